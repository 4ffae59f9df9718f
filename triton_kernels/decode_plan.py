"""Tiles, splits and workspace of a decode launch: everything that shapes decide."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import ceil_div, check_caches, check_device, check_queries, padded, traits
from .tuning import DecodeTile, choose_splits, decode_tile

__all__ = ["MAX_ROWS", "DecodePlan", "JoinTile", "cut_workspace", "join_tile", "plan_decode", "workspace_numel"]

MAX_ROWS = 64
"""Query rows of one tile."""


class DecodePlan(NamedTuple):
    """Tile sizes of one launch: `heads` KV heads and `rows` query rows a program, `row_tiles` programs for all rows.

    The launch splits the tokens of each request or, if `across`, of all together. The workspace holds `num_parts`.
    """

    heads: int
    rows: int
    row_tiles: int
    block_tokens: int
    width: int
    num_splits: int
    across: bool
    num_parts: int
    tile: DecodeTile


class JoinTile(NamedTuple):
    """How parts are joined: so many at a time, and so many columns a program."""

    splits: int
    columns: int


def join_tile(places: int, width: int, num_splits: int, device: torch.device) -> JoinTile:
    """Choose how to join parts: where few heads have many parts, more programs share a head's columns."""
    few = places < 4 * traits(device).multiprocessors
    return JoinTile(min(64, padded(num_splits)), min(32, width) if few else width)


def plan_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_len: int,
    max_seq_len: int | None,
    uneven: bool,
    num_splits: int | None,
    window: int | None,
    tile: DecodeTile | None,
) -> DecodePlan:
    """Check what shapes a launch and choose its tiles and splits.

    Raises
    ------
    TypeError, ValueError
        As `decode_attention`.
    """
    check_caches(k_cache, v_cache)
    check_queries(q, k_cache)
    for name, value in (("q_len", q_len), ("max_seq_len", max_seq_len), ("num_splits", num_splits), ("window", window)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if q.shape[0] % q_len:
        raise ValueError(f"q has {q.shape[0]} rows; they must be a multiple of q_len, {q_len}")
    _, max_len, num_kv_heads, head_dim = k_cache.shape
    capability, multiprocessors = traits(q.device)
    tile = tile or decode_tile(capability, k_cache.element_size())
    lanes = q.shape[0] // q_len
    rows_per_head = q_len * (q.shape[1] // num_kv_heads)
    heads = _heads(tile.heads, rows_per_head, k_cache, v_cache)
    rows = min(MAX_ROWS, padded(heads * rows_per_head))
    row_tiles = ceil_div(heads * rows_per_head, rows)
    width = padded(heads * head_dim)
    fitting = min(256, max(16, tile.tile_bytes // (width * k_cache.element_size())))
    block_tokens = 1 << (fitting.bit_length() - 1)
    if num_splits is None:
        reach = min(max_seq_len or max_len, max_len, window + q_len - 1 if window else max_len)
        blocks = num_kv_heads // heads * row_tiles
        tiles = ceil_div(reach, block_tokens)
        num_splits = choose_splits(lanes, blocks, tiles, multiprocessors, tile, uneven=uneven)
    across = uneven and lanes > 1 and num_splits > 1
    num_parts = num_splits * (2 if across else lanes)  # a part of all may share a request with those on both sides
    return DecodePlan(heads, rows, row_tiles, block_tokens, width, num_splits, across, num_parts, tile)


def _heads(wanted: int, rows_per_head: int, k_cache: Tensor, v_cache: Tensor) -> int:
    """Return how many KV heads one program can take: side by side in memory, and at no cost in the matrix units.

    Their query rows share one tile, each row zero outside its own head's columns. A tile has 16 rows anyway.
    """
    num_heads, head_dim = k_cache.shape[2:]
    if not k_cache.stride(2) == v_cache.stride(2) == head_dim:
        return 1
    heads = wanted
    while heads > 1 and (
        num_heads % heads or heads * rows_per_head > 16 or padded(heads * head_dim) > heads * head_dim
    ):
        heads -= 1
    return heads


def workspace_numel(q: Tensor, q_len: int, num_parts: int) -> int:
    """Return the float32 elements of the parts' outputs and logarithms."""
    return num_parts * q_len * q.shape[1] * (q.shape[2] + 1)


def cut_workspace(workspace: Tensor | None, q: Tensor, q_len: int, num_parts: int) -> tuple[Tensor, Tensor]:
    """Cut the workspace, allocated if there is none, into outputs and logarithms of the parts.

    Raises
    ------
    TypeError, ValueError
        It does not fit.
    """
    needed = workspace_numel(q, q_len, num_parts)
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.float32, device=q.device)
    if workspace.dtype != torch.float32:
        raise TypeError(f"workspace is {workspace.dtype}; it must be float32")
    if not workspace.is_contiguous() or workspace.numel() < needed:
        raise ValueError(
            f"workspace has {workspace.numel()} elements; {num_parts} parts need {needed}, contiguous "
            "(decode_workspace_numel tells)"
        )
    check_device("workspace", workspace, q.device)
    flat = workspace.view(-1)
    num_outputs = needed // (q.shape[2] + 1) * q.shape[2]
    return flat[:num_outputs], flat[num_outputs:needed]
