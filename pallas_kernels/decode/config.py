"""Block sizes of the decoded token: explicit, else tuned, else heuristic."""

import functools
import pathlib

from pallas_kernels import state_rows

TUNED = pathlib.Path(__file__).parent / "tuned"

Config = state_rows.Config
heuristic = state_rows.heuristic
choose = functools.partial(state_rows.choose, TUNED)
