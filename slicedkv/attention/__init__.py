"""Attention over layer slices: `open_backend` picks a backend by name and imports only that one.

A new backend is one more row of the table below.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ..errors import BackendUnavailableError, ConfigError
from .base import AttentionBackend, Batch, KVSource

__all__ = ["AttentionBackend", "Batch", "KVSource", "available_backends", "open_backend"]

# Name -> module and class, in the order in which "auto" tries them.
_BACKENDS = {
    "sdpa": ("sdpa", "SDPABackend"),
    "reference": ("reference", "ReferenceBackend"),
}


def available_backends(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16, head_dim: int = 128
) -> dict[str, str | None]:
    """Return for every backend None when it would run there, else the reason why not, in the order of preference."""
    return {name: _missing(name, torch.device(device), dtype, head_dim) for name in _BACKENDS}


def open_backend(name: str, cache: KVSource, *, num_qo_heads: int, **options: Any) -> AttentionBackend:
    """Return a backend for `cache`.

    Parameters
    ----------
    name : str
        A backend's name, or "auto" for the first that runs on the cache's device and dtype.
    cache : KVSource
    num_qo_heads : int
    **options
        `scale`, `causal` and what the backend adds; see `AttentionBackend`.

    Raises
    ------
    ConfigError
        No backend has this name, or an option does not fit.
    BackendUnavailableError
        The backend cannot run here; the message says why.
    """
    if name != "auto" and name not in _BACKENDS:
        raise ConfigError(f"backend is {name!r}; use 'auto' or one of {', '.join(_BACKENDS)}")
    first = cache.k(0)
    reasons: list[str] = []
    for candidate in _BACKENDS if name == "auto" else (name,):
        reason = _missing(candidate, first.device, first.dtype, first.shape[-1])
        if reason is None:
            return _load(candidate)(cache, num_qo_heads=num_qo_heads, **options)
        reasons.append(f"{candidate}: {reason}")
    raise BackendUnavailableError(f"no attention backend for {first.dtype} on {first.device}: {'; '.join(reasons)}")


def _load(name: str) -> type[AttentionBackend]:
    module, attribute = _BACKENDS[name]
    found: type[AttentionBackend] = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    return found


def _missing(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    try:
        backend = _load(name)
    except ImportError as error:
        return f"cannot import {error.name or error}"
    return backend.supports(device, dtype, head_dim)
