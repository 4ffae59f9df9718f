"""Slots that a driver failing twice took out of use: the error that says so, and where they are counted."""

from __future__ import annotations

import pytest
from rig import QUIET, TOKENS, Rig

from slicedkv import LostSlotsError, SlicedKVCache


def lose_one(rig: Rig, cache: SlicedKVCache) -> int:
    """Lose the slot of a new request in a step that can neither map its second plane nor unmap the first."""
    reqid = cache.alloc_reqid()
    rig.driver.fail("map", at=2)
    rig.driver.fail("unmap")
    with pytest.raises(LostSlotsError, match="could neither be mapped nor left as they were") as caught:
        cache.step({reqid: TOKENS})
    rig.driver.heal()
    assert caught.value.slots == (reqid,)
    return reqid


def test_a_step_names_the_slots_it_lost(rig: Rig) -> None:
    cache = rig.open(**QUIET)
    other = cache.alloc_reqid()
    assert cache.step({other: TOKENS})
    lost = lose_one(rig, cache)
    assert not cache.is_active(lost)
    assert cache.step({other: 2 * TOKENS})
    cache.close()


def test_stats_count_lost_slots(rig: Rig) -> None:
    cache = rig.open(**QUIET)
    for lost in range(3):
        stats = cache.stats()
        assert (stats.active_slots, stats.idle_slots, stats.lost_slots) == (0, 4 - lost, lost)
        lose_one(rig, cache)
    cache.close()
