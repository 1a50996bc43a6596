"""The toy of scripts/sampling_checks as tests use it: small, compiled in a hurry."""

import functools

import jax
import jax.numpy as jnp

from scripts.sampling_checks import exact, measure
from scripts.sampling_checks import toys as parts
from treewy_jax import drafters
from treewy_jax import sampling as sampling_lib
from treewy_jax import tree as tree_lib

VOCAB, PROMPT, FIRST, SAID = parts.VOCAB, parts.PROMPT, parts.FIRST, parts.SAID
Target = parts.Target
tables = parts.tables
following, joint, distance = exact.following, exact.joint, exact.distance

# Most of the time of these tests is the compiler's.
HURRY = {"xla_backend_optimization_level": 0}
_write = jax.jit(parts.write, static_argnames=parts.STATIC, compiler_options=HURRY)


def write(tables, drafter, sampling, accept, rows, key=0, steps=None, said=SAID):
    """Take steps until every row has emitted `said` tokens after the first.

    `key` is a number or a key a row.
    """
    if isinstance(key, int):
        key = sampling_lib.row_keys(jax.random.key(key), rows)
    steps = jnp.int32(said if steps is None else steps)
    tables = tuple(map(jnp.asarray, tables))
    options = dict(sampling=sampling, accept=accept, said=said)
    return _write(tables, drafter, key, steps, **options)


@functools.cache
def sampled(widths, n_max=None):
    """Return the MTP drafter that draws a tree of these widths."""
    tree = tree_lib.DraftTree.from_widths(widths, n_max=n_max)
    return drafters.MTPDrafter.from_tree(tree, sampled=True)


def counts(state):
    """Count the texts of three tokens that were written."""
    return jax.device_get(measure.counts(state.tokens))


def off(counted, wanted):
    """Return by how many sigmas of exact draws frequencies are too far off."""
    yardstick = exact.yardstick(wanted, int(counted.sum()))
    return yardstick.sigmas(exact.distance(counted, wanted))


def bound(wanted, total):
    """Return what `total` exact draws score at three sigma."""
    return exact.yardstick(wanted, total).bound(3)
