"""The rows are well-formed and sourced; the rules answer as the rows say; versions order as vendors mean."""

import itertools
import json

import pytest

from kvbackend.compat import data, rules, text, versions

ORDERED = [
    "8.0.T63",
    "8.0.0.alpha001",
    "8.0.RC1",
    "8.0.RC3",
    "8.0.0",
    "8.1.RC1",
    "8.2.RC1.alpha003",
    "8.2.RC1",
    "8.2.0",
    "8.5.0.alpha001",
    "8.5.0",
    "9.0.0-beta.2",
    "9.0.0-rc.1",
    "9.0.0",
    "9.1.0",
    "9.1.0.b083",
    "9.1.0.post4",
    "9.1.1",
    "24.1.rc1",
    "24.1.0.3",
    "25.0.rc1",
    "25.0.rc1.1",
    "25.2.0",
    "25.5.t7",
    "25.5.1",
    "25.7.rc1.6",
    "26.0.rc1",
    "26.1.0.b083",
]


def test_versions_order():
    parsed = [versions.parse(v) for v in ORDERED]
    assert sorted(parsed) == parsed
    assert all(a < b and b > a and a <= b and b >= a and a != b for a, b in itertools.pairwise(parsed))
    assert versions.parse("25.5.T7") == versions.parse("25.5.t7")
    assert versions.parse("9.1") == versions.parse("9.1.0")
    assert len({versions.parse("2.10.0+cpu"), versions.parse("2.10.0")}) == 1
    assert versions.parse("2.0b1") < versions.parse("2.0") < versions.parse("2.0.b1")


@pytest.mark.parametrize("bad", ["", "x", "not known", "9..1", "1.2.foo3", "-1", None, 9, "9" * 100])
def test_what_is_no_version(bad):
    assert versions.parse(bad) is None
    assert versions.base(bad) == ""
    assert not versions.fits("9.1.X", bad)
    assert versions.within(bad, ">=1") is None


@pytest.mark.parametrize(
    ("pattern", "version", "want"),
    [
        ("9.1.X", "9.1.0", True),
        ("9.1.X", "9.1.0-beta.3", True),
        ("9.1.X", "9.2.0", False),
        ("25.7.RC1", "25.7.rc1.6", True),
        ("26.0.RC1", "26.0.rc2", False),
        ("9.2.0", "9.2.0", True),
        ("9.2.0", "9.2.0-rc.1", False),
        ("26.X", "26.1.0", True),
        ("odd", "9.1.0", False),
    ],
)
def test_patterns(pattern, version, want):
    assert versions.fits(pattern, version) is want


@pytest.mark.parametrize(
    ("version", "bounds", "want"),
    [
        ("8.2.0.0.201", ">=7.6, <=8.2", True),
        ("8.2.0.0.201", "8.2", True),
        ("8.3.0.2.220", '">=7.6, <=8.2"', False),
        ("9.1.0", ">=9.1.0", True),
        ("9.0.0", ">=9.1.0", False),
        ("23.0.7", ">=23.0", True),
        ("9.1.0", "", None),
        ("9.1.0", ">=x", None),
        ("9.1.0", "<9.1.1", True),
        ("9.1.0", ">9.1.0", False),
        ("9.1.0.post4", ">=9.1.0.post5", False),
    ],
)
def test_ranges(version, bounds, want):
    assert versions.within(version, bounds) is want


def test_every_row_is_well_formed_and_sourced():
    document = json.loads(data._shipped("matrix.json"))
    for number, row in enumerate(document["rows"], 1):
        data.check_row(row, f"row {number}")
        for key in ("torch_npu", "torch", "cann", "driver", "driver_min", "cann_min"):
            for value in row[key] if isinstance(row.get(key), list) else [row.get(key)]:
                assert value is None or versions.parse(value) or value[-2:] == ".X" or row["kind"] == "numpy_cann", row
    names = [(r["kind"], *(r[k] for k in data.KINDS[r["kind"]][0])) for r in document["rows"]]
    assert len(names) == len(set(names))
    assert {r["kind"] for r in document["rows"]} == set(data.KINDS)


