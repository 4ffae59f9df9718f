"""The benchmark of other projects: engines give the same tokens, allocators the same lengths, failures are rows."""

from __future__ import annotations

import json
import os
import sys
import time
from types import ModuleType, SimpleNamespace

import fake_kvcached
import pytest
import torch

import bench.peers
from bench.baselines import transformers_batching as batching
from bench.reporting.figure import summarise
from bench.reporting.peers import FIGURES, KVCACHED, OURS, SOURCE
from bench.support import spin
from bench.support.child import in_child
from bench.support.traces import Request

SHAPE = (2, 2, 16)
TOKEN_BYTES = 2 * 2 * 2 * 16 * 2


@pytest.fixture
def peers(monkeypatch) -> ModuleType:
    """The benchmark, with a small shape and steps that take no time."""
    monkeypatch.setattr(spin, "STEP_S", 0.0)
    monkeypatch.setitem(spin.SHAPES, bench.peers.SHAPE, SHAPE)
    return bench.peers


def requests_of(*lengths: tuple[int, int]) -> list:
    return [Request(*pair) for pair in lengths]


def test_both_engines_serve_the_same_tokens(peers, tiny_model):
    model = tiny_model("llama", torch.float32, head_dim=16)
    requests = requests_of((15, 9), (14, 3), (15, 5), (33, 7), (3, 9))
    workload = peers.Workload("azure_2023_conv", 5, 1.0, 3, 16 << 20)
    ours, expected = batching.serve_slicedkv(model, workload, requests, tokens_per_step=64)
    theirs, tokens = batching.serve_transformers(model, workload, requests, tokens_per_step=64)
    assert tokens == expected
    assert [len(found) for found in tokens] == [9, 3, 5, 7, 9]
    assert list(ours) == list(theirs)
    assert (ours["engine"], theirs["engine"]) == ("slicedkv", "transformers")
    assert (ours["tokens"], theirs["tokens"]) == (33, 33)
    assert 0.99 * (16 << 20) < theirs["kv_held_gb"] * 1e9 <= 16 << 20
    assert 0 < ours["kv_held_gb"] * 1e9 <= 16 << 20
    assert "sdpa, cuDNN o" in theirs["attention"]
    assert "sdpa" in model.config._attn_implementation


def test_a_manager_that_fails_is_not_waited_for(monkeypatch):
    running, result, stops = [True], [None], []
    manager = SimpleNamespace(
        add_request=lambda *_, **__: "a",
        get_result=lambda timeout: result[0],
        is_running=lambda: running[0],
        stop=lambda **options: stops.append(options),
    )
    monkeypatch.setattr(batching, "LIMIT_S", 0.0)
    with pytest.raises(TimeoutError, match="0 of 1 requests served after 0 s"):
        batching.answers(manager, [[1]], [1])
    assert stops == [{"timeout": 5, "hard_stop": True}]
    running[0] = False
    with pytest.raises(RuntimeError, match="its thread ended"):
        batching.answers(manager, [[1]], [1])
    result[0] = SimpleNamespace(error="no memory")
    with pytest.raises(RuntimeError, match="a request failed: no memory"):
        batching.answers(manager, [[1]], [1])


@pytest.mark.parametrize("mapper", ["background", "sync"])
def test_growing_in_the_cache(peers, tmp_path, mapper):
    (tmp_path / "azure_2023_conv.csv").write_text("ContextTokens,GeneratedTokens\n40,3\n7,9\n100,1\n1,5\n")
    workload = peers.Workload("azure_2023_conv", 4, 1.0, 2, 8 << 20)
    row = peers.grow_sliced(mapper, "cpu", workload, [tmp_path / "azure_2023_conv.csv"])
    assert (row["allocator"], row["requests"], row["slots"]) == (f"slicedkv, {mapper}", 4, 2)
    assert row["steps"] == len(row["series"]["used_mib"]) == 9
    assert row["series"]["used_mib"][0] == (41 + 8) * TOKEN_BYTES / 2**20
    assert row["held_per_used"] >= 1
    assert row["held_gib_trimmed"] <= row["held_gib_end"] <= row["held_gib_max"]
    assert row["free_us_max"] >= row["free_us_p50"] > 0


