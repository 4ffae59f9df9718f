"""Loads the optional C loops of `_native`, or says that there are none.

Without them drivers make every call from Python, one by one. That is right, but slow beside a busy main thread, since
each call must win the GIL back. Does not know what the loops do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

__all__ = ["disabled", "load"]

_switched_off = 0


def load() -> ModuleType | None:
    """Return the extension module, or None when it was not built or is switched off. Each new driver asks once."""
    if _switched_off:
        return None
    try:
        return import_module("slicedkv.vmm._native")
    except ImportError:
        return None


@contextmanager
def disabled() -> Iterator[None]:
    """Make drivers opened inside the context use Python loops for as long as they live. For tests and measurements."""
    global _switched_off
    _switched_off += 1
    try:
        yield
    finally:
        _switched_off -= 1
