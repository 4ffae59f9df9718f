"""In one forward every layer gets K and V once, or the forward is refused."""

from __future__ import annotations

import pytest
import torch
from tiny_models import build

from slicedkv.attention import Batch, open_backend
from slicedkv.attention.reference import ReferenceBackend
from slicedkv.engine import Engine, SamplingParams
from slicedkv.engine.counted import CountedBackend
from slicedkv.engine.graphs import DecodeGraphs
from slicedkv.errors import ConfigError
from slicedkv.integrations.servable import LayerKinds
from slicedkv.integrations.transformers import attention_scale, cache_for_model


@pytest.fixture
def planned(make_cache):
    """A cache of three layers and a backend that is planned for one token of one request."""
    cache = make_cache()
    slot = cache.alloc_reqid()
    assert cache.step({slot: 1})
    backend = open_backend("sdpa", cache, num_qo_heads=2)
    backend.plan(Batch([slot], [1], [1]))
    yield cache, slot, backend
    cache.free_reqid(slot)


PLAIN = LayerKinds([None] * 3, None)


def rows(value):
    return torch.full((1, 2, 16), float(value))


def test_a_second_time_is_refused_before_it_overwrites_the_first(planned):
    cache, slot, backend = planned
    counted = CountedBackend(backend, PLAIN)
    counted.append(1, rows(1), rows(2))
    with pytest.raises(ConfigError, match="layer 1 attends 2 times in one forward"):
        counted.append(1, rows(3), rows(4))
    assert torch.equal(cache.k(1)[slot, :1], rows(1))
    assert torch.equal(cache.v(1)[slot, :1], rows(2))


def test_layers_that_were_left_out_are_named(planned):
    _, _, backend = planned
    counted = CountedBackend(backend, PLAIN)
    counted.append(1, rows(1), rows(1))
    with pytest.raises(ConfigError, match=r"layers \[0, 2\] of 3 in the cache got K and V 0 times in one forward"):
        counted.check()
    for layer in (0, 2):
        counted.append(layer, rows(1), rows(1))
    counted.check()


@pytest.mark.parametrize("layer", [3, -1])
def test_a_layer_that_the_cache_lacks_is_named(planned, layer):
    _, _, backend = planned
    with pytest.raises(ConfigError, match=rf"the model has a layer {layer}, the cache layers \[0, 3\)"):
        CountedBackend(backend, PLAIN).append(layer, rows(1), rows(1))


def test_what_was_refused_is_not_counted(planned):
    _, _, backend = planned
    counted = CountedBackend(backend, PLAIN)
    with pytest.raises(ConfigError, match="k has shape"):
        counted.append(0, rows(1)[:, :1], rows(1))
    counted.append(0, rows(1), rows(1))


@pytest.mark.parametrize(
    ("kinds", "asked", "message"),
    [
        (LayerKinds([None, 8, None], None), {}, "layer 1 asks for a sliding window of None, .* config has 8"),
        (PLAIN, {"window": 8}, "layer 1 asks for a sliding window of 8, .* config has None"),
        (LayerKinds([None] * 3, 20.0), {}, r"layer 1 asks for a cap on scores of None, .* config has 20\.0"),
        (LayerKinds([None] * 3, 20.0), {"soft_cap": 30.0}, r"layer 1 asks for a cap on scores of 30\.0"),
    ],
)
def test_what_a_layer_does_not_ask_for_is_not_done_in_silence(planned, kinds, asked, message):
    """Its window would be in a mask, and attention gets none."""
    _, _, backend = planned
    with pytest.raises(ConfigError, match=message):
        CountedBackend(backend, kinds).run(1, rows(1), **asked)


def test_a_step_without_the_probe_is_refused_too():
    """The requests stay, and nothing of the forward counts."""
    model = build("DiffLlama", "DiffLlamaForCausalLM")
    with Engine(model, max_batch_size=2, max_seq_len=64, memory_limit="16MiB", probe=False) as engine:
        request = engine.submit([5, 6, 7], SamplingParams(max_tokens=3))
        for _ in range(2):
            with pytest.raises(ConfigError, match="layer 0 attends 2 times"):
                engine.step()
        assert (request.num_computed, request.output_ids) == (0, [])


def test_a_layer_that_attends_by_itself_is_noticed(make_engine, tiny_model, monkeypatch):
    model = tiny_model()
    engine = make_engine(model)
    attention = model.model.layers[1].self_attn
    monkeypatch.setattr(attention, "forward", lambda hidden_states, **_: (hidden_states, None))
    request = engine.submit([5, 6, 7], SamplingParams(max_tokens=3))
    with pytest.raises(ConfigError, match=r"layers \[1\] of 3 in the cache got K and V 0 times"):
        engine.step()
    engine.abort(request)


def test_captured_steps_are_counted_when_they_are_captured(monkeypatch):
    """Graphs need a GPU; what is captured in them runs anywhere."""
    monkeypatch.setattr(ReferenceBackend, "captures", True)
    model = build("DiffLlama", "DiffLlamaForCausalLM")
    with cache_for_model(model, 2, 64, memory_limit="16MiB") as cache:
        slot = cache.alloc_reqid()
        assert cache.step({slot: 1})
        backend = open_backend("reference", cache, num_qo_heads=4, scale=attention_scale(model))
        graphs = DecodeGraphs(model, backend)
        model.set_attn_implementation("slicedkv")
        backend.plan(Batch([slot], [1], [1]), graph=True)
        with torch.inference_mode(), pytest.raises(ConfigError, match="layer 0 attends 2 times"):
            graphs._run(1)
