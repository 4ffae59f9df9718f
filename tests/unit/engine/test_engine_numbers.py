"""Logits that are not numbers fail the request that has them, by name, and nobody else."""

from __future__ import annotations

import copy

import pytest
import torch

from slicedkv.engine import FinishReason, Request, SamplingParams
from slicedkv.engine.request import NO_TOKEN
from slicedkv.engine.sampler import sample
from slicedkv.errors import StateError

FREE = SamplingParams(max_tokens=6, ignore_eos=True)
BAD = 7


@pytest.fixture
def broken(tiny_model):
    """A model with one token whose embedding is no number."""
    model = copy.deepcopy(tiny_model())
    with torch.no_grad():
        model.model.embed_tokens.weight[BAD] = float("nan")
    return model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_others_go_on(make_engine, broken, temperature):
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=temperature, seed=3)
    engine = make_engine(broken)
    expected = engine.generate([[5, 6], [9]], params)
    good, bad, other = (engine.submit(prompt, params) for prompt in ([5, 6], [8, BAD], [9]))
    with pytest.raises(StateError, match=r"logits for \[Request\(3, finished, .*\] are not finite numbers"):
        engine.step()
    assert (bad.finish_reason, bad.output_ids, bad.reqid) == (FinishReason.FAILED, [], None)
    events = []
    while not engine.idle:
        events += engine.step()
    assert [good.output_ids, other.output_ids] == expected
    assert [event.token for event in events if event.request is good] == good.output_ids
    assert not [event for event in events if event.request is bad]


def test_generate_says_so_and_ends_all(make_engine, broken):
    engine = make_engine(broken)
    with pytest.raises(StateError, match="not finite numbers"):
        engine.generate([[5], [BAD]], FREE)
    assert engine.idle


def test_such_a_step_is_counted(make_engine, broken):
    records = []
    engine = make_engine(broken, on_step=records.append)
    engine.submit([BAD], FREE)
    with pytest.raises(StateError):
        engine.step()
    assert (engine.num_steps, len(records), records[0].num_running) == (1, 1, 0)


@pytest.mark.parametrize(
    ("values", "token"),
    [
        ([1.0, float("nan"), 3.0], NO_TOKEN),
        ([float("nan")] * 3, NO_TOKEN),
        ([float("-inf")] * 3, NO_TOKEN),
        ([1.0, float("inf"), 3.0], NO_TOKEN),
        ([float("-inf"), 1.0, 3.0], 2),
    ],
)
def test_what_counts_as_a_number(values, token):
    """Vocabularies are filled up with -inf; that is well."""
    assert sample(torch.tensor([values]), [Request(0, [1], FREE)]).tolist() == [token]
