"""What does each layout hold beyond the tokens of its requests, and how many requests fit?

    python -m bench.footprint [--trace CSV ...] [--quick] [--only waste replay batch serve memory] [--fit]

Traces of requests go through the real cache: for `memory` on the device's own memory, else on the driver without
memory. Columns marked "modelled" are arithmetic. Without `--trace` the requests are drawn from distributions fitted to
public traces (`support/traces.py`). Waste is in MiB a request, averaged over its decode steps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import accumulate, chain, cycle, islice, takewhile
from operator import mul
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from slicedkv import SlicedKVCache
from slicedkv.errors import SlicedKVError
from slicedkv.layout import KVLayout
from slicedkv.vmm import open_driver

from .support.common import command, parser, progress, show, write_result
from .support.layouts import Shape, layouts, modelled, shapes
from .support.replay import GROUP, Books, Moment, Profile, largest_batch, measure_profile, replay, serve, shape_options
from .support.spin import Device
from .support.traces import Request, Trace, fit, traces

Row = dict[str, Any]
Part = Callable[[list[Trace], argparse.Namespace], Iterator[Row]]
MIB = 1 << 20
BUDGET_GB, QUICK_BUDGET_GB = 40, 10
"""For K and V: half of a GPU of 80 GB. The weights get the other half."""
LOOKAHEAD_TOKENS = 4
"""The fixed distance for columns with lookahead: about the highest mean of the automatic distance on an H200
(`mapper.lookahead_pages_max`, at 32 tokens a page)."""
LLAMA, SMALL_SHAPE = (32, 8, 128), (32, 1, 128)
_AHEAD = "by lookahead: "
SMALL_TOKENS = 4096
"""Longest request on the device's own memory."""


def longest_of(*found: Trace) -> int:
    """Tokens of the longest request."""
    return max(request.tokens for trace in found for request in trace.requests)


@cache
def profile(layout: KVLayout, lookahead_tokens: int = 0) -> Profile:
    """What the cache maps for a request of each length."""
    with Books(layout, lookahead_tokens=lookahead_tokens) as books:
        return measure_profile(books, layout.max_seq_len)


def profiles(shape: Shape, longest: int, trace: Trace) -> dict[str, Profile]:
    """By column: all layouts without lookahead, the modelled layouts, and the first two layouts with lookahead."""
    known = layouts(shape, longest)
    found = {name: profile(layout) for name, layout in known.items()}
    for name, footprint in modelled(shape, longest_of(trace)).items():
        found[name] = Profile.modelled(footprint.request_bytes, footprint.tokens_per_page, longest)
    for name in list(known)[:2]:
        found[f"{_AHEAD}{name}"] = profile(known[name], LOOKAHEAD_TOKENS)
    return found


def waste(found: list[Trace], options: argparse.Namespace) -> Iterator[Row]:
    """Bytes beyond the tokens, averaged in three ways.

    What the cache maps for a request in an empty slot depends on its length alone, as `replay` checks. So this asks the
    cache once for each length, and computes the exact averages over all steps of all requests.
    """
    longest = longest_of(*found)
    for shape, model in shapes(BUDGET_GB, options.quick).items():
        progress(f"waste: {model}")
        for trace in found:
            about = {"trace": trace.name, "model": model, "requests": len(trace.requests)}
            yield from ({"measure": measure} | about | row for measure, row in _waste(shape, longest, trace).items())


