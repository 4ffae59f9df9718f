"""Windows, capped scores and sinks of single layers, by every backend that has them, against float64 loops."""

from __future__ import annotations

import math

import pytest
import torch
from test_attention_backends import BACKENDS, LAYOUTS, Driven

from slicedkv.attention import open_backend
from slicedkv.errors import ConfigError

SINKS = torch.linspace(-2, 3, 6)
KINDS = {
    "window": {"window": 7},
    "window of one": {"window": 1},
    "wide window": {"window": 1000},
    "cap": {"soft_cap": 0.7},
    "sinks": {"sinks": SINKS},
    "all": {"window": 9, "soft_cap": 1.5, "sinks": SINKS},
}
STEPS = [([4, 0], [7, 1]), ([0, 4, 2], [1, 5, 33]), ([2, -1, 4, 0], [1, 2, 3, 1]), ([0, 2, 4], [1, 1, 1])]


def oracle(q, k, v, window=None, soft_cap=None, sinks=None):
    """Attention of the last rows of a request, one query row and head at a time, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    group, past, out = q.shape[1] // k.shape[1], len(k) - len(q), torch.empty_like(q)
    for row in range(len(q)):
        end = past + row + 1
        seen = slice(0 if window is None else max(0, end - window), end)
        for head in range(q.shape[1]):
            scores = k[seen, head // group] @ q[row, head] / math.sqrt(q.shape[2])
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            weights = scores.exp()
            total = weights.sum() + (0 if sinks is None else sinks[head].double().exp())
            out[row, head] = (weights / total) @ v[seen, head // group]
    return out


class DrivenByKind(Driven):
    """Attends twice in each step: as `kind` says, and plainly, as another layer would."""

    def __init__(self, cache, backend, kind):
        super().__init__(cache, backend)
        self.kind = kind

    def compare(self, reqids, q_lens):
        run, seen = self.backend.run, []

        def spy(layer, q):
            seen.append((q, run(layer, q, **self.kind)))
            return run(layer, q)

        self.backend.run = spy
        try:
            plain, plainly_expected = self.step(reqids, q_lens)
        finally:
            del self.backend.run
        torch.testing.assert_close(plain.double(), plainly_expected, atol=1e-5, rtol=1e-5)
        q, out = seen[0]
        for lane in self.backend._lanes:
            rows = slice(lane.begin, lane.end)
            expected = oracle(q[rows], *self.rows[lane.reqid], **self.kind)
            torch.testing.assert_close(out[rows].double(), expected, atol=1e-5, rtol=1e-5)
        padded = [row for row in range(len(q)) if not any(lane.begin <= row < lane.end for lane in self.backend._lanes)]
        assert not out[padded].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", KINDS)
def test_layers_of_each_kind_in_one_plan(make_cache, backend, name):
    driven = DrivenByKind(make_cache(layout=LAYOUTS[len(name) % 3]), backend, KINDS[name])
    for reqids, q_lens in STEPS:
        driven.compare(reqids, q_lens)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_window_hides_may_be_anything(make_cache, backend):
    """Rows that nobody sees are never read into a result: NaN there changes nothing."""
    driven = DrivenByKind(make_cache(), backend, {"window": 7})
    driven.compare([1, 3], [40, 2])
    for side in (driven.cache.k(1), driven.cache.v(1)):
        side[1, :30] = float("nan")
    q = driven.tensor(2, 6)
    reqids, lens = [1, 3], [41, 3]
    assert driven.cache.step(dict(zip(reqids, lens, strict=True)))
    from slicedkv.attention import Batch

    driven.backend.plan(Batch(reqids, [1, 1], lens))
    new = driven.tensor(2, 2)
    driven.backend.append(1, new, new)
    out = driven.backend.run(1, q, window=7)
    assert bool(out.isfinite().all())
    kept = [torch.cat((rows[-6:], new[:1])) for rows in driven.rows[1]]
    torch.testing.assert_close(out[:1].double(), oracle(q[:1], *kept), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ({"window": 0}, "window is 0"),
        ({"soft_cap": 0.0}, "soft_cap is 0.0; it must be positive and finite"),
        ({"soft_cap": math.inf}, "soft_cap is inf"),
        ({"sinks": torch.zeros(5)}, r"sinks has shape \(5,\) on cpu; it must be \(6,\)"),
    ],
)
def test_wrong_values_are_named(make_cache, backend, kind, message):
    driven = Driven(make_cache(), backend)
    driven.step([0], [3])
    out = torch.full((3, 6, 16), 5.0)
    with pytest.raises(ConfigError, match=message):
        driven.backend.run(1, driven.tensor(3, 6), out, **kind)
    assert bool((out == 5).all())


def test_a_window_needs_a_causal_mask(make_cache):
    cache = make_cache()
    driven = Driven(cache, "reference", causal=False)
    driven.step([0], [3])
    with pytest.raises(ConfigError, match="window is 3 without causal"):
        driven.backend.run(1, driven.tensor(3, 6), window=3)


def test_backends_that_lack_a_feature_say_who_has_it(make_cache, monkeypatch):
    backend = open_backend("reference", make_cache(), num_qo_heads=6)
    monkeypatch.setattr(type(backend), "features", frozenset({"window"}))
    driven = Driven(make_cache(), "reference")
    driven.step([0], [3])
    with pytest.raises(ConfigError, match="a layer has soft_cap, and backend 'reference' has not; backends 'triton'"):
        driven.backend.run(1, driven.tensor(3, 6), soft_cap=2.0)
