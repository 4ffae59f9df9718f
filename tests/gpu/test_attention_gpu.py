"""Backends against the reference on a GPU, with real shapes in the three layouts, NaN past every length."""

from __future__ import annotations

import itertools

import pytest
import torch

from slicedkv import SlicedKVCache
from slicedkv.attention import Batch, open_backend

pytestmark = pytest.mark.gpu

GIB = 1 << 30
LAYOUTS = ["sliced", "interleaved", "per_layer"]
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-3}
# Lengths before and new tokens of each lane: prompts, chunks and decode, one slot skipped, one lane padded.
REQIDS = [0, 5, 2, -1, 3, 1, 7]
PAST = [0, 3000, 8191, 0, 0, 511, 12_345]
NEW = [1000, 512, 1, 2, 1, 17, 1]


@pytest.fixture
def open_cache(cuda_device):
    opened = []

    def open_(**options):
        shape = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128, "max_batch_size": 8, "max_seq_len": 16_384}
        cache = SlicedKVCache(device=cuda_device, memory_limit=12 * GIB, **(shape | options))
        opened.append(cache)
        for _ in range(8):
            cache.alloc_reqid()
        return cache

    yield open_
    for cache in opened:
        cache.check_integrity()
        cache.close()


def fill(cache, layer):
    """Back 16 more tokens than each request has; random rows up to its length before the step, NaN behind."""
    lens = {r: past + new for r, past, new in zip(REQIDS, PAST, NEW, strict=True) if r >= 0}
    assert cache.step({reqid: length + 16 for reqid, length in lens.items()})
    for side in (cache.k(layer), cache.v(layer)):
        for reqid, past, new in zip(REQIDS, PAST, NEW, strict=True):
            if reqid >= 0:
                side[reqid, :past].normal_()
                side[reqid, past : past + new + 16] = float("nan")
    return Batch(REQIDS, NEW, [past + new for past, new in zip(PAST, NEW, strict=True)])


def check(cache, name, batch, num_qo_heads, against=("reference", {}), kind=None, **options):
    """Append and attend in the last layer, which is of this kind, by both backends; compare what they found."""
    torch.manual_seed(torch.seed())
    layer, tolerance = cache.layout.num_layers - 1, TOLERANCE[cache.dtype]
    k, v, q = (
        torch.randn(batch.total_q, heads, 128, dtype=cache.dtype, device=cache.device) for heads in (8, 8, num_qo_heads)
    )
    found = {}
    for backend, own in ((name, options), against):
        opened = open_backend(backend, cache, num_qo_heads=num_qo_heads, **own)
        opened.plan(batch)
        opened.append(layer, k, v)
        found[backend] = opened.run(layer, q, **(kind or {})).float()
    assert bool(found[name].isfinite().all())
    torch.testing.assert_close(found[name], found[against[0]], atol=tolerance, rtol=tolerance)
    for (begin, end), reqid in zip(itertools.pairwise(batch.cu_q_lens), batch.reqids, strict=True):
        assert reqid >= 0 or not found[name][begin:end].any()


