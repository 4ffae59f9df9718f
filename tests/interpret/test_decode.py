"""Decode in Triton's interpreter against float64. Cases A3, A7, A8, A12."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from kernel_reference import attend_all, error, fill, index, planes

from slicedkv.triton_kernels import DecodeTile, decode_attention, decode_plan, decode_workspace_numel
from slicedkv.triton_kernels.checks import Traits

FLOAT32, FLOAT16 = torch.float32, torch.float16
TOLERANCE = {FLOAT32: 2e-6, FLOAT16: 2e-3}


def tile_of(tokens: int, head_dim: int, dtype: torch.dtype, heads: int = 1) -> DecodeTile:
    """Tile of so many tokens of one head."""
    return DecodeTile(
        tile_bytes=tokens * heads * max(16, 1 << (head_dim - 1).bit_length()) * dtype.itemsize, heads=heads
    )


def check(
    reqids: list[int],
    seq_lens: list[int],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 32,
    dtype: torch.dtype = FLOAT32,
    cache_dtype: torch.dtype | None = None,
    layout: str = "sliced",
    tokens: int = 16,
    heads_a_program: int = 1,
    q_len: int = 1,
    num_splits: int | None = None,
    max_seq_len: int = 40,
    uneven: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Run one batch on the last of two layers and compare output and LSE."""
    cache_dtype = cache_dtype or dtype
    k, v = planes(max(reqids) + 1, max_seq_len, 2, heads[1], head_dim, cache_dtype, layout=layout)
    fill(k[1], v[1], reqids, seq_lens)
    q = torch.randn(len(reqids) * q_len, heads[0], head_dim).to(dtype)
    tile = tile_of(tokens, head_dim, cache_dtype, heads_a_program)
    out, lse = decode_attention(
        q, k[1], v[1], index(reqids), index(seq_lens), q_len=q_len, num_splits=num_splits, tile=tile, return_lse=True,
        out=torch.full_like(q, float("nan")), uneven=uneven, **options,
    )  # fmt: skip
    expected, expected_lse = attend_all(q, k[1], v[1], reqids, [q_len] * len(reqids), seq_lens, **options)
    assert out.dtype == dtype
    assert error(out, expected) < TOLERANCE[dtype]
    torch.testing.assert_close(lse.double(), expected_lse, atol=TOLERANCE[dtype] * 10, rtol=1e-5)
    return out


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_lengths_around_tile_edges_with_nan_behind_them(dtype: torch.dtype, num_splits: int) -> None:
    lens = [0, 1, 15, 16, 17, 31, 32, 33, 40]
    check([3, 0, 7, 5, 1, 8, 2, 4, 6], lens, dtype=dtype, num_splits=num_splits, heads=(2, 1), head_dim=16)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_head_dims(head_dim: int) -> None:
    check([1, 0], [19, 33], head_dim=head_dim, num_splits=2, heads=(2, 1), dtype=FLOAT16)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (4, 1), (14, 2), (20, 1), (9, 3)])
def test_head_groups(heads: tuple[int, int]) -> None:
    check([1, 0], [9, 33], heads=heads)


@pytest.mark.parametrize("layout", ["sliced", "interleaved", "per_layer"])
@pytest.mark.parametrize("heads_a_program", [1, 2, 4, 8])
def test_layouts_and_heads_a_program(layout: str, heads_a_program: int) -> None:
    check([1, 0], [18, 33], heads=(16, 8), head_dim=16, layout=layout, heads_a_program=heads_a_program, num_splits=2)


def test_heads_that_share_a_program_share_nothing_else() -> None:
    k, v = planes(1, 20, 1, 2, 16, FLOAT32)
    fill(k[0], v[0], [0], [20])
    v[0][0, :, 1] = float("nan")
    tile = tile_of(16, 16, FLOAT32, heads=2)
    out = decode_attention(torch.randn(1, 2, 16), k[0], v[0], index([0]), index([20]), tile=tile)
    assert isinstance(out, torch.Tensor)
    assert out[:, 0].isfinite().all()
    assert out[:, 1].isnan().all()


@pytest.mark.parametrize("q_len", [2, 3, 5])
@pytest.mark.parametrize("window", [None, 4, 17])
def test_several_tokens_are_causal_among_themselves(q_len: int, window: int | None) -> None:
    check([1, 0, 2], [5, 33, 18], q_len=q_len, window=window, num_splits=2)


def test_more_rows_than_one_tile_takes() -> None:
    check([0], [33], q_len=5, heads=(40, 2), num_splits=2)


def test_a_request_shorter_than_its_new_tokens_sees_what_there_is() -> None:
    out = check([0, 1], [2, 7], q_len=4)
    assert (out[:2] == 0).all()


@pytest.mark.parametrize("window", [1, 15, 16, 17, 100])
def test_window(window: int) -> None:
    check([1, 0], [33, 5], window=window, num_splits=2)


@pytest.mark.parametrize("options", [{"soft_cap": 2.0}, {"scale": 0.5}, {"soft_cap": 1.0, "window": 9, "scale": 3.0}])
def test_scores(options: dict[str, float]) -> None:
    check([1, 0], [33, 5], **options)


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_caches(cache_dtype: torch.dtype) -> None:
    check([1, 0], [33, 5], cache_dtype=cache_dtype, k_scale=0.5, v_scale=3.0, num_splits=2)
    check([1, 0], [33, 5], cache_dtype=cache_dtype, dtype=FLOAT16)


