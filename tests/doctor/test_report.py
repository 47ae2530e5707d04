"""Reports: redaction, bundles, baselines, the schema of the JSON, and every way of saying them."""

import ast
import json
import re
from pathlib import Path

import pytest

import kvbackend.doctor
from kvbackend.compat import data
from kvbackend.compat.text import say
from kvbackend.doctor import facts, saved
from kvbackend.doctor import report as reports
from kvbackend.doctor.collect import collect
from kvbackend.doctor.judge import CHECKS, Options, judge
from kvbackend.doctor.judge.check import SECTIONS
from kvbackend.doctor.redact import Redactor
from kvbackend.doctor.render import documents, explanation, paint
from kvbackend.doctor.render.screen import screen
from kvbackend.doctor.render.words import Words, cells, wrap

from .kinds import KINDS
from .roots import ASCEND_950, ATB, BASES, FakeHost, changed, sample, write

ROUGH = {
    "env": {"ATB_HOME_PATH": f"{ATB}/atb/cxx_abi_0"},
    "tools": {
        "npu-smi info": sample("npu-smi/info_950pr_25.7.rc1.6.txt"),
        "npu-smi health": sample("npu-smi/health_alarm_i0.txt"),
    },
}


def report_of(root, base=ASCEND_950, change=ROUGH, **options):
    spec = changed(base, change)
    write(root, spec)
    found = collect(FakeHost(root, spec), "import")
    verdict = judge(found, data.load_matrix(), data.load_diagnoses(), Options(**options))
    run = {
        "started": "2026-11-29T00:00:00+00:00",
        "seconds": 1.0,
        "level": "import",
        "purpose": "run",
        "backend": verdict.backend,
        "backend_reason": verdict.backend_reason,
        "root": "/",
        "redacted": False,
        "argv": [],
    }
    return reports.Report(
        run, {"version": "0.1.0", "matrix": "2026-11", "diagnoses": "2026-11"}, found, verdict, ["/etc/os-release"]
    )


def lines(report, lang="en", **options):
    return "\n".join("".join(t for t, _ in line) for line in screen(report, Words(lang), **options))


def test_the_screen(tmp_path):
    text = lines(report_of(tmp_path))
    assert text.startswith(
        "kvbackend doctor 0.1.0   backend: ascend (auto: PCI 19e5:d806 x1)   level: import   matrix: 2026-11"
    )
    assert "✗ ATB libraries of the other C++ ABI" in text
    assert "source /usr/local/Ascend/nnal/atb/set_env.sh --cxx_abi=1" in text
    assert "card 0 Alarm A4025021 8C03A000" in text
    assert "1 failure, 1 warning in 1.0 s." in text
    assert "Start here: source NNAL's set_env.sh" in text
    assert "reshape_and_cache  will run" in text
    assert "q is torch.int8" in text
    quiet = lines(report_of(tmp_path / "q"), quiet=True)
    assert "openEuler" not in quiet
    assert "✗ ATB" in quiet
    long = lines(report_of(tmp_path / "v"), detail=2)
    assert "host.glibc  glibc 2.38" in long
    assert " ms" in long
    assert "read  /etc/os-release" in long


def test_all_clear_and_other_verdicts(tmp_path):
    assert "All clear: " in lines(report_of(tmp_path / "a", change={}))
    report = report_of(tmp_path / "b", change={})
    report.facts["torch.import"] = facts.failed("timeout", "x", "late")
    blocked = report._replace(verdict=judge(report.facts, data.load_matrix(), data.load_diagnoses(), Options()))
    assert "No verdict: " in lines(blocked)
    skipped = lines(report_of(tmp_path / "c", change={"env": {"ASCEND_HOME_PATH": "/gone"}}))
    assert "– ascend.atb.tree  not judged because ascend.cann.active failed" in skipped


def test_no_line_is_wider_than_the_terminal_except_for_what_cannot_break(tmp_path):
    for lang in ("en", "zh"):
        for line in lines(report_of(tmp_path / lang), lang=lang, width=80).splitlines()[1:]:
            assert cells(line) <= 80 or max(cells(w) for w in line.split()) > 30, line


