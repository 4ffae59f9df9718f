"""What every kernel looks up on the device: where a cache begins, which lane owns a row, where its tokens lie."""

from __future__ import annotations

import triton
import triton.language as tl

# Index vectors begin where a batch happens to put them: Triton must not compile another kernel for that.
INDICES = ["reqids", "cu_q_lens", "seq_lens", "positions"]


@triton.jit
def cache_pointer(address, ELEMENT: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Return the pointer to a cache's first element, a multiple of ALIGNMENT bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(ELEMENT)), ALIGNMENT)


@triton.jit
def find_lane(cu_q_lens, place, num_lanes, steps, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Return the lane that owns a packed row, or a tile of rows, by bisection; `place` is a scalar or a tensor.

    With TILE, lane i owns the tiles from ``cu_q_lens[i] * GROUP // TILE + i``: always at least as many as its
    ``q_len * GROUP`` rows need, so the host can bound their number without reading a length.
    """
    low = place * 0
    high = low + num_lanes
    for _ in range(steps):
        middle = (low + high) // 2
        first = tl.load(cu_q_lens + middle).to(tl.int64)
        if TILE:
            first = first * GROUP // TILE + middle
        low = tl.where(first <= place, middle, low)
        high = tl.where(first <= place, high, middle)
    return low


@triton.jit
def find_slot(reqids, seq_lens, lane, max_batch_size, max_seq_len):
    """Return slot and length of a lane. A padded lane has length 0, and so has one that names no slot.

    No value on the device can lead a kernel out of the caches.
    """
    slot = tl.load(reqids + lane).to(tl.int64)
    length = tl.load(seq_lens + lane).to(tl.int32)
    real = (slot >= 0) & (slot < max_batch_size)
    length = tl.where(real, tl.minimum(tl.maximum(length, 0), max_seq_len), 0)
    return tl.where(real, slot, 0), length


@triton.jit
def find_place(
    rows, reqids, cu_q_lens, seq_lens, num_rows, max_batch_size, max_seq_len, num_lanes, steps, ONE_EACH: tl.constexpr
):
    """Return slot and position of packed rows, and whether they have a place in the cache."""
    if ONE_EACH:
        lane = tl.minimum(rows, num_lanes - 1)
        lane_end = lane + 1
    else:
        lane = find_lane(cu_q_lens, rows, num_lanes, steps, 1, 0)
        lane_end = tl.load(cu_q_lens + lane + 1).to(tl.int64)
    # A length past the end of the cache stays uncut here, so that every row keeps its place. Rows past the end are left
    # out below.
    slot, length = find_slot(reqids, seq_lens, lane, max_batch_size, 2147483647)
    position = length + rows - lane_end
    # A padded lane has length 0, so its positions are negative; rows past the last lane have one past the length.
    mapped = (position >= 0) & (position < tl.minimum(length, max_seq_len)) & (rows < num_rows)
    return slot, position, mapped
