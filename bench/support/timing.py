"""Timing of what is compared: in turn, forward and backward, so that clocks and heat that drift meet all alike.

What runs first, straight after heavy work, seems slower than what runs later. So all variants warm up in the same way.
Then each round runs them in order and back (A B B A), and a ratio is taken round by round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

__all__ = ["Call", "Timings", "ahead", "captured", "cuda_seconds", "in_turn"]

Call = Callable[[], object]


class Timings:
    """Seconds of each variant, round by round.

    Parameters
    ----------
    rounds : mapping of str to list of float
    """

    def __init__(self, rounds: Mapping[str, Sequence[float]]) -> None:
        self.rounds = rounds

    def seconds(self, name: str) -> float:
        """Median over the rounds."""
        return statistics.median(self.rounds[name])

    def speed(self, name: str, over: str) -> float:
        """How many times as fast one variant is as another: the median of the ratios of every round."""
        pairs = zip(self.rounds[name], self.rounds[over], strict=True)
        return statistics.median(theirs / ours for ours, theirs in pairs)

    def fastest(self, names: Sequence[str]) -> str:
        """The variant among these that takes least."""
        return min(names, key=self.seconds)


def in_turn(
    calls: Mapping[str, Call], *, rounds: int = 5, warmup: int = 2, clock: Callable[[Call], float] | None = None
) -> Timings:
    """Time several calls alternately: each round runs all, in order and back.

    Parameters
    ----------
    calls : mapping of str to callable
    rounds : int
    warmup : int
        How often all run before, in order.
    clock : callable
        Runs a call and returns its seconds; by default `cuda_seconds`.
    """
    clock = clock or cuda_seconds
    for _ in range(warmup):
        for call in calls.values():
            clock(call)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        halves = [{name: clock(calls[name]) for name in order} for order in (list(calls), list(calls)[::-1])]
        for name, seconds in found.items():
            seconds.append(statistics.fmean(half[name] for half in halves))
    return Timings(found)


def cuda_seconds(call: Call, *, lead_cycles: int = 0) -> float:
    """Seconds of a call on the current stream, by CUDA events.

    With `lead_cycles` the GPU waits for that many cycles first. The host gets ahead meanwhile, so the figure leaves out
    what launches cost the host.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if lead_cycles:
        torch.cuda._sleep(lead_cycles)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def ahead(lead_cycles: int) -> Callable[[Call], float]:
    """`cuda_seconds` with a lead, as a clock for `in_turn`."""
    return partial(cuda_seconds, lead_cycles=lead_cycles)


def captured(calls: Sequence[Call]) -> Call:
    """One CUDA graph of all calls, as a call: no launch gaps, no call twice in a row.

    It keeps the calls, and with them the tensors that the graph reads and writes.
    """
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return partial(_replay, graph, calls)


def _replay(graph: torch.cuda.CUDAGraph, calls: Sequence[Call]) -> None:
    graph.replay()
