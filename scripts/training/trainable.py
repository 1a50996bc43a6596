"""The model arranged for training, and its parameters as one flat dictionary.

Parameters are kept in float32 under dotted names and rounded to the compute type at
each step, all but those that the model itself keeps in float32.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from models.qwen3_5 import config as config_lib
from models.qwen3_5 import model as model_lib
from scripts.training import attention, loss

Parameters = Mapping[str, Array]

# Float32 in the model, too; the embedding is rounded where it is used.
FLOAT32 = ("A_log", "dt_bias", "linear_attn.norm.weight", "embed_tokens.embedding")
# Maps that write into the residual stream start smaller, by the depth of the model.
RESIDUAL = ("out_proj.kernel", "o_proj.kernel", "down_proj.kernel", "down_proj")
# Embedding gradients are summed over this many one-hot rows at a time.
LOOKUP_ROWS = 8192


class TrainableModel(model_lib.Qwen3_5):
    """Qwen3.5 with a cheap embedding gradient and attention made for training."""

    def __init__(self, config, *, rngs, compute_dtype, cudnn=False, remat=False):
        super().__init__(config, rngs=rngs, dtype=jnp.float32)
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.cudnn, self.remat = cudnn, remat

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        """Look tokens up in the compute type."""
        table = self.embed_tokens.embedding[...]
        return loss.lookup(table, tokens, self.compute_dtype, LOOKUP_ROWS)

    def forward(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        """Return hidden states after the final norm, every row T tokens long."""
        h = self.embed(tokens)
        for layer in self.layers:
            graphdef, params = nnx.split(layer)

            def run(h, params, graphdef=graphdef):
                return _layer(nnx.merge(graphdef, params), h, cudnn=self.cudnn)

            h = (jax.checkpoint(run) if self.remat else run)(h, params)
        return self.norm(h)


def _layer(layer, h: Array, *, cudnn: bool) -> Array:
    """One layer from an empty state; what it would keep is dropped."""
    positions = jnp.broadcast_to(jnp.arange(h.shape[1]), h.shape[:2])
    if not layer.attends:
        lengths = jnp.full(h.shape[0], h.shape[1], jnp.int32)
        return layer.prefill(h, positions, lengths)[0]
    mixer = layer.self_attn

    def attend(x):
        q, gate, k, v = mixer.project(x, positions)
        return mixer.output(attention.causal(q, (k, v), cudnn=cudnn), gate), ()

    return layer(h, attend)[0]


@dataclasses.dataclass(frozen=True)
class Structure:
    """How flat parameters become a module again; hashable, hence static in `jit`."""

    graphdef: Any
    treedef: Any
    names: tuple[str, ...]

    def module(self, params: Parameters, dtype: jnp.dtype | None = None) -> Any:
        """Rebuild the module, rounding what is not in FLOAT32 to `dtype`."""
        return nnx.merge(self.graphdef, self.state(params, dtype))

    def state(self, params: Parameters, dtype: jnp.dtype | None = None) -> Any:
        """Return the nnx state that the flat parameters stand for."""
        leaves = [_round(name, params[name], dtype) for name in self.names]
        return jax.tree.unflatten(self.treedef, leaves)


def _round(name: str, value: Array, dtype: jnp.dtype | None) -> Array:
    return value if dtype is None or name.endswith(FLOAT32) else value.astype(dtype)


def structure(config: config_lib.Qwen3_5Config, **options) -> Structure:
    """Describe a `TrainableModel` without making its arrays."""
    model = nnx.eval_shape(lambda: TrainableModel(config, rngs=nnx.Rngs(0), **options))
    graphdef, state = nnx.split(model)
    names = tuple(flatten(state))
    return Structure(graphdef, jax.tree.structure(state), names)


def flatten(state: Any) -> dict[str, Array]:
    """Return the leaves of an nnx state under dotted names, in tree order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {_name(path): leaf for path, leaf in leaves}


def _name(path: tuple) -> str:
    # The last key of a path is nnx's own (the value inside a variable).
    keys = path[:-1] if isinstance(path[-1], jax.tree_util.GetAttrKey) else path
    return ".".join(str(getattr(k, "key", getattr(k, "idx", None))) for k in keys)


def initialise(config: config_lib.Qwen3_5Config, seed: int) -> dict[str, Array]:
    """Return fresh float32 parameters by name, the same on every machine.

    Maps are normal with variance 1 / inputs. Decay rates (0.05 to 16) and step sizes
    (1e-3 to 1e-1) spread, so that GDN heads begin with memories short and long.
    """
    model = nnx.eval_shape(lambda: model_lib.Qwen3_5(config, rngs=nnx.Rngs(0)))
    random = np.random.default_rng(seed)
    shrink = (2 * config.num_hidden_layers) ** -0.5
    params = {}
    for name, leaf in flatten(nnx.state(model)).items():
        value = _initial(name, leaf.shape, random)
        scale = shrink if name.endswith(RESIDUAL) else 1.0
        params[name] = jnp.asarray(scale * value, jnp.float32)
    return params


def _initial(name: str, shape: tuple[int, ...], random: np.random.Generator):
    if name.endswith("A_log"):
        return np.log(random.uniform(0.05, 16, shape))
    if name.endswith("dt_bias"):  # the inverse of softplus
        return np.log(np.expm1(np.exp(random.uniform(*np.log((1e-3, 0.1)), shape))))
    if name.endswith("conv1d.weight"):
        return random.uniform(-1, 1, shape) * shape[-1] ** -0.5
    if name.endswith("weight"):  # gains: all but GDN's are stored around 0
        return np.full(shape, float(name.endswith("linear_attn.norm.weight")))
    inputs = shape[-1] if name.endswith("embedding") else shape[-2]
    return random.normal(size=shape) * inputs**-0.5


def count(params: Parameters) -> int:
    """Number of parameters."""
    return sum(leaf.size for leaf in params.values())
