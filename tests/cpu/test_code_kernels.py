"""Kernels that write and read codes: every pattern of 16 bits and every code, in every format and instruction set."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvbackend import backends, codecs, formats, native, use
from kvbackend.ops import dequantize_kv, quantize_kv
from kvbackend.ops.quantize_kv import every_format

pytestmark = pytest.mark.skipif(
    bool(backends.registered()["cpu"].missing()), reason="; ".join(backends.registered()["cpu"].missing())
)

QUANTIZED = [(name, role) for name, role in every_format() if formats.get(name).quantized]
OUT = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def rows(kind: str) -> Tensor:
    """Rows [256, 2, 128] whose numbers are all patterns of 16 bits, in order, so that neighbours are of one size."""
    patterns = torch.arange(65536, dtype=torch.int32)
    if kind == "shuffled":
        patterns = patterns[torch.randperm(65536, generator=torch.Generator().manual_seed(1))]
    if kind == "fp32":  # upper halves, with lower ones that are ties, next to ties, and others
        lower = torch.tensor([0, 1, 0x8000, 0x7FFF, 0x8001, 0xFFFF, 0x1234, 0x4000])
        bits = (patterns.long() << 16) + lower[torch.arange(65536) * 5 // 3 % 8]
        x = bits.to(torch.int32).view(torch.float32)
    else:
        x = patterns.to(torch.int16).view(torch.float16 if kind == "fp16" else torch.bfloat16)
    return x.reshape(256, 2, 128)


def faults() -> Iterator[str]:
    """What the CPU kernels give that the codecs do not."""
    for kind in ("bf16", "fp16", "fp32", "shuffled"):
        x = rows(kind)
        for name, role in QUANTIZED:
            fmt = formats.get(name)
            global_scale = torch.tensor([0.0117]) if fmt.global_scale else None
            given = [None]
            if fmt.granularity in codecs.split.STATIC:
                size = codecs.split.scales_shape(fmt, role, x.shape)
                given += [torch.ones(size), torch.linspace(3e-5, 700.0, 256)[: max(size)].expand(size)]
            for scale in given:
                got = quantize_kv(x, name, scale, global_scale, role)
                want = codecs.encode(x, name, role, global_scale, scale)
                for what, one, other in zip(("codes", "scales"), got, want, strict=True):
                    if one.dtype != other.dtype or not torch.equal(raw(one), raw(other)):
                        yield f"quantize_kv {kind} {name} {role} {'given scale' if scale is not None else ''}: {what}"
            every_code = torch.arange(65536).to(torch.uint8)[: got[0].numel()].reshape(got[0].shape)
            for codes in (got[0], every_code.view(got[0].dtype)):
                for out, dtype in OUT.items():
                    number = dequantize_kv(codes, want[1], name, global_scale, role, out)
                    wanted = codecs.decode(codes, want[1], name, role, global_scale, dtype)
                    if not torch.equal(number.nan_to_num(7.0), wanted.nan_to_num(7.0)):
                        yield f"dequantize_kv {name} {role} {out}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_format", ["fp8_e4m3:channel", "fp8_e5m2:channel", "fp4_e2m1:channel"])
def test_numbers_are_divided_exactly(kv_format: str, dtype: torch.dtype) -> None:
    """The kernels multiply by reciprocals and correct that: 4096 scales, most in reach, under numbers of all kinds."""
    generator = torch.Generator().manual_seed(5)
    scale = 1 + torch.rand(16, 256, generator=generator)
    scale[8:] = torch.randint(1, 449, (8, 256), generator=generator) / 448  # ties are met
    x = torch.randint(-256, 257, (128, 16, 256), generator=generator) * 2.0 ** torch.randint(
        -12, 3, (128, 16, 256), generator=generator
    )
    for power in (0, -20, 30):
        given = scale * 2.0**power
        scaled = (x * 2.0**power if dtype is torch.bfloat16 else x).to(dtype)
        assert_coded_alike(scaled, kv_format, given)


@pytest.mark.parametrize("power", [-140, -126, -80, -61, -60, 60, 100, 125, 126])
def test_scales_near_the_ends_of_float32(power: int) -> None:
    """Reciprocals of these are not to be had, or leave nothing to correct by."""
    x = rows("bf16")
    x = x.masked_fill(x.isnan(), 0)
    for name in ("fp8_e4m3", "fp4_e2m1:tensor", "fp8_e5m2:head"):
        scale = torch.full((2 if name.endswith("head") else 1,), 1.3) * torch.tensor(2.0).double().pow(power).float()
        assert_coded_alike(x, name, scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kv_format", "global_scale"),
    [("fp4_e2m1", None), ("nvfp4", 1.0), ("nvfp4", 0.0117), ("nvfp4", 0.7), ("nvfp4", 3e-30), ("nvfp4", 2e30),
     ("mxfp4", None), ("fp4_e2m1:32", None), ("fp4_e2m1:128", None),
     ("mxfp8", None), ("fp8_e4m3:16", None), ("fp8_e5m2:128", None)],
)  # fmt: skip
def test_codes_under_every_scale(
    kv_format: str, global_scale: float | None, dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    """Groups with every scale there is (of 8 bits: with each fifth), and all numbers but those far below their largest.

    All twice, in one thread: the kernel finds out where codes begin once it has seen so many numbers.
    """
    fmt, other = formats.get(kv_format), None if global_scale is None else torch.tensor([global_scale])
    assert fmt.group is not None
    if fmt.scale_dtype == "float8_e4m3fn":
        tops = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float() * 6 * (global_scale or 1.0)
        tops = torch.stack((tops, tops * 1.03)).flatten()
    else:
        tops = torch.tensor([1.0, 1.4, 1.6, 1.8]) * 2.0 ** torch.arange(-126, 127, 5 if fmt.bits == 8 else 1)[:, None]
    limits = torch.finfo(dtype)
    tops = tops.flatten().clamp(limits.tiny, limits.max).to(dtype).unique()
    x = grouped(tops, fmt.group, octaves=18 if fmt.bits == 8 else 6)
    x = torch.cat((x, x))
    set_threads(1)
    with use("cpu"):
        got = quantize_kv(x, kv_format, None, other)
    for one, wanted in zip(got, codecs.encode(x, kv_format, global_scale=other), strict=True):
        assert torch.equal(raw(one), raw(wanted))


def grouped(tops: Tensor, group: int, octaves: int) -> Tensor:
    """Rows [n, 1, 128] in groups, each with one of these on top of numbers down to 2^-octaves of it, of both signs."""
    octave = 1 << (10 if tops.dtype is torch.float16 else 7)
    below = torch.arange(octaves * octave // (group - 1) * (group - 1)).reshape(-1, group - 1)
    bits = tops.view(torch.int16).int()[:, None, None]
    members = (bits - below).clamp(min=0)
    both = torch.stack((members, members | 0x8000), 1).flatten(0, 2)
    all_groups = torch.cat((bits.expand(-1, 2 * len(below), 1).reshape(-1, 1), both), 1).to(torch.int16)
    rest = len(all_groups) * group % 128 // group
    return all_groups[: len(all_groups) - rest].view(tops.dtype).reshape(-1, 1, 128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_format", ["fp4_e2m1:tensor", "fp8_e4m3", "fp8_e5m2:head"])
def test_codes_under_one_scale(kv_format: str, dtype: torch.dtype) -> None:
    """Every number under 32 scales for all tokens, ties with some of them."""
    x = rows("fp16" if dtype is torch.float16 else "bf16").repeat(2, 1, 1)
    scales = 2.0 ** torch.arange(-16, 16).float()
    scales[8:] *= 1 + torch.rand(24, generator=torch.Generator().manual_seed(3))
    scales[24:] = scales[24:].bfloat16().float()
    for scale in scales.reshape(-1, 1):
        assert_coded_alike(x, kv_format, torch.cat((scale, scale * 1.7)) if kv_format.endswith("head") else scale)


def assert_coded_alike(x: Tensor, kv_format: str, scale: Tensor) -> None:
    with use("cpu"):
        got = quantize_kv(x, kv_format, scale)
    for one, other in zip(got, codecs.encode(x, kv_format, scale=scale), strict=True):
        assert torch.equal(raw(one), raw(other))


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def isa() -> str:
    function = ctypes.CDLL(str(native.FOLDER / "libkvbackend_cpu.so")).kvbackend_isa
    function.restype = ctypes.c_char_p
    return function().decode()


def test_every_pattern_is_coded_as_the_codecs_say() -> None:
    with use("cpu"):
        assert list(faults()) == []


CHILD = """
from kvbackend import use
from tests.cpu.test_code_kernels import faults, isa
with use("cpu"):
    print(*[*faults(), isa()], sep="; ")
