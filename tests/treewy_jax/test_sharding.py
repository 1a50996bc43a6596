"""Meshes and the table of letters; ops on parts run with eight devices, apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import eight_devices
from treewy_jax import history, loop, mesh, sharding
from treewy_jax import tree as tree_lib
from treewy_jax import verify as verify_lib

EIGHT = {"data": 2, "tensor": 4, "expert": 1}


def test_ops_on_eight_devices():
    eight_devices.run("treewy_jax/sharded_ops.py")


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("tensor=8", {"tensor": 8}), ("data=2, tensor=4", {"data": 2, "tensor": 4})],
)
def test_parse(text, sizes):
    assert mesh.parse(text) == sizes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows=2", "'rows' is unknown; allowed are data, tensor, expert"),
        ("tensor", "allowed: AXIS=DEVICES"),
        ("tensor=0", "allowed: AXIS=DEVICES"),
        ("tensor=2,tensor=2", "came twice"),
        ("tensor=1000", "1000 devices are needed; there are "),
    ],
)
def test_a_wrong_mesh_is_refused_in_one_line(text, message):
    with pytest.raises(ValueError, match=message) as refused:
        mesh.make(text)
    assert "\n" not in str(refused.value)


def test_a_batch_has_to_fill_the_data_axis():
    one = mesh.make("data=1")
    mesh.check_batch(3, one)
    mesh.check_batch(3, None)
    abstract = jax.sharding.AbstractMesh((2, 1, 1), mesh.AXES)
    with pytest.raises(ValueError, match="data is 2, the batch has 3 rows"):
        mesh.check_batch(3, abstract)


def test_nothing_is_wrapped_without_a_mesh():
    """The function itself is called, with the arguments as they are."""
    seen = []

    def op(x: jax.Array, size: int) -> jax.Array:
        seen.append((x, size))
        return x

    x = jnp.ones((2, 3))
    assert sharding.by_letters(op, {"x": "B Hv"}, {"size": "Hv"})(x, 3) is x
    with mesh.use(mesh.make("tensor=1")):
        assert sharding.by_letters(op, {"x": "B Hv"}, {"size": "Hv"})(x, 3) is x
    assert [size for _, size in seen] == [3, 3]
    assert all(given is x for given, _ in seen)


def test_letters_are_split_together_or_not_at_all():
    abstract = jax.sharding.AbstractMesh(tuple(EIGHT.values()), mesh.AXES)
    axes = sharding.split({"Hk": (4,), "Hv": (8,), "B": (4,), "E": (8,)}, abstract)
    assert axes["Hk"] == axes["Hv"] == ("tensor",)
    assert axes["B"] == ("data",)
    assert axes["E"] == ("tensor",)
    axes = sharding.split({"Hk": (2,), "Hv": (8,), "B": (3,), "E": (6,)}, abstract)
    assert axes["Hk"] == axes["Hv"] == axes["C"] == axes["B"] == axes["E"] == ()


def test_experts_fill_both_of_their_axes():
    abstract = jax.sharding.AbstractMesh((1, 4, 2), mesh.AXES)
    assert sharding.split({"E": (512,)}, abstract)["E"] == ("expert", "tensor")
    assert sharding.split({"E": (6,)}, abstract)["E"] == ("expert",)


def test_letters_come_from_annotations():
    tree = tree_lib.DraftTree.from_widths((2,), batch=3)
    letters = sharding.letters_of(tree_lib.DraftTree, tree)
    assert (letters.tokens, letters.parent, letters.size) == ("B n", "n", "B")
    assert letters.depth_max == tree.depth_max
    both = sharding.letters_of(tuple[verify_lib.Verified, history.History])
    assert both[0].pseudo_values == "B n Hv Dv"
    assert both[1].k == "B m Hk Dk"
    assert sharding.letters_of(loop.LoopState.__annotations__["steps"]) == ""


def test_fetch_returns_numpy():
    found = mesh.fetch({"a": jnp.arange(3), "b": 2})
    assert isinstance(found["a"], np.ndarray)
