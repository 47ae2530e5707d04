"""Codes and scales to the bit: published vectors, exhaustive searches, bounds, and what is not finite."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kvbackend import formats
from kvbackend.codecs import decode, encode, global_scale_of, grids, pack_record, unpack_record
from kvbackend.errors import ArgumentError
from tests.codes import global_scale, raw, relative, there_and_back
from tests.golden import wave

NAN, INF = math.nan, math.inf
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
EVERY_FORMAT = [
    (f"{name}:{choice}" if choice else name, role)
    for name in formats.names()
    for choice in formats.get(name).choices or ("",)
    for role in (("key", "value") if name == "int4" else ("key",))
]
QUANTIZED = [(name, role) for name, role in EVERY_FORMAT if formats.get(name).quantized]


def row(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).reshape(1, 1, -1)


# ------------------------------------------------------------------------------------------------ published vectors

X = 4 * wave(20, 16).reshape(1, 1, 16)


def test_int8_of_the_wave() -> None:
    codes, scales = encode(X, "int8")
    assert scales.shape == (1, 1)
    assert scales.item() == pytest.approx(0.0313740364, rel=1e-7)
    assert codes.flatten().tolist() == [116, 121, 65, -25, -102, -127, -87, -3, 83, 126, 105, 31, -60, -120, -119, -57]


def test_kivi_int4_of_the_wave() -> None:
    """The same 16 numbers, twice for a group of 32: tokens of one channel (key), channels of one token (value)."""
    want = [14, 15, 11, 6, 1, 0, 2, 7, 12, 15, 14, 9, 4, 0, 0, 4] * 2
    twice = torch.cat((X, X), -1)
    codes, scales = encode(twice, "int4", "value")
    assert grids.unpack_nibbles(codes).flatten().tolist() == want
    words = [word & 0xFFFFFFFF for word in codes.flatten().view(torch.int32).tolist()]
    assert words == [0x72016BFE, 0x40049EFC] * 2
    step, low = scales[0, 0, 0].tolist()
    assert (step, low) == (float(np.float16(0.529926068)), float(np.float16(-3.98450262)))
    codes, scales = encode(twice.reshape(32, 1, 1).expand(32, 1, 2), "int4", "key")
    assert codes.shape == (32, 1, 1)
    assert scales.shape == (1, 1, 2, 2)
    assert grids.unpack_nibbles(codes)[:, 0, 1].tolist() == want


def test_e4m3_of_the_wave_and_of_single_numbers() -> None:
    want = [71, 71, 64, 181, 197, 200, 195, 156, 66, 72, 69, 55, 191, 199, 199, 190]
    assert raw(encode(X, "fp8_e4m3", scale=torch.ones(1))[0]) == want
    numbers = [0, -0.0, 1, 448, 464, 500, -3.1, 0.0019, 0.00097, 2**-6, 17, 18, 19, 0.1]
    want = [0, 128, 56, 126, 126, 126, 196, 1, 0, 8, 88, 89, 90, 29]
    assert raw(encode(row(*numbers), "fp8_e4m3", scale=torch.ones(1))[0]) == want


def test_fp4_of_the_wave() -> None:
    twice = torch.cat((X, X), -1)
    codes, scales = encode(twice, "fp4_e2m1:32")
    assert scales.float().item() == 1
    half = [6, 6, 4, 10, 13, 14, 13, 8, 5, 6, 5, 2, 12, 14, 14, 12]
    assert grids.unpack_nibbles(codes).flatten().tolist() == half * 2
    codes, scales = encode(twice, "mxfp4")
    assert scales.float().item() == 0.5
    half = [7, 7, 6, 11, 15, 15, 15, 8, 7, 7, 7, 4, 14, 15, 15, 14]
    assert grids.unpack_nibbles(codes).flatten().tolist() == half * 2
    codes, scales = encode(X, "fp4_e2m1")
    assert (scales.float().item(), raw(scales)) == (0.6875, [51])
    assert codes.flatten().tolist() == [119, 165, 254, 142, 118, 54, 253, 223]
    g = global_scale_of(X)
    assert g.item() == pytest.approx(0.0014823298, rel=1e-7)
    under_global, scales = encode(X, "nvfp4", global_scale=g)
    assert scales.float().item() == 448
    assert torch.equal(under_global, codes)


def test_deepseek_v41_vectors() -> None:
    x = ((torch.arange(32) - 16) * 0.37).bfloat16().reshape(1, 1, 32)
    codes, scales = encode(x, "fp8_e4m3:32")
    assert raw(scales) == [121]
    assert bytes(raw(codes)).hex() == "fcfbfafaf9f8f7f5f4f2f1efece9e4dc005c64696c6f717274757778797a7a7b"
    codes, scales = encode(x, "fp4_e2m1")
    assert raw(scales) == [0x38, 0x37]
    assert bytes(raw(codes)).hex() == "ffefeededdccab991022435465667677"
    codes, scales = encode(x, "fp4_e2m1:32")
    assert raw(scales) == [127]
    assert bytes(raw(codes)).hex() == "ffefeededdccab991021435455666677"


def test_nibbles() -> None:
    assert grids.pack_nibbles(torch.tensor([1, 2], dtype=torch.uint8)).tolist() == [0x21]
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(grids.pack_nibbles(grids.unpack_nibbles(every)), every)


# ----------------------------------------------------------------------------------------------- one number at a time


def values_of(grid: str) -> list[float]:
    """The non-negative numbers of a grid in the order of their codes, from its definition."""
    if grid == "e2m1":
        return E2M1
    if grid == "int8":
        return [float(code) for code in range(128)]
    mantissa, bias, count = {"e4m3": (3, 7, 127), "e5m2": (2, 15, 124)}[grid]
    return [
        (code & (1 << mantissa) - 1 | (exponent > 0) << mantissa) * 2.0 ** (max(exponent, 1) - bias - mantissa)
        for code in range(count)
        for exponent in [code >> mantissa]
    ]


def nearest(x: np.ndarray, grid: str) -> np.ndarray:
    """Codes of |x| by search: the nearest value, ties to the even code (int8: away from zero), the last one beyond."""
    values = np.array(values_of(grid))
    a = np.minimum(np.abs(x.astype(np.float64)), values[-1])
    above = np.searchsorted(values, a)  # values[above - 1] < a <= values[above]
    below = np.maximum(above - 1, 0)
    up, down = values[above] - a, a - values[below]
    tie_goes_up = (above % 2 == 0) if grid != "int8" else True
    return np.where((up < down) | ((up == down) & tie_goes_up), above, below)


def rounded(x: torch.Tensor, grid: str) -> tuple[np.ndarray, np.ndarray]:
    """The codes of |x| and the signs as our functions give them."""
    codes = getattr(grids, f"{grid}_codes")(x)
    if grid == "int8":
        return codes.abs().numpy(), (codes < 0).numpy()
    sign_bit = 8 if grid == "e2m1" else 128
    stored = codes.view(torch.uint8).numpy()
    return stored & (sign_bit - 1), (stored & sign_bit) > 0


EVERY_BFLOAT16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("grid", ["e4m3", "e5m2", "e2m1", "int8"])
def test_every_bfloat16_goes_to_the_nearest_value(grid: str) -> None:
    x = EVERY_BFLOAT16[~EVERY_BFLOAT16.isnan()].float()
    if grid == "int8":
        x = x[x > -127.5]  # two's complement has a -128, below
    codes, negative = rounded(x, grid)
    np.testing.assert_array_equal(codes, nearest(x.numpy(), grid))
    signed = np.signbit(x.numpy())
    np.testing.assert_array_equal(negative, signed & (codes > 0) if grid == "int8" else signed)


def test_int8_has_128_below_zero_and_ties_go_outward() -> None:
    x = torch.tensor([-INF, -1000, -128.5, -127.5, 127.5, INF, 0.5, -0.5, 1.5, 2.5, 0.49999997, -0.49999997, 126.5])
    assert grids.int8_codes(x).tolist() == [-128, -128, -128, -128, 127, 127, 1, -1, 2, 3, 0, 0, 127]


@pytest.mark.parametrize("grid", ["e4m3", "e5m2", "e2m1", "int8"])
def test_midpoints_and_their_float32_neighbours(grid: str) -> None:
    values = np.array(values_of(grid))
    middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    x = np.concatenate([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(INF))])
    np.testing.assert_array_equal(rounded(torch.from_numpy(x), grid)[0], nearest(x, grid))


def test_values_of_every_code() -> None:
    signed = [*E2M1, *(-value for value in E2M1)]
    assert grids.e2m1_values(torch.arange(16, dtype=torch.uint8)).tolist() == signed
    for grid, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        values = values_of(grid)
        codes = torch.arange(len(values), dtype=torch.uint8).view(dtype)
        assert codes.float().tolist() == values


def test_ocp_names_the_same_limits() -> None:
    limits = {"e4m3": (448, 2**-9), "e5m2": (57344, 2**-16), "e2m1": (6, 0.5), "int8": (127, 1)}
    assert {grid: (values_of(grid)[-1], values_of(grid)[1]) for grid in limits} == limits
    for grid in grids.GRIDS.values():
        assert 2.0**grid.emax <= grid.largest < 2.0 ** (grid.emax + 1)


# ------------------------------------------------------------------------------------------------------------- scales


def near_powers_of_two() -> torch.Tensor:
    powers = np.ldexp(np.float32(1), np.arange(-125, 126)).astype(np.float32)
    steps = [powers]
    for target in (np.float32(0), np.float32(INF)):
        moved = powers
        for _ in range(4):
            moved = np.nextafter(moved, target)
            steps.append(moved)
    return torch.from_numpy(np.concatenate(steps))


def exact_ceil_log2(r: float) -> int:
    mantissa, exponent = math.frexp(r)
    return exponent - (mantissa == 0.5)


def test_powers_of_two_are_rounded_up_exactly() -> None:
    r = near_powers_of_two()
    want = [exact_ceil_log2(value) + 127 for value in r.double().tolist()]
    assert raw(grids.pow2_ceil(r)) == want
    by_logarithm = np.ceil(np.log2(r.numpy())).astype(int) + 127
    assert (by_logarithm != np.array(want)).any(), "the numbers do not reach the trap that they are for"


@pytest.mark.parametrize("emax", [2, 8, 15])
def test_powers_of_two_are_rounded_down_exactly(emax: int) -> None:
    amax = torch.cat((near_powers_of_two(), torch.tensor([0.0, 1e-45, 2.0**-126, 65504.0])))
    want = [max(math.frexp(value)[1] - 1 - emax + 127, 0) if value else 0 for value in amax.double().tolist()]
    assert raw(grids.pow2_floor(amax, emax)) == want


def test_every_power_of_two_scale_reads_as_one() -> None:
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    got = grids.scale_values(scales)
    assert got[:255].tolist() == [2.0 ** (exponent - 127) for exponent in range(255)]
    assert got[255].isnan()


def test_a_scale_rounded_up_never_clips() -> None:
    amax = (near_powers_of_two() * 448).clamp(min=2.0**-100, max=1e30)
    _, scales = encode(amax.reshape(-1, 1, 1).expand(-1, 1, 32), "fp8_e4m3:32", floor=1e-30)
    stored = amax.double() / grids.scale_values(scales).flatten().double()
    assert float(stored.max()) <= 448
    assert float(stored[amax > 1e-29].min()) > 224


def test_smallest_scales() -> None:
    """An all-zero group: codes 0 and the rule's smallest scale, never 0."""
    zeros = torch.zeros(1, 1, 32)
    bytes_of_zero = {"fp8_e4m3:32": 105, "fp4_e2m1:32": 1, "mxfp8": 0, "mxfp4": 0, "fp4_e2m1": 1, "nvfp4": 1}
    for name, want in bytes_of_zero.items():
        codes, scales = encode(zeros, name, global_scale=global_scale(name, zeros))
        assert (set(raw(codes)), set(raw(scales))) == ({0}, {want}), name
    assert raw(encode(zeros, "fp8_e4m3:32", floor=0.0448)[1]) == [114]
    for name in ("int8", "fp8_e4m3", "fp8_e4m3:token_head", "fp8_e4m3:channel", "fp4_e2m1:tensor"):
        assert set(encode(zeros, name)[1].flatten().tolist()) == {float(np.float32(1e-6))}, name


