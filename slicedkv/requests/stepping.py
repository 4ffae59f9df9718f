"""`Stepper`: what `SlicedKVCache.step` does.

A step that finds everything mapped costs one vector comparison under the lock. Any other step takes the gate's work
token, looks again, since the mapper may have mapped some of it, and maps the rest on the calling thread: a stall. So
does a step of a request that another thread's call uses: it comes after that call.
"""

from __future__ import annotations

import time

import torch

from ..errors import OutOfPagesError
from ..memory.change import Change, Growth
from ..paging.growth import grow_now
from ..paging.mapper import Mapper
from ..state.cache_state import CacheState
from ..stats import StepRecord
from .copy_on_write import CopyOnWrite
from .zeroing import Zeroer

__all__ = ["Stepper"]

_QUIET = StepRecord(ok=True)


class Stepper:
    """Make lengths mapped.

    Parameters
    ----------
    state : CacheState
    mapper : Mapper
        Woken when a slot nears the end of what is mapped.
    copy_on_write : CopyOnWrite
    zeroer : Zeroer, optional
        With `zero_on_reuse`: a request has no token before the pages of its tokens were zeroed.
    """

    def __init__(
        self, state: CacheState, mapper: Mapper, copy_on_write: CopyOnWrite, zeroer: Zeroer | None = None
    ) -> None:
        self._state = state
        self._mapper = mapper
        self._copy_on_write = copy_on_write
        self._zeroer = zeroer
        self._mutex = state.gate.mutex
        with torch.inference_mode(False):
            self._requests = torch.frombuffer(state.slots.requests, dtype=torch.int64)

    def step(self, lens: torch.Tensor) -> bool:
        """Map what is missing for `lens` (``[B]`` int64); see `SlicedKVCache.step`."""
        started = time.perf_counter()
        state = self._state
        with self._mutex:
            state.require_running()
            state.counters.steps += 1
            state.pace.step_at(started)
            quiet, held = state.lengths.is_quiet(lens), state.holds.meet(lens)
            if state.protector is not None:
                held = held or self._copy_on_write.is_hindered(lens, state.protector)
            if held or (self._zeroer is not None and self._zeroer.is_needed(lens)):
                state.lengths.check_range(lens)
                self._require_same(lens, self._requests)
            elif quiet:
                self._advance(lens)
                state.counters.last_step = _QUIET
                return True
            else:
                late = () if state.lengths.is_backed(lens) else self.growths(lens)
                if not late and not self._copy_on_write.swaps(lens, count_idle=True):
                    self._settle(lens, _QUIET, due=True)
                    return True
                self._note_late(late)
            tickets = self._requests.clone()
        return self._step_with_token(lens, tickets, started, stalled=held or not quiet)

    def _require_same(self, lens: torch.Tensor, tickets: torch.Tensor) -> None:
        """Raise `StateError` unless all requests of a step are there, and are those of the tickets. Lock held."""
        if self._requests is not tickets and torch.equal(self._requests, tickets):
            return  # nobody came or went meanwhile, and all were there when the tickets were taken
        gone = (lens > 0) & ((self._requests != tickets) | (tickets <= 0))
        if gone.any():
            slot = int(gone.nonzero()[0])
            self._state.slots.require_same({slot: int(tickets[slot])})

    def _advance(self, lens: torch.Tensor) -> None:
        """Note the lengths of a step that is True. Lock held.

        From now on kernels may write rows that a copy on another stream still reads: the current stream waits for it.
        """
        state = self._state
        if state.slots.reads:
            for slot in [slot for slot in state.slots.reads if lens[slot] > 0]:
                state.pool.driver.order_after(state.slots.reads[slot])
                del state.slots.reads[slot]
        state.lengths.advance(lens)

    def growths(self, lens: torch.Tensor) -> tuple[Growth, ...]:
        """What is missing for `lens`, after refusing what can never be. Lock held.

        Raises
        ------
        ConfigError, StateError
            A length is out of range, or given for a slot that is not active.
        """
        state = self._state
        state.lengths.check_range(lens)
        growths = []
        for slot in state.lengths.beyond_backed(lens):
            state.slots.require_active(slot)
            growths.append(Growth(slot, state.layout.pages_for(int(lens[slot])) - state.backing.mapped(slot)))
        return tuple(growths)

    def pages_needed(self, lens: torch.Tensor) -> int:
        """Pages over all planes that a step would take of what is available; see `SlicedKVCache`. Lock held."""
        state = self._state
        self.growths(lens)  # refuses what can never be
        claims, needed = self._claims(lens), 0
        for slot, pages in claims.items():
            # What is available counts this request's margin, part of which the step would use.
            margin = state.spare_pages(slot)
            if margin:
                margin -= state.spare_pages(slot, claim=pages)
            needed += max(0, pages - state.backing.mapped(slot)) + margin
        needed += sum(swap.pages for swap in self._copy_on_write.swaps(lens, count_idle=False))
        return needed * state.layout.num_planes

    def _claims(self, lens: torch.Tensor) -> dict[int, int]:
        """Pages per plane that the requests which grow need. Lock held."""
        state = self._state
        lengths = lens.tolist()
        return {slot: state.layout.pages_for(lengths[slot]) for slot in state.lengths.beyond_longest(lens)}

    def _settle(self, lens: torch.Tensor, record: StepRecord, *, due: bool = False) -> None:
        """Note the outcome of a step that is True and let the mapper look ahead. Lock held."""
        self._advance(lens)
        self._state.counters.last_step = record
        self._state.unscheduled = True
        self._mapper.wake(due=due)

    def _step_with_token(self, lens: torch.Tensor, tickets: torch.Tensor, started: float, *, stalled: bool) -> bool:
        """Map what is missing, then copy and zero what must be. A step that only zeroes counts as no stall."""
        state = self._state
        with state.work("step"):
            with state.gate.lock:
                self._require_same(lens, tickets)
                state.holds.add_all(lens)
                growths = self.growths(lens)
                state.holds.claims.update(self._claims(lens))
            begun = time.perf_counter()
            try:
                copies = self._copy_on_write.make_way(lens, growths)
                change = Change(growths, swaps=copies.swaps)
                if change:
                    grow_now(state, change)
                self._copy_on_write.copy(copies)
                if state.protector is not None:
                    state.protector.settle()
                ok = True
            except OutOfPagesError:
                ok = False
            finished = time.perf_counter()
            if ok and self._zeroer is not None:
                self._zeroer.zero(lens)
            with state.gate.lock:
                pages = change.pages * state.layout.num_planes if ok else 0
                record = StepRecord(ok=ok, pages=pages, stall_us=(finished - started) * 1e6 * stalled)
                state.counters.stalls += stalled
                state.counters.stall_us += record.stall_us
                state.counters.critical_map_us += (finished - begun) * 1e6
                state.counters.last_step = record
                if ok:
                    self._settle(lens, record)
        return ok

    def _note_late(self, growths: tuple[Growth, ...]) -> None:
        """Widen lookahead when a request that was decoding had to wait for a page. Lock held."""
        if any(pages == 1 and self._state.lengths.longest[slot] > 0 for slot, pages in growths):
            self._state.pace.stalled()
