"""Requests that share pages move to pinned host memory and back on CUDA, behind and before kernels on other streams."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from slicedkv import SlicedKVCache

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_alone]
GIB = 1 << 30
MakeCache = Callable[..., SlicedKVCache]


@pytest.fixture
def make_cache(make_cache: MakeCache) -> MakeCache:
    """Open caches whose requests may be swapped out."""
    return partial(make_cache, swap_limit="4GiB")


def rows(cache: SlicedKVCache, reqid: int, start: int, end: int) -> list[torch.Tensor]:
    views = (view for layer in range(cache.layout.num_layers) for view in (cache.k(layer), cache.v(layer)))
    return [view[reqid, start:end] for view in views]


def fill(cache: SlicedKVCache, reqid: int, start: int, end: int, value: float) -> None:
    """Write numbers that name token, plane and `value`; all are below 256, exact in bfloat16."""
    numbers = torch.arange(start, end, device=cache.device).remainder(97).view(-1, 1, 1).to(cache.dtype)
    for index, part in enumerate(rows(cache, reqid, start, end)):
        part.copy_((numbers + value + index).expand_as(part))


def holds(cache: SlicedKVCache, reqid: int, start: int, end: int, value: float) -> bool:
    numbers = torch.arange(start, end, device=cache.device).remainder(97).view(-1, 1, 1).to(cache.dtype)
    return all(
        torch.equal(part, (numbers + value + index).expand_as(part))
        for index, part in enumerate(rows(cache, reqid, start, end))
    )


@pytest.mark.parametrize("layout", ["sliced", "interleaved", "per_layer"])
@pytest.mark.parametrize("mapper", ["sync", "background"])
@pytest.mark.parametrize("extent_pages", [1, 16])
def test_a_sharer_is_swapped_out_and_in(make_cache: MakeCache, layout: str, mapper: str, extent_pages: int) -> None:
    cache = make_cache(layout=layout, mapper=mapper, extent_pages=extent_pages)
    source = cache.alloc_reqid()
    assert cache.step({source: 9000})
    torch.cuda._sleep(50_000_000)  # the fork, the writes and the copies out queue behind it
    fill(cache, source, 0, 9000, 1.0)
    (child,) = cache.fork(source)
    assert cache.step({child: 9500})
    fill(cache, child, 9000, 9500, 2.0)
    handle = cache.swap_out(child)
    assert cache.step({source: 1})
    assert cache.step({source: 300})
    fill(cache, source, 1, 300, 3.0)
    back = cache.swap_in(handle)
    assert back is not None
    assert holds(cache, back, 0, 9000, 1.0)
    assert holds(cache, back, 9000, 9500, 2.0)
    assert holds(cache, source, 1, 300, 3.0)
    assert holds(cache, source, 300, 9000, 1.0)
    assert cache.stats().saved_bytes == 0


def test_rows_copied_on_one_stream_are_swapped_out_on_another(make_cache: MakeCache) -> None:
    cache = make_cache()
    source = cache.alloc_reqid()
    assert cache.step({source: 5001})
    fill(cache, source, 0, 5001, 1.0)
    shares, swaps = torch.cuda.Stream(), torch.cuda.Stream()
    shares.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(shares):
        torch.cuda._sleep(200_000_000)
        (child,) = cache.fork(source)
    with torch.cuda.stream(swaps):
        handle = cache.swap_out(child)
        back = cache.swap_in(handle)
        assert back is not None
        assert holds(cache, back, 0, 5001, 1.0)


@pytest.mark.parametrize("layout", ["sliced", "interleaved", "per_layer"])
def test_sharers_leave_the_device_and_come_back(make_cache: MakeCache, layout: str) -> None:
    cache = make_cache(layout=layout, extent_pages=1)
    source = cache.alloc_reqid()
    assert cache.step({source: 9000})
    fill(cache, source, 0, 9000, 1.0)
    reqids = [source, *cache.fork(source, 2)]
    for turn in range(2):
        free = torch.cuda.mem_get_info()[0]
        given = cache.pause(offload=True)
        assert cache.stats().created_bytes == 0
        if turn:  # the first time the driver takes some for what is pinned
            assert torch.cuda.mem_get_info()[0] - free >= given * 9 // 10
        cache.resume()
        assert (cache.stats().saved_bytes, cache.stats().used_bytes) == (0, 3 * 9000 * cache.layout.token_bytes)
        for reqid in reqids:
            assert holds(cache, reqid, 0, 9000, 1.0)
