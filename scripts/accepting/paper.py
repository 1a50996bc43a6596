"""The TreeWY paper's own figures, to stand beside ours in columns of their own.

They are of Qwen3.5-35B-A3B on one B200, Spec-Bench, greedy, in vLLM: another model and
other prompts than ours, so acceptance does not compare; state blocks do.
"""

SOURCE = "TreeWY paper, Tables 2 and 4: Qwen3.5-35B-A3B, Spec-Bench, greedy"

# Table 2: tokens a step. The chain with store-all: 3.24, with one state: 3.23.
STORE_ALL_CHAIN = 3.24
ACCEPTANCE = {"1,1,1": 3.23, "2,2,1": 3.38, "2,2,2": 3.38, "3,3,3": 3.58}

# Table 4: states a request holds with store-all, and with TreeWY.
BLOCKS = {"1,1,1": (4, 1), "2,2,2": (15, 1), "3,3,3": (40, 1)}


def beside(tree: str) -> dict[str, object]:
    """Return what the paper says of a tree by widths; None where it says nothing."""
    store_all, ours = BLOCKS.get(tree, (None, None))
    return {
        "source": SOURCE,
        "accept_length": ACCEPTANCE.get(tree),
        "blocks": {"store-all": store_all, "treewy": ours},
    }
