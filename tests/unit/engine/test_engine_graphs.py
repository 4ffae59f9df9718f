"""Which decode steps are captured, and what stands in the way; graphs themselves run in tests/gpu."""

from __future__ import annotations

import pytest
import torch

from slicedkv.attention.triton import TritonBackend
from slicedkv.engine import SamplingParams
from slicedkv.engine.graphs import DecodeGraphs, graph_sizes
from slicedkv.errors import ConfigError


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 64, 100, 256, 300, 1000])
def test_sizes_reach_every_batch_and_waste_little(most):
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for count in range(1, most + 1):
        size = next(size for size in sizes if size >= count)
        assert size - count <= max(7, count // 4)
    assert len(sizes) <= 24 + most // 32


def test_what_cannot_be_captured_is_named_and_nothing_stays_open(make_engine, tiny_model):
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match=r"backend 'sdpa' on cpu does not support it; pass cuda_graphs=False"):
        make_engine(model, max_batch_size=2, max_seq_len=64, cuda_graphs=True)
    assert model.config._attn_implementation != "slicedkv"
    engine = make_engine(model, max_batch_size=2, max_seq_len=64)
    assert engine._runner.graphs is None
    assert len(engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))[0]) == 4


def test_angles_that_depend_on_the_longest_request_are_an_obstacle(make_engine, tiny_model, monkeypatch):
    monkeypatch.setattr(TritonBackend, "captures", True)
    model = tiny_model("llama", torch.float16)
    engine = make_engine(model, max_batch_size=2, max_seq_len=64, backend="triton", cuda_graphs=False)
    assert DecodeGraphs.obstacle(model, engine.backend) is None
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "dynamic"}
    assert "rope_type 'dynamic' looks at the positions" in str(DecodeGraphs.obstacle(model, engine.backend))


def test_steps_tell_how_long_they_waited(make_engine, tiny_model):
    records = []
    engine = make_engine(tiny_model("llama"), max_batch_size=2, max_seq_len=64, on_step=records.append)
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(records) == 4
    assert all(0 <= record.wait_seconds < record.seconds for record in records)


@pytest.mark.thorough
def test_greedy_tokens_on_triton(make_engine, tiny_model):
    """The kernels in their interpreter, prompts in chunks and slots reused."""
    model = tiny_model("llama")
    prompts = [[5, 6, 7, 8, 9], [10, 11], [12] * 9]
    found = []
    for name in ("reference", "triton"):
        engine = make_engine(model, max_batch_size=2, max_seq_len=64, max_tokens_per_step=4, backend=name)
        found.append(engine.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True)))
        engine.close()
    assert found[0] == found[1]
