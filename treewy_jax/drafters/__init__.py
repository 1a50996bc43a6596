"""Drafters: each proposes a tree of tokens below the root, by its own means.

| module     | where the tokens come from                                   |
|------------|--------------------------------------------------------------|
| `mtp`      | the model's multi-token-prediction head, in a given topology |
| `dynamic`  | the same head; the topology follows its probabilities        |
| `external` | another model of the same vocabulary                         |
| `ngram`    | what followed the last tokens earlier in the text, as chains |
| `suffix`   | the same, all of it merged into one tree                     |
| `scripted` | a given text, with mistakes where a test wants them          |
| `nothing`  | nowhere: the root alone, which is plain decoding             |

Shared by them: `mtp_head` runs the head, `text` keeps the text, `candidates` makes a
tree of the best nodes, `gumbel` draws. The trees of `mtp` and `external` can be drawn,
and then any rule of acceptance takes them; all others are fixed by their context, for
which `match` accepts the most that is possible.
"""

from treewy_jax.drafters.dynamic import DynamicDrafter as DynamicDrafter
from treewy_jax.drafters.external import ExternalDrafter as ExternalDrafter
from treewy_jax.drafters.mtp import MTPDrafter as MTPDrafter
from treewy_jax.drafters.ngram import NgramDrafter as NgramDrafter
from treewy_jax.drafters.nothing import NoDrafter as NoDrafter
from treewy_jax.drafters.protocol import BoundDrafter as BoundDrafter
from treewy_jax.drafters.protocol import Drafter as Drafter
from treewy_jax.drafters.protocol import DraftHead as DraftHead
from treewy_jax.drafters.protocol import SampledDrafter as SampledDrafter
from treewy_jax.drafters.scripted import ScriptedDrafter as ScriptedDrafter
from treewy_jax.drafters.suffix import SuffixDrafter as SuffixDrafter
