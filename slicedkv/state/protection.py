"""`Protector`: with `debug`, shared pages are read-only, so that a kernel that writes there faults at once.

Pages of a slot are read-only while another active or idle slot has them mapped, too. That is exactly as long as a step
would copy them before it lets a request write there; lost slots count for neither.

Who changes what is mapped does it inside `changing`. Where the driver refuses, pages stay as they are until the next
change. A call that is about to write, or promises that somebody may, calls `settle` first and fails if that does.

Functions marked *token* need the gate's work token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from ..errors import DriverError, StateError
from ..memory.backing import Backing
from ..memory.change import Cut
from .slots import SlotTable

__all__ = ["Protector", "changing"]


class _Span(NamedTuple):
    """Pages ``[first, end)`` of a slot, in every plane: one segment."""

    slot: int
    first: int
    end: int

    def overlaps(self, slot: int, first_page: int, end_page: int) -> bool:
        return self.slot == slot and self.first < end_page and first_page < self.end


class Protector:
    """Which pages of one cache are read-only.

    Parameters
    ----------
    backing : Backing
        Over a driver that `can_protect`.
    slots : SlotTable
    """

    def __init__(self, backing: Backing, slots: SlotTable) -> None:
        self._backing = backing
        self._slots = slots
        self._gate = backing.pool.gate
        self._perhaps: set[_Span] = set()  # may be read-only
        self._surely: set[_Span] = set()  # a part of them: these are, as far as the driver can be trusted

    @property
    def slots(self) -> set[int]:
        """Slots in which pages may be read-only. Lock held."""
        return {span.slot for span in self._perhaps}

    def hinders(self, slot: int, first_page: int, end_page: int) -> bool:
        """True when one of these pages of a slot may be read-only. Lock held."""
        return any(span.overlaps(slot, first_page, end_page) for span in self._perhaps)

    def doubt(self, *cuts: Cut) -> None:
        """*token* Note that pages were unmapped, and perhaps mapped back: whether they are read-only nobody knows."""
        with self._gate.lock:
            ranges = [cut[:3] for cut in cuts]
            self._surely = {span for span in self._surely if not any(span.overlaps(*range_) for range_ in ranges)}

    def settle(self) -> None:
        """*token* Make shared pages read-only, and pages that are not shared any more writable.

        The caller has waited for all work that writes shared pages.

        Raises
        ------
        DriverError
            The driver refused some pages; this is its first refusal. The others are as they should be.
        """
        if not self._perhaps and not self._backing.shared.alias_pages:
            return
        with self._gate.lock:
            wanted = self._wanted()
            self._perhaps &= self._mapped()
            self._surely &= self._perhaps
            opened, closed = self._perhaps - wanted, wanted - self._surely
        failure: DriverError | None = None
        for spans, writable in ((opened, True), (closed, False)):
            for joined in _joined(spans):
                try:
                    self._protect(joined, writable=writable)
                except DriverError as error:
                    failure = failure or error
        if failure is not None:
            raise failure

    def _wanted(self) -> set[_Span]:
        """What is to be read-only. Lock held."""
        shared, lost = self._backing.shared, self._slots.lost
        in_use = self._slots.active | self._slots.idle
        return {_Span(*found) for found in shared.spans(in_use, ignored=shared.mappings(lost))}

    def _mapped(self) -> set[_Span]:
        """What is mapped in the slots where something may be read-only, but for lost ones. Lock held."""
        slots = self.slots - self._slots.lost
        return {_Span(slot, *found) for slot in slots for found in self._backing.segment_spans(slot)}

    def _protect(self, spans: list[_Span], *, writable: bool) -> None:
        """*token* Make neighbouring spans of a slot read-only or writable."""
        with self._gate.lock:  # for the time of the call, and after one that failed, nobody knows
            self._perhaps.update(spans)
            self._surely.difference_update(spans)
        for plane in self._backing.reservations:
            mapped = plane.mapped_range(spans[0].slot, spans[0].first, spans[-1].end)
            self._backing.pool.driver.protect(*mapped, writable=writable)
        with self._gate.lock:
            (self._perhaps.difference_update if writable else self._surely.update)(spans)

    def check_integrity(self) -> None:
        """Raise `StateError` if a page is shared and writable, or read-only and not shared. Lock held.

        Pages that the driver refused do not count.
        """
        wanted = self._wanted()
        for wrong, what in ((wanted - self._perhaps, "shared"), (self._surely - wanted, "read-only")):
            if wrong:
                slot, first, end = min(wrong)
                raise StateError(f"slot {slot}: pages [{first}, {end}) are {what}, but not both shared and read-only")


def _joined(spans: Iterable[_Span]) -> Iterator[list[_Span]]:
    """Neighbours together."""
    run: list[_Span] = []
    for span in sorted(spans):
        if run and (run[-1].slot, run[-1].end) != (span.slot, span.first):
            yield run
            run = []
        run.append(span)
    if run:
        yield run


@contextmanager
def changing(protector: Protector | None, *cuts: Cut) -> Iterator[None]:
    """*token* Wrap a change of what is mapped, which unmaps `cuts` among others: the protector settles after it.

    What the driver refuses is left for the next time, since the change itself is done.
    """
    try:
        yield
    finally:
        if protector is not None:
            protector.doubt(*cuts)
            with suppress(DriverError):
                protector.settle()
