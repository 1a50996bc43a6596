"""Shape contract of the chunked prefill: what it takes, what it must move."""

import dataclasses
import math

import jax
import jax.numpy as jnp

Shaped = jax.Array | jax.ShapeDtypeStruct
_NAMES = ("q", "k", "v", "log_decay", "beta", "state")


@dataclasses.dataclass(frozen=True)
class Spec:
    """Sizes and dtype names of one call; `chunk` is the reference's chunk length."""

    batch: int
    tokens: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    chunk: int
    input_dtype: str
    state_dtype: str
    output_dtype: str

    @property
    def group(self) -> int:
        """Value heads that share one key head."""
        return self.value_heads // self.key_heads

    @property
    def chunks(self) -> int:
        """Number of chunks, the last one padded."""
        return math.ceil(self.tokens / self.chunk)

    @property
    def padding(self) -> int:
        """Identity tokens appended after the last real one."""
        return self.chunks * self.chunk - self.tokens

    @property
    def compute_dtype(self) -> jnp.dtype:
        """Operands of the large dots: bfloat16 only for bfloat16 inputs."""
        low = self.input_dtype == "bfloat16"
        return jnp.dtype(jnp.bfloat16) if low else self.accumulator_dtype

    @property
    def accumulator_dtype(self) -> jnp.dtype:
        """Gates, decays, solves, states: float64 for float64, else float32."""
        return jnp.promote_types(self.input_dtype, jnp.float32)

    @property
    def parts(self) -> int:
        """Bfloat16 parts of an operand: one for bfloat16 inputs, else two."""
        return 1 if self.input_dtype == "bfloat16" else 2

    @property
    def part_dtype(self) -> jnp.dtype:
        """What the kernels keep between launches."""
        return jnp.dtype(jnp.bfloat16 if self.parts == 1 else jnp.float32)

    @property
    def bytes_moved(self) -> int:
        """Least traffic: every input read once, output and state written once."""
        size = {x: jnp.dtype(x).itemsize for x in self._dtypes()}
        keys = 2 * self.key_heads * self.key_dim * size[self.input_dtype]
        values = self.value_heads * self.value_dim
        values *= size[self.input_dtype] + size[self.output_dtype]
        gates = 2 * self.value_heads * self.accumulator_dtype.itemsize
        state = self.value_heads * self.value_dim * self.key_dim
        state *= 2 * size[self.state_dtype]
        return self.batch * (self.tokens * (keys + values + gates) + state)

    @property
    def flops(self) -> int:
        """Multiply-adds (times two) of the dots that `reference` performs."""
        length, dk, dv = self.chunk, self.key_dim, self.value_dim
        per_key_head = 2 * length * length * dk
        solve = 2 * length**3
        mix = length**3 + 2 * length * length * (dk + dv)
        carry = length * dk * (dk + dv) + dv * dk * dk + length * dk * dv
        per_chunk = self.key_heads * per_key_head
        per_chunk += self.value_heads * (solve + mix + carry)
        return 2 * self.batch * self.chunks * per_chunk

    def _dtypes(self) -> tuple[str, ...]:
        return self.input_dtype, self.state_dtype, self.output_dtype


def make_spec(
    q: Shaped,
    k: Shaped,
    v: Shaped,
    log_decay: Shaped,
    beta: Shaped,
    state: Shaped,
    chunk: int = 64,
) -> Spec:
    """Check the arguments against each other and describe the call.

    Raises:
        ValueError: names the argument, what came and what is allowed.
    """
    _check_ranks(dict(zip(_NAMES, (q, k, v, log_decay, beta, state), strict=True)))
    batch, tokens, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    _expect("k", k.shape, q.shape)
    _expect("v", v.shape[:2], (batch, tokens))
    _expect("log_decay", log_decay.shape, (batch, tokens, value_heads))
    _expect("beta", beta.shape, (batch, tokens, value_heads))
    _expect("state", state.shape, (batch, value_heads, value_dim, key_dim))
    if value_heads % key_heads:
        raise ValueError(
            f"v has {value_heads} heads; allowed: a multiple of q's {key_heads}"
        )
    if tokens == 0:
        raise ValueError("q has 0 tokens; allowed: at least 1")
    return Spec(
        batch=batch,
        tokens=tokens,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        chunk=_chunk_length(chunk, tokens),
        input_dtype=jnp.result_type(q, k, v).name,
        state_dtype=state.dtype.name,
        output_dtype=v.dtype.name,
    )


def _chunk_length(chunk: int, tokens: int) -> int:
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"chunk is {chunk}; allowed: a power of two")
    return min(chunk, 1 << (tokens - 1).bit_length())


def _check_ranks(arrays: dict[str, Shaped]) -> None:
    for name, array in arrays.items():
        rank = 3 if name in ("log_decay", "beta") else 4
        if array.ndim != rank:
            raise ValueError(
                f"{name} has shape {array.shape}; allowed: {rank} dimensions"
            )
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {array.dtype}; allowed: a float type")


def _expect(name: str, got: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if tuple(got) != tuple(wanted):
        raise ValueError(f"{name} has sizes {tuple(got)}; allowed: {tuple(wanted)}")
