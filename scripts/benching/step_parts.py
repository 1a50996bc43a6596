"""The parts of a decode step, each the model's own code compiled alone.

Parts of layers take those of one super-block with inputs of their own for each layer,
so that XLA cannot merge them; they count once for every block. Inputs are noise of
the right shapes, except for the decode state and the tree, which are those of a step.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.qwen3_5 import decoder, gated_delta_net
from pallas_kernels.grouped_matmul import spec as grouped_specs
from pallas_kernels.tree_attention import spec as attention_specs
from scripts.benching import step_program
from treewy_jax import accept, attention, commit, conv, loop, pytree
from treewy_jax import cache as cache_lib

nbytes = pytree.nbytes


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of the step.

    Attributes:
        name: what it is called in tables.
        function: the program, of what `inputs` returns.
        inputs: function of (parameters, running state, key).
        times: how often a step does it.
        floor_bytes: least traffic of one call, from its inputs and outputs as shapes.
        fed: the first input is donated, and replaced by the result.
    """

    name: str
    function: Callable
    inputs: Callable
    floor_bytes: Callable[[tuple, Any], int]
    times: int = 1
    fed: bool = False


def of_step(subject: step_program.Subject, params: Any) -> list[Part]:
    """Return all parts of a step; `params` may be shapes."""
    module = subject.build(params).module
    graphdef, params = nnx.split(_first_block(module))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    block = _Block(subject, graphdef, nnx.merge(graphdef, shapes), module)
    found = [
        block.projections(),
        block.front(),
        block.verify(),
        block.attention(),
        block.feed_forward(),
        _commit(subject),
        _head(subject, module),
    ]
    if subject.path > 1:
        found.append(_draft(subject, module))
    return found


