"""Taking what another cache of the pool holds: its work is waited for, and failures, requests and threads in between.

Two caches that are short at the same time both get on.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest
from inside import begin_inside
from rig import PAGE, QUIET, TOKENS, Rig, grow, mapped, most

from slicedkv import DriverError, OutOfPagesError


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig(limit_pages=40) as rig:
        yield rig


def test_the_work_of_the_other_cache_is_waited_for(rig: Rig) -> None:
    one, two = rig.open(**QUIET), rig.open(**QUIET)
    idle = grow(one, 15)
    rig.fake.hold_fences = True
    one.free_reqid(idle)
    finished: list[float] = []
    unmapped: list[float] = []
    rig.driver.on_call = lambda op, args: unmapped.append(time.monotonic()) if op == "unmap" else None
    timer = threading.Timer(0.05, lambda: finished.append(time.monotonic()) or rig.fake.finish_fences())
    timer.start()
    assert two.step({two.alloc_reqid(): 15 * TOKENS})
    timer.join()
    assert min(unmapped) >= finished[0]
    rig.driver.on_call = None
    one.close()
    two.close()


@pytest.mark.parametrize("lowered", [False, True])
def test_a_share_is_not_taken_for_a_slot_that_went_to_a_request_meanwhile(rig: Rig, lowered: bool) -> None:
    one, two = rig.open(**QUIET), rig.open(**QUIET)
    three = rig.open(**QUIET, min_share=20 * PAGE)
    larger, smaller = grow(one, 6), grow(one, 4)
    one.free_reqid(smaller)
    one.free_reqid(larger)

    def take_the_other(op: str, args: object) -> None:
        if op == "unmap" and not one.is_active(smaller):
            assert begin_inside(one, 4 * TOKENS) == smaller

    rig.driver.on_call = take_the_other
    if lowered:
        with pytest.raises(OutOfPagesError, match=r"20 pages .* requests need 28"):
            two.set_memory_limit(20 * PAGE)
    else:
        assert not two.step({two.alloc_reqid(): 10 * TOKENS})
    rig.driver.on_call = None
    assert (mapped(one, smaller), three.pages_available()) == (4, 32)
    reqid = two.alloc_reqid()
    assert two.step({reqid: 6 * TOKENS})
    assert most(three, three.alloc_reqid()) == 10
    for cache in (one, two, three):
        cache.close()


@pytest.mark.parametrize("op", ["unmap", "create", "map"])
def test_taking_that_fails_at_any_call_loses_nothing(op: str) -> None:
    with Rig(limit_pages=40, extent_pages=4) as rig:
        one, two = rig.open(**QUIET, layout="per_layer", num_layers=2, max_seq_len=9000), rig.open(**QUIET)
        active, idle = one.alloc_reqid(), one.alloc_reqid()
        assert one.step({active: 2 * 1024, idle: 5 * 1024})
        one.free_reqid(idle)
        reqid = two.alloc_reqid()
        failures = 0
        while True:
            rig.driver.heal()
            rig.driver.fail(op, at=failures + 1)
            before = (one.stats().active_bytes, one.stats().used_bytes, two.stats().mapped_bytes)
            try:
                assert two.step({reqid: 14 * TOKENS})
                break
            except DriverError:
                failures += 1
            assert (one.stats().active_bytes, one.stats().used_bytes, two.stats().mapped_bytes) == before
            one.check_integrity()
        assert failures > 0
        assert one.step({active: 2 * 1024})
        rig.driver.heal()
        one.close()
        two.close()


def test_two_that_are_short_at_once_both_get_on(rig: Rig) -> None:
    """Each thread fills its share and frees it, again and again, with mappers at work; nobody waits for ever."""
    caches = [rig.open(min_share=16 * PAGE), rig.open(min_share=16 * PAGE, layout="interleaved")]
    failures: list[BaseException] = []
    turns = [0, 0]

    def work(index: int) -> None:
        cache, numbers = caches[index], random.Random(index)
        try:
            while time.monotonic() < end:
                promised = cache.layout.tokens_backed(8 // cache.layout.num_planes)
                first, second = cache.alloc_reqid(), cache.alloc_reqid(promised)
                assert cache.step({first: promised, second: promised}), "its share is its own"
                cache.step({first: numbers.randrange(4000)})
                if numbers.random() < 0.3:
                    cache.trim()
                cache.free_reqid(first)
                cache.free_reqid(second)
                turns[index] += 1
        except BaseException as error:
            failures.append(error)

    end = time.monotonic() + 2
    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive(), "a deadlock"
    assert not failures
    assert min(turns) > 5
    for cache in caches:
        cache.check_integrity()
        cache.close()
