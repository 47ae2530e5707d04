"""Every failure kind fires on its host and stays silent on the near miss; the data is well-formed."""

import json
import re

import pytest

from kvbackend import native
from kvbackend.compat import data
from kvbackend.doctor.collect.environment import ALLOWED
from kvbackend.doctor.judge import CHECKS, Options, evidence, judge
from kvbackend.doctor.judge.derive import derive
from kvbackend.doctor.judge.symptoms import explain

from .kinds import KINDS, OLD_TORCH
from .roots import BASES, changed, facts_of

MATRIX, DIAGNOSES = data.load_matrix(), data.load_diagnoses()
ROWS = {row["id"]: row for row in DIAGNOSES["diagnoses"]}
PROOF_ONLY = {"com-roundtrip"}  # needs the device level; see test_judge


def named(root, base, change, options, id, log):
    """Whether the doctor names the kind on this host, from its facts or with the log."""
    aclnn = re.findall(r"(aclnn\w+?)GetWorkspaceSize", log)
    facts = facts_of(root, changed(BASES[base], change), **({"aclnn": aclnn} if log else {}))
    purpose = options.get("purpose", "run")
    if log:
        found = explain(log, derive(facts, MATRIX, purpose, "auto"), DIAGNOSES)
        return any(m.diagnosis["id"] == id and m.standing != "possible" for m in found)
    verdict = judge(facts, MATRIX, DIAGNOSES, Options(purpose=purpose, keep_going=True))
    return any(f["id"] == id for f in verdict.findings)


def test_every_kind_has_a_host():
    assert set(KINDS) | PROOF_ONLY == set(ROWS)


@pytest.mark.parametrize("id", KINDS)
def test_fires_and_not_on_the_near_miss(tmp_path, id):
    base, fires, misses, options = (*KINDS[id], {})[:4]
    log = options.get("log", "")
    assert named(tmp_path / "fires", base, fires, options, id, log)
    assert not named(tmp_path / "misses", base, misses, options, id, options.get("other_log", log))


def test_under_a_torch_that_is_too_old_rebuilding_is_not_advised(tmp_path):
    facts = facts_of(tmp_path, changed(BASES["cpu"], OLD_TORCH))
    verdict = judge(facts, MATRIX, DIAGNOSES, Options(keep_going=True))
    assert [found["id"] for found in verdict.findings] == ["com-torch-too-old"]
    oldest = ".".join(map(str, native.MIN_TORCH))
    assert ROWS["com-torch-too-old"]["when"][1] == ["torch.base", "<", f"{oldest}.0"]


@pytest.mark.parametrize("id", ROWS)
def test_a_row_is_well_formed(id):
    row = ROWS[id]
    assert row["check"] in {c.id for c in CHECKS}
    assert row["severity"] in ("fail", "warn", "info")
    assert row["confidence"] in ("certain", "likely", "possible")
    assert row["trigger"] in ("facts", "log")
    assert all(row["source"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"])
    assert row["status"] in data.STATUSES
    assert row["when"] or row.get("conclusive")
    assert row["trigger"] == "facts" or row["symptoms"]
    assert row["remedy"]
    for remedy in row["remedy"]:
        assert remedy["where"] in ("here", "host", "image", "admin")
        assert remedy["risk"] in ("none", "reinstall", "reboot")


def test_evidence_reads_only_facts_that_exist(tmp_path):
    known = set()
    for name, spec in BASES.items():
        view = derive(facts_of(tmp_path / name, changed(spec, {})), MATRIX, "run", "auto")
        known |= set(view)
    known |= {"env." + n for n in ALLOWED}
    known |= {"ascend.smi.error", "ascend.health", "cuda.smi.error", "ascend.driver.path_key"}
    for row in ROWS.values():
        assert set(evidence.facts_used(row["when"])) <= known, row["id"]


def test_no_row_names_a_local_thing():
    text = json.dumps(DIAGNOSES) + json.dumps([r for kind in data.KINDS for r in MATRIX.rows(kind)])
    assert not re.search(r"/(wor[k]|tm[p]|hom[e])/|share[d]/|mirror[s]\.|downloa[d]\.", text)


def test_symptoms_of_digits_match_whole_numbers():
    row = ROWS["asc-aclinit-507008"]
    from kvbackend.doctor.judge.symptoms import matches

    assert matches(row, "error 507008.")
    assert not matches(row, "15070081")
