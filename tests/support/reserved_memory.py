"""Address ranges most of which have nothing behind them, for kernels on the CPU: a read too far ends the process."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

_NONE, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class ReservedMemory:
    """One reserved range. Keep it alive as long as its tensors."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.address = _libc.mmap(None, num_bytes, _NONE, _FLAGS, -1, 0)
        if self.address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), f"no {num_bytes} bytes of addresses")

    def tensor(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """Strided tensor over the range; nothing is read."""
        buffer = (ctypes.c_char * self.num_bytes).from_address(self.address)
        return torch.frombuffer(buffer, dtype=dtype).as_strided(shape, strides, offset)

    def map_rows(self, rows: Tensor) -> None:
        """Put zeroed memory behind the OS pages that a tensor's span touches."""
        span = sum((extent - 1) * stride for extent, stride in zip(rows.shape, rows.stride(), strict=True)) + 1
        begin = rows.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        end = -(-(rows.data_ptr() + span * rows.element_size()) // mmap.PAGESIZE) * mmap.PAGESIZE
        if _libc.mprotect(begin, end - begin, _READ_WRITE):
            raise OSError(ctypes.get_errno(), "mprotect")

    def close(self) -> None:
        """Give the addresses back."""
        _libc.munmap(self.address, self.num_bytes)
