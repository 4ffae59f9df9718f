"""Requests, sampling parameters and the sampler."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from slicedkv.engine import FinishReason, Request, RequestState, SamplingParams
from slicedkv.engine.sampler import sample as sample_on_device
from slicedkv.errors import ConfigError


def sample(logits, requests):
    """Choose tokens and hand them on, as the engine does."""
    tokens = sample_on_device(logits, requests).tolist()
    for request, token in zip(requests, tokens, strict=True):
        request.accept(token)
    return tokens


def request(request_id=0, prompt=(5, 6, 7), eos=(2,), **params):
    return Request(request_id, prompt, SamplingParams(**params), eos)


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"seed": -1}, "seed is -1"),
        ({"stop_ids": (-4,)}, "stop_ids is -4"),
        ({"ignore_eos": 1}, "ignore_eos is 1"),
    ],
)
def test_bad_parameters_are_named(params, named):
    with pytest.raises(ConfigError, match=named):
        SamplingParams(**params)


@pytest.mark.parametrize(("prompt", "named"), [([], "empty"), ([3, -1], "prompt token is -1"), ([1.0], "1.0")])
def test_bad_prompts_are_named(prompt, named):
    with pytest.raises(ConfigError, match=named):
        request(prompt=prompt)


def test_life_of_a_request():
    one = request(max_tokens=3)
    assert (one.num_tokens, one.num_pending, one.max_cached_tokens) == (3, 3, 5)
    assert one.pending_ids(2) == [5, 6]
    one.num_computed = 2
    one.accept(9)
    assert one.pending_ids(2) == [7, 9]
    one.num_computed = 3
    one.accept(8)
    assert one.pending_ids(2) == [9, 8]
    assert not one.finished
    one.accept(4)
    assert (one.state, one.finish_reason, one.output_ids) == (RequestState.FINISHED, FinishReason.LENGTH, [9, 8, 4])
    assert repr(one) == "Request(0, finished, prompt=3, output=3, computed=3)"


@pytest.mark.parametrize(
    ("params", "token", "reason"),
    [
        ({}, 2, FinishReason.STOP),
        ({"ignore_eos": True}, 2, None),
        ({"stop_ids": (11,), "ignore_eos": True}, 11, FinishReason.STOP),
        ({"stop_ids": (11,)}, 2, FinishReason.STOP),
        ({}, 11, None),
    ],
)
def test_what_ends_a_request(params, token, reason):
    one = request(**params)
    one.accept(token)
    assert one.finish_reason is reason
    assert one.output_ids == [token]


def test_greedy_rows_and_sampled_rows_in_one_batch():
    logits = torch.tensor([[0.0, 3.0, 1.0], [9.0, 0.0, 0.0], [0.0, 0.0, 40.0]])
    assert sample(logits, [request(), request(temperature=0.1, seed=1), request(temperature=1.0, seed=2)]) == [1, 0, 2]
    assert sample(torch.empty(0, 3), []) == []


def test_draws_do_not_depend_on_the_batch():
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    alone, among = request(temperature=1.0, seed=3), request(temperature=1.0, seed=3)
    others = [request(temperature=1.0, seed=seed) for seed in (8, 9)]
    one_by_one = [sample(row[None], [alone])[0] for row in logits]
    in_company = [sample(torch.stack([row.flip(0), row, row * 2]), [others[0], among, others[1]])[1] for row in logits]
    assert one_by_one == in_company
    assert len(set(one_by_one)) > 5


def test_same_seed_same_tokens_and_no_seed_differs():
    logits = torch.zeros(1, 1000)

    def draws(**params):
        one = request(temperature=1.0, **params)
        return [sample(logits, [one])[0] for _ in range(8)]

    assert draws(seed=5) == draws(seed=5) != draws(seed=6)
    assert draws() != draws()


def test_frequencies_follow_temperature_and_top_p():
    shares = torch.tensor([[0.05, 0.4, 0.25, 0.3]])

    def frequencies(**params):
        one = request(seed=1, **params)
        counts = Counter(sample(shares.log(), [one])[0] for _ in range(4000))
        return [counts[token] / 4000 for token in range(4)]

    assert frequencies(temperature=1.0) == pytest.approx([0.05, 0.4, 0.25, 0.3], abs=0.03)
    squared = (shares[0] ** 2 / (shares[0] ** 2).sum()).tolist()
    assert frequencies(temperature=0.5) == pytest.approx(squared, abs=0.03)
    # 0.4 + 0.3 reach 0.6, so two tokens are kept.
    assert frequencies(temperature=1.0, top_p=0.6) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.03)
    assert frequencies(temperature=1.0, top_p=1e-6) == [0, 1, 0, 0]