@dataclasses.dataclass(frozen=True)
class _Block:
    """The parts that lie in the layers of a super-block."""

    subject: step_program.Subject
    graphdef: Any
    shapes: Sequence[decoder.DecoderLayer]
    module: Any

    def projections(self) -> Part:
        """In and out projections with their norms and gates."""

        def function(block, xs, mixed, positions):
            *recurrent, attending = self._merge(block)
            found = []
            for layer, x, o in zip(recurrent, xs[:-1], mixed[:-1], strict=True):
                mixer, rows = layer.linear_attn, layer.linear_attn.in_proj(x)
                z = gated_delta_net.split_columns(rows, self._config).z
                found.append((rows, mixer._output(o, z)))
            mixer = attending.self_attn
            q, gate, k, v = mixer.project(xs[-1], positions)
            return found, (q, k, v), mixer.output(mixed[-1], gate)

        def inputs(params, state, key):
            cfg = self._config
            values = (cfg.linear_num_value_heads, cfg.linear_value_head_dim)
            heads = (cfg.num_attention_heads, cfg.head_dim)
            noise = Noise(key, state)
            xs = self._rows(noise, state)
            mixed = [noise(*values, dtype=xs[0].dtype) for _ in xs[:-1]]
            mixed.append(noise(*heads, dtype=xs[0].dtype))
            positions = state.base[:, None] + state.tree.depth()
            return self._first(params), xs, mixed, positions

        names = ("in_proj", "norm", "out_proj")
        weights = nbytes(
            [[nnx.state(getattr(m, name)) for name in names] for m in self._mixers]
        ) + nbytes(nnx.state(self.shapes[-1].self_attn))
        return self._part("projections", function, inputs, weights)

    def front(self) -> Part:
        """Conv along ancestors, heads and gates; the output gate is not read."""

        def function(block, rows, windows, numbers):
            layers = self._merge(block)[:-1]
            return [
                layer.linear_attn._front(r, w, numbers)
                for layer, r, w in zip(layers, rows, windows, strict=True)
            ]

        def inputs(params, state, key):
            noise = Noise(key, state)
            dtype = state.cache.window[0].dtype
            rows = [noise(_joint(self._config), dtype=dtype) for _ in self._mixers]
            width = self._config.linear_conv_kernel_dim
            numbers = conv.tree_windows(state.tree, width)
            return (
                self._first(params),
                rows,
                self._of_block(state.cache.window),
                numbers,
            )

        weights = nbytes([nnx.state(mixer.conv1d) for mixer in self._mixers])
        part = self._part("GDN front", function, inputs, weights)

        def floor(shapes, results):
            gate = nbytes([inputs.v for inputs in results])  # is as large as v
            return part.floor_bytes(shapes, results) - gate

        return dataclasses.replace(part, floor_bytes=floor)

    def verify(self) -> Part:
        """The recurrence over all nodes; the keys in its records are its inputs."""
        lifecycle = self.subject.build.lifecycle

        def function(states, nodes, tree):
            verified = [
                lifecycle.verify(state, commit.Inputs(*arrays), tree)
                for state, arrays in zip(states, nodes, strict=True)
            ]
            return [(output, records[1:]) for output, records in verified]

        def inputs(params, state, key):
            noise = Noise(key, state)
            states = self._of_block(state.cache.recurrent)
            dtype = state.cache.window[0].dtype
            nodes = [_nodes(noise, self._config, dtype) for _ in states]
            return states, nodes, state.tree

        return self._part("GDN verify", function, inputs, 0, whole=True)

    def attention(self) -> Part:
        """Attention over prefix and tree."""

        def function(q, prefix, nodes, length, mask):
            return attention.over_tree(q, prefix, nodes, length, mask)

        def inputs(params, state, key):
            cfg, noise = self._config, Noise(key, state)
            prefix = (state.cache.key[0], state.cache.value[0])
            dtype = prefix[0].dtype
            q = noise(cfg.num_attention_heads, cfg.head_dim, dtype=dtype)
            heads = (cfg.num_key_value_heads, cfg.head_dim)
            nodes = (noise(*heads, dtype=dtype), noise(*heads, dtype=dtype))
            return q, prefix, nodes, state.cache.length, state.tree.ancestors()

        def floor(shapes, results):
            spec = attention_specs.spec_of(*shapes)
            filled = self.subject.context
            return dataclasses.replace(spec, filled=filled).bytes_moved

        return Part("attention", function, inputs, floor, self._config.num_blocks)

    def feed_forward(self) -> Part:
        """MLP, or router, routed and shared experts, of all layers."""

        def function(block, xs):
            layers = self._merge(block)
            return [layer.mlp(x) for layer, x in zip(layers, xs, strict=True)]

        def inputs(params, state, key):
            return self._first(params), self._rows(Noise(key, state), state)

        mlps = [layer.mlp for layer in self.shapes]
        name = "MoE" if self._config.is_moe else "MLP"

        def floor(shapes, results):
            tokens = results[0].shape[0] * results[0].shape[1]
            rows = nbytes(shapes[1:]) + nbytes(results)
            return rows + sum(_mlp_bytes(mlp, self._config, tokens) for mlp in mlps)

        times = self._config.num_blocks
        return Part(name, function, inputs, floor, times)

    @property
    def _config(self):
        return self.subject.config

    @property
    def _mixers(self) -> list:
        return [layer.linear_attn for layer in self.shapes[:-1]]

    def _part(self, name, function, inputs, weights: int, whole=False) -> Part:
        """A part that reads `weights` and its inputs but the block, writes results."""

        def floor(shapes, results):
            read = shapes if whole else shapes[1:]
            return weights + nbytes(read) + nbytes(results)

        return Part(name, function, inputs, floor, self._config.num_blocks)

    def _first(self, params):
        """Return the first block's parameters."""
        return nnx.state(_first_block(self.subject.build(params).module))

    def _of_block(self, layers: Sequence) -> list:
        """Return what belongs to the recurrent layers of the first block."""
        return list(layers[: self._config.gdn_per_block])

    def _merge(self, block) -> Sequence[decoder.DecoderLayer]:
        return list(nnx.merge(self.graphdef, block))

    def _rows(self, noise, state):
        """Return rows of hidden states for every layer."""
        dtype = self.shapes[0].input_layernorm.weight.dtype
        size = self._config.hidden_size
        return [noise(size, dtype=dtype) for _ in self.shapes]


def _first_block(module: Any) -> nnx.List:
    return nnx.List(module.layers[: module.config.full_attention_interval])


def _joint(config: Any) -> int:
    """Return the columns of a row: q, k, v, b, a and the output gate."""
    values = config.value_dim
    return config.conv_dim + 2 * config.linear_num_value_heads + values


def _commit(subject: step_program.Subject) -> Part:
    """The commit of states, windows and KV rows of all layers."""
    lifecycle = subject.build.lifecycle

    def function(cache, records, accepted):
        return cache_lib.commit(cache, records, accepted, lifecycle)

    def inputs(params, state, key):
        cfg, noise, cache = subject.config, Noise(key, state), state.cache
        dtype = cache.window[0].dtype
        recurrent = []
        for _ in cache.recurrent:
            _, k, v, log_decay, _ = _nodes(noise, cfg, dtype)
            recurrent.append((k, v.astype(jnp.float32), log_decay))
        heads = (cfg.num_key_value_heads, cfg.head_dim)
        records = cache_lib.Records(
            recurrent=tuple(recurrent),
            rows=tuple(noise(cfg.conv_dim, dtype=dtype) for _ in cache.window),
            key=tuple(noise(*heads, dtype=dtype) for _ in cache.key),
            value=tuple(noise(*heads, dtype=dtype) for _ in cache.value),
        )
        return jax.tree.map(jnp.copy, cache), records, state.accepted

    def floor(shapes, results):
        cache, records, accepted = shapes
        moved = 2 * nbytes((cache.recurrent, cache.window))
        path, nodes = accepted.path.shape[1], records.rows[0].shape[1]
        taken = nbytes(records) + nbytes((records.key, records.value))
        return moved + taken * path // nodes

    return Part("commit", function, inputs, floor, fed=True)


