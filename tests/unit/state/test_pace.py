"""The latest-start schedule against brute force, and how the pace follows what is measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicedkv.state.pace import Pace, latest_start


def brute_force(slack: list[int], work: float) -> list[float]:
    """The tightest of all bounds: whatever follows must be done by its own deadline."""
    ranks = range(len(slack))
    return [slack[k] - min(slack[j] - (j - k + 1) * work for j in ranks[k:]) for k in ranks]


@given(st.lists(st.integers(0, 64), min_size=1, max_size=40).map(sorted), st.floats(0.001, 3.0))
def test_latest_start_is_backward_scheduling(slack: list[int], work: float) -> None:
    assert latest_start(slack, work) == pytest.approx(brute_force(slack, work))


def pace(interval_s: float, page_s: float) -> Pace:
    found = Pace()
    found.interval_s, found.page_s, found.latency_s = interval_s, page_s, 0.0
    return found


def test_spread_deadlines_need_the_least_distance() -> None:
    slack = sorted(index % 32 for index in range(256))
    assert pace(0.005, 40e-6).distances(slack, 2, 32) == [2] * 256


def test_coinciding_deadlines_start_earlier_and_one_after_the_other() -> None:
    distances = pace(0.005, 40e-6).distances([20] * 256, 2, 32)
    assert max(distances) == 6, "256 slots of 2 mappings of 40 us are 20 ms, four steps and two to be safe"
    assert min(distances) == 2


def test_distance_is_between_two_tokens_and_a_page() -> None:
    slack = [0] * 64
    assert max(pace(1e-5, 1e-3).distances(slack, 2, 32)) == 32
    assert pace(1.0, 1e-6).distances(slack, 2, 32) == [2] * 64
    assert pace(1.0, 1e-6).distances(slack, 2, 1) == [2] * 64


def test_latency_and_stalls_widen_it() -> None:
    found = pace(0.005, 40e-6)
    found.mapped(2, 80e-6, 0.010 + 80e-6)
    assert found.distances([5], 2, 32)[0] == 4
    found.stalled()
    assert found.distances([5], 2, 32)[0] == 5
    for step in range(2000):
        found.step_at(step * 0.005)
    assert found.margin_tokens == 0


def test_interval_follows_short_gaps_at_once_and_ignores_pauses() -> None:
    found = pace(0.1, 1e-6)
    for step in range(10):
        found.step_at(step * 0.005)
    assert found.interval_s == pytest.approx(0.005, rel=0.1)
    found.step_at(100.0)
    assert found.interval_s == pytest.approx(0.005, rel=0.1)


def test_waits_for_the_gil_are_latency_and_not_mapping_time() -> None:
    found = pace(0.005, 40e-6)
    for _ in range(50):
        found.mapped(16, 16 * 40e-6 + 0.005, 0.010 + 16 * 40e-6)
        found.mapped(16, 16 * 40e-6, 0.005 + 16 * 40e-6)
    assert found.page_s < 60e-6
    assert 0.004 < found.latency_s < 0.011
    assert max(found.distances(sorted(index % 32 for index in range(256)), 2, 32)) <= 5
