"""The Triton kernels on a GPU, on fresh random data against float64. Cases A4, A6-A8, A12, A13."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import triton
from kernel_reference import attend_all, ends, error, fill, index, planes, rotate

from slicedkv.triton_kernels import DecodeTile, append_kv, decode_attention, decode_workspace_numel, prefill_attention

pytestmark = pytest.mark.gpu
FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOLERANCE = {FLOAT32: 1e-5, FLOAT16: 2e-3, BFLOAT16: 1e-2}
DTYPES = [(FLOAT32, FLOAT32), (FLOAT16, FLOAT16), (BFLOAT16, BFLOAT16), (BFLOAT16, E4M3), (FLOAT16, E5M2)]
HOLES = [5, -1, 0, 3, 7, -1, 2]
EDGES = [1, 9, 63, 64, 65, 3, 129]


@pytest.fixture(autouse=True)
def _fresh(cuda_device: str) -> None:
    """Other values each time."""
    torch.manual_seed(torch.seed())


def test_where_a_batch_begins_makes_no_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of lanes are slices of one; a second's compiling for each way they may be aligned was seen in serving."""
    compiled: list[str] = []
    hook = lambda **found: compiled.append(found["fn"].name)  # noqa: E731
    (k, *_), (v, *_) = planes(40, 300, 2, 2, 128, BFLOAT16, layout="sliced", device="cuda")
    for values in (k, v):
        values.normal_()
    for lanes in (32, 31, 30, 29):
        if lanes == 31:
            monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", hook)
        values = [*range(lanes), *[200] * lanes, *range(lanes + 1), *[7] * lanes]
        packed = index(values, "cuda")
        reqids, seq_lens, cu_q_lens, positions = packed.split([lanes, lanes, lanes + 1, lanes])
        q, new = (torch.randn(lanes, heads, 128, device="cuda").bfloat16() for heads in (8, 2))
        cos, sin = (torch.randn(300, 64, device="cuda") for _ in range(2))
        for ends_ in (cu_q_lens, None):
            append_kv(new, new, k, v, reqids, ends_, seq_lens)
        append_kv(new, new, k, v, reqids, None, seq_lens, rotary_cos=cos, rotary_sin=sin, positions=positions)
        for uneven in (False, True):
            decode_attention(q, k, v, reqids, seq_lens, uneven=uneven, num_splits=40)
        prefill_attention(q, k, v, reqids, cu_q_lens, seq_lens)
    assert compiled == []


