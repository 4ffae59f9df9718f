"""Parts of decode: how the tokens of one request, or of all requests together, are cut into equal ones, and joined."""

from __future__ import annotations

import triton
import triton.language as tl

from .lanes import find_slot
from .tile import LN2, NOTHING

# Arguments that change from batch to batch must not make another kernel of it.
RUNTIME_INTS = ["max_batch_size", "max_seq_len", "num_splits", "num_blocks", "num_lanes"]


@triton.jit
def equal_parts(length, num_splits, Q_LEN: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return tiles a part of one lane, and how many parts are not empty.

    Large parts are odd, so that they do not all begin at the same address modulo a large power of two, where DRAM has
    few channels for them.
    """
    seen = tl.minimum(length, Q_LEN - 1 + WINDOW) if WINDOW else length
    tiles = tl.cdiv(seen, BLOCK_N)
    size = tl.maximum(tl.cdiv(tiles, num_splits), 1)
    size = tl.where((size >= 64) & (num_splits > 1), size | 1, size)
    return size, tl.cdiv(tiles, size)


@triton.jit
def lane_tiles(
    reqids, seq_lens, max_batch_size, max_seq_len, num_lanes,
    Q_LEN: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Return the tiles of each lane, and how many there are up to its end with the lanes before it."""
    lane = tl.arange(0, BLOCK_L)
    there = lane < num_lanes
    slot = tl.load(reqids + lane, mask=there, other=-1).to(tl.int64)
    length = tl.load(seq_lens + lane, mask=there, other=0).to(tl.int32)
    seen = tl.minimum(tl.maximum(length, 0), max_seq_len)
    if WINDOW:
        seen = tl.minimum(seen, Q_LEN - 1 + WINDOW)
    tiles = tl.where((slot >= 0) & (slot < max_batch_size), tl.cdiv(seen, BLOCK_N), 0)
    return tiles, tl.cumsum(tiles, 0)


@triton.jit
def lane_span(lane, tiles, ends, BLOCK_L: tl.constexpr):
    """Return first and last tile (exclusive) of one lane, counted over all lanes."""
    chosen = tl.arange(0, BLOCK_L) == lane
    end = tl.sum(tl.where(chosen, ends, 0), 0)
    return end - tl.sum(tl.where(chosen, tiles, 0), 0), end


@triton.jit(do_not_specialize=RUNTIME_INTS)
def join_kernel(
    parts, part_lse, out, lse, reqids, seq_lens, out_row, out_head, v_scale,
    max_batch_size, max_seq_len, num_splits, num_lanes,
    Q_LEN: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_HEADS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr, WINDOW: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """One program joins some columns of the parts of one query row of one head, if it is in parts."""
    row = tl.program_id(0) // NUM_HEADS
    head = tl.program_id(0) % NUM_HEADS
    lane = row // Q_LEN
    if BLOCK_L:
        tiles, ends = lane_tiles(
            reqids, seq_lens, max_batch_size, max_seq_len, num_lanes, Q_LEN, WINDOW, BLOCK_N, BLOCK_L
        )  # fmt: skip
        size = tl.maximum(tl.cdiv(tl.sum(tiles, 0), num_splits), 1)
        lane_begin, lane_end = lane_span(lane, tiles, ends, BLOCK_L)
        first = lane_begin // size
        last = tl.where(lane_begin < lane_end, (lane_end - 1) // size, first - 1)
        if first == last:
            return
    else:
        _, length = find_slot(reqids, seq_lens, lane, max_batch_size, max_seq_len)
        _, num_parts = equal_parts(length, num_splits, Q_LEN, WINDOW, BLOCK_N)
        first = lane * num_splits
        last = first + num_parts - 1

    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    index = tl.arange(0, BLOCK_S)
    acc = tl.zeros([BLOCK_D], tl.float32)
    peak = tl.full([], NOTHING, tl.float32)
    total = tl.zeros([], tl.float32)
    for start in tl.range(first, last + 1, BLOCK_S):
        share = start + index
        written = share <= last
        part = share
        if BLOCK_L:
            part = 2 * share + (share * size <= lane_begin).to(tl.int32)
        at = part * (Q_LEN * NUM_HEADS) + row % Q_LEN * NUM_HEADS + head
        sums = tl.load(part_lse + at, mask=written, other=NOTHING)
        higher = tl.maximum(peak, tl.max(sums, 0))
        shift = tl.where(higher == NOTHING, 0.0, higher)
        weights = tl.exp2(sums - shift)
        kept = tl.exp2(peak - shift)
        inside = written[:, None] & (columns < HEAD_DIM)[None, :]
        values = tl.load(parts + at[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0.0)
        acc = acc * kept + tl.sum(values * weights[:, None], 0)
        total = total * kept + tl.sum(weights, 0)
        peak = higher
    divisor = tl.where(total == 0.0, 1.0, total)
    where = out + row.to(tl.int64) * out_row + head.to(tl.int64) * out_head + columns
    tl.store(where, (acc / divisor * v_scale).to(out.dtype.element_ty), mask=columns < HEAD_DIM)
    if HAS_LSE and tl.program_id(1) == 0:
        tl.store(lse + tl.program_id(0), (peak + tl.log2(divisor)) * LN2)
