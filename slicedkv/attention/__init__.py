"""Attention over layer slices: `open_backend` picks a backend by name and imports only that one.

A new backend is one more row of the table below.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection
from typing import Any, NamedTuple

import torch

from ..errors import BackendUnavailableError, ConfigError
from .base import AttentionBackend, KVSource, is_hopper
from .batch import Batch

__all__ = ["AttentionBackend", "Batch", "Choice", "KVSource", "available_backends", "choose_backend", "open_backend"]

# Name -> module and class.
_BACKENDS = {
    "flashinfer": ("flashinfer", "FlashInferBackend"),
    "fa3": ("fa3", "FlashAttention3Backend"),
    "fa4": ("fa4", "FlashAttention4Backend"),
    "triton": ("triton", "TritonBackend"),
    "flash_attn": ("flash_attn", "FlashAttentionBackend"),
    "sdpa": ("sdpa", "SDPABackend"),
    "reference": ("reference", "ReferenceBackend"),
}
_INSTALL = {name: f"slicedkv[{name}]" for name in ("flashinfer", "fa3", "fa4", "triton")} | {"flash_attn": "flash-attn"}


class Choice(NamedTuple):
    """What "auto" takes: a backend, options for it, and why."""

    name: str
    options: dict[str, Any]
    why: str

    @property
    def backends(self) -> list[str]:
        """Names of the backends that must run for it."""
        return _used(self.name, self.options)


# In this order. The figures behind it are bench/results/decode-h200.json and prefill-h200.json. FlashAttention 3 runs
# on Hopper alone. FlashAttention 4 is taken by name only: its adapter has not been measured.
_TOKENS = "tokens are decoded by the Triton kernels"
_ON_HOPPER = (
    Choice("flashinfer", {"decode": "triton", "prompts": "fa3"}, f"FlashAttention 3 for long prompts; {_TOKENS}"),
    Choice("fa3", {}, f"the fastest for long prompts; {_TOKENS}"),
)
_AUTO = {
    "cuda": (
        Choice("flashinfer", {"decode": "triton"}, f"the fastest for prompts; {_TOKENS}"),
        Choice("triton", {}, "reads every dtype and head dimension in place, and decodes in CUDA graphs"),
        Choice("flash_attn", {}, "reads slices in place, one call for all decoding requests"),
        Choice("sdpa", {}, "runs wherever torch does, one call for each request"),
        Choice("reference", {}, "plain torch operations, slow"),
    ),
    "cpu": (
        Choice("sdpa", {}, "the fastest without a GPU"),
        Choice("reference", {}, "plain torch operations, slow; reads float8"),
    ),
}


def available_backends(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16, head_dim: int = 128
) -> dict[str, str | None]:
    """Return for every backend None when it would run there, else the reason why not."""
    return {name: _missing(name, torch.device(device), dtype, head_dim) for name in _BACKENDS}


def choose_backend(
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 128,
    *,
    needs: Collection[str] = (),
    **options: Any,
) -> Choice:
    """Return what "auto" takes: the first backend that runs there, has what is needed and knows these options.

    Parameters
    ----------
    device, dtype, head_dim
        Of the cache.
    needs : collection of str
        What `AttentionBackend.features` must hold: "window", "soft_cap", "sinks".
    **options
        For the backend.

    Raises
    ------
    BackendUnavailableError
        No backend runs there with these options; the message says why not, for each.
    """
    device = torch.device(device)
    reasons: dict[str, None] = {}
    for choice in _choices(device):
        reason = next(filter(None, (_missing(name, device, dtype, head_dim) for name in choice.backends)), None)
        if reason is None and (unknown := _unknown(_load(choice.name), options)):
            reason = f"has no option {', '.join(unknown)}"
        if reason is None and (lacking := _lacking(choice.name, needs)):
            reason = f"has no {', '.join(lacking)}"
        if reason is None:
            return choice
        reasons[f"{'+'.join(choice.backends)}: {reason}"] = None
    raise BackendUnavailableError(f"no attention backend for {dtype} on {device}: {'; '.join(reasons)}")


def open_backend(
    name: str, cache: KVSource, *, num_qo_heads: int, needs: Collection[str] = (), **options: Any
) -> AttentionBackend:
    """Return a backend for `cache`.

    Parameters
    ----------
    name : str
        A backend's name, or "auto" for what `choose_backend` finds.
    cache : KVSource
    num_qo_heads : int
    needs : collection of str
        As for `choose_backend`.
    **options
        `scale`, `causal` and what the backend adds; see `AttentionBackend`.

    Raises
    ------
    ConfigError
        No backend has this name, it has no such option or lacks what is needed, or a value does not fit.
    BackendUnavailableError
        The backend cannot run here; the message says why.
    """
    if name != "auto" and name not in _BACKENDS:
        raise ConfigError(f"backend is {name!r}; use 'auto' or one of {', '.join(_BACKENDS)}")
    first = cache.k(0)
    if name == "auto":
        choice = choose_backend(first.device, first.dtype, first.shape[-1], needs=needs, **options)
        name, options = choice.name, {**choice.options, **options}
    for used in _used(name, options):
        if (reason := _missing(used, first.device, first.dtype, first.shape[-1])) is not None:
            where = f"{first.dtype} on {first.device}"
            raise BackendUnavailableError(f"no attention backend {used!r} for {where}: {reason}")
    backend = _load(name)
    if unknown := _unknown(backend, options):
        raise ConfigError(f"backend {name!r} has no option {', '.join(unknown)}; it has {', '.join(_options(backend))}")
    if lacking := _lacking(name, needs):
        raise ConfigError(f"backend {name!r} has no {', '.join(lacking)}; 'triton', 'sdpa' and 'reference' have")
    return backend(cache, num_qo_heads=num_qo_heads, **options)


def _lacking(name: str, needs: Collection[str]) -> list[str]:
    return sorted(set(needs) - _load(name).features)


def _choices(device: torch.device) -> tuple[Choice, ...]:
    choices = _AUTO.get(device.type, _AUTO["cpu"])
    return _ON_HOPPER + choices if is_hopper(device) else choices


def _used(name: str, options: dict[str, Any]) -> list[str]:
    """Names of the backends whose kernels these options take."""
    prompts = options.get("prompts")
    return [name, prompts] if prompts != name and prompts in _BACKENDS else [name]


def _options(backend: type[AttentionBackend]) -> list[str]:
    return [name for name in inspect.signature(backend).parameters if name not in {"cache", "num_qo_heads"}]


def _unknown(backend: type[AttentionBackend], options: dict[str, Any]) -> list[str]:
    return [name for name in options if name not in _options(backend)]


def _load(name: str) -> type[AttentionBackend]:
    module, attribute = _BACKENDS[name]
    found: type[AttentionBackend] = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    return found


def _missing(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    try:
        backend = _load(name)
    except ImportError as error:
        package = _INSTALL.get(name)
        return f"cannot import {error.name or error}" + (f"; pip install {package}" if package else "")
    except Exception as error:  # a package that is there and broken, such as one whose parts are of different versions
        return f"cannot be imported: {type(error).__name__}: {error}"
    return backend.supports(device, dtype, head_dim)
