"""Train a small Qwen3.5-style hybrid with its MTP head, from a folder of tokens.

    python scripts/train.py --data PACK --out RUN            a run from the beginning
    python scripts/train.py --data PACK --out RUN --resume   the rest of it, exactly
    python scripts/train.py --data PACK --out RUN --profile  where a step's time goes

RUN gets log.jsonl, checkpoints/ (the whole training state) and model/ (the weights in
the published Hugging Face layout, bfloat16).
"""

import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from models import checkpoints as models_checkpoints
from models.qwen3_5 import config as config_lib
from models.qwen3_5 import weights
from scripts import command
from scripts.training import (
    checkpoint,
    evaluate,
    loop,
    optimizer,
    profile,
    step,
    trainable,
)
from scripts.training import data as data_lib

PROG = "train.py"
# 14.8 M parameters; real head sizes, so that the kernels of the large models apply.
TINY = config_lib.Qwen3_5Config(
    vocab_size=8192,
    hidden_size=320,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=128,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
    intermediate_size=704,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    mtp_num_hidden_layers=1,
    eos_token_ids=(8190, 8188),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Train the tiny model.

    Attributes:
        data: folder in the pack format (meta.json, train.u16[.xz], val.u16[.xz]).
        out: folder for the log, the checkpoints and the model.
        tokens: length of the schedule, in training tokens.
        steps: length of the schedule in steps, instead of `tokens`.
        resume: continue the run in `out`; its schedule must be the same.
        minutes: stop, checkpointed, when this much time has passed since the start.
        seed: of the parameters and of the batches.
        batch: windows a step.
        length: tokens a window.
        learning_rate: at the end of the warm-up.
        tail: last share of the steps, which see tasks in 60 % of the windows.
        init: start from the weights of this folder (or "tiny").
        mtp_only: train the MTP head alone.
        mtp_weight: weight of the MTP loss.
        mtp_labels: what a draft should be, the text or the target's own choice.
        dtype: compute type; parameters and states are float32 in any case.
        cudnn: causal attention by the vendor's fused kernel (GPU, bfloat16).
        remat: recompute each block in the backward pass, for memory.
        config: config.json of another model size; the vocabulary must be the pack's.
        tokenizer: tokenizer.json to put beside the weights.
        log_every: steps between log lines.
        evaluate_every: steps between validations.
        save_every: steps between checkpoints.
        validation_windows: windows of each source in a validation.
        profile: measure the step and its parts, train nothing.
    """

    data: pathlib.Path
    out: pathlib.Path
    tokens: int = 370_000_000
    steps: int | None = None
    resume: bool = False
    minutes: float | None = None
    seed: int = 0
    batch: int = 64
    length: int = 1024
    learning_rate: float = 3e-3
    tail: float = 0.15
    init: str | None = None
    mtp_only: bool = False
    mtp_weight: float = 0.3
    mtp_labels: Literal["text", "target"] = "text"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    cudnn: bool = False
    remat: bool = False
    config: pathlib.Path | None = None
    tokenizer: pathlib.Path | None = None
    log_every: int = 20
    evaluate_every: int = 1000
    save_every: int = 2000
    validation_windows: int = 48
    profile: bool = False

    def check(self) -> None:
        """Raise a ValueError that names the first option out of its range."""
        counts = ("tokens", "steps", "batch", "length", "log_every", "evaluate_every")
        for name in (*counts, "save_every", "validation_windows"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"{name} {count}: expected at least 1")
        for name in ("config", "tokenizer"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise ValueError(f"{name} {str(path)!r}: no such file")
        if self.length < 8:
            raise ValueError(f"length {self.length}: expected at least 8")
        if not 0 <= self.tail <= 1:
            raise ValueError(f"tail {self.tail}: expected a share between 0 and 1")
        if self.resume and self.init:
            raise ValueError("init: a resumed run has its weights already")
        if self.resume and not (self.out / "checkpoints").is_dir():
            raise ValueError(f"resume: no checkpoint in {str(self.out)!r}")

    @property
    def total_steps(self) -> int:
        """Length of the schedule."""
        return self.steps or max(1, self.tokens // (self.batch * self.length))

    @property
    def goal(self) -> step.Objective:
        """What the step minimises."""
        return step.Objective(
            mtp_weight=self.mtp_weight,
            mtp_only=self.mtp_only,
            mtp_labels=self.mtp_labels,
            dtype=jnp.dtype(self.dtype),
        )

    def recipe(self, pack: data_lib.Pack) -> dict[str, Any]:
        """What a resumed run must share with the run that it continues."""
        names = ("batch", "length", "seed", "learning_rate", "tail", "mtp_only")
        names += ("mtp_weight", "mtp_labels", "dtype")
        shared = {name: getattr(self, name) for name in names}
        return shared | {"steps": self.total_steps, "train_tokens": len(pack.train)}


def run(options: Options, started: float | None = None) -> dict[str, Any]:
    """Train (or profile) as told; returns the last validation by source.

    Raises:
        ValueError: options, data, or a checkpoint that do not fit together.
    """
    started = time.monotonic() if started is None else started
    options.check()
    pack = data_lib.read_pack(options.data)
    window = options.length + step.DEPTHS + 1
    sampler = data_lib.Sampler(
        pack, batch=options.batch, window=window, seed=options.seed
    )
    config, params = _model(options, pack)
    options.out.mkdir(parents=True, exist_ok=True)
    transform = optimizer.make(options.learning_rate, options.total_steps)
    if options.profile:
        return _profile(options, config, params, transform, sampler)
    return _train(options, pack, config, params, transform, sampler, started)


def _train(options, pack, config, params, transform, sampler, started):
    structure = trainable.structure(
        config,
        compute_dtype=options.goal.dtype,
        cudnn=options.cudnn,
        remat=options.remat,
    )
    state = step.create_state(params, transform, options.mtp_only)
    saved = checkpoint.Checkpoints(options.out / "checkpoints", options.recipe(pack))
    if options.resume:
        state = saved.restore(state)
    log = loop.Log(options.out / "log.jsonl")
    log.write(
        event="start",
        step=int(state.step),
        parameters=trainable.count(params),
        device=jax.devices()[0].device_kind,
        jax=jax.__version__,
        recipe=options.recipe(pack),
    )
    measure = evaluate.make_evaluate(structure, options.goal, min(16, options.batch))
    windows = data_lib.validation_windows(
        pack, options.length + step.DEPTHS + 1, options.validation_windows
    )
    results: dict[str, Any] = {}

    def validate(state: step.State) -> dict[str, dict]:
        results.update(measure(state.all_params, windows))
        return results

    train = step.make_step(structure, transform, options.goal)
    plan = _plan(options, started)
    state, finished = loop.run(state, train, sampler, validate, saved, log, plan)
    saved.close()
    _write_model(options, config, structure, state)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    log.write(event="end", step=int(state.step), finished=finished, peak_bytes=peak)
    _show(results, int(state.step), finished)
    return results


def _plan(options: Options, started: float) -> loop.Plan:
    total, minutes = options.total_steps, options.minutes
    return loop.Plan(
        total=total,
        tail=total - round(options.tail * total),
        log=options.log_every,
        evaluate=options.evaluate_every,
        save=options.save_every,
        deadline=None if minutes is None else started + 60 * minutes,
    )


def _model(options: Options, pack: data_lib.Pack):
    """The configuration and the float32 parameters to start from."""
    if options.init:
        loaded = models_checkpoints.load(options.init, dtype="float32")
        _check_config(loaded.config, pack)
        params = trainable.flatten(loaded.params)
        return loaded.config, {k: jnp.asarray(v) for k, v in params.items()}
    config = TINY
    if options.config:
        raw = json.loads(options.config.read_text())
        config = config_lib.Qwen3_5Config.from_hf(raw)
    _check_config(config, pack)
    return config, trainable.initialise(config, options.seed)


def _check_config(config: config_lib.Qwen3_5Config, pack: data_lib.Pack) -> None:
    if config.vocab_size != pack.vocab_size:
        raise ValueError(
            f"data has {pack.vocab_size} token ids; the model has {config.vocab_size}"
        )
    if not config.mtp_num_hidden_layers:
        raise ValueError("config mtp_num_hidden_layers 0: expected an MTP head")


def _write_model(options, config, structure, state) -> None:
    """Write the weights; the tokenizer is that of the folder started from, or ours."""
    tokenizer = options.tokenizer
    if tokenizer is None and config.vocab_size == TINY.vocab_size:
        tokenizer = pathlib.Path(__file__).parent / "data" / "tokenizer.json"
    weights.save_checkpoint(
        structure.state(state.all_params),
        config,
        options.out / "model",
        tokenizer=tokenizer,
    )


def _profile(options, config, params, transform, sampler) -> dict[str, Any]:
    windows = sampler.batch(0, tail=False)
    parts = profile.profile_parts(
        config, options.batch, options.length, options.goal.dtype
    )
    steps = profile.profile_steps(config, params, transform, options.goal, windows)
    device = jax.devices()[0]
    results = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "batch": options.batch,
        "length": options.length,
        "parameters": trainable.count(params),
        "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "check": profile.check(options.goal.dtype),
        "parts": parts,
        "steps": steps,
    }
    (options.out / "profile.json").write_text(json.dumps(results, indent=1))
    profile.show(results)
    return results


def _show(results: dict[str, dict], done: int, finished: bool) -> None:
    print(f"step {done}: {'finished' if finished else 'stopped by the clock'}")
    for source, values in results.items():
        print(source, *(f"{name}={value:.3f}" for name, value in values.items()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; wrong options give one line and exit status 2."""
    started = time.monotonic()
    try:
        run(command.parse(Options, PROG, arguments), started)
    except (ValueError, NotImplementedError) as error:
        return command.refuse(PROG, error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
