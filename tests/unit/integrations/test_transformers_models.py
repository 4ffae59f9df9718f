"""What `cache_for_model` makes of a model's config, and the models it refuses."""

from __future__ import annotations

import pytest
import torch
import transformers
from tiny_models import WINDOWED, build, perturbed

from slicedkv.engine import Engine
from slicedkv.errors import ConfigError
from slicedkv.integrations.servable import layer_kinds
from slicedkv.integrations.transformers import SlicedTransformersCache, cache_for_model

KIB = 1 << 10
QWEN = {"use_sliding_window": True, "sliding_window": 64}


def test_cache_for_model(tiny_model):
    model = tiny_model("qwen2", torch.bfloat16)
    with cache_for_model(model, 3, 100, memory_limit="8MiB", page_bytes=64 * KIB) as cache:
        layout = cache.layout
        assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (3, 2, 16)
        assert (layout.max_batch_size, layout.max_seq_len, cache.dtype) == (3, 100, torch.bfloat16)
    with cache_for_model(model.config, 3, 100, memory_limit="8MiB", device="cpu", dtype="float16") as cache:
        assert cache.dtype == torch.float16


@pytest.mark.parametrize(
    ("name", "options", "heads"),
    [
        ("FalconConfig", {}, 1),
        ("FalconConfig", {"multi_query": False}, 71),
        ("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 8}, 71),
        ("GPTBigCodeConfig", {}, 1),
        ("BloomConfig", {}, 8),
        ("MptConfig", {}, 16),
    ],
)
def test_kv_heads_of_other_families(name, options, heads):
    """Those of what reaches the cache: newer Falcons repeat them before."""
    config = getattr(transformers, name)(**options)
    with cache_for_model(config, 1, 8, memory_limit="1MiB", device="cpu", page_bytes=4 * KIB) as cache:
        assert cache.layout.num_kv_heads == heads


@pytest.mark.parametrize(
    ("family", "options", "named"),
    [
        ("llama", {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention"),
        (
            "llama",
            {
                "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
                "max_position_embeddings": 64,
            },
            "rope_type 'dynamic'",
        ),
        (
            "gemma3",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
                "max_position_embeddings": 64,
            },
            "rope_type 'dynamic'",
        ),
        (
            "llama4",
            {"attention_chunk_size": None, "layer_types": ["full_attention"] * 3, "no_rope_layers": [1, 1, 0]},
            "attn_temperature_tuning",
        ),
    ],
)
def test_models_that_are_not_plainly_causal_are_refused(family, options, named):
    kind = {"llama": "LlamaConfig", "gemma3": "Gemma3TextConfig", "llama4": "Llama4TextConfig"}[family]
    config = getattr(transformers, kind)(num_hidden_layers=3, **options)
    with pytest.raises(ConfigError, match=named):
        cache_for_model(config, 2, 100, device="cpu")


@pytest.mark.parametrize(("config", "model", "options"), WINDOWED, ids=[model for _, model, _ in WINDOWED])
def test_windows_over_the_cache_give_the_tokens_of_generate(config, model, options):
    """The cache keeps all rows, and the model's own masks say who sees which."""
    model = perturbed(build(config, model, **options))
    ids = torch.tensor([list(range(4, 44)), list(range(50, 10, -1))])
    wanted = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 8}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **wanted)
    with cache_for_model(model, 2, 64, memory_limit="16MiB") as sliced, SlicedTransformersCache(sliced) as cache:
        found = model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, **wanted)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "options", "windows", "soft_cap"),
    [
        ("MistralConfig", {"sliding_window": 99}, [99, 99, 99], None),
        ("MistralConfig", {"sliding_window": 100}, [None] * 3, None),
        (
            "Qwen2Config",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            [None, 64, 64],
            None,
        ),
        ("Qwen2Config", {**QWEN, "use_sliding_window": False}, [None] * 3, None),
        ("Gemma2Config", {"sliding_window": 64}, [64, None, 64], 50.0),
        ("LlamaConfig", {}, [None] * 3, None),
    ],
)
def test_windows_are_read_from_a_config(name, options, windows, soft_cap):
    """A window as long as the longest text is none."""
    config = getattr(transformers, name)(num_hidden_layers=3, **options)
    assert layer_kinds(config, 100) == (windows, soft_cap)


def test_a_cap_that_layers_do_not_know_of_is_refused(tiny_model):
    model = tiny_model()
    model.config.attn_logit_softcapping = 30.0
    try:
        with pytest.raises(ConfigError, match=r"layer 0 asks for a cap on scores of None, .* config has 30\.0"):
            Engine(model, max_batch_size=2, max_seq_len=64, memory_limit="16MiB")
    finally:
        del model.config.attn_logit_softcapping
