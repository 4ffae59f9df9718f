"""Numbers and tables as text. Knows nothing of caches."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..config import parse_memory_limit

__all__ = ["format_bytes", "format_table", "parse_bytes", "parse_limit"]

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def format_bytes(num_bytes: float) -> str:
    """Return a size in the largest unit in which it is at least 1, with three digits or more."""
    power = 0
    while round(abs(num_bytes)) >= 1024 and power < len(_UNITS) - 1:
        num_bytes /= 1024
        power += 1
    digits = 0 if power == 0 or num_bytes >= 1000 else 1 if num_bytes >= 10 else 2
    text = f"{num_bytes:,.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {_UNITS[power]}"


def parse_bytes(name: str, text: str) -> int:
    """Read the size that an option of this name has, such as "64KiB" or "40 GB".

    Raises
    ------
    ConfigError
        It is not written like that.
    """
    return parse_memory_limit(text, free_bytes=0, default_fraction=1.0, name=name)


def parse_limit(name: str, text: str) -> int | float:
    """Read an option that is a size as for `parse_bytes`, or a fraction of the free memory: a number with a point.

    Raises
    ------
    ConfigError
        It is not written like that, or the fraction is not in (0, 1].
    """
    if re.fullmatch(r"\d+\.\d*|\.\d+", text):
        parse_memory_limit(float(text), free_bytes=0, default_fraction=1.0, name=name)
        return float(text)
    return parse_bytes(name, text)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "  ") -> str:
    """Align columns: the first to the left, numbers (cells that begin with a digit) to the right."""
    cells = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [
        index > 0 and all(row[index][:1].isdigit() or row[index] == "-" for row in rows) for index in range(len(header))
    ]
    lines = []
    for row in cells:
        padded = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        )
        lines.append((indent + "  ".join(padded)).rstrip())
    return "\n".join(lines)
