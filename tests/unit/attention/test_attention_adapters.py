"""Adapters of packages for GPUs, planned and run here over stand-ins; tests/gpu has the packages themselves."""

from __future__ import annotations

import contextlib
import importlib
import sys
from unittest.mock import Mock

import fake_flash_attention
import fake_flashinfer
import pytest
import torch
from test_attention_backends import EACH_LAYOUT_WITH_EACH_SHAPE, LAYOUTS, Driven
from torch_modes import MODES, attend

from slicedkv import attention
from slicedkv.attention import Batch
from slicedkv.attention.long_lanes import LongLaneBackend
from slicedkv.attention.paged_view import PagedView
from slicedkv.attention.triton import TritonBackend
from slicedkv.errors import ConfigError, StateError

QUICK, OTHERS = ["flashinfer", "flashinfer-triton-fa3", "fa4"], ["flashinfer-triton", "flash_attn", "fa3"]


@pytest.fixture(params=[*QUICK, *(pytest.param(name, marks=pytest.mark.thorough) for name in OTHERS)])
def adapter(request, monkeypatch):
    """Put stand-ins in place of the packages and of the GPU; return name and options of a backend."""
    name, *values = request.param.split("-")
    options = dict(zip(("decode", "prompts"), values, strict=False))
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    fake_flash_attention.install(monkeypatch)
    module = importlib.import_module(f"slicedkv.attention.{name}")
    monkeypatch.setattr(attention, "_missing", lambda *_: None)
    for limit, value in {"long_rows": 24, "long_pairs": 800, "alone_rows": 12, "alone_pairs": 400}.items():
        monkeypatch.setattr(LongLaneBackend, limit, value)
    if name == "flashinfer":
        monkeypatch.setattr(module, "_kernel", lambda device: "fa3")
        monkeypatch.setattr(module, "_SINGLE_Q_LEN", 5)
        monkeypatch.setattr(module, "_SINGLE_SEQ_LEN", 30)
        monkeypatch.setattr(module, "_ALONE_SEQ_LEN", 20)
        monkeypatch.setattr(module, "_ALONE_PAIRS", 60)
        monkeypatch.setattr(module, "_QUERIES_A_CALL", 16)
        monkeypatch.setattr(module, "_PAGE_TOKENS", 16)
        monkeypatch.setattr(module, "_WORKSPACE_BYTES", 1 << 16)
        fake_flashinfer.SINGLE.clear()
    yield name, options
    for loaded in ("flashinfer", "flash_attn", "fa3", "fa4"):
        sys.modules.pop(f"slicedkv.attention.{loaded}", None)


of_flashinfer = pytest.mark.parametrize(
    "adapter", ["flashinfer", "flashinfer-triton", "flashinfer-triton-fa3"], indirect=True
)

STEPS = [
    ([4, 0], [7, 1]),
    ([0, 4, 2], [1, 5, 33]),  # decode, a short chunk, a long prompt
    ([2, -1, 4, 5, 0], [1, 2, 3, 0, 1]),  # decode, a padded lane, short chunks apart and together
    ([5, 1, 2, 3], [3, 40, 6, 2]),  # short, long, long, short
    ([0, 2, 4], [1, 1, 1]),
    ([0, -1, 2], [1, 1, 1]),
    ([-1, -1], [1, 1]),
    ([0, 2], [0, 0]),  # nobody has a new token
    ([3], [70]),  # alone
    ([1, 3], [4, 4]),  # several tokens each, as when guesses are verified
    ([1, -1, 3], [2, 2, 2]),
]


