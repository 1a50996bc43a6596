"""The golden checkpoints of Hugging Face transformers, loaded once."""

import functools
import pathlib

import jax.numpy as jnp
import numpy as np

import models
from treewy_jax import tree as tree_lib

FOLDER = pathlib.Path(__file__).parents[1] / "golden" / "tiny"
VARIANTS = ("dense", "moe")
PROMPT = 70
HIDDEN, LOGITS = 1e-4, 5e-4


@functools.cache
def model(variant, layout="flat"):
    """Return the golden model in float32."""
    folder = FOLDER / variant / ("published" if layout == "published" else "")
    return models.load(folder, dtype="float32")


@functools.cache
def arrays(variant, layout="flat"):
    """Return the arrays that transformers computed."""
    folder = FOLDER / variant / ("published" if layout == "published" else "")
    with np.load(folder / "golden.npz") as file:
        return dict(file)


def prompt(variant):
    """Return the ids whose greedy continuation is golden, and that continuation."""
    golden = arrays(variant)
    return golden["ids"][0, :PROMPT].tolist(), golden["gen.ids"][0].tolist()


def padded(ids, bucket=128):
    """Return one right-padded row and its length."""
    row = np.zeros((1, bucket), np.int32)
    row[0, : len(ids)] = ids
    return jnp.asarray(row), jnp.asarray([len(ids)], jnp.int32)


def tree(variant):
    """Return the 14-node tree under a root: the last prompt token, in no state yet."""
    golden = arrays(variant)
    parents = [-1, *(golden["tree.parents"] + 1).tolist()]
    tokens = [golden["ids"][0, PROMPT - 1], *golden["tree.ids"]]
    shape = tree_lib.DraftTree.from_parents(parents)
    return shape.with_tokens(jnp.asarray([tokens], jnp.int32))


def state(array):
    """Transpose transformers' [.., Dk, Dv] state to the paper's [.., Dv, Dk]."""
    return np.swapaxes(array, -1, -2)


def window(array):
    """Turn transformers' [.., C, 4] conv rows into our [.., 3, C] window."""
    return np.swapaxes(array[..., 1:], -1, -2)
