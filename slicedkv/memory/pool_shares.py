"""`Shares`: the caches that draw on one pool, and how much of it each is promised (`min_share`).

The pool keeps for a cache what it was promised and has not mapped: no other cache may take these pages. A cache that is
short takes what others hold beyond their share and do not need, see `paging.victims`.

All caches of a pool have one gate. To change what is mapped, also of another cache, hold its work token; to read or
change books, hold its lock. Take the token first. Nobody holds two gates, so two caches that are short at the same time
wait for each other's driver calls and for nothing else.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

from ..errors import ConfigError

__all__ = ["Member", "Shares"]


class Holding(Protocol):
    """What a member has mapped."""

    @property
    def held_pages(self) -> int:
        """Pages of memory behind all its slots and planes."""

    @property
    def leaving_pages(self) -> int:
        """Those of them that are about to be unmapped."""

    def mapped_handles(self) -> Iterable[int]:
        """Every handle it has mapped, once per mapping."""


class Member(Protocol):
    """A cache, as far as its pool knows it."""

    @property
    def min_share_pages(self) -> int:
        """Pages over all planes that no other member may take from it."""

    @property
    def backing(self) -> Holding:
        """What it has mapped."""


class Shares:
    """The caches of one pool, in order of opening. Hold the gate's lock to call anything.

    A cache that is collected without being closed is forgotten.

    Attributes
    ----------
    own_pool : bool
        A cache opened the pool: the pool and its driver end with the last of its caches.
    """

    def __init__(self) -> None:
        self.own_pool = False
        self.ended = False
        self._members: list[weakref.ref[Member]] = []

    @property
    def members(self) -> tuple[Member, ...]:
        """All of them."""
        return tuple(member for known in self._members if (member := known()) is not None)

    def join(self, member: Member) -> None:
        """Count a cache in."""
        self._members.append(weakref.ref(member))

    def leave(self, member: Member) -> None:
        """Forget a cache and its promise. The cache need not have joined."""
        self._members = [known for known in self._members if known() not in (member, None)]

    def promised(self, besides: Member | None = None) -> int:
        """Pages that the caches, all but `besides`, were promised and have not mapped."""
        return sum(
            max(0, member.min_share_pages - member.backing.held_pages)
            for member in self.members
            if member.min_share_pages and member is not besides
        )

    def check_limit(self, limit_pages: int, newcomer_pages: int = 0) -> None:
        """Raise `ConfigError` if the promises to all caches, and to a new one, exceed a limit."""
        total = sum(member.min_share_pages for member in self.members)
        if total + newcomer_pages > limit_pages:
            raise ConfigError(
                f"the caches of this pool have min_share of {total} pages"
                + (f", and {newcomer_pages} more are asked for" if newcomer_pages else "")
                + f"; a limit of {limit_pages} pages does not hold them, lower min_share or raise the limit"
            )
