"""A mesh of devices: how it is asked for, used, and read back from.

    with mesh.use(mesh.make("data=2,tensor=4")):
        ...

The axes are `data` (rows of the batch), `tensor` (heads) and `expert` (experts), see
treewy_jax.sharding. One program runs on all processes: each calls `join` first, makes
the same mesh over the devices of all, and passes the same arguments.
"""

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

AXES = ("data", "tensor", "expert")

AnyMesh = Mesh | jax.sharding.AbstractMesh


def join(text: str) -> None:
    """Join the processes that run one program; to be called before JAX first computes.

    Args:
        text: "HOST:PORT,PROCESSES,NUMBER": where the first process listens, how many
            there are, and which of them this is, from 0; or "auto", where the cluster
            tells (`jax.distributed.initialize` asks Slurm, Open MPI, Kubernetes).

    Raises:
        ValueError: another text, or no cluster that tells.
    """
    found = re.fullmatch(r"([^\s,]+:[0-9]{1,5}),([0-9]{1,6}),([0-9]{1,6})", text)
    if found is None and text != "auto":
        raise ValueError(
            f"distributed {text!r}: allowed are HOST:PORT,PROCESSES,NUMBER and auto"
        )
    if found is not None and int(found[3]) >= int(found[2]):
        raise ValueError(
            f"distributed {text!r}: process {found[3]} of {found[2]}; numbers from 0 "
            "and below that are allowed"
        )
    if found is None:
        jax.distributed.initialize()
    else:
        jax.distributed.initialize(found[1], int(found[2]), int(found[3]))


def parse(text: str) -> dict[str, int]:
    """Read "data=2,tensor=4"; axes that are not named get one device.

    Raises:
        ValueError: one line that says what is wrong and what is allowed.
    """
    allowed = f"AXIS=DEVICES, separated by commas, with axes {', '.join(AXES)}"
    sizes: dict[str, int] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\w+)\s*=\s*([0-9]{1,6})\s*", part)
        if found is None or int(found[2]) == 0:
            raise ValueError(f"mesh {text!r}: {part!r} came; allowed: {allowed}")
        if found[1] in sizes:
            raise ValueError(f"mesh {text!r}: axis {found[1]!r} came twice")
        sizes[found[1]] = int(found[2])
    _check_axes(sizes)
    return sizes


def make(sizes: str | Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """Return a mesh of the first devices (None: of all processes) in these sizes.

    >>> make("tensor=1").axis_names
    ('data', 'tensor', 'expert')

    Raises:
        ValueError: an unknown axis, or more devices than there are; with several
            processes, not all of them.
    """
    sizes = parse(sizes) if isinstance(sizes, str) else dict(sizes)
    _check_axes(sizes)
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    devices = jax.devices() if devices is None else list(devices)
    wanted = math.prod(shape)
    asked = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    if wanted > len(devices):
        raise ValueError(
            f"mesh {asked}: {wanted} devices are needed; there are {len(devices)}"
            f"{_advice(devices, wanted)}"
        )
    if jax.process_count() > 1 and wanted != len(devices):
        raise ValueError(
            f"mesh {asked}: {wanted} devices; with {jax.process_count()} processes all "
            f"{len(devices)} are needed"
        )
    types_ = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(shape, AXES, devices=devices[:wanted], axis_types=types_)


def _advice(devices, wanted) -> str:
    if devices[0].platform != "cpu":
        return ""
    return f" (JAX_NUM_CPU_DEVICES={wanted} makes as many of a CPU)"


def _check_axes(sizes: Mapping[str, int]) -> None:
    for axis, size in sizes.items():
        if axis not in AXES:
            raise ValueError(
                f"mesh axis {axis!r} is unknown; allowed are {', '.join(AXES)}"
            )
        if size < 1:
            raise ValueError(f"mesh axis {axis} is {size}; 1 or more is allowed")


def normal(mesh: Mesh) -> Mesh:
    """Return a mesh with all `AXES`, of type Auto, over the same devices.

    Raises:
        ValueError: the mesh has an axis of another name.
    """
    _check_axes(dict(mesh.shape))
    if mesh.axis_names == AXES and set(mesh.axis_types) == {AxisType.Auto}:
        return mesh
    order = [mesh.axis_names.index(axis) for axis in AXES if axis in mesh.axis_names]
    shape = [dict(mesh.shape).get(axis, 1) for axis in AXES]
    devices = np.transpose(mesh.devices, order).reshape(shape)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def use(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """Run what is called inside on the mesh; None changes nothing."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(normal(mesh))


def check_batch(batch: int, mesh: AnyMesh | None) -> None:
    """Raise ValueError where the rows of a batch cannot be spread over the mesh."""
    parts = 1 if mesh is None else dict(mesh.shape).get("data", 1)
    if batch % parts:
        raise ValueError(
            f"mesh axis data is {parts}, the batch has {batch} rows; a multiple of "
            f"{parts} is allowed"
        )


def fetch(tree: Any) -> Any:
    """Return a pytree of arrays as numpy ones, also those that lie in other processes.

    With several processes all of them have to call it.
    """

    def one(x):
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return (
                x
                if x.is_fully_replicated
                else multihost_utils.process_allgather(x, tiled=True)
            )
        return x

    return jax.device_get(jax.tree.map(one, tree))
