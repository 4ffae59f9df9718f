"""The cache over CUDA: real memory, real streams, capture beside a working mapper. Cases B1, B3, B11, B13, C2."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
from gpu_caches import free_bytes

from slicedkv import SlicedKVCache

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_alone]
MIB, GIB = 1 << 20, 1 << 30
MakeCache = Callable[..., SlicedKVCache]


@pytest.mark.parametrize("layout", ["sliced", "interleaved", "per_layer"])
def test_free_memory_follows_stats_and_returns(make_cache: MakeCache, layout: str) -> None:
    torch.zeros(1, device="cuda")
    make_cache(layout=layout).close()
    before = free_bytes()
    cache = make_cache(layout=layout, mapper="sync")
    reqids = [cache.alloc_reqid() for _ in range(4)]
    for length in (1, 1000, 5000):
        assert cache.step(dict.fromkeys(reqids, length))
        assert before - free_bytes() == cache.stats().created_bytes
        for layer in (0, 7):
            cache.k(layer)[: len(reqids), :length] = layer + 1
            assert bool((cache.k(layer)[:4, :length] == layer + 1).all())
    for _ in range(64):
        for reqid in reqids:
            cache.free_reqid(reqid)
        cache.trim()
        assert cache.stats().created_bytes == 0
        reqids = [cache.alloc_reqid() for _ in range(4)]
        assert cache.step(dict.fromkeys(reqids, 700))
    cache.close()
    assert free_bytes() == before


def test_twelve_tebibytes_open_quickly_and_cost_nothing(cuda_device: str) -> None:
    torch.zeros(1, device="cuda")
    before = free_bytes()
    begun = time.perf_counter()
    shape = {"num_layers": 60, "num_kv_heads": 4, "head_dim": 128, "dtype": torch.float16}
    with SlicedKVCache(**shape, max_batch_size=500, max_seq_len=200_000, device=cuda_device) as cache:
        assert time.perf_counter() - begun < 1.0
        assert cache.layout.plane_bytes * 2 > 11 << 40
        assert before - free_bytes() < 64 * MIB
        reqid = [cache.alloc_reqid() for _ in range(500)][-1]
        assert cache.step({reqid: 3})
        cache.v(59)[reqid, :3] = 5
        assert float(cache.v(59)[reqid, :3].float().mean()) == 5


def test_a_freed_slot_is_unmapped_only_after_its_kernels(make_cache: MakeCache) -> None:
    cache = make_cache(memory_limit=64 * 2 * MIB, mapper="sync", lookahead_tokens=0)
    first, second = cache.alloc_reqid(), cache.alloc_reqid()
    length = cache.layout.tokens_backed(30)
    assert cache.step({first: length})
    keys = cache.k(3)[first, :length]
    keys.add_(1)  # loading a kernel for the first time would wait for the GPU
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for _ in range(20):
        keys.add_(1)
    event = torch.cuda.Event()
    event.record()
    cache.free_reqid(first)
    assert not event.query(), "the kernels must still be queued for this test to mean anything"
    assert cache.step({second: length})
    assert event.query()
    torch.cuda.synchronize()
    cache.k(3)[second, :length] = 1


@pytest.mark.parametrize("capture_error_mode", ["global", "thread_local", "relaxed"])
def test_graphs_are_captured_and_replayed_beside_the_mapper(make_cache: MakeCache, capture_error_mode: str) -> None:
    cache = make_cache(extent_pages=1, memory_limit=8 * GIB, reclaim_watermark=0.9)
    reqid, other = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({reqid: 100})
    keys = cache.k(2)[reqid, :100]
    stop = threading.Event()

    def keep_mapping() -> None:
        while not stop.is_set():
            cache.prefetch(other, 16384)
            time.sleep(0.001)
            cache.trim()

    worker = threading.Thread(target=keep_mapping)
    worker.start()
    try:
        for _ in range(10):
            keys.zero_()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode=capture_error_mode):
                keys.add_(1)
            for _ in range(3):
                graph.replay()
            torch.cuda.synchronize()
            assert bool((keys == 3).all())
    finally:
        stop.set()
        worker.join()


def test_growth_between_replays(make_cache: MakeCache) -> None:
    cache = make_cache(mapper="sync", lookahead_tokens=0)
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 10})
    position = torch.tensor([9], device="cuda")
    value = torch.ones(1, 8, 128, device="cuda", dtype=torch.bfloat16)
    row = cache.v(5)[reqid]
    row.index_copy_(0, position, value)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        row.index_copy_(0, position, value)
    far = cache.layout.tokens_backed(3)
    assert cache.step({reqid: far})
    position.fill_(far - 1)
    graph.replay()
    torch.cuda.synchronize()
    assert bool((cache.v(5)[reqid, far - 1] == 1).all())


def test_zeroing_is_ordered_on_the_callers_stream(make_cache: MakeCache) -> None:
    cache = make_cache(zero_on_reuse=True, max_batch_size=1)
    length = 3000
    for round_ in range(5):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            reqid = cache.alloc_reqid()
            assert cache.step({reqid: length})
            view = cache.k(0)[reqid, :length]
            before = view.clone()
            torch.cuda._sleep(20_000_000)
            view.fill_(round_ + 1)
            cache.free_reqid(reqid)
        torch.cuda.synchronize()
        assert not bool(before.any()), "the last request's values were seen"
        assert bool((view == round_ + 1).all()), "zeroing came after the request's own write"


def test_every_call_works_from_a_fresh_thread(make_cache: MakeCache) -> None:
    cache = make_cache()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            reqid = cache.alloc_reqid(100)
            assert cache.step({reqid: 5000})
            cache.free_reqid(reqid)
            cache.trim()
            cache.stats()
        except BaseException as error:
            failures.append(error)

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert not failures


def test_torch_gives_cached_memory_back_when_the_device_is_full(make_cache: MakeCache) -> None:
    hog = torch.empty(free_bytes() - 6 * GIB, dtype=torch.uint8, device="cuda")
    idle = torch.empty(5 * GIB, dtype=torch.uint8, device="cuda")
    del idle
    cache = make_cache(memory_limit=4 * GIB)
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 16384 * 3 // 2 // 2}), "torch held 5 GiB that nobody used"
    del hog
    torch.cuda.empty_cache()


EXIT = """
import torch
from slicedkv import SlicedKVCache
cache = SlicedKVCache(num_layers=8, num_kv_heads=8, head_dim=128, dtype="bfloat16", max_batch_size=4,
                      max_seq_len=16384, device="cuda", memory_limit="2GiB", extent_pages=1)
reqid = cache.alloc_reqid(16384)
keep = cache.k(0)
"""


@pytest.mark.parametrize("ending", ["", "del cache", "cache.step({reqid: 9}); keep[0, :9] = 1", "cache.close()"])
def test_leaving_without_close_is_silent(cuda_device: str, ending: str) -> None:
    done = subprocess.run([sys.executable, "-c", EXIT + ending], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
