"""ci/matrix.toml: each wanted combination exists, by the compatibility matrix; which are covered."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbackend.cli import main
from kvbackend.errors import ArgumentError
from kvbackend.matrix import merge, wanted

from .test_merge import H200, made, write  # noqa: F401

PATH = Path(__file__).parents[2] / "ci" / "matrix.toml"
ROWS = wanted.read(str(PATH))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row.values()))
def test_the_versions_go_together(row: wanted.Row) -> None:
    found = wanted.rulings(row)
    assert found
    assert {ruling.state for ruling in found} == {"ok"}, [str(ruling) for ruling in found]


def test_every_kind_of_device_is_wanted() -> None:
    assert {row["device"] for row in ROWS} == {"cpu", "cuda", "npu"}
    assert {row["arch"] for row in ROWS} >= {"x86_64", "aarch64", "sm_90", "Ascend950PR", "Ascend950DT"}


@pytest.mark.parametrize(
    ("change", "state"),
    [
        (dict(torch="2.11.0"), "bad"),  # torch_npu is made for one torch
        (dict(cann="8.5.0"), "bad"),  # older than the chip
        (dict(torch_npu="2.12.0", cann="7.0.0"), "unknown"),
        (dict(python="3.8"), "bad"),
        (dict(arch="Ascend951"), "bad"),
    ],
)
def test_combinations_that_do_not_exist_are_noticed(change: dict[str, str], state: str) -> None:
    row = next(row for row in ROWS if row["arch"] == "Ascend950DT")
    assert state in {ruling.state for ruling in wanted.rulings(row | change)}


def test_cuda_rows_name_the_wheels_own_cuda_and_triton() -> None:
    row = next(row for row in ROWS if row["arch"] == "sm_90")
    for change in (dict(cuda="12.8"), dict(triton="3.6.0"), dict(torch="2.10.0"), dict(arch="sm_100", cuda="11.8")):
        assert "bad" in {ruling.state for ruling in wanted.rulings(row | change)}, change


def test_which_runs_cover_a_row(write, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    row = next(row for row in ROWS if row["arch"] == "sm_90")
    paths = write("a.json", H200), write("b.json", made("cpu", date="2026-12-09T00:00:00Z"))
    runs = merge.distinct(run for path in paths for run in merge.read(path))
    assert wanted.covering(row, runs) == [1]
    for change in (dict(arch="sm_100"), dict(torch="2.12.0"), dict(python="3.12"), dict(cuda="12.8"), dict(triton="3")):
        assert not wanted.covering(row | change, runs), change
    cpu = next(row for row in ROWS if row["arch"] == "x86_64" and row["python"] == "3.11" and row["torch"] == "2.13.0")
    assert wanted.covering(cpu, runs) == [2]
    assert main(["matrix", "merge", *paths, "--wanted", str(PATH)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "│ cuda │ sm_90 │ python 3.11, torch 2.13.0, cuda 13.0, triton 3.7.1 │ [1] │" in shown
    assert "│ npu │ Ascend950PR │ python 3.11, torch 2.12.0, torch_npu 2.12.0.post2, cann 9.1.0 │ no run │" in shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wanted = 3", "has no [[wanted]]"),
        ("[[wanted", "cannot be read"),
        ("[[wanted]]\ndevice = 'gpu'", "has device 'gpu'; it must be one of cpu, cuda, npu"),
        ("[[wanted]]\ndevice = ['cpu']", "has device ['cpu']; it must be one of cpu, cuda, npu"),
        ("[[wanted]]\ndevice = 'cpu'", "for cpu it must name arch, device, python, torch"),
        ("[[wanted]]\ndevice = 'cpu'\narch = 'x'\npython = 3.11\ntorch = '2'", "has values that are no text"),
        ("[[wanted]]\ndevice = 'cpu'\narch = 'x'\npython = []\ntorch = '2'", "python is []; it must be a text"),
        ("[[wanted]]\ndevice = 'cpu'\narch = ''\npython = '3'\ntorch = '2'", "arch is ''; it must be a text"),
    ],
)
def test_files_that_say_nothing(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "matrix.toml").write_text(text)
    with pytest.raises(ArgumentError) as told:
        wanted.read(str(tmp_path / "matrix.toml"))
    assert message in str(told.value)


TOML = st.recursive(
    st.text("ab.1", max_size=3) | st.integers(0, 9) | st.booleans(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=3,
)


def written(value: Any) -> str:
    """As TOML has it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {written(inner)}" for key, inner in value.items()) + "}"
    return "[" + ", ".join(map(written, value)) + "]" if isinstance(value, list) else json.dumps(value)


@given(
    st.sampled_from([row for row in ROWS if row["python"] == "3.11"]),
    st.dictionaries(st.sampled_from(["device", "arch", "python", "torch", "cuda", "more"]), TOML, max_size=3),
)
def test_values_of_any_kind_are_read_or_refused_in_words(row: wanted.Row, change: dict[str, Any]) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write("[[wanted]]\n" + "\n".join(f"{name} = {written(value)}" for name, value in (row | change).items()))
        file.flush()
        try:
            found, told = wanted.read(file.name), file.name
        except ArgumentError as error:
            found, told = [], str(error)
    assert file.name in told
    for read in found:
        assert all(isinstance(value, str) for value in read.values())
        wanted.rulings(read)
        wanted.covering(read, [])
