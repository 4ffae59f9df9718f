"""Swapping and pausing over CUDA: real streams, pinned memory, graphs that outlive a pause. Cases B3, D5, E3."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import lru_cache

import pytest
import torch
from gpu_caches import SHAPE, free_bytes, open_cache

from slicedkv import PagePool, SlicedKVCache, StateError
from slicedkv.vmm import open_driver

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_alone]
MIB, GIB = 1 << 20, 1 << 30
LAYOUTS = ["sliced", "interleaved", "per_layer"]
MakeCache = Callable[..., SlicedKVCache]


@pytest.fixture(autouse=True)
def _all_memory_back(cuda_device: str) -> Iterator[None]:
    """At the end of a test, when its caches are closed, all memory must be back."""
    settle(cuda_device)
    before = free_bytes()
    yield
    assert before - free_bytes() < 64 * MIB, "the context may have grown, a request's rows may not stay"


@lru_cache
def settle(device: str) -> None:
    """Do once what the tests do: kernels and pinned memory cost the device some the first time."""
    with open_cache(device) as cache:
        reqid = cache.alloc_reqid()
        assert cache.step({reqid: 16384})
        write(cache, reqid, 16384, 1)
        back = cache.swap_in(cache.swap_out(reqid))
        assert back is not None
        assert holds(cache, back, 16384, 1)


def rows(cache: SlicedKVCache, seq_len: int, seed: int, layer: int, kv: int) -> torch.Tensor:
    """Numbers of a request's own."""
    tokens = torch.arange(seq_len, device=cache.device).view(-1, 1, 1)
    return ((tokens * 7 + seed * 31 + layer * 2 + kv) % 251).to(cache.dtype).expand(seq_len, 8, 128)


def write(cache: SlicedKVCache, reqid: int, seq_len: int, seed: int) -> None:
    for layer in range(8):
        for kv, view in enumerate((cache.k(layer), cache.v(layer))):
            view[reqid, :seq_len] = rows(cache, seq_len, seed, layer, kv)


def holds(cache: SlicedKVCache, reqid: int, seq_len: int, seed: int) -> bool:
    return all(
        torch.equal(view[reqid, :seq_len], rows(cache, seq_len, seed, layer, kv))
        for layer in range(8)
        for kv, view in enumerate((cache.k(layer), cache.v(layer)))
    )


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("mapper", ["sync", "background"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seq_len", [1, 5000, 16384])
def test_rows_come_back_in_another_slot(make_cache: MakeCache, layout: str, mapper: str, seq_len: int) -> None:
    """Written late, on a stream of the caller's, and swapped out at once: the copy comes after the writes."""
    cache = make_cache(layout=layout, mapper=mapper, zero_on_reuse=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        moved = cache.alloc_reqid()
        assert cache.step({moved: seq_len})
        torch.cuda._sleep(100_000_000)
        write(cache, moved, seq_len, 1)
        handle = cache.swap_out(moved)
        other = cache.alloc_reqid()
        assert cache.step({other: 9000})
        write(cache, other, 9000, 2)
        back = cache.swap_in(handle)
        assert back is not None
        assert holds(cache, back, seq_len, 1)
        assert holds(cache, other, 9000, 2)


def test_swapping_leaves_the_calling_thread_free(make_cache: MakeCache) -> None:
    """Neither direction waits for the copy, once its host memory is pinned."""
    cache = make_cache(mapper="sync")
    reqid: int | None = cache.alloc_reqid()
    assert reqid is not None
    assert cache.step({reqid: 16384})
    for turn in range(3):
        write(cache, reqid, 16384, turn)
        torch.cuda._sleep(400_000_000)
        busy = torch.cuda.Event()
        busy.record()
        handle = cache.swap_out(reqid)
        assert turn == 0 or not busy.query()
        reqid = cache.swap_in(handle)
        assert reqid is not None
        assert turn == 0 or not busy.query()
        assert holds(cache, reqid, 16384, turn)
    assert cache.stats().copy_bytes_per_s > 1e9


def test_pages_are_unmapped_only_after_the_copy(make_cache: MakeCache) -> None:
    cache = make_cache(mapper="sync", memory_limit=600 * MIB, lookahead_tokens=0)
    reqid, other = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({reqid: 16384})
    write(cache, reqid, 16384, 1)
    torch.cuda._sleep(400_000_000)
    handle = cache.swap_out(reqid)
    assert cache.step({other: 16384})
    write(cache, other, 16384, 2)
    assert cache.swap_in(handle) is None, "memory holds one of them"
    cache.free_reqid(other)
    back = cache.swap_in(handle)
    assert back is not None
    assert holds(cache, back, 16384, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_graph_sees_the_rows_after_pause_and_resume(make_cache: MakeCache, layout: str) -> None:
    cache = make_cache(layout=layout)
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 5000})
    write(cache, reqid, 5000, 1)
    keys, total = cache.k(3)[reqid, :5000], torch.zeros((), device=cache.device)
    total.copy_(keys.float().sum())
    expected = float(total)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total.copy_(keys.float().sum())
    for _ in range(3):
        before = free_bytes()
        freed = cache.pause(offload=True)
        assert freed > 0
        assert cache.stats().created_bytes == 0
        assert abs(free_bytes() - before - freed) < 16 * MIB, "pinning may cost the device a little"
        with pytest.raises(StateError, match="paused"):
            cache.step({reqid: 1})
        cache.resume()
        total.zero_()
        graph.replay()
        assert float(total) == expected
        assert holds(cache, reqid, 5000, 1)


def test_neither_breaks_a_capture(make_cache: MakeCache) -> None:
    """They are refused on a stream that captures; nothing is changed and the graph is good."""
    cache = make_cache(mapper="sync")
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 100})
    keys = cache.k(0)[reqid, :100]
    keys.zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in (lambda: cache.swap_out(reqid), cache.pause, lambda: cache.pause(offload=True)):
            with pytest.raises(StateError, match="captures"):
                call()
        keys.add_(1)
    graph.replay()
    graph.replay()
    assert bool((keys == 2).all())
    assert cache.swap_in(cache.swap_out(reqid)) is not None


def test_two_caches_share_one_pool(cuda_device: str) -> None:
    driver = open_driver(cuda_device)
    pool = PagePool(driver, page_bytes=driver.granularity, memory_limit=600 * MIB)
    with SlicedKVCache(**SHAPE, pool=pool) as one, SlicedKVCache(**SHAPE, pool=pool, min_share="64MiB") as two:
        first = one.alloc_reqid()
        assert one.step({first: 16384})
        write(one, first, 16384, 1)
        small = two.alloc_reqid()
        assert two.step({small: 1000})
        write(two, small, 1000, 2)
        assert not two.step({small: 16384})
        torch.cuda._sleep(200_000_000)
        one.free_reqid(first)
        begun = time.perf_counter()
        assert two.step({small: 16384}), "what the other does not need is had"
        assert time.perf_counter() - begun < 4
        assert holds(two, small, 1000, 2)
        one.check_integrity()
    pool.trim()
    assert pool.created_pages == 0
    driver.close()