def _head(subject: step_program.Subject, module: Any) -> Part:
    """Logits of all nodes, the target's choice at each, and the accepted path."""

    def function(params, hidden, tree, key, base):
        logits = subject.build(params).logits(hidden)
        return accept.sample_and_match(logits, tree, key, base, step_program.SAMPLING)

    def inputs(params, state, key):
        hidden = _hidden(Noise(key, state), subject, params)
        return params, hidden, state.tree, jax.random.key(0), state.base

    def floor(shapes, results):
        return _head_bytes(subject, module) + nbytes(shapes[1])

    return Part("head, accept", function, inputs, floor)


def _draft(subject: step_program.Subject, module: Any) -> Part:
    """Proposing a tree and taking in what was accepted of it."""

    def function(carried, params, root, base, accepted, hidden):
        state, _ = carried
        bound = subject.drafter.bind(subject.build(params))
        tree, state = bound.propose(state, root, base)
        return bound.update(state, accepted, hidden), tree.tokens

    def inputs(params, state, key):
        hidden = _hidden(Noise(key, state), subject, params)
        carried = (jax.tree.map(jnp.copy, state.draft), jnp.copy(state.tree.tokens))
        return carried, params, state.root, state.base, state.accepted, hidden

    def floor(shapes, results):
        # Each run of the head waits for the one before: its weights are read anew.
        runs = len(subject.drafter.levels)
        layer = nnx.state(module.mtp)
        read = nbytes(layer)
        if subject.config.is_moe:
            (inner,) = module.mtp.layers
            read -= nbytes(nnx.state(inner.mlp))
            tokens = [level.shape[0] for level in subject.drafter.levels[1:]]
            rows = [subject.batch * count for count in (*tokens, subject.path)]
            experts = sum(_mlp_bytes(inner.mlp, subject.config, row) for row in rows)
        else:
            experts = 0
        (draft, _), filled = shapes[0], subject.context / subject.capacity
        prefix = int(filled * nbytes((draft.key, draft.value)))
        return runs * (read + prefix + _head_bytes(subject, module)) + experts

    return Part("draft", function, inputs, floor, fed=True)


class Noise:
    """Normal rows for every node; each call takes the next key."""

    def __init__(self, key: jax.Array, state: loop.LoopState):
        self._key, self._nodes = key, state.tree.tokens.shape

    def __call__(self, *shape: int, dtype: Any) -> jax.Array:
        """Return [B, n, *shape]."""
        self._key, key = jax.random.split(self._key)
        return jax.random.normal(key, (*self._nodes, *shape), jnp.dtype(dtype))


def _nodes(noise: Noise, cfg: Any, dtype: Any) -> tuple[jax.Array, ...]:
    """Return q, k, v, log_decay and beta as the front leaves them."""
    keys = (cfg.linear_num_key_heads, cfg.linear_key_head_dim)
    values = (cfg.linear_num_value_heads, cfg.linear_value_head_dim)
    small = cfg.linear_key_head_dim**-0.5
    q, k = (noise(*keys, dtype=dtype) * jnp.asarray(small, dtype) for _ in range(2))
    gates = [noise(values[0], dtype=jnp.float32) for _ in range(2)]
    log_decay, beta = -0.1 * jnp.abs(gates[0]), jax.nn.sigmoid(gates[1])
    return (
        q * jnp.asarray(small, dtype),
        k,
        noise(*values, dtype=dtype),
        log_decay,
        beta,
    )


def _hidden(noise: Noise, subject: step_program.Subject, params: Any) -> jax.Array:
    module = subject.build(params).module
    return noise(subject.config.hidden_size, dtype=module.norm.weight.dtype)


def _head_bytes(subject: step_program.Subject, module: Any) -> int:
    tied = subject.config.tie_word_embeddings
    return nbytes(nnx.state(module.embed_tokens if tied else module.lm_head))


def _mlp_bytes(mlp: Any, cfg: Any, tokens: int) -> int:
    """Return the bytes of weights that `tokens` rows need; experts: those touched."""
    weights = nbytes(nnx.state(mlp))
    if not cfg.is_moe:
        return weights
    experts = nbytes(nnx.state(mlp.experts))
    spec = grouped_specs.make_spec(
        tokens=tokens,
        per_token=cfg.num_experts_per_tok,
        experts=cfg.num_experts,
        hidden=cfg.hidden_size,
        inner=cfg.moe_intermediate_size,
    )
    return weights - experts + round(experts * spec.touched / cfg.num_experts)
