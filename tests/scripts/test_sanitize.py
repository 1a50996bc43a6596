"""The driver of the memory checker: what it runs, and in what kind of memory."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import pytest

from scripts import sanitize

ROOT = pathlib.Path(__file__).parent.parent.parent


def test_every_kernel_runs_once_and_is_checked(blend_op, capsys):
    ran = []
    (case,) = blend_op

    def call(impl, config):
        ran.append(impl)
        return case.call(impl, config)

    blend_op[:] = [dataclasses.replace(case, call=call)]
    assert sanitize.main(["--ops", "blend"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "blend B=3 D=8 triton: ok",
        "blend B=3 D=8 mosaic_tpu: does not run here: needs a TPU",
        "1 calls run of 2",
    ]
    assert "triton" in ran
    assert sanitize.main(["--ops", "blend", "--reference"]) == 0
    assert "2 calls run of 3" in capsys.readouterr().out
    assert sanitize.main(["--ops", "blend", "--impl", "triton"]) == 0
    assert "1 calls run of 1" in capsys.readouterr().out


def test_a_wrong_kernel_fails(blend_op, capsys):
    (case,) = blend_op
    blend_op[:] = [dataclasses.replace(case, bounds=(1e-30, 1.0))]
    assert sanitize.main(["--ops", "blend"]) == 1
    assert "wrong: relative errors" in capsys.readouterr().out


def test_nothing_run_is_no_success(blend_op, monkeypatch):
    monkeypatch.setattr("pallas_kernels.device.platform", lambda: "rocm")
    assert sanitize.main(["--ops", "blend"]) == 1


@pytest.mark.parametrize(
    ("tags", "arguments", "message"),
    [
        ({"bench"}, ["--ops", "blend"], "blend: no case is tagged 'small'"),
        ({"small"}, ["--ops", "blur"], "op is 'blur'"),
        ({"small"}, ["--ops"], "ops is empty"),
        ({"small"}, ["--ops", "blend", "--impl", "cuda"], "impl is ('cuda',)"),
    ],
)
def test_wrong_input_is_one_line(blend_op, tags, arguments, message, capsys):
    blend_op[:] = [dataclasses.replace(blend_op[0], tags=frozenset(tags))]
    assert sanitize.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_allocator_is_set_before_jax_is_there():
    """Set later, it would do nothing, and the checker would see one large array."""
    code = (
        "import os, sys, builtins\n"
        "load = builtins.__import__\n"
        "def spy(name, *rest):\n"
        "    if name == 'jax' and 'jax' not in sys.modules:\n"
        "        print(os.environ.get('XLA_PYTHON_CLIENT_ALLOCATOR'))\n"
        "        print(os.environ.get('XLA_PYTHON_CLIENT_PREALLOCATE'))\n"
        "    return load(name, *rest)\n"
        "builtins.__import__ = spy\n"
        "sys.argv = ['sanitize.py', '--ops', 'nothing']\n"
        "import runpy\n"
        "runpy.run_path('scripts/sanitize.py', run_name='__main__')\n"
    )
    unset = {k: v for k, v in os.environ.items() if not k.startswith("XLA_PYTHON")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=unset | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "op is 'nothing'" in done.stderr
    assert done.stdout.split() == ["platform", "false"]
