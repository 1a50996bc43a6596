# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Commit: four ways to move the state on
#
# `01_the_idea` ended with a tree verified from one state $S$, and small records of its
# nodes: a key $k$, a pseudo-value $u$ and a log decay $g$ each. Then the model agrees
# with one path, and the next step has to start from the state after it. When is that
# state written, and what has to be kept until then? There are four answers in
# `treewy_jax`, called *lifecycles*:
#
# | lifecycle | keeps | writes $S$ |
# |---|---|---|
# | `store-all` | a whole state for every node | at every node |
# | `reconstruct` | the records of the nodes | when a path is accepted |
# | `fused` | the same, and those of the path accepted last | in the next verification |
# | `deferred` | the same, and those of some paths before | when their room is full |
#
# They differ in bytes moved, not in results. This notebook runs all four on one small
# tree, counts what they write, and measures what rounding does to them. It takes about
# a minute on a CPU.

# %%
import importlib.util
import pathlib
import sys

if importlib.util.find_spec("treewy_jax") is None:
    here = pathlib.Path.cwd()
    clones = [d for d in (here, *here.parents) if (d / "treewy_jax").is_dir()]
    if not clones:
        raise SystemExit("Open this notebook inside a clone of the repository.")
    get_ipython().run_line_magic("pip", f"install -q -e {clones[0]}[plots]")
    sys.path.insert(0, str(clones[0]))  # a running kernel does not see new installs

# %%
import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import rich

from models.qwen3_5 import published
from treewy_jax import accept, commit, memory, slots
from treewy_jax import tree as tree_lib

# Drift is measured in float32; a GPU's kernels would add their own rounding.
jax.config.update("jax_default_device", jax.devices("cpu")[0])
rng = np.random.default_rng(0)

# %% [markdown]
# ## 1. The index map: which nodes were accepted
#
# On a chain, "three accepted" says it all: nodes 0, 1 and 2. On a tree it does not. In
# this one the root has two children, and each goes on as a chain. Nodes are numbered in
# preorder; the path that the model agrees with is green.

# %%
tree = tree_lib.DraftTree.from_widths((2, 1, 1))
n, depth = tree.n_max, tree.depth_max
rich.print(tree.render([f"node {i}" for i in range(n)], highlight={0, 4, 5}))


def accepted(node):
    """Return the accepted path of each row; -1 stands for no step."""
    rows = tree.with_tokens(jnp.zeros((len(node), n), jnp.int32))
    path, count = rows.path(node)
    return accept.Accepted(jnp.maximum(node, 0), path, count, count)


every_node = np.array([*range(n), -1])
paths, counts = map(np.asarray, accepted(jnp.asarray(every_node))[1:3])
for node, path, count in zip(every_node, paths, counts, strict=True):
    print(f"node {node:2}: path {path}, of which {count} count")

# %% [markdown]
# Nodes 2 and 5 both have three nodes on their path, but not the same ones. So the map
# from "first, second, third accepted token" to node numbers is part of the result of a
# step: `path`, and how many of its entries `count`. It is a handful of small integers a
# row, the same for all layers. Whatever a lifecycle does, it takes records in this
# order. Count 0 is a row that did no step, which keeps its state bit for bit.

# %%
of_node = jnp.arange(n)[None] * 10  # a stand-in for records: node i holds 10 i
path, count = accepted(jnp.array([5]))[1:3]
ahead = slots.take(of_node, path)[0, : count[0]]
print(f"records of the path, in the order of the text: {ahead}")
assert ahead.tolist() == [0, 40, 50]

# %% [markdown]
# ## 2. One step in each lifecycle
#
# Two rows, one key head, two value heads of width 32. Row 0 accepts node 5 and row 1
# only the root. Every lifecycle has the same methods: `init` wraps a plain state,
# `verify` returns outputs and records, `commit` takes records and path, `materialize`
# gives the plain state back.

# %%
batch, heads, width = 2, 2, 32
HORIZON = 8  # records that a row of `deferred` has room for


