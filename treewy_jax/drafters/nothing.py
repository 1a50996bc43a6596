"""The empty draft: every step verifies the root alone."""

from treewy_jax import pytree
from treewy_jax import tree as tree_lib


@pytree.dataclass
class NoDrafter:
    """Proposes the root and nothing below it: plain decoding through the same step."""

    depth_max = 0
    n_max = 1

    def bind(self, target):
        return self

    def start(self, tokens, lengths, hidden, next_token, capacity):
        return ()

    def propose(self, state, root, base):
        tree = tree_lib.DraftTree.from_widths((), batch=root.shape[0])
        return tree.with_tokens(root[:, None]), state

    def update(self, state, accepted, hidden):
        return state
