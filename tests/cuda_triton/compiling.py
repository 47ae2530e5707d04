"""Compiles what launchers launch, for GPUs that are not here, and reads registers, spills and shared memory.

A launcher is run on tensors of device 'meta' with `launch` replaced: what would be launched is recorded, with the types
and divisibilities that triton would specialize on, and compiled for an explicit target. ptxas, cuobjdump and nvdisasm
are those that triton brings.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from kvbackend import backends
from kvbackend.backends import nvidia
from kvbackend.backends.cuda_triton import launching, resources
from kvbackend.ops import registry

from . import shapes

TOOLS = Path(triton.backends.nvidia.__file__).parent / "bin"

# compute capability -> shared memory that a block may have, in bytes: CUDA C++ Programming Guide, technical
# specifications per compute capability
SHARED_LIMIT = {80: 166912, 87: 166912, 90: 232448, 100: 232448, 120: 101376}
TENSOR_COLUMNS = 512  # of tensor memory, which compute capability 10.0 has; what asks for more is compiled to a trap
WIDE_PRODUCT = {90: "HGMMA", 100: "UTCHMMA"}  # of 64 rows and more
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


@dataclass(frozen=True)
class Launch:
    """One launch as triton specializes it."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


@dataclass(frozen=True)
class Resources:
    """What one kernel takes on one target."""

    registers: int
    spilled: int  # bytes
    shared: int  # bytes
    tensor_columns: int
    ptx: str
    sass: str


