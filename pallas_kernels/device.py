"""What the next compilation is for."""

import jax


def target() -> tuple[str, str]:
    """Return platform ("cpu", "gpu", "tpu") and kind of the device compiled for.

    An abstract mesh with an abstract device (compilation without the device) comes
    before the default backend.
    """
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is None:
        return jax.default_backend(), jax.devices()[0].device_kind
    platform = "gpu" if abstract.platform in ("cuda", "rocm") else abstract.platform
    return platform, abstract.device_kind


def platform() -> str:
    """Return "cpu", "gpu" or "tpu": what the next compilation is for."""
    return target()[0]
