"""Hugging Face to orbax and back: bits, interruptions, damage, meshes, memory."""

import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import hypothesis
import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import strategies as st
from safetensors import numpy as safetensors_numpy

import models
from models.conversion import convert, manifest, orbax_store, stored
from models.conversion import plan as plan_lib
from tests.models import golden

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = {
    f"{variant}-{layout}": golden.FOLDER / variant / ("published" * (layout == "bf16"))
    for variant in golden.VARIANTS
    for layout in ("float32", "bf16")
}
FOLDERS["tiny"] = ROOT / "models/pretrained/tiny"
DENSE = FOLDERS["dense-bf16"]


def run(source, out, advance=lambda nbytes: None):
    return convert.run(plan_lib.make(source, out), advance)


def raw(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= safetensors_numpy.load_file(path)
    return found


def write_file(path, tensors, **metadata):
    """Write a safetensors file of {key: (dtype code, shape, bytes)} by hand."""
    header, end = {"__metadata__": metadata} if metadata else {}, 0
    for key, (code, shape, data) in tensors.items():
        offsets = [end, end := end + len(data)]
        header[key] = {"dtype": code, "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    data = b"".join(data for _, _, data in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def flip(path, offset=-1):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.fixture
def source(tmp_path):
    """A copy of the dense golden checkpoint in two files, to damage."""
    return pathlib.Path(shutil.copytree(DENSE, tmp_path / "source"))


@pytest.fixture(params=["whole", "parts"])
def part_bytes(request, monkeypatch):
    """Tensors in one part each, and in many."""
    if request.param == "parts":
        monkeypatch.setattr(stored, "PART_BYTES", 4000)


# --- what comes out -----------------------------------------------------------------


@pytest.mark.parametrize("name", FOLDERS)
def test_round_trip_is_equal_byte_by_byte(name, tmp_path, part_bytes):
    folder = FOLDERS[name]
    if name == "tiny" and stored.PART_BYTES == 4000:
        pytest.skip("8000 files of 4000 bytes show no more than golden ones")
    there = run(folder, tmp_path / "orbax")
    assert (there.written, there.reused, there.repaired) == (len(raw(folder)), 0, [])
    run(tmp_path / "orbax", tmp_path / "back")
    names = {path.name for path in (tmp_path / "back").iterdir()}
    kept = {p.name for p in folder.iterdir() if p.is_file() and p.suffix != ".npz"}
    assert names == kept | {manifest.NAME}
    for name in kept:
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", ["dense-bf16", "moe-float32"])
def test_plain_orbax_restores_the_stored_arrays(name, tmp_path, part_bytes):
    run(FOLDERS[name], tmp_path / "orbax")
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "orbax" / orbax_store.PARAMS)
    wanted = raw(FOLDERS[name])
    assert found.keys() == wanted.keys()
    for key, array in wanted.items():
        assert found[key].dtype == array.dtype, key
        np.testing.assert_array_equal(found[key], array, err_msg=key)
    if name == "dense-bf16":
        assert {array.dtype.name for array in found.values()} == {"bfloat16", "float32"}


@pytest.mark.parametrize("name", ["dense-bf16", "moe-bf16"])
def test_load_reads_an_orbax_folder(name, tmp_path):
    run(FOLDERS[name], tmp_path / "orbax")
    first, second = models.load(FOLDERS[name]), models.load(tmp_path / "orbax")
    assert first.config == second.config

    def same(path, one, other):
        assert one.dtype == other.dtype, path
        np.testing.assert_array_equal(one, other, err_msg=str(path))

    jax.tree_util.tree_map_with_path(same, first.params, second.params)


def test_every_dtype_and_shape_is_kept(tmp_path, part_bytes):
    rng = np.random.default_rng(0)
    shapes = [(), (0, 3), (5,), (3, 1, 7), (2, 600, 3)]
    tensors = {}
    for code, name in stored.DTYPES.items():
        size = np.dtype(getattr(ml_dtypes, name, name)).itemsize
        for shape in shapes:
            count = int(np.prod(shape, dtype=int))
            data = rng.integers(0, 2 if code == "BOOL" else 256, count * size)
            key = f"{code}.{len(shape)}.{count}"
            tensors[key] = (code, shape, data.astype(np.uint8).tobytes())
    (tmp_path / "a").mkdir()
    (tmp_path / "a/config.json").write_text("{}")
    write_file(tmp_path / "a/x.safetensors", tensors, format="pt")
    run(tmp_path / "a", tmp_path / "b")
    run(tmp_path / "b", tmp_path / "c")
    file = "x.safetensors"
    assert (tmp_path / "c" / file).read_bytes() == (tmp_path / "a" / file).read_bytes()


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    shape=st.lists(st.integers(0, 9), max_size=4), limit=st.integers(4, 200)
)
def test_parts_are_the_bytes_in_order(shape, limit):
    tensor = stored.Tensor("x", "f", "F32", tuple(shape), 0)
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored, "PART_BYTES", limit)
        parts = [array[part].tobytes() for part in tensor.parts()]
        sizes = [tensor.part_bytes(part) for part in tensor.parts()]
    assert b"".join(parts) == array.tobytes()
    assert sizes == [len(part) for part in parts] and max(sizes, default=0) <= limit


