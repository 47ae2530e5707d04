"""The curves: their points, and their picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvbackend import cli
from kvbackend.bench import curves


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "CONTEXTS", (16, 48))
    monkeypatch.setattr(curves, "SEQUENCES", (1, 3))
    monkeypatch.setattr(curves, "CONTEXT", 32)
    monkeypatch.setattr(curves, "THREADS_CONTEXT", 40)
    monkeypatch.setattr(curves, "ROUNDS", 1)


def test_every_curve_has_its_points(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curves.png"
    assert cli.main(["bench", "--curves", "--json", "--plot", str(picture)]) == 0
    found = {(p["op"], p["curve"], p["at"]): p for p in json.loads(capsys.readouterr().out)["curves"]}
    threads = range(1, torch.get_num_threads() + 1)
    for op in curves.OPS:
        for curve, at in [("context", (16, 48)), ("sequences", (1, 3)), ("threads", threads)]:
            assert [key[2] for key in found if key[:2] == (op, curve)] == list(at)
    assert found["paged_attention", "context", 48]["tokens"] == 48
    assert found["mla_attention", "sequences", 3]["tokens"] == 96
    assert all(point["median_us"] > 0 for point in found.values())
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_threads_are_set_back() -> None:
    before, seen = torch.get_num_threads(), []
    curves._with_threads(before + 1, lambda: seen.append(torch.get_num_threads()))
    with pytest.raises(ZeroDivisionError):
        curves._with_threads(before + 2, lambda: 1 // 0)
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--curves", "copy_blocks"], "it has paged_attention and mla_attention"),
        (["--plot", "x.png"], "add --curves"),
        (["--curves", "--plot", "x.nothing"], "must be a .png"),
        (["--curves", "--peers"], "--curves and --peers are given"),
        (["--model", "ascend950pr_9599", "--crossover"], "each measures something of its own"),
        (["--crossover", "transcode"], "it measures no single op"),
        (["--model", ""], "''"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *arguments]) == 2
    assert why in capsys.readouterr().err
