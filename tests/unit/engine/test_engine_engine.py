"""The engine as users meet it: streams, aborts, strings, hooks, refusals, and what it leaves behind."""

from __future__ import annotations

import pytest
import torch

from slicedkv.engine import Engine, EngineStep, Event, FinishReason, SamplingParams
from slicedkv.errors import BackendUnavailableError, CapacityError, ConfigError, StateError

FREE = SamplingParams(max_tokens=10, ignore_eos=True)
PROMPTS = [[5, 9, 14, 3], [20], list(range(3, 40)), [8, 8, 8]]


class Words:
    """Stands in for a tokenizer."""

    def __call__(self, text):
        return {"input_ids": [3 + len(word) for word in text.split()]}


def test_streams_can_be_read_in_turn_and_late(make_engine, tiny_model):
    engine = make_engine(tiny_model())
    expected = engine.generate(PROMPTS, FREE)
    first, second, third = (engine.submit(prompt, FREE) for prompt in PROMPTS[:3])
    streams = engine.stream(first), engine.stream(second)
    taken = [(next(streams[0]), next(streams[1])) for _ in range(10)]
    assert [list(tokens) for tokens in zip(*taken, strict=True)] == expected[:2]
    assert list(engine.stream(third)) == expected[2]
    assert list(engine.stream(third)) == expected[2]
    assert first.finish_reason is FinishReason.LENGTH


def test_events_and_the_hook(make_engine, tiny_model):
    records: list[EngineStep] = []
    engine = make_engine(tiny_model(), on_step=records.append, max_batch_size=2, max_tokens_per_step=16)
    requests = [engine.submit(prompt, SamplingParams(max_tokens=3, ignore_eos=True)) for prompt in PROMPTS]
    events: list[Event] = []
    while not engine.idle:
        events += engine.step()
    for request in requests:
        mine = [event for event in events if event.request is request]
        assert [event.token for event in mine] == request.output_ids
        assert [event.finish_reason for event in mine] == [None, None, FinishReason.LENGTH]
    assert [record.index for record in records] == list(range(len(records)))
    assert sum(record.num_tokens for record in records) == sum(len(prompt) + 2 for prompt in PROMPTS)
    assert max(record.num_tokens for record in records) == 16
    layout = engine.cache.layout
    for record in records:
        assert record.used_bytes == sum(record.seq_lens) * layout.token_bytes
        assert record.mapped_bytes >= sum(layout.bytes_for(length) for length in record.seq_lens)
        assert len(record.seq_lens) <= 2
        assert record.seconds > 0
    assert (records[0].num_running, records[0].num_waiting) == (2, 2)
    assert (records[-1].num_running, records[-1].num_waiting) == (0, 0)
    assert engine.step() == []
    assert "running=0" in repr(engine)


def test_model_end_of_text_and_stop_tokens(make_engine, tiny_model):
    model = tiny_model()
    with make_engine(model) as engine:
        free = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=30, ignore_eos=True))[0]
        stop = free[4]
        [short] = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=30, ignore_eos=True, stop_ids=(stop,)))
        assert short == free[: free.index(stop) + 1]
    model.generation_config.eos_token_id = [stop, 60]
    try:
        other = make_engine(model)
        assert other.generate([PROMPTS[0]], SamplingParams(max_tokens=30)) == [short]
    finally:
        model.generation_config.eos_token_id = 2


def test_sampling_does_not_depend_on_the_batch(make_engine, tiny_model):
    engine = make_engine(tiny_model())
    params = [SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9, top_p=0.9, seed=s) for s in range(4)]
    together = engine.generate(PROMPTS, params)
    alone = [engine.generate([prompt], own)[0] for prompt, own in zip(PROMPTS, params, strict=True)]
    assert together == alone
    assert engine.generate([PROMPTS[0]], params[1:2])[0] != alone[0]


def test_abort_gives_the_slot_to_others(make_engine, tiny_model):
    engine = make_engine(tiny_model(), max_batch_size=1)
    expected = engine.generate(PROMPTS[1:2], FREE)
    long = engine.submit(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True))
    other = engine.submit(PROMPTS[1], FREE)
    stream = engine.stream(long)
    kept = [next(stream) for _ in range(3)]
    assert other.reqid is None
    engine.abort(long)
    assert list(stream) == []
    assert (long.finish_reason, long.output_ids) == (FinishReason.ABORTED, kept)
    assert list(engine.stream(other)) == expected[0]


def test_strings_need_a_tokenizer(make_engine, tiny_model):
    engine = make_engine(tiny_model(), tokenizer=Words())
    assert engine.generate(["one two three"], FREE) == engine.generate([[6, 6, 8]], FREE)
    engine.tokenizer = None
    with pytest.raises(ConfigError, match="tokenizer"):
        engine.submit("one")


