"""The memory calls of the CUDA driver over whole columns: once as Python loops, once as C loops. Same answers.

Gets the bindings and their structs from `driver`. Imports neither CUDA nor torch, and checks nothing.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping
from typing import Any

from ..ledger import Mappings
from ..strict import Outcome

__all__ = [
    "ENTRY_POINTS",
    "NativeCalls",
    "PythonCalls",
    "access_descriptor",
    "allocation_properties",
    "set_access",
]

ENTRY_POINTS = ("cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemSetAccess", "cuMemUnmap")
"""Driver calls whose addresses `NativeCalls` needs."""

ACCESS_TRIES = 500
RETRY_S = 200e-6  # between two tries, as in the C loop: the last try comes after about 0.1 s
_NOT_READY = 600  # CUDA_ERROR_NOT_READY, see CUresult in the CUDA driver API


def allocation_properties(api: Any, device_index: int) -> Any:
    """Pinned memory of one device: the only kind of page made here."""
    properties = api.CUmemAllocationProp()
    properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device_index
    return properties


def access_descriptor(api: Any, device_index: int, *, writable: bool = True) -> Any:
    """The right of one device to read, and where `writable` to write."""
    flags = api.CUmemAccess_flags
    access = api.CUmemAccessDesc()
    access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device_index
    access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    return access


def set_access(api: Any, address: int, size: int, access: Any) -> int:
    """Set the access rights of mapped memory and return the code."""
    code = 0
    for left in reversed(range(ACCESS_TRIES)):
        code = int(api.cuMemSetAccess(address, size, [access], 1)[0])
        if code != _NOT_READY or not left:
            break
        time.sleep(RETRY_S)  # under load the driver may say so for a moment
    return code


class PythonCalls:
    """One call of the bindings after another."""

    def __init__(self, api: Any, properties: Any, access: Any) -> None:
        self._api = api
        self._properties = properties
        self._access = access

    def create(self, num_bytes: int, handles: array[int]) -> Outcome:
        """Fill `handles` from the front until done or failed."""
        for done in range(len(handles)):
            result, handle = self._api.cuMemCreate(num_bytes, self._properties, 0)
            if int(result):
                return done, int(result), "create"
            handles[done] = int(handle)
        return len(handles), 0, ""

    def release(self, handles: array[int]) -> Outcome:
        """Release every handle even when one fails."""
        codes = [int(self._api.cuMemRelease(handle)[0]) for handle in handles]
        return codes.count(0), next(filter(None, codes), 0), "release"

    def map(self, mappings: Mappings) -> Outcome:
        """Map everything, or nothing. `done` counts what is left where undoing a failure fails too."""
        done = 0
        for address, handle, size in zip(*mappings, strict=True):
            mapped, code, op = self._map_one(address, handle, size)
            done += mapped
            if code:
                return self._undo(mappings, done), code, op
        return done, 0, ""

    def _undo(self, mappings: Mappings, count: int) -> int:
        """Unmap the first `count` mappings, last to first. Stop at a failure and return how many are left."""
        while count and not int(self._api.cuMemUnmap(mappings.addresses[count - 1], mappings.sizes[count - 1])[0]):
            count -= 1
        return count

    def _map_one(self, address: int, handle: int, size: int) -> Outcome:
        """Map one handle and grant access. Mapped without access, it counts as done, so that the caller undoes it."""
        code = int(self._api.cuMemMap(address, size, 0, handle, 0)[0])
        if code:
            return 0, code, "map"
        code = set_access(self._api, address, size, self._access)
        return 1, code, "set_access" if code else ""

    def unmap(self, addresses: array[int], sizes: array[int]) -> Outcome:
        """Unmap range after range until done or failed."""
        for done, (address, size) in enumerate(zip(addresses, sizes, strict=True)):
            if code := int(self._api.cuMemUnmap(address, size)[0]):
                return done, code, "unmap"
        return len(addresses), 0, ""


class NativeCalls:
    """One C loop over the driver's entry points for each batch; the GIL is dropped once.

    Parameters
    ----------
    module
        `slicedkv.vmm._native`.
    entry : mapping of str to int
        Address of each of `ENTRY_POINTS`.
    properties, access
        The bindings' structs. C reads them through their addresses, so this object keeps them alive.
    """

    def __init__(self, module: Any, entry: Mapping[str, int], properties: Any, access: Any) -> None:
        self._module = module
        self._entry = dict(entry)
        self._structs = (properties, access)
        self._properties = int(properties.getPtr())
        self._access = int(access.getPtr())

    def create(self, num_bytes: int, handles: array[int]) -> Outcome:
        """Fill `handles` from the front until done or failed."""
        outcome: Outcome = self._module.cuda_create(self._entry["cuMemCreate"], self._properties, num_bytes, handles)
        return outcome

    def release(self, handles: array[int]) -> Outcome:
        """Release every handle even when one fails."""
        outcome: Outcome = self._module.cuda_release(self._entry["cuMemRelease"], handles)
        return outcome

    def map(self, mappings: Mappings) -> Outcome:
        """Map everything, or nothing."""
        calls = (self._entry[name] for name in ("cuMemMap", "cuMemSetAccess", "cuMemUnmap"))
        outcome: Outcome = self._module.cuda_map(*calls, self._access, ACCESS_TRIES, *mappings)
        return outcome

    def unmap(self, addresses: array[int], sizes: array[int]) -> Outcome:
        """Unmap range after range until done or failed."""
        outcome: Outcome = self._module.cuda_unmap(self._entry["cuMemUnmap"], addresses, sizes)
        return outcome
