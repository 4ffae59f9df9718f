"""The serving benchmark's paged baseline gives the model's tokens, and its requests are the traces'."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import fake_flash_attention
import fake_flashinfer
import pytest
import torch

from bench.baselines import workloads
from bench.support.traces import Request
from slicedkv.engine import Engine, SamplingParams
from slicedkv.errors import ConfigError
from slicedkv.integrations.transformers import cache_for_model


@pytest.fixture
def serving(monkeypatch) -> ModuleType:
    """The benchmark over a stand-in for FlashInfer."""
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    fake_flash_attention.install(monkeypatch)
    yield importlib.import_module("bench.serving")
    for name in ("bench.baselines.paged", "bench.baselines.paged_prefix", "slicedkv.attention.flashinfer"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("manager", ["sliced", "interleaved", "per_layer", "paged", "paged_fa3", "static"])
def test_every_manager_gives_the_same_tokens(serving, tiny_model, manager, monkeypatch):
    model = tiny_model("llama", torch.float32, head_dim=16)
    layers, heads, dim = model.config.num_hidden_layers, model.config.num_key_value_heads, 16
    token_bytes = 2 * layers * heads * dim * 4
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 61, (n,), generator=generator).tolist() for n in (15, 14, 15, 33, 3)]
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    with Engine(model, max_batch_size=1, max_seq_len=64, memory_limit="64MiB") as engine:
        expected = engine.generate(prompts, params)
    memory = 64 * token_bytes if manager in workloads.PAGED else 64 << 20
    monkeypatch.setitem(workloads.PAGED, "paged_fa3", ("fa3", 16))  # pages of 128 tokens are too few to be short
    workload = serving.Workload("azure_2023_conv", 5, 1.0, 3, memory)
    records = []
    with serving.open_engine(model, manager, workload, 64, on_step=records.append, max_tokens_per_step=8) as engine:
        assert engine.generate(prompts, params) == expected
        assert engine.cache.layout.max_batch_size == 3
        if manager in workloads.PAGED:
            assert engine.scheduler.num_preemptions > 0
            assert engine.cache.stats().mapped_bytes == 0
            assert max(record.mapped_bytes for record in records) <= memory
    assert max(len(record.seq_lens) for record in records) > 1


def test_a_measurement_tells_throughput_and_steps(serving, tiny_model, monkeypatch):
    monkeypatch.setattr(workloads, "POINTS", 4)
    model = tiny_model("llama", torch.float32, head_dim=16)
    requests = [Request(prompt, tokens) for prompt, tokens in ((20, 9), (3, 12), (31, 5))]
    managers = ("sliced", "sliced_sync", "paged", "paged_fa3")
    workload = serving.Workload("azure_2023_conv", 3, 1.0, 2, 64 << 20, managers)
    monkeypatch.setattr(serving, "lengths", lambda *_: requests)
    passes = list(serving.rows(model, "chat", workload, []))
    assert [row["manager"] for row in passes] == [*managers, *managers[::-1]]
    found = {row["manager"]: row for row in serving.joined(passes)}
    assert list(found) == list(managers)
    for row in found.values():
        assert row["first_tokens_as_sliced"] == 1.0
        assert row["prompt_tokens"] == 54
        assert row["batch_max"] == 2
        assert 0 < row["decode_step_ms_p50"] <= row["decode_step_ms_max"]
        assert len(row["series"]["batch"]) <= 4
        assert row["passes"] == 2
    speed = {name: [row["tokens_per_s"] for row in passes if row["manager"] == name] for name in managers}
    for row in passes:
        assert row["tokens_per_s"] == pytest.approx(26 / row["seconds"])
    for name in ("paged", "paged_fa3"):
        ratios = [ours / theirs for ours, theirs in zip(speed["sliced"], speed[name], strict=True)]
        assert found["sliced"][f"vs_{name}"] == pytest.approx(sum(ratios) / 2)


@pytest.mark.parametrize("manager", ["paged", pytest.param("paged_fa3", marks=pytest.mark.thorough)])
def test_questions_about_documents_share_them(serving, tiny_model, monkeypatch, manager):
    """Each document is computed once, and tokens are those without sharing."""
    for name, value in {"DOCUMENT_TOKENS": 256, "QUESTION": (3, 20), "ANSWER": (2, 6)}.items():
        monkeypatch.setattr(workloads, name, value)
    model = tiny_model("llama", torch.float32, head_dim=16)
    workload = serving.Workload("documents", 9, 1.0, 4, 64 << 20, (manager,), documents=2)
    requests = workloads.lengths(workload, [])
    ids = workloads.prompts(model, requests, workload)
    assert [len(prompt) for prompt in ids] == [request.prompt_tokens for request in requests]
    assert len({tuple(prompt[:256]) for prompt in ids}) == 2
    found, cached = {}, {}
    for shared in (False, True):
        options = workload if shared else workload._replace(documents=0)
        with serving.open_engine(model, manager, options, 320, max_tokens_per_step=300) as engine:
            for prompt, request in zip(ids, requests, strict=True):
                engine.submit(prompt, SamplingParams(max_tokens=request.decode_tokens, ignore_eos=True))
            waiting = list(engine.scheduler.waiting)
            engine.run()
            found[shared] = [request.output_ids for request in waiting]
            cached[shared] = engine.scheduler.admission.num_cached_tokens
            assert engine.cache.stats().mapped_bytes == 0, "what is kept is to be had"
    assert found[True] == found[False]
    assert cached[False] == 0
    assert cached[True] >= 5 * 256, "at first, several ask about one that nobody has computed"


def test_known_pages_go_when_memory_is_short(serving, tiny_model):
    model = tiny_model("llama", torch.float32, head_dim=16)
    token_bytes = 2 * model.config.num_hidden_layers * model.config.num_key_value_heads * 16 * 4
    workload = serving.Workload("documents", 9, 1.0, 2, 96 * token_bytes, ("paged",), documents=2)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 61, (n,), generator=generator).tolist() for n in (40, 33, 50, 40, 20)]
    prompts += prompts[::-1]
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    with Engine(model, max_batch_size=1, max_seq_len=64, memory_limit="64MiB") as engine:
        expected = engine.generate(prompts, params)
    with serving.open_engine(model, "paged", workload, 64, max_tokens_per_step=16) as engine:
        assert engine.generate(prompts, params) == expected
        assert engine.scheduler.admission.num_cached_tokens > 0
        cache = engine.cache
        assert 0 < len(cache.known) <= cache.num_pages
        assert cache.pages_available() == cache.num_pages * cache.layout.num_planes


def test_thinned_keeps_every_spike(monkeypatch):
    monkeypatch.setattr(workloads, "POINTS", 3)
    assert workloads.thinned([1, 1, 9, 2, 1, 1, 7]) == [9, 2, 7]


def test_requests_are_the_traces(tmp_path):
    path = tmp_path / "azure_2023_conv.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,100,10\n1,7,1\n2,50,5\n")
    found = workloads.lengths(workloads.Workload("azure_2023_conv", 2, 0.5, 1, 1), [path])
    assert [tuple(request) for request in found] == [(50, 5), (4, 1)]
    drawn = workloads.lengths(workloads.Workload("arxiv_long_offline", 5, 0.25, 1, 1), [path])
    assert len(drawn) == 5
    assert all(63_862 // 4 <= request.prompt_tokens <= 192_786 // 4 for request in drawn)


def test_a_cache_of_ones_own(tiny_model):
    model = tiny_model("llama")
    cache = cache_for_model(model, 2, 64, memory_limit="64MiB")
    with pytest.raises(ConfigError, match="a cache came with layout, max_seq_len; the cache has its own"):
        Engine(model, cache=cache, max_seq_len=64, layout="sliced")
    assert not cache.closed
    with Engine(model, cache=cache) as engine:
        assert engine.cache is cache
        assert len(engine.generate([[5, 6]], SamplingParams(max_tokens=3, ignore_eos=True))[0]) == 3
    assert cache.closed
    with pytest.raises(ConfigError, match="max_batch_size and max_seq_len missing; give both, or a cache"):
        Engine(model)
