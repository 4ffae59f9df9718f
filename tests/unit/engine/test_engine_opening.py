"""What an engine does to a model when it opens and closes, and what it says of the model."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from tiny_models import DYNAMIC

from slicedkv.attention.triton import TritonBackend
from slicedkv.engine import Engine, SamplingParams, opening
from slicedkv.engine import probe as probing
from slicedkv.engine.graphs import DecodeGraphs
from slicedkv.errors import BackendUnavailableError, ConfigError, DriverError, StateError
from slicedkv.integrations.servable import moving_rope

FREE = SamplingParams(max_tokens=4, ignore_eos=True)
OPTIONS = {"max_batch_size": 2, "max_seq_len": 64, "memory_limit": "16MiB"}


@pytest.fixture(scope="module")
def llava():
    """A model of several parts: the text's attention is sdpa, the picture's eager."""
    text = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"model_type": "llama", "vocab_size": 61, "num_key_value_heads": 2, "initializer_range": 0.3}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, "projection_dim": 32}
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=60)
    torch.manual_seed(3)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager"})
    return model


def attentions(model):
    return {
        name: module.config._attn_implementation for name, module in model.named_modules() if hasattr(module, "config")
    }


def test_each_part_gets_its_own_attention_back(llava):
    before = attentions(llava)
    assert set(before.values()) == {"sdpa", "eager"}
    ids = torch.tensor([[5, 6, 7, 30]])
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = llava.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, 4:].tolist()
    with Engine(llava, **OPTIONS) as engine:
        assert attentions(llava) != before
        assert engine.generate([[5, 6, 7, 30]], FREE) == [expected]
    assert attentions(llava) == before


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("attention_scale", ConfigError("no scale")),
        ("open_backend", BackendUnavailableError("no kernels")),
        ("ModelRunner", ConfigError("no graphs")),
        ("probe", DriverError("map", 1, "CUDA_ERROR_UNKNOWN")),
        ("probe", KeyboardInterrupt()),
    ],
)
def test_each_part_gets_it_back_when_opening_fails_half_way(llava, monkeypatch, place, error):
    def fail(*_, **__):
        raise error

    opened = []
    open_cache = opening.cache_for_model
    monkeypatch.setattr(opening, "cache_for_model", lambda *a, **k: opened.append(open_cache(*a, **k)) or opened[-1])
    before = attentions(llava)
    with monkeypatch.context() as context:
        context.setattr(opening, place, fail)
        with pytest.raises(type(error)):
            Engine(llava, **OPTIONS)
    assert attentions(llava) == before
    assert [cache.closed for cache in opened] == [True]


def test_tokens_that_stand_for_a_picture_are_not_probed_with(llava, monkeypatch):
    """Whichever part's config names them."""
    for token in probing._tokens(llava, 7, 0):
        monkeypatch.setattr(llava.config, "image_token_index", token)
        assert token not in probing._tokens(llava, 7, 0)


