"""How well does the mapper hide mapping?

python -m bench.mapper [--device cuda] [--quick] [--only stalls throughput prompts step jitter]

`stalls` counts the steps of steady decode that wait for the driver; `throughput` times the mapper's thread; `prompts`
times the first step of a long prompt; `step` times `step` over a driver without memory; `jitter` times kernel launches
beside a mapper at work.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from slicedkv import PagePool, SlicedKVCache
from slicedkv.vmm import open_driver
from slicedkv.vmm.fake import FakeDriver

from .support.common import parser, percentiles, progress, record
from .support.spin import SHAPES, STEP_S, Device, busy_until

Row = dict[str, Any]
LONG = ("llama-3-8b", 64)
"""Shape and slots of the runs of 10,000 steps."""


def stalls(device: Device, shape_name: str, slots: int, steps: int, mapper: str, *, busy: bool) -> Row:
    """Decode with every slot active and count the steps that wait, but for the step of the prompts."""
    generator = random.Random(0)
    lens = torch.tensor([generator.randrange(32, 512) for _ in range(slots)])
    shape = SHAPES[shape_name]
    with device.cache(shape, slots, 512 + steps, mapper=mapper) as cache:
        for _ in range(slots):
            cache.alloc_reqid()
        cache.step(lens)
        device.launch()()  # the prompts take at least as long as a step
        before = cache.stats()
        waits, calls, held = [], [], []
        for index in range(steps):
            lens += 1
            begun = time.perf_counter()
            if not cache.step(lens):
                raise SystemExit(f"memory ran out after {index} steps")
            calls.append((time.perf_counter() - begun) * 1e6)
            record = cache.stats().last_step if index % 20 == 0 else cache._state.counters.last_step
            if record.stall_us:
                waits.append(record.stall_us)
            wait = device.launch()
            if busy:
                busy_until(begun + STEP_S * 0.9)
            wait()
            if index % 20 == 0:
                held.append(cache.stats().lookahead_bytes / (slots * cache.layout.num_planes * cache.layout.page_bytes))
        after = cache.stats()
        cache.check_integrity()
    p50, p99 = percentiles(calls, 0.5, 0.99)
    return {
        "measure": "stalls", "shape": shape_name, "slots": slots, "steps": steps, "mapper": mapper,
        "main_thread": "busy" if busy else "idle",
        "stalls": len(waits), "stall_ms_total": sum(waits) / 1e3, "stall_ms_max": max(waits, default=0.0) / 1e3,
        "step_us_p50": p50, "step_us_p99": p99, "step_us_max": max(calls),
        "lookahead_pages_per_request": statistics.mean(held),
        "pages_lookahead": after.pages_lookahead - before.pages_lookahead,
        "pages_growth": after.pages_growth - before.pages_growth,
    }  # fmt: skip


def all_stalls(device: Device, quick: bool) -> Iterator[Row]:
    """Both shapes and batch sizes; one of them, on a GPU, for 10,000 steps."""
    steps, long = 400 if quick else 2000, device.is_cuda and not quick
    for busy in (False, True) if long else ():
        progress(f"stalls: 10,000 steps, main thread {'busy' if busy else 'idle'}")
        yield stalls(device, *LONG, 10_000, "background", busy=busy)
    for shape_name in SHAPES:
        for slots in (64, 256) if device.is_cuda else (16,):
            for mapper, busy in (("sync", False), ("background", False), ("background", True)):
                if long and (shape_name, slots, mapper) == (*LONG, "background"):
                    continue
                progress(f"stalls: {shape_name}, {slots} slots, {mapper}, main thread {'busy' if busy else 'idle'}")
                yield stalls(device, shape_name, slots, steps if device.is_cuda else min(steps, 400), mapper, busy=busy)


def throughput(device: Device, *, busy: bool, extent_pages: int, pages: int) -> Row:
    """Pages a second that the mapper's thread maps. The second attempt finds all handles ready and counts."""
    driver = open_driver(device.name)
    page_bytes = max(driver.granularity, 2 << 20)
    pool = PagePool(driver, page_bytes=page_bytes, memory_limit=pages * page_bytes, extent_pages=extent_pages)
    tokens = pages * page_bytes // (2 * 32 * 8 * 128 * 2)
    for attempt in ("create", "map"):
        cache = device.cache(SHAPES["llama-3-8b"], 1, tokens, pool=pool)
        reqid = cache.alloc_reqid()
        target = pages // 2
        begun = time.perf_counter()
        cache.prefetch(reqid, tokens)
        while cache._state.backing.mapped(reqid) < target:
            busy_until(time.perf_counter() + 0.002) if busy else time.sleep(0.0005)
        seconds = time.perf_counter() - begun
        if attempt == "create":
            created = seconds
        cache.close()
    pool.trim()
    driver.close()
    return {
        "measure": "throughput",
        "main_thread": "busy" if busy else "idle",
        "extent_pages": extent_pages,
        "pages": pages,
        "pages_per_s": pages / seconds,
        "gb_per_s": pages * page_bytes / seconds / 1e9,
        "gb_per_s_with_create": pages * page_bytes / created / 1e9,
    }


