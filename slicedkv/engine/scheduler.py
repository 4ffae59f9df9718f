"""Which requests run in the next step, and with how many tokens: continuous batching, chunked prefill, preemption.

Owns the queues and the slots of running requests; knows a cache's public interface, neither models nor tensors.

Order of a step: one token for every decoding request, then chunks of prompts in order of arrival, then new requests
while slots and memory last. Requests are admitted first come, first served; when memory runs short the youngest running
one gives its pages back and returns to the head of the queue; what becomes of its rows, see `preemption`. The oldest is
never preempted for a younger one, so it always gets on, and so does everybody in turn.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from ..checks import check_int
from ..errors import CapacityError, ConfigError, OutOfPagesError
from .preemption import PreemptionKind, Preemptor, SwappingCache
from .request import FinishReason, Request, RequestState

__all__ = ["Scheduler", "StepPlan"]


class SchedulerCache(SwappingCache, Protocol):
    """The part of `SlicedKVCache` that a scheduler uses; see there."""

    def alloc_reqid(self, seq_len: int = 0) -> int: ...
    def step(self, seq_lens: dict[int, int]) -> bool: ...
    def can_admit(self, seq_len: int) -> bool: ...
    def pages_needed(self, seq_lens: dict[int, int]) -> int: ...
    def pages_available(self) -> int: ...


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: requests in packed order and how many of their pending tokens each computes."""

    requests: tuple[Request, ...]
    q_lens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Packed tokens."""
        return sum(self.q_lens)


class Scheduler:
    """Queues over a cache. Not thread-safe.

    Parameters
    ----------
    cache : SchedulerCache
        All its slots must be idle; the scheduler is the only one to allocate and step.
    max_tokens_per_step : int
        Budget of packed tokens, at least the number of slots so that every decoding request has its token.
    preemption : {"recompute", "swap", "auto"}
        See `Preemptor`.
    """

    def __init__(
        self, cache: SchedulerCache, *, max_tokens_per_step: int, preemption: PreemptionKind = "recompute"
    ) -> None:
        slots = cache.layout.max_batch_size
        self._cache = cache
        self.max_tokens_per_step = check_int("max_tokens_per_step", max_tokens_per_step, slots)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.preemptor = Preemptor(cache, preemption)
        self._total_pages = cache.pages_available()

    @property
    def idle(self) -> bool:
        """True when there is nothing to do."""
        return not self.waiting and not self.running

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises
        ------
        ConfigError
            It may grow longer than `max_seq_len`.
        CapacityError
            It may need more memory than the cache has even when it is alone.
        """
        layout, tokens = self._cache.layout, request.max_cached_tokens
        if tokens > layout.max_seq_len:
            raise ConfigError(
                f"a prompt of {len(request.prompt_ids)} tokens and max_tokens {request.params.max_tokens} need "
                f"{tokens} rows; max_seq_len is {layout.max_seq_len}"
            )
        pages = self._pages(tokens)
        if pages > self._total_pages:
            raise CapacityError(
                f"{tokens} tokens need {pages} pages of {layout.page_bytes} bytes and the cache has "
                f"{self._total_pages} in all; raise memory_limit or lower max_tokens",
                requested=pages,
                available=self._total_pages,
            )
        self.waiting.append(request)

    def schedule(self) -> StepPlan | None:
        """Return the next step with every row it writes backed, or None when nothing is to do.

        Raises
        ------
        OutOfPagesError
            Memory does not even suffice for one request alone: something else has taken it.
        """
        may_admit = True
        while not self.idle:
            plan = self._plan(may_admit)
            if self._cache.step(self._seq_lens(plan)):
                return plan
            if len(self.running) == 1:
                raise self._out_of_pages(plan)
            self._preempt(max(self.running, key=lambda request: request.request_id))
            may_admit = False  # or the freed pages would go to a newcomer, who would be preempted at once
        return None

    def complete(self, plan: StepPlan) -> list[Request]:
        """Note that `plan` was computed; return the requests whose next token can be sampled, in packed order."""
        ready = []
        for request, q_len in zip(plan.requests, plan.q_lens, strict=True):
            request.num_computed += q_len
            if not request.num_pending:
                ready.append(request)
        return ready

    def abort(self, request: Request) -> None:
        """End a request early; does nothing when it is finished."""
        if request.finished:
            return
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
            self.preemptor.drop(request)
        request.finish(FinishReason.ABORTED)
        self.retire()

    def retire(self) -> None:
        """Free the slots of running requests that have finished."""
        for request in [request for request in self.running if request.finished]:
            self._release(request)

    def _plan(self, may_admit: bool) -> StepPlan:
        budget = self.max_tokens_per_step
        chosen: list[tuple[Request, int]] = []
        for request in sorted(self.running, key=lambda request: (request.num_pending > 1, request.request_id)):
            if q_len := min(request.num_pending, budget):
                chosen.append((request, q_len))
                budget -= q_len
        while may_admit and budget and self.waiting and self._can_admit(self.waiting[0]):
            request = self.waiting[0]
            if not self._admit(request):
                break
            chosen.append((request, min(request.num_pending, budget)))
            budget -= chosen[-1][1]
        requests, q_lens = zip(*chosen, strict=True)
        return StepPlan(requests, q_lens)

    def _can_admit(self, request: Request) -> bool:
        if not self.running:
            return True  # it fits alone, and `step`, which waits for a mapper at work, knows better than an estimate
        tokens = _next_len(request)
        if len(self.running) >= self._cache.layout.max_batch_size or not self._cache.can_admit(tokens):
            return False
        # Prompts that are still being computed have been promised the pages they lack, too.
        promised = self._cache.pages_needed({_slot(other): _next_len(other) for other in self.running})
        return promised + self._pages(tokens) <= self._cache.pages_available()

    def _admit(self, request: Request) -> bool:
        """Give the head of the queue a slot; False when its rows are swapped out and memory is short for them."""
        request.reqid = self.preemptor.bring_back(request)
        if request.reqid is None:
            if request.swapped is not None and self.running:
                return False
            self.preemptor.drop(request)  # alone, and still memory is short: `step` will say by how much
            request.reqid = self._cache.alloc_reqid(request.num_tokens)
        self.waiting.popleft()
        request.state = RequestState.RUNNING
        self.running.append(request)
        return True

    def _preempt(self, request: Request) -> None:
        self.preemptor.take_slot(request, _slot(request))
        self._leave(request)
        request.state = RequestState.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self._cache.free_reqid(_slot(request))
        self._leave(request)

    def _leave(self, request: Request) -> None:
        request.reqid = None
        self.running.remove(request)

    def _seq_lens(self, plan: StepPlan) -> dict[int, int]:
        """Lengths of all running requests after the plan; one without tokens in this step keeps its length."""
        seq_lens = {_slot(request): request.num_computed for request in self.running}
        for request, q_len in zip(plan.requests, plan.q_lens, strict=True):
            seq_lens[_slot(request)] += q_len
        return seq_lens

    def _pages(self, seq_len: int) -> int:
        return self._cache.layout.pages_for(seq_len) * self._cache.layout.num_planes

    def _out_of_pages(self, plan: StepPlan) -> OutOfPagesError:
        needed, available = self._cache.pages_needed(self._seq_lens(plan)), self._cache.pages_available()
        return OutOfPagesError(
            f"{plan.requests[0]!r}, the only one running, needs {needed} more pages and {available} can be had, though "
            f"{self._total_pages} could when the engine was opened; something else holds the memory",
            requested=needed,
            available=available,
        )


def _next_len(request: Request) -> int:
    """Rows a request needs to generate one token and append it, if it may."""
    return min(request.num_tokens + 1, request.max_cached_tokens)


def _slot(request: Request) -> int:
    if request.reqid is None:
        raise ConfigError(f"{request!r} holds no slot")
    return request.reqid
