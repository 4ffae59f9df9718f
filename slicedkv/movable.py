"""`MovableMemory`: the part of `SlicedKVCache` that moves requests' memory out of the way and back.

Checks what the facade checks and asks `swap`; knows nothing else of a cache.
"""

from __future__ import annotations

from abc import abstractmethod

from .lifecycle import Closeable
from .mapper import Mapper
from .swap import SwapHandle, Swapper

__all__ = ["MovableMemory"]


class MovableMemory(Closeable):
    """Swap requests out and in."""

    _mapper: Mapper
    _swapper: Swapper

    @abstractmethod
    def _enter(self) -> None: ...

    @abstractmethod
    def _check_reqid(self, reqid: int) -> int: ...

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
