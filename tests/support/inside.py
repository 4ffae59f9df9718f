"""What some tests must see or do inside a cache, because no public call tells it. They do it here alone."""

from __future__ import annotations

from typing import Any

import torch

from slicedkv import DriverError, SlicedKVCache


def fence_of(cache: SlicedKVCache, reqid: int) -> Any:
    """What the device must have done before pages of this slot may be unmapped."""
    return cache._state.slots.fence(reqid)


def generation(cache: SlicedKVCache, reqid: int) -> int:
    """How many requests this slot has had: it tells a request from the next one in its slot."""
    return cache._state.slots.generation(reqid)


def shares_pages(cache: SlicedKVCache, reqid: int) -> bool:
    """True when the slot, active or idle, may have mapped pages that another one has mapped, too."""
    return cache._state.backing.shared.has(reqid)


def addresses(cache: SlicedKVCache, reqid: int, page: int) -> list[int]:
    """Where one page of a slot lies, plane by plane."""
    return [plane.page_address(reqid, page) for plane in cache._state.backing.reservations]


def page_bytes_of(cache: SlicedKVCache, reqid: int, pages: int | None = None) -> list[torch.Tensor]:
    """Bytes of a slot's first `pages` pages, by default of all that are mapped: one tensor a plane."""
    end = cache._state.backing.mapped(reqid) if pages is None else pages
    return cache._views.bytes_of(cache.layout, reqid, 0, end * cache.layout.page_bytes)


def background_failure(cache: SlicedKVCache) -> Exception | None:
    """What went wrong on the mapper's thread, until a call raises it. Looking does not use it up."""
    return cache._mapper.failure


def fail_in_background(cache: SlicedKVCache) -> None:
    """As when the mapper's thread failed: the next call says so and does nothing."""
    cache._mapper.failure = DriverError("map", 999, "CUDA_ERROR_UNKNOWN")


def forget_background_failure(cache: SlicedKVCache) -> None:
    """As if no call needed to raise it."""
    cache._mapper.failure = None


def lose(cache: SlicedKVCache, reqid: int) -> None:
    """As when the driver failed, and failed again while the first failure was undone: the slot is out of use."""
    with cache.pool.gate.lock:
        cache._state.lose(reqid)
