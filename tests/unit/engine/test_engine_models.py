"""Architectures of transformers: the engine gives the tokens of `generate` alone, or refuses to open and says why."""

from __future__ import annotations

import pytest
from tiny_models import CAUSAL, DYNAMIC, LONGROPE, WINDOWED, alone, build, perturbed

from slicedkv.engine import Engine, SamplingParams
from slicedkv.errors import ConfigError

MAX_TOKENS = 8
PROMPTS = [[5, 9, 14, 3, 33, 21, 8], list(range(4, 44)), [20, 7, 7]]


def open_engine(model, **options):
    defaults = {"max_batch_size": 2, "max_seq_len": 64, "memory_limit": "16MiB", "max_tokens_per_step": 16}
    return Engine(model, **(defaults | options))


SERVED = [
    ("Llama", "LlamaForCausalLM", {}),
    ("Llama", "LlamaForCausalLM", {"rope_parameters": {**DYNAMIC}, "max_position_embeddings": 64}),
    ("Qwen2Moe", "Qwen2MoeForCausalLM", {}),
    ("GPT2", "GPT2LMHeadModel", {}),
    ("GPTJ", "GPTJForCausalLM", {"rotary_dim": 8}),
    ("GPTNeoX", "GPTNeoXForCausalLM", {}),
    ("Cohere", "CohereForCausalLM", {}),
    ("Olmo2", "Olmo2ForCausalLM", {}),
    ("Gemma3Text", "Gemma3ForCausalLM", {"sliding_window": 64}),
    ("Ministral3", "Ministral3ForCausalLM", {"sliding_window": 64}),
    ("Phi3", "Phi3ForCausalLM", {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 64}}),
    ("BioGpt", "BioGptForCausalLM", {}),
    ("Bert", "BertLMHeadModel", CAUSAL),
    (
        "Llama4Text",
        "Llama4ForCausalLM",
        {
            "attention_chunk_size": None,
            "attn_temperature_tuning": False,
            "no_rope_layers": [1, 0],
            "layer_types": ["full_attention"] * 2,
        },
    ),
]


def names(cases):
    return [f"{model}-{i}" for i, (_, model, *_) in enumerate(cases)]


@pytest.mark.parametrize(("config", "model", "options"), SERVED, ids=names(SERVED))
def test_served_with_the_tokens_of_the_model_alone(config, model, options):
    model = build(config, model, **options)
    expected = [alone(model, prompt, MAX_TOKENS) for prompt in PROMPTS]
    with open_engine(model) as engine:
        assert engine.generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)) == expected


@pytest.mark.parametrize(("config", "model", "options"), WINDOWED, ids=names(WINDOWED))
def test_windows_caps_and_sinks_are_served_with_the_tokens_of_the_model_alone(config, model, options):
    """Prompts up to five windows long, in chunks of two, unequal requests together."""
    model = perturbed(build(config, model, **options))
    expected = [alone(model, prompt, MAX_TOKENS) for prompt in PROMPTS]
    with open_engine(model) as engine:
        assert engine.generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)) == expected


