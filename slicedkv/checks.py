"""Checks of plain arguments that several modules share. Knows the errors and nothing else."""

from __future__ import annotations

import operator
from typing import Any

from .errors import ConfigError

__all__ = ["check_bool", "check_fraction", "check_int"]


def check_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return `value` as an int in ``[low, high]``.

    Raises
    ------
    ConfigError
        `value` is out of range, or not an integer. A bool does not count as one.
    """
    try:
        number = operator.index(value)
    except (TypeError, RuntimeError):  # RuntimeError: a tensor without a value, such as a meta tensor
        number = None
    if number is None or _is_bool(value):
        raise ConfigError(f"{name} is {value!r}; it must be an integer")
    if number < low or (high is not None and number > high):
        span = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise ConfigError(f"{name} is {number}; it must be {span}")
    return number


def _is_bool(value: Any) -> bool:
    """True for a bool, and for an array or tensor of bools: Python takes one with a single item for a number."""
    return isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))


def check_fraction(name: str, value: Any) -> float:
    """Return `value` as a float in ``[0, 1]``; raise `ConfigError` for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ConfigError(f"{name} is {value!r}; it must be a number in [0, 1]")
    return float(value)


def check_bool(name: str, value: Any) -> bool:
    """Return `value` if it is True or False; raise `ConfigError` for anything else."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be True or False")
    return value
