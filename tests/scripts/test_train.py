"""Training: parts against plain forms, the MTP chain against its cache, resuming."""

import json
import lzma

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import numpy as safetensors_numpy

from models.qwen3_5 import config as config_lib
from models.qwen3_5 import model as model_lib
from scripts import train
from scripts.training import attention, data, loss, mtp_chain, step, trainable
from treewy_jax import attention as plain_attention

EOT = 60
CONFIG = config_lib.Qwen3_5Config(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    full_attention_interval=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_conv_kernel_dim=4,
    intermediate_size=48,
    max_position_embeddings=128,
    tie_word_embeddings=True,
    mtp_num_hidden_layers=1,
)


@pytest.fixture(scope="module")
def pack_folder(tmp_path_factory):
    """Counting in threes from a random start: easy to learn, hard to guess cold."""
    folder, random = tmp_path_factory.mktemp("pack"), np.random.default_rng(0)
    parts, sources = {"train": [], "val": []}, {}
    for name, sizes in (("books", (4000, 300)), ("tasks_syn", (2000, 200))):
        entry = {"start": len(parts["train"]), "val_start": len(parts["val"])}
        for part, size in zip(parts, sizes, strict=True):
            tokens = []
            while len(tokens) < size:
                first, count = random.integers(0, 50), random.integers(10, 30)
                tokens += [int(first + 3 * i) % 50 for i in range(count)] + [EOT]
            parts[part] += tokens[:size]
        entry |= {"tokens": sizes[0], "val_tokens": sizes[1]}
        sources[f"{name}.txt"] = entry
    raw = {k: np.array(v, "<u2").tobytes() for k, v in parts.items()}
    (folder / "train.u16.xz").write_bytes(lzma.compress(raw["train"]))
    (folder / "val.u16").write_bytes(raw["val"])
    meta = {"n_vocab": 64, "eot": EOT, "sources": sources}
    meta |= {f"{k}_tokens": len(v) for k, v in parts.items()}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


@pytest.fixture(scope="module")
def pack(pack_folder):
    return data.read_pack(pack_folder)


@pytest.fixture(scope="module")
def model():
    return trainable.TrainableModel(CONFIG, rngs=nnx.Rngs(3), compute_dtype=jnp.float32)


@pytest.fixture(scope="module")
def windows(pack):
    return jnp.asarray(pack.train[: 2 * 24].reshape(2, 24).astype(np.int32))


def difference(a, b):
    return float(jnp.max(jnp.abs(a - b)))


def test_run_learns_and_a_resumed_one_is_bit_equal(pack_folder, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG.to_hf()))
    common = dict(
        data=pack_folder,
        steps=40,
        batch=8,
        length=32,
        log_every=20,
        evaluate_every=1000,
        dtype="float32",
        config=config,
    )
    whole = train.Options(out=tmp_path / "whole", **common)
    results = train.run(whole)
    lines = read_lines(whole.out)
    losses = [e["ce"] for e in map(json.loads, lines) if e["event"] == "train"]
    assert losses[-1] < 0.8 * losses[0] < 0.8 * np.log(64)
    assert set(results) == {"books", "tasks_syn"}
    assert 1 <= results["books"]["chain"] <= 4

    halves = train.Options(out=tmp_path / "halves", minutes=0.0, **common)
    train.run(halves)
    train.run(train.Options(out=halves.out, resume=True, **common))
    events = [json.loads(x) for x in read_lines(halves.out)]
    ends = [e for e in events if e["event"] == "end"]
    assert [(e["step"], e["finished"]) for e in ends] == [(20, False), (40, True)]
    assert weights_of(whole.out).keys() == weights_of(halves.out).keys()
    for name, tensor in weights_of(whole.out).items():
        assert tensor.tobytes() == weights_of(halves.out)[name].tobytes()
    last = [json.loads(x) for x in lines if '"validate"' in x][-1]
    assert [e for e in events if e["event"] == "validate"][-1] == last
    with pytest.raises(ValueError, match="resume: seed"):
        train.run(train.Options(out=halves.out, resume=True, seed=1, **common))

    # A second stage from those weights: the head alone, towards the target's choice.
    head = common | dict(steps=2, log_every=2, mtp_only=True, mtp_labels="target")
    del head["config"]
    second = train.Options(out=tmp_path / "head", init=str(whole.out / "model"), **head)
    train.run(second)
    before, after = weights_of(whole.out), weights_of(second.out)
    changed = {n for n in before if before[n].tobytes() != after[n].tobytes()}
    assert "mtp.fc.weight" in changed
    assert all(name.startswith("mtp.") for name in changed)


