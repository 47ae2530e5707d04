"""What passes as compiled for a 950, and how much of its memories a kernel takes."""

from __future__ import annotations

import pytest

from .judging import LIMIT, faults, memory

GOOD = """[AscendNPU IR] Allocated UB size = 16384 bits
[ERROR] Cannot find hivmc-a5 under $PATH
[ERROR] Failed to run BiShengIR pipeline
[ERROR] Executing: bishengir-compile-a5 /tmp/error/kernel.mlir
"""
HIVM = """
  func.func @a(%0: i64) {
    %1 = llvm.mlir.constant(1024 : i64) : i64
    %2 = arith.constant 0 : i64
    %3 = hivm.hir.pointer_cast(%1) : memref<16x16xf32, #hivm.address_space<ub>>
    %4 = hivm.hir.pointer_cast(%2) : memref<2x1x16x16xbf16, #hivm.address_space<cbuf>>
  }
  func.func @b() {
    %1 = llvm.mlir.constant(2048 : i64) : i64
    %2 = arith.constant 64 : i64
    %3 = hivm.hir.pointer_cast(%2, %1) : memref<16x16xf32, #hivm.address_space<cc>>
    %4 = hivm.hir.pointer_cast(%2) : memref<3x10xi1, strided<[256, 1]>, #hivm.address_space<ub>>
  }
"""
USED = {"ub": 2.0, "cbuf": 1.0, "cc": 3.0}


def test_memory_ends_with_its_last_buffer() -> None:
    assert memory(HIVM) == USED
    strided_last = HIVM.replace("constant 64", "constant 4096")  # 522 bits, strided, are three times 256
    assert memory(strided_last)["ub"] == 4 + 3 * 32 / 1024
    with pytest.raises(AssertionError, match="another kind"):
        memory("%3 = hivm.hir.pointer_cast(%2) : memref<?xf32, #hivm.address_space<ub>>")


def test_the_one_end_that_passes() -> None:
    assert not list(faults(GOOD, 1, HIVM, USED))


@pytest.mark.parametrize(
    ("log", "returncode", "hivm", "words"),
    [
        (GOOD, 0, HIVM, "ended with 0"),
        (GOOD.replace("hivmc-a5", "hivmc-a6"), 1, HIVM, "Cannot find hivmc-a6"),
        (GOOD.replace("[ERROR] Cannot find hivmc-a5 under $PATH\n", ""), 1, HIVM, "not for want of hivmc-a5"),
        (GOOD + "loc(1): error: ub overflow, requires 2 bits\n", 1, HIVM, "error: ub overflow, requires 2 bits"),
        (GOOD + "Assertion `x' failed.\n", -6, HIVM, "Assertion `x' failed."),
        (GOOD, -6, HIVM, "ended with -6"),
        (GOOD, 1, "", "no optimised HIVM"),
        (GOOD.replace("16384", "16640"), 1, HIVM, "buffers of 16384 bits"),
        (GOOD.replace("16384 bits", "?"), 1, HIVM, "buffers of 16384 bits"),
    ],
)
def test_everything_else_fails(log: str, returncode: int, hivm: str, words: str) -> None:
    assert any(words in fault for fault in faults(log, returncode, hivm, memory(hivm)))


@pytest.mark.parametrize("name", LIMIT)
def test_a_memory_that_is_too_small(name: str) -> None:
    found = list(faults(GOOD, 1, HIVM, USED | {name: LIMIT[name] + 0.1}))
    assert any(f"there are {LIMIT[name]}" in fault for fault in found)
