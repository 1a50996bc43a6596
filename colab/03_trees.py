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
# # Which tree?
#
# A draft tree costs nodes: every one of them is verified. It earns tokens: one step
# emits the accepted path and one token more. Given how often a drafter's best, second
# best, ... token is right, there is a best tree of every size, and given how long a
# step takes, there is a best size. This notebook draws trees, plans them with
# `treewy_jax.planning` from the measured rates of the shipped model, looks for the
# batch from which a chain is better, and decodes with a planned tree. It takes about
# two minutes on a CPU.

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
import itertools
import json

import jax
import matplotlib.pyplot as plt
import numpy as np
import rich

import models
from treewy_jax import generate, planning
from treewy_jax import tree as tree_lib

jax.config.update("jax_default_device", jax.devices("cpu")[0])

# %% [markdown]
# ## 1. Trees
#
# A tree is the list of its nodes' parents. Node 0 is the root, the newest token; the
# children of a node stand for the drafter's best tokens there, in order. Widths such as
# (2, 2, 1) give every node of a level the same number of children. Nothing asks for
# that: any list in which a parent comes before its children will do.


# %%
def draw(parents, notes=None):
    """Draw a tree: #1 is the drafter's best token below a node, #2 the second best."""
    ranks = [parents[:node].count(parent) for node, parent in enumerate(parents)]
    notes = notes or [""] * len(parents)
    labels = [f"#{r + 1} {note}" for r, note in zip(ranks, notes, strict=True)]
    labels[0] = "root"
    rich.print(tree_lib.DraftTree.from_parents(parents).render(labels))


def widths(*sizes):
    """Return the parents of a tree by widths."""
    return tree_lib.DraftTree.from_widths(sizes).parent.tolist()


draw(widths(2, 2, 1))
draw([-1, 0, 1, 2, 1, 0])  # a chain of three with two runner-ups

# %% [markdown]
# ## 2. How often is the drafter right?
#
# `scripts/bench_acceptance.py` decodes 80 prompts with the shipped model and drafts
# along the text with its MTP head, eight tokens deep. It counts which rank each token
# of the text had, *once the tokens before it were drafted*: `p[depth, context, rank]`.
# The context is the sum of the ranks on the path so far. It matters: a guess below a
# runner-up is worse than one on the path of best tokens.
#
# The counts are taken where steps begin. A deep tree steps over easy text, so that its
# steps begin more often where text is hard; hence there are rates for each depth of
# trees. Positions taken at random would promise too much.

# %%
root = pathlib.Path(planning.__file__).parents[2]
found = json.loads((root / "scripts/results/nvidia-h200/acceptance.json").read_text())
entries = [e for e in found["rates"] if (e["drafter"], e["temperature"]) == ("mtp", 0)]
rates = {}
for entry in entries:
    reached, accepted = np.array(entry["reached"]), np.array(entry["accepted"])
    table = accepted / np.maximum(reached, 1)[..., None]
    rates[entry["depth"]] = planning.Rates(table)

DEEP, FLAT = max(rates), 3
print(f"trees of depth {FLAT}, percent accepted by rank 1 to 4")
for depth, row in enumerate(100 * rates[FLAT].table, 1):
    for context, name in enumerate(("best tokens so far", "one second best", "worse")):
        if depth > 1 or context == 0:
            ranks = "  ".join(f"{share:5.1f}" for share in row[context, :4])
            print(f"  depth {depth}, {name:20} {ranks}")

# %% [markdown]
# ## 3. The best tree of every size
#
# A node is reached with the product of the rates on its path, and a step emits the sum
# over all nodes, the root included. `planning.optimal` finds the tree with the largest
# sum by dynamic programming: how many nodes go to the subtree of the first child, how
# many to those behind it, level by level (in the manner of Sequoia, arXiv:2402.12374).
# The percentages are each node's chance to be accepted.

# %%
for nodes in (8, 16):
    parents = planning.optimal(rates[FLAT], nodes)
    reach = planning.reach(parents, rates[FLAT])
    print(f"{nodes} nodes, {sum(reach):.2f} tokens a step expected")
    draw(parents, [f"{100 * chance:.0f} %" for chance in reach])

# %% [markdown]
# The planned trees are wide at the root and thin below, and most of their nodes lie on
# or near the path of best tokens. Against all trees by widths:

# %%
NODES = 40
figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
for depth in (FLAT, 5, DEEP):
    best = planning.frontier(rates[depth], NODES)
    lengths = [planning.expected(parents, rates[depth]) for parents in best]
    axis.plot(range(1, NODES + 1), lengths, label=f"planned, depth up to {depth}")
