"""`kvbackend matrix merge`: what several machines found, together; and that the README says just that."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbackend import backends
from kvbackend.cli import main
from kvbackend.errors import ArgumentError
from kvbackend.matrix import Cell, merge, wanted
from kvbackend.matrix.page import page
from kvbackend.ops import registry

ROOT = Path(__file__).parents[2]


def made(kind: str, *cells: tuple[str, ...], **head: Any) -> dict[str, Any]:
    """A document as a machine of that kind would have written it; cells: op, backend, status, sample, dtype."""
    found = [
        Cell(
            op,
            backend,
            kind if kind != "npu" else "npu:0",
            dtype,
            "auto",
            sample,
            status,
            ("why",) * (status != "pass"),
        )
        for op, backend, status, sample, dtype in cells
    ]
    chips = {"cpu": "x86_64", "cuda": "sm_90", "npu": "Ascend950PR_9599", "xpu": "b"}
    document = dict(
        schema="kvbackend-matrix/1",
        version="0.1.0",
        date="2026-12-01T08:00:00Z",
        commit="abc1234",
        versions={"python": "3.11.7", "torch": "2.13.0+cu130", "cuda": "13.0", "triton": "3.7.1"},
        devices=[kind],
        chips={kind: {"name": f"a {kind}", "arch": chips[kind]}},
        quick=False,
    )
    return document | head | {"cells": [cell.to_dict() for cell in found]}


H200 = made(
    "cuda",
    ("gather_cache", "cuda_triton", "pass", "padding", "float32"),
    ("gather_cache", "cuda_triton", "pass", "padding", "bfloat16"),
    ("gather_cache", "reference", "pass", "padding", "float32"),
    ("reshape_and_cache", "cuda_triton", "pass", "decode", "float32"),
    ("reshape_and_cache", "cuda_triton", "fail", "window", "float32"),
    ("reshape_and_cache", "cuda_triton", "refused", "sinks", "float32"),
    ("quantize_kv", "cuda_triton", "crashed", "int8", "float32"),
    ("apply_rope", "cuda_triton", "refused", "decode", "float32"),
)


@pytest.fixture
def write(tmp_path: Path):
    def write(name: str, document: Any) -> str:
        (tmp_path / name).write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
        return str(tmp_path / name)

    return write


def read(*paths: str) -> list[merge.Run]:
    return merge.distinct(run for path in paths for run in merge.read(path))


def test_without_runs_the_backends_own_words_stand() -> None:
    npu, triton = backends.registered()["npu"], backends.registered()["cuda_triton"]
    assert merge.known("absorb_q", "npu", []) == npu.evidence
    assert "not executed" in npu.evidence
    for op in ("reshape_and_cache", "absorb_q"):
        assert merge.known(op, "cuda", []) == triton.evidence_of(op) != triton.evidence
        assert "not run" in triton.evidence_of(op)
    assert merge.known("paged_attention", "cpu", []) == "built, not run"
    assert merge.known("gather_cache", "xpu", []) == "reference"  # a kind of device that no backend serves
    for backend in backends.registered().values():
        adapters = {op for op in registry if backend.adapter(op)}
        assert backend._evidence_of.keys() <= adapters, (
            f"{backend.name} declares evidence for what it has no kernel for"
        )


def test_a_devices_results_take_the_place_of_the_words(write) -> None:
    runs = read(write("h200.json", H200))
    assert merge.known("gather_cache", "cuda", runs) == "pass [1]"
    assert merge.known("reshape_and_cache", "cuda", runs) == "**1 of 3 fail**, 1 of 3 pass, 1 refused [1]"
    assert merge.known("quantize_kv", "cuda", runs) == "**1 of 1 fail**, 0 of 1 pass [1]"
    assert merge.known("apply_rope", "cuda", runs) == backends.registered()["cuda_triton"].evidence_of("apply_rope")
    assert merge.known("gather_cache", "cpu", runs) == "built, not run"
    text = merge.table(runs)
    line = "- [1] cuda: a cuda, sm\\_90; python 3.11.7, torch 2.13.0+cu130, cuda 13.0, triton 3.7.1; kvbackend 0.1.0"
    assert f"\n{line} (abc1234); 2026-12-01: 4 pass, 2 refused, 1 fail, 1 crashed\n" in text


def test_where_no_backend_ran_an_op_the_references_results_are_told(write) -> None:
    cells = (
        ("gather_cache", "one", "refused", "padding", "float32"),
        ("gather_cache", "reference", "pass", "x", "float32"),
    )
    assert merge.known("gather_cache", "xpu", read(write("xpu.json", made("xpu", *cells)))) == "reference: pass [1]"


def test_what_a_backend_says_of_a_device_that_is_not_there_is_no_evidence(write) -> None:
    document = made("cpu", ("topk_indices", "cpu", "pass", "plain", "float32"))
    asked = Cell("absorb_q", "npu", "npu", "float32", "auto", "decode", "untested", ("no NPU",))
    document["cells"].append(asked.to_dict())
    [run] = read(write("cpu.json", document))
    assert [key.op for key in run.cells] == ["topk_indices"]
    assert merge.known("absorb_q", "npu", [run]) == backends.registered()["npu"].evidence


def test_several_backends_of_a_device_are_told_apart(write) -> None:
    document = made("cuda", ("gather_cache", "elsewhere", "pass", "padding", "float32"))
    runs = read(write("a.json", document))
    triton = backends.registered()["cuda_triton"].evidence_of("gather_cache")
    assert merge.known("gather_cache", "cuda", runs) == f"cuda_triton: {triton}; elsewhere: pass [1]"


def test_merged_documents_merge_again_and_say_the_same(write, capsys: pytest.CaptureFixture[str]) -> None:
    first = write("h200.json", H200)
    second = write(
        "npu.json", made("npu", ("absorb_q", "npu", "pass", "decode", "float32"), date="2026-12-02T01:00:00Z")
    )
    runs = read(first, second)
    assert main(["matrix", "merge", second, first, "--json"]) == 1  # a cell fails
    merged = capsys.readouterr().out
    again = read(write("merged.json", merged), first)
    assert again == runs
    assert merge.table(again) == merge.table(runs)
    assert merge.known("absorb_q", "npu", again) == "pass [2]"


def test_contradictions_are_shown(write, capsys: pytest.CaptureFixture[str]) -> None:
    later = made(
        "cuda",
        ("gather_cache", "cuda_triton", "fail", "padding", "float32"),
        ("gather_cache", "cuda_triton", "pass", "padding", "bfloat16"),
        date="2026-12-03T08:00:00Z",
        version="0.2.0",
    )
    paths = write("later.json", later), write("h200.json", H200)
    runs = read(*paths)
    assert [str(conflict) for conflict in merge.conflicts(runs)] == [
        "gather_cache on cuda_triton, cuda, float32, auto, 'padding': passed in [1], failed in [2]"
    ]
    assert merge.known("gather_cache", "cuda", runs) == "**1 of 2 fail**, 2 of 2 pass [1, 2]"
    assert main(["matrix", "merge", *paths, "--markdown"]) == 1
    shown = capsys.readouterr().out
    assert "- Conflict: gather\\_cache on cuda\\_triton, cuda, float32" in shown
    assert "- The runs are of different versions of kvbackend: 0.1.0, 0.2.0" in shown
    assert main(["matrix", "merge", *paths, "--json"]) == 1
    [conflict] = json.loads(capsys.readouterr().out)["conflicts"]
    assert (conflict["sample"], conflict["passed"], conflict["failed"]) == ("padding", [1], [2])


def test_a_crash_contradicts_a_pass_and_a_refusal_does_not(write) -> None:
    later = made(
        "cuda",
        ("quantize_kv", "cuda_triton", "pass", "int8", "float32"),
        ("gather_cache", "cuda_triton", "refused", "padding", "float32"),
        date="2026-12-03T08:00:00Z",
    )
    [conflict] = merge.conflicts(read(write("h200.json", H200), write("later.json", later)))
    assert (conflict.key.op, conflict.passed, conflict.failed) == ("quantize_kv", [2], [1])


def test_text_from_a_file_is_no_markup(write) -> None:
    evil = H200 | {"version": "<b>|x`", "chips": {"cuda": {"name": "one\n| two |", "arch": "_a_"}}}
    text = merge.table(read(write("evil.json", evil)))
    assert "\\<b\\>\\|x\\`" in text
    assert "one \\| two \\|, \\_a\\_" in text


def test_the_table_is_written_between_the_markers_of_a_readme(write, capsys: pytest.CaptureFixture[str]) -> None:
    readme = write("README.md", f"before\n\n{merge.BEGIN}\nold\n{merge.END}\n\nafter\n")
    good = made("cuda", ("gather_cache", "cuda_triton", "pass", "padding", "float32"))
    assert main(["matrix", "merge", write("a.json", good), "--readme", readme]) == 0
    text = Path(readme).read_text("utf-8")
    assert text.startswith(f"before\n\n{merge.BEGIN}\n\n| op | CPU | CUDA | Ascend |\n")
    assert text.endswith(f"\n{merge.END}\n\nafter\n")
    assert "old" not in text
    assert main(["matrix", "merge", write("a.json", good), "--readme", readme]) == 0
    assert Path(readme).read_text("utf-8") == text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "must be what `kvbackend matrix --json` wrote"),
        ("[]", "has schema None; kvbackend-matrix/1 and kvbackend-matrix-merged/1 can be merged"),
        ({"schema": "kvbackend-matrix/1"}, "is not whole (KeyError: 'chips')"),
        (H200 | {"cells": [{"op": "x"}]}, "is not whole (KeyError"),
        (H200 | {"cells": [H200["cells"][0] | {"status": "good"}]}, "a cell's status is 'good'"),
        ({"schema": "kvbackend-matrix-merged/1", "runs": [{"groups": 3}]}, "is not whole"),
        (H200 | {"cells": [H200["cells"][0] | {"backend": "a|b"}]}, "'a|b' is no name of an op or a backend"),
        (H200 | {"fake": True}, "was made over a fake of the device"),
        (H200 | {"chips": "cpu"}, "is not whole (ValueError: chips is 'cpu')"),
        (H200 | {"chips": {"cuda": {"name": "a"}}}, "is not whole (ValueError: chips is {'cuda': {'name': 'a'}})"),
        (H200 | {"chips": {"cuda": "a"}}, "is not whole (ValueError: chips is {'cuda': 'a'})"),
        (H200 | {"date": 5}, "is not whole (ValueError: date is 5)"),
        (H200 | {"version": None}, "is not whole (ValueError: version is None)"),
        (H200 | {"commit": 5}, "is not whole (ValueError: commit is 5)"),
        (H200 | {"versions": None}, "is not whole (ValueError: versions is None)"),
        (H200 | {"versions": {"torch": 2.13}}, "is not whole (ValueError: versions is {'torch': 2.13})"),
        (H200 | {"devices": [0]}, "is not whole (ValueError: devices is [0])"),
        (H200 | {"quick": "no"}, "is not whole (ValueError: quick is 'no')"),
        (H200 | {"cells": [H200["cells"][0] | {"dtype": None}]}, "is not whole (ValueError: a cell is of"),
        (H200 | {"cells": [H200["cells"][0] | {"reasons": "none"}]}, "a cell's reasons are 'none'"),
        (H200 | {"cells": [H200["cells"][0] | {"sample": "\ud800"}]}, "cannot be read ('utf-8' codec"),
        (merge.document([merge.Run({}, {})]), "is not whole (KeyError: 'date')"),
        (
            merge.document([merge.Run({name: H200[name] for name in merge.HEAD} | {"versions": None}, {})]),
            "is not whole (ValueError: versions is None)",
        ),
    ],
)
def test_files_that_cannot_be_merged(content: Any, message: str, write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix", "merge", write("bad.json", content)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of everything in a JSON document, itself first."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def spoiled(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with something else at that place; a list as value: without it."""
    if not path:
        return value
    copy = deepcopy(document)
    inner = reduce(getitem, path[:-1], copy)
    if value == []:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return copy


