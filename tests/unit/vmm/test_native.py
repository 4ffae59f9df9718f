"""The C loops against callbacks as entry points: counts, order, undo, retries, and what they refuse."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slicedkv.vmm import native

loops: Any = native.load()
PAGE = mmap.PAGESIZE
NOT_READY = 600
WORD, SIZE, POINTER, NUMBER = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int


def address_of(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address
    return address


class Recorder:
    """Entry points that write down their calls and answer from scripts (0 when a script has run out)."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.scripts: dict[str, list[int]] = {}
        self.structs = (ctypes.c_char * 64)()
        self.callbacks = {
            "map": ctypes.CFUNCTYPE(NUMBER, WORD, SIZE, SIZE, WORD, WORD)(self._answer("map")),
            "access": ctypes.CFUNCTYPE(NUMBER, WORD, SIZE, POINTER, SIZE)(self._answer("access")),
            "unmap": ctypes.CFUNCTYPE(NUMBER, WORD, SIZE)(self._answer("unmap")),
            "release": ctypes.CFUNCTYPE(NUMBER, WORD)(self._answer("release")),
            "create": ctypes.CFUNCTYPE(NUMBER, ctypes.POINTER(WORD), SIZE, POINTER, WORD)(self._create),
        }
        self.at = {name: address_of(callback) for name, callback in self.callbacks.items()}
        self.struct = ctypes.addressof(self.structs)

    def _answer(self, name: str) -> Callable[..., int]:
        def answer(*args: int) -> int:
            self.calls.append((name, *args))
            script = self.scripts.get(name)
            return script.pop(0) if script else 0

        return answer

    def _create(self, handle: Any, size: int, properties: int, flags: int) -> int:
        self.calls.append(("create", size, properties, flags))
        script = self.scripts.get("create")
        code = script.pop(0) if script else 0
        if not code:
            handle[0] = 2**63 + len(self.calls)
        return code

    def map(self, addresses: list[int], handles: list[int], sizes: list[int], tries: int = 5) -> Any:
        columns = (array("Q", addresses), array("Q", handles), array("Q", sizes))
        calls = (self.at["map"], self.at["access"], self.at["unmap"])
        return loops.cuda_map(*calls, self.struct, tries, *columns)

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def test_the_extension_is_built_and_can_be_switched_off() -> None:
    assert loops is not None
    with native.disabled(), native.disabled():
        assert native.load() is None
    assert native.load() is loops


def test_create_fills_the_column(recorder: Recorder) -> None:
    handles = array("Q", [0] * 3)
    assert loops.cuda_create(recorder.at["create"], recorder.struct, 4096, handles) == (3, 0, "")
    assert handles.tolist() == [2**63 + 1, 2**63 + 2, 2**63 + 3]
    assert recorder.calls == [("create", 4096, recorder.struct, 0)] * 3


@pytest.mark.parametrize("at", range(4))
def test_create_stops_at_the_first_failure(recorder: Recorder, at: int) -> None:
    recorder.scripts["create"] = [0] * at + [2]
    handles = array("Q", [0] * 4)
    assert loops.cuda_create(recorder.at["create"], recorder.struct, 4096, handles) == (at, 2, "create")
    assert [bool(handle) for handle in handles] == [True] * at + [False] * (4 - at)


def test_release_goes_on_after_a_failure(recorder: Recorder) -> None:
    recorder.scripts["release"] = [0, 1, 999, 0]
    assert loops.cuda_release(recorder.at["release"], array("Q", [5, 6, 7, 8])) == (2, 1, "release")
    assert recorder.named("release") == [(5,), (6,), (7,), (8,)]


