"""The probe of an engine that opens: what it finds, what it leaves alone, and what it costs."""

from __future__ import annotations

import functools

import pytest
import torch
from tiny_models import CAUSAL, DYNAMIC, build

from slicedkv.engine import Engine, SamplingParams, opening
from slicedkv.engine import probe as probing
from slicedkv.errors import ConfigError

KIB = 1 << 10
FREE = SamplingParams(max_tokens=4, ignore_eos=True)


def open_engine(model, **options):
    defaults = {"max_batch_size": 2, "max_seq_len": 64, "memory_limit": "16MiB"}
    return Engine(model, **(defaults | options))


@pytest.fixture
def unchecked(monkeypatch):
    """Nothing is read from configs and code: only the probe can tell."""
    for name in ("check_config", "check_layers", "check_model"):
        monkeypatch.setattr(opening, name, lambda *_: None)
    monkeypatch.setattr("slicedkv.integrations.transformers.check_config", lambda *_: None)


@pytest.fixture
def counting(tiny_model):
    """A model that counts the tokens of a row instead of using their positions."""
    model = tiny_model("llama", initializer_range=0.2)
    rotary = model.model.rotary_emb
    forward = rotary.forward

    def count(x, position_ids):
        return forward(x, torch.arange(x.shape[1])[None])

    rotary.forward = count
    yield model
    rotary.forward = forward


def test_the_message_says_what_differs(counting):
    with pytest.raises(ConfigError) as caught:
        open_engine(counting)
    message = str(caught.value)
    assert message.startswith("LlamaForCausalLM cannot be served: packed with other requests it computes other logits")
    assert "prompt 1 of 2 (tokens [" in message
    assert "from position 0 on) at position 3, in its decode step, are off by" in message
    assert "of their spread, 0.0002 is allowed" in message
    assert "probe=False serves it" in message
    assert counting.config._attn_implementation == "sdpa"


def test_it_can_be_left_out(counting):
    with open_engine(counting, probe=False) as engine:
        assert len(engine.generate([[5, 6]], FREE)[0]) == 4
    with pytest.raises(ConfigError, match="probe is 1"):
        open_engine(counting, probe=1)


@pytest.mark.parametrize(("slots", "longest"), [(1, 64), (1, 2), (2, 2), (4, 3)])
def test_a_small_cache_is_probed_too(counting, slots, longest):
    with pytest.raises(ConfigError, match="other logits"):
        open_engine(counting, max_batch_size=slots, max_seq_len=longest)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("longest", [1, 2, 3, 4])
def test_small_caches_open(make_engine, tiny_model, slots, longest):
    engine = make_engine(tiny_model(), max_batch_size=slots, max_seq_len=longest)
    params = SamplingParams(max_tokens=longest, ignore_eos=True)
    assert [len(tokens) for tokens in engine.generate([[5], [6]], params)] == [longest] * 2


@pytest.mark.parametrize("pages", [1, 2, 3])
def test_it_takes_what_memory_there_is(make_engine, tiny_model, pages):
    """One page for one request, interleaved; or two for K and V, and then one that is of no use."""
    options = {"layout": "interleaved"} if pages == 1 else {}
    engine = make_engine(tiny_model(), memory_limit=pages * 4 * KIB, page_bytes=4 * KIB, max_seq_len=8, **options)
    assert len(engine.generate([[5, 6]], FREE)[0]) == 4


def test_positions_that_depend_on_the_length_so_far(unchecked):
    """As in Llama 4: with a floor_scale that requests reach, scores change there, wherever the row has room."""
    options = {"attention_chunk_size": None, "no_rope_layers": [1, 0], "layer_types": ["full_attention"] * 2}
    model = build("Llama4Text", "Llama4ForCausalLM", floor_scale=60, attn_scale=1.0, **options)
    with pytest.raises(ConfigError, match=r"prompt 2 of 2 .* from position 61 on\) at position 62, in its prompt"):
        open_engine(model, max_seq_len=64)
    open_engine(model, max_seq_len=59).close()


def test_frequencies_that_depend_on_other_requests(unchecked):
    ropes = {"full_attention": DYNAMIC, "sliding_attention": DYNAMIC}
    model = build("Gemma3Text", "Gemma3ForCausalLM", rope_parameters=ropes, max_position_embeddings=32)
    with pytest.raises(ConfigError, match=r"prompt 1 of 2 \(tokens .* from position 0 on"):
        open_engine(model)


