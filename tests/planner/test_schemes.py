"""Schemes: what a string means, and what is refused."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kvbackend.errors import ArgumentError
from kvbackend.planner import plan
from kvbackend.planner.schemes import Eviction, Scheme, parse, ranks


@pytest.mark.parametrize(
    ("text", "scheme"),
    [
        ("native", Scheme("native")),
        ("int8/int4:64", Scheme("int8/int4:64", "int8", "int4:64")),
        ("v4_fp8_584+index_fp8_132", Scheme("v4_fp8_584+index_fp8_132", "v4_fp8_584", None, "index_fp8_132")),
        ("bf16,keep=4096", Scheme("bf16,keep=4096", "bf16", keep=4096)),
        ("bf16,keep=25%", Scheme("bf16,keep=25%", "bf16", keep=Fraction(1, 4))),
        ("bf16,keep=0.5", Scheme("bf16,keep=0.5", "bf16", keep=Fraction(1, 2))),
        ("int4, recent = 128, sinks=4", Scheme("int4, recent = 128, sinks=4", "int4", recent=128, sinks=4)),
        ("bf16,ratios=1/2", Scheme("bf16,ratios=1/2", "bf16", ratios=(1, 2))),
        ("bf16,rank=32/64", Scheme("bf16,rank=32/64", "bf16", rank=32, value_rank=64)),
        ("auto/int8", Scheme("auto/int8", "native", "int8")),
        (
            "int8,evict=h2o:512:summary=8:recent=64",
            Scheme(
                "int8,evict=h2o:512:summary=8:recent=64",
                "int8",
                keep=512,
                evict=Eviction("h2o", 512, (("summary", "8"), ("recent", "64"))),
            ),
        ),
        (
            "bf16,evict=snapkv:25%",
            Scheme("bf16,evict=snapkv:25%", keep=Fraction(1, 4), key="bf16", evict=Eviction("snapkv", Fraction(1, 4))),
        ),
        ("fp8_e4m3:head,scales=amax", Scheme("fp8_e4m3:head,scales=amax", "fp8_e4m3:head", scales="amax")),
        ("auto,topk=64/32,reselect=0", Scheme("auto,topk=64/32,reselect=0", topk=(64, 32), reselect=0)),
        ("bf16,0-3=int8,9=fp32", Scheme("bf16,0-3=int8,9=fp32", "bf16", by_layer=((0, 3, "int8"), (9, 9, "fp32")))),
        ("bf16,window=v41_fp8_528", Scheme("bf16,window=v41_fp8_528", "bf16", window="v41_fp8_528")),
    ],
)
def test_parse(text: str, scheme: Scheme) -> None:
    assert parse(text) == scheme


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("starts with a format",)),
        ("fp9", ("'fp9'", "fp8_e4m3", "v4_fp8_584")),
        ("int8/fp9", ("'fp9'",)),
        ("int8/", ("kv_format is ''",)),
        ("bf16+", ("kv_format is ''",)),
        ("bf16+nope", ("'nope'",)),
        ("fp8_e4m3:7", ("fp8_e4m3:7", "token_head")),
        ("bf16,recent", ("NAME=VALUE", "recent")),
        ("bf16,recent=-1", ("'-1'", "from 0")),
        ("bf16,rank=x", ("'x'", "from 1")),
        ("bf16,keep=150%", ("'150%'", "25%")),
        ("bf16,keep=1/0", ("'1/0'",)),
        ("bf16,speed=9", ("'speed'", "keep")),
        ("bf16,rank=8,ratios=2", ("rank and ratios",)),
        ("bf16,evict=h2o", ("'h2o'", "POLICY:KEEP")),
        ("bf16,evict=lru:64", ("'lru:64'", "snapkv")),
        ("bf16,evict=h2o:0", ("keep is '0'",)),
        ("bf16,evict=h2o:64:recent", ("'recent'", "NAME=VALUE")),
        ("bf16,evict=h2o:64,keep=64", ("keep and evict",)),
        # what a policy cannot have: the same words for all who read schemes
        ("bf16,evict=h2o:8:observed=2", ("evict has observed=2", "h2o takes recent, per_head, summary, slack")),
        ("bf16,evict=h2o:8:recent=x", ("recent is 'x' in evict",)),
        ("bf16,evict=snapkv:8", ("budget is 8 tokens", "always keeps 32 recent tokens", "at least 32")),
        ("bf16,evict=streaming:12:summary=8", ("4 sinks and 1 recent tokens and 8 summary slots", "at least 13")),
        ("bf16,evict=snapkv:64:kernel=4", ("kernel is 4", "must be odd")),
        ("int8,evict=h2o:64,recent=8", ("evict is given with keep_recent or keep_sinks", "give one of the two")),
        ("int8,evict=h2o:64,topk=8", ("sparse is given with evict", "give one of the two")),
        ("int8,recent=8,topk=8", ("sparse is given with keep_recent or keep_sinks", "give one of the two")),
        ("int4,topk=8", ("sparse is given with kv_format 'int4'", "share scales across tokens", "fp4_e2m1 or int8")),
        ("int8,0-3=int4:64,topk=8", ("sparse is given with kv_format 'int4:64'",)),
        ("int4/int8,evict=h2o:64", ("evict is given with kv_format 'int4/int8'",)),
        ("int8,rank=8,evict=l2norm:64", ("evict is L2Norm, which chooses by keys", "latent rows")),
        ("int8,0=bf16,evict=pyramidkv:64", ("PyramidKV gives layers budgets of their own", "the same in all layers")),
        ("int8,ratios=1/2,evict=pyramidkv:64", ("PyramidKV gives layers budgets of their own",)),
        ("int8,rank=8,scales=amax", ("scales=amax with a rank", "leave scales out")),
        ("int8,ratios=2,topk=8", ("sparse is given with low_rank", "give one of the two")),
        ("bf16,scales=max", ("'max'", "scales=amax")),
        ("bf16,rank=8/0", ("'0'",)),
        ("bf16,7-0=int8", ("7-0", "write 0-7")),
        ("bf16,recent=1,recent=2", ("sets recent twice",)),
        ("bf16,topk=0", ("'0'", "from 1")),
        ("bf16,reselect=4", ("reselect without topk",)),
        ("bf16,0-3=fp9", ("'fp9'",)),
        ("bf16,window=fp9", ("'fp9'",)),
    ],
)
def test_strings_that_are_no_scheme(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse(text)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("model", "scheme", "words"),
    [
        ("llama-3-8b", "v4_fp8_584", ("key 8 x 128 and value 8 x 128", "bf16")),
        ("llama-3-8b", "bf16+index_fp8_132", ("no indexer",)),
        ("llama-3-8b", "bf16,window=fp8_e4m3", ("no window rows",)),
        ("llama-3-8b", "bf16,rank=129", ("128 dims",)),
        ("llama-3-8b", "bf16,ratios=1/2/3", ("3 entries", "32 layers")),
        ("llama-3-8b", "bf16,keep=100,recent=90,sinks=10", ("keep is 100", "recent + sinks, 100")),
        ("llama-3-8b", "bf16,32=fp32", ("layers 32-32", "0-31")),
        ("llama-3-8b", "bf16,9-3=fp32", ("layers 9-3",)),
        ("llama-3-8b", "int4,rank=40", ("head_dim is 40", "group of 32")),
        ("deepseek-v3", "int4", ("one row is both",)),
        ("deepseek-v3", "int8/int8", ("one row is key and value",)),
        ("deepseek-v3", "v32_fp8_656/bf16", ("no second format", "write 'v32_fp8_656'")),
        ("deepseek-v3", "bf16,rank=64", ("trained low-rank row",)),
        ("deepseek-v3", "bf16,topk=64", ("among keys of heads", "leave it out")),
        ("deepseek-v3", "bf16,evict=h2o:64", ("evicts by H2O", "latent", "evict=window")),
        ("deepseek-v3", "bf16,evict=streaming:64", ("evicts by StreamingLLM", "positions=original")),
        ("deepseek-v3", "bf16,evict=window:64:summary=8", ("evicts by SlidingWindow", "without summaries")),
        ("llama-3-8b", "bf16,topk=1/2/3", ("topk (--sparse-topk) has 3 entries", "32 layers")),
        ("deepseek-v3", "v4_fp8_584", ("latent 1 x 512 and rope 1 x 64", "v32_fp8_656")),
        ("deepseek-v3.2", "v32_fp8_656+v4_fp8_584", ("index_key 1 x 128", "index_fp8_132")),
        ("deepseek-v4.1-flash", "v32_fp8_656", ("kv 1 x 512", "v41_fp4_288")),
        ("deepseek-v4.1-flash", "bf16,keep=512", ("fixed by training",)),
        ("deepseek-v4-flash", "bf16,recent=8", ("fixed by training",)),
    ],
)
def test_what_an_attention_cannot_have(model: str, scheme: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ArgumentError) as caught:
        plan(model, kv_format=scheme)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(("block_size", "scheme"), [(0, "bf16"), (-4, "bf16"), (20, "int4"), (48, "int4:64")])
def test_pages_that_cannot_be(block_size: int, scheme: str) -> None:
    with pytest.raises(ArgumentError, match=f"block_size is {block_size}"):
        plan("llama-3-8b", kv_format=scheme, block_size=block_size)


def test_a_page_holds_whole_compressed_rows() -> None:
    with pytest.raises(ArgumentError, match="multiple of 128"):
        plan("deepseek-v4-flash", block_size=64)


def test_the_default_page_suits_the_scheme() -> None:
    assert plan("llama-3-8b").cache.block_size == 16
    assert plan("llama-3-8b", kv_format="int4:64").cache.block_size == 64
    assert plan("llama-3-8b", kv_format="bf16,0=int4").cache.block_size == 32
    assert plan("llama-3-8b", kv_format="int8/int4").cache.block_size == 16


def test_ranks_are_multiples_of_16_and_stretched_over_the_layers() -> None:
    assert ranks(parse("bf16,ratios=1/1/2/2/4/4/4/4"), 40, 128) == [128] * 10 + [64] * 10 + [32] * 20
    assert ranks(parse("bf16,ratios=3"), 2, 128) == [48, 48]
    assert ranks(parse("bf16,ratios=100"), 1, 128) == [16]
    assert ranks(parse("bf16"), 3, 64) == [64, 64, 64]


def test_keys_and_values_have_ranks_of_their_own() -> None:
    scheme = parse("bf16,rank=32/64")
    assert ranks(scheme, 3, 64) == [32] * 3
    assert ranks(scheme, 3, 64, value=True) == [64] * 3
    assert ranks(parse("bf16,rank=32"), 2, 64, value=True) == [32] * 2


def test_a_policy_counts_as_the_tokens_that_it_keeps() -> None:
    plan("deepseek-v3", kv_format="bf16,evict=streaming:64:positions=original")  # latent rows have policies by position
    for kept, policy in (("keep=4096", "evict=h2o:4096:summary=8"), ("keep=25%", "evict=snapkv:25%")):
        ours, wanted = (plan("llama-3-8b", kv_format=f"int8,{setting}", context=8192) for setting in (policy, kept))
        assert ours.bytes_at(8192) == wanted.bytes_at(8192)
