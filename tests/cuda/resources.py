"""What ptxas said of csrc/cuda's kernels, from the log of `python setup.py build_cuda`, against docs/cuda.md.

python -m tests.cuda.resources LOG [--write]
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "cuda.md"
MARK = "<!-- compiled -->\n"
KERNEL = re.compile(
    r"Compiling entry function '(\w+)' for 'sm_(\d+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores.*?"
    r"Used (\d+) registers",
    re.DOTALL,
)


def kernels(log: str) -> dict[tuple[str, str], tuple[int, int, int]]:
    """(kernel, number of the target) -> bytes of stack, bytes that spill, registers."""
    found = KERNEL.findall(log)
    names = subprocess.run(
        ["c++filt", *(name for name, *_ in found)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return {
        (short(name), target): (int(stack), int(spilled), int(registers))
        for name, (_, target, stack, spilled, registers) in zip(names, found, strict=True)
    }


def short(name: str) -> str:
    """`copy_pages<uint4, DevicePairs>` of a demangled name."""
    name = re.sub(r"\(.*", "", name.replace("void ", "").replace("kvbackend::cuda::", ""))
    return (
        name.replace("unsigned char", "1 byte").replace("unsigned short", "2 bytes").replace("unsigned int", "4 bytes")
    )


def table(found: dict[tuple[str, str], tuple[int, int, int]]) -> str:
    """Registers by kernel and target."""
    targets = sorted({target for _, target in found}, key=int)
    lines = [f"| kernel | {' | '.join(f'sm_{target}' for target in targets)} |", "|---|" + "---|" * len(targets)]
    for kernel in sorted({kernel for kernel, _ in found}):
        lines.append(f"| `{kernel}` | {' | '.join(str(found[kernel, target][2]) for target in targets)} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    log, *options = arguments
    text = Path(log).read_text()
    found = kernels(text)
    if "warning" in text or not found:
        print(text)
        return 1
    wrong = {key: value for key, value in found.items() if value[0] or value[1]}
    made = table(found)
    print(made, end="")
    print(f"{len(found)} kernels compiled, not run; {len(wrong)} of them spill or use a stack {wrong or ''}")
    page = PAGE.read_text("utf-8")
    if "--write" in options:
        PAGE.write_text(re.sub(rf"{MARK}\n(\|.*\n)*", f"{MARK}\n{made}", page), "utf-8")
    elif made not in page:
        print("docs/cuda.md has another table: run ci/cuda_build.sh --write")
        return 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
