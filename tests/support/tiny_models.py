"""Models of any architecture of transformers, tiny and random."""

from __future__ import annotations

import torch
import transformers

# Each config takes the names that it knows.
_SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "embed_dim": 64,
    "d_model": 64,
    "n_embd": 64,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "ffn_hidden_size": 64,
    "n_inner": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "intermediate_size_mlp": 64,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "decoder_layers": 2,
    "encoder_layers": 1,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "max_seq_len": 256,
    "max_target_positions": 256,
    "word_embed_proj_dim": 64,
    "embedding_size": 64,
    # Weights this large keep the likeliest token apart from the second.
    "initializer_range": 0.3,
    "init_std": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CAUSAL = {"is_decoder": True, "is_encoder_decoder": False}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
LONGROPE |= {"original_max_position_embeddings": 32, "partial_rotary_factor": 1.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
WINDOW = 8
SLIDING = {"sliding_window": WINDOW}
MIXED = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
WINDOWED = [
    ("Mistral", "MistralForCausalLM", SLIDING),
    ("Mixtral", "MixtralForCausalLM", SLIDING),
    ("Ministral", "MinistralForCausalLM", MIXED),
    ("Ministral3", "Ministral3ForCausalLM", SLIDING),
    ("Qwen2", "Qwen2ForCausalLM", {"use_sliding_window": True, **MIXED}),
    ("Qwen3", "Qwen3ForCausalLM", {"use_sliding_window": True, **MIXED}),
    ("Gemma2", "Gemma2ForCausalLM", {**MIXED, "query_pre_attn_scalar": 16}),
    ("Gemma3Text", "Gemma3ForCausalLM", {**MIXED, "query_pre_attn_scalar": 16}),
    ("VaultGemma", "VaultGemmaForCausalLM", {**MIXED, "query_pre_attn_scalar": 16}),
    ("Phi3", "Phi3ForCausalLM", SLIDING),
    ("GptOss", "GptOssForCausalLM", MIXED),
    ("Olmo3", "Olmo3ForCausalLM", MIXED),
    ("Cohere2", "Cohere2ForCausalLM", MIXED),
    ("Starcoder2", "Starcoder2ForCausalLM", SLIDING),
    ("Exaone4", "Exaone4ForCausalLM", MIXED),
    ("Cwm", "CwmForCausalLM", MIXED),
]
"""Sliding windows, alone and beside full layers; soft caps (Gemma 2, VaultGemma) and sinks (gpt-oss)."""


def build(config, model, **options):
    """A model of random weights, of two classes' names; an option named as a size replaces it."""
    config_class, model_class = getattr(transformers, f"{config}Config"), getattr(transformers, model)
    fields = {**config_class().to_dict(), **dict.fromkeys(config_class.attribute_map)}
    sizes = {name: value for name, value in _SIZES.items() if name in fields}
    torch.manual_seed(3)
    found = model_class(config_class(**(sizes | options)))
    assert sum(part.numel() for part in found.parameters()) < 4e6, "not tiny"
    return found.float().eval()


def perturbed(model, seed=5):
    """The model with every parameter moved, so that none is a neutral 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def alone(model, prompt, max_tokens):
    """Greedy tokens of `generate` for one prompt."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": max_tokens}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
