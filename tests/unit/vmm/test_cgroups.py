"""Free memory under the limits of cgroups, both versions, over made-up folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slicedkv.errors import DriverError
from slicedkv.vmm import MemoryInfo, procfs
from slicedkv.vmm.host import HostDriver

MIB = 1 << 20
UNLIMITED = 0x7FFFFFFFFFFFF000  # what version 1 has in place of "max"
Machine = Callable[[str], Path]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine of 1000 MiB, 900 of them free; give it the process's own cgroups, get the folder of all of them."""
    (tmp_path / "meminfo").write_text(f"MemTotal: {1000 << 10} kB\nMemAvailable: {900 << 10} kB\n")
    monkeypatch.setattr(procfs, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(procfs, "OWN_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(procfs, "CGROUP_ROOT", tmp_path / "root")

    def make(own: str) -> Path:
        (tmp_path / "cgroup").write_text(own)
        (tmp_path / "root").mkdir()
        return tmp_path / "root"

    return make


def limit_1(folder: Path, limit: int, used: int, cached: int = 0) -> None:
    """Make a cgroup of version 1; `cached` is file cache, as all below hold it and as this level itself does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"inactive_file 0\ntotal_inactive_file {cached}\n")


def limit_2(folder: Path, limit: int, used: int) -> None:
    """Make a cgroup of version 2."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text("inactive_file 0\n")


def test_version_1_is_heeded(machine: Machine) -> None:
    root = machine("9:name=systemd:/\n4:memory:/jobs/ours\n2:cpu,cpuacct:/jobs\n0::/\n")
    limit_1(root / "memory" / "jobs" / "ours", 300 * MIB, 120 * MIB, cached=20 * MIB)
    assert procfs.memory_info() == MemoryInfo(200 * MIB, 300 * MIB)


@pytest.mark.parametrize("tightest", ["", "jobs", "jobs/ours"])
def test_the_least_of_all_levels_counts(machine: Machine, tightest: str) -> None:
    root = machine("4:memory:/jobs/ours\n") / "memory"
    for level in ("", "jobs", "jobs/ours"):
        limit_1(root / level, 300 * MIB if level == tightest else UNLIMITED, 50 * MIB)
    limit_1(root / "jobs" / "theirs", MIB, MIB)
    assert procfs.memory_info() == MemoryInfo(250 * MIB, 300 * MIB)


def test_the_least_free_may_be_on_another_level_than_the_least_limit(machine: Machine) -> None:
    root = machine("4:memory:/jobs/ours\n") / "memory"
    limit_1(root / "jobs", 500 * MIB, 490 * MIB)
    limit_1(root / "jobs" / "ours", 300 * MIB, 50 * MIB)
    assert procfs.memory_info() == MemoryInfo(10 * MIB, 300 * MIB)


def test_more_used_than_the_limit_leaves_nothing(machine: Machine) -> None:
    root = machine("4:memory:/ours\n")
    limit_1(root / "memory" / "ours", 300 * MIB, 310 * MIB)
    assert procfs.memory_info() == MemoryInfo(0, 300 * MIB)


def test_no_limit_is_no_limit(machine: Machine) -> None:
    root = machine("4:memory:/ours\n0::/\n")
    limit_1(root / "memory" / "ours", UNLIMITED, 310 * MIB)
    assert procfs.memory_info() == MemoryInfo(900 * MIB, 1000 * MIB)


@pytest.mark.parametrize("own", ["", "sub", "sub/deep"])
def test_a_container_sees_its_cgroup_as_the_mount_under_the_hosts_names(machine: Machine, own: str) -> None:
    root = machine(f"7:cpuset,memory:/docker/0a1b/{own}\n") / "memory"
    limit_1(root, 300 * MIB, 50 * MIB)
    limit_1(root / own, 200 * MIB, 50 * MIB)
    assert procfs.memory_info() == MemoryInfo(150 * MIB, 200 * MIB)


def test_a_process_outside_its_namespace_takes_the_mount(machine: Machine) -> None:
    root = machine("4:memory:/../../elsewhere\n")
    limit_1(root / "memory", 300 * MIB, 50 * MIB)
    limit_1(root / "elsewhere", MIB, MIB)
    assert procfs.memory_info() == MemoryInfo(250 * MIB, 300 * MIB)


def test_both_versions_mounted(machine: Machine) -> None:
    root = machine("4:memory:/ours\n0::/ours\n")
    limit_1(root / "memory" / "ours", 400 * MIB, 50 * MIB)
    limit_2(root / "unified" / "ours", 300 * MIB, 50 * MIB)
    assert procfs.memory_info() == MemoryInfo(250 * MIB, 300 * MIB)


def test_a_driver_refuses_what_version_1_would_kill_for(machine: Machine) -> None:
    root = machine("4:memory:/ours\n")
    limit_1(root / "memory" / "ours", 300 * MIB, 299 * MIB)
    driver = HostDriver()
    with pytest.raises(DriverError, match="2097152 bytes asked for, 1048576 free") as caught:
        driver.create(2 * MIB)
    assert caught.value.out_of_memory
    driver.close()
