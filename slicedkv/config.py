"""`CacheConfig`: every argument of `SlicedKVCache`, validated once, before anything is opened or reserved.

Knows torch's dtypes and devices, but no driver. What depends on a driver (granularity, free memory) the cache checks
once it has opened one.
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
        An int is bytes, a float a fraction in (0, 1] of `free_bytes`, a string a size such as ``"40GiB"`` or
        ``"500 MB"``. None means `default_fraction` of `free_bytes`.
    free_bytes : int
        Physical memory free on the device now.
    default_fraction : float
    name : str
        The argument's name, for messages.

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
        B slots of L tokens. They cost addresses, not memory.
    device : torch.device or str, optional
        "cuda", "cuda:<index>" or "cpu" (memfd and mmap). Default: CUDA where there is a GPU.
    memory_limit : int, float or str, optional
        Bytes (an int), "40GiB", or a fraction (a float in (0, 1]) of the memory that is free on the device when the
        cache opens. Host memory that a cgroup denies is not free. Default: 0.9 on a GPU, 0.5 on the host.
    page_bytes : int, optional
        Bytes of a page, a multiple of the driver's granularity. Default: the granularity on CUDA (2 MiB), 2 MiB on the
        host.
    extent_pages : int, optional
        A request that grows by this many pages at once gets them as one extent, behind one handle. Default: 16. With 1
        there are no extents.
    layout : {"sliced", "interleaved", "per_layer"}
        See `slicedkv.layout`.
    mapper : {"background", "sync"}
        A thread maps ahead, or the calling thread does.
    lookahead_tokens : int, optional
        The mapper maps a request's next page when the request comes within this many tokens of the end of what is
        mapped. 0 means never. Default: it follows measured map time, demand and step interval; with `mapper="sync"`
        it is 0.
    eager_tokens : int or "auto"
        The mapper keeps this many tokens mapped in the slot that the next request gets. "auto" follows recent prompts.
    reclaim_watermark : float
        The mapper takes pages from idle slots when less than this share of the memory limit is available.
    guard_tokens : int
        Rows behind each request's length that stay mapped too, for kernels that read past it.
    zero_on_reuse : bool
        Zero pages before a request may see them. The stream that is current in its `step` does this, in order.
    swap_limit : int, float or str, optional
        Host memory for swapped-out requests: bytes, "40GiB", or a fraction of what is available on the host. Default:
        a quarter of it. The cache takes it only when it is used.
    min_share : int, float or str, optional
        Memory that the pool keeps for this cache, and that other caches of the pool never take: bytes, "4GiB", or a
        fraction of the pool's limit, rounded up to whole pages. Default: none.
    debug : bool
        Find writes that would damage what other requests read. The cache maps shared pages read-only where the device
        can do that. A write there faults at once: with SIGSEGV on the host, with an error that ends the context on a
        GPU. A GPU driver may refuse; `SlicedKVCache.protects_shared_pages` tells. On every device, `append` of an
        attention backend refuses rows that no step has backed and rows in shared pages. `plan(graph=True)` refuses
        them too, as a replayed graph does not call `append`. The price: sharing whole pages costs driver calls and
        waits for the current stream's work.

    Raises
    ------
    ConfigError
        An argument has a wrong type or value. The message names it.
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
