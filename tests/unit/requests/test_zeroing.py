"""`zero_on_reuse`: no request sees a byte of another, not even past its own length (B11, invariant 11)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from inside import fence_of, page_bytes_of
from rig import SMALL, mapped, wait_until

from slicedkv import PagePool, SlicedKVCache
from slicedkv.requests.copier import Copier
from slicedkv.vmm.fake import FakeDriver
from slicedkv.vmm.faulty import FaultyDriver

PAGE = 64 << 10


@pytest.mark.parametrize("layout", ["sliced", "interleaved", "per_layer"])
@pytest.mark.parametrize("mapper", ["sync", "background"])
def test_reused_pages_are_zero(make_cache: Callable[..., SlicedKVCache], layout: str, mapper: str) -> None:
    cache = make_cache(zero_on_reuse=True, layout=layout, mapper=mapper, memory_limit=24 * PAGE, max_seq_len=1200)
    for round_ in range(6):
        reqids = [cache.alloc_reqid() for _ in range(3)]
        for length in (1, 200, 201):
            assert cache.step(dict.fromkeys(reqids[: 1 + round_ % 3], length))
            for reqid in reqids[: 1 + round_ % 3]:
                # In the background the mapper may map more after the step; the next step zeroes that.
                pages = None if mapper == "sync" else cache.layout.pages_for(length)
                assert not any(bool(plane.any()) for plane in page_bytes_of(cache, reqid, pages))
        for reqid in reqids[: 1 + round_ % 3]:
            for plane in page_bytes_of(cache, reqid):
                plane.fill_(255)
        for reqid in reqids:
            cache.free_reqid(reqid)


def test_what_a_request_wrote_is_not_zeroed_by_later_steps(make_cache: Callable[..., SlicedKVCache]) -> None:
    cache = make_cache(zero_on_reuse=True, mapper="sync")
    reqid = cache.alloc_reqid()
    for length in range(1, 400):
        assert cache.step({reqid: length})
        cache.k(1)[reqid, length - 1] = length
    assert torch.equal(cache.k(1)[reqid, :399, 0, 0], torch.arange(1, 400, dtype=torch.float32))


def test_without_it_nothing_is_zeroed(make_cache: Callable[..., SlicedKVCache]) -> None:
    cache = make_cache(mapper="sync")
    reqid = cache.alloc_reqid()
    cache.step({reqid: 5})
    cache.k(0)[reqid, :5] = 7
    cache.free_reqid(reqid)
    reqid = cache.alloc_reqid()
    cache.step({reqid: 5})
    assert bool((cache.k(0)[reqid, :5] == 7).all())


def test_pages_being_zeroed_are_not_unmapped() -> None:
    fake = FakeDriver(PAGE)
    driver = FaultyDriver(fake)
    pool = PagePool(driver, page_bytes=PAGE, memory_limit=100 * PAGE)
    shape = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 64, "max_batch_size": 2, "max_seq_len": 4096}
    with SlicedKVCache(**shape, dtype="float16", pool=pool, mapper="sync", zero_on_reuse=True) as cache:
        reqid = cache.alloc_reqid()
        fake.hold_fences = True
        assert cache.step({reqid: 100})
        (fence,) = fake.fences
        assert fence_of(cache, reqid) is fence
        fake.finish_fences()
        cache.check_integrity()


def test_zeroing_does_not_let_go_of_earlier_work_in_the_slot() -> None:
    """The slot's fence must stand for the last request's work too, whatever stream `step` zeroes on."""
    fake = FakeDriver(PAGE)
    pool = PagePool(FaultyDriver(fake), page_bytes=PAGE, memory_limit=100 * PAGE)
    shape = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 64, "max_batch_size": 1, "max_seq_len": 4096}
    with SlicedKVCache(**shape, dtype="float16", pool=pool, mapper="sync", zero_on_reuse=True) as cache:
        reqid = cache.alloc_reqid()
        assert cache.step({reqid: 100})
        fake.hold_fences = True
        cache.free_reqid(reqid)
        earlier = fence_of(cache, reqid)
        assert cache.alloc_reqid() == reqid
        fake.ordered.clear()
        fake.current_stream = "another"
        assert cache.step({reqid: 100})
        assert fake.ordered == [("another", earlier)]
        assert fence_of(cache, reqid) is not earlier
        fake.finish_fences()


def test_a_request_that_comes_while_its_slot_is_zeroed_for_the_last_one_sees_nothing_old() -> None:
    """The slot changes hands between the zeroing of a page mapped ahead and the note of it."""
    options = {"page_bytes": 4096, "max_seq_len": 4096, "lookahead_tokens": 0, "zero_on_reuse": True}
    with SlicedKVCache(**(SMALL | options | {"max_batch_size": 1})) as cache:
        reqid = cache.alloc_reqid()
        assert cache.step({reqid: 64})
        cache.k(0)[reqid, :64] = 42.0
        pages = mapped(cache, reqid)
        cache.prefetch(reqid, 96)
        wait_until(lambda: mapped(cache, reqid) > pages)
        zero, new = Copier.zero, []

        def hand_over() -> None:
            cache.free_reqid(reqid)
            new.append(cache.alloc_reqid())

        def zero_late(*arguments: Any) -> None:
            zero(*arguments)
            if not thread.ident:
                thread.start()
                thread.join(0.1)

        thread = threading.Thread(target=hand_over)
        with mock.patch.object(Copier, "zero", zero_late):
            assert cache.step({reqid: 64})
        thread.join(5)
        assert new == [reqid]
        assert cache.step({reqid: 64})
        assert not bool(cache.k(0)[reqid, :64].any())


def test_a_step_zeroes_for_its_own_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of others are zeroed on the stream of their own steps, before what is launched there."""
    fake = FakeDriver(PAGE)
    pool = PagePool(fake, page_bytes=PAGE, memory_limit=100 * PAGE)
    shape = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 64, "max_batch_size": 2, "max_seq_len": 4096}
    with SlicedKVCache(**shape, dtype="float16", pool=pool, mapper="sync", zero_on_reuse=True) as cache:
        zero, zeroed = Copier.zero, []

        def note(copier: Copier, slot: int, *span: int) -> None:
            zeroed.append((fake.current_stream, slot))
            zero(copier, slot, *span)

        monkeypatch.setattr(Copier, "zero", note)
        one, other = cache.alloc_reqid(10), cache.alloc_reqid(10)
        for stream, reqid in (("first", one), ("second", other), ("first", one)):
            fake.current_stream = stream
            assert cache.step({reqid: 10})
        assert zeroed == [("first", one), ("second", other)]
