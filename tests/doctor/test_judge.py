"""The judge: graph, options, verdicts, replay, and that nothing but the facts decides."""

import copy
import itertools
import json
import random

import pytest

from kvbackend.compat.data import Matrix, load_diagnoses, load_matrix
from kvbackend.doctor import facts
from kvbackend.doctor.facts import View
from kvbackend.doctor.judge import BACKENDS, CHECKS, PURPOSES, Options, evidence, fill, judge
from kvbackend.doctor.judge.check import SECTIONS, STATUSES
from kvbackend.doctor.judge.derive import covered, derive, proof_good
from kvbackend.doctor.judge.symptoms import explain

from .kinds import KINDS
from .roots import ASCEND_950, ATB, BASES, CANN, CPU, H200, SITE, answers, changed, dist, facts_of, sample

MATRIX, DIAGNOSES = load_matrix(), load_diagnoses()


def verdict_of(root, base, change=None, facts_change=None, **options):
    found = facts_of(root, changed(base, change or {}))
    found.update(facts_change or {})
    return judge(found, MATRIX, DIAGNOSES, Options(**options))


def row(verdict, id):
    return next(c for c in verdict.checks if c["id"] == id)


def test_same_facts_same_bytes_in_any_order(tmp_path):
    found = facts_of(tmp_path, changed(ASCEND_950, KINDS["asc-atb-abi"][1]))
    want = json.dumps(judge(found, MATRIX, DIAGNOSES, Options()))
    for seed in range(5):
        items = list(found.items())
        random.Random(seed).shuffle(items)
        assert json.dumps(judge(json.loads(json.dumps(dict(items))), MATRIX, DIAGNOSES, Options())) == want


def test_two_collections_of_one_tree_judge_alike(tmp_path):
    spec = changed(ASCEND_950, KINDS["asc-atb-abi"][1])
    first, second = (judge(facts_of(tmp_path / n, spec), MATRIX, DIAGNOSES, Options()) for n in "ab")
    assert json.dumps(first) == json.dumps(second)


def test_the_judge_leaves_its_input_alone(tmp_path):
    found = facts_of(tmp_path, changed(H200, {}))
    before = copy.deepcopy(found)
    judge(found, MATRIX, DIAGNOSES, Options())
    assert found == before


def test_dependents_of_a_failure_are_skipped_with_its_name(tmp_path):
    change = {"env": {"ASCEND_HOME_PATH": "/gone"}}
    verdict = verdict_of(tmp_path / "a", ASCEND_950, change)
    assert row(verdict, "ascend.cann.active")["status"] == "fail"
    for id in ("ascend.ops.package", "ascend.atb.tree", "ascend.atb.abi", "torch_npu.import"):
        assert (row(verdict, id)["status"], row(verdict, id)["because"]) == ("skip", "ascend.cann.active")
    going = verdict_of(tmp_path / "b", ASCEND_950, change, keep_going=True)
    assert all("because" not in c for c in going.checks)


def test_the_earliest_cause_is_primary(tmp_path):
    change = {"deny": {"davinci0": "EACCES"}, "env": {"ATB_HOME_PATH": f"{ATB}/atb/cxx_abi_0"}}
    verdict = verdict_of(tmp_path, ASCEND_950, change)
    assert [f["id"] for f in verdict.findings if f["severity"] == "fail"] == [
        "asc-nonroot-node-permission",
        "asc-atb-abi",
    ]
    assert verdict.summary["primary"] == "asc-nonroot-node-permission"
    assert [f["primary"] for f in verdict.findings] == [True, False]
    assert row(verdict, "ascend.smi")["because"] == "ascend.node_access"


def test_exit_codes(tmp_path):
    fails, warns = KINDS["asc-atb-abi"][1], KINDS["asc-card-health-alarm"][1]
    assert verdict_of(tmp_path / "a", ASCEND_950, fails).exit_code == 1
    assert verdict_of(tmp_path / "b", ASCEND_950, warns).exit_code == 0
    assert verdict_of(tmp_path / "c", ASCEND_950, warns, strict=True).exit_code == 3
    late = {"torch.import": facts.failed("timeout", "x", "late")}
    blocked = verdict_of(tmp_path / "d", ASCEND_950, None, late)
    assert (blocked.verdict, blocked.exit_code, row(blocked, "torch.import")["status"]) == (
        "inconclusive",
        4,
        "unknown",
    )
    assert verdict_of(tmp_path / "e", ASCEND_950, fails, late).exit_code == 1
    crashed = {"probe.pci": facts.failed("crashed", "pci", "boom")}
    assert verdict_of(tmp_path / "f", CPU, None, crashed).exit_code == 4


