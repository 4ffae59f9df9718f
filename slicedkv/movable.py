"""`MovableMemory`: the part of `SlicedKVCache` that moves requests' memory out of the way and back.

Checks what the facade checks and asks `swap` and `pause`; knows nothing else of a cache.
"""

from __future__ import annotations

from abc import abstractmethod

from .checks import check_bool, check_int
from .lifecycle import Closeable
from .mapper import Mapper
from .pause import Pauser
from .state import CacheState
from .swap import SwapHandle, Swapper

__all__ = ["MovableMemory"]


class MovableMemory(Closeable):
    """Swap requests out and in; pause and resume."""

    _state: CacheState
    _mapper: Mapper
    _pauser: Pauser
    _swapper: Swapper

    @abstractmethod
    def _enter(self) -> None: ...

    def _check_reqid(self, reqid: int) -> int:
        return check_int("reqid", reqid, 0, self._state.layout.max_batch_size - 1)

    def swap_out(self, reqid: int) -> SwapHandle:
        """Copy a request's K and V to host memory and end it here; `swap_in` brings it back.

        One copy for each plane, of exactly its tokens, after the work queued so far on the current stream and beside
        what is queued later. The slot is free at once. Its pages can be had by others, as those of a freed request,
        once the copy is done; who needs them waits for that.

        Parameters
        ----------
        reqid : int
            Its length is the longest that `step` was given for it.

        Returns
        -------
        SwapHandle
            Drop or `release` it when the request is not wanted any more.

        Raises
        ------
        CapacityError
            Host memory is short, in bytes; nothing was changed.
        ConfigError, StateError
            `reqid` is out of range; it is not active; the current stream is being captured. Nothing was changed.
        DriverError
            The driver could not copy; nothing was changed.
        """
        self._enter()
        handle = self._swapper.swap_out(self._check_reqid(reqid))
        self._mapper.run_pending()
        return handle

    def swap_in(self, handle: SwapHandle) -> int | None:
        """Bring a request that was swapped out into a free slot and return its reqid there.

        Its tokens are backed, and kernels launched on the current stream after this call see them. Waits, as `step`
        does, for the mapper and for device work of freed requests when memory is short; not for the copy.

        Returns
        -------
        int or None
            None: not enough memory, nothing was changed and the handle is good as before; free or preempt a request
            and try again.

        Raises
        ------
        OutOfSlotsError
            All slots are active; nothing was changed.
        ConfigError, StateError
            `handle` is of another cache; it was swapped in or released already.
        DriverError
            The driver failed for another reason than memory; the handle is good as before.
        """
        self._enter()
        reqid = self._swapper.swap_in(handle)
        self._mapper.run_pending()
        return reqid

    def pause(self, *, offload: bool = False) -> int:
        """Give memory back to the device until `resume`, keeping addresses, views and captured graphs valid.

        Idle, lookahead, eager and free memory is given back and no more is mapped ahead. With `offload` active requests
        go to host memory as well, and nothing is left on the device. Until `resume` every call that would change
        something raises `StateError`; `stats`, `close` and other readers work. Waits for all work of the device and for
        the copies. Requests' rows must not be read or written meanwhile: after `offload` that faults.

        Returns
        -------
        int
            Bytes given back to the device.

        Raises
        ------
        CapacityError
            Host memory is short, in bytes; nothing was changed.
        StateError
            The cache is paused already; device work or a copy did not end in time; the current stream is being
            captured.
        DriverError
            The driver failed; no request lost anything and the cache is not paused, or, where the driver failed again
            in undoing it, a `StateError` says that it is.
        """
        self._enter()
        return self._pauser.pause(offload=check_bool("offload", offload))

    def resume(self) -> None:
        """Undo `pause`: bring requests back to their slots, at their lengths, and serve again.

        Kernels launched on the current stream after this call see the rows. Waits as `step` does, not for the copies.

        Raises
        ------
        OutOfPagesError
            The device has no memory for the requests now; the cache stays paused and nothing was changed.
        StateError
            The cache is not paused.
        DriverError
            The driver failed; the cache stays paused.
        """
        self._enter()
        self._pauser.resume()
        self._mapper.run_pending()
