"""SDPA against the reference on a GPU, with real shapes in the three layouts, NaN past every length."""

from __future__ import annotations

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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_qo_heads", [8, 32])
def test_sdpa_equals_the_reference(open_cache, layout, dtype, num_qo_heads):
    cache = open_cache(layout=layout, dtype=dtype)
    torch.manual_seed(0)
    batch = fill(cache, layer=31)
    k, v, q = (
        torch.randn(batch.total_q, heads, 128, dtype=dtype, device=cache.device) for heads in (8, 8, num_qo_heads)
    )
    found = {}
    for name in ("sdpa", "reference"):
        backend = open_backend(name, cache, num_qo_heads=num_qo_heads)
        backend.plan(batch)
        backend.append(31, k, v)
        found[name] = backend.run(31, q).float()
    assert bool(found["sdpa"].isfinite().all())
    torch.testing.assert_close(found["sdpa"], found["reference"], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    padded = batch.cu_q_lens[3]
    assert not found["sdpa"][padded : padded + 2].any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("q_lens", [[1, 1, 1], [300, 1, 7]])
def test_append_changes_its_rows_and_no_other(open_cache, layout, q_lens):
    """Case A4."""
    cache = open_cache(layout=layout, dtype=torch.bfloat16, num_layers=4)
    cache.step([400] * 8)
    for layer in range(4):
        for side in (cache.k(layer), cache.v(layer)):
            side[:, :400] = 42.0
    reqids, seq_lens = [6, 0, 3], [310, 5, 400]
    k, v = (torch.randn(sum(q_lens), 8, 128, dtype=torch.bfloat16, device=cache.device) for _ in range(2))
    backend = open_backend("sdpa", cache, num_qo_heads=8)
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
