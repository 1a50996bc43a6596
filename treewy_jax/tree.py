"""The tree of drafted tokens: parents as data inside a static envelope.

Node 0 is the root, the newest token already emitted; every other node is a draft
whose parent has a smaller index (preorder: a subtree is a contiguous range). A row
has `size` real nodes; the rest of the envelope is padding with parent -1, which has
no ancestors, not even itself, and so never acts. `n_max` and `depth_max` are static:
another topology inside them compiles nothing new.
"""

import contextlib
import dataclasses
import re
import typing
from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import rich.markup
import rich.tree
from jax import lax
from jaxtyping import Array, Bool, Int


# Unflattening a pytree may put tracers' types or plain objects into the fields, so
# run-time type checking has to stay out of this class.
@typing.no_type_check
@dataclasses.dataclass(frozen=True)
class DraftTree:
    """A tree per batch row, preorder, node 0 the root.

    Attributes:
      tokens: int32 [B, n], token ids (anything in padding).
      parent: int32 [B, n], or [n] shared by the batch; -1 for the root and padding.
      size: int32 [B], number of real nodes of each row.
      depth_max: static bound on the edges from the root to any node.
    """

    tokens: Int[Array, "B n"]
    parent: Int[Array, "B n"] | Int[Array, " n"]
    size: Int[Array, " B"]
    depth_max: int

    @property
    def n_max(self) -> int:
        """Nodes of the static envelope, padding included."""
        return self.tokens.shape[-1]

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self.tokens.shape[0]

    @classmethod
    def from_widths(
        cls, widths: Sequence[int], *, n_max: int | None = None, batch: int = 1
    ) -> "DraftTree":
        """Build the tree in which every node of level d has widths[d] children.

        (3, 3, 3) has 39 drafts, n = 40; () is the root alone. Raises ValueError for
        a width that is no positive int, or more nodes than n_max.
        """
        widths = _check_widths(widths, n_max)
        parents: list[int] = [-1]

        def grow(node: int, level: int) -> None:
            for _ in range(widths[level] if level < len(widths) else 0):
                parents.append(node)
                grow(len(parents) - 1, level + 1)

        grow(0, 0)
        return cls.from_parents(
            parents, n_max=n_max, depth_max=len(widths), batch=batch
        )

    @classmethod
    def chain(
        cls, drafts: int, *, n_max: int | None = None, batch: int = 1
    ) -> "DraftTree":
        """Build the tree without branches: `drafts` tokens after the root."""
        if not _is_int(drafts) or drafts < 0:
            raise ValueError(f"drafts is {drafts!r}; a non-negative int is allowed")
        return cls.from_parents(range(-1, drafts), n_max=n_max, batch=batch)

    @classmethod
    def chain_with_leaves(
        cls,
        drafts: int,
        *,
        leaves: int | None = None,
        n_max: int | None = None,
        batch: int = 1,
    ) -> "DraftTree":
        """Build a chain with the runner-up beside each of its first `leaves` drafts.

        The runner-up is the second child of its parent and has none. It needs no more
        passes of a drafter than the chain. None puts one at every level:
        n = 1 + drafts + leaves. Raises ValueError for leaves outside [0, drafts].
        """
        chain = cls.chain(drafts).parent.tolist()
        leaves = drafts if leaves is None else leaves
        if not _is_int(leaves) or not 0 <= leaves <= drafts:
            raise ValueError(
                f"leaves is {leaves!r}; None or an int from 0 to {drafts} is allowed"
            )
        # In preorder the leaf of the deepest level comes first.
        parents = chain + list(reversed(range(leaves)))
        return cls.from_parents(parents, n_max=n_max, batch=batch)

    @classmethod
    def from_parents(
        cls,
        parents: Sequence[int],
        *,
        n_max: int | None = None,
        depth_max: int | None = None,
        batch: int = 1,
    ) -> "DraftTree":
        """Build a tree from the parent of every node, preorder, root first with -1.

        n_max None takes exactly these nodes, depth_max None their depth. Raises
        ValueError where the list is no preorder tree or exceeds the envelope.
        """
        parents = _check_parents(list(parents))
        n_max = _check_envelope(len(parents), n_max)
        depth = max(_depths(parents))
        if depth_max is not None and depth_max < depth:
            raise ValueError(f"depth_max is {depth_max}; this tree needs >= {depth}")
        if not _is_int(batch) or batch < 1:
            raise ValueError(f"batch is {batch!r}; a positive int is allowed")
        padded = parents + [-1] * (n_max - len(parents))
        return cls(
            tokens=jnp.zeros((batch, n_max), jnp.int32),
            parent=jnp.asarray(padded, jnp.int32),
            size=jnp.full((batch,), len(parents), jnp.int32),
            depth_max=depth if depth_max is None else depth_max,
        )

    @classmethod
    def stack(
        cls, rows: Sequence["DraftTree"], *, n_max: int | None = None
    ) -> "DraftTree":
        """Put trees of any topology into one batch inside a common envelope."""
        if not rows:
            raise ValueError("rows is empty; at least one tree is allowed")
        n_max = _check_envelope(max(row.n_max for row in rows), n_max)

        def pad(x: Array, value: int) -> Array:
            room = ((0, 0), (0, n_max - x.shape[1]))
            return jnp.pad(x, room, constant_values=value)

        return cls(
            tokens=jnp.concatenate([pad(row.tokens, 0) for row in rows]),
            parent=jnp.concatenate([pad(row.parents(), -1) for row in rows]),
            size=jnp.concatenate([row.size for row in rows]),
            depth_max=max(row.depth_max for row in rows),
        )

    def with_tokens(self, tokens: Int[Array, "B n"]) -> "DraftTree":
        """Return the tree with these tokens; a tree of one row takes any batch."""
        if tokens.ndim != 2 or tokens.shape[1] != self.n_max:
            raise ValueError(
                f"tokens has shape {tokens.shape}; [B, {self.n_max}] is allowed"
            )
        batch = tokens.shape[0]
        if self.batch not in (1, batch):
            raise ValueError(f"tokens has {batch} rows; the tree has {self.batch}")
        parent = self.parent
        if parent.ndim == 2:
            parent = jnp.broadcast_to(parent, tokens.shape)
        size = jnp.broadcast_to(self.size, (batch,))
        return dataclasses.replace(
            self, tokens=tokens.astype(jnp.int32), parent=parent, size=size
        )

    def valid(self) -> Bool[Array, "B n"]:
        """Tell real nodes from padding."""
        with self._evaluated_if_known():
            return jnp.arange(self.n_max) < self.size[:, None]

    def parents(self) -> Int[Array, "B n"]:
        """Return each node's parent per row; -1 for the root and for padding."""
        with self._evaluated_if_known():
            parent = jnp.broadcast_to(self.parent, self.tokens.shape)
            return jnp.where(self.valid(), parent, -1)

    def ancestors(self, include_self: bool = True) -> Bool[Array, "B n n"]:
        """Return [t, i] = node i lies on the path from the root to node t.

        Pointer doubling: after m rounds a node knows 2^m nodes of its path, so
        depth_max.bit_length() rounds reach every root.
        """
        with self._evaluated_if_known():
            itself = jnp.eye(self.n_max, dtype=bool)
            reached = itself & self.valid()[:, :, None]
            jump = self.parents()
            for _ in range(self.depth_max.bit_length()):
                found, row = jump >= 0, jnp.maximum(jump, 0)
                above = jnp.take_along_axis(reached, row[:, :, None], axis=1)
                reached = reached | (above & found[:, :, None])
                jump = jnp.where(found, jnp.take_along_axis(jump, row, axis=1), -1)
            return reached if include_self else reached & ~itself

    def depth(self) -> Int[Array, "B n"]:
        """Return the edges between the root and each node (root and padding: 0)."""
        with self._evaluated_if_known():
            above = self.ancestors(include_self=False)
            return jnp.sum(above, axis=-1, dtype=jnp.int32)

    def deepest(self) -> Int[Array, " B"]:
        """Return the depth of each row's deepest node."""
        with self._evaluated_if_known():
            return jnp.max(self.depth(), axis=-1)

    def rank(self) -> Int[Array, "B n"]:
        """Return each node's place among its siblings (root and padding: 0)."""
        with self._evaluated_if_known():
            parent = self.parents()
            earlier = jnp.tri(self.n_max, k=-1, dtype=bool)
            earlier &= parent[:, :, None] == parent[:, None]
            place = jnp.sum(earlier, axis=-1, dtype=jnp.int32)
            return jnp.where(parent < 0, 0, place)

    def _evaluated_if_known(self) -> contextlib.AbstractContextManager:
        """Make what follows constants of the program where the tree is one."""
        traced = (isinstance(x, jax.core.Tracer) for x in (self.parent, self.size))
        if any(traced):
            return contextlib.nullcontext()
        return jax.ensure_compile_time_eval()

    def ancestor_at(self, distance: int) -> Int[Array, "B n"]:
        """Return the node `distance` edges above each node, itself at 0, else -1."""
        parent = self.parents()

        def climb(_, node):
            above = jnp.take_along_axis(parent, jnp.maximum(node, 0), axis=1)
            return jnp.where(node >= 0, above, -1)

        itself = jnp.where(self.valid(), jnp.arange(self.n_max, dtype=jnp.int32), -1)
        return lax.fori_loop(0, distance, climb, itself)

    def path(
        self, node: Int[Array, " B"]
    ) -> tuple[Int[Array, "B P"], Int[Array, " B"]]:
        """Return the nodes from the root to `node`, and how many they are.

        The path is padded to depth_max + 1 by repeating `node`. A node outside
        [0, size) names no path: count 0, path all 0.
        """
        index = jnp.arange(self.n_max, dtype=jnp.int32)
        ancestors = self.ancestors()
        depth = jnp.sum(ancestors, axis=-1) - 1
        known = (node >= 0) & (node < self.size)
        target = jnp.where(known, node, 0).astype(jnp.int32)
        above = jnp.take_along_axis(ancestors, target[:, None, None], axis=1)[:, 0]
        levels = jnp.arange(self.depth_max + 1)
        here = (above & known[:, None])[:, None] & (depth[:, None] == levels[:, None])
        found = jnp.any(here, axis=-1)
        nodes = jnp.sum(jnp.where(here, index, 0), axis=-1, dtype=jnp.int32)
        path = jnp.where(found, nodes, target[:, None])
        return path, jnp.sum(found, axis=-1, dtype=jnp.int32)

    def render(
        self,
        labels: Sequence[str] | None = None,
        highlight: Collection[int] = (),
        row: int = 0,
    ) -> rich.tree.Tree:
        """Draw one row for the terminal, the nodes in `highlight` in bold green.

        `labels` names every node (default: its token id). Reads the arrays, so it
        works outside jit only.
        """
        parents = np.asarray(self.parents())[row, : int(self.size[row])]
        if labels is None:
            labels = [str(token) for token in np.asarray(self.tokens)[row]]
        if len(labels) < len(parents):
            raise ValueError(
                f"labels has {len(labels)} entries; one for each of the "
                f"{len(parents)} nodes is allowed"
            )
        drawn: list[rich.tree.Tree] = []
        for node, parent in enumerate(parents):
            label = rich.markup.escape(labels[node])
            if node in highlight:
                label = f"[bold green]{label}[/]"
            branch = drawn[parent].add(label) if node else rich.tree.Tree(label)
            drawn.append(branch)
        return drawn[0]


