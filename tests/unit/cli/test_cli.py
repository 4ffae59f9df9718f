"""The command: what it prints, how it fails. The demo has a file of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import slicedkv.cli.bench
import slicedkv.cli.devices
import slicedkv.cli.plan
from slicedkv.cli import main
from slicedkv.cli.devices import choose_device, probe
from slicedkv.cli.footprint import footprints
from slicedkv.cli.text import format_bytes, format_table, parse_bytes, parse_limit
from slicedkv.config import CacheConfig
from slicedkv.errors import BackendUnavailableError, ConfigError
from slicedkv.layout import KVLayout

MIB = 1 << 20


def fails(capsys, *words: str) -> str:
    """Run a command that must fail in one line, and return that line."""
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("slicedkv: ")
    assert captured.err.count("\n") == 1
    return captured.err


# --- info -----------------------------------------------------------------------------------------------------------


def test_info_for_people(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for words in ("device host", "granularity", "vm.max_map_count", "native loops", "torch ", "sdpa: runs"):
        assert words in text


def test_info_as_json(capsys):
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    host = found["devices"]["host"]
    assert host["reason"] is None
    assert 0 < host["free_bytes"] <= host["total_bytes"]
    assert host["address_bytes"] >= 1 << 40
    assert found["packages"]["torch"] == torch.__version__
    assert 0 < found["mapped_areas"]["now"] < found["mapped_areas"]["limit"]
    assert found["attention"]["host"]["reference"] is None
    assert all(device["reason"] or name in found["attention"] for name, device in found["devices"].items())


def test_device_that_is_not_there():
    report = probe("cuda:99")
    assert report.reason
    assert not report.torch_device
    with pytest.raises(BackendUnavailableError, match="cuda:99"):
        choose_device("cuda:99")


def test_automatic_device_falls_back_to_the_host(monkeypatch):
    monkeypatch.setattr(slicedkv.cli.devices, "_PREFERENCE", ("cuda:99", "host"))
    assert choose_device("auto").torch_device == "cpu"


# --- plan -----------------------------------------------------------------------------------------------------------


def test_plan_for_a_known_model(capsys):
    assert main(["plan", "llama-3-8b", "--seq-len", "1000", "--memory", "64GiB"]) == 0
    text = capsys.readouterr().out
    assert "131,072 bytes a token" in text
    cells = {line[:28].strip(): line[28:].split("  ") for line in text.splitlines() if " pages  " in line}
    rows = {name: [cell.strip() for cell in row if cell.strip()] for name, row in cells.items()}
    # 1,000 tokens are 125 MiB: 31.25 pages of 2 MiB for K and as many for V, or one page for each of 64 planes.
    assert rows["sliced, 2 MiB pages"][:2] == ["32", "3 MiB"]
    assert rows["per layer, 2 MiB pages"][:2] == ["1,024", "3 MiB"]
    assert rows["interleaved, 2 MiB pages"][:2] == ["16", "1 MiB"]


def test_plan_for_a_shape(capsys):
    shape = ("--layers", "60", "--kv-heads", "8", "--head-dim", "128", "--tensor-parallel", "2")
    assert main(["plan", *shape]) == 0
    assert "4 KV heads of 128" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "shape is incomplete"),
        (("--layers", "3"), "--kv-heads --head-dim"),
        (("yi-34b", "--tensor-parallel", "3"), "tensor_parallel is 3"),
        (("yi-34b", "--tensor-parallel", "0"), "tensor_parallel is 0"),
        (("yi-34b", "--seq-len", "40000"), "seq_len is 40000"),
        (("yi-34b", "--layers", "0"), "num_layers is 0"),
        (("yi-34b", "--dtype", "int8"), "dtype is 'int8'"),
        (("yi-34b", "--memory", "much"), "--memory is 'much'"),
    ],
)
def test_plan_refuses(capsys, words, message):
    assert message in fails(capsys, "plan", *words)


def test_plan_shares_heads_among_more_gpus_than_heads(capsys):
    assert main(["plan", "yi-6b", "--tensor-parallel", "8"]) == 0
    assert "1 KV heads of 128 on each GPU of 8" in capsys.readouterr().out


def config_of(folder: Path, **fields) -> Path:
    """A folder with a model's config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


