"""`CudaDriver`: virtual memory of one CUDA device through the driver API. The only module that imports cuda.bindings.

Finds the device, and keeps threads and graph captures in order. `calls` makes the memory calls, `copies` moves bytes,
`streams` knows torch's streams. Must not know what is mapped where, or why.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

from ...errors import BackendUnavailableError, DriverError
from .. import native
from ..base import Copy, Fence, MemoryInfo
from ..ledger import Mappings
from ..strict import Outcome, StrictDriver
from .calls import ENTRY_POINTS, NativeCalls, PythonCalls, access_descriptor, allocation_properties, set_access
from .copies import HostCopies
from .streams import TorchStreams

__all__ = ["CudaDriver"]

_INVALID_VALUE = (1, "CUDA_ERROR_INVALID_VALUE")
_ENTRY_POINT_VERSION = 10020  # the virtual-memory calls came with CUDA 10.2
_SHORTEST_NAP_S, _LONGEST_NAP_S = 20e-6, 1e-3  # between two looks at a fence


class CudaDriver(StrictDriver):
    """Virtual memory on a CUDA device.

    All verbs are thread-safe, and only `wait_fence` and `synchronize` wait for the GPU. In a forked child every verb
    but `close` raises `StateError`, as CUDA itself does not survive a fork.

    Parameters
    ----------
    device_index : int
        CUDA device.
    api : object, optional
        Stands in for the module `cuda.bindings.driver`; for tests.

    Raises
    ------
    BackendUnavailableError
        cuda-bindings, the NVIDIA driver or the device is missing, or the device has no virtual memory management.
    """

    name = "cuda"

    def __init__(self, device_index: int, api: Any = None) -> None:
        self.torch_device = f"cuda:{device_index}"
        self._index = device_index
        self._api: Any = _load_bindings() if api is None else api
        device = self._find_device()
        self._properties = allocation_properties(self._api, device_index)
        self._access = access_descriptor(self._api, device_index)
        super().__init__(self._find_granularity(), _INVALID_VALUE)
        self._context = self._probe("cuDevicePrimaryCtxRetain", device)
        self._device = device
        self._threads = threading.local()
        self._streams = TorchStreams(device_index)
        self._copies = HostCopies(self._api, self._streams, self._value)
        self._calls = self._find_calls()
        self._can_protect: bool | None = None

    # --- finding out what there is ---------------------------------------------------------------------------------

    def _probe(self, call: str, *args: Any) -> Any:
        """Make one call of the start-up and return its value. Whatever goes wrong, the device is not usable."""
        try:
            result, *values = getattr(self._api, call)(*args)
            code = int(result)
        except (AttributeError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise BackendUnavailableError(
                f"{self.torch_device} cannot be used, {call} raised {type(error).__name__}: {error}. Install the "
                "NVIDIA driver, and cuda-bindings >= 12.9.1 (pip install 'slicedkv[cuda]')"
            ) from error
        if code:
            raise BackendUnavailableError(
                f"{self.torch_device} cannot be used, {call} answered {self._name_of(code)} ({code}). Check that "
                "nvidia-smi lists the device and that the NVIDIA driver is not older than CUDA 12"
            )
        return values[0] if values else None

    def _find_device(self) -> Any:
        self._probe("cuInit", 0)
        count = self._probe("cuDeviceGetCount")
        if not 0 <= self._index < count:
            raise BackendUnavailableError(f"{self.torch_device} asked for, but there are {count} CUDA devices")
        device = self._probe("cuDeviceGet", self._index)
        attribute = self._api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not self._probe("cuDeviceGetAttribute", attribute, device):
            raise BackendUnavailableError(
                f"{self.torch_device} has no virtual memory management, which slicedkv needs; use another GPU"
            )
        return device

    def _find_granularity(self) -> int:
        """The recommended granularity, or the minimum where the driver recommends none."""
        flags = self._api.CUmemAllocationGranularity_flags
        try:
            answer = self._probe(
                "cuMemGetAllocationGranularity", self._properties, flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
            )
        except BackendUnavailableError:
            answer = self._probe(
                "cuMemGetAllocationGranularity", self._properties, flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
            )
        granularity = int(answer)
        if granularity <= 0 or granularity & (granularity - 1):
            raise BackendUnavailableError(
                f"{self.torch_device} cannot be used: its allocation granularity is {granularity} bytes"
            )
        return granularity

    def _find_calls(self) -> PythonCalls | NativeCalls:
        """The C loops when they are built and the driver tells where its calls are, else Python loops."""
        module = native.load()
        entry: dict[str, int] = {}
        for name in ENTRY_POINTS if module is not None else ():
            try:
                entry[name] = int(self._probe("cuGetProcAddress", name.encode(), _ENTRY_POINT_VERSION, 0) or 0)
            except BackendUnavailableError:
                entry[name] = 0
        if module is None or not all(entry.values()):
            return PythonCalls(self._api, self._properties, self._access)
        return NativeCalls(module, entry, self._properties, self._access)

    @property
    def can_protect(self) -> bool:
        """Whether the driver takes read-only access to device memory. The first time, tries it out on one page."""
        if self._can_protect is None:
            size = self._granularity
            with ExitStack() as undo:
                address = self.reserve(size)
                undo.callback(self.free_reservation, address, size)
                handle = self.create(size)
                undo.callback(self.release, handle)
                self.map_run(address, (handle,), size)
                undo.callback(self.unmap_run, address, size)
                codes = [self._protect(address, size, writable=writable) for writable in (False, True)]
            self._can_protect = not any(codes)
        return self._can_protect

    # --- threads, contexts and graph capture ---------------------------------------------------------------------

    def _enter(self) -> None:
        super()._enter()
        if not getattr(self._threads, "has_context", False):
            # Recent drivers make memory calls without a context, older ones do not.
            if not int(self._value("context", self._api.cuCtxGetCurrent())):
                self._value("context", self._api.cuCtxSetCurrent(self._context))
            self._threads.has_context = True

    @contextmanager
    def _own_context(self) -> Iterator[None]:
        """Make this device's context the current one for a moment."""
        current = self._value("context", self._api.cuCtxGetCurrent())
        self._value("context", self._api.cuCtxSetCurrent(self._context))
        try:
            yield
        finally:
            self._value("context", self._api.cuCtxSetCurrent(current))

    def bind_thread(self) -> None:
        """Give the calling thread this device's context, and keep its calls out of every graph capture.

        Do not bind a thread that captures graphs itself.
        """
        super()._enter()
        if getattr(self._threads, "relaxed", False):
            return
        self._value("context", self._api.cuCtxSetCurrent(self._context))
        self._exchange_capture_mode(self._api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        self._threads.has_context = True
        self._threads.relaxed = True

    def _exchange_capture_mode(self, mode: Any) -> Any:
        return self._value("capture_mode", self._api.cuThreadExchangeStreamCaptureMode(mode))

    @contextmanager
    def _outside_capture(self) -> Iterator[None]:
        """Let this thread make calls that would break a graph if some thread captures one in a strict mode."""
        if getattr(self._threads, "relaxed", False):
            yield
            return
        before = self._exchange_capture_mode(self._api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            yield
        finally:
            self._exchange_capture_mode(before)

    def _value(self, op: str, answer: tuple[Any, ...]) -> Any:
        """Return the value of a binding's answer ``(result, value)``, or raise `DriverError` if it failed."""
        code = int(answer[0])
        if code:
            raise self._error(op, code)
        return answer[1] if len(answer) > 1 else None

    def _name_of(self, code: int) -> str:
        try:
            return str(self._api.CUresult(code).name)
        except (AttributeError, ValueError):
            return "an unknown CUresult"

    def _error(self, op: str, code: int) -> DriverError:
        return DriverError(op, code, self._name_of(code))

    # --- primitives ------------------------------------------------------------------------------------------------

    def _reserve(self, num_bytes: int) -> int:
        return int(self._value("reserve", self._api.cuMemAddressReserve(num_bytes, 0, 0, 0)))

    def _free(self, address: int, num_bytes: int) -> None:
        self._value("free_reservation", self._api.cuMemAddressFree(address, num_bytes))

    def _create(self, num_bytes: int, handles: array[int]) -> Outcome:
        return self._calls.create(num_bytes, handles)

    def _release(self, handles: array[int], sizes: array[int]) -> Outcome:
        return self._calls.release(handles)

    def _map(self, mappings: Mappings) -> Outcome:
        return self._calls.map(mappings)

    def _unmap(self, addresses: array[int], sizes: array[int]) -> Outcome:
        return self._calls.unmap(addresses, sizes)

    def _protect(self, address: int, num_bytes: int, *, writable: bool) -> int:
        return set_access(self._api, address, num_bytes, access_descriptor(self._api, self._index, writable=writable))

    def _close(self) -> None:
        self._api.cuDevicePrimaryCtxRelease(self._device)

    # --- fences, memory, pressure ----------------------------------------------------------------------------------

    def record_fence(self) -> Fence:
        """Mark all work submitted so far on torch's current stream of this device.

        Raises
        ------
        StateError
            That stream is capturing a graph: a fence would be part of the graph and never be done.
        """
        self._enter()
        return self._streams.record()

    def fence_done(self, fence: Any) -> bool:
        self._enter()
        with self._outside_capture():
            return bool(fence.query())

    def wait_fence(self, fence: Any, timeout_s: float) -> bool:
        """Wait by asking for the fence again and again: so the wait has a bound, and the GIL stays free."""
        deadline = time.monotonic() + timeout_s
        nap = _SHORTEST_NAP_S
        while not self.fence_done(fence):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(nap, left))
            nap = min(2 * nap, _LONGEST_NAP_S)
        return True

    def order_after(self, fence: Any) -> None:
        self._enter()
        self._streams.order_after(fence)

    def copy_batch(self, copies: Sequence[Copy]) -> Fence:
        self._enter()
        with self._own_context(), self._outside_capture():
            return self._copies.copy(copies)

    def copy_seconds(self, fence: Any) -> float | None:
        return self._copies.seconds(fence) if self.fence_done(fence) else None

    def pin(self, address: int, num_bytes: int) -> None:
        self._enter()
        with self._own_context(), self._outside_capture():
            self._value("pin", self._api.cuMemHostRegister(address, num_bytes, 0))

    def unpin(self, address: int, num_bytes: int) -> None:
        self._enter()
        with self._own_context(), self._outside_capture():
            self._value("unpin", self._api.cuMemHostUnregister(address))

    def synchronize(self) -> None:
        """Wait for all work of the device. Does without torch, as a cache also closes when the interpreter ends."""
        self._enter()
        with self._own_context():
            self._value("synchronize", self._api.cuCtxSynchronize())

    def relieve_pressure(self) -> bool:
        """Empty torch's cache in this process; True when memory came back. May wait for the GPU, as `cudaFree` does."""
        self._enter()
        return self._streams.empty_cache()

    def memory_info(self) -> MemoryInfo:
        """Free and total memory of the device, whatever device is current."""
        self._enter()
        with self._own_context():
            result, free, total = self._api.cuMemGetInfo()
        if int(result):
            raise self._error("memory_info", int(result))
        return MemoryInfo(int(free), int(total))


def _load_bindings() -> ModuleType:
    try:
        return import_module("cuda.bindings.driver")
    except ImportError as error:
        raise BackendUnavailableError(
            "the CUDA driver needs cuda-bindings >= 12.9.1: pip install 'slicedkv[cuda]'"
        ) from error
