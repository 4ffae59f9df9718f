"""`PagedPrefixes`: a prefix cache over pages as paged engines have it, by a hash of each page and all before it."""

from __future__ import annotations

from collections.abc import Sequence

from slicedkv.engine.admission import Admission, slot_of
from slicedkv.engine.request import Request

from .paged import PagedCache

__all__ = ["PagedPrefixes"]


class PagedPrefixes(Admission):
    """Requests begin with full pages that others have computed. Those of finished requests stay while there is room.

    Parameters
    ----------
    cache : PagedCache
    """

    def __init__(self, cache: PagedCache) -> None:
        super().__init__(cache)  # type: ignore[arg-type]
        self._pages = cache
        self._keys: dict[int, list[int]] = {}  # of each request's full pages, as far as they were asked for

    def can_admit(self, request: Request, seq_len: int, promised: int, running: Sequence[Request]) -> bool:
        """As `Admission.can_admit`. Known pages need not be found; those that nobody uses are no longer to be had."""
        hit, planes = self._known(request), self._pages.layout.num_planes
        unused = sum(not self._pages.is_used(page) for page in hit) * planes
        needed = promised + self.pages(seq_len) - len(hit) * planes
        return needed <= self._pages.pages_available() - unused and self._pages.can_admit(0)

    def is_fresh(self, request: Request) -> bool:
        """As `Admission.is_fresh`."""
        return not self._known(request)

    def admit(self, request: Request) -> int:
        """As `Admission.admit`."""
        hit = self._known(request)
        reqid = self._pages.alloc_reqid()
        self._pages.adopt(reqid, hit)
        request.num_computed = request.num_cached_tokens = len(hit) * self._pages.page_tokens
        self.num_cached_tokens += request.num_cached_tokens
        return reqid

    def note_computed(self, request: Request) -> None:
        """Make the full pages that a request has computed known."""
        table = self._pages.table(slot_of(request), request.num_computed)
        full = request.num_computed // self._pages.page_tokens
        begin = max(0, full - self._new_pages(request))
        for key, page in zip(self._key_list(request, full)[begin:full], table[begin:full].tolist(), strict=True):
            self._pages.remember(key, page)

    def release(self, request: Request) -> None:
        """As `Admission.release`."""
        self._pages.free_reqid(slot_of(request))
        self._keys.pop(request.request_id, None)

    def _new_pages(self, request: Request) -> int:
        """How many full pages may have come since the last look: none decodes more than one, a prompt all."""
        return 1 if request.output_ids else request.num_computed

    def _known(self, request: Request) -> list[int]:
        """Pages that hold the beginning of a request; its last token is always computed."""
        found = []
        for key in self._key_list(request, (request.num_tokens - 1) // self._pages.page_tokens):
            if key not in self._pages.known:
                break
            found.append(self._pages.known[key])
        return found

    def _key_list(self, request: Request, count: int) -> list[int]:
        """Keys of the first full pages, each a hash of the key before and the page's tokens."""
        keys, tokens = self._keys.setdefault(request.request_id, []), self._pages.page_tokens
        while len(keys) < count:
            begin = len(keys) * tokens
            ids = tuple(request.token_ids(begin, begin + tokens))
            keys.append(hash((keys[-1] if keys else 0, ids)))
        return keys[:count]
