"""Swapping on the host's real memory: bytes come back, in another slot, whatever the layout and what happens between.

Cases D3 and D5 for swapping, E3's count of what is left, and every refusal.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
from inside import page_bytes_of
from rig import SMALL
from stamped_rows import KIB, LAYOUTS, MIB, begin, holds

from slicedkv import CapacityError, ConfigError, OutOfSlotsError, SlicedKVCache, StateError

MakeCache = Callable[..., SlicedKVCache]


@pytest.mark.parametrize("mapper", ["sync", "background"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("page_bytes", "seq_len"), [(64 * KIB, 1), (64 * KIB, 399), (2 * MIB, 170), (2 * MIB, 400)])
def test_rows_come_back_in_another_slot(
    make_cache: MakeCache, mapper: str, layout: str, page_bytes: int, seq_len: int
) -> None:
    cache = make_cache(mapper=mapper, layout=layout, page_bytes=page_bytes, head_dim=96, guard_tokens=2)
    moved, stays = begin(cache, seq_len, 1), begin(cache, 57, 2)
    handle = cache.swap_out(moved)
    assert (handle.seq_len, cache.stats().active_slots) == (seq_len, 1)
    assert handle.num_bytes == -(-seq_len * cache.layout.token_bytes // 4096) * 4096
    others = [begin(cache, 300, 3), begin(cache, 5, 4)]
    cache.check_integrity()
    back = cache.swap_in(handle)
    assert back not in {None, stays, *others}
    assert cache.stats().used_bytes == (seq_len + 57 + 300 + 5) * cache.layout.token_bytes
    for reqid, length, seed in ((back, seq_len, 1), (stays, 57, 2), (others[0], 300, 3), (others[1], 5, 4)):
        assert holds(cache, reqid, length, seed)
    if seq_len < 400:
        assert cache.step({back: seq_len + 1})
    cache.free_reqid(back)
    assert handle.released


def test_one_copy_a_plane_of_exactly_the_rows(make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(mapper="sync", layout="per_layer")
    reqid = begin(cache, 123, 1)
    copied: list[int] = []
    copy = cache.pool.driver.copy_batch
    monkeypatch.setattr(
        cache.pool.driver, "copy_batch", lambda copies: copied.extend(one.num_bytes for one in copies) or copy(copies)
    )
    cache.swap_in(cache.swap_out(reqid))
    assert copied == [123 * cache.layout.row_bytes] * 12


def test_an_empty_request(make_cache: MakeCache) -> None:
    cache = make_cache(mapper="sync")
    handle = cache.swap_out(cache.alloc_reqid())
    assert (handle.seq_len, handle.num_bytes, cache.stats().mapped_bytes) == (0, 0, 0)
    reqid = cache.swap_in(handle)
    assert cache.stats().mapped_bytes == 0
    assert cache.step({reqid: 3})


def test_the_longest_length_counts(make_cache: MakeCache) -> None:
    cache = make_cache(mapper="sync")
    reqid = begin(cache, 50, 1)
    assert cache.step({reqid: 20})
    assert cache.swap_out(reqid).seq_len == 50


def test_memory_short_is_none_and_changes_nothing(make_cache: MakeCache) -> None:
    cache = make_cache(mapper="sync", memory_limit=16 * 64 * KIB, head_dim=64, extent_pages=1)
    length = cache.layout.tokens_backed(5)
    moved = begin(cache, length, 1)
    handle = cache.swap_out(moved)
    other = begin(cache, cache.layout.tokens_backed(4), 2)
    before = cache.stats()
    assert cache.swap_in(handle) is None
    after = cache.stats()
    assert (after.mapped_bytes, after.created_bytes, after.active_slots, after.used_bytes) == (
        before.mapped_bytes,
        before.created_bytes,
        before.active_slots,
        before.used_bytes,
    )
    cache.check_integrity()
    assert holds(cache, other, cache.layout.tokens_backed(4), 2)
    cache.free_reqid(other)
    assert holds(cache, cache.swap_in(handle), length, 1)


def test_slots_short_is_an_error_as_for_alloc(make_cache: MakeCache) -> None:
    cache = make_cache(max_batch_size=1, mapper="sync")
    handle = cache.swap_out(begin(cache, 30, 1))
    reqid = cache.alloc_reqid()
    with pytest.raises(OutOfSlotsError):
        cache.swap_in(handle)
    cache.free_reqid(reqid)
    assert holds(cache, cache.swap_in(handle), 30, 1)


def test_host_memory_short_is_an_error_before_anything(make_cache: MakeCache) -> None:
    cache = make_cache(mapper="sync", swap_limit=256 * KIB)
    reqid, small = begin(cache, 400, 1), begin(cache, 5, 2)
    before = cache.stats()
    with pytest.raises(CapacityError, match="release handles or raise swap_limit"):
        cache.swap_out(reqid)
    assert cache.stats() == before
    assert holds(cache, reqid, 400, 1)
    handle = cache.swap_out(small)
    assert 0 < cache.stats().swapped_bytes <= cache.stats().host_bytes <= 256 * KIB
    handle.release()
    handle.release()
    assert cache.stats().swapped_bytes == 0
    cache.trim()
    assert cache.stats().host_bytes == 0


def test_what_a_handle_refuses(make_cache: MakeCache) -> None:
    cache, other = make_cache(mapper="sync"), make_cache(mapper="sync")
    reqid = begin(cache, 10, 1)
    with pytest.raises(StateError, match="reqid 3 is not active"):
        cache.swap_out(3)
    with pytest.raises(ConfigError, match="reqid is 6"):
        cache.swap_out(6)
    handle = cache.swap_out(reqid)
    with pytest.raises(StateError, match="freed already"):
        cache.free_reqid(reqid)
    for wrong in (None, 0, "handle"):
        with pytest.raises(ConfigError, match="what swap_out of the same cache returned"):
            cache.swap_in(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="same cache"):
        other.swap_in(handle)
    cache.swap_in(handle)
    with pytest.raises(StateError, match="swapped in or released already"):
        cache.swap_in(handle)
    assert "released" in repr(handle)


def test_a_dropped_handle_gives_its_memory_back(make_cache: MakeCache) -> None:
    cache = make_cache(mapper="sync")
    handle = cache.swap_out(begin(cache, 100, 1))
    assert cache.stats().swapped_bytes == handle.num_bytes
    del handle
    gc.collect()
    assert cache.stats().swapped_bytes == 0
    cache.check_integrity()


def test_closing_with_handles_alive() -> None:
    with SlicedKVCache(**SMALL, mapper="sync") as cache:
        reqid = cache.alloc_reqid()
        assert cache.step({reqid: 100})
        handle, dropped = cache.swap_out(reqid), cache.swap_out(cache.alloc_reqid())
    assert "seq_len=100" in repr(handle)
    handle.release()
    del dropped
    with pytest.raises(StateError, match="closed"):
        cache.swap_in(handle)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mapper", ["sync", "background"])
def test_pages_that_change_requests_are_zeroed(make_cache: MakeCache, layout: str, mapper: str) -> None:
    cache = make_cache(zero_on_reuse=True, layout=layout, mapper=mapper, memory_limit=40 * 64 * KIB, head_dim=64)
    for round_ in range(3):
        length = 150 + 10 * round_
        handle = cache.swap_out(begin(cache, length, round_))
        full = begin(cache, 200, 7)
        cache.free_reqid(full)  # its pages hold 0x5a behind row 200, and its rows before
        reqid = cache.swap_in(handle)
        assert holds(cache, reqid, length, round_)
        rows, pages = length * cache.layout.row_bytes, cache.layout.pages_for(length)
        for plane in page_bytes_of(cache, reqid, pages):
            assert not plane[rows:].any(), "what others left is seen"
        assert cache.step({reqid: length + 20})
        assert holds(cache, reqid, length, round_), "a later step zeroed what was swapped in"
        for layer in range(cache.layout.num_layers):
            assert not cache.k(layer)[reqid, length : length + 20].any()
        cache.free_reqid(reqid)


def test_others_may_come_and_go_from_other_threads(make_cache: MakeCache) -> None:
    cache = make_cache(max_batch_size=8, memory_limit=400 * 64 * KIB, swap_limit=8 * MIB)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(25):
                length = 1 + (seed * 97 + turn * 31) % 390
                reqid = begin(cache, length, seed)
                handle = cache.swap_out(reqid)
                if turn % 5 == 4:
                    handle.release()
                    continue
                back = cache.swap_in(handle)
                assert back is not None
                assert holds(cache, back, length, seed)
                cache.free_reqid(back)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    stats = cache.stats()
    assert (stats.active_slots, stats.swapped_bytes, stats.swaps_out, stats.swaps_in) == (0, 0, 100, 80)
    assert stats.copy_bytes_per_s > 0
    cache.trim()
    assert (cache.stats().created_bytes, cache.stats().host_bytes) == (0, 0)


@pytest.mark.parametrize("limit", [-1, 0, 1.5, "much", True])
def test_a_bad_limit_is_named(make_cache: MakeCache, limit: object) -> None:
    with pytest.raises(ConfigError, match="swap_limit is"):
        make_cache(swap_limit=limit)
