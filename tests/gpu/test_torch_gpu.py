"""torch's modes, gradients and copies over CUDA: storages made through DLPack refuse as the host's do, and pinned
memory and buffers stay where they belong, whatever the default device is."""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing.reduction
import pickle
import threading
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.multiprocessing
from torch_modes import attend, default_device

from slicedkv import SlicedKVCache, StateError
from slicedkv.attention import Batch, open_backend

pytestmark = pytest.mark.gpu
MakeCache = Callable[..., SlicedKVCache]
BACKENDS = ["triton", "flashinfer", "sdpa"]
MODES = {
    "inference": torch.inference_mode,
    "on cuda": lambda: torch.device("cuda"),
    "on meta": lambda: torch.device("meta"),
    "cuda by default": lambda: default_device("cuda"),
}
TAKERS = {
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda rows: torch.save(rows, io.BytesIO()),
    "to another process": multiprocessing.reduction.ForkingPickler.dumps,
    "spawn queue": lambda rows: torch.multiprocessing.get_context("spawn").SimpleQueue().put(rows),
    "shared": lambda rows: rows.share_memory_(),
}


@pytest.mark.parametrize("take", TAKERS)
def test_torch_is_refused_the_whole_memory(make_cache: MakeCache, take: str) -> None:
    cache = make_cache()
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 9})
    cache.k(3)[reqid, :9] = 2
    gc.collect()
    for rows in (cache.k(3)[reqid, :9], cache.k(3)[reqid, :9].transpose(0, 1).detach(), cache.kv_tensors[0][reqid, :9]):
        with pytest.raises(StateError, match=r"rows\.clone"):
            TAKERS[take](rows)
    with pytest.raises(StateError, match="clone"):
        TAKERS[take](cache.k(3))


def test_a_clone_is_saved_and_rows_are_printed(make_cache: MakeCache) -> None:
    cache = make_cache()
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 9})
    cache.k(3)[reqid, :9] = 2
    rows = cache.k(3)[reqid, :9]
    assert torch.equal(pickle.loads(pickle.dumps(rows.clone())), rows)
    assert torch.equal(copy.deepcopy(rows.cpu()), rows.cpu())
    assert "2., 2." in repr(rows)
    assert "values not shown" in repr(cache.k(3))


def test_views_are_captured_in_graphs(make_cache: MakeCache) -> None:
    cache = make_cache()
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 100})
    cache.k(2)[reqid, :100] = 0
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        cache.k(2)[reqid, :100].add_(1)  # the view is gone when the graph is replayed
    for _ in range(3):
        graph.replay()
    assert bool((cache.k(2)[reqid, :100] == 3).all())


def test_a_cache_opened_in_inference_mode_serves_other_threads(make_cache: MakeCache) -> None:
    with torch.inference_mode():
        cache = make_cache(zero_on_reuse=True)
        reqid = cache.alloc_reqid()
        assert cache.step({reqid: 5})
    failures: list[BaseException] = []

    def work() -> None:
        try:
            assert cache.step({reqid: 5000})
            cache.v(7)[reqid, :5000] = 1
            (fork,) = cache.fork(reqid)
            assert cache.step({reqid: 100, fork: 5001})
            handle = cache.swap_out(fork)
            back = cache.swap_in(handle)
            assert back is not None
            assert bool((cache.v(7)[back, :5000] == 1).all())
        except BaseException as error:
            failures.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert not failures, failures


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_in_every_mode(make_cache: MakeCache, backend: str) -> None:
    def attended(*modes) -> list[torch.Tensor]:
        return attend(make_cache, backend, *modes, dtype=torch.bfloat16)

    expected = attended()
    for mode in MODES.values():
        for modes in ((mode, nullcontext), (nullcontext, mode), (nullcontext, nullcontext, mode)):
            torch.testing.assert_close(attended(*modes), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("mode", MODES)
def test_engines_in_every_mode(model, mode: str) -> None:
    """Captured decode steps and sampling too."""
    from slicedkv.engine import Engine, SamplingParams

    prompts = [[5, 9, 11, 30, 7], [8, 3], [20] * 300]
    params = [SamplingParams(max_tokens=8, temperature=t, seed=3, ignore_eos=True) for t in (0, 0.8, 0)]
    found = []
    for opened_in, served_in in ((MODES[mode], nullcontext), (nullcontext, MODES[mode]), (nullcontext, nullcontext)):
        with opened_in():
            engine = Engine(model, max_batch_size=4, max_seq_len=1024, memory_limit="1GiB")
        with engine:
            with served_in():
                found.append(engine.generate(prompts, params))
            assert engine.cache.stats().active_slots == 0
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_refused_and_keep_nothing(make_cache: MakeCache, backend: str) -> None:
    cache = make_cache()
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 64})
    attention = open_backend(backend, cache, num_qo_heads=16)
    weight = torch.ones(128, device=cache.device, dtype=torch.bfloat16, requires_grad=True)
    held = []
    for _ in range(4):
        attention.plan(Batch([reqid], [64], [64]))
        for layer in range(8):
            k, v = (torch.randn(64, 8, 128, device=cache.device, dtype=torch.bfloat16) * weight for _ in range(2))
            attention.append(layer, k, v)
            out = attention.run(layer, torch.randn(64, 16, 128, device=cache.device, dtype=torch.bfloat16))
            with pytest.raises(StateError, match="backward through a KV cache"):
                out.sum().backward()
        del k, v, out
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    assert weight.grad is None
    assert not cache.k(0).requires_grad
    assert held[1] == held[3]
