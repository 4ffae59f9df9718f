"""What every backend takes and refuses: strides, dtypes, lengths that do not count, lanes without tokens."""

from __future__ import annotations

import sys

import pytest
import torch

from slicedkv.attention import Batch, available_backends, open_backend
from slicedkv.errors import ConfigError

BACKENDS = ["sdpa", "reference", "triton"]


@pytest.fixture
def opened(make_cache):
    """A backend over a cache with reqids 0 and 1 of eight tokens each."""

    def open_(name, **options):
        cache = make_cache(**options)
        for _ in range(2):
            cache.alloc_reqid()
        assert cache.step({0: 8, 1: 8})
        return open_backend(name, cache, num_qo_heads=4)

    return open_


def rows(count, heads, dtype=torch.float32):
    return torch.randn(count, heads, 16, generator=torch.Generator().manual_seed(count + heads)).to(dtype)


def strided(tensor):
    """The same numbers, the last dimension not contiguous."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("name", BACKENDS)
def test_any_strides(opened, name):
    backend, k, v, q = opened(name), rows(8, 2), rows(8, 2) * 2, rows(8, 4)
    backend.plan(Batch([0], [8], [8]))
    backend.append(1, k, v)
    expected = backend.run(1, q)
    backend.append(1, strided(k), strided(v))
    assert torch.equal(backend.cache.k(1)[0, :8], k)
    assert torch.equal(backend.run(1, strided(q)), expected)
    with pytest.raises(ConfigError, match=r"out has strides \(64, 1, 4\); its last dimension must be contiguous"):
        backend.run(1, q, strided(torch.zeros_like(q)))


@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.float8_e5m2])
def test_any_float_goes_to_a_float8_cache(opened, name, dtype):
    """In numbers that all of these types hold."""
    backend, k = opened(name, dtype=torch.float8_e4m3fn), torch.randint(-3, 4, (8, 2, 16)).float()
    backend.plan(Batch([0], [8], [8]))
    backend.append(0, k.to(dtype), (2 * k).to(dtype))
    assert torch.equal(backend.cache.k(0)[0, :8].float(), k)
    assert torch.equal(backend.cache.v(0)[0, :8].float(), 2 * k)
    with pytest.raises(ConfigError, match=r"q is torch\.float64"):
        backend.run(0, rows(8, 4, torch.float64))


@pytest.mark.parametrize("name", BACKENDS)
def test_the_length_of_a_padded_lane_does_not_count(opened, name):
    backend, k, q = opened(name), rows(2, 2), rows(2, 4)
    out = []
    for length in (0, 2**40):
        backend.plan(Batch([0, -1], [1, 1], [8, length]))
        backend.append(0, k, k)
        out.append(backend.run(0, q))
    assert torch.equal(out[0], out[1])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("reqids", "seq_lens", "named"), [([0, 7], [4, 4], "reqid is 7"), ([0, 1], [4, 10**9], "seq_len of reqid 1 is 10")]
)
def test_lanes_without_tokens_must_fit_too(opened, name, reqids, seq_lens, named):
    backend = opened(name)
    with pytest.raises(ConfigError, match=named):
        backend.plan(Batch(reqids, [1, 0], seq_lens))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_layer_that_is_not_there_is_refused_before_anything_is_written(opened, name):
    backend, out = opened(name), torch.full((2, 4, 16), 7.0)
    backend.plan(Batch([0, -1], [1, 1], [8, 0]))
    with pytest.raises(ConfigError, match="layer is 99"):
        backend.run(99, rows(2, 4), out)
    assert bool((out == 7).all())


def test_a_package_that_is_broken_is_one_that_is_missing(monkeypatch, tmp_path):
    """Such as one that finds, while it is imported, that its parts are of different versions."""
    (tmp_path / "flashinfer.py").write_text("raise RuntimeError('its parts are of different versions')")
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("flashinfer", "slicedkv.attention.flashinfer"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    found = available_backends(torch.device("cpu"), torch.float32, 16)
    assert "cannot be imported: RuntimeError: its parts are of different versions" in str(found["flashinfer"])
    assert found["reference"] is None
