"""How much the planner puts into one batch of the driver."""

from __future__ import annotations

import pytest

from slicedkv.memory.change import Growth
from slicedkv.paging.planner import _BATCH_HANDLES, _within


@pytest.mark.parametrize(("planes", "extent_pages"), [(2, 1), (2, 16), (64, 1), (1, 1)])
def test_a_batch_of_single_pages_is_bounded(planes: int, extent_pages: int) -> None:
    growths = [Growth(slot, 1) for slot in range(500)]
    chosen = list(_within(growths, 10**6, extent_pages, planes))
    assert chosen == growths[: _BATCH_HANDLES // planes], "as many as one batch takes, the first ones"


@pytest.mark.parametrize("planes", [2, 128, 200])
def test_a_batch_takes_at_least_one_page(planes: int) -> None:
    assert next(_within([Growth(3, 1), Growth(4, 1)], 10, 1, planes)) == Growth(3, 1)


def test_many_pages_of_one_request_are_counted_in_extents() -> None:
    chosen = list(_within([Growth(0, 320), Growth(1, 10**4)], 10**6, 16, 2))
    assert chosen == [Growth(0, 320), Growth(1, (64 - 20) * 16)]


def test_a_batch_ends_where_memory_does() -> None:
    assert list(_within([Growth(0, 5), Growth(1, 9), Growth(2, 1)], 8, 1, 2)) == [Growth(0, 5), Growth(1, 3)]