def test_wrapping():
    assert wrap("aaa bbb ccc", 7) == ["aaa bbb", "ccc"]
    assert wrap("x" * 50, 10) == ["x" * 50]
    assert wrap("中文字符测试", 6) == ["中文字", "符测试"]
    assert cells("中a") == 3


def test_chinese(tmp_path):
    text = lines(report_of(tmp_path), lang="zh")
    for piece in (
        "主机",
        "后端:ascend",
        "路径上的 ATB 库与 torch 的 C++ ABI 不同",
        "卡报告硬件告警",
        "从这里开始:",
        "1 个失败",
    ):
        assert piece in text
    assert "  why " not in text


NEUTRAL = re.compile(
    r"\{\w*\}|\w*\d\w*|GLIBCXX_|[^A-Za-z]|\b(?:torch|torch_npu|numpy|triton|ascend|libcuda|ptxas|SoC|glibc|libstdc|GLIBCXX|Python|uid|LD_PRELOAD|"
    r"PCI|C|ABI|x|e|npu|nvidia|smi|dev|shm|de)\b"
)


def test_every_message_has_its_chinese():
    table = data.load_translations()
    wanted = {c.about for c in CHECKS} | {s for s in SECTIONS if s not in ("NNAL", "Python", "kvbackend")}
    for path in [*Path(kvbackend.doctor.__file__).parent.rglob("*.py"), Path(data.__file__).parent / "rules.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("say", "ok", "info", "unknown", "blocked", "plain", "words")
            ):
                wanted |= {
                    a.value
                    for a in node.args
                    if isinstance(a, ast.Constant)
                    and isinstance(a.value, str)
                    and not (node.func.id == "plain" and a is node.args[0])
                }
    for row in data.load_diagnoses()["diagnoses"]:
        wanted |= {row["cause"], *(r["text"] for r in row["remedy"])}
    lacking = [w for w in sorted(wanted) if w not in table and re.sub(NEUTRAL, "", w)]
    assert lacking == []
    for english, chinese in table.items():
        assert sorted(re.findall(r"\{\w+\}", english)) == sorted(re.findall(r"\{\w+\}", chinese))


def test_ci_lines(tmp_path):
    report = report_of(tmp_path, strict=True)
    shown = documents.ci(report, Words(ascii_only=True))
    assert shown[0].startswith('FAIL ascend.atb.abi id=asc-atb-abi found=0 need=1 fix="source ')
    assert shown[1].startswith("WARN ascend.health id=asc-card-health-alarm ")
    assert shown[2] == "verdict=fail fail=1 warn=1 unknown=0 skip=1 exit=1"
    assert all(ord(c) < 128 for line in shown for c in line)


def test_markdown_ends_with_the_digest(tmp_path):
    text = documents.markdown(report_of(tmp_path), Words())
    digest = json.loads(re.search(r"```json\n(.*)\n```\n</details>\n$", text, re.S).group(1))
    assert digest["verdict"] == "fail"
    assert digest["facts"]["ascend.cann.version"] == "9.1.0"
    assert "### ✗ ATB libraries" in text
    assert "| op | backend |" in text


def test_the_script_is_shell_and_keeps_what_is_not_ours_a_comment(tmp_path):
    import subprocess

    report = report_of(tmp_path, change={**ROUGH, "files": KINDS["asc-driver-too-old"][1]["files"]})
    text = documents.script(report, Words())
    assert "\nsource /usr/local/Ascend/nnal/atb/set_env.sh --cxx_abi=1\n" in text
    assert "\n# export ASCEND_RT_VISIBLE_DEVICES=<ids of healthy cards>\n" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    assert "nothing to mend" in documents.script(report_of(tmp_path / "b", change={}), Words())


SCHEMA_KEYS = {"schema", "tool", "version", "run", "verdict", "exit_code", "summary", "facts", "checks", "findings"}


