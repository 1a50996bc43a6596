"""The workloads of every op: a new kernel is a module beside this and a line here."""

import importlib
from collections.abc import Iterable, Sequence

from scripts.workloads import base

# From an op to the module whose `cases()` lists its workloads; imported when asked for.
MODULES: dict[str, str] = {
    "attention_front": "scripts.workloads.attention_front",
    "chunk_prefill": "scripts.workloads.chunk_prefill",
    "decode": "scripts.workloads.decode",
    "grouped_matmul": "scripts.workloads.grouped_matmul",
    "store_all": "scripts.workloads.store_all",
    "tree_attention": "scripts.workloads.tree_attention",
    "commit": "scripts.workloads.commit",
    "gdn_front": "scripts.workloads.gdn_front",
    "history_append": "scripts.workloads.history_append",
    "history_verify": "scripts.workloads.history_verify",
    "residual_norm": "scripts.workloads.residual_norm",
    "tree_verify": "scripts.workloads.tree_verify",
}


def cases(
    ops: Sequence[str] | None = None, tags: Iterable[str] | None = None
) -> list[base.Case]:
    """Return the cases of some ops (None: all) that have one of `tags` (None: any).

    Raises ValueError for an op that has no workloads.
    """
    names = list(MODULES) if ops is None else ops
    for name in names:
        if name not in MODULES:
            raise ValueError(f"op is {name!r}; allowed: {', '.join(MODULES)}")
    found = [c for n in names for c in importlib.import_module(MODULES[n]).cases()]
    wanted = None if tags is None else frozenset(tags)
    return [case for case in found if wanted is None or case.tags & wanted]
