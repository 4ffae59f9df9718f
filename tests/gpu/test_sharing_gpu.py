"""Sharing over CUDA: attention over a shared prefix, memory by the driver's own count, copies behind running kernels.

Cases B1, B3 and D5 as far as they touch sharing.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu_caches import free_bytes

from slicedkv import SlicedKVCache, StateError
from slicedkv.attention import Batch, open_backend

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_alone]
GIB = 1 << 30
LAYOUTS = ("sliced", "interleaved", "per_layer")
MakeCache = Callable[..., SlicedKVCache]


def fill(cache: SlicedKVCache, reqid: int, start: int, end: int) -> None:
    """Random rows in every layer."""
    for layer in range(cache.layout.num_layers):
        cache.k(layer)[reqid, start:end].normal_()
        cache.v(layer)[reqid, start:end].normal_()


def snapshot(cache: SlicedKVCache, reqid: int, length: int) -> list[torch.Tensor]:
    """Copies of all rows of a request, on the host, so that the GPU's free memory tells of the cache alone."""
    views = (view for layer in range(cache.layout.num_layers) for view in (cache.k(layer), cache.v(layer)))
    return [view[reqid, :length].cpu() for view in views]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mapper", ["sync", "background"])
@pytest.mark.parametrize("extent_pages", [1, 16])
def test_rows_are_shared_and_memory_is_counted_once(
    make_cache: MakeCache, layout: str, mapper: str, extent_pages: int
) -> None:
    torch.zeros(1, device="cuda")
    make_cache(layout=layout).close()
    before = free_bytes()
    cache = make_cache(layout=layout, mapper=mapper, extent_pages=extent_pages)
    source = cache.alloc_reqid()
    assert cache.step({source: 9001})
    fill(cache, source, 0, 9001)
    rows = snapshot(cache, source, 9001)
    reqids = cache.fork(source, 5)
    if mapper == "sync":
        assert before - free_bytes() == cache.stats().created_bytes
        assert cache.stats().created_bytes < 3 * cache.layout.bytes_for(9001)
    assert cache.stats().saved_bytes > 0
    assert cache.step(dict.fromkeys(reqids, 9100))
    for reqid in reqids:
        assert same(snapshot(cache, reqid, 9001), rows)
        fill(cache, reqid, 9001, 9100)
    assert same(snapshot(cache, source, 9001), rows)
    cache.free_reqid(source)
    cache.trim()
    for reqid in reqids:
        assert same(snapshot(cache, reqid, 9001), rows)
        cache.free_reqid(reqid)
    cache.close()
    assert free_bytes() == before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_over_a_shared_prefix_equals_unshared(make_cache: MakeCache, layout: str) -> None:
    cache = make_cache(layout=layout, extent_pages=1)
    prefix, length = 3001, 3040
    source, alone = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({source: prefix, alone: prefix})
    fill(cache, source, 0, prefix)
    for layer in range(cache.layout.num_layers):
        for view in (cache.k(layer), cache.v(layer)):
            view[alone, :prefix] = view[source, :prefix]
    shared = cache.alloc_reqid()
    assert cache.share_prefix(source, shared, prefix)
    assert cache.step({shared: length, alone: length})
    new = length - prefix
    backend = open_backend("sdpa", cache, num_qo_heads=32)
    backend.plan(Batch([shared, alone], [new, new], [length, length]))
    for layer in range(cache.layout.num_layers):
        k, v, q = (
            torch.randn(new, heads, 128, dtype=cache.dtype, device=cache.device).repeat(2, 1, 1) for heads in (8, 8, 32)
        )
        backend.append(layer, k, v)
        out = backend.run(layer, q)
        assert torch.equal(out[:new], out[new:])
        assert bool(out.isfinite().all())


def test_a_prefix_is_copied_behind_the_kernel_that_writes_it(make_cache: MakeCache) -> None:
    cache = make_cache(extent_pages=1)
    source, target = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({source: 1001})
    cache.k(0)[source, :1001] = 0  # loading a kernel for the first time would wait for the GPU
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for layer in range(8):
            cache.k(layer)[source, :1001] = layer + 1
        assert cache.share_prefix(source, target, 1001)
        assert not stream.query(), "the call waits for nothing that runs"
        found = [cache.k(layer)[target, :1001].clone() for layer in range(8)]
        cache.free_reqid(source)
    torch.cuda.synchronize()
    assert all(bool((rows == layer + 1).all()) for layer, rows in enumerate(found))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_shared_page_is_replaced_only_when_kernels_are_done(make_cache: MakeCache, layout: str) -> None:
    cache = make_cache(layout=layout, mapper="sync", extent_pages=1)
    source = cache.alloc_reqid()
    assert cache.step({source: 6000})
    fill(cache, source, 0, 6000)
    rows = snapshot(cache, source, 6000)
    (target,) = cache.fork(source)
    view = cache.k(3)[target, :6000]
    view.clone()
    torch.cuda.synchronize()
    assert cache.step({target: 100})
    torch.cuda._sleep(100_000_000)
    read = view.clone()
    event = torch.cuda.Event()
    event.record()
    assert not event.query()
    assert cache.step({target: 140})
    assert event.query(), "pages were replaced, so the kernel that read them is over"
    fill(cache, target, 100, 140)
    torch.cuda.synchronize()
    assert cache.stats().pages_copied > 0
    assert torch.equal(read.cpu(), rows[6])
    assert same(snapshot(cache, source, 6000), rows)
    assert same(snapshot(cache, target, 100), [row[:100] for row in rows])


def test_sharing_is_refused_while_a_graph_is_captured(make_cache: MakeCache) -> None:
    cache = make_cache(mapper="sync")
    source, target = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({source: 1000})
    keys = cache.k(0)[source, :10]
    keys.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        keys.add_(1)
        with pytest.raises(StateError, match="captures"):
            cache.share_prefix(source, target, 1000)
    graph.replay()
    assert cache.share_prefix(source, target, 1000)


def test_many_rounds_give_all_memory_back(make_cache: MakeCache) -> None:
    torch.zeros(1, device="cuda")
    make_cache().close()
    before = free_bytes()
    cache = make_cache()
    for round_ in range(64):
        source = cache.alloc_reqid()
        assert cache.step({source: 2000 + 100 * round_})
        reqids = [source, *cache.fork(source, 7)]
        assert cache.step(dict.fromkeys(reqids, 2001 + 100 * round_))
        for reqid in reqids:
            cache.free_reqid(reqid)
    cache.trim()
    cache.close()
    assert free_bytes() == before