@pytest.mark.parametrize(("layout", "num_kv_heads", "num_qo_heads"), EACH_LAYOUT_WITH_EACH_SHAPE)
def test_prefill_chunks_and_decode_mixed(make_cache, adapter, layout, num_kv_heads, num_qo_heads):
    name, options = adapter
    driven = Driven(
        make_cache(layout=layout, num_kv_heads=num_kv_heads, dtype=torch.float16), name, num_qo_heads, **options
    )
    driven.options = {}
    for reqids, q_lens in STEPS:
        out, expected = driven.step(reqids, q_lens)
        torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)
    lanes = [(33, 33), (40, 40), *([(6, 40)] if num_qo_heads >= 4 else []), (70, 72)]
    if name != "flashinfer":
        assert {(name, *lane) for lane in lanes} <= set(fake_flash_attention.CALLS)
        assert min(q_len * num_qo_heads for _, q_len, _ in fake_flash_attention.CALLS) >= 12, "the others together"
    elif "prompts" in options:
        assert fake_flash_attention.CALLS
        assert {called for called, *_ in fake_flash_attention.CALLS} == {"fa3"}
        assert not fake_flashinfer.SINGLE
    else:
        # A prompt of 33 in pieces of 16, each over what its tokens see; then the long lanes of the fourth step.
        assert fake_flashinfer.SINGLE[:3] == [(16, 16), (16, 32), (1, 33)]
        assert (6, 40) in fake_flashinfer.SINGLE
        assert fake_flashinfer.SINGLE[-2:] == [(16, 66), (6, 72)], "less than among others is enough for one alone"


def test_requests_without_a_token_are_no_lanes(make_cache, adapter):
    name, options = adapter
    driven = Driven(make_cache(dtype=torch.float16), name, **options)
    for reqids in [[0, 1], [1, 0], [0]]:  # none has a row yet
        out, _ = driven.step(reqids, [0] * len(reqids))
        assert len(out) == 0


@of_flashinfer
def test_a_plan_that_fails_half_way_is_nobodys(make_cache, adapter, monkeypatch):
    """Its tables would lie beside the former batch."""
    name, options = adapter
    driven = Driven(make_cache(dtype=torch.float16), name, **options)
    driven.options, backend = {}, driven.backend
    driven.step([0, 1], [9, 3])
    with monkeypatch.context() as patched:
        patched.setattr(backend._plans, "plan", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            backend.plan(Batch([0, 1], [1, 3], [10, 6]))
    rows = driven.tensor(4, backend.num_kv_heads)
    with pytest.raises(StateError, match="call plan"):
        backend.append(1, rows, rows)
    out, expected = driven.step([0, 1], [1, 3])
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("mode", ["inference", "on meta"])
def test_modes_of_torch(make_cache, adapter, mode):
    name, options = adapter
    expected = attend(make_cache, name, **options)
    for modes in ({"opened_in": MODES[mode]}, {"served_in": MODES[mode]}):
        assert all(map(torch.equal, attend(make_cache, name, **modes, **options), expected))


def test_what_was_opened_in_inference_mode_serves_outside(make_cache, adapter, monkeypatch):
    """Captured steps and others: buffers that stay are written in every plan."""
    monkeypatch.setattr(TritonBackend, "captures", True)
    name, options = adapter
    driven = Driven(make_cache(dtype=torch.float16), name, **options)
    driven.options = {}
    for mode in (torch.inference_mode, contextlib.nullcontext):
        with mode():
            driven.step([0, 1, 2], [33, 3, 4])
            driven.step([0, 1], [1, 1])
            if driven.backend.captures:
                driven.backend.plan(Batch([0, 1], [1, 1], [1, 1]), graph=True)


def test_captured_steps_keep_their_wrapper_and_places(make_cache, adapter, monkeypatch):
    monkeypatch.setattr(TritonBackend, "captures", True)
    name, options = adapter
    cache = make_cache(dtype=torch.float16)
    driven = Driven(cache, name, **options)
    driven.options = {}
    driven.step([3, 1], [9, 4])
    backend = driven.backend
    step = Batch([3, 1, -1], [1, 1, 1], [10, 5, 0])
    cache.step({3: 10, 1: 5})
    if name == "flash_attn":
        with pytest.raises(ConfigError, match="cannot be captured"):
            backend.plan(step, graph=True)
        return
    places = []
    for _ in range(2):
        backend.plan(step, graph=True)
        backend.append(1, driven.tensor(3, 2), driven.tensor(3, 2))
        assert bool(backend.run(1, driven.tensor(3, 6)).isfinite().all())
        places.append((backend._reqids.data_ptr(), id(getattr(backend, "_decoder", None))))
    assert places[0] == places[1]


@of_flashinfer
def test_steps_with_prompts_launch_no_kernel_of_tritons(make_cache, adapter, monkeypatch):
    name, options = adapter
    fake_flashinfer.APPENDED.clear()
    driven = Driven(make_cache(dtype=torch.float16), name, **options)
    driven.options = {}
    launched = []
    for method in ("_append", "_run_decode", "_run_prefill"):
        former = getattr(TritonBackend, method)
        monkeypatch.setattr(
            TritonBackend, method, lambda *args, former=former, method=method: (launched.append(method), former(*args))
        )
    for reqids, q_lens in ([3, 1], [9, 4]), ([3, 1, 0], [1, 1, 7]), ([0, 3, 1], [5, 1, 40]), ([3, 0], [4, 4]):
        out, expected = driven.step(reqids, q_lens)
        torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)
    assert fake_flashinfer.APPENDED == [13, 9, 46, 8]
    assert not launched
    driven.step([3, 1], [1, 1])
    assert launched == (["_append", "_run_decode"] if options else ["_append"])
    driven.step([3, -1, 1], [1, 2, 3])  # it knows no padded lanes
    assert launched[-1] == "_append"
    assert len(fake_flashinfer.APPENDED) == 4


