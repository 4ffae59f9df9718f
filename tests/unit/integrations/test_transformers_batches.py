"""`SlicedTransformersCache` as a container: what it shows of its rows, and batches that are copied, repeated and cut.

Everything is done to a `DynamicCache` too, and the two must show the same afterwards.
"""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from rig import active
from transformers import DynamicCache

from slicedkv.errors import ConfigError, OutOfPagesError, OutOfSlotsError
from slicedkv.integrations.transformers import SlicedTransformersCache

LAYOUTS = ["sliced", "interleaved", "per_layer"]
OPTIONS = {"page_bytes": 4096, "extent_pages": 1, "max_batch_size": 12}


class Both:
    """A cache and a `DynamicCache` to compare with."""

    def __init__(self, sliced, rows=3, length=70):
        self.random = torch.Generator().manual_seed(4)
        self.cache, self.plain = SlicedTransformersCache(sliced), DynamicCache()
        self.update(rows, length)

    def update(self, rows, length=5):
        for layer in range(3):
            k, v = (torch.randn(rows, 2, length, 16, generator=self.random) for _ in range(2))
            for found, expected in zip(self.cache.update(k, v, layer), self.plain.update(k, v, layer), strict=True):
                assert torch.equal(found, expected)

    def do(self, call):
        call(self.cache)
        call(self.plain)
        self.compare()

    def compare(self):
        assert len(self.cache) == len(self.plain) == 3
        for found, expected in zip(self.cache, self.plain, strict=True):
            assert torch.equal(found[0], expected[0])
            assert torch.equal(found[1], expected[1])
            assert found[2:] == expected[2:]


CALLS = {
    "repeat": (lambda c: c.batch_repeat_interleave(3), 9),
    "repeat once": (lambda c: c.batch_repeat_interleave(1), 3),
    "select": (lambda c: c.batch_select_indices(torch.tensor([2, 0])), 2),
    "select all anew": (lambda c: c.batch_select_indices(torch.tensor([1, 2, 0])), 3),
    "select from behind": (lambda c: c.batch_select_indices(torch.tensor([-1])), 1),
    "select by mask": (lambda c: c.batch_select_indices(torch.tensor([True, False, True])), 2),
    "select more": (lambda c: c.batch_select_indices(torch.tensor([2, 2, 1, 0, 0])), 5),
    "reorder": (lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), 3),
    "reorder to more": (lambda c: c.reorder_cache(torch.tensor([1, 0, 2, 1])), 4),
    "reorder to fewer": (lambda c: c.reorder_cache(torch.tensor([2, 1])), 2),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_change_as_dynamic_cache_does(make_cache, layout, call):
    sliced = make_cache(layout=layout, **OPTIONS)
    both, (change, rows) = Both(sliced), CALLS[call]
    both.do(change)
    assert both.cache.batch_size == rows
    assert sliced.stats().active_slots == rows
    both.update(rows)
    both.do(lambda c: c.crop(-20))
    both.update(rows, 30)
    sliced.check_integrity()


@pytest.mark.parametrize("taken", [[0], [5], [0, 4, 8]])
def test_batches_change_among_slots_of_others(make_cache, taken):
    sliced = make_cache(**OPTIONS)
    others = [sliced.alloc_reqid() for _ in range(12)]
    for reqid in set(others) - set(taken):
        sliced.free_reqid(reqid)
    both = Both(sliced, rows=1)
    both.do(lambda c: c.batch_repeat_interleave(3))
    both.update(3)
    both.do(lambda c: c.batch_select_indices(torch.tensor([2, 1])))
    assert sliced.stats().active_slots == 2 + len(taken)
    assert all(map(sliced.is_active, taken))


def test_a_batch_grows_into_all_slots(make_cache):
    """Its own are among them: as many as the batch will have are enough."""
    both = Both(make_cache(**OPTIONS | {"max_batch_size": 4}), rows=2)
    both.do(lambda c: c.batch_repeat_interleave(2))
    both.update(4)


@pytest.mark.parametrize("head_dim", [16, 170, 172, 256])
@pytest.mark.parametrize("change", [change for change, _ in CALLS.values()], ids=CALLS)
def test_others_keep_the_rows_they_share(make_cache, change, head_dim):
    """From the first on, however rows lie in pages."""
    sliced = make_cache(**OPTIONS | {"head_dim": head_dim, "max_batch_size": 16})
    cache, new = SlicedTransformersCache(sliced), torch.randn(3, 2, 20, head_dim)
    for layer in range(3):
        cache.update(new, new, layer)
    forks = [sliced.fork(slot)[0] for slot in active(sliced)]
    change(cache)
    rows = cache.batch_size
    for layer in range(3):
        cache.update(torch.zeros(rows, 2, 5, head_dim), torch.zeros(rows, 2, 5, head_dim), layer)
    cache.crop(-25)
    cache.update(torch.zeros(rows, 2, 5, head_dim), torch.zeros(rows, 2, 5, head_dim), 0)
    for fork, expected in zip(forks, new, strict=True):
        for layer in range(3):
            assert torch.equal(sliced.k(layer)[fork, :20].transpose(0, 1), expected)
            assert torch.equal(sliced.v(layer)[fork, :20].transpose(0, 1), expected)


