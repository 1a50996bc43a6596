"""Drafters: each proposes a tree of tokens below the root, by its own means.

| module     | where the tokens come from                                  |
|------------|-------------------------------------------------------------|
| `mtp`      | the model's multi-token-prediction head, level by level      |
| `ngram`    | what followed the last tokens earlier in the same text       |
| `scripted` | a given text, with mistakes where a test wants them          |
| `nothing`  | nowhere: the root alone, which is plain decoding             |
"""

from treewy_jax.drafters.mtp import MTPDrafter as MTPDrafter
from treewy_jax.drafters.ngram import NgramDrafter as NgramDrafter
from treewy_jax.drafters.nothing import NoDrafter as NoDrafter
from treewy_jax.drafters.protocol import BoundDrafter as BoundDrafter
from treewy_jax.drafters.protocol import Drafter as Drafter
from treewy_jax.drafters.protocol import DraftHead as DraftHead
from treewy_jax.drafters.protocol import SampledDrafter as SampledDrafter
from treewy_jax.drafters.scripted import ScriptedDrafter as ScriptedDrafter
