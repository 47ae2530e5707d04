"""What a run of bishengir-compile shows: how it ended, and which memory of an Ascend 950 the kernel takes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

# KiB that bishengir-compile has for buffers on every 950: the dlti.target_system_spec of its output
LIMIT = {"ub": 248, "cbuf": 512, "cc": 256}
NAMES = {"ub": "UB", "cbuf": "L1", "cc": "L0C"}  # Huawei's names, by those of the address spaces

END = {"[ERROR] Cannot find hivmc-a5 under $PATH", "[ERROR] Failed to run BiShengIR pipeline"}
ECHO = "[ERROR] Executing: "  # of the command


def faults(log: str, returncode: int, hivm: str, used: dict[str, float]) -> Iterator[str]:
    """Why a compilation is not one that ended for want of hivmc-a5 alone, within the chip's memories."""
    lines = [line.strip() for line in log.splitlines()]
    told = (re.sub(r"^loc\(.*?\): ", "", line) for line in lines if not line.startswith(ECHO) and line not in END)
    yield from dict.fromkeys(line for line in told if re.search(r"error|assert|overflow", line, re.I))
    if returncode != 1 or not END.issubset(lines):
        yield f"ended with {returncode}, and not for want of hivmc-a5"
    if not hivm:
        yield "made no optimised HIVM"
        return
    for name, limit in LIMIT.items():
        if used[name] > limit:
            yield f"takes {used[name]:.1f} KiB of {NAMES[name]}; there are {limit}"
    printed = re.search(r"Allocated UB size = (\d+) bits", log)
    bits = used["ub"] * 8192
    if (int(printed[1]) if printed else 0) != bits:
        yield f"buffers of {bits:.0f} bits of UB were found where the compiler says {printed and printed[1]}"


BITS = {"i1": 1, "i8": 8, "i16": 16, "f16": 16, "bf16": 16, "i32": 32, "f32": 32, "i64": 64}
_CONSTANT = re.compile(r"(%\w+) = llvm\.mlir\.constant\((\d+) : i64\)|(%\w+) = arith\.constant (\d+) : i64")
_BUFFER = re.compile(
    r"pointer_cast\(([^)]*)\).*: memref<((?:\d+x)*)(\w+)(?:, strided<\[([\d, ]*)\]>)?, #hivm\.address_space<(\w+)>>"
)


def memory(hivm: str) -> dict[str, float]:
    """KiB of each memory up to the end of its last buffer; buffers start and end at multiples of 32 bytes."""
    at: dict[str, int] = {}
    end = dict.fromkeys(LIMIT, 0)
    for line in hivm.splitlines():
        if "func.func" in line:
            at = {}
        if found := _CONSTANT.search(line):
            at[found[1] or found[3]] = int(found[2] or found[4])
        if "pointer_cast(" not in line:
            continue
        buffer = _BUFFER.search(line)
        assert buffer, f"a buffer of another kind: {line}"
        sizes = [int(size) for size in buffer[2].split("x")[:-1]]
        count = math.prod(sizes)
        if buffer[4]:
            steps = [int(step) for step in buffer[4].split(",")]
            count = 1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
        for start in buffer[1].split(","):
            bits = at[start.strip()] * 8 + count * BITS[buffer[3]]
            end[buffer[5]] = max(end[buffer[5]], -(-bits // 256) * 256)
    return {name: bits / 8192 for name, bits in end.items()}
