"""Loading onto eight devices (run by test_sharding.py): a part at a time, no more."""

import dataclasses
import shutil
import tracemalloc

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors import numpy as safetensors_numpy

import models
from models import checkpoints
from models.conversion import convert, orbax_store, plan, stored
from models.qwen3_5 import sharding
from tests.models import golden, sharded_models
from treewy_jax import mesh

MESHES = ("tensor=8", "data=2,expert=2,tensor=2", "data=8")
# Expert matrices of 4 MiB are the largest tensors, and fill a file each.
BIG = dataclasses.replace(
    sharded_models.WIDE, moe_intermediate_size=512, vocab_size=2048
)
PIECE = 2**18  # of orbax' files, below an eighth of such a tensor


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Return one model in both kinds of folder."""
    there = tmp_path_factory.mktemp("big")
    hugging = sharded_models.save(BIG, there / "hf", max_shard_bytes=2**20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored, "PART_BYTES", PIECE)
        convert.run(plan.make(hugging, there / "orbax"))
    return {"hf": hugging, "orbax": there / "orbax"}


def largest_file(folders):
    return max(path.stat().st_size for path in folders["hf"].glob("*.safetensors"))


def peak(folder, spread):
    """Return the most bytes that loading holds on the host at one time."""
    models.load(folder, mesh=spread)  # what is traced and imported once
    with pytest.MonkeyPatch.context() as patch:
        # A device that is a CPU may keep the host's own array.
        patch.setattr(sharding, "_copies", copies)
        tracemalloc.start()
        model = models.load(folder, mesh=spread)
        held = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return held, model


def copies(array, devices):
    """Put an array that lies where no device can keep it: not at a multiple of 64."""
    room = np.empty(array.nbytes + 128, np.uint8)
    start = -room.ctypes.data % 64 + 16
    apart = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    apart[...] = array
    return jax.block_until_ready([jax.device_put(apart, one) for one in devices])


@pytest.mark.parametrize("kind", ["hf", "orbax"])
@pytest.mark.parametrize("text", MESHES)
def test_every_device_has_its_part(folders, text, kind):
    """Parameters that stay in their order are those of one device, slice by slice."""
    one = models.load(folders["hf"]).params
    spread = models.load(folders[kind], mesh=mesh.make(text)).params
    pairs = zip(jax.tree.leaves(spread), jax.tree.leaves(one), strict=True)
    same = 0
    for ours, whole in pairs:
        shards = ours.addressable_shards
        assert ours.dtype == whole.dtype and len(shards) == 8
        rearranged = ours.shape != whole.shape or not np.array_equal(ours, whole)
        if rearranged:  # see models.qwen3_5.sharding
            continue
        same += 1
        for shard in shards:
            np.testing.assert_array_equal(shard.data, whole[shard.index])
    assert same > 0.8 * len(jax.tree.leaves(one))


@pytest.mark.parametrize("kind", ["hf", "orbax"])
def test_the_host_holds_a_part_of_a_tensor(folders, kind):
    """Not the model, not even one tensor of it; a device holds about an eighth."""
    most = largest_file(folders)
    held, model = peak(folders[kind], mesh.make("tensor=8"))
    assert held < 0.75 * most
    leaves = jax.tree.leaves(model.params)
    total = sum(leaf.nbytes for leaf in leaves)
    assert total > 5 * most
    for number in range(8):
        here = sum(leaf.addressable_shards[number].data.nbytes for leaf in leaves)
        assert here < 0.25 * total


@pytest.mark.parametrize("kind", ["hf", "orbax"])
def test_a_host_that_holds_more_would_be_seen(folders, kind, monkeypatch):
    """The broken twin: readers that read whole tensors and cut them."""
    for reader in (checkpoints.FolderReader, orbax_store.Reader):
        read = reader.read

        def whole(self, key, part=None, read=read):
            found = read(self, key)
            return found if part is None else found[part].copy()

        monkeypatch.setattr(reader, "read", whole)
    held = peak(folders[kind], mesh.make("tensor=8"))[0]
    assert held > largest_file(folders)


def test_a_device_reads_the_files_of_its_own_experts(tmp_path, monkeypatch):
    """Experts stored one by one: each tensor is read once, by the device it is on."""
    source = golden.FOLDER / "moe"
    tensors = {}
    for path in source.glob("*.safetensors"):
        tensors |= safetensors_numpy.load_file(path)
    apart = {}
    for key, array in tensors.items():
        stem, _, name = key.rpartition(".")
        if not stem.endswith(".experts"):
            apart[key] = array
            continue
        names = ["gate_proj", "up_proj"] if name == "gate_up_proj" else [name]
        for number, expert in enumerate(array):
            for part, rows in zip(names, np.split(expert, len(names)), strict=True):
                apart[f"{stem}.{number}.{part}.weight"] = np.ascontiguousarray(rows)
    safetensors_numpy.save_file(apart, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    seen, read = [], checkpoints.FolderReader.read

    def noted(self, key, part=None):
        seen.append(key)
        return read(self, key, part)

    monkeypatch.setattr(checkpoints.FolderReader, "read", noted)
    spread = mesh.make("expert=4")
    found = models.load(tmp_path, mesh=spread)
    experts = [key for key in seen if ".experts." in key]
    assert sorted(experts) == sorted(key for key in apart if ".experts." in key)
    expected = models.load(source, mesh=spread)
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)


def test_a_device_reads_the_projections_of_its_own_heads(folders, monkeypatch):
    """Every row of the four tensors once, and an eighth of them at a time at most."""
    seen, read = {}, checkpoints.FolderReader.read

    def noted(self, key, part=None):
        found = read(self, key, part)
        if "in_proj" in key:
            seen.setdefault(key, []).append(len(found))
        return found

    monkeypatch.setattr(checkpoints.FolderReader, "read", noted)
    models.load(folders["hf"], mesh=mesh.make("tensor=8"))
    assert len(seen) == 4 * 3
    widths = {"qkv": BIG.conv_dim, "z": BIG.value_dim, "b": 16, "a": 16}
    for key, counts in seen.items():
        name = key.removesuffix(".weight").rpartition("_")[2]
        assert sum(counts) == widths[name]
        assert len(counts) == (3 if name == "qkv" else 1) * 8


def mixed(folder, text):
    """Return rows and state that a GDN layer makes of some rows."""
    model = models.load(folder, mesh=mesh.make(text))
    mixer = nnx.merge(model.graphdef, model.params).layers[0].linear_attn
    x = jax.random.normal(jax.random.key(3), (2, 5, BIG.hidden_size))
    with mesh.use(model.mesh):
        rows, (_, state) = jax.jit(mixer.prefill)(x, np.array([5, 4]))
    return np.asarray(rows), np.asarray(state)


def contiguous(config, letter, parts, number):
    """Cut channels as if those of a device followed each other."""
    size = sum(sharding.blocks(config, letter)) // parts
    return [slice(number * size, (number + 1) * size)]


@pytest.mark.parametrize("letters", ["", "C", "joint"])
def test_channels_that_are_not_ordered_by_device_are_seen(
    folders, letters, monkeypatch
):
    """A device has the heads that it should; the broken twins have others'."""
    wanted, right = mixed(folders["hf"], "tensor=1"), sharding.pieces

    def pieces(config, letter, parts, number):
        wrong = letter in letters.split()
        return (contiguous if wrong else right)(config, letter, parts, number)

    monkeypatch.setattr(sharding, "pieces", pieces)
    found = mixed(folders["hf"], "tensor=8")
    off = max(np.abs(a - b).max() for a, b in zip(found, wanted, strict=True))
    assert off > 1e-2 if letters else off < 1e-5


def test_a_flipped_byte_is_found_on_a_mesh(folders, tmp_path):
    """An orbax folder is compared with its checksums before a part is used."""
    key = "model.language_model.layers.0.mlp.experts.down_proj"
    copy = tmp_path / "copy"
    shutil.copytree(folders["orbax"], copy)
    file = sorted((copy / orbax_store.PARAMS / key).glob("[0-9]*"))[-1]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(stored.Damage, match="down_proj: its checksum differs"):
        models.load(copy, mesh=mesh.make("tensor=8"))
