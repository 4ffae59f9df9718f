"""A prefix cache when memory or slots are short or something fails: the request stays, nothing is lost."""

from __future__ import annotations

from contextlib import suppress

import pytest
from inside import fail_in_background, lose
from prefix_serving import SYSTEM, Served, options

from slicedkv.engine.prefix_cache import PrefixCache
from slicedkv.engine.request import Request, SamplingParams
from slicedkv.engine.scheduler import Scheduler
from slicedkv.errors import DriverError, OutOfSlotsError


def test_nothing_held_is_given_up_while_the_device_is_at_work(serve):
    """What was given up would be waited for: the device may be reading it."""
    served = serve(slots=3, budget=60)
    for n in range(3):
        served.serve(SYSTEM + [n] * 10)
    assert len(served.prefixes.held_slots) == 3
    first = served.add([50] * 60, max_tokens=3)
    other, sharer = served.add([60] * 20), served.add(SYSTEM + [1] * 10 + [3])
    plan = served.scheduler.schedule()
    served.scheduler.complete(plan)
    held = served.prefixes.held_slots
    assert len(held) == 2
    served.scheduler.admit_ahead()
    assert served.prefixes.held_slots == held
    assert list(served.scheduler.waiting) == [other, sharer]
    served.scheduler.abort(first)  # nobody has written its rows
    served.run()
    assert sharer.num_cached_tokens > 0
    served.check_books()


def test_without_memory_for_a_copy_a_request_is_computed(serve):
    served = serve(head_dim=80)  # rows straddle pages, so a share of 12 tokens copies a part of one
    first = served.add([1] * 20, max_tokens=30)
    served.step()
    shared = served.cache.share_prefix
    served.cache.share_prefix = lambda *args: False
    second = served.add([1] * 20 + [2])
    served.step()
    assert second.num_cached_tokens == 0
    served.cache.share_prefix = shared
    third = served.add([1] * 20 + [3])
    served.step()
    assert third.num_cached_tokens == 18
    served.run()
    assert first.output_ids == [7] * 30
    served.check_books()


@pytest.mark.parametrize("call", ["share_prefix", "prefetch", "step"])
def test_a_failure_on_the_way_leaves_nothing_behind(serve, call):
    """Whatever fails, the request stays in the queue, and the next try serves it."""
    served = serve()
    talk = served.serve(SYSTEM)
    prompt = talk.token_ids(0, talk.num_tokens) if call == "step" else [*SYSTEM[:16], 5]
    newcomer = served.add([*prompt, 5])
    works = getattr(served.cache, call)

    def fails(*_):
        raise DriverError("map", 1, "CUDA_ERROR_UNKNOWN")

    setattr(served.cache, call, fails)
    with pytest.raises(DriverError):
        served.step()
    setattr(served.cache, call, works)
    assert list(served.scheduler.waiting) == [newcomer]
    served.check_books()
    served.run()
    assert newcomer.finished
    served.check_books()


def test_a_background_failure_while_a_copy_is_given_up_loses_no_slot(serve):
    served = serve(head_dim=80)
    served.add([1] * 20, max_tokens=20)
    served.step()
    newcomer = served.add([1] * 20 + [2])

    def refuses(*_):
        fail_in_background(served.cache)
        return False

    shared, served.cache.share_prefix = served.cache.share_prefix, refuses
    with pytest.raises(DriverError):
        served.step()
    served.cache.share_prefix = shared
    assert newcomer.reqid is None
    served.check_books()
    served.run()


def test_a_background_failure_while_giving_up_loses_no_slot(serve):
    served = serve(slots=1)
    served.serve([1] * 20)
    fail_in_background(served.cache)
    with pytest.raises(DriverError):
        served.prefixes.evict()
    served.check_books()
    assert served.serve([2] * 20).finished
    served.check_books()


def test_a_lost_slot_is_forgotten(serve):
    served = serve(slots=2)
    served.serve([1] * 20)
    (slot,) = served.prefixes.held_slots
    lose(served.cache, slot)
    assert served.prefixes.held_bytes == 0
    assert not served.cache.is_active(slot)
    served.prefixes.clear()
    assert served.prefixes.held_slots == ()
    assert served.serve([1] * 20).num_cached_tokens == 0


def test_slots_of_others_are_theirs(serve):
    served = serve(slots=2)
    others = [served.cache.alloc_reqid(), served.cache.alloc_reqid()]
    request = served.add([1] * 20)
    with pytest.raises(OutOfSlotsError):
        served.step()
    served.cache.free_reqid(others.pop())
    served.step()
    assert len(served.scheduler.running) == 1
    served.add([1] * 20)
    served.run()
    assert request.finished
    served.cache.free_reqid(others.pop())


def test_cost_of_a_hit(make_cache):
    """Driver calls of a long hit: one mapping for each handle, nothing copied when it ends with a page."""
    cache = make_cache(**options(100, max_seq_len=800))
    served = Served(cache, budget=1024)
    first = served.add([1] * 512, max_tokens=9)
    served.step()
    served.add([1] * 512 + [2])
    before = cache.stats()
    served.step()
    assert cache.stats().pages_shared - before.pages_shared == 64 * 2
    assert cache.stats().pages_growth - before.pages_growth <= 4
    served.run()
    assert first.finished


def test_driver_failures_at_any_moment(open_cache):
    """Over a driver that fails now and then, nothing is lost but the step."""
    cache, driver, _ = open_cache(limit_pages=60, max_batch_size=3, num_layers=8, mapper="sync")
    admission = PrefixCache(cache, 1 << 40)
    scheduler = Scheduler(cache, max_tokens_per_step=512, admission=admission)
    everyone = [Request(i, [1] * 300 + [i] * 200, SamplingParams(max_tokens=4)) for i in range(12)]
    for index, one in enumerate(everyone):
        scheduler.add(one)
        driver.heal()
        driver.fail(("map", "create", "unmap")[index % 3], at=1 + 5 * index % 7)
        for _ in range(40):
            with suppress(DriverError):
                plan = scheduler.schedule()
                if plan is None:
                    break
                for ready in scheduler.complete(plan):
                    ready.accept(7)
                scheduler.retire()
        cache.check_integrity()
        assert cache.stats().active_slots == len(scheduler.running) + len(admission.held_slots)
    assert all(len(one.output_ids) == 4 for one in everyone)
    driver.heal()
    admission.clear()
    assert cache.stats().active_slots == 0
