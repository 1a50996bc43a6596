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
# # The idea: verify a tree, hold one state
#
# You know transformers: keys and values of all tokens lie in a cache, and a token that
# turns out wrong is cut off its end. Three of four layers of a Qwen3.5 have no such
# cache. They fold all tokens into one matrix of fixed size, the *state* of a gated
# delta rule (GDN), and a fold cannot be cut off.
#
# That is awkward for speculative decoding, which drafts tokens, verifies them in one
# pass and keeps some of them. This notebook shows on numbers small enough to print why
# engines copy the state at every drafted token, what that costs, and how a small
# triangular system makes the copies unnecessary. Everything runs on a CPU in seconds.

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
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import rich

from models.qwen3_5 import published
from pallas_kernels.tree_verify import spec as specs
from treewy_jax import memory, recurrence, verify
from treewy_jax import tree as tree_lib

# The equalities below are shown in float64, which not every accelerator has.
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_default_device", jax.devices("cpu")[0])
np.set_printoptions(precision=4, suppress=True)


def relative(actual, exact):
    """Norm of the difference over the norm of what is right."""
    return np.linalg.norm(actual - exact) / np.linalg.norm(exact)


# %% [markdown]
# ## 1. The recurrence, on three tokens
#
# The state $S$ (value width x key width) is a notebook of key-value pairs: $S k$ reads
# what is written under key $k$. A token brings a unit key $k$, a value $v$, a log decay
# $g \le 0$ and a write strength $\beta \in [0, 1]$:
#
# $$u = \beta\,(v - e^{g} S k), \qquad S \leftarrow e^{g} S + u\,k^\top, \qquad
# o = S q.$$
#
# First everything fades by $e^g$. Then $e^g S k$ is read, what the notebook would
# answer for this key, and only the *difference* to the wanted value is written. That
# difference $u$ is called the pseudo-value; remember it, the whole method is about it.
#
# Three tokens, the third with the key of the first: linear attention would add both
# values, the delta rule replaces the old one.


# %%
def step(S, k, v, g, beta):
    """Absorb one token; returns the new state and the pseudo-value."""
    decayed = np.exp(g) * S
    u = beta * (v - decayed @ k)
    return decayed + np.outer(u, k), u


key_a, key_b = np.array([1.0, 0.0]), np.array([0.6, 0.8])
tokens = [
    ("a <- (1, 2)", key_a, np.array([1.0, 2.0])),
    ("b <- (5, 5)", key_b, np.array([5.0, 5.0])),
    ("a <- (9, 9)", key_a, np.array([9.0, 9.0])),
]
S = np.zeros((2, 2))
for text, k, v in tokens:
    S, u = step(S, k, v, g=-0.1, beta=1.0)
    print(f"{text}   u = {u}   now a reads {S @ key_a}, b reads {S @ key_b}")

assert np.allclose(S @ key_a, [9, 9])  # replaced, not added

# %% [markdown]
# ## 2. Why the state cannot be cut back
#
# A drafter proposes three tokens, the model verifies them in one pass, and the last one
# is wrong. In an attention layer we shorten the cache. Here we would have to undo
# $S' = e^{g} S (I - \beta k k^\top) + \beta v k^\top$. With $\beta = 1$ the matrix in
# the middle is a projection: what was written under $k$ before is gone. With a smaller
# $\beta$ it can be inverted, but dividing by $e^g$ and $1 - \beta$ blows up every
# rounding error, and $e^g$ is often close to 0.

# %%
for beta in (0.5, 0.99, 1.0):
    erase = np.eye(2) - beta * np.outer(key_b, key_b)
    print(f"beta {beta:4}: smallest singular value {np.linalg.svd(erase)[1][-1]:.2g}")

before, _ = step(np.zeros((2, 2)), key_b, np.array([5.0, 5.0]), -0.1, 1.0)
other, _ = step(np.zeros((2, 2)), key_b, np.array([-7.0, 1.0]), -0.1, 1.0)
after, after_other = (
    step(past, key_b, np.array([2.0, 3.0]), -0.1, 1.0)[0] for past in (before, other)
)
assert not np.allclose(before, other) and np.allclose(after, after_other)
print("two different pasts, one and the same state: no way back")

# %% [markdown]
# So engines take the straight way: keep the state after *every* drafted token, then
# select one of them. For a chain of three drafts that is four states (the root, which
# is the newest token already emitted, also has to be absorbed). For a tree of drafts,
# where a level of width $w$ multiplies the nodes, it gets out of hand.
#
# Below are the states alone, per sequence. *Counted* is a state a node, as papers
# count; *allocated* adds the committed state. Qwen3.5 configurations ask for float32
# states; published figures are often those of bfloat16. Both are shown, since mixing
# them is a factor of two.