BACKENDS = [
    *(("sdpa", {}, dtype) for dtype in TOLERANCE),
    *(("triton", {}, dtype) for dtype in TOLERANCE),
    ("flashinfer", {}, torch.bfloat16),
    ("flashinfer", {"decode": "triton"}, torch.bfloat16),
    ("flashinfer", {"decode": "triton", "prompts": "fa3"}, torch.bfloat16),
    ("fa3", {}, torch.bfloat16),
    ("fa4", {}, torch.float16),
    ("fa4", {}, torch.bfloat16),
]
IN_PLACE = [(name, {}) for name in ("triton", "flashinfer", "sdpa", "fa3", "fa4")]
"""What reads slices with nothing mapped around them."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "options", "dtype"), BACKENDS)
@pytest.mark.parametrize("num_qo_heads", [8, 32])
def test_mixed_steps(open_cache, layout, name, options, dtype, num_qo_heads):
    cache = open_cache(layout=layout, dtype=dtype)
    check(cache, name, fill(cache, layer=31), num_qo_heads, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "options", "dtype"), BACKENDS)
def test_decode_steps_and_long_prompts(open_cache, layout, name, options, dtype):
    """Lengths that are no multiple of a page of any view; a slot that ends with the plane; a prompt taken in pieces."""
    cache = open_cache(layout=layout, dtype=dtype, num_layers=3, max_seq_len=16_999 if layout == "sliced" else 4097)
    longest = cache.layout.max_seq_len
    assert cache.step([longest] * 8)
    for side in (cache.k(2), cache.v(2)):
        side.normal_()
    lens = [longest, 1, 63, 64, 65, 4000]
    check(cache, name, Batch([7, 0, 3, -1, 2, 5, 1], [1] * 7, [*lens[:3], 0, *lens[3:]]), 32, **options)
    check(cache, name, Batch([7, 0], [longest - 5, 2], [longest, 2]), 8, **options)
    check(cache, name, Batch([3, 7, 1, 2], [1, 1, 40, 3], [65, longest, 4000, longest]), 32, **options)
    check(cache, name, Batch([6, 1, -1, 2], [3] * 4, [3, longest, 3, 90]), 32, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "options"), IN_PLACE)
def test_nothing_behind_the_last_mapped_page_is_read(open_cache, layout, name, options):
    """Lengths that end with a page, the next page not mapped; what reads on faults, and with it the process."""
    cache = open_cache(
        layout=layout, dtype=torch.bfloat16, num_layers=4, max_seq_len=20_000, lookahead_tokens=0, extent_pages=1
    )
    page = cache.layout.tokens_per_page
    lens = [page * count for count in (1, 2, 3, 1, 9, 4, 2, 1)]
    assert cache.step(lens)
    assert cache.stats().waste_bytes == 0
    for side in (cache.k(3), cache.v(3)):
        for reqid, length in enumerate(lens):
            side[reqid, :length].normal_()
    check(cache, name, Batch(range(8), [1] * 8, lens), 32, **options)
    check(cache, name, Batch(range(8), [1, 1, 7, 128, 600, 65, 64, 63], lens), 32, **options)
    torch.cuda.synchronize()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "options"), IN_PLACE)
def test_nothing_is_mapped_where_the_cache_begins(open_cache, layout, name, options):
    """Slot 0 is idle and its pages are gone, so that the first byte of every view is nowhere."""
    cache = open_cache(layout=layout, dtype=torch.bfloat16, num_layers=4, lookahead_tokens=0)
    assert cache.step([5] * 8)
    cache.free_reqid(0)
    cache.trim()
    lens = [0, 700, 8200, 65, 1, 300, 5, 5]
    assert cache.step(lens)
    for side in (cache.k(3), cache.v(3)):
        for reqid, length in enumerate(lens):
            side[reqid, :length].normal_()
    check(cache, name, Batch([3, 1, -1, 4], [1] * 4, [65, 700, 0, 1]), 32, **options)
    check(cache, name, Batch([1, 2, 5], [1, 600, 300], [700, 8200, 300]), 32, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{"window": 300}, {"soft_cap": 20.0}, {"window": 5000, "soft_cap": 20.0}])
def test_windows_and_soft_caps_of_fa4(open_cache, layout, options):
    """Beside the Triton kernels, whose own tests compare them with plain torch."""
    cache = open_cache(layout=layout, dtype=torch.bfloat16)
    check(cache, "fa4", fill(cache, layer=31), 32, against=("triton", options), **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("names", ["window", "soft_cap", "sinks", "window soft_cap sinks"])
@pytest.mark.parametrize("name", ["triton", "sdpa"])
def test_layers_of_each_kind(open_cache, name, names, dtype):
    cache = open_cache(dtype=dtype)
    values = {"window": 300, "soft_cap": 20.0, "sinks": torch.linspace(-3, 5, 32, device=cache.device, dtype=dtype)}
    check(cache, name, fill(cache, layer=31), 32, kind={key: values[key] for key in names.split()})


@pytest.mark.gpu_alone
@pytest.mark.parametrize(
    ("name", "options"),
    [("triton", {}), ("flashinfer", {}), ("flashinfer", {"decode": "triton", "prompts": "fa3"}), ("fa3", {})],
)
def test_steps_that_nobody_waits_for(open_cache, name, options):
    """The host is several steps ahead of the device; every step sees its own plan."""
    cache = open_cache(layout="sliced", dtype=torch.bfloat16, num_layers=2)
    lens = [900, 5000, 64, 300, 1, 2000, 700, 40]
    assert cache.step(lens)
    for side in (cache.k(1), cache.v(1)):
        for reqid, length in enumerate(lens):
            side[reqid, :length].normal_()
    opened = open_backend(name, cache, num_qo_heads=32, **options)
    reference = open_backend("reference", cache, num_qo_heads=32)
    batches = []
    for first, wanted in ((0, (1, 60, 2)), (1, (1, 1, 700)), (2, (1, 40, 30)), (5, (1, 1, 1)), (6, (1, 1, 900))):
        reqids = [first, (first + 3) % 8, (first + 5) % 8]
        seq_lens = [lens[reqid] for reqid in reqids]
        batches.append(Batch(reqids, [min(pair) for pair in zip(wanted, seq_lens, strict=True)], seq_lens))
    queries = [torch.randn(batch.total_q, 32, 128, dtype=torch.bfloat16, device=cache.device) for batch in batches]
    for _ in range(2):  # the first time everything is compiled and loaded
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        found = []
        for batch, q in zip(batches, queries, strict=True):
            opened.plan(batch)
            found.append(opened.run(1, q))
    for batch, q, out in zip(batches, queries, found, strict=True):
        reference.plan(batch)
        torch.testing.assert_close(out.float(), reference.run(1, q).float(), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["sdpa", "triton", "flashinfer"])
@pytest.mark.parametrize("q_lens", [[1, 1, 1], [300, 1, 7], [1, 5, 80]])
def test_append_changes_its_rows_and_no_other(open_cache, layout, q_lens, name):
    """Case A4."""
    cache = open_cache(layout=layout, dtype=torch.bfloat16, num_layers=4)
    cache.step([400] * 8)
    for layer in range(4):
        for side in (cache.k(layer), cache.v(layer)):
            side[:, :400] = 42.0
    reqids, seq_lens = [6, 0, 3], [310, 5, 400]
    # As projections give them: heads of K and V in one row.
    k, v = torch.randn(sum(q_lens), 16, 128, dtype=torch.bfloat16, device=cache.device).split(8, dim=1)
    backend = open_backend(name, cache, num_qo_heads=8)
    backend.plan(Batch(reqids, q_lens, seq_lens))
    backend.append(2, k, v)
    for layer in range(4):
        for side, new in ((cache.k(layer), k), (cache.v(layer), v)):
            expected = torch.full((8, 400, 8, 128), 42.0, dtype=torch.bfloat16, device=cache.device)
            if layer == 2:
                for reqid, q_len, seq_len, rows in zip(reqids, q_lens, seq_lens, new.split(q_lens), strict=True):
                    expected[reqid, seq_len - q_len : seq_len] = rows
            assert torch.equal(side[:, :400], expected)


def test_slots_of_two_to_the_32_elements(open_cache):
    """Cases A1 and A2: a slot of Llama-3-8B at 131,072 tokens."""
    cache = open_cache(dtype=torch.bfloat16, max_seq_len=131_072)
    cache.step([3] * 8)
    v = (
        torch.arange(8, dtype=torch.bfloat16, device=cache.device)
        .repeat_interleave(3)[:, None, None]
        .expand(24, 8, 128)
    )
    for name in ("sdpa", "reference"):
        backend = open_backend(name, cache, num_qo_heads=32)
        backend.plan(Batch(range(8), [3] * 8, [3] * 8))
        backend.append(31, torch.ones_like(v), v)
        out = backend.run(31, torch.ones(24, 32, 128, dtype=torch.bfloat16, device=cache.device))
        assert torch.equal(out, v[:, :1].expand(24, 32, 128))
