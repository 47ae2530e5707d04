"""Cells in child processes: a crash or a hang is one cell, and the rest goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvbackend.cli import main
from kvbackend.commands.matrix import verdict
from kvbackend.matrix import Cell, children, judge
from kvbackend.ops import registry

# Runs the reference, except where a sample of topk_indices is to end badly.
BAD = """
    import os, signal, subprocess, time
    from kvbackend.ops import registry

    def unsupported(lengths, **_):
        if lengths is not None:
            yield "lengths are given; this takes none: drop them"

    def run(scores, k, lengths, order):
        if scores.shape[0] == 0:
            os.kill(os.getpid(), signal.SIGSEGV)
        if scores.shape[1] == 0:
            print("about to abort", flush=True)
            os.abort()
        if k == 1:
            grandchild = subprocess.Popen(["sleep", "600"])
            with open(os.environ["GRANDCHILD"], "w") as file:
                file.write(str(grandchild.pid))
            time.sleep(600)
        if scores.stride(0) == 1:
            raise RuntimeError("no <transposed> rows")
        result = registry["topk_indices"].reference(scores, k, lengths, order)
        return result.flip(-1) if k > scores.shape[1] else result
"""
SAMPLES = [name for name, _ in registry["topk_indices"].make_samples("cpu", torch.float32)]


def group(backend: str, op: str = "topk_indices") -> children.Group:
    return children.Group([op], [backend], "cpu", ["float32"], quick=False)


def verdicts(cells: list[Cell]) -> dict[str, tuple[str, str]]:
    return {cell.sample: (cell.status, "; ".join(cell.reasons)) for cell in cells}


def gone(pid: int) -> bool:
    """Whether a process has ended: a zombie that nobody has waited for yet has."""
    for _ in range(50):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


def test_each_bad_end_is_one_cell(install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRANDCHILD", str(tmp_path / "grandchild"))
    install("bad", topk_indices=BAD)
    begun: list[judge.Key] = []
    cells = list(children.run(group("bad"), begun.append, seconds=8))
    found = verdicts(cells)
    assert list(found) == SAMPLES
    assert found["plain"] == ("pass", "")
    assert found["no rows"] == (
        "crashed",
        "its process ended with signal SIGSEGV: Fatal Python error: Segmentation fault",
    )
    assert found["no columns"] == ("crashed", "its process ended with signal SIGABRT: Fatal Python error: Aborted")
    assert found["k of 1"] == ("crashed", "nothing came back in 8 seconds: its process was killed")
    assert found["transposed"] == ("fail", "RuntimeError: no <transposed> rows")
    assert found["lengths"] == ("refused", "lengths are given; this takes none: drop them")
    assert found["more than there are"][0] == "fail"
    assert "output 0 differs from the reference" in found["more than there are"][1]
    assert {status for status, _ in found.values()} == {"pass", "fail", "refused", "crashed"}
    assert {key.sample for key in begun} >= set(SAMPLES)
    assert gone(int((tmp_path / "grandchild").read_text()))


def test_a_group_whose_processes_always_end_is_left(install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "MAX_CRASHES", 2)
    install(
        "ending",
        copy_blocks="import os\ndef unsupported(**_): return ()\ndef run(cache, block_mapping): os._exit(3)\n",
    )
    found = list(children.run(group("ending", "copy_blocks")))
    crashed, untested = found[:2], found[2:]
    assert {(cell.status, *cell.reasons) for cell in crashed} == {
        ("crashed", "its process ended with exit code 3: it said nothing")
    }
    assert {(cell.status, *cell.reasons) for cell in untested} == {
        ("untested", "not run: 2 processes ended at cells of copy_blocks")
    }
    assert [cell.sample for cell in found] == [
        name for name, _ in registry["copy_blocks"].make_samples("cpu", torch.float32)
    ]


def test_samples_that_cannot_be_made_leave_the_cells_untested(
    monkeypatch: pytest.MonkeyPatch, install, tmp_path: Path
) -> None:
    """The child cannot be told by a monkeypatch: a sitecustomize breaks the samples there."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'kvbackend.matrix.worker' in sys.orig_argv:\n"
        "    import kvbackend.spec as spec\n"
        "    spec.Op.make_samples = lambda self, device, dtype: 1 / 0\n"
    )
    first, *rest = children.run(group("reference"))
    assert (first.status, first.sample) == ("crashed", "making the samples")
    assert first.reasons == ("its process ended with exit code 1: ZeroDivisionError: division by zero",)
    assert {cell.status for cell in rest} == {"untested"}
    assert [cell.sample for cell in rest] == SAMPLES