@of_flashinfer
@pytest.mark.parametrize("offset", [1, 4, 8])
def test_rows_in_odd_places_are_appended(make_cache, adapter, offset):
    """FlashInfer loads 16 bytes at a time."""
    name, options = adapter
    cache = make_cache(dtype=torch.float16)
    backend = attention.open_backend(name, cache, num_qo_heads=cache.layout.num_kv_heads, **options)
    reqid, shape = cache.alloc_reqid(), (9, cache.layout.num_kv_heads, cache.layout.head_dim)
    assert cache.step({reqid: 9})
    k, v = (torch.randn(offset + 9 * shape[1] * shape[2]).half()[offset:].view(shape) for _ in range(2))
    fake_flashinfer.APPENDED.clear()
    backend.plan(Batch([reqid], [9], [9]))
    backend.append(1, k, v)
    assert torch.equal(cache.k(1)[reqid, :9], k)
    assert torch.equal(cache.v(1)[reqid, :9], v)
    assert bool(fake_flashinfer.APPENDED) == (offset == 8)


def test_a_closed_cache_is_refused_not_touched(make_cache, adapter):
    """Views that are kept outlive it; what they show is unmapped."""
    name, options = adapter
    cache = make_cache(dtype=torch.float16)
    driven = Driven(cache, name, **options)
    driven.options = {}
    driven.step([3, 1], [9, 4])
    k, q = driven.tensor(13, cache.layout.num_kv_heads), driven.tensor(13, driven.backend.num_qo_heads)
    cache.close()
    with pytest.raises(StateError, match="closed"):
        driven.backend.append(1, k, k)
    with pytest.raises(StateError, match="closed"):
        driven.backend.run(1, q)


class PinnedWrapper:
    """A wrapper whose plans leave from one piece of pinned memory when the device gets there, as FlashInfer's do."""

    def __init__(self, queue):
        self.queue, self.pinned, self.on_device = queue, None, []

    def plan(self, plan, *, scale):
        self.pinned = (plan, scale)
        self.queue.append(lambda: self.on_device.append(self.pinned))


class LazyStream:
    """Does what is queued only when an event is waited for."""

    def __init__(self):
        self.queue = []

    def record_event(self):
        stream, end = self, len(self.queue)

        class Event:
            def synchronize(self):
                while stream.queue[:end]:
                    stream.queue.pop(0)()

        return Event()


def test_a_plan_leaves_before_the_next_one_overwrites_it(adapter, monkeypatch):
    if adapter[0] != "flashinfer":
        return
    module, stream = sys.modules["slicedkv.attention.flashinfer"], LazyStream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    plans = module.WrapperPlans(torch.device("cuda:0"))
    one, other = PinnedWrapper(stream.queue), PinnedWrapper(stream.queue)
    plans.plan(one, "a", scale=1)
    plans.plan(other, "b", scale=1)
    assert not one.on_device, "wrappers do not wait for each other"
    plans.plan(one, "c", scale=2)
    assert one.on_device == [("a", 1)]
    stream.record_event().synchronize()
    assert (one.on_device, other.on_device) == ([("a", 1), ("c", 2)], [("b", 1)])


