"""Writes text by verifying trees of drafted tokens, and shows what that saved.

    python scripts/decode.py --prompt "Tell me a story about a lantern." --stream
    python scripts/decode.py --tree 1,1,1 --compare --json result.json
    python scripts/decode.py --model FOLDER --prompt-ids 1,2,3 --commit store-all
    python scripts/decode.py --drafter dynamic --tree chain5 --nodes 16
    python scripts/decode.py --drafter external --draft-model tiny --tree 1,1,1

Exit status: 0, or 2 for a wrong argument, with one line on stderr that says what is
wrong and what is allowed; nothing is computed or written then.
"""

import sys
import time
from collections.abc import Sequence

import jax
from rich import console as rich_console

from scripts import command
from scripts.decoding import (
    compare,
    options,
    outputs,
    progress,
    report,
    request,
    result,
    text,
)
from treewy_jax import drafters, mesh
from treewy_jax import generate as generation_lib


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    try:
        chosen = options.parse(arguments)
        if chosen.distributed is not None:
            mesh.join(chosen.distributed)
        outputs.check(chosen)
        asked = request.prepare(chosen)
    except (ValueError, NotImplementedError, OSError) as error:
        return command.refuse(options.PROG, error)
    found = decode(asked, chosen)
    if jax.process_index() > 0:
        return 0
    report.show(found, asked, chosen, rich_console.Console(highlight=False))
    outputs.write(found, asked, chosen)
    return 0


def decode(asked: request.Request, chosen: options.Options) -> result.Result:
    """Decode, and once more without drafts where they are to be compared."""
    with progress.Spinner() as spinner:
        spinner.say("compiling and decoding")
        stream = text.Printer(asked.model.tokenizer, spinner) if chosen.stream else None
        drafted = timed(asked, asked.drafter, chosen, stream)
        if stream:
            stream.finish()
        if not chosen.compare:
            return result.Result(*drafted)
        spinner.say("compiling and decoding without drafts, to compare")
        plain, seconds = timed(asked, drafters.NoDrafter(), chosen)
        differences = compare.differences(asked, drafted[0].token_ids, plain.token_ids)
        return result.Result(*drafted, result.Plain(plain, seconds, differences))


def timed(
    asked: request.Request,
    drafter: drafters.Drafter,
    chosen: options.Options,
    on_tokens: text.Printer | None = None,
) -> tuple[generation_lib.Generation, float]:
    """Generate; returns what was written and the seconds, compilation included."""
    begin = time.perf_counter()
    generation = generation_lib.generate(
        asked.model,
        asked.prompts,
        tree=asked.tree,
        drafter=drafter,
        commit=asked.lifecycle,
        max_new_tokens=chosen.max_new_tokens,
        sampling=asked.sampling,
        accept=chosen.accept,
        seed=chosen.seed,
        on_tokens=on_tokens,
    )
    return generation, time.perf_counter() - begin


if __name__ == "__main__":
    # A terminal of a narrow encoding shows escapes rather than ending the program.
    sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main())