# %%
SIZES = {"35B": "qwen3.5-35b-a3b", "397B": "qwen3.5-397b-a17b"}
shapes = {
    label: memory.Shape.from_config(published.get(name))
    for label, name in SIZES.items()
}
trees = [(1, 1, 1), (2, 2, 2), (3, 3, 3)]

print("store-all, states only, MiB a sequence")
print("model  dtype     nodes  one state   counted  allocated")
for row in memory.table(shapes, trees, schemes=("store-all",)):
    one, counted, allocated = (
        size / 2**20 for size in (row.counted / row.nodes, row.counted, row.allocated)
    )
    print(
        f"{row.model:6} {row.state_dtype:9} {row.nodes:5} {one:10.0f} "
        f"{counted:9.0f} {allocated:10.0f}"
    )

assert memory.state_bytes(shapes["35B"], "bfloat16") == 30 * 2**20
assert memory.state_bytes(shapes["397B"], "float32") == 180 * 2**20
assert [memory.blocks(t, "store-all").counted for t in trees] == [4, 15, 40]

# %% [markdown]
# ## 3. The triangular system of a 5-node tree, by hand
#
# Look at what a node adds to the state: one outer product $u\,k^\top$, two vectors. If
# all pseudo-values were known, every state in the tree could be written down without
# running the recurrence. With $c_t$ the log decay summed from the root to node $t$,
#
# $$S_t = e^{c_t} S_0 + \sum_{i \,\preceq\, t} e^{c_t - c_i}\, u_i k_i^\top ,$$
#
# the sum running over the ancestors of $t$ and $t$ itself. Put the state of the parent
# into the definition of $u_t$ and the states disappear:
#
# $$u_t + \sum_{i \,\prec\, t}
# \underbrace{\beta_t\, e^{c_t - c_i} (k_t \cdot k_i)}_{A_{ti}} u_i
# = \underbrace{\beta_t\,(v_t - e^{c_t} S_0 k_t)}_{R_t},
# \qquad\text{that is}\qquad (I + A)\,U = R .$$
#
# $A$ is n x n, five rows here and 40 for a large tree, and it needs $S_0$ only. It is
# strictly lower triangular, since a parent comes before its children, and 0 wherever
# $i$ is no ancestor of $t$: siblings do not see each other.
#
# Our tree, nodes numbered in preorder:

# %%
parents = [-1, 0, 1, 1, 0]
tree = tree_lib.DraftTree.from_parents(parents)
rich.print(tree.render([f"node {i}" for i in range(5)]))

n, width = 5, 4
rng = np.random.default_rng(0)
unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
# Keys resemble each other, or A would be nearly 0 and the example would show nothing.
k = unit(0.5 + rng.normal(size=(n, width)))
q = unit(rng.normal(size=(n, width)))
v = rng.normal(size=(n, width))
g = rng.uniform(-0.5, -0.01, n)
beta = rng.uniform(0.3, 1.0, n)
S0 = rng.normal(size=(width, width))

# %% [markdown]
# First the truth: run the recurrence down the tree, from each node's parent, and keep
# all five states. This is what we want to avoid, and what the result is held against.

# %%
states, U_true = [], []
for t, parent in enumerate(parents):
    start = S0 if parent < 0 else states[parent]
    S, u = step(start, k[t], v[t], g[t], beta[t])
    states.append(S)
    U_true.append(u)
U_true = np.array(U_true)
O_true = np.array([states[t] @ q[t] for t in range(n)])

# %% [markdown]
# Now $A$ and $R$, entry by entry. Decays are exponentials of differences, and only
# between a node and its ancestors, where the difference is at most 0 and cannot
# overflow.

# %%
paths = []  # ancestors of each node and itself, root first
for t, parent in enumerate(parents):
    paths.append(([] if parent < 0 else paths[parent]) + [t])
c = np.array([sum(g[i] for i in path) for path in paths])
print("paths ", paths)
print("c     ", c)

A = np.zeros((n, n))
R = np.zeros((n, width))
for t in range(n):
    for i in paths[t][:-1]:
        A[t, i] = beta[t] * np.exp(c[t] - c[i]) * (k[t] @ k[i])
    R[t] = beta[t] * (v[t] - np.exp(c[t]) * S0 @ k[t])
print(f"A =\n{A}")
print(f"R =\n{R}")

# %% [markdown]
# Solve by *depth sweeps*, $U \leftarrow R - A U$ from $U = R$. The root has no
# ancestors, so its row is right at the start. After one sweep the nodes at depth 1 are
# right, after two those at depth 2. The number of sweeps is the depth of the tree, here
# 2, not the number of nodes: all siblings are solved at once, which is what makes this
# fast on hardware that likes matrix products. One more sweep would change nothing.

