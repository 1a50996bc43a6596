"""The golden arrays: what the models say and hold, by name (see README.md)."""

import copy

import torch
import transformers

TOKEN_SEED = {"dense": 11, "moe": 9}  # greedy continuations without near-ties
PREFIX, LENGTH, NEW_TOKENS, CHAIN = 70, 80, 48, 4


def new_cache(config):
    return transformers.DynamicCache(config=config)


def run(target, ids, cache=None, **options):
    return target(input_ids=ids, cache=cache, use_cache=cache is not None, **options)


def states(cache, prefix):
    """Copies the cache: conv and rec of GDN layers, k and v of attention layers."""
    arrays = {}
    for i, layer in enumerate(cache.layers):
        if hasattr(layer, "recurrent_states"):
            part = {"conv": layer.conv_states[0], "rec": layer.recurrent_states[0]}
        else:
            part = {"k": layer.keys, "v": layer.values}
        arrays |= {f"{prefix}.{name}.{i}": a.clone() for name, a in part.items()}
    return arrays


def target_arrays(target, ids, batch_ids):
    """One forward, prefill and single steps, two segments, a batch of two."""
    full = run(target, ids, output_hidden_states=True)
    arrays = {"ids": ids, "logits": full.logits}
    arrays |= {f"hidden.{i}": hidden for i, hidden in enumerate(full.hidden_states)}
    cache = new_cache(target.config)
    prefill = run(target, ids[:, :PREFIX], cache, output_hidden_states=True)
    arrays |= states(cache, "pre")
    after_prefix = copy.deepcopy(cache)
    steps = [
        run(target, ids[:, t : t + 1], cache).logits for t in range(PREFIX, LENGTH)
    ]
    arrays |= {"dec.logits": torch.cat(steps, 1), **states(cache, "dec")}
    cache, cut = new_cache(target.config), 33
    segments = [ids[:, :cut], ids[:, cut:PREFIX]]
    logits = [run(target, segment, cache).logits for segment in segments]
    arrays["seg.logits"] = torch.cat(logits, 1)
    arrays |= {"bids": batch_ids, "b.logits": run(target, batch_ids).logits}
    return arrays, prefill, after_prefix


def mtp_arrays(head, ids, hidden, next_token):
    """The head over the pairs (x_{t+1}, h_t), then a greedy chain from the last one."""
    cache = new_cache(head.config)
    positions = torch.arange(PREFIX)[None]
    logits, output = head(ids[:, 1:PREFIX], hidden[:, :-1], positions[:, :-1], cache)
    arrays = {"mtp.logits": logits, "mtp.hidden": output}
    token, feedback, position = next_token, hidden[:, -1:], positions[:, -1:]
    chain_ids, chain_logits = [token], []
    for _ in range(CHAIN):
        logits, feedback = head(token, feedback, position, cache)
        token, position = logits[:, -1].argmax(-1, keepdim=True), position + 1
        chain_ids.append(token)
        chain_logits.append(logits)
    arrays["mtp.chain_ids"] = torch.cat(chain_ids, 1)
    arrays["mtp.chain_logits"] = torch.cat(chain_logits, 1)
    return arrays


def continuation_arrays(target, logits, cache):
    """Greedy tokens after the prefix and the top-2 logit gap behind each of them."""
    ids, gaps = [], []
    for _ in range(NEW_TOKENS):
        best = logits[0, -1].topk(2)
        ids.append(best.indices[:1])
        gaps.append(best.values[0] - best.values[1])
        logits = run(target, ids[-1][None], cache).logits
    return {"gen.ids": torch.cat(ids)[None], "gen.gap": torch.stack(gaps)}


def tree_paths(widths):
    """Preorder list of paths; a path holds the node indices down to its node."""
    paths = []

    def grow(path, depth):
        if depth == len(widths):
            return
        for _ in range(widths[depth]):
            child = (*path, len(paths))
            paths.append(child)
            grow(child, depth + 1)

    grow((), 0)
    return paths


def tree_arrays(target, ids, after_prefix):
    """Logits and states after each of 14 nodes, every path run as a plain chain."""
    paths, logits, node_states = tree_paths((2, 2, 2)), [], []
    for path in paths:
        cache = copy.deepcopy(after_prefix)
        for node in path:
            output = run(target, ids[node].view(1, 1), cache)
        logits.append(output.logits[0, -1])
        node_states.append(states(cache, "tree"))
    recurrent = [n for n in node_states[0] if n.split(".")[1] in ("rec", "conv")]
    return {
        "tree.parents": torch.tensor([([-1, *path])[-2] for path in paths]),
        "tree.depth": torch.tensor([len(path) - 1 for path in paths]),
        "tree.ids": ids,
        "tree.logits": torch.stack(logits),
    } | {name: torch.cat([state[name] for state in node_states]) for name in recurrent}


def golden(target, head, seed):
    """All arrays of golden.npz, by name."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, LENGTH), (2, 20), (14,)]
    vocab = target.config.vocab_size
    ids, batch_ids, tree_ids = (
        torch.randint(0, vocab, shape, generator=generator) for shape in shapes
    )
    arrays, prefill, after_prefix = target_arrays(target, ids, batch_ids)
    next_token = arrays["logits"][:, PREFIX - 1].argmax(-1, keepdim=True)
    arrays |= mtp_arrays(head, ids, prefill.hidden_states[-1], next_token)
    cache = copy.deepcopy(after_prefix)
    arrays |= continuation_arrays(target, prefill.logits, cache)
    return arrays | tree_arrays(target, tree_ids, after_prefix)


def published_golden(folder, ids):
    """Logits of the published layout through the auto class, in fp32 and bf16."""
    arrays = {"ids": ids}
    for name, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16}.items():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager"
        )
        arrays[f"logits_{name}"] = run(model.eval(), ids).logits.float()
    return arrays
