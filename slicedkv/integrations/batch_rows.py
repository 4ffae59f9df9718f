"""`BatchRows`: neighbouring slots of a `SlicedKVCache`, one for each row of a batch, so one view shows them all.

It uses the public interface of `SlicedKVCache` and knows no transformers.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from ..cache import SlicedKVCache
from ..errors import ConfigError, OutOfPagesError, OutOfSlotsError, StateError

__all__ = ["BatchRows"]

_dropped: weakref.WeakKeyDictionary[SlicedKVCache, deque[int]] = weakref.WeakKeyDictionary()
"""Slots of dropped batches. A thread that drops one may hold any lock, so the next batch gives the slots back."""


class BatchRows:
    """Slots ``[slots.start, slots.stop)``. The first `back` takes them; `free` gives them back, or this object's end.

    Attributes
    ----------
    sliced : SlicedKVCache
    slots : range
        Row `i` of the batch is slot ``slots[i]``.
    backed_len : int
        Tokens of each row that may be read and written.

    Notes
    -----
    Not thread-safe.
    """

    def __init__(self, sliced: SlicedKVCache) -> None:
        self.sliced = sliced
        self.slots = range(0)
        self.backed_len = 0
        self.closed = False
        self._held: list[int] = []  # slots of the batch, and others that are to be given back
        weakref.finalize(self, _dropped.setdefault(sliced, deque()).extend, self._held).atexit = False

    @property
    def in_place(self) -> bool:
        """Whether `rewrite` reaches the first token's row: it does if that row shares a page with the second one."""
        return self.sliced.layout.row_bytes < self.sliced.layout.page_bytes

    def view(self, tensor: Tensor, seq_len: int) -> Tensor:
        """Return this batch's rows ``[B, seq_len, H, D]`` of a layer slice."""
        return tensor[self.slots.start : self.slots.stop, :seq_len]

    def back(self, batch_size: int, seq_len: int) -> None:
        """See `SlicedTransformersCache.back`."""
        self._check_open()
        if not batch_size:
            raise ConfigError("the batch has 0 rows; it needs at least one")
        if not self.slots:
            self._take(batch_size)
        if batch_size != len(self.slots):
            raise ConfigError(f"the batch has {batch_size} rows, the cache holds {len(self.slots)}; call reset() first")
        if seq_len > self.backed_len:
            self._step(self.slots, seq_len)
            self.backed_len = seq_len

    def crop(self, seq_len: int) -> None:
        """Forget tokens from `seq_len` on. They will be written again, so shared pages there are copied.

        Raises
        ------
        OutOfPagesError
            Other requests share guard rows, and there is no memory for copies. Nothing was forgotten.
        """
        if not seq_len:
            self.free()
        elif seq_len < self.backed_len:
            self._step(self.slots, seq_len)
            self.backed_len = seq_len

    def rewrite(self, slots: Sequence[int]) -> None:
        """Make all rows of some slots this batch's own, so that they can be written again.

        Raises
        ------
        OutOfPagesError
            Other requests share rows, and there is no memory for copies.
        """
        self._step(slots, 1)  # the shortest length of an active slot: rows from here on will be written again
        self._step(slots, self.backed_len)

    def select(self, rows: Sequence[int]) -> None:
        """Let row `i` of the batch be what row ``rows[i]`` was, and the batch be as large as `rows`.

        Rows in new slots share the old ones' pages; the others are copied. If a row fills whole pages, all slots are
        new, see `in_place`. After a failure nothing has changed.

        Raises
        ------
        OutOfPagesError, OutOfSlotsError
            Memory or slots are short.
        ConfigError, StateError
            There are no rows; this was closed.
        """
        self._check_open()
        if not rows:
            raise ConfigError("no row of the batch would be left; keep at least one, or call reset()")
        old = self.slots
        own = old if self.in_place else range(0)
        new = own[: len(rows)] if len(rows) <= len(own) else self._find(len(rows), own)
        sources = {slot: old[row] for slot, row in zip(new, rows, strict=True)}
        moves = {slot: source for slot, source in sources.items() if slot in old and slot != source}
        try:
            for slot in (slot for slot in new if slot not in old):
                self._share(sources[slot], slot)
            if moves:
                self.rewrite(list(moves))
        except BaseException:
            self._keep(old)
            raise
        self._copy(moves)
        self.slots = new
        self._keep(new)

    def fork(self) -> BatchRows:
        """Return another batch of the same rows, which shares all whole pages with this one.

        Raises
        ------
        OutOfPagesError, OutOfSlotsError, StateError
            Memory or slots are short; this was closed.
        """
        self._check_open()
        twin = BatchRows(self.sliced)
        if self.slots:
            twin._take(len(self.slots))
            try:
                for source, slot in zip(self.slots, twin.slots, strict=True):
                    twin.backed_len = self.backed_len
                    twin._share(source, slot)
            except BaseException:
                twin.free()
                raise
        return twin

    def free(self) -> None:
        """Give the slots back. After a failure, another call gives back the rest."""
        self.slots, self.backed_len = range(0), 0
        self._keep(self.slots)

    def _check_open(self) -> None:
        if self.closed:
            raise StateError("this SlicedTransformersCache is closed; make a new one")

    def _take(self, count: int) -> None:
        self._keep(())  # what could not be given back before
        try:
            self.slots = self._find(count, ())
        finally:
            self._keep(self.slots)

    def _find(self, count: int, own: Sequence[int]) -> range:
        """Take slots until there are `count` neighbours, counting the `own` ones, and return these."""
        dropped = _dropped[self.sliced]
        while dropped:
            self._held.append(dropped.popleft())
        self._keep(self.slots)
        usable = set(own)
        try:
            while True:
                self._held.append(low := self.sliced.alloc_reqid())
                usable.add(low)
                high = low + 1
                while low - 1 in usable:
                    low -= 1
                while high in usable:
                    high += 1
                if high - low >= count:
                    return range(low, low + count)
        except OutOfSlotsError as error:
            self._keep(self.slots)
            message = f"a batch of {count} rows needs {count} neighbouring slots; raise max_batch_size or free requests"
            raise OutOfSlotsError(message, requested=count, available=len(usable)) from error

    def _keep(self, slots: Sequence[int]) -> None:
        """Give back what is held beside these slots."""
        for slot in [slot for slot in self._held if slot not in slots]:
            self.sliced.free_reqid(slot)
            self._held.remove(slot)

    def _share(self, source: int, slot: int) -> None:
        if self.backed_len and not self.sliced.share_prefix(source, slot, self.backed_len):
            raise self._short([slot], self.backed_len)

    def _copy(self, moves: dict[int, int]) -> None:
        if not moves:
            return
        targets, sources = list(moves), list(moves.values())
        for layer in range(self.sliced.layout.num_layers):
            for tensor in (self.sliced.k(layer), self.sliced.v(layer)):
                tensor[targets, : self.backed_len] = tensor[sources, : self.backed_len]

    def _step(self, slots: Sequence[int], seq_len: int) -> None:
        if not self.sliced.step(dict.fromkeys(slots, seq_len)):
            raise self._short(slots, seq_len)

    def _short(self, slots: Sequence[int], seq_len: int) -> OutOfPagesError:
        needed = self.sliced.pages_needed(dict.fromkeys(slots, seq_len))
        available = self.sliced.pages_available()
        return OutOfPagesError(
            f"{len(slots)} rows of {seq_len} tokens need {needed} more pages and {available} can be had; raise "
            "memory_limit, or use a smaller batch",
            requested=needed,
            available=available,
        )
