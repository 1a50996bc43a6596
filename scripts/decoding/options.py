"""The options of decode.py: one dataclass, whose docstrings are the help."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Literal

from scripts import command

PROG = "decode.py"
DEFAULT_PROMPT = (
    "Tell me a story about a rabbit who has a lantern and lives near the river."
)

Dtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class Options:
    """Writes text by verifying trees of drafted tokens, and shows what that saved."""

    tree: str = "3,3,3"
    """Children of each node, level by level; none verifies the newest token alone.
    chain3+leaf is a chain of 3 with the runner-up of its first token beside it,
    chain3+leaves with that of each. Or FILE.json[:NODES] of plan_tree.py."""
    model: str = "tiny"
    """The model that ships (tiny), or a Hugging Face folder of Qwen3.5."""
    random_weights: bool = False
    """Make a published size, such as qwen3.5-0.8b, with random weights; it has no
    tokenizer, so the prompt is --prompt-ids."""
    layers: int | None = None
    """First layers of a model with random weights, a multiple of 4; by default all."""
    prompt: str | None = None
    """What to answer, in the chat format if the tokenizer has one; else a story."""
    prompt_file: pathlib.Path | None = None
    """Read the prompt from a file; lines of --- part the prompts of a batch."""
    prompt_ids: str | None = None
    """The prompt as token ids, such as 1,2,3; taken as it is."""
    raw: bool = False
    """Continue the prompt as plain text, without the chat format."""
    commit: str = "reconstruct"
    """reconstruct rebuilds the accepted state; store-all keeps one for every node;
    fused writes it while it verifies the next tree; deferred every few steps only."""
    horizon: int = 16
    """Accepted tokens that deferred keeps beside a state at most."""
    record_dtype: Dtype = "float32"
    """Storage of accepted keys and pseudo-values in fused and deferred."""
    max_new_tokens: int = 128
    """Tokens to write at most, for each prompt."""
    temperature: float = 0.0
    """0 takes the most probable token; above 0 tokens are sampled."""
    top_k: int = 0
    """Sample among the k most probable tokens; 0: among all."""
    top_p: float = 1.0
    """Sample among the fewest tokens that have this probability together."""
    min_p: float = 0.0
    """Sample among tokens at least this times as probable as the best; 0: among all."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that occurred before (prompt included) get less probable."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that occurred before, the prompt included."""
    accept: Literal["match", "greedy", "rejection", "block", "traversal"] = "match"
    """Which drafts join the text; the last three draw the drafts of mtp or
    external, and block takes chains only. All keep the distribution of the model."""
    seed: int = 0
    """Of the samples: a draw depends on it, the prompt's number and the position."""
    stream: bool = False
    """Print text as it appears, some steps at a time."""
    dtype: Dtype = "float32"
    """Of weights and activations. Equality with plain decoding is exact in float32."""
    state_dtype: Dtype | None = None
    """Storage of the recurrent states; by default what the model's config says."""
    impl: str = "auto"
    """Implementation of verify; auto takes the fastest that runs here."""
    drafter: Literal["mtp", "dynamic", "ngram", "suffix", "external"] = "mtp"
    """mtp: the model's head. dynamic: the same, its most probable nodes. ngram: earlier
    text, a chain a node of level one; suffix: all of it in one tree. external: the
    model of --draft-model. Trees are as deep as --tree."""
    nodes: int | None = None
    """Nodes of the trees of dynamic and suffix, the root included; by default as many
    as --tree has."""
    draft_model: str | None = None
    """The model that external drafts with: tiny, or a folder, of the same tokens."""
    n_max: int = 64
    """Largest number of nodes that a tree may have, the root included."""
    mesh: str | None = None
    """Devices to spread the model over, such as tensor=8 or data=2,tensor=4: rows over
    data, heads over tensor, experts over expert and tensor. By default one device."""
    distributed: str | None = None
    """Run --mesh over the devices of several processes, each started alike with
    HOST:PORT,PROCESSES,NUMBER: where the first listens, how many, which one from 0. Or
    auto, where the cluster tells. The first one prints and writes files."""
    compare: bool = False
    """Decode without drafts as well and report the first difference, if any."""
    json: pathlib.Path | None = None
    """Write the result to this file."""
    plot: pathlib.Path | None = None
    """Draw accept lengths and memory into this file (needs matplotlib)."""


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; `--help` prints and exits.

    Raises:
        ValueError: an unknown option, a value of the wrong type, or options that
            exclude each other; one line.
    """
    options = command.parse(Options, PROG, arguments)
    _check(options)
    return options


def _check(options: Options) -> None:
    """Refuse what neither the parser nor the library refuses."""
    names = ("prompt", "prompt_file", "prompt_ids")
    given = [name for name in names if getattr(options, name) is not None]
    if len(given) > 1:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"{flags}: only one of them is allowed")
    if options.raw and options.prompt_ids is not None:
        raise ValueError("--raw and --prompt-ids: ids are always taken as they are")
    if options.random_weights and options.prompt_ids is None:
        raise ValueError(
            "--random-weights: a model without files has no tokenizer; only a prompt "
            "of --prompt-ids is allowed"
        )
    if options.layers is not None and not options.random_weights:
        raise ValueError("--layers: only allowed with --random-weights")
    _check_drafter(options)
    if options.distributed is not None and options.mesh is None:
        raise ValueError("--distributed: needs --mesh, over the devices of all")
    if options.distributed is not None and options.stream:
        raise ValueError("--distributed and --stream: only one of them is allowed")
    if options.compare and options.temperature > 0:
        if options.accept in ("rejection", "block", "traversal"):
            raise ValueError(
                f"--compare and --accept {options.accept}: with a temperature only the "
                "distribution equals that of plain decoding; match is allowed, or "
                "temperature 0"
            )
    if options.n_max < 1:
        raise ValueError(f"n_max={options.n_max}: must be 1 or more")
    if not 0 <= options.seed < 2**32:
        raise ValueError(f"seed={options.seed}: must lie in [0, 2**32)")


def _check_drafter(options: Options) -> None:
    """Refuse options of other drafters than the one that is named."""
    name, nodes = options.drafter, options.nodes
    if nodes is not None and name not in ("dynamic", "suffix"):
        raise ValueError(
            f"--nodes: only allowed with --drafter dynamic or suffix, not {name}"
        )
    if nodes is not None and not 2 <= nodes <= options.n_max:
        raise ValueError(
            f"--nodes {nodes}: must lie between 2 and n_max={options.n_max}"
        )
    if options.draft_model is not None and name != "external":
        raise ValueError(
            f"--draft-model: only allowed with --drafter external, not {name}"
        )
    if options.draft_model is None and name == "external":
        raise ValueError("--drafter external: needs --draft-model, tiny or a folder")
