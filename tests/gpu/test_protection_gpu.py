"""`debug=True` over CUDA: shared pages are read-only where the driver can map device memory so, or it says that not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from read_only import run_script

from slicedkv import SlicedKVCache, StateError
from slicedkv.attention import Batch, open_backend
from slicedkv.vmm import open_driver

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_alone]
LAYOUTS = ("sliced", "interleaved", "per_layer")
MakeCache = Callable[..., SlicedKVCache]


def can_protect(device: str) -> bool:
    """What the driver finds out about itself."""
    driver = open_driver(device)
    try:
        return driver.can_protect
    finally:
        driver.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mapper", ["sync", "background"])
@pytest.mark.parametrize("extent_pages", [1, 16])
def test_requests_share_and_write_what_is_theirs(
    make_cache: MakeCache, cuda_device: str, layout: str, mapper: str, extent_pages: int
) -> None:
    cache = make_cache(layout=layout, mapper=mapper, extent_pages=extent_pages, debug=True)
    assert cache.protects_shared_pages is can_protect(cuda_device)
    source = cache.alloc_reqid()
    assert cache.step({source: 9000})
    for layer in range(8):
        cache.k(layer)[source, :9000] = layer + 1
    reqids = cache.fork(source, 3)
    assert cache.step(dict.fromkeys(reqids, 9010))
    for reqid in reqids:
        cache.k(0)[reqid, 9000:9010] = 50 + reqid
    assert cache.step({source: 10})
    assert cache.step({source: 9000})
    cache.k(7)[source, 10:9000] = 99
    handle = cache.swap_out(reqids[0])
    cache.free_reqid(source)
    cache.pause(offload=True)
    cache.resume()
    back = cache.swap_in(handle)
    assert back is not None
    for reqid in (back, *reqids[1:]):
        assert cache.step({reqid: 1})
        assert cache.step({reqid: 9000})
        assert bool((cache.k(7)[reqid, :9000] == 8).all())
        cache.k(7)[reqid, 1:9000] = 7
    torch.cuda.synchronize()


def test_a_prefix_is_shared_behind_the_kernel_that_writes_it(make_cache: MakeCache) -> None:
    cache = make_cache(extent_pages=1, debug=True)
    source = cache.alloc_reqid()
    assert cache.step({source: 6000})
    cache.k(0)[source, :6000] = 0
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    for layer in range(8):
        cache.k(layer)[source, :6000] = layer + 1
    (target,) = cache.fork(source)
    assert all(bool((cache.k(layer)[target, :6000] == layer + 1).all()) for layer in range(8))
    torch.cuda.synchronize()


@pytest.mark.parametrize("graph", [False, True])
def test_appending_into_a_shared_page_is_refused(make_cache: MakeCache, graph: bool) -> None:
    cache = make_cache(debug=True, extent_pages=1)
    source = cache.alloc_reqid()
    assert cache.step({source: 6000})
    cache.fork(source)
    backend = open_backend("triton", cache, num_qo_heads=32)
    rows = torch.zeros(1, 8, 128, dtype=cache.dtype, device=cache.device)

    def append(length: int) -> None:
        backend.plan(Batch([source], [1], [length]), graph=graph)
        backend.append(0, rows, rows)

    for length in (10, 6001):
        with pytest.raises(StateError, match=f"rows \\[{length - 1}, {length}\\) of reqid {source}"):
            append(length)
    assert cache.step({source: 6001})
    append(6001)


SCRIPT = """
import torch
from slicedkv import SlicedKVCache
cache = SlicedKVCache(num_layers=8, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, max_batch_size=8,
                      max_seq_len=16384, device={device!r}, memory_limit=1 << 30, extent_pages=1, debug=True)
a = cache.alloc_reqid()
cache.step({{a: 6000}})
cache.k(0)[a, :6000] = 1
(b,) = cache.fork(a)
assert float(cache.k(0)[b, :6000].float().sum()) == 6000 * 8 * 128
torch.cuda.synchronize()
print("shared", cache.protects_shared_pages, flush=True)
cache.k(0)[b, 10:11] = 2
try:
    torch.cuda.synchronize()
    print("written", flush=True)
except RuntimeError as error:
    print("fault", flush=True)
import os
os._exit(0)  # the context may be dead: nothing can be closed
"""


def test_a_kernel_that_writes_into_a_shared_prefix_faults_or_the_cache_says_that_not(cuda_device: str) -> None:
    status, out, errors = run_script(SCRIPT.format(device=cuda_device))
    expected = "shared True\nfault\n" if can_protect(cuda_device) else "shared False\nwritten\n"
    assert (status, out) == (0, expected), errors