jax.tree_util.register_dataclass(
    DraftTree, data_fields=["tokens", "parent", "size"], meta_fields=["depth_max"]
)


def parse(text: str, n_max: int = 64) -> DraftTree:
    """Read a topology: what `parse_widths` reads, or a chain by its name.

    chain4 is 1,1,1,1; chain4+leaf has the runner-up of the first draft beside it,
    chain4+leaves that of every draft. Raises ValueError as `parse_widths` does.
    """
    text = text.strip()
    if not text.startswith("chain"):
        return DraftTree.from_widths(parse_widths(text, n_max))
    named = re.fullmatch(r"chain([1-9][0-9]{0,8})(\+leaf|\+leaves)?", text)
    if named is None:
        raise ValueError(
            f"tree {text[:40]!r}: of chains, names such as chain4, chain4+leaf and "
            "chain4+leaves are allowed"
        )
    drafts = int(named[1])
    leaves = {None: 0, "+leaf": 1, "+leaves": drafts}[named[2]]
    try:
        _check_envelope(1 + drafts + leaves, n_max)
    except ValueError as error:
        raise ValueError(f"tree {text!r}: {error}") from None
    return DraftTree.chain_with_leaves(drafts, leaves=leaves)


def parse_widths(text: str, n_max: int = 64) -> tuple[int, ...]:
    """Read "3,3,3" (children per level) or "none" (the root alone).

    Raises ValueError with one line that says what is wrong and what is allowed.
    """
    if text.strip() == "none":
        return ()
    shown = text if len(text) <= 40 else f"{text[:37]}..."
    allowed = "positive integers separated by commas, such as 3,3,3, or none"
    levels = [level.strip() for level in text.split(",")]
    for number, level in enumerate(levels, 1):
        if not re.fullmatch("[0-9]{1,9}", level) or int(level) == 0:
            raise ValueError(
                f"tree {shown!r}: level {number} is {level[:20]!r}; allowed: {allowed}"
            )
    try:
        return _check_widths([int(level) for level in levels], n_max)
    except ValueError as error:
        raise ValueError(f"tree {shown!r}: {error}") from None


