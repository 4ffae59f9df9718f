"""Stand-ins for a model: steps of a fixed length on the GPU or the host, and a main thread that keeps the GIL."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from slicedkv import SlicedKVCache

SHAPES = {"llama-3-8b": (32, 8, 128), "yi-34b-tp2": (60, 4, 128)}
"""Layers, KV heads and head_dim."""

STEP_S = 0.005


class Device:
    """What differs between a GPU and the host: the stand-in for a model's step, and how much memory to use."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_cuda = name != "cpu"
        self.limit = int(110e9) if self.is_cuda else int(4e9)
        self._cycles = self._calibrate() if self.is_cuda else 0

    def _calibrate(self) -> int:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)
        start.record()
        torch.cuda._sleep(20_000_000)
        end.record()
        end.synchronize()
        return int(20_000_000 * STEP_S * 1e3 / start.elapsed_time(end))

    def launch(self) -> Callable[[], None]:
        """Start a step of 5 ms and return a function that waits for its end."""
        if not self.is_cuda:
            until = time.perf_counter() + STEP_S
            return lambda: time.sleep(max(0.0, until - time.perf_counter()))
        torch.cuda._sleep(self._cycles)
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def taken_bytes(self, driver: Any) -> int:
        """Physical memory in use: on a GPU by all processes, on the host by this driver, as the OS counts it."""
        if not self.is_cuda:
            return int(driver.used_bytes())
        info = driver.memory_info()
        return int(info.total_bytes - info.free_bytes)

    def cache(self, shape: tuple[int, int, int], slots: int, max_seq_len: int, **options: Any) -> SlicedKVCache:
        layers, heads, dim = shape
        if "pool" not in options:
            options.setdefault("memory_limit", self.limit)
        return SlicedKVCache(
            num_layers=layers,
            num_kv_heads=heads,
            head_dim=dim,
            dtype=torch.bfloat16,
            max_batch_size=slots,
            max_seq_len=max_seq_len,
            device=self.name,
            **options,
        )


def busy_until(end: float) -> int:
    """Run pure Python, which never lets go of the GIL by itself, until `end`."""
    rounds = 0
    while time.perf_counter() < end:
        rounds += sum(range(50)) > 0
    return rounds
