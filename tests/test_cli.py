"""The command line: exit codes, JSON on stdout alone, errors that tell what to do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvbackend
from kvbackend.cli import COMMANDS, main


def run(*arguments: str) -> int:
    """The exit code, whether the command returned it or argparse exited with it."""
    try:
        return main(arguments)
    except SystemExit as stopped:
        return int(stopped.code or 0)


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code = main([*arguments, "--json"])
    assert code == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["schema"] == f"kvbackend-{arguments[0]}/1"
    assert found["version"]
    return found


def test_ops(capsys: pytest.CaptureFixture[str]) -> None:
    found = {op["name"]: op for op in document(capsys, "ops")["ops"]}
    assert found["paged_attention"]["group"] == "dense attention"
    *kernels, last = found["paged_attention"]["backends"]
    assert {"cpu", "npu"} <= set(kernels)
    assert last == "reference"
    assert all({"name", "group", "summary", "backends"} <= op.keys() for op in found.values())


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "explain", "paged_attention", "--dtype", "float32", "--sample", "sinks")
    assert (found["op"], found["device"], found["chosen"]) == ("paged_attention", "cpu", "cpu")
    assert [backend["name"] for backend in found["backends"]] == ["cpu", "reference"]
    assert [backend["status"] for backend in found["backends"]] == ["chosen", "lower"]


def test_explain_says_where_automatic_sparsity_begins(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbackend.cache import crossover

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = "explain", "sparse_attention", "--dtype", "float32", "--shape", "8/2/64", "--topk", "32"
    found = document(capsys, *asked)["automatic"]
    assert found["dense_below"] == 800
    assert "not measured on this device: 8 times the 100 tokens that a query reads" in found["why"]
    case = crossover.Case(**found["case"])
    for rows, below in (([(1024, 9.0, 9.5), (2048, 18.0, 10.0)], 2048), ([(512, 9.0, 9.5), (1024, 18.0, 19.0)], 2048)):
        crossover.save(case, [crossover.Row(*row, {}) for row in rows])
        found = document(capsys, *asked)["automatic"]
        assert (found["dense_below"], found["mode"]) == (below, f"dense below {below} tokens, sparse from there on")
        assert "measured on" in found["why"]
        assert case.device in found["why"]
        assert document(capsys, *asked, "--reselect", "4")["automatic"]["dense_below"] == 800  # another case
    on_meta = document(capsys, *asked, "--device", "meta")["automatic"]
    assert (on_meta["case"]["device"], on_meta["dense_below"]) == ("meta", 800)
    in_float64 = document(capsys, "explain", "sparse_attention", "--dtype", "float64")
    assert in_float64["chosen"] == "reference"
    assert "automatic" not in in_float64  # no cache holds it
    assert "automatic" not in document(capsys, "explain", "paged_attention")
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert "automatic mode (dense_below='auto'): dense below 2048 tokens, sparse from there on; " in shown
    assert "not faster up to 1024 tokens" in shown


def test_matrix(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    found = document(capsys, "matrix", "reshape_and_cache", "--quick", "--html", str(page))
    assert found["summary"]["fail"] == found["summary"]["crashed"] == 0
    assert found["devices"] == ["cpu"]
    cells = found["cells"]
    assert len(cells) == sum(found["summary"].values())
    here = {(cell["backend"], cell["dtype"], cell["status"]) for cell in cells if cell["device"] == "cpu"}
    dtypes = ("float32", "bfloat16", "float16")
    assert here == {(backend, dtype, "pass") for backend in ("cpu", "reference") for dtype in dtypes}
    assert {cell["format"] for cell in cells} >= {"auto", "mxfp8/mxfp4"}
    keys = {"op", "backend", "device", "dtype", "format", "sample", "status", "reasons", "max_error", "evidence"}
    assert all(keys <= cell.keys() for cell in cells)
    elsewhere = {(cell["status"], bool(cell["reasons"])) for cell in cells if cell["device"] != "cpu"}
    assert elsewhere == {("refused", True), ("untested", True)}
    assert found["versions"]["torch"]
    assert found["chips"]["cpu"]["arch"] == found["host"]["machine"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", found["date"])
    assert json.dumps(found["date"][:10])[1:-1] in page.read_text("utf-8")
    assert not list(tmp_path.glob(".page*")), "what is written in parts must not stay"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "paged_atention"], "there is no op 'paged_atention'; the ops are"),
        (["explain", "paged_attention", "--dtype", "float33"], "--dtype is 'float33'"),
        (["explain", "paged_attention", "--sample", "x"], "--sample is 'x'; paged_attention has decode"),
        (["explain", "paged_attention", "--device", "cudda"], "--device is 'cudda'"),
        (["matrix", "--backend", "cudda"], "--backend is 'cudda'; installed are cpu"),
        (["matrix", "--device", "cudda"], "--device is 'cudda'; torch cannot use it here"),
        (["matrix", "--device", "meta"], "--device is 'meta', which holds no numbers"),
        (["matrix", "reshape_and_cach"], "there is no op 'reshape_and_cach'"),
        (["matrix", "--html", "/no/such/folder/page.html"], "its folder must exist and be writable"),
        (["matrix", "--html", "/tmp"], "'/tmp' names no file; one is written there"),
        (["matrix", "--html", ""], "'' names no file; one is written there"),
        (["matrix", "--readme", ""], "--readme is given without merge"),
        (["explain", "paged_attention", "--dtype", "int8"], "--dtype is 'int8'; samples come in float32"),
        (["plan", "--layers", "1000000000", "--kv-heads", "8", "--head-dim", "128"], "must be a whole number from 1"),
        (["plan", "--layers", "4", "--kv-heads", "8", "--latent", "512"], "--latent is given with --kv-heads"),
        (["plan", "llama-3-8b", "--block-size", "99999999999"], "block_size is 99999999999"),
        (["run", "--block-size", "999999999"], "--block-size is 999999999"),
        (["doctor", "--list-checks", "--json"], "--list-checks and --json are given"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        ([], "COMMAND"),
    ],
)
def test_usage_errors_exit_with_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out


def test_a_closed_pipe_is_no_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m kvbackend ops --json | head -c 20", shell=True, capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        assert run(command, "--help") == 0
        assert f"kvbackend {command}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["ops"], ["ops", "--json"]])
def test_a_full_disk_is_said(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvbackend", *arguments], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "kvbackend ops: the output cannot be written (No space left on device): make room\n"


def test_bench_keeps_where_sparse_attention_pays(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = "--shape", "4/2/16", "--topk", "8", "--contexts", "100/200", "--dtype", "float32"
    with kvbackend.use("reference"):
        found = document(capsys, "bench", "--crossover", *options)["crossover"]
        assert main(["bench", "--crossover", *options]) == 0
    assert "measured on" in capsys.readouterr().out
    assert [row["context"] for row in found["rows"]] == [100, 200]
    assert (found["case"]["heads"], found["case"]["topk"], found["case"]["dtype"]) == (4, 8, "float32")
    assert [file.name for file in (tmp_path / "kvbackend").iterdir()] == ["crossover.json"]
    assert run("bench", "--crossover", "--shape", "8/3/16", "--contexts", "512") == 2
    assert "heads is 8 with 3 kv heads" in capsys.readouterr().err
    assert run("bench", "--crossover", "--shape", "4/2") == 2
    assert "--shape is '4/2'; it must be 3 numbers" in capsys.readouterr().err
