"""`SlicedTransformersCache` in `model.generate`: the tokens of DynamicCache, views without copies, slots given back."""

from __future__ import annotations

import copy
import functools

import greedy
import pytest
import torch
from inside import fail_in_background
from rig import active

from slicedkv.errors import ConfigError, DriverError, OutOfPagesError, OutOfSlotsError, StateError
from slicedkv.integrations.transformers import SlicedTransformersCache

KIB = 1 << 10
LAYOUTS = ["sliced", "interleaved", "per_layer"]


generate = functools.partial(greedy.generate, max_new_tokens=40)


@pytest.fixture
def over(make_cache, tiny_model):
    """Open a cache for a model in the way `cache_for_model` would, through the checked fixture."""

    def make(model, **options):
        config = model.config
        geometry = {
            "num_layers": config.num_hidden_layers,
            "num_kv_heads": config.num_key_value_heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            "dtype": model.dtype,
        }
        return make_cache(**(geometry | {"page_bytes": 4 * KIB} | options))

    return make


def prompts(rows, length=9):
    return torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_tokens_equal_dynamic_cache(over, tiny_model, family, layout, rows):
    model, sliced = tiny_model(family), over(tiny_model(family), layout=layout)
    with SlicedTransformersCache(sliced) as cache:
        assert torch.equal(generate(model, prompts(rows), cache), generate(model, prompts(rows)))
        assert cache.get_seq_length() == 48
        assert cache.batch_size == rows
        assert cache.get_max_length() == 400
        stats = sliced.stats()
        assert stats.active_slots == rows
        assert stats.used_bytes == rows * 48 * sliced.layout.token_bytes
        assert stats.active_bytes >= rows * sliced.layout.bytes_for(48) > rows * sliced.layout.bytes_for(9)
    assert sliced.stats().active_slots == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_half_precision_and_eager(over, tiny_model, dtype, attention):
    model = tiny_model("llama", dtype)
    model.set_attn_implementation(attention)
    try:
        cache = SlicedTransformersCache(over(model))
        assert torch.equal(generate(model, prompts(2), cache), generate(model, prompts(2)))
    finally:
        model.set_attn_implementation("sdpa")


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_the_name_past_key_values_still_works(over, tiny_model):
    model = tiny_model()
    cache = SlicedTransformersCache(over(model))
    found = model.generate(
        prompts(1),
        past_key_values=cache,
        max_new_tokens=4,
        do_sample=False,
        eos_token_id=None,
        attention_mask=torch.ones(1, 9, dtype=torch.int64),
    )
    assert torch.equal(found, generate(model, prompts(1), max_new_tokens=4))
    assert cache.get_seq_length() == 12


def test_left_padded_batch(over, tiny_model):
    model, ids = tiny_model(), prompts(3)
    mask = torch.ones_like(ids)
    mask[0, :4], mask[2, :7] = 0, 0
    cache = SlicedTransformersCache(over(model))
    assert torch.equal(generate(model, ids, cache, attention_mask=mask), generate(model, ids, attention_mask=mask))


def test_sampling_and_beams(over, tiny_model):
    model, ids = tiny_model(), prompts(2)
    for options in (
        {"do_sample": True, "temperature": 0.8, "num_return_sequences": 2},
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 15},
    ):
        found = []
        for cache in (SlicedTransformersCache(over(model)), None):
            torch.manual_seed(3)
            found.append(generate(model, ids, cache, **options))
        assert torch.equal(*found)


def test_prompt_lookup_crops_the_cache(over, tiny_model):
    model, ids = tiny_model(), prompts(1, 5).repeat(1, 4)
    cache = SlicedTransformersCache(over(model))
    assert torch.equal(
        generate(model, ids, cache, prompt_lookup_num_tokens=3), generate(model, ids, prompt_lookup_num_tokens=3)
    )


