"""The scheduler alone, over a real cache of a few small pages: who runs, with how much, and who has to wait."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slicedkv import SlicedKVCache
from slicedkv.engine.request import FinishReason, Request, RequestState, SamplingParams
from slicedkv.engine.scheduler import Scheduler
from slicedkv.errors import CapacityError, ConfigError, OutOfPagesError

PAGE = 4096
PAGE_TOKENS = 16


def options(pages, slots=4, length=200):
    """Sixteen tokens a page; `pages` pages for K and as many for V."""
    return {
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_dim": 64,
        "dtype": torch.float32,
        "max_batch_size": slots,
        "max_seq_len": length,
        "page_bytes": PAGE,
        "memory_limit": 2 * pages * PAGE,
        "mapper": "sync",
    }


@pytest.fixture
def schedule(make_cache):
    def make(pages, *, slots=4, budget=64, length=200):
        return Scheduler(make_cache(**options(pages, slots, length)), max_tokens_per_step=budget)

    return make


def request(request_id, prompt, max_tokens=8):
    return Request(request_id, [1] * prompt, SamplingParams(max_tokens=max_tokens))


def advance(scheduler, *, ahead=False):
    """Run one step with token 7 for everybody; return it as {request id: tokens}."""
    plan = scheduler.schedule()
    if plan is None:
        return None
    computed = scheduler.complete(plan)
    if ahead:
        scheduler.admit_ahead()
    for ready in computed:
        ready.accept(7)
    scheduler.retire()
    return {request.request_id: q_len for request, q_len in zip(plan.requests, plan.q_lens, strict=True)}


def test_chunks_within_the_budget_and_decodes_first(schedule):
    scheduler = schedule(40, budget=20)
    for request_id, prompt in enumerate([5, 33, 4]):
        scheduler.add(request(request_id, prompt))
    assert advance(scheduler) == {0: 5, 1: 15}
    assert advance(scheduler) == {0: 1, 1: 18, 2: 1}
    assert advance(scheduler) == {0: 1, 1: 1, 2: 3}
    plan = scheduler.schedule()
    assert [r.request_id for r in plan.requests] == [0, 1, 2]
    assert plan.num_tokens == 3
    for one in list(scheduler.running):
        scheduler.abort(one)


def test_slots_are_reused_in_order_of_arrival(schedule):
    scheduler = schedule(40, slots=2)
    everyone = [request(i, 3, max_tokens=2 + i % 3) for i in range(7)]
    for one in everyone:
        scheduler.add(one)
    order = []
    while (step := advance(scheduler)) is not None:
        assert len(step) <= 2
        order += [request_id for request_id, q_len in step.items() if q_len == 3]
    assert order == list(range(7))
    assert all(one.finish_reason is FinishReason.LENGTH and one.reqid is None for one in everyone)
    assert scheduler.idle


def test_admission_waits_for_memory_promised_to_others(schedule):
    scheduler = schedule(6, budget=16)
    scheduler.add(request(0, 60, max_tokens=2))  # 4 pages, computed in 4 steps
    scheduler.add(request(1, 40, max_tokens=2))  # 3 pages: not beside the first
    steps = [advance(scheduler) for _ in range(5)]
    assert steps == [{0: 16}, {0: 16}, {0: 16}, {0: 12}, {0: 1}]
    assert scheduler.num_preemptions == 0
    assert advance(scheduler) == {1: 16}
    while advance(scheduler):
        pass


def test_what_the_next_step_begins_with_is_admitted_while_this_one_is_computed(schedule):
    scheduler = schedule(40, budget=20, slots=5)
    everyone = [request(request_id, prompt) for request_id, prompt in enumerate([5, 33, 4, 3, 50])]
    for one in everyone:
        scheduler.add(one)
    assert advance(scheduler, ahead=True) == {0: 5, 1: 15}
    assert [one.request_id for one in scheduler.running] == [0, 1, 2], "the third's first token is in the next step"
    mapped = scheduler._cache.stats().mapped_bytes
    assert mapped == 2 * PAGE * (1 + 3 + 1), "its page is mapped, and the second's are"
    assert advance(scheduler, ahead=True) == {0: 1, 1: 18, 2: 1}
    assert advance(scheduler, ahead=True) == {0: 1, 1: 1, 2: 3, 3: 3, 4: 12}
    assert not scheduler.waiting
    for one in everyone:
        scheduler.abort(one)
    assert scheduler._cache.stats().active_slots == 0


def test_nobody_is_admitted_ahead_into_memory_that_tokens_to_come_need(schedule):
    """Two tokens more fill the first's page: its next one needs another."""
    scheduler = schedule(3, budget=15)
    first = request(0, 15, max_tokens=20)
    scheduler.add(first)
    scheduler.add(request(1, 31, max_tokens=2))
    advance(scheduler, ahead=True)
    assert [one.request_id for one in scheduler.running] == [0], "the other two pages would go to the second"
    while scheduler.running == [first]:
        advance(scheduler, ahead=True)
    assert (first.finished, scheduler.num_preemptions) == (True, 0)


