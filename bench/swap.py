"""How fast does a request go to host memory and come back, and how fast does a cache pause and resume?

    python -m bench.swap [--device cuda] [--quick]

Two other ways take turns with each swap: one plain copy of the same bytes between a tensor and pinned host memory, and
copies of 32 KiB each, as a cache of small groups of tokens would make them. Times end when the bytes are there. When a
request comes back, its pages are still mapped; "resume" shows what mapping costs. The first swap pins and touches host
memory; its time is the row "first_swap" and counts nowhere else.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from slicedkv import SlicedKVCache

from .support.common import parser, progress, record
from .support.spin import SHAPES, Device

Row = dict[str, Any]
PIECE_BYTES = 32 << 10
LAYOUTS = ("sliced", "interleaved", "per_layer")


class Copies:
    """The same bytes between one stretch of device memory and one of host memory, without a cache."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self.here = torch.zeros(num_bytes, dtype=torch.uint8, device=device.name)
        self.host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.is_cuda)

    def plain(self, *, out: bool) -> None:
        """Make one copy."""
        target, source = (self.host, self.here) if out else (self.here, self.host)
        target.copy_(source, non_blocking=True)

    def pieces(self, *, out: bool) -> None:
        """Make one copy for each piece."""
        target, source = (self.host, self.here) if out else (self.here, self.host)
        for into, piece in zip(target.split(PIECE_BYTES), source.split(PIECE_BYTES), strict=True):
            into.copy_(piece, non_blocking=True)


def timed(device: Device, call: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[float, Any]:
    """Seconds until everything that the call started is done, and what it returned."""
    synchronize(device)
    begun = time.perf_counter()
    result = call(*arguments, **options)
    synchronize(device)
    return time.perf_counter() - begun, result


def synchronize(device: Device) -> None:
    """Wait for the device."""
    if device.is_cuda:
        torch.cuda.synchronize()


def open_cache(device: Device, num_bytes: int, layout: str) -> tuple[SlicedKVCache, int]:
    """A cache of Llama-3-8B's shape, and the tokens of a request of `num_bytes`."""
    shape = SHAPES["llama-3-8b"]
    tokens = num_bytes // (4 * shape[0] * shape[1] * shape[2])
    limit = num_bytes + num_bytes // 8 + (512 << 20)
    return (
        device.cache(shape, 2, tokens, layout=layout, memory_limit=limit, swap_limit=2 * num_bytes, mapper="sync"),
        tokens,
    )


def swaps(device: Device, num_bytes: int, layout: str, repeats: int) -> Iterator[Row]:
    """Swap out and in, in turn with both other ways."""
    cache, tokens = open_cache(device, num_bytes, layout)
    copies = Copies(device, num_bytes)
    seconds: dict[str, list[float]] = {}
    with cache:
        reqid: int | None = cache.alloc_reqid()
        if not cache.step({reqid: tokens}):
            raise SystemExit(f"the device has no {num_bytes} bytes free")
        pin_s = None
        for turn in range(repeats + 1):
            out_s, handle = timed(device, cache.swap_out, reqid)
            in_s, reqid = timed(device, cache.swap_in, handle)
            pin_s = out_s if pin_s is None else pin_s
            found = {"swap_out": out_s, "swap_in": in_s}
            for direction, out in (("out", True), ("in", False)):
                found[f"plain_{direction}"], _ = timed(device, copies.plain, out=out)
                found[f"pieces_{direction}"], _ = timed(device, copies.pieces, out=out)
            for name, one in found.items() if turn else ():
                seconds.setdefault(name, []).append(one)
    rates = {name: num_bytes / statistics.median(all_) / 1e9 for name, all_ in seconds.items()}
    for direction in ("out", "in"):
        plain = rates[f"plain_{direction}"]
        yield {
            "measure": "swap",
            "layout": layout,
            "direction": direction,
            "bytes": num_bytes,
            "repeats": repeats,
            "gb_s": rates[f"swap_{direction}"],
            "plain_copy_gb_s": plain,
            "pieces_gb_s": rates[f"pieces_{direction}"],
            "vs_plain_copy": rates[f"swap_{direction}"] / plain,
        }
    yield {"measure": "first_swap", "layout": layout, "bytes": num_bytes, "seconds": pin_s}


def pauses(device: Device, num_bytes: int, repeats: int) -> Iterator[Row]:
    """Pause and resume a cache: with the contents of one long request, and with nothing but unused memory."""
    for offload in (False, True):
        cache, tokens = open_cache(device, num_bytes, "sliced")
        times: dict[str, list[float]] = {"pause": [], "resume": []}
        with cache:
            reqid, other = cache.alloc_reqid(), cache.alloc_reqid()
            if offload and not cache.step({reqid: tokens}):
                raise SystemExit(f"the device has no {num_bytes} bytes free")
            for _ in range(repeats + 1):
                if not offload:  # leave memory that nobody uses
                    cache.step({other: tokens})
                    cache.free_reqid(other)
                    other = cache.alloc_reqid()
                times["pause"].append(timed(device, cache.pause, offload=offload)[0])
                times["resume"].append(timed(device, cache.resume)[0])
        for name, all_ in times.items():
            yield {
                "measure": name,
                "offload": offload,
                "bytes": num_bytes,
                "repeats": repeats,
                "ms": statistics.median(all_[1:]) * 1e3,
                "ms_per_gb": statistics.median(all_[1:]) * 1e3 / (num_bytes / 1e9),
            }


def measure(device: Device, quick: bool) -> Iterator[Row]:
    """All rows."""
    num_bytes = (256 if quick or not device.is_cuda else 2048) << 20
    repeats = 3 if quick else 5
    for layout in LAYOUTS:
        progress(f"swap: {layout}")
        yield from swaps(device, num_bytes, layout, repeats)
    progress("pause and resume")
    yield from pauses(device, num_bytes, repeats)


def main() -> None:
    """Measure, print each row as it comes, and write them."""
    options = parser(__doc__ or "").parse_args()
    record("swap", options, measure(Device(options.device), options.quick))


if __name__ == "__main__":
    main()