def check(
    reqids: list[int],
    q_lens: list[int],
    seq_lens: list[int],
    *,
    dtypes: tuple[torch.dtype, torch.dtype] = (BFLOAT16, BFLOAT16),
    shape: tuple[int, int, int, int] = (8, 300, 3, 2),
    group: int = 4,
    head_dim: int = 128,
    layout: str = "sliced",
    layer: int = -1,
    decode: dict[str, Any] | None = None,
    prefill: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Run prefill, and decode where all lanes have as many new tokens, on one layer of ``(B, L, N, H)`` planes."""
    batch, length, layers, heads = shape
    k, v = planes(batch, length, layers, heads, head_dim, dtypes[1], layout=layout, device="cuda")
    fill(k[layer], v[layer], reqids, seq_lens)
    q = torch.randn(sum(q_lens), heads * group, head_dim, device="cuda").to(dtypes[0])
    lanes, cu_q_lens = (index(reqids, "cuda"), index(seq_lens, "cuda")), index(ends(q_lens), "cuda")
    expected, expected_lse = attend_all(q, k[layer], v[layer], reqids, q_lens, seq_lens, **options)
    results = []
    if decode is not None:
        poison = torch.full_like(q, float("nan"))
        options_of = options | decode
        results.append(
            decode_attention(q, k[layer], v[layer], *lanes, q_len=q_lens[0], out=poison, return_lse=True, **options_of)
        )
    if prefill is not None:
        poison = torch.full_like(q, float("nan"))
        options_of = options | prefill
        args = (lanes[0], cu_q_lens, lanes[1])
        results.append(prefill_attention(q, k[layer], v[layer], *args, out=poison, return_lse=True, **options_of))
    for out, lse in results:
        assert error(out, expected) < TOLERANCE[dtypes[0]]
        torch.testing.assert_close(lse.double(), expected_lse, atol=0.03, rtol=1e-3)


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_dtypes_and_head_dims(dtypes: tuple[torch.dtype, torch.dtype], head_dim: int) -> None:
    scales = {"k_scale": 0.5, "v_scale": 2.0} if dtypes[1].itemsize == 1 else {}
    check(HOLES, [1] * 7, EDGES, dtypes=dtypes, head_dim=head_dim, decode={"num_splits": 3}, prefill={}, **scales)
    check(HOLES, [1, 3, 63, 9, 65, 0, 100], EDGES, dtypes=dtypes, head_dim=head_dim, prefill={}, **scales)


@pytest.mark.parametrize("num_splits", [None, 1, 2, 7])
def test_lengths_around_tile_edges_with_nan_behind_them(cuda_device: str, num_splits: int | None) -> None:
    """A7: the rows past a length hold NaN; infinities are tried too."""
    for first in range(0, 130, 13):
        lens = list(range(first, first + 13))
        check(list(range(13)), [1] * 13, lens, shape=(13, 150, 2, 2), decode={"num_splits": num_splits}, prefill={})


def test_infinities_behind_a_length(cuda_device: str) -> None:
    k, v = planes(2, 200, 2, 2, 128, BFLOAT16, device="cuda")
    k.fill_(float("inf")), v.fill_(float("-inf"))
    fill(k[1], v[1], [0, 1], [70, 33])
    q = torch.randn(2, 8, 128, device="cuda").bfloat16()
    expected, _ = attend_all(q, k[1], v[1], [0, 1], [1, 1], [70, 33])
    lanes = index([0, 1], "cuda"), index([70, 33], "cuda")
    assert error(decode_attention(q, k[1], v[1], *lanes), expected) < 1e-2
    assert error(prefill_attention(q, k[1], v[1], lanes[0], index([0, 1, 2], "cuda"), lanes[1]), expected) < 1e-2


@pytest.mark.parametrize("layout", ["sliced", "interleaved", "per_layer"])
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_layouts_and_heads_a_program(layout: str, heads: int) -> None:
    tile = DecodeTile(tile_bytes=16384, heads=heads, stages=3)
    shape = (8, 300, 3, 8)
    for group, q_len in itertools.product((1, 2, 4), (1, 2)):
        check(
            HOLES, [q_len] * 7, [50, 9, 300, 63, 2, 0, 129], shape=shape, group=group, layout=layout,
            decode={"tile": tile, "num_splits": 2}, prefill={},
        )  # fmt: skip


@pytest.mark.parametrize("group", [1, 2, 3, 7, 8, 16, 20, 71])
def test_head_groups(cuda_device: str, group: int) -> None:
    check([1, 0, 3], [1, 1, 1], [300, 65, 0], group=group, decode={}, prefill={})
    check([1, 0, 3], [70, 65, 1], [300, 65, 9], group=group, prefill={})


@pytest.mark.parametrize("q_len", [2, 4, 5, 17])
@pytest.mark.parametrize("window", [None, 1, 63, 64, 65, 1000])
def test_several_tokens_and_windows(q_len: int, window: int | None) -> None:
    check([1, 0, 3], [q_len] * 3, [300, 65, 17], window=window, decode={"num_splits": 3}, prefill={})


@pytest.mark.parametrize("options", [{"soft_cap": 5.0}, {"scale": 0.3}, {"soft_cap": 20.0, "window": 77, "scale": 1.0}])
def test_scores(options: dict[str, Any]) -> None:
    check([1, 0, 3], [9] * 3, [300, 65, 17], decode={"num_splits": 3}, prefill={}, **options)
    check([1, 0, 3], [129, 65, 17], [300, 65, 17], prefill={}, **options)


def test_not_causal(cuda_device: str) -> None:
    check([1, 0, -1, 3], [129, 65, 5, 2], [300, 65, 17, 250], prefill={}, causal=False)


def test_a_batch_of_long_and_short(cuda_device: str) -> None:
    q_lens, lens = [1000, 1, 7, 0, 513, 1], [1000, 3000, 2500, 9, 2049, 1]
    check([5, 4, 3, 2, 1, 0], q_lens, lens, shape=(6, 3000, 2, 2), prefill={})
    check([5, 4, 3, 2, 1, 0], [1] * 6, lens, shape=(6, 3000, 2, 2), decode={}, prefill={"max_q_len": 1})


@pytest.mark.parametrize("shape", [(1, 70, 2, 2), (3, 1, 2, 2), (3, 70, 1, 2), (3, 70, 2, 1), (1, 1, 1, 1)])
def test_arguments_equal_to_one(shape: tuple[int, int, int, int]) -> None:
    """A6: B, L, N and H each 1, and one lane, one row, one query head."""
    reqid, length = shape[0] - 1, shape[1]
    for group in (1, 4):
        check([reqid], [1], [length], shape=shape, group=group, decode={}, prefill={})
        check([reqid], [1], [length], shape=shape, group=group, decode={"num_splits": 2})
    k, v = planes(*shape, 64, BFLOAT16, device="cuda")
    new = torch.randn(1, shape[3], 64, device="cuda").bfloat16()
    append_kv(new, new, k[-1], v[-1], *(index(values, "cuda") for values in ([reqid], [0, 1], [length])))
    assert torch.equal(k[-1, reqid, length - 1], new[0])
    assert torch.equal(v[-1, reqid, length - 1], new[0])


def batch_of(reqids: list[int], q_lens: list[int], seq_lens: list[int]) -> list[torch.Tensor]:
    """Lanes for append."""
    return [index(values, "cuda") for values in (reqids, ends(q_lens), seq_lens)]


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_append_changes_only_the_rows_named(dtype: torch.dtype, head_dim: int) -> None:
    """A4: everything else keeps its canary; K turned, q turned, V as it is."""
    reqids, q_lens, lens = [2, -1, 0, 3], [70, 3, 1, 0], [100, 3, 33, 5]
    k, v = planes(4, 120, 3, 2, head_dim, dtype, device="cuda")
    k.fill_(7), v.fill_(7)
    expected_k, expected_v = k.clone(), v.clone()
    angles = torch.rand(120, head_dim // 2, device="cuda") * 6
    tables = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    k_new, v_new = (torch.randn(74, 2, head_dim, device="cuda").to(dtype) for _ in range(2))
    q = torch.randn(74, 6, head_dim, device="cuda").to(dtype)
    at = torch.tensor([*range(30, 100), 0, 0, 0, 32])
    turned = rotate(k_new, angles.cos()[at], angles.sin()[at])
    for rows, target in ((turned.to(dtype), expected_k), (v_new, expected_v)):
        target[1, 2, 30:100], target[1, 0, 32] = rows[:70], rows[73]
    q_out = append_kv(k_new, v_new, k[1], v[1], *batch_of(reqids, q_lens, lens), **tables, q=q)
    assert q_out is not None
    expected_q = rotate(q, angles.cos()[at], angles.sin()[at])
    expected_q[70:73] = 0
    assert error(q_out, expected_q) < TOLERANCE[dtype] / 2
    assert (q_out[70:73] == 0).all()
    torch.testing.assert_close(k, expected_k, rtol=2**-7 if dtype == BFLOAT16 else 2**-10, atol=1e-5)
    assert torch.equal(k[[0, 2]], expected_k[[0, 2]])
    assert torch.equal(v, expected_v)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("source", [FLOAT32, FLOAT16, BFLOAT16])
def test_append_to_float8(dtype: torch.dtype, source: torch.dtype) -> None:
    """A12: as torch casts, except beyond the largest value, where torch has NaN or infinity; NaN stays NaN."""
    k, v = planes(2, 600, 2, 2, 128, dtype, device="cuda")
    k_new, v_new = (torch.randn(500, 2, 128, device="cuda").to(source) * 8 for _ in range(2))
    k_new[0, 0, 0], k_new[0, 0, 1], k_new[0, 0, 2] = 60000.0, float("-inf"), float("nan")
    append_kv(k_new, v_new, k[1], v[1], *batch_of([1], [500], [600]), k_scale=0.25, v_scale=4.0)
    limit = torch.finfo(dtype).max
    for cache, rows, scale in ((k, k_new, 0.25), (v, v_new, 4.0)):
        expected = (rows.float() / scale).clamp(-limit, limit).to(dtype).float()
        torch.testing.assert_close(cache[1, 1, 100:].float(), expected, rtol=0, atol=0, equal_nan=True)
    assert v[1, 1, :100].float().isnan().all()


def test_the_wrong_float8_flavour_is_refused(cuda_device: str) -> None:
    k, v = planes(1, 8, 1, 1, 16, E4M3, device="cuda")
    new = torch.zeros(1, 1, 16, device="cuda").to(E5M2)
    with pytest.raises(TypeError, match=r"k_new is torch.float8_e5m2; it does not go with a cache of .*e4m3fn"):
        append_kv(new, new, k[0], v[0], *batch_of([0], [1], [1]))


def test_padded_lanes_in_three_steps_touch_nothing(cuda_device: str) -> None:
    """A8: real rows finite and right, no other slot changed."""
    k, v = planes(4, 100, 2, 2, 128, BFLOAT16, device="cuda")
    fill(k[1], v[1], [2, 0], [40, 64])
    reqids = [2, -1, 0, -1]
    for step in range(1, 4):
        lens = [40 + step, 5, 64 + step, 0]
        canary = k[:, [1, 3]].clone()
        new, q = (torch.randn(4, heads, 128, device="cuda").bfloat16() for heads in (2, 8))
        new[1], q[1] = float("nan"), float("nan")
        append_kv(new, new, k[1], v[1], *batch_of(reqids, [1] * 4, lens))
        for num_splits in (1, 4):
            out = decode_attention(q, k[1], v[1], index(reqids, "cuda"), index(lens, "cuda"), num_splits=num_splits)
            assert error(out, attend_all(q, k[1], v[1], reqids, [1] * 4, lens)[0]) < 1e-2
            assert (out[[1, 3]] == 0).all()
        assert torch.equal(k[:, [1, 3]].isnan(), canary.isnan())


def test_a_captured_graph_replays_with_other_slots_and_lengths(cuda_device: str) -> None:
    """A13: captured at length 8 in slot 0, replayed at 9 in slot 3, at 0, padded, and at the end of the cache."""
    k, v = planes(4, 5000, 2, 2, 128, BFLOAT16, device="cuda")
    fill(k[1], v[1], [0, 3], [8, 4999])
    q, new = torch.randn(1, 8, 128, device="cuda").bfloat16(), torch.randn(1, 2, 128, device="cuda").bfloat16()
    reqids, lens, cu_q_lens = index([0], "cuda"), index([8], "cuda"), index([0, 1], "cuda")
    outs = [torch.empty_like(q) for _ in range(2)]
    numel = decode_workspace_numel(q, k[1], v[1])
    assert numel > 0
    buffers = {"workspace": torch.empty(numel, device="cuda"), "out": outs[0]}

    def step() -> None:
        append_kv(new, new, k[1], v[1], reqids, cu_q_lens, lens)
        decode_attention(q, k[1], v[1], reqids, lens, **buffers)
        prefill_attention(q, k[1], v[1], reqids, cu_q_lens, lens, max_q_len=1, out=outs[1])

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_allocated()  # after what a capture takes for itself
        step()
        assert torch.cuda.memory_allocated() == before, "with all buffers given nothing is allocated"
    for reqid, length in ((0, 8), (3, 9), (3, 5000), (-1, 9), (3, 0), (0, 8)):
        reqids.fill_(reqid), lens.fill_(length)
        new.normal_(), q.normal_()
        graph.replay()
        expected, _ = attend_all(q, k[1], v[1], [reqid], [1], [length])
        for out in outs:
            assert error(out, expected) < 1e-2
        if reqid >= 0 and length:
            assert torch.equal(k[1, reqid, length - 1], new[0])