def test_who_was_refused_ahead_is_asked_about_again_when_somebody_has_left(schedule, monkeypatch):
    """Asking takes as long as all else that a step of decoding requests waits for on the host."""
    scheduler = schedule(5, slots=3)
    first, second = request(0, 15, max_tokens=6), request(1, 40, max_tokens=30)
    for one in (first, second, request(2, 20)):
        scheduler.add(one)
    advance(scheduler, ahead=True)
    asked = []
    can_admit = scheduler._can_admit
    monkeypatch.setattr(scheduler, "_can_admit", lambda *who: asked.append(who[1]) or can_admit(*who))
    while not first.finished:
        assert advance(scheduler, ahead=True) == {0: 1, 1: 1}
    assert 0 not in asked, "in `schedule`, with the device waiting"
    assert set(advance(scheduler, ahead=True)) == {1, 2}
    for one in list(scheduler.running):
        scheduler.abort(one)


def test_memory_that_others_gave_back_is_noticed_a_step_later(schedule):
    scheduler = schedule(4, slots=3)
    for one in (request(0, 40, max_tokens=20), request(1, 40)):
        scheduler.add(one)
    advance(scheduler, ahead=True)
    advance(scheduler, ahead=True)
    assert len(scheduler.running) == 1
    scheduler._cache.set_memory_limit(2 * 12 * PAGE)
    assert advance(scheduler) == {0: 1}
    assert advance(scheduler) == {0: 1, 1: 40}
    for one in list(scheduler.running):
        scheduler.abort(one)


def test_who_was_refused_ahead_is_in_nobodys_way_any_more_when_it_is_aborted(schedule):
    scheduler = schedule(8)
    refused = request(1, 90)
    for one in (request(0, 40, max_tokens=50), refused, request(2, 10)):
        scheduler.add(one)
    advance(scheduler, ahead=True)
    assert advance(scheduler, ahead=True) == {0: 1}
    scheduler.abort(refused)
    assert advance(scheduler) == {0: 1, 2: 10}
    for one in list(scheduler.running):
        scheduler.abort(one)


def test_a_prompt_under_way_has_no_token_to_come(schedule):
    """With one, the first would need a third page, which the second fills to its end."""
    scheduler = schedule(8, budget=26)
    for one in (request(0, 31, max_tokens=90), request(1, 90, max_tokens=1)):
        scheduler.add(one)
    assert advance(scheduler, ahead=True) == {0: 26}
    assert advance(scheduler, ahead=True) == {0: 5, 1: 21}
    for one in list(scheduler.running):
        scheduler.abort(one)


def test_the_youngest_is_preempted_and_computed_again(schedule):
    scheduler = schedule(3)
    everyone = [request(i, 15, max_tokens=6) for i in range(3)]
    for one in everyone:
        scheduler.add(one)
    assert advance(scheduler) == {0: 15, 1: 15, 2: 15}
    assert advance(scheduler) == {0: 1, 1: 1, 2: 1}
    assert advance(scheduler) == {0: 1}  # its second page is taken from 2; then 1 cannot grow either
    assert [one.num_preemptions for one in everyone] == [0, 1, 1]
    assert [one.request_id for one in scheduler.waiting] == [1, 2]
    assert (everyone[2].num_computed, everyone[2].reqid, everyone[2].state) == (0, None, RequestState.WAITING)
    assert everyone[2].output_ids == [7, 7]
    while advance(scheduler):
        assert [one.request_id for one in scheduler.waiting] == sorted(one.request_id for one in scheduler.waiting)
    assert all(one.output_ids == [7] * 6 for one in everyone)
    assert scheduler.num_preemptions >= 2


