"""Opening what is behind a cache: driver, pool, reservations, books. What fails halfway is closed again."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from .config import CacheConfig, MemoryLimit, parse_memory_limit
from .errors import ConfigError, StateError
from .layout import KVLayout, ceil_div
from .memory.backing import Backing
from .memory.copy_meter import CopyMeter
from .memory.host_pool import HostPool
from .memory.page_pool import PagePool
from .paging.reclaim import claim_share
from .state.cache_state import CacheState
from .state.lengths import LengthTable
from .state.protection import Protector
from .state.slots import SlotTable
from .vmm import Driver, open_driver, procfs

__all__ = ["limit_bytes", "open_state"]

_HOST_PAGE_BYTES, _EXTENT_PAGES = 2 << 20, 16
_MOST_ADDRESSES = 1 << 56
_DEFAULT_FRACTION = {"cuda": 0.9}
_DEFAULT_SWAP_FRACTION = 0.25


def open_pool(config: CacheConfig) -> PagePool:
    """Open the device's driver and a pool of its own for one cache.

    Raises
    ------
    ConfigError
        `page_bytes` or `memory_limit` does not suit the device; the driver is closed again.
    """
    with ExitStack() as undo:
        driver = open_driver(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        undo.callback(driver.close)
        page_bytes = config.page_bytes or max(driver.granularity, _HOST_PAGE_BYTES)
        extent_pages = config.extent_pages or _EXTENT_PAGES
        limit = limit_bytes(config.memory_limit, driver)
        pool = PagePool(driver, page_bytes=page_bytes, memory_limit=limit, extent_pages=extent_pages)
        pool.shares.own_pool = True
        undo.pop_all()
    return pool


def limit_bytes(limit: MemoryLimit, driver: Driver, pool: PagePool | None = None) -> int:
    """Bytes of a memory limit. A fraction is one of the memory that is free on the device or held by the pool.

    Raises
    ------
    ConfigError
        It is not written as one, or not positive.
    """
    held_bytes = pool.created_pages * pool.page_bytes if pool else 0
    free_bytes = driver.memory_info().free_bytes + held_bytes
    return parse_memory_limit(limit, free_bytes=free_bytes, default_fraction=_DEFAULT_FRACTION.get(driver.name, 0.5))


def open_state(config: CacheConfig, pool: PagePool | None) -> CacheState:
    """Open the parts of a cache. With `pool` they use its driver, page size and limit.

    Raises
    ------
    ConfigError
        An argument contradicts the pool or the device; nothing stays open.
    DriverError
        The addresses could not be reserved.
    """
    with ExitStack() as undo:
        if pool is None:
            pool = open_pool(config)
            undo.callback(pool.driver.close)
        else:
            _check_pool(config, pool)
        layout = config.kv_layout(pool.page_bytes)
        _check_addresses(layout)
        backing = Backing(layout, pool)
        slots, lengths = SlotTable(layout.max_batch_size), LengthTable(layout.max_batch_size, layout.max_seq_len)
        host = HostPool(pool.driver, pool.gate, _swap_limit(config))
        state = CacheState(config, layout, pool, backing, slots, lengths, host, CopyMeter(pool.driver))
        state.min_share_pages = _min_share_pages(config, pool)
        with pool.gate.work("opening a cache"):
            if pool.shares.ended:
                raise StateError("the pool ended with its last cache; open a new one")
            claim_share(state)
        if config.debug and pool.driver.can_protect:
            state.protector = Protector(backing, slots)
        undo.pop_all()
    return state


def _min_share_pages(config: CacheConfig, pool: PagePool) -> int:
    if config.min_share is None:
        return 0
    limit = pool.memory_limit
    num_bytes = parse_memory_limit(config.min_share, free_bytes=limit, default_fraction=1.0, name="min_share")
    return ceil_div(num_bytes, pool.page_bytes)


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


def _check_pool(config: CacheConfig, pool: PagePool) -> None:
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
