"""What the host says about memory and about this process's mapped areas, read from /proc and the cgroup.

Only reads text files; the host driver decides what to do about it. Paths are module constants so that a test can put
other files there.
"""

from __future__ import annotations

from pathlib import Path

from .base import MemoryInfo

__all__ = ["area_limit", "count_areas", "memory_info"]

MAX_MAP_COUNT = Path("/proc/sys/vm/max_map_count")
MAPS = Path("/proc/self/maps")
MEMINFO = Path("/proc/meminfo")
OWN_CGROUP = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")

DEFAULT_MAX_MAP_COUNT = 65530
"""The kernel's own default, see Documentation/admin-guide/sysctl/vm.rst; used where the file cannot be read."""


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
    for directory in _cgroup_directories():
        limit, used = _cgroup_memory(directory)
        total = min(total, limit)
        free = min(free, max(0, limit - used))
    return MemoryInfo(free, total)


def _cgroup_directories() -> list[Path]:
    """This process's cgroup (version 2) and all above it: the tightest limit counts."""
    try:
        lines = OWN_CGROUP.read_text().splitlines()
    except OSError:
        return []
    own = next((line[3:] for line in lines if line.startswith("0::")), None)
    if own is None:
        return []
    directory = CGROUP_ROOT / own.lstrip("/")
    return [directory, *(above for above in directory.parents if above.is_relative_to(CGROUP_ROOT))]


def _cgroup_memory(directory: Path) -> tuple[int, int]:
    """Limit and use of one cgroup in bytes; file cache that the kernel would drop first does not count as used."""
    try:
        limit = int((directory / "memory.max").read_text())
        used = int((directory / "memory.current").read_text())
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no cgroup, or "max": no limit
        return 2**63, 0
    return limit, used - int(stat.get("inactive_file", 0))
