"""The memory benchmark: traces, replay through the real cache, and what it says of a trace known by heart."""

from __future__ import annotations

import json
import random
import sys

import pytest
import torch

from bench import footprint
from bench.support.layouts import LAYOUTS, layout_of, layouts, shapes
from bench.support.replay import GROUP, Books, Profile, largest_batch, measure_profile, replay, serve
from bench.support.traces import FITS, Request, Trace, fit, generate, read_trace
from slicedkv.errors import ConfigError, OutOfPagesError
from slicedkv.layout import KVLayout

MIB = 1 << 20
LLAMA = (32, 8, 128)
"""32 tokens in a page of K or V, 16 where they are interleaved; 128 KiB a token."""
STRADDLING = (30, 3, 64)
"""182.04 tokens in a page of K or V: rows straddle pages."""


# --- traces ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:50.99,396,109\n",
        "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n374,44,418,8.5\n396,109,505,3.6\n",
        "\ufeffContextTokens,GeneratedTokens\n374,44\n396,109\n",
    ],
)
def test_both_forms_of_csv(tmp_path, text):
    path = tmp_path / "two.csv"
    path.write_text(text)
    assert read_trace(path) == Trace("two", [Request(374, 44), Request(396, 109)])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a,b\n1,2\n", r"columns \['a', 'b'\]; it must have ContextTokens,GeneratedTokens or num_prefill"),
        ("", "columns None"),
        ("ContextTokens,GeneratedTokens\n", "holds no request"),
        ("ContextTokens,GeneratedTokens\n5,6\n7,0\n", "line 3: GeneratedTokens is '0'"),
        ("ContextTokens,GeneratedTokens\n-5,6\n", "line 2: ContextTokens is '-5'"),
        ("ContextTokens,GeneratedTokens\n5.5,6\n", "line 2: ContextTokens is '5.5'"),
        ("ContextTokens,GeneratedTokens\n5\n", "line 2: GeneratedTokens is None"),
        ("ContextTokens,GeneratedTokens\n" + "9" * 5000 + ",6\n", "line 2: ContextTokens is '999"),
        ("ContextTokens,GeneratedTokens\n5," + "x" * 200_000 + "\n", "cannot be read: field larger than field limit"),
    ],
)
def test_bad_traces_are_refused(tmp_path, text, named):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named) as refused:
        read_trace(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("requests", [[Request(5, 6)], [Request(5, 6)] * 3, [Request(5, 6), Request(5, 7)]])
def test_requests_without_a_distribution_are_refused(requests):
    with pytest.raises(ConfigError, match="lengths that do not differ"):
        fit(requests)


def test_missing_trace_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.csv cannot be read"):
        read_trace(tmp_path / "none.csv")


@pytest.mark.parametrize("name", FITS)
def test_generator_repeats_itself_and_its_fit(name):
    wanted = FITS[name]
    trace = generate(name, wanted, 5000)
    assert generate(name, wanted, 5000) == trace
    assert generate(name, wanted, 5000, seed=1) != trace
    found = fit(trace.requests)
    # What lies beyond the range is moved to its ends, which narrows the distribution a little.
    assert found[:5] == pytest.approx(wanted[:5], abs=0.12)
    for drawn, seen in ((found.prompt_range, wanted.prompt_range), (found.decode_range, wanted.decode_range)):
        assert seen[0] <= drawn[0] <= drawn[1] <= seen[1]


# --- replay ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [LLAMA, STRADDLING])
@pytest.mark.parametrize("lookahead_tokens", [0, 4, 200])
@pytest.mark.parametrize(("kind", "page_bytes"), LAYOUTS)
def test_jumps_equal_every_token(kind, page_bytes, lookahead_tokens, shape):
    layout = layout_of(shape, kind, page_bytes, slots=2, max_seq_len=900)
    source = random.Random(0)
    with Books(layout, lookahead_tokens=lookahead_tokens) as books:
        profile = measure_profile(books, 900)
        for _ in range(4):
            prompt, decode = source.randrange(1, 700), source.randrange(1, 200)
            by_token = replay(books, prompt, decode, every_token=True)
            assert replay(books, prompt, decode) == by_token
            ends = profile.total(torch.tensor([prompt, prompt + decode])).tolist()
            assert (ends[1] - ends[0]) / decode == by_token


def test_jumps_ask_the_cache_seldom():
    with Books(layout_of(LLAMA, "sliced", 2 * MIB, slots=1, max_seq_len=4096)) as books:
        replay(books, 1000, 3000)
        assert books.cache.stats().steps <= 2 + 3000 // 32 + 1


def test_profile_by_hand():
    held = Profile([1, 4, 6], [10, 20, 30])  # 10 10 10 20 20 30 30 ...
    assert held.total(torch.tensor([0, 1, 3, 4, 5, 6, 8])).tolist() == [0, 10, 30, 50, 70, 100, 160]
    assert held.held(torch.tensor([1, 3, 4, 5, 6, 9])).tolist() == [10, 10, 20, 20, 30, 30]
    assert Profile.modelled(lambda length: -(-length // 3), 3, 8).total(torch.tensor([3, 8])).tolist() == [3, 15]


def waste_of(requests: list[tuple[int, int]]) -> dict[str, dict[str, float]]:
    trace = Trace("known", [Request(*request) for request in requests])
    return footprint._waste(LLAMA, footprint.longest_of(trace), trace)


def test_waste_of_a_trace_known_by_heart():
    # Lengths 31, 32, 33, 34: 4, 4, 8, 8 MiB mapped sliced, 4, 4, 6, 6 interleaved, 4.0625 used on average; then 64: 8.
    found = waste_of([(30, 4), (63, 1)])
    by_hand = {
        "used": (4.0625 + 8) / 2,
        "sliced, 2 MiB pages (measured)": (6 - 4.0625) / 2,
        "interleaved, 2 MiB pages (measured)": (5 - 4.0625) / 2,
        "per layer, 64 KiB pages (measured)": (6 - 4.0625) / 2,
        "per layer, 128 KiB pages (measured)": (8 - 4.0625) / 2,
        "per layer, 256 KiB pages (measured)": (16 - 4.0625 + 8) / 2,
        "per layer, 2 MiB pages (measured)": (128 - 4.0625 + 120) / 2,
        "paged, 16 tokens (modelled)": (5 - 4.0625) / 2,
        "static (modelled)": (8 - 4.0625) / 2,
        # The next page is there at 31 and 32 already, K and V; at 64 tokens, the longest, there is no next.
        "by lookahead: sliced, 2 MiB pages (measured)": (4 + 4) / 4 / 2,
        "by lookahead: interleaved, 2 MiB pages (measured)": (2 + 2) / 4 / 2,
    }
    assert found["waste_mib"] == pytest.approx(by_hand, abs=0.0005)
    by_step = found["waste_mib_by_step"]["sliced, 2 MiB pages (measured)"]
    assert by_step == pytest.approx(4 * (6 - 4.0625) / 5, abs=0.0005)


def test_waste_at_eighths_of_a_trace_known_by_heart():
    # The first at lengths 30 30 31 31 32 32 33 33, the second at 63 eight times, with four steps to one.
    eighths = waste_of([(30, 4), (63, 1)])["waste_mib_by_eighths"]
    used = (4 * 31.5 + 63) / 5 / 8
    assert eighths["used"] == pytest.approx(used, abs=0.0005)
    assert eighths["sliced, 2 MiB pages (measured)"] == pytest.approx((4 * 5 + 8) / 5 - used, abs=0.0005)
    assert eighths["paged, 16 tokens (modelled)"] == pytest.approx((4 * 4.5 + 8) / 5 - used, abs=0.0005)
    # The next page is there from 30 tokens on: beyond 28 of 32. At 63 of 64, the longest, there is no next.
    assert eighths["by lookahead: sliced, 2 MiB pages (measured)"] == pytest.approx(4 * 3 / 5, abs=0.0005)


@pytest.mark.parametrize(("kind", "page_bytes"), LAYOUTS)
def test_largest_batch_is_what_the_pages_allow(kind, page_bytes):
    source = random.Random(1)
    lengths = [source.randrange(1, 900) for _ in range(400)]
    layout = layout_of(STRADDLING, kind, page_bytes, slots=len(lengths) + GROUP, max_seq_len=900)
    budget = 1000 * MIB
    held, fitting = 0, 0
    for length in lengths:
        held += layout.bytes_for(length)
        if held > budget:
            break
        fitting += 1
    with Books(layout, memory_limit=budget) as books:
        assert largest_batch(books, lengths) == fitting
    assert 0 < fitting < len(lengths)


def test_largest_batch_when_all_fit():
    layout = layout_of(LLAMA, "sliced", 2 * MIB, slots=100, max_seq_len=64)
    with Books(layout) as books:
        assert largest_batch(books, [64] * 40) == 40


def test_batch_is_served_full_to_the_last_admission():
    layout = layout_of(LLAMA, "sliced", 2 * MIB, slots=2, max_seq_len=64)
    with Books(layout) as books:
        moments = serve(books.cache, [(30, 2), (1, 3), (40, 5)])
    # The first leaves after two steps, the third takes its slot, the second leaves after three: nobody is left to come.
    assert [moment.seq_lens for moment in moments] == [(31, 2), (32, 3), (41, 4)]
    assert [moment.used_bytes for moment in moments] == [sum(m.seq_lens) * layout.token_bytes for m in moments]
    assert [moment.mapped_bytes // MIB for moment in moments] == [8, 8, 12]
    assert [moment.margin_bytes for moment in moments] == [0, 0, 0]


def test_margin_is_what_a_longer_request_left():
    layout = layout_of(LLAMA, "sliced", 2 * MIB, slots=1, max_seq_len=64)
    with Books(layout) as books:
        moments = serve(books.cache, [(40, 1), (1, 1)])
    assert [moment.own_bytes // MIB for moment in moments] == [8, 4]
    assert [moment.margin_bytes // MIB for moment in moments] == [0, 4]


def test_memory_that_does_not_hold_the_batch():
    layout = layout_of(LLAMA, "sliced", 2 * MIB, slots=2, max_seq_len=64)
    with Books(layout, memory_limit=4 * MIB) as books:
        with pytest.raises(OutOfPagesError, match="needs 2 pages of 2097152 bytes, 0 can be had; use fewer slots"):
            serve(books.cache, [(1, 1), (1, 1)])
        with pytest.raises(OutOfPagesError, match="can be had"):
            books.grow(0, 64)


# --- the benchmark --------------------------------------------------------------------------------------------------


def test_shapes_are_those_that_fit():
    found = shapes(40, quick=False)
    assert found[(32, 4, 128)] == "llama-3-8b TP2, yi-6b TP1"
    assert (60, 8, 128) not in found  # Yi-34B on one GPU leaves no room
    assert found[(80, 2, 128)] == "llama-3-70b TP4"
    assert len(found) == 9
    assert set(shapes(40, quick=True)) < set(found)


def test_layouts_have_the_same_tokens():
    found = layouts((60, 4, 128), 100)
    assert len(found) == len(LAYOUTS)
    assert {layout.token_bytes for layout in found.values()} == {60 * 4 * 128 * 2 * 2}
    assert all(isinstance(layout, KVLayout) for layout in found.values())


WASTE = {"waste_mib", "waste_mib_by_step", "waste_mib_by_eighths"}


def run_bench(monkeypatch, tmp_path, *words: str) -> tuple[int, dict]:
    """Run the benchmark on the host in this process; return its exit code and its result."""
    path = tmp_path / "tiny.csv"
    path.write_text("ContextTokens,GeneratedTokens\n" + "30,4\n63,1\n20,9\n" * 8)
    monkeypatch.setattr(footprint, "QUICK_BUDGET_GB", 1)
    given = ["footprint.py", "--device", "cpu", "--quick", "--trace", str(path), "--out", str(tmp_path), *words]
    monkeypatch.setattr(sys, "argv", given)
    code = footprint.measure(footprint.arguments())
    (written,) = tmp_path.glob("*.json")
    return code, json.loads(written.read_text())


def test_all_parts_on_the_host(monkeypatch, tmp_path):
    code, result = run_bench(monkeypatch, tmp_path)
    assert (code, result["command"]) == (0, "python -m bench.footprint --trace tiny.csv --quick")
    rows = result["rows"]
    measures = {row["measure"] for row in rows}
    assert measures == {*WASTE, "replay", "largest_batch", "serve", "memory"}
    assert all(row["differing_requests"] == 0 for row in rows if row["measure"] == "replay")
    real = [row for row in rows if row["measure"] == "memory"]
    assert len(real) == len(LAYOUTS)
    assert all(row["taken_from_device_mib_at_end"] == row["created_mib_at_end"] > 0 for row in real)
    served = [row for row in rows if row["measure"] == "serve"]
    assert all(row["used_mib"] <= row["held_without_margin_mib"] <= row["held_mib"] for row in served)
    assert str(tmp_path) not in json.dumps(result)


def test_interrupt_leaves_the_parts_that_are_complete(monkeypatch, tmp_path):
    def interrupted(found, options):
        yield {"measure": "half"}
        raise KeyboardInterrupt

    monkeypatch.setitem(footprint.PARTS, "batch", interrupted)
    code, result = run_bench(monkeypatch, tmp_path, "--only", "replay", "batch", "memory")
    assert code == 130
    assert {row["measure"] for row in result["rows"]} == {"replay"}


def test_too_few_short_requests_for_memory(monkeypatch, tmp_path, capsys):
    path = tmp_path / "long.csv"
    path.write_text("ContextTokens,GeneratedTokens\n" + "5000,1\n" * 20)
    _, result = run_bench(monkeypatch, tmp_path, "--only", "memory", "--trace", str(path))
    assert len(result["rows"]) == len(LAYOUTS)  # of the other trace
    monkeypatch.setattr(footprint, "SMALL_TOKENS", 10)
    assert run_bench(monkeypatch, tmp_path, "--only", "memory")[1]["rows"] == []
    assert "memory: not possible, more than 8 requests of up to 10 tokens" in capsys.readouterr().err
