"""Why a kernel cannot run a call: the reasons that many kernels share.

Each function returns a reason or None, so `supports` is a chain of them with `or`.
"""

from typing import Any


def device(wanted: str, platform: str, *, interpret: bool) -> str | None:
    """Refuse another platform than `wanted`; `interpret` also accepts a CPU."""
    if platform == wanted or (interpret and platform == "cpu"):
        return None
    return f"needs a {wanted.upper()}; the device is a {platform}"


def not_power_of_two(spec: Any, least: int, *names: str) -> str | None:
    """Refuse sizes that are no power of two or below `least`: Triton's tiles."""
    for name in names:
        size = getattr(spec, name)
        if size < least or size & (size - 1):
            return f"needs {name} to be a power of two >= {least}, not {size}"
    return None


def not_multiple(spec: Any, of: int, *names: str) -> str | None:
    """Refuse sizes that are no multiple of `of`: a TPU's tiles."""
    for name in names:
        size = getattr(spec, name)
        if size % of:
            return f"needs {name} to be a multiple of {of}, not {size}"
    return None


def above(spec: Any, most: int, name: str) -> str | None:
    """Refuse a size above `most`."""
    size = getattr(spec, name)
    return f"takes at most {most} {name}, not {size}" if size > most else None


def dtypes(spec: Any, *kinds: str) -> str | None:
    """Refuse what a kernel that accumulates in float32 cannot take.

    `kinds` are fields of the spec without "_dtype".
    """
    accumulation = getattr(spec, "accumulation_dtype", "float32")
    if accumulation != "float32":
        return f"accumulates in float32, not {accumulation}"
    for kind in kinds:
        name = getattr(spec, f"{kind}_dtype")
        if name not in ("float32", "bfloat16"):
            return f"takes float32 and bfloat16, not {kind} dtype {name}"
    return None
