"""Decode attention: few query tokens a request, split over tokens so that any batch fills the GPU.

A program streams tokens for one KV head, or for a few that lie side by side in a token's row. It streams all tokens of
a request, or one of the request's equal parts. Where requests may differ in length, it streams one of the equal parts
of all tokens of all requests. A second kernel joins the parts of a request. Kernels read lengths on the device, so a
captured CUDA graph replays with other lengths.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from .checks import (
    cache_elements,
    ceil_div,
    check_index,
    check_positive,
    check_scales,
    on_device,
    outputs,
    padded,
)
from .decode_parts import RUNTIME_INTS, join_kernel, lane_span, lane_tiles, part_range, share_part, share_span
from .decode_plan import cut_workspace, join_tile, plan_decode, workspace_numel
from .lanes import INDICES, cache_pointer, find_slot
from .tile import LN2, attend, finish_rows, start_rows
from .tuning import DecodeTile

__all__ = ["decode_attention", "decode_workspace_numel"]


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
    uneven: bool = False,
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
        For a float8 cache: the values in it are multiplied by this.
    max_seq_len : int, optional
        A bound of the lengths that the host knows, to choose `num_splits` by; L by default. Results for longer ones are
        right, too.
    uneven : bool
        Lengths may differ much. The kernel then splits the tokens of all requests together, not those of each.
    num_splits : int, optional
        Equal parts of each request, or, if `uneven`, of all requests together.
    workspace : Tensor, optional
        float32, at least `decode_workspace_numel` elements; allocated if missing and needed.
    out : Tensor, optional
        Like q, and may be q.
    lse : Tensor, optional
        ``[lanes * q_len, Hq]`` float32 for the natural logarithm of the sum of exponentials.
    return_lse : bool
        Return the logarithms; they are allocated if `lse` is missing.
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
    It runs on the current stream and waits for nothing. With `out`, `workspace` and, if wanted, `lse`, it allocates
    nothing.
    """
    plan = plan_decode(q, k_cache, v_cache, q_len, max_seq_len, uneven, num_splits, window, tile)
    lanes, num_heads, head_dim = q.shape[0] // q_len, *q.shape[1:]
    check_index("reqids", reqids, q.device, lanes)
    check_index("seq_lens", seq_lens, q.device, lanes)
    check_positive("soft_cap", soft_cap)
    k_factor, v_factor = check_scales(k_cache, k_scale, v_scale)
    out, lse = outputs(q, out, lse, return_lse=return_lse)
    split = plan.num_splits > 1
    parts, part_lse = cut_workspace(workspace, q, q_len, plan.num_parts) if split else (out, out)
    result = (out, lse) if return_lse and lse is not None else out
    if not q.shape[0]:
        return result
    group = num_heads // k_cache.shape[2]
    num_blocks = k_cache.shape[2] // plan.heads * plan.row_tiles
    sizes = {"Q_LEN": q_len, "HEAD_DIM": head_dim, "NUM_HEADS": num_heads, "BLOCK_N": plan.block_tokens}
    options = {"BLOCK_L": padded(lanes) if plan.across else 0, "WINDOW": window or 0, "HAS_LSE": lse is not None}
    grid = (plan.num_splits * num_blocks,) if plan.across else (lanes * num_blocks, plan.num_splits)
    with on_device(q):
        _decode_kernel[grid](
            q, k_cache.data_ptr(), v_cache.data_ptr(), out, lse, parts, part_lse, reqids, seq_lens,
            *q.stride()[:2], *out.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
            (1 / math.sqrt(head_dim) if scale is None else scale) * k_factor, v_factor,
            k_cache.shape[0], k_cache.shape[1], plan.num_splits, num_blocks, lanes,
            GROUP=group, HEADS=plan.heads, BLOCK_M=plan.rows, BLOCK_W=plan.width, ROW_TILES=plan.row_tiles,
            SOFT_CAP=soft_cap or 0.0, SPLIT=split, **sizes, **options, **cache_elements(k_cache, v_cache),
            num_warps=plan.tile.warps, num_stages=plan.tile.stages,
        )  # fmt: skip
        if split:
            join = join_tile(q.shape[0] * num_heads, padded(head_dim), plan.num_splits, q.device)
            join_kernel[(q.shape[0] * num_heads, ceil_div(head_dim, join.columns))](
                parts, part_lse, out, lse, reqids, seq_lens, *out.stride()[:2], v_factor,
                k_cache.shape[0], k_cache.shape[1], plan.num_splits, lanes,
                BLOCK_D=join.columns, BLOCK_S=join.splits, **sizes, **options, num_warps=4,
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
    uneven: bool = False,
    num_splits: int | None = None,
    tile: DecodeTile | None = None,
) -> int:
    """Return the float32 elements `decode_attention` needs with these arguments; 0 if it does not split.

    Raises
    ------
    TypeError, ValueError
        As there.
    """
    plan = plan_decode(q, k_cache, v_cache, q_len, max_seq_len, uneven, num_splits, window, tile)
    return workspace_numel(q, q_len, plan.num_parts) if plan.num_splits > 1 else 0


# --- on the device ---------------------------------------------------------------------------------------------------


