"""Programs that hang, flood, fork, abort or print rubbish harm neither the run nor the other facts."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from kvbackend.doctor import collect as probes_module
from kvbackend.doctor import process
from kvbackend.doctor.collect import Probe, _run, collect, imports, tools
from kvbackend.doctor.host import Host

from .roots import ASCEND_950, changed, write


def python(code: str, timeout: float = 5, **more) -> process.Output:
    return process.run([sys.executable, "-I", "-S", "-c", code, "{answer}"], timeout, **more)


def test_output_answer_and_exit_code():
    out = python(
        "import os, sys; print('out'); print('err', file=sys.stderr); os.write(int(sys.argv[1]), b'yes'); sys.exit(3)"
    )
    assert (out.ended, out.code, out.stdout, out.stderr, out.answer) == ("exit", 3, "out\n", "err\n", "yes")


def test_hang_ends_in_time():
    begin = time.monotonic()
    assert python("import time; time.sleep(60)", 0.4).ended == "timeout"
    assert time.monotonic() - begin < 3


def test_flood_ends_early_and_is_cut():
    out = python("while True: print('x' * 10000)", 20, limit=50_000)
    assert out.ended == "flood"
    assert len(out.stdout) <= 50_000
    assert out.seconds < 10


def test_abort_is_a_signal():
    out = python("import os; os.abort()")
    assert (out.ended, imports.signal_name(-out.code)) == ("signal", "SIGABRT")
    assert imports.signal_name(4000) == "signal 4000"


def test_a_forked_child_with_the_pipe_is_killed(tmp_path):
    pid_file = tmp_path / "pid"
    child = f"open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    code = f"import os, time\nif os.fork() == 0:\n {child}\nprint('parent')"
    begin = time.monotonic()
    out = python(code)
    assert (out.ended, out.stdout) == ("exit", "parent\n")
    assert time.monotonic() - begin < 3
    for _ in range(50):
        if not pid_file.exists() or not pid_file.read_text() or not os.path.exists(f"/proc/{pid_file.read_text()}"):
            break
        time.sleep(0.05)
    else:
        state = Path(f"/proc/{pid_file.read_text()}/stat").read_text().split()[2]
        assert state == "Z"


def test_closing_its_output_does_not_fool_the_watch():
    out = python("import os, time; os.close(1); os.close(2); os.close(int(__import__('sys').argv[1])); time.sleep(0.3)")
    assert (out.ended, out.code) == ("exit", 0)


def test_garbage_and_missing_programs():
    assert "�" in python("import os; os.write(1, bytes(range(256)))").stdout
    assert process.run(["/no/such/program"], 1).ended == "missing"


@pytest.mark.parametrize(
    ("script", "state"),
    [
        ("sleep 30", "timeout"),
        ("while :; do echo flood flood flood flood; done", "unparsed"),
        ("kill -ABRT $$", "unparsed"),
        ("(sleep 30 &) ; echo rubbish", "unparsed"),
        ("printf '\\377\\000|+|\\n'", "unparsed"),
    ],
)
def test_a_hostile_npu_smi_harms_no_other_fact(tmp_path, script, state):
    write(tmp_path, changed(ASCEND_950, {"files": {"/usr/local/bin/npu-smi": f"#!/bin/sh\n{script}\n"}}))
    host = Host(str(tmp_path), run=lambda argv, **more: process.run([str(tmp_path) + argv[0], *argv[1:]], **more))
    begin = time.monotonic()
    found = tools.npu(host, 1.0)
    assert time.monotonic() - begin < 8
    assert found["ascend.smi.chips"]["state"] == state
    json.dumps(found)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("import os; os.abort()", "SIGABRT"),
        ("import sys; print('{\"ok\": true}'); sys.exit(7)", "SystemExit: 7"),
        ("raise ImportError('libatb.so: cannot open shared object file')", "libatb.so"),
        ("import os; os.write(int(__import__('sys').argv[1]), b'[1]\\n{'); raise SystemExit(2)", "exit 0"),
    ],
)
def test_a_hostile_torch_npu_becomes_a_fact(tmp_path, body, error):
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "torch_npu.py").write_text(body)
    host = Host("/", environ={"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"]})
    fact = imports.outcome(imports.child(host, imports._TORCH_NPU, 5, clean=False), "test")
    assert fact["value"]["ok"] is False
    assert error in fact["value"]["error"]


def test_a_hanging_import_is_a_timeout(tmp_path):
    (tmp_path / "torch.py").write_text("import time; time.sleep(60)")
    host = Host("/", environ={"PYTHONPATH": str(tmp_path)})
    fact = imports.outcome(imports.child(host, imports._TORCH_NPU, 0.2, clean=False), "test")
    assert fact["state"] == "timeout"


def test_a_probe_that_raises_or_hangs_is_told_and_the_rest_goes_on(monkeypatch):
    found: dict = {}
    told: list = []
    monkeypatch.setattr(probes_module, "SLOW_S", 0.3)

    def late():
        time.sleep(1.5)
        return {}

    probes = [
        Probe("bad", "import", lambda: 1 / 0),
        Probe("late", "import", late),
        Probe("good", "import", lambda: {"good": {"state": "value", "value": 1}}),
    ]
    _run(probes, (), 0.8, found, told.append)
    assert found["good"]["value"] == 1
    assert (found["probe.bad"]["state"], "ZeroDivisionError" in found["probe.bad"]["error"]) == ("crashed", True)
    assert found["probe.late"]["state"] == "timeout"
    assert told == ["late"]


def test_the_deadline_holds(tmp_path):
    write(tmp_path, changed(ASCEND_950, {}))
    host = Host(str(tmp_path), run=lambda *_, **__: time.sleep(30))
    begin = time.monotonic()
    found = collect(host, "import", timeout=30, deadline=1.5)
    assert time.monotonic() - begin < 4
    assert found["probe.npu-smi"]["state"] == "timeout"
    assert found["ascend.cann.version"]["value"] == "9.1.0"