@pytest.mark.parametrize(("name", "key"), [("h200", "cuda.smi.gpus"), ("950", "ascend.smi.chips")])
@pytest.mark.parametrize(("state", "code"), [("timeout", 4), ("absent", 0), ("unparsed", 0)])
def test_a_tool_that_fails(tmp_path, name, key, state, code):
    verdict = verdict_of(tmp_path, BASES[name], None, {key: facts.failed(state, "tool", "why")})
    assert verdict.exit_code == code
    assert row(verdict, key.rpartition(".")[0])["status"] == "unknown"


def test_import_failures(tmp_path):
    known = answers({"ok": False, "error": "ImportError: libatb.so: cannot open shared object file"})
    change = {"env": {"ATB_HOME_PATH": None, "LD_LIBRARY_PATH": f"{CANN}/lib64:/usr/local/Ascend/driver/lib64/driver"}}
    verdict = verdict_of(tmp_path / "a", ASCEND_950, {**change, "tools": {"torch_npu": known}})
    found = {f["id"]: f for f in verdict.findings}
    assert "asc-libatb-missing" in found  # the import's own text plus this host's facts
    unknown = verdict_of(tmp_path / "b", ASCEND_950, {"tools": {"torch_npu": answers({"ok": False, "error": "odd"})}})
    assert [f["id"] for f in unknown.findings] == ["import-failed"]
    assert "import torch_npu fails: odd" in unknown.findings[0]["cause"]
    assert unknown.findings[0]["remedy"][0]["command"] == "python -c 'import torch_npu'"
    hint = verdict_of(
        tmp_path / "c", ASCEND_950, {"tools": {"torch_npu": answers({"ok": False, "error": "error 507008"})}}
    )
    assert "asc-aclinit-507008" in hint.findings[0]["remedy"][0]["text"]  # possible, so never named as the cause


def test_backends(tmp_path):
    assert verdict_of(tmp_path / "a", CPU, backend="ascend").findings[0]["id"] == "asc-nodes-missing"
    assert verdict_of(tmp_path / "b", CPU, backend="cuda").findings[0]["id"] == "cuda-libcuda-missing"
    assert (
        verdict_of(
            tmp_path / "c", ASCEND_950, {"gone": ["/sys", "/dev"], "tools": {"npu-smi info": None}}
        ).backend_reason
        == "auto: torch_npu is installed"
    )
    assert verdict_of(tmp_path / "d", ASCEND_950, {"gone": ["/sys"]}).backend_reason == "auto: device nodes"
    both = {"files": {k: v for k, v in H200["files"].items() if k.startswith(("/sys", "/dev"))}}
    assert verdict_of(tmp_path / "e", ASCEND_950, both).backend == "both"


def test_only_and_skip(tmp_path):
    change = KINDS["asc-atb-abi"][1]
    only = verdict_of(tmp_path / "a", ASCEND_950, change, only=("ascend.driver.*",))
    assert {c["id"] for c in only.checks} == {"ascend.driver.version", "ascend.driver.pair", "ascend.driver.libs"}
    assert only.exit_code == 0
    skipped = verdict_of(tmp_path / "b", ASCEND_950, change, skip=("ascend.atb.*",))
    assert skipped.findings == []


def test_purpose_decides_about_compilers(tmp_path):
    both = {"files": dist("triton", "3.5.0")}
    severity = {
        p: next(
            f["severity"]
            for f in verdict_of(tmp_path / p, ASCEND_950, both, purpose=p).findings
            if f["id"] == "asc-triton-clobber"
        )
        for p in PURPOSES
    }
    assert severity == {"run": "warn", "jit": "fail", "build": "fail"}
    none = {"files": {"/usr/bin/c++": None, "/usr/bin/g++-12": None}}
    status = {p: row(verdict_of(tmp_path / ("x" + p), CPU, none, purpose=p), "host.cxx")["status"] for p in PURPOSES}
    assert status == {"run": "skip", "jit": "warn", "build": "fail"}


def test_a_pair_outside_the_matrix_warns_with_the_nearest(tmp_path):
    verdict = verdict_of(
        tmp_path, ASCEND_950, {"gone": [f"{SITE}/torch_npu-"], "files": dist("torch-npu", "2.10.0.post7")}
    )
    assert [(f["id"], f["severity"]) for f in verdict.findings] == [("matrix.torch_npu-cann", "warn")]
    assert "torch 2.10.0, torch_npu 2.10.0.post4, CANN 9.1.0" in verdict.findings[0]["cause"]
    assert verdict.exit_code == 0


