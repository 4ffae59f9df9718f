"""A small, strict stand-in for `cuda.bindings.driver`, in plain Python.

`FakeCuda` keeps to the rules of CUDA's virtual memory (offset 0, whole handles, no mapping over a mapping), answers
like the bindings, and lends its calls as C function pointers, so that C loops can be run against it.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter, defaultdict
from enum import IntEnum
from typing import Any

MIB = 2**20

VALUES = {"cuInit": 0, "cuMemRelease": 0, "cuMemMap": 0, "cuMemSetAccess": 0, "cuMemUnmap": 0, "cuMemAddressFree": 0}
VALUES |= {"cuMemcpyAsync": 0, "cuMemHostRegister": 0, "cuMemHostUnregister": 0}
VALUES |= {"cuCtxSetCurrent": 0, "cuDevicePrimaryCtxRelease": 0, "cuMemGetInfo": 2, "cuGetProcAddress": 2}
"""Values beside the result code in a function's answer, where it is not one; on failure they are None."""


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_UNKNOWN = 999


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Struct(ctypes.Structure):
    def getPtr(self) -> int:
        return ctypes.addressof(self)


class _Properties(_Struct):
    _fields_ = (
        ("type", ctypes.c_int),
        ("requestedHandleTypes", ctypes.c_int),
        ("location", _Location),
        ("win32HandleMetaData", ctypes.c_void_p),
        ("allocFlags", ctypes.c_ubyte * 8),
    )


