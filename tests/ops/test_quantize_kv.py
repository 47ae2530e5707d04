"""The ops quantize_kv and dequantize_kv: what they give, promise while tracing, refuse and report."""

from __future__ import annotations

import logging

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import kvbackend
from kvbackend import codecs, formats
from kvbackend.ops import dequantize_kv, quantize_kv
from kvbackend.ops.quantize_kv import every_format

EVERY_FORMAT = list(every_format())
X = torch.randn(128, 2, 128, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def by_reference():  # type: ignore[no-untyped-def]
    with kvbackend.use("reference"):
        yield


def global_scale(kv_format: str) -> torch.Tensor | None:
    return torch.tensor([0.002]) if formats.get(kv_format).global_scale else None


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize(("kv_format", "role"), EVERY_FORMAT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_there_and_back(kv_format: str, role: str, dtype: torch.dtype) -> None:
    x, g = X.to(dtype), global_scale(kv_format)
    codes, scales = quantize_kv(x, kv_format, global_scale=g, role=role)
    want = codecs.encode(x, kv_format, role, g)
    assert torch.equal(raw(codes), raw(want[0]))
    assert torch.equal(raw(scales), raw(want[1]))
    back = dequantize_kv(codes, scales, kv_format, g, role, "fp32")
    assert torch.equal(back, codecs.decode(codes, scales, kv_format, role, g))
    for name, out in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        assert torch.equal(dequantize_kv(codes, scales, kv_format, g, role, name), back.to(out))
    assert float((back - x).norm() / x.norm()) < 0.35


def test_bf16_is_what_comes_back_by_default() -> None:
    assert dequantize_kv(*quantize_kv(X, "int8"), "int8").dtype is torch.bfloat16


@pytest.mark.parametrize(("kv_format", "role"), EVERY_FORMAT)
def test_fake_results_are_like_real_ones(kv_format: str, role: str) -> None:
    g = global_scale(kv_format)
    real = quantize_kv(X, kv_format, global_scale=g, role=role)
    real = (*real, dequantize_kv(*real, kv_format, g, role, "fp16"))
    with FakeTensorMode() as mode:
        g = None if g is None else mode.from_tensor(g)
        fake = quantize_kv(mode.from_tensor(X), kv_format, global_scale=g, role=role)
        fake = (*fake, dequantize_kv(*fake, kv_format, g, role, "fp16"))
    for one, other in zip(fake, real, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


@pytest.mark.parametrize(("kv_format", "role"), EVERY_FORMAT)
def test_counts_of_tokens_may_be_unknown_while_tracing(kv_format: str, role: str) -> None:
    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True):
        count = environment.create_unbacked_symint()
        torch._check(count >= 2)
        codes, scales = quantize_kv(
            torch.empty(count, 2, 128), kv_format, global_scale=global_scale(kv_format), role=role
        )
        back = dequantize_kv(codes, scales, kv_format, global_scale(kv_format), role)
    assert back.shape[1:] == (2, 128)


def test_a_resolved_callable_takes_other_counts_of_tokens() -> None:
    codes, scales = quantize_kv(X, "int8")
    quantize, dequantize = quantize_kv.resolve(x=X, kv_format="int8"), dequantize_kv.resolve(
        codes=codes, scales=scales, kv_format="int8"
    )  # fmt: skip
    got = quantize(x=X[:5], kv_format="int8")
    assert torch.equal(got[0], codes[:5])
    dequantize(codes=codes[:7], scales=scales[:7], kv_format="int8")
    keys = quantize_kv.resolve(x=X, kv_format="int4")
    keys(x=X[:64], kv_format="int4")
    with pytest.raises(kvbackend.ArgumentError, match="6 tokens more"):
        keys(x=X[:70], kv_format="int4")
    with pytest.raises(kvbackend.ArgumentError, match="scales"):
        dequantize(codes=codes[:7], scales=scales[:6], kv_format="int8")


def test_formats_of_other_ranks_may_follow_each_other() -> None:
    """Scales have one to four dims; what was decided for one call must neither break the next nor be taken for it."""
    for _ in range(2):
        for kv_format, role in EVERY_FORMAT:
            g = global_scale(kv_format)
            codes, scales = quantize_kv(X, kv_format, global_scale=g, role=role)
            dequantize_kv(codes, scales, kv_format, g, role)
            wrong = (
                torch.cat((scales, scales)) if scales.dim() > 1 else scales.expand(3) if scales.numel() == 1 else None
            )
            if wrong is not None:
                with pytest.raises(kvbackend.ArgumentError, match="scales has shape"):
                    dequantize_kv(codes, wrong, kv_format, g, role)


def test_a_scale_per_head_is_not_read_as_one_number() -> None:
    scale = torch.tensor([0.01, 0.16])
    codes, kept = quantize_kv(X, "fp8_e4m3:head", scale)
    assert torch.equal(kept, scale)
    assert kept.data_ptr() != scale.data_ptr(), "no result may share memory with an argument"
    for head in range(2):
        one = quantize_kv(X[:, head : head + 1], "fp8_e4m3", scale[head : head + 1])[0]
        assert torch.equal(raw(codes[:, head : head + 1]), raw(one))
    back = dequantize_kv(codes, scale, "fp8_e4m3:head", out_dtype="fp32")
    assert float((back - X).abs().max()) < 0.2
    assert float((dequantize_kv(codes, scale.flip(0), "fp8_e4m3:head", out_dtype="fp32") - X).abs().max()) > 1


INT8 = quantize_kv.reference(X, "int8")
MXFP8 = quantize_kv.reference(X, "mxfp8")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: quantize_kv(X, "fp9"), ("kv_format is 'fp9'", "fp8_e4m3")),
        (lambda: quantize_kv(X, "auto"), ("'auto'", "bf16")),
        (lambda: quantize_kv(X, "v41_fp8_528"), ("528 bytes", "record")),
        (lambda: quantize_kv(X[..., :48], "fp8_e4m3:32"), ("head_dim is 48", "32 channels", "choose a group")),
        (lambda: quantize_kv(X[..., :48], "int4", role="value"), ("head_dim is 48", "32 channels")),
        (lambda: quantize_kv(X[:33], "int4"), ("1 tokens more", "32 tokens")),
        (lambda: quantize_kv(X[..., :5], "fp4_e2m1:channel"), ("head_dim is 5", "even")),
        (lambda: quantize_kv(X, "int4", role="v"), ("role is 'v'", "key or value")),
        (lambda: quantize_kv(X, "nvfp4"), ("global_scale is None", "calibration")),
        (lambda: quantize_kv(X, "nvfp4", global_scale=torch.ones(2)), ("global_scale", "it must be 1")),
        (lambda: quantize_kv(X, "int8", global_scale=torch.ones(1)), ("global_scale is given", "nvfp4")),
        (lambda: quantize_kv(X, "int8", torch.ones(128, 2)), ("scale is given", "computes")),
        (lambda: quantize_kv(X, "bf16", torch.ones(1)), ("scale is given",)),
        (lambda: quantize_kv(X, "fp8_e4m3:head", torch.ones(1)), ("scale has shape [1]", "per head", "[2]")),
        (lambda: quantize_kv(X, "fp8_e4m3", torch.ones(2)), ("scale has shape [2]", "per tensor", "[1]")),
        (lambda: quantize_kv(X, "fp8_e4m3:channel", torch.ones(2)), ("scale has shape [2]", "[2, 128]")),
        (lambda: quantize_kv(X, "fp8_e4m3", torch.ones(1).double()), ("scale is torch.float64", "torch.float32")),
        (lambda: quantize_kv(X.int(), "int8"), ("x is torch.int32",)),
        (lambda: dequantize_kv(*INT8, "fp8_e4m3:token_head"), ("codes is torch.int8", "float8_e4m3fn")),
        (lambda: dequantize_kv(INT8[0], INT8[1][:1], "int8"), ("scales has shape [1, 2]", "token_head")),
        (lambda: dequantize_kv(INT8[0], INT8[1][..., None], "int8"), ("scales has shape [128, 2, 1]",)),
        (lambda: dequantize_kv(MXFP8[0], MXFP8[1].view(torch.uint8), "mxfp8"), ("scales is torch.uint8", "e8m0")),
        (lambda: dequantize_kv(MXFP8[0], MXFP8[1][..., :2], "mxfp8"), ("scales has shape [128, 2, 2]", "2, 4]")),
        (lambda: dequantize_kv(*INT8, "int8", out_dtype="fp8"), ("out_dtype is 'fp8'", "fp32, bf16 or fp16")),
    ],
)  # fmt: skip
def test_refusals_say_what_is_allowed(call, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(kvbackend.ArgumentError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_what_is_not_finite_is_counted_when_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVBACKEND_CHECK", "values")
    x = X.clone()
    x[3, 1, 4:7], x[0, 0, 0] = torch.nan, torch.inf
    with caplog.at_level(logging.WARNING, "kvbackend"):
        codes, scales = quantize_kv(x, "int8")
        quantize_kv(X, "int8")
        quantize_kv(x, "bf16")
    assert [record.getMessage() for record in caplog.records] == [
        "quantize_kv: x holds 3 NaN and 1 infinities among 32768 numbers; int8 writes NaN as 0 and lets inf saturate"
    ]
    monkeypatch.delenv("KVBACKEND_CHECK")
    unasked = quantize_kv(x, "int8")
    assert torch.equal(codes, unasked[0]), "looking must not change what is written"
    assert torch.equal(scales, unasked[1])


@pytest.mark.parametrize("bad", [0.0, -1.0, torch.inf, torch.nan])
def test_scales_that_are_not_positive_are_refused_when_asked(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBACKEND_CHECK", "values")
    with pytest.raises(kvbackend.ArgumentError, match=r"scale holds .* positive and finite"):
        quantize_kv(X, "fp8_e4m3:head", torch.tensor([1.0, bad]))
    with pytest.raises(kvbackend.ArgumentError, match="global_scale holds"):
        quantize_kv(X, "nvfp4", global_scale=torch.tensor([bad]))


def test_metadata_alone_tells_a_wrong_granularity() -> None:
    """Without a backend's help: native kernels rely on it."""
    good = dict(x=X, kv_format="fp8_e4m3:head", scale=torch.ones(2), global_scale=None, role="key")
    quantize_kv.validate(good)
    with pytest.raises(kvbackend.ArgumentError, match=r"scale has shape \[1\]"):
        quantize_kv.validate(good | {"scale": torch.ones(1)})
    with pytest.raises(kvbackend.ArgumentError, match="tokens more"):
        quantize_kv.validate(good | {"x": X[:5], "kv_format": "int4", "scale": None})
    read = dict(codes=INT8[0], scales=INT8[1], kv_format="int8", global_scale=None, role="key", out_dtype="bf16")
    dequantize_kv.validate(read)
    with pytest.raises(kvbackend.ArgumentError, match=r"scales has shape \[127, 2\]"):
        dequantize_kv.validate(read | {"scales": INT8[1][1:]})


@pytest.mark.parametrize("kv_format", ["int8:token_head", "fp8_e4m3", "fp8_e5m2:head"])
def test_codes_are_dense_whatever_strides_rows_have(kv_format: str) -> None:
    rows = torch.randn(64, 2, 5, dtype=torch.float64).permute(2, 1, 0)
    assert all(part.is_contiguous() for part in quantize_kv(rows, kv_format))
