"""The prefix cache on a GPU, decode steps as CUDA graphs: the model's tokens, prefill saved, all memory back."""

from __future__ import annotations

import gc

import pytest
import torch
from greedy import MAX_TOKENS, check

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def params():
    from slicedkv.engine import SamplingParams

    return SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)


def random_ids(length, seed):
    return torch.randint(3, 1024, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def generate(engine, prompts):
    """Tokens of all prompts; the cache's books must be right and only prefixes be held."""
    tokens = engine.generate(prompts, params())
    assert engine.cache.stats().active_slots == len(getattr(engine.scheduler.admission, "held_slots", ()))
    engine.cache.check_integrity()
    return tokens


@pytest.mark.parametrize("layout", ["sliced", "interleaved", "per_layer"])
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_one_system_prompt_for_all(model, exact, record_property, layout, backend):
    """A row of K is 16 KiB, so 128 tokens fill a page (64 interleaved, 1024 in a plane of one layer)."""
    from slicedkv.engine import Engine

    system = random_ids(2500, seed=1)
    prompts = [system + random_ids(1 + 70 * n, seed=2 + n) for n in range(8)]
    options = {"backend": backend, "layout": layout, "max_batch_size": 6, "max_seq_len": 4096}
    options |= {"max_tokens_per_step": 512, "memory_limit": "2GiB"}
    with Engine(model, **options) as engine:
        without = generate(engine, prompts)
    records = []
    with Engine(model, prefix_cache=0.5, on_step=records.append, **options) as engine:
        found = generate(engine, prompts)
        run = engine.cache.layout.tokens_per_page
        assert engine._runner.graphs.num_captured > 0
        assert sum(record.num_cached_tokens for record in records) == 7 * (len(system) // run) * run
        assert engine.scheduler.admission.held_bytes > 0
    same = sum(one == other for one, other in zip(found, without, strict=True))
    print(f"{same} of {len(prompts)} requests say exactly what they say without a prefix cache")
    record_property("ties", check(model, exact, prompts, found))


def test_turns_of_a_conversation(model, exact):
    """Each turn goes on in its own slot; nothing is mapped twice or copied."""
    from slicedkv.engine import Engine

    prompts, found = [], []
    options = {"max_batch_size": 4, "max_seq_len": 4096, "memory_limit": "1GiB", "max_tokens_per_step": 512}
    with Engine(model, prefix_cache="1GiB", **options) as engine:
        run = engine.cache.layout.tokens_per_page
        talks = [random_ids(300 + 100 * n, seed=20 + n) for n in range(3)]
        for turn in range(3):
            requests = [engine.submit(talk + random_ids(40, seed=30 + turn), params()) for talk in talks]
            engine.run()
            if turn:
                expected = [(len(talk) - 1) // run * run for talk in talks]
                assert [request.num_cached_tokens for request in requests] == expected
            talks = [request.token_ids(0, request.num_tokens) for request in requests]
            prompts += [request.prompt_ids for request in requests]
            found += [request.output_ids for request in requests]
        assert engine.cache.stats().pages_shared == 0
        engine.cache.check_integrity()
    check(model, exact, prompts, found)


def test_tight_memory(model, exact):
    """Memory for ten pages of K and V: prefixes go first, then requests, which begin with what others have."""
    from slicedkv.engine import Engine

    system = random_ids(300, seed=3)
    prompts = [system[: 140 + 150 * (n % 2)] + random_ids(20 * n, seed=40 + n) for n in range(8)]
    records = []
    options = {"max_batch_size": 6, "max_seq_len": 1024, "max_tokens_per_step": 256, "memory_limit": 10 * 2 * 2 * MIB}
    with Engine(model, prefix_cache=1.0, on_step=records.append, **options) as engine:
        found = generate(engine, prompts)
    assert sum(record.num_cached_tokens for record in records) > 0
    assert not any(record.num_preemptions and record.held_bytes for record in records)
    check(model, exact, prompts, found)


@pytest.mark.gpu_alone
def test_memory_comes_back(model):
    """Held prefixes and a request that runs: after `close` the GPU has all its memory again."""
    from slicedkv.engine import Engine

    options = {"max_batch_size": 4, "max_seq_len": 2048, "memory_limit": "1GiB"}
    prompts = [random_ids(1000, seed=5) + [n] * 20 for n in range(5, 9)]
    with Engine(model, prefix_cache=0.5, **options) as engine:  # what libraries take once and keep is taken here
        generate(engine, prompts)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    with Engine(model, prefix_cache=0.5, **options) as engine:
        generate(engine, prompts[:2])
        running = engine.submit(prompts[2], params())
        engine.step()
        assert running.num_cached_tokens > 0
        assert torch.cuda.mem_get_info()[0] < before
    assert running.finished
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= before - 64 * MIB
    assert model.config._attn_implementation == "sdpa"
