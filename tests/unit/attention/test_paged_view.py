"""`PagedView`: every page of every request has its number, and finding them keeps to the calling thread."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from slicedkv.attention.paged_view import PagedView, ramps


@pytest.mark.parametrize("token_stride", [1, 64, 192])
def test_table_numbers_every_page(token_stride):
    rows = torch.empty_strided((9, 999, 1, 1), (64 * token_stride * 16, token_stride, 1, 1), device="meta")
    view = PagedView.of(rows, 64)
    reqids, seq_lens = [7, 0, 3, 8], [64, 1, 999, 65]
    indptr, numbers, last = view.table(reqids, seq_lens)
    pages = [-(-length // 64) for length in seq_lens]
    expected = [view.number(reqid, page) for reqid, n in zip(reqids, pages, strict=True) for page in range(n)]
    assert numbers.tolist() == expected
    assert indptr.tolist() == [0, 1, 2, 18, 20]
    assert last.tolist() == [64, 1, 999 - 15 * 64, 1]
    assert {part.dtype for part in (indptr, numbers, last)} == {torch.int32}


def test_table_of_nobody_is_empty():
    view = PagedView(64, 64, 100, 1)
    assert [part.tolist() for part in view.table([], [])] == [[0], [], []]


@pytest.mark.parametrize("step", [0, 1, 7, -2])
def test_ramps(step):
    found = ramps(torch.tensor([5, -3, 5]), torch.tensor([1, 4, 2]), step)
    assert found.tolist() == [5, -3, step - 3, 2 * step - 3, 3 * step - 3, 5, step + 5]


def test_steps_and_plans_wake_no_threads_of_torch():
    """All of torch's threads at work for a dozen numbers cost a step up to 40 ms where other processes want the cores.

    They are started when first needed, so a fresh process shows it. The last line shows that this one could.
    """
    script = """
        import os
        import sys
        import fake_flashinfer
        import torch
        sys.modules["flashinfer"] = fake_flashinfer
        from slicedkv import SlicedKVCache, attention
        from slicedkv.attention import flashinfer

        attention._missing = lambda *_: None
        flashinfer._kernel = lambda device: "fa3"
        flashinfer._WORKSPACE_BYTES = 1 << 10

        def threads():
            return len(os.listdir("/proc/self/task"))

        torch.set_num_threads(8)
        shape = dict(num_layers=2, num_kv_heads=2, head_dim=64, dtype=torch.float16, max_seq_len=8192)
        with SlicedKVCache(**shape, max_batch_size=64, device="cpu", mapper="sync") as cache:
            backend = attention.open_backend("flashinfer", cache, num_qo_heads=4)
            before = threads()
            slots = [cache.alloc_reqid(100) for _ in range(60)]
            for length in (3000, 3001, 4000):
                assert cache.can_admit(10)
                cache.pages_needed(dict.fromkeys(slots, length))
                assert cache.step(dict.fromkeys(slots, length))
                for q_lens in [1] * 60, [1] * 30 + [130] * 29 + [2000]:
                    backend.plan(attention.Batch(slots, q_lens, [length] * 60))
            assert threads() == before, threads() - before
            torch.repeat_interleave(torch.arange(60), torch.full((60,), 130))
            assert threads() > before
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "support")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
