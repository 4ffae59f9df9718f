"""Virtual-memory drivers: one contract (`base`), one file for each kind of memory, and `open_driver` to pick one.

Importing this package loads no driver, so neither CUDA nor torch is needed until a driver is opened.
"""

from __future__ import annotations

from ..errors import ConfigError
from .base import Copy, Driver, Fence, MappedRange, MemoryInfo, Run

__all__ = ["Copy", "Driver", "Fence", "MappedRange", "MemoryInfo", "Run", "open_driver"]


def open_driver(device: object) -> Driver:
    """Open the driver for a device.

    Parameters
    ----------
    device : str or torch.device
        "cpu" or "host"; "cuda" for torch's current CUDA device, or "cuda:<index>".

    Raises
    ------
    ConfigError
        `device` is none of these.
    BackendUnavailableError
        The device, its driver or a package for it is missing.
    """
    kind, colon, index = str(device).partition(":")
    if kind in {"cpu", "host"} and not colon:
        from .host import HostDriver

        return HostDriver()
    if kind == "cuda" and (index.isdecimal() or not colon):
        from .cuda import CudaDriver

        return CudaDriver(int(index) if colon else _current_cuda_device())
    raise ConfigError(f'device is {str(device)!r}; it must be "cpu", "host", "cuda" or "cuda:<index>"')


def _current_cuda_device() -> int:
    import torch

    return torch.cuda.current_device() if torch.cuda.is_available() else 0
