"""The dimension letters of every signature, and the one rule about dtypes.

Signatures carry jaxtyping annotations such as `Float[Array, "B n Hk Dk"]`. A letter
has the meaning below everywhere and no other; `DIMENSIONS` is that list as data.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike

DIMENSIONS = {
    "B": "batch rows (sequences)",
    "n": "verified nodes of the static envelope: root, drafts and padding",
    "T": "tokens of a sequence",
    "P": "nodes on a path, depth_max + 1, root first",
    "Hk": "key heads; value head j uses key head j // (Hv // Hk)",
    "Hv": "value heads",
    "Dk": "width of a key head",
    "Dv": "width of a value head",
    "W": "taps of the short convolution",
    "C": "channels of the short convolution",
    "L": "layers",
}


def accumulation_dtype(*dtypes: DTypeLike) -> jnp.dtype:
    """Return the dtype to compute in: float64 if any input is, else float32.

    Gates, decays, solves and states never accumulate below float32, whatever the
    storage dtype of the operands (bfloat16 states included).
    """
    has_double = any(jnp.dtype(dtype) == jnp.float64 for dtype in dtypes)
    return jnp.dtype(jnp.float64 if has_double else jnp.float32)
