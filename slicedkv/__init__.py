"""slicedkv: K and V of each request contiguous in virtual memory, physical pages committed as it grows.

Works on unmodified NVIDIA drivers, and on any Linux host for tests and development. Importing it needs torch only.
"""

from __future__ import annotations

from .cache import SlicedKVCache
from .config import CacheConfig
from .errors import (
    BackendUnavailableError,
    CapacityError,
    ConfigError,
    DriverError,
    OutOfPagesError,
    OutOfSlotsError,
    SlicedKVError,
    StateError,
)
from .layout import KVLayout
from .page_pool import PagePool
from .stats import CacheStats
from .swap import SwapHandle

__all__ = [
    "BackendUnavailableError",
    "CacheConfig",
    "CacheStats",
    "CapacityError",
    "ConfigError",
    "DriverError",
    "KVLayout",
    "OutOfPagesError",
    "OutOfSlotsError",
    "PagePool",
    "SlicedKVCache",
    "SlicedKVError",
    "StateError",
    "SwapHandle",
]
__version__ = "0.1.0"
