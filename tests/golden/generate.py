"""Builds the golden checkpoints and arrays of this folder with Hugging Face models.

    python tests/golden/generate.py           # write tiny/ from its config.json files
    python tests/golden/generate.py --check   # run the models, compare with tiny/

Input is `tiny/<variant>/config.json`; the weights are drawn from fixed seeds. The tests
read the committed files only, so torch 2.13 and transformers 5.24 (Python >= 3.10) are
needed here and nowhere else. What each array holds: README.md beside this file.
"""

import argparse
import json

import arrays
import numpy as np
import reference
import torch
import transformers
from safetensors import torch as safetensors_torch

# Relative RMS error; processors differ in logarithms, sums and bf16 products.
WEIGHTS_BOUND, FP32_BOUND, BF16_BOUND = 1e-7, 3e-5, 5e-2


def published_config(fields):
    """The nested config of the published checkpoints around the flat one."""
    moe = "num_experts" in fields
    family, kind = ("Qwen3_5Moe", "qwen3_5_moe") if moe else ("Qwen3_5", "qwen3_5")
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32}
    vision |= {"out_hidden_size": 64, "patch_size": 4, "spatial_merge_size": 2}
    vision |= {"temporal_patch_size": 2, "num_position_embeddings": 16}
    tokens = ("image_token", "video_token", "vision_start_token", "vision_end_token")
    return {
        "architectures": [f"{family}ForConditionalGeneration"],
        "model_type": kind,
        "text_config": fields | {"dtype": "bfloat16", "full_attention_interval": 4},
        "vision_config": {"model_type": kind, **vision},
        **{f"{token}_id": 250 + i for i, token in enumerate(tokens)},
        "tie_word_embeddings": fields["tie_word_embeddings"],
    }


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1))


def write_shards(folder, weights):
    """Writes the weights in two shards and their index."""
    names = sorted(weights)
    half, weight_map = len(names) // 2, {}
    for number, part in enumerate((names[:half], names[half:]), 1):
        file = f"model.safetensors-{number:05d}-of-00002.safetensors"
        save_weights(folder / file, {name: weights[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    size = sum(weight.numel() * weight.element_size() for weight in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)


def save_weights(path, weights):
    safetensors_torch.save_file(weights, path, metadata={"format": "pt"})


def save_arrays(path, tensors):
    np.savez_compressed(path, **{name: t.numpy() for name, t in tensors.items()})


def write(variant, target, head):
    """Writes everything below tiny/<variant> but its config.json."""
    folder = reference.FOLDER / variant
    published = folder / "published"
    published.mkdir(exist_ok=True)
    flat = reference.flat_weights(target, head)
    golden = arrays.golden(target, head, arrays.TOKEN_SEED[variant])
    save_weights(folder / "model.safetensors", flat)
    save_arrays(folder / "golden.npz", golden)
    write_json(
        published / "config.json", published_config(reference.read_config(variant))
    )
    write_shards(published, reference.published_weights(flat))
    save_arrays(
        published / "golden.npz", arrays.published_golden(published, golden["ids"])
    )


def relative_error(new, committed):
    """RMS of the difference over RMS; infinite for another name, shape or dtype."""
    if new is None or committed is None:
        return float("inf")
    if new.shape != committed.shape or new.dtype != committed.dtype:
        return float("inf")
    difference, committed = (new.double() - committed.double()), committed.double()
    return (difference.norm() / committed.norm().clamp(min=1e-30)).item()


def load_arrays(path):
    with np.load(path) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


def agree(what, new, committed, bound):
    """Prints the largest error of a group of tensors; returns whether it is allowed."""
    errors = {
        name: relative_error(new.get(name), committed.get(name))
        for name in sorted(new.keys() | committed.keys())
    }
    name = max(errors, key=errors.get)
    good = errors[name] <= bound
    print(f"{what}: {errors[name]:.1e} ({name}) {'ok' if good else 'DIFFERS'}")
    return good


def check(variant, target, head):
    """Compares with the committed files; returns whether all of them agree."""
    folder = reference.FOLDER / variant
    published, flat = folder / "published", reference.flat_weights(target, head)
    config = json.loads((published / "config.json").read_text())
    good = config == published_config(reference.read_config(variant))
    print(f"{variant} published config: {'ok' if good else 'DIFFERS'}")
    committed = safetensors_torch.load_file(folder / "model.safetensors")
    good &= agree(f"{variant} weights", flat, committed, WEIGHTS_BOUND)
    committed = {}
    for path in sorted(published.glob("*.safetensors")):
        committed |= safetensors_torch.load_file(path)
    new = reference.published_weights(flat)
    good &= agree(f"{variant} published weights", new, committed, WEIGHTS_BOUND)
    new = arrays.golden(target, head, arrays.TOKEN_SEED[variant])
    committed = load_arrays(folder / "golden.npz")
    good &= agree(f"{variant} arrays", new, committed, FP32_BOUND)
    new = arrays.published_golden(published, new["ids"])
    committed = load_arrays(published / "golden.npz")
    for name, bound in {"fp32": FP32_BOUND, "bf16": BF16_BOUND}.items():
        pair = ({"logits": array[f"logits_{name}"]} for array in (new, committed))
        good &= agree(f"{variant} published {name}", *pair, bound)
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(2)
    good = True
    with torch.no_grad():
        for variant in reference.CLASSES:
            target, head = reference.build(variant)
            if options.check:
                good &= check(variant, target, head)
            else:
                write(variant, target, head)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