@pytest.mark.parametrize("name", BASES)
def test_the_document_has_the_promised_shape(tmp_path, name):
    document = json.loads(json.dumps(report_of(tmp_path, BASES[name], KINDS["asc-atb-abi"][1]).document))
    assert set(document) == SCHEMA_KEYS
    assert document["schema"] == "kvbackend-doctor/1"
    assert set(document["run"]) >= {
        "started",
        "seconds",
        "level",
        "purpose",
        "backend",
        "backend_reason",
        "root",
        "redacted",
    }
    assert set(document["summary"]) == {"ok", "warn", "fail", "skip", "unknown", "info", "primary"}
    for key, fact in document["facts"].items():
        assert fact["state"] in facts.STATES
        assert re.fullmatch(r"[\w .+-]+", key)
        assert set(fact) <= {"state", "value", "raw", "source", "others", "ms", "error"}
        assert len(fact.get("raw", "")) <= 4096
    for check in document["checks"]:
        assert re.fullmatch(r"[a-z0-9_.-]+", check["id"])
        assert set(check) <= {"id", "section", "status", "text", "because", "facts", "ms"}
    for finding in document["findings"]:
        assert set(finding) >= {"id", "check", "severity", "component", "cause", "evidence", "remedy"}
        assert all(isinstance(v, str) for k in ("found", "expected") for v in finding.get(k, {}).values())


SEEDS = {
    "user": "jane.doe",
    "host": "node-7-secret",
    "serial": "SN9988776655",
    "ip": "10.20.30.40",
    "ipv6": "fe80::1ff:fe23:4567:890a",
    "mac": "00:1b:44:11:3a:b7",
    "uuid": "GPU-12345678-1234-1234-1234-123456789abc",
    "token": "hf_abcdefghijklmnopqrstuv",
    "env": "hunter2hunter2",
    "other": "/home/someoneelse/x",
}


def test_seeded_secrets_never_come_out(tmp_path):
    board = sample("npu-smi/board_950pr_i0.txt").replace("SN0000000001", SEEDS["serial"])
    noise = " ".join(
        [
            SEEDS["host"],
            SEEDS["ip"],
            SEEDS["ipv6"],
            SEEDS["mac"],
            SEEDS["uuid"],
            SEEDS["token"],
            SEEDS["env"],
            SEEDS["other"],
            "password=" + "pa55w0rd",
            "https://u:" + "pw123456@x.y/",
        ]
    )
    bad = json.dumps({"ok": False, "error": f"failed for {SEEDS['user']} at /home/{SEEDS['user']}/x: {noise}"}) + "\n"
    change = {
        "tools": {"npu-smi board": board, "torch_npu": bad},
        "env": {"PYTHONPATH": f"/home/{SEEDS['user']}/lib", "MY_API_KEY": SEEDS["env"]},
    }
    report = report_of(tmp_path / "root", change=change)
    redact = Redactor(
        {"MY_API_KEY": SEEDS["env"]}, report.facts, f"/home/{SEEDS['user']}", SEEDS["user"], SEEDS["host"]
    )
    clean = report.redacted(redact)
    saved.write_bundle(str(tmp_path / "b.tar.gz"), clean.document, documents.markdown(clean, Words()))
    import gzip

    out = [
        json.dumps(clean.document, ensure_ascii=False),
        documents.markdown(clean, Words("zh")),
        lines(clean, detail=2),
        lines(clean, "zh"),
        "\n".join(documents.ci(clean, Words())),
        documents.script(clean, Words()),
        gzip.decompress((tmp_path / "b.tar.gz").read_bytes()).decode("utf-8", "replace"),
    ]
    for text in out:
        for name, secret in [*SEEDS.items(), ("pw", "pa55w0rd"), ("url", "pw123456")]:
            if name != "other":
                assert secret not in text, name
        assert "someoneelse" not in text
    assert clean.run["redacted"] is True
    assert "25.7.rc1.6" in out[0]
    assert "9.0.0.105.229" in out[0]
    assert "V100R001C11" in out[0]
    assert SEEDS["serial"] in json.dumps(report.document)


def test_versions_that_look_like_addresses_stay():
    found = {"ascend.driver.version": facts.value("24.1.0.3"), "other": facts.value("10.1.2.3")}
    redact = Redactor({}, found)
    assert redact(found)["ascend.driver.version"]["value"] == "24.1.0.3"
    assert redact(found)["other"]["value"] == "<ip>"
    assert redact.text("firmware 7.1.0.7.220, 300.1.1.1, 127.0.0.1") == "firmware 7.1.0.7.220, 300.1.1.1, 127.0.0.1"
    assert redact(say("at {x}", x="10.1.2.3")).said_in({"at {x}": "在 {x}"}) == "在 <ip>"


