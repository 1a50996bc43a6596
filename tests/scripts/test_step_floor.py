"""Least bytes and flops of a step, against sums by hand; one device's share."""

import dataclasses

import jax
import pytest

from models.qwen3_5 import published, random_weights
from scripts.benching import step_floor, step_share
from tests.scripts.test_bench_step import EXPERTS, subject


def test_floors_by_hand():
    """One GDN layer, one of attention; 2 rows, 5 nodes, 2 levels, a = 2.3."""
    found = subject()
    params = found.build.params(found.weights())
    floor = step_floor.of_step(found, params, 2.3)
    hidden, inner, vocabulary = 32, 48, 64
    mlp = 3 * hidden * inner
    gdn = hidden * (64 + 32 + 4 + 4) + 32 * hidden + 64 * 4
    attention = hidden * (2 * 64 + 2 * 32) + 64 * hidden + 2 * 16
    small = 4 * (4 + 4 + 8)  # A_log, dt_bias, the gated norm: float32
    dense = 2 * (2 * mlp + gdn + attention + 5 * hidden) + small
    head = 2 * vocabulary * hidden
    assert floor["weights"] == dense + head + 2 * 5 * 2 * hidden
    assert floor["experts"] == 0
    mtp = 2 * (2 * hidden * hidden + attention + mlp + 5 * hidden)
    kv = 2 * 2 * 2 * 16
    assert floor["draft"] == 2 * (mtp + head + 2 * 96 * kv)
    state = 4 * 8 * 8 * 4
    assert floor["state"] == 2 * 3 * state and floor["history"] == 0
    record = 2 * 16 + 4 * (32 + 4) + 2 * 64 + kv
    assert floor["records"] == round(2 * 5 * record * (1 + 2.3 / 5))
    assert floor["conv"] == 2 * 2 * 3 * 64 * 2
    assert floor["kv"] == round(2 * kv * (96 + 2.3))
    assert floor["total"] == sum(v for k, v in floor.items() if k != "total")
    norms = 2 * 16
    met = 2 * 5 * (2 * mlp + gdn + attention - norms)
    met += 2 * (5 + 1 + 2) * vocabulary * hidden  # the root and two drafts draft
    met += 2 * (2 + 3) * (2 * hidden * hidden + attention - norms + mlp)
    assert step_floor.flops(found, params) == 2 * met


@pytest.mark.parametrize(
    ("name", "moves", "records"),
    [
        ("store-all", 6, 0),
        ("reconstruct", 3, 0),
        ("fused", 2, 4.6),
        ("deferred", 1 + 2.3 / 5, 5 / 2 + 4.6),
    ],
)
def test_states_move_as_often_as_the_lifecycle_says(name, moves, records):
    found = subject(name=name)
    floor = step_floor.of_step(found, found.build.params(found.weights()), 2.3)
    record = 2 * 2 * 8 + 4 * (4 * 8 + 4) + 4  # keys as narrow as the rows
    assert floor["state"] == round(2 * moves * 4 * 8 * 8 * 4)
    assert floor["history"] == round(2 * records * record)
    assert step_floor.scheme_of(found.build.lifecycle) == name


def test_a_node_meets_the_experts_of_its_token():
    config = dataclasses.replace(EXPERTS, num_hidden_layers=4)
    one, two = (
        step_floor.flops(found, found.build.params(found.weights()))
        for found in (
            subject(dataclasses.replace(config, num_experts_per_tok=picks), tree="none")
            for picks in (1, 2)
        )
    )
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    assert two - one == 2 * 2 * 4 * expert  # rows, flops and layers


def test_busy_experts_are_fewer():
    found = subject(dataclasses.replace(EXPERTS, num_hidden_layers=4))
    params = found.build.params(found.weights())
    even, zipf = (
        step_floor.of_step(found, params, 2.3, router=router)["experts"]
        for router in random_weights.ROUTERS
    )
    touched = 8 * (1 - (1 - 2 / 8) ** 10)
    assert even == pytest.approx(2 * 4 * touched * 3 * 32 * 16, abs=2)
    assert zipf < even


def test_the_share_of_a_device_is_named_with_its_size():
    whole = published.get("qwen3.5-397b-a17b")
    assert step_share.parse("qwen3.5-397b-a17b/8") == ("qwen3.5-397b-a17b", 8)
    for other in ("qwen3.5-397b-a17b", "qwen3.5-397b-a17b/x", "runs/8"):
        assert step_share.parse(other) == (other, 1)
    share = step_share.of(whole, 8)
    assert (share.hidden_size, share.num_hidden_layers) == (4096, 60)
    assert (share.linear_num_key_heads, share.linear_num_value_heads) == (2, 8)
    assert (share.num_attention_heads, share.num_key_value_heads) == (4, 1)
    assert (share.num_experts, share.num_experts_per_tok) == (64, 1)
    assert step_share.of(whole, 1) == dataclasses.replace(whole, eos_token_ids=())
    # Eight shares weigh what the model does, but for what each has whole.
    sizes = [
        sum(leaf.size for leaf in jax.tree.leaves(random_weights.graph(c, "bfloat16")))
        for c in (whole, share)
    ]
    assert 1 < 8 * sizes[1] / sizes[0] < 1.02
    with pytest.raises(ValueError, match="share is 3; vocab_size is 248320"):
        step_share.of(whole, 3)