# --- interruptions ------------------------------------------------------------------


class Interruption(Exception):
    pass


def interrupt_after(count):
    seen = []

    def advance(nbytes):
        seen.append(nbytes)
        if len(seen) == count:
            raise Interruption

    return advance


@pytest.mark.parametrize("back", [False, True])
def test_an_interrupted_conversion_goes_on(source, tmp_path, back, monkeypatch):
    if back:
        run(source, tmp_path / "orbax")
        source = tmp_path / "orbax"
    total = len(raw(DENSE))
    for count in (11, 21):  # the tensor in work then is not among the complete ones
        with pytest.raises(Interruption):
            run(source, tmp_path / "out", interrupt_after(count))
        assert not (tmp_path / "out").exists()
    copied = []
    copy = stored.copy
    monkeypatch.setattr(
        stored, "copy", lambda *a, **k: copied.append(a[2].key) or copy(*a, **k)
    )
    done = run(source, tmp_path / "out")
    assert (done.written, done.reused, done.repaired) == (total - 20, 20, [])
    assert len(copied) == total - 20
    if not back:
        run(tmp_path / "out", tmp_path / "again")
    folder = tmp_path / ("out" if back else "again")
    assert all(
        (folder / path.name).read_bytes() == path.read_bytes()
        for path in DENSE.glob("*.safetensors")
    )


