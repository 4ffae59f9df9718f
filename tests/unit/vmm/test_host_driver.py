"""What only the host driver has: areas and their limit, zeroed memory, faults past mapped pages, forks."""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import functools
import gc
import mmap
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from memory_probe import is_readable

from slicedkv.errors import ConfigError, DriverError, StateError
from slicedkv.views import tensor_at
from slicedkv.vmm import MappedRange, MemoryInfo, Run, host, native, open_driver, procfs
from slicedkv.vmm.host import HostDriver

PAGE = 64 << 10
PAGES = 512


@pytest.fixture(params=["c", "python"])
def driver(request: pytest.FixtureRequest) -> Iterator[HostDriver]:
    with native.disabled() if request.param == "python" else nullcontext():
        driver = HostDriver(PAGE)
    yield driver
    driver.close()


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child and return how it ended: 0, 1 when it raised, or the negative signal.

    No torch in there: its thread pool does not survive a fork.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside torch's threads
        pid = os.fork()
    if not pid:
        code = 1
        signal.alarm(10)
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def mmap_at(wish: int, num_bytes: int) -> int | None:
    """Where the kernel puts anonymous memory that it is asked to put at `wish`."""
    return host._mmap(wish, num_bytes, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANON, -1, 0)


def scatter(base: int, handles: list[int]) -> list[Run]:
    """Runs of one page with a gap after each."""
    return [Run(base + 2 * index * PAGE, (handle,), PAGE) for index, handle in enumerate(handles)]


def test_a_page_is_an_os_page_unless_said_otherwise() -> None:
    assert open_driver("cpu").granularity == os.sysconf("SC_PAGE_SIZE")
    with pytest.raises(ConfigError, match="multiple of"):
        HostDriver(1000)


@pytest.mark.parametrize("device", ["tpu", "cpu:0", "cuda:", "cuda:x", "cuda:-1", ""])
def test_unknown_devices_are_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="device is"):
        open_driver(device)


def test_neighbours_in_address_and_file_merge_into_few_areas(driver: HostDriver) -> None:
    base = driver.reserve(PAGES * PAGE)
    before = procfs.count_areas()
    for page, handle in enumerate(driver.create_batch(PAGE, PAGES)):
        driver.map_run(base + page * PAGE, (handle,), PAGE)
    assert procfs.count_areas() - before <= 3
    driver.unmap_run(base, PAGES * PAGE)
    assert procfs.count_areas() - before <= 1


def test_lowest_offsets_are_handed_out_first(driver: HostDriver) -> None:
    handles = driver.create_batch(PAGE, 6)
    assert handles == sorted(handles)
    driver.release_batch([handles[4], handles[1], handles[2]])
    assert driver.create_batch(PAGE, 4) == [handles[1], handles[2], handles[4], handles[5] + PAGE]
    assert driver.create(2 * PAGE) == handles[5] + 2 * PAGE


def test_a_new_handle_holds_zeros(driver: HostDriver) -> None:
    base = driver.reserve(PAGE)
    for _ in range(2):
        handle = driver.create(PAGE)
        driver.map_run(base, (handle,), PAGE)
        view = tensor_at(base, PAGE, "cpu", driver)
        assert not view.any()
        view.fill_(0xFF)
        driver.unmap_run(base, PAGE)
        driver.release(handle)