def unit(x):
    """Divide rows by their norm."""
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def draw(*leading):
    """Draw inputs whose keys resemble each other and whose decay is slow."""
    key = unit(
        1.0 * unit(np.ones(width)) + 0.5 * unit(rng.normal(size=(*leading, 1, width)))
    )
    query = unit(rng.normal(size=(*leading, 1, width))) * width**-0.5
    value = rng.normal(size=(*leading, heads, width))
    log_decay = -np.exp(rng.uniform(np.log(1e-5), np.log(1e-2), (*leading, heads)))
    beta = rng.uniform(0, 1, (*leading, heads))
    arrays = (query, key, value, log_decay, beta)
    return commit.Inputs(*(x.astype(np.float32) for x in arrays))


def shapes(x):
    """Name dtype and shape of every array in a pytree."""
    return ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(x))


owners = {
    name: commit.by_name(name, depth=depth, nodes=n, horizon=HORIZON)
    for name in ("store-all", "reconstruct", "fused", "deferred")
}
rows = tree.with_tokens(jnp.zeros((batch, n), jnp.int32))
S = jnp.asarray(rng.normal(size=(batch, heads, width, width)), jnp.float32)
inputs = draw(batch, n)
chosen = accepted(jnp.array([5, 0]))

held, after = {}, {}
for name, owner in owners.items():
    state = owner.init(S, 1)
    output, records = owner.verify(state, inputs, rows)
    held[name] = owner.commit(state, records, chosen)
    after[name] = owner.materialize(held[name])
    print(f"{name}\n  records  {shapes(records)}\n  state    {shapes(held[name])}")

# %% [markdown]
# `store-all` keeps `[2, 8, ...]`: a ring of states a row, seven for the nodes and the
# committed one, and an index; commit moves the index. `reconstruct` keeps vectors only.
# The records of `fused` and `deferred` start with a state, written or not, and their
# state is a *history*: $S$, room for some records (four for `fused`, which is one path;
# here eight for `deferred`), and how many there are.
#
# All four say the same about the next token. $S$ itself is another matter: with `fused`
# and `deferred` it is still the old one, bit for bit, and the path is in the history.

# %%
for name, plain in after.items():
    distance = jnp.linalg.norm(plain - after["store-all"]) / jnp.linalg.norm(plain)
    print(f"{name:12} state after the path, against store-all: {distance:.1e}")
    assert distance < 1e-6
for name in ("fused", "deferred"):
    print(f"{name}: records of each row that S lacks: {held[name].count}")
    assert jnp.array_equal(held[name].state, S)
    assert held[name].count.tolist() == [3, 1]

# %% [markdown]
# ## 3. Many steps: who writes when
#
# How can a tree be verified from a state that is out of date? The records of the
# history act as further ancestors of every node. With $m$ of them, $h_j$ their summed
# log decay and $H = h_m$, what a node reads with $x$ (its key or its query) is
#
# $$S_0\,x = e^{H} S\,x + \sum_j e^{H - h_j}\, u_j\,(k_j \cdot x),$$
#
# and the true state $S_0$ is never formed. A row folds its history into $S$ in the pass
# that verifies anyway: `fused` always, `deferred` when one more path might not fit,
# that is when count + depth + 1 > horizon. That is decided on the device, row by row.
#
# Ten steps; each row accepts another random node. A `W` is a write of $S$, found by
# comparing its bits.

# %%
STEPS = 300


def plain(owner, state):
    """Return S as it lies in memory; of a ring, the slot that counts."""
    if isinstance(state, commit.Slots):
        return owner.materialize(state)
    return getattr(state, "state", state)


def trace(owner, stream, nodes):
    """Run steps; tell for each step and row if S changed, and the records it lacks."""

    @jax.jit
    def step(state, inputs, node):
        _, records = owner.verify(state, inputs, rows)
        after = owner.commit(state, records, accepted(node))
        changed = jnp.any(plain(owner, after) != plain(owner, state), axis=(1, 2, 3))
        held = getattr(after, "count", jnp.zeros(batch, jnp.int32))
        return after, (changed, held)

    state = owner.init(jnp.zeros((batch, heads, width, width)), 1)
    _, found = jax.lax.scan(lambda s, x: step(s, *x), state, (stream, nodes))
    return map(np.asarray, found)


