"""README: its example runs, its table is what the command prints, and what it names exists."""

from __future__ import annotations

import math
import re
from pathlib import Path

import torch

from slicedkv import SlicedKVCache
from slicedkv.cli import main
from slicedkv.cli.plan import MODELS
from slicedkv.layout import KVLayout, LayoutKind

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def fences(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)


def test_example_runs(capsys):
    example, *_ = fences("python")
    assert len(example.splitlines()) <= 15
    exec(compile(example, "README.md", "exec"), {})
    # 1000 tokens need 32 pages of 2 MiB for K and 32 for V; a little more may be mapped ahead by then.
    assert 64 <= int(capsys.readouterr().out) / (2 << 20) <= 72


def test_attention_example_runs():
    (example,) = (text for text in fences("python") if "open_backend" in text)
    shape = {"num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16, "max_batch_size": 4, "max_seq_len": 4096}
    with SlicedKVCache(num_layers=1, device="cpu", memory_limit="64MiB", **shape) as cache:
        reqids = [cache.alloc_reqid() for _ in range(4)]
        assert cache.step({reqids[0]: 900, reqids[3]: 4096})
        k, v, q = (torch.randn(513, heads, 128, dtype=torch.bfloat16) for heads in (8, 8, 32))
        for side in (cache.k(0), cache.v(0)):
            side[0, :900], side[3, :4096] = 1, 1
        names = {"cache": cache, "layer": 0, "k": k, "v": v, "q": q}
        exec(compile(example, "README.md", "exec"), names)
        assert names["out"].shape == (513, 32, 128)
        assert torch.equal(cache.v(0)[3, 4095], v[512])


def test_example_of_sharing_runs(capsys):
    (example,) = (text for text in fences("python") if "share_prefix" in text)
    exec(compile(example, "README.md", "exec"), {})
    # Of 1000 tokens 31 pages of 32 tokens are whole, of 900 there are 28; four beams and one sharer, K and V.
    assert int(capsys.readouterr().out) == (4 * 31 + 28) * 2 * (2 << 20)


def page_tokens(kind: LayoutKind, model: str, gpus: int) -> float:
    """Tokens in a page of 2 MiB; the first length that fills one agrees."""
    layers, heads, dim = MODELS[model]
    layout = KVLayout(kind, layers, heads // gpus, dim, 2, 1, 8192, 2 << 20)
    tokens = layout.page_bytes / layout.row_bytes
    assert next(n for n in range(1, 8192) if layout.whole_pages(n)) == math.ceil(tokens)
    assert layout.tokens_per_page == math.floor(tokens)
    return tokens


def test_table_of_sharing_is_computed():
    rows = re.findall(r"^\| (\S+) " + r"\| ([\d.]+ / [\d.]+|-) " * 4 + r"\|$", TEXT, flags=re.MULTILINE)
    assert [model for model, *_ in rows] == list(MODELS)
    for model, *shown in rows:
        for gpus, cell in zip((1, 2, 4, 8), shown, strict=True):
            fits = MODELS[model][1] % gpus == 0
            sizes = [page_tokens(kind, model, gpus) for kind in ("sliced", "interleaved")] if fits else []
            assert cell == (" / ".join(f"{size:.1f}" for size in sizes) or "-"), (model, gpus)
    per_layer = [page_tokens("per_layer", model, 1) for model in MODELS]
    assert f"{min(per_layer):,.0f} to {max(per_layer):,.0f} tokens" in TEXT


def test_table_is_what_plan_prints(capsys):
    (table,) = fences("text")
    assert main(["plan", "llama-3-8b"]) == 0
    assert table == capsys.readouterr().out


def test_commands_and_files_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`?make (\w+)", TEXT):
        assert f"\n{target}: " in makefile
    for name in re.findall(r"\b[\w/]+\.py\b", TEXT):
        assert (ROOT / name).exists() or (ROOT / "slicedkv" / name).exists(), name
    for name in re.findall(r"^(?:  )?(\w+/) ", TEXT, flags=re.MULTILINE):
        assert (ROOT / name).is_dir() or (ROOT / "slicedkv" / name).is_dir(), name
