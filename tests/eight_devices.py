"""Run a file of tests in a process of its own that has eight devices, all one CPU."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
# What is tested is where arrays lie, so machine code may be slow.
FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def run(path: str) -> None:
    """Fail with its output unless all tests of `path` (below tests/) pass."""
    # Checks of types at run time are those of the suite itself, and slow.
    plain = ["-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plain, f"tests/{path}"],
        env=os.environ | environment(8),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def environment(devices: int) -> dict[str, str]:
    """Return the variables that give a process so many devices."""
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "XLA_FLAGS": FLAGS,
    }
