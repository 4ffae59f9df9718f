"""While a cache is paused, or about to be: what works, what waits and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from stamped_rows import MIB, begin, holds

from slicedkv import ConfigError, SlicedKVCache, StateError
from slicedkv.memory.host_pool import HostPool

MakeCache = Callable[..., SlicedKVCache]

REFUSED: dict[str, Callable[[SlicedKVCache, Any], object]] = {
    "alloc_reqid": lambda cache, handle: cache.alloc_reqid(5),
    "prefetch": lambda cache, handle: cache.prefetch(0, 5),
    "step": lambda cache, handle: cache.step({0: 1}),
    "a step that grows": lambda cache, handle: cache.step({0: 300}),
    "swap_out": lambda cache, handle: cache.swap_out(0),
    "swap_in": lambda cache, handle: cache.swap_in(handle),
    "share_prefix": lambda cache, handle: cache.share_prefix(0, 1, 50),
    "fork": lambda cache, handle: cache.fork(0),
    "trim": lambda cache, handle: cache.trim(),
    "pause": lambda cache, handle: cache.pause(),
}


@pytest.mark.parametrize("mapper", ["sync", "background"])
@pytest.mark.parametrize("offload", [False, True])
def test_what_is_refused_and_what_works_meanwhile(make_cache: MakeCache, mapper: str, offload: bool) -> None:
    cache = make_cache(mapper=mapper)
    handle = cache.swap_out(begin(cache, 50, 2))
    reqid = begin(cache, 100, 1)
    assert reqid == 0
    with pytest.raises(StateError, match="not paused"):
        cache.resume()
    with pytest.raises(ConfigError, match="offload is 1"):
        cache.pause(offload=1)  # type: ignore[arg-type]
    cache.pause(offload=offload)
    before = cache.stats()
    for call in REFUSED.values():
        with pytest.raises(StateError, match=r"the cache is paused; call resume\(\) first"):
            call(cache, handle)
    assert cache.stats() == before
    assert not cache.can_admit(1)
    assert cache.pages_available() > 0
    assert cache.pages_needed({reqid: 200}) > 0
    assert cache.k(0).shape[0] == 6
    cache.check_integrity()
    cache.resume()
    assert holds(cache, reqid, 100, 1)
    assert holds(cache, cache.swap_in(handle), 50, 2)


@pytest.mark.parametrize("mapper", ["sync", "background"])
@pytest.mark.parametrize("offload", [False, True])
def test_requests_end_and_the_limit_moves_meanwhile(make_cache: MakeCache, mapper: str, offload: bool) -> None:
    cache = make_cache(mapper=mapper)
    first, second = begin(cache, 100, 1), begin(cache, 150, 2)
    cache.pause(offload=offload)
    cache.free_reqid(first)
    with pytest.raises(StateError, match=f"reqid {first} is not active"):
        cache.free_reqid(first)
    stats = cache.stats()
    assert stats.active_slots == 1
    used = (stats.swapped_bytes, stats.used_bytes)
    least = cache.layout.token_bytes * 150
    assert least <= used[offload is False] < least + 2 * 4096
    cache.set_memory_limit(2 * MIB)
    assert cache.stats().memory_limit_bytes == 2 * MIB
    cache.check_integrity()
    cache.resume()
    assert cache.stats().swapped_bytes == 0
    assert holds(cache, second, 150, 2)
    assert begin(cache, 100, 3) != second


def test_no_request_grows_or_ends_under_a_pause(make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(mapper="sync")
    first, second = begin(cache, 100, 1), begin(cache, 150, 2)
    take, threads = HostPool.take, []

    def take_while_others_call(pool: HostPool, sizes: list[int]) -> Any:
        with pytest.raises(StateError, match="paused"):
            cache.step({first: 120})
        threads.append(threading.Thread(target=cache.free_reqid, args=(second,)))
        threads[0].start()
        threads[0].join(0.05)
        assert cache.stats().active_slots == 2
        return take(pool, sizes)

    with monkeypatch.context() as patched:
        patched.setattr(HostPool, "take", take_while_others_call)
        cache.pause(offload=True)
    threads[0].join()
    assert cache.stats().active_slots == 1
    cache.resume()
    assert holds(cache, first, 100, 1)
    assert cache.step({first: 120})


def test_others_wait_or_are_refused_while_it_happens(make_cache: MakeCache) -> None:
    cache = make_cache(max_batch_size=4)
    lens = {begin(cache, 200 + index, index): 200 + index for index in range(3)}
    stop, failures, steps = threading.Event(), [], [0]

    def keep_stepping() -> None:
        while not stop.is_set():
            try:
                assert cache.step(lens)
                steps[0] += 1
            except StateError as error:
                if "paused" not in str(error):
                    failures.append(error)
            except BaseException as error:
                failures.append(error)

    thread = threading.Thread(target=keep_stepping)
    thread.start()
    for _ in range(20):
        cache.pause(offload=True)
        cache.resume()
    stop.set()
    thread.join()
    assert not failures
    assert steps[0] > 0
    for index, (reqid, length) in enumerate(lens.items()):
        assert holds(cache, reqid, length, index)