def test_refusals_leave_nothing_behind(make_engine, tiny_model):
    engine = make_engine(tiny_model(), max_seq_len=64, memory_limit=8 << 20, page_bytes=64 << 10)
    for prompt, params, error, named in [
        ([], FREE, ConfigError, "empty"),
        ([61], FREE, ConfigError, "prompt token is 61"),
        ([1] * 56, FREE, ConfigError, "max_seq_len is 64"),
        ([1] * 65, SamplingParams(max_tokens=1), ConfigError, "max_seq_len is 64"),
    ]:
        with pytest.raises(error, match=named):
            engine.submit(prompt, params)
    with pytest.raises(ConfigError, match="2 prompts came with 1 parameters"):
        engine.generate(PROMPTS[:2], [FREE])
    with pytest.raises(ConfigError, match="empty"):
        engine.generate([[5], []], FREE)
    assert engine.idle
    assert len(engine.submit([1] * 64, SamplingParams(max_tokens=1)).prompt_ids) == 64
    engine.run()


def test_a_request_larger_than_memory_is_refused(make_engine, tiny_model):
    engine = make_engine(tiny_model(), max_seq_len=4096, memory_limit=256 << 10, page_bytes=64 << 10)
    with pytest.raises(CapacityError, match="raise memory_limit"):
        engine.submit([1] * 2000, FREE)
    assert engine.generate([PROMPTS[0]], FREE)[0]


def test_close_restores_the_model_and_frees_memory(tiny_model):
    model = tiny_model()
    with Engine(model, max_batch_size=2, max_seq_len=64, memory_limit="4MiB") as engine:
        assert model.config._attn_implementation == "slicedkv"
        request = engine.submit(PROMPTS[0], FREE)
        engine.step()
    assert model.config._attn_implementation == "sdpa"
    assert request.finish_reason is FinishReason.ABORTED
    engine.close()
    for call in (engine.step, lambda: engine.submit([5])):
        with pytest.raises(StateError, match="closed"):
            call()
    with Engine(model, max_batch_size=2, max_seq_len=64, memory_limit="4MiB"):
        with pytest.raises(StateError, match="another engine"):
            Engine(model, max_batch_size=2, max_seq_len=64, memory_limit="4MiB")
        assert model.config._attn_implementation == "slicedkv"
    with pytest.raises(StateError, match="closed"):
        engine.cache.stats()


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"backend": "none"}, ConfigError, "'none'"),
        ({"max_tokens_per_step": 1}, ConfigError, "max_tokens_per_step is 1"),
        ({"dtype": "float8_e5m2", "backend": "sdpa"}, BackendUnavailableError, "float8"),
        ({"layout": "round"}, ConfigError, "layout is 'round'"),
    ],
)
def test_a_failed_start_leaves_the_model_alone(tiny_model, options, error, named):
    model = tiny_model()
    with pytest.raises(error, match=named):
        Engine(model, max_batch_size=2, max_seq_len=64, memory_limit="4MiB", **options)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_in_training_mode_is_refused(tiny_model):
    model = tiny_model("llama", initializer_range=0.1)
    model.train()
    try:
        with pytest.raises(ConfigError, match="eval"):
            Engine(model, max_batch_size=2, max_seq_len=64, memory_limit="4MiB")
    finally:
        model.eval()


def test_attention_changed_behind_the_engine_is_noticed(make_engine, tiny_model):
    model = tiny_model()
    engine = make_engine(model)
    request = engine.submit(PROMPTS[0], FREE)
    model.set_attn_implementation("sdpa")
    with pytest.raises(StateError, match="'sdpa'"):
        engine.step()
    model.set_attn_implementation("slicedkv")
    assert len(list(engine.stream(request))) == 10


def test_a_failed_forward_can_be_tried_again(make_engine, tiny_model, monkeypatch):
    model = tiny_model()
    engine = make_engine(model)
    expected = engine.generate(PROMPTS, FREE)
    requests = [engine.submit(prompt, FREE) for prompt in PROMPTS]
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.backend, "run", lambda *_: (_ for _ in ()).throw(RuntimeError("device lost")))
        with pytest.raises(RuntimeError, match="device lost"):
            engine.step()
    engine.run()
    assert [request.output_ids for request in requests] == expected


def test_model_called_without_a_backend_says_so(make_engine, tiny_model):
    model = tiny_model()
    engine = make_engine(model)
    with pytest.raises(StateError, match="slicedkv_backend"):
        model(torch.tensor([[5, 6]]), use_cache=False)
    with pytest.raises(ConfigError, match="2 rows"):
        model(torch.tensor([[5], [6]]), use_cache=False, slicedkv_backend=engine.backend)
    engine.backend.scale *= 2
    with pytest.raises(ConfigError, match=r"scales by 0\.25"):
        model(torch.tensor([[5]]), use_cache=False, slicedkv_backend=engine.backend)


def test_float8_cache_with_the_reference_backend(make_engine, tiny_model):
    engine = make_engine(tiny_model(), dtype="float8_e4m3fn")
    assert engine.backend.name == "reference"
    assert [len(tokens) for tokens in engine.generate(PROMPTS, FREE)] == [10] * 4
