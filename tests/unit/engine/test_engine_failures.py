"""The engine after a failure in the middle of a step: nothing hangs, no token and no event is lost."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from rig import TOKENS, Rig

from slicedkv import DriverError, SlicedKVCache, StateError
from slicedkv.engine import Engine, SamplingParams, engine, sampler
from slicedkv.engine.prefix_cache import PrefixCache
from slicedkv.engine.request import NO_TOKEN, Request
from slicedkv.engine.scheduler import Scheduler
from slicedkv.errors import ConfigError

FREE = SamplingParams(max_tokens=6, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8, 9]]


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as opened:
        yield opened


def test_a_token_that_could_not_be_chosen_is_chosen_later(make_engine, tiny_model, monkeypatch):
    served = make_engine(tiny_model("llama"))
    expected = served.generate(PROMPTS, FREE)
    requests = [served.submit(prompt, FREE) for prompt in PROMPTS]
    served.step()

    def short(*_):
        raise torch.OutOfMemoryError("sorting")

    with monkeypatch.context() as context:
        context.setattr(engine, "sample", short)
        with pytest.raises(torch.OutOfMemoryError):
            served.step()
    served.run()
    assert [request.output_ids for request in requests] == expected


@pytest.mark.parametrize("params", [FREE, replace(FREE, temperature=1.0, seed=5)])
def test_no_token_is_lost_when_nobody_can_be_admitted_ahead(make_engine, tiny_model, monkeypatch, params):
    """Nor drawn again: the generators have moved on."""
    served, prompts = make_engine(tiny_model("llama"), max_tokens_per_step=4, max_batch_size=4), [[5, 6, 7, 4], [8, 9]]
    expected = served.generate(prompts, params)
    requests = [served.submit(prompt, params) for prompt in prompts]
    admit = served.scheduler.admission.admit
    calls = []

    def fail(request):
        calls.append(request.request_id)
        if len(calls) == 2:
            raise DriverError("map", 999, "CUDA_ERROR_UNKNOWN", "injected")
        return admit(request)

    monkeypatch.setattr(served.scheduler.admission, "admit", fail)
    with pytest.raises(DriverError, match="injected"):
        served.step()
    assert [request.request_id for request in served.scheduler.waiting] == [requests[1].request_id]
    assert requests[0].output_ids == expected[0][:1]
    events = []
    while not served.idle:
        events += served.step()
    assert [event.token for event in events if event.request is requests[0]] == expected[0]
    assert [request.output_ids for request in requests] == expected


@pytest.mark.parametrize("prefixes", [False, True])
def test_a_request_whose_slot_was_lost_can_be_aborted(rig, prefixes):
    cache = rig.open(mapper="sync", lookahead_tokens=TOKENS)
    admission = PrefixCache(cache, 1 << 40) if prefixes else None
    scheduler = Scheduler(cache, max_tokens_per_step=512, admission=admission)
    lost, other = (Request(i, [5 + i] * 20, SamplingParams(max_tokens=5)) for i in (0, 1))
    scheduler.add(lost)
    scheduler.add(other)

    def step():
        plan = scheduler.schedule()
        for request in scheduler.complete(plan):
            request.accept(7)
        scheduler.retire()

    step()
    rig.driver.fail("unmap", at=2)
    rig.driver.fail("map")
    with pytest.raises(StateError, match="out of use"):
        cache.trim()
    rig.driver.heal()
    with pytest.raises(StateError, match="is not active"):
        step()
    scheduler.abort(lost)
    while not other.finished:
        step()
    assert scheduler.idle
    assert other.output_ids == [7] * 5
    cache.close()


@pytest.mark.parametrize("temperature", [1e-310, 1e-30, 1.0])
@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
def test_one_request_does_not_spoil_the_others(temperature, bad):
    logits = torch.randn(2, 61)
    if bad is not None:
        logits[0, 3] = bad
    cold, greedy = (Request(i, [1], SamplingParams(temperature=t, seed=1)) for i, t in enumerate((temperature, 0.0)))
    tokens = sampler.sample(logits, [cold, greedy]).tolist()
    assert tokens[1] == int(logits[1].argmax())
    if bad is not None:
        assert tokens[0] == NO_TOKEN
    elif temperature < 1:
        assert tokens[0] == int(logits[0].argmax())
    else:
        assert 0 <= tokens[0] < 61


def test_events_outlive_a_failure_that_comes_after_them(make_engine, tiny_model, monkeypatch):
    served = make_engine(tiny_model("llama"), mapper="background")
    request = served.submit([5, 6, 7], SamplingParams(max_tokens=2, ignore_eos=True))
    events = served.step()
    retire = served.scheduler.retire

    def broken():
        monkeypatch.setattr(served.scheduler, "retire", retire)
        raise DriverError("map", 1, "CUDA_ERROR_UNKNOWN")

    forward = served._runner.forward

    def forwarded(plan):
        monkeypatch.setattr(served.scheduler, "retire", broken)
        return forward(plan)

    monkeypatch.setattr(served._runner, "forward", forwarded)
    with pytest.raises(DriverError):
        served.step()
    while not served.idle or len(events) < 2:
        events += served.step()
    assert [event.token for event in events] == request.output_ids
    assert events[-1].finish_reason is not None


def test_a_cache_of_ones_own_does_not_make_up_for_a_model_that_does_not_fit(tiny_model):
    model = copy.copy(tiny_model("llama"))
    model.config = layout = copy.deepcopy(model.config)
    layout.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    layout.max_position_embeddings = 32
    shape = {"num_layers": layout.num_hidden_layers, "num_kv_heads": layout.num_key_value_heads}
    shape |= {"head_dim": layout.head_dim, "dtype": model.dtype, "device": "cpu", "memory_limit": "64MiB"}
    with SlicedKVCache(**shape, max_batch_size=4, max_seq_len=256) as cache:
        with pytest.raises(ConfigError, match="dynamic"):
            Engine(model, cache=cache)
        assert not cache.closed
