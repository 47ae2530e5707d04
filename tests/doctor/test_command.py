"""The command line: exit codes, streams, and that the static level touches nothing it should not."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvbackend.compat.data import DataError
from kvbackend.doctor import causes, command, explain_import_error, primary_cause, single
from kvbackend.doctor import report as reports

from .kinds import KINDS
from .roots import ASCEND_950, CPU, FakeHost, changed, write

HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.fixture
def call(tmp_path, capsys, monkeypatch):
    """Run the command on a tree; returns (exit code, stdout, stderr)."""

    def run(*argv, base=CPU, change=None, stdin=""):
        root = tmp_path / "root"
        if not root.exists():
            write(root, changed(base, change or {}))
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode("utf-8", "surrogateescape"))))
        code = command.main(command.parse(["--root", str(root), *argv]))
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


def test_a_clean_tree(call):
    code, out, err = call()
    assert (code, err) == (0, "")
    assert "All clear" in out
    assert "\x1b" not in out


def test_json_alone_is_on_stdout(call, tmp_path):
    code, out, _ = call("--json", base=ASCEND_950, change=KINDS["asc-atb-abi"][1])
    document = json.loads(out)
    assert (code, document["exit_code"], document["summary"]["primary"]) == (1, 1, "asc-atb-abi")
    code, out, _ = call("--json", str(tmp_path / "r.json"), "-q")
    assert json.loads((tmp_path / "r.json").read_text())["exit_code"] == code == 1
    assert "✗" in out


def test_ci_is_one_line_per_finding(call):
    code, out, _ = call("--ci", base=ASCEND_950, change=KINDS["asc-atb-abi"][1])
    assert code == 1
    assert out.isascii()
    assert len(out.splitlines()) == 2
    assert out.splitlines()[-1].endswith("exit=1")


def test_strict_makes_warnings_count(call):
    change = KINDS["com-duplicate-dists"][1]
    assert call(change=change)[0] == 0
    assert call("--strict")[0] == 3


def test_report_script_bundle_and_baseline(call, tmp_path):
    change = KINDS["asc-atb-abi"][1]
    assert "```json" in call("--report", base=ASCEND_950, change=change)[1]
    assert call("--script")[1].startswith("#!/usr/bin/env bash")
    code, _, err = call(
        "--bundle", str(tmp_path / "b.tar.gz"), "--report", str(tmp_path / "r.md"), "--json", str(tmp_path / "r.json")
    )
    assert code == 1
    assert "b.tar.gz" in err
    assert (tmp_path / "r.md").stat().st_size > 500
    again = command.main(command.parse(["--root", str(tmp_path / "b.tar.gz"), "-q"]))
    assert again == 1
    document = json.loads((tmp_path / "r.json").read_text())
    document["facts"]["ascend.atb.abi"]["value"] = 1
    (tmp_path / "r.json").write_text(json.dumps(document))
    _, out, _ = call("--baseline", str(tmp_path / "r.json"))
    assert "changed  ascend.atb.abi: 1 -> 0" in out
    assert [
        c["fact"] for c in json.loads(call("--baseline", str(tmp_path / "r.json"), "--json")[1])["run"]["baseline"]
    ] == ["ascend.atb.abi"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--matrix", "/no/such"], "cannot be read"),
        (["--baseline", "/no/such"], "cannot be read"),
        (["no.such.check"], "no check is called"),
        (["--only", "nothing*"], "no check is called"),
        (["--explain", "nonsense"], "no check and no failure kind"),
        (["--json", "/no/such/folder/x"], "cannot be written"),
        (["--json", "--report"], "share stdout"),
    ],
)
def test_usage_errors_have_three_parts(call, argv, words):
    code, _, err = call(*argv)
    assert code == 2
    assert words in err
    assert "; " in err
    assert ": " in err


@pytest.mark.parametrize(
    "argv", [["--level", "odd"], ["--timeout", "-1"], ["--deadline", "x"], ["-q", "-v"], ["--for", "fun"]]
)
def test_wrong_options(argv, capsys):
    with pytest.raises(SystemExit) as error:
        command.parse(argv)
    assert error.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_a_corrupt_matrix_is_a_usage_error(call, tmp_path):
    (tmp_path / "m.json").write_bytes(b"\xff\x00{")
    assert call("--matrix", str(tmp_path / "m.json"))[0] == 2


def test_explain(call):
    assert "ATB libraries" in call("--explain", "asc-atb-abi")[1]
    assert call("--list-checks")[1].count("\n") > 50
    token = "x\nImportError: undefined symbol: _ZNK6AsdOps3Ops18GetOperationByNameERKSs\n"
    code, out, _ = call("--explain", "-", stdin=token)
    assert code == 0
    assert "line 2:" in out
    assert "asc-atb-abi (possible" in out
    assert call("--explain", "-", stdin="nothing\udcff")[0] == 1


def test_explain_fits_this_host(call):
    token = "undefined symbol: _ZNK6AsdOps3Ops18GetOperationByNameERKSs"
    code, out, _ = call("--explain", "-", base=ASCEND_950, change=KINDS["asc-atb-abi"][1], stdin=token)
    assert code == 0
    assert "asc-atb-abi (fits this host)" in out
    assert "--cxx_abi=1" in out
    assert "other kinds with such a token: none" in out


def test_a_bug_of_the_doctor_is_5_and_an_interrupt_130(monkeypatch, capsys):
    for error, code in ((ZeroDivisionError("x"), 5), (KeyboardInterrupt(), 130), (DataError("a; b: c"), 2)):

        def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr(reports, "run", fail)
        assert command.main(command.parse([])) == code
        assert capsys.readouterr().err
    monkeypatch.setattr(reports, "run", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        command.main(command.parse(["-vv"]))


AUDIT = """
import sys
seen = []
def hook(event, args):
    if event.startswith(("socket.", "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.system")):
        seen.append(event)
    if event == "open" and isinstance(args[1], str) and any(c in args[1] for c in "wa+"):
        seen.append(("write", args[0]))