def test_a_bundle_replays_to_the_same_verdict(tmp_path):
    report = report_of(tmp_path / "root")
    path = tmp_path / "b.tar.gz"
    names = saved.write_bundle(str(path), report.document, "text")
    assert {"report.json", "report.md", "raw/ascend.smi.chips.txt"} <= set(names)
    again = kvbackend.doctor.run(root=str(path))
    assert json.dumps([again.checks, again.findings]) == json.dumps([report.checks, report.findings])
    import tarfile

    with tarfile.open(path) as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from 3.10.12 and 3.11.4 on
        archive.extractall(tmp_path / "unpacked", **safely)
    assert kvbackend.doctor.run(root=str(tmp_path / "unpacked")).exit_code == 1


def test_a_foreign_tree_is_judged_from_its_files(tmp_path):
    write(tmp_path, changed(ASCEND_950, KINDS["asc-atb-abi"][1]))
    report = kvbackend.doctor.run("import", root=str(tmp_path))
    assert report.run["level"] == "static"
    assert [f["id"] for f in report.findings] == ["asc-atb-abi"]
    bare = tmp_path / "bare"
    write(bare, {**changed(ASCEND_950, {}), "env": None})
    report = kvbackend.doctor.run(root=str(bare))
    assert report.exit_code == 0
    assert next(c for c in report.checks if c["id"] == "env.cann_consistent")["status"] == "unknown"


def test_links_of_a_tree_stay_inside_it(tmp_path):
    write(
        tmp_path,
        {
            "files": {
                "/a": "-> /etc/target",
                "/etc/target": "inside",
                "/loop": "-> /loop",
                "/up": "-> ../../etc/target",
            },
            "env": {},
            "tools": {},
        },
    )
    host = FakeHost(tmp_path, {"tools": {}, "deny": {}})
    assert host.text("/a") == host.text("/up") == "inside"
    assert host.read("/loop").state == "absent"
    assert host.read("/etc").state == "unreadable"
    assert host.read("/no\0pe").state == "absent"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"schema": "kvbackend-doctor/1"}',
        '{"schema": "kvbackend-doctor/1", "facts": {"a": 1}, "run": {}}',
        '{"schema": "kvbackend-doctor/1", "facts": {}, "run": {"level": "odd"}}',
    ],
)
def test_files_that_are_no_report(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(data.DataError):
        saved.load_report(str(tmp_path / "r.json"))
    (tmp_path / "b.tar.gz").write_text(text)
    with pytest.raises(data.DataError):
        saved.load_bundle(str(tmp_path / "b.tar.gz"))
    with pytest.raises(data.DataError):
        saved.load_bundle(str(tmp_path / "gone"))


def test_changes_name_what_differs(tmp_path):
    before, after = (
        report_of(tmp_path / n, change=c).document
        for n, c in (("a", {}), ("b", {"env": {"ATB_HOME_PATH": f"{ATB}/atb/cxx_abi_0"}}))
    )
    changes = {c["fact"]: (c["before"], c["after"]) for c in saved.changes(before, after)}
    assert changes["ascend.atb.abi"] == (1, 0)
    assert saved.changes(before, before) == []


def test_explanations():
    words, diagnoses = Words(), data.load_diagnoses()
    for id in [c.id for c in CHECKS] + [d["id"] for d in diagnoses["diagnoses"]]:
        assert explanation.explain_id(id, diagnoses, words)
    assert explanation.explain_id("no.such", diagnoses, words) is None
    assert "ascend.atb.abi" in explanation.near("atb", diagnoses)
    assert len(explanation.list_checks(words)) == len(CHECKS)


def test_paint_colours_with_and_without_rich(capsys, monkeypatch):
    import sys

    line = [[("bad", "bold red"), (" good", "")]]
    for block in (False, True):
        if block:
            monkeypatch.setitem(sys.modules, "rich.console", None)
        paint.paint(line, True, sys.stdout)
        out = capsys.readouterr().out
        assert "\x1b[1;31mbad" in out
        assert "good" in out
    paint.paint(line, False, sys.stdout)
    assert capsys.readouterr().out == "bad good\n"
    assert paint.use_color("always", sys.stdout)
    assert not paint.use_color("never", sys.stdout)
    assert not paint.use_color("auto", sys.stdout)