# %%
depth = np.array([len(path) - 1 for path in paths])
U = R
for sweep in range(depth.max() + 1):
    right = [t for t in range(n) if relative(U[t], U_true[t]) < 1e-14]
    print(f"after {sweep} sweeps these nodes are right: {right}")
    assert set(np.flatnonzero(depth <= sweep)) <= set(right)
    if sweep < depth.max():
        U = R - A @ U
print(f"U =\n{U}")

assert relative(U, U_true) < 1e-14
assert np.array_equal(R - A @ U, U)

# %% [markdown]
# Outputs need no states either:
# $o_t = e^{c_t} S_0 q_t + \sum_{i \preceq t} e^{c_t - c_i} (q_t \cdot k_i)\, u_i$.

# %%
output = np.array(
    [
        np.exp(c[t]) * S0 @ q[t]
        + sum(np.exp(c[t] - c[i]) * (q[t] @ k[i]) * U[i] for i in paths[t])
        for t in range(n)
    ]
)
print(f"pseudo-values, relative error {relative(U, U_true):.1e}")
print(f"outputs,       relative error {relative(output, O_true):.1e}")
assert relative(output, O_true) < 1e-14

# %% [markdown]
# A check that cannot fail proves nothing. Let node 3 see its sibling, node 2, and the
# result must be visibly wrong:

# %%
A_wrong = A.copy()
A_wrong[3, 2] = beta[3] * (k[3] @ k[2])
wrong = np.linalg.solve(np.eye(n) + A_wrong, R)
print(f"with one wrong entry in the mask: {relative(wrong[3], U_true[3]):.1e}")
assert relative(wrong[3], U_true[3]) > 1e-3

# %% [markdown]
# ## 4. Rebuild the one state that was accepted
#
# Say the model agrees with the path 0, 1, 3. Its state is the only one we ever need,
# and $S_0$ with three pairs $(u_i, k_i)$ gives it: fade and add, root first. There is
# no read and no solve in this, so nothing can cancel. The other nodes are forgotten.

# %%
accepted = 3
S = S0
for i in paths[accepted]:
    S = np.exp(g[i]) * S + np.outer(U[i], k[i])
print(f"state after node {accepted}, relative error {relative(S, states[3]):.1e}")
assert relative(S, states[accepted]) < 1e-14

# %% [markdown]
# ## 5. The same through the library
#
# `verify` takes arrays with batch and heads, solves the system, and returns outputs and
# pseudo-values; `reconstruct` rebuilds the state of one node a row. First on the
# numbers from above, then on a (3, 3, 3) tree with heads of the published width 128,
# where every one of the 40 states is rebuilt and compared with the recurrence.

# %%
batched = [x[None, :, None] for x in (q, k, v, g, beta)]  # [B, n, heads, ...]
verified = verify.verify(*map(jnp.asarray, batched), jnp.asarray(S0[None, None]), tree)
rebuilt = verify.reconstruct(
    jnp.asarray(S0[None, None]), batched[1], verified, tree, jnp.array([accepted])
)
assert relative(verified.pseudo_values[0, :, 0], U_true) < 1e-14
assert relative(verified.output[0, :, 0], O_true) < 1e-14
assert relative(rebuilt[0, 0], states[accepted]) < 1e-14

large = tree_lib.DraftTree.from_widths((3, 3, 3))
n, key_heads, value_heads, width = large.n_max, 2, 4, 128
inputs = [
    unit(rng.normal(size=(1, n, key_heads, width))) * width**-0.5,
    unit(rng.normal(size=(1, n, key_heads, width))),
    rng.normal(size=(1, n, value_heads, width)),
    rng.uniform(-2.0, -0.001, (1, n, value_heads)),
    rng.uniform(0.01, 0.99, (1, n, value_heads)),
]
inputs = [jnp.asarray(x) for x in inputs]
state = jnp.asarray(rng.normal(size=(1, value_heads, width, width)))
verified = verify.verify(*inputs, state, large)
outputs, every_state = recurrence.recurrent_tree(*inputs, state, large)
rebuild = jax.jit(verify.reconstruct)
errors = [
    relative(rebuild(state, inputs[1], verified, large, jnp.array([t])), exact[None])
    for t, exact in enumerate(every_state[0])
]
print(f"outputs of 40 nodes: {relative(verified.output, outputs):.1e}")
print(f"worst of 40 states:  {max(errors):.1e}")
assert relative(verified.output, outputs) < 1e-14 and max(errors) < 1e-14

# %% [markdown]
# `verify` has several implementations. Left to itself it takes the best one that
# supports the device and the shapes, and otherwise the plain JAX reference, which runs
# anywhere. Ask it what it would do with a call of the 35B model here, and why:

# %%
published_call = specs.make_spec(
    nodes=40,
    key_heads=16,
    value_heads=32,
    key_dim=128,
    value_dim=128,
    input_dtype="bfloat16",
    state_dtype="float32",
)
print(verify.explain(published_call))

# %% [markdown]
# ## 6. Memory against width
#
# Per sequence, for trees of three levels of width 1 to 5 (4 to 156 nodes): the
# recurrent states plus all that verification leaves until commit. That is a state a
# node for store-all, and key, pseudo-value and decay a node for the method above; both
# also keep the raw conv rows and the KV of the nodes. The dotted line is the KV cache
# of an 8K context, for scale.


# %%
def held(shape, scheme, width, dtype):
    """MiB of states and records for the tree (width, width, width)."""
    parts = memory.per_sequence(shape, scheme, (width,) * 3, dtype)
    return (parts["recurrent"] + parts["records"]) / 2**20


widths = range(1, 6)
styles = {"store-all": "o--", "reconstruct": "o-"}
figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
for axis, (label, shape) in zip(axes, shapes.items(), strict=True):
    for color, dtype in (("tab:blue", "bfloat16"), ("tab:red", "float32")):
        for scheme, style in styles.items():
            mib = [held(shape, scheme, width, dtype) for width in widths]
            axis.plot(widths, mib, style, color=color, label=f"{scheme}, {dtype}")
    context = memory.kv_bytes(shape, 8192) / 2**20
    axis.axhline(context, color="gray", linestyle=":", label="KV of 8K tokens")
    axis.set(title=f"Qwen3.5-{label}", yscale="log", xlabel="width of each level")
    axis.set_xticks(widths)
axes[0].set_ylabel("MiB a sequence")
axes[0].legend(fontsize=8)
plt.show()

for label, shape in shapes.items():
    for dtype in memory.STATE_DTYPES:
        all_states, one_state = (held(shape, s, 3, dtype) for s in styles)
        print(
            f"{label} {dtype}, (3, 3, 3): {all_states:.0f} MiB against "
            f"{one_state:.0f}, a factor of {all_states / one_state:.1f}"
        )

# %% [markdown]
# ## 7. Where it does not help
#
# **Records are small, not free.** They grow with the tree. How many nodes until they
# weigh as much as one state?

# %%
for label, shape in shapes.items():
    for dtype in memory.STATE_DTYPES:
        node = memory.record_bytes(shape, 1, state_dtype=dtype)
        state = memory.state_bytes(shape, dtype)
        print(
            f"{label} {dtype}: a node leaves {node / 2**20:.2f} MiB, "
            f"{state / node:.0f} nodes weigh as much as the state"
        )

# %% [markdown]
# A bfloat16 state is outweighed before 40 nodes, so "one state" is not the whole bill;
# the figure above includes the records.
#
# **The conv has a state too.** In front of the recurrence stands a causal convolution
# of four taps, which remembers three rows. A window of its own for each of 40 nodes
# would outweigh the recurrent state in bfloat16 (first number below, for one layer of
# 35B). So windows are never stored: a node's raw row is, once, and it finds the other
# taps along its ancestors. Those rows are part of the records.

# %%
layer = memory.Shape(
    gdn_layers=1,
    value_heads=32,
    key_heads=16,
    key_dim=128,
    value_dim=128,
    conv_width=4,
    attention_layers=0,
    kv_heads=2,
    head_dim=256,
)
window, state = memory.conv_bytes(layer), memory.state_bytes(layer, "bfloat16")
parts = {"40 windows": 40 * window, "40 raw rows": 40 * window / 3, "state": state}
for name, size in parts.items():
    print(f"{name:11} {size / 2**20:.2f} MiB")
assert 40 * window > state > 40 * window / 3

# %% [markdown]
# **Memory is not speed.** The method reads the state to verify and reads and writes it
# to commit, three passes a step, where a plain decode takes two (one read, one write).
# It is far less than store-all's pass a node. But a wide tree also runs all its nodes
# through the rest of the model: where the batch already fills the device, or where the
# nodes of a mixture of experts wake more experts, a tree can be slower than a chain.
#
# **The bits differ.** The system adds up in another order than the recurrence. In
# float64 the two agree to 1e-14; in float32 to rounding, which can turn a token where
# two logits are all but equal.
#
# **It is not ours.** Verifying a tree against one state by a masked triangular system
# was published three times in 2026: Weaver (arXiv 2607.06763, July), Bole (arXiv
# 2608.01651, early August) and TreeWY (arXiv 2608.20961, late August), whose name this
# repository bears. The recurrence is that of Gated DeltaNet (arXiv 2412.06464). What
# may be claimed here is at most to be the first to do it in JAX.
