"""`Unique`: the base of objects that own memory of this process. Knows the errors and nothing else."""

from __future__ import annotations

from typing import ClassVar, NoReturn, SupportsIndex

from .errors import StateError

__all__ = ["Unique"]


class Unique:
    """An object that cannot be copied or pickled: the copy would map, free and close the same memory.

    `copy.copy`, `copy.deepcopy` and `pickle` raise `StateError`.
    """

    __slots__ = ()
    _instead: ClassVar[str] = "use this one"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise StateError(
            f"a {type(self).__name__} cannot be copied or pickled, it owns memory of this process; {self._instead}"
        )
