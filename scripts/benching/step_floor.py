"""Least bytes and flops of a whole decode step, by formula.

Bytes are what is read and written once.

With B rows, n nodes, d levels of drafts, a tokens accepted a step on average, S the
bytes of a row's recurrent states, r those of a row's records:

    weights   dense parts of the target and the output head; rows of the embedding
    experts   layers * bytes * (1 - (1 - load)^(B n)), averaged over the experts
    draft     d runs of the MTP head, each behind the one before: its weights, the
              output head, its keys and values; and its experts touched
    state     B S (1 + n store-all | 3 reconstruct | 2 fused | 1 + f deferred), with f
              the share of steps in which a row folds: a / (horizon - d), 1 at most
    history   records read and appended: a + a of fused; deferred reads
              (horizon - d - 1) / 2 + a, at most its horizon
    records   B r (1 + a / n): written for all nodes, read along the path
    conv      windows of all layers, read and written
    kv        the context read, the path written

Logits and other activations are left out: a step that never wrote them would be right.

Flops are those of products with weights, two for a weight and a row that it meets; the
recurrence, attention's scores and norms are left out. A tree of many nodes on many rows
is bound by them.

On a mesh all figures are those of one device: its parts of the weights, parts that each
device has whole counted in full; its share of the experts, touched by the rows of its
part of the batch; states, records and KV of its rows and heads. What the devices
exchange is in no floor.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.qwen3_5 import random_weights, stored
from scripts.benching import step_mesh, step_program
from treewy_jax import commit as commit_lib
from treewy_jax import memory
from treewy_jax import tree as tree_lib


def of_step(
    subject: step_program.Subject,
    params: Any,
    accept_length: float,
    *,
    router: str = "uniform",
    activation: str = memory.ACTIVATION,
    mesh: step_mesh.Mesh = None,
) -> dict[str, int]:
    """Return bytes by part; `params` may be shapes, `activation` is their dtype.

    They are those of one device, where the parameters are spread over a mesh.
    """
    subject = step_mesh.share(subject, mesh)
    sizes, config = _by_kind(params), subject.config
    nodes, levels = subject.drafter.n_max, subject.path - 1
    loads = random_weights.expert_loads(config, router)
    head = sizes["embedding" if config.tie_word_embeddings else "head"]
    row = sizes["embedding"] // config.vocab_size
    rows = subject.batch * nodes

    def touched(tokens: int) -> float:
        return float(np.mean(1 - (1 - loads) ** tokens)) if config.is_moe else 0.0

    runs = _draft_rows(subject) if levels else []
    found = {
        "weights": sizes["dense"] + head + rows * row,
        "experts": round(sizes["experts"] * touched(rows)),
        "draft": levels * (sizes["draft"] + head + _draft_prefix(subject, activation))
        + round(sum(sizes["draft_experts"] * touched(run) for run in runs)),
    }
    found |= {
        name: round(subject.batch * size)
        for name, size in _of_row(subject, accept_length, activation).items()
    }
    return found | {"total": sum(found.values())}


def flops(
    subject: step_program.Subject, params: Any, *, mesh: step_mesh.Mesh = None
) -> int:
    """Return the operations of a step's products with weights; see above.

    Every node meets the dense weights, k of E experts and the output head. The draft
    head runs for the drafted nodes that have children and for the accepted path, and
    scores the former and the root.
    """
    subject = step_mesh.share(subject, mesh)
    sizes, config = _by_kind(params, _elements), subject.config
    drafting = [len(level) for level in getattr(subject.drafter, "levels", ())]
    rows = subject.batch * subject.drafter.n_max
    drafted = sum(_draft_rows(subject)) if drafting else 0
    scored = rows + subject.batch * sum(drafting)
    share = config.num_experts_per_tok / config.num_experts if config.is_moe else 0.0
    head = sizes["embedding" if config.tie_word_embeddings else "head"]
    met = rows * (sizes["dense"] + share * sizes["experts"]) + scored * head
    met += drafted * (sizes["draft"] + share * sizes["draft_experts"])
    return round(2 * met)


def _elements(leaf: Any) -> int:
    """Return the elements of a device's part of a matrix."""
    return step_mesh.shard_bytes(leaf) // leaf.dtype.itemsize if leaf.ndim > 1 else 0


