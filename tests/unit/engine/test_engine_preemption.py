"""Preemption by swapping: the same tokens, nothing left in host memory, and a choice by measured cost."""

from __future__ import annotations

import pytest
import torch

from slicedkv.engine import SamplingParams
from slicedkv.engine.preemption import Preemptor
from slicedkv.engine.request import Request
from slicedkv.engine.scheduler import Scheduler
from slicedkv.errors import ConfigError
from slicedkv.memory.copy_meter import CopyMeter

KIB = 1 << 10
SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
FREE = SamplingParams(max_tokens=24, ignore_eos=True)


def prompts(page):
    """Six around a page's end."""
    random = torch.Generator().manual_seed(page)
    lengths = (page - 3, page - 5, page // 3, page + 7, 5, page - 2)
    return [torch.randint(3, 61, (length,), generator=random).tolist() for length in lengths]


def serve(make_engine, model, *, pages=3, layout="sliced", **options):
    """Serve them, three at a time; by default in memory for three pages of each plane."""
    settings = {"page_bytes": 64 * KIB, "layout": layout, "max_batch_size": 3, "max_seq_len": 200}
    with make_engine(model, **settings) as probe:
        geometry = probe.cache.layout
    limit = pages * geometry.num_planes * 64 * KIB
    engine = make_engine(model, max_tokens_per_step=24, memory_limit=limit, **settings, **options)
    return engine, engine.generate(prompts(geometry.tokens_per_page), FREE)


@pytest.mark.parametrize("layout", ["sliced", "interleaved", "per_layer"])
@pytest.mark.parametrize("mapper", ["sync", "background"])
def test_tokens_do_not_depend_on_how_requests_are_preempted(make_engine, tiny_model, layout, mapper):
    model = tiny_model("llama", **SHAPE)
    roomy, expected = serve(make_engine, model, pages=100, layout=layout)
    assert roomy.scheduler.num_preemptions == 0
    roomy.close()
    for kind in ("swap", "recompute", "auto"):
        engine, found = serve(make_engine, model, preemption=kind, layout=layout, mapper=mapper)
        assert found == expected
        assert engine.scheduler.num_preemptions > 0
        swaps = engine.scheduler.preemptor.num_swaps
        assert {"swap": swaps > 0, "recompute": swaps == 0, "auto": True}[kind]
        stats = engine.cache.stats()
        assert (stats.swapped_bytes, stats.swaps_in) == (0, swaps)
        engine.close()


def test_without_host_memory_everything_is_computed_again(make_engine, tiny_model):
    model = tiny_model("llama", **SHAPE)
    roomy, expected = serve(make_engine, model, pages=100)
    roomy.close()
    engine, found = serve(make_engine, model, preemption="swap", swap_limit=4 * KIB)
    assert found == expected
    assert engine.scheduler.num_preemptions > engine.scheduler.preemptor.num_swaps == 0


def test_abort_gives_host_memory_back(make_engine, tiny_model):
    engine, _ = serve(make_engine, tiny_model("llama", **SHAPE), preemption="swap")
    everyone = [engine.submit(prompt, FREE) for prompt in prompts(engine.cache.layout.tokens_per_page)]
    while not any(request.swapped for request in everyone):
        engine.step()
    (swapped,) = (request for request in everyone if request.swapped)
    handle = swapped.swapped
    assert engine.cache.stats().swapped_bytes == handle.num_bytes
    engine.abort(swapped)
    assert (engine.cache.stats().swapped_bytes, handle.released, swapped.swapped) == (0, True, None)
    while not any(request.swapped for request in everyone):
        engine.step()
    engine.close()
    assert all(request.swapped is None for request in everyone)


@pytest.fixture
def one(make_cache):
    """A cache, and a request of 100 tokens with its slot."""
    cache = make_cache(mapper="sync")
    request = Request(0, [1] * 100, FREE)
    request.reqid, request.num_computed = cache.alloc_reqid(), 100
    assert cache.step({request.reqid: 100})
    return cache, request


def test_auto_measures_first_and_computes_again(one):
    cache, request = one
    preemptor = Preemptor(cache, "auto")
    preemptor.note_step((100,), 1.0, waited=True)
    preemptor.take_slot(request, request.reqid)
    assert (request.swapped, request.num_computed, preemptor.num_swaps) == (None, 0, 0)
    stats = cache.stats()
    assert stats.copy_bytes_per_s > 0
    assert (stats.swapped_bytes, stats.active_slots) == (0, 0)


@pytest.mark.parametrize(("copies_faster", "steps"), [(True, [100]), (False, [100]), (False, []), (False, [1, 1])])
def test_auto_does_what_is_faster(one, monkeypatch, copies_faster, steps):
    cache, request = one
    stats = cache.stats()
    needed = 2 * cache.layout.token_bytes  # bytes copied for a token, out and in; a second computes 100 tokens
    speed = needed * 100 * (1.01 if copies_faster else 0.99)
    monkeypatch.setattr(CopyMeter, "bytes_per_s", speed)
    assert cache.stats().copy_bytes_per_s == speed != stats.copy_bytes_per_s
    preemptor = Preemptor(cache, "auto")
    for q_len in steps:
        preemptor.note_step((q_len,), q_len / 100, waited=True)
    preemptor.take_slot(request, request.reqid)
    assert (request.swapped is not None, preemptor.num_swaps) == (copies_faster, int(copies_faster))
    assert request.num_computed == (100 if copies_faster else 0)
    preemptor.drop(request)
    assert request.num_computed == 0


def test_speed_is_measured_between_waits(one):
    cache, _ = one
    preemptor = Preemptor(cache, "auto")
    meter = preemptor._prefill
    preemptor.note_step((64,), 0.001, waited=False)  # only queued: no measure of its own
    assert meter.tokens_per_s == 0
    preemptor.note_step((64,), 0.127, waited=True)
    assert meter.tokens_per_s == 1000
    preemptor.note_step((1, 1, 1), 1.0, waited=True)
    assert meter.tokens_per_s == 1000, "decoding is no measure of computing prompts"


def test_rows_that_cannot_come_back_alone_are_computed_again(make_cache):
    cache = make_cache(mapper="sync", memory_limit=16 * 64 * KIB, max_batch_size=2, head_dim=64)
    scheduler = Scheduler(cache, max_tokens_per_step=400, preemption="swap")
    older, younger = (Request(index, [1] * 100, FREE) for index in range(2))
    for request in (older, younger):
        scheduler.add(request)
    plan = scheduler.schedule()
    scheduler.complete(plan)
    scheduler._preempt(younger)
    assert younger.swapped is not None
    scheduler.abort(older)
    thief = cache.alloc_reqid()
    assert cache.step({thief: 300})
    with pytest.raises(MemoryError, match="the only one running"):
        scheduler.schedule()
    assert (younger.swapped, younger.num_computed, cache.stats().swapped_bytes) == (None, 0, 0)
    cache.free_reqid(thief)
    assert scheduler.schedule().num_tokens == 100
    scheduler.abort(younger)


def test_an_unknown_kind_is_named(make_engine, tiny_model):
    with pytest.raises(ConfigError, match="preemption is 'drop'; use one of recompute, swap, auto"):
        make_engine(tiny_model(), preemption="drop")
