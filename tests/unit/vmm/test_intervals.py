"""Intervals against a set of integers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicedkv.vmm.intervals import Intervals

RANGES = st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(1, 8)), max_size=60)


@given(RANGES)
def test_like_a_set(steps: list[tuple[bool, int, int]]) -> None:
    intervals, model = Intervals(), set[int]()
    for adding, start, size in steps:
        span = set(range(start, start + size))
        assert intervals.overlaps(start, start + size) == bool(span & model)
        assert intervals.covers(start, start + size) == (span <= model)
        legal = not span & model if adding else span <= model
        change = intervals.add if adding else intervals.remove
        if legal:
            change(start, start + size)
            model = model | span if adding else model - span
        else:
            with pytest.raises(ValueError, match="cannot"):
                change(start, start + size)
        listed = list(intervals)
        assert {value for first, end in listed for value in range(first, end)} == model
        assert all(end < later for (_, end), (later, _) in pairwise(listed))
        assert intervals.total() == len(model)


def test_lowest_first() -> None:
    intervals = Intervals([(10, 12), (20, 30)])
    assert [intervals.take_lowest(size) for size in (1, 3, 1, 7)] == [10, 20, 11, 23]
    with pytest.raises(ValueError, match="no range"):
        intervals.take_lowest(1)