def specialize(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> Launch:
    """As triton does: integers that are 1 become constants; multiples of 16 and aligned pointers are marked, unless the
    kernel asks not to be specialized on them."""
    options = tuple((key, constants[key]) for key in OPTIONS if key in constants)
    fixed = {key: value for key, value in constants.items() if key not in OPTIONS}
    signature, aligned = {}, []
    for index, (name, value) in enumerate(zip(kernel.arg_names, args, strict=False)):
        if kernel.params[index].do_not_specialize:
            signature[name] = mangle_type(value)
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value == 1:
            fixed[name] = 1
            continue
        signature[name] = mangle_type(value)
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if isinstance(number, int) and number % 16 == 0:
            aligned.append(index)
    missing = set(kernel.arg_names) - set(signature) - set(fixed)
    assert not missing, f"{kernel.fn.__name__} is launched without {missing}"
    return Launch(kernel, tuple(signature.items()), tuple(fixed.items()), tuple(aligned), options)


def launches(op_name: str, capability: int, **example: Any) -> list[Launch]:
    """What the op's launcher launches on a GPU for a call, whose tensors may be on 'meta'."""
    found: list[Launch] = []

    def record(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if 0 not in grid:
            found.append(specialize(kernel, args, constants))

    adapter = backends.registered()["cuda_triton"].adapter(op_name)
    assert adapter is not None
    with (
        mock.patch.object(launching, "launch", record),
        mock.patch.object(nvidia, "capability", return_value=divmod(capability, 10)),
    ):
        adapter.run(**registry[op_name].bind((), example))
    return found


def build(launch: Launch, capability: int) -> Resources:
    """Compile a launch for a compute capability, and read its cubin."""
    constants = dict(launch.constants)
    source = ASTSource(
        launch.kernel,
        signature={**dict(launch.signature), **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
        attrs={(index,): [["tt.divisibility", 16]] for index in launch.aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(launch.options))
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "-res-usage", cubin)
        sass = _tool("nvdisasm", "-c", cubin)
    registers = int(re.search(r"REG:(\d+)", usage).group(1))  # type: ignore[union-attr]
    stores = re.findall(r"\bSTL(?:\.(\d+))?\b", sass)  # to local memory; of the stack, calls of division take some too
    spilled = sum(int(bits or 32) // 8 for bits in stores)
    memories = compiled.metadata.shared, compiled.metadata.tmem_size or 0
    return Resources(registers, spilled, *memories, compiled.asm["ptx"], sass)


def _tool(name: str, *args: Any) -> str:
    return subprocess.run([TOOLS / name, *args], capture_output=True, text=True, check=True).stdout


def samples(op_name: str, dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """The op's contract samples without data."""
    yield from registry[op_name].make_samples("meta", dtype)


# ------------------------------------------------------------------------------------------- every target: the table

PAGE = Path(__file__).parents[2] / "docs" / "cuda.md"
MARK = "<!-- resources -->\n"


def faults(launch: Launch, capability: int, found: Resources) -> Iterator[str]:
    """What must not be in machine code."""
    if found.spilled:
        yield f"spills {found.spilled} bytes"
    if found.shared > SHARED_LIMIT[capability]:
        yield f"takes {found.shared} bytes of shared memory; a block may have {SHARED_LIMIT[capability]}"
    if found.tensor_columns > TENSOR_COLUMNS:
        yield f"takes {found.tensor_columns} columns of tensor memory; a block may have {TENSOR_COLUMNS}"
    constants = dict(launch.constants)
    if "DOT" in constants:
        wide = constants.get("BLOCK_M", 0) >= 64 and WIDE_PRODUCT.get(capability)
        if not re.search(rf"\b{wide or '(HG|UTCH|H)MMA'}\b", found.sass):
            yield f"has no {wide or 'product of tensor cores'}"
        if capability == 90 and not re.search(r"\b(LDG|LDGSTS|UTMALDG)\S*\.128\b", found.sass):
            yield "has no 16-byte load"


def _built(job: tuple[str, str, int, int]) -> tuple[Any, ...]:
    """Compile one launch of a call for one target; in a process of its own, so named by its place."""
    op_name, case, place, capability = job
    example = next(args for op, name, args in (*hot(), *shapes.FULL.every_format()) if (op, name) == (op_name, case))
    launch = launches(op_name, capability, **example)[place]
    found = build(launch, capability)
    return job, found.registers, found.shared, tuple(faults(launch, capability, found))


def hot() -> Iterator[shapes.Call]:
    """The calls that are compiled for every target."""
    yield from shapes.FULL.calls()
    yield "swap_blocks", "2 blocks", shapes.FULL.swapping()  # not captured in a graph, so not among those
    for dim in (64, 128):
        yield "paged_attention", f"positions and biases, heads of {dim}", shapes.FULL.placed(shapes.FULL.prefill, dim)


Everywhere = tuple[Launch, ...]  # what takes one place in a call, by target


def _everywhere(op_name: str, example: dict[str, Any]) -> Iterator[Everywhere]:
    return zip(*(launches(op_name, capability, **example) for capability in SHARED_LIMIT), strict=True)


def _unique(calls: Iterable[shapes.Call]) -> dict[Everywhere, tuple[str, str, int]]:
    """Each launch once, with the op, case and place of the first call that makes it."""
    found: dict[Everywhere, tuple[str, str, int]] = {}
    for op_name, case, example in calls:
        for place, made in enumerate(_everywhere(op_name, example)):
            found.setdefault(made, (op_name, case, place))
    return found


def by_op(calls: Iterable[shapes.Call]) -> dict[str, set[Everywhere]]:
    """What the calls of each op launch, also where another op does, too."""
    found: dict[str, set[Everywhere]] = {}
    for op_name, _, example in calls:
        found.setdefault(op_name, set()).update(_everywhere(op_name, example))
    return {op_name: made for op_name, made in found.items() if made}


def module(most: dict[str, tuple[int, int]]) -> str:
    """The text of backends/cuda_triton/resources.py."""
    head, mark, _ = Path(resources.__file__).read_text().partition(" = {\n")
    rows = (f'    "{op}": ({registers}, {shared / 1024:.0f}),\n' for op, (registers, shared) in sorted(most.items()))
    return head + mark + "".join(rows) + "}\n"


def main(arguments: list[str]) -> int:
    """Compile hot calls for every target and every format for sm_90; compare what is written of them, or write it."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    rows = _unique(hot())
    others = {made: where for made, where in _unique(shapes.FULL.every_format()).items() if made not in rows}
    jobs = [(*where, capability) for where in rows.values() for capability in SHARED_LIMIT]
    jobs += [(*where, 90) for where in others.values()]
    with ProcessPoolExecutor(max_workers=2, mp_context=get_context("spawn")) as pool:
        built = {job: found for job, *found in pool.map(_built, jobs)}
    wrong = [f"{job}: {fault}" for job, (_, _, found) in built.items() for fault in found]
    most = {}
    for op, launched in by_op(hot()).items():
        taken = [built[(*rows[launch], capability)] for launch in launched for capability in SHARED_LIMIT]
        most[op] = max(registers for registers, _, _ in taken), max(shared for _, shared, _ in taken)
    lines = ["| op | first call that launches it | kernel |" + "".join(f" sm_{c} |" for c in SHARED_LIMIT)]
    lines.append("|---" * (3 + len(SHARED_LIMIT)) + "|")
    for made, where in rows.items():
        cells = (built[(*where, capability)] for capability in SHARED_LIMIT)
        numbers = "".join(f" {registers} / {shared / 1024:.0f} |" for registers, shared, _ in cells)
        lines.append(f"| `{where[0]}` | {where[1]} | `{made[0].name}` |{numbers}")
    head, mark, _ = PAGE.read_text().partition(MARK)
    written = {PAGE: head + mark + "\n" + "\n".join(lines) + "\n", Path(resources.__file__): module(most)}
    for path, text in written.items():
        if "--write" in arguments:
            path.write_text(text)
        elif path.read_text() != text:
            wrong.append(f"{path.name} is not of this code: run ci/cuda_compile.sh --write")
    print(f"triton {triton.__version__}: {len(rows)} kernels for {len(SHARED_LIMIT)} targets, {len(others)} for sm_90")
    for line in wrong:
        print(f"wrong: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
