"""What a slot's last request left is of use to the next one, or to others, but kept from nobody; over the fake driver.

An extent cannot be unmapped as long as a request needs a part of it. What of it the request does not need would be
stranded. And what the mapper is at work on is missing in no sum.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from rig import QUIET, TOKENS, Rig, mapped, wait_until

from slicedkv import SlicedKVCache
from slicedkv.vmm.fake import FakeDriver
from slicedkv.vmm.faulty import FaultyDriver

Open = Callable[..., tuple[SlicedKVCache, FaultyDriver, FakeDriver]]
EXTENT = 16


def served(cache: SlicedKVCache, *pages: int) -> list[int]:
    """Serve requests of so many pages, all at the same time, and free them; return their slots."""
    reqids = [cache.alloc_reqid(count * TOKENS) for count in pages]
    assert cache.step(dict(zip(reqids, (count * TOKENS for count in pages), strict=True)))
    for reqid in reqids:
        cache.free_reqid(reqid)
    return reqids


def begun(cache: SlicedKVCache, pages: int) -> tuple[int, int]:
    """Begin a request of so many pages; return its slot and the pages of it that nobody else can have."""
    before = cache.pages_available()
    reqid = cache.alloc_reqid(pages * TOKENS)
    assert cache.step({reqid: pages * TOKENS})
    return reqid, (before - cache.pages_available()) // cache.layout.num_planes


@pytest.mark.parametrize(
    ("last", "pages", "left"),
    [
        (16, 5, 0),  # a part of the only extent
        (40, 20, 16),  # the first of two extents, and a part of the second
        (40, 32, 40),  # whole extents; the pages behind them can go whenever they are wanted
        (40, 36, 40),
        (40, 29, 40),  # of the second extent three pages are left over: less than an eighth of 29
        (40, 28, 16),  # four are more
        (16, 15, 16),
    ],
)
@pytest.mark.parametrize("mapper", ["sync", "background"])
def test_a_shorter_request_keeps_little_that_it_does_not_need(
    open_cache: Open, mapper: str, last: int, pages: int, left: int
) -> None:
    cache, _, _ = open_cache(
        extent_pages=EXTENT, mapper=mapper, max_batch_size=1, lookahead_tokens=0, reclaim_watermark=0.0
    )
    served(cache, last)
    assert cache.stats().extents_mapped
    unmapped = cache.stats().pages_reclaimed
    reqid, kept = begun(cache, pages)
    assert pages <= kept <= pages + pages // 8
    assert cache.stats().pages_reclaimed - unmapped == (last - left) * 2
    assert mapped(cache, reqid) == max(pages, left)


def test_memory_that_requests_left_holds_as_many_as_fresh_memory(open_cache: Open) -> None:
    """Requests of 12 pages after some of 16: they were a quarter fewer than 12 pages each allow."""
    cache, _, _ = open_cache(limit_pages=2 * 12 * 16, extent_pages=EXTENT, max_batch_size=32, **QUIET)
    served(cache, *[EXTENT] * 12)
    for count in range(16):
        assert cache.can_admit(12 * TOKENS), f"{count} requests"
        begun(cache, 12)
    assert not cache.can_admit(1)


def test_what_fits_goes_before_what_must_be_cut(open_cache: Open) -> None:
    cache, _, _ = open_cache(extent_pages=EXTENT, max_batch_size=3, **QUIET)
    long, short, _ = served(cache, 16, 4, 0)
    assert cache.alloc_reqid(5 * TOKENS) == short
    empty, _ = begun(cache, 6)
    assert empty not in (long, short), "an empty slot is as good as one that must be emptied first"
    assert mapped(cache, long) == 16
    assert cache.stats().pages_reclaimed == 0


def test_nothing_waits_for_the_device_to_cut(open_cache: Open) -> None:
    cache, _, fake = open_cache(extent_pages=EXTENT, max_batch_size=1, **QUIET)
    fake.hold_fences = True
    served(cache, 16)
    started = time.monotonic()
    assert cache.alloc_reqid(5 * TOKENS) == 0
    assert time.monotonic() - started < 1.0
    assert mapped(cache, 0) == 16, "the last request's work may still use it"


def test_a_request_of_unknown_length_takes_all_there_is(open_cache: Open) -> None:
    cache, _, _ = open_cache(extent_pages=EXTENT, max_batch_size=1, **QUIET)
    served(cache, 40)
    assert cache.alloc_reqid() == 0
    assert mapped(cache, 0) == 40


def test_a_driver_that_refuses_to_cut_changes_nothing(open_cache: Open) -> None:
    cache, driver, _ = open_cache(extent_pages=EXTENT, max_batch_size=1, **QUIET)
    served(cache, 16)
    driver.fail("unmap")
    with pytest.raises(Exception, match="injected"):
        cache.alloc_reqid(5 * TOKENS)
    cache.check_integrity()
    assert cache.stats().idle_slots == 1
    assert begun(cache, 5)[1] == 5


# --- what the mapper is at work on -----------------------------------------------------------------------------------


@contextmanager
def held(driver: FaultyDriver, op: str) -> Iterator[None]:
    """Keep the mapper in its next call of `op` until the end of the context."""
    inside, go_on = threading.Event(), threading.Event()

    def wait(called: str, args: object) -> None:
        if called == op and threading.current_thread().name == "slicedkv-mapper":
            inside.set()
            assert go_on.wait(5.0)

    driver.on_call = wait
    try:
        yield
        assert inside.is_set()
    finally:
        driver.on_call = None
        go_on.set()


@pytest.mark.parametrize("op", ["create", "map"])
def test_pages_on_their_way_to_a_request_count_once(op: str) -> None:
    """They were missing for the request and gone from what can be had: others were refused what was there."""
    with Rig(limit_pages=300) as rig, rig.open(lookahead_tokens=0) as cache:
        with held(rig.driver, op):
            reqid = cache.alloc_reqid(100 * TOKENS)
            wait_until(lambda: rig.driver.counts[op] > 0)
            assert cache.pages_available() - cache.pages_needed({reqid: 100 * TOKENS}) == 100
            assert cache.can_admit(50 * TOKENS)
            assert not cache.can_admit(50 * TOKENS + 1)
        assert cache.step({reqid: 100 * TOKENS})
        assert cache.pages_available() == 100


def test_pages_on_their_way_out_of_an_idle_slot_can_be_had() -> None:
    with Rig() as rig, rig.open(lookahead_tokens=0, reclaim_watermark=0.95) as cache:
        reqids = [cache.alloc_reqid() for _ in range(2)]
        assert cache.step(dict.fromkeys(reqids, 20 * TOKENS))
        total = cache.pages_available()
        with held(rig.driver, "unmap"):
            for reqid in reqids:
                cache.free_reqid(reqid)
            wait_until(lambda: rig.driver.counts["unmap"] > 0)
            assert cache.pages_available() == total + 80


def test_a_slot_that_is_being_mapped_changes_hands() -> None:
    """The mapper was on its way with extents for one request when a short one got the slot: both kept them."""
    with Rig(limit_pages=2 * 64, extent_pages=EXTENT) as rig, rig.open(max_batch_size=2, lookahead_tokens=0) as cache:
        first = cache.alloc_reqid()
        assert cache.step({first: TOKENS})
        maps = rig.driver.counts["map"]
        with held(rig.driver, "map"):
            long = cache.alloc_reqid(48 * TOKENS)
            wait_until(lambda: rig.driver.counts["map"] > maps)
            cache.free_reqid(long)
            short = alloc_beside(cache, TOKENS)
        assert short() == long
        lens = {first: 62 * TOKENS, long: TOKENS}
        assert cache.pages_needed(lens) <= cache.pages_available()
        assert cache.step(lens)
        assert mapped(cache, long) == 1


def alloc_beside(cache: SlicedKVCache, seq_len: int) -> Callable[[], int]:
    """Ask for a slot on another thread; return what waits for the answer."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(cache.alloc_reqid(seq_len)))
    thread.start()

    def answer() -> int:
        thread.join(5.0)
        return found[0]

    return answer


def test_asking_whether_there_is_room_waits_for_no_driver() -> None:
    with Rig(limit_pages=300) as rig:
        cache = rig.open_mapping(page_s=0.01)
        started = time.monotonic()
        for _ in range(50):
            assert not cache.can_admit(4096)
            assert cache.can_admit(32)
        assert time.monotonic() - started < 0.5, "256 pages take 2.5 s and more"
        rig.driver.heal()
        cache.close()