def _waste(shape: Shape, longest: int, trace: Trace) -> dict[str, Row]:
    """Three averages of the bytes beyond the tokens, by measure.

    `waste_mib` averages over the decode steps of each request, then over requests. `waste_mib_by_step` averages over
    the steps of all requests. `waste_mib_by_eighths` samples these: eight lengths of each request, evenly spaced from
    its prompt on, weighted by its steps. Others make their tables in that way.
    """
    prompts, decodes = torch.tensor(trace.requests).T.contiguous()
    ends, eighths = prompts + decodes, prompts + torch.arange(8).unsqueeze(1) * decodes // 8
    by_layout = profiles(shape, longest, trace)
    all_steps = {name: held.total(ends) - held.total(prompts) for name, held in by_layout.items()}
    eight_steps = {name: held.held(eighths).sum(0) * decodes for name, held in by_layout.items()}
    beyond_all = _beyond(decodes * prompts + decodes * (decodes + 1) // 2, shape, all_steps)
    beyond_eight = _beyond(eighths.sum(0) * decodes, shape, eight_steps)
    steps = decodes.sum()
    return {
        "waste_mib": {name: _mib((total / decodes).mean()) for name, total in beyond_all.items()},
        "waste_mib_by_step": {name: _mib(total.sum() / steps) for name, total in beyond_all.items()},
        "waste_mib_by_eighths": {name: _mib(total.sum() / (8 * steps)) for name, total in beyond_eight.items()},
    }


def _beyond(tokens: torch.Tensor, shape: Shape, held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By column, for each request: bytes used, bytes held beyond them, and what lookahead adds to these."""
    used = _token_bytes(shape) * tokens
    base = {name: held[name.removeprefix(_AHEAD)] if name.startswith(_AHEAD) else used for name in held}
    return {"used": used.double()} | {name: (total - base[name]).double() for name, total in held.items()}


def _mib(num_bytes: torch.Tensor) -> float:
    return round(num_bytes.item() / MIB, 3)


def _token_bytes(shape: Shape) -> int:
    return next(iter(layouts(shape, 1).values())).token_bytes


def replays(found: list[Trace], options: argparse.Namespace) -> Iterator[Row]:
    """A sample of requests one by one, each in an empty slot, beside what `waste` computes for them."""
    longest = longest_of(*found)
    count = 4 if options.quick else 16
    for trace in found:
        progress(f"replay: {trace.name}")
        sample = trace.requests[:: max(1, len(trace.requests) // count)][:count]
        prompts, decodes = torch.tensor(sample).T.contiguous()
        for name, layout in layouts(LLAMA, longest).items():
            totals = profile(layout).total(prompts + decodes) - profile(layout).total(prompts)
            expected = (totals.double() / decodes).tolist()
            with Books(layout) as books:
                mapped = [replay(books, *request) for request in sample]
            yield {
                "measure": "replay",
                "trace": trace.name,
                "model": "llama-3-8b TP1",
                "layout": name,
                "requests": len(sample),
                "mapped_mib": round(fmean(mapped) / MIB, 3),
                "mapped_mib_by_waste": round(fmean(expected) / MIB, 3),
                "differing_requests": sum(a != b for a, b in zip(mapped, expected, strict=True)),
            }


def batch(found: list[Trace], options: argparse.Namespace) -> Iterator[Row]:
    """How many requests of a trace fit in the budget at once, each at its full length."""
    budget = (QUICK_BUDGET_GB if options.quick else BUDGET_GB) * 10**9
    for shape, model in shapes(BUDGET_GB, options.quick).items():
        for trace in found:
            longest = longest_of(trace)
            token_bytes = _token_bytes(shape)
            if longest * token_bytes > budget:
                continue
            progress(f"batch: {model}, {trace.name}")
            slots = _fitting(partial(mul, token_bytes), trace, budget) + GROUP  # no layout holds less than the tokens
            row = {"measure": "largest_batch", "trace": trace.name, "model": model, "budget_gb": budget / 1e9}
            for name, layout in layouts(shape, longest, slots).items():
                with Books(layout, memory_limit=budget) as books:
                    row[name] = largest_batch(books, cycle(request.tokens for request in trace.requests))
            for name, footprint in modelled(shape, longest).items():
                row[name] = _fitting(footprint.request_bytes, trace, budget)
            yield row


def _fitting(held_bytes: Callable[[int], int], trace: Trace, budget: int) -> int:
    """How many requests fit when `held_bytes` tells what each holds by its length."""
    held = accumulate(held_bytes(request.tokens) for request in cycle(trace.requests))
    return sum(1 for _ in takewhile(lambda total: total <= budget, held))


def served(found: list[Trace], options: argparse.Namespace) -> Iterator[Row]:
    """The first trace by continuous batching: used and mapped bytes over time."""
    trace, slots = found[0], 8 if options.quick else 32
    requests = list(islice(cycle(trace.requests), slots * (2 if options.quick else 10)))
    longest = longest_of(trace)
    for name, layout in layouts(LLAMA, longest, slots).items():
        progress(f"serve: {name}")
        with Books(layout) as books:
            moments = serve(books.cache, requests)
        yield _served_row(trace.name, name, moments, [moment.mapped_bytes for moment in moments])
    for name, footprint in modelled(LLAMA, longest, slots).items():
        yield _served_row(trace.name, name, moments, [footprint.held_bytes(moment.seq_lens) for moment in moments])


def _served_row(trace: str, name: str, moments: Sequence[Moment], held_bytes: Sequence[int]) -> Row:
    every = max(1, len(moments) // 150)
    own = [moment.own_bytes for moment in moments] if "modelled" not in name else held_bytes
    return {
        "measure": "serve",
        "trace": trace,
        "model": "llama-3-8b TP1",
        "layout": name,
        "requests_at_once": len(moments[0].seq_lens),
        "steps": len(moments),
        "used_mib": round(fmean(moment.used_bytes for moment in moments) / MIB, 1),
        "held_mib": round(fmean(held_bytes) / MIB, 1),
        "held_without_margin_mib": round(fmean(own) / MIB, 1),
        "series": {
            "step": list(range(0, len(moments), every)),
            "used_mib": [moment.used_bytes // MIB for moment in moments[::every]],
            "held_mib": [num_bytes // MIB for num_bytes in held_bytes[::every]],
        },
    }


def memory(found: list[Trace], options: argparse.Namespace) -> Iterator[Row]:
    """A small batch on the device's own memory: background mapper, automatic lookahead, steps of 5 ms."""
    device = Device(options.device)
    slots = 64 if device.is_cuda else 8
    every = chain.from_iterable(trace.requests for trace in found)
    requests = list(
        islice((each for each in every if each.tokens <= SMALL_TOKENS), slots * (2 if options.quick else 3))
    )
    if len(requests) <= slots:
        progress(f"memory: not possible, more than {slots} requests of up to {SMALL_TOKENS} tokens are needed")
        return
    driver = open_driver(device.name)
    granularity = driver.granularity
    driver.close()
    for name, layout in layouts(SMALL_SHAPE, SMALL_TOKENS, slots).items():
        if layout.page_bytes % granularity:
            progress(f"memory: {name}: not possible, the driver's granularity is {granularity} bytes")
        else:
            progress(f"memory: {name}")
            yield _memory(device, name, layout, requests)


def _memory(device: Device, name: str, layout: KVLayout, requests: Sequence[Request]) -> Row:
    options = shape_options(layout) | {"layout": layout.kind, "page_bytes": layout.page_bytes}
    with SlicedKVCache(**options, device=device.name, memory_limit=device.limit) as opened:
        before = device.taken_bytes(opened.pool.driver)
        moments = serve(opened, requests, lambda: device.launch()())
        opened.check_integrity()
        with opened._state.work("counting memory"):  # the mapper must not create handles between the two
            taken = device.taken_bytes(opened.pool.driver) - before
            stats = opened.stats()
    return {
        "measure": "memory",
        "layout": name,
        "requests_at_once": layout.max_batch_size,
        "steps": len(moments),
        "used_mib": round(fmean(moment.used_bytes for moment in moments) / MIB, 1),
        "mapped_mib": round(fmean(moment.mapped_bytes for moment in moments) / MIB, 1),
        "without_margin_mib": round(fmean(moment.own_bytes for moment in moments) / MIB, 1),
        "stalls": stats.stalls,
        "created_mib_at_end": stats.created_bytes / MIB,
        "taken_from_device_mib_at_end": round(taken / MIB, 1),
    }


PARTS: dict[str, Part] = {"waste": waste, "replay": replays, "batch": batch, "serve": served, "memory": memory}


def arguments() -> argparse.Namespace:
    """The arguments of every benchmark and of this one."""
    found = parser(__doc__ or "")
    found.add_argument("--trace", type=Path, action="append", default=[], help="CSV of requests; may be repeated")
    found.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    found.add_argument("--fit", action="store_true", help="print the distribution fitted to each trace, and stop")
    return found.parse_args()


def measure(options: argparse.Namespace) -> int:
    """Run the parts, print each row as it comes, and write all complete parts, also after Ctrl-C."""
    found = traces(options.trace, quick=options.quick)
    if options.fit:
        for trace in found:
            print(trace.name, *(f"{x:.3f}" if isinstance(x, float) else x for x in fit(trace.requests)))
        return 0
    rows: list[Row] = []
    code = 0
    try:
        for name in options.only:
            part = []
            for row in PARTS[name](found, options):
                show({key: value for key, value in row.items() if key != "series"})
                part.append(row)
            rows.extend(part)
    except KeyboardInterrupt:
        progress("interrupted; writing the parts that are complete")
        code = 130
    partial = [] if options.only == list(PARTS) else options.only
    words = [command(), *(f"--trace {path.name}" for path in options.trace), *(["--quick"] if options.quick else [])]
    print(write_result("_".join(["footprint", *partial]), options, rows, command=" ".join(words)))
    return code


if __name__ == "__main__":
    try:
        sys.exit(measure(arguments()))
    except SlicedKVError as error:
        sys.exit(f"footprint: {error}")
