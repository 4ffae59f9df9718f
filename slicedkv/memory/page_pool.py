"""`PagePool`: physical memory as handles of two sizes, page and extent, under one memory limit.

A handle is free in the pool, or mapped one or more times. The pool counts mappings and knows no addresses. Caches may
share a pool; they then share its gate and its limit. The gate's lock guards the books. Methods marked *token* make
driver calls; they need the gate's work token and not the lock.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import NamedTuple

from ..checks import check_int
from ..errors import ConfigError, DriverError, OutOfPagesError, StateError
from ..layout import ceil_div
from ..unique import Unique
from ..vmm.base import Driver
from .gate import Gate
from .patience import again_under_pressure
from .pool_shares import Shares
from .references import Handles, References

__all__ = ["PagePool"]


class PagePool(Unique):
    """Create, keep, count and release handles.

    Parameters
    ----------
    driver : Driver
    page_bytes : int
        Bytes of a page, a multiple of the driver's granularity.
    memory_limit : int
        Bytes that all handles together may hold.
    extent_pages : int
        Pages in one extent; 1 means no extents.

    Attributes
    ----------
    references : References
        How often each handle is mapped.

    Raises
    ------
    ConfigError
        A size does not fit the driver.
    """

    def __init__(self, driver: Driver, *, page_bytes: int, memory_limit: int, extent_pages: int = 16) -> None:
        granularity = driver.granularity
        check_int("page_bytes", page_bytes, 1)
        if page_bytes % granularity:
            raise ConfigError(
                f"page_bytes is {page_bytes}; on the {driver.name} driver it must be a multiple of {granularity}"
            )
        self.driver = driver
        self.page_bytes = page_bytes
        self.extent_pages = check_int("extent_pages", extent_pages, 1)
        self.gate = Gate()
        self.shares = Shares()
        self._free = Handles([], [])
        self.references = References(self.extent_pages)
        self._created_pages = 0
        self._limit_pages = self.pages_in_limit(memory_limit)

    def __repr__(self) -> str:
        return (
            f"PagePool({self.driver.name}, page_bytes={self.page_bytes}, created={self._created_pages} of "
            f"{self._limit_pages} pages, free={self.free_pages})"
        )

    def pages_in_limit(self, memory_limit: int) -> int:
        """Pages that a limit in bytes holds; `ConfigError` when it holds none."""
        pages = check_int("memory_limit", memory_limit, 1) // self.page_bytes
        if not pages:
            raise ConfigError(f"memory_limit is {memory_limit} bytes, less than one page of {self.page_bytes} bytes")
        return pages

    @property
    def memory_limit(self) -> int:
        """Bytes that may be created, a whole number of pages."""
        return self._limit_pages * self.page_bytes

    @property
    def created_pages(self) -> int:
        """Pages behind all handles, free or mapped."""
        return self._created_pages

    @property
    def free_pages(self) -> int:
        """Pages behind free handles."""
        return len(self._free.pages) + len(self._free.extents) * self.extent_pages

    @property
    def free_singles(self) -> int:
        """Free handles of one page."""
        return len(self._free.pages)

    @property
    def creatable_pages(self) -> int:
        """Pages the limit still allows to create."""
        return self._limit_pages - self._created_pages

    @property
    def in_flight_pages(self) -> int:
        """Pages that are being mapped or unmapped. Right only while the caches of the pool share no pages."""
        holdings = [member.backing for member in self.shares.members]
        return self._created_pages - self.free_pages - sum(held.held_pages - held.leaving_pages for held in holdings)

    @property
    def available_pages(self) -> int:
        """Pages that the pool can give without unmapping anything: free ones, and what it may create."""
        return self.free_pages + self.creatable_pages

    @property
    def available_extents(self) -> int:
        """Extents that the pool can give without unmapping anything."""
        if self.extent_pages == 1:
            return 0
        return len(self._free.extents) + self.creatable_pages // self.extent_pages

    # --- taking and giving back ------------------------------------------------------------------------------------

    def take(self, pages: int, extents: int = 0) -> Handles:
        """*token* Return handles with one reference each: free ones, then new ones. All or nothing.

        If the limit leaves no room for new ones, free handles of the other size are released first.

        Raises
        ------
        OutOfPagesError
            The limit, or the device's memory, does not hold that many.
        DriverError
            The driver failed for another reason than memory.
        """
        taken, surplus, missing = self._pick(pages, extents)
        created = Handles([], [])
        with ExitStack() as undo:
            undo.callback(self._release, created)
            undo.callback(self._put_back, taken)
            self._release(surplus)
            created.extents.extend(self._create(missing.extents, self.extent_pages))
            created.pages.extend(self._create(missing.pages, 1))
            undo.pop_all()
        taken.pages.extend(created.pages)
        taken.extents.extend(created.extents)
        with self.gate.lock:
            self.references.add(taken)
        return taken

    def _pick(self, pages: int, extents: int) -> tuple[Handles, Handles, _Count]:
        """Take free handles. Return them, what must be released to stay within the limit, and what must be created."""
        with self.gate.lock:
            needed = pages + extents * self.extent_pages
            if needed > self.available_pages:
                raise OutOfPagesError(
                    f"{needed} pages of {self.page_bytes} bytes asked for, {self.available_pages} available under "
                    f"the memory limit of {self.memory_limit} bytes",
                    requested=needed,
                    available=self.available_pages,
                )
            taken = Handles(_pop(self._free.pages, pages), _pop(self._free.extents, extents))
            missing = _Count(pages - len(taken.pages), extents - len(taken.extents))
            excess = missing.pages + missing.extents * self.extent_pages - self.creatable_pages
            broken = _pop(self._free.extents, ceil_div(excess, self.extent_pages))
            loose = _pop(self._free.pages, excess - len(broken) * self.extent_pages)
            return taken, Handles(loose, broken), missing

    def _put_back(self, handles: Handles) -> None:
        """Make handles free again that nobody mapped."""
        with self.gate.lock:
            self._free.pages.extend(handles.pages)
            self._free.extents.extend(handles.extents)

    def _create(self, count: int, handle_pages: int) -> list[int]:
        """Create handles. If the device is short of memory, ask its other users once to make room."""
        if not count:
            return []
        num_bytes = handle_pages * self.page_bytes
        try:
            handles = again_under_pressure(self.driver, lambda: self.driver.create_batch(num_bytes, count))
        except DriverError as error:
            if not error.out_of_memory:
                raise
            raise OutOfPagesError(
                f"the device has no memory for {count} more handles of {num_bytes} bytes, though memory_limit "
                f"({self.memory_limit} bytes) allows them; lower it or free device memory that others hold",
                requested=count * handle_pages,
                available=self.free_pages,
            ) from error
        with self.gate.lock:
            self._created_pages += count * handle_pages
        return handles

    def stock(self, pages: int) -> int:
        """*token* Create up to `pages` free handles, as far as the limit allows; return how many."""
        count = max(0, min(pages, self.creatable_pages))
        self._put_back(Handles(self._create(count, 1), []))
        return count

    def give_back(self, handles: Handles) -> int:
        """Count one mapping less of each handle, free those that have none left, return the pages freed. Lock held."""
        unmapped = self.references.drop(handles)
        self._free.pages.extend(unmapped.pages)
        self._free.extents.extend(unmapped.extents)
        return len(unmapped.pages) + len(unmapped.extents) * self.extent_pages

    def trim(self, keep_pages: int = 0) -> int:
        """*token* Release free handles until at most `keep_pages` pages are free; return the pages released."""
        with self.gate.lock:
            surplus = max(0, self.free_pages - keep_pages)
            pages = _pop(self._free.pages, surplus)
            extents = _pop(self._free.extents, ceil_div(surplus - len(pages), self.extent_pages))
        self._release(Handles(pages, extents))
        return len(pages) + len(extents) * self.extent_pages

    def set_memory_limit(self, memory_limit: int) -> None:
        """*token* Change the limit; free handles above it are released.

        Raises
        ------
        CapacityError
            More is mapped than the new limit holds; nothing was changed.
        """
        limit = self.pages_in_limit(memory_limit)
        mapped = self.references.mapped_pages
        if mapped > limit:
            raise OutOfPagesError(
                f"memory_limit of {memory_limit} bytes holds {limit} pages, but {mapped} pages are mapped; free "
                "requests first",
                requested=mapped,
                available=limit,
            )
        self.trim(max(0, limit - mapped))
        with self.gate.lock:
            self._limit_pages = limit

    def _release(self, handles: Handles) -> None:
        """Release handles that are in no list any more. The pool forgets a handle that the driver will not release."""
        count = len(handles.pages) + len(handles.extents) * self.extent_pages
        with self.gate.lock:
            self._created_pages -= count
        self.driver.release_batch(handles.pages + handles.extents)

    def check_integrity(self) -> None:
        """Compare the books with what the caches of the pool have mapped.

        Raises
        ------
        StateError
            An invariant is broken. Hold the lock, and let no driver work be under way.
        """
        found = Counter(handle for member in self.shares.members for handle in member.backing.mapped_handles())
        self.references.check(dict(found), self._free)
        mapped = self.references.mapped_pages
        if self._created_pages != self.free_pages + mapped:
            raise StateError(f"{self._created_pages} pages created, but {self.free_pages} are free and {mapped} mapped")
        if self._created_pages > self._limit_pages:
            raise StateError(f"{self._created_pages} pages created, over the limit of {self._limit_pages}")


class _Count(NamedTuple):
    pages: int
    extents: int


def _pop(handles: list[int], count: int) -> list[int]:
    """Remove and return up to `count` handles from the end of a list."""
    start = len(handles) - max(0, min(count, len(handles)))
    taken = handles[start:]
    del handles[start:]
    return taken
