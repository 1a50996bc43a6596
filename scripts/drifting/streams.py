"""Long streams of inputs to a recurrence: drawn, or recorded from the shipped model."""

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import models
from models import checkpoints
from pallas_kernels.chunk_prefill import op as chunk_prefill
from scripts import gen_tasks
from treewy_jax import commit
from treewy_jax import tree as tree_lib

TEXT = 2048  # tokens of a text: the context that the shipped model was trained for
SEED = 90001  # of the text; training took others
# Range of -log_decay, drawn log-uniformly for each token and head, and the mean of the
# logit of beta, whose deviation is 2.
GATES = {
    "no decay, weak writes": (1e-6, 1e-4, -4.0),
    "no decay": (1e-6, 1e-4, 0.0),
    "slow decay": (1e-4, 1e-2, 0.0),
    "all kinds of decay": (1e-5, 1e1, 0.0),
    "strong decay": (1e-1, 1e1, 0.0),
}
COSINE = 0.8  # of any two keys of a head, in the mean


class Streams(NamedTuple):
    """Rows of tokens, each with a name; inputs are NumPy arrays [B, T, ...]."""

    names: tuple[str, ...]
    inputs: commit.Inputs


def join(parts: Sequence[Streams]) -> Streams:
    """Put streams of equal sizes below each other."""
    names = sum((part.names for part in parts), ())
    inputs = zip(*(part.inputs for part in parts), strict=True)
    return Streams(names, commit.Inputs(*map(np.concatenate, inputs)))


def synthetic(tokens: int, heads: int, width: int, seed: int) -> Streams:
    """Draw a row for each of `GATES`; two value heads share a key head.

    Keys of a head share a direction, values are normal.
    """
    rng = np.random.default_rng(seed)
    rows, key_heads = len(GATES), key_heads_of(heads)
    normal = rng.standard_normal
    shared = _unit(normal((rows, 1, key_heads, width)))
    q, other = (_unit(normal((rows, tokens, key_heads, width))) for _ in range(2))
    least, most, logit = np.array(list(GATES.values())).T[..., None, None]
    drawn = (
        q * width**-0.5,
        _unit(COSINE**0.5 * shared + (1 - COSINE) ** 0.5 * other),
        normal((rows, tokens, heads, width)),
        -np.exp(rng.uniform(np.log(least), np.log(most), (rows, tokens, heads))),
        1 / (1 + np.exp(-logit - 2 * normal((rows, tokens, heads)))),
    )
    return Streams(tuple(GATES), commit.Inputs(*(x.astype(np.float32) for x in drawn)))


def key_heads_of(heads: int) -> int:
    """Return how many key heads so many value heads read."""
    return -(-heads // 2)


class Recorder(commit.Reconstruct):
    """A lifecycle for chains from an empty state, whose records are its inputs."""

    def verify(self, state, inputs, tree):
        """Return the outputs of the chain and what was fed to it."""
        return chunk_prefill.chunk_prefill(*inputs, state)[0], inputs


def recorded(tokens: int, heads: int) -> Streams:
    """Record each GDN layer of the shipped model, a row a layer, in float32.

    Texts of `TEXT` tokens are read one by one and their inputs laid end to end.

    Raises:
        ValueError: the layers have fewer heads.
    """
    model = models.load("tiny", dtype="float32")
    most = model.config.linear_num_value_heads
    if heads > most:
        raise ValueError(f"heads is {heads}; at most {most} of the model are allowed")
    length = min(TEXT, tokens)
    run = jax.jit(_record, static_argnums=0)
    builder = model.builder(Recorder())
    parts = [
        jax.tree.map(np.asarray, run(builder, model.params, text[None]))
        for text in texts(model, -(-tokens // length), length)
    ]
    whole = (np.concatenate(x, 1)[:, :tokens] for x in zip(*parts, strict=True))
    kept = (key_heads_of(heads),) * 2 + (heads,) * 3
    inputs = commit.Inputs(*(x[:, :, :n] for x, n in zip(whole, kept, strict=True)))
    return Streams(tuple(f"layer {n}" for n in _gdn_layers(model.config)), inputs)


def _gdn_layers(config) -> list[int]:
    return [i for i, kind in enumerate(config.layer_types) if kind.startswith("linear")]


def _record(builder, params, tokens):
    """Return the inputs of every GDN layer, leaves [layers, T, ...]."""
    target = builder(params)
    empty = jnp.zeros(1, jnp.int32)
    cache = target.prefill(tokens[:, :1], empty, 1)[1]
    chain = tree_lib.DraftTree.chain(tokens.shape[1] - 1).with_tokens(tokens)
    inputs = target.verify(cache, chain)[1].recurrent
    return jax.tree.map(lambda *layers: jnp.concatenate(layers), *inputs)


def texts(model: checkpoints.Model, count: int, length: int) -> Iterator[np.ndarray]:
    """Yield pieces of instruction text of the kind that the model was trained on."""
    rng = random.Random(SEED)
    ids: list[int] = []
    while count:
        category = rng.choice(list(gen_tasks.CATEGORIES.values()))
        text = gen_tasks.render(category(rng, True))
        ids += model.tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) >= length:
            yield np.array(ids[:length])
            ids, count = ids[length:], count - 1


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)
