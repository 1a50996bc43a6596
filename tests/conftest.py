"""Fixtures and settings shared by all tests."""

import gc
import pathlib

import hypothesis
import jax
import pytest

# Shapes are few and examples many: the first example of a shape compiles, so a
# deadline would only measure the compiler. Derandomised, a failure is repeatable.
hypothesis.settings.register_profile(
    "treewy",
    deadline=None,
    derandomize=True,
    max_examples=25,
    database=None,
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.function_scoped_fixture,
    ],
)
hypothesis.settings.load_profile("treewy")


@pytest.fixture
def double():
    """Compute in float64 within the test; everywhere else x64 stays off."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(autouse=True, scope="module")
def programs_are_freed():
    """Free compiled programs when there are many; a process ends without warning else.

    Each is some maps of memory, and Linux gives a process 65,530 of those.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_text().count("\n") > 20_000:
        jax.clear_caches()
        gc.collect()