class _Access(_Struct):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class FakeCuda:
    """Stands in for the module `cuda.bindings.driver`.

    Attributes
    ----------
    scripted : dict of str to list of int
        Codes that the next calls of a function answer instead of doing anything; 0 means do it.
    values : dict of str to object
        Values that a function answers with success.
    calls : Counter
        Calls of each function.
    takes_read_only : bool
        Whether device memory can be mapped read-only.
    """

    CUresult = CUresult
    CUmemAllocationProp = _Properties
    CUmemAccessDesc = _Access
    CUdevice_attribute = IntEnum("A", {"CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 102})
    CUmemAllocationGranularity_flags = IntEnum(
        "G", {"CU_MEM_ALLOC_GRANULARITY_MINIMUM": 0, "CU_MEM_ALLOC_GRANULARITY_RECOMMENDED": 1}
    )
    CUmemAllocationType = IntEnum("T", {"CU_MEM_ALLOCATION_TYPE_PINNED": 1})
    CUmemLocationType = IntEnum("L", {"CU_MEM_LOCATION_TYPE_DEVICE": 1})
    CUmemAccess_flags = IntEnum("F", {"CU_MEM_ACCESS_FLAGS_PROT_READ": 1, "CU_MEM_ACCESS_FLAGS_PROT_READWRITE": 3})
    CUstreamCaptureMode = IntEnum("M", {"CU_STREAM_CAPTURE_MODE_GLOBAL": 0, "CU_STREAM_CAPTURE_MODE_RELAXED": 2})

    def __init__(self, total_bytes: int = 1 << 30, devices: int = 2) -> None:
        self.total_bytes = total_bytes
        self.devices = devices
        self.scripted: dict[str, list[int]] = defaultdict(list)
        self.values: dict[str, Any] = {}
        self.calls: Counter[str] = Counter()
        self.reservations: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.mappings: dict[int, int] = {}  # address -> handle
        self.accessible: dict[int, int] = {}  # address -> flags
        self.takes_read_only = True
        self.contexts = 0
        self.thread = threading.local()
        self.synchronized: list[int] = []
        self.copies: list[tuple[int, int, int, int]] = []
        self.registered: dict[int, int] = {}
        self._next = 1 << 40
        self._next_handle = 1 << 33
        self._entries = self._lend()

    def __getattribute__(self, name: str) -> Any:
        attribute = super().__getattribute__(name)
        return self._scripted_call(name, attribute) if name.startswith("cu") else attribute

    def _scripted_call(self, name: str, function: Any) -> Any:
        def call(*args: Any) -> tuple[Any, ...]:
            self.calls[name] += 1
            script = self.scripted[name]
            if script and (code := script.pop(0)):
                known = code in list(CUresult)
                return (CUresult(code) if known else code, *[None] * VALUES.get(name, 1))
            if name in self.values:
                return (CUresult.CUDA_SUCCESS, self.values[name], *[None] * (VALUES.get(name, 1) - 1))
            code, *values = function(*args)
            return (CUresult(code), *values)

        return call

    # --- start-up, contexts, capture -----------------------------------------------------------------------------

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return (0,)

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return 0, self.devices

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        return (0, index) if index < self.devices else (1, None)

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Any, ...]:
        return 0, 1

    def cuMemGetAllocationGranularity(self, properties: _Properties, flag: int) -> tuple[Any, ...]:
        return 0, 2 * MIB

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        self.contexts += 1
        return 0, 1000 + device

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[Any, ...]:
        self.contexts -= 1
        return (0,)

    def cuCtxGetCurrent(self) -> tuple[Any, ...]:
        return 0, getattr(self.thread, "context", 0)

    def cuCtxSetCurrent(self, context: int) -> tuple[Any, ...]:
        self.thread.context = context
        return (0,)

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> tuple[Any, ...]:
        before = getattr(self.thread, "mode", 0)
        self.thread.mode = mode
        return 0, before

    def cuMemGetInfo(self) -> tuple[Any, ...]:
        if not getattr(self.thread, "context", 0):
            return 1, None, None
        return 0, self.total_bytes - sum(self.handles.values()), self.total_bytes

    def cuCtxSynchronize(self) -> tuple[Any, ...]:
        self.synchronized.append(getattr(self.thread, "context", 0))
        return (0,)

    # --- virtual memory ------------------------------------------------------------------------------------------

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[Any, ...]:
        at = self._next
        self._next += size
        self.reservations[at] = size
        return 0, at

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Any, ...]:
        if self.reservations.get(address) != size or self._mapped_in(address, size):
            return (1,)
        del self.reservations[address]
        return (0,)

    def cuMemCreate(self, size: int, properties: _Properties, flags: int) -> tuple[Any, ...]:
        if properties.type != 1 or properties.location.type != 1 or flags or size % (2 * MIB):
            return 1, None
        if sum(self.handles.values()) + size > self.total_bytes:
            return 2, None
        self._next_handle += 1
        self.handles[self._next_handle] = size
        return 0, self._next_handle

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        return (0,) if self.handles.pop(handle, None) else (1,)

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[Any, ...]:
        inside = any(at <= address and address + size <= at + room for at, room in self.reservations.items())
        if offset or flags or self.handles.get(handle) != size or not inside or self._mapped_in(address, size):
            return (1,)
        self.mappings[address] = handle
        return (0,)

    def cuMemSetAccess(self, address: int, size: int, access: Any, count: int) -> tuple[Any, ...]:
        flags, mapped = access[0].flags, self._mapped_in(address, size)
        right = count == 1 and flags in {1, 3} and access[0].location.type == 1
        if not right or sum(self.handles[self.mappings[at]] for at in mapped) != size or min(mapped) < address:
            return (1,)
        if flags == 1 and not self.takes_read_only:
            return (801,)
        self.accessible.update(dict.fromkeys(mapped, flags))
        return (0,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Any, ...]:
        mapped = self._mapped_in(address, size)
        if sum(self.handles[self.mappings[at]] for at in mapped) != size or min(mapped, default=-1) < address:
            return (1,)
        for at in mapped:
            del self.mappings[at]
            self.accessible.pop(at, None)
        return (0,)

    # --- host memory, for which a context must be current --------------------------------------------------------

    def cuMemcpyAsync(self, target: int, source: int, num_bytes: int, stream: int) -> tuple[Any, ...]:
        self.copies.append((target, source, num_bytes, stream))
        return (0,) if getattr(self.thread, "context", 0) else (1,)

    def cuMemHostRegister(self, address: int, num_bytes: int, flags: int) -> tuple[Any, ...]:
        if address in self.registered or not getattr(self.thread, "context", 0):
            return (1,)
        self.registered[address] = num_bytes
        return (0,)

    def cuMemHostUnregister(self, address: int) -> tuple[Any, ...]:
        return (0,) if self.registered.pop(address, None) else (1,)

    def _mapped_in(self, address: int, size: int) -> list[int]:
        return [
            at
            for at, handle in self.mappings.items()
            if at < address + size and at + self.handles.get(handle, 0) > address
        ]

    # --- the same calls as C functions -----------------------------------------------------------------------------

    def cuGetProcAddress(self, name: bytes, version: int, flags: int) -> tuple[Any, ...]:
        function = self._entries.get(name.decode())
        return (0, ctypes.cast(function, ctypes.c_void_p).value if function else 0, 0)

    def _lend(self) -> dict[str, Any]:
        word, size, pointer, number = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int

        def create(handle: Any, num_bytes: int, properties: int, flags: int) -> int:
            code, made, *_ = self.cuMemCreate(num_bytes, _Properties.from_address(properties), flags)
            handle[0] = made or 0
            return int(code)

        def grant(address: int, num_bytes: int, access: int, count: int) -> int:
            return int(self.cuMemSetAccess(address, num_bytes, [_Access.from_address(access)], count)[0])

        return {
            "cuMemCreate": ctypes.CFUNCTYPE(number, ctypes.POINTER(word), size, pointer, word)(create),
            "cuMemRelease": ctypes.CFUNCTYPE(number, word)(lambda h: int(self.cuMemRelease(h)[0])),
            "cuMemMap": ctypes.CFUNCTYPE(number, word, size, size, word, word)(lambda *a: int(self.cuMemMap(*a)[0])),
            "cuMemSetAccess": ctypes.CFUNCTYPE(number, word, size, pointer, size)(grant),
            "cuMemUnmap": ctypes.CFUNCTYPE(number, word, size)(lambda *a: int(self.cuMemUnmap(*a)[0])),
        }
