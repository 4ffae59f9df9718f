"""slicedkv: K and V of each request contiguous in virtual memory, physical pages committed as it grows.

Works on unmodified NVIDIA drivers, and on any Linux host for tests and development. Needs torch only, and imports it
when a public name is first used: the command can answer, or be interrupted, without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cache import SlicedKVCache
    from .config import CacheConfig
    from .errors import (
        BackendUnavailableError,
        CapacityError,
        ConfigError,
        DriverError,
        LostSlotsError,
        OutOfPagesError,
        OutOfSlotsError,
        SlicedKVError,
        StateError,
    )
    from .layout import KVLayout
    from .memory.page_pool import PagePool
    from .requests.swap import SwapHandle
    from .stats import CacheStats

__all__ = [
    "BackendUnavailableError",
    "CacheConfig",
    "CacheStats",
    "CapacityError",
    "ConfigError",
    "DriverError",
    "KVLayout",
    "LostSlotsError",
    "OutOfPagesError",
    "OutOfSlotsError",
    "PagePool",
    "SlicedKVCache",
    "SlicedKVError",
    "StateError",
    "SwapHandle",
]
__version__ = "0.1.0"

_HOMES = ("cache", "config", "errors", "layout", "memory.page_pool", "stats", "requests.swap")

if not TYPE_CHECKING:  # a type checker would take every name for one that exists

    def __getattr__(name: str) -> Any:
        """Import all public names, and the modules they come from, when one of them is used."""
        if not name.startswith("_") and "SlicedKVCache" not in globals():
            for home in _HOMES:
                module = import_module(f"{__name__}.{home}")
                globals().update({public: getattr(module, public) for public in module.__all__ if public in __all__})
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
