"""A fake device that can be made to fail, a pool on it, and the caches that use it, of Llama-3-8B's shape."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from inside import mapped_pages, mapper_has_nothing_to_do

from slicedkv import DriverError, PagePool, SlicedKVCache
from slicedkv.vmm.fake import FakeDriver
from slicedkv.vmm.faulty import FaultyDriver

PAGE = 2 << 20
TOKENS = 32
"""Tokens in one page."""
SHAPE: dict[str, Any] = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.float16}
SHAPE |= {"max_batch_size": 4, "max_seq_len": 4096}
SMALL: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 16, "dtype": torch.float32, "device": "cpu"}
SMALL |= {"max_batch_size": 2, "max_seq_len": 400, "page_bytes": 65536, "memory_limit": "8MiB"}
"""A small cache on the host's own memory."""
QUIET: dict[str, Any] = {"mapper": "sync", "lookahead_tokens": 0, "reclaim_watermark": 0.0}
"""Options of a cache that maps only what a call needs."""


def memory_files() -> int:
    """Memory files this process has open."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except OSError:
            continue  # the listing's own
    return sum("memfd:slicedkv" in link for link in links)


def wait_until(true: Callable[[], object], seconds: float = 5.0) -> None:
    """Look every millisecond whether something is true; fail when it is not in time."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.001)


def mapper_threads() -> int:
    """Mapper threads of all caches of this process."""
    return sum(thread.name == "slicedkv-mapper" for thread in threading.enumerate())


class Rig:
    """At the end of its context nothing may be mapped or running any more, and all memory can be given back."""

    def __init__(self, limit_pages: int = 1000, extent_pages: int = 1) -> None:
        self.fake = FakeDriver(PAGE)
        self.driver = FaultyDriver(self.fake)
        self.pool = PagePool(self.driver, page_bytes=PAGE, memory_limit=limit_pages * PAGE, extent_pages=extent_pages)
        self._threads = mapper_threads()

    def open(self, **options: Any) -> SlicedKVCache:
        return SlicedKVCache(**(SHAPE | options), pool=self.pool)

    def open_mapping(self, page_s: float = 0.001) -> SlicedKVCache:
        """A cache whose thread is in the middle of mapping 256 pages for reqid 0."""
        cache = self.open()
        self.driver.delay("map", page_s)
        cache.alloc_reqid(4096)
        wait_until(lambda: self.driver.counts["map"] > 0)
        return cache

    def sweep(self, cache: SlicedKVCache, op: str, call: Callable[[], object], unchanged: Callable[[], object]) -> int:
        """Fail the k-th call of `op` for every k until `call` succeeds; return the failures, which change nothing."""
        failures = 0
        while True:
            before = unchanged()
            self.driver.heal()
            self.driver.fail(op, at=failures + 1)
            try:
                call()
            except DriverError as error:
                if error.op != op:
                    raise
            else:
                self.driver.heal()
                cache.check_integrity()
                return failures
            failures += 1
            self.driver.heal()
            for handle in self.fake._ledger.idle_handles() if op == "release" else ():
                self.fake.release(handle)  # what the driver will not release is gone for us: let it go here too
            assert unchanged() == before
            cache.check_integrity()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.driver.heal()
        self.driver.on_call = None
        if kind is not None:
            return
        assert self.fake.mapped == 0
        self.pool.trim()
        assert self.fake.created_bytes == 0
        assert mapper_threads() == self._threads


def mapped(cache: SlicedKVCache, reqid: int) -> int:
    """Pages per plane mapped behind a request."""
    return mapped_pages(cache, reqid)


def settle(cache: SlicedKVCache) -> None:
    """Wait until the mapper has nothing more to do."""
    wait_until(lambda: mapper_has_nothing_to_do(cache))


def used_bytes(cache: SlicedKVCache) -> int:
    """Physical memory of a cache on the host, as the OS counts it."""
    return cache.pool.driver.used_bytes()  # type: ignore[attr-defined]


def stamps(cache: SlicedKVCache, layer: int, start: int, end: int, seed: int | torch.Tensor) -> torch.Tensor:
    """Values of rows ``[start, end)`` that name layer, token and request, or each row's ``[end - start, 1, 1]``."""
    tokens = torch.arange(start, end, device=cache.device).view(-1, 1, 1) + 10_000 * layer + 100_000 * seed
    return tokens.to(cache.dtype)


def stamp(cache: SlicedKVCache, reqid: int, start: int, end: int, seed: int) -> None:
    """Write its stamps into every row of ``[start, end)``."""
    for layer in range(cache.layout.num_layers):
        cache.k(layer)[reqid, start:end] = stamps(cache, layer, start, end, seed)
        cache.v(layer)[reqid, start:end] = -stamps(cache, layer, start, end, seed)


def assert_stamped(cache: SlicedKVCache, reqid: int, end: int, seed: int | torch.Tensor, start: int = 0) -> None:
    """Compare rows ``[start, end)`` with the stamps they must hold."""
    shape = (end - start, cache.layout.num_kv_heads, cache.layout.head_dim)
    for layer in range(cache.layout.num_layers):
        expected = stamps(cache, layer, start, end, seed).expand(shape)
        assert torch.equal(cache.k(layer)[reqid, start:end], expected)
        assert torch.equal(cache.v(layer)[reqid, start:end], -expected)


def grow(cache: SlicedKVCache, pages: int) -> int:
    """A request of so many pages of K and as many of V."""
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: pages * TOKENS})
    return reqid


def active(cache: SlicedKVCache) -> list[int]:
    """Slots that have a request, the first one first."""
    return list(filter(cache.is_active, range(cache.layout.max_batch_size)))


def most(cache: SlicedKVCache, reqid: int) -> int:
    """Pages per plane that a request can have."""
    while cache.step({reqid: (mapped(cache, reqid) + 1) * TOKENS}):
        pass
    return mapped(cache, reqid)