def test_the_vendors_own_data_goes_before_our_rows(tmp_path):
    old_driver = {"/usr/local/Ascend/driver/version.info": sample("files/driver_version.info.25.0.rc1.1")}
    fits = {f"{CANN}/share/info/runtime/version.info": 'Version=9.1.0\nrequired_package_driver_version=">=23.0"\n'}
    bad = {f"{CANN}/share/info/runtime/version.info": 'Version=9.1.0\nrequired_package_driver_version=">=26.0"\n'}
    inner = {f"{CANN}/x86_64-linux/ascend_toolkit_install.info": "version=9.1.0\ncompatible_version=[V100R001C21]\n"}
    for number, (files, state) in enumerate((({}, "fail"), (fits, "ok"), (inner, "ok"))):
        verdict = verdict_of(tmp_path / str(number), ASCEND_950, {"files": {**old_driver, **files}})
        assert row(verdict, "matrix.cann-driver")["status"] == state
    verdict = verdict_of(tmp_path / "bad", ASCEND_950, {"files": bad})
    assert verdict.findings[0]["id"] == "asc-driver-too-old"
    assert verdict.findings[0]["expected"] == {"value": ">=26.0"}


@pytest.mark.parametrize(
    ("proof", "status", "code"),
    [
        ({"ok": True, "read_ok": True, "error": 1e-7, "bound": 1e-4, "backends": {"paged_attention": "cpu"}}, "ok", 0),
        ({"ok": True, "read_ok": True, "error": None, "backends": {}}, "ok", 0),
        ({"ok": True, "skipped": "not among the 1 visible cards"}, "ok", 0),
        ({"ok": True, "read_ok": True, "error": 0.5, "bound": 1e-4}, "fail", 1),
        ({"ok": True, "read_ok": False, "error": 0.0, "bound": 1e-4}, "fail", 1),
        ({"ok": False, "error": "RuntimeError: no"}, "fail", 1),
    ],
)
def test_the_round_trip(tmp_path, proof, status, code):
    found = {"proof.npu0": facts.value(proof, "round trip")}
    verdict = verdict_of(tmp_path, CPU, None, found, level="device")
    assert (row(verdict, "proof.roundtrip")["status"], verdict.exit_code) == (status, code)
    assert (status == "fail") == ("com-roundtrip" in [f["id"] for f in verdict.findings])


def test_a_round_trip_that_hangs_gives_no_verdict(tmp_path):
    verdict = verdict_of(tmp_path, CPU, None, {"proof.npu0": facts.failed("timeout", "x")}, level="device")
    assert verdict.exit_code == 4
    assert not proof_good({"ok": False})


@pytest.mark.parametrize(
    ("arch", "built", "want"),
    [
        ("sm_90", ["sm_90"], True),
        ("sm_90", ["sm_90a"], True),
        ("sm_100", ["sm_90a"], False),
        ("sm_86", ["sm_80"], True),
        ("sm_80", ["sm_86"], False),
        ("sm_121", ["sm_120"], True),
        ("sm_103", ["compute_90"], True),
        ("sm_80", ["compute_90", "odd"], False),
    ],
)
def test_code_that_runs_on_an_architecture(arch, built, want):
    assert covered(arch, built) is want


def test_clauses():
    view = View(
        {
            "a": facts.value("9.1.0"),
            "b": facts.value(["x", "y/z"]),
            "n": facts.value(3),
            "u": facts.failed("unreadable"),
            "t": facts.value(True),
        },
        {"d": None},
    )
    true = [
        ["a", "=", "9.1.0"],
        ["a", ">=", "9.0.0"],
        ["a", "<", "9.1.1"],
        ["a", "!=", "9"],
        ["b", "mentions", "y/"],
        ["b", "lacks", "w"],
        ["n", ">", 2],
        ["z", "absent"],
        ["t", "true"],
        ["z", "not-true"],
        ["a", "prefix", "9."],
        ["a", "in", ["9.1.0"]],
        ["z", "not-mentions", "q"],
        ["a", "not-in", ["8"]],
        {"any": [["z", "present"], ["t", "true"]]},
        ["d", "absent"],
    ]
    false = [
        ["u", "absent"],
        ["u", "=", None],
        ["z", "=", "x"],
        ["z", "!=", "x"],
        ["a", "<", "@n"],
        ["a", ">", "nonsense"],
        ["t", "false"],
        ["n", "<", "@z"],
        ["z", "in", ["x"]],
        ["z", "mentions", "x"],
        ["z", "prefix", "x"],
        {"any": [["z", "present"]]},
    ]
    assert [c for c in true if not evidence.holds(c, view)] == []
    assert [c for c in false if evidence.holds(c, view)] == []
    assert not evidence.all_hold([], view)
    assert evidence.lines([["a", "=", "@n"], ["z", "absent"]], view) == ["a is 9.1.0", "n is 3", "z is absent"]
    assert fill("pip install x=={a.b}", View({"a.b": facts.value("1")})) == "pip install x==1"
    assert fill("x {no.fact} ${HOME}", view) == "x <no.fact> ${HOME}"


