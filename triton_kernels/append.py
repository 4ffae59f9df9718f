"""Append new tokens' K and V to the cache in one launch, turning K (and q) by rotary embedding on the way.

Decode, prefill and chunks are one packed batch here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .checks import (
    FLOAT8_DTYPES,
    FLOAT_DTYPES,
    cache_elements,
    ceil_div,
    check_caches,
    check_device,
    check_index,
    check_last_contiguous,
    check_like,
    check_queries,
    check_rows,
    check_scales,
    on_device,
    padded,
    traits,
)
from .lanes import INDICES, cache_pointer, find_place
from .tuning import AppendTile, append_tile

__all__ = ["append_kv"]

# These arguments change from batch to batch: Triton must not compile another kernel for them.
_RUNTIME_INTS = ["num_rows", "max_batch_size", "max_seq_len", "num_angles", "num_lanes", "steps"]
_RUNTIME_INTS += ["num_blocks", "num_kv_heads"]


def append_kv(
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    reqids: Tensor,
    cu_q_lens: Tensor | None,
    seq_lens: Tensor,
    *,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    positions: Tensor | None = None,
    q: Tensor | None = None,
    q_out: Tensor | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    tile: AppendTile | None = None,
) -> Tensor | None:
    """Write the packed rows of each lane to its slot, at positions ``seq_len - q_len .. seq_len - 1``.

    Parameters
    ----------
    k_new, v_new : Tensor
        ``[rows, H, D]``, last dimension contiguous, of the cache's dtype; for a float8 cache any float, rounded to
        nearest and held within its range (NaN stays NaN).
    k_cache, v_cache : Tensor
        ``[B, L, H, D]`` in any strides with a contiguous last dimension. Only the rows named are written.
    reqids, seq_lens : Tensor
        ``[lanes]`` int32 or int64 on the device: slot of each lane and its length, the new tokens included. Nothing is
        written for a reqid outside ``[0, B)``, such as -1, nor at a position outside ``[0, L)``.
    cu_q_lens : Tensor or None
        ``[lanes + 1]`` int32 or int64 on the device, ascending from 0: the packed rows of lane i are
        ``[cu_q_lens[i], cu_q_lens[i + 1])``. Rows past the last belong to nobody. None: lane i has row i alone, as in
        decode; the kernel then searches nothing.
    rotary_cos, rotary_sin : Tensor, optional
        ``[positions, D / 2]`` of any float, last dimension contiguous. Given both, the kernel turns K: dimension d with
        dimension ``d + D / 2``.
    positions : Tensor, optional
        ``[rows]`` int32 or int64: the row of the tables each packed row takes; by default its position in the cache.
        A packed row that the tables have no row for becomes zeros.
    q : Tensor, optional
        ``[rows, Hq, D]`` of float32, float16 or bfloat16, to be turned as well; only with tables.
    q_out : Tensor, optional
        Like q, and may be q; allocated if missing. Rows of padded lanes become zeros.
    k_scale, v_scale : float, optional
        The kernel divides values by this before they go to a float8 cache.
    tile : AppendTile, optional
        Launch choices other than the table's.

    Returns
    -------
    Tensor or None
        `q_out` if q was given.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; nothing was launched.

    Notes
    -----
    Runs on the current stream and synchronises with nothing.
    """
    check_caches(k_cache, v_cache)
    max_batch_size, max_seq_len, num_kv_heads, head_dim = k_cache.shape
    for name, rows in (("k_new", k_new), ("v_new", v_new)):
        check_rows(name, rows, k_cache, num_heads=num_kv_heads)
        _check_source(name, rows, k_cache)
    num_rows, lanes = len(k_new), len(reqids)
    if len(v_new) != num_rows:
        raise ValueError(f"k_new has {num_rows} rows and v_new {len(v_new)}")
    check_index("reqids", reqids, k_cache.device, lanes)
    check_index("seq_lens", seq_lens, k_cache.device, lanes)
    if cu_q_lens is not None:
        check_index("cu_q_lens", cu_q_lens, k_cache.device, lanes + 1)
    elif num_rows != lanes:
        raise ValueError(f"k_new has {num_rows} rows and reqids {lanes}; without cu_q_lens every lane has one row")
    k_factor, v_factor = check_scales(k_cache, k_scale, v_scale)
    rotary = _check_rotary(rotary_cos, rotary_sin, positions, k_new)
    if q is not None:
        q_out = _check_q(q, q_out, k_new, k_cache, rotary)
    elif q_out is not None:
        raise ValueError("q_out is given without q")
    if not (num_rows and lanes):
        return q_out
    num_q_heads = 0 if q is None else q.shape[1]
    tile = tile or append_tile(num_rows, num_kv_heads + num_q_heads, traits(k_cache.device).multiprocessors)
    cos, sin = (k_new, k_new) if rotary_cos is None or rotary_sin is None else (rotary_cos, rotary_sin)
    source, target = (k_new, k_new) if q is None or q_out is None else (q, q_out)
    num_blocks = num_kv_heads + num_q_heads
    with on_device(k_cache):
        _append_kernel[(ceil_div(num_rows, tile.tokens) * num_blocks,)](
            k_new, v_new, k_cache.data_ptr(), v_cache.data_ptr(), source, target, cos, sin, positions,
            reqids, cu_q_lens, seq_lens,
            *k_new.stride()[:2], *v_new.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
            *source.stride()[:2], *target.stride()[:2], cos.stride(0), sin.stride(0), k_factor, v_factor,
            num_rows, max_batch_size, max_seq_len, cos.shape[0], lanes, lanes.bit_length(), num_blocks, num_kv_heads,
            HEAD_DIM=head_dim, BLOCK_T=tile.tokens, BLOCK_H=padded(head_dim // 2, 8), LIMIT=_limit(k_cache.dtype),
            ROTARY=rotary, HAS_POSITIONS=positions is not None, HAS_Q=q is not None, ONE_EACH=cu_q_lens is None,
            **cache_elements(k_cache, v_cache), num_warps=tile.warps,
        )  # fmt: skip
    return q_out


def _limit(dtype: torch.dtype) -> float:
    """Return the largest value of a float8, 0 for types that need no saturation."""
    return torch.finfo(dtype).max if dtype in FLOAT8_DTYPES else 0.0


def _check_source(name: str, rows: Tensor, k_cache: Tensor) -> None:
    allowed = (*FLOAT_DTYPES, k_cache.dtype) if k_cache.dtype in FLOAT8_DTYPES else (k_cache.dtype,)
    if rows.dtype not in allowed:
        raise TypeError(f"{name} is {rows.dtype}; it does not go with a cache of {k_cache.dtype}")


def _check_rotary(cos: Tensor | None, sin: Tensor | None, positions: Tensor | None, k_new: Tensor) -> bool:
    """Return whether there are tables to turn by."""
    if cos is None or sin is None:
        if cos is not None or sin is not None or positions is not None:
            raise ValueError("rotary_cos and rotary_sin go together, and positions go with them")
        return False
    half = k_new.shape[2] // 2
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if table.dtype not in FLOAT_DTYPES:
            raise TypeError(f"{name} is {table.dtype}; it must be float32, float16 or bfloat16")
        if table.dim() != 2 or table.shape[1] != half:
            raise ValueError(f"{name} has shape {tuple(table.shape)}; it must be [positions, {half}]")
        check_device(name, table, k_new.device)
        check_last_contiguous(name, table)
    if len(cos) != len(sin):
        raise ValueError(f"rotary_cos has {len(cos)} rows and rotary_sin {len(sin)}")
    if positions is not None:
        check_index("positions", positions, k_new.device, len(k_new))
    return True


def _check_q(q: Tensor, q_out: Tensor | None, k_new: Tensor, k_cache: Tensor, rotary: bool) -> Tensor:
    """Return where to write the turned q."""
    if not rotary:
        raise ValueError("q is given without rotary_cos and rotary_sin; there is nothing to do to it")
    check_queries(q, k_cache)
    if len(q) != len(k_new):
        raise ValueError(f"q has {len(q)} rows and k_new {len(k_new)}")
    q_out = torch.empty_like(q, memory_format=torch.contiguous_format) if q_out is None else q_out
    check_like("q_out", q_out, q)
    return q_out


# --- on the device ---------------------------------------------------------------------------------------------------


@triton.jit
def _halves(base, offsets, inside, HALF: tl.constexpr):
    """Load the two halves of rows in float32."""
    low = tl.load(base + offsets, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(base + offsets + HALF, mask=inside, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def _turned(
    base, offsets, inside, rows, position, cos_table, sin_table, positions, cos_row, sin_row, num_rows, num_angles,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, HAS_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Load the two halves of rows, turned by their angle; 0 where they have no place or the tables no angle."""
    columns = tl.arange(0, BLOCK_H)
    angle = position
    if HAS_POSITIONS:
        angle = tl.load(positions + rows, mask=rows < num_rows, other=-1).to(tl.int64)
    known = inside & ((angle >= 0) & (angle < num_angles))[:, None]
    cos = tl.load(cos_table + angle[:, None] * cos_row + columns[None, :], mask=known, other=0.0).to(tl.float32)
    sin = tl.load(sin_table + angle[:, None] * sin_row + columns[None, :], mask=known, other=0.0).to(tl.float32)
    low, high = _halves(base, offsets, inside, HALF)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _store_halves(base, offsets, low, high, inside, factor, HALF: tl.constexpr, LIMIT: tl.constexpr):
    """Store two halves in the target's type, scaled and saturated where that is a float8."""
    if LIMIT > 0:
        low = _within(tl.div_rn(low, factor), LIMIT)
        high = _within(tl.div_rn(high, factor), LIMIT)
    tl.store(base + offsets, low.to(base.dtype.element_ty), mask=inside)
    tl.store(base + offsets + HALF, high.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _within(x, LIMIT: tl.constexpr):
    """Hold x within the limits; comparisons with NaN are false, so NaN stays."""
    return tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, x))