def test_growing_in_kvcached(peers, monkeypatch):
    fake_kvcached.install(monkeypatch)
    monkeypatch.setattr(fake_kvcached, "STATE", fake_kvcached.State(opened=None, tensors=None, threads=0))
    row = peers.grow_kvcached("cpu", peers.Workload("azure_2023_conv", 12, 0.1, 3, 32 << 20), [])
    ours = peers.grow_sliced("sync", "cpu", peers.Workload("azure_2023_conv", 12, 0.1, 3, 32 << 20), [])
    assert list(row) == list(ours)
    assert row["version"] == "0.1.6"
    assert row["series"]["used_mib"] == ours["series"]["used_mib"]
    page_mib = fake_kvcached.PAGE_SIZE * SHAPE[0] * 2 / 2**20
    assert row["held_gib_max"] * 1024 % page_mib == 0
    assert row["held_gib_end"] * 1024 <= fake_kvcached.RESERVE * page_mib
    assert row["held_gib_trimmed"] == 0
    assert (fake_kvcached.STATE.opened, fake_kvcached.STATE.threads) == (None, 0)


def test_an_allocator_without_memory_is_closed(peers, monkeypatch, capsys):
    fake_kvcached.install(monkeypatch)
    sys.modules["kvcached"].__spec__ = SimpleNamespace()
    monkeypatch.setattr(fake_kvcached, "STATE", fake_kvcached.State(opened=None, tensors=None, threads=0))
    small = peers.Workload("azure_2023_conv", 12, 1.0, 12, 1 << 20)
    row = peers.guarded("kvcached", "growing", lambda: peers.grow_kvcached("cpu", small, []))
    assert row["reason"].startswith("MemoryError: memory is short with ")
    assert row["installed"]
    assert (fake_kvcached.STATE.opened, fake_kvcached.STATE.threads) == (None, 0)
    assert "kvcached was not measured (growing): MemoryError" in capsys.readouterr().out


def test_a_peer_that_is_not_installed_is_a_row(peers, monkeypatch, capsys):
    monkeypatch.setattr(peers, "grow_sliced", lambda *_: {"measure": "growing"})
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None if name == "kvcached" else object())
    *_, row = peers.growing_rows("cpu", peers.QUICK[1], [])
    assert row["measure"] == "not measured"
    assert not row["installed"]
    assert row["reason"].startswith("not installed: pip install --no-build-isolation kvcached==0.1.6")
    assert capsys.readouterr().out.count("\n") == 1


def test_a_failure_is_one_line_and_the_rest_is_measured(peers, monkeypatch, tmp_path):
    def fails(*_):
        raise RuntimeError("CUDA | error\n  of the peer")

    monkeypatch.setattr(peers, "model", fails)
    monkeypatch.setattr(peers, "grow_sliced", lambda *_: {"measure": "growing", "allocator": "slicedkv", "x": 1.0})
    monkeypatch.setattr(peers, "in_child", fails)
    monkeypatch.setattr(peers.torch.cuda, "empty_cache", lambda: None)
    found = list(peers.rows("cpu", quick=True, paths=[]))
    reasons = [row["reason"] for row in found if row["measure"] == "not measured"]
    assert set(reasons[:2]) == {"RuntimeError: CUDA / error of the peer"}
    assert [row["measure"] for row in found][:4] == ["not measured"] * 2 + ["growing"] * 2
    peers.record("peers", SimpleNamespace(device="cpu", out=tmp_path, commit="c", quick=True), found)
    assert len(json.loads((tmp_path / "peers-host.json").read_text())["rows"]) == len(found) == 5


def test_the_faster_kernels_are_kept():
    former = torch.backends.cuda.cudnn_sdp_enabled()
    trial = lambda: time.sleep(0.05 * torch.backends.cuda.cudnn_sdp_enabled())  # noqa: E731
    with batching.faster_kernels(trial) as kernels:
        assert kernels == "off"
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == former


def test_a_child_may_answer_raise_die_or_hang():
    assert in_child(dict, [("measure", "x")]) == {"measure": "x"}
    with pytest.raises(RuntimeError, match="ValueError: invalid literal"):
        in_child(int, "x")
    with pytest.raises(RuntimeError, match="its process ended with exit code -6"):
        in_child(os.abort)
    with pytest.raises(TimeoutError, match="no result after 0 s"):
        in_child(time.sleep, 60, limit_s=0.1)


def test_figures_of_what_was_measured() -> None:
    serving = {"measure": "serving", "tokens_per_s": 30.0, "peak_beside_weights_gb": 2.0}
    growing = {"measure": "growing", "decode_us_p99": 9.0, "free_us_p50": 4.0, "held_per_used": 1.25}
    rows = [serving | {"engine": "slicedkv"}, serving | {"engine": "transformers", "tokens_per_s": 20.0}]
    rows += [growing | {"allocator": OURS}, {"measure": "not measured", "peer": KVCACHED}]
    summary = summarise(FIGURES, {SOURCE: {"rows": rows, "date": "2026-01-01"}})
    assert summary["peers.tokens_vs_transformers"]["value"] == 1.5
    assert summary["peers.held_per_used"]["value"] == 1.25
    assert not any(name.startswith("peers.kvcached") for name in summary)