sys.addaudithook(hook)
from kvbackend.doctor import run
report = run("static")
assert not seen, seen
heavy = [m for m in ("torch", "torch_npu", "numpy", "rich", "asyncio", "multiprocessing") if m in sys.modules]
assert not heavy, heavy
print(report.run["seconds"])
"""


def test_the_static_level_starts_writes_and_imports_nothing():
    out = subprocess.run(
        [sys.executable, "-c", AUDIT],
        cwd=HERE,
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert out.returncode == 0, out.stderr
    assert float(out.stdout) < 5  # 0.2 s where nothing else runs


def test_it_runs_as_a_module_without_site_packages():
    out = subprocess.run(
        [sys.executable, "-S", "-m", "kvbackend.doctor", "--level", "static", "--json"],
        cwd=HERE,
        text=True,
        capture_output=True,
    )
    assert json.loads(out.stdout)["summary"]["primary"] == "com-torch-missing"
    assert out.returncode == 1


def test_a_reader_that_leaves_early_is_no_error():
    code = f"cd {HERE} && {sys.executable} -m kvbackend.doctor --list-checks | head -1; echo ${{PIPESTATUS[0]}}"
    out = subprocess.run(["bash", "-c", code], text=True, capture_output=True)
    assert out.stdout.splitlines()[-1] == "0"
    assert "Traceback" not in out.stderr


def test_the_one_cause(tmp_path):
    def cause(name, change, error=""):
        spec = changed(ASCEND_950, change)
        write(tmp_path / name, spec)
        return causes.first_cause(error, FakeHost(tmp_path / name, spec))

    assert cause("a", {}) is None
    assert cause("b", KINDS["asc-atb-abi"][1]).startswith("ATB libraries of the other C++ ABI")
    error = "undefined symbol: _ZNK6AsdOps3Ops18GetOperationByNameERKSs"
    both = {**KINDS["asc-atb-abi"][1], "deny": {"davinci0": "EACCES"}}
    assert cause("c", both).startswith("process user is neither owner")
    assert cause("d", both, error).startswith("ATB libraries of the other C++ ABI")


def test_the_text_of_an_import_error(monkeypatch):
    monkeypatch.setattr(causes, "first_cause", lambda error: "the cause: the remedy")
    assert explain_import_error(ImportError("no")) == "no\nthe cause: the remedy\nrun: kvbackend doctor"
    monkeypatch.setattr(causes, "first_cause", lambda error: 1 / 0)
    assert primary_cause() is None
    assert explain_import_error(ImportError("no")) == "no\nrun: kvbackend doctor"


def test_one_file_runs_alone(tmp_path):
    single.pack(str(tmp_path / "doctor.py"))
    command_line = [sys.executable, "-I", "-S", str(tmp_path / "doctor.py"), "--level", "static", "--json"]
    out = subprocess.run(command_line, cwd=tmp_path, text=True, capture_output=True)
    assert json.loads(out.stdout)["summary"]["primary"] == "com-torch-missing"


def test_a_judge_that_fails_still_leaves_a_report(call, monkeypatch):
    monkeypatch.setattr(reports, "judge", lambda *_: 1 / 0)
    code, out, _ = call("--json")
    document = json.loads(out)
    assert (code, document["exit_code"], document["findings"][0]["id"]) == (5, 5, "doctor-bug")
    assert document["facts"]["torch.version"]["value"] == "2.13.0+cpu"
    assert "the doctor itself failed: ZeroDivisionError" in call()[1]


def test_an_interrupt_keeps_what_was_finished(tmp_path):
    """A real Ctrl-C while a program hangs: the finished facts stay, and no program is left behind."""
    spec = changed(ASCEND_950, {"files": {"/usr/local/bin/npu-smi": '#!/bin/sh\necho $$ > "$PID_FILE"\nsleep 300\n'}})
    write(tmp_path / "root", spec)
    code = (
        "import signal, sys\nfrom kvbackend.doctor.host import Host\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in what a shell runs in the background
        "root = sys.argv[1]\nhost = Host(root)\n"
        "inner = host.run\nhost.run = lambda argv, **m: inner([root + argv[0], *argv[1:]], **m)\n"
        "from kvbackend.doctor.collect import collect, INTERRUPTED\n"
        "facts = collect(host, 'import', timeout=60, deadline=60)\n"
        "print(INTERRUPTED in facts, facts['host.os']['value'])\n"
    )
    env = {**os.environ, "PID_FILE": str(tmp_path / "pid")}
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "root")], cwd=HERE, env=env, stdout=subprocess.PIPE, text=True
    )
    for _ in range(400):
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip():
            break
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=30)[0] == "True openEuler 24.03\n"
    pid = (tmp_path / "pid").read_text().strip()
    assert not os.path.exists(f"/proc/{pid}") or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


def test_an_interrupted_run_ends_with_130(call, monkeypatch):
    monkeypatch.setattr(reports, "collect", lambda *_: {reports.INTERRUPTED: {"state": "value", "value": True}})
    code, out, _ = call()
    assert code == 130
    assert "interrupted: what was finished is shown" in out