@triton.jit(do_not_specialize=_RUNTIME_INTS, do_not_specialize_on_alignment=INDICES)
def _append_kernel(
    k_new, v_new, k_address, v_address, q, q_out, cos_table, sin_table, positions, reqids, cu_q_lens, seq_lens,
    kn_row, kn_head, vn_row, vn_head, k_slot, k_token, k_head, v_slot, v_token, v_head,
    q_row, q_head, qo_row, qo_head, cos_row, sin_row, k_scale, v_scale,
    num_rows, max_batch_size, max_seq_len, num_angles, num_lanes, steps, num_blocks, num_kv_heads,
    HEAD_DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, LIMIT: tl.constexpr,
    ROTARY: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_Q: tl.constexpr, ONE_EACH: tl.constexpr,
    ELEMENT: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Some tokens of one head: a KV head's K and V, or, past those, a query head.

    The kernel loads rows that are not turned before it knows their place: the two loads take as long as one. It loads
    rows that are turned together with their angle: loaded as early as the others, 8,192 of them took 6 % longer (H200).
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    block = tl.program_id(0) % num_blocks
    rows = (tl.program_id(0) // num_blocks).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.arange(0, BLOCK_H)
    there = (rows < num_rows)[:, None] & (columns < HALF)[None, :]
    head = tl.cast(block, tl.int64)
    if block < num_kv_heads:
        v_low, v_high = _halves(v_new + head * vn_head, rows[:, None] * vn_row + columns[None, :], there, HALF)
        if not ROTARY:
            k_low, k_high = _halves(k_new + head * kn_head, rows[:, None] * kn_row + columns[None, :], there, HALF)
        slot, position, mapped = find_place(
            rows, reqids, cu_q_lens, seq_lens, num_rows, max_batch_size, max_seq_len, num_lanes, steps, ONE_EACH
        )
        inside = mapped[:, None] & (columns < HALF)[None, :]
        if ROTARY:
            k_low, k_high = _turned(
                k_new + head * kn_head, rows[:, None] * kn_row + columns[None, :], inside, rows, position,
                cos_table, sin_table, positions, cos_row, sin_row, num_rows, num_angles, HALF, BLOCK_H, HAS_POSITIONS,
            )  # fmt: skip
        target = slot[:, None] * k_slot + position[:, None] * k_token + columns[None, :]
        base = cache_pointer(k_address, ELEMENT, ALIGNMENT) + head * k_head
        _store_halves(base, target, k_low, k_high, inside, k_scale, HALF, LIMIT)
        target = slot[:, None] * v_slot + position[:, None] * v_token + columns[None, :]
        base = cache_pointer(v_address, ELEMENT, ALIGNMENT) + head * v_head
        _store_halves(base, target, v_low, v_high, inside, v_scale, HALF, LIMIT)
    elif HAS_Q:
        head = head - num_kv_heads
        slot, position, mapped = find_place(
            rows, reqids, cu_q_lens, seq_lens, num_rows, max_batch_size, max_seq_len, num_lanes, steps, ONE_EACH
        )
        inside = mapped[:, None] & (columns < HALF)[None, :]
        low, high = _turned(
            q + head * q_head, rows[:, None] * q_row + columns[None, :], inside, rows, position,
            cos_table, sin_table, positions, cos_row, sin_row, num_rows, num_angles, HALF, BLOCK_H, HAS_POSITIONS,
        )  # fmt: skip
        target = rows[:, None] * qo_row + columns[None, :]
        _store_halves(q_out + head * qo_head, target, low, high, there, 1.0, HALF, 0.0)