def test_attention_that_fails_to_be_set_is_set_back(llava, monkeypatch):
    before = attentions(llava)
    monkeypatch.setattr(type(llava.model.vision_tower), "get_correct_attn_implementation", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Engine(llava, **OPTIONS)
    assert attentions(llava) == before


def test_a_part_that_another_engine_uses_is_enough(llava):
    with Engine(llava, **OPTIONS), pytest.raises(StateError, match="another engine uses the model"):
        Engine(llava, **OPTIONS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it loads its compiler
def test_compiled_models_are_refused(tiny_model):
    model = copy.deepcopy(tiny_model())
    with pytest.raises(ConfigError, match=r"wrapped by torch\.compile; pass the model itself \(its _orig_mod\)"):
        Engine(torch.compile(model), **OPTIONS)
    model.model.layers[0].compile()
    with pytest.raises(ConfigError, match="compiled in place"):
        Engine(model, **OPTIONS)


def test_what_is_no_model_is_refused(tiny_model):
    for other in (torch.nn.DataParallel(tiny_model()), None, "llama"):
        with pytest.raises(ConfigError, match=f"the model is a {type(other).__name__}"):
            Engine(other, **OPTIONS)


def test_a_scale_that_only_the_backend_lacks_can_be_given(tiny_model):
    """The message of the refusal says so; the layer's own is what `generate` uses."""
    from slicedkv.attention import open_backend
    from slicedkv.integrations.transformers import cache_for_model

    model = tiny_model()
    with cache_for_model(model, 2, 64, memory_limit="16MiB") as cache:
        backend = open_backend("sdpa", cache, num_qo_heads=4, scale=1.0)
        with pytest.raises(ConfigError, match=r"layer 0 scales by 0\.25, the backend by 1\.0"):
            Engine(model, cache=cache, backend=backend)


NESTED = {"full_attention": {**DYNAMIC}, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}


@pytest.mark.parametrize(
    ("rope", "found"),
    [
        (None, []),
        ({"rope_type": "llama3", "factor": 2.0}, []),
        ({**DYNAMIC}, [("dynamic", 32)]),
        ({**DYNAMIC, "original_max_position_embeddings": 16}, [("dynamic", 16)]),
        ({**DYNAMIC, "original_max_position_embeddings": 128}, [("dynamic", 32)]),
        ({"rope_type": "longrope", "original_max_position_embeddings": 128}, [("longrope", 128)]),
        ({"type": "dynamic"}, [("dynamic", 32)]),
        (NESTED, [("dynamic", 32)]),
        ({"full_attention": None, "sliding_attention": {"rope_type": "longrope"}}, [("longrope", 32)]),
    ],
)
def test_rotary_kinds_that_move_are_found_at_every_depth(tiny_model, rope, found):
    config = copy.deepcopy(tiny_model().config)
    config.max_position_embeddings = 32
    config.__dict__["rope_parameters"] = rope
    assert list(moving_rope(config)) == found


def test_nested_rotary_kinds_stand_in_the_way_of_graphs(make_engine, tiny_model, monkeypatch):
    monkeypatch.setattr(TritonBackend, "captures", True)
    model = copy.deepcopy(tiny_model())
    engine = make_engine(model, max_batch_size=2, max_seq_len=64, cuda_graphs=False, backend="triton", probe=False)
    assert DecodeGraphs.obstacle(model, engine.backend) is None
    model.config.__dict__["rope_parameters"] = NESTED
    assert "rope_type 'dynamic' looks at the positions" in str(DecodeGraphs.obstacle(model, engine.backend))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"repetition_penalty": 1.3}, ["repetition_penalty=1.3"]),
        ({"no_repeat_ngram_size": 2, "suppress_tokens": [5]}, ["no_repeat_ngram_size=2", "suppress_tokens=[5]"]),
        ({"bad_words_ids": [[4]], "forced_bos_token_id": 3}, ["bad_words_ids=[[4]]", "forced_bos_token_id=3"]),
        ({"begin_suppress_tokens": [7], "min_new_tokens": 3}, ["begin_suppress_tokens=[7]", "min_new_tokens=3"]),
        ({"forced_bos_token_id": 0}, ["forced_bos_token_id=0"]),
        ({"do_sample": True, "top_k": 20, "temperature": 0.6, "top_p": 0.9}, ["top_k=20"]),
        ({"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1, "min_length": 0}, []),
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 50, "max_length": 200, "eos_token_id": [2, 3]}, []),
    ],
)
def test_it_warns_once_of_what_it_ignores(tiny_model, recwarn, fields, named):
    model = copy.copy(tiny_model())
    model.generation_config = transformers.GenerationConfig()
    for name, value in fields.items():
        setattr(model.generation_config, name, value)
    Engine(model, **OPTIONS).close()
    found = [str(warning.message) for warning in recwarn.list if "generation_config" in str(warning.message)]
    assert len(found) == bool(named)
    if named:
        assert f"generation_config has {', '.join(named)}, which the engine ignores" in found[0]


def test_a_warning_that_is_an_error_leaves_nothing_open(tiny_model, monkeypatch):
    model = copy.copy(tiny_model())
    model.generation_config = transformers.GenerationConfig(repetition_penalty=2.0)
    with pytest.raises(UserWarning, match="repetition_penalty"):
        Engine(model, **OPTIONS)
    assert model.config._attn_implementation == "sdpa"


class Letters:
    """Stands in for a tokenizer."""

    def __call__(self, text):
        return {"input_ids": [3 + ord(letter) % 50 for letter in text]}


@pytest.mark.parametrize(
    ("prompts", "named"),
    [
        ("Hello", r"prompts is one string, 'Hello'; pass a list of prompts, \['Hello'\]"),
        (b"Hello", "prompts is one string, b'Hello'"),
        ([5, 6, 7], r"prompts begins with 5; for one prompt of tokens pass a list of it, \[\[\.\.\.\]\]"),
        (torch.tensor([5, 6, 7]), r"prompts begins with tensor\(5\)"),
        (5, "prompts is 5; it must be a list"),
        (None, "prompts is None; it must be a list"),
        ({"input_ids": [5]}, "prompts is {'input_ids': .*; it must be a list"),
        ([[5], None], "the prompt is None; it must be a string or a list of token ids"),
        ([[5], b"ab"], "the prompt is b'ab'"),
        ([[5], {"input_ids": [5]}], "the prompt is {'input_ids'"),
    ],
)
def test_what_is_no_list_of_prompts_is_named(make_engine, tiny_model, prompts, named):
    engine = make_engine(tiny_model(), tokenizer=Letters())
    with pytest.raises(ConfigError, match=named):
        engine.generate(prompts, FREE)
    assert engine.idle


@pytest.mark.parametrize("params", [{"max_tokens": 4}, 5, [FREE, None, 7]])
def test_what_are_no_parameters_is_named(make_engine, tiny_model, params):
    engine = make_engine(tiny_model())
    with pytest.raises(ConfigError, match="it must be SamplingParams"):
        engine.generate([[5], [6], [7]], params)
    with pytest.raises(ConfigError, match="it must be SamplingParams"):
        engine.submit([5], params)
    assert engine.idle


def test_prompts_of_many_kinds_are_served(make_engine, tiny_model):
    engine = make_engine(tiny_model(), tokenizer=Letters())
    expected = engine.generate([[5, 6], [7, 8]], FREE)
    assert engine.generate(((5, 6), range(7, 9)), FREE) == expected
    assert engine.generate(torch.tensor([[5, 6], [7, 8]]), FREE) == expected
    assert engine.generate(torch.tensor([[5, 6], [7, 8]]).numpy(), [FREE, FREE]) == expected
    assert engine.generate([]) == []
    assert len(engine.generate(["Hello"], FREE)[0]) == 4
