"""Opening and closing what is behind a cache: driver, pool, reservations, and giving all of it back.

`shut_down` is a function of the parts and not a method of the cache, so that a forgotten cache can be finalized.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Self

import torch

from .config import CacheConfig, MemoryLimit, parse_memory_limit
from .errors import ConfigError, StateError
from .layout import KVLayout
from .memory.backing import Backing
from .memory.copy_meter import CopyMeter
from .memory.host_pool import HostPool
from .memory.page_pool import PagePool
from .paging.mapper import Mapper, wait_for_finishing
from .paging.reclaim import claim_share
from .state.cache_state import CacheState
from .state.lengths import LengthTable
from .state.protection import Protector
from .state.slots import SlotTable
from .unique import Unique
from .vmm import Driver, open_driver, procfs

__all__ = ["Closeable", "abandon", "limit_bytes", "open_state", "shut_down"]

_HOST_PAGE_BYTES, _EXTENT_PAGES = 2 << 20, 16
_PACKAGE = __name__.partition(".")[0]
_LAST_CALLS_S, _POLL_S = 2.0, 0.001
_MOST_ADDRESSES = 1 << 56
_DEFAULT_FRACTION = {"cuda": 0.9}
_DEFAULT_SWAP_FRACTION = 0.25


_CLOSED = "the cache is closed; open a new one"
_CLOSING = "the cache is being closed; if that failed, call close() again"
_FORKED = "this cache belongs to the parent process; a forked child must open its own"

_opened: weakref.WeakSet[Closeable] = weakref.WeakSet()


class Closeable(Unique, ABC):
    """A public object that is closed once, belongs to the process that opened it, and is a context manager."""

    def __init__(self) -> None:
        self._refusal: str | None = "the cache is not open"  # until all of it is
        _opened.add(self)

    @property
    def closed(self) -> bool:
        """True when it can no longer be used."""
        return self._refusal == _CLOSED

    def _check_open(self) -> None:
        if self._refusal is not None:
            raise StateError(self._refusal)

    def close(self) -> None:
        """Unmap everything and give all memory back. Waits for all work of the device. Calling it again does nothing.

        Views that are still held keep their addresses reserved; reading or writing them faults. When the driver hangs
        or fails, `StateError` or `DriverError` is raised and `close` may be called again.
        """
        refusal = self._refusal
        if refusal == _CLOSED:
            return
        if refusal not in (None, _CLOSING):
            raise StateError(refusal)
        self._before_close()
        self._refusal = _CLOSING
        self._close()
        self._refusal = _CLOSED

    def _before_close(self) -> None:
        """Raise `StateError` when the calling thread is in the middle of a call: `close` would wait for itself."""

    @abstractmethod
    def _close(self) -> None: ...

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_pool(config: CacheConfig) -> PagePool:
    """Open the device's driver and a pool of its own for one cache.

    Raises
    ------
    ConfigError
        `page_bytes` or `memory_limit` does not suit the device; the driver is closed again.
    """
    driver = open_driver(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        page_bytes = config.page_bytes or max(driver.granularity, _HOST_PAGE_BYTES)
        extent_pages = config.extent_pages or _EXTENT_PAGES
        limit = limit_bytes(config.memory_limit, driver)
        pool = PagePool(driver, page_bytes=page_bytes, memory_limit=limit, extent_pages=extent_pages)
        pool.shares.own_pool = True
        return pool
    except BaseException:
        driver.close()
        raise


def limit_bytes(limit: MemoryLimit, driver: Driver, pool: PagePool | None = None) -> int:
    """Bytes of a memory limit; a fraction is of what is free on the device, and what the pool holds counts as free.

    Raises
    ------
    ConfigError
        It is not written as one, or not positive.
    """
    held_bytes = pool.created_pages * pool.page_bytes if pool else 0
    free_bytes = driver.memory_info().free_bytes + held_bytes
    return parse_memory_limit(limit, free_bytes=free_bytes, default_fraction=_DEFAULT_FRACTION.get(driver.name, 0.5))


def open_state(config: CacheConfig, pool: PagePool | None) -> CacheState:
    """Open a cache's parts; with `pool` they use its driver, page size and limit.

    Raises
    ------
    ConfigError
        An argument contradicts the pool or the device; nothing stays open.
    DriverError
        The addresses could not be reserved.
    """
    owned = pool is None
    pool = open_pool(config) if pool is None else pool
    try:
        _check_pool(config, pool, owned=owned)
        layout = config.kv_layout(pool.page_bytes)
        _check_addresses(layout)
        backing = Backing(layout, pool)
    except BaseException:
        if owned:
            pool.driver.close()
        raise
    slots, lengths = SlotTable(layout.max_batch_size), LengthTable(layout.max_batch_size, layout.max_seq_len)
    host = HostPool(pool.driver, pool.gate, _swap_limit(config))
    state = CacheState(config, layout, pool, backing, slots, lengths, host, CopyMeter(pool.driver))
    try:
        state.min_share_pages = _min_share_pages(config, pool)
        with pool.gate.work("opening a cache"):
            if pool.shares.ended:
                raise StateError("the pool ended with its last cache; open a new one")
            claim_share(state)
        if config.debug and pool.driver.can_protect:
            state.protector = Protector(backing, slots)
    except BaseException:
        if owned:
            pool.driver.close()
        raise
    return state


def _min_share_pages(config: CacheConfig, pool: PagePool) -> int:
    if config.min_share is None:
        return 0
    limit = pool.memory_limit
    num_bytes = parse_memory_limit(config.min_share, free_bytes=limit, default_fraction=1.0, name="min_share")
    return -(-num_bytes // pool.page_bytes)


def _swap_limit(config: CacheConfig) -> int:
    return parse_memory_limit(
        config.swap_limit,
        free_bytes=procfs.memory_info().free_bytes,
        default_fraction=_DEFAULT_SWAP_FRACTION,
        name="swap_limit",
    )


def _check_addresses(layout: KVLayout) -> None:
    if layout.plane_bytes * layout.num_planes > _MOST_ADDRESSES:
        raise ConfigError(
            f"max_batch_size {layout.max_batch_size} and max_seq_len {layout.max_seq_len} need "
            f"{layout.plane_bytes * layout.num_planes} bytes of addresses, more than any device has; lower one of them"
        )


def _check_pool(config: CacheConfig, pool: PagePool, *, owned: bool) -> None:
    if owned:
        return
    if not isinstance(pool, PagePool):
        raise ConfigError(f"pool is {pool!r}; it must be a PagePool")
    if config.memory_limit is not None:
        raise ConfigError(f"memory_limit is {config.memory_limit!r}, but the shared pool has a limit; leave it out")
    for name in ("page_bytes", "extent_pages"):
        asked, found = getattr(config, name), getattr(pool, name)
        if asked not in {None, found}:
            raise ConfigError(f"{name} is {asked}, but that of the shared pool is {found}; leave it out")
    asked, found = config.device, torch.device(pool.driver.torch_device)
    if asked is not None and (asked.type != found.type or asked.index not in {None, found.index}):
        raise ConfigError(f"device is {asked}, but the shared pool is on {found}; leave it out")


def shut_down(state: CacheState, mapper: Mapper) -> None:
    """Stop the mapper, wait for the device, unmap everything; the last cache of a pool that a cache opened ends it too.

    Raises
    ------
    StateError, DriverError
        Something hangs or the driver failed; it may be called again.
    """
    mapper.stop()
    with state.gate.work("close"):
        if state.closed:
            return
        with state.gate.lock:
            state.lengths.reset_all()  # a step that is already past its checks must not find anything mapped
        state.pool.driver.synchronize()
        state.backing.unmap_all(unknown=state.slots.lost)
        state.host.close()
        shares = state.pool.shares
        with state.gate.lock:
            shares.leave(state)
        if shares.own_pool and not shares.members:
            shares.ended = True
            state.pool.trim()
            state.pool.driver.close()
        state.closed = True


def abandon(state: CacheState, mapper: Mapper, owner_pid: int) -> None:
    """Shut down for a cache that was dropped, on another thread.

    The collector calls this anywhere, also on a thread that holds the gate's lock or token: nothing may wait here.
    """
    if os.getpid() == owner_pid:
        mapper.finish_elsewhere(lambda: shut_down(state, mapper))


def _refuse_all() -> None:
    """In a forked child: locks may be held by threads that are not here, and memory is the parent's."""
    for opened in list(_opened):
        if not opened.closed:
            opened._refusal = _FORKED


os.register_at_fork(after_in_child=_refuse_all)


@atexit.register
def _close_all() -> None:
    """Close what is open when the interpreter exits: nobody is there to handle an error."""
    left_open = [opened for opened in list(_opened) if not opened.closed]
    for opened in left_open:
        with suppress(Exception):
            opened.close()
    wait_for_finishing()
    if left_open:
        _wait_for_calls()


def _wait_for_calls() -> None:
    """Wait, for a bounded time, until no daemon thread is inside the library any more: it finds everything closed.

    A thread that comes back from a computation of torch's and finds the interpreter at its end ends the process.
    """
    own, end = threading.get_ident(), time.monotonic() + _LAST_CALLS_S
    while time.monotonic() < end:
        if not any(_is_inside(frame) for thread, frame in sys._current_frames().items() if thread != own):
            return
        time.sleep(_POLL_S)


def _is_inside(frame: FrameType | None) -> bool:
    """True when a function of this package is running in a frame or called what does."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
            return True
        frame = frame.f_back
    return False
