"""Append in Triton's interpreter. Cases A3, A4, A8, A12."""

from __future__ import annotations

import pytest
import torch
from kernel_reference import ends, error, index, planes, rotate

from slicedkv.triton_kernels import AppendTile, append_kv

FLOAT32, FLOAT16 = torch.float32, torch.float16
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
REQIDS, Q_LENS, SEQ_LENS = [2, -1, 0, 3], [7, 3, 1, 0], [20, 3, 33, 5]


def expected_rows(cache: torch.Tensor, rows: torch.Tensor, layer: int) -> torch.Tensor:
    """Copy of all layers with the batch's rows in one of them."""
    expected = cache.clone()
    for begin, reqid, q_len, length in zip(ends(Q_LENS), REQIDS, Q_LENS, SEQ_LENS, strict=False):
        if reqid >= 0:
            expected[layer, reqid, length - q_len : length] = rows[begin : begin + q_len]
    return expected


def batch() -> list[torch.Tensor]:
    """Reqids, packed rows and lengths."""
    return [index(REQIDS), index(ends(Q_LENS)), index(SEQ_LENS)]


@pytest.mark.parametrize("layout", ["sliced", "interleaved", "per_layer"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_only_the_rows_named_change(layout: str, head_dim: int) -> None:
    k, v = planes(4, 40, 3, 2, head_dim, FLOAT16, layout=layout)
    k.zero_(), v.zero_()
    k_new, v_new = (torch.randn(11, 2, head_dim).half() for _ in range(2))
    expected = expected_rows(k, k_new, 1), expected_rows(v, v_new, 1)
    assert append_kv(k_new, v_new, k[1], v[1], *batch(), tile=AppendTile(tokens=4)) is None
    assert torch.equal(k, expected[0])
    assert torch.equal(v, expected[1])


def test_strided_rows_and_wide_indices() -> None:
    k, v = planes(4, 40, 2, 3, 32, FLOAT32)
    k.zero_(), v.zero_()
    both = torch.randn(11, 3, 2, 40)
    k_new, v_new = both[:, :, 0, 8:], both[:, :, 1, :32]
    expected = expected_rows(k, k_new, 0), expected_rows(v, v_new, 0)
    append_kv(k_new, v_new, k[0], v[0], *(values.long() for values in batch()))
    assert torch.equal(k, expected[0])
    assert torch.equal(v, expected[1])


@pytest.mark.parametrize("rotary", [False, True])
def test_one_row_a_lane_needs_no_ends(rotary: bool) -> None:
    reqids, lens = index([2, -1, 0, 3, 1]), index([20, 3, 40, 0, 41])  # one padded, one empty, one past the cache
    new, q = torch.randn(5, 2, 32), torch.randn(5, 4, 32)
    new[1], q[1] = float("nan"), float("nan")
    angles = torch.rand(40, 16) * 6
    options = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "q": q} if rotary else {}
    results = []
    for cu_q_lens in (index(range(6)), None):
        k, v = planes(4, 40, 2, 2, 32, FLOAT32)
        k.zero_(), v.zero_()
        results.append((k, v, append_kv(new, -new, k[1], v[1], reqids, cu_q_lens, lens, **options)))
    for one, other in zip(*results, strict=True):
        assert one is other is None or torch.equal(one, other)
    k, v, _ = results[1]
    assert torch.equal(v[1, 2, 19], -new[0])
    assert (v != 0).any(dim=-1).any(dim=-1).sum() == (k != 0).any(dim=-1).any(dim=-1).sum() == 2


@pytest.mark.parametrize("head_dim", [64, 80])
def test_rotary_at_the_positions_in_the_cache(head_dim: int) -> None:
    k, v = planes(4, 40, 2, 2, head_dim, FLOAT32)
    k.zero_(), v.zero_()
    angles = torch.rand(40, head_dim // 2) * 6
    k_new, v_new, q = torch.randn(11, 2, head_dim), torch.randn(11, 2, head_dim), torch.randn(11, 6, head_dim)
    q_out = append_kv(k_new, v_new, k[1], v[1], *batch(), rotary_cos=angles.cos(), rotary_sin=angles.sin(), q=q)
    at = torch.tensor([*range(13, 20), 0, 0, 0, 32])
    turned = rotate(k_new, angles.cos()[at], angles.sin()[at]).float()
    torch.testing.assert_close(k, expected_rows(torch.zeros_like(k), turned, 1))
    assert torch.equal(v, expected_rows(torch.zeros_like(v), v_new, 1))
    expected = rotate(q, angles.cos()[at], angles.sin()[at])
    expected[7:10] = 0
    assert q_out is not None
    assert error(q_out, expected) < 1e-6
    assert (q_out[7:10] == 0).all()


def test_rotary_at_given_positions_and_in_place() -> None:
    k, v = planes(4, 40, 1, 2, 32, FLOAT32)
    k.zero_(), v.zero_()
    angles = torch.rand(11, 16) * 6
    k_new, v_new, q = torch.randn(11, 2, 32), torch.randn(11, 2, 32), torch.randn(11, 2, 32)
    expected = rotate(q, angles.cos(), angles.sin())
    expected[7:10] = 0
    tables = {"rotary_cos": angles.cos().repeat(1, 2)[:, :16], "rotary_sin": angles.sin()}
    assert append_kv(k_new, v_new, k[0], v[0], *batch(), **tables, positions=torch.arange(11), q=q, q_out=q) is q
    assert error(q, expected) < 1e-6
    turned = rotate(k_new, angles.cos(), angles.sin()).float()
    torch.testing.assert_close(k, expected_rows(torch.zeros_like(k), turned, 0))


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("source", [FLOAT32, FLOAT16])
def test_float8_caches_hold_values_within_their_range(dtype: torch.dtype, source: torch.dtype) -> None:
    """Exact values only, and NaN in one type only: the interpreter loses a carry in rounding and has no NaN in e4m3."""
    k, v = planes(4, 40, 1, 2, 32, dtype)
    for cache in (k, v):
        cache.copy_(torch.zeros(cache.shape))
    k_new, v_new = (torch.randint(-3, 4, (11, 2, 32)).to(source) for _ in range(2))
    k_new[0, 0, 0], k_new[0, 0, 1] = 30000.0, float("-inf")
    v_new[1, 1, 17] = float("nan") if dtype == torch.float8_e5m2 else 2.0
    limit = torch.finfo(dtype).max
    scaled = (k_new.float() / 0.5).clamp(-limit, limit).to(dtype), (v_new.float() / 4.0).to(dtype)
    append_kv(k_new, v_new, k[0], v[0], *batch(), k_scale=0.5, v_scale=4.0)
    for cache, rows in zip((k, v), scaled, strict=True):
        expected = expected_rows(torch.zeros(cache.shape), rows.float(), 0)
        torch.testing.assert_close(cache.float(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8_rows_are_copied(dtype: torch.dtype) -> None:
    k, v = planes(4, 40, 1, 1, 16, dtype)
    k_new, v_new = (torch.randint(0, 120, (11, 1, 16), dtype=torch.uint8).view(dtype) for _ in range(2))
    append_kv(k_new, v_new, k[0], v[0], *batch())
    assert torch.equal(k[0, 2, 13:20].view(torch.uint8), k_new[:7].view(torch.uint8))
    assert torch.equal(v[0, 0, 32:33].view(torch.uint8), v_new[10:11].view(torch.uint8))


def test_positions_outside_the_cache_and_unknown_slots_write_nothing() -> None:
    k, v = planes(2, 8, 1, 1, 16, FLOAT32)
    k.zero_(), v.zero_()
    k_new = torch.ones(6, 1, 16)
    append_kv(k_new, k_new, k[0], v[0], index([0, 1, 2]), index([0, 3, 5, 6]), index([10, 1, 4]))
    written = torch.zeros(2, 8)
    written[0, 7] = written[1, 0] = 1
    assert torch.equal(k[0, :, :, 0, 0], written)
    assert torch.equal(v[0, :, :, 0, 0], written)
