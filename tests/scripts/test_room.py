"""A model that has no room is refused before it is made."""

import jax
import pytest

from scripts import bench_step, decode, room
from tests.models import golden

DECODE = ["--random-weights", "--model", "qwen3.5-27b", "--prompt-ids", "1,2"]
STEP = ["--model", "qwen3.5-35b-a3b"]


@pytest.mark.parametrize("variant", golden.VARIANTS)
def test_bytes_are_those_of_the_model(variant):
    model = golden.model(variant)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert room.weight_bytes(model.config, "float32", None) == held


@pytest.mark.parametrize(
    ("main", "arguments"), [(decode.main, DECODE), (bench_step.main, STEP)]
)
def test_no_room_is_one_line(main, arguments, monkeypatch, capsys):
    monkeypatch.setattr(room, "memory_bytes", lambda: 3 * 2**30)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "GiB; 3.0 GiB are there" in error


@pytest.mark.parametrize("less", [0, 1])
def test_what_fits_to_the_byte_is_not_refused(less, monkeypatch):
    """Nor is anything where the memory is not known."""
    config = golden.model("dense").config
    needed = room.weight_bytes(config, "float32", None)
    monkeypatch.setattr(room, "memory_bytes", lambda: needed - less)
    if less:
        with pytest.raises(ValueError, match="are there"):
            room.check("tiny", config, "float32", None)
    else:
        room.check("tiny", config, "float32", None)
    monkeypatch.setattr(room, "memory_bytes", lambda: None)
    room.check("tiny", config, "float32", None)


def test_the_memory_of_this_machine_is_known():
    assert room.memory_bytes() > 2**30
