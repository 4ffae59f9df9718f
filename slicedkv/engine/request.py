"""`Request` and `SamplingParams`: what a user asks for, and how far it got."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from ..checks import check_bool, check_int
from ..errors import ConfigError
from ..requests.swap import SwapHandle

__all__ = ["NO_TOKEN", "FinishReason", "Request", "RequestState", "SamplingParams"]

NO_TOKEN = -1
"""Stands for the next token of a request whose logits are not numbers."""


class RequestState(Enum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a request is over: a stop token, `max_tokens`, `Engine.abort`, or logits that are not numbers."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens, and when to stop.

    Attributes
    ----------
    max_tokens : int
        Most tokens to generate, at least 1.
    temperature : float
        0 takes the likeliest token.
    top_p : float
        Sample among the fewest likeliest tokens that have this probability together; in (0, 1].
    seed : int or None
        With a seed, sampling is repeatable, whatever else is in the batch. None takes a new seed.
    stop_ids : tuple of int
        Tokens that end the request, like the model's own end-of-text tokens. The token is part of the output.
    ignore_eos : bool
        Go on past the model's end-of-text tokens; `stop_ids` still count.

    Raises
    ------
    ConfigError
        A value is out of range.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check_int("max_tokens", self.max_tokens, 1)
        for name, valid in (("temperature", 0 <= self.temperature < float("inf")), ("top_p", 0 < self.top_p <= 1)):
            if not valid:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; temperature must be >= 0 and top_p in (0, 1]")
        if self.seed is not None:
            check_int("seed", self.seed, 0, 2**63 - 1)
        object.__setattr__(self, "stop_ids", tuple(check_int("stop_ids", token, 0) for token in self.stop_ids))
        check_bool("ignore_eos", self.ignore_eos)


class Request:
    """One prompt on its way. Made by `Engine.submit`; read it, do not change it.

    Attributes
    ----------
    request_id : int
        Order of arrival.
    prompt_ids, output_ids : list of int
    params : SamplingParams
    state : RequestState
    finish_reason : FinishReason or None
    reqid : int or None
        Slot in the cache while running.
    num_computed : int
        Tokens whose K and V are in the cache or in host memory.
    swapped : SwapHandle or None
        The rows of these tokens while they wait in host memory.
    num_cached_tokens : int
        Tokens that it got from a shared prefix when it last got a slot.
    num_preemptions : int
        How often the slot was taken away.
    """

    def __init__(
        self, request_id: int, prompt_ids: Sequence[int], params: SamplingParams, eos_ids: Sequence[int] = ()
    ) -> None:
        self.request_id = request_id
        self.prompt_ids = [check_int("prompt token", token, 0) for token in prompt_ids]
        if not self.prompt_ids:
            raise ConfigError("the prompt is empty; it needs at least one token")
        self.params = params
        self.output_ids: list[int] = []
        self.state = RequestState.WAITING
        self.finish_reason: FinishReason | None = None
        self.reqid: int | None = None
        self.num_computed = 0
        self.swapped: SwapHandle | None = None
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self._stop_ids = frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))
        self._generator: torch.Generator | None = None
        self._drawn: float | None = None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.state.value}, prompt={len(self.prompt_ids)}, "
            f"output={len(self.output_ids)}, computed={self.num_computed})"
        )

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_pending(self) -> int:
        """Known tokens whose K and V are not computed; 1 while decoding."""
        return len(self.prompt_ids) + len(self.output_ids) - self.num_computed

    @property
    def max_cached_tokens(self) -> int:
        """Most rows that this request can need. Its last generated token needs none."""
        return len(self.prompt_ids) + self.params.max_tokens - 1

    @property
    def finished(self) -> bool:
        """True when no more tokens will come."""
        return self.state is RequestState.FINISHED

    @property
    def generator(self) -> torch.Generator:
        """This request's own source of random numbers, on the CPU so that every device draws the same."""
        if self._generator is None:
            self._generator = torch.Generator(device="cpu")
            if self.params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(self.params.seed)
        return self._generator

    @property
    def drawn(self) -> float:
        """The number in [0, 1) that decides on the next token; it stays the same until that token is accepted."""
        if self._drawn is None:
            self._drawn = float(torch.rand((), generator=self.generator, dtype=torch.float64, device="cpu"))
        return self._drawn

    def pending_ids(self, count: int) -> list[int]:
        """Return the next `count` tokens to compute."""
        return self.token_ids(self.num_computed, self.num_computed + count)

    def token_ids(self, start: int, end: int) -> list[int]:
        """Return tokens ``[start, end)`` of prompt and output."""
        prompt = len(self.prompt_ids)
        if start >= prompt:
            return self.output_ids[start - prompt : end - prompt]
        return self.prompt_ids[start:end] + self.output_ids[: max(0, end - prompt)]

    def accept(self, token: int) -> None:
        """Append a generated token, and finish if it is the last. `NO_TOKEN` makes the request fail."""
        if token == NO_TOKEN:
            self.finish(FinishReason.FAILED)
            return
        self.output_ids.append(token)
        self._drawn = None
        if token in self._stop_ids:
            self.finish(FinishReason.STOP)
        elif len(self.output_ids) >= self.params.max_tokens:
            self.finish(FinishReason.LENGTH)

    def finish(self, reason: FinishReason) -> None:
        """Mark this request as over."""
        self.state = RequestState.FINISHED
        self.finish_reason = reason
