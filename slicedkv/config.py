"""`CacheConfig`: every argument of `SlicedKVCache`, validated once, before anything is opened or reserved.

Knows torch dtypes and devices, no driver: what depends on a driver (granularity, free memory) is checked by the
cache when it has one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, get_args

import torch

from .checks import check_bool, check_fraction, check_int
from .errors import ConfigError
from .layout import KVLayout, LayoutKind

__all__ = ["CacheConfig", "MapperKind", "MemoryLimit", "parse_memory_limit"]

MapperKind = Literal["background", "sync"]
MemoryLimit = int | float | str | None

_DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
_UNITS = {"": 1, **{f"{p}{'i' * b}B": (1024 if b else 1000) ** e for e, p in enumerate("KMGT", 1) for b in (0, 1)}}
_MOST_BYTES, _MOST_CHARACTERS = 1 << 62, 40
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_memory_limit(
    limit: MemoryLimit, *, free_bytes: int, default_fraction: float, name: str = "memory_limit"
) -> int:
    """Turn an amount of memory into bytes.

    Parameters
    ----------
    limit : int, float, str or None
        An int: bytes. A float: a fraction in (0, 1] of `free_bytes`. A size such as ``"40GiB"`` or ``"500 MB"``. None:
        `default_fraction` of `free_bytes`.
    free_bytes : int
        Physical memory free on the device now.
    default_fraction : float
    name : str
        Of the argument, for messages.

    Raises
    ------
    ConfigError
        The limit is not one of these forms, or not positive.
    """
    fraction = default_fraction if limit is None else limit
    if isinstance(fraction, float):
        if not 0 < fraction <= 1:
            raise ConfigError(
                f"{name} is {limit!r}; with a point it is a fraction of the free memory and must be in (0, 1]; write "
                "bytes as a whole number, or like '40GiB'"
            )
        return int(free_bytes * fraction)
    if isinstance(limit, str):
        match = _SIZE.fullmatch(limit)
        known = match is not None and match[2] in _UNITS and len(limit) <= _MOST_CHARACTERS
        if match is None or not known or (not match[2] and "." in match[1]):
            raise ConfigError(f"{name} is {limit!r:.80}; write it like '40GiB', '500MB' or as a whole number of bytes")
        return check_int(name, int(Decimal(match[1]) * _UNITS[match[2]]), 1, _MOST_BYTES)
    return check_int(name, limit, 1, _MOST_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Validated arguments of `SlicedKVCache`.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim : int
        N, H and D of the model (of this rank's part of it).
    dtype : torch.dtype or str
        float16, bfloat16, float32, float64, float8_e4m3fn or float8_e5m2.
    max_batch_size, max_seq_len : int
        B slots of L tokens; costs addresses, not memory.
    device : torch.device or str, optional
        "cuda", "cuda:<index>" or "cpu" (memfd and mmap); by default CUDA where there is a GPU.
    memory_limit : int, float or str, optional
        Bytes (an int), "40GiB", or a fraction (a float in (0, 1]) of what is free on the device when the cache opens,
        host memory that a cgroup denies left out; by default 0.9 of it on a GPU, half of it on the host.
    page_bytes : int, optional
        Bytes of a page, a multiple of the driver's granularity; by default the granularity on CUDA (2 MiB), 2 MiB on
        the host.
    extent_pages : int, optional
        Pages mapped with one handle where a request grows by that many at once, by default 16; 1 turns it off.
    layout : {"sliced", "interleaved", "per_layer"}
        See `slicedkv.layout`.
    mapper : {"background", "sync"}
        Map ahead on a thread, or on the calling thread.
    lookahead_tokens : int, optional
        Map a request's next page when it comes within that many tokens of the end of what is mapped; 0 never. By
        default it follows measured map time, demand and step interval (0 with `mapper="sync"`).
    eager_tokens : int or "auto"
        Keep this many tokens mapped in the slot that the next request gets; "auto" follows recent prompts.
    reclaim_watermark : float
        Take pages from idle slots when less than this share of the limit is available.
    guard_tokens : int
        Rows behind each request's length that are mapped too, for kernels that read past it.
    zero_on_reuse : bool
        Zero pages before a request may see them, ordered on the stream current in its `step`.
    swap_limit : int, float or str, optional
        Host memory for swapped-out requests: bytes, "40GiB", or a fraction of what is available on the host; by
        default a quarter of it. Taken only when used.
    min_share : int, float or str, optional
        Memory of the pool that other caches on it never take from this one: bytes, "4GiB", or a fraction of the pool's
        limit, in whole pages; by default none.
    debug : bool
        Find writes that would damage what other requests read. Pages that requests share are mapped read-only where the
        device can do that, so that whatever writes there faults at once: on the host with SIGSEGV, on a GPU with an
        error that ends the context. A GPU driver may refuse; `SlicedKVCache.protects_shared_pages` tells. Everywhere
        `append` of an attention backend refuses rows that no step has backed, or that lie in shared pages; so does
        `plan(graph=True)`, as a replayed graph does not call `append`. Sharing whole pages then waits for the current
        stream's work, and costs driver calls.

    Raises
    ------
    ConfigError
        An argument has a wrong type or value; the message names it.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    max_batch_size: int
    max_seq_len: int
    device: torch.device | None = None
    memory_limit: MemoryLimit = None
    page_bytes: int | None = None
    extent_pages: int | None = None
    layout: LayoutKind = "sliced"
    mapper: MapperKind = "background"
    lookahead_tokens: int | None = None
    eager_tokens: int | Literal["auto"] = 0
    reclaim_watermark: float = 0.1
    guard_tokens: int = 0
    zero_on_reuse: bool = False
    swap_limit: MemoryLimit = None
    min_share: MemoryLimit = None
    debug: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "max_batch_size", "max_seq_len"):
            self._set(name, check_int(name, getattr(self, name), 1))
        self._set("guard_tokens", check_int("guard_tokens", self.guard_tokens, 0))
        for name in ("page_bytes", "extent_pages"):
            if getattr(self, name) is not None:
                self._set(name, check_int(name, getattr(self, name), 1))
        if self.lookahead_tokens is not None:
            self._set("lookahead_tokens", check_int("lookahead_tokens", self.lookahead_tokens, 0, self.max_seq_len))
        if isinstance(self.eager_tokens, str) and self.eager_tokens != "auto":
            raise ConfigError(f"eager_tokens is {self.eager_tokens!r}; it must be a number of tokens or 'auto'")
        if self.eager_tokens != "auto":
            self._set("eager_tokens", check_int("eager_tokens", self.eager_tokens, 0, self.max_seq_len))
        self._set("reclaim_watermark", check_fraction("reclaim_watermark", self.reclaim_watermark))
        check_bool("zero_on_reuse", self.zero_on_reuse)
        check_bool("debug", self.debug)
        self._choice("layout", get_args(LayoutKind))
        self._choice("mapper", get_args(MapperKind))
        self._set("dtype", _check_dtype(self.dtype))
        if self.device is not None:
            self._set("device", _check_device(self.device))
        for name in ("memory_limit", "swap_limit", "min_share"):
            parse_memory_limit(getattr(self, name), free_bytes=1 << 40, default_fraction=1.0, name=name)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _choice(self, name: str, allowed: tuple[str, ...]) -> None:
        if getattr(self, name) not in allowed:
            raise ConfigError(f"{name} is {getattr(self, name)!r}; use one of {', '.join(allowed)}")

    def kv_layout(self, page_bytes: int) -> KVLayout:
        """Return the geometry of this cache for pages of `page_bytes`."""
        return KVLayout(
            kind=self.layout,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            itemsize=self.dtype.itemsize,
            max_batch_size=self.max_batch_size,
            max_seq_len=self.max_seq_len,
            page_bytes=page_bytes,
            guard_tokens=self.guard_tokens,
        )


def _check_dtype(dtype: Any) -> torch.dtype:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found not in _DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in _DTYPES)
        raise ConfigError(f"dtype is {dtype!r}; use one of {names}")
    return found  # type: ignore[no-any-return]


def _check_device(device: Any) -> torch.device:
    try:
        found = torch.device("cpu" if device == "host" else device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device is {device!r}; use 'cpu', 'cuda' or 'cuda:<index>'") from error
    if found.type not in {"cpu", "cuda", "meta"}:
        raise ConfigError(f"device is {device!r}; use 'cpu', 'cuda' or 'cuda:<index>'")
    return found
