"""Figures and plots of the results: a module for each benchmark, joined here.

For a new benchmark, add a module with `FIGURES` (and `PLOTS`) and name it below.
"""

from __future__ import annotations

from . import attention, footprint, mapper, page_size, peers, serving, sharing, swap

__all__ = ["FIGURES", "HEADLINES", "PLOTS"]

FIGURES = (
    *mapper.FIGURES,
    *attention.FIGURES,
    *footprint.FIGURES,
    *serving.FIGURES,
    *sharing.FIGURES,
    *swap.FIGURES,
    *peers.FIGURES,
)
PLOTS = (*attention.PLOTS, *footprint.PLOTS, *page_size.PLOTS, *serving.PLOTS, *peers.PLOTS)

HEADLINES = (
    "footprint.sliced_vs_small_page_max",
    "footprint.batch_vs_small_page_min",
    "mapper.stalls_idle_main",
    "mapper.cold_2gib_ms",
    "decode.vs_flashinfer_paged_geomean",
    "decode.vs_per_layer_geomean",
    "prefill.vs_flashinfer_paged_min_8k",
    "prefill.vs_fa3_paged_geomean",
    "serving.long_vs_paged",
    "serving.chat_vs_paged",
    "serving.prefix_vs_paged",
    "sharing.first_token_32k",
    "swap.vs_plain_copy",
)
"""The figures that README shows."""
