"""Taking pages back: what may go and what stays, and never under work of the device that may still use it.

Cases B1, B2's order and D1; over the fake driver, whose fences end when a test says so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from inside import forget_background_failure, mapper_failed
from rig import TOKENS, mapped, settle, wait_until

from slicedkv import SlicedKVCache, StateError
from slicedkv.vmm.fake import FakeDriver
from slicedkv.vmm.faulty import FaultyDriver

Open = Callable[..., tuple[SlicedKVCache, FaultyDriver, FakeDriver]]


def test_reclaim_below_the_watermark_takes_the_largest_and_spares_the_next(open_cache: Open) -> None:
    cache, _, fake = open_cache(limit_pages=100, reclaim_watermark=0.3, lookahead_tokens=0)
    lens = {cache.alloc_reqid(): pages * TOKENS for pages in (5, 20, 12)}
    assert cache.step(lens)
    small, large, middle = lens
    fake.hold_fences = True
    for reqid in (small, large, middle):
        cache.free_reqid(reqid)
    time.sleep(0.05)
    assert [mapped(cache, reqid) for reqid in lens] == [5, 20, 12], "the GPU may still be reading them"
    fake.finish_fences()
    wait_until(lambda: mapped(cache, large) == 0)
    settle(cache)
    assert [mapped(cache, reqid) for reqid in lens] == [5, 0, 12]
    assert cache.stats().pages_reclaimed == 40


def test_nothing_is_unmapped_under_running_work(open_cache: Open) -> None:
    cache, driver, fake = open_cache(limit_pages=40, mapper="sync", lookahead_tokens=0)
    first, second = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({first: 15 * TOKENS})
    fake.hold_fences = True
    cache.free_reqid(first)
    finished: list[float] = []

    def finish() -> None:
        finished.append(time.monotonic())
        fake.finish_fences()

    timer = threading.Timer(0.1, finish)
    timer.start()
    unmapped_at: list[float] = []
    driver.on_call = lambda op, args: unmapped_at.append(time.monotonic()) if op == "unmap" else None
    assert cache.step({second: 15 * TOKENS}), "the step waits for the GPU, as it says"
    timer.join()
    assert unmapped_at
    assert min(unmapped_at) >= finished[0]


def test_a_fence_that_never_ends_is_a_bounded_error(open_cache: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _, fake = open_cache(limit_pages=40, mapper="sync", lookahead_tokens=0)
    monkeypatch.setattr("slicedkv.paging.reclaim.TIMEOUT_S", 0.05)
    first, second = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({first: 15 * TOKENS})
    fake.hold_fences = True
    cache.free_reqid(first)
    with pytest.raises(StateError, match=f"device work on freed reqid {first}"):
        cache.step({second: 15 * TOKENS})
    assert mapped(cache, first) == 15
    fake.finish_fences()
    assert cache.step({second: 15 * TOKENS})


def test_a_slot_given_away_at_once_is_ordered_after_its_last_request(open_cache: Open) -> None:
    cache, _, fake = open_cache(max_batch_size=1)
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 10})
    fake.hold_fences = True
    fake.current_stream, fake.current_device = "stream A", 1
    cache.free_reqid(reqid)
    with pytest.raises(StateError, match="freed already"):
        cache.free_reqid(reqid)
    fake.current_stream = "stream B"
    assert cache.alloc_reqid() == reqid
    (fence,) = fake.fences
    assert fence.stream == "stream A"
    assert fake.ordered == [("stream B", fence)]


def test_a_request_that_grows_into_its_margin_keeps_it(open_cache: Open) -> None:
    cache, _, _ = open_cache(limit_pages=8, mapper="sync", lookahead_tokens=TOKENS, reclaim_watermark=0.0)
    one, two = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({one: TOKENS, two: 1})
    assert (mapped(cache, one), mapped(cache, two)) == (2, 2)
    lens = {one: TOKENS + 1, two: 3 * TOKENS}
    assert cache.pages_needed(lens) > cache.pages_available()
    assert cache.step(lens) is False, "8 pages are mapped; one's margin is no longer to be had"
    lens = {one: TOKENS, two: 3 * TOKENS}
    assert cache.pages_needed(lens) <= cache.pages_available()
    assert cache.step(lens)
    cache.check_integrity()


def test_what_a_growing_request_does_not_need_of_its_slot_may_go(open_cache: Open) -> None:
    cache, _, _ = open_cache(limit_pages=40, mapper="sync", reclaim_watermark=0.0)
    big, other = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({big: 18 * TOKENS, other: TOKENS})
    cache.free_reqid(big)
    small = cache.alloc_reqid()
    assert mapped(cache, small) == 18
    assert cache.step({small: 2 * TOKENS, other: 15 * TOKENS})
    assert mapped(cache, small) >= 2


def test_pages_asked_for_are_not_promised_twice(open_cache: Open) -> None:
    cache, driver, _ = open_cache(limit_pages=20)
    driver.delay("map", 0.01)
    admitted = []
    while cache.can_admit(8 * TOKENS):
        admitted.append(cache.alloc_reqid(8 * TOKENS))
    assert len(admitted) == 1, "16 of 20 pages are asked for"
    assert cache.step({admitted[0]: 8 * TOKENS})


def test_a_device_that_fails_to_answer_does_not_end_the_thread(
    open_cache: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, driver, fake = open_cache(limit_pages=60, reclaim_watermark=1.0, lookahead_tokens=0)
    reqids = [cache.alloc_reqid() for _ in range(3)]
    assert cache.step(dict.fromkeys(reqids, 8 * TOKENS))
    settle(cache)
    fake.hold_fences = True
    with monkeypatch.context() as patched:
        asked: list[object] = []
        # No at first, when work is planned; then it fails, when the mapper wants to know how long to sleep.
        patched.setattr(driver, "fence_done", lambda fence: asked.append(fence) or (len(asked) > 1 and 1 // 0))
        for reqid in reqids[:2]:
            cache.free_reqid(reqid)  # one of them is handed out next and spared, the other is asked about
            forget_background_failure(cache)
        wait_until(lambda: mapper_failed(cache))
    forget_background_failure(cache)
    cache.prefetch(reqids[2], 10 * TOKENS)
    wait_until(lambda: mapped(cache, reqids[2]) == 10)


@pytest.mark.parametrize("extent_pages", [1, 4])
def test_eager_pages_and_reclaim_do_not_undo_each_other(open_cache: Open, extent_pages: int) -> None:
    """Memory is always short: what is mapped for the next request must be what reclaim spares."""
    cache, driver, _ = open_cache(
        extent_pages=extent_pages, mapper="sync", eager_tokens=4 * TOKENS, lookahead_tokens=0, reclaim_watermark=0.99
    )
    reqids = [cache.alloc_reqid() for _ in range(3)]
    assert cache.step(dict(zip(reqids, (5 * TOKENS, 9 * TOKENS, TOKENS), strict=True)))
    unmapped = driver.counts["unmap"]

    def count(op: str, args: object) -> None:
        assert driver.counts["unmap"] < unmapped + 100, "it goes on for ever"

    driver.on_call = count
    for reqid in reqids:
        cache.free_reqid(reqid)
    cache.alloc_reqid()
    assert cache.stats().active_slots == 1
