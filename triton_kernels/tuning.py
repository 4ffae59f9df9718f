"""Launch choices for each GPU architecture: a table filled by `bench/*.py --tune`, and defaults that run anywhere.

Nothing is tuned at run time: the first call of a shape costs a compilation, never a search.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from .checks import ceil_div

__all__ = ["AppendTile", "DecodeTile", "PrefillTile", "append_tile", "choose_splits", "decode_tile", "prefill_tile"]

MAX_SPLITS = 256
_STARTUP_TILES = 2
"""What starting a program costs, in tiles it could have read meanwhile."""
_REDUCTION_TILES = 3
"""The same for the second kernel."""
_FEW = 1.015
"""How much longer tiles take where programs are just enough to keep a multiprocessor busy, not as many as it holds."""


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """How decode reads: `tile_bytes` of K, then of V, at a time, of `heads` neighbouring KV heads if they fit.

    A multiprocessor holds `programs_per_sm` programs at a time, and `busy_programs` of them keep it busy.
    """

    tile_bytes: int = 8192
    heads: int = 1
    warps: int = 4
    stages: int = 2
    programs_per_sm: int = 2
    busy_programs: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.busy_programs <= self.programs_per_sm:
            raise ValueError(
                f"busy_programs is {self.busy_programs} and programs_per_sm {self.programs_per_sm}; the first must be "
                "at least 1 and at most the second"
            )


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """How prefill cuts: packed query rows and tokens a tile."""

    rows: int = 64
    tokens: int = 32
    warps: int = 4
    stages: int = 2


@dataclass(frozen=True, slots=True)
class AppendTile:
    """How append cuts: tokens a program."""

    tokens: int = 16
    warps: int = 4


# Keyed by compute capability; a newer minor or major version without an entry takes the nearest one below.
_DECODE: dict[tuple[int, int], DecodeTile] = {
    (0, 0): DecodeTile(),
    (8, 0): DecodeTile(tile_bytes=16384, stages=3),
    (8, 6): DecodeTile(tile_bytes=8192, stages=3),
    (9, 0): DecodeTile(tile_bytes=16384, stages=4, busy_programs=1),
    (10, 0): DecodeTile(tile_bytes=16384, stages=3),
    (12, 0): DecodeTile(tile_bytes=8192, stages=3),
}

# For 16-bit queries, by the largest (padded) head dimension a choice serves.
_PREFILL: dict[tuple[int, int], dict[int, PrefillTile]] = {
    (0, 0): {128: PrefillTile(64, 32, 4, 2), 256: PrefillTile(32, 16, 4, 2)},
    (8, 0): {64: PrefillTile(128, 64, 4, 3), 128: PrefillTile(128, 64, 8, 2), 256: PrefillTile(64, 32, 4, 2)},
    (8, 6): {64: PrefillTile(128, 64, 4, 2), 128: PrefillTile(64, 64, 4, 2), 256: PrefillTile(32, 32, 4, 2)},
    (9, 0): {64: PrefillTile(128, 128, 8, 3), 128: PrefillTile(128, 128, 8, 3), 256: PrefillTile(128, 64, 8, 2)},
    (10, 0): {64: PrefillTile(128, 128, 8, 3), 128: PrefillTile(128, 64, 8, 3), 256: PrefillTile(128, 64, 8, 2)},
    (12, 0): {64: PrefillTile(128, 64, 4, 2), 128: PrefillTile(64, 64, 4, 2), 256: PrefillTile(32, 32, 4, 2)},
}
# float32 products run on ordinary arithmetic units, and need registers that a larger tile would not leave.
_PREFILL_FLOAT32 = {128: PrefillTile(32, 32, 4, 2), 256: PrefillTile(16, 16, 4, 2)}


def decode_tile(capability: tuple[int, int], itemsize: int) -> DecodeTile:
    """Return the choice for an architecture and the cache's item size."""
    tile = _DECODE[_nearest(tuple(_DECODE), capability)]
    # The same bytes of a float8 are twice the tokens: with the same warps their scores would not stay in registers.
    return replace(tile, warps=2 * tile.warps) if itemsize == 1 else tile


def prefill_tile(capability: tuple[int, int], itemsize: int, head_dim: int) -> PrefillTile:
    """Return the choice for an architecture, the queries' item size and the head dimension."""
    choices = _PREFILL_FLOAT32 if itemsize > 2 else _PREFILL[_nearest(tuple(_PREFILL), capability)]
    return choices[min(limit for limit in choices if limit >= head_dim)]


def append_tile(num_tokens: int, num_heads: int, multiprocessors: int) -> AppendTile:
    """Return how to cut: few tokens a program while only that fills the GPU."""
    if num_tokens * num_heads < 64 * multiprocessors:
        return AppendTile(tokens=4, warps=1)
    return AppendTile()


@lru_cache(maxsize=4096)
def choose_splits(
    lanes: int, blocks: int, tiles: int, multiprocessors: int, tile: DecodeTile, *, uneven: bool = False
) -> int:
    """Return into how many parts to split each request's tokens, or, if `uneven`, those of all requests together.

    For requests of one length, the split with the least cost wins. The cost is the number of rounds of programs over
    the GPU, times the tiles that each program reads and what starting it is worth; with more than one part, plus the
    reduction. The first round has as many programs as keep all multiprocessors busy. Later rounds have as many as all
    multiprocessors hold, and each counts as many times as it is larger than the first. A round that is not full costs
    as much as a full one: places come free in pairs, and the other multiprocessors idle. So 656 programs took 7 %
    longer than 528 or 128 for the same tokens (H200, four requests of 131,072 tokens).

    Uneven requests get as many parts as keep the GPU busy. If a part would have two requests or more, there are twice
    as many, since such parts differ in how often they start on a request.

    Parameters
    ----------
    lanes, blocks : int
        Requests, and programs that each takes without a split.
    tiles : int
        Upper bound of the tiles of any request.
    multiprocessors : int
        Of the GPU.
    tile : DecodeTile
        Says how many programs each takes.
    uneven : bool
        Whether requests may differ much in tiles.
    """
    busy, most = tile.busy_programs, tile.programs_per_sm
    if uneven and lanes > 1:
        splits = max(1, min(busy * multiprocessors // max(1, blocks), lanes * tiles))
        return 2 * splits if splits > 1 and lanes >= 2 * splits else splits

    def rounds(programs: int) -> float:
        if programs <= busy * multiprocessors:
            return _FEW if busy < most else 1
        return ceil_div(programs, most * multiprocessors) * most / busy

    def cost(splits: int) -> float:
        reading = rounds(lanes * blocks * splits) * (ceil_div(tiles, splits) + _STARTUP_TILES)
        return reading + (_REDUCTION_TILES if splits > 1 else 0)

    return min(range(1, min(MAX_SPLITS, max(1, tiles)) + 1), key=cost)


def _nearest(known: tuple[tuple[int, int], ...], capability: tuple[int, int]) -> tuple[int, int]:
    return max(entry for entry in known if entry <= capability)