def test_e4m3_scales_stay_within_the_grid() -> None:
    for amax, want in ((1e-9, 2.0**-9), (6 * 2.0**-9, 2.0**-9), (1.0, 0.171875), (2688.0, 448.0), (1e9, 448.0)):
        assert encode(torch.full((1, 1, 16), amax), "fp4_e2m1")[1].float().item() == want


def slow_scale(amax: float, name: str, largest: float, emax: int) -> float:
    """A scale by its definition, in Python's arithmetic; only divisions are float32, as the definitions have them."""
    rule = formats.get(name).rule
    if rule == "ocp_floor":
        return 2.0 ** max(math.frexp(amax)[1] - 1 - emax, -127) if amax else 2.0**-127
    if rule == "pow2_ceil":
        floor = 6 * 2.0**-126 if largest == 6 else np.float32(1e-4)
        return 2.0 ** exact_ceil_log2(float(np.float32(max(amax, floor)) / np.float32(largest)))
    ratio = np.float32(amax) / np.float32(largest)
    if rule == "amax":
        return float(max(ratio, np.float32(1e-6)))
    return values_of("e4m3")[int(nearest(np.maximum(ratio, np.float32(2**-9)), "e4m3"))]


@pytest.mark.parametrize(("name", "role"), [case for case in QUANTIZED if not case[0].startswith("int4")])
@pytest.mark.parametrize("size", [1e-6, 1e-2, 1.0, 3e4])
def test_codes_and_scales_by_definition(name: str, role: str, size: float) -> None:
    """Every format against a search over the numbers of its grid, with scales made group by group."""
    fmt = formats.get(name)
    grid = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "int8": "int8", "uint8": "e2m1"}[fmt.storage]
    largest = values_of(grid)[-1]
    generator = torch.Generator().manual_seed(7)
    x = (torch.randn(6, 2, 128, generator=generator) * size).bfloat16()
    x[0] = 0
    g = torch.tensor([size / 300]) if fmt.global_scale else None
    codes, scales = encode(x, name, role, g)
    y = x.float().numpy() / (g.numpy() if g is not None else np.float32(1))
    covered = {
        "tensor": y.reshape(1, -1), "head": y.transpose(1, 0, 2).reshape(2, -1), "channel": y.reshape(6, -1).T,
        "token_head": y.reshape(12, -1), "group": y.reshape(-1, fmt.group or 1),
    }[fmt.granularity]  # fmt: skip
    want = np.array([slow_scale(float(np.abs(c).max()), name, largest, math.frexp(largest)[1] - 1) for c in covered])
    np.testing.assert_array_equal(grids.scale_values(scales).double().flatten().numpy(), want)
    one_each = {"tensor": (1, 1, 1), "head": (1, 2, 1), "channel": (1, 2, 128), "token_head": (6, 2, 1)}
    group = fmt.group or 128
    spread = want.reshape(one_each.get(fmt.granularity, (6, 2, 128 // group)))
    if fmt.granularity == "group":
        spread = spread.repeat(group, -1)
    scaled = y / spread.astype(np.float32)
    assert scaled.dtype == np.float32
    got = grids.GRIDS[fmt.storage].values(codes).numpy()
    np.testing.assert_array_equal(got, np.copysign(np.array(values_of(grid))[nearest(scaled, grid)], scaled))


def test_division_is_not_multiplication_by_an_inverse() -> None:
    """x * (1 / s) gives other codes: the reason why every implementation must divide."""
    x = torch.randn(4096, 1, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
    codes, scales = encode(x, "fp4_e2m1")
    inverse = 1 / scales.float().repeat_interleave(16, -1)
    assert not torch.equal(grids.pack_nibbles(grids.e2m1_codes(x.float() * inverse)), codes)


def test_the_global_scale_divides() -> None:
    """Numbers that are ties once divided, exactly; times an inverse that was rounded, some are ties no more."""
    ties = [6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25] * 2
    for numerator in range(3, 400, 2):
        g = torch.tensor([numerator / 1024])
        codes, scales = encode(row(*ties) * g, "nvfp4", global_scale=g)
        assert scales.float().item() == 1
        assert grids.unpack_nibbles(codes).flatten().tolist() == [7, 6, 6, 4, 4, 2, 2, 0] * 2


def test_every_head_has_its_own_scale() -> None:
    scale = torch.tensor([0.5, 4.0, 0.25])
    x = torch.arange(1.0, 9.0).reshape(2, 1, 4).expand(2, 3, 4)
    codes, kept = encode(x, "fp8_e4m3:head", scale=scale)
    assert torch.equal(kept, scale)
    want = (x / scale[:, None]).to(torch.float8_e4m3fn)
    assert raw(codes) == raw(want)
    assert torch.equal(decode(codes, scale, "fp8_e4m3:head"), want.float() * scale[:, None])
    channel = torch.linspace(0.1, 2, 12).reshape(3, 4)
    codes, _ = encode(x, "fp8_e4m3:channel", scale=channel)
    assert raw(codes) == raw((x / channel).to(torch.float8_e4m3fn))


# ---------------------------------------------------------------------------------------------------- error levels

# format, role, relative RMS error on N(0, 1), and with 4 of 128 channels times 10; attention output: K, V, both
ERRORS = [
    ("int8", "key", 0.0065, 0.0175, 0.0097, 0.0064, 0.0117),
    ("int4:32", "value", 0.078, 0.108, 0.108, 0.077, 0.132),
    ("int4:64", "value", 0.090, 0.157, 0.137, 0.089, 0.163),
    ("int4:128", "value", 0.100, 0.216, 0.146, 0.100, 0.178),
    ("int4:32", "key", 0.078, 0.078, 0.107, 0.077, 0.132),
    ("int4:64", "key", 0.090, 0.089, 0.133, 0.089, 0.160),
    ("int4:128", "key", 0.100, 0.100, 0.146, 0.099, 0.176),
    ("fp8_e4m3", "key", 0.0266, 0.0269, 0.042, 0.027, 0.050),
    ("fp8_e4m3:token_head", "key", 0.0257, 0.0193, 0.039, 0.025, 0.047),
    ("fp8_e4m3:32", "key", 0.0266, 0.0269, 0.042, 0.027, 0.050),
    ("fp8_e4m3:64", "key", 0.0266, 0.0269, 0.042, 0.027, 0.050),
    ("fp8_e4m3:128", "key", 0.0266, 0.0269, 0.042, 0.027, 0.050),
    ("fp8_e5m2", "key", 0.0529, 0.0525, 0.081, 0.053, 0.096),
    ("mxfp8", "key", 0.0293, 0.0374, 0.045, 0.030, 0.054),
    ("mxfp4", "key", 0.115, 0.174, 0.183, 0.114, 0.215),
    ("fp4_e2m1:32", "key", 0.115, 0.191, 0.181, 0.113, 0.213),
    ("fp4_e2m1", "key", 0.0953, 0.0928, 0.137, 0.094, 0.166),
    ("nvfp4", "key", 0.0952, 0.0928, 0.145, 0.094, 0.173),
]


@pytest.mark.parametrize(("name", "role", "gauss", "outliers", "keys", "values", "both"), ERRORS)
def test_error_levels(name, role, gauss, outliers, keys, values, both) -> None:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(2026)
    how = {"scale": torch.ones(1)} if name in ("fp8_e4m3", "fp8_e5m2") else {}

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    def lossy(x: torch.Tensor) -> torch.Tensor:
        return there_and_back(x.reshape(-1, 1, 128), name, role, **how).reshape(-1, 128)

    x = draw(4096, 128)
    assert relative(lossy(x), x) == pytest.approx(gauss, rel=0.15)
    x = (x.float() * torch.where(torch.arange(128) % 32 == 5, 10.0, 1.0)).bfloat16()
    assert relative(lossy(x), x) == pytest.approx(outliers, rel=0.15)

    q = draw(64, 128).float() * 1.5
    found = []
    for _ in range(3):
        k, v = draw(1024, 128), draw(1024, 128)
        pairs = (k, v), (lossy(k), v), (k, lossy(v)), (lossy(k), lossy(v))
        exact, *rest = (torch.softmax(q @ k.float().T / 128**0.5, -1) @ v.float() for k, v in pairs)
        found.append([relative(out, exact) for out in rest])
    assert np.mean(found, 0).tolist() == pytest.approx([keys, values, both], rel=0.15)


numbers = st.floats(-6e4, 6e4, width=32)


@settings(max_examples=200, deadline=None)
@given(st.lists(numbers, min_size=32, max_size=32))
def test_hard_bounds(values: list[float]) -> None:
    """What no group of numbers may exceed, whatever they are."""
    x = row(*values).double()
    amax = float(x.abs().max())
    tiny = 1e-4  # below it, floors rule
    for name, bound in (("fp4_e2m1:32", 0.2), ("mxfp4", 0.25), ("int8", 0.5 / 127 * 1.001), ("mxfp8", 0.125)):
        error = (there_and_back(x, name).double() - x).abs().max()
        assert float(error) <= bound * max(amax, tiny), name
    error, scale = (there_and_back(x, "fp8_e4m3:32") - x).abs(), encode(x, "fp8_e4m3:32")[1].float()
    assert bool((error <= torch.maximum(x.abs() * 2**-4, scale.double() * 2**-10)).all())
    codes, scales = encode(x, "int4", "value")
    low = float(scales[0, 0, 0, 1])
    spread = float(x.max() - x.min())
    slack = 2**-11 * (abs(low) + spread) + 2**-24 * 20  # float16 holds step and minimum
    assert float((decode(codes, scales, "int4", "value") - x).abs().max()) <= spread / 30 + slack


# ------------------------------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize(("name", "role"), QUANTIZED)
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_a_second_round_trip_changes_nothing(name: str, role: str, size: float) -> None:
    """Codes stay, under scales that differ by a rounding at most; with powers of two every value stays to the bit.

    A power of two rounded up may become half of it, where the group's largest number was rounded down to 224 of 448 or
    3 of 6: then the codes change, and what they read as does not. FP4 under E4M3 scales is left out where the scale is
    subnormal: rounding it moves the group's largest number.
    """
    fmt = formats.get(name)
    if fmt.rule == "e4m3" and size < 1 and not fmt.global_scale:
        size = 1.0
    x = torch.randn(128, 2, 128, generator=torch.Generator().manual_seed(11)).mul(size).bfloat16()
    g = global_scale(name, x)
    codes, scales = encode(x, name, role, g)
    once = decode(codes, scales, name, role, g)
    codes_again, scales_again = encode(once, name, role, g)
    if fmt.rule in ("pow2_ceil", "ocp_floor", "e4m3"):
        assert torch.equal(decode(codes_again, scales_again, name, role, g), once)
    if fmt.rule == "pow2_ceil":
        return
    assert raw(codes_again) == raw(codes)
    torch.testing.assert_close(grids.scale_values(scales_again), grids.scale_values(scales), rtol=1e-3, atol=0)


@pytest.mark.parametrize(("name", "role"), EVERY_FORMAT)
@pytest.mark.parametrize("num_tokens", [0, 128])
def test_shapes_dtypes_and_strides(name: str, role: str, num_tokens: int) -> None:
    fmt = formats.get(name)
    x = torch.randn(2, num_tokens, 128, generator=torch.Generator().manual_seed(5)).transpose(0, 1)  # [T, 2, 128]
    g = torch.ones(1) if fmt.global_scale else None
    codes, scales = encode(x, name, role, g)
    assert (str(codes.dtype), str(scales.dtype)) == (f"torch.{fmt.storage}", f"torch.{fmt.scale_dtype or 'float32'}")
    if num_tokens:
        assert codes.numel() * codes.element_size() == num_tokens * fmt.code_bytes_per_token(2, 128)
        stored = scales.numel() * scales.element_size() + (4 if fmt.global_scale else 0)
        assert stored == num_tokens * fmt.scale_bytes_per_token(2, 128) + fmt.fixed_scale_bytes(2, 128)
    codes_of_dense, scales_of_dense = encode(x.contiguous(), name, role, g)
    assert raw(codes) == raw(codes_of_dense)
    assert raw(scales) == raw(scales_of_dense)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        back = decode(codes, scales, name, role, g, dtype)
        assert (back.shape, back.dtype) == (x.shape, dtype)
        exact = decode(codes, scales, name, role, g)
        assert torch.equal(back, exact.to(dtype))
    pages, page_scales = encode(torch.stack((x, x)), name, role, g)
    if fmt.quantized and fmt.granularity not in ("tensor", "head", "channel"):
        assert raw(pages) == raw(codes) * 2, "tokens may come in pages"
        assert raw(page_scales) == raw(scales) * 2


@pytest.mark.parametrize(("name", "role"), EVERY_FORMAT)
def test_float64_counts_as_float32(name: str, role: str) -> None:
    x = torch.randn(128, 1, 128, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    g = torch.tensor([0.01]) if formats.get(name).global_scale else None
    assert [raw(part) for part in encode(x, name, role, g)] == [raw(part) for part in encode(x.float(), name, role, g)]


@pytest.mark.parametrize(("name", "role"), EVERY_FORMAT)
def test_nothing_looks_at_a_value(name: str, role: str) -> None:
    """On 'meta' there is none to look at."""
    x = torch.empty(128, 2, 128, device="meta", dtype=torch.bfloat16)
    g = torch.empty(1, device="meta") if formats.get(name).global_scale else None
    codes, scales = encode(x, name, role, g)
    assert decode(codes, scales, name, role, g).shape == x.shape


# ------------------------------------------------------------------------------------------------- what is not finite


@pytest.mark.parametrize(("name", "role"), QUANTIZED)
def test_nan_becomes_0_and_counts_as_0(name: str, role: str) -> None:
    x = torch.randn(128, 2, 128, generator=torch.Generator().manual_seed(8))
    with_nan, with_zero = x.clone(), x.clone()
    with_nan[::3, :, 1::5], with_zero[::3, :, 1::5] = NAN, 0
    with_nan[4], with_zero[4] = NAN, 0
    g = torch.tensor([0.002]) if formats.get(name).global_scale else None
    got, want = encode(with_nan, name, role, g), encode(with_zero, name, role, g)
    assert [raw(part) for part in got] == [raw(part) for part in want]


@pytest.mark.parametrize(("name", "role"), QUANTIZED)
def test_infinity_saturates_and_spares_its_neighbours(name: str, role: str) -> None:
    # DeepSeek-V4.1's scale ends at 448, and so the format at 2688
    size, reach = (1e3, 2688) if name == "fp4_e2m1:16" else (3e4, 44000)
    x = torch.full((128, 1, 128), size)
    x[5, 0, 7], x[6, 0, 8] = INF, -INF
    g = torch.tensor([30.0]) if formats.get(name).global_scale else None
    back = decode(*encode(x, name, role, g), name, role, g)
    assert back.isfinite().all()
    assert float(back[5, 0, 7]) == float(back.max())
    assert float(back[6, 0, 8]) == float(back.min())
    assert float(back[5, 0, 7]) >= reach
    assert float(back[6, 0, 8]) <= -reach
    others = torch.ones_like(x, dtype=torch.bool)
    others[5, 0, 7] = others[6, 0, 8] = False
    assert float((back[others] - size).abs().max()) <= 0.3 * size, "the others keep a value"


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "fp4_e2m1:tensor"])
def test_a_given_scale_saturates(name: str) -> None:
    largest = grids.GRIDS[formats.get(name).storage].largest
    x = row(INF, -INF, 1e30, -1e30, largest * 2, NAN)
    back = decode(*encode(x, name, scale=torch.tensor([2.0])), name)
    assert back.flatten().tolist() == [2 * largest, -2 * largest, 2 * largest, -2 * largest, 2 * largest, 0]


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_formats_without_codes_keep_what_is_not_finite(name: str) -> None:
    back = decode(*encode(row(NAN, INF, -INF, 1), name), name).flatten()
    assert back[0].isnan()
    assert back[1:].tolist() == [INF, -INF, 1]


def test_finite_numbers_past_float16_are_kept_where_the_scale_is_not_float16() -> None:
    x = row(1e6, -1e6, INF, *[0.0] * 29)
    for name in ("int8", "fp8_e4m3:32", "fp8_e4m3:token_head", "mxfp8"):
        back = there_and_back(x, name).flatten()
        assert back[:2].tolist() == pytest.approx([1e6, -1e6], rel=0.13), name
        assert float(back[0]) <= float(back[2]) < 2e6, "the largest code"
    assert there_and_back(x, "int4", "value").abs().max() == pytest.approx(65504, rel=1e-3)


def test_a_nan_scale_makes_what_it_covers_nan() -> None:
    codes, scales = encode(torch.ones(1, 1, 64), "mxfp8")
    scales.view(torch.uint8)[..., 0] = 255
    back = decode(codes, scales, "mxfp8").flatten()
    assert back[:32].isnan().all()
    assert (back[32:] == 1).all()


def test_kivi_of_equal_and_of_nearly_equal_numbers() -> None:
    for value in (0.0, 1.25, -3e4):
        back = there_and_back(torch.full((1, 1, 32), value), "int4", "value")
        assert (back == value).all()
    x = torch.full((1, 1, 32), 1.0)
    x[..., 0] = 1 + 2**-23  # a step that float16 cannot hold
    assert (there_and_back(x, "int4", "value") == 1).all()
    assert encode(x, "int4", "value")[1].flatten().tolist() == [1, 1], "scale 1, so that nothing is divided by 0"


# ------------------------------------------------------------------------------------------------------------ refusals

ONES = torch.ones(4, 2, 96)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: encode(ONES, "fp9"), ("'fp9'", "int8")),
        (lambda: encode(ONES, "auto"), ("'auto'", "bf16")),
        (lambda: encode(ONES, "fp8_e4m3:64"), ("head_dim is 96", "64 channels")),
        (lambda: encode(ONES, "int4:64", "value"), ("head_dim is 96", "64 channels")),
        (lambda: encode(ONES, "int4"), ("4 tokens more", "32 tokens", "full precision")),
        (lambda: encode(ONES[..., :7], "fp4_e2m1:tensor"), ("head_dim is 7", "even")),
        (lambda: encode(ONES, "int4", "both"), ("'both'", "key or value")),
        (lambda: encode(ONES, "nvfp4"), ("global_scale is None", "calibration")),
        (lambda: encode(ONES, "mxfp4", global_scale=torch.ones(1)), ("global_scale is given", "nvfp4")),
        (lambda: encode(ONES, "int8", scale=torch.ones(4, 2)), ("computes its scales", "tensor, head or channel")),
        (lambda: encode(ONES, "fp8_e4m3:head", scale=torch.ones(1)), ("shape [1]", "per head", "[2]")),
        (lambda: encode(ONES, "fp8_e4m3", scale=torch.ones(2)), ("shape [2]", "per tensor", "[1]")),
        (lambda: encode(ONES, "fp8_e4m3:channel", scale=torch.ones(96, 2)), ("shape [96, 2]", "[2, 96]")),
        (lambda: encode(ONES, "fp8_e4m3:32", floor=0.0), ("floor is 0.0", "positive")),
        (lambda: decode(ONES.to(torch.int8), torch.ones(1, 2), "int8"), ("scales has shape [1, 2]", "[4, 2]")),
        (lambda: decode(ONES, torch.ones(4, 2), "int8"), ("codes is torch.float32", "torch.int8")),
        (lambda: decode(ONES.to(torch.float8_e4m3fn), ONES, "mxfp8"), ("scales is torch.float32", "e8m0")),
        (lambda: pack_record(ONES, "v41_fp8_528"), ("[4, 2, 96]", "512")),
        (lambda: pack_record(ONES, "nope"), ("'nope'", "v41_fp8_528")),
        (lambda: pack_record(torch.ones(1, 1, 576), "v32_fp8_656", "raw"), ("'raw'", "pow2_ceil or amax")),
        (lambda: unpack_record(torch.zeros(1, 528, dtype=torch.uint8), "v41_fp8_528", 2), ("[1, 528]", "1056")),
        (lambda: unpack_record(torch.zeros(1, 1056), "v41_fp8_528", 2), ("torch.float32", "torch.uint8")),
    ],
)  # fmt: skip
def test_refusals_say_what_is_allowed(call, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ArgumentError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_every_format_is_in_this_file() -> None:
    """A new format needs numbers here."""
    assert {name.partition(":")[0] for name, _ in EVERY_FORMAT} == set(formats.names())


class NoNumberDivides(TorchDispatchMode):
    """Raises where a tensor is divided by a Python number, which torch's CUDA kernel makes a multiplication."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.__name__.startswith("div") and not isinstance(args[1], torch.Tensor):
            raise AssertionError(f"{function} by {args[1]}")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kv_format", "role"), QUANTIZED)
def test_every_division_is_one_on_every_device(kv_format: str, role: str) -> None:
    rows = torch.randn(128, 2, 128, generator=torch.Generator().manual_seed(1))
    with NoNumberDivides():
        encode(rows, kv_format, role, global_scale_of(rows) if kv_format.startswith("nvfp4") else None)
    with pytest.raises(AssertionError, match="by 3"), NoNumberDivides():
        rows / 3.0
