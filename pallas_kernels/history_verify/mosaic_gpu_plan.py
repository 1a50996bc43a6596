"""How the Mosaic GPU kernel is cut: that of tree_verify, with room for a history."""

import dataclasses

from pallas_kernels.history_verify import spec as specs
from pallas_kernels.tree_verify import mosaic_gpu_plan as plans

FOLD_PARTS = 3  # bfloat16 arrays that are a float32 array
ALIGNED = 1024  # bytes of which Pallas gives a buffer a multiple
OTHER = 3 * 1024  # bytes that Pallas takes, most for sums across warps; and barriers


@dataclasses.dataclass(frozen=True)
class Plan(plans.Plan):
    """The sizes that follow from a call and a configuration."""

    spec: specs.Spec

    FEW = ({"separate": True, "ahead": 2}, {"separate": True}, {})
    MANY = (
        {"separate": True, "ahead": 1, "staged": True, "given": 32},
        {"separate": True, "ahead": 1, "given": 32},
        {"separate": True, "staged": True, "given": 32},
        {"staged": True},
    )

    @property
    def records(self) -> int:
        """Records of a row, rounded up to what the K of wgmma is a multiple of."""
        return -(-self.spec.horizon // 16) * 16

    @property
    def fold_parts(self) -> int:
        """Bfloat16 arrays of which a record's key is the sum: a fold needs them all."""
        return 1 if self.spec.record_key_dtype == "bfloat16" else FOLD_PARTS

    @property
    def past_parts(self) -> int:
        """Those that make products with keys and queries."""
        return min(self.parts, self.fold_parts)

    @property
    def seen_first(self) -> tuple[int, ...]:
        """Rows of [K; Q] from where 64 make products with the records' keys."""
        return (0,) if 2 * self.wide <= 64 else (0, self.wide)

    @property
    def seen_rows(self) -> int:
        """Rows of the buffer of those products."""
        return self.seen_first[-1] + 64

    @property
    def key_rows(self) -> int:
        """Rows of the buffer of keys: those of the records lie below the queries.

        Few nodes leave that room unused.
        """
        layers = -(-self.past_parts // self.key_parts)
        return max(super().key_rows, 2 * self.wide + layers * self.records)

    @property
    def vectors(self) -> int:
        """Those of tree_verify, and the log decays of the records."""
        return super().vectors + 1

    @property
    def barriers(self) -> dict[str, plans.Barriers]:
        """Barriers: of records, and of what is seen of them, which all write."""
        return super().barriers | {
            "past_here": plans.Barriers(True, 1, self.preparing),
            "seen_here": plans.Barriers(True, self.key_buffers, self.preparing),
        }

    @property
    def buffers(self) -> tuple[int, ...]:
        """Bytes of each buffer of a block."""
        teams = self.config.teams
        buffers = teams * self.key_buffers
        return (
            *super().buffers,
            buffers * self.parts * self.seen_rows * self.records * 2,
            buffers * self.fold_parts * self.spec.key_dim * self.records * 2,
            teams * self.config.heads * 2 * 64 * 4,
        )

    @property
    def shared_memory(self) -> int:
        """Bytes of a block, to the byte but for barriers: there is little to spare."""
        return sum(-(-size // ALIGNED) * ALIGNED for size in self.buffers) + OTHER
