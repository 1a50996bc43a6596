"""Block sizes of the verification behind a history: those of tree_verify, own table."""

import pathlib

from pallas_kernels import tuning
from pallas_kernels.history_verify import spec as specs
from pallas_kernels.tree_verify import config as verify_config

Config = verify_config.Config
TUNED = pathlib.Path(__file__).parent / "tuned"


def choose(
    spec: specs.Spec, platform: str, device_kind: str, explicit: Config | None = None
) -> Config:
    """Return the explicit configuration, else the tuned one, else tree_verify's guess.

    Raises ValueError where the explicit one does not divide the call evenly.
    """
    if explicit is None:
        found = tuning.lookup(TUNED, device_kind, spec)
        if found is not None:
            return verify_config.fit(spec, Config(**found))
        explicit = verify_config.heuristic(spec, platform)
    return verify_config.choose(spec, platform, device_kind, explicit)
