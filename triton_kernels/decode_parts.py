"""Parts of decode: how the tokens of one request, or of all requests together, are cut into equal ones, and joined."""

from __future__ import annotations

import triton
import triton.language as tl

from .lanes import INDICES, find_slot
from .tile import LN2, NOTHING

# These arguments change from batch to batch: Triton must not compile another kernel for them.
RUNTIME_INTS = ["max_batch_size", "max_seq_len", "num_splits", "num_blocks", "num_lanes"]


@triton.jit
def part_range(length, split, num_splits, Q_LEN: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the tokens of one part of a lane; the parts that are not empty come first."""
    lowest = length * 0
    if WINDOW:
        lowest = tl.maximum(length - (Q_LEN - 1 + WINDOW), 0)
    size = tl.cdiv(tl.cdiv(length - lowest, num_splits), BLOCK_N) * BLOCK_N
    begin = lowest + split * size
    return begin, tl.minimum(begin + size, length)


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


@triton.jit
def share_span(share, tiles, ends, num_splits):
    """Return first and last tile (exclusive) of one of the equal shares of all lanes, and its first and last lane."""
    total = tl.sum(tiles, 0)
    size = tl.cdiv(total, num_splits)
    start = share * size
    stop = tl.minimum(start + size, total)
    # A lane that ends where the share begins is not its own, nor is an empty lane there.
    return start, stop, tl.sum((ends <= start).to(tl.int32), 0), tl.sum((ends < stop).to(tl.int32), 0)


@triton.jit
def share_part(
    share, start, stop, lane_start, lane_stop, length,
    Q_LEN: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the tokens ``[begin, end)`` of a lane in a share, and the number of that part; -1 if it is all of them."""
    lowest, _ = part_range(length, 0, 1, Q_LEN, WINDOW, BLOCK_N)
    begin = lowest + tl.maximum(start - lane_start, 0) * BLOCK_N
    end = tl.minimum(lowest + (tl.minimum(stop, lane_stop) - lane_start) * BLOCK_N, length)
    # Of the lanes of a share only the first can have begun before, and only the last can go on.
    part = 2 * share + (start <= lane_start).to(tl.int32)
    return begin, end, tl.where((start <= lane_start) & (lane_stop <= stop), -1, part)


@triton.jit
def _shares_of(lane, tiles, ends, num_splits, BLOCK_L: tl.constexpr):
    """Return the shares ``[first, stop)`` that have tiles of a lane, their size, and the lane's first tile."""
    size = tl.maximum(tl.cdiv(tl.sum(tiles, 0), num_splits), 1)
    lane_start, lane_stop = lane_span(lane, tiles, ends, BLOCK_L)
    first = lane_start // size
    return first, tl.where(lane_start < lane_stop, (lane_stop - 1) // size + 1, first), size, lane_start


@triton.jit(do_not_specialize=RUNTIME_INTS, do_not_specialize_on_alignment=INDICES)
def join_kernel(
    parts, part_lse, out, lse, reqids, seq_lens, out_row, out_head, v_scale,
    max_batch_size, max_seq_len, num_splits, num_lanes,
    Q_LEN: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_HEADS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr, WINDOW: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """One program joins some columns of the parts of one query row of one head, if it is in parts."""
    place = tl.program_id(0).to(tl.int64)
    row = place // NUM_HEADS
    head = place % NUM_HEADS
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    index = tl.arange(0, BLOCK_S)
    first = 0
    stop = num_splits
    if BLOCK_L:
        tiles, ends = lane_tiles(
            reqids, seq_lens, max_batch_size, max_seq_len, num_lanes, Q_LEN, WINDOW, BLOCK_N, BLOCK_L
        )  # fmt: skip
        first, stop, size, lane_start = _shares_of(row // Q_LEN, tiles, ends, num_splits, BLOCK_L)
        if stop == first + 1:
            return
    else:
        _, length = find_slot(reqids, seq_lens, row // Q_LEN, max_batch_size, max_seq_len)
    acc = tl.zeros([BLOCK_D], tl.float32)
    peak = tl.full([], NOTHING, tl.float32)
    total = tl.zeros([], tl.float32)
    for start in tl.range(first, stop, BLOCK_S):
        split = start + index
        if BLOCK_L:
            written = split < stop
            part = 2 * split + (split * size <= lane_start).to(tl.int32)
            at = part * (Q_LEN * NUM_HEADS) + (row % Q_LEN) * NUM_HEADS + head
        else:
            begin, end = part_range(length, split, num_splits, Q_LEN, WINDOW, BLOCK_N)
            written = (split < num_splits) & (begin < end)
            at = place * num_splits + split
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
    where = out + row * out_row + head * out_head + columns
    tl.store(where, (acc / divisor * v_scale).to(out.dtype.element_ty), mask=columns < HEAD_DIM)
    if HAS_LSE and tl.program_id(1) == 0:
        tl.store(lse + place, (peak + tl.log2(divisor)) * LN2)