LLAMA = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        (LLAMA, "32 layers, 8 KV heads of 128"),
        (LLAMA | {"head_dim": 256}, "32 layers, 8 KV heads of 256"),
        (LLAMA | {"num_key_value_heads": None}, "32 layers, 32 KV heads of 128"),
        ({"text_config": LLAMA, "hidden_size": 7}, "32 layers, 8 KV heads of 128"),
        (LLAMA | {"layer_types": ["full_attention", "sliding_attention"]}, "32 layers, 8 KV heads of 128"),
    ],
)
@pytest.mark.parametrize("name", ["", "config.json"])
def test_plan_for_a_config(capsys, tmp_path, fields, shape, name):
    folder = config_of(tmp_path / "some-model", **fields)
    assert main(["plan", str(folder / name)]) == 0
    assert capsys.readouterr().out.startswith(f"some-model: {shape} on each GPU of 1")


def test_plan_for_the_config_of_this_folder(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(config_of(tmp_path / "here", **LLAMA))
    assert main(["plan", "config.json", "--layers", "3"]) == 0
    assert capsys.readouterr().out.startswith("here: 3 layers, 8 KV heads of 128")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "has no num_hidden_layers; give --layers"),
        ({"text_config": {"model_type": "llama"}}, "has no num_hidden_layers"),
        (LLAMA | {"num_hidden_layers": "many"}, "is 'many'; it must be an integer"),
        (LLAMA | {"num_key_value_heads": [8, 4]}, "is [8, 4]; it must be an integer"),
        (LLAMA | {"num_hidden_layers": 0}, "is 0; it must be >= 1"),
        (LLAMA | {"hidden_size": 4000, "num_attention_heads": 30}, "hidden_size 4000 is no multiple of 30 heads"),
        ({**LLAMA, "hidden_size": None}, "has no hidden_size"),
        (LLAMA | {"kv_lora_rank": 512}, "has kv_lora_rank: its layers hold latent rows"),
        (LLAMA | {"layer_types": ["full_attention", "linear_attention"]}, "layers of type linear_attention, which"),
        (LLAMA | {"num_kv_shared_layers": 10}, "some of its layers have no K and V of their own"),
        (LLAMA | {"multi_query": True}, "its KV heads are counted otherwise"),
        (LLAMA | {"is_encoder_decoder": True}, "an encoder and a decoder"),
    ],
)
def test_plan_refuses_a_config_that_it_does_not_understand(capsys, tmp_path, fields, message):
    folder = config_of(tmp_path / "some-model", **fields)
    told = fails(capsys, "plan", str(folder))
    assert message in told
    assert str(folder / "config.json") in told


