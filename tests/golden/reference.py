"""The Hugging Face models behind the golden arrays, with weights from fixed seeds."""

import copy
import json
import pathlib

import torch
import transformers

FOLDER = pathlib.Path(__file__).parent / "tiny"
CLASSES = {
    "dense": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
    "moe": (transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM),
}
WEIGHT_SEED = {"dense": 100, "moe": 200}  # the MTP head takes the next one
VISION_SEED = 5

# Hugging Face's own init hides faults (zero norms, equal gates), so every parameter is
# drawn: the first rule whose name part fits, else "matrix" by fan-in, "vector" for 1-D.
RULES = {
    "A_log": lambda w, gen: torch.log(0.05 + 3.0 * torch.rand(w.shape, generator=gen)),
    "dt_bias": lambda w, gen: -2.0 + normal(w, gen),
    "linear_attn.norm.weight": lambda w, gen: 1.0 + 0.2 * normal(w, gen),
    "conv1d": lambda w, gen: 0.5 * normal(w, gen),
    "embed_tokens": lambda w, gen: 0.3 * normal(w, gen),
    "lm_head": lambda w, gen: 0.3 * normal(w, gen),
    "vector": lambda w, gen: 0.2 * normal(w, gen),
    "matrix": lambda w, gen: normal(w, gen) / w.shape[-1] ** 0.5,
}


def normal(weight, generator):
    return torch.randn(weight.shape, generator=generator)


def draw(named_parameters, seed):
    """Draws all parameters in the order of their names."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in sorted(named_parameters, key=lambda pair: pair[0]):
        kind = "vector" if weight.ndim == 1 else "matrix"
        rule = next((part for part in RULES if part in name), kind)
        weight.data.copy_(RULES[rule](weight, generator))


class MtpHead(torch.nn.Module):
    """The head that transformers drops, from its own decoder layer and norm.

    m = layer(fc([norm_e(embedding(x_{t+1})); norm_h(h_t)])), output norm(m); h_t is the
    target's hidden after its final norm, or this head's previous output.
    """

    def __init__(self, target):
        super().__init__()
        self.config = copy.deepcopy(target.config)
        self.config.layer_types, self.config.num_hidden_layers = ["full_attention"], 1
        norm, layer = type(target.model.norm), type(target.model.layers[-1])
        width, eps = self.config.hidden_size, self.config.rms_norm_eps
        self.pre_fc_norm_embedding = norm(width, eps=eps)
        self.pre_fc_norm_hidden = norm(width, eps=eps)
        self.fc = torch.nn.Linear(2 * width, width, bias=False)
        self.layers = torch.nn.ModuleList([layer(self.config, 0)])
        self.norm = norm(width, eps=eps)
        self.target = [target]  # in a list: shared, not a submodule

    def forward(self, ids, hidden, positions, cache):
        (target,) = self.target
        embedding = self.pre_fc_norm_embedding(target.model.embed_tokens(ids))
        x = self.fc(torch.cat([embedding, self.pre_fc_norm_hidden(hidden)], -1))
        rotary = target.model.rotary_emb(x, positions.expand(3, *positions.shape))
        seen, new = cache.get_seq_length(), ids.shape[1]
        mask = torch.full((1, 1, new, seen + new), -torch.inf).triu(seen + 1)
        x = self.layers[0](
            x, position_embeddings=rotary, attention_mask=mask, cache=cache
        )
        x = self.norm(x)
        return target.lm_head(x), x


def read_config(variant):
    fields = json.loads((FOLDER / variant / "config.json").read_text())
    fields.pop("architectures")
    return fields


def build(variant):
    """Returns the target and its MTP head with drawn weights, in eager fp32."""
    config_class, model_class = CLASSES[variant]
    config = config_class(**read_config(variant))
    config._attn_implementation = "eager"
    target = model_class(config).eval()
    if variant == "moe":
        target.set_experts_implementation("eager")
    draw(target.named_parameters(), WEIGHT_SEED[variant])
    target.tie_weights()
    head = MtpHead(target).eval()
    named = ((f"mtp.{name}", weight) for name, weight in head.named_parameters())
    draw(named, WEIGHT_SEED[variant] + 1)
    return target, head


def flat_weights(target, head):
    tied = target.config.tie_word_embeddings
    weights = {
        name: weight
        for name, weight in target.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    weights |= {f"mtp.{name}": weight for name, weight in head.state_dict().items()}
    return {name: weight.contiguous() for name, weight in weights.items()}


def published_weights(flat):
    """The names and dtypes of the published checkpoints, vision tensors included."""
    weights = {
        name.replace("model.", "model.language_model.", 1)
        if name.startswith("model.")
        else name: weight
        for name, weight in flat.items()
    }
    generator = torch.Generator().manual_seed(VISION_SEED)
    for name, shape in {
        "patch_embed.proj.weight": (16, 3, 2, 4, 4),
        "patch_embed.proj.bias": (16,),
        "blocks.0.attn.qkv.weight": (48, 16),
        "merger.linear_fc2.weight": (64, 64),
    }.items():
        weights[f"model.visual.{name}"] = torch.randn(shape, generator=generator)
    keep = ("A_log", "linear_attn.norm.weight")
    return {
        name: weight.float() if name.endswith(keep) else weight.bfloat16()
        for name, weight in weights.items()
    }
