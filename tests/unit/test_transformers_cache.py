"""`SlicedTransformersCache` in `model.generate`: the tokens of DynamicCache, views without copies, slots given back."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch

from slicedkv.errors import ConfigError, OutOfPagesError, OutOfSlotsError, StateError
from slicedkv.integrations.transformers import SlicedTransformersCache, cache_for_model

KIB = 1 << 10
LAYOUTS = ["sliced", "interleaved", "per_layer"]


def generate(model, ids, cache=None, **options):
    """Greedy tokens; transformers is renaming the argument `past_key_values` to `cache`."""
    settings = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    settings |= {"attention_mask": torch.ones_like(ids)} | options
    if cache is not None:
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        settings[name] = cache
    return model.generate(ids, **settings)


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
    first = cache._slots.start
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
    assert set(cache._slots) == {2, 3}
    other = SlicedTransformersCache(sliced)
    with pytest.raises(OutOfSlotsError, match="2 neighbouring slots"):
        other.update(new, new, 0)
    assert sliced.stats().active_slots == 4
    other.update(new[:1], new[:1], 0)
    assert sliced.step({1: 9, 4: 9})


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
    cache.update(new, new, 0)
    with pytest.raises(ConfigError, match="3 rows"):
        cache.update(torch.randn(3, 2, 1, 16), torch.randn(3, 2, 1, 16), 0)
    with pytest.raises(ConfigError, match="is 503"):
        cache.update(torch.randn(2, 2, 500, 16), torch.randn(2, 2, 500, 16), 0)
    with pytest.raises(ConfigError, match="batch_repeat_interleave"):
        cache.batch_repeat_interleave(2)
    with pytest.raises(ConfigError, match="batch_select_indices"):
        cache.batch_select_indices(torch.tensor([0]))
    with pytest.raises(ConfigError, match="copied"):
        copy.deepcopy(cache)
    assert repr(cache) == "SlicedTransformersCache(slots [0, 2), seq_len=3)"
    cache.close()
    cache.close()
    assert "closed" in repr(cache)
    with pytest.raises(StateError, match="closed"):
        cache.update(new, new, 0)


def test_cache_for_model(tiny_model):
    model = tiny_model("qwen2", torch.bfloat16)
    with cache_for_model(model, 3, 100, memory_limit="8MiB", page_bytes=64 * KIB) as cache:
        layout = cache.layout
        assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (3, 2, 16)
        assert (layout.max_batch_size, layout.max_seq_len, cache.dtype) == (3, 100, torch.bfloat16)
    with cache_for_model(model.config, 3, 100, memory_limit="8MiB", device="cpu", dtype="float16") as cache:
        assert cache.dtype == torch.float16


@pytest.mark.parametrize(
    ("family", "options", "named"),
    [
        ("mistral", {"sliding_window": 99}, "sliding window of 99"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "sliding window of 64"),
        ("llama", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping 30"),
        ("llama", {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention"),
        (
            "llama",
            {
                "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
                "max_position_embeddings": 64,
            },
            "rope_type 'dynamic'",
        ),
    ],
)
def test_models_that_are_not_plainly_causal_are_refused(family, options, named):
    import transformers

    kind = {"mistral": "MistralConfig", "qwen2": "Qwen2Config", "llama": "LlamaConfig"}[family]
    config = getattr(transformers, kind)(num_hidden_layers=3, **options)
    with pytest.raises(ConfigError, match=named):
        cache_for_model(config, 2, 100, device="cpu")


def test_a_window_as_long_as_the_cache_is_no_window(over, tiny_model):
    import transformers

    config = transformers.MistralConfig(num_hidden_layers=1, sliding_window=100)
    cache_for_model(config, 2, 100, device="cpu", dtype="float16", memory_limit="4MiB").close()
