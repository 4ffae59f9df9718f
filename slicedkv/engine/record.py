"""What an engine tells of its work: `Event`, a request's new token, and `EngineStep`, one step. Numbers only."""

from __future__ import annotations

from dataclasses import dataclass

from .request import FinishReason, Request

__all__ = ["EngineStep", "Event"]


@dataclass(frozen=True, slots=True)
class Event:
    """A request got a token."""

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
        How much of it was spent waiting for the device to have the tokens.
    num_running, num_waiting : int
        Requests after it.
    num_tokens : int
        Packed tokens it computed.
    num_cached_tokens : int
        Tokens that requests which got a slot in it need not compute: they begin with what others have computed.
    num_preemptions : int
        Requests that lost their slot in it.
    seq_lens : tuple of int
        Lengths of the requests in the cache at its widest moment, before finished ones were freed.
    used_bytes : int
        What the rows of these lengths take, over all layers; what requests share counts for each of them.
    mapped_bytes : int
        Physical memory mapped then, idle slots included.
    held_bytes : int
        Part of it that only the prefixes of finished requests keep from others; those of this step are not among them.
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
