"""`Facade`: what the classes that make up the public face of a cache have in common, one class a topic.

`SlicedKVCache` inherits all of them.
"""

from __future__ import annotations

from .checks import check_int
from .layout import KVLayout
from .memory.page_pool import PagePool
from .opening import Closeable
from .paging.mapper import Mapper
from .state.cache_state import CacheState

__all__ = ["Facade"]


class Facade(Closeable):
    """The parts that every public call uses."""

    _instead = "fork() copies requests, another process opens a cache of its own"
    _state: CacheState
    _mapper: Mapper

    @property
    def layout(self) -> KVLayout:
        """Geometry: bytes and pages of a length, strides, capacity."""
        return self._state.layout

    @property
    def pool(self) -> PagePool:
        """The pool of handles, to be shared with another cache."""
        return self._state.pool

    def is_active(self, reqid: int) -> bool:
        """True while a request has this slot: from `alloc_reqid` to `free_reqid`, unless a failing driver lost it.

        Raises
        ------
        ConfigError, StateError
            `reqid` is out of range; the cache is closed.
        """
        self._look()
        with self._state.gate.lock:
            return self._state.has_request(self._check_reqid(reqid))

    def seq_len(self, reqid: int) -> int:
        """Tokens of a request: the length that its last `step`, `share_prefix`, `fork` or `truncate` gave it.

        Raises
        ------
        ConfigError, StateError
            `reqid` is out of range; it is not active.
        """
        self._look()
        with self._state.gate.lock:
            self._state.slots.require_active(self._check_reqid(reqid))
            return self._state.lengths.last(reqid)

    def _look(self) -> None:
        """Begin a call that takes the lock.

        Raises
        ------
        StateError
            The cache is closed; this thread has the lock already, and would wait for itself.
        """
        self._check_open()
        self._state.gate.refuse_inside()
        if self._state.late_ends:
            with self._state.gate.lock:
                self._state.catch_up()

    def _enter(self) -> None:
        """Begin a call that changes something: raise what went wrong in the background since the last one."""
        self._look()
        if self._mapper.failure is not None:
            self._mapper.raise_failure()

    def _check_reqid(self, reqid: int) -> int:
        return check_int("reqid", reqid, 0, self.layout.max_batch_size - 1)
