"""The heart of decode and prefill: a tile of query rows attends to a range of one request's tokens.

The softmax is online and in base 2, so that a score costs one multiplication and one `exp2`. "Guarded" functions do not
read rows outside the range, and keep them out of both products: memory behind a length may hold NaN, or nothing at all.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def start_rows(BLOCK_M: tl.constexpr, BLOCK_W: tl.constexpr):
    """Return output, peak and total of rows that have seen nothing."""
    acc = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
    peak = tl.full([BLOCK_M], NOTHING, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    return acc, peak, total


@triton.jit
def attend(
    acc,
    peak,
    total,
    q,
    positions,
    k_base,
    v_base,
    k_token,
    v_token,
    begin,
    end,
    scale,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    WIDTH: tl.constexpr,
    GUARDED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Let rows `q` see tokens ``[begin, end)`` and return output, peak and total carried on.

    If not GUARDED, ``end - begin`` must be a multiple of BLOCK_N and every row must see every token.
    """
    index = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_W)
    # 64 bits from the first product on: a token index times N*H*D passes 2**31 at 65,536 tokens of a common model.
    k_offsets = index.to(tl.int64)[:, None] * k_token + columns[None, :]
    v_offsets = index.to(tl.int64)[:, None] * v_token + columns[None, :]
    for start in tl.range(begin, end, BLOCK_N):
        tokens = start + index
        first = tl.cast(start, tl.int64)
        inside = (columns < WIDTH)[None, :]
        if GUARDED:
            inside = inside & (tokens < end)[:, None]

        key = _load(k_base + first * k_token + k_offsets, inside, GUARDED or WIDTH < BLOCK_W).to(q.dtype)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee")
        scores = _scaled(scores, scale, SOFT_CAP)
        if GUARDED:
            visible = (tokens < end)[None, :]
            if CAUSAL:
                visible = visible & (tokens[None, :] <= positions[:, None])
            if WINDOW:
                visible = visible & (tokens[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(visible, scores, NOTHING)

        higher = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen nothing yet keeps its peak at -inf; shifting by that would make NaN of it.
        shift = tl.where(higher == NOTHING, 0.0, higher) if GUARDED else higher
        weights = tl.exp2(scores - shift[:, None])
        kept = tl.exp2(peak - shift)
        total = total * kept + tl.sum(weights, 1)
        value = _load(v_base + first * v_token + v_offsets, inside, GUARDED or WIDTH < BLOCK_W).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), value, acc * kept[:, None], input_precision="ieee")
        peak = higher
    return acc, peak, total


@triton.jit
def finish_rows(acc, peak, total):
    """Return the rows' output and the base-2 logarithm of their sum of exponentials: 0 and -inf if they saw none."""
    divisor = tl.where(total == 0.0, 1.0, total)
    return acc / divisor[:, None], peak + tl.log2(divisor)


@triton.jit
def _load(pointers, inside, MASKED: tl.constexpr):
    """Load, with zeros outside where anything can be outside: an unmasked load is the faster one."""
    return tl.load(pointers, mask=inside, other=0.0) if MASKED else tl.load(pointers)


@triton.jit
def _scaled(scores, scale, SOFT_CAP: tl.constexpr):
    """Return scores for base 2, capped where there is a cap."""
    if SOFT_CAP > 0:
        return _tanh(scores * (scale / SOFT_CAP)) * (SOFT_CAP * LOG2E)
    return scores * (scale * LOG2E)


@triton.jit
def _tanh(x):
    """Hyperbolic tangent from one exponential that cannot overflow."""
    small = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0.0, -size, size)
