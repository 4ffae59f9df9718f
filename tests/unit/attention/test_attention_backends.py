"""Every backend against attention written out in float64 loops, on real host memory."""

from __future__ import annotations

import math

import pytest
import torch

from slicedkv.attention import Batch, open_backend

LAYOUTS = ["sliced", "interleaved", "per_layer"]
BACKENDS = ["sdpa", "reference", "triton"]  # Triton's kernels run in its interpreter
SHAPES = [(2, 6), (1, 4), (3, 3)]
"""KV heads and query heads."""
# Three pairs have each layout and each shape once.
EACH_LAYOUT_WITH_EACH_SHAPE = [
    pytest.param(layout, *shape, marks=[] if nth == other else [pytest.mark.thorough])
    for nth, layout in enumerate(LAYOUTS)
    for other, shape in enumerate(SHAPES)
]


def oracle(q, k, v, *, scale=None, causal=True):
    """Attention of the last rows of a request over all of it, one query row and head at a time, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    group, past = q.shape[1] // k.shape[1], k.shape[0] - q.shape[0]
    out = torch.empty_like(q)
    for row in range(q.shape[0]):
        seen = past + row + 1 if causal else k.shape[0]
        for head in range(q.shape[1]):
            scores = k[:seen, head // group] @ q[row, head] * (scale or 1 / math.sqrt(q.shape[2]))
            weights = (scores - scores.max()).exp()
            out[row, head] = (weights / weights.sum()) @ v[:seen, head // group]
    return out


class Driven:
    """A cache, a backend and a plain copy of every request's K and V, driven together."""

    def __init__(self, cache, backend="sdpa", num_qo_heads=6, seed=0, **options):
        self.cache = cache
        self.backend = open_backend(backend, cache, num_qo_heads=num_qo_heads, **options)
        self.options = options
        self.random = torch.Generator().manual_seed(seed)
        self.rows = {}
        while cache.can_admit(1):
            cache.alloc_reqid()

    def tensor(self, rows, heads):
        values = torch.randn(rows, heads, self.cache.layout.head_dim, generator=self.random)
        return values.to(self.backend.dtype)

    def step(self, reqids, q_lens, layer=1):
        """Append `q_lens` new tokens; return the output and the oracle's, padded lanes zero."""
        seq_lens = [self.seq_len(r) + n if r >= 0 else 0 for r, n in zip(reqids, q_lens, strict=True)]
        assert self.cache.step({r: n for r, n in zip(reqids, seq_lens, strict=True) if r >= 0})
        batch = Batch(reqids, q_lens, seq_lens)
        heads = self.cache.layout.num_kv_heads
        k, v, q = (self.tensor(batch.total_q, n) for n in (heads, heads, self.backend.num_qo_heads))
        self.backend.plan(batch)
        self.backend.append(layer, k, v)
        out = self.backend.run(layer, q)
        expected = torch.zeros(q.shape, dtype=torch.float64)
        for lane in batch.lanes():
            old_k, old_v = self.rows.get(lane.reqid, (k[:0], v[:0]))
            new = slice(lane.begin, lane.end)
            self.rows[lane.reqid] = torch.cat([old_k, k[new]]), torch.cat([old_v, v[new]])
            expected[new] = oracle(q[new], *self.rows[lane.reqid], **self.options)
        return out, expected

    def seq_len(self, reqid):
        return len(self.rows[reqid][0]) if reqid in self.rows else 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("layout", "num_kv_heads", "num_qo_heads"), EACH_LAYOUT_WITH_EACH_SHAPE)
