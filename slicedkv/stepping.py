"""`Stepper`: what `SlicedKVCache.step` does. Quick when nothing grows, exact about failure when something does.

A step that finds everything mapped costs one vector comparison under the lock. A step that does not takes the gate's
work token, looks again (the mapper may have been at it), and maps the rest on the calling thread: that is a stall.
"""

from __future__ import annotations

import time

import torch

from .backing import Growth
from .errors import OutOfPagesError
from .growth import grow_now, new_pages
from .mapper import Mapper
from .state import CacheState
from .stats import StepRecord
from .writing import CopyOnWrite

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
    """

    def __init__(self, state: CacheState, mapper: Mapper, copy_on_write: CopyOnWrite) -> None:
        self._state = state
        self._mapper = mapper
        self._copy_on_write = copy_on_write
        self._mutex = state.gate.mutex

    def step(self, lens: torch.Tensor) -> bool:
        """Map what is missing for `lens` (``[B]`` int64); see `SlicedKVCache.step`."""
        started = time.perf_counter()
        lengths, counters = self._state.lengths, self._state.counters
        with self._mutex:
            self._state.require_running()
            counters.steps += 1
            self._state.pace.step_at(started)
            if lengths.is_quiet(lens):
                lengths.advance(lens)
                counters.last_step = _QUIET
                return True
            late = () if lengths.is_backed(lens) else self.growths(lens)
            if not late and not self._copy_on_write.swaps(lens, count_idle=True):
                self._settle(lens, _QUIET, due=True)
                return True
            self._note_late(late)
        return self._step_with_growth(lens, started)

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
        return {slot: state.layout.pages_for(lengths[slot]) for slot in state.lengths.beyond_touched(lens)}

    def _settle(self, lens: torch.Tensor, record: StepRecord, *, due: bool = False) -> None:
        """Note the outcome of a step that is True and let the mapper look ahead. Lock held."""
        self._state.lengths.advance(lens)
        self._state.counters.last_step = record
        self._state.unscheduled = True
        self._mapper.wake(due=due)

    def _step_with_growth(self, lens: torch.Tensor, started: float) -> bool:
        """Map what is missing, and copy what is shared, on the calling thread; count it as a stall."""
        state = self._state
        with state.work("step"):
            with state.gate.lock:
                growths = self.growths(lens)
                state.claims = self._claims(lens)
                state.lengths.ended.clear()
            begun = time.perf_counter()
            try:
                swaps = self._copy_on_write.make_way(lens, growths)
                if growths or swaps:
                    grow_now(state, growths, swaps=swaps)
                self._copy_on_write.copy(swaps)
                ok = True
            except OutOfPagesError:
                ok = False
            finally:
                state.claims = {}
            finished = time.perf_counter()
            with state.gate.lock:
                pages = new_pages(state, growths, swaps) if ok else 0
                record = StepRecord(ok=ok, pages=pages, stall_us=(finished - started) * 1e6)
                state.counters.stalls += 1
                state.counters.stall_us += record.stall_us
                state.counters.critical_map_us += (finished - begun) * 1e6
                state.counters.last_step = record
                if ok:
                    self._settle(self._without_ended(lens), record)
        return ok

    def _without_ended(self, lens: torch.Tensor) -> torch.Tensor:
        """Lengths without those of requests that ended meanwhile: their slots are idle, or a new one's. Lock held."""
        if ended := self._state.lengths.ended:
            lens = lens.clone()
            lens[list(ended)] = 0
        return lens

    def _note_late(self, growths: tuple[Growth, ...]) -> None:
        """Widen lookahead when a request that was decoding had to wait for a page. Lock held."""
        if any(pages == 1 and self._state.lengths.touched[slot] > 0 for slot, pages in growths):
            self._state.pace.stalled()
