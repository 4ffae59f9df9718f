"""What is reported of the results: a module for each benchmark, its figures and plots joined here.

To report a new one, give it a module with `FIGURES` (and `PLOTS`) and name it below.
"""

from __future__ import annotations

from reporting import footprint, mapper

__all__ = ["FIGURES", "PLOTS"]

FIGURES = (*mapper.FIGURES, *footprint.FIGURES)
PLOTS = footprint.PLOTS