@triton.jit
def _attend_part(
    q, k_base, v_base, out, lse, parts, part_lse, q_row, q_head, out_row, out_head, k_token, v_token, scale, v_scale,
    block, lane, length, begin, end, part, num_splits,
    GROUP: tl.constexpr, Q_LEN: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_L: tl.constexpr,
    ROW_TILES: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, SPLIT: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Attend to tokens ``[begin, end)`` of one lane and store what comes of it.

    Unsplit, the result goes to the output. A part of a lane goes to its place among the lane's parts. A part of all
    lanes goes to its own place. Only if `part` is negative, it has all tokens of the lane and goes to the output.
    """
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
    acc, peak, total = start_rows(BLOCK_M, BLOCK_W)
    acc, peak, total = attend(
        acc, peak, total, queries, length - Q_LEN + token, k_base, v_base, k_token, v_token, begin, end, scale,
        BLOCK_N, BLOCK_W, HEADS * HEAD_DIM, True, Q_LEN > 1, WINDOW if Q_LEN > 1 else 0, SOFT_CAP,
    )  # fmt: skip
    acc, log2_sum = finish_rows(acc, peak, total)

    place = packed * NUM_HEADS + head
    real = local_head < HEADS
    if SPLIT:
        at = place * num_splits + part
        stored, known = mine, real
        if BLOCK_L:
            at = part * (Q_LEN * NUM_HEADS) + token * NUM_HEADS + head
            whole = tl.full([BLOCK_M], part, tl.int32) < 0
            stored, known = mine & (~whole)[:, None], real & ~whole
            mine, real = mine & whole[:, None], real & whole
        tl.store(parts + at[:, None] * HEAD_DIM + inner[None, :], acc, mask=stored)
        tl.store(part_lse + at, log2_sum, mask=known)
    if BLOCK_L or not SPLIT:
        where = out + packed[:, None] * out_row + head.to(tl.int64)[:, None] * out_head + inner[None, :]
        tl.store(where, (acc * v_scale).to(out.dtype.element_ty), mask=mine)
        if HAS_LSE:
            tl.store(lse + place, log2_sum * LN2, mask=real)


@triton.jit(do_not_specialize=RUNTIME_INTS, do_not_specialize_on_alignment=INDICES)
def _decode_kernel(
    q, k_address, v_address, out, lse, parts, part_lse, reqids, seq_lens,
    q_row, q_head, out_row, out_head, k_slot, k_token, k_head, v_slot, v_token, v_head,
    scale, v_scale, max_batch_size, max_seq_len, num_splits, num_blocks, num_lanes,
    GROUP: tl.constexpr, Q_LEN: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_L: tl.constexpr,
    ROW_TILES: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, SPLIT: tl.constexpr, HAS_LSE: tl.constexpr,
    ELEMENT: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Programs of neighbouring heads run side by side, as their rows do: they share pages and DRAM rows.

    BLOCK_L is 0, or at least the number of lanes: then the parts are parts of all tokens of all lanes.
    """
    share = tl.program_id(0) // num_blocks
    block = tl.program_id(0) % num_blocks
    first_head = tl.cast(block // ROW_TILES * HEADS, tl.int64)
    k_base = cache_pointer(k_address, ELEMENT, ALIGNMENT)
    v_base = cache_pointer(v_address, ELEMENT, ALIGNMENT)
    if BLOCK_L:
        tiles, ends = lane_tiles(
            reqids, seq_lens, max_batch_size, max_seq_len, num_lanes, Q_LEN, WINDOW, BLOCK_N, BLOCK_L
        )  # fmt: skip
        start, stop, first_lane, last_lane = share_span(share, tiles, ends, num_splits)
        for lane in tl.range(first_lane, last_lane + 1, num_stages=1):
            slot, length = find_slot(reqids, seq_lens, lane, max_batch_size, max_seq_len)
            lane_start, lane_stop = lane_span(lane, tiles, ends, BLOCK_L)
            begin, end, part = share_part(
                share, start, stop, lane_start, lane_stop, length, Q_LEN, WINDOW, BLOCK_N
            )  # fmt: skip
            _attend_part(
                q, k_base + slot * k_slot + first_head * k_head, v_base + slot * v_slot + first_head * v_head,
                out, lse, parts, part_lse, q_row, q_head, out_row, out_head, k_token, v_token, scale, v_scale,
                block, lane, length, begin, end, part, num_splits,
                GROUP, Q_LEN, HEADS, HEAD_DIM, NUM_HEADS, BLOCK_M, BLOCK_N, BLOCK_W, BLOCK_L, ROW_TILES,
                WINDOW, SOFT_CAP, SPLIT, HAS_LSE,
            )  # fmt: skip
    else:
        split = tl.program_id(1)
        slot, length = find_slot(reqids, seq_lens, share, max_batch_size, max_seq_len)
        begin, end = part_range(length, split, num_splits, Q_LEN, WINDOW, BLOCK_N)
        if SPLIT and begin >= end:
            return
        _attend_part(
            q, k_base + slot * k_slot + first_head * k_head, v_base + slot * v_slot + first_head * v_head,
            out, lse, parts, part_lse, q_row, q_head, out_row, out_head, k_token, v_token, scale, v_scale,
            block, share, length, begin, end, split, num_splits,
            GROUP, Q_LEN, HEADS, HEAD_DIM, NUM_HEADS, BLOCK_M, BLOCK_N, BLOCK_W, BLOCK_L, ROW_TILES,
            WINDOW, SOFT_CAP, SPLIT, HAS_LSE,
        )  # fmt: skip
