"""The same requests through allocators of memory for K and V: what growing and freeing them costs, and what is held.

`replay` serves requests by continuous batching without a model: every step each request has one token more, those that
are done are freed, others take their place. `Sliced` is a `SlicedKVCache`, `Kvcached` the allocator of the package of
that name as its integrations use it: blocks of 16 tokens, in pages that requests share. Knows neither traces nor
results.
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
BLOCK_TOKENS = 16


class Allocator(Protocol):
    """What `replay` needs. A request is known by the number that `admit` gives it."""

    version: str

    def admit(self, tokens: int) -> int:
        """Begin a request that is going to have so many tokens in the next `grow`."""

    def grow(self, lengths: dict[int, int]) -> bool:
        """Back every token of all requests; False when memory is short."""

    def free(self, request: int) -> None:
        """End a request."""

    def trim(self) -> None:
        """Give everything that no request needs back to the device."""

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


class Kvcached:
    """K and V in the pages of kvcached, opened with its defaults.

    Parameters
    ----------
    shape : (int, int, int)
        Layers, KV heads and head_dim, of bfloat16.
    memory_bytes : int
        Capacity; what one page for every layer does not divide is left out.
    device : str
        As kvcached spells it, "cuda:0".
    """

    def __init__(self, shape: tuple[int, int, int], memory_bytes: int, device: str) -> None:
        import kvcached
        from kvcached import vmm_ops
        from kvcached.kv_cache_manager import KVCacheManager
        from kvcached.utils import CONTIGUOUS_LAYOUT, PAGE_SIZE

        layers, heads, dim = shape
        row_bytes = heads * dim * torch.bfloat16.itemsize  # K, or V, of a token in one layer
        self.page_bytes = PAGE_SIZE * layers * 2  # it maps the same page of every layer's K and V together
        pages = memory_bytes // self.page_bytes
        self.version = str(kvcached.__version__)
        self._ops = vmm_ops
        vmm_ops.init_kvcached(device, PAGE_SIZE, CONTIGUOUS_LAYOUT)
        self._tensors = vmm_ops.create_kv_tensors(2 * pages * PAGE_SIZE, torch.bfloat16.itemsize, device, layers, 2)
        blocks = pages * PAGE_SIZE // (BLOCK_TOKENS * row_bytes)
        self._manager = KVCacheManager(blocks, BLOCK_TOKENS, row_bytes, layers)
        self._blocks: dict[int, list[int]] = {}
        self._requests = 0
        self._manager.free(self._manager.alloc(1))  # returns when its threads are ready

    def admit(self, tokens: int) -> int:
        """Begin a request without blocks."""
        self._requests += 1
        self._blocks[self._requests] = []
        return self._requests

    def grow(self, lengths: dict[int, int]) -> bool:
        """Allocate the blocks that are missing, one call for each request that misses some."""
        for request, length in lengths.items():
            blocks = self._blocks[request]
            missing = -(-length // BLOCK_TOKENS) - len(blocks)
            if missing > 0:
                found = self._manager.alloc(missing)
                if found is None:
                    return False
                blocks += found
        return True

    def free(self, request: int) -> None:
        """Give a request's blocks back; pages without blocks are unmapped at once, but for a few."""
        self._manager.free(self._blocks.pop(request))

    def trim(self) -> None:
        """Unmap these few too."""
        self._manager.trim()

    def held_bytes(self) -> int:
        """Pages with blocks, and pages in reserve."""
        state = self._manager.page_allocator.get_page_state()
        return int(state["inuse_pages"] + state["reserved_pages"]) * self.page_bytes

    def close(self) -> None:
        """Stop its threads, remove its shared segment and unmap all."""
        self._manager.shutdown()
        self._tensors = None
        self._ops.shutdown_kvcached()


class _Times:
    """Microseconds of each call, by what it was for."""

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
    """Serve requests (prompt and decode tokens), `slots` at a time, until all are done; return what was measured.

    Raises
    ------
    MemoryError
        The allocator's memory does not hold the batch.
    """
    taken = (lambda: _taken_bytes(device)) if device.is_cuda else (lambda: 0)
    device.launch()()
    before, allocator = taken(), open_allocator()
    # On a GPU the driver says what is held, which no allocator's books can hide; without one, the books do.
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
