"""`PrefixCache`: requests begin with what others have computed.

Running requests share what they begin with. Finished ones leave it behind: their rows stay in their slots, which are
*held*, up to a limit. The slot used least recently is given up first.

A newcomer that continues a held request takes over its slot and rows. Any other one shares the pages of the longest
beginning that it has in common with a running or held request. Held slots never keep a slot or memory from a request:
they are given up for a newcomer, and before a running request is preempted.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain
from typing import NamedTuple

from ..errors import OutOfSlotsError, SlicedKVError
from .admission import Admission, slot_of
from .prefix_index import PrefixIndex
from .request import Request
from .served_cache import SharingCache

__all__ = ["PrefixCache"]


class _Hit(NamedTuple):
    """A slot that has the first `length` tokens of a request."""

    slot: int
    length: int


class PrefixCache(Admission):
    """Admission of requests that share prefixes. Not thread-safe.

    Parameters
    ----------
    cache : SharingCache
    limit_bytes : int
        Most memory that held slots may keep from others.
    """

    _cache: SharingCache

    def __init__(self, cache: SharingCache, limit_bytes: int) -> None:
        super().__init__(cache)
        self._limit_pages = limit_bytes // cache.layout.page_bytes
        self._index = PrefixIndex(cache.layout.tokens_per_page)
        self._held: dict[int, None] = {}  # held slots, the least recently used first

    @property
    def held_slots(self) -> tuple[int, ...]:
        """Held slots, the least recently used first."""
        return tuple(self._held)

    @property
    def held_bytes(self) -> int:
        """Memory that held slots alone keep from others, without what running requests share with them."""
        return self._cache.freeable_pages(self._held) * self._cache.layout.page_bytes

    def can_admit(self, request: Request, seq_len: int, promised: int, running: Sequence[Request]) -> bool:
        """As `Admission.can_admit`. Held memory and slots count as free, and shared pages as present.

        Also False while a running request is computing more of this one's beginning, since it can soon be shared.
        """
        swapped = request.num_computed > 0  # it brings its own rows with it
        hit = None if swapped else self._find(request)
        if not swapped and self._is_coming(request, 0 if hit is None else hit.length, running):
            return False
        if not self._held and not self._cache.can_admit(0):
            return False
        missing = promised + self.pages(seq_len) - self._cache.pages_available()
        if missing <= 0:
            return True
        # The source may be given up after it was shared: what the request does not share of it becomes free.
        if missing <= self._cache.freeable_pages(self._held):
            return True
        others = [slot for slot in self._held if slot != hit.slot] if hit else []
        return hit is not None and missing - self._cache.shareable_pages(*hit) <= self._cache.freeable_pages(others)

    def is_fresh(self, request: Request) -> bool:
        """As `Admission.is_fresh`."""
        return self._find(request) is None

    def admit(self, request: Request) -> int:
        """As `Admission.admit`. Held slots are given up if no slot is idle, or memory for a copy is short."""
        hit = self._find(request)
        reqid = None if hit is None else self._attach(hit, request)
        if hit is None or reqid is None:
            request.num_cached_tokens = 0
            return self._alloc(request.num_tokens)
        try:
            self._cache.prefetch(reqid, request.num_tokens)
        except BaseException:
            self._index.remove(reqid)
            self._free(reqid)
            raise
        self._index.extend(reqid, request.token_ids(self._index.length(reqid), hit.length))
        request.num_computed = request.num_cached_tokens = hit.length
        self.num_cached_tokens += hit.length
        return reqid

    def note_computed(self, request: Request) -> None:
        """As `Admission.note_computed`: other requests can share whole runs of its tokens from now on."""
        slot, run = slot_of(request), self._index.run_tokens
        start = self._index.length(slot)
        if request.num_computed >= start + run:
            self._index.extend(slot, request.token_ids(start, request.num_computed))

    def forget(self, request: Request) -> None:
        """As `Admission.forget`: nobody can share what it computed."""
        self._index.remove(slot_of(request))

    def release(self, request: Request) -> None:
        """As `Admission.release`, or hold the slot."""
        slot = slot_of(request)
        if self._cache.is_active(slot) and self._is_worth_holding(request):
            for covered in self._index.covered(slot) & self._held.keys():
                self._give_up(covered)
            self._held[slot] = None
        else:
            try:
                super().release(request)
            finally:
                if not self._cache.is_active(slot):
                    self._index.remove(slot)

    def trim(self) -> None:
        """As `Admission.trim`; the held slots used least recently go first."""
        while self._cache.freeable_pages(self._held) > self._limit_pages and self.evict():
            pass

    def evict(self, keep: int | None = None) -> bool:
        """Give up the held slot that was used least recently, `keep` aside; False when there is none."""
        slot = next((slot for slot in self._held if slot != keep), None)
        if slot is not None:
            self._give_up(slot)
        return slot is not None

    # --- beginning with what is there -------------------------------------------------------------------------------

    def _find(self, request: Request) -> _Hit | None:
        """Return the best slot to begin with, None without a match.

        Of the slots with the longest match: one to take over, else a running one, else the held one used most recently.
        """
        # The last token is always computed: the next one is chosen from its logits.
        length, slots = self._index.match(request.token_ids(0, request.num_tokens - 1))
        if not slots:
            return None
        takeable = (slot for slot in slots if self._is_whole(_Hit(slot, length)))
        recent = (slot for slot in reversed(self._held) if slot in slots)
        return _Hit(next(chain(takeable, slots - self._held.keys(), recent)), length)

    def _is_whole(self, hit: _Hit) -> bool:
        """True when a held slot has nothing beyond the hit that others could share: taking it over costs nothing."""
        return hit.slot in self._held and self._index.length(hit.slot) == hit.length

    def _is_coming(self, request: Request, length: int, running: Sequence[Request]) -> bool:
        """True when a running request is about to compute the run behind the first `length` tokens of this one."""
        end = length + self._index.run_tokens
        if end >= request.num_tokens:
            return False
        return any(
            other.num_pending > 1
            and self._index.length(slot_of(other)) == length
            and other.token_ids(0, end) == request.token_ids(0, end)
            for other in running
        )

    def _attach(self, hit: _Hit, request: Request) -> int | None:
        """Return a slot with the rows of a hit: the one that has them, or one that shares them. None: neither."""
        if self._is_whole(hit):
            return self._take_over(hit)
        try:
            reqid = self._alloc(0, keep=hit.slot)
        except OutOfSlotsError:
            if hit.slot not in self._held:
                raise
            # It is the last slot: worth taking over only if the request fills its pages anyway.
            fits = self.pages(self._index.length(hit.slot)) <= self.pages(request.num_tokens)
            return self._take_over(hit) if fits else None
        with ExitStack() as undo:
            undo.callback(self._free, reqid)
            if not self._share(hit, reqid):
                return None
            undo.pop_all()
        if hit.slot in self._held:
            self._held[hit.slot] = self._held.pop(hit.slot)  # used most recently
        return reqid

    def _share(self, hit: _Hit, reqid: int) -> bool:
        """Let a slot share the rows of a hit, if need be by giving up other held slots. False: memory is short."""
        try:
            while not self._cache.share_prefix(hit.slot, reqid, hit.length):
                if not self.evict(keep=hit.slot):
                    return False
        except BaseException:
            if hit.slot in self._held:  # or it would fail the next time too
                self._give_up(hit.slot)
            raise
        return True

    def _take_over(self, hit: _Hit) -> int | None:
        """Give a held slot, cut to the hit, to a request. None: memory is short for copies of what others share."""
        try:
            # The cache learns that rows from here on will be written again.
            ok = self._cache.step({hit.slot: hit.length})
        except BaseException:
            self._give_up(hit.slot)
            raise
        if not ok:
            self._give_up(hit.slot)
            return None
        if not self._is_whole(hit):
            self._index.remove(hit.slot)
        del self._held[hit.slot]
        return hit.slot

    def _alloc(self, seq_len: int, keep: int | None = None) -> int:
        """Return an idle slot. While there is none, give up held slots, `keep` aside.

        Raises
        ------
        OutOfSlotsError
            No slot is idle, and no other slot is held.
        """
        while True:
            try:
                return self._cache.alloc_reqid(seq_len)
            except OutOfSlotsError:
                if not self.evict(keep):
                    raise

    # --- holding ----------------------------------------------------------------------------------------------------

    def _is_worth_holding(self, request: Request) -> bool:
        """True when a finished request has tokens that no other slot has, and its memory is below the limit."""
        slot = slot_of(request)
        if not self._index.length(slot) or self._index.covering(slot):
            return False
        # A prompt that was not computed to its end would hold pages that it only asked for.
        computed = request.num_computed >= len(request.prompt_ids)
        return computed and self._cache.freeable_pages([slot]) <= self._limit_pages

    def _give_up(self, slot: int) -> None:
        try:
            self._free(slot)
        finally:
            if not self._cache.is_active(slot):
                self._index.remove(slot)
                del self._held[slot]

    def _free(self, slot: int) -> None:
        """Free a slot; one that the driver lost counts as free. If the background has failed, free it, then raise."""
        try:
            self._cache.free_reqid(slot)
        except SlicedKVError:
            if self._cache.is_active(slot):
                self._cache.free_reqid(slot)
                raise
