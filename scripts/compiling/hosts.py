"""Several devices of one host to compile for, none of which need be there.

H200x8 is a host of eight GPUs; the topology of a TPU names all its devices itself.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental import topologies

from scripts.compiling import targets
from treewy_jax import mesh as mesh_lib

GPU_HOST = re.compile(r"(\w+?)(?:x([1-9]\d?))?")


@dataclasses.dataclass(frozen=True)
class Host:
    """Devices of one kind; `count` is that of GPUs, a TPU's topology tells its own."""

    name: str
    target: targets.Target
    count: int | None

    @property
    def memory(self) -> int | None:
        """Bytes of a device; None for a TPU, whose compiler refuses what is more."""
        gpu = targets.GPUS.get(self.target.name)
        return None if gpu is None else gpu.memory


def parse(name: str) -> Host:
    """Read the name of a host, such as H200, B200x8 or v5p:2x2x2.

    Raises ValueError for any other name.
    """
    found = GPU_HOST.fullmatch(name)
    if found is not None and found[1] in targets.GPUS:
        return Host(name, targets.parse(found[1]), int(found[2] or 1))
    if targets.TPU_NAME.fullmatch(name):
        return Host(name, targets.parse(name), None)
    gpus = ", ".join(f"{gpu}, {gpu}x8" for gpu in targets.GPUS)
    raise ValueError(
        f"target is {name!r}; allowed: {gpus}, or a TPU topology such as v5p:2x2x2"
    )


def devices(host: Host) -> list[Any]:
    """Return the devices as XLA describes them; nothing is opened."""
    if host.count is None:
        options = dict(platform="tpu", topology_name=host.name)
    else:
        options = dict(
            platform="cuda",
            topology=f"1x1x{host.count}",
            target_config=targets.target_config(host.target),
        )
    return list(topologies.get_topology_desc(**options).devices)


def mesh(host: Host, sizes: str | Mapping[str, int] | None = None) -> jax.sharding.Mesh:
    """Return a mesh of all devices of a host; by default heads are spread over them.

    Raises ValueError where `sizes` are not those of all devices.
    """
    found = devices(host)
    if sizes is None:
        sizes = {"tensor": len(found)}
    made = mesh_lib.make(sizes, found)
    if made.size != len(found):
        raise ValueError(
            f"mesh is {sizes}: {made.size} devices; {host.name} has {len(found)}, and "
            "all are needed"
        )
    return made


def abstract(host: Host, mesh: jax.sharding.Mesh) -> jax.sharding.AbstractMesh:
    """Return the mesh to trace with, which also tells kernels what they are for."""
    kind = mesh.devices.flat[0].device_kind
    if host.count is not None:
        kind = f"NVIDIA {host.target.name}"
    device = jax.sharding.AbstractDevice(kind, 1, host.target.platform)
    return jax.sharding.AbstractMesh(
        mesh.axis_sizes, mesh.axis_names, mesh.axis_types, abstract_device=device
    )