def read_lines(out):
    return (out / "log.jsonl").read_text().splitlines()


def weights_of(out):
    """The written tensors by name, whatever files they are in."""
    files = sorted((out / "model").glob("*.safetensors"))
    assert files
    loaded = [safetensors_numpy.load_file(path) for path in files]
    return {name: tensor for tensors in loaded for name, tensor in tensors.items()}


def test_trainable_model_is_the_model(model, windows):
    base = model_lib.Qwen3_5(CONFIG, rngs=nnx.Rngs(0))
    nnx.update(base, nnx.state(model))
    wanted = jax.jit(lambda tokens: base.forward(tokens))(windows)
    got = jax.jit(lambda tokens: model.forward(tokens))(windows)
    assert difference(got, wanted) < 2e-6 * float(jnp.max(jnp.abs(wanted)))


@nnx.jit(static_argnums=2)
def cached_chain(model, windows, row):
    """The head as decoding runs it: prefix KV cache, then one draft at a time."""
    hidden = model.forward(windows[:, : row + 1])
    batch, length = len(windows), jnp.full(len(windows), row + 1)
    embedded = model.embed(windows)
    steps = jnp.broadcast_to(jnp.arange(row + 1), (batch, row + 1))
    m, prefix = model.mtp.prefill(embedded[:, 1 : row + 2], hidden, steps)
    spare = ((0, 0), (0, 5), (0, 0), (0, 0))
    prefix = tuple(jnp.pad(x, spare, constant_values=jnp.nan) for x in prefix)
    m, outputs, earlier = m[:, -1:], [m[:, -1]], None
    for depth in range(1, step.DEPTHS):
        m, earlier = model.mtp.extend(
            embedded[:, row + 1 + depth, None],
            m,
            jnp.full((batch, 1), row + depth),
            prefix,
            length,
            jnp.ones((batch, 1, depth), bool),
            earlier,
        )
        outputs.append(m[:, 0])
    return outputs


@nnx.jit
def broken_chains(model, windows):
    """Token and hidden one step apart; a second draft fed with h and not with m."""
    hidden = model.forward(windows[:, :20])
    embedded = [model.embed(windows[:, d : d + 20]) for d in range(3)]
    apart = mtp_chain.chain(model.mtp, embedded[:1], hidden)[0]
    return apart, mtp_chain.chain(model.mtp, embedded[2:], hidden)[0]


def test_mtp_chain_equals_the_head_with_its_cache(model, windows):
    rows = nnx.jit(step.hidden_states)(model, windows)[1:]
    for row in (5, rows[0].shape[1] - 1):
        wanted = cached_chain(model, windows, row)
        for got, m in zip(rows, wanted, strict=True):
            assert difference(got[:, row], m) < 2e-6 * float(jnp.max(jnp.abs(m)))
    apart, unchained = broken_chains(model, windows)
    assert difference(apart, rows[0]) > 1e-2
    assert difference(unchained, rows[1]) > 1e-2


@pytest.mark.parametrize("own", [0, 2])
def test_training_attention_equals_the_plain_one(own):
    random = np.random.default_rng(0)
    shapes = [(2, 11, 4, 8)] + [(2, 11, 2, 8)] * (2 + 2 * own)
    arrays = [jnp.asarray(random.normal(size=s), jnp.float32) for s in shapes]

    def ours(q, k, v, *rest):
        pairs = list(zip(rest[::2], rest[1::2], strict=True))
        return attention.causal(q, (k, v), pairs, rows=4)

    def plain(q, k, v, *rest):
        if not rest:
            return plain_attention.causal(q, k, v)
        eye = jnp.broadcast_to(jnp.eye(11, dtype=bool), (2, 11, 11))
        causal = jnp.broadcast_to(jnp.tril(jnp.ones((11, 11), bool)), eye.shape)
        mask = jnp.concatenate([causal] + [eye] * own, axis=-1)[:, None]
        k, v = (jnp.concatenate([x, *rest[i::2]], 1) for i, x in enumerate((k, v)))
        return jax.nn.dot_product_attention(q, k, v, mask=mask)

    def run(function):
        weights = jnp.cos(jnp.arange(arrays[0].size).reshape(arrays[0].shape))
        value = lambda *x: jnp.sum(weights * function(*x))  # noqa: E731
        every = tuple(range(len(arrays)))
        return jax.jit(jax.value_and_grad(value, argnums=every))(*arrays)

    for got, wanted in zip(
        jax.tree.leaves(run(ours)), jax.tree.leaves(run(plain)), strict=True
    ):
        assert difference(got, wanted) < 1e-5