@pytest.mark.parametrize(
    ("content", "message"), [(b"{", "is not JSON"), (b"[1]", "is a list"), (b"\xff\xfe", "not JSON")]
)
def test_plan_refuses_what_is_no_config(capsys, tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    assert message in fails(capsys, "plan", str(tmp_path))


def test_plan_names_a_config_that_is_not_there(capsys, tmp_path):
    assert "config.json cannot be read: No such file" in fails(capsys, "plan", str(tmp_path))
    assert "there is no model or file 'llama-9'; use one of llama-3-8b" in fails(capsys, "plan", "llama-9")


@pytest.mark.parametrize(("kind", "page_bytes", "key"), [("sliced", 2 * MIB, "sliced"), ("per_layer", 65536, "static")])
def test_footprints(kind, page_bytes, key):
    layout = KVLayout(kind, 4, 2, 16, 2, 8, 1000, page_bytes)
    found = footprints(layout)
    lens = (1, 17, 1000)
    assert found["paged"].held_bytes(lens) == (16 + 32 + 1008) * layout.token_bytes
    assert found["static"].held_bytes(lens) == found["static"].held_bytes(()) == 8 * 1000 * layout.token_bytes
    assert found["sliced"].held_bytes(lens) == 3 * 2 * 2 * MIB
    assert found["per_layer"].held_bytes(lens) == 3 * 8 * 2 * MIB
    assert found["per_layer_small"].held_bytes(lens) == 8 * (1 + 1 + 1) * 65536
    assert found[key].tokens_per_page > 0


# --- bench ----------------------------------------------------------------------------------------------------------


def test_bench_list(capsys):
    assert main(["bench", "--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert "mapper" in listed
    assert "common" not in listed


def test_bench_runs_a_script_with_its_arguments(capsys, monkeypatch, tmp_path):
    script = 'import sys\n\nif __name__ == "__main__":\n    print(sys.argv[1:])\n'
    (tmp_path / "echo.py").write_text(script)
    monkeypatch.setattr(slicedkv.cli.bench, "FOLDER", tmp_path)
    before, path = sys.argv, sys.path[:]
    assert main(["bench", "echo", "--quick", "x"]) == 0
    assert capsys.readouterr().out == "['--quick', 'x']\n"
    assert sys.argv is before
    assert sys.path == path


def test_bench_is_not_hidden_by_a_module_of_its_name(capsys, monkeypatch, tmp_path):
    folder, other = tmp_path / "checkout" / "measures", tmp_path / "other"
    for path, text in (
        (folder / "__init__.py", ""),
        (folder / "tool.py", "FOUND = 'ours'\n"),
        (other / "measures.py", ""),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "echo.py").write_text('from .tool import FOUND\n\nif __name__ == "__main__":\n    print(FOUND)\n')
    monkeypatch.syspath_prepend(other)
    monkeypatch.setattr(slicedkv.cli.bench, "FOLDER", folder)
    assert main(["bench", "echo"]) == 0
    assert capsys.readouterr().out == "ours\n"


def bench_folder(monkeypatch, tmp_path, **scripts: str) -> None:
    """Measurements of these names, each with these statements."""
    for name, body in scripts.items():
        (tmp_path / f"{name}.py").write_text(
            f'"""What {name} is for."""\n{body}\nif __name__ == "__main__":\n    pass\n'
        )
    monkeypatch.setattr(slicedkv.cli.bench, "FOLDER", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_bench_without_a_name_runs_all_that_can_run(capfd, monkeypatch, tmp_path):
    say = "import sys; print('ran', sys.argv[1:], flush=True)"
    bench_folder(monkeypatch, tmp_path, zebra=say, ape=say, gpu_only=f"NEEDS_GPU = True\n{say}", report=say)
    assert main(["bench", "--quick"]) == 0
    ran = [line.partition(" after")[0] for line in capfd.readouterr().out.splitlines() if line]
    each = [("ape", ["--quick"]), ("zebra", ["--quick"]), ("report", [])]
    assert ran[:-1] == [line for name, words in each for line in (f"{name}:", f"ran {words}", f"{name}: done")]
    assert ran[-1] == "not run, for they need a GPU and torch finds none: gpu_only"
    assert main(["bench", "--list"]) == 0
    assert "gpu_only  What gpu_only is for. (needs a GPU)\n" in capfd.readouterr().out


@pytest.mark.thorough
def test_bench_with_a_gpu_runs_the_rest_too(capfd, monkeypatch, tmp_path):
    bench_folder(monkeypatch, tmp_path, gpu_only="NEEDS_GPU = True")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main(["bench"]) == 0
    assert "gpu_only: done" in capfd.readouterr().out


@pytest.mark.thorough
def test_bench_goes_on_after_a_failure(capfd, monkeypatch, tmp_path):
    say = "import sys; print('ran', sys.argv[1:], flush=True)"
    bench_folder(monkeypatch, tmp_path, bad="raise SystemExit(3)", good=say, report=say)
    assert main(["bench", "--out", "there"]) == 1
    out = capfd.readouterr().out
    assert "bad: exit code 3" in out
    assert "ran ['--out', 'there']" in out
    assert "report" not in out  # it reads the folder of the checkout only
    assert out.endswith("failed: bad\n")


@pytest.mark.thorough
def test_bench_gives_an_interrupted_script_time_to_write(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\n"
        'if __name__ == "__main__":\n'
        "    try:\n"
        "        print('measuring', flush=True)\n"
        "        time.sleep(60)\n"
        "    except KeyboardInterrupt:\n"
        "        time.sleep(0.5)\n"
        "        pathlib.Path(__file__).with_name('written').touch()\n"
    )
    (tmp_path / "then.py").write_text('if __name__ == "__main__":\n    print("must not run")\n')
    code = f"import pathlib, sys, slicedkv.cli.bench as b; b.FOLDER = pathlib.Path({str(tmp_path)!r}); "
    code += "from slicedkv.cli import main; sys.exit(main(['bench']))"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as child:
        assert child.stdout is not None
        while "measuring" not in child.stdout.readline():
            assert child.poll() is None
        os.killpg(child.pid, signal.SIGINT)  # as the terminal does
        rest = child.stdout.read()
    assert child.returncode == 130
    assert (tmp_path / "written").exists()
    assert "must not run" not in rest


def test_bench_refuses(capsys, monkeypatch, tmp_path):
    assert "no measurement 'nothing'" in fails(capsys, "bench", "nothing")
    monkeypatch.setattr(slicedkv.cli.bench, "FOLDER", tmp_path / "bench")
    assert "come with the source" in fails(capsys, "bench", "--list")


# --- errors and text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [[], ["nothing"], ["plan", "--no-such-option"], ["demo", "--layout", "round"]])
def test_usage_errors(capsys, words):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "usage: slicedkv" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"slicedkv {slicedkv.__version__}\n"


def test_interrupt_leaves_quietly(capsys, monkeypatch):
    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(slicedkv.cli.plan, "run", interrupt)
    assert main(["plan", "yi-6b"]) == 130
    assert capsys.readouterr() == ("", "")


def test_reader_that_leaves_early():
    command = f"{sys.executable} -m slicedkv plan yi-6b | head -n 1"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("yi-6b: ")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (1023, "1,023 bytes"), (1024, "1 KiB"), (3 * MIB // 2, "1.5 MiB"), (1 << 50, "1,024 TiB")],
)
def test_format_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("text", "limit"),
    [("67108864", 64 * MIB), ("64MiB", 64 * MIB), ("1", 1), ("0.5", 0.5), ("1.0", 1.0), (".25", 0.25)],
)
def test_limits(text, limit):
    found = parse_limit("--limit", text)
    assert (found, type(found)) == (limit, type(limit))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1.5", "--limit is 1.5; with a point it is a fraction of the free memory"),
        ("0.0", "--limit is 0.0; with a point it is a fraction"),
        ("0", "--limit is 0; it must be in"),
        ("64 MB of it", "--limit is '64 MB of it'; write it like '40GiB'"),
        ("6e7", "--limit is '6e7'; write it like"),
        ("nan", "--limit is 'nan'; write it like"),
    ],
)
def test_limits_that_are_none(text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_limit("--limit", text)


def test_text():
    assert parse_bytes("--size", "64KiB") == 65536
    table = format_table(("name", "size"), [("a", "1 KiB"), ("bcd", "10 KiB")], indent="")
    assert table == "name    size\na      1 KiB\nbcd   10 KiB"


def test_known_models_are_valid():
    for layers, heads, dim in slicedkv.cli.plan.MODELS.values():
        CacheConfig(
            num_layers=layers,
            num_kv_heads=heads,
            head_dim=dim,
            dtype=torch.bfloat16,
            max_batch_size=1,
            max_seq_len=1,
            device=torch.device("cpu"),
        )


def test_measurements_that_refuse_the_host_say_so():
    for path in slicedkv.cli.bench.FOLDER.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert ("this benchmark needs an NVIDIA GPU" in text) == ("\nNEEDS_GPU = True\n" in text), path.name
