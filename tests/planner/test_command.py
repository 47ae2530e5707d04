"""`kvbackend plan`: exit codes, text, JSON, the walk and the picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbackend.cli import main
from kvbackend.planner.configs import builtin
from kvbackend.planner.walk import walk


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["plan", *argv])
    out, err = capsys.readouterr()
    return code, out, err


def document(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> dict[str, Any]:
    got, out, _ = run(capsys, *argv, "--json")
    assert got == code
    found: dict[str, Any] = json.loads(out)
    assert found["schema"] == "kvbackend-plan/1"
    return found


def test_json_keys_that_programs_rely_on(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "deepseek-v4-flash")
    assert found["bytes_per_token"] == 3514.25
    assert found["allocated_bytes_per_token"] == 3563.25
    assert found["fixed_bytes_per_sequence"] == 15420416
    assert (found["model"], found["attention"], found["scheme"]) == ("deepseek-v4-flash", "v4_hybrid", "native")
    assert found["max_sequences"] is found["max_context"] is found["fits"] is None
    assert sum(layer["bytes_per_token"] for layer in found["layers"]) == 3514.25
    assert found["layers"][2] == {"index": 2, "kind": "csa", "bytes_per_token": 163}
    assert "3514.25 B per token" in found["formula"]
    assert found["version"]


def test_whole_numbers_stay_whole(capsys: pytest.CaptureFixture[str]) -> None:
    value = document(capsys, "deepseek-v3")["bytes_per_token"]
    assert (value, type(value)) == (70272, int)


def test_compared_schemes_are_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "llama-3-8b", "--memory", "80GiB", "--compare", "bf16", "int8", "int4,recent=128")
    assert [scheme["bytes_per_token"] for scheme in found["schemes"]] == [131072, 67584, 40960]
    assert found["schemes"][0]["max_sequences"] == 53
    found = document(capsys, "llama-3-8b", "--kv-format", "fp32", "--compare", "bf16")
    assert [scheme["scheme"] for scheme in found["schemes"]] == ["fp32", "bf16"]


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["llama-3-8b"], 0),
        (["llama-3-8b", "--memory", "80GiB"], 0),
        (["llama-3-8b", "--memory", "24GiB", "--sequences", "64"], 1),
        (["llama-3-8b", "--memory", "24GiB", "--sequences", "64", "--compare", "bf16", "int4"], 1),
        (["llama-3-8b", "--memory", "24GiB", "--sequences", "6", "--compare", "bf16", "int4"], 0),
        (["llama-3-8b", "--memory", "8GiB"], 2),
        (["llama-3-8b", "--kv-format", "v4_fp8_584"], 2),
        (["llama-3-8b", "--context", "0"], 2),
        (["llama-9"], 2),
        ([], 2),
        (["--layers", "4"], 2),
        (["llama-3-8b", "--layers", "4"], 2),
    ],
)
def test_exit_codes(capsys: pytest.CaptureFixture[str], argv: list[str], code: int) -> None:
    got, out, err = run(capsys, *argv)
    assert got == code
    if code == 2:
        assert err.startswith("kvbackend plan: ")
        assert ";" in err
        assert not out
    if code == 1:
        assert "short of" in out or "smaller" in out


def test_the_shortfall_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("llama-3-8b", "--memory", "24GiB", "--sequences", "64")
    assert "a device is 58.558 GiB short of 64 sequences of 8192 tokens" in run(capsys, *argv)[1]
    assert document(capsys, *argv, code=1)["shortfall_bytes"] == 64 * 2**30 - (24 * 2**30 - 16060522496) + int(
        24 * 2**30 * 0.1
    ) + int(24 * 2**30 * 0.05)


@pytest.mark.parametrize(
    ("argv", "per_token"),
    [
        ("--layers 48 --kv-heads 8 --head-dim 128", 196608),
        ("--layers 48 --latent 512 --rope 64", 55296),
        ("--layers 61 --latent 512 --rope 64 --index-dim 128 --index-topk 2048", 48068),
        ("--layers 2 --kv-heads 2 --head-dim 64 --value-head-dim 32", 2 * 2 * 96 * 2),
        ("--layers 2 --kv-heads 2 --head-dim 64 --window 128", 0),
    ],
)
def test_shapes_in_place_of_a_model(capsys: pytest.CaptureFixture[str], argv: str, per_token: int) -> None:
    assert document(capsys, *argv.split())["bytes_per_token"] == per_token


def test_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fields = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert document(capsys, str(tmp_path))["bytes_per_token"] == 2 * 2 * 4 * 64 * 2


def test_text_shows_memory_vllm_and_the_formula(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "deepseek-v4-flash", "--device", "h200", "--tp", "8", "--explain", "--context", "131072")
    assert "21 csa layers x (584 / 4 + 68 / 4) + 20 hca layers x (584 / 128) = 3514.25 B per token" in out
    assert "43 x 128 rows x 584 + 21 x 81920 (state) + 20 x 524288 (state) = 15420416 B per sequence" in out
    assert "--tensor-parallel-size 8" in out
    assert "--max-model-len 131072" in out
    assert "margin, 10%" in out
    assert "us at least" in out


def test_a_share_of_the_tokens_multiplies_the_whole_row(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "llama-3-8b", "--kv-format", "int4,keep=25%,recent=64")
    assert found["formula"] == "32 full layers x ((8 x (64 + 16) + 8 x (64 + 16)) x 0.25) = 10240 B per token"
    assert found["fixed_formula"] == "32 x 127 rows x 4096 = 16646144 B per sequence"


def test_the_walk(capsys: pytest.CaptureFixture[str]) -> None:
    steps = walk(builtin("deepseek-v2"))
    assert [step.cache.per_token for step in steps] == [
        60 * 128 * (192 + 128) * 2, 60 * 8 * 256 * 2, 60 * 1152, 60 * 656, 60 * (656 + 132), 0, 69120,
    ]  # fmt: skip
    assert float(steps[0].cache.per_token / steps[2].cache.per_token) == pytest.approx(71.1, abs=0.02)
    assert steps[4].cache.read_bytes_at(1 << 17) < steps[3].cache.read_bytes_at(1 << 17)
    assert steps[5].cache.bytes_at(1 << 17) == 60 * 788 * 4096
    _, out, _ = run(capsys, "deepseek-v2", "--walk")
    assert [line.split()[0] for line in out.splitlines()[-7:]] == [
        "MHA", "GQA-8", "MLA", "quantize", "sparse", "evict", "deepseek-v2",
    ]  # fmt: skip
    assert len(document(capsys, "deepseek-v2", "--walk")["walk"]) == 7


def test_a_walk_needs_query_heads(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "--layers", "2", "--latent", "512", "--rope", "64", "--walk")
    assert code == 2
    assert "--heads" in err


def test_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "cache.png"
    argv = ("llama-3-8b", "--device", "h100", "--compare", "bf16", "int4", "--plot", str(file))
    code, _, err = run(capsys, *argv)
    assert code == 0
    assert "plot written" in err
    assert file.read_bytes().startswith(b"\x89PNG")
    assert file.stat().st_size > 10_000


@pytest.mark.parametrize("name", ["x.nope", "nowhere/x.png", "x"])
def test_plots_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    code, out, err = run(capsys, "llama-3-8b", "--plot", str(tmp_path / name))
    assert code == 2
    assert "--plot is" in err
    assert not out


def test_a_folder_or_nothing_is_no_place_for_a_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    for place, message in (
        (tmp_path / "folder.png", "names no file; one is written there"),
        ("", "--plot is ''; it must be a .png"),
    ):
        code, out, err = run(capsys, "llama-3-8b", "--plot", str(place))
        assert code == 2
        assert message in err
        assert not out


def test_without_matplotlib_the_message_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = run(capsys, "llama-3-8b", "--plot", "x.png")
    assert code == 2
    assert "pip install matplotlib" in err


def test_without_rich_tables_are_plain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run(capsys, "llama-3-8b")[1]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setitem(sys.modules, "rich.table", None)
    assert run(capsys, "llama-3-8b")[1] == plain


def test_help_lists_models_devices_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("deepseek-v4.1-flash", "ascend950dt", "recent", "exit codes"))
