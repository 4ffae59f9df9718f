"""Which devices a cache could use here, and why not the others. It opens each driver once and closes it again."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import BackendUnavailableError, DriverError, SlicedKVError
from ..vmm import Driver, open_driver

__all__ = ["DeviceReport", "choose_device", "device_names", "probe"]

_PREFERENCE = ("cuda", "host")
_LARGEST_RESERVATION = 1 << 47  # no user process has more addresses than this on the CPUs and GPUs supported


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What a device offers.

    Attributes
    ----------
    device : str
        The name asked for.
    reason : str or None
        None when a cache can be opened there, else why not; then the rest is empty.
    torch_device : str
        Device of the tensors.
    granularity_bytes : int
        Smallest page.
    free_bytes, total_bytes : int
        Physical memory now.
    address_bytes : int
        Largest power of two that could be reserved as one range of addresses.
    """

    device: str
    reason: str | None = None
    torch_device: str = ""
    granularity_bytes: int = 0
    free_bytes: int = 0
    total_bytes: int = 0
    address_bytes: int = 0


def device_names() -> list[str]:
    """Devices worth asking about: the host and every GPU that torch sees, or the first when it sees none."""
    return ["host", *(f"cuda:{index}" for index in range(max(1, torch.cuda.device_count())))]


def probe(device: str) -> DeviceReport:
    """Open a device's driver, look, and close it. Raises `ConfigError` when `device` names no device."""
    try:
        driver = open_driver(device)
    except (BackendUnavailableError, DriverError) as error:
        return DeviceReport(device, str(error))
    try:
        torch.empty(0, device=driver.torch_device)
        free_bytes, total_bytes = driver.memory_info()
        room = _address_room(driver)
        return DeviceReport(device, None, driver.torch_device, driver.granularity, free_bytes, total_bytes, room)
    except (SlicedKVError, RuntimeError, AssertionError) as error:  # torch: no driver found; not compiled for CUDA
        return DeviceReport(device, f"torch cannot use {driver.torch_device}: {error}")
    finally:
        driver.close()


def choose_device(wanted: str) -> DeviceReport:
    """Return the device of that name. "auto" is the GPU if it can be used, else the host.

    Raises
    ------
    BackendUnavailableError
        It cannot be used; the message says why.
    """
    reports = map(probe, _PREFERENCE if wanted == "auto" else (wanted,))
    reasons = []
    for report in reports:
        if report.reason is None:
            return report
        reasons.append(report.reason)
    raise BackendUnavailableError("; ".join(reasons))


def _address_room(driver: Driver) -> int:
    size = _LARGEST_RESERVATION
    while size >= driver.granularity:
        try:
            driver.free_reservation(driver.reserve(size), size)
        except DriverError:
            size //= 2
        else:
            return size
    return 0