level = np.asarray(tree.depth())[0]
lengths = rng.integers(1, depth + 2, (STEPS, batch))
nodes = np.vectorize(lambda a: rng.choice(np.flatnonzero(level == a - 1)))(lengths)
stream = draw(STEPS, batch, n)
written = {}
print(f"accepted in row 0   {' '.join(f'{a:2}' for a in lengths[:10, 0])}")
for name, owner in owners.items():
    written[name], held = trace(owner, stream, jnp.asarray(nodes))
    marks = " ".join(f"{'W' if w else '.':>2}" for w in written[name][:10, 0])
    print(f"{name:12} S       {marks}")
    if name == "deferred":
        print(f"{'':12} history {' '.join(f'{m:2}' for m in held[:10, 0])}")
assert written["reconstruct"].all() and written["fused"][1:].all()
assert not written["fused"][0].any()  # no history yet

# %% [markdown]
# ## 4. Bytes moved, by formula and counted
#
# One *move* is one pass over $S$, reading or writing. Each step:
#
# - `store-all`, tree: every node reads its parent's state and writes its own, $2n$ (on
#   a chain the state stays in registers between nodes: $1 + n$).
# - `reconstruct`: verify reads; commit reads and writes: 3.
# - `fused`: one pass reads and writes: 2.
# - `deferred`: one read, and a write every so many steps. With accept lengths 1 to 4
#   drawn alike, the mean number of steps from fold to fold is a small recursion.
#
# The counts below take the writes of $S$ from the run above.


# %%
def steps_between_folds(horizon):
    """Return the mean number of verifications from one fold to the next."""

    @functools.cache
    def left(held):  # until the next fold, the folding step included
        if held + depth + 1 > horizon:
            return 1
        return 1 + np.mean([left(held + a) for a in range(1, depth + 2)])

    return np.mean([left(a) for a in range(1, depth + 2)])


share = {name: float(found.mean()) for name, found in written.items()}
table = {
    "store-all": (2 * n, 2 * n),
    "reconstruct": (3, 2 + share["reconstruct"]),
    "fused": (2, 1 + share["fused"]),
    "deferred": (1 + 1 / steps_between_folds(HORIZON), 1 + share["deferred"]),
}
print("lifecycle      moves by formula   counted")
for name, (formula, counted) in table.items():
    print(f"{name:14} {formula:16.2f} {counted:9.2f}")
    assert abs(counted / formula - 1) < 0.05

# %% [markdown]
# (The nodes of `store-all` are not taken from the run: it writes a state for each.)
# Records are not free either. In bytes, for one layer of Qwen3.5-35B, state and records
# in float32: each step writes the records of all nodes once; `reconstruct` reads those
# of the path, `fused` and `deferred` read their history and write the path behind it.

# %%
whole = memory.Shape.from_config(published.get("qwen3.5-35b-a3b"))
state = memory.state_bytes(whole, "float32") / whole.gdn_layers
record = (
    memory.history_bytes(whole, 1) - memory.history_bytes(whole, 0)
) / whole.gdn_layers
path = (depth + 2) / 2  # mean of 1 to depth + 1
print(f"state {state / 2**20:.2f} MiB a layer, record {record / 2**10:.1f} KiB")


def moved(name, horizon=HORIZON):
    """Return bytes of state and of records that a step moves in a layer."""
    if name == "store-all":
        return 2 * n * state, 0
    if name == "reconstruct":
        return 3 * state, (n + path) * record
    if name == "fused":
        return 2 * state, (n + 3 * path) * record
    steps = steps_between_folds(horizon)
    mean = path * (steps + 1) / 2  # the history grows by a path in every step
    return (1 + 1 / steps) * state, (n + 2 * path + mean) * record


print("lifecycle     MiB of state  of records   total")
for name, horizon in [
    *((name, 0) for name in list(table)[:3]),
    *(("deferred", h) for h in (8, 16, 32)),
]:
    parts = np.array(moved(name, horizon)) / 2**20
    label = f"{name} {horizon or ''}"
    print(f"{label:14} {parts[0]:11.2f} {parts[1]:11.2f} {sum(parts):7.2f}")

