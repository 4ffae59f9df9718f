"""When must the next page of each slot be mapped, at the latest? The schedule, and the pace it follows.

A page mapped long before its use is waste, one mapped too late is a stall. So the mapper starts at the *latest start*
of classic backward scheduling: with deadlines (the step at which a slot runs out of mapped rows) in ascending order,
each mapping must start one mapping time before both its own deadline and the next one's start. Knows vectors and
numbers only.
"""

from __future__ import annotations

import torch

__all__ = ["Pace", "latest_start"]

_MAX_INTERVAL_S = 0.5
_LATENCY_DECAY = 0.9


def latest_start(slack_steps: torch.Tensor, work_steps: float) -> torch.Tensor:
    """Steps before its deadline at which each slot's mapping must start.

    Parameters
    ----------
    slack_steps : torch.Tensor
        ``[n]`` float64, ascending: steps until each slot's deadline.
    work_steps : float
        Duration of one slot's mapping in steps.

    Returns
    -------
    torch.Tensor
        ``[n]`` float64, each at least `work_steps`.
    """
    rank = torch.arange(slack_steps.numel(), dtype=torch.float64)
    tightest = (slack_steps - (rank + 1) * work_steps).flip(0).cummin(0).values.flip(0)
    return slack_steps - (tightest + rank * work_steps)


class Pace:
    """Measured speed of both sides: how fast steps come, how fast pages are mapped, how late the mapper starts.

    Attributes
    ----------
    interval_s : float
        Time between two steps; smoothed, pauses left out.
    page_s : float
        Driver time of one mapping; smoothed.
    latency_s : float
        From the step that asks until the mapper has mapped, less the mapping itself; a slowly decaying maximum.
    margin_tokens : int
        Added after a stall that lookahead should have prevented; shrinks again while there is none.
    """

    def __init__(self) -> None:
        self.interval_s = 0.01
        self.page_s = 40e-6
        self.latency_s = 0.0
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
        if self._calm_steps >= 1000 and self.margin_tokens:
            self.margin_tokens -= 1
            self._calm_steps = 0

    def mapped(self, mappings: int, seconds: float, latency_s: float) -> None:
        """Note that the mapper made `mappings` mappings in `seconds`, `latency_s` after it was asked."""
        if mappings:
            self.page_s += 0.2 * (seconds / mappings - self.page_s)
            self.latency_s = max(latency_s, self.latency_s * _LATENCY_DECAY)

    def stalled(self) -> None:
        """Note a stall that lookahead should have prevented."""
        self.margin_tokens = min(self.margin_tokens + 1, 64)
        self._calm_steps = 0

    def distances(self, slack_tokens: torch.Tensor, planes: int, tokens_per_page: int) -> torch.Tensor:
        """Tokens before the end of what is mapped at which each slot's next page is due.

        Parameters
        ----------
        slack_tokens : torch.Tensor
            ``[n]`` int64: mapped tokens each active slot has left; a decoding request uses one a step.
        planes : int
            Mappings one slot needs.
        tokens_per_page : int
            The most a distance may be; the least is 2.
        """
        interval = max(self.interval_s, 1e-6)
        order = slack_tokens.argsort()
        lead = latest_start(slack_tokens[order].to(torch.float64), planes * self.page_s / interval)
        due = torch.empty_like(slack_tokens)
        due[order] = (lead + self.latency_s / interval).ceil().to(torch.int64)
        return (due + 1 + self.margin_tokens).clamp_(min(2, tokens_per_page), max(2, tokens_per_page))
