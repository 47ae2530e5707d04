"""Run the ops on an NPU and compare with the references: nobody has done it yet. `ci/ascend_check.sh` calls it.

    python -m tests.npu.device.check [--ops a,b] [--fake] [--json FILE] [--limits]

Each op takes its contract samples and the calls of `tests/npu/cases.py` in three dtypes; a line says how many were
taken and refused, and what went wrong. Then come round trips between plain and NZ pages, graphs that are captured,
changed and replayed, and times of the hot calls as percents of a copy and a matmul measured here. --json writes the
cells for `kvbackend matrix merge`, and times to a file beside it. --limits makes calls past each documented limit,
which CANN must refuse; a device that takes one may not survive it, so nothing else is done then.
--fake installs the fake operator library first (ci/npu_check.sh's environment), to try the check itself. Exit code 1 if
a call fails or differs, or is taken past a limit.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

import kvbackend
from kvbackend import profile
from kvbackend.backends.npu import cann_ops, target
from kvbackend.matrix import Cell, copy_arguments, documents, flat_results
from kvbackend.matrix import judge as matrix
from kvbackend.ops import registry
from tests.doubles import cann_ops_transformer
from tests.npu import cases, judge
from tests.npu.device import fractals, graphs, probes, times
from tests.npu.device.moving import ON_HOST, moved

# Calls that rest on something which Ascend's documentation does not say (docs/ascend.md)
UNDOCUMENTED = ("padding", "all padding", "int32 slots", "rows past the batch", "equal scores")


def check(op: str, dtype: torch.dtype) -> list[Cell]:
    """A cell for each call; of a failed one the reasons say what went wrong."""
    return [cell_of(op, dtype, name, args) for name, args in cases.every(op, dtype)]


def cell_of(op: str, dtype: torch.dtype, name: str, args: dict[str, Any]) -> Cell:
    about = op, "npu", "npu", matrix.name_of(dtype), matrix.format_of(args), name
    if refused := judge.reasons(op, args):
        return Cell(*about, "refused", tuple(refused))
    on_device = moved(registry[op].bind((), copy_arguments(args)), "npu:0", ON_HOST.get(op, ()))
    try:
        with kvbackend.use("npu", ops=op):
            result = registry[op](**on_device)
        got = {key: value.cpu() for key, value in flat_results(registry[op], result, on_device).items()}
        found = judge.faults(op, args, got)
    except RuntimeError as error:
        found = [str(error).splitlines()[0]]
    remark = " (rests on undocumented behaviour)" if name.removeprefix("npu: ") in UNDOCUMENTED else ""
    faults = tuple(f"{fault}{remark}" for fault in found)
    return Cell(*about, "fail" if faults else "pass", faults, None, "one call on the device")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default=",".join(judge.ADAPTED), help="comma-separated ops")
    parser.add_argument("--fake", action="store_true", help="over the fake operator library")
    parser.add_argument("--json", metavar="FILE", help="write the cells, for kvbackend matrix merge")
    parser.add_argument("--limits", action="store_true", help="past the documented limits, instead")
    options = parser.parse_args()
    for reason in judge.NPU.missing():
        print(f"no NPU: {reason}")
        return 1
    import torch_npu

    if options.fake:
        from tests.npu.stub_cann import aten, fake_aclnn  # noqa: F401

        torch.empty(1, device="npu:0")
        fake_aclnn.install()
        sys.modules[cann_ops.PACKAGE] = cann_ops_transformer.module()
        of_cann = cann_ops_transformer.define()  # noqa: F841  (the ops are there as long as it is)
    soc, here = torch_npu.npu.get_device_name(), target.current()
    print(f"{'FAKE ' if options.fake else ''}{soc}, CANN {here.cann}, torch_npu {torch_npu.__version__}", end=", ")
    print(f"torch {torch.__version__}, {platform.platform()}")
    for name, library in probes.operators():
        if library not in cann_ops.OWN:
            print(f"{name} is in {library}, which is not CANN's" if library else f"this CANN does not have {name}")
    if options.limits:
        answers = list(probes.limits())
        print(*(f"{call}: {refusal or 'TAKEN'}" for call, refusal in answers), sep="\n")
        return int(any(not refusal for _, refusal in answers))
    cells: list[Cell] = []
    for op in options.ops.split(","):
        for dtype in judge.DTYPES:
            judged = check(op, dtype)
            wrong = [cell for cell in judged if cell.status == "fail"]
            refused = sum(cell.status == "refused" for cell in judged)
            counts = f"{len(judged) - refused:3} taken {refused:3} refused {len(wrong):3} wrong"
            print(f"{op:22} {str(dtype).removeprefix('torch.'):9} {counts}")
            for cell in wrong:
                print(*(f"    {cell.sample}: {fault}" for fault in cell.reasons), sep="\n")
            cells += judged
    faulty = [cell.op for cell in cells if cell.status == "fail"]
    for part, found in (("NZ", fractals.faults()), ("graph", graphs.faults())):
        for name, fault in found:
            print(f"{part}: {name}: {fault or 'as it should be'}")
            faulty += [name] if fault else []
    rows = []
    for row in times.rows(options.fake):
        print(f"{'FAKE ' if options.fake else ''}{times.line(row)}")
        rows.append(row)
    if options.json:
        document = documents.document(cells, ["npu:0"]) | {"fake": options.fake}
        profile.write_whole(options.json, json.dumps(document, indent=1).encode())
        measured = {"fake": options.fake, "soc": soc, "cann": here.cann, "times": rows}
        profile.write_whole(Path(options.json).with_name("times.json"), json.dumps(measured, indent=1).encode())
    return int(bool(faulty))


if __name__ == "__main__":
    raise SystemExit(main())