def test_a_killed_process_leaves_what_goes_on(source, tmp_path):
    code = (
        "import os, pathlib, sys\n"
        "from models.conversion import convert, plan, stored\n"
        "stored.PART_BYTES = 4000\n"
        "seen = []\n"
        "def advance(nbytes):\n"
        "    seen.append(nbytes)\n"
        "    if len(seen) == 80: os.kill(os.getpid(), 9)\n"
        "convert.run(plan.make(*map(pathlib.Path, sys.argv[1:])), advance)\n"
    )
    command = [sys.executable, "-c", code, source, tmp_path / "out"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert not (tmp_path / "out").exists()
    with open(tmp_path / ".out.partial" / plan_lib.JOURNAL, "ab") as journal:
        journal.write(b'{"key": "torn')
    summary = run(source, tmp_path / "out")
    assert summary.reused > 0 and summary.repaired == []
    assert summary.written + summary.reused == len(raw(DENSE))
    assert run(source, tmp_path / "out").written == 0


def test_one_process_at_a_time(source, tmp_path):
    made = plan_lib.make(source, tmp_path / "out")
    made.staging.mkdir()
    journal = manifest.Journal(made.staging / plan_lib.JOURNAL, made.identity)
    with pytest.raises(ValueError, match="another process"):
        convert.run(made)
    journal.close()
    assert convert.run(made).written == len(made.tensors)


# --- damage -------------------------------------------------------------------------


def place(folder, key):
    """Return the file and offset of a tensor's last byte, in either kind."""
    if (folder / orbax_store.PARAMS).is_dir():
        return sorted((folder / orbax_store.PARAMS / key).glob("[0-9]*"))[-1], -1
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        fields = json.loads(data[8 : 8 + length]).get(key)
        if fields:
            return path, 8 + length + fields["data_offsets"][1] - 1
    raise KeyError(key)


KEY = "model.language_model.layers.0.mlp.up_proj.weight"


def interrupted(source, out, key=KEY):
    """Interrupt a conversion once `key` is complete; returns the journal's keys."""
    keys = [tensor.key for tensor in plan_lib.make(source, out).tensors]
    with pytest.raises(Interruption):
        run(source, out, interrupt_after(keys.index(key) + 3))


@pytest.mark.parametrize("back", [False, True])
def test_damage_of_what_was_written_is_repaired(source, tmp_path, back):
    if back:
        run(source, tmp_path / "orbax")
        source = tmp_path / "orbax"
    interrupted(source, tmp_path / "out")
    flip(*place(tmp_path / ".out.partial", KEY))
    done = run(source, tmp_path / "out")
    assert len(done.repaired) == 1 and KEY in done.repaired[0]
    assert run(source, tmp_path / "out").written == 0  # verified


@pytest.mark.parametrize("name", [".zarray", "0.0"])
def test_a_lost_file_of_what_was_written_is_repaired(source, tmp_path, name):
    interrupted(source, tmp_path / "out")
    (tmp_path / ".out.partial" / orbax_store.PARAMS / KEY / name).unlink()
    done = run(source, tmp_path / "out")
    assert len(done.repaired) == 1 and KEY in done.repaired[0]
    assert run(source, tmp_path / "out").written == 0


def test_damage_of_the_source_since_an_interruption_is_named(source, tmp_path):
    interrupted(source, tmp_path / "out")
    path, offset = place(source, KEY)
    flip(path, offset)
    with pytest.raises(stored.Damage, match="earlier run") as error:
        run(source, tmp_path / "out")
    assert KEY in str(error.value) and path.name in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("back", [False, True])
def test_damage_of_a_converted_source_is_named(source, tmp_path, back):
    run(source, tmp_path / "a")
    if back:
        run(tmp_path / "a", tmp_path / "b")
    folder = tmp_path / ("b" if back else "a")
    path, offset = place(folder, KEY)
    flip(path, offset)
    with pytest.raises(stored.Damage) as error:
        run(folder, tmp_path / "out")
    assert KEY in str(error.value) and str(folder) in str(error.value)
    assert not (tmp_path / "out").exists()
    with pytest.raises(stored.Damage) as error:  # and so is it as a result
        run(tmp_path / "a" if back else source, folder)
    assert KEY in str(error.value)


class Blind:
    """A checksum that is always the same."""

    def update(self, data):
        pass

    def hexdigest(self):
        return "same"


def test_without_checksums_damage_would_pass(source, tmp_path, monkeypatch):
    """The broken twin of the test above."""
    monkeypatch.setattr(hashlib, "sha256", lambda data=b"": Blind())
    run(source, tmp_path / "a")
    flip(*place(tmp_path / "a", KEY))
    run(tmp_path / "a", tmp_path / "out")
    assert not np.array_equal(raw(tmp_path / "out")[KEY], raw(source)[KEY])


def test_load_names_a_damaged_tensor(source, tmp_path):
    run(source, tmp_path / "out")
    path, offset = place(tmp_path / "out", KEY)
    flip(path, offset)
    with pytest.raises(ValueError, match=KEY):
        models.load(tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["config.json", manifest.NAME, f"{orbax_store.PARAMS}/_METADATA"]
)
def test_damage_beside_tensors_is_named(source, tmp_path, name):
    run(source, tmp_path / "out")
    flip(tmp_path / "out" / name, 40)
    for arguments in ((source, tmp_path / "out"), (tmp_path / "out", tmp_path / "x")):
        with pytest.raises(ValueError, match=str(tmp_path / "out" / name)):
            run(*arguments)
    assert not (tmp_path / "x").exists()


# --- meshes and memory --------------------------------------------------------------

MESHES = """
import pathlib, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import numpy as safetensors_numpy
from models.conversion import orbax_store

wanted = {}
for path in pathlib.Path(sys.argv[1]).glob("*.safetensors"):
    wanted |= safetensors_numpy.load_file(path)
devices = np.array(jax.devices())
assert devices.size == 8
for shape in ((8, 1), (2, 4), (1, 8)):
    mesh = Mesh(devices.reshape(shape), ("data", "tensor"))

    def sharding(key, sizes):
        fits = len(sizes) >= 2 and sizes[-2] % shape[0] == sizes[-1] % shape[1] == 0
        axes = [None] * (len(sizes) - 2) + ["data", "tensor"] if fits else []
        return NamedSharding(mesh, PartitionSpec(*axes))

    found = orbax_store.restore(sys.argv[2], sharding)
    assert found.keys() == wanted.keys()
    split = 0
    for key, array in found.items():
        assert array.sharding.is_equivalent_to(sharding(key, array.shape), array.ndim)
        assert array.dtype == wanted[key].dtype, key
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, wanted[key][shard.index])
        split += array.addressable_shards[0].data.size * 8 == array.size
    print(shape, split)
"""


def test_restoring_on_another_mesh_reshards(tmp_path):
    run(FOLDERS["moe-bf16"], tmp_path / "out")
    flags = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", MESHES, FOLDERS["moe-bf16"], tmp_path / "out"],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    counts = [int(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]
    assert len(counts) == 3 and min(counts) > 10


MEMORY = """
import pathlib, sys
from models.conversion import convert, plan, stored

small, large, out, part = sys.argv[1:]
stored.PART_BYTES = int(part)
# Not ru_maxrss, which a process inherits from the one that started it.
status = lambda: pathlib.Path("/proc/self/status").read_text()
peak = lambda: int(status().partition("VmHWM:")[2].split()[0]) * 1024
run = lambda a, b: convert.run(plan.make(pathlib.Path(a), pathlib.Path(b)))
run(small, out + "0")
run(out + "0", out + "1")  # every library is loaded now
before = peak()
run(large, out + "2")
run(out + "2", out + "3")
print(peak() - before)
"""
LARGEST = 64 * 2**20


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Two weight files, each one tensor of `LARGEST` bytes."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text("{}")
    data = np.random.default_rng(0).bytes(LARGEST)
    for name in "ab":
        tensor = {name: ("BF16", (LARGEST // 2**13, 2**12), data)}
        write_file(folder / f"{name}.safetensors", tensor)
    return folder


def growth(large, out, part):
    """Return by how many bytes the largest use of memory grows, there and back."""
    command = [sys.executable, "-c", MEMORY, DENSE, large, out / "x", str(part)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_memory_does_not_grow_with_a_tensor(large, tmp_path):
    assert growth(large, tmp_path, 4 * 2**20) < 0.75 * LARGEST


def test_memory_of_whole_tensors_would_be_seen(large, tmp_path):
    """The broken twin: one part a tensor takes more than the bound that is asked."""
    assert growth(large, tmp_path, 2**40) > 1.5 * LARGEST
