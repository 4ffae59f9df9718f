"""What other layouts of a KV cache would hold for the same requests. All of it is arithmetic, none is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ..layout import KVLayout, LayoutKind, paged_kv_bytes

__all__ = ["CUDA_PAGE_BYTES", "Footprint", "footprints", "layout_name"]

_PAGED_TOKENS = 16
_SMALL = 64 << 10
CUDA_PAGE_BYTES = 2 << 20
"""The page that CUDA drivers give."""
_NAMES = {"sliced": "sliced", "interleaved": "interleaved", "per_layer": "per layer"}


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that one way to lay out a KV cache takes.

    Attributes
    ----------
    name : str
    request_bytes : callable
        Physical bytes behind a request of so many tokens.
    tokens_per_page : int
        Whole tokens in the smallest piece it allocates.
    virtual_bytes : int
        Addresses it reserves, 0 when it needs none beyond its memory.
    fixed_bytes : int
        Physical bytes held from the start, however few requests there are; 0 when it allocates as they grow.
    """

    name: str
    request_bytes: Callable[[int], int]
    tokens_per_page: int
    virtual_bytes: int = 0
    fixed_bytes: int = 0

    def held_bytes(self, seq_lens: Iterable[int]) -> int:
        """Physical bytes held while requests of these lengths are active."""
        return self.fixed_bytes or sum(map(self.request_bytes, seq_lens))


def layout_name(layout: KVLayout) -> str:
    """Name of a layout and its page size, for tables."""
    small = layout.page_bytes < 1 << 20
    size = f"{layout.page_bytes >> 10} KiB" if small else f"{layout.page_bytes / (1 << 20):g} MiB"
    return f"{_NAMES[layout.kind]}, {size} pages"


def footprints(layout: KVLayout) -> dict[str, Footprint]:
    """Return every way this module knows, for the model and the slots of `layout`.

    The keys are "sliced", "interleaved", "per_layer_small" (pages of 64 KiB, which no stock CUDA driver has),
    "per_layer", "paged" (16 tokens at a time) and "static" (all tokens of all slots from the start).
    """
    token_bytes, slots, tokens = layout.token_bytes, layout.max_batch_size, layout.max_seq_len
    whole = tokens * token_bytes
    return {
        "sliced": _on_demand(layout, "sliced", CUDA_PAGE_BYTES),
        "interleaved": _on_demand(layout, "interleaved", CUDA_PAGE_BYTES),
        "paged": Footprint(
            f"paged, {_PAGED_TOKENS} tokens",
            lambda seq_len: paged_kv_bytes(token_bytes, seq_len, _PAGED_TOKENS),
            _PAGED_TOKENS,
        ),
        "per_layer_small": _on_demand(layout, "per_layer", _SMALL),
        "per_layer": _on_demand(layout, "per_layer", CUDA_PAGE_BYTES),
        "static": Footprint(f"static, {slots:,} x {tokens:,} tokens", lambda _: whole, tokens, 0, slots * whole),
    }


def _on_demand(layout: KVLayout, kind: LayoutKind, page_bytes: int) -> Footprint:
    found = replace(layout, kind=kind, page_bytes=page_bytes)
    virtual_bytes = found.num_planes * found.plane_bytes
    return Footprint(layout_name(found), found.bytes_for, found.tokens_per_page, virtual_bytes)
