"""A call on the thread that is inside another call: a signal's handler, a finalizer. Nothing waits for itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from inside import fence_of, give_slot_to_the_next
from rig import QUIET, SMALL, Rig, mapped, wait_until
from warm_python import run_script

from slicedkv import SlicedKVCache, StateError

Call = Callable[[SlicedKVCache, int], object]
CALLS: dict[str, Call] = {
    "alloc_reqid": lambda cache, reqid: cache.alloc_reqid(),
    "prefetch": lambda cache, reqid: cache.prefetch(reqid, 50),
    "step": lambda cache, reqid: cache.step({reqid: 10}),
    "truncate": lambda cache, reqid: cache.truncate(reqid, 5),
    "check_writable": lambda cache, reqid: cache.check_writable([reqid], [0], [1]),
    "seq_len": lambda cache, reqid: cache.seq_len(reqid),
    "is_active": lambda cache, reqid: cache.is_active(reqid),
    "pages_needed": lambda cache, reqid: cache.pages_needed({reqid: 20}),
    "pages_available": lambda cache, reqid: cache.pages_available(),
    "can_admit": lambda cache, reqid: cache.can_admit(5),
    "shareable_pages": lambda cache, reqid: cache.shareable_pages(reqid, 5),
    "freeable_pages": lambda cache, reqid: cache.freeable_pages([reqid]),
    "share_prefix": lambda cache, reqid: cache.share_prefix(reqid, 1 - reqid, 5),
    "fork": lambda cache, reqid: cache.fork(reqid),
    "swap_out": lambda cache, reqid: cache.swap_out(reqid),
    "pause": lambda cache, reqid: cache.pause(),
    "trim": lambda cache, reqid: cache.trim(),
    "set_memory_limit": lambda cache, reqid: cache.set_memory_limit(1 << 30),
    "stats": lambda cache, reqid: cache.stats(),
    "check_integrity": lambda cache, reqid: cache.check_integrity(),
    "close": lambda cache, reqid: cache.close(),
}


@pytest.fixture
def cache(rig: Rig) -> SlicedKVCache:
    return rig.open(max_batch_size=2, **QUIET)


@pytest.mark.parametrize("name", CALLS)
def test_under_the_lock_every_call_is_refused_at_once(rig: Rig, cache: SlicedKVCache, name: str) -> None:
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 10})
    before = cache.stats()
    with rig.pool.gate.lock, pytest.raises(StateError, match="in the middle of another call"):
        CALLS[name](cache, reqid)
    assert cache.stats() == before
    assert cache.step({reqid: 11})
    cache.close()


def test_no_public_call_is_left_out(cache: SlicedKVCache) -> None:
    waiting_for_nobody = {"k", "v", "kv_tensors", "layout", "pool", "closed", "dtype", "device"}
    waiting_for_nobody |= {"debug", "protects_shared_pages"}
    public = {name for name in dir(cache) if not name.startswith("_")} - waiting_for_nobody
    # Those that give back are put off; these two take what another call returned, or need a paused cache.
    assert public - set(CALLS) == {"free_reqid", "swap_in", "resume"}
    cache.close()


def test_a_request_that_ends_under_the_lock_is_over_at_the_next_call(rig: Rig, cache: SlicedKVCache) -> None:
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 10})
    with rig.pool.gate.lock:
        cache.free_reqid(reqid)
        with pytest.raises(StateError, match="freed already"):
            cache.free_reqid(reqid)
    assert not cache.is_active(reqid)
    assert cache.stats().active_slots == 0
    with pytest.raises(StateError, match="is not active"):
        cache.step({reqid: 11})
    cache.check_integrity()
    cache.close()


def test_a_late_end_waits_for_the_work_queued_when_it_was_asked_for(rig: Rig, cache: SlicedKVCache) -> None:
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 10})
    rig.fake.hold_fences = True
    rig.fake.current_stream = "its own"
    with rig.pool.gate.lock:
        cache.free_reqid(reqid)
    rig.fake.current_stream = "another"
    assert not cache.is_active(reqid)
    behind = fence_of(cache, reqid)
    assert behind is not None
    assert (behind.done, behind.stream) == (False, "its own")
    rig.fake.finish_fences()
    cache.close()


def test_a_late_end_is_its_own_requests(rig: Rig, cache: SlicedKVCache) -> None:
    """Not that of the next request in the slot."""
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 10})
    with rig.pool.gate.lock:
        cache.free_reqid(reqid)
        give_slot_to_the_next(cache, reqid)  # the call that was interrupted ends it itself
    assert cache.is_active(reqid)
    cache.close()


def test_in_the_middle_of_driver_work_nobody_waits_for_himself(rig: Rig, cache: SlicedKVCache) -> None:
    """The lock is free there: what needs no driver works, what does is refused, what gives back is put off."""
    reqid, other = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({reqid: 10, other: 10})
    seen: list[str] = []

    def interrupt(op: str, args: object) -> None:
        rig.driver.on_call = None
        started = time.monotonic()
        assert cache.stats().active_slots == 2
        for call in (lambda: cache.step({other: 500}), cache.trim, lambda: cache.step({reqid: 5})):
            with pytest.raises(StateError, match="this thread is in the middle of step"):
                call()
        cache.free_reqid(reqid)
        assert not cache.is_active(reqid)
        with pytest.raises(StateError, match="is not active"):
            cache.free_reqid(reqid)
        assert time.monotonic() - started < 2
        seen.append(op)

    rig.driver.on_call = interrupt
    assert cache.step({reqid: 100})
    assert len(seen) == 1
    assert cache.stats().active_slots == 1
    assert mapped(cache, reqid) == 4, "its pages stayed as long as they were in use, and are there for the next request"
    cache.check_integrity()
    cache.close()


def test_a_paused_caches_request_ends_after_the_pause(rig: Rig, cache: SlicedKVCache) -> None:
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 10})
    rig.driver.on_call = lambda op, args: cache.is_active(reqid) and cache.free_reqid(reqid) if op == "copy" else None
    cache.pause(offload=True)
    rig.driver.on_call = None
    with pytest.raises(StateError, match="is not active"):
        cache.free_reqid(reqid)
    assert cache.stats().swapped_bytes == 0
    cache.resume()
    assert not cache.is_active(reqid)
    cache.check_integrity()
    cache.close()


def test_the_last_slot_is_waited_for(rig: Rig, cache: SlicedKVCache) -> None:
    """Its request is over, but a call still uses its pages."""
    reqid, other = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({reqid: 10})
    answers: list[object] = []
    thread = threading.Thread(target=lambda: (cache.free_reqid(reqid), answers.append(cache.alloc_reqid())))

    def interrupt(op: str, args: object) -> None:
        if not thread.ident:
            thread.start()
            wait_until(lambda: rig.pool.gate._foreground_waiting)

    rig.driver.on_call = interrupt
    assert cache.step({reqid: 100, other: 100})
    thread.join(5)
    assert answers == [reqid]
    assert cache.seq_len(reqid) == 0
    cache.close()


def test_a_call_that_waited_is_refused_when_its_slot_has_another_request(rig: Rig) -> None:
    cache = rig.open(**QUIET)
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 10})
    calls: dict[str, Callable[[], object]] = {
        "step": lambda: cache.step({reqid: 500}),
        "share": lambda: cache.share_prefix(reqid, other, 5),
        "fork": lambda: cache.fork(reqid),
        "swap": lambda: cache.swap_out(reqid),
    }
    other = cache.alloc_reqid()
    refused: list[str] = []

    def wait(name: str) -> None:
        with pytest.raises(StateError, match="its slot is another request's now"):
            calls[name]()
        refused.append(name)

    threads = [threading.Thread(target=wait, args=(name,)) for name in calls]
    with rig.pool.gate.work("a test"):
        for count, thread in enumerate(threads):
            thread.start()
            wait_until(lambda count=count: rig.pool.gate._foreground_waiting == count + 1)
        with rig.pool.gate.lock:
            give_slot_to_the_next(cache, reqid)
    for thread in threads:
        thread.join(5)
    assert sorted(refused) == sorted(calls)
    assert cache.seq_len(reqid) == 0
    cache.check_integrity()
    cache.close()


def test_signals_and_finalizers_at_any_moment() -> None:
    """Thousands, in a process of its own: one that waits for itself would stop it for good."""
    options = SMALL | {"dtype": "float32", "max_batch_size": 4, "memory_limit": "2MiB", "page_bytes": 4096}
    code = f"""
        import faulthandler, gc, random, signal, time
        from slicedkv import SlicedKVCache, StateError, OutOfSlotsError, OutOfPagesError

        class Client:
            "A request that ends when it is forgotten; part of a cycle, so that the collector finds it anywhere."

            def __init__(self, reqid):
                self.reqid, self.itself = reqid, self

            def __del__(self):
                try:
                    cache.free_reqid(self.reqid)
                    freed.append(self.reqid)
                except BaseException as error:
                    failures.append(error)

        def ask(*_):
            try:
                cache.stats(), cache.is_active(0)
                counts[0] += 1
            except StateError as error:
                if "in the middle of another call" not in str(error):
                    failures.append(error)
                counts[1] += 1

        faulthandler.dump_traceback_later(60, exit=True)
        signal.signal(signal.SIGALRM, ask)
        gc.set_threshold(40)
        counts, failures, freed = [0, 0], [], []
        cache = SlicedKVCache(**{options!r})
        end = time.monotonic() + 4
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
        while time.monotonic() < end or (len(freed) < 60 and time.monotonic() < end + 30):  # longer on a busy machine
            try:
                client = Client(cache.alloc_reqid(random.randrange(100)))
                for _ in range(3):
                    cache.step({{client.reqid: random.randrange(1, 400)}})
                    cache.trim()
            except (OutOfSlotsError, OutOfPagesError):
                gc.collect()
            client = None
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.collect()
        assert not failures, failures[:3]
        assert cache.stats().active_slots == 0
        cache.check_integrity()
        print(*counts, len(freed))
    """
    status, out, errors = run_script(code, timeout_s=90)
    assert status == 0, errors
    answered, refused, freed = map(int, out.split())
    assert answered > 100
    assert refused > 5
    assert freed > 50
