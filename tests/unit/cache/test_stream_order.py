"""Copies between requests and what is queued on other streams: nobody writes rows that a copy may still read."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from inside import fence_of, slots_read_from
from rig import QUIET, TOKENS, Rig

from slicedkv import SlicedKVCache
from slicedkv.requests.copier import Copier

PARTLY = 4 * TOKENS + 5
"""Tokens of which the last five are copied, not shared."""


def copied(rig: Rig, name: str) -> tuple[SlicedKVCache, int, int]:
    """A cache, a request whose rows a copy on stream "copies" reads, and the request that gets them."""
    cache = rig.open(**QUIET)
    source = cache.alloc_reqid()
    assert cache.step({source: PARTLY})
    rig.fake.hold_fences = True
    rig.fake.current_stream = "copies"
    if name == "share_prefix":
        target = cache.alloc_reqid()
        assert cache.share_prefix(source, target, PARTLY)
    elif name == "fork":
        (target,) = cache.fork(source)
    else:
        rig.fake.hold_fences = False
        (target,) = cache.fork(source)
        assert cache.step({target: 40})
        rig.fake.finish_fences()
        rig.fake.ordered.clear()
        copy = Copier.copy

        def late(*arguments: Any) -> None:
            rig.fake.hold_fences = True
            copy(*arguments)

        with mock.patch.object(Copier, "copy", late):
            assert cache.step({target: 41})
    rig.fake.current_stream = "its own"
    rig.fake.ordered.clear()
    return cache, source, target


@pytest.mark.parametrize("name", ["share_prefix", "fork", "step"])
def test_a_step_of_the_source_comes_after_the_copy(rig: Rig, name: str) -> None:
    cache, source, _ = copied(rig, name)
    read = fence_of(cache, source)
    assert read is not None
    assert read.stream == "copies"
    other = cache.alloc_reqid()
    assert cache.step({other: 1})
    assert rig.fake.ordered == [], "others need not wait"
    assert cache.step({source: PARTLY})
    assert rig.fake.ordered == [("its own", read)]
    assert cache.step({source: PARTLY + 1})
    assert rig.fake.ordered == [("its own", read)], "once for a stream of a request"
    rig.fake.finish_fences()
    cache.close()


def test_a_step_that_is_refused_waits_again_when_it_succeeds(rig: Rig) -> None:
    cache, source, _ = copied(rig, "fork")
    cache.set_memory_limit(cache.stats().mapped_bytes)
    assert not cache.step({source: 4000})
    assert rig.fake.ordered == []
    assert cache.step({source: PARTLY})
    assert len(rig.fake.ordered) == 1
    rig.fake.finish_fences()
    cache.close()


def test_the_next_request_in_the_slot_waits_for_the_copy_too(rig: Rig) -> None:
    cache, source, _ = copied(rig, "fork")
    cache.free_reqid(source)
    cache.free_reqid(cache.alloc_reqid())
    assert not slots_read_from(cache)
    assert not fence_of(cache, source).done
    rig.fake.finish_fences()
    cache.close()
