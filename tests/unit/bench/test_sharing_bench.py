"""The benchmark of sharing: its hits are hits, and what is reported of its rows."""

from __future__ import annotations

import pytest

from bench import sharing
from bench.reporting import FIGURES
from bench.reporting.figure import summarise
from bench.reporting.sharing import SOURCE
from bench.support.spin import Device


def test_prefixes_are_unknown_then_shared_then_gone_on_with(make_engine, tiny_model):
    engine = make_engine(tiny_model(), prefix_cache=1.0, max_seq_len=800, page_bytes=16 << 10)
    run = engine.cache.layout.tokens_per_page
    row = sharing.first_tokens(engine, 61, 300, 2)
    assert row["computed_tokens"] == 2 * run + 10
    assert row["hit_cached_tokens"] == 300 // run * run
    assert row["next_turn_cached_tokens"] == (300 + 2 * run + 10) // run * run
    assert row["miss_over_hit"] == row["miss_ms"] / row["hit_ms"] > 0


@pytest.mark.parametrize("tokens", [1024, 5000])
def test_lookups_find_the_prefix(tokens):
    setting = sharing.Setting(Device("cpu"), quick=True)
    row = sharing.lookup(setting, tokens)
    assert (row["measure"], row["tokens"], row["requests"]) == ("lookup", tokens, 64)
    assert row["us_p50"] > 0


def test_figures():
    rows = [
        {"measure": "hit", "extent_pages": extent_pages, "tokens": tokens + 10, "us_p50": tokens / 1024 + extent_pages}
        for extent_pages in (1, 16)
        for tokens in (1024, 32_768, 65_536)
    ]
    rows.append({"measure": "lookup", "tokens": 32_768, "us_p50": 9.0})
    memory = {"measure": "memory", "extent_pages": 16, "tokens": 32_778, "requests": 64}
    rows.append({**memory, "created_bytes": 3, "unshared_bytes": 60})
    result = {SOURCE: {"date": "2026-01-01", "rows": rows}}
    values = {name: entry["value"] for name, entry in summarise(FIGURES, result).items()}
    assert values == {
        "sharing.hit_us_32k": 48.0,
        "sharing.lookup_us_32k": 9.0,
        "sharing.memory_share_64x32k": 0.05,
    }, "first tokens were not measured"
    rows.append({"measure": "first_token", "tokens": 32_768, "miss_over_hit": 40.0})
    assert summarise(FIGURES, result)["sharing.first_token_32k"]["value"] == 40.0
