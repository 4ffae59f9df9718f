"""Decode attention: few query tokens a request, split over the tokens of its cache so that every request fills the GPU.

A program streams one range of tokens of one request for one KV head, or for a few that lie side by side in a token's
row. A second kernel joins the parts. Must not know how lengths came about: they are read on the device, so a captured
CUDA graph replays with others.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from .common import (
    cache_elements,
    check_index,
    check_positive,
    check_scales,
    on_device,
    outputs,
    padded,
)
from .decode_plan import cut_workspace, join_tile, plan_decode, workspace_numel
from .lanes import cache_pointer, find_slot
from .tile import LN2, NOTHING, attend, finish_rows, start_rows
from .tuning import DecodeTile

__all__ = ["decode_attention", "decode_workspace_numel"]

# Arguments that change from batch to batch must not make another kernel of it.
_RUNTIME_INTS = ["max_batch_size", "max_seq_len", "num_splits", "num_blocks"]


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    reqids: Tensor,
    seq_lens: Tensor,
    *,
    q_len: int = 1,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    max_seq_len: int | None = None,
    num_splits: int | None = None,
    workspace: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
    tile: DecodeTile | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from the last `q_len` tokens of each request to all its tokens, causally.

    Parameters
    ----------
    q : Tensor
        ``[lanes * q_len, Hq, D]`` of float32, float16 or bfloat16, last dimension contiguous. Hq is a multiple of H.
    k_cache, v_cache : Tensor
        ``[B, L, H, D]`` of q's dtype or a float8, in any strides with a contiguous last dimension. D is a multiple
        of 16, at most 256. Only rows below a request's length are read.
    reqids, seq_lens : Tensor
        ``[lanes]`` int32 or int64 on the device: slot and length (the new tokens included) of each lane. A reqid
        outside ``[0, B)``, such as -1, is a padded lane: zeros. Lengths are cut to ``[0, L]``.
    q_len : int
        New tokens of every request.
    scale : float, optional
        Factor on the scores; ``1 / sqrt(D)`` by default.
    window : int, optional
        How many tokens a token sees, itself included; all by default.
    soft_cap : float, optional
        Scores s become ``soft_cap * tanh(s / soft_cap)``.
    k_scale, v_scale : float, optional
        What the values in a float8 cache are to be multiplied by.
    max_seq_len : int, optional
        Bound of the lengths that the host knows, for choosing `num_splits`; L by default. Longer ones stay right.
    num_splits : int, optional
        Parts each request is read in.
    workspace : Tensor, optional
        float32, at least `decode_workspace_numel` elements; allocated if missing and needed.
    out : Tensor, optional
        Like q, and may be q.
    lse : Tensor, optional
        ``[lanes * q_len, Hq]`` float32 for the natural logarithm of the sum of exponentials.
    return_lse : bool
        Whether to return it; allocated if `lse` is missing.
    tile : DecodeTile, optional
        Launch choices other than the table's.

    Returns
    -------
    Tensor or tuple of Tensor
        `out`, or `out` and `lse`. Tokens that see nothing have zeros and -inf.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; nothing was launched.

    Notes
    -----
    Runs on the current stream and synchronises with nothing. With `out`, `workspace` and, if wanted, `lse` given it
    allocates nothing.
    """
    plan = plan_decode(q, k_cache, v_cache, q_len, max_seq_len, num_splits, window, tile)
    lanes, num_heads, head_dim = q.shape[0] // q_len, *q.shape[1:]
    check_index("reqids", reqids, q.device, lanes)
    check_index("seq_lens", seq_lens, q.device, lanes)
    check_positive("soft_cap", soft_cap)
    k_factor, v_factor = check_scales(k_cache, k_scale, v_scale)
    out, lse = outputs(q, out, lse, return_lse=return_lse)
    split = plan.num_splits > 1
    parts, part_lse = cut_workspace(workspace, q, plan.num_splits) if split else (out, out)
    result = (out, lse) if return_lse and lse is not None else out
    if not q.shape[0]:
        return result
    group = num_heads // k_cache.shape[2]
    num_blocks = k_cache.shape[2] // plan.heads * plan.row_tiles
    with on_device(q):
        _decode_kernel[(lanes * num_blocks, plan.num_splits)](
            q, k_cache.data_ptr(), v_cache.data_ptr(), out, lse, parts, part_lse, reqids, seq_lens,
            *q.stride()[:2], *out.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
            (1 / math.sqrt(head_dim) if scale is None else scale) * k_factor, v_factor,
            k_cache.shape[0], k_cache.shape[1], plan.num_splits, num_blocks,
            GROUP=group, Q_LEN=q_len, HEADS=plan.heads, HEAD_DIM=head_dim, NUM_HEADS=num_heads,
            BLOCK_M=plan.rows, BLOCK_N=plan.block_tokens, BLOCK_W=plan.width, ROW_TILES=plan.row_tiles,
            WINDOW=window or 0, SOFT_CAP=soft_cap or 0.0, SPLIT=split, HAS_LSE=lse is not None,
            **cache_elements(k_cache, v_cache), num_warps=plan.tile.warps, num_stages=plan.tile.stages,
        )  # fmt: skip
        if split:
            join = join_tile(q.shape[0] * num_heads, padded(head_dim), plan.num_splits, q.device)
            _join_kernel[(q.shape[0] * num_heads, -(-head_dim // join.columns))](
                parts, part_lse, out, lse, reqids, seq_lens, *out.stride()[:2], v_factor,
                k_cache.shape[0], k_cache.shape[1], plan.num_splits,
                Q_LEN=q_len, HEAD_DIM=head_dim, NUM_HEADS=num_heads, BLOCK_D=join.columns, BLOCK_S=join.splits,
                BLOCK_N=plan.block_tokens, WINDOW=window or 0, HAS_LSE=lse is not None, num_warps=4,
            )  # fmt: skip
    return result


def decode_workspace_numel(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    q_len: int = 1,
    window: int | None = None,
    max_seq_len: int | None = None,
    num_splits: int | None = None,
    tile: DecodeTile | None = None,
) -> int:
    """Return the float32 elements `decode_attention` needs with these arguments; 0 if it does not split.

    Raises
    ------
    TypeError, ValueError
        As there.
    """
    splits = plan_decode(q, k_cache, v_cache, q_len, max_seq_len, num_splits, window, tile).num_splits
    return workspace_numel(q, splits) if splits > 1 else 0


# --- on the device ---------------------------------------------------------------------------------------------------


@triton.jit
def _part_range(length, split, num_splits, Q_LEN: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the tokens of one part; the parts that are not empty come first."""
    lowest = length * 0
    if WINDOW:
        lowest = tl.maximum(length - (Q_LEN - 1 + WINDOW), 0)
    size = tl.cdiv(tl.cdiv(length - lowest, num_splits), BLOCK_N) * BLOCK_N
    begin = lowest + split * size
    return begin, tl.minimum(begin + size, length)


@triton.jit(do_not_specialize=_RUNTIME_INTS)
def _decode_kernel(
    q, k_address, v_address, out, lse, parts, part_lse, reqids, seq_lens,
    q_row, q_head, out_row, out_head, k_slot, k_token, k_head, v_slot, v_token, v_head,
    scale, v_scale, max_batch_size, max_seq_len, num_splits, num_blocks,
    GROUP: tl.constexpr, Q_LEN: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, ROW_TILES: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, SPLIT: tl.constexpr, HAS_LSE: tl.constexpr,
    ELEMENT: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Programs of neighbouring heads run side by side, as their rows do: they share pages and DRAM rows."""
    lane = tl.program_id(0) // num_blocks
    block = tl.program_id(0) % num_blocks
    split = tl.program_id(1)
    slot, length = find_slot(reqids, seq_lens, lane, max_batch_size, max_seq_len)
    begin, end = _part_range(length, split, num_splits, Q_LEN, WINDOW, BLOCK_N)
    if SPLIT and begin >= end:
        return

    # A row is (KV head of this program, new token, query head of its group).
    rows = (block % ROW_TILES) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_W)
    local_head = rows // (Q_LEN * GROUP)
    token = rows // GROUP % Q_LEN
    kv_head = block // ROW_TILES * HEADS
    head = (kv_head + local_head) * GROUP + rows % GROUP
    mine = (local_head < HEADS)[:, None] & (columns // HEAD_DIM == local_head[:, None])
    packed = (lane * Q_LEN + token).to(tl.int64)
    inner = columns % HEAD_DIM
    queries = tl.load(
        q + packed[:, None] * q_row + head.to(tl.int64)[:, None] * q_head + inner[None, :], mask=mine, other=0.0
    )

    first_head = tl.cast(kv_head, tl.int64)
    k_base = cache_pointer(k_address, ELEMENT, ALIGNMENT)
    v_base = cache_pointer(v_address, ELEMENT, ALIGNMENT)
    acc, peak, total = start_rows(BLOCK_M, BLOCK_W)
    acc, peak, total = attend(
        acc, peak, total, queries, length - Q_LEN + token,
        k_base + slot * k_slot + first_head * k_head, v_base + slot * v_slot + first_head * v_head, k_token, v_token,
        begin, end, scale, BLOCK_N, BLOCK_W, HEADS * HEAD_DIM, True, Q_LEN > 1, WINDOW if Q_LEN > 1 else 0, SOFT_CAP,
    )  # fmt: skip
    acc, log2_sum = finish_rows(acc, peak, total)

    place = packed * NUM_HEADS + head
    real = local_head < HEADS
    if SPLIT:
        part = place * num_splits + split
        tl.store(parts + part[:, None] * HEAD_DIM + inner[None, :], acc, mask=mine)
        tl.store(part_lse + part, log2_sum, mask=real)
    else:
        where = out + packed[:, None] * out_row + head.to(tl.int64)[:, None] * out_head + inner[None, :]
        tl.store(where, (acc * v_scale).to(out.dtype.element_ty), mask=mine)
        if HAS_LSE:
            tl.store(lse + place, log2_sum * LN2, mask=real)


@triton.jit(do_not_specialize=_RUNTIME_INTS)
def _join_kernel(
    parts, part_lse, out, lse, reqids, seq_lens, out_row, out_head, v_scale, max_batch_size, max_seq_len, num_splits,
    Q_LEN: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_HEADS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """One program joins some columns of the parts of one query row of one head."""
    place = tl.program_id(0).to(tl.int64)
    row = place // NUM_HEADS
    head = place % NUM_HEADS
    _, length = find_slot(reqids, seq_lens, row // Q_LEN, max_batch_size, max_seq_len)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    index = tl.arange(0, BLOCK_S)
    acc = tl.zeros([BLOCK_D], tl.float32)
    peak = tl.full([], NOTHING, tl.float32)
    total = tl.zeros([], tl.float32)
    for first in tl.range(0, num_splits, BLOCK_S):
        split = first + index
        begin, end = _part_range(length, split, num_splits, Q_LEN, WINDOW, BLOCK_N)
        written = (split < num_splits) & (begin < end)
        at = place * num_splits + split
        sums = tl.load(part_lse + at, mask=written, other=NOTHING)
        higher = tl.maximum(peak, tl.max(sums, 0))
        shift = tl.where(higher == NOTHING, 0.0, higher)
        weights = tl.exp2(sums - shift)
        kept = tl.exp2(peak - shift)
        inside = written[:, None] & (columns < HEAD_DIM)[None, :]
        part = tl.load(parts + at[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0.0)
        acc = acc * kept + tl.sum(part * weights[:, None], 0)
        total = total * kept + tl.sum(weights, 0)
        peak = higher
    divisor = tl.where(total == 0.0, 1.0, total)
    where = out + row * out_row + head * out_head + columns
    tl.store(where, (acc / divisor * v_scale).to(out.dtype.element_ty), mask=columns < HEAD_DIM)
    if HAS_LSE and tl.program_id(1) == 0:
        tl.store(lse + place, (peak + tl.log2(divisor)) * LN2)
