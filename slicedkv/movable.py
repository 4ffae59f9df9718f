"""`MovableMemory`: the part of `SlicedKVCache` that moves requests' memory out of the way and back.

Checks what the facade checks and asks `swap` and `pause`; knows nothing else of a cache.
"""

from __future__ import annotations

from .checks import check_bool
from .facade import Facade
from .requests.pause import Pauser
from .requests.swap import SwapHandle, Swapper

__all__ = ["MovableMemory"]


class MovableMemory(Facade):
    """The public calls of `SlicedKVCache` that move requests' memory out of the way and back."""

    _pauser: Pauser
    _swapper: Swapper

    def swap_out(self, reqid: int) -> SwapHandle:
        """Copy a request's K and V to host memory and end it here; `swap_in` brings it back.

        One copy for each plane, of exactly its tokens, after the work queued so far on the current stream and beside
        what is queued later. The slot is free at once. Its pages can be had by others, as those of a freed request,
        once the copy is done; who needs them waits for that. Pages that it shares are copied too and stay with the
        others.

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

        Its tokens are backed, by pages of its own also where it shared some before, and kernels launched on the current
        stream after this call see them. Waits, as `step` does, for the mapper and for device work of freed requests
        when memory is short; not for the copy.

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
        go to host memory as well, each with all its rows, and nothing is left on the device. Until `resume` every call
        that would change something raises `StateError`, but for `free_reqid` and `set_memory_limit`, which make room
        for it; `stats`, `close` and other readers work. Waits for all work of the device and for the copies. Requests'
        rows must not be read or written meanwhile: after `offload` that faults.

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
            The driver failed; no request lost a row and the cache is not paused, or, where undoing it failed too, a
            `StateError` says that it is. What failed after requests had left brings them back sharing no pages.
        """
        self._enter()
        return self._pauser.pause(offload=check_bool("offload", offload))

    def resume(self) -> None:
        """Undo `pause`: bring requests back to their slots, at their lengths, and serve again.

        Kernels launched on the current stream after this call see the rows. Waits as `step` does, not for the copies.
        Requests that went to host memory share no pages any more, so they may need more memory than before; what is
        missing can be had by `free_reqid` and `set_memory_limit`.

        Raises
        ------
        OutOfPagesError
            There is no memory for the requests now; the cache stays paused and nothing was changed.
        StateError
            The cache is not paused.
        DriverError
            The driver failed; the cache stays paused.
        """
        self._enter()
        self._pauser.resume()
        self._mapper.run_pending()
