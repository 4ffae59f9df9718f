"""What some tests must see or do inside a cache, because no public call tells it. They do it here alone."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from slicedkv import DriverError, PagePool, SlicedKVCache


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


def mapped_pages(cache: SlicedKVCache, reqid: int) -> int:
    """Pages per plane mapped behind a slot."""
    return cache._state.backing.mapped(reqid)


def held_pages(cache: SlicedKVCache) -> int:
    """Pages of all planes that are mapped behind slots of this cache."""
    return cache._state.backing.held_pages


def promised_pages(cache: SlicedKVCache) -> int:
    """Pages that the pool keeps for this cache: its `min_share`."""
    return cache._state.min_share_pages


def are_all_members(pool: PagePool, *caches: SlicedKVCache) -> bool:
    """True when these caches, in this order, are all that the pool divides its pages among."""
    return pool.shares.members == tuple(cache._state for cache in caches)


def planes_of(cache: SlicedKVCache) -> Any:
    """The reservations behind its planes."""
    return cache._state.backing.reservations


def segments_of_all(cache: SlicedKVCache) -> Any:
    """The handles behind each slot."""
    return cache._state.backing._segments


def sharing_books(cache: SlicedKVCache) -> Any:
    """What it knows of pages that several slots have mapped, to be put wrong."""
    return cache._state.backing.shared


def shared_end(cache: SlicedKVCache, reqid: int) -> int:
    """The page from which on no page of this slot is another one's, too."""
    return cache._state.backing.shared.end_page(reqid)


def lengths_of(cache: SlicedKVCache) -> Any:
    """Its columns of lengths, to be put wrong."""
    return cache._state.lengths


def slots_read_from(cache: SlicedKVCache) -> Any:
    """Slots that queued copies read from."""
    return cache._state.slots.reads


def zeroes_on_reuse(cache: SlicedKVCache) -> bool:
    """The option `zero_on_reuse`."""
    return cache._state.config.zero_on_reuse


def is_offloaded(cache: SlicedKVCache) -> bool:
    """True when a pause took the pages of all requests."""
    return cache._state.offloaded


def working(cache: SlicedKVCache) -> AbstractContextManager[Any]:
    """Hold the token of driver work, so that nobody maps or unmaps meanwhile."""
    return cache._state.work("a test")


def begin_inside(cache: SlicedKVCache, seq_len: int) -> int:
    """`alloc_reqid` as it goes on once nobody else works, for a test that is in the middle of such work."""
    return cache._lifetime.begin(seq_len)


def truncate_inside(cache: SlicedKVCache, reqid: int, seq_len: int) -> None:
    """`truncate` as it goes on once nobody else works."""
    cache._lifetime.truncate(reqid, seq_len)


def give_slot_to_the_next(cache: SlicedKVCache, reqid: int) -> None:
    """End a request and begin another one in its slot. The caller holds the lock."""
    cache._state.end(reqid, cache.pool.driver.record_fence())
    cache._lifetime._activate(reqid)


def mapper_has_nothing_to_do(cache: SlicedKVCache) -> bool:
    """True when it was told nothing that it has not done."""
    return not cache._state.news and cache.pool.gate.claim is None


def mapper_failed(cache: SlicedKVCache) -> bool:
    """True when its last round failed."""
    return bool(cache._mapper._failed)


def wake_mapper(cache: SlicedKVCache) -> None:
    """Let it look for work. The caller holds the lock."""
    cache._mapper.wake()


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
