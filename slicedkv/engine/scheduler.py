"""`Scheduler`: which requests run in the next step, and with how many tokens.

It does continuous batching, chunked prefill and preemption. It owns the queues and the slots of running requests, and
uses a cache's public interface.

A step has one token for every decoding request, then chunks of prompts in order of arrival, then new requests while
slots and memory last. While the device computes a step, the requests of the next one are admitted.

Requests are admitted first come, first served. When memory runs short, what is kept for later requests is given up
(`prefix_cache`). If that does not suffice, the youngest running request gives its pages back and returns to the head of
the queue (`preemption`). No request is preempted for a younger one, so the oldest always gets on, and so in turn do
all.
"""

from __future__ import annotations

from collections import deque

from ..checks import check_int
from ..errors import CapacityError, ConfigError, OutOfPagesError, OutOfSlotsError
from .admission import Admission, slot_of
from .plan import StepPlan
from .preemption import PreemptionKind, Preemptor
from .request import FinishReason, Request, RequestState
from .served_cache import ServedCache

__all__ = ["Scheduler"]


class Scheduler:
    """Queues over a cache. Not thread-safe.

    Parameters
    ----------
    cache : ServedCache
        All its slots must be idle. Only the scheduler may allocate and step.
    max_tokens_per_step : int
        Budget of packed tokens, at least the number of slots so that every decoding request has its token.
    preemption : {"recompute", "swap", "auto"}
        See `Preemptor`.
    admission : Admission, optional
        Over the same cache; by default one that shares nothing.
    """

    def __init__(
        self,
        cache: ServedCache,
        *,
        max_tokens_per_step: int,
        preemption: PreemptionKind = "recompute",
        admission: Admission | None = None,
    ) -> None:
        slots = cache.layout.max_batch_size
        self._cache = cache
        self.max_tokens_per_step = check_int("max_tokens_per_step", max_tokens_per_step, slots)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.preemptor = Preemptor(cache, preemption)
        self.admission = Admission(cache) if admission is None else admission
        self._total_pages = cache.pages_available()
        self._rewound: list[Request] = []  # to compute their last token again, which the cache still counts
        self._refused: Request | None = None  # refused ahead of the next step; nobody has left since

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
        pages = self.admission.pages(tokens)
        self._total_pages = max(self._total_pages, self._cache.pages_available())  # the limit may have been raised
        if pages > self._total_pages:
            raise CapacityError(
                f"{tokens} tokens need {pages} pages of {layout.page_bytes} bytes and the cache has "
                f"{self._total_pages} in all; raise memory_limit (set_memory_limit) or lower max_tokens",
                requested=pages,
                available=self._total_pages,
            )
        self.waiting.append(request)

    def schedule(self) -> StepPlan | None:
        """Back every row that the next step writes, and return the step. None: there is nothing to do.

        Raises
        ------
        OutOfPagesError
            Memory does not suffice for one request alone: something else has taken it.
        """
        self.retire()  # what a failing driver left
        for request in self.running:
            if not request.num_pending:  # its next token was never chosen: compute the last one again
                request.num_computed -= 1
                self._rewound.append(request)
        may_admit = not self.waiting or self.waiting[0] is not self._refused
        self._refused = None
        while not self.idle:
            plan = self._plan(may_admit)
            if self._back(plan):
                return plan
            if len(self.running) == 1:
                raise self._out_of_pages(plan)
            self._preempt(max(self.running, key=lambda request: request.request_id))
            may_admit = False  # or the freed pages would go to a newcomer, who would be preempted at once
        return None

    def complete(self, plan: StepPlan) -> list[Request]:
        """Note that `plan` was computed; return, in packed order, the requests whose next token can be sampled."""
        ready = []
        for request, q_len in zip(plan.requests, plan.q_lens, strict=True):
            request.num_computed += q_len
            self.admission.note_computed(request)
            if not request.num_pending:
                ready.append(request)
        return ready

    def admit_ahead(self) -> None:
        """Admit requests for the next step while the device computes this one.

        The mapper maps their pages meanwhile, so that the next step need not wait. Only requests that get an idle slot
        and share nothing are admitted: to give up or copy something, the host would have to wait for the device.

        Raises
        ------
        OutOfSlotsError, StateError, DriverError
            As `Admission.admit`.
        """
        budget = self.max_tokens_per_step - sum(max(1, request.num_pending) for request in self.running)
        while budget > 0 and self._is_head_fresh():
            newcomer = self._admit_next(tokens_to_come=1)
            if newcomer is None:  # the next step need not ask again, with the device waiting for it
                self._refused = self.waiting[0]
                return
            budget -= newcomer.num_pending

    def abort(self, *requests: Request) -> None:
        """End requests early; those that are finished stay as they are.

        Raises
        ------
        ConfigError
            A request is another scheduler's; none was ended.
        StateError, DriverError
            The cache failed in freeing a slot. All are ended, and `schedule` frees what is left.
        """
        left = [request for request in requests if not request.finished]
        for request in left:
            if request not in (self.waiting if request.state is RequestState.WAITING else self.running):
                raise ConfigError(f"{request!r} is not one of this engine's; abort it where it was submitted")
        for request in left:
            if request.state is RequestState.WAITING:
                self.waiting.remove(request)
                self.preemptor.drop(request)
            request.finish(FinishReason.ABORTED)
        self.retire()

    def retire(self) -> None:
        """Free the slots of running requests that have finished."""
        finished = [request for request in self.running if request.finished]
        for request in finished:
            self.admission.release(request)
            self._leave(request)
        if finished:
            self._refused = None
            self.admission.trim()

    def _plan(self, may_admit: bool) -> StepPlan:
        budget = self.max_tokens_per_step
        chosen: list[tuple[Request, int]] = []
        for request in sorted(self.running, key=lambda request: (request.num_pending > 1, request.request_id)):
            if q_len := min(request.num_pending, budget):
                chosen.append((request, q_len))
                budget -= q_len
        while may_admit and budget and (newcomer := self._admit_next()):
            chosen.append((newcomer, min(newcomer.num_pending, budget)))
            budget -= chosen[-1][1]
        requests, q_lens = zip(*chosen, strict=True)
        return StepPlan(requests, q_lens)

    def _back(self, plan: StepPlan) -> bool:
        """Back every row of a plan, if need be by giving up what is kept for later requests. False: memory is short."""
        seq_lens = plan.seq_lens(self.running)
        while not (self._step_back() and self._cache.step(seq_lens)):
            if not self.admission.evict():
                return False
        return True

    def _step_back(self) -> bool:
        """Tell the cache which rows will be written again, so that it copies shared ones. False: memory is short.

        This comes after newcomers were admitted, since they may share all that was computed.
        """
        running = [request for request in self._rewound if request.reqid is not None]
        if running and not self._cache.step({slot_of(request): request.num_computed for request in running}):
            return False
        self._rewound.clear()
        return True

    def _is_head_fresh(self) -> bool:
        """True when the head of the queue would get an idle slot, and nothing of it is computed yet."""
        head = self.waiting[0] if self.waiting else None
        if head is None or head.swapped is not None or not self._cache.can_admit(0):
            return False
        return self.admission.is_fresh(head)

    def _admit_next(self, tokens_to_come: int = 0) -> Request | None:
        """Admit the head of the queue if possible. Each running request may get `tokens_to_come` tokens first."""
        request = self.waiting[0] if self.waiting else None
        return request if request and self._can_admit(request, tokens_to_come) and self._admit(request) else None

    def _can_admit(self, request: Request, tokens_to_come: int) -> bool:
        if not self.running:
            return True  # it fits alone, and `step`, which waits for a mapper at work, knows better than an estimate
        if len(self.running) >= self._cache.layout.max_batch_size:
            return False
        # Prompts that are still being computed were promised the pages they lack, too. They get no new token yet.
        lens = {slot_of(other): _next_len(other, 0 if other.num_pending else tokens_to_come) for other in self.running}
        promised = self._cache.pages_needed(lens)
        return self.admission.can_admit(request, _next_len(request), promised, self.running)

    def _admit(self, request: Request) -> bool:
        """Give the head of the queue a slot. False: its rows are in host memory, and memory is short for them."""
        reqid = self._bring_back(request)
        if reqid is None:
            if request.swapped is not None and self.running:
                return False
            self.preemptor.drop(request)  # alone, and still memory is short: `step` will say by how much
            reqid = self.admission.admit(request)
        request.reqid = reqid
        self.waiting.popleft()
        request.state = RequestState.RUNNING
        self.running.append(request)
        self.admission.note_computed(request)  # what it brought with it can be shared
        return True

    def _bring_back(self, request: Request) -> int | None:
        """As `Preemptor.bring_back`, if need be by giving up what is kept for later requests."""
        while request.swapped is not None:
            try:
                reqid = self.preemptor.bring_back(request)
            except OutOfSlotsError:
                if not self.admission.evict():
                    raise
                continue
            if reqid is not None:
                request.num_cached_tokens = 0
                return reqid
            if not self.admission.evict():
                break
        return None

    def _preempt(self, request: Request) -> None:
        self.admission.forget(request)
        self.preemptor.take_slot(request, slot_of(request))
        self._leave(request)
        request.state = RequestState.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        request.reqid = None
        self.running.remove(request)

    def _out_of_pages(self, plan: StepPlan) -> OutOfPagesError:
        needed, available = self._cache.pages_needed(plan.seq_lens(self.running)), self._cache.pages_available()
        return OutOfPagesError(
            f"{plan.requests[0]!r}, the only one running, needs {needed} more pages and {available} can be had, though "
            f"{self._total_pages} could before; something else holds the memory",
            requested=needed,
            available=available,
        )


def _next_len(request: Request, tokens_to_come: int = 0) -> int:
    """Rows that a request needs to get `tokens_to_come` tokens and one more, as far as it may generate them."""
    return min(request.num_tokens + tokens_to_come + 1, request.max_cached_tokens)
