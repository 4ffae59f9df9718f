"""Ctrl-C in the middle of a call: nothing hangs, no memory leaks, and the books agree afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from rig import QUIET, SMALL, TOKENS, Rig
from warm_python import run_script

from slicedkv import SlicedKVCache
from slicedkv.memory import backing
from slicedkv.vmm import host

MIB = 1 << 20


def once(call: Callable[..., Any], at: int = 1) -> Callable[..., Any]:
    """A call that is interrupted the `at`-th time, before it does anything."""
    count = 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == at:
            raise KeyboardInterrupt
        return call(*arguments)

    return interrupted


def test_taking_back_from_an_active_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was to be unmapped is mapped: a step must know it."""
    with Rig() as rig:
        cache = rig.open(mapper="sync", lookahead_tokens=TOKENS, reclaim_watermark=0.0)
        reqid = cache.alloc_reqid()
        for length in range(1, 5):
            assert cache.step({reqid: length})
        monkeypatch.setattr(rig.fake, "_unmap", once(rig.fake._unmap))
        with pytest.raises(KeyboardInterrupt):
            cache.trim()
        cache.check_integrity()
        assert cache.step({reqid: TOKENS + 1})
        cache.close()


def test_between_taking_handles_and_mapping_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with Rig(limit_pages=8) as rig:
        cache = rig.open(**QUIET)
        reqid = cache.alloc_reqid()
        for _ in range(2):
            with monkeypatch.context() as context:
                context.setattr(backing, "lay_out", once(backing.lay_out))
                with pytest.raises(KeyboardInterrupt):
                    cache.step({reqid: 4 * TOKENS})
            cache.check_integrity()
        assert cache.step({reqid: 4 * TOKENS}), "all memory is there"
        cache.close()


@pytest.mark.parametrize("at", [1, 6])
def test_creating_and_releasing_memory(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """By the count of the OS, whatever the books say."""
    monkeypatch.setattr(host.native, "load", lambda: None)
    options = {"page_bytes": MIB, "memory_limit": "16MiB", "max_seq_len": 400_000, "extent_pages": 1, "mapper": "sync"}
    with SlicedKVCache(**(SMALL | options)) as cache:
        reqid, driver = cache.alloc_reqid(), cache.pool.driver
        for _ in range(4):
            with monkeypatch.context() as context:
                context.setattr(host, "_fallocate", once(host._fallocate, at))
                with pytest.raises(KeyboardInterrupt):
                    cache.step({reqid: 20_000})
            cache.check_integrity()
            assert driver.used_bytes() == cache.stats().created_bytes
        assert cache.step({reqid: 20_000})
        cache.free_reqid(reqid)
        with monkeypatch.context() as context:
            context.setattr(host, "_fallocate", once(host._fallocate, at))
            with pytest.raises(KeyboardInterrupt):
                cache.trim()
        cache.trim()
        assert (driver.used_bytes(), cache.stats().created_bytes) == (0, 0)
        assert cache.step({cache.alloc_reqid(): 20_000})


def test_signals_at_any_moment() -> None:
    """Thousands of real ones, in a process of its own: a lock that is never given back would stop it for good.

    One that comes between two statements that change the books may break the books of its cache, but of no other.
    """
    options = SMALL | {"memory_limit": "2MiB", "page_bytes": 4096, "dtype": "float32", "extent_pages": 1}
    code = f"""
        import faulthandler, random, signal, time
        from slicedkv import SlicedKVCache

        def interrupt(_, frame):
            while frame is not None:
                if frame.f_code is work.__code__:
                    raise KeyboardInterrupt
                frame = frame.f_back

        def work(cache, reqid, end):
            while time.monotonic() < end:
                try:
                    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 1e-4))
                    cache.trim(), cache.pages_available(), cache.stats()
                    cache.step({{reqid: random.randrange(1, 400)}})
                    time.sleep(1e-4)
                except KeyboardInterrupt:
                    counts[0] += 1
                except Exception:
                    return

        faulthandler.dump_traceback_later(40, exit=True)
        signal.signal(signal.SIGALRM, interrupt)
        end, counts, caches = time.monotonic() + 4, [0], []
        while time.monotonic() < end:
            caches.append(SlicedKVCache(**{options!r}))
            try:
                work(caches[-1], caches[-1].alloc_reqid(), end)
            except KeyboardInterrupt:
                pass
            signal.setitimer(signal.ITIMER_REAL, 0)
            gate, tries = caches[-1].pool.gate, 0
            # The mapper's thread may have them for a moment.
            while gate.claim is not None or gate.is_inside() or not gate.mutex.acquire(blocking=False):
                time.sleep(0.01)
                tries += 1
                assert tries < 500
            gate.mutex.release()
        with SlicedKVCache(**{options!r}) as cache:
            assert cache.step({{cache.alloc_reqid(): 400}})
            cache.check_integrity()
        print(counts[0])
    """
    status, out, errors = run_script(code, timeout_s=90)
    assert status == 0, errors
    assert int(out) > 200


def test_a_token_is_given_back_wherever_its_taker_is_interrupted() -> None:
    """Also between taking it and the block it is held for."""
    with Rig() as rig:
        gate = rig.pool.gate
        take = gate._take

        def interrupted(claim: Any) -> None:
            take(claim)
            raise KeyboardInterrupt

        gate._take = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt), gate.work("a test"):
            pytest.fail("the block must not run")
        gate._take = take  # type: ignore[method-assign]
        with gate.work("another"):
            pass
