"""Compiles for a GPU or TPU that is not there: targets by name, and `compile_for`.

The compilers come with jax-cuda13-plugin, jax-cuda13-pjrt, nvidia-cuda-nvcc (ptxas and
libdevice) and libtpu; no driver and no device is needed.
"""

import dataclasses
import importlib.metadata
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

DEFAULT = ("H200", "B200", "v5e:2x2", "v5p:2x2x1", "v6e:2x4")
PACKAGES = {
    "cuda": ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc"),
    "tpu": ("libtpu",),
}
TPU_NAME = re.compile(r"(v4|v5e|v5p|v6e|tpu7x):[1-9]\d*(x[1-9]\d*)+")

# No metadata server to ask and no device for libtpu's lock to guard. Without a type and
# a name of the host libtpu warns; what is compiled for comes from the target alone.
TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What XLA asks of a GPU that it compiles for; sizes in bytes, from data sheets.

    Only the compute capability and the limits decide what is generated; the other
    figures feed XLA's cost model. `shared_memory` is the most that one block may get.
    """

    capability: tuple[int, int]
    cores: int
    memory: int
    bandwidth: int
    l2_cache: int
    clock_ghz: float
    shared_memory: int = 232448


GPUS = {
    "H200": Gpu((9, 0), 132, 150754820096, 4800000000000, 62914560, 1.98),
    "B200": Gpu((10, 0), 148, 191503523840, 7672000000000, 132644864, 1.965),
}


@dataclasses.dataclass(frozen=True)
class Target:
    """A device to compile for; `platform` is cuda or tpu, as XLA names them."""

    name: str
    platform: str

    @property
    def shared_memory(self) -> int | None:
        """Bytes of shared memory that a block may get; None for a TPU."""
        return GPUS[self.name].shared_memory if self.name in GPUS else None


def parse(name: str) -> Target:
    """Read a target's name: a GPU, or a TPU topology such as v5e:2x2.

    Raises ValueError for any other name.
    """
    if name in GPUS:
        return Target(name, "cuda")
    if TPU_NAME.fullmatch(name):
        return Target(name, "tpu")
    raise ValueError(
        f"target is {name!r}; allowed: {', '.join(GPUS)}, or a TPU topology such as "
        "v5e:2x2 (v4, v5e, v5p, v6e, tpu7x)"
    )


def missing(target: Target) -> list[str]:
    """Return the packages that compiling for the target needs and that are absent."""
    return [name for name in PACKAGES[target.platform] if not version(name)]


def version(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def ptxas() -> str:
    """Return the path of ptxas: that of the nvidia-cuda-nvcc package, else of PATH.

    Raises FileNotFoundError where there is none.
    """
    if version("nvidia-cuda-nvcc"):
        for file in importlib.metadata.files("nvidia-cuda-nvcc") or ():
            if file.name == "ptxas":
                return str(pathlib.Path(file.locate()).resolve())
    found = shutil.which("ptxas")
    if found is None:
        raise FileNotFoundError("ptxas: install nvidia-cuda-nvcc")
    return found


def prepare(target: Target) -> None:
    """Set what JAX and the compilers read from the environment, for later processes.

    In the process itself it has to come before JAX first computes. JAX stays on the
    CPU, or it would look for the devices of the plugins.
    """
    jax.config.update("jax_platforms", "cpu")
    os.environ["JAX_PLATFORMS"] = "cpu"
    if target.platform == "tpu":
        for name, value in TPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        return
    # XLA takes the first ptxas of PATH: the one whose spills are then reported.
    folder = str(pathlib.Path(ptxas()).parent)
    path = os.environ.get("PATH", "").split(os.pathsep)
    if path[0] != folder:
        os.environ["PATH"] = os.pathsep.join([folder, *path])


def compile_for(
    target: Target,
    function: Callable,
    *shapes: Any,
    donate: Sequence[int] = (),
    compiler_options: Mapping[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Compile a function for one device of a target, without the device.

    Args:
      target: what to compile for; see `prepare` and `missing`.
      function: what jax.jit takes; it sees the target through
        jax.sharding.get_abstract_mesh().abstract_device.
      shapes: one pytree an argument, of arrays or jax.ShapeDtypeStruct.
      donate: positions of arguments that may be overwritten.
      compiler_options: options of XLA, such as those of `dump_options`.

    Whatever XLA or the kernel compilers refuse is raised as they raise it. Memory of
    the device is not checked: compare memory_analysis() with it.
    """
    devices = _devices(target)
    mesh = jax.sharding.Mesh(np.array(devices[:1]), ("device",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
    )
    with jax.sharding.use_abstract_mesh(_abstract_mesh(target, devices[0])):
        traced = jax.jit(function, donate_argnums=donate).trace(*placed)
        lowered = traced.lower(lowering_platforms=(target.platform,))
    return lowered.compile(compiler_options=dict(compiler_options or {}))


def dump_options(target: Target, folder: str) -> dict[str, str]:
    """Return the options that make XLA write a GPU's PTX and launches to a folder."""
    if target.platform == "tpu":
        return {}
    return {"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"}


def _devices(target: Target) -> list[Any]:
    if target.platform == "tpu":
        description = topologies.get_topology_desc(
            platform="tpu", topology_name=target.name
        )
    else:
        description = topologies.get_topology_desc(
            platform="cuda", topology="1x1x1", target_config=target_config(target)
        )
    return list(description.devices)


def _abstract_mesh(target: Target, device: Any) -> jax.sharding.AbstractMesh:
    """Return the mesh that tells kernels which device they are traced for."""
    kind = f"NVIDIA {target.name}" if target.name in GPUS else device.device_kind
    abstract = jax.sharding.AbstractDevice(kind, 1, target.platform)
    return jax.sharding.AbstractMesh((), (), abstract_device=abstract)


def target_config(target: Target) -> str:
    """Return XLA's GpuTargetConfigProto of a GPU, as text."""
    gpu = GPUS[target.name]
    major, minor = gpu.capability
    info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "threads_per_core_limit": 2048,
        "shared_memory_per_block": 48 * 1024,
        "shared_memory_per_block_optin": gpu.shared_memory,
        "shared_memory_per_core": gpu.shared_memory + 1024,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "core_count": gpu.cores,
        "fpus_per_core": 128,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "memory_bandwidth": gpu.bandwidth,
        "device_memory_size": gpu.memory,
        "l2_cache_size": gpu.l2_cache,
        "clock_rate_ghz": gpu.clock_ghz,
    }
    fields = " ".join(f"{name}: {value}" for name, value in info.items())
    capability = f"cuda_compute_capability {{ major: {major} minor: {minor} }}"
    return (
        f"gpu_device_info {{ {fields} {capability} }} "
        'platform_name: "CUDA" '
        "dnn_version_info { major: 9 minor: 12 patch: 0 } "
        "runtime_version { major: 13 minor: 0 patch: 0 } "
        f'device_description_str: "NVIDIA {target.name}"'
    )
