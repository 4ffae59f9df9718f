"""What `cache_for_model` makes of a model's config, and the models it refuses."""

from __future__ import annotations

import pytest
import torch
import transformers

from slicedkv.errors import ConfigError
from slicedkv.integrations.transformers import cache_for_model

KIB = 1 << 10


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
    kinds = {"mistral": "MistralConfig", "qwen2": "Qwen2Config", "llama": "LlamaConfig", "gemma3": "Gemma3TextConfig"}
    kind = {**kinds, "llama4": "Llama4TextConfig"}[family]
    config = getattr(transformers, kind)(num_hidden_layers=3, **options)
    with pytest.raises(ConfigError, match=named):
        cache_for_model(config, 2, 100, device="cpu")


def test_a_window_as_long_as_the_cache_is_no_window():
    config = transformers.MistralConfig(num_hidden_layers=1, sliding_window=100)
    cache_for_model(config, 2, 100, device="cpu", dtype="float16", memory_limit="4MiB").close()