def _is_int(value) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _check_widths(widths: Sequence, n_max: int | None) -> tuple[int, ...]:
    for level, width in enumerate(widths, 1):
        if not _is_int(width) or width < 1:
            raise ValueError(
                f"widths[{level - 1}] is {width!r}; positive ints are allowed"
            )
    nodes = level_nodes = 1
    for width in widths:
        level_nodes *= int(width)
        nodes += level_nodes
        # A bound of its own keeps a typing error from filling the memory.
        if nodes > (2**20 if n_max is None else n_max):
            break
    _check_envelope(nodes, n_max)
    return tuple(int(width) for width in widths)


def _check_envelope(nodes: int, n_max: int | None) -> int:
    if n_max is None:
        n_max = nodes if nodes <= 2**20 else 2**20
    if not _is_int(n_max) or nodes > n_max:
        raise ValueError(
            f"at least {nodes} nodes with the root; at most n_max = {n_max} are allowed"
        )
    return int(n_max)


def _check_parents(parents: list) -> list[int]:
    if not parents or not all(_is_int(parent) for parent in parents):
        raise ValueError(f"parents is {parents!r}; a non-empty list of ints is allowed")
    if parents[0] != -1:
        raise ValueError(f"parents[0] is {parents[0]}; the root comes first, with -1")
    branch = [0]
    for node, parent in enumerate(parents[1:], 1):
        if parent == -1:
            raise ValueError(f"parents[{node}] is -1; only node 0 is a root")
        # In preorder the parent is the node before, or one of its ancestors.
        while branch and branch[-1] != parent:
            branch.pop()
        if not branch:
            raise ValueError(
                f"parents[{node}] is {parent}; in preorder it is node {node - 1} "
                "or one of its ancestors"
            )
        branch.append(node)
    return [int(parent) for parent in parents]


def _depths(parents: list[int]) -> list[int]:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths
