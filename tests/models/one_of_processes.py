"""One of several processes that decode together: ADDRESS PROCESSES NUMBER ROWS."""

import json
import sys

import models
from tests.models import golden
from treewy_jax import generate, mesh


def main(address: str, processes: str, number: str, rows: str) -> None:
    """Decode on all devices of all processes, and print the tokens."""
    mesh.join(f"{address},{processes},{number}")
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