def _by_kind(
    params: Any, size: Callable[[Any], int] = step_mesh.shard_bytes
) -> dict[str, int]:
    """Return the bytes of the parameters on a device, by what reads them."""
    kinds = ("embedding", "head", "dense", "experts", "draft", "draft_experts")
    found = dict.fromkeys(kinds, 0)
    slots = stored.slots(params)
    for slot, leaf in zip(slots, jax.tree.leaves(params), strict=True):
        path = slot.path
        kind = {"embed_tokens": "embedding", "lm_head": "head", "mtp": "draft"}.get(
            path[0], "dense"
        )
        if "experts" in path:
            kind = "draft_experts" if kind == "draft" else "experts"
        found[kind] += size(leaf)
    return found


def _draft_rows(subject: step_program.Subject) -> list[int]:
    """Return the rows of each run of the draft head: levels, then the accepted path."""
    levels = [len(level) for level in subject.drafter.levels[1:]]
    return [subject.batch * count for count in (*levels, subject.path)]


def _draft_prefix(subject: step_program.Subject, activation: str) -> int:
    shape = memory.Shape.from_config(subject.config)
    return subject.batch * memory.mtp_kv_bytes(shape, subject.context, activation)


def _of_row(subject, accept_length: float, activation: str) -> dict[str, float]:
    """Return the bytes of a row's state."""
    shape, lifecycle = memory.Shape.from_config(subject.config), subject.build.lifecycle
    nodes, scheme = subject.drafter.n_max, scheme_of(lifecycle)
    dtype = lifecycle.state_dtype
    records = memory.record_bytes(
        shape, nodes, scheme, state_dtype=dtype, activation_dtype=activation
    )
    # Of a raw row only the conv's channels need to move; the others are kept beside.
    beside = shape.gdn_layers * (shape.joint_columns - shape.conv_channels)
    records -= nodes * beside * jnp.dtype(activation).itemsize
    moves, history = _moves(subject, scheme, accept_length)
    record_dtype = getattr(lifecycle, "record_dtype", "float32")
    of_history = memory.history_bytes(shape, 1, record_dtype, activation)
    return {
        "state": moves * memory.state_bytes(shape, dtype),
        "history": history * of_history,
        "records": records * (1 + accept_length / nodes),
        "conv": 2 * memory.conv_bytes(shape, activation),
        "kv": memory.kv_bytes(shape, 1, activation) * (subject.context + accept_length),
    }


def _moves(subject, scheme: str, accept_length: float) -> tuple[float, float]:
    """Return the passes over a state, and the records of a history that are moved."""
    nodes = subject.drafter.n_max
    if scheme in ("store-all", "reconstruct"):
        return {"store-all": 1 + nodes, "reconstruct": 3}[scheme], 0
    if scheme == "fused":
        return 2, 2 * accept_length
    lifecycle = subject.build.lifecycle
    room = lifecycle.horizon - subject.path
    folds = min(1.0, accept_length / max(room, 1))
    held = min(lifecycle.horizon, room / 2 + accept_length)
    return 1 + folds, held + accept_length


def scheme_of(lifecycle: commit_lib.Lifecycle) -> str:
    """Return the name of a lifecycle."""
    kinds = commit_lib.LIFECYCLES.items()
    return next(name for name, kind in kinds if isinstance(lifecycle, kind))


def per_row(
    subject: step_program.Subject, activation: str, mesh: step_mesh.Mesh = None
) -> dict[str, int]:
    """Return the bytes that a row holds while it is verified, by `memory`'s formula.

    On a mesh, on each device that has the row.
    """
    subject = step_mesh.share(subject, mesh)
    lifecycle = subject.build.lifecycle
    parents = np.asarray(getattr(subject.drafter, "parent", [-1])).tolist()
    return memory.per_sequence(
        memory.Shape.from_config(subject.config),
        scheme_of(lifecycle),
        tree_lib.DraftTree.from_parents(parents),
        lifecycle.state_dtype,
        tokens=subject.capacity,
        activation_dtype=activation,
        horizon=getattr(lifecycle, "horizon", memory.HORIZON),
        record_dtype=getattr(lifecycle, "record_dtype", memory.RECORD_DTYPE),
    )