"""


@pytest.mark.parametrize("name", ["plain", "avx2"])
def test_lower_instruction_sets_code_every_pattern_alike(name: str) -> None:
    order = native.CPU_ISAS
    if order.index(name) >= order.index(isa()):
        pytest.skip(f"kernels use {isa()} here: {name} is no lower one")
    done = subprocess.run(
        [sys.executable, "-c", CHILD], cwd=Path(__file__).parents[2], env={**os.environ, "KVBACKEND_CPU_ISA": name},
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.stdout.strip(), done.returncode) == (name, 0), done.stderr


def test_an_infinite_magnitude_does_not_hide_in_a_maximum() -> None:
    """The kernel takes maxima of bits, where NaN and infinity are largest."""
    x = torch.full((3, 2, 32), 0.5, dtype=torch.bfloat16)
    x[0, 0, 5], x[1, 1, 7], x[2, 0, 31] = torch.nan, torch.inf, -torch.inf
    with use("cpu"):
        scales = quantize_kv(x, "int8")[1]
        tensor = quantize_kv(x, "fp8_e4m3")[1]
    assert scales[0].tolist() == pytest.approx([0.5 / 127] * 2)
    assert scales[1].tolist() == pytest.approx([0.5 / 127, 65504 / 127])
    assert tensor.item() == pytest.approx(65504 / 448)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("role", ["key", "value"])
def test_a_minimum_of_zero_has_no_sign(role: str, dtype: torch.dtype) -> None:
    """Whether -0 or 0 is the least of both depends on who compares; neither may show."""
    for zeros in ([0.0, -0.0], [-0.0, 0.0], [-0.0, -0.0]):
        x = torch.tensor(zeros, dtype=dtype).repeat_interleave(32).repeat(32).reshape(32, 1, 64)
        x = x.transpose(0, 2).reshape(64, 1, 32).contiguous() if role == "key" else x
        with use("cpu"):
            got = quantize_kv(x, "int4", role=role)
        want = codecs.encode(x, "int4", role)
        assert not got[1][..., 1].view(torch.int16).any()
        assert torch.equal(raw(got[0]), raw(want[0]))
        assert torch.equal(raw(got[1]), raw(want[1]))


def test_a_maximum_over_all_tokens_does_not_depend_on_threads(set_threads: Callable[[int], None]) -> None:
    x = torch.randn(4099, 3, 40, generator=torch.Generator().manual_seed(2)).bfloat16()
    for name in ("fp8_e4m3", "fp8_e5m2:head", "fp8_e4m3:channel"):
        with use("cpu"):
            set_threads(1)
            one = quantize_kv(x, name)
            set_threads(3)
            three = quantize_kv(x, name)
        want = codecs.encode(x, name)
        for a, b, c in zip(one, three, want, strict=True):
            assert torch.equal(raw(a), raw(b))
            assert torch.equal(raw(a), raw(c))
