"""What the loop asks of a drafter, and what an MTP drafter asks of a model."""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Bool, Float, Int

from treewy_jax import accept
from treewy_jax import sampling as sampling_lib
from treewy_jax import tree as tree_lib


@runtime_checkable
class Drafter(Protocol):
    """What a caller chooses: a pytree whose topology and tables are data.

    Another one of the same shapes needs no new compilation.
    """

    @property
    def depth_max(self) -> int:
        """Depth of the deepest tree that it proposes; static."""
        ...

    @property
    def n_max(self) -> int:
        """Nodes of its trees, root and padding included; static."""
        ...

    def bind(self, target: Any) -> "BoundDrafter":
        """Return the drafter joined to the target; called inside `jit`."""
        ...


@runtime_checkable
class BoundDrafter(Protocol):
    """Proposes a tree each step; its state is a pytree it alone understands."""

    def start(
        self,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        hidden: Float[Array, "B T H"],
        next_token: Int[Array, " B"],
        capacity: int,
    ) -> Any:
        """Return the state after the prompt: `hidden` is the target's, final-normed."""
        ...

    def propose(
        self, state: Any, root: Int[Array, " B"], base: Int[Array, " B"]
    ) -> tuple[tree_lib.DraftTree, Any]:
        """Draft a tree below `root`, the newest token, at position `base`."""
        ...

    def update(
        self, state: Any, accepted: accept.Accepted, hidden: Float[Array, "B n H"]
    ) -> Any:
        """Take in what the target accepted; `hidden` are the target's, node by node."""
        ...


@runtime_checkable
class SampledDrafter(BoundDrafter, Protocol):
    """A drafter that can draw its tree, and says from which distribution.

    Attributes:
        sampled: the loop calls `propose_sampled` in place of `propose`. The unbound
            drafter has it too.
    """

    sampled: bool

    def propose_sampled(
        self,
        state: Any,
        root: Int[Array, " B"],
        base: Int[Array, " B"],
        draws: sampling_lib.Draws,
    ) -> tuple[tree_lib.DraftTree, Float[Array, "B n V"], Any]:
        """Draft a tree whose nodes' children are drawn without replacement.

        Also returns the log-probabilities (normalised, float32) that each node's first
        child was drawn from; those of leaves are not read.
        """
        ...


@runtime_checkable
class DraftHead(Protocol):
    """A head that maps (next token, hidden state) pairs to hidden states further on."""

    def prefill(
        self,
        tokens: Int[Array, "B T"],
        hidden: Float[Array, "B T H"],
        positions: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B T H"], tuple[Array, Array]]:
        """Run a whole prompt causally; returns outputs and KV rows."""
        ...

    def extend(
        self,
        tokens: Int[Array, "B m"],
        hidden: Float[Array, "B m H"],
        positions: Int[Array, "B m"],
        prefix: tuple[Array, Array],
        length: Int[Array, " B"],
        mask: Bool[Array, "B m n"],
        earlier: tuple[Array, Array] | None = None,
    ) -> tuple[Float[Array, "B m H"], tuple[Array, Array]]:
        """Run m more rows over `length` prefix slots and the rows `mask` names."""
        ...

    def logits(self, hidden: Float[Array, "B m H"]) -> Float[Array, "B m V"]:
        """Project outputs to the vocabulary."""
        ...
