"""Virtual memory on CUDA devices. The only place that touches cuda.bindings."""

from __future__ import annotations

from .driver import CudaDriver

__all__ = ["CudaDriver"]
