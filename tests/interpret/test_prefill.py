"""Prefill in Triton's interpreter against float64. Cases A3, A7, A8, A12."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_reference import attend_all, ends, error, fill, index, planes

from slicedkv.triton_kernels import PrefillTile, prefill_attention

FLOAT32, FLOAT16 = torch.float32, torch.float16
TOLERANCE = {FLOAT32: 2e-6, FLOAT16: 2e-3}


def check(
    reqids: list[int],
    q_lens: list[int],
    seq_lens: list[int],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 32,
    dtype: torch.dtype = FLOAT32,
    cache_dtype: torch.dtype | None = None,
    layout: str = "sliced",
    tile: PrefillTile | None = None,
    max_q_len: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """Run one packed batch on the last of two layers and compare output and LSE."""
    k, v = planes(max(reqids) + 1, 80, 2, heads[1], head_dim, cache_dtype or dtype, layout=layout)
    fill(k[1], v[1], reqids, seq_lens)
    q = torch.randn(sum(q_lens), heads[0], head_dim).to(dtype)
    cu_q_lens = index(ends(q_lens))
    out, lse = prefill_attention(
        q, k[1], v[1], index(reqids), cu_q_lens, index(seq_lens), max_q_len=max_q_len, return_lse=True,
        tile=tile or PrefillTile(rows=32, tokens=16), out=torch.full_like(q, float("nan")), **options,
    )  # fmt: skip
    expected, expected_lse = attend_all(q, k[1], v[1], reqids, q_lens, seq_lens, **options)
    assert error(out, expected) < TOLERANCE[dtype]
    torch.testing.assert_close(lse.double(), expected_lse, atol=TOLERANCE[dtype] * 10, rtol=1e-5)
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16])
def test_lengths_around_tile_edges_with_nan_behind_them(causal: bool, dtype: torch.dtype) -> None:
    lens = [1, 15, 16, 17, 33]
    check([3, 0, 2, 4, 1], lens, lens, causal=causal, dtype=dtype, heads=(2, 1), head_dim=16)


@pytest.mark.parametrize("causal", [True, False])
def test_chunks_on_a_prefix_beside_prompts_and_single_tokens(causal: bool) -> None:
    check([2, 0, 5, 1, 3], [7, 1, 0, 20, 16], [40, 33, 9, 20, 64], causal=causal)


@pytest.mark.parametrize("max_q_len", [1, 3, 40])
def test_a_bound_of_the_new_tokens_makes_smaller_tiles(max_q_len: int) -> None:
    q_lens = [min(max_q_len, 3), 1, min(max_q_len, 40)]
    check([0, 1, 2], q_lens, [50, 17, 41], max_q_len=max_q_len, tile=PrefillTile(rows=64, tokens=16))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_head_dims(head_dim: int) -> None:
    check([1, 0], [5, 18], [19, 18], head_dim=head_dim, heads=(2, 1), dtype=FLOAT16)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (4, 1), (14, 2), (9, 3), (40, 1)])
def test_head_groups(heads: tuple[int, int]) -> None:
    check([1, 0], [5, 11], [19, 11], heads=heads)


@pytest.mark.parametrize("layout", ["sliced", "interleaved", "per_layer"])
def test_layouts(layout: str) -> None:
    check([1, 0], [5, 18], [19, 18], layout=layout)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 100])
def test_window(window: int) -> None:
    check([1, 0], [20, 33], [50, 33], window=window)


@pytest.mark.parametrize("options", [{"soft_cap": 2.0}, {"scale": 0.5}, {"soft_cap": 1.0, "window": 9, "scale": 3.0}])
def test_scores(options: dict[str, float]) -> None:
    check([1, 0], [20, 5], [50, 33], **options)


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_caches(cache_dtype: torch.dtype) -> None:
    check([1, 0], [20, 5], [33, 5], cache_dtype=cache_dtype, k_scale=0.5, v_scale=3.0)
    check([1, 0], [20, 5], [33, 5], cache_dtype=cache_dtype, dtype=FLOAT16)


def test_padded_lanes_read_and_write_nothing() -> None:
    out = check([-1, 1, -1, 0], [3, 18, 0, 2], [9, 18, 4, 30])
    assert (out[:3] == 0).all()
    check([0, -1], [3, 40], [9, 40], causal=False)


def test_new_tokens_beyond_a_length_see_nothing() -> None:
    out = check([0, 1], [6, 3], [4, 3])
    assert (out[:2] == 0).all()


def test_rows_of_nobody_are_left_alone() -> None:
    k, v = planes(1, 20, 1, 1, 16, FLOAT32)
    fill(k[0], v[0], [0], [20])
    out = torch.full((9, 2, 16), 7.0)
    prefill_attention(torch.randn(9, 2, 16), k[0], v[0], index([0]), index([0, 5]), index([20]), out=out)
    assert (out[5:] == 7).all()
    assert (out[:5] != 7).all()


def test_nothing_to_do() -> None:
    k, v = planes(1, 20, 1, 1, 16, FLOAT32)
    q = torch.randn(0, 2, 16)
    assert prefill_attention(q, k[0], v[0], index([]), index([0]), index([])).shape == (0, 2, 16)
    assert prefill_attention(q, k[0], v[0], index([0]), index([0, 0]), index([20])).shape == (0, 2, 16)


def test_strided_queries_and_wide_indices() -> None:
    k, v = planes(1, 20, 1, 1, 16, FLOAT32)
    fill(k[0], v[0], [0], [20])
    q = torch.randn(3, 9, 40)[:, :, 8:24].transpose(0, 1)
    wide = [index(values, dtype=torch.int64) for values in ([0], [0, 9], [20])]
    out = prefill_attention(q, k[0], v[0], *wide)
    assert error(out, attend_all(q, k[0], v[0], [0], [9], [20])[0]) < 1e-6