def test_mapping_is_refused_before_the_kernel_would(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    base = driver.reserve(2 * PAGES * PAGE)
    handles = driver.create_batch(PAGE, PAGES)
    areas = procfs.count_areas()
    monkeypatch.setattr(procfs, "area_limit", lambda: (areas + 200) * 16 // 15)  # room for 200 more, with headroom
    with pytest.raises(DriverError, match=r"larger page_bytes, or raise .*max_map_count") as caught:
        driver.map_batch(scatter(base, handles))
    assert (caught.value.op, caught.value.code, caught.value.name) == ("map", errno.ENOMEM, "ENOMEM")
    assert procfs.count_areas() <= areas + 1
    for run in scatter(base, handles[:60]):
        driver.map_batch([run])
    with pytest.raises(DriverError):
        driver.map_batch(scatter(base, handles)[60:])
    driver.unmap_batch([MappedRange(run.address, PAGE) for run in scatter(base, handles[:60])])


def test_areas_are_counted_only_when_the_budget_is_used_up(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = 0
    count_areas = procfs.count_areas

    def counted() -> int:
        nonlocal counts
        counts += 1
        return count_areas()

    monkeypatch.setattr(procfs, "count_areas", counted)
    base = driver.reserve(PAGE)
    handle = driver.create(PAGE)
    for _ in range(500):
        driver.map_run(base, (handle,), PAGE)
        driver.unmap_run(base, PAGE)
    assert counts == 1


def test_memory_that_the_machine_lacks_is_refused(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "memory_info", lambda: MemoryInfo(10 * PAGE, 20 * PAGE))
    driver.release_batch(driver.create_batch(PAGE, 10))
    with pytest.raises(DriverError, match="free") as caught:
        driver.create_batch(PAGE, 11)
    assert caught.value.out_of_memory
    assert driver.used_bytes() == 0


def test_the_kernels_refusal_is_an_error_and_leaves_nothing(driver: HostDriver) -> None:
    with pytest.raises(DriverError) as caught:
        driver.reserve(1 << 56)
    assert (caught.value.op, caught.value.name) == ("reserve", "ENOMEM")


def test_reading_past_mapped_pages_faults(driver: HostDriver) -> None:
    base = driver.reserve(4 * PAGE)
    handles = driver.create_batch(PAGE, 2)
    driver.map_run(base, handles, PAGE)
    assert is_readable(base, 2 * PAGE)
    assert not is_readable(base, 2 * PAGE + 1)
    driver.unmap_run(base, PAGE)
    assert not is_readable(base, 1)
    assert is_readable(base + PAGE, PAGE)


@pytest.mark.parametrize("write", [False, True])
def test_rows_fault_in_a_forked_child(driver: HostDriver, write: bool) -> None:
    """Also in pages mapped, exchanged and unmapped since the addresses were reserved, and in a grandchild."""
    base = driver.reserve(4 * PAGE)
    first, second = driver.create_batch(PAGE, 2)
    driver.map_run(base, (first, second), PAGE)
    driver.unmap_run(base, PAGE)
    driver.map_run(base, (second,), PAGE)
    rows = tensor_at(base, 2 * PAGE, "cpu", driver)
    rows.fill_(5)

    def touch(page: int) -> None:
        faulthandler.disable()  # a fault is what the test wants; no trace of it
        ctypes.memset(base + page * PAGE, 9, 1) if write else ctypes.string_at(base + page * PAGE, 1)

    for page in range(4):
        assert in_child(functools.partial(touch, page)) == -signal.SIGSEGV
    assert in_child(lambda: os._exit(in_child(functools.partial(touch, 0)) != -signal.SIGSEGV)) == 0
    assert rows.unique().tolist() == [5]
    driver.unmap_run(base, 2 * PAGE)


def test_nothing_else_comes_to_lie_at_a_parents_addresses(driver: HostDriver) -> None:
    """A view that the child still has would show it."""
    base = driver.reserve(PAGES * PAGE)
    driver.map_run(base, driver.create_batch(PAGE, PAGES), PAGE)

    def child() -> None:
        assert mmap_at(base, PAGE) != base  # where it would be, were the addresses free

    assert in_child(child) == 0
    driver.unmap_run(base, PAGES * PAGE)


def test_a_forked_child_keeps_no_memory_of_its_parent(driver: HostDriver) -> None:
    def child() -> None:
        links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        assert not [link for link in links if link.is_symlink() and "memfd:slicedkv" in os.readlink(link)]
        driver.close()

    assert in_child(child) == 0


def test_a_forked_child_is_refused_and_disturbs_nobody(driver: HostDriver) -> None:
    base = driver.reserve(4 * PAGE)
    first, second = driver.create_batch(PAGE, 2)
    driver.map_run(base, (first,), PAGE)
    tensor_at(base, PAGE, "cpu", driver).fill_(5)
    used = driver.used_bytes()

    def child() -> None:
        calls: list[Callable[[], object]] = [
            lambda: driver.map_run(base + PAGE, (second,), PAGE),
            lambda: driver.unmap_run(base, PAGE),
            lambda: driver.release(second),
            lambda: driver.create(PAGE),
            lambda: driver.reserve(PAGE),
            lambda: driver.free_reservation(base, 4 * PAGE),
            driver.record_fence,
        ]
        for call in calls:
            with pytest.raises(StateError, match="forked child"):
                call()
        driver.close()

    driver._ledger.lock.acquire()  # as if another thread were mapping at the moment of the fork
    assert in_child(child) == 0
    driver._ledger.lock.release()
    assert driver.used_bytes() == used
    assert tensor_at(base, PAGE, "cpu", driver).unique().tolist() == [5]
    driver.unmap_run(base, PAGE)


def test_a_finalizer_may_free_a_reservation_while_the_lock_is_held(driver: HostDriver) -> None:
    base = driver.reserve(PAGE)
    with driver._ledger.lock:
        driver.free_reservation(base, PAGE)
    driver.free_reservation(driver.reserve(PAGE), PAGE)


def test_a_forgotten_driver_leaves_no_file_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    HostDriver().create(1 << 20)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_info_heeds_the_tightest_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1000000 kB\nMemFree: 1 kB\nMemAvailable: 500000 kB\nHugePages_Total: 0\n")
    own = tmp_path / "cgroup"
    own.write_text("4:memory:/old\n0::/a/b\n")
    (tmp_path / "root" / "a" / "b").mkdir(parents=True)
    for name in ("MEMINFO", "OWN_CGROUP", "CGROUP_ROOT"):
        monkeypatch.setattr(procfs, name, {"MEMINFO": meminfo, "OWN_CGROUP": own}.get(name, tmp_path / "root"))
    assert procfs.memory_info() == (500_000 * 1024, 1_000_000 * 1024)
    limits = {"a/b": ("max", 7), "a": ("9000000", 3_000_000)}
    for directory, (limit, used) in limits.items():
        (tmp_path / "root" / directory / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "root" / directory / "memory.current").write_text(f"{used}\n")
        (tmp_path / "root" / directory / "memory.stat").write_text("anon 1\ninactive_file 1000000\n")
    assert procfs.memory_info() == (7_000_000, 9_000_000)
    monkeypatch.setattr(procfs, "MAX_MAP_COUNT", tmp_path / "missing")
    assert procfs.area_limit() == 65530
