"""The engine on a GPU: eight layers of Llama-3-8B in bf16 against the model itself, and all memory back."""

from __future__ import annotations

import gc

import pytest
import torch
from greedy import MAX_TOKENS, check, generate

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def serve(engine, prompts):
    from slicedkv.engine import SamplingParams

    found = engine.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))
    held = getattr(engine.scheduler.admission, "held_slots", ())
    assert engine.cache.stats().active_slots == len(held)
    engine.cache.check_integrity()
    return found


@pytest.mark.gpu_alone
@pytest.mark.parametrize("layout", ["sliced", "interleaved", "per_layer"])
def test_engine_equals_dynamic_cache_and_gives_memory_back(model, exact, record_property, layout):
    from slicedkv.engine import Engine

    random = torch.Generator().manual_seed(1)
    # A row of K is 16 KiB, so 128 tokens fill a page (64 interleaved, 1024 in a plane of one layer).
    lengths = [125, 1500, 17, 500, 120, 900, 3, 250]
    prompts = [torch.randint(3, 1024, (length,), generator=random).tolist() for length in lengths]
    # What libraries take once and keep (workspaces, loaded kernels) is taken before memory is counted.
    with Engine(model, layout=layout, max_batch_size=4, max_seq_len=2048, memory_limit="1GiB") as engine:
        serve(engine, prompts)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    # Enough for the longest request (1539 tokens: 26, 25 or 32 pages) and little more.
    limit = {"sliced": 36, "interleaved": 36, "per_layer": 48}[layout] * 2 * MIB
    options = {"max_batch_size": 4, "max_seq_len": 2048, "max_tokens_per_step": 512, "memory_limit": limit}
    with Engine(model, layout=layout, **options) as engine:
        found = serve(engine, prompts)
        stats = engine.cache.stats()
        assert 0 < stats.mapped_bytes <= limit
        preemptions = engine.scheduler.num_preemptions
    print(f"{layout}: {preemptions} preemptions")
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= before - 64 * MIB
    assert model.config._attn_implementation == "sdpa"
    record_property("ties", check(model, exact, prompts, found))


BACKENDS = ["reference", "sdpa", "triton", "flashinfer", "auto"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_gives_the_models_tokens(model, exact, record_property, backend):
    """More requests than slots, prompts in chunks, pages that grow between replays of graphs."""
    from slicedkv.engine import Engine

    random = torch.Generator().manual_seed(3)
    lengths = [125, 700, 17, 340, 126, 3, 250, 90, 1200]
    prompts = [torch.randint(3, 1024, (length,), generator=random).tolist() for length in lengths]
    records = []
    options = {"max_batch_size": 6, "max_seq_len": 2000, "max_tokens_per_step": 512, "memory_limit": 512 * MIB}
    with Engine(model, backend=backend, on_step=records.append, **options) as engine:
        found = serve(engine, prompts)
        graphs = engine._runner.graphs
        captured = graphs.num_captured if graphs else 0
    assert (captured > 0) == (backend in ("triton", "flashinfer", "auto"))
    assert sum(record.num_tokens == record.num_running for record in records) > MAX_TOKENS
    record_property("ties", check(model, exact, prompts, found))
    if captured:
        with Engine(model, backend=backend, cuda_graphs=False, **options) as engine:
            found = serve(engine, prompts)
        check(model, exact, prompts, found)


@pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("prefix_cache", [None, 1.0])
def test_preemption_on_the_gpu(model, exact, preemption, prefix_cache):
    """Three requests that fill a page each, in memory for three pages: growth takes pages from the youngest."""
    from slicedkv.engine import Engine

    random = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 1024, (length,), generator=random).tolist() for length in (125, 120, 60, 135, 20)]
    options = {"max_batch_size": 3, "max_seq_len": 512, "max_tokens_per_step": 64, "memory_limit": 3 * 2 * 2 * MIB}
    with Engine(model, preemption=preemption, prefix_cache=prefix_cache, **options) as engine:
        found = serve(engine, prompts)
        assert engine.scheduler.num_preemptions > 0
        assert preemption != "swap" or engine.scheduler.preemptor.num_swaps > 0
        stats = engine.cache.stats()
        assert stats.pages_reused > 0
        assert (stats.swapped_bytes, stats.swaps_in) == (0, engine.scheduler.preemptor.num_swaps)
    check(model, exact, prompts, found)


def test_generate_with_a_sliced_cache(model, exact, cuda_device):
    from slicedkv.integrations.transformers import SlicedTransformersCache, cache_for_model

    ids = torch.randint(3, 1024, (3, 200), device=cuda_device)
    with cache_for_model(model, 4, 512, memory_limit="1GiB") as sliced:
        assert sliced.device.type == "cuda"
        with SlicedTransformersCache(sliced) as cache:
            found = generate(model, ids, cache)[:, ids.shape[1] :].tolist()
        sliced.check_integrity()
    check(model, exact, ids.tolist(), found)
