"""Models that decode through `treewy_jax`; `load` is the way in."""

from models.checkpoints import load

__all__ = ["load"]