def test_conversation_goes_on_in_the_same_cache(over, tiny_model):
    model, ids = tiny_model(), prompts(1)
    cache = SlicedTransformersCache(over(model))
    first = generate(model, ids, cache, max_new_tokens=8)
    longer = torch.cat([first, prompts(1, 6)], dim=1)
    assert torch.equal(generate(model, longer, cache, max_new_tokens=8), generate(model, longer, max_new_tokens=8))


def test_update_returns_views(over, tiny_model):
    sliced = over(tiny_model())
    cache = SlicedTransformersCache(sliced)
    new = torch.randn(2, 2, 5, 16)
    for layer in range(3):
        keys, values = cache.update(new, 2 * new, layer)
    first, _ = active(sliced)
    assert keys.shape == values.shape == (2, 2, 5, 16)
    assert keys.data_ptr() == sliced.k(2)[first].data_ptr()
    assert values.data_ptr() == sliced.v(2)[first].data_ptr()
    assert torch.equal(keys, new)
    assert torch.equal(values, 2 * new)


def test_crop_and_reset(over, tiny_model):
    sliced = over(tiny_model())
    cache = SlicedTransformersCache(sliced)
    new = torch.randn(1, 2, 10, 16)
    for layer in range(3):
        cache.update(new, new, layer)
    cache.crop(0)
    assert cache.get_seq_length() == 10
    cache.crop(-4)
    assert cache.get_seq_length() == 6
    cache.crop(20)
    assert cache.get_seq_length() == 6
    cache.crop(2)
    for layer in range(3):
        keys, _ = cache.update(-new[:, :, :1], new[:, :, :1], layer)
    assert torch.equal(keys, torch.cat([new[:, :, :2], -new[:, :, :1]], dim=2))
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.batch_size == -1
    assert sliced.stats().active_slots == 0
    cache.update(torch.randn(4, 2, 3, 16), torch.randn(4, 2, 3, 16), 0)
    assert sliced.stats().active_slots == 4


def test_rows_are_neighbours_among_taken_slots(over, tiny_model):
    sliced = over(tiny_model())
    taken = [sliced.alloc_reqid() for _ in range(6)]
    for reqid in set(taken) - {1, 4}:
        sliced.free_reqid(reqid)
    cache = SlicedTransformersCache(sliced)
    new = torch.randn(2, 2, 1, 16)
    cache.update(new, new, 0)
    assert active(sliced) == [1, 2, 3, 4]
    other = SlicedTransformersCache(sliced)
    with pytest.raises(OutOfSlotsError, match="2 neighbouring slots"):
        other.update(new, new, 0)
    assert sliced.stats().active_slots == 4
    other.update(new[:1], new[:1], 0)
    assert sliced.step({1: 9, 4: 9})


def test_slots_that_could_not_be_given_back_are_later(over, tiny_model):
    """A failure of the background shows in whatever call comes next, and that call does nothing."""
    sliced, new = over(tiny_model(), max_batch_size=4), torch.randn(2, 2, 1, 16)
    cache = SlicedTransformersCache(sliced)
    cache.update(new, new, 0)
    fail_in_background(sliced)
    with pytest.raises(DriverError):
        cache.close()
    cache.close()
    assert sliced.stats().active_slots == 0


def test_slots_taken_in_vain_are_given_back_after_a_failure(over, tiny_model, monkeypatch):
    sliced, new = over(tiny_model(), max_batch_size=4), torch.randn(2, 2, 1, 16)
    taken = [sliced.alloc_reqid() for _ in range(4)]
    for reqid in {0, 2, 3}:
        sliced.free_reqid(taken[reqid])
    alloc, calls = sliced.alloc_reqid, []

    def alloc_with_news():
        calls.append(alloc())
        if len(calls) == 3:
            fail_in_background(sliced)
        return calls[-1]

    monkeypatch.setattr(sliced, "alloc_reqid", alloc_with_news)
    cache = SlicedTransformersCache(sliced)
    with pytest.raises(DriverError):
        cache.update(new, new, 0)
    keys, _ = cache.update(new, new, 0)
    assert torch.equal(keys, new)
    cache.close()
    assert sliced.stats().active_slots == 1


