"""Gradients end at a cache: no row joins a graph, and `backward` through a cache raises instead of leaving some out."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref

import pytest
import torch

from slicedkv.attention import Batch, open_backend
from slicedkv.errors import StateError
from slicedkv.integrations.transformers import SlicedTransformersCache

BACKENDS = ["sdpa", "reference", "triton"]
REFUSED = "backward through a KV cache"


@pytest.fixture(params=BACKENDS)
def planned(request, make_cache):
    """A backend with a prompt of three tokens and a token of another request planned."""
    cache = make_cache(num_layers=2)
    first, second = cache.alloc_reqid(), cache.alloc_reqid()
    assert cache.step({first: 3, second: 1})
    backend = open_backend(request.param, cache, num_qo_heads=4)
    backend.plan(Batch([first, second], [3, 1], [3, 1]))
    return backend


def tensors(*needing):
    """K, V and q of a step, of which those named require gradients as a model's do: computed from a weight."""
    random = torch.Generator().manual_seed(1)
    shapes = {"k": (4, 2, 16), "v": (4, 2, 16), "q": (4, 4, 16)}
    plain = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    weight = torch.ones(16, requires_grad=True)
    return weight, [values * weight if name in needing else values for name, values in plain.items()]


@pytest.mark.parametrize("needing", ["k", "v", "q", "kvq"])
def test_backward_through_attention_is_refused(planned, needing):
    weight, (k, v, q) = tensors(*needing)
    _, plain = tensors()
    planned.append(1, k, v)
    out = planned.run(1, q)
    with pytest.raises(StateError, match=REFUSED):
        out.sum().backward()
    with pytest.raises(StateError, match=REFUSED):
        torch.autograd.grad(out.sum() + weight.sum(), [weight])
    assert weight.grad is None
    planned.append(0, *plain[:2])
    assert torch.equal(out, planned.run(0, plain[2])), "what is computed is the same"
    out.add_(1)  # as models do in place


@pytest.mark.parametrize("needing", ["", "kvq"])
def test_no_row_joins_a_graph(planned, needing):
    _, (k, v, q) = tensors(*needing)
    planned.append(0, k, v)
    planned.run(0, q)
    cache = planned.cache
    for view in (cache.k(0), cache.v(0), *cache.kv_tensors):
        assert not view.requires_grad
        assert view.grad_fn is None
    assert torch.equal(cache.k(0)[0, :3], k[:3])


def test_nothing_is_refused_without_gradients(planned):
    _, (k, v, q) = tensors("k", "v", "q")
    buffer = torch.empty(4, 4, 16)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            planned.append(0, k, v)
            assert not planned.run(0, q).requires_grad
            planned.append(1, k, v)
            assert planned.run(1, q, out=buffer) is buffer
    _, (k, v, q) = tensors()
    planned.append(0, k, v)
    assert not planned.run(0, q).requires_grad
    assert planned.run(0, q, out=buffer) is buffer
    assert not buffer.requires_grad


@pytest.mark.parametrize("needing", ["k", "q"])
def test_out_cannot_be_differentiated(planned, needing):
    """As torch's own functions with `out=`: who looks at it alone would miss gradients."""
    _, (k, v, q) = tensors(needing)
    buffer = torch.zeros(4, 4, 16)
    planned.append(0, k, v)
    with pytest.raises(StateError, match=r"torch\.no_grad"):
        planned.run(0, q, out=buffer)
    assert not buffer.any()
    with torch.no_grad():
        assert planned.run(0, q, out=buffer).any()


def test_graphs_of_a_step_end_with_it(planned):
    """Neither the cache nor the backend keeps them once a layer has run, or another step is planned."""
    batch = Batch([0, 1], [3, 1], [3, 1])
    for runs in (True, False):
        _, (k, v, q) = tensors("k", "v", "q")
        kept = [weakref.ref(rows) for rows in (k, v, q)]
        planned.append(0, k, v)
        if runs:
            planned.run(0, q)
        else:
            planned.plan(batch)
        del k, v, q
        gc.collect()
        assert [ref() for ref in kept] == [None, None, None]


def test_rows_that_a_user_writes_join_nothing_of_others(make_cache):
    """The view that was written to has the gradient; whoever asks the cache again does not."""
    cache = make_cache()
    reqid = cache.alloc_reqid()
    assert cache.step({reqid: 4})
    weight = torch.ones(16, requires_grad=True)
    rows = weight * torch.randn(4, 2, 16)
    graph = weakref.ref(rows)
    cache.k(0)[reqid, :4] = rows
    cache.v(2)[reqid, :4].copy_(rows)
    cache.kv_tensors[0][reqid, :4, 1] = rows
    assert torch.equal(cache.k(1)[reqid, :4], rows)
    for view in (cache.k(0), cache.k(1), cache.v(2), *cache.kv_tensors):
        assert not view.requires_grad
    del rows
    gc.collect()
    assert graph() is None


def forward(model, ids, cache):
    """Logits; transformers is renaming the argument `past_key_values` to `cache`."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model(ids, **{name: cache}).logits


@pytest.mark.parametrize("trained", ["k_proj", "v_proj", "q_proj", ""])
def test_a_model_is_not_trained_through_a_cache(make_cache, tiny_model, trained):
    """Nor a part of it: what the first layer makes of a token is in the rows of the second."""
    model = copy.deepcopy(tiny_model())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not trained or f"layers.0.self_attn.{trained}" in name)
    logits = forward(model, torch.arange(3, 12).view(1, -1), SlicedTransformersCache(make_cache()))
    with pytest.raises(StateError, match=REFUSED):
        logits.sum().backward()
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if "layers.0" in name)


def test_forwards_with_gradients_leave_none_behind(make_cache, tiny_model):
    model, sliced = tiny_model(), make_cache()
    cache, known = SlicedTransformersCache(sliced), torch.empty(1, 0, dtype=torch.int64)
    for step in range(3):
        ids = torch.arange(3, 12).view(1, -1) + step
        known = torch.cat([known, ids], dim=1)
        logits = forward(model, ids, cache)
        assert logits.requires_grad
        with torch.no_grad():
            torch.testing.assert_close(logits, model(known).logits[:, -9:], atol=1e-4, rtol=1e-4)
        graph = weakref.ref(logits)
        del logits
        gc.collect()
        assert graph() is None
        assert not any(view.requires_grad for view in (sliced.k(0), sliced.v(2), cache.layers[1].keys))
