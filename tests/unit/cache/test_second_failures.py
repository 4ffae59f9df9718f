"""Failures while a failure is undone, interrupts inside a batch, and requests that end in between, on real memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from rig import QUIET, SMALL, Rig, assert_stamped, mapped, stamp, wait_until

from slicedkv import DriverError, PagePool, SlicedKVCache, StateError, opening
from slicedkv.errors import LostSlotsError
from slicedkv.requests.copier import Copier
from slicedkv.vmm import host
from slicedkv.vmm.faulty import FaultyDriver
from slicedkv.vmm.host import HostDriver

Open = Callable[..., tuple[SlicedKVCache, FaultyDriver, HostDriver]]
HOST_PAGE = 65536


@pytest.fixture
def open_host() -> Iterator[Open]:
    """Open small caches on host memory whose driver can be made to fail; at the end all memory must be back."""
    opened: list[tuple[SlicedKVCache, FaultyDriver, HostDriver]] = []

    def make(**options: Any) -> tuple[SlicedKVCache, FaultyDriver, HostDriver]:
        driver = HostDriver(HOST_PAGE)
        faulty = FaultyDriver(driver)
        pool = PagePool(faulty, page_bytes=HOST_PAGE, memory_limit=64 << 20, extent_pages=1)
        shape = {key: value for key, value in SMALL.items() if key not in ("page_bytes", "memory_limit")}
        shape |= {"max_batch_size": 4, "max_seq_len": 4000, "swap_limit": "64MiB"} | QUIET
        opened.append((SlicedKVCache(**(shape | options), pool=pool), faulty, driver))
        return opened[-1]

    yield make
    for cache, faulty, driver in opened:
        faulty.heal()
        if not cache.closed:
            cache.check_integrity()
            cache.close()
        cache.pool.trim()
        assert driver._ledger.created_bytes == 0
        driver.close()


def shared(cache: SlicedKVCache, tokens: int) -> int:
    """A request whose rows are stamped."""
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: tokens})
    stamp(cache, reqid, 0, tokens, 1)
    return reqid


def test_nothing_is_copied_from_a_lost_slot(open_host: Open) -> None:
    cache, faulty, _ = open_host()
    page = cache.layout.tokens_per_page
    source, lost = shared(cache, 2 * page), cache.alloc_reqid()
    faulty.fail("map", at=cache.shareable_pages(source, 2 * page) // 2 + 1)  # K is shared, V is not
    faulty.fail("unmap")
    with pytest.raises(LostSlotsError):
        cache.share_prefix(source, lost, 2 * page)
    faulty.heal()
    assert cache.step({source: page})
    assert cache.step({source: page + 1})
    assert_stamped(cache, source, page, 1)


def test_a_share_that_can_neither_be_filled_nor_taken_back_is_known(open_host: Open) -> None:
    cache, faulty, _ = open_host()
    page = cache.layout.tokens_per_page
    source, target = shared(cache, 2 * page + 5), cache.alloc_reqid()
    faulty.fail("unmap")
    with (
        mock.patch.object(Copier, "copy", raising(RuntimeError("no stream"))),
        pytest.raises(RuntimeError, match="no stream"),
    ):
        cache.share_prefix(source, target, 2 * page + 5)
    faulty.heal()
    assert cache.step({target: 2 * page + 5})
    stamp(cache, target, 0, 2 * page + 5, 2)
    assert_stamped(cache, source, 2 * page + 5, 1)


def test_rows_that_could_not_be_copied_are_lost_aloud(open_host: Open) -> None:
    cache, _, _ = open_host()
    page = cache.layout.tokens_per_page
    source, target = shared(cache, 2 * page), cache.alloc_reqid()
    assert cache.share_prefix(source, target, 2 * page)
    assert cache.step({target: page // 2})
    told = rf"reqids \[{target}\] have pages of their own, but not what they held"
    with (
        mock.patch.object(Copier, "copy", raising(RuntimeError("no stream"))),
        pytest.raises(LostSlotsError, match=told),
    ):
        cache.step({target: page // 2 + 1})
    with pytest.raises(StateError, match="is not active"):
        cache.step({target: page // 2 + 1})
    assert_stamped(cache, source, 2 * page, 1)


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*_: Any) -> None:
        raise error

    return call


@pytest.mark.parametrize("tokens", [4000, 4096])
def test_a_resume_that_failed_twice_is_done_in_the_end(open_host: Open, tokens: int) -> None:
    cache, faulty, _ = open_host(max_seq_len=tokens)
    one = shared(cache, tokens)
    other = shared(cache, 40)
    cache.pause(offload=True)
    faulty.fail("copy")
    faulty.fail("unmap")
    with pytest.raises((DriverError, StateError)):
        cache.resume()
    faulty.heal()
    cache.resume()
    for reqid, length in ((one, tokens), (other, 40)):
        assert mapped(cache, reqid) == cache.layout.pages_for(length)
        assert_stamped(cache, reqid, length, 1)
    assert cache.step({cache.alloc_reqid(): tokens})


@pytest.mark.parametrize("again", [False, True])
def test_a_request_that_ends_while_a_step_grows_leaves_no_length(again: bool) -> None:
    with Rig() as rig:
        cache = rig.open(**QUIET)
        one, other = cache.alloc_reqid(), cache.alloc_reqid()
        assert cache.step({one: 10, other: 10})
        ended: list[int] = []

        def free() -> None:
            cache.free_reqid(other)
            ended.append(cache.alloc_reqid() if again else other)

        thread = threading.Thread(target=free)

        def end(op: str, _: tuple[Any, ...]) -> None:
            if op == "map" and not thread.ident:
                thread.start()
                wait_until(lambda: rig.pool.gate._foreground_waiting)  # to map for the next one

        rig.driver.on_call = end
        assert cache.step({one: 100, other: 11})
        rig.driver.on_call = None
        thread.join(5)
        cache.check_integrity()
        newcomer = ended[0] if again else cache.alloc_reqid()
        assert cache.share_prefix(one, newcomer, 20), "it has had no step"
        cache.close()


@pytest.mark.parametrize("verb", ["_map", "_unmap"])
def test_an_interrupt_on_the_way_back_from_a_batch_changes_nothing(open_host: Open, verb: str) -> None:
    cache, _, driver = open_host()
    reqid = shared(cache, 1000)
    if verb == "_unmap":
        cache.free_reqid(reqid)
    real, hits = getattr(driver, verb), []

    def interrupted(*columns: Any) -> Any:
        outcome = real(*columns)
        if not hits:
            hits.append(1)
            raise KeyboardInterrupt
        return outcome

    setattr(driver, verb, interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.trim() if verb == "_unmap" else cache.step({reqid: 3000})
    setattr(driver, verb, real)
    cache.check_integrity()
    assert driver._ledger.mapped_count * HOST_PAGE == cache.stats().mapped_bytes
    if verb == "_unmap":
        assert cache.alloc_reqid() == reqid
    assert cache.step({reqid: 3000})
    stamp(cache, reqid, 1000, 3000, 1)
    assert_stamped(cache, reqid, 3000, 1)


def test_a_pool_that_just_ended_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    first = SlicedKVCache(**SMALL)
    real = opening._min_share_pages

    def late(*arguments: Any) -> int:
        first.close()
        return real(*arguments)

    monkeypatch.setattr(opening, "_min_share_pages", late)
    shape = {key: value for key, value in SMALL.items() if key not in ("page_bytes", "memory_limit")}
    with pytest.raises(StateError, match="the pool ended with its last cache"):
        SlicedKVCache(**shape, pool=first.pool)


def test_a_forked_child_that_drops_a_cache_keeps_its_own_memory(open_host: Open) -> None:
    cache, _, _ = open_host()
    handle = cache.swap_out(shared(cache, 100))
    num_bytes, chunk = cache.stats().host_bytes, handle._host._chunks[0].address
    child = os.fork()
    if child == 0:
        # The kernel gives memory where it is asked for, should nothing be there: where the chunk would be missing.
        mine = host._mmap(chunk, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANON, -1, 0)
        ctypes.memmove(mine or 0, b"mine", 4)
        handle._host._chunks[0].close()
        os._exit(ctypes.string_at(mine or 0, 4) != b"mine")
    assert os.waitpid(child, 0)[1] == 0
    back = cache.swap_in(handle)
    assert back is not None
    assert_stamped(cache, back, 100, 1)