STATES = [
    (rules.torch_npu_torch, ("2.10.0+cpu", "2.10.0.post4"), "ok"),
    (rules.torch_npu_torch, ("2.10.1", "2.10.0"), "bad"),
    (rules.torch_npu_torch, ("odd", "2.10.0"), "unknown"),
    (rules.torch_npu_cann, ("2.10.0.post4", "9.1.0"), "ok"),
    (rules.torch_npu_cann, ("2.10.0.post6", "9.1.1"), "ok"),
    (rules.torch_npu_cann, ("2.10.0.post2", "9.0.1"), "ok"),
    (rules.torch_npu_cann, ("2.10.0.post4", "8.5.1"), "ok"),
    (rules.torch_npu_cann, ("2.10.0.post4", "9.2.0"), "unknown"),
    (rules.torch_npu_cann, ("2.9.1", "9.1.0"), "unknown"),
    (rules.cann_driver, ("9.1.0", "25.7.rc1.6"), "ok"),
    (rules.cann_driver, ("9.1.0", "25.0.rc1.1"), "bad"),
    (rules.cann_driver, ("9.0.0", "25.0.rc1.1"), "ok"),
    (rules.cann_driver, ("9.2.0", "25.2.0"), "bad"),
    (rules.cann_driver, ("9.1.0", "24.1.rc1"), "unknown"),
    (rules.cann_driver, ("7.0.0", "23.0.7"), "unknown"),
    (rules.soc_cann, ("Ascend950PR_9579", "9.0.0"), "ok"),
    (rules.soc_cann, ("Ascend950DT_9582", "9.0.0"), "bad"),
    (rules.soc_cann, ("Ascend950PR_9579", "9.0.0-beta.2"), "ok"),
    (rules.soc_cann, ("Ascend950PR_9579", "8.5.0"), "bad"),
    (rules.soc_cann, ("Ascend910B2", "8.0.0"), "unknown"),
    (rules.soc_cann, ("Other", "9.0.0"), "unknown"),
    (rules.soc_torch_npu, ("Ascend950PR_9579", "2.10.0.post4"), "ok"),
    (rules.soc_torch_npu, ("Ascend950PR_9579", "2.9.0"), "bad"),
    (rules.soc_torch_npu, ("Ascend950PR_9579", "9.9.9"), "unknown"),
    (rules.op_cann, ("npu_sparse_flash_attention", "Ascend950PR_9579", "9.1.0"), "ok"),
    (rules.op_cann, ("npu_sparse_flash_attention", "Ascend950PR_9579", "9.0.0"), "bad"),
    (rules.op_cann, ("npu_quant_lightning_indexer", "Ascend950PR_9579", "9.0.0"), "ok"),
    (rules.op_cann, ("flash_mla", "Ascend950PR_9579", "9.1.0"), "bad"),
    (rules.op_cann, ("flash_mla", "Ascend950PR_9579", "9.2.0"), "ok"),
    (rules.op_cann, ("npu_interleave_rope", "Ascend950PR_9579", "9.2.0"), "bad"),
    (rules.op_cann, ("npu_dynamic_mx_quant", "Ascend910B2", "9.1.0"), "bad"),
    (rules.op_cann, ("unheard_of", "Ascend950PR", "9.1.0"), "unknown"),
    (rules.python_torch, ("3.11.7", "2.13.0+cpu"), "ok"),
    (rules.python_torch, ("3.9.1", "2.13.0"), "bad"),
    (rules.python_torch, ("3.11", "9.9.9"), "unknown"),
    (rules.triton_ascend_cann, ("3.2.2", "9.1.0"), "ok"),
    (rules.triton_ascend_cann, ("3.2.0", "9.1.0"), "bad"),
    (rules.triton_ascend_cann, ("3.2.0", "7.0.0"), "unknown"),
    (rules.numpy_cann, ("2.1.0", "8.2.RC1"), "bad"),
    (rules.numpy_cann, ("2.1.0", "9.1.0"), "ok"),
    (rules.cuda_driver, ("12.8", "525.60.13"), "ok"),
    (rules.cuda_driver, ("13.0", "570.86.15"), "bad"),
    (rules.cuda_driver, ("9.2", "570"), "unknown"),
    (rules.torch_triton, ("2.10.0+cu128", "3.6.0"), "ok"),
    (rules.torch_triton, ("2.10.0", "3.5.0"), "bad"),
    (rules.torch_triton, ("2.14.1", "3.8.4"), "ok"),
    (rules.torch_triton, ("9.9.9", "3.5.0"), "unknown"),
    (rules.cuda_arch, ("sm_90a", "11.8"), "ok"),
    (rules.cuda_arch, ("sm_100", "12.6"), "bad"),
    (rules.cuda_arch, ("sm_75", "12.6"), "unknown"),
    (rules.driver_firmware, ("25.2.0", "7.7.0.6.236"), "ok"),
    (rules.driver_firmware, ("25.2.0", "7.1.0"), "unknown"),
    (rules.feature, ("FA3 handler in NPU graphs", "9.0.0"), "bad"),
    (rules.feature, ("FA3 handler in NPU graphs", "9.1.0"), "ok"),
    (rules.feature, ("pinned-memory expandable segments", "", "25.2.0"), "bad"),
    (rules.feature, ("none such",), "unknown"),
]


