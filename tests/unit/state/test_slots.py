"""Slot states and best fit (case E5)."""

from __future__ import annotations

import pytest

from slicedkv.errors import OutOfSlotsError, StateError
from slicedkv.state.slots import SlotTable


def table_with(mapped: list[int]) -> tuple[SlotTable, list[int]]:
    return SlotTable(len(mapped)), mapped


@pytest.mark.parametrize(("need", "expected"), [(1, 1), (2, 1), (3, 1), (4, 2), (10, 2), (20, 2)])
def test_best_fit_prefers_what_suffices_then_the_largest(need: int, expected: int) -> None:
    slots, mapped = table_with([0, 3, 10])
    assert slots.best_fit(need, mapped.__getitem__) == expected


def test_best_fit_avoids_slots_whose_work_may_still_run() -> None:
    slots, mapped = table_with([5, 5, 5])
    for fence in ("first", "second"):
        slot = slots.activate(slots.best_fit(5, mapped.__getitem__))
        slots.deactivate(slot, fence)
        slots.activate(slot)
        slots.deactivate(slot, fence)
    assert slots.fence(0) == "first"
    assert slots.best_fit(5, mapped.__getitem__) == 2
    slots.clear_fences([0])
    assert slots.best_fit(5, mapped.__getitem__) == 0


def test_states() -> None:
    slots, mapped = table_with([0, 0])
    assert [slots.activate(slots.best_fit(1, mapped.__getitem__)) for _ in range(2)] == [0, 1]
    with pytest.raises(OutOfSlotsError, match="none of 2 slots is idle: 2 active; free") as caught:
        slots.activate(slots.best_fit(1, mapped.__getitem__))
    assert (caught.value.requested, caught.value.available) == (1, 0)
    slots.deactivate(0, None)
    with pytest.raises(StateError, match="reqid 0 is not active"):
        slots.require_active(0)
    with pytest.raises(StateError, match="reqid 7 does not exist"):
        slots.require_active(7)
    slots.lose(0)
    assert slots.best_fit(1, mapped.__getitem__) is None


def test_lost_slots_are_named_when_none_is_left() -> None:
    slots, _ = table_with([0, 0])
    slots.activate(0)
    slots.lose(1)
    with pytest.raises(OutOfSlotsError, match="1 active, 1 out of use until the cache is closed"):
        slots.activate(None)