shapes = [
    sizes
    for sizes in itertools.product(range(1, 7), repeat=FLAT)
    if sum(np.cumprod(sizes)) < NODES
]
sizes = [1 + sum(np.cumprod(shape)) for shape in shapes]
by_widths = [planning.expected(widths(*shape), rates[FLAT]) for shape in shapes]
axis.scatter(sizes, by_widths, s=8, color="gray", label=f"all widths of depth {FLAT}")
axis.set(xlabel="nodes", ylabel="tokens a step, expected")
axis.legend(fontsize=8)
plt.show()
planned = planning.frontier(rates[FLAT], NODES)
for size, length in zip(sizes, by_widths, strict=True):
    assert length <= planning.expected(planned[size - 1], rates[FLAT]) + 1e-9

# %% [markdown]
# Returns diminish: the first nodes are worth tenths of a token, the last ones
# hundredths. Where a text is easy, as much of what the tiny model writes is, depth
# earns more than width.
#
# ## 4. What a step costs, and the crossover
#
# More nodes take more time; how much more depends on the batch. Measured step times
# come from `scripts/bench_step.py`; `scripts/plan_tree.py` takes both files. Here a
# made-up device stands for them: a pass reads weights for 8 ms, each level of drafting
# costs 0.4 ms, and beyond 200 rows of tokens every row more costs 20 microseconds.


# %%
def step_ms(batch):
    """Return the time of a step as a function of nodes and depth."""
    return lambda nodes, depth: 8 + 0.4 * depth + 0.02 * max(0, batch * nodes - 200)


tried = planning.candidates(rates, NODES)
chains = [list(range(-1, drafts)) for drafts in range(DEEP + 1)]
BATCHES = (1, 4, 8, 16, 32, 64, 128)
lines = {"fastest tree": [], **{f"best of {n} nodes": [] for n in (8, 16, 40)}}
for batch in BATCHES:
    time = step_ms(batch)
    chain = planning.fastest(chains, rates, time, batch)
    tree = planning.fastest(tried, rates, time, batch)
    drafts, depth = len(tree.parents) - 1, planning.depth_of(tree.parents)
    print(
        f"B = {batch:3}: chain of {len(chain.parents) - 1} drafts "
        f"{chain.tokens_per_second:7,.0f} tokens/s, tree of {drafts:2} drafts, depth "
        f"{depth}: {tree.tokens_per_second:7,.0f}"
    )
    lines["fastest tree"].append(tree.tokens_per_second / chain.tokens_per_second)
    for n in (8, 16, 40):
        fixed = planning.optimal(rates[DEEP], n)
        choice = planning.choice(fixed, rates, time, batch)
        ratio = choice.tokens_per_second / chain.tokens_per_second
        lines[f"best of {n} nodes"].append(ratio)

figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
for name, ratios in lines.items():
    axis.plot(BATCHES, ratios, marker="o", ms=3, label=name)
axis.axhline(1, color="gray", lw=0.8)
axis.set(xscale="log", xlabel="batch", ylabel="tokens/s over the best chain's")
axis.legend(fontsize=8)
plt.show()
assert lines["best of 40 nodes"][0] > 1 > lines["best of 40 nodes"][-1]
assert min(lines["fastest tree"]) >= 1 - 1e-9

# %% [markdown]
# A large tree pays in small batches, where rows are free, and loses in large ones; with
# experts a small batch has a price as well, since every node wakes more of them. The
# fastest tree shrinks with the batch until it is a chain.
#
# ## 5. Decode with a planned tree
#
# `generate` takes any topology, and so does the command line, which reads what
# `scripts/plan_tree.py --out plan.json` writes: `decode.py --tree plan.json`. The text
# is the same whatever the tree.

# %%
model = models.load("tiny", dtype="float32")
QUESTIONS = (
    "What is the capital of Norway?",
    "Tell me a story about a rabbit who has a lantern.",
    "What is 17 plus 25?",
)
chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
prompts = [model.tokenizer.encode(chat.format(q)).ids for q in QUESTIONS]
texts = []
for name, parents in {
    "2,2,2": widths(2, 2, 2),
    "planned, 15 nodes, depth 8": planning.optimal(rates[DEEP], 15),
}.items():
    tree = tree_lib.DraftTree.from_parents(parents)
    written = generate.generate(model, prompts, tree=tree, max_new_tokens=48)
    texts.append(written.token_ids)
    tokens = sum(map(len, written.token_ids))
    print(
        f"{name:28} {tokens} tokens, "
        f"{sum(map(len, written.accept_lengths))} passes of a prompt, "
        f"{written.mean_accept_length:.2f} tokens each"
    )
assert texts[0] == texts[1]

# %% [markdown]
# ## 6. What to take
#
# - Measure rates with `scripts/bench_acceptance.py` on prompts like yours: they decide
#   the tree, and they differ from one kind of text to the next.
# - Plan with `scripts/plan_tree.py`. Without step times take the smallest tree of which
#   the next node is worth less than you would pay for it.
# - A tree of n nodes needs n states with store-all and one here, so its size is a
#   question of time alone.