@pytest.mark.parametrize(("rule", "values", "state"), STATES)
def test_rules(rule, values, state):
    ruling = rule(*values)
    assert ruling.state == state
    if state == "bad":
        assert ruling.source
        assert ": " in ruling.reason
        assert "; " in ruling.reason
        assert str(ruling) == ruling.reason
    else:
        assert str(ruling) == ruling.reason or state


def test_vllm_ascend_pins_its_stack():
    good = {"cann": "9.1.0", "torch": "2.10.0", "torch_npu": "2.10.0.post4"}
    assert rules.vllm_ascend("0.23.0", good).state == "ok"
    assert rules.vllm_ascend("0.23.0", {**good, "cann": "8.2.RC1"}).expected == "cann 9.1.0"
    assert rules.vllm_ascend("9.9.9", good).state == "unknown"
    assert rules.triton_ascend_for("9.1.0") == "3.2.2"
    assert rules.nearest_set("2.10.0", "1.0", data.Matrix([], "")) == "none known"


def row(**fields):
    return {
        "kind": "cann_driver",
        "cann": "9.1.X",
        "driver": "25.0.X",
        "ok": True,
        "source": "own test",
        "date": "2026-11-01",
        "status": "tested",
        **fields,
    }


def write(path, *rows, **more):
    path.write_text(json.dumps({"schema": data.MATRIX_SCHEMA, "rows": list(rows), **more}))
    return str(path)


def test_extra_rows_override(tmp_path):
    matrix = data.load_matrix(write(tmp_path / "m.json", row()))
    assert rules.cann_driver("9.1.0", "25.0.rc1.1", matrix).state == "ok"
    assert matrix.version.endswith("+local")
    assert rules.cann_driver("9.1.0", "25.0.rc1.1").state == "bad"


@pytest.mark.parametrize(
    ("text_", "message"),
    [("{", "not JSON"), ("[]", "schema"), ('{"schema": "kvbackend-matrix/1"}', "rows"), (None, "cannot be read")],
)
def test_files_that_are_no_matrix(tmp_path, text_, message):
    path = tmp_path / "m.json"
    if text_ is not None:
        path.write_text(text_)
    with pytest.raises(data.DataError, match=message):
        data.load_matrix(str(path))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "odd"}, "kind"),
        ({"source": ""}, "source"),
        ({"status": "guessed"}, "status"),
        ({"driver": None}, "driver"),
    ],
)
def test_rows_that_are_refused(tmp_path, fields, message):
    with pytest.raises(data.DataError, match=message):
        data.load_matrix(write(tmp_path / "m.json", row(**fields)))
    with pytest.raises(data.DataError, match="str"):
        data.load_matrix(write(tmp_path / "m.json", "text"))


def test_texts_translate_inside_out():
    table = {"a {x}": "A {x}", "b {y}": "B {y}", "plain": "PLAIN"}
    assert text.say("a {x}", x=text.say("b {y}", y=1)).said_in(table) == "A B 1"
    assert text.join([text.say("plain"), "", text.say("b {y}", y=2)]).said_in(table) == "PLAIN, B 2"
    assert text.say("braces {stay}") == "braces {stay}" == text.say("braces {stay}").said_in({})
    assert text.translated(3, table) == 3
