"""Plan a draft tree: which topology accepts most, and which is fastest.

| module  | question                                                            |
|---------|---------------------------------------------------------------------|
| `trees` | from measured acceptance by rank and depth, the best tree of a size |
| `times` | from measured step times, the tree with most tokens a second        |

Plain NumPy on the host: a plan is made before anything is compiled.
"""

from treewy_jax.planning.times import Choice as Choice
from treewy_jax.planning.times import StepTimes as StepTimes
from treewy_jax.planning.times import candidates as candidates
from treewy_jax.planning.times import choice as choice
from treewy_jax.planning.times import fastest as fastest
from treewy_jax.planning.trees import ByDepth as ByDepth
from treewy_jax.planning.trees import Rates as Rates
from treewy_jax.planning.trees import accept_length as accept_length
from treewy_jax.planning.trees import depth_of as depth_of
from treewy_jax.planning.trees import expected as expected
from treewy_jax.planning.trees import frontier as frontier
from treewy_jax.planning.trees import optimal as optimal
from treewy_jax.planning.trees import reach as reach
