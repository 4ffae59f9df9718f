"""The demo's report: memory over time, its fullest moment beside other layouts, the cache's counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...layout import KVLayout
from ...stats import CacheStats
from ..footprint import Footprint, footprints, layout_name
from ..text import format_bytes, format_table

if TYPE_CHECKING:
    from ...engine import EngineStep

__all__ = ["MemoryLog", "Moment", "cache_lines", "memory_lines"]

_OTHERS = ("paged", "per_layer_small", "per_layer", "static")


@dataclass(frozen=True, slots=True)
class Moment:
    """Memory at the end of one step, `seconds` after the first began."""

    seconds: float
    used_bytes: int
    mapped_bytes: int
    seq_lens: tuple[int, ...]


class MemoryLog:
    """Collects a `Moment` a step; give `record` to an engine as `on_step`.

    Attributes
    ----------
    name : str
        The cache's own layout.
    models : tuple of Footprint
        What its layout needs for the active requests, and what others would hold; all arithmetic.
    moments : list of Moment
    """

    def __init__(self, layout: KVLayout) -> None:
        known = footprints(layout)
        self.name = layout_name(layout)
        needed = Footprint(f"{self.name}, none kept", layout.bytes_for, layout.tokens_per_page)
        self.models = (needed, *(known[key] for key in _OTHERS if known[key].name != self.name))
        self.moments: list[Moment] = []

    def record(self, step: EngineStep) -> None:
        """Take a step's figures."""
        seconds = step.seconds + (self.moments[-1].seconds if self.moments else 0.0)
        self.moments.append(Moment(seconds, step.used_bytes, step.mapped_bytes, step.seq_lens))

    @property
    def fullest(self) -> Moment:
        """The moment with the most tokens of active requests."""
        return max(self.moments, key=lambda moment: moment.used_bytes)

    @property
    def peak_bytes(self) -> int:
        """Most memory mapped at any time."""
        return max(moment.mapped_bytes for moment in self.moments)


def memory_lines(log: MemoryLog) -> str:
    """Table of what was held at the fullest moment, and what other layouts would have held then."""
    moment = log.fullest
    held = [(log.name, "measured", moment.mapped_bytes)]
    held += [(model.name, "modelled", model.held_bytes(moment.seq_lens)) for model in log.models]
    rows = [
        (
            name,
            kind,
            format_bytes(num_bytes),
            format_bytes(num_bytes - moment.used_bytes),
            f"{num_bytes / moment.used_bytes:.2f}",
        )
        for name, kind, num_bytes in held
    ]
    return (
        f"physical memory at the fullest moment, {moment.seconds:.1f} s after the start: {len(moment.seq_lens)} "
        f"requests, {sum(moment.seq_lens):,} tokens, {format_bytes(moment.used_bytes)} of K and V\n"
        f"{format_table(('layout', '', 'held', 'waste', 'held / used'), rows)}\n"
        "  measured: all that is mapped, pages kept for the next request of a slot and pages mapped ahead included\n"
        "  modelled: arithmetic on the lengths of the active requests at that moment, nothing kept or mapped ahead"
    )


def cache_lines(stats: CacheStats, log: MemoryLog) -> str:
    """The cache's counters."""
    planned = f"{stats.pages_growth:,} for growth, {stats.pages_prefetch + stats.pages_eager:,} for prompts"
    rows = (
        ("mapped at peak", format_bytes(log.peak_bytes)),
        ("mapped now", f"{format_bytes(stats.mapped_bytes)} in {stats.idle_slots} idle slots, for the next requests"),
        ("limit", format_bytes(stats.memory_limit_bytes)),
        ("pages mapped", f"{stats.pages_mapped:,} ({planned}, {stats.pages_lookahead:,} ahead of need)"),
        ("pages reused", f"{stats.pages_reused:,} found mapped by a later request"),
        ("pages reclaimed", f"{stats.pages_reclaimed:,} taken from idle slots"),
        (
            "stalls",
            f"{stats.stalls:,} of {stats.steps:,} steps waited for a page, {stats.stall_us / 1e3:.2f} ms in all",
        ),
        ("mapping", f"{stats.critical_map_us / 1e3:.2f} ms in steps, {stats.hidden_map_us / 1e3:.2f} ms hidden"),
    )
    return "cache\n" + "\n".join(f"  {name:16} {value}" for name, value in rows)
