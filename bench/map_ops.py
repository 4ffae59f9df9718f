"""What does each driver call cost, and how long do the slowest calls take?

    python -m bench.map_ops [--device cuda] [--quick]

First one request grows in each layout. Then single calls are timed one by one; `slow` counts those of more than 5 ms.
Meanwhile another process only watches the clock, and tells how long the machine itself stops now and then.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from slicedkv.vmm import Driver, open_driver

from .support.common import parser, percentiles, progress, record
from .support.spin import SHAPES, Device

Row = dict[str, Any]
SLOW_S = 0.005


def timed(seconds: list[float], call: Callable[..., Any], *arguments: Any) -> Any:
    """Call, note the time it took, and return what it returned."""
    begun = time.perf_counter()
    result = call(*arguments)
    seconds.append(time.perf_counter() - begun)
    return result


def calls(driver: Driver, num_bytes: int, count: int) -> dict[str, list[float]]:
    """Seconds of `count` calls of each verb for handles of `num_bytes`."""
    found: dict[str, list[float]] = {verb: [] for verb in ("create", "map", "unmap", "release")}
    address = driver.reserve(count * num_bytes)
    handles = [timed(found["create"], driver.create, num_bytes) for _ in range(count)]
    for index, handle in enumerate(handles):
        timed(found["map"], driver.map_run, address + index * num_bytes, (handle,), num_bytes)
    for index in range(count):
        timed(found["unmap"], driver.unmap_run, address + index * num_bytes, num_bytes)
    for handle in handles:
        timed(found["release"], driver.release, handle)
    driver.free_reservation(address, count * num_bytes)
    return found


@contextmanager
def gpu_at_work(device: Device, *, at_work: bool) -> Iterator[None]:
    """Keep a spin kernel on the GPU for about two seconds."""
    if at_work and device.is_cuda:
        for _ in range(400):
            device.launch()
    yield


def watch(until: float, pauses: Any) -> None:
    """Watch the clock until `until`; send the gaps of more than 1 ms between two looks at it."""
    found = []
    last = time.monotonic()
    while last < until:
        now = time.monotonic()
        if now - last > 0.001:
            found.append(now - last)
        last = now
    pauses.put(found)


def rounds(device: Device, count: int) -> list[tuple[int, int, bool]]:
    """Pages a handle, handles, and whether the GPU is at work. The last round on a GPU is ten times longer."""
    if not device.is_cuda:
        return [(1, count // 8, False), (16, count // 128, False)]
    return [(pages, count // pages, at_work) for pages in (1, 16) for at_work in (False, True)] + [
        (1, count * 10, False)
    ]


def growth(device: Device, quick: bool) -> Iterator[Row]:
    """One request grows by what one more page of every plane holds; `step` itself maps."""
    kinds: list[tuple[str, int | None]] = [("sliced", None), ("interleaved", None), ("per_layer", None)]
    if not device.is_cuda:
        kinds.append(("per_layer", 64 << 10))  # on a GPU only a modified driver has such pages
    for layout, page_bytes in kinds:
        options = {"layout": layout, "page_bytes": page_bytes, "mapper": "sync", "lookahead_tokens": 0}
        with device.cache(SHAPES["llama-3-8b"], 1, 24_576, extent_pages=1, memory_limit=4 << 30, **options) as cache:
            reqid, tokens, taken = cache.alloc_reqid(), cache.layout.tokens_per_page, []
            for pages in range(min(8 if quick else 40, 24_576 // tokens)):
                cache.step({reqid: pages * tokens + 1})
                taken.append(cache.stats().last_step.stall_us)
            yield {
                "measure": "growth", "layout": layout, "page_bytes": cache.layout.page_bytes, "tokens": tokens,
                "pages": cache.layout.num_planes, "us_p50": percentiles(taken, 0.5)[0],
                "us_per_token": percentiles(taken, 0.5)[0] / tokens,
            }  # fmt: skip


def measure(device: Device, quick: bool) -> Iterator[Row]:
    """Every verb, for pages and for extents, GPU idle and at work; then the pauses of the machine."""
    driver = open_driver(device.name)
    page = max(driver.granularity, 2 << 20)
    count = 500 if quick else 4000
    pauses: Any = multiprocessing.get_context("spawn").Queue()
    seconds = 3.0 if quick else 12.0
    watcher = multiprocessing.get_context("spawn").Process(
        target=watch, args=(time.monotonic() + seconds + 1.0, pauses)
    )
    watcher.start()
    for pages, number, at_work in rounds(device, count):
        progress(f"calls: {number} handles of {pages} pages, GPU {'at work' if at_work else 'idle'}")
        with gpu_at_work(device, at_work=at_work):
            times = calls(driver, pages * page, number)
        for verb, taken in times.items():
            p50, p99 = percentiles(taken, 0.5, 0.99)
            yield {
                "measure": "calls",
                "verb": verb,
                "handle_bytes": pages * page,
                "gpu": ("at work" if at_work else "idle") if device.is_cuda else "none",
                "calls": len(taken),
                "us_p50": p50 * 1e6,
                "us_p99": p99 * 1e6,
                "us_max": max(taken) * 1e6,
                "slow": sum(one > SLOW_S for one in taken),
            }
    driver.close()
    progress("pauses of the machine")
    found = pauses.get()
    watcher.join()
    yield {
        "measure": "pauses",
        "seconds": seconds,
        "over_1_ms": len(found),
        "over_5_ms": sum(one > SLOW_S for one in found),
        "ms_max": max(found, default=0.0) * 1e3,
    }


def main() -> None:
    """Measure, print each row as it comes, and write them."""
    options = parser(__doc__ or "").parse_args()
    device = Device(options.device)
    record("map_ops", options, chain(growth(device, options.quick), measure(device, options.quick)))


if __name__ == "__main__":
    main()
