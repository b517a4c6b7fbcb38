"""Which device runtime host memory is registered with, if any."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import jax

from shmstage.errors import HostRegistrationError
from shmstage.trainer.cuda_host import CudaHostRegistry
from shmstage.trainer.registration import HostRegistry


def devices_of(shardings: Iterable[jax.sharding.Sharding]) -> set[Any]:
    """All devices that arrays with these shardings lie on."""
    return {device for sharding in shardings for device in sharding.device_set}


def registry_for(devices: Collection[Any]) -> HostRegistry:
    """Raises ``HostRegistrationError`` where uploads to ``devices`` do not read the pool, or nobody can register it."""
    platforms = {device.platform for device in devices}
    if "cpu" in platforms:
        raise HostRegistrationError("on the CPU backend uploads are copies between host buffers")
    if platforms != {"gpu"}:
        raise HostRegistrationError(f"no runtime to register with on {', '.join(sorted(platforms)) or 'no device'}")
    process = jax.process_index()
    local = [device for device in devices if device.process_index == process]
    if not local:
        raise HostRegistrationError("none of the devices belongs to this process")
    version = " ".join(str(local[0].client.platform_version).split())
    if "rocm" in version.lower():
        raise HostRegistrationError(f"no CUDA runtime: the devices are driven by {version[:80]}")
    # JAX says -1 or nothing where it does not know
    return CudaHostRegistry(max(0, min(int(device.local_hardware_id or 0) for device in local)))
