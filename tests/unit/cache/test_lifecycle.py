"""The end of a cache: closed, closed while others are at it, or forgotten (case C4).

Whatever the end, all memory, addresses, files and threads are given back, and nobody waits for ever. What happens at
the end of a process is in `test_processes`.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rig import PAGE, SMALL, Rig, mapper_threads, memory_files, wait_until

from slicedkv import DriverError, SlicedKVCache, StateError, closing


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as rig:
        yield rig


def is_reserved(address: int, num_bytes: int) -> bool:
    """True when all of a range belongs to some mapping of the process, as the OS sees it."""
    spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    for start, end in sorted((int(start, 16), int(end, 16)) for start, end in spans):
        if start <= address < end:
            num_bytes -= end - address
            address = end
    return num_bytes <= 0


@contextmanager
def no_collection() -> Iterator[None]:
    """Let the collector run only where a test calls it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# --- close ----------------------------------------------------------------------------------------------------------

OPTIONS = {"debug", "protects_shared_pages"}
USES: dict[str, Callable[[SlicedKVCache], object]] = {
    "kv_tensors": lambda cache: cache.kv_tensors,
    "k": lambda cache: cache.k(0),
    "v": lambda cache: cache.v(0),
    "alloc_reqid": lambda cache: cache.alloc_reqid(5),
    "prefetch": lambda cache: cache.prefetch(0, 5),
    "free_reqid": lambda cache: cache.free_reqid(0),
    "step": lambda cache: cache.step({0: 1}),
    "share_prefix": lambda cache: cache.share_prefix(0, 1, 1),
    "fork": lambda cache: cache.fork(0),
    "shareable_pages": lambda cache: cache.shareable_pages(0, 1),
    "freeable_pages": lambda cache: cache.freeable_pages([0]),
    "is_active": lambda cache: cache.is_active(0),
    "seq_len": lambda cache: cache.seq_len(0),
    "truncate": lambda cache: cache.truncate(0, 0),
    "check_writable": lambda cache: cache.check_writable([0], [0], [1]),
    "pages_needed": lambda cache: cache.pages_needed({0: 1}),
    "pages_available": lambda cache: cache.pages_available(),
    "can_admit": lambda cache: cache.can_admit(1),
    "swap_out": lambda cache: cache.swap_out(0),
    "swap_in": lambda cache: cache.swap_in(None),
    "pause": lambda cache: cache.pause(),
    "resume": lambda cache: cache.resume(),
    "trim": lambda cache: cache.trim(),
    "set_memory_limit": lambda cache: cache.set_memory_limit(PAGE),
    "stats": lambda cache: cache.stats(),
    "check_integrity": lambda cache: cache.check_integrity(),
    "__enter__": lambda cache: cache.__enter__(),
}


@pytest.mark.parametrize("mapper", ["sync", "background"])
def test_a_closed_cache_refuses_every_call(rig: Rig, mapper: str) -> None:
    cache = rig.open(mapper=mapper)
    public = {name for name in dir(SlicedKVCache) if not name.startswith("_")}
    assert set(USES) - {"__enter__"} == public - {"close", "closed", "layout", "pool", *OPTIONS}, (
        "the list above is complete"
    )
    assert cache.step({cache.alloc_reqid(100): 100})
    assert not cache.closed
    cache.close()
    cache.close()
    assert cache.closed
    assert "closed" in repr(cache)
    for use in USES.values():
        with pytest.raises(StateError, match="the cache is closed; open a new one"):
            use(cache)


def test_leaving_the_context_closes_it(rig: Rig) -> None:
    cache = rig.open()

    def use() -> None:
        with cache as same:
            assert same.step({cache.alloc_reqid(): 10})
            raise KeyError("of the caller")

    with pytest.raises(KeyError, match="of the caller"):
        use()
    assert cache.closed


def test_close_in_the_middle_of_mapping(rig: Rig) -> None:
    cache = rig.open_mapping()
    cache.close()
    assert 0 < rig.driver.counts["map"] < 256, "it did not wait for all that was asked for"


def test_close_from_several_threads(rig: Rig) -> None:
    cache, together, failures = rig.open_mapping(), threading.Barrier(4), []

    def close() -> None:
        together.wait()
        try:
            cache.close()
            assert cache.closed
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert rig.driver.counts["map"] == rig.driver.counts["set_access"]


def test_steps_that_wait_while_another_thread_closes(rig: Rig) -> None:
    cache, answers = rig.open(), []
    reqid = cache.alloc_reqid()

    def step() -> None:
        try:
            answers.append(cache.step({reqid: 1000}))
        except StateError as error:
            answers.append(str(error))

    threads = [threading.Thread(target=step) for _ in range(3)]
    threads.insert(1, threading.Thread(target=cache.close))
    with rig.pool.gate.work("test"):
        for waiting, thread in enumerate(threads, 1):
            thread.start()
            if waiting < 3:  # the first step and then close wait for the token, later steps are refused at once
                wait_until(lambda waiting=waiting: rig.pool.gate._foreground_waiting >= waiting)
    for thread in threads:
        thread.join()
    assert len(answers) == 3
    assert all(answer is True or "closed" in answer for answer in answers)