def test_cross_entropy_and_its_gradient():
    random = np.random.default_rng(0)
    hidden = jnp.asarray(random.normal(size=(21, 16)), jnp.float32)
    table = jnp.asarray(random.normal(size=(33, 16)), jnp.float32)
    labels = jnp.asarray(random.integers(0, 33, 21))
    weights = jnp.asarray(random.random(21), jnp.float32)

    def fused(hidden, table):
        return 2 * loss.cross_entropy(hidden, table, labels, weights, 8)[0]

    def plain(hidden, table):
        logits = jnp.matmul(hidden, table.T, precision="highest")
        chosen = jax.nn.log_softmax(logits)[jnp.arange(21), labels]
        return -2 * jnp.sum(weights * chosen)

    got = jax.value_and_grad(fused, argnums=(0, 1))(hidden, table)
    wanted = jax.value_and_grad(plain, argnums=(0, 1))(hidden, table)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert np.allclose(a, b, rtol=1e-5, atol=1e-5)
    best = loss.cross_entropy(hidden, table, labels, weights, 8)[1]
    assert np.array_equal(best, jnp.argmax(hidden @ table.T, axis=-1))


def test_lookup_gradient_adds_repeated_tokens():
    table = jnp.arange(12.0).reshape(6, 2)
    tokens = jnp.array([[0, 3, 3], [5, 0, 3]])
    slopes = jnp.arange(12.0).reshape(2, 3, 2)

    def value(table, rows):
        taken = loss.lookup(table, tokens, jnp.dtype("float32"), rows)
        return jnp.sum(slopes * taken)

    wanted = jax.grad(lambda t: jnp.sum(slopes * t[tokens]))(table)
    for rows in (4, 100):
        assert np.array_equal(jax.grad(value)(table, rows), wanted)


def test_batches_depend_on_seed_and_step_alone(pack):
    make = lambda seed: data.Sampler(pack, batch=64, window=36, seed=seed)  # noqa: E731
    one, other = make(0), make(0)
    other.batch(5, tail=False)
    assert np.array_equal(one.batch(3, tail=False), other.batch(3, tail=False))
    assert not np.array_equal(one.batch(3, tail=False), one.batch(4, tail=False))
    assert not np.array_equal(one.batch(3, tail=False), make(1).batch(3, tail=False))


def test_task_windows_begin_at_documents_and_fill_the_tail():
    tokens = np.arange(6000, dtype=np.uint16)  # each says where it is
    tokens[19::20] = 9999
    sources = (data.Source("books", 0, 4000, 0, 0),)
    sources += (data.Source("tasks_syn", 4000, 2000, 0, 0),)
    pack = data.Pack(tokens, tokens[:0], sources, 10000, 9999)
    sampler = data.Sampler(pack, batch=400, window=36, seed=0)
    shares = []
    for tail in (False, True):
        rows = sampler.batch(0, tail=tail)
        rows = rows[rows[:, 0] != 9999]
        assert rows.dtype == np.int32 and rows.shape[1] == 36
        assert np.all((rows[:, 0] < 3965) | (rows[:, 0] >= 4000))
        inside = rows[rows[:, 0] >= 4000]
        assert np.all(inside[:, 0] % 20 == 0) and np.all(inside[:, 0] <= 5964)
        shares.append(len(inside) / len(rows))
    assert abs(shares[0] - 1 / 3) < 0.1 and abs(shares[1] - 0.6) < 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "nowhere"}, "meta.json"),
        ({"length": 4096}, "no source holds a window"),
        ({"batch": 0}, "batch 0"),
        ({"tail": 1.5}, "tail 1.5"),
        ({"evaluate_every": 0}, "evaluate_every 0"),
        ({"steps": 0}, "steps 0"),
        ({"tokenizer": "nowhere"}, "tokenizer 'nowhere': no such file"),
        ({"batch": "many"}, "'many' is no integer"),
        ({"nothing": True}, "Unrecognized options: --nothing"),
        ({"resume": True}, "no checkpoint"),
        ({}, "data has 64 token ids"),
    ],
)
def test_wrong_options_are_one_line_and_status_two(
    change, message, pack_folder, tmp_path, capsys
):
    if change:
        config = tmp_path / "config.json"
        config.write_text(json.dumps(CONFIG.to_hf()))
        change = {"config": config} | change
    options = {"data": pack_folder, "out": tmp_path / "out", "length": 32} | change
    words = []
    for name, value in options.items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    assert train.main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error
