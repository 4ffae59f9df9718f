"""What the host says about memory and about this process's mapped areas, read from /proc and the cgroup.

Only reads text files; the host driver decides what to do about it. Paths are module constants so that a test can put
other files there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .base import MemoryInfo

__all__ = ["area_limit", "count_areas", "memory_info"]

MAX_MAP_COUNT = Path("/proc/sys/vm/max_map_count")
MAPS = Path("/proc/self/maps")
MEMINFO = Path("/proc/meminfo")
OWN_CGROUP = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")

DEFAULT_MAX_MAP_COUNT = 65530
"""The kernel's own default, see Documentation/admin-guide/sysctl/vm.rst; used where the file cannot be read."""


class _Names(NamedTuple):
    """How a version of cgroups names its files, and the line of memory.stat that counts the file cache of all below."""

    limit: str
    used: str
    droppable: str


_NO_LIMIT = 2**62  # version 1 writes the most that its counter holds, a little below 2**63
_VERSION_1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Names("memory.max", "memory.current", "inactive_file")


def area_limit() -> int:
    """Areas the kernel lets this process have, `vm.max_map_count`."""
    try:
        return int(MAX_MAP_COUNT.read_text())
    except (OSError, ValueError):
        return DEFAULT_MAX_MAP_COUNT


def count_areas() -> int:
    """Areas this process has now. About half a microsecond for each of them."""
    return MAPS.read_bytes().count(b"\n")


def memory_info() -> MemoryInfo:
    """Memory that can be committed without swapping, and all there is, under the cgroup's limit where there is one."""
    fields = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines() if ":" in line)
    free, total = (int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    for directory, names in _cgroups():
        limit, used = _cgroup_memory(directory, names)
        total = min(total, limit)
        free = min(free, max(0, limit - used))
    return MemoryInfo(free, total)


def _cgroups() -> Iterator[tuple[Path, _Names]]:
    """The cgroups of this process that may limit memory, and all above them. The tightest limit counts.

    Where both versions are mounted, the kernel lists version 1 first. One of the two limits memory.
    """
    try:
        lines = OWN_CGROUP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            hybrid = CGROUP_ROOT / "unified"
            yield from ((level, _VERSION_2) for level in _levels(hybrid if hybrid.is_dir() else CGROUP_ROOT, path))
        elif "memory" in controllers.split(","):
            yield from ((level, _VERSION_1) for level in _levels(CGROUP_ROOT / "memory", path))


def _levels(mount: Path, path: str) -> list[Path]:
    """The folder of a cgroup and all above it.

    In a container, the mount may be its own cgroup while `path` has the names of the host. So names are left out from
    the front until the folder exists.
    """
    names = [name for name in path.split("/") if name not in {"", ".."}]
    tails = (mount.joinpath(*names[skip:]) for skip in range(len(names) + 1))
    own = next(filter(Path.is_dir, tails), mount)
    return [own, *(above for above in own.parents if above.is_relative_to(mount))]


def _cgroup_memory(directory: Path, names: _Names) -> tuple[int, int]:
    """Limit and use of one cgroup in bytes. File cache that the kernel would drop first does not count as used."""
    try:
        limit = int((directory / names.limit).read_text())
        if limit >= _NO_LIMIT:  # before the rest is read, which is slow near the root
            return _NO_LIMIT, 0
        used = int((directory / names.used).read_text())
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no cgroup, or "max": no limit
        return _NO_LIMIT, 0
    return limit, used - int(stat.get(names.droppable, 0))