def test_a_step_that_was_past_its_checks_when_the_cache_closed(rig: Rig) -> None:
    cache = rig.open()
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 100})

    class Closing(dict[int, int]):
        def items(self) -> Any:
            cache.close()  # in place of another thread, at the worst moment
            return super().items()

    with pytest.raises(StateError, match="closed by another thread"):
        cache.step(Closing({reqid: 50}))


def test_a_close_that_failed_can_be_called_again(rig: Rig) -> None:
    cache = rig.open()
    assert cache.step({cache.alloc_reqid(): 100, cache.alloc_reqid(): 100})
    rig.driver.fail("unmap", at=3)
    with pytest.raises(DriverError):
        cache.close()
    assert not cache.closed
    for use in USES.values():
        with pytest.raises(StateError, match="being closed"):
            use(cache)
    assert rig.fake.mapped > 0
    cache.close()
    assert cache.closed


# --- forgotten ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cycle", [False, True], ids=["dropped", "in a cycle"])
def test_a_forgotten_cache_gives_everything_back(rig: Rig, cycle: bool) -> None:
    cache = rig.open_mapping()
    if cycle:
        ring: list[Any] = [cache]
        ring.append(ring)
        del ring
    del cache
    gc.collect()
    wait_until(lambda: rig.fake.mapped == 0 and not mapper_threads())
    assert rig.fake.reserved == 0


def test_a_forgotten_cache_on_the_host_closes_its_memory_file() -> None:
    files = memory_files()
    cache = SlicedKVCache(**SMALL)
    assert cache.step({cache.alloc_reqid(300): 300})
    assert memory_files() == files + 1
    del cache
    gc.collect()
    wait_until(lambda: memory_files() == files and not mapper_threads())


def test_collection_on_a_thread_that_holds_the_lock(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten, cache = rig.open(), rig.open()
    assert forgotten.step({forgotten.alloc_reqid(): 100})
    reqid = cache.alloc_reqid()
    ring: list[Any] = [forgotten]
    ring.append(ring)
    with no_collection():
        del forgotten, ring
        # A fence is recorded with the lock held; a collection may happen at any moment.
        monkeypatch.setattr(rig.driver, "record_fence", lambda: gc.collect() and rig.fake.record_fence())
        cache.free_reqid(reqid)
    wait_until(lambda: rig.fake.mapped == 0)
    cache.check_integrity()
    cache.close()


@pytest.mark.parametrize("where", ["holding the token", "holding the lock"])
def test_collection_on_the_mapper_thread_of_the_cache_itself(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    cache = rig.open(reclaim_watermark=1.0)
    lens = {cache.alloc_reqid(): length for length in (60, 100, 30)}
    assert cache.step(lens)
    cache.check_integrity()
    ring: list[Any] = [cache]
    ring.append(ring)
    collected_by: list[str] = []

    def collect_once(*_: object) -> bool:
        if not collected_by and threading.current_thread().name == "slicedkv-mapper":
            collected_by.append("the mapper")
            gc.collect()
        return True

    with no_collection():
        if where == "holding the token":
            rig.driver.on_call = collect_once
        else:
            monkeypatch.setattr(rig.driver, "fence_done", collect_once)
        with rig.pool.gate.work("test"):  # the mapper waits until nobody else knows the cache
            for reqid in lens:
                cache.free_reqid(reqid)
            del cache, ring
        wait_until(lambda: rig.fake.mapped == 0 and not mapper_threads())
    assert collected_by == ["the mapper"]


def test_a_view_keeps_its_addresses_reserved() -> None:
    cache = SlicedKVCache(**SMALL | {"max_seq_len": 10_000_000})
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 10})
    files = memory_files()
    keys, first, num_bytes = cache.k(1)[reqid], cache.k(0).data_ptr(), cache.layout.plane_bytes
    other = cache.v(0).data_ptr()
    del cache
    gc.collect()
    wait_until(lambda: memory_files() == files - 1)
    assert is_reserved(first, num_bytes)
    assert not is_reserved(other, num_bytes), "V has no view left"
    assert keys.shape == (10_000_000, 2, 16)
    del keys
    assert not is_reserved(first, num_bytes)


def test_what_is_finished_elsewhere_is_gone_before_the_interpreter_may_end() -> None:
    """What a dropped cache held dies on the thread that closes it, and frees addresses by driver calls of its own."""
    gone = []

    class Parts:
        def __del__(self) -> None:
            time.sleep(0.2)
            gone.append(True)

    def holding(parts: Parts) -> Callable[[], None]:
        return lambda: parts and None

    closing._finish_elsewhere(holding(Parts()))
    closing._wait_for_finishing()
    assert gone == [True]
