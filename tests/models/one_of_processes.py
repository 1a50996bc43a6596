"""One of several processes that decode together: ADDRESS PROCESSES NUMBER ROWS."""

import json
import sys

import jax

import models
from tests.models import golden
from treewy_jax import generate, mesh


def main(address: str, processes: str, number: str, rows: str) -> None:
    """Decode on all devices of all processes, and print the tokens."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, int(processes), int(number))
    spread = mesh.make("data=2,tensor=2")
    folder = golden.FOLDER / "dense"
    found = generate.generate(
        models.load(folder, dtype="float32", mesh=spread),
        json.loads(rows),
        tree="2",
        max_new_tokens=6,
        eos_token_ids=(),
    )
    print(json.dumps(found.token_ids))


if __name__ == "__main__":
    main(*sys.argv[1:])
