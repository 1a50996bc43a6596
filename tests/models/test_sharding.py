"""Models on meshes of eight devices, each file of tests in a process of its own."""

import json
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

import models
from models.qwen3_5 import sharding
from tests import eight_devices
from tests.models import golden
from treewy_jax import generate, mesh

CONFIG = golden.model("dense").config
ROWS = ([5, 9, 2, 7], [8, 1, 3])


def test_models_on_eight_devices():
    eight_devices.run("models/sharded_models.py")


def abstract_mesh(**sizes):
    return jax.sharding.AbstractMesh(
        tuple(sizes.get(axis, 1) for axis in mesh.AXES), mesh.AXES
    )


def test_channels_go_with_their_heads():
    """Each half of the channels is q, k and v of half of the heads."""
    order = sharding.channel_order(CONFIG, 2)
    assert sorted(order) == list(range(CONFIG.conv_dim))
    q, k, v = np.split(order[: len(order) // 2], [16, 32])
    np.testing.assert_array_equal(q, np.arange(16))
    np.testing.assert_array_equal(k, 32 + np.arange(16))
    np.testing.assert_array_equal(v, 64 + np.arange(48))


@pytest.mark.parametrize(
    ("devices", "copies"), [(1, 1), (2, 1), (4, 2), (8, 1), (3, 1)]
)
def test_key_heads_are_there_once_for_each_device(devices, copies):
    """4 query heads on 2 key heads; 8 and 3 devices do not divide the query heads."""
    assert sharding.kv_copies(CONFIG, abstract_mesh(tensor=devices)) == copies


def test_published_sizes_divide_on_eight_devices():
    config = models.qwen3_5.published.get("qwen3.5-397b-a17b")
    axes = sharding.axes(config, abstract_mesh(tensor=8))
    assert sharding.kv_copies(config, abstract_mesh(tensor=8)) == 4
    assert all(axes[letter] == ("tensor",) for letter in ("Hv", "heads", "E", "I", "V"))


def test_two_processes_write_what_one_does():
    """Each process has two devices; the mesh spans both (jax.distributed)."""
    one = generate.generate(
        golden.model("dense"), ROWS, tree="2", max_new_tokens=6, eos_token_ids=()
    )
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "tests.models.one_of_processes", address, "2"]
    processes = [
        subprocess.Popen(
            [*command, str(number), json.dumps(ROWS)],
            env=os.environ | eight_devices.environment(2),
            cwd=eight_devices.ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        found = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, err) in zip(processes, found, strict=True):
        assert process.returncode == 0, err[-4000:]
        assert json.loads(out.splitlines()[-1]) == one.token_ids
