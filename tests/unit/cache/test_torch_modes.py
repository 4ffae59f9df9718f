"""A cache, its backends and engines serve in every mode of torch, whichever mode they were opened in."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch
from rig import assert_stamped, stamp
from torch_modes import MODES, attend, default_device

from slicedkv import SlicedKVCache
from slicedkv.engine.request import Request, SamplingParams
from slicedkv.engine.sampler import sample

LAYOUTS = ["sliced", "interleaved", "per_layer"]
EITHER_WAY = {"opened in it": (True, False), "served in it": (False, True)}
BACKENDS = ["sdpa", "reference", "triton"]
OUTSIDE: dict[str, list[torch.Tensor]] = {}
"""What each backend computes outside all modes."""


@pytest.fixture(params=EITHER_WAY)
def when(request):
    return EITHER_WAY[request.param]


@pytest.fixture(params=MODES)
def modes(request, when):
    """What a cache is opened in, and what it serves in."""
    return tuple(MODES[request.param] if inside else nullcontext for inside in when)


def serve(cache: SlicedKVCache) -> None:
    """Call what a cache has, and look at what it did to rows."""
    first, second = cache.alloc_reqid(90), cache.alloc_reqid()
    assert cache.step({first: 90, second: 30})
    stamp(cache, first, 0, 90, 1)
    stamp(cache, second, 0, 30, 2)
    assert cache.step([90, 31, *[0] * (cache.layout.max_batch_size - 2)])
    assert cache.step(torch.tensor([91, 32, *[0] * (cache.layout.max_batch_size - 2)], dtype=torch.int32, device="cpu"))
    stamp(cache, first, 90, 91, 1)
    stamp(cache, second, 30, 32, 2)
    (fork,) = cache.fork(first)
    assert cache.step({first: 60, fork: 92})
    assert cache.step({first: 95})
    stamp(cache, first, 60, 95, 3)
    stamp(cache, fork, 91, 92, 1)
    handle = cache.swap_out(second)
    cache.pause(offload=True)
    cache.resume()
    second = cache.swap_in(handle)
    assert cache.can_admit(10)
    assert_stamped(cache, fork, 92, 1)
    assert_stamped(cache, first, 60, 1)
    assert_stamped(cache, first, 95, 3, start=60)
    assert_stamped(cache, second, 32, 2)
    for reqid in (first, second, fork):
        cache.free_reqid(reqid)
    again = cache.alloc_reqid()
    assert cache.step({again: 95})
    assert not cache.k(0)[again, :95].any()  # with zero_on_reuse
    cache.free_reqid(again)
    cache.trim()
    cache.check_integrity()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_call_of_a_cache(make_cache, modes, layout):
    opened_in, served_in = modes
    with opened_in():
        cache = make_cache(layout=layout, zero_on_reuse=True, page_bytes=4096, extent_pages=1)
    with served_in():
        serve(cache)


def test_another_default_device(make_cache):
    with default_device("meta"):
        cache = make_cache(zero_on_reuse=True, page_bytes=4096, extent_pages=1)
        serve(cache)


@pytest.mark.parametrize("mapper", ["background", "sync"])
def test_a_cache_opened_in_inference_mode_serves_other_threads(make_cache, mapper):
    with torch.inference_mode():
        cache = make_cache(mapper=mapper, zero_on_reuse=True)
        reqid = cache.alloc_reqid()
        assert cache.step({reqid: 5})
        failures: list[BaseException] = []

        def work() -> None:
            try:
                assert not torch.is_inference_mode_enabled()
                assert cache.step({reqid: 50})
                cache.k(0)[reqid, :50] = 1
                cache.free_reqid(reqid)
                serve(cache)
            except BaseException as error:
                failures.append(error)

        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
    assert not failures, failures


def test_nothing_a_cache_shows_is_an_inference_tensor(make_cache):
    with torch.inference_mode():
        cache = make_cache()
        for view in (cache.k(0), cache.v(1), *cache.kv_tensors):
            assert not view.is_inference()
            assert not view[0, :3].is_inference()


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention(make_cache, modes, backend):
    """To the bit as outside all modes."""
    if backend not in OUTSIDE:
        OUTSIDE[backend] = attend(make_cache, backend)
    for found, expected in zip(attend(make_cache, backend, *modes), OUTSIDE[backend], strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("planned_in", MODES)
def test_a_plan_made_in_a_mode_serves_outside(make_cache, planned_in, backend):
    found = attend(make_cache, backend, planned_in=MODES[planned_in])
    assert all(map(torch.equal, found, attend(make_cache, backend)))


def test_engines(make_engine, tiny_model, modes):
    model, opened_in, served_in = tiny_model(), *modes
    prompts = [[5, 9, 11, 30, 7], [8, 3], [20] * 12]
    params = [SamplingParams(max_tokens=6, temperature=t, top_p=0.9, seed=3) for t in (0, 0.8, 0)]
    outputs = []
    for opening, serving in ((opened_in, served_in), (nullcontext, nullcontext)):
        with opening():
            engine = make_engine(model, prefix_cache="1MiB")
        with serving():
            outputs.append(engine.generate(prompts, params))
        engine.close()
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_sampling(mode):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    chosen = []
    for drawn_in in (mode, nullcontext):
        with drawn_in():
            requests = [Request(i, [1], SamplingParams(temperature=t, seed=i)) for i, t in enumerate((0, 0.7, 1))]
            chosen.append(sample(logits, requests).tolist())
    assert chosen[0] == chosen[1]
