"""Many threads on one cache, and a driver that sleeps or raises under them (cases C1, C2, E6)."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rig import PAGE, Rig, mapper_threads, wait_until

from slicedkv import CapacityError, SlicedKVCache, StateError


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig(limit_pages=300, extent_pages=4) as rig:
        yield rig


def in_threads(*calls: Callable[[], object], seconds: float = 5.0) -> list[object]:
    """Run each call on a fresh thread; return what they returned or raised, all within a bounded time."""
    answers: list[object] = [None] * len(calls)

    def run(index: int, call: Callable[[], object]) -> None:
        try:
            answers[index] = call()
        except BaseException as error:
            answers[index] = error

    threads = [threading.Thread(target=run, args=(index, call)) for index, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
        assert not thread.is_alive(), "a call hangs"
    return answers


class Block:
    """Holds the mapper's first map until it is told to go on."""

    def __init__(self, rig: Rig, then: BaseException | None = None) -> None:
        self.inside, self.go_on, self._then = threading.Event(), threading.Event(), then
        rig.driver.on_call = self

    def __call__(self, op: str, args: tuple[Any, ...]) -> None:
        if op == "map" and not self.inside.is_set() and threading.current_thread().name == "slicedkv-mapper":
            self.inside.set()
            self.go_on.wait(20)
            if self._then is not None:
                raise self._then


def test_calls_return_or_raise_while_the_mapper_hangs_in_the_driver(rig: Rig) -> None:
    cache = rig.open()
    rig.pool.gate.timeout_s = 0.2
    block = Block(rig)
    reqid = cache.alloc_reqid(500)
    assert block.inside.wait(5)
    allocated, stepped, trimmed, admitted, stats = in_threads(
        lambda: cache.alloc_reqid(10),
        lambda: cache.step({reqid: 500}),
        cache.trim,
        lambda: cache.can_admit(10),
        cache.stats,
    )
    assert allocated == 1 - reqid
    assert admitted is True
    assert stats.active_slots >= 1  # type: ignore[attr-defined]
    for error in (stepped, trimmed):
        assert isinstance(error, StateError)
        assert "waited 0.2 s for the mapper to finish its driver calls" in str(error)
    block.go_on.set()
    rig.pool.gate.timeout_s = 4.0
    assert cache.step({reqid: 500, allocated: 10})
    cache.check_integrity()
    cache.close()


@pytest.mark.parametrize("error", [KeyError("from Python"), MemoryError("from Python")], ids=repr)
def test_a_step_that_waits_for_a_mapper_that_raises_maps_for_itself(rig: Rig, error: Exception) -> None:
    cache = rig.open()
    block = Block(rig, then=error)
    reqid = cache.alloc_reqid(500)
    assert block.inside.wait(5)
    timer = threading.Timer(0.05, block.go_on.set)
    timer.start()
    stepped, allocated = in_threads(lambda: cache.step({reqid: 500}), cache.alloc_reqid)
    timer.join()
    assert (stepped, allocated) == (True, 1 - reqid)
    with pytest.raises(type(error), match="from Python"):
        cache.step({reqid: 501})
    assert cache.step({reqid: 501}), "a failure is raised once"
    cache.check_integrity()
    assert mapper_threads() == 1, "the thread lives on"
    cache.close()


def test_close_while_the_mapper_hangs_is_a_bounded_error(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slicedkv.paging.mapper.TIMEOUT_S", 0.1)
    cache = rig.open()
    block = Block(rig)
    cache.alloc_reqid(500)
    assert block.inside.wait(5)
    with pytest.raises(StateError, match="a driver call hangs"):
        cache.close()
    block.go_on.set()
    wait_until(lambda: not mapper_threads())
    cache.close()


def test_every_call_works_from_a_fresh_thread(rig: Rig) -> None:
    cache = rig.open()
    (reqid,) = in_threads(lambda: cache.alloc_reqid(100))
    assert isinstance(reqid, int)
    for call in (
        lambda: cache.step({reqid: 100}),
        lambda: cache.prefetch(reqid, 200),
        lambda: cache.pages_needed({reqid: 300}),
        cache.pages_available,
        lambda: cache.can_admit(10),
        cache.stats,
        lambda: (cache.k(0), cache.v(0), cache.kv_tensors),
        lambda: cache.set_memory_limit(200 * PAGE),
        cache.trim,
        cache.check_integrity,
        lambda: cache.free_reqid(reqid),
        cache.close,
    ):
        (answer,) = in_threads(call)
        assert not isinstance(answer, BaseException), answer


@pytest.mark.parametrize("mapper", ["sync", "background"])
def test_many_threads_never_meet_in_the_driver_and_keep_the_books_right(rig: Rig, mapper: str) -> None:
    cache = rig.open(mapper=mapper, max_batch_size=8, reclaim_watermark=0.3, eager_tokens=100)
    inside, most = [0], [0]

    def enter(op: str, args: tuple[Any, ...]) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0)  # lets another thread run, should there be one
        inside[0] -= 1

    rig.driver.on_call = enter
    end = time.monotonic() + 1.0

    def live(seed: int) -> tuple[int, int]:
        """One engine's life with requests of its own; memory and slots are fought for."""
        draw, steps, short = random.Random(seed), 0, 0
        lens: dict[int, int] = {}
        while time.monotonic() < end:
            try:
                reqid = cache.alloc_reqid(draw.choice((0, 200)))
                lens[reqid] = 0
            except CapacityError:
                short += 1
            for _ in range(draw.randint(1, 5)):
                grown = {reqid: min(length + draw.randint(0, 300), 4096) for reqid, length in lens.items()}
                if cache.step(grown):
                    lens = grown
                    steps += 1
                else:
                    short += 1
            if lens and draw.random() < 0.7:
                gone = draw.choice(list(lens))
                cache.free_reqid(gone)
                del lens[gone]
        for reqid in lens:
            cache.free_reqid(reqid)
        return steps, short

    lives = in_threads(*(lambda seed=seed: live(seed) for seed in range(3)), lambda: manage(cache, end), seconds=30)
    assert not [answer for answer in lives if isinstance(answer, BaseException)], lives
    assert all(steps > 3 for steps, _ in lives[:3])  # type: ignore[misc]
    assert most == [1]
    assert cache.stats().active_slots == 0
    cache.check_integrity()
    rig.driver.on_call = None
    cache.close()


def manage(cache: SlicedKVCache, end: float) -> int:
    """Trim, look, and move the limit, all the while."""
    calls = 0
    while time.monotonic() < end:
        cache.trim()
        cache.stats()
        cache.pages_available()
        for pages in (300, 250):
            try:
                cache.set_memory_limit(pages * PAGE)
            except CapacityError:
                continue
        cache.check_integrity()
        calls += 1
        time.sleep(0.005)
    return calls
