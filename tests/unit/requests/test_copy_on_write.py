"""Shared pages are never written: which pages a step may write, and the copies a request gets of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from rig import QUIET, TOKENS, assert_stamped, mapped, stamp, wait_until

from slicedkv import SlicedKVCache, StateError
from slicedkv.vmm.fake import FakeDriver
from slicedkv.vmm.faulty import FaultyDriver

MakeCache = Callable[..., SlicedKVCache]
Open = Callable[..., tuple[SlicedKVCache, FaultyDriver, FakeDriver]]


@pytest.mark.parametrize(
    ("steps", "guard_tokens", "copied"),
    [
        ([130, 150], 0, 0),  # appends behind what is shared
        ([100], 0, 0),  # shorter: nothing is written
        ([100, 101], 0, 1),  # row 100 lies in page 3
        ([96, 97], 0, 1),  # the first row of a page
        ([128, 129], 0, 0),  # the first row behind
        ([95, 97], 0, 2),  # rows on both sides of a page's end
        ([10, 129], 0, 4),  # all four pages
        ([10, 20, 30], 0, 1),  # the copy is made once
        ([10, 20, 40], 0, 2),  # and the next page when it is reached
        ([100, 100], 0, 0),
        ([50], 40, 2),  # guard rows [50, 90)
        ([127], 1, 1),  # a guard row
        ([128], 40, 0),
        ([60, 130], 0, 3),
        ([60, 0, 61], 0, 1),  # 0 leaves a request as it was
    ],
)
def test_which_pages_a_step_may_write(open_cache: Open, steps: list[int], guard_tokens: int, copied: int) -> None:
    cache, driver, _ = open_cache(guard_tokens=guard_tokens, **QUIET)
    source, target = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({source: 4 * TOKENS + 2})
    assert cache.share_prefix(source, target, 4 * TOKENS)
    needed = 0
    for length in steps:
        before = cache.stats().pages_copied
        needed = cache.pages_needed({target: length})
        unmapped = driver.counts["unmap"]
        assert cache.step({target: length})
        copies = cache.stats().pages_copied - before
        assert needed >= copies
        assert (driver.counts["unmap"] > unmapped) == (copies > 0)
        cache.check_integrity()
    assert cache.stats().pages_copied == copied * cache.layout.num_planes
    assert cache.stats().saved_bytes == (4 - copied) * cache.layout.num_planes * cache.layout.page_bytes


@pytest.mark.parametrize("writer", ["source", "target"])
@pytest.mark.parametrize("layout", ["sliced", "interleaved", "per_layer"])
@pytest.mark.parametrize("extent_pages", [1, 4])
def test_the_other_keeps_its_tokens(make_cache: MakeCache, writer: str, layout: str, extent_pages: int) -> None:
    cache = make_cache(
        layout=layout, mapper="sync", head_dim=64, max_seq_len=4000, extent_pages=extent_pages, memory_limit="64MiB"
    )
    source, target, third = (cache.alloc_reqid() for _ in range(3))
    assert cache.step({source: 3000})
    stamp(cache, source, 0, 3000, seed=1)
    assert cache.share_prefix(source, target, 3000)
    assert cache.share_prefix(source, third, 2000)
    writing, reading = (source, target) if writer == "source" else (target, source)
    assert cache.step({writing: 1000})
    assert cache.step({writing: 1700})
    stamp(cache, writing, 1000, 1700, seed=2)
    assert cache.stats().pages_copied > 0
    assert_stamped(cache, reading, 3000, seed=1)
    assert_stamped(cache, third, 2000, seed=1)
    assert_stamped(cache, writing, 1000, seed=1)
    assert_stamped(cache, writing, 1700, seed=2, start=1000)
    assert_stamped(cache, writing, 3000, seed=1, start=1700)
    cache.check_integrity()


def test_of_all_that_write_one_page_the_last_keeps_it(open_cache: Open) -> None:
    cache, _, _ = open_cache(**QUIET)
    source = cache.alloc_reqid()
    assert cache.step({source: 2 * TOKENS})
    reqids = [source, *cache.fork(source, 3)]
    assert cache.step(dict.fromkeys(reqids, 40))
    assert cache.step(dict.fromkeys(reqids, 41))
    planes = cache.layout.num_planes
    assert cache.stats().pages_copied == 3 * planes
    assert cache.stats().saved_bytes == 3 * planes * cache.layout.page_bytes, "the first page is still shared"


def test_a_page_whose_other_sharers_are_gone_is_written_in_place(open_cache: Open) -> None:
    cache, driver, fake = open_cache(limit_pages=8, **QUIET)
    source = cache.alloc_reqid()
    assert cache.step({source: 4 * TOKENS})
    (target,) = cache.fork(source)
    fake.hold_fences = True
    cache.free_reqid(source)
    assert cache.step({target: 33}), "shorter"
    timer = threading.Timer(0.05, fake.finish_fences)
    timer.start()
    unmapped: list[bool] = []
    driver.on_call = lambda op, args: unmapped.append(fake.fences[0].done) if op == "unmap" else None
    lens = {target: 34}
    assert cache.pages_needed(lens) == 0
    assert cache.step(lens), "the step waits for the work of the freed request, which may still read the page"
    timer.join()
    assert unmapped
    assert all(unmapped)
    assert (cache.stats().pages_copied, mapped(cache, source), mapped(cache, target)) == (0, 0, 4)


def test_no_page_for_the_copy_is_false_without_side_effects(open_cache: Open) -> None:
    cache, _, _ = open_cache(limit_pages=10, **QUIET)
    source, other = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({source: 4 * TOKENS})
    (target,) = cache.fork(source)
    assert cache.step({other: 1, target: 40})
    before = cache.stats(), cache.pages_available()
    lens = {target: 41, other: 2}
    assert (cache.pages_needed(lens), cache.pages_available()) == (2, 0)
    assert cache.step(lens) is False
    after = cache.stats()
    for name in ("mapped_bytes", "created_bytes", "free_bytes", "used_bytes", "saved_bytes", "pages_copied"):
        assert getattr(after, name) == getattr(before[0], name), name
    cache.check_integrity()
    cache.free_reqid(other)
    assert cache.step({target: 41})
    assert cache.stats().pages_copied == 2


def test_growth_and_copies_are_all_or_nothing(open_cache: Open) -> None:
    cache, _, _ = open_cache(limit_pages=12, **QUIET)
    source, other = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({source: 4 * TOKENS})
    (target,) = cache.fork(source)
    assert cache.step({target: 40, other: 1})
    lens = {target: 41, other: TOKENS + 1}
    assert (cache.pages_needed(lens), cache.pages_available()) == (4, 2)
    assert cache.step(lens) is False
    assert (cache.stats().pages_copied, mapped(cache, other)) == (0, 1)
    cache.set_memory_limit(14 * cache.layout.page_bytes)
    assert cache.step(lens)
    assert (cache.stats().pages_copied, mapped(cache, other)) == (2, 2)


def test_a_copy_waits_for_the_callers_stream_for_a_bounded_time(
    open_cache: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, _, fake = open_cache(**QUIET)
    monkeypatch.setattr("slicedkv.paging.reclaim.TIMEOUT_S", 0.05)
    source = cache.alloc_reqid()
    assert cache.step({source: 4 * TOKENS})
    (target,) = cache.fork(source)
    fake.hold_fences = True
    assert cache.step({target: 40})
    with pytest.raises(StateError, match=r"waited 0.05 s for device work on a page that a step must copy"):
        cache.step({target: 41})
    assert cache.stats().pages_copied == 0
    cache.check_integrity()
    threading.Timer(0.02, fake.finish_fences).start()
    assert cache.step({target: 41})
    assert cache.stats().pages_copied == 2


def test_no_page_is_replaced_under_running_work(open_cache: Open) -> None:
    cache, driver, fake = open_cache(**QUIET)
    source = cache.alloc_reqid()
    assert cache.step({source: 4 * TOKENS})
    (target,) = cache.fork(source)
    assert cache.step({target: 40})
    fake.hold_fences = True
    finished: list[float] = []
    unmapped: list[float] = []

    def finish() -> None:
        finished.append(time.monotonic())
        fake.finish_fences()

    driver.on_call = lambda op, args: unmapped.append(time.monotonic()) if op == "unmap" else None
    timer = threading.Timer(0.05, finish)
    timer.start()
    assert cache.step({target: 41})
    timer.join()
    assert len(unmapped) == cache.layout.num_planes
    assert min(unmapped) >= finished[0]


def test_steps_beside_stale_shared_pages_stay_quiet(open_cache: Open) -> None:
    cache, _, _ = open_cache(**QUIET)
    source = cache.alloc_reqid()
    assert cache.step({source: 8 * TOKENS})
    (target,) = cache.fork(source)
    assert cache.step({target: 10})
    stalls = cache.stats().stalls
    for length in range(11, TOKENS + 1):
        assert cache.step({target: length})
    assert cache.stats().stalls == stalls + 1, "one copy, though pages 1 to 7 behind are shared still"


def test_the_mapper_does_not_wait_for_copies(open_cache: Open) -> None:
    cache, _, _ = open_cache(lookahead_tokens=8)
    source = cache.alloc_reqid()
    assert cache.step({source: 4 * TOKENS - 1})
    targets = cache.fork(source, 2)
    assert cache.step(dict.fromkeys(targets, 4 * TOKENS))
    wait_until(lambda: all(mapped(cache, reqid) == 5 for reqid in targets))
    assert cache.stats().pages_copied == 0