def test_the_reference_is_asked_once_for_all_backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'kvbackend.matrix.worker' in sys.orig_argv:\n"
        "    from kvbackend.matrix import judge\n"
        "    in_float64 = judge.in_float64\n"
        "    judge.in_float64 = lambda op, args: print('asked', file=open(told, 'a')) or in_float64(op, args)\n"
        f"told = {str(tmp_path / 'told')!r}\n"
    )
    found = list(children.run(children.Group(["topk_indices"], ["cpu", "reference"], "cpu", ["float32"], quick=False)))
    assert [(cell.backend, cell.sample, cell.status) for cell in found] == [
        (backend, sample, "pass") for backend in ("cpu", "reference") for sample in SAMPLES
    ]
    assert (tmp_path / "told").read_text().split() == ["asked"] * len(SAMPLES)


def test_a_device_that_is_lost_is_taken_up_by_another_process(install) -> None:
    """Past a fault of a kernel nothing computes in that process: the rest must not fail for it."""
    install(
        "losing",
        topk_indices="""
            import sys
            from kvbackend.ops import registry

            lost = False

            def unsupported(**_):
                return ()

            def run(scores, k, lengths, order):
                global lost
                if k == 1:
                    lost = True
                    sys.modules["__main__"].usable = lambda device: False  # what the child asks
                if lost:
                    raise RuntimeError("an illegal memory access was encountered")
                return registry["topk_indices"].reference(scores, k, lengths, order)
        """,
    )
    found = verdicts(list(children.run(group("losing"))))
    assert list(found) == SAMPLES
    assert [name for name, (status, _) in found.items() if status != "pass"] == ["k of 1"]


def test_the_command_goes_on_past_a_crash(install, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(judge, "DTYPES", (torch.float32,))
    install("bad", topk_indices=BAD.replace("k == 1", "False"))
    assert main(["matrix", "topk_indices", "--backend", "bad", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["summary"] == {"pass": 11, "refused": 4, "fail": 2, "crashed": 2, "untested": 0}
    assert found["backends"]["bad"]["device"] == "cpu"
    cells = [children.cell_of(cell) for cell in found["cells"]]
    assert verdict(cells) == ("FAIL 2 of 19: more than there are, CRASHED 2 of 19: no rows, pass 11 (exact), 4 refused")


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_children_end_with_the_command(install, tmp_path: Path, sent: signal.Signals, code: int) -> None:
    grandchild = tmp_path / "grandchild"
    install("bad", topk_indices=BAD)
    environment = os.environ | {"GRANDCHILD": str(grandchild), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "kvbackend", "matrix", "topk_indices", "--backend", "bad"]

    def heed() -> None:  # a shell's background job is started deaf to it
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, preexec_fn=heed) as process:
        for _ in range(600):
            if grandchild.exists() and grandchild.read_text():
                break
            time.sleep(0.1)
        process.send_signal(sent)
        assert process.wait(30) == code
    assert gone(int(grandchild.read_text()))


def test_what_backends_elsewhere_say(install: Callable[..., None]) -> None:
    head = "DEVICE = 'cuda'\nORDER = 1\ndef missing():\n    yield 'no such card'\n"
    install(
        "far",
        head,
        topk_indices="""
            def unsupported(k, **_):
                if k == 1:
                    yield "k is 1; 2 and more: add one"

            def run(*_):
                1 / 0
        """,
    )
    cells = list(children.asked(["topk_indices", "copy_blocks"], ["far"], ["cpu"], quick=False))
    topk = [cell for cell in cells if (cell.op, cell.dtype) == ("topk_indices", "bfloat16")]
    assert verdicts(topk)["k of 1"] == ("refused", "k is 1; 2 and more: add one")
    assert verdicts(topk)["plain"] == ("untested", "no such card")
    assert {(cell.status, *cell.reasons) for cell in cells if cell.op == "copy_blocks"} == {
        ("refused", "has no kernel for copy_blocks")
    }
    assert not any(cell.evidence for cell in cells)


def test_a_backend_that_is_not_whole_is_a_reason_and_the_others_go_on(install: Callable[..., None]) -> None:
    install("half", "DEVICE = 'cpu'\ndef missing(): return ()\n", topk_indices="def unsupported(**_): return ()\n")
    found = [*children.run(group("half")), *children.run(group("reference"))]
    assert {cell.status for cell in found if cell.backend == "reference"} == {"pass"}
    [(status, reasons)] = {(cell.status, cell.reasons) for cell in found if cell.backend == "half"}
    assert status == "refused"
    assert "backend package half cannot be used (module 'half' has no attribute 'ORDER')" in reasons[0]