def test_map_grants_access_to_each_mapping(recorder: Recorder) -> None:
    assert recorder.map([2**47, 2**47 + 64], [2**63, 7], [64, 2**33]) == (2, 0, "")
    assert recorder.calls == [
        ("map", 2**47, 64, 0, 2**63, 0),
        ("access", 2**47, 64, recorder.struct, 1),
        ("map", 2**47 + 64, 2**33, 0, 7, 0),
        ("access", 2**47 + 64, 2**33, recorder.struct, 1),
    ]


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("failing", ["map", "access"])
def test_a_failed_map_is_undone_last_first(recorder: Recorder, failing: str, at: int) -> None:
    recorder.scripts[failing] = [0] * at + [2]
    addresses = [1000, 2000, 3000, 4000]
    op = {"map": "map", "access": "set_access"}[failing]
    assert recorder.map(addresses, [1, 2, 3, 4], [10, 20, 30, 40]) == (0, 2, op)
    mapped = addresses[: at + (failing == "access")]
    assert recorder.named("unmap") == [(address, address // 100) for address in reversed(mapped)]


@pytest.mark.parametrize("failing", ["map", "access"])
@pytest.mark.parametrize("nth", range(2))
def test_a_map_that_cannot_be_undone_says_so(recorder: Recorder, failing: str, nth: int) -> None:
    recorder.scripts[failing] = [0, 0, 2]
    recorder.scripts["unmap"] = [0] * nth + [1]
    op = {"map": "map", "access": "set_access"}[failing]
    left = 2 + (failing == "access") - nth
    assert recorder.map([1000, 2000, 3000], [1, 2, 3], [10, 20, 30]) == (left, 2, op)
    assert len(recorder.named("unmap")) == nth + 1, "what is left are the first ones"


def test_not_ready_is_tried_again(recorder: Recorder) -> None:
    recorder.scripts["access"] = [0, NOT_READY, NOT_READY, NOT_READY, 0]
    assert recorder.map([1000, 2000], [1, 2], [10, 10]) == (2, 0, "")
    assert len(recorder.named("access")) == 5


def test_not_ready_for_ever_is_an_error(recorder: Recorder) -> None:
    recorder.scripts["access"] = [NOT_READY] * 100
    assert recorder.map([1000], [1], [10], tries=7) == (0, NOT_READY, "set_access")
    assert len(recorder.named("access")) == 7
    assert recorder.named("unmap") == [(1000, 10)]


def test_unmap_stops_and_counts(recorder: Recorder) -> None:
    recorder.scripts["unmap"] = [0, 0, 1]
    columns = array("Q", [1, 2, 3, 4]), array("Q", [10] * 4)
    assert loops.cuda_unmap(recorder.at["unmap"], *columns) == (2, 1, "unmap")
    assert recorder.named("unmap") == [(1, 10), (2, 10), (3, 10)]


def test_empty_batches(recorder: Recorder) -> None:
    empty = array("Q")
    assert recorder.map([], [], []) == (0, 0, "")
    assert loops.cuda_unmap(recorder.at["unmap"], empty, empty) == (0, 0, "")
    assert loops.host_map(0, empty, empty, empty) == (0, 0, "")
    assert recorder.calls == []


def test_other_threads_run_during_a_batch(recorder: Recorder) -> None:
    entered, ran = threading.Event(), threading.Event()

    def slow(address: int, size: int) -> int:
        entered.set()
        return 0 if ran.wait(5) else 1

    callback = ctypes.CFUNCTYPE(NUMBER, WORD, SIZE)(slow)
    other = threading.Thread(target=lambda: entered.wait(5) and ran.set())
    other.start()
    assert loops.cuda_unmap(address_of(callback), array("Q", [1]), array("Q", [1])) == (1, 0, "")
    other.join()


GOOD = array("Q", [1, 2])
BAD_CALLS: dict[str, tuple[type[Exception], Callable[[int], object]]] = {
    "uneven columns": (ValueError, lambda f: loops.cuda_unmap(f, GOOD, array("Q", [1]))),
    "not whole words": (ValueError, lambda f: loops.cuda_release(f, b"1234567")),
    "misaligned": (ValueError, lambda f: loops.cuda_release(f, memoryview(bytearray(17))[1:])),
    "read-only target": (BufferError, lambda f: loops.cuda_create(f, f, 1, bytes(8))),
    "null function": (ValueError, lambda f: loops.cuda_release(0, GOOD)),
    "null struct": (ValueError, lambda f: loops.cuda_create(f, 0, 1, array("Q", [0]))),
    "no size": (ValueError, lambda f: loops.cuda_create(f, f, 0, array("Q", [0]))),
    "negative address": (OverflowError, lambda f: loops.cuda_release(-1, GOOD)),
    "no address": (TypeError, lambda f: loops.cuda_release("x", GOOD)),
    "a list": (TypeError, lambda f: loops.cuda_release(f, [1, 2])),
    "too few": (TypeError, lambda f: loops.cuda_release(f)),
    "offset out of range": (ValueError, lambda f: loops.host_create(0, array("Q", [2**63]), array("Q", [1]))),
    "size out of range": (ValueError, lambda f: loops.host_release(0, array("Q", [1]), array("Q", [2**64 - 1]))),
    "map out of range": (ValueError, lambda f: loops.host_map(0, GOOD, array("Q", [2**63] * 2), GOOD)),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_arguments_are_refused(recorder: Recorder, name: str) -> None:
    kind, call = BAD_CALLS[name]
    with pytest.raises((kind, TypeError) if kind is BufferError else kind):
        call(recorder.at["release"])
    assert recorder.calls == []


@pytest.fixture
def memory_file() -> Iterator[int]:
    file = os.memfd_create("test")
    yield file
    os.close(file)


def test_host_loops_allocate_map_and_punch(memory_file: int) -> None:
    offsets, sizes = array("Q", [0, 4 * PAGE]), array("Q", [PAGE, 2 * PAGE])
    assert loops.host_create(memory_file, offsets, sizes) == (2, 0, "")
    assert os.fstat(memory_file).st_blocks * 512 == 3 * PAGE
    with mmap.mmap(-1, 8 * PAGE) as area:
        anchor = ctypes.c_char.from_buffer(area)
        base = ctypes.addressof(anchor)
        addresses = array("Q", [base, base + 5 * PAGE])
        assert loops.host_map(memory_file, addresses, offsets, sizes) == (2, 0, "")
        area[0:4] = b"head"
        area[5 * PAGE : 5 * PAGE + 4] = b"tail"
        assert os.pread(memory_file, 4, 0) == b"head"
        assert os.pread(memory_file, 4, 4 * PAGE) == b"tail"
        assert loops.host_unmap(addresses, sizes) == (2, 0, "")
        del anchor
    assert loops.host_release(memory_file, offsets, sizes) == (2, 0, "")
    assert os.fstat(memory_file).st_blocks == 0


def test_host_failures_are_counted_and_undone(memory_file: int) -> None:
    offsets, sizes = array("Q", [PAGE, 2 * PAGE]), array("Q", [PAGE, 0])
    assert loops.host_create(memory_file, offsets, sizes) == (1, 22, "create")  # EINVAL: no size
    assert loops.host_release(memory_file, offsets[::-1], sizes[::-1]) == (1, 22, "release")
    assert os.fstat(memory_file).st_blocks == 0
    with mmap.mmap(-1, 2 * PAGE) as area:
        anchor = ctypes.c_char.from_buffer(area)
        base = ctypes.addressof(anchor)
        addresses = array("Q", [base, base + PAGE + 1])
        assert loops.host_map(memory_file, addresses, offsets, array("Q", [PAGE, PAGE])) == (0, 22, "map")
        maps = Path("/proc/self/maps").read_text().splitlines()
        protections = {line.split()[1] for line in maps if line.startswith(f"{base:x}-")}
        assert protections == {"---p"}
        assert loops.host_unmap(addresses, array("Q", [PAGE, PAGE])) == (1, 22, "unmap")
        del anchor
