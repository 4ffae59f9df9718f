"""`Batch`, the choice of a backend, and what both refuse before anything is written."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slicedkv import attention
from slicedkv.attention import Batch, available_backends, choose_backend, open_backend
from slicedkv.attention.batch import Lane
from slicedkv.attention.triton import TritonBackend
from slicedkv.errors import BackendUnavailableError, ConfigError, StateError


def test_batch_describes_packed_rows():
    batch = Batch([4, -1, 0, 2], [3, 2, 0, 1], [5, 0, 7, 9])
    assert batch.total_q == 6
    assert batch.cu_q_lens == (0, 3, 5, 5, 6)
    assert batch.positions() == [2, 3, 4, 0, 0, 8]
    assert batch.lanes() == [Lane(4, 0, 3, 5), Lane(2, 5, 6, 9)]
    assert (batch.lanes()[0].q_len, batch.lanes()[0].past_len) == (3, 2)
    assert Batch([], [], []).total_q == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (([0, 1], [1], [1, 1]), "2, 1 and 2"),
        (([0], [2], [1]), "q_len is 2"),
        (([0], [-1], [1]), "q_len is -1"),
        (([0], [1], [-3]), "seq_len is -3"),
        (([-2], [1], [1]), "reqid is -2"),
        (([3, 3], [1, 1], [1, 1]), "reqid 3"),
        (([0.5], [1], [1]), "reqid is 0.5"),
        (([True], [1], [1]), "reqid is True"),
    ],
)
def test_batch_refuses(arguments, named):
    with pytest.raises(ConfigError, match=named):
        Batch(*arguments)


def test_padded_lanes_may_repeat():
    assert Batch([-1, -1], [1, 1], [0, 0]).lanes() == []


def test_plan_refuses_what_does_not_fit_and_keeps_the_former(make_cache):
    backend = open_backend("sdpa", make_cache(), num_qo_heads=2)
    with pytest.raises(StateError, match="plan"):
        backend.append(0, torch.zeros(1, 2, 16), torch.zeros(1, 2, 16))
    backend.cache.step({backend.cache.alloc_reqid(): 2})
    backend.plan(Batch([0], [2], [2]))
    with pytest.raises(ConfigError, match="reqid is 6"):
        backend.plan(Batch([6], [1], [1]))
    with pytest.raises(ConfigError, match="seq_len of reqid 0 is 401"):
        backend.plan(Batch([0], [1], [401]))
    backend.append(0, torch.zeros(2, 2, 16), torch.zeros(2, 2, 16))


@pytest.mark.parametrize("name", ["sdpa", "reference"])
def test_wrong_tensors_are_named_and_nothing_is_written(make_cache, name):
    cache = make_cache()
    cache.step({cache.alloc_reqid(): 4})
    cache.k(1)[0, :4] = 7
    cache.v(1)[0, :4] = 7
    backend = open_backend(name, cache, num_qo_heads=4)
    backend.plan(Batch([0], [2], [4]))
    good, q = torch.zeros(2, 2, 16), torch.zeros(2, 4, 16)
    for k, v, named in [
        (good[:1], good, "k has shape"),
        (good, torch.zeros(2, 4, 16), "v has shape"),
        (good, good.half(), "v is torch.float16"),
        (good.to("meta"), good, "k is on meta"),
    ]:
        with pytest.raises(ConfigError, match=named):
            backend.append(1, k, v)
    for bad, out, named in [
        (q[:, :2], None, "q has shape"),
        (q.double(), None, "q is torch.float64"),
        (q, q[:1], "out has shape"),
        (q, q.to("meta"), "out is on meta"),
    ]:
        with pytest.raises(ConfigError, match=named):
            backend.run(1, bad, out)
    with pytest.raises(ConfigError, match="layer is 3"):
        backend.append(3, good, good)
    assert bool((cache.k(1)[0, :4] == 7).all())
    assert bool((cache.v(1)[0, :4] == 7).all())


def test_constructor_refuses(make_cache):
    with pytest.raises(ConfigError, match="num_qo_heads is 3"):
        open_backend("sdpa", make_cache(), num_qo_heads=3)
    with pytest.raises(ConfigError, match="num_qo_heads is 0"):
        open_backend("sdpa", make_cache(), num_qo_heads=0)
    with pytest.raises(ConfigError, match="compute_dtype"):
        open_backend("reference", make_cache(), num_qo_heads=2, compute_dtype=torch.float16)


def test_choice_of_a_backend(make_cache):
    assert open_backend("auto", make_cache(), num_qo_heads=2).name == "sdpa"
    assert open_backend("auto", make_cache(dtype=torch.float8_e5m2), num_qo_heads=2).name == "reference"
    with pytest.raises(BackendUnavailableError, match="float8"):
        open_backend("sdpa", make_cache(dtype=torch.float8_e5m2), num_qo_heads=2)
    with pytest.raises(ConfigError, match="'cudnn'"):
        open_backend("cudnn", make_cache(), num_qo_heads=2)
    reasons = available_backends(dtype=torch.float8_e4m3fn)
    assert list(reasons) == ["flashinfer", "fa3", "fa4", "triton", "flash_attn", "sdpa", "reference"]
    assert reasons["reference"] is None
    assert "float8" in str(reasons["sdpa"])
    assert reasons["flash_attn"] == "cannot import flash_attn; pip install flash-attn"
    with pytest.raises(BackendUnavailableError, match=r"pip install slicedkv\[flashinfer\]"):
        open_backend("flashinfer", make_cache(), num_qo_heads=2)


def test_options_decide_and_are_named(make_cache):
    assert choose_backend("cpu", torch.float32, 64, scale=1.0).name == "sdpa"
    assert choose_backend("cpu", torch.float32, 64, compute_dtype=torch.float64).name == "reference"
    with pytest.raises(BackendUnavailableError, match="sdpa: has no option window; reference: has no option window"):
        choose_backend("cpu", torch.float32, 64, window=3)
    with pytest.raises(ConfigError, match="backend 'sdpa' has no option window; it has scale, causal"):
        open_backend("sdpa", make_cache(), num_qo_heads=2, window=3)


def choose_on(monkeypatch, capability, missing):
    """Names of the backends that "auto" takes on such a GPU without some packages."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(attention, "_missing", lambda name, *_: "not installed" if name in missing else None)
    monkeypatch.setattr(attention, "_unknown", lambda *_: [])
    monkeypatch.setattr(attention, "_load", lambda name: SimpleNamespace(features=frozenset()))
    return choose_backend("cuda").backends


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_what_auto_takes_on_a_gpu_depends_on_what_is_there(monkeypatch, capability):
    others = ["flashinfer", "triton", "flash_attn", "sdpa", "reference"]
    for count, expected in enumerate(others):
        assert choose_on(monkeypatch, capability, ["fa3", *others[:count]]) == [expected]


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ([], ["flashinfer", "fa3"]),
        (["flashinfer"], ["fa3"]),
        (["fa3"], ["flashinfer"]),
        (["flashinfer", "fa3"], ["triton"]),
    ],
)
def test_what_auto_takes_on_hopper(monkeypatch, missing, expected):
    assert choose_on(monkeypatch, (9, 0), missing) == expected
    assert choose_on(monkeypatch, (8, 9), missing) == ["triton" if "flashinfer" in missing else "flashinfer"]


