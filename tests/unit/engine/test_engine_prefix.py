"""The engine with a prefix cache says what it says without, whatever requests share, and computes less."""

from __future__ import annotations

import gc

import pytest
import torch
from rig import memory_files

from slicedkv.engine import Engine, SamplingParams
from slicedkv.errors import ConfigError
from slicedkv.integrations.transformers import cache_for_model

KIB = 1 << 10
SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
PAGE = {"page_bytes": 16 * KIB, "extent_pages": 1}
"""10.67 tokens a page in the sliced layout of three layers, float32: rows straddle pages."""
SYSTEM = torch.randint(3, 61, (100,), generator=torch.Generator().manual_seed(7)).tolist()


def free(max_tokens=12):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def serve(make_engine, model, prompts, *, max_tokens=12, **options):
    """Tokens of all prompts together, what each step did, and the engine, which is closed."""
    records = []
    with make_engine(model, **{**PAGE, "max_seq_len": 256, "on_step": records.append, **options}) as engine:
        tokens = engine.generate(prompts, free(max_tokens))
        engine.cache.check_integrity()
    return tokens, records, engine


@pytest.mark.parametrize("layout", ["sliced", "interleaved", "per_layer"])
@pytest.mark.parametrize("mapper", ["sync", "background"])
@pytest.mark.parametrize("extent_pages", [4, pytest.param(1, marks=pytest.mark.thorough)])
def test_one_system_prompt_for_all(make_engine, tiny_model, layout, mapper, extent_pages):
    model = tiny_model("llama", **SHAPE)
    prompts = [SYSTEM + [10 + n] * (1 + 5 * n) for n in range(7)]
    options = {"layout": layout, "mapper": mapper, "extent_pages": extent_pages, "max_tokens_per_step": 64}
    expected, before, _ = serve(make_engine, model, prompts, **options)
    tokens, after, engine = serve(make_engine, model, prompts, prefix_cache=0.5, **options)
    assert tokens == expected
    run = engine.scheduler.admission._index.run_tokens
    cached = sum(record.num_cached_tokens for record in after)
    assert cached == 6 * (100 // run) * run, "all but the first begin with it"
    assert sum(record.num_tokens for record in after) == sum(record.num_tokens for record in before) - cached
    assert max(record.mapped_bytes for record in after) < max(record.mapped_bytes for record in before)
    assert after[0].held_bytes == 0 < after[-1].held_bytes
    assert not any(record.num_cached_tokens or record.held_bytes for record in before)


def test_conversations_of_several_turns(make_engine, tiny_model):
    model = tiny_model("llama", **SHAPE)
    plain = make_engine(model, max_seq_len=256, **PAGE)
    talks = [SYSTEM[:50] + [n] * 5 for n in (5, 6, 7)]
    turns = [[20 + n] * 9 for n in range(3)]

    def converse(engine):
        said = [list(talk) for talk in talks]
        requests = []
        for turn in turns:
            requests = [engine.submit(talk + turn, free(10)) for talk in said]
            engine.run()
            said = [request.token_ids(0, request.num_tokens) for request in requests]
        return said, requests

    expected, _ = converse(plain)
    plain.close()
    sharing = make_engine(model, max_seq_len=256, **PAGE, prefix_cache="1GiB")
    found, last = converse(sharing)
    assert found == expected
    run = sharing.cache.layout.tokens_per_page
    for request in last:
        earlier = len(request.prompt_ids) - 9 - 1  # the last token that was said is in no cache
        assert request.num_cached_tokens == earlier // run * run
    assert len(sharing.scheduler.admission.held_slots) == 3


def test_tight_memory(make_engine, tiny_model):
    """Prefixes are given up first, then requests are preempted, and those find what others still have."""
    model = tiny_model("llama", **SHAPE)
    prompts = [SYSTEM[: 40 + 9 * (n % 3)] + [10 + n] * (4 * n) for n in range(9)]
    expected, *_ = serve(make_engine, model, prompts, max_tokens=40)
    memory = 2 * 16 * PAGE["page_bytes"]
    options = {"memory_limit": memory, "max_seq_len": 160, "max_tokens": 40, "max_tokens_per_step": 50}
    without, _, engine = serve(make_engine, model, prompts, **options)
    assert engine.scheduler.num_preemptions > 0
    tokens, records, engine = serve(make_engine, model, prompts, prefix_cache=1.0, **options)
    assert tokens == without == expected
    assert engine.scheduler.num_preemptions > 0
    assert max(record.mapped_bytes for record in records) <= memory
    assert sum(record.num_cached_tokens for record in records) > 8 * 30
    for record in records:
        assert not (record.num_preemptions and record.held_bytes), "nobody is preempted while prefixes are held"


@pytest.mark.parametrize("layout", ["sliced", "per_layer"])
@pytest.mark.parametrize("mapper", ["sync", "background"])
@pytest.mark.parametrize("slots", [3, pytest.param(8, marks=pytest.mark.thorough)])
def test_swapped_requests_come_back_among_prefixes(make_engine, tiny_model, layout, mapper, slots):
    """Those that are swapped out lose their place in the index and have it again when they are back."""
    model = tiny_model("llama", **SHAPE)
    prompts = [SYSTEM[: 40 + 9 * (n % 3)] + [10 + n] * (4 * n) for n in range(9)]
    options = {"layout": layout, "max_seq_len": 160, "max_batch_size": slots, "max_tokens_per_step": 50}
    expected, *_ = serve(make_engine, model, prompts, max_tokens=40, **options)
    with make_engine(model, **PAGE, **options) as probe:
        geometry = probe.cache.layout
    pages = geometry.pages_for(160) * geometry.num_planes
    options |= {"memory_limit": pages * 5 // 4 * PAGE["page_bytes"], "mapper": mapper, "preemption": "swap"}
    tokens, records, engine = serve(make_engine, model, prompts, max_tokens=40, prefix_cache=1.0, **options)
    assert tokens == expected
    assert engine.scheduler.preemptor.num_swaps > 0
    assert sum(record.num_cached_tokens for record in records) > 0


def test_held_slots_make_way_for_a_swapped_request(make_engine, tiny_model):
    """The only idle slots are held, and a request that waits in host memory needs one."""
    engine = make_engine(tiny_model("llama", **SHAPE), max_seq_len=160, max_batch_size=2, **PAGE, prefix_cache=1.0)
    scheduler = engine.scheduler
    scheduler.preemptor.kind = "swap"
    waits = engine.submit(SYSTEM[:30], free(30))
    engine.step()
    scheduler._preempt(waits)
    assert waits.swapped is not None
    scheduler.waiting.clear()
    for token in (7, 8):
        engine.generate([[token] * 40], free(3))
    assert len(scheduler.admission.held_slots) == 2
    scheduler.waiting.append(waits)
    engine.run()
    assert waits.num_computed == 30 + 30 - 1
    assert engine.cache.stats().swaps_in == 1


def test_aborts_and_forks_in_between(make_engine, tiny_model):
    model = tiny_model("llama", **SHAPE)
    prompts = [SYSTEM + [n] * 6 for n in range(5, 9)]
    expected, *_ = serve(make_engine, model, prompts)
    engine = make_engine(model, max_seq_len=256, **PAGE, prefix_cache=0.3, max_batch_size=5)
    first = engine.submit(prompts[0], free(30))
    engine.step()
    (fork,) = engine.cache.fork(first.reqid)
    rows = engine.cache.k(2)[fork, : first.num_computed].clone()
    second = engine.submit(prompts[1], free())
    engine.step()
    assert second.num_cached_tokens == 100
    engine.abort(first)
    engine.abort(second)
    assert engine.idle
    requests = [engine.submit(prompt, free()) for prompt in prompts]
    engine.run()
    assert [request.output_ids for request in requests] == expected
    assert all(request.num_cached_tokens >= 100 for request in requests)
    assert torch.equal(engine.cache.k(2)[fork, : len(rows)], rows)
    engine.cache.free_reqid(fork)
    engine.cache.check_integrity()


def test_samples_are_the_same(make_engine, tiny_model):
    model = tiny_model("llama", **SHAPE)
    params = [SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9, seed=seed) for seed in range(4)]
    plain = make_engine(model, max_seq_len=256, **PAGE)
    expected = plain.generate([SYSTEM] * 4, params)
    plain.close()
    engine = make_engine(model, max_seq_len=256, **PAGE, prefix_cache=0.5)
    assert engine.generate([SYSTEM] * 4, params) == expected
    assert engine.scheduler.admission.num_cached_tokens == 3 * 90


def test_close_gives_all_memory_back(tiny_model):
    model = tiny_model("llama", **SHAPE)
    gc.collect()
    before = memory_files()
    with Engine(model, max_batch_size=3, max_seq_len=256, memory_limit="8MiB", prefix_cache=0.5, **PAGE) as engine:
        engine.generate([SYSTEM, SYSTEM[::-1]], free())
        running = engine.submit(SYSTEM + [5] * 30, free())
        engine.step()
        assert running.num_cached_tokens == 100
        assert engine.cache.stats().active_slots == 3
        engine.reset_prefix_cache()
        assert engine.cache.stats().active_slots == 1
        engine.run()
        assert engine.cache.pool.driver.used_bytes() > 0
    assert memory_files() == before
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("value", [True, 0, -1, 0.0, 1.5, "many", "0"])
def test_limits_that_are_none(tiny_model, value):
    model = tiny_model("llama", **SHAPE)
    cache = cache_for_model(model, 2, 64, memory_limit="8MiB")
    with cache:
        with pytest.raises(ConfigError, match="prefix_cache is"):
            Engine(model, cache=cache, prefix_cache=value)
        assert not cache.closed
    assert model.config._attn_implementation == "sdpa"


def test_a_cache_that_cannot_share_is_refused(tiny_model):
    model = tiny_model("llama", **SHAPE)

    class Paged:
        layout = None

        def close(self):
            raise AssertionError("it is still its owner's")

    with pytest.raises(ConfigError, match="Paged cannot share prefixes"):
        Engine(model, cache=Paged(), prefix_cache=0.5)
    assert model.config._attn_implementation == "sdpa"