# %% [markdown]
# A longer horizon saves ever less state and reads ever more records: from 16 to 32 next
# to nothing is gained. The history also takes memory, all the time:

# %%
for horizon in (8, 16, 32):
    part = horizon * record / state
    print(f"horizon {horizon:2}: {part:.0%} of the state, {part / 2:.0%} in bfloat16")

# %% [markdown]
# ## 5. Drift
#
# All four are the same in exact arithmetic. In float32 they add up in different orders,
# which does no harm. Storing the *state* in bfloat16 does: each write rounds what all
# later steps build on. With a slow decay the errors pile up, less of them with fewer
# writes. Records in bfloat16 are rounded once each.
#
# 300 steps, some 750 tokens of the stream from above, now with next to no decay, held
# against the recurrence in float64.

# %%
SETTINGS = {
    "reconstruct, all float32": ("reconstruct", "float32", "float32"),
    "deferred, all float32": ("deferred", "float32", "float32"),
    "deferred, bfloat16 records": ("deferred", "float32", "bfloat16"),
    "deferred, bfloat16 state": ("deferred", "bfloat16", "float32"),
    "reconstruct, bfloat16 state": ("reconstruct", "bfloat16", "float32"),
}
stream = stream._replace(log_decay=stream.log_decay * 1e-2)


def states(owner):
    """Return S after every step, [steps, B, Hv, Dv, Dk]."""

    def step(state, x):
        inputs, node = x
        _, records = owner.verify(state, inputs, rows)
        state = owner.commit(state, records, accepted(node))
        return state, owner.materialize(state).astype(jnp.float32)

    start = owner.init(jnp.zeros((batch, heads, width, width)), 1)
    return np.asarray(jax.lax.scan(step, start, (stream, jnp.asarray(nodes)))[1])


# The truth: a loop in NumPy, float64, over the accepted nodes.
exact = np.zeros((STEPS, batch, heads, width, width))
for row in range(batch):
    truth = np.zeros((heads, width, width))
    for step in range(STEPS):
        last = nodes[step, row]
        for node in paths[last, : counts[last]]:
            _, k, v, g, beta = (np.float64(x[step, row, node]) for x in stream)
            truth = np.exp(g)[:, None, None] * truth
            u = beta[:, None] * (v - truth @ k[0])
            truth = truth + u[:, :, None] * k[0]
        exact[step, row] = truth

tokens = lengths.mean(1).cumsum()
figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
errors = {}
for label, (name, state_dtype, record_dtype) in SETTINGS.items():
    options = dict(state_dtype=state_dtype, record_dtype=record_dtype)
    owner = commit.by_name(name, depth=depth, horizon=HORIZON, **options)
    difference = np.linalg.norm((states(owner) - exact).reshape(STEPS, -1), axis=1)
    error = difference / np.linalg.norm(exact.reshape(STEPS, -1), axis=1)
    axis.plot(tokens, error, label=label)
    errors[label] = error[-1]
    early = f"after {tokens[49]:.0f} tokens {error[49]:.1e}"
    print(f"{label:28} {early}, after {tokens[-1]:.0f} {error[-1]:.1e}")
axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="error of the state")
axis.legend(fontsize=8)
plt.show()
assert max(list(errors.values())[:2]) < 2e-6
assert errors["reconstruct, bfloat16 state"] > 1.5 * errors["deferred, bfloat16 state"]

# %% [markdown]
# ## 6. What to take
#
# - `deferred` moves the least and is the one to try first where many sequences share a
#   device. `fused` needs less memory for its history.
# - Keep state and records in float32 unless a measurement says otherwise.
#   `scripts/bench_drift.py` runs every combination over thousands of tokens, also on
#   inputs of the shipped model.
# - Fewer bytes are less time only where bytes are the limit. The state of one sequence
#   is read in microseconds, and the rest of the model takes milliseconds.
# - In a functional program the state that `verify` returns is another array beside the
#   old one until commit, so `fused` and `deferred` hold two for a moment, and
#   `store-all` two rings (`memory.blocks`).
#
# ReplaySSM (vLLM RFC 47572) defers the write for chains. That records of *any* tree can
# be deferred, by the index map of section 1, is what `treewy_jax.history` adds.
