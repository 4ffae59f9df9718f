"""`examples/minimal_engine.py`: what it prints, and that its cache holds, bit by bit, what plain tensors would."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest
import torch

from slicedkv import SlicedKVCache
from slicedkv.attention import Batch, open_backend

FILE = Path(__file__).resolve().parents[3] / "examples" / "minimal_engine.py"
SYSTEM = list(range(1, 41))
# Prompts and lengths: three begin alike, one is short.
PROMPTS = [([*SYSTEM, 50, 51], 120), ([*SYSTEM, 52, 53], 120), ([*SYSTEM, 54, 55], 110), ([7], 60)]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("minimal_engine", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


class PlainCache:
    """As much of a cache as the engine calls, over plain contiguous tensors ``[B, L, H, D]``, one a layer for K and V.

    Whether memory suffices is what the real cache said in the same step.
    """

    device = torch.device("cpu")

    def __init__(self, example, answers):
        shape = (4, example.MAX_LEN, example.KV_HEADS, example.HEAD_DIM)
        self._k = [torch.full(shape, torch.nan) for _ in range(example.LAYERS)]
        self._v = [torch.full(shape, torch.nan) for _ in range(example.LAYERS)]
        self._idle = [3, 2, 1, 0]
        self._answers = answers

    def k(self, layer):
        return self._k[layer]

    def v(self, layer):
        return self._v[layer]

    def can_admit(self, seq_len):
        return self._answers.popleft()

    def step(self, lens):
        return self._answers.popleft()

    def share_prefix(self, src, dst, num_tokens):
        for plane in (*self._k, *self._v):
            plane[dst, :num_tokens] = plane[src, :num_tokens]
        return self._answers.popleft()

    def alloc_reqid(self):
        return self._idle.pop(0)

    def free_reqid(self, reqid):
        self._idle.append(reqid)

    def truncate(self, reqid, seq_len):
        for plane in (*self._k, *self._v):
            plane[reqid, seq_len:] = torch.nan


class Recorded:
    """A real cache that writes down what it answered."""

    def __init__(self, cache):
        self.cache, self.answers = cache, deque()

    def __getattr__(self, name):
        return getattr(self.cache, name)

    def _record(self, answer):
        self.answers.append(answer)
        return answer

    def can_admit(self, seq_len):
        return self._record(self.cache.can_admit(seq_len))

    def step(self, lens):
        return self._record(self.cache.step(lens))

    def share_prefix(self, src, dst, num_tokens):
        return self._record(self.cache.share_prefix(src, dst, num_tokens))


def same_rows(engine, plain):
    """Compare all rows of all running requests; return how many there were."""
    rows = 0
    for mine, other in zip(engine.running, plain.running, strict=True):
        assert (mine.tokens, mine.computed) == (other.tokens, other.computed)
        assert engine.cache.seq_len(mine.reqid) == mine.computed
        for layer in range(2):
            for side in ("k", "v"):
                found = getattr(engine.cache, side)(layer)[mine.reqid, : mine.computed]
                expected = getattr(plain.cache, side)(layer)[other.reqid, : other.computed]
                assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), (layer, side)
                rows += len(found)
    return rows


def alone(example, model, prompt, length):
    """Greedy tokens of one request, all of it computed anew for every token."""
    tokens = list(prompt)
    plain = PlainCache(example, deque())
    backend = open_backend("reference", plain, num_qo_heads=example.QO_HEADS)

    def attend(layer, q, k, v):
        backend.append(layer, k, v)
        return backend.run(layer, q)

    while len(tokens) < length:
        batch = Batch([0], [len(tokens)], [len(tokens)])
        backend.plan(batch)
        logits = model(torch.tensor(tokens), torch.tensor(batch.positions()), attend)
        tokens.append(int(logits[-1].argmax()))
    return tokens


def serve(engine):
    while engine.waiting or engine.running:
        engine.step()


@pytest.mark.parametrize("mapper", ["background", "sync"])
def test_rows_and_tokens_are_those_of_plain_tensors(example, mapper):
    torch.manual_seed(0)
    model = example.TinyModel()
    with SlicedKVCache(
        **example.SIZES, **example.MEMORY, dtype=torch.float32, max_batch_size=4, mapper=mapper, debug=True
    ) as cache:
        recorded = Recorded(cache)
        engine = example.MinimalEngine(model, recorded)
        plain = example.MinimalEngine(model, PlainCache(example, recorded.answers))
        requests = [example.Request(list(prompt), length) for prompt, length in PROMPTS]
        coming, rows, steps = deque(requests), 0, 0
        while coming or engine.waiting or engine.running:
            if coming and steps % 4 == 0:
                engine.waiting.append(coming.popleft())
                plain.waiting.append(example.Request(list(engine.waiting[-1].tokens), engine.waiting[-1].length))
            engine.step()
            plain.step()
            assert not recorded.answers, "the plain run took another way"
            rows += same_rows(engine, plain)
            steps += 1
        cache.check_integrity()
        assert cache.stats().used_bytes == 0
    assert rows > 10_000
    assert min(engine.shared, engine.preempted, engine.rejected) > 0
    accepted = sum(len(request.tokens) for request in requests) - sum(len(prompt) for prompt, _ in PROMPTS)
    assert accepted > steps, "several requests decode in a step"
    for request, (prompt, length) in zip(requests, PROMPTS, strict=True):
        assert request.tokens == alone(example, model, prompt, length)


def test_a_request_that_cannot_fit_is_refused(example):
    with SlicedKVCache(
        **example.SIZES, dtype=torch.float32, max_batch_size=1, device="cpu", page_bytes=4096, memory_limit=4 * 4096
    ) as cache:
        engine = example.MinimalEngine(example.TinyModel(), cache)
        engine.waiting.append(example.Request([1], 60))
        with pytest.raises(MemoryError, match="one request alone"):
            serve(engine)


def test_it_prints_a_few_lines_and_warns_of_nothing():
    done = subprocess.run([sys.executable, "-W", "error", FILE], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    *requests, total = done.stdout.splitlines()
    assert [line.split(",")[0] for line in requests] == ["120 tokens", "120 tokens", "120 tokens", "60 tokens"]
    shared, rejected, preempted = (int(part.split()[0]) for part in total.split(", "))
    assert shared >= 40
    assert rejected > 0
    assert preempted > 0


def test_it_is_short_and_uses_public_names_only():
    text = FILE.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 150
    assert "slicedkv." not in text.replace("from slicedkv.attention import", "")
    assert "._" not in text
