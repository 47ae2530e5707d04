"""Infinite logits: from numbers that are infinite, from products that overflow, from a bias. With one of +inf lse is
+inf, as a sum of exponentials is, and NaN only where a logit is NaN; a token's score is NaN only if its own logit is.
Where all are -inf the query sees nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbackend import backends, native
from kvbackend.matrix import DTYPES, TOLERANCES, copy_arguments, difference, flat_results, in_float64
from kvbackend.ops import registry

from .common import assert_isa, call, run_on_isa

# What logits are made of, and nothing else is
FACTORS = {
    "accumulate_scores": ("q", "key_cache"),
    "mla_attention": ("q_nope", "q_pe", "kpe_cache"),
    "paged_attention": ("q", "key_cache", "key_bias"),
    "shared_kv_attention": ("q",),
    "sparse_attention": ("q", "key_cache"),
    "sparse_mla_attention": ("q_nope", "q_pe", "kpe_cache"),
}
LARGE = dict(q_lens=[1, 10], seq_lens=[1300, 90])  # keys in parts, and rows in several tasks


def large_calls(name: str, dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    for heads in (2, 8, 144):
        if name in ("paged_attention", "accumulate_scores"):
            args = call("paged_attention", **LARGE, dtype=dtype, heads=heads)
            if name == "accumulate_scores":
                del args["value_cache"], args["return_lse"]
                args["scores"] = torch.zeros(2, 2, 1300)
            yield f"{heads} heads", args
        elif name == "mla_attention":
            yield f"{heads} heads", call(name, **LARGE, dtype=dtype, heads=heads)


def with_infinities(args: dict[str, Any], names: tuple[str, ...], each: int, seed: int) -> dict[str, Any]:
    """The call with so many infinite numbers in each of these arguments, mostly positive, and a NaN among many."""
    args, generator = copy_arguments(args), torch.Generator().manual_seed(seed)
    for name in names:
        tensor = args.get(name)
        if tensor is None or tensor.dtype not in TOLERANCES or not tensor.numel():
            continue
        for i in range(each):
            place = tuple(int(torch.randint(size, (), generator=generator)) for size in tensor.shape)
            tensor[place] = torch.nan if i == 11 else -torch.inf if i % 5 == 4 else torch.inf
    return args


def adapter(name: str) -> Any:
    """The kernel past the dispatcher, which might choose another."""
    assert native.library("cpu").reason is None
    return backends.registered()["cpu"].adapter(name)


def outcome(name: str, run: Any, args: dict[str, Any]) -> dict[str, Tensor]:
    args = copy_arguments(args)
    return flat_results(registry[name], run(*registry[name].bind((), args).values()), args)


def check(name: str, args: dict[str, Any], message: str, exact: bool = True) -> int:
    """The kernel's results are the reference's; how many rows had a logit of +inf."""
    op = registry[name]
    got = outcome(name, adapter(name).run, args)
    want = outcome(name, op.reference, in_float64(op, args) if exact else args)
    if name == "accumulate_scores":
        assert difference(got["scores"], want["scores"]) <= 4 * TOLERANCES[torch.float32], message
        return int(got["scores"].isnan().any())
    lse = want["output 1"]
    out = got["output 0"]
    assert difference(got["output 1"], lse.float()) <= 2 * TOLERANCES[torch.float32], f"{message}: lse"
    assert difference(out, want["output 0"].to(out.dtype)) <= 2 * TOLERANCES[out.dtype], f"{message}: out"
    return int((lse == torch.inf).sum())


def check_this_isa(wanted: str) -> None:
    """Runs in a process of its own."""
    assert_isa(wanted)
    for name, factors in FACTORS.items():
        infinite = 0
        for dtype in DTYPES:
            op = registry[name]
            samples = [(sample, args) for sample, args in op.make_samples("cpu", dtype) if "production" not in sample]
            for index, (sample, args) in enumerate([*samples, *large_calls(name, dtype)]):
                refused = list(adapter(name).unsupported(**op.bind((), args)))
                if refused or (name == "accumulate_scores" and args.get("scores") is None):
                    continue
                chosen = factors[index % len(factors) :][:1] if index % 3 else factors
                each = 1 if index % 2 else 12
                wrong = with_infinities(args, chosen, each, seed=index)
                if "return_lse" in op.parameters:
                    wrong["return_lse"] = True
                infinite += check(name, wrong, f"{name} {dtype} {sample}, {each} in {chosen}")
        assert infinite, name


@pytest.mark.parametrize("wanted", native.CPU_ISAS)
def test_every_instruction_set_gives_infinite_rows_as_the_reference(wanted: str) -> None:
    run_on_isa(wanted, f"from tests.cpu.test_infinite_logits import check_this_isa; check_this_isa({wanted!r})")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["paged_attention", "mla_attention"])
def test_products_that_overflow_are_infinite(name: str, dtype: torch.dtype) -> None:
    args = call(name, [1, 3], [1300, 9], dtype)
    for key in ("q", "key_cache", "q_pe", "kpe_cache"):
        if key in args:
            args[key] = args[key].abs() * 1e30  # all of one sign: how sums of both overflow is the order of summing
    assert check(name, args, name, exact=False)


@pytest.mark.parametrize("sink", [0.0, torch.inf, -torch.inf])
def test_a_sink_beside_an_infinite_logit(sink: float) -> None:
    """No share of a softmax whose greatest logit is infinite is known, but that of a finite one: 0."""
    sinks = torch.full((8,), sink)
    args = call("paged_attention", [1, 3], [1300, 9], sinks=sinks)
    bias = torch.zeros(args["key_cache"].shape[:3])
    bias[args["block_table"][0, 80].item(), 4, 1] = torch.inf  # token 1284, kv head 1
    args["key_bias"] = bias
    assert check("paged_attention", args, "attention") == 4
    del args["value_cache"], args["return_lse"]
    args["scores"] = torch.zeros(2, 2, 1300)
    assert check("accumulate_scores", args, "scores")
    after = outcome("accumulate_scores", adapter("accumulate_scores").run, args)["scores"]
    assert after.isnan().nonzero().tolist() == [[0, 1, 1284]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [2, 4, 8, 16, 40])
def test_an_infinite_logit_leaves_other_heads_alone(dtype: torch.dtype, heads: int) -> None:
    args = call("paged_attention", [1, 3], [1300, 9], dtype, heads=heads)
    clean = outcome("paged_attention", adapter("paged_attention").run, args)
    args["key_bias"] = torch.zeros(args["key_cache"].shape[:3])
    args["key_bias"][args["block_table"][0, 80].item(), 4, 1] = torch.inf  # token 1284, kv head 1
    got = outcome("paged_attention", adapter("paged_attention").run, args)
    assert (got["output 1"][0, heads // 2 :] == torch.inf).all()
    for result in ("output 0", "output 1"):
        assert torch.equal(got[result][:, : heads // 2], clean[result][:, : heads // 2]), result
        assert torch.equal(got[result][1:], clean[result][1:]), result


@pytest.mark.parametrize("sink", [None, 0.0])
def test_a_bias_of_minus_infinity_hides_keys(sink: float | None) -> None:
    """Also all that a query sees: its output and its scores are 0 then, and its lse is -inf."""
    args = call("paged_attention", [1, 3], [1300, 9], sinks=None if sink is None else torch.full((8,), sink))
    args["key_bias"] = torch.zeros(args["key_cache"].shape[:3])
    args["key_bias"][args["block_table"][1, 0].item(), :, 1] = -torch.inf  # sequence 1, kv head 1
    check("paged_attention", args, "attention")
    got = outcome("paged_attention", adapter("paged_attention").run, args)
    assert (got["output 1"] == -torch.inf).tolist() == [[False] * 8] + [[False] * 4 + [True] * 4] * 3
    assert got["output 0"][1:, 4:].abs().max() == 0
    del args["value_cache"], args["return_lse"]
    args["scores"] = torch.zeros(2, 2, 1300)
    check("accumulate_scores", args, "scores")