def test_repeated_rows_share_their_pages(make_cache):
    sliced = make_cache(**OPTIONS)
    both = Both(sliced, rows=1, length=300)
    before = sliced.stats().active_bytes
    both.do(lambda c: c.batch_repeat_interleave(4))
    assert sliced.stats().active_bytes < 1.3 * before


def test_what_does_not_fit_changes_nothing(make_cache):
    sliced = make_cache(**OPTIONS)
    both, taken = Both(sliced), [sliced.alloc_reqid() for _ in range(4)]
    with pytest.raises(OutOfSlotsError, match="12 neighbouring slots"):
        both.cache.batch_repeat_interleave(4)
    both.compare()
    assert sliced.stats().active_slots == 7
    for reqid in taken:
        sliced.free_reqid(reqid)
    both.do(lambda c: c.batch_repeat_interleave(4))


def test_no_memory_for_more_rows_changes_nothing(make_cache):
    sliced = make_cache(**OPTIONS | {"memory_limit": 44 * 4096, "mapper": "sync", "lookahead_tokens": 0})
    both = Both(sliced, rows=3, length=70)
    with pytest.raises(OutOfPagesError, match="raise memory_limit"):
        both.cache.batch_repeat_interleave(4)
    both.compare()
    assert sliced.stats().active_slots == both.cache.batch_size == 3
    both.update(3, 1)


def test_rows_that_do_not_exist_are_refused(make_cache):
    both = Both(make_cache(**OPTIONS))
    for call in (
        lambda: both.cache.batch_select_indices(torch.tensor([3])),
        lambda: both.cache.reorder_cache(torch.tensor([3, 0])),
    ):
        with pytest.raises(IndexError):
            call()
    with pytest.raises(ConfigError, match="no row"):
        both.cache.batch_select_indices(torch.tensor([False] * 3))
    both.compare()


def test_an_empty_cache_takes_any_batch_afterwards(make_cache):
    sliced = make_cache(**OPTIONS)
    for change, _ in CALLS.values():
        cache = SlicedTransformersCache(sliced)
        assert [layer.keys for layer in cache.layers] == [None] * 3
        assert list(cache) == [(None, None, None)] * 3
        change(cache)
        cache.update(torch.ones(5, 2, 4, 16), torch.ones(5, 2, 4, 16), 0)
        cache.close()


def test_layers_show_views_of_what_is_cached(make_cache):
    sliced = make_cache(**OPTIONS)
    both = Both(sliced)
    layer = both.cache.layers[1]
    assert layer.keys.shape == layer.values.shape == (3, 2, 70, 16)
    assert layer.keys.data_ptr() == sliced.k(1)[active(sliced)[0]].data_ptr()
    layer.values[0, 1, 3] = 5
    both.plain.layers[1].values[0, 1, 3] = 5
    both.compare()
    both.do(lambda c: c.crop(-60))
    both.cache.reset()
    assert layer.keys is layer.values is None
    assert not both.cache.is_initialized


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_goes_its_own_way(make_cache, layout, rows):
    sliced = make_cache(layout=layout, **OPTIONS)
    both = Both(sliced, rows)
    twin = copy.copy(both)
    twin.cache, twin.plain = copy.deepcopy((both.cache, both.plain))
    assert twin.cache is not both.cache
    assert sliced.stats().active_slots == 2 * rows
    assert sliced.stats().saved_bytes > 0
    for one in (twin, both):
        one.compare()
        one.do(lambda c: c.crop(-30))
        one.update(rows, 8)
        one.do(lambda c: c.reorder_cache(torch.arange(rows).flip(0)))
    twin.compare()
    twin.cache.close()
    both.compare()
    both.update(rows)


def test_a_prompt_is_computed_once_and_continued_from_copies(make_cache, tiny_model):
    """As transformers' documentation reuses a prompt; copies that are dropped give their slots back."""
    model, sliced = tiny_model(), make_cache(**OPTIONS | {"max_batch_size": 3})
    prompt = torch.randint(3, 61, (1, 40), generator=torch.Generator().manual_seed(2))
    cache, plain = SlicedTransformersCache(sliced), DynamicCache()
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for kept in (cache, plain):
        model.generate(prompt, cache=kept, **options | {"max_new_tokens": 1})
    for token in range(6):
        ids = torch.cat([prompt, torch.full((1, 2), 5 + token)], dim=1)
        found, expected = (model.generate(ids, cache=copy.deepcopy(kept), **options) for kept in (cache, plain))
        assert torch.equal(found, expected)
    assert cache.get_seq_length() == 40


def test_dropped_caches_give_their_slots_back_to_the_next(make_cache):
    sliced = make_cache(**OPTIONS)
    for _ in range(5):
        Both(sliced, rows=4)
    assert sliced.stats().active_slots <= 8
    kept = Both(sliced, rows=5)
    layer = kept.cache.layers[0]
    del kept
    gc.collect()
    other = Both(sliced, rows=5)
    assert layer.keys.shape == (5, 2, 70, 16), "a layer that somebody has is not dropped"
    other.compare()


def test_a_copy_without_slots_or_memory_leaves_nothing_behind(make_cache):
    sliced = make_cache(**OPTIONS | {"max_batch_size": 5})
    both = Both(sliced)
    with pytest.raises(OutOfSlotsError, match="3 neighbouring slots"):
        copy.deepcopy(both.cache)
    assert sliced.stats().active_slots == 3
    both.update(3)
