"""Requests that share prefixes, over a real cache of small pages and without a model: every row names the tokens it
stands behind, so that a request with another's rows is found out at once.
"""

from __future__ import annotations

import pytest
from prefix_serving import PAGE, RUN, SYSTEM


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
