"""`Pace`: when the mapper must map the next page of each slot, at the latest, and how fast both sides are.

Mapping too early wastes memory, too late stalls a step. Deadlines are the steps at which slots run out of mapped rows.
They are taken from last to first: each mapping starts one mapping time before its own deadline or before the next
mapping starts, whichever is earlier. Knows numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["Pace", "latest_start"]

_MAX_INTERVAL_S = 0.5
_LATENCY_DECAY = 0.9
_MOST_MARGIN_TOKENS = 4
_CALM_STEPS = 1000


def latest_start(slack: Sequence[float], work: float) -> list[float]:
    """How long before its deadline each mapping must start, if one mapper makes them one after the other.

    Parameters
    ----------
    slack : sequence of float
        Time until each deadline, ascending.
    work : float
        Duration of one mapping, in the same unit.

    Returns
    -------
    list of float
        Each at least `work`.
    """
    start = float("inf")
    lead = []
    for deadline in reversed(slack):
        start = min(start, deadline) - work
        lead.append(deadline - start)
    return lead[::-1]


class Pace:
    """Measured speed of both sides: how fast steps come, how fast the mapper maps, how late it starts.

    Attributes
    ----------
    interval_s : float
        Smoothed time between two steps, without pauses.
    page_s : float
        Driver time of one mapping. It falls quickly and rises slowly, so that waits for the GIL hardly count.
    latency_s : float
        Time from the step that asks until the mapper is done, less `page_s` for each mapping: a decaying maximum.
    margin_tokens : int
        It grows with each stall that lookahead should have prevented, and shrinks again while there is none.
    """

    def __init__(self) -> None:
        self.interval_s = 0.01
        self.page_s = 40e-6
        self.latency_s = 0.01  # until it is measured
        self.margin_tokens = 0
        self._last_step: float | None = None
        self._calm_steps = 0

    def step_at(self, now: float) -> None:
        """Note a step at time `now` (`time.perf_counter`)."""
        if self._last_step is not None:
            gap = now - self._last_step
            if gap < _MAX_INTERVAL_S:
                # Shorter gaps count at once, longer ones slowly: mapping too early costs little, too late a stall.
                self.interval_s += (0.5 if gap < self.interval_s else 0.05) * (gap - self.interval_s)
        self._last_step = now
        self._calm_steps += 1
        if self._calm_steps >= _CALM_STEPS and self.margin_tokens:
            self.margin_tokens -= 1
            self._calm_steps = 0

    def mapped(self, mappings: int, seconds: float, since_asked_s: float | None) -> None:
        """Note that the mapper made `mappings` mappings in `seconds`, done `since_asked_s` after a step asked."""
        sample = seconds / mappings
        self.page_s += (0.5 if sample < self.page_s else 0.02) * (sample - self.page_s)
        if since_asked_s is not None:
            self.latency_s = max(since_asked_s - mappings * self.page_s, self.latency_s * _LATENCY_DECAY, 0.0)

    def stalled(self) -> None:
        """Note a stall that lookahead should have prevented."""
        self.margin_tokens = min(self.margin_tokens + 1, _MOST_MARGIN_TOKENS)
        self._calm_steps = 0

    def distances(self, slack: Sequence[int], planes: int, tokens_per_page: int) -> list[int]:
        """Tokens before the end of what is mapped at which each slot's next page is due.

        Parameters
        ----------
        slack : sequence of int
            Mapped tokens each active slot has left, ascending; a decoding request uses one a step.
        planes : int
            Mappings one slot needs.
        tokens_per_page : int
            The most a distance may be; the least is 2.
        """
        interval = max(self.interval_s, 1e-6)
        least, most = min(2, tokens_per_page), max(2, tokens_per_page)
        late = self.latency_s / interval
        leads = latest_start(slack, planes * self.page_s / interval)
        return [max(least, min(math.ceil(lead + late) + 1 + self.margin_tokens, most)) for lead in leads]
