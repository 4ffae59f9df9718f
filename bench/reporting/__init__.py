"""What is reported of the results: a module for each benchmark, its figures and plots joined here.

To report a new one, give it a module with `FIGURES` (and `PLOTS`) and name it below.
"""

from __future__ import annotations

from reporting import attention, footprint, mapper, page_size, peers, serving, sharing, swap

__all__ = ["FIGURES", "PLOTS"]

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
