"""The Triton kernels on the cache's own memory: far slots and tokens, nothing behind a length. Cases A1-A3, B16."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from kernel_reference import attend_all, ends, error, index

from slicedkv import SlicedKVCache
from slicedkv.triton_kernels import append_kv, decode_attention, prefill_attention

pytestmark = pytest.mark.gpu
BFLOAT16, GIB = torch.bfloat16, 1 << 30
MakeCache = Callable[..., SlicedKVCache]


@pytest.fixture
def make_cache(make_cache: MakeCache) -> MakeCache:
    """Open caches of few long slots, in which nothing is mapped ahead."""
    shape = {"num_layers": 32, "max_batch_size": 3, "max_seq_len": 131072, "memory_limit": 24 * GIB}
    return partial(make_cache, **shape, mapper="sync", lookahead_tokens=0)


def batch_of(reqids: list[int], q_lens: list[int], seq_lens: list[int]) -> list[torch.Tensor]:
    """Lanes for append and prefill."""
    return [index(values, "cuda") for values in (reqids, ends(q_lens), seq_lens)]


def fill_layer(cache: SlicedKVCache, layer: int, lens: dict[int, int], value: float | None = None) -> None:
    """Put random values, or one value in V, in one layer's rows in use."""
    for reqid, length in lens.items():
        cache.k(layer)[reqid, :length] = torch.randn(length, 8, 128, device="cuda").bfloat16()
        noise = torch.randn(length, 8, 128, device="cuda")
        cache.v(layer)[reqid, :length] = (noise if value is None else torch.full_like(noise, value)).bfloat16()


def test_slots_of_two_to_the_32_elements(make_cache: MakeCache) -> None:
    """A1: V of slot 0 is 1, of slot 1 is 2: decode of slot 1 gives 2."""
    cache = make_cache()
    assert cache.k(0).stride(0) == 2**32
    reqids = [cache.alloc_reqid() for _ in range(2)]
    assert cache.step(dict.fromkeys(reqids, 40))
    for reqid in reqids:
        fill_layer(cache, 31, {reqid: 40}, value=1.0 + reqid)
    q = torch.randn(2, 32, 128, device="cuda").bfloat16()
    lanes = index(reqids, "cuda"), index([40, 33], "cuda")
    expected = torch.tensor(reqids, device="cuda")[:, None, None] + 1.0
    for out in (
        decode_attention(q, cache.k(31), cache.v(31), *lanes),
        prefill_attention(q, cache.k(31), cache.v(31), lanes[0], index([0, 1, 2], "cuda"), lanes[1]),
    ):
        torch.testing.assert_close(out.float(), expected.expand(out.shape), atol=0.02, rtol=0)


@pytest.mark.parametrize("layout", ["sliced", "interleaved", "per_layer"])
def test_tokens_past_two_to_the_31_elements(make_cache: MakeCache, layout: str) -> None:
    """A2, A3: token 65,536 of 32 layers lies 2**31 elements in, append and attention find it, in every layout."""
    cache = make_cache(layout=layout, max_seq_len=66048)
    length, q_len = 66000, 500
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: length})
    fill_layer(cache, 31, {reqid: length})
    early = cache.k(31)[reqid, :100].clone()
    k_new, v_new = (torch.randn(q_len, 8, 128, device="cuda").bfloat16() for _ in range(2))
    q = torch.randn(q_len, 8, 128, device="cuda").bfloat16()
    lanes = batch_of([reqid], [q_len], [length])
    append_kv(k_new, v_new, cache.k(31), cache.v(31), *lanes)
    assert torch.equal(cache.k(31)[reqid, length - q_len : length], k_new)
    assert torch.equal(cache.v(31)[reqid, length - q_len : length], v_new)
    assert torch.equal(cache.k(31)[reqid, :100], early)
    for window in (None, 300):
        out = prefill_attention(q, cache.k(31), cache.v(31), *lanes, window=window)
        single = decode_attention(q[-1:], cache.k(31), cache.v(31), lanes[0], lanes[2], window=window)
        last = attend_all(q[-4:], cache.k(31), cache.v(31), [reqid], [4], [length], window=window)[0]
        assert error(out[-4:], last) < 1e-2
        assert error(single, last[-1:]) < 1e-2


@pytest.mark.parametrize("layout", ["sliced", "interleaved", "per_layer"])
def test_nothing_is_read_past_the_last_mapped_page(make_cache: MakeCache, layout: str) -> None:
    """Lengths that end with a page, the page before it and one row after it; a fault would end the process."""
    cache = make_cache(layout=layout, max_seq_len=4096)
    tokens = {"sliced": 32, "interleaved": 16, "per_layer": 1024}[layout]
    reqids = [cache.alloc_reqid() for _ in range(3)]
    for lens in ([tokens, 3 * tokens, 2 * tokens], [tokens + 1, 3 * tokens + 5, 4 * tokens]):
        assert cache.step(dict(zip(reqids, lens, strict=True)))
        for layer in (0, 31):
            fill_layer(cache, layer, dict(zip(reqids, lens, strict=True)))
            new, q = (torch.randn(27, heads, 128, device="cuda").bfloat16() for heads in (8, 32))
            lanes = batch_of(reqids, [9] * 3, lens)
            k, v = cache.k(layer), cache.v(layer)
            append_kv(new, new, k, v, *lanes)
            expected, _ = attend_all(q, k, v, reqids, [9] * 3, lens)
            assert error(prefill_attention(q, k, v, *lanes), expected) < 1e-2
            for num_splits in (1, 2, 5):
                out = decode_attention(q, k, v, lanes[0], lanes[2], q_len=9, num_splits=num_splits)
                assert error(out, expected) < 1e-2
