"""Clean hosts: exit 0 and not one warning."""

import pytest

from kvbackend.compat.data import load_diagnoses, load_matrix
from kvbackend.doctor.judge import Options, judge

from .roots import BASES, changed, facts_of


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("level", ["static", "import"])
def test_a_clean_host_has_no_finding(tmp_path, name, level):
    facts = facts_of(tmp_path, changed(BASES[name], {}), level)
    verdict = judge(facts, load_matrix(), load_diagnoses(), Options(level=level))
    assert verdict.findings == []
    assert [c for c in verdict.checks if c["status"] in ("warn", "fail", "skip") and "because" in c] == []
    assert (verdict.verdict, verdict.exit_code) == ("ok", 0)
    assert verdict.backend == {"950": "ascend", "h200": "cuda", "cpu": "cpu"}[name]