def parts_case(num_splits: int, q_len: int, uneven: bool, window: int | None) -> Any:
    """More than 64 parts, which are joined in two goes, take long; 5 show what 2 and 12 do."""
    quick = num_splits in (2, 12) or (q_len, uneven, window) in {(3, False, None), (1, True, 20)}
    return pytest.param(num_splits, q_len, uneven, window, marks=[] if quick else [pytest.mark.thorough])


PARTS = [parts_case(*values) for values in product([2, 5, 12, 65], [1, 3], [False, True], [None, 20])]


@pytest.mark.parametrize(("num_splits", "q_len", "uneven", "window"), PARTS)
def test_parts_of_each_request_and_of_all(num_splits: int, q_len: int, uneven: bool, window: int | None) -> None:
    """Parts of one tile, parts of several requests, requests of no tile at either end and between."""
    options = {"num_splits": num_splits, "q_len": q_len, "uneven": uneven, "window": window}
    reqids, lens = [6, 3, 0, 7, -1, 5, 1, 8, 2, 4, 9], [0, 40, 3, 0, 0, 17, 16, 40, 1, 33, 0]
    if num_splits > 5 and not uneven:  # parts are those of 5, all of one tile; only how many are joined differs
        reqids, lens = [3, -1, 5, 0], [40, 16, 17, 0]
    check(reqids, lens, heads=(2, 1), head_dim=16, **options)
    check([0, 1], [0, 0], heads=(2, 1), head_dim=16, **options)


def test_uneven_requests_are_split_though_they_fill_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_plan, "traits", lambda device: Traits((0, 0), 3))
    k, v = planes(6, 160, 1, 1, 16, FLOAT32)
    q = torch.randn(6, 2, 16)
    tile = tile_of(16, 16, FLOAT32)
    assert decode_workspace_numel(q, k[0], v[0], tile=tile) == 0
    assert decode_workspace_numel(q, k[0], v[0], tile=tile, uneven=True) == 2 * 6 * 2 * 17
    check([5, 4, 3, 2, 1, 0], [160, 1, 0, 5, 90, 2], max_seq_len=160, heads=(2, 1), head_dim=16, uneven=True)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_padded_lanes_read_and_write_nothing(num_splits: int) -> None:
    k, v = planes(3, 20, 1, 2, 16, FLOAT32)
    fill(k[0], v[0], [1], [20])
    for length in (18, 19, 20):
        q = torch.randn(4, 4, 16)
        q[0] = float("nan")
        before = k.clone(), v.clone()
        reqids, lens = [-1, 1, -1, 3], [7, length, 0, 9]
        out = decode_attention(q, k[0], v[0], index(reqids), index(lens), num_splits=num_splits)
        expected, _ = attend_all(q, k[0], v[0], [-1, 1, -1, -1], [1] * 4, lens)
        assert error(out, expected) < 1e-6
        assert (out[[0, 2, 3]] == 0).all()
        for cache, old in zip((k, v), before, strict=True):
            torch.testing.assert_close(cache, old, equal_nan=True, rtol=0, atol=0)


def test_lengths_beyond_the_cache_are_cut() -> None:
    k, v = planes(1, 20, 1, 1, 16, FLOAT32)
    fill(k[0], v[0], [0], [20])
    q = torch.randn(1, 2, 16)
    out = decode_attention(q, k[0], v[0], index([0]), index([1000], dtype=torch.int64))
    assert error(out, attend_all(q, k[0], v[0], [0], [1], [20])[0]) < 1e-6


def test_strided_queries_and_outputs_and_no_lanes() -> None:
    k, v = planes(1, 20, 1, 1, 16, FLOAT32)
    fill(k[0], v[0], [0], [20])
    q = torch.randn(2, 3, 40)[:, :, 8:24]
    out = torch.zeros(2, 6, 16)[:, ::2]
    returned = decode_attention(q, k[0], v[0], index([0, -1]), index([20, 0]), out=out)
    assert returned is out
    assert error(out, attend_all(q, k[0], v[0], [0, -1], [1, 1], [20, 0])[0]) < 1e-6
    assert decode_attention(q[:0], k[0], v[0], index([]), index([])).shape == (0, 3, 16)


def test_a_workspace_is_used_and_measured() -> None:
    k, v = planes(1, 64, 1, 1, 16, FLOAT32)
    fill(k[0], v[0], [0], [64])
    q, lens = torch.randn(1, 2, 16), index([64])
    numel = decode_workspace_numel(q, k[0], v[0], num_splits=3)
    assert numel == 2 * 3 * 17
    assert decode_workspace_numel(q, k[0], v[0], num_splits=1) == 0
    workspace = torch.full((numel,), float("nan"))
    decode_attention(q, k[0], v[0], index([0]), lens, num_splits=3, workspace=workspace, tile=tile_of(16, 16, FLOAT32))
    assert workspace.isfinite().sum() == 2 * 2 * 17, "four tiles in three parts fill two"
    with pytest.raises(ValueError, match="101 elements; 3 parts need 102"):
        decode_attention(q, k[0], v[0], index([0]), lens, num_splits=3, workspace=workspace[:-1])
