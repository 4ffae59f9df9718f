"""Prefill attention over packed requests of any lengths: whole prompts, chunks on a cached prefix, single tokens.

Query heads that share a KV head are packed into one tile, so a tile of 128 rows covers few tokens and wastes little on
the diagonal. The new tokens' K and V are in the cache before the launch.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from .checks import (
    cache_elements,
    check_caches,
    check_index,
    check_positive,
    check_queries,
    check_scales,
    on_device,
    outputs,
    padded,
    traits,
)
from .lanes import INDICES, cache_pointer, find_lane, find_slot
from .tile import LN2, attend, finish_rows, start_rows
from .tuning import PrefillTile, prefill_tile

__all__ = ["prefill_attention"]

# These arguments change from batch to batch: Triton must not compile another kernel for them.
_RUNTIME_INTS = ["num_rows", "max_batch_size", "max_seq_len", "num_lanes", "steps"]


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    reqids: Tensor,
    cu_q_lens: Tensor,
    seq_lens: Tensor,
    *,
    max_q_len: int | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
    tile: PrefillTile | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from each request's new tokens, its last ones, to all its tokens.

    Parameters
    ----------
    q : Tensor
        ``[rows, Hq, D]`` of float32, float16 or bfloat16, packed by lane, last dimension contiguous.
    k_cache, v_cache, reqids, seq_lens, scale, soft_cap, k_scale, v_scale
        As for `decode_attention`.
    cu_q_lens : Tensor
        ``[lanes + 1]`` int32 or int64 on the device, ascending from 0: the packed rows of lane i are
        ``[cu_q_lens[i], cu_q_lens[i + 1])``, possibly none. Rows past the last are left alone.
    max_q_len : int, optional
        A bound of any lane's new tokens that the host knows. With few, smaller tiles are chosen.
    causal : bool
        Whether a token sees only itself and what is before it; the last new token sees all ("lower right").
    window : int, optional
        How many tokens a token sees, itself included; only with `causal`.
    out, lse, return_lse
        As for `decode_attention`.
    tile : PrefillTile, optional
        Launch choices other than the table's.

    Returns
    -------
    Tensor or tuple of Tensor
        `out`, or `out` and `lse`. Tokens that see nothing, and those of padded lanes, have zeros and -inf.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; nothing was launched.

    Notes
    -----
    It runs on the current stream and waits for nothing. With `out` and, if wanted, `lse`, it allocates nothing. The
    grid depends on shapes only.
    """
    check_caches(k_cache, v_cache)
    check_queries(q, k_cache)
    lanes = len(reqids)
    check_index("reqids", reqids, q.device, lanes)
    check_index("seq_lens", seq_lens, q.device, lanes)
    check_index("cu_q_lens", cu_q_lens, q.device, lanes + 1)
    _check_options(causal, window, soft_cap, max_q_len)
    k_factor, v_factor = check_scales(k_cache, k_scale, v_scale)
    out, lse = outputs(q, out, lse, return_lse=return_lse)
    result = (out, lse) if return_lse and lse is not None else out
    if not (q.shape[0] and lanes):
        return result
    max_batch_size, max_seq_len, num_kv_heads, head_dim = k_cache.shape
    group = q.shape[1] // num_kv_heads
    tile = tile or prefill_tile(traits(q.device).capability, q.element_size(), head_dim)
    rows = tile.rows if max_q_len is None else min(tile.rows, padded(max_q_len * group))
    grid = (num_kv_heads, q.shape[0] * group // rows + lanes)
    with on_device(q):
        _prefill_kernel[grid](
            q, k_cache.data_ptr(), v_cache.data_ptr(), out, lse, reqids, cu_q_lens, seq_lens,
            *q.stride()[:2], *out.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
            (1 / math.sqrt(head_dim) if scale is None else scale) * k_factor, v_factor,
            q.shape[0], max_batch_size, max_seq_len, lanes, lanes.bit_length(),
            GROUP=group, HEAD_DIM=head_dim, NUM_HEADS=q.shape[1],
            BLOCK_M=rows, BLOCK_N=tile.tokens, BLOCK_D=padded(head_dim),
            CAUSAL=causal, WINDOW=window or 0, SOFT_CAP=soft_cap or 0.0, HAS_LSE=lse is not None,
            **cache_elements(k_cache, v_cache), num_warps=tile.warps if rows >= 64 else 4, num_stages=tile.stages,
        )  # fmt: skip
    return result


def _check_options(causal: bool, window: int | None, soft_cap: float | None, max_q_len: int | None) -> None:
    check_positive("soft_cap", soft_cap)
    for name, value in (("window", window), ("max_q_len", max_q_len)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if window is not None and not causal:
        raise ValueError(f"window is {window} without causal; a window reaches back from a token, so it needs causal")


# --- on the device ---------------------------------------------------------------------------------------------------


@triton.jit
def _find_tile(cu_q_lens, place, num_lanes, steps, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the lane that owns a tile of packed rows, its first row, its rows, and which of its tiles it is."""
    lane = find_lane(cu_q_lens, place, num_lanes, steps, GROUP, BLOCK_M)
    first_row = tl.load(cu_q_lens + lane).to(tl.int64)
    q_len = (tl.load(cu_q_lens + lane + 1).to(tl.int64) - first_row).to(tl.int32)
    return lane, first_row, q_len, (place - (first_row * GROUP // BLOCK_M + lane)).to(tl.int32)


@triton.jit
def _seen(length, first_position, last_position, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return the tokens ``[begin, end)`` that rows at these positions see, and how far every row sees every token.

    That far tokens take the fast way. A window has such tokens too, but rarely enough of them.
    """
    begin = length * 0
    end = length
    everyone = length
    if CAUSAL:
        end = tl.minimum(length, last_position + 1)
        everyone = tl.minimum(length, first_position + 1)
    fast_end = tl.maximum(everyone, 0) // BLOCK_N * BLOCK_N
    if WINDOW:
        begin = tl.maximum(first_position - WINDOW + 1, 0)
        fast_end = begin
    return begin, fast_end, end


@triton.jit(do_not_specialize=_RUNTIME_INTS, do_not_specialize_on_alignment=INDICES)
def _prefill_kernel(
    q, k_address, v_address, out, lse, reqids, cu_q_lens, seq_lens,
    q_row, q_head, out_row, out_head, k_slot, k_token, k_head, v_slot, v_token, v_head,
    scale, v_scale, num_rows, max_batch_size, max_seq_len, num_lanes, steps,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, HAS_LSE: tl.constexpr,
    ELEMENT: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """One tile of packed rows of one KV head. Last tiles first: under a causal mask they take longest."""
    kv_head = tl.program_id(0)
    place = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    lane, first_row, q_len, tile = _find_tile(cu_q_lens, place, num_lanes, steps, GROUP, BLOCK_M)
    if tile * BLOCK_M >= q_len * GROUP:
        return
    slot, length = find_slot(reqids, seq_lens, lane, max_batch_size, max_seq_len)

    # A row is (new token, query head of the group).
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    packed = first_row + token
    real = (token < q_len) & (packed < num_rows)
    mine = real[:, None] & (columns < HEAD_DIM)[None, :]
    queries = tl.load(
        q + packed[:, None] * q_row + head.to(tl.int64)[:, None] * q_head + columns[None, :], mask=mine, other=0.0
    )
    past = length - q_len
    first_position = past + tile * BLOCK_M // GROUP
    last_position = past + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, q_len - 1)
    begin, fast_end, end = _seen(length, first_position, last_position, BLOCK_N, CAUSAL, WINDOW)

    kv = tl.cast(kv_head, tl.int64)
    k_base = cache_pointer(k_address, ELEMENT, ALIGNMENT) + slot * k_slot + kv * k_head
    v_base = cache_pointer(v_address, ELEMENT, ALIGNMENT) + slot * v_slot + kv * v_head
    positions = past + token
    acc, peak, total = start_rows(BLOCK_M, BLOCK_D)
    if not WINDOW:
        acc, peak, total = attend(
            acc, peak, total, queries, positions, k_base, v_base, k_token, v_token, begin, fast_end, scale,
            BLOCK_N, BLOCK_D, HEAD_DIM, False, False, 0, SOFT_CAP,
        )  # fmt: skip
    acc, peak, total = attend(
        acc, peak, total, queries, positions, k_base, v_base, k_token, v_token, fast_end, end, scale,
        BLOCK_N, BLOCK_D, HEAD_DIM, True, CAUSAL, WINDOW, SOFT_CAP,
    )  # fmt: skip
    acc, log2_sum = finish_rows(acc, peak, total)
    where = out + packed[:, None] * out_row + head.to(tl.int64)[:, None] * out_head + columns[None, :]
    tl.store(where, (acc * v_scale).to(out.dtype.element_ty), mask=mine)
    if HAS_LSE:
        tl.store(lse + packed * NUM_HEADS + head, log2_sum * LN2, mask=real)
