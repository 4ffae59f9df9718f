"""What an engine reports: `Event`, a request's new token, and `EngineStep`, one step. Numbers only."""

from __future__ import annotations

from dataclasses import dataclass

from .request import FinishReason, Request

__all__ = ["EngineStep", "Event"]


@dataclass(frozen=True, slots=True)
class Event:
    """A request's new token, and why the request is over if it is."""

    request: Request
    token: int
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStep:
    """What one step did, for `on_step`.

    Attributes
    ----------
    index : int
        Steps before this one.
    seconds : float
        Wall time of the step.
    wait_seconds : float
        The part of it in which the engine waited for the device to choose the tokens.
    num_running, num_waiting : int
        Requests after the step.
    num_tokens : int
        Packed tokens it computed.
    num_cached_tokens : int
        Tokens that requests admitted in this step need not compute, since others have computed them.
    num_preemptions : int
        Requests that lost their slot in this step.
    seq_lens : tuple of int
        Lengths of the requests in the cache before it freed finished ones.
    used_bytes : int
        Bytes of all rows of these lengths. Rows that requests share count for each of them.
    mapped_bytes : int
        Physical memory mapped then, idle slots included.
    held_bytes : int
        The part of it that only prefixes of finished requests keep from others. Requests that finish in this step do
        not count yet.
    """

    index: int
    seconds: float
    wait_seconds: float
    num_running: int
    num_waiting: int
    num_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    seq_lens: tuple[int, ...]
    used_bytes: int
    mapped_bytes: int
    held_bytes: int