def test_wrong_decode_is_named(make_cache, adapter):
    name, _ = adapter
    if name == "flashinfer":
        with pytest.raises(ConfigError, match="decode is 'mine'; use 'flashinfer' or 'triton'"):
            attention.open_backend(name, make_cache(dtype=torch.float16), num_qo_heads=2, decode="mine")
        with pytest.raises(ConfigError, match="prompts is 'mine'; use 'flashinfer', 'fa3' or 'fa4'"):
            attention.open_backend(name, make_cache(dtype=torch.float16), num_qo_heads=2, prompts="mine")


@pytest.mark.parametrize("adapter", ["flashinfer-triton-fa3", "flash_attn", "fa3", "fa4"], indirect=True)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_long_lanes_see_nothing_behind_their_length(make_cache, adapter, layout):
    """Views end with the request, so NaN behind it is out of reach, whatever tiles a kernel loads."""
    name, options = adapter
    cache = make_cache(dtype=torch.float16, layout=layout)
    driven = Driven(cache, name, **options)
    driven.options = {}
    assert cache.step({0: 60})
    for side in (cache.k(1), cache.v(1)):
        side[0, :60].fill_(float("nan"))
    out, expected = driven.step([0], [50])
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)
    assert fake_flash_attention.CALLS[-1][1:] == (50, 50)


@pytest.mark.parametrize("adapter", ["fa4"], indirect=True)
@pytest.mark.parametrize(("window", "soft_cap"), [(7, None), (45, 2.0), (None, 2.0), (200, None)])
def test_windows_and_soft_caps(make_cache, adapter, window, soft_cap):
    options = {"window": window, "soft_cap": soft_cap}
    found = {}
    for name in ("fa4", "triton"):
        driven = Driven(make_cache(dtype=torch.float16), name, **options)
        driven.options = {}
        found[name] = [driven.step([0, 1], q_lens)[0] for q_lens in ([40, 9], [3, 50], [1, 1], [30, 1])]
    for out, expected in zip(found["fa4"], found["triton"], strict=True):
        torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)
    assert ("fa4", 50, 59 if window is None else min(59, window + 49)) in fake_flash_attention.CALLS


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("max_seq_len", [7, 64, 130, 700])
@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_pages_of_a_table_are_the_slots_tokens(make_cache, layout, max_seq_len, page_tokens):
    """Every page lies at number times stride, also where `max_seq_len` is no multiple of a page."""
    cache = make_cache(layout=layout, num_kv_heads=3, max_batch_size=3, max_seq_len=max_seq_len, memory_limit="1GiB")
    lens = [max_seq_len, max(1, max_seq_len - page_tokens), 1]
    slots = [cache.alloc_reqid() for _ in lens]
    cache.step(dict(zip(slots, lens, strict=True)))
    for layer in range(3):
        for rows in (cache.k(layer), cache.v(layer)):
            view = PagedView.of(rows, page_tokens)
            if page_tokens <= max_seq_len:
                assert view.pages(rows).stride() == (view.stride, *rows.stride()[1:])
            indptr, numbers, last = view.table(slots, lens)
            for lane, (slot, length) in enumerate(zip(slots, lens, strict=True)):
                rows[slot, :length] = torch.randn(length, *rows.shape[2:])
                pages = numbers[indptr[lane] : indptr[lane + 1]].tolist()
                assert (len(pages) - 1) * page_tokens + int(last[lane]) == length
                for index, number in enumerate(pages):
                    expected = rows[slot, index * page_tokens : min(length, (index + 1) * page_tokens)]
                    offset = rows.storage_offset() + number * view.stride
                    assert torch.equal(rows.as_strided(expected.shape, rows.stride()[1:], offset), expected)


@pytest.mark.parametrize(
    ("length", "slot", "token", "message"),
    [
        (64, 2**33, 2**27, f"page numbers up to 1 of {2**33} elements"),
        (2**20, 2**31 + 1, 2**10, f"page numbers up to {2**31 + 1 + 16383 * 2**16} of 1 elements"),
    ],
)
def test_what_page_tables_cannot_say_is_refused(length, slot, token, message):
    with torch.device("meta"):
        rows = torch.empty_strided((2, length, 1, 1), (slot, token, 1, 1), dtype=torch.float16)
    with pytest.raises(ConfigError, match=message):
        PagedView.of(rows, 64)