@pytest.mark.parametrize("name", ["reference", pytest.param("triton", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("config", "model", "options"), [WINDOWED[6], WINDOWED[10]], ids=["caps", "sinks"])
def test_other_backends_serve_them_too(config, model, options, name):
    model = perturbed(build(config, model, **options))
    expected = [alone(model, prompt, 3) for prompt in PROMPTS]
    with open_engine(model, backend=name) as engine:
        assert engine.generate(PROMPTS, SamplingParams(max_tokens=3, ignore_eos=True)) == expected


ONE_OF_A_KIND = [WINDOWED[0], WINDOWED[6], WINDOWED[10]]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize(("config", "model", "options"), ONE_OF_A_KIND, ids=names(ONE_OF_A_KIND))
def test_windows_when_memory_is_short_and_prefixes_are_shared(config, model, options, preemption):
    model = perturbed(build(config, model, **options))
    growing, sharing = [PROMPTS[0], PROMPTS[2]], [PROMPTS[1], [*PROMPTS[1][:36], 9]]
    expected = [alone(model, prompt, 40) for prompt in growing] + [alone(model, prompt, 6) for prompt in sharing]
    limits = {"max_batch_size": 3, "page_bytes": 4096, "memory_limit": 9 * 4096}
    with open_engine(model, prefix_cache=0.9, preemption=preemption, **limits) as engine:
        found = engine.generate(growing, SamplingParams(max_tokens=40, ignore_eos=True))
        assert engine.scheduler.num_preemptions > 0
        for prompt in sharing:
            found += engine.generate([prompt], SamplingParams(max_tokens=6, ignore_eos=True))
        assert engine.scheduler.admission.num_cached_tokens > 0
        assert found == expected


NO_POSITIONS = "its forward takes no position_ids"
OWN_ATTENTION = "it computes attention in code of its own"
KEEPS_ARGUMENTS = "does not hand its arguments on to its attention layers"
NESTED = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}
TUNED = {"attention_chunk_size": None, "no_rope_layers": [1, 0], "layer_types": ["full_attention"] * 2}
REFUSED = [
    ("DiffLlama", "DiffLlamaForCausalLM", {}, "layer 0 attends 2 times in one forward"),
    ("Dory", "DoryForCausalLM", {"num_hidden_layers": 4}, "layer 0 attends 2 times in one forward"),
    ("HrmText", "HrmTextForCausalLM", {}, "layer 0 attends 2 times in one forward"),
    ("Bart", "BartForCausalLM", CAUSAL, NO_POSITIONS),
    ("MBart", "MBartForCausalLM", CAUSAL, NO_POSITIONS),
    ("Marian", "MarianForCausalLM", CAUSAL, NO_POSITIONS),
    ("Pegasus", "PegasusForCausalLM", CAUSAL, NO_POSITIONS),
    ("Blenderbot", "BlenderbotForCausalLM", CAUSAL, NO_POSITIONS),
    ("BlenderbotSmall", "BlenderbotSmallForCausalLM", CAUSAL, NO_POSITIONS),
    ("PLBart", "PLBartForCausalLM", CAUSAL, NO_POSITIONS),
    ("BigBirdPegasus", "BigBirdPegasusForCausalLM", CAUSAL, NO_POSITIONS),
    ("Mvp", "MvpForCausalLM", CAUSAL, NO_POSITIONS),
    ("TrOCR", "TrOCRForCausalLM", CAUSAL, NO_POSITIONS),
    ("Whisper", "WhisperForCausalLM", CAUSAL, r"layers\.0\.encoder_attn attends to more than the tokens before"),
    ("XGLM", "XGLMForCausalLM", {}, OWN_ATTENTION),
    ("Falcon", "FalconForCausalLM", {}, OWN_ATTENTION),
    ("Bloom", "BloomForCausalLM", {}, NO_POSITIONS),
    ("Mpt", "MptForCausalLM", {}, NO_POSITIONS),
    ("GPTNeo", "GPTNeoForCausalLM", {"attention_types": [[["global"], 2]]}, OWN_ATTENTION),
    ("StableLm", "StableLmForCausalLM", {}, KEEPS_ARGUMENTS),
    ("Nemotron", "NemotronForCausalLM", {}, KEEPS_ARGUMENTS),
    ("OPT", "OPTForCausalLM", {}, "layer 0 scales by 1.0, the backend by 0.25"),
    ("MiMoV2Flash", "MiMoV2FlashForCausalLM", {**NESTED, "v_head_dim": 16}, r"k has shape \(5, 4, 16\)"),
    ("MiMoV2Flash", "MiMoV2FlashForCausalLM", NESTED, r"v has shape \(5, 2, 128\)"),
    ("Doge", "DogeForCausalLM", {}, "no mask"),
    (
        "Gemma4Text",
        "Gemma4ForCausalLM",
        {
            "sliding_window": 64,
            "global_head_dim": 32,
            "vocab_size_per_layer_input": 61,
            "hidden_size_per_layer_input": 8,
        },
        r"layers have configs of their own \(head_dim \[16, 32\]\)",
    ),
    ("Llama4Text", "Llama4ForCausalLM", TUNED, "attn_temperature_tuning"),
    (
        "Gemma3Text",
        "Gemma3ForCausalLM",
        {
            "sliding_window": 64,
            "rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": DYNAMIC},
            "max_position_embeddings": 32,
        },
        "rope_type 'dynamic'",
    ),
    (
        "Gemma3Text",
        "Gemma3ForCausalLM",
        {"sliding_window": 64, "rope_parameters": {"full_attention": LONGROPE, "sliding_attention": LONGROPE}},
        "rope_type 'longrope'",
    ),
    ("Bert", "BertLMHeadModel", {}, "attends to more than the tokens before"),
    ("GPT2", "GPT2LMHeadModel", {"max_position_embeddings": 63}, "a table of 63 positions .*use max_seq_len <= 63"),
    ("Llama", "LlamaModel", {}, "LlamaModel has no language model head"),
    ("Llama", "LlamaForSequenceClassification", {}, "LlamaForSequenceClassification has no language model head"),
]


@pytest.mark.parametrize(("config", "model", "options", "reason"), REFUSED, ids=names(REFUSED))
def test_refused_when_opened_with_the_true_reason(config, model, options, reason):
    model = build(config, model, **options)
    former = model.config._attn_implementation
    with pytest.raises(ConfigError, match=reason):
        open_engine(model)
    assert model.config._attn_implementation == former


def test_a_config_that_was_changed_after_loading_does_not_hide_what_the_layers_do():
    model = build("Llama4Text", "Llama4ForCausalLM", **TUNED)
    model.config.attn_temperature_tuning = False
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn has attn_temperature_tuning"):
        open_engine(model)