def test_rows_that_others_share_are_not_written_again(over, tiny_model):
    """Cropped or reordered, a batch writes rows once more; a fork keeps what it had."""
    sliced = over(tiny_model(), extent_pages=1)
    cache = SlicedTransformersCache(sliced)
    old, new = torch.randn(2, 2, 100, 16), torch.randn(2, 2, 20, 16)
    for layer in range(3):
        cache.update(old, old, layer)
    first, _ = active(sliced)
    (fork,) = sliced.fork(first)
    cache.crop(-50)
    for layer in range(3):
        cache.update(new, new, layer)
    assert torch.equal(sliced.k(2)[fork, :100].transpose(0, 1), old[0])
    (other,) = sliced.fork(first)
    before = sliced.k(2)[other, :70].clone()
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(sliced.k(2)[other, :70], before)
    assert torch.equal(cache.update(new, new, 2)[0][0, :, :50], old[1, :, :50])
    for reqid in (fork, other):
        sliced.free_reqid(reqid)


def test_memory_runs_out_with_numbers_and_the_cache_lives_on(over, tiny_model):
    sliced = over(tiny_model(), memory_limit=16 * 4 * KIB, max_seq_len=4000)
    cache = SlicedTransformersCache(sliced)
    small, large = torch.randn(1, 2, 4, 16), torch.randn(1, 2, 3000, 16)
    cache.update(small, small, 0)
    with pytest.raises(OutOfPagesError, match="raise memory_limit") as caught:
        cache.update(large, large, 0)
    assert caught.value.requested > caught.value.available
    keys, _ = cache.update(small, small, 0)
    assert torch.equal(keys, torch.cat([small, small], dim=2))


def test_refusals(over, tiny_model):
    sliced = over(tiny_model())
    cache = SlicedTransformersCache(sliced)
    new = torch.randn(2, 2, 3, 16)
    with pytest.raises(ConfigError, match="float16"):
        cache.update(new.half(), new.half(), 0)
    with pytest.raises(ConfigError, match="a layer 3 and the cache 3 layers"):
        cache.update(new, new, 3)
    with pytest.raises(ConfigError, match=r"K is \[2, 1, 3, 16\], and the cache has rows of 2 KV heads of 16"):
        cache.update(new[:, :1], new[:, :1], 0)
    with pytest.raises(ConfigError, match="0 rows"):
        cache.update(new[:0], new[:0], 0)
    cache.update(new, new, 0)
    with pytest.raises(ConfigError, match="3 rows"):
        cache.update(torch.randn(3, 2, 1, 16), torch.randn(3, 2, 1, 16), 0)
    with pytest.raises(ConfigError, match="is 503"):
        cache.update(torch.randn(2, 2, 500, 16), torch.randn(2, 2, 500, 16), 0)
    for states in (new[..., :8], new[:, :1], new[:1], new[:, :, :1], new[0], new.half(), new.to("meta")):
        with pytest.raises(ConfigError, match="V "):
            cache.update(new, states, 0)
    with pytest.raises(ConfigError, match="on meta"):
        cache.update(new.to("meta"), new.to("meta"), 0)
    with pytest.raises(ConfigError, match="repeats is 0"):
        cache.batch_repeat_interleave(0)
    with pytest.raises(ConfigError, match="no row"):
        cache.batch_select_indices(torch.tensor([], dtype=torch.int64))
    assert cache.get_seq_length() == 3
    assert repr(cache) == "SlicedTransformersCache(slots [0, 2), seq_len=3)"
    cache.close()
    cache.close()
    assert "closed" in repr(cache)
    for call in (lambda: cache.update(new, new, 0), lambda: copy.deepcopy(cache)):
        with pytest.raises(StateError, match="closed"):
            call()
