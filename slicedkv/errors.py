"""Every exception slicedkv raises. Nothing else lives here, so any module may import it."""

from __future__ import annotations

__all__ = [
    "BackendUnavailableError",
    "CapacityError",
    "ConfigError",
    "DriverError",
    "LostSlotsError",
    "OutOfPagesError",
    "OutOfSlotsError",
    "SlicedKVError",
    "StateError",
]


class SlicedKVError(Exception):
    """Base class of all slicedkv errors."""


class ConfigError(SlicedKVError, ValueError):
    """An argument has a value or type that can never work. Raised before any state changes."""


class StateError(SlicedKVError, RuntimeError):
    """The call is legal, but not now.

    The cache is closed, the reqid is unknown or idle, the process is a forked child, or a wait ran out of time.
    """


class LostSlotsError(StateError):
    """Slots are out of use: the driver failed to change what they have mapped, and then failed to undo it.

    They stay so until the cache is closed.

    Attributes
    ----------
    slots : tuple of int
    """

    def __init__(self, message: str, slots: tuple[int, ...]) -> None:
        super().__init__(message, slots)
        self.slots = slots

    def __str__(self) -> str:
        return str(self.args[0])


class CapacityError(SlicedKVError, MemoryError):
    """Something countable ran out.

    Attributes
    ----------
    requested, available : int
        How much the call asked for and how much there was, in the unit that the message names.
    """

    def __init__(self, message: str, *, requested: int, available: int) -> None:
        super().__init__(message)
        self.requested = requested
        self.available = available

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_capacity, (type(self), str(self), self.requested, self.available), self.__dict__


class OutOfPagesError(CapacityError):
    """Physical memory is short: the call needs more pages than it can get."""


class OutOfSlotsError(CapacityError):
    """All `max_batch_size` slots hold active requests."""


class BackendUnavailableError(SlicedKVError, RuntimeError):
    """An optional package or a device is missing. The message says what to install."""


class DriverError(SlicedKVError, RuntimeError):
    """A virtual-memory call failed.

    Attributes
    ----------
    op : str
        The verb that failed: "reserve", "create", "map", "set_access", "unmap", "release", ...
    code : int
        The driver's numeric code (CUresult on CUDA, errno on the host).
    name : str
        The code's symbolic name, such as "CUDA_ERROR_OUT_OF_MEMORY" or "ENOMEM".
    completed : int
        How many ranges a batch had unmapped before the failure; unmapping is the one batch that is not undone.
    left_behind : bool
        A batch of maps failed, and undoing it failed too: some of it is still mapped, and nobody knows which part.
    """

    def __init__(self, op: str, code: int, name: str, hint: str = "") -> None:
        detail = f"; {hint}" if hint else ""
        super().__init__(f"driver call {op!r} failed with {name} ({code}){detail}")
        self.op = op
        self.code = code
        self.name = name
        self.hint = hint
        self.completed = 0
        self.left_behind = False

    @property
    def out_of_memory(self) -> bool:
        """True when the driver had no physical memory left for the call."""
        return self.name in {"CUDA_ERROR_OUT_OF_MEMORY", "ENOMEM", "ENOSPC"}

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.op, self.code, self.name, self.hint), self.__dict__


def _rebuild_capacity(kind: type[CapacityError], message: str, requested: int, available: int) -> CapacityError:
    return kind(message, requested=requested, available=available)