def test_what_a_model_needs_decides_too(make_cache, monkeypatch):
    monkeypatch.setattr(attention, "_missing", lambda *_: None)
    features = {"flashinfer": set(), "fa3": set(), "triton": {"window", "sinks"}}
    monkeypatch.setattr(attention, "_load", lambda name: SimpleNamespace(features=features.get(name, set())))
    monkeypatch.setattr(attention, "_unknown", lambda *_: [])
    assert choose_backend("cuda").name == "flashinfer"
    assert choose_backend("cuda", needs={"window"}).name == "triton"
    with pytest.raises(BackendUnavailableError, match=r"triton: has no soft_cap; .*sdpa: has no soft_cap, window"):
        choose_backend("cuda", needs={"window", "soft_cap"})
    with pytest.raises(ConfigError, match="backend 'fa3' has no sinks; 'triton', 'sdpa' and 'reference' have"):
        open_backend("fa3", make_cache(), num_qo_heads=2, needs={"sinks"})


def test_kernels_of_another_backend_must_run_too(make_cache, monkeypatch):
    """The message says of which one."""
    missing = {"fa3": "needs a Hopper GPU"}
    monkeypatch.setattr(attention, "_missing", lambda name, *_: missing.get(name))
    with pytest.raises(BackendUnavailableError, match=r"no attention backend 'fa3' for .*: needs a Hopper GPU"):
        open_backend("flashinfer", make_cache(dtype=torch.float16), num_qo_heads=2, prompts="fa3")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window is 0"),
        ({"window": 4, "causal": False}, "window is 4 without causal"),
        ({"soft_cap": -1.0}, "soft_cap is -1.0; it must be positive"),
        ({"k_scale": 2.0}, "k_scale is 2.0 and v_scale None; they go with float8"),
    ],
)
def test_options_of_triton(make_cache, options, message):
    with pytest.raises(ConfigError, match=message):
        open_backend("triton", make_cache(), num_qo_heads=2, **options)


def test_graphs_take_decode_steps_of_backends_that_can(make_cache, monkeypatch):
    monkeypatch.setattr(TritonBackend, "captures", True)
    cache = make_cache()
    step = Batch([0, -1], [1, 1], [1, 0])
    with pytest.raises(ConfigError, match="backend 'sdpa' cannot be captured"):
        open_backend("sdpa", cache, num_qo_heads=2).plan(step, graph=True)
    backend = open_backend("triton", cache, num_qo_heads=2)
    backend.plan(step, graph=True)
    for batch in (Batch([0, 1], [1, 2], [1, 2]), Batch([-1] * 7, [1] * 7, [0] * 7)):
        with pytest.raises(ConfigError, match=f"{len(batch.reqids)} lanes and {batch.total_q} tokens is planned for"):
            backend.plan(batch, graph=True)
