"""Requests that share prefixes, over a real cache of small pages and without a model: every row names the tokens it
stands behind, so that a request with another's rows is found out at once.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slicedkv import SlicedKVCache
from slicedkv.engine.prefix_cache import PrefixCache
from slicedkv.engine.request import Request, SamplingParams
from slicedkv.engine.scheduler import Scheduler
from slicedkv.errors import DriverError, OutOfSlotsError

PAGE = 4096
RUN = 8
"""Tokens of a page in the sliced layout."""


def options(pages, slots=4, **more):
    """`pages` pages for K and as many for V, of eight tokens each."""
    shape = {"num_layers": 2, "num_kv_heads": 1, "head_dim": 64, "dtype": torch.float32, "device": "cpu"}
    shape |= {"max_batch_size": slots, "max_seq_len": 160, "page_bytes": PAGE, "memory_limit": 2 * pages * PAGE}
    return shape | {"mapper": "sync", "extent_pages": 1} | more


class Served:
    """A scheduler whose "model" writes rows that depend on all tokens before them, and always says 7."""

    def __init__(self, cache, limit_pages=1000, budget=64):
        self.cache = cache
        self.prefixes = PrefixCache(cache, 2 * limit_pages * PAGE)
        self.scheduler = Scheduler(cache, max_tokens_per_step=budget, admission=self.prefixes)
        self.requests = []

    def add(self, prompt, max_tokens=4):
        self.requests.append(Request(len(self.requests), prompt, SamplingParams(max_tokens=max_tokens)))
        self.scheduler.add(self.requests[-1])
        return self.requests[-1]

    def step(self):
        """Run one step; return it as {request id: tokens computed}."""
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        for request, q_len in zip(plan.requests, plan.q_lens, strict=True):
            start, end = request.num_computed, request.num_computed + q_len
            self.check(request, start)
            for keys, values in self.rows(request, start, end):
                expected = marks(request.token_ids(0, end))[start:, None, None]
                keys.copy_(expected.expand_as(keys))
                values.copy_(-expected.expand_as(values))
        for request in self.scheduler.complete(plan):
            self.check(request, request.num_computed)
            request.accept(7)
        self.scheduler.retire()
        return {request.request_id: q_len for request, q_len in zip(plan.requests, plan.q_lens, strict=True)}

    def run(self):
        for _ in range(3000):
            if self.step() is None:
                return
        raise AssertionError("requests do not get on")

    def serve(self, prompt, max_tokens=4):
        request = self.add(prompt, max_tokens)
        self.run()
        return request

    def rows(self, request, start, end):
        layers = range(self.cache.layout.num_layers)
        return [tuple(view[request.reqid, start:end] for view in (self.cache.k(n), self.cache.v(n))) for n in layers]

    def check(self, request, length):
        """Every row of a request below a length is its own."""
        expected = marks(request.token_ids(0, length))[:, None, None]
        for keys, values in self.rows(request, 0, length):
            assert torch.equal(keys, expected.expand_as(keys)), request
            assert torch.equal(values, -expected.expand_as(values)), request

    def has(self, prompt):
        """Whether something could share a prefix of this prompt."""
        return self.prefixes._index.match(prompt).length > 0

    def check_books(self):
        """Slots are running or held, and held memory is what freeing it would give."""
        running = [request.reqid for request in self.scheduler.running]
        held = self.prefixes.held_slots
        assert self.cache.stats().active_slots == len(running) + len(held)
        assert not set(running) & set(held)
        assert self.prefixes.held_bytes <= self.prefixes._limit_pages * PAGE
        self.cache.check_integrity()


def marks(tokens):
    """A number for each token that depends on all before it, exact in float32."""
    found, mark = [], 1
    for token in tokens:
        mark = (mark * 31 + token) % 1_000_003
        found.append(float(mark))
    return torch.tensor(found)


@pytest.fixture
def serve(make_cache):
    def make(pages=100, *, slots=4, limit_pages=1000, budget=64, **more):
        return Served(make_cache(**options(pages, slots, **more)), limit_pages, budget)

    return make


SYSTEM = list(range(100, 121))  # two runs and five tokens


def test_a_prompt_begins_with_what_a_running_request_has(serve):
    served = serve()
    first = served.add([*SYSTEM, 1, 2, 3], max_tokens=20)
    served.step()
    assert first.num_cached_tokens == 0
    second = served.add(SYSTEM + [4] * 10)
    assert served.step() == {0: 1, 1: 15}
    assert second.num_cached_tokens == served.prefixes.num_cached_tokens == 2 * RUN
    assert served.cache.stats().saved_bytes == 2 * 2 * PAGE
    served.run()
    served.check_books()


def test_only_computed_rows_are_shared(serve):
    served = serve(budget=20)
    first, second = served.add(SYSTEM * 3, max_tokens=8), served.add(SYSTEM * 3 + [5])
    steps = [served.step() for _ in range(4)]
    assert steps == [{0: 20}, {0: 20}, {0: 20}, {0: 3, 1: 8}], "it waits for what the first one is computing"
    assert second.num_cached_tokens == 7 * RUN
    assert first.num_cached_tokens == 0
    served.run()


def test_prompts_that_come_together_are_computed_once(serve):
    served = serve(budget=128)
    for n in range(4):
        served.add(SYSTEM * 2 + [n], max_tokens=3)
    assert served.step() == {0: 43}, "the others begin with what it computes"
    assert served.step() == {0: 1, 1: 3, 2: 3, 3: 3}
    assert [request.num_cached_tokens for request in served.requests] == [0, 40, 40, 40]
    served.run()


def test_another_prompt_does_not_wait(serve):
    served = serve(budget=30)
    served.add(SYSTEM * 2)
    served.add(SYSTEM[:RUN] + [1] * 30)
    assert served.step() == {0: 30}
    assert served.step() == {0: 12, 1: 18}
    assert served.requests[1].num_cached_tokens == RUN
    served.run()


def test_the_last_token_is_always_computed(serve):
    served = serve()
    prompt = list(range(1, 2 * RUN + 1))
    served.serve(prompt)
    again = served.serve(prompt)
    assert again.num_cached_tokens == RUN
    assert served.serve([*prompt, 5]).num_cached_tokens == 2 * RUN
    assert served.serve(prompt[:RUN]).num_cached_tokens == 0


def test_a_conversation_goes_on_in_its_own_slot(serve):
    served = serve()
    talk = served.serve(SYSTEM)
    (slot,) = served.prefixes.held_slots
    mapped = served.cache.stats().mapped_bytes
    turn = served.add(talk.token_ids(0, talk.num_tokens) + [3] * 6)
    served.step()
    assert turn.reqid == slot
    assert turn.num_cached_tokens == 3 * RUN, "24 of the 24 rows it left"
    assert served.prefixes.held_slots == ()
    assert served.cache.stats().pages_shared == 0
    served.run()
    assert served.prefixes.held_slots == (slot,)
    assert served.cache.stats().mapped_bytes == mapped + 4 * PAGE, "34 rows instead of 24"
    served.check_books()


def test_a_held_slot_is_taken_over_though_a_running_request_has_the_same(serve):
    served = serve()
    first = served.serve(SYSTEM, max_tokens=12)
    (slot,) = served.prefixes.held_slots
    again = served.add(SYSTEM, max_tokens=30)
    while again.num_computed < 32:
        served.step()
    assert (again.num_cached_tokens, served.prefixes.held_slots) == (2 * RUN, (slot,))
    turn = served.add([*first.token_ids(0, 32), 5, 5])
    served.step()
    assert (turn.reqid, turn.num_cached_tokens) == (slot, 4 * RUN)
    served.run()
    served.check_books()


def test_rows_written_again_are_the_requests_own(serve):
    """A user's fork of a request shares all its whole pages; the request that goes on in its slot must not write there.

    With rows that straddle pages, more of them are whole than runs are.
    """
    served = serve(head_dim=80)  # 6.4 tokens a page
    assert served.cache.layout.tokens_per_page == 6
    talk = served.add(SYSTEM + [1] * 12, max_tokens=2)
    served.step()
    (fork,) = served.cache.fork(talk.reqid)
    served.run()
    (slot,) = served.prefixes.held_slots
    tail = served.serve(SYSTEM + [1] * 9 + [2] * 8)
    assert tail.num_cached_tokens == 30
    assert served.cache.stats().pages_copied > 0
    talk.reqid = fork
    served.check(talk, 33)
    served.cache.free_reqid(fork)
    assert served.prefixes.held_slots == (slot,)
    served.check_books()


def test_prefixes_of_others_are_not_held_twice(serve):
    served = serve()
    first = served.serve(SYSTEM + [1] * RUN)
    assert len(served.prefixes.held_slots) == 1
    served.serve([2] * 20)
    assert served.serve(SYSTEM, max_tokens=1).num_cached_tokens == 2 * RUN
    assert len(served.prefixes.held_slots) == 2, "the shorter one has nothing that the longer has not"
    longer = served.add(first.token_ids(0, first.num_tokens) + [5] * 20, max_tokens=9)
    served.step()
    assert len(served.prefixes.held_slots) == 1, "continued"
    served.scheduler.abort(longer)
    assert len(served.prefixes.held_slots) == 2
    served.check_books()


def test_the_least_recently_used_is_given_up_for_a_slot(serve):
    served = serve(slots=3)
    prompts = [[n] * 20 for n in (1, 2, 3)]
    for prompt in prompts:
        served.serve(prompt)
    assert len(served.prefixes.held_slots) == 3
    share = served.serve(prompts[0][:12] + [9] * 9)  # uses the first; the second goes
    assert share.num_cached_tokens == RUN
    assert list(map(served.has, prompts)) == [True, False, True]
    served.serve([4] * 20)
    assert list(map(served.has, prompts)) == [True, False, False]
    served.check_books()


def test_a_longer_prefix_replaces_a_shorter(serve):
    served = serve(slots=2, budget=2)
    short = served.add([1] * 20, max_tokens=6)
    while short.num_pending > 1:
        served.step()
    long = served.add([1] * 20 + [7] * 30, max_tokens=8)
    while not short.finished:
        served.step()
    assert len(served.prefixes.held_slots) == 1, "24 of its 25 rows, and only 16 of them the other's"
    served.run()
    assert long.num_cached_tokens == 2 * RUN
    assert len(served.prefixes.held_slots) == 1
    assert served.serve([1] * 20 + [7] * 31).num_cached_tokens == 6 * RUN
    served.check_books()


def test_a_held_slot_is_given_up_though_others_run(serve):
    served = serve(slots=2)
    served.serve([1] * 20)
    served.add([2] * 20, max_tokens=30)
    served.step()
    newcomer = served.add([3] * 20)
    served.step()
    assert newcomer.num_computed == 20
    assert served.prefixes.held_slots == ()
    served.run()


@pytest.mark.parametrize("limit_pages", [0, 2, 3, 6, 7])
def test_held_memory_has_a_limit(serve, limit_pages):
    served = serve(limit_pages=limit_pages)
    for prompt in ([1] * 20, [2] * 20, [3] * 20):  # 23 rows, 3 pages each
        served.serve(prompt)
        served.check_books()
    assert len(served.prefixes.held_slots) == limit_pages // 3
    held = [served.has([n] * 10) for n in (1, 2, 3)]
    assert held == {0: [False] * 3, 1: [False, False, True], 2: [False, True, True]}[limit_pages // 3]


def test_what_running_requests_share_is_not_held(serve):
    served = serve(limit_pages=4, slots=4)
    served.serve([1] * 20 + [2] * 4)
    long = served.add([1] * 20 + [3] * 60, max_tokens=30)
    served.step()
    assert long.num_cached_tokens == 2 * RUN
    assert served.prefixes.held_bytes == 2 * 2 * PAGE, "two of its four pages are the long one's too"
    served.scheduler.abort(long)
    assert served.prefixes.held_bytes == 4 * 2 * PAGE
    served.check_books()


def test_held_memory_goes_before_a_running_request(serve):
    served = serve(12)
    for n in (1, 2):
        served.serve([n] * 28)  # 4 pages each
    first, second = served.add([3] * 8, max_tokens=40), served.add([4] * 8, max_tokens=40)
    while len(served.prefixes.held_slots) == 2:
        served.step()
    assert served.scheduler.num_preemptions == 0
    assert served.serve([5]).num_cached_tokens == 0
    assert served.scheduler.num_preemptions == 0
    assert first.finished
    assert second.finished
    served.check_books()


def test_held_memory_counts_as_free_for_newcomers(serve):
    served = serve(12, slots=4)
    served.serve([1] * 60)  # 8 pages
    running = served.add([2] * 8, max_tokens=12)
    served.step()
    newcomer = served.add([3] * 60)  # 8 pages; 2 or 3 are free
    assert served.step() == {0 + 1: 1, 2: 60}
    assert newcomer.num_cached_tokens == 0
    assert served.prefixes.held_slots == ()
    assert running.num_preemptions == 0
    served.run()


def test_a_newcomer_keeps_what_it_shares_of_a_prefix_that_must_go(serve):
    served = serve(12)
    served.serve([1] * 28 + [2] * 40)  # 9 pages
    running = served.add([5] * 7, max_tokens=3)
    served.step()
    newcomer = served.add([1] * 28 + [3] * 40)  # 9 pages, three of them shared; two are free
    served.step()
    assert newcomer.num_cached_tokens == 3 * RUN
    assert served.prefixes.held_slots == ()
    assert running.num_preemptions == newcomer.num_preemptions == 0
    served.run()
    served.check_books()


def test_admission_counts_only_what_is_missing(serve):
    served = serve(12)
    served.add([1] * 64, max_tokens=6)  # 9 pages
    served.step()
    served.add([2] * 20)  # 3 pages: with the growth of the first there is no room for them
    served.add([1] * 60 + [3] * 8)  # 9 pages, 7 of them shared
    served.scheduler.waiting.rotate(1)
    assert served.step() == {0: 1, 2: 12}
    served.run()
    assert served.scheduler.num_preemptions == 0


def test_the_only_slot_is_taken_over_if_its_pages_are_of_use(serve):
    served = serve(slots=1)
    served.serve(SYSTEM + [1] * 10)
    assert served.serve(SYSTEM + [2] * 20).num_cached_tokens == 2 * RUN
    assert served.serve(SYSTEM).num_cached_tokens == 0, "it would keep pages it has no use for"
    served.check_books()


def test_preempted_requests_find_the_prefix_of_others(serve):
    served = serve(8, slots=3)
    for n in range(3):
        served.add([*SYSTEM, n], max_tokens=30)
    served.run()
    preempted = [request for request in served.requests if request.num_preemptions]
    assert preempted
    assert all(request.num_cached_tokens >= 2 * RUN for request in served.requests[1:])
    assert all(request.output_ids == [7] * 30 for request in served.requests)
    served.check_books()


def test_aborted_requests_leave_what_a_whole_prompt_has(serve):
    served = serve(budget=16)
    early, late = served.add([1] * 60), served.add([2] * 12, max_tokens=30)
    served.step()
    served.scheduler.abort(early)
    assert served.prefixes.held_slots == ()
    for _ in range(5):
        served.step()
    served.scheduler.abort(late)
    assert len(served.prefixes.held_slots) == 1
    waiting = served.add([3] * 9)
    served.scheduler.abort(waiting)
    assert served.scheduler.idle
    served.check_books()
    served.prefixes.clear()
    assert served.cache.stats().active_slots == 0


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
        served.cache._mapper.failure = DriverError("map", 1, "CUDA_ERROR_UNKNOWN")
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
    served.cache._mapper.failure = DriverError("map", 1, "CUDA_ERROR_UNKNOWN")
    with pytest.raises(DriverError):
        served.prefixes.evict()
    served.check_books()
    assert served.serve([2] * 20).finished
    served.check_books()


def test_a_lost_slot_is_forgotten(serve):
    served = serve(slots=2)
    served.serve([1] * 20)
    (slot,) = served.prefixes.held_slots
    with served.cache._gate.lock:
        served.cache._state.lose(slot)
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


PROMPTS = st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 3), st.integers(1, 30), st.integers(1, 20))


@settings(max_examples=120, deadline=None)
@given(
    prompts=st.lists(st.one_of(PROMPTS, st.integers(0, 8)), min_size=1, max_size=10),
    pages=st.integers(16, 24),
    slots=st.integers(1, 4),
    budget=st.integers(4, 70),
    limit_pages=st.integers(0, 24),
    shape=st.sampled_from(["sliced", "interleaved", "per_layer"]),
    extent_pages=st.sampled_from([1, 4]),
    head_dim=st.sampled_from([64, 80]),
    zero_on_reuse=st.booleans(),
    guard_tokens=st.sampled_from([0, 3]),
)
def test_everybody_finishes_with_rows_of_its_own(prompts, pages, slots, budget, limit_pages, shape, **more):
    """Whatever comes in whatever order: new prompts, next turns, aborts; every row is right and no page is lost."""
    pages *= 2 if shape == "per_layer" else 1
    with SlicedKVCache(**options(pages, slots, layout=shape, **more)) as cache:
        served = Served(cache, limit_pages, budget)
        for prompt in prompts:
            if isinstance(prompt, tuple):
                kind, shared, other, own, max_tokens = prompt
                served.add([kind + 1] * shared + [other + 10] * own, max_tokens)
            elif served.requests:
                earlier = served.requests[prompt % len(served.requests)]
                if prompt % 3 == 0:
                    served.scheduler.abort(earlier)
                else:
                    served.add([*earlier.token_ids(0, 90), prompt], 5)
            served.step()
            served.check_books()
        served.run()
        served.check_books()
        for request in served.requests:
            assert request.num_cached_tokens % cache.layout.tokens_per_page == 0
        served.prefixes.clear()
        assert (cache.stats().active_slots, served.prefixes.held_bytes) == (0, 0)
        cache.check_integrity()


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
