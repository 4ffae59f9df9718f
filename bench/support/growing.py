"""Requests through an allocator of memory for K and V: what growing and freeing them costs, and what it holds.

`replay` serves requests by continuous batching without a model. Every step each request gets one token more; requests
that are done go, others take their places. `Sliced` is the allocator for a `SlicedKVCache`. This module knows no traces
and no results.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

import slicedkv
from slicedkv import SlicedKVCache

from .common import percentiles
from .spin import Device

Row = dict[str, Any]


class Allocator(Protocol):
    """What `replay` needs. `admit` gives each request a number, by which the other calls know it."""

    version: str

    def admit(self, tokens: int) -> int:
        """Begin a request of `tokens` tokens; `grow` comes next."""

    def grow(self, lengths: dict[int, int]) -> bool:
        """Back every token of all requests; return False when memory is short."""

    def free(self, request: int) -> None:
        """End a request."""

    def trim(self) -> None:
        """Give the device back what no request needs."""

    def held_bytes(self) -> int:
        """Physical memory, by the allocator's own books."""

    def close(self) -> None:
        """Free all."""


class Sliced:
    """K and V in a `SlicedKVCache`."""

    version = slicedkv.__version__

    def __init__(self, cache: SlicedKVCache) -> None:
        self.cache = cache
        self.admit, self.grow, self.free = cache.alloc_reqid, cache.step, cache.free_reqid
        self.trim, self.close = cache.trim, cache.close

    def held_bytes(self) -> int:
        """Behind all handles, mapped or not."""
        return self.cache.stats().created_bytes


class _Times:
    """Microseconds of each call, by its purpose."""

    def __init__(self) -> None:
        self.us: dict[str, list[float]] = {"decode": [], "arrival": [], "free": []}

    def percentiles(self, kind: str) -> Row:
        """The middle, the 99th percentile and the largest."""
        values = self.us[kind]
        names = (f"{kind}_us_p50", f"{kind}_us_p99", f"{kind}_us_max")
        return dict(zip(names, [*percentiles(values, 0.5, 0.99), max(values)] if values else [0.0] * 3, strict=True))


def replay(
    open_allocator: Callable[[], Allocator],
    requests: Iterable[tuple[int, int]],
    slots: int,
    device: Device,
    token_bytes: int,
) -> Row:
    """Serve all requests (prompt and decode tokens), `slots` at a time; return their times and the memory held.

    Raises
    ------
    MemoryError
        The batch does not fit in the allocator's memory.
    """
    taken = (lambda: _taken_bytes(device)) if device.is_cuda else (lambda: 0)
    device.launch()()
    before, allocator = taken(), open_allocator()
    # On a GPU the driver tells what is held, whatever the allocator's books say. Without a GPU the books tell.
    held = (lambda: taken() - before) if device.is_cuda else allocator.held_bytes
    try:
        times, series = _serve(allocator, requests, slots, device, held, token_bytes)
        end_bytes, begun = held(), time.perf_counter()
        allocator.trim()
        trim_ms, trimmed = (time.perf_counter() - begun) * 1e3, held()
        version = allocator.version
    finally:
        allocator.close()
    used, held_mib = (statistics.fmean(series[name]) for name in ("used_mib", "held_mib"))
    stride = max(1, len(series["step"]) // 200)
    return {
        "version": version, "slots": slots, "steps": len(series["step"]),
        **times.percentiles("decode"), **times.percentiles("arrival"), **times.percentiles("free"),
        "total_ms": sum(map(sum, times.us.values())) / 1e3, "trim_ms": trim_ms,
        "used_gib_mean": used / 1024, "held_gib_mean": held_mib / 1024, "held_per_used": held_mib / used,
        "held_gib_max": max(series["held_mib"]) / 1024, "held_gib_end": end_bytes / 2**30,
        "held_gib_trimmed": trimmed / 2**30,
        "series": {name: values[::stride] for name, values in series.items()},
    }  # fmt: skip


def _serve(
    allocator: Allocator,
    requests: Iterable[tuple[int, int]],
    slots: int,
    device: Device,
    held: Callable[[], int],
    token_bytes: int,
) -> tuple[_Times, dict[str, list[float]]]:
    waiting, ends, lengths, times = deque(requests), dict[int, int](), dict[int, int](), _Times()
    series: dict[str, list[float]] = {"step": [], "used_mib": [], "held_mib": []}
    while True:
        for request in [request for request, end in ends.items() if lengths[request] == end]:
            begun = time.perf_counter()
            allocator.free(request)
            times.us["free"].append((time.perf_counter() - begun) * 1e6)
            del ends[request], lengths[request]
        if not waiting and not ends:
            return times, series
        coming = [waiting.popleft() for _ in range(min(slots - len(ends), len(waiting)))]
        begun = time.perf_counter()
        for prompt, decode in coming:
            request = allocator.admit(prompt)
            ends[request], lengths[request] = prompt + decode, prompt
        lengths = {request: length + 1 for request, length in lengths.items()}
        if not allocator.grow(lengths):
            raise MemoryError(f"memory is short with {sum(lengths.values())} tokens of {len(lengths)} requests")
        times.us["arrival" if coming else "decode"].append((time.perf_counter() - begun) * 1e6)
        device.launch()()  # the model's step, in which background threads work
        series["step"].append(len(series["step"]))
        series["used_mib"].append(sum(lengths.values()) * token_bytes / 2**20)
        series["held_mib"].append(held() / 2**20)


def _taken_bytes(device: Device) -> int:
    free, total = torch.cuda.mem_get_info(device.name)
    return total - free