def test_views_and_states():
    view = View({"a": facts.failed("unparsed", "src", "why")}, {"d": 1})
    assert (view["a"], view.state("a"), view.state("d"), view.state("q"), view.error("a"), view.source("a")) == (
        None,
        "unparsed",
        "value",
        "absent",
        "why",
        "src",
    )
    assert list(view) == ["a", "d"]
    assert len(view) == 2


def test_explain_orders_what_fits_first(tmp_path):
    found = facts_of(tmp_path, changed(ASCEND_950, {"env": {"ATB_HOME_PATH": f"{ATB}/atb/cxx_abi_0"}}))
    lines = (
        "first",
        "undefined symbol: _ZNK6AsdOps3Ops18GetOperationByNameERKSs",
        "libatb.so: cannot open shared object file",
    )
    log = "\n".join(lines)
    matches = explain(log, derive(found, MATRIX, "run", "auto"), DIAGNOSES)
    assert [(m.diagnosis["id"], m.line, m.standing) for m in matches] == [
        ("asc-atb-abi", 2, "fits"),
        ("asc-libatb-missing", 3, "possible"),
    ]
    assert explain("nothing here", derive(found, MATRIX, "run", "auto"), DIAGNOSES) == []


@pytest.mark.parametrize("damage", ["absent", "unreadable", "unparsed", "timeout", "crashed", "not_run"])
def test_any_fact_may_be_missing(tmp_path, damage):
    whole = facts_of(tmp_path, changed(ASCEND_950, {"files": H200["files"]}))
    generator = random.Random(damage)
    for backend, purpose in itertools.product(BACKENDS, PURPOSES):
        for _ in range(2):
            found = {
                k: (facts.failed(damage, "x", "gone") if generator.random() < 0.4 else v) for k, v in whole.items()
            }
            verdict = judge(found, MATRIX, DIAGNOSES, Options("device", purpose, backend))
            assert verdict.exit_code in (0, 1, 4)
            json.dumps(verdict)
    assert judge({}, MATRIX, DIAGNOSES, Options()).findings[0]["id"] == "com-torch-missing"


def test_the_graph_of_checks_is_sound():
    ids = [c.id for c in CHECKS]
    assert len(ids) == len(set(ids))
    position = {c.id: (SECTIONS[c.section], i) for i, c in enumerate(CHECKS)}
    for check in CHECKS:
        assert check.section in SECTIONS
        assert check.about.endswith(".")
        for need in check.needs:
            assert position[need] < position[check.id], (check.id, need)
    assert set(STATUSES) >= {"ok", "warn", "fail", "skip", "unknown", "info"}


def test_an_empty_matrix_knows_nothing(tmp_path):
    found = facts_of(tmp_path, changed(ASCEND_950, {}))
    verdict = judge(found, Matrix([], "empty"), DIAGNOSES, Options())
    assert {f["id"] for f in verdict.findings} == {"matrix.torch_npu-cann", "matrix.cann-driver", "triton.match"}


def test_a_tree_that_was_declared_but_is_not_used_is_told(tmp_path):
    declared = {
        "/etc/Ascend/ascend_cann_install.info": "Toolkit_InstallPath=/opt/cann-8.5.0\n",
        "/opt/cann-8.5.0/version.cfg": "toolkit_running_version=[8.5.0:8.5.0]\n",
    }
    verdict = verdict_of(tmp_path, ASCEND_950, {"files": declared})
    assert (
        row(verdict, "ascend.cann.trees")["text"]
        == "the last installation was CANN 8.5.0, this environment selects 9.1.0"
    )
    assert verdict.findings == []


def test_ops_that_wait_for_a_newer_cann_are_listed(tmp_path):
    text = row(verdict_of(tmp_path / "a", ASCEND_950), "matrix.ops")["text"]
    assert "flash_mla (>= 9.2.0)" in text
    assert "npu_sparse_flash_attention" not in text
    older = {f"{CANN}/x86_64-linux/ascend_toolkit_install.info": "version=9.0.0\n"}
    text = row(verdict_of(tmp_path / "b", ASCEND_950, {"files": older}), "matrix.ops")["text"]
    assert "npu_sparse_flash_attention (>= 9.1.0)" in text
    assert "npu_quant_lightning_indexer" not in text
