"""The index alone: the longest match in whole runs, by the tokens themselves, whatever was added and removed before."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from slicedkv.engine.prefix_index import PrefixIndex

RUN = 4
FIRST, SECOND, THIRD = [1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]


def index_of(**tokens):
    """Slots named `s0`, `s1`, ... with their tokens."""
    index = PrefixIndex(RUN)
    for name, ids in tokens.items():
        index.extend(int(name[1:]), ids)
    return index


def test_the_longest_match_in_whole_runs():
    index = index_of(s0=FIRST + SECOND, s1=FIRST + THIRD, s2=FIRST, s3=SECOND)
    assert index.match(FIRST + SECOND + THIRD) == (8, {0})
    assert index.match(FIRST + THIRD + [7]) == (8, {1})
    assert index.match(FIRST + SECOND[:3]) == (4, {0, 1, 2})
    assert index.match(FIRST[:3]) == (0, set())
    assert index.match(THIRD) == (0, set())
    assert index.match([]) == (0, set())
    assert index.match(SECOND) == (4, {3}), "only what lies at the start counts"


def test_slots_grow_by_whole_runs():
    index = index_of(s0=FIRST + SECOND[:2])
    assert index.length(0) == 4
    index.extend(0, [*SECOND, 1])
    assert index.length(0) == 8
    assert index.match(FIRST + SECOND) == (8, {0})
    index.extend(1, FIRST[:2])
    assert (index.length(1), len(index)) == (0, 1)


def test_a_removed_slot_leaves_what_others_have():
    index = index_of(s0=FIRST + SECOND + THIRD, s1=FIRST + SECOND)
    index.remove(0)
    assert index.match(FIRST + SECOND + THIRD) == (8, {1})
    index.remove(0)
    index.remove(1)
    assert index.match(FIRST) == (0, set())
    assert len(index) == 0
    assert not index._root.children
    index.extend(0, THIRD)
    assert index.match(THIRD) == (4, {0})


def test_tokens_are_compared_not_only_their_hashes():
    """Python hashes an int modulo 2**61 - 1, so this token has the hash of 0 and these runs have the same one."""
    twin = 2**61 - 1
    true, false = [0, 5, 6, 7], [twin, 5, 6, 7]
    assert hash(tuple(true)) == hash(tuple(false))
    index = index_of(s0=true + SECOND)
    assert index.match(false + SECOND) == (0, set())
    index.extend(1, false + SECOND)
    assert index.match(true + SECOND) == (8, {0})
    assert index.match(false + SECOND) == (8, {1})
    assert not index.covering(0)


def test_who_covers_whom():
    index = index_of(s0=FIRST + SECOND, s1=FIRST, s2=FIRST + SECOND + THIRD, s3=FIRST + SECOND, s4=SECOND)
    assert index.covering(0) == {2, 3}
    assert index.covered(0) == {1, 3}
    assert index.covering(2) == set()
    assert index.covered(2) == {0, 1, 3}
    assert (index.covering(9), index.covered(9)) == (set(), set())


class Model:
    """What the index must answer, by comparing all tokens with all."""

    def __init__(self, run):
        self.run = run
        self.tokens = {}

    def whole(self, slot):
        tokens = self.tokens.get(slot, [])
        return tokens[: len(tokens) - len(tokens) % self.run]

    def match(self, tokens):
        for length in range(len(tokens) - len(tokens) % self.run, 0, -self.run):
            if slots := {slot for slot in self.tokens if self.whole(slot)[:length] == tokens[:length]}:
                return length, slots
        return 0, set()

    def covering(self, slot):
        mine = self.whole(slot)
        return {s for s in self.tokens if s != slot and mine and self.whole(s)[: len(mine)] == mine}

    def covered(self, slot):
        return {s for s in self.tokens if s != slot and self.whole(s) and slot in self.covering(s) | {s}}


TOKENS = st.lists(st.integers(0, 1), max_size=14)
SLOTS = st.integers(0, 4)


@settings(max_examples=300, deadline=None)
@given(
    run=st.integers(1, 4),
    calls=st.lists(
        st.one_of(
            st.tuples(st.just("extend"), SLOTS, TOKENS),
            st.tuples(st.just("remove"), SLOTS, st.just([])),
            st.tuples(st.just("match"), SLOTS, TOKENS),
        ),
        max_size=30,
    ),
)
def test_it_answers_as_comparing_all_with_all_does(run, calls):
    index, model = PrefixIndex(run), Model(run)
    for name, slot, tokens in calls:
        if name == "remove":
            index.remove(slot)
            model.tokens.pop(slot, None)
        elif name == "extend":
            # As requests do: whole runs are noted once, the rest comes again with the next tokens.
            model.tokens[slot] = model.tokens.get(slot, []) + tokens
            index.extend(slot, model.tokens[slot][index.length(slot) :])
        else:
            assert index.match(tokens) == model.match(tokens)
        assert index.length(slot) == len(model.whole(slot))
        assert index.covering(slot) == model.covering(slot)
        assert index.covered(slot) == model.covered(slot)
        assert len(index) == sum(bool(model.whole(slot)) for slot in model.tokens)
