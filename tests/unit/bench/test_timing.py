"""What benchmarks compare is timed in turn, and a drift of the clock cancels out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.support.timing import Timings, in_turn


def test_every_round_runs_all_in_order_and_back() -> None:
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}

    def clock(call: Callable[[], object]) -> float:
        call()
        return 1.0

    in_turn(calls, rounds=2, warmup=1, clock=clock)
    assert "".join(order) == "abc" + 2 * "abccba"


def test_a_drift_cancels_out() -> None:
    """Each run takes 1 % longer than the one before: one after the other, b would seem 7 % slower."""
    runs = 0

    def clock(call: Callable[[], object]) -> float:
        nonlocal runs
        runs += 1
        return (1 + 0.01 * runs) * (2.0 if call is slow else 1.0)

    def fast() -> None: ...
    def also_fast() -> None: ...
    def slow() -> None: ...

    timed = in_turn({"a": fast, "b": also_fast, "slow": slow}, rounds=5, clock=clock)
    assert timed.speed("a", "b") == pytest.approx(1.0)
    assert timed.speed("a", "slow") == pytest.approx(2.0)
    assert timed.fastest(["slow", "b"]) == "b"


def test_ratios_are_taken_round_by_round() -> None:
    """A machine that changes its speed between rounds changes no ratio."""
    timed = Timings({"a": [1.0, 9.0, 3.0], "b": [2.0, 18.0, 3.0]})
    assert timed.speed("a", "b") == 2.0
    assert timed.speed("b", "a") == 0.5
    assert timed.seconds("a") == 3.0