def test_prefill_chunks_and_decode_mixed(make_cache, backend, layout, num_kv_heads, num_qo_heads):
    driven = Driven(make_cache(layout=layout, num_kv_heads=num_kv_heads), backend, num_qo_heads)
    steps = [
        ([4, 0], [7, 1]),  # two first chunks, slots in any order and with holes
        ([0, 4, 2], [1, 5, 33]),  # decode, a later chunk and a whole prompt
        ([2, -1, 4, 5, 0], [1, 2, 3, 0, 1]),  # a padded lane, and a request without a new token
        ([0, 2, 4], [1, 1, 1]),  # decode only
        ([0, 2, -1], [1, 1, 1]),  # decode only, padded
    ]
    for reqids, q_lens in steps:
        out, expected = driven.step(reqids, q_lens)
        torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)
    assert driven.seq_len(2) == 36


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [True, False])
def test_scale_and_causality(make_cache, backend, causal):
    driven = Driven(make_cache(), backend, scale=0.3, causal=causal)
    for q_lens in ([9, 4], [5, 1]):
        out, expected = driven.step([1, 3], q_lens)
        torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance"),
    [
        *((name, torch.float16, 2e-3) for name in BACKENDS),
        *((name, torch.bfloat16, 2e-2) for name in ("sdpa", "reference")),  # the interpreter has no bfloat16 products
        *((name, torch.float64, 1e-12) for name in ("sdpa", "reference")),
    ],
)
def test_dtypes(make_cache, backend, dtype, tolerance):
    driven = Driven(make_cache(dtype=dtype), backend)
    for q_lens in ([20, 3], [11, 1], [1, 1]):
        out, expected = driven.step([1, 3], q_lens)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.parametrize("flavour", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_cache_reads_as_a_cast(make_cache, flavour, name):
    """Case A12: neither bytes nor the other flavour."""
    cache = make_cache(dtype=flavour)
    reqid = cache.alloc_reqid()
    cache.step({reqid: 12})
    k, v, q = (torch.randn(12, heads, 16) for heads in (2, 2, 4))
    if name == "triton":  # whose interpreter casts towards zero
        k, v = k.to(flavour).float(), v.to(flavour).float()
    backend = open_backend(name, cache, num_qo_heads=4)
    backend.plan(Batch([reqid], [12], [12]))
    backend.append(0, k, v)
    out = backend.run(0, q)
    torch.testing.assert_close(out.double(), oracle(q, k.to(flavour), v.to(flavour)), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_past_the_length_take_no_part(make_cache, backend, layout):
    """Case A7: recycled pages hold anything."""
    cache = make_cache(layout=layout)
    driven = Driven(cache, backend)
    cache.step([70] * 6)
    for fill, slots in ((float("nan"), slice(0, 3)), (float("inf"), slice(3, 6))):
        cache.k(1)[slots, :70] = fill
        cache.v(1)[slots, :70] = fill
    for q_lens in ([1, 2, 15, 16, 17, 33], [1, 1, 1, 1, 1, 1], [3, 1, 2, 1, 5, 1]):
        out, expected = driven.step([0, 1, 2, 3, 4, 5], q_lens)
        assert bool(out.isfinite().all())
        torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("q_lens", [[1, 1], [3, 1]])
def test_append_changes_its_rows_and_no_other(make_cache, backend, layout, q_lens):
    """Case A4: the writer follows the strides too."""
    cache = make_cache(layout=layout)
    driven = Driven(cache, backend)
    cache.step([40] * 6)
    sides = {"k": cache.k, "v": cache.v}
    for layer in range(3):
        for side in sides.values():
            side(layer)[:, :40] = 42.0
    new = {name: driven.tensor(sum(q_lens), 2) for name in sides}
    driven.backend.plan(Batch([5, 2, -1], [*q_lens, 0], [20, 31, 0]))
    driven.backend.append(1, new["k"], new["v"])
    for layer in range(3):
        for name, side in sides.items():
            expected = torch.full((6, 40, 2, 16), 42.0)
            if layer == 1:
                expected[5, 20 - q_lens[0] : 20] = new[name][: q_lens[0]]
                expected[2, 31 - q_lens[1] : 31] = new[name][q_lens[0] :]
            assert torch.equal(side(layer)[:, :40], expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_lanes_touch_nothing(make_cache, backend):
    """Case A8."""
    cache = make_cache()
    driven = Driven(cache, backend)
    cache.step([8] * 6)
    for side in (cache.k(1), cache.v(1)):
        side[:, :8] = 5.0
    for _ in range(3):
        out, expected = driven.step([-1, 2, -1], [1, 1, 2])
        torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)
        assert not out[[0, 2, 3]].any()
    for side in (cache.k(1), cache.v(1)):
        assert bool((side[[0, 1, 3, 4, 5], :8] == 5.0).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_out_is_filled_whole(make_cache, backend):
    driven = Driven(make_cache(), backend)
    driven.step([0], [5])
    q = driven.tensor(3, 6)
    driven.cache.step({0: 6})
    driven.backend.plan(Batch([-1, 0], [2, 1], [0, 6]))
    driven.backend.append(1, driven.tensor(3, 2), driven.tensor(3, 2))
    out = torch.full((3, 6, 16), float("nan"))
    assert driven.backend.run(1, q, out) is out
    assert not out[:2].any()
    assert bool(out.isfinite().all())


def test_strided_arguments(make_cache):
    """Models hand over transposed views."""
    cache = make_cache()
    driven = Driven(cache)
    cache.step({0: 6})
    q, k, v = (torch.randn(heads, 6, 16).transpose(0, 1) for heads in (6, 2, 2))
    for name in BACKENDS:
        backend = open_backend(name, cache, num_qo_heads=6)
        backend.plan(Batch([0], [6], [6]))
        backend.append(0, k, v)
        torch.testing.assert_close(backend.run(0, q).double(), oracle(q, k, v), atol=2e-6, rtol=1e-5)
        backend.plan(Batch([0], [1], [6]))
        torch.testing.assert_close(backend.run(0, q[5:]).double(), oracle(q[5:], k, v), atol=2e-6, rtol=1e-5)
    assert driven.rows == {}


@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_mapped_ahead_are_not_tokens(make_cache, backend):
    """Case A11: one token before, at and after the end of a page, lookahead on."""
    cache = make_cache(lookahead_tokens=200)
    page = cache.layout.tokens_per_page
    driven = Driven(cache, backend)
    for length in (page - 1, page, page + 1, 2 * page):
        out, expected = driven.step([3], [length - driven.seq_len(3)])
        torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)
    assert driven.seq_len(3) == 2 * page


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slots_of_two_to_the_32_elements(make_cache, backend, layout):
    """Cases A1 and A2: offsets do not fit 32 bits."""
    cache = make_cache(
        layout=layout,
        num_layers=32,
        num_kv_heads=8,
        head_dim=128,
        max_batch_size=2,
        max_seq_len=131072,
        dtype=torch.float16,
        page_bytes=None,
        memory_limit="512MiB",
    )
    backend = open_backend(backend, cache, num_qo_heads=8)
    reqids = [cache.alloc_reqid(), cache.alloc_reqid()]
    cache.step(dict.fromkeys(reqids, 3))
    backend.plan(Batch(reqids, [3, 3], [3, 3]))
    v = torch.ones(6, 8, 128, dtype=torch.float16)
    v[3:] = 2
    backend.append(31, torch.ones_like(v), v)
    assert torch.equal(backend.run(31, torch.ones_like(v)), v)