def parsed(document: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(document))


RUNS = [merge._run(parsed(found)) for found in (H200, made("npu", ("absorb_q", "npu", "pass", "x", "float32")))]
WHOLE = [parsed(H200), parsed(merge.document(RUNS))]


@given(st.data())
def test_a_file_that_is_spoiled_anywhere_is_read_or_refused_in_words(data: st.DataObject) -> None:
    """What is read can be shown in every way there is; what is not is an ArgumentError."""
    whole = data.draw(st.sampled_from(WHOLE))
    document = spoiled(whole, data.draw(st.sampled_from(list(places(whole)))), data.draw(JSON))
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(document, file)
        file.flush()
        try:
            runs, told = merge.distinct(merge.read(file.name)), file.name
        except ArgumentError as error:
            runs, told = [], str(error)
    assert file.name in told
    merge.table(runs).encode()
    merge.rows(runs)
    json.dumps(merge.document(runs), ensure_ascii=False).encode()
    page([run.document() for run in runs]).encode()
    for row in wanted.read(str(ROOT / "ci" / "matrix.toml")):
        wanted.covering(row, runs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "merge names no file"),
        (["no.json"], "no.json cannot be read"),
        (["GOOD", "--json", "--markdown"], "--json and --markdown are given"),
        (["GOOD", "--json", "--wanted"], "--json and --wanted are given"),
        (["GOOD", "--html", ""], "--html is ''; it takes a file"),
        (["GOOD", "--readme", ""], "--readme is ''; it takes a file"),
        (["GOOD", "--wanted", ""], "--wanted is ''; it takes a file"),
        (["GOOD", "--quick", "--device", "cpu"], "--quick, --device is given with merge"),
        (["GOOD", "--readme", "/no/readme"], "/no/readme cannot be read"),
        (["GOOD", "--readme", "GOOD"], "lacks <!-- support table"),
        (["GOOD", "--html", "/no/folder/page.html"], "its folder must exist and be writable"),
        (["GOOD", "--wanted", "/no/matrix.toml"], "/no/matrix.toml cannot be read"),
    ],
)
def test_options_that_cannot_be_meant(options: list[str], message: str, write, capsys) -> None:
    good = write("good.json", H200)
    assert main(["matrix", "merge", *(good if option == "GOOD" else option for option in options)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out


def test_the_page_of_several_runs(write, tmp_path: Path) -> None:
    paths = write("a.json", H200), write("b.json", H200 | {"date": "2026-12-09T00:00:00Z"})
    assert main(["matrix", "merge", *paths, "--html", str(tmp_path / "page.html")]) == 1
    text = (tmp_path / "page.html").read_text("utf-8")
    assert "[1] cuda: a cuda" in text
    assert "[2] cuda: a cuda" in text


def test_the_readme_says_what_the_evidence_says() -> None:
    """Evidence: ci/evidence.json, merged documents of machines; and what each backend declares."""
    runs = read(str(ROOT / "ci" / "evidence.json"))
    readme = ROOT / "README.md"
    if merge.into(str(readme), runs) != readme.read_text("utf-8"):
        pytest.fail(
            "the support table of README.md is not what ci/evidence.json and the backends' EVIDENCE say: run "
            "kvbackend matrix merge ci/evidence.json --readme README.md"
        )
    assert not merge.conflicts(runs)


def test_every_cpu_kernel_has_evidence() -> None:
    runs = read(str(ROOT / "ci" / "evidence.json"))
    without = [op for op in registry if "not run" in merge.known(op, "cpu", runs)]
    assert not without, (
        f"no machine's results: run kvbackend matrix {' '.join(without)} --json > new.json, then "
        "kvbackend matrix merge ci/evidence.json new.json --json, and keep that as ci/evidence.json"
    )