def all_throughput(device: Device, quick: bool) -> Iterator[Row]:
    """The main thread asleep, then holding the GIL; with pages and with extents."""
    pages = 4096 if device.is_cuda else 512
    for busy in (False, True):
        for extent_pages in (1, 16):
            progress(f"throughput: main thread {'busy' if busy else 'idle'}, extents of {extent_pages} pages")
            rows = [
                throughput(device, busy=busy, extent_pages=extent_pages, pages=pages) for _ in range(1 if quick else 5)
            ]
            yield sorted(rows, key=lambda row: row["gb_per_s"])[len(rows) // 2]


def prompt(device: Device, *, extent_pages: int, notice_s: float, warm: bool, tokens: int) -> Row:
    """How long the first step of a long prompt waits for the driver."""
    with device.cache(SHAPES["llama-3-8b"], 2, tokens, extent_pages=extent_pages) as cache:
        waits = []
        for _ in range(5):
            reqid = cache.alloc_reqid(tokens if notice_s else 0)
            if notice_s:
                time.sleep(notice_s)
            cache.step({reqid: tokens})
            waits.append(cache.stats().last_step.stall_us / 1e3)
            cache.free_reqid(reqid)
            if not warm:
                cache.trim()
    return {
        "measure": "prompt",
        "tokens": tokens,
        "kv_bytes": tokens * cache.layout.token_bytes,
        "extent_pages": extent_pages,
        "notice_ms": notice_s * 1e3,
        "slot": "warm" if warm else "cold",
        "stall_ms": statistics.median(waits[1:] if warm else waits),
        "stall_ms_max": max(waits[1:] if warm else waits),
    }


def all_prompts(device: Device, quick: bool) -> Iterator[Row]:
    """A slot with nothing mapped, with pages and with extents; with notice; a slot with pages from before."""
    tokens = 16384 if device.is_cuda else 4096
    for extent_pages, notice_s, warm in ((1, 0.0, False), (16, 0.0, False), (16, 0.05, False), (16, 0.0, True)):
        progress(f"prompt: extents of {extent_pages}, notice {notice_s * 1e3:.0f} ms, {'warm' if warm else 'cold'}")
        yield prompt(device, extent_pages=extent_pages, notice_s=notice_s, warm=warm, tokens=tokens)


def step_cost(slots: int, growing: int, form: str) -> Row:
    """Microseconds of `step` with nothing to grow, or with `growing` slots that each cross a page.

    The driver has no memory, so this times the bookkeeping alone.
    """
    pool = PagePool(FakeDriver(total_bytes=1 << 44), page_bytes=2 << 20, memory_limit=1 << 43)
    with SlicedKVCache(
        num_layers=32,
        num_kv_heads=8,
        head_dim=128,
        dtype=torch.bfloat16,
        max_batch_size=slots,
        max_seq_len=1 << 15,
        mapper="sync",
        lookahead_tokens=0,
        pool=pool,
    ) as cache:
        for _ in range(slots):
            cache.alloc_reqid()
        lens = torch.full((slots,), 5)
        cache.step(lens)
        times = []
        for _ in range(300 if growing else 3000):
            lens[:growing] += cache.layout.tokens_per_page
            given = lens.numpy() if form == "numpy" else lens
            begun = time.perf_counter()
            ok = cache.step(given)
            times.append((time.perf_counter() - begun) * 1e6)
            if not ok:
                raise SystemExit("memory ran out")
    p50, p99 = percentiles(times[1:], 0.5, 0.99)
    return {
        "measure": "step",
        "slots": slots,
        "growing": growing,
        "form": form,
        "step_us_p50": p50,
        "step_us_p99": p99,
    }


def all_steps(device: Device, quick: bool) -> Iterator[Row]:
    """No slot grows, then some slots grow."""
    for slots in (256, 4096):
        for form in ("tensor", "numpy"):
            progress(f"step: {slots} slots, {form}")
            yield step_cost(slots, 0, form)
        for growing in (1, 8, 64):
            yield step_cost(slots, growing, "tensor")


@contextmanager
def mapper_at_work(device: Device, *, at_work: bool) -> Iterator[None]:
    """Keep the mapper mapping in the background: one prompt after another is prefetched and thrown away."""
    tokens = 32768 if device.is_cuda else 2048
    with device.cache(SHAPES["llama-3-8b"], 1, tokens, extent_pages=1) as cache:
        if at_work:
            reqid = cache.alloc_reqid()
            cache.prefetch(reqid, tokens)
        yield


def jitter(device: Device, *, at_work: bool) -> Row:
    """Microseconds to launch a small kernel while the mapper maps, and while it sleeps."""
    value = torch.zeros(1024, device=device.name)
    for _ in range(100):
        value.add_(1)
    times: list[float] = []
    for _ in range(5):
        with mapper_at_work(device, at_work=at_work):
            end = time.perf_counter() + (0.08 if device.is_cuda else 0.02)
            while time.perf_counter() < end:
                begun = time.perf_counter()
                value.add_(1)
                times.append((time.perf_counter() - begun) * 1e6)
                if device.is_cuda:
                    torch.cuda.synchronize()
    p50, p99 = percentiles(times, 0.5, 0.99)
    return {
        "measure": "jitter",
        "mapper": "at work" if at_work else "asleep",
        "launch_us_p50": p50,
        "launch_us_p99": p99,
    }


def all_jitter(device: Device, quick: bool) -> Iterator[Row]:
    """The mapper asleep, then at work."""
    for at_work in (False, True):
        progress(f"jitter: mapper {'at work' if at_work else 'asleep'}")
        yield jitter(device, at_work=at_work)


MEASURES = {
    "step": all_steps,
    "jitter": all_jitter,
    "prompts": all_prompts,
    "throughput": all_throughput,
    "stalls": all_stalls,
}


def main() -> None:
    """Measure, print each row as it comes, and write the rows, also after Ctrl-C."""
    found = parser(__doc__ or "")
    found.add_argument("--only", nargs="+", choices=list(MEASURES), default=list(MEASURES))
    options = found.parse_args()
    device = Device(options.device)
    # As serving engines do: the collector would stop every thread for tens of milliseconds while it visits torch.
    gc.collect()
    gc.freeze()
    partial = options.only != list(MEASURES)
    rows = (row for name in options.only for row in MEASURES[name](device, options.quick))
    record("_".join(["mapper", *(options.only if partial else [])]), options, rows)


if __name__ == "__main__":
    main()