def test_abort_in_every_state(schedule):
    scheduler = schedule(40, slots=1)
    running, waiting, last = (request(i, 3) for i in range(3))
    for one in (running, waiting, last):
        scheduler.add(one)
    advance(scheduler)
    scheduler.abort(waiting)
    scheduler.abort(running)
    scheduler.abort(running)
    assert (running.finish_reason, waiting.finish_reason) == (FinishReason.ABORTED, FinishReason.ABORTED)
    assert advance(scheduler) == {2: 3}
    scheduler.abort(last)
    assert scheduler.idle
    assert advance(scheduler) is None


def test_requests_that_can_never_fit_are_refused(schedule):
    scheduler = schedule(3, length=60)
    with pytest.raises(ConfigError, match="max_seq_len is 60"):
        scheduler.add(request(0, 55, max_tokens=7))
    with pytest.raises(CapacityError, match="8 pages of 4096 bytes and the cache has 6") as caught:
        scheduler.add(request(0, 41, max_tokens=9))
    assert (caught.value.requested, caught.value.available) == (8, 6)
    scheduler.add(request(0, 41, max_tokens=8))
    while advance(scheduler):
        pass


def test_budget_must_serve_every_slot(make_cache):
    with pytest.raises(ConfigError, match="max_tokens_per_step is 3"):
        Scheduler(make_cache(**options(8)), max_tokens_per_step=3)


def test_memory_taken_by_others_is_an_error_with_numbers(schedule):
    scheduler = schedule(4)
    thief = scheduler._cache.alloc_reqid()
    scheduler._cache.step({thief: 2 * PAGE_TOKENS})
    one = request(0, 2 * PAGE_TOKENS - 1, max_tokens=5)
    scheduler.add(one)
    assert advance(scheduler) == {0: 31}
    assert advance(scheduler) == {0: 1}
    for _ in range(2):
        with pytest.raises(
            OutOfPagesError, match="the only one running, needs 2 more pages and 0 can be had"
        ) as caught:
            scheduler.schedule()
        assert (caught.value.requested, caught.value.available) == (2, 0)
    scheduler._cache.free_reqid(thief)
    assert advance(scheduler) == {0: 1}
    scheduler.abort(one)
    scheduler._cache.step({scheduler._cache.alloc_reqid(): 4 * PAGE_TOKENS})
    scheduler.add(request(1, 5))
    with pytest.raises(OutOfPagesError, match="the only one running"):
        scheduler.schedule()


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 70), st.integers(1, 30)), min_size=1, max_size=9),
    pages=st.integers(7, 12),
    slots=st.integers(1, 4),
    budget=st.integers(4, 50),
    preemption=st.sampled_from(["recompute", "swap", "auto"]),
    ahead=st.booleans(),
)
def test_everybody_finishes(lengths, pages, slots, budget, preemption, ahead):
    """Whatever comes, every request gets all its tokens, in a bounded number of steps, and leaves nothing behind."""
    with SlicedKVCache(device="cpu", **options(pages, slots)) as cache:
        scheduler = Scheduler(cache, max_tokens_per_step=budget, preemption=preemption)
        everyone = [request(i, prompt, max_tokens) for i, (prompt, max_tokens) in enumerate(lengths)]
        for one in everyone:
            scheduler.add(one)
        for _ in range(3000):
            step = advance(scheduler, ahead=ahead)
            if step is None:
                break
            assert sum(step.values()) <= budget
        assert all(len(one.output_ids) == one.params.max_tokens for one in everyone)
        assert (cache.stats().active_slots, cache.stats().swapped_bytes) == (0, 0)
        cache.check_integrity()
