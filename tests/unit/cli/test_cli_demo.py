"""The demo from end to end, with a random model and with real weights, and the parts that show its text."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

import slicedkv.cli.demo
from slicedkv.cli import main
from slicedkv.cli.demo.display import LogDisplay, TerminalDisplay, Transcript
from slicedkv.cli.demo.plot import check_plot
from slicedkv.cli.demo.prompts import draw_jobs

ROOT = Path(__file__).resolve().parents[3]
PNG = b"\x89PNG\r\n\x1a\n"


class WordTokenizer:
    """Stands in for a tokenizer: a token a word, and words that end sentences now and then."""

    def apply_chat_template(self, messages, **options):
        return {"input_ids": [3 + len(word) % 50 for word in messages[0]["content"].split()]}

    def decode(self, tokens, **options):
        return " ".join(f"word{token}{'.' if token % 4 == 0 else ''}" for token in tokens)


@pytest.fixture
def tiny_demo(monkeypatch, tiny_model):
    """The demo with a random model."""
    monkeypatch.setattr(slicedkv.cli.demo, "load_model", lambda dtype, device: (tiny_model(), WordTokenizer()))


@pytest.mark.parametrize("layout", ["sliced", "interleaved", "per_layer"])
def test_demo(capsys, tmp_path, tiny_demo, layout):
    plot = tmp_path / "memory.png"
    words = ("--requests", "9", "--max-batch-size", "3", "--max-tokens", "20", "--device", "host", "--seed", "5")
    assert main(["demo", *words, "--page-bytes", "64KiB", "--layout", layout, "--plot", str(plot)]) == 0
    text = capsys.readouterr().out
    assert "9 requests, 3 at a time" in text
    for number in range(9):
        assert f"[{number:2}] > " in text
        assert f"[{number:2}] -- " in text
    for words in ("measured", "paged, 16 tokens", "static, 3 x 2,048 tokens", "pages reused", "stalls", "mapped now"):
        assert words in text
    assert plot.read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--requests", "0"), "requests is 0"),
        (("--max-batch-size", "-1"), "max_batch_size is -1"),
        (("--dtype", "int8"), "dtype is 'int8'"),
        (("--device", "tpu"), "device is 'tpu'"),
        (("--device", "cuda:99"), "cuda:99"),
        (("--page-bytes", "1000"), "page_bytes"),
        (("--page-bytes", "big"), "'big'"),
        (("--memory-limit", "64KiB", "--page-bytes", "64KiB"), "raise memory_limit"),
        (("--backend", "magic"), "backend is 'magic'"),
        (("--memory-limit", "1.5"), "--memory-limit is 1.5"),
        (("--plot", "/nowhere/at/all.png"), "/nowhere/at/all.png"),
    ],
)
def test_demo_refuses(capsys, tiny_demo, words, message):
    device = () if "--device" in words else ("--device", "host")
    assert main(["demo", *words, *device]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("slicedkv: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize(
    "words",
    [
        ("--page-bytes", "1000"),
        ("--page-bytes", "big"),
        ("--backend", "magic"),
        ("--backend", "flashinfer"),
        ("--max-batch-size", "0"),
        ("--max-batch-size", "100000000000"),
        ("--memory-limit", "2.0"),
        ("--memory-limit", "5"),
        ("--dtype", "int8"),
        ("--plot", "/nowhere/at/all.png"),
        ("--plot", "/"),
        ("--plot", "/proc/version"),
        ("--plot", f"{'x' * 300}.png"),
    ],
)
def test_demo_refuses_before_the_model_is_loaded(capsys, monkeypatch, words):
    monkeypatch.setattr(slicedkv.cli.demo, "load_model", lambda dtype, device: pytest.fail("the model was loaded"))
    assert main(["demo", *words, "--device", "host"]) == 2
    assert capsys.readouterr().err.startswith("slicedkv: ")


def test_looking_at_the_plot_leaves_no_trace(tmp_path):
    new, old = tmp_path / "new.png", tmp_path / "old.png"
    old.write_bytes(b"old")
    check_plot(new)
    check_plot(old)
    assert not new.exists()
    assert old.read_bytes() == b"old"


def test_a_plot_that_cannot_be_written_in_the_end(capsys, tmp_path, tiny_demo, monkeypatch):
    def full(figure, path, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    words = ("--requests", "1", "--max-tokens", "2", "--device", "host", "--plot", str(tmp_path / "memory.png"))
    assert main(["demo", *words]) == 2
    captured = capsys.readouterr()
    assert "No space left on device; give another file" in captured.err
    assert "1 requests in" in captured.out


@pytest.mark.parametrize("limit", ["67108864", "64MiB"])
def test_demo_with_a_limit(capsys, tmp_path, tiny_demo, limit):
    plot = ("--plot", str(tmp_path / "memory.png"))
    assert (
        main(["demo", "--requests", "1", "--max-tokens", "2", "--device", "host", "--memory-limit", limit, *plot]) == 0
    )
    assert "at most 64 MiB, attention" in capsys.readouterr().out


def test_demo_with_real_weights(tmp_path):
    """In a process of its own, as from a shell."""
    words = ("--requests", "4", "--max-batch-size", "2", "--max-tokens", "8", "--device", "host")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "TQDM_DISABLE": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-m", "slicedkv", "demo", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "The capital of France is Paris." in done.stdout
    assert "4 requests in " in done.stdout
    assert len(done.stdout.splitlines()) < 80
    assert (tmp_path / "demo-memory.png").read_bytes().startswith(PNG)


def test_jobs_follow_from_the_seed():
    assert draw_jobs(20, 100, seed=1) == draw_jobs(20, 100, seed=1) != draw_jobs(20, 100, seed=2)
    assert {job.max_tokens for job in draw_jobs(20, 5, seed=1)} == {5}
    assert len({job.question for job in draw_jobs(8, 100, seed=3)}) == 8


def test_transcript_gives_whole_sentences():
    text = "Yes. 1. one\n2. two. And"
    transcript = Transcript(lambda tokens: text[: len(tokens)])
    lines = [line for end in range(len(text)) for line in transcript.take(range(end), last=False)]
    assert lines == ["Yes.", "1. one", "2. two."]
    assert transcript.take(range(len(text)), last=True) == ["And"]
    assert transcript.take(range(len(text)), last=True) == []


def test_log_says_little_about_progress():
    stream = io.StringIO()
    with LogDisplay(stream, interval_s=0.0) as display:
        display.progress(1, 2, "now")
    with LogDisplay(stream, interval_s=3600.0) as display:
        for done in range(1000):
            display.progress(done, 1000, "later")
        display.line("text", 3)
    assert stream.getvalue() == "-- 1 of 2 tokens, now\n[ 3] text\n"


def test_terminal_shows_lines(capsys):
    with TerminalDisplay() as display:
        display.line("[b]text[/b]", 3)
        display.progress(1, 2, "now")
    assert "[ 3] [b]text[/b]" in capsys.readouterr().out
