"""Orbax checkpoints of the whole training state, and what they may be resumed with."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from scripts.training import step

RECIPE = "recipe.json"


class Checkpoints:
    """The newest checkpoint of a run, under `folder`, beside the recipe it is of."""

    def __init__(self, folder: pathlib.Path, recipe: dict[str, Any]):
        self._folder, self._recipe = pathlib.Path(folder).absolute(), recipe
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(max_to_keep=1, create=True),
        )

    def save(self, state: step.State) -> None:
        """Write `state` and wait until it is whole on disk."""
        name = int(state.step)
        if self._manager.latest_step() == name:
            return
        (self._folder / RECIPE).write_text(json.dumps(self._recipe, indent=1))
        self._manager.save(name, args=ocp.args.StandardSave(state._asdict()))
        self._manager.wait_until_finished()

    def restore(self, like: step.State) -> step.State:
        """Return the newest state, of `like`'s shapes.

        Raises:
            ValueError: there is none, or it belongs to another recipe.
        """
        newest = self._manager.latest_step()
        if newest is None:
            raise ValueError(f"resume: no checkpoint in {str(self._folder)!r}")
        saved = json.loads((self._folder / RECIPE).read_text())
        for name, value in self._recipe.items():
            if saved.get(name) != value:
                raise ValueError(
                    f"resume: {name} is {value}; the checkpoint's is {saved.get(name)}"
                )
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like._asdict())
        tree = self._manager.restore(newest, args=ocp.args.StandardRestore(abstract))
        # Through the host: restored arrays are pinned to a device, which would
        # compile the step a second time.
        return step.State(**jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree))

    def close(self) -> None:
        """Release the manager's threads."""
        self._manager.close()
