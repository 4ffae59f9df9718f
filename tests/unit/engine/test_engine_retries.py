"""Engines after a failure: what is done again, what is ended, and that nothing of others is touched meanwhile."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from inside import fail_in_background, shared_end
from rig import SMALL

from slicedkv import CapacityError, DriverError, PagePool, SlicedKVCache
from slicedkv.attention import open_backend
from slicedkv.engine import Engine, FinishReason, SamplingParams, engine, sampler
from slicedkv.errors import ConfigError
from slicedkv.integrations.transformers import attention_scale, cache_for_model
from slicedkv.vmm.faulty import FaultyDriver
from slicedkv.vmm.host import HostDriver

LONG = SamplingParams(max_tokens=9, ignore_eos=True)
KIB = 1 << 10


def test_a_token_computed_again_is_not_written_where_others_share_it(make_engine, tiny_model, monkeypatch):
    """Its row was shared by a newcomer before it is written the second time."""
    model = tiny_model("llama", num_hidden_layers=2)  # whole tokens fill a page
    options = {"page_bytes": 4 * KIB, "extent_pages": 1, "prefix_cache": 0.5, "mapper": "sync", "backend": "reference"}
    served, one = make_engine(model, **options), SamplingParams(max_tokens=1, ignore_eos=True)
    run = served.scheduler.admission._index.run_tokens
    prompt = [3 + (7 * i * i + 3) % 55 for i in range(2 * run)]

    def fail(*_):
        raise torch.OutOfMemoryError("sorting")

    first = served.submit(prompt, one)
    with monkeypatch.context() as context:
        context.setattr(engine, "sample", fail)
        with pytest.raises(torch.OutOfMemoryError):
            served.step()
    slot, second = first.reqid, served.submit([*prompt, 7, 8], one)
    append, written = served.backend.append, []

    def spy(layer, k, v):
        for lane in served.backend._lanes:
            written.append((lane.reqid, lane.past_len))
            assert lane.past_len >= served.cache.layout.rows_within(shared_end(served.cache, lane.reqid))
        append(layer, k, v)

    monkeypatch.setattr(served.backend, "append", spy)
    served.run()
    assert (slot, 2 * run - 1) in written, "the last token was computed again"
    assert second.num_cached_tokens == 2 * run, "and what it wrote the first time is shared"


def test_a_number_is_drawn_once_for_each_token(make_engine, tiny_model, monkeypatch):
    served = make_engine(tiny_model("llama"))
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.9, seed=3)
    expected = served.generate([[5, 9, 14]], params)[0]
    request, draw = served.submit([5, 9, 14], params), sampler._draw
    served.step()

    def draw_in_vain(*arguments):
        draw(*arguments)
        raise torch.OutOfMemoryError("sorting")

    with monkeypatch.context() as context:
        context.setattr(sampler, "_draw", draw_in_vain)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                served.step()
    served.run()
    assert request.output_ids == expected


def test_close_goes_on_where_it_failed(tiny_model):
    model, driver = tiny_model("llama"), FaultyDriver(HostDriver())
    pool = PagePool(driver, page_bytes=64 * KIB, memory_limit=8 << 20, extent_pages=1)
    served = Engine(model, cache=cache_for_model(model, 2, 64, pool=pool))
    served.generate([[5, 9, 14]], SamplingParams(max_tokens=3))
    driver.fail("unmap", at=1)
    with pytest.raises(DriverError):
        served.close()
    assert model.config._attn_implementation != "slicedkv", "the model is free, whatever became of the cache"
    driver.heal()
    served.close()
    assert (served.closed, served.cache.closed) == (True, True)
    pool.trim()
    assert driver.inner.used_bytes() == 0


def test_a_failing_model_does_not_keep_the_cache_open(tiny_model, monkeypatch):
    served = Engine(tiny_model("llama"), max_batch_size=2, max_seq_len=64, memory_limit="4MiB")
    close = served._runner.close

    def fail():
        close()
        raise RuntimeError("no attention of that name")

    monkeypatch.setattr(served._runner, "close", fail)
    with pytest.raises(RuntimeError, match="no attention"):
        served.close()
    assert served.cache.closed


def test_generate_leaves_no_request_behind(make_engine, tiny_model, monkeypatch):
    """Two failures at once: of the step, and of the background in freeing the first slot."""
    served = make_engine(tiny_model("llama"))

    def forward(_):
        fail_in_background(served.cache)
        raise RuntimeError("device lost")

    with monkeypatch.context() as context:
        context.setattr(served._runner, "forward", forward)
        with pytest.raises(DriverError) as caught:
            served.generate([[5], [6], [7]], LONG)
        assert "device lost" in str(caught.value.__context__)
    assert not served.scheduler.waiting
    assert served.step() == []
    assert served.idle


def test_close_ends_every_request(tiny_model):
    served = Engine(tiny_model("llama"), max_batch_size=4, max_seq_len=64, memory_limit="4MiB", page_bytes=4 * KIB)
    requests = [served.submit([5], LONG) for _ in range(3)]
    served.step()
    fail_in_background(served.cache)
    with pytest.raises(DriverError):
        served.close()
    assert {request.finish_reason for request in requests} == {FinishReason.ABORTED}
    assert served.cache.closed


def test_requests_of_another_engine_are_refused(make_engine, tiny_model):
    one, other = (make_engine(tiny_model("llama", num_hidden_layers=layers)) for layers in (2, 3))
    own, waiting = one.submit([5, 9], LONG), other.submit([5, 9], LONG)
    with pytest.raises(ConfigError, match="not one of this engine's; abort it"):
        one.abort(own, waiting)
    assert not own.finished
    other.step()
    with pytest.raises(ConfigError, match="not one of this engine's; abort it"):
        one.abort(waiting)
    one.run()
    with pytest.raises(ConfigError, match="not one of this engine's; stream it"):
        list(one.stream(waiting))
    assert list(other.stream(waiting)) == waiting.output_ids
    assert len(waiting.output_ids) == 9
    one.abort(waiting)  # finished: nothing to end


def test_a_raised_limit_admits_longer_requests(make_engine, tiny_model):
    served = make_engine(tiny_model("llama"), memory_limit=16 * 4 * KIB, page_bytes=4 * KIB)
    long = SamplingParams(max_tokens=100, ignore_eos=True)
    with pytest.raises(CapacityError, match="set_memory_limit"):
        served.submit([5] * 150, long)
    served.cache.set_memory_limit(4 << 20)
    request = served.submit([5] * 150, long)
    served.run()
    assert len(request.output_ids) == 100


def test_a_backend_over_another_cache_is_refused(tiny_model):
    model = tiny_model("llama")
    with (
        cache_for_model(model, 2, 64, memory_limit="4MiB") as one,
        cache_for_model(model, 2, 64, memory_limit="4MiB") as two,
    ):
        backend = open_backend("sdpa", two, num_qo_heads=4, scale=attention_scale(model))
        for options in ({"cache": one}, {"max_batch_size": 2, "max_seq_len": 64}):
            with pytest.raises(ConfigError, match="'sdpa' is not over the engine's cache"):
                Engine(model, backend=backend, **options)
        assert not one.closed
        with Engine(model, cache=two, backend=backend) as served:
            assert len(served.generate([[5, 9]], LONG)[0]) == 9


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"num_layers": 2}, "num_layers 2 and the model 3"),
        ({"num_layers": 4}, "num_layers 4 and the model 3"),
        ({"num_kv_heads": 4}, "num_kv_heads 4 and the model 2"),
        ({"head_dim": 32}, "head_dim 32 and the model 16"),
        ({"dtype": torch.float16}, "float16 on cpu, the model computes in torch.float32"),
    ],
)
def test_a_cache_of_another_shape_is_refused(tiny_model, wrong, named):
    model = tiny_model("llama")
    with SlicedKVCache(**(SMALL | {"num_layers": 3} | wrong)) as cache:
        with pytest.raises(ConfigError, match=named):
            Engine(model, cache=cache)
        assert not cache.closed
    with pytest.raises(ConfigError, match=named):
        Engine(model, max_batch_size=2, max_seq_len=64, memory_limit="8MiB", **wrong)


def test_steps_are_counted_whatever_the_hook_does(make_engine, tiny_model):
    indices: list[int] = []

    def hook(step):
        indices.append(step.index)
        if not step.index:
            raise RuntimeError("hook")

    served = make_engine(tiny_model("llama"), on_step=hook)
    served.submit([5], SamplingParams(max_tokens=3, ignore_eos=True))
    with pytest.raises(RuntimeError, match="hook"):
        served.step()
    served.run()
    assert indices == list(range(served.num_steps))


def test_without_transformers_it_is_said_what_to_install():
    code = "import sys; sys.modules['transformers'] = None; import slicedkv.engine; slicedkv.engine.Engine"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "BackendUnavailableError: transformers is missing; pip install slicedkv[transformers]" in done.stderr
