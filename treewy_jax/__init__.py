"""TreeWY in JAX: verify a tree of drafted tokens while holding one state.

| what you want                         | where it is                                  |
|---------------------------------------|----------------------------------------------|
| write text with a model               | `generate.generate(model, prompts, tree=...)`|
| verify a tree, rebuild one state      | `verify.verify(...)`, `reconstruct(...)`     |
| build a tree                          | `DraftTree.from_widths((3, 3, 3))`           |
| the oracle                            | `recurrent_tree(...)`, `recurrence`          |
| the loop, one step of it              | `loop.run`, `loop.step`                      |
| what is kept until commit             | `lifecycle`, `commit`, `deferred`, `cache`   |
| verify behind a short history         | `history`                                    |
| bytes by formula                      | `memory`                                     |
"""

from treewy_jax.accept import Accepted as Accepted
from treewy_jax.generate import Generation as Generation
from treewy_jax.recurrence import recurrent_tree as recurrent_tree
from treewy_jax.sampling import Sampling as Sampling
from treewy_jax.tree import DraftTree as DraftTree
from treewy_jax.verify import Verified as Verified
from treewy_jax.verify import reconstruct as reconstruct