def test_positions_that_do_not_arrive(unchecked):
    model = build("Bart", "BartForCausalLM", **CAUSAL)
    with pytest.warns(UserWarning, match="forced_eos_token_id"), pytest.raises(ConfigError, match="cannot be served"):
        open_engine(model)


def test_attention_both_ways(unchecked):
    model = build("Bert", "BertLMHeadModel")
    with pytest.raises(ConfigError, match="at position 0, in its prompt"):
        open_engine(model)


def state_of(model):
    tensors = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    settings = [module.__dict__.keys() for module in model.modules()]
    return tensors, settings, model.config.to_dict(), model.generation_config.to_dict()


def test_nothing_is_left_behind(make_cache, make_engine, tiny_model):
    model = tiny_model()
    before = state_of(model)
    cache = make_cache(max_batch_size=3)
    engine = make_engine(model, cache=cache, max_batch_size=None, max_seq_len=None, memory_limit=None)
    stats = cache.stats()
    assert (stats.active_slots, stats.mapped_bytes) == (0, 0)
    cache.check_integrity()
    assert model.config._attn_implementation == "slicedkv"
    engine.close()
    after = state_of(model)
    assert before[0].keys() == after[0].keys()
    assert all(torch.equal(tensor, after[0][name]) for name, tensor in before[0].items())
    assert before[1:] == after[1:]


def test_pages_that_were_there_stay(make_cache, tiny_model):
    cache = make_cache(max_batch_size=3, mapper="sync", lookahead_tokens=0)
    slots = [cache.alloc_reqid() for _ in range(3)]
    assert cache.step(dict.fromkeys(slots, 100))
    for slot in slots:
        cache.free_reqid(slot)
    mapped = cache.stats().mapped_bytes
    assert mapped > 0
    with Engine(tiny_model(), cache=cache):
        assert cache.stats().mapped_bytes == mapped


def test_it_costs_four_short_forwards(tiny_model, monkeypatch):
    """Two prompts packed and a decode step of both; then each alone."""
    model = tiny_model()
    rows = []
    forward = model.forward

    @functools.wraps(forward)
    def counted(*args, **kwargs):
        rows.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", counted)
    open_engine(model).close()
    assert rows == [5, 2, 4, 3]
    rows.clear()
    open_engine(model, probe=False).close()
    assert not rows


@pytest.mark.parametrize(("dtype", "attempts"), [(torch.float32, 1), (torch.bfloat16, 3)])
def test_half_precision_gets_other_chances(tiny_model, monkeypatch, dtype, attempts):
    """Rounding may choose another expert for one token; what is wrong is wrong for all."""
    model, calls = tiny_model("llama", dtype), []

    def differ(prompts, *_):
        calls.append([prompt.tokens for prompt in prompts])
        return "something else"

    monkeypatch.setattr(probing, "_difference", differ)
    with pytest.raises(ConfigError, match="it computes something else"):
        open_engine(model)
    assert len(calls) == attempts
    assert len({str(tokens) for tokens in calls}) == attempts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_stays_far_below_what_is_allowed(tiny_model, monkeypatch, dtype):
    model, shares = tiny_model("qwen2", dtype), []
    difference = probing._difference

    def halved(prompts, found, alone, tolerance):
        shares.append(tolerance)
        return difference(prompts, found, alone, tolerance / 4)

    monkeypatch.setattr(probing, "_difference", halved)
    open_engine(model).close()
    assert len(shares) == 1


def test_ordinary_tokens_are_chosen(tiny_model):
    model = tiny_model()
    config = model.config
    chosen = probing._tokens(model, 7, 0)
    assert len(set(chosen)) == 7
    assert not {config.pad_token_id, config.bos_token_id, config.eos_token_id} & set(chosen)
    assert max(chosen) < config.vocab_size
    assert max(probing._tokens(model, 7, 2)) < config.vocab_size


def test_a_machine_that_fails_is_not_the_models_fault(tiny_model, monkeypatch):
    model = tiny_model()

    def short(*_, **__):
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as context:
        context.setattr(model.model, "forward", short)
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            open_engine(model)
    assert model.config._attn_implementation == "sdpa"
    open_engine(model).close()
