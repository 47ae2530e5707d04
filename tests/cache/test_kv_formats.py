"""PagedCache in quantized formats: bytes to the last one, attention over codes and kept rows, copies, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kvbackend
from kvbackend import ArgumentError, formats, ops
from kvbackend.cache import GqaLayer, MlaLayer, OutOfBlocks, PagedCache
from kvbackend.planner import plan

from .rows import CODES, layer_rows, nan_cache, snapshot, stored, tables, write

GQA, MLA = GqaLayer(2, 32), MlaLayer(32, 8)
BY_TOKEN = ["int8", "fp8_e4m3:token_head", "fp8_e5m2:token_head", "fp8_e4m3:32", "mxfp8", "mxfp4", "nvfp4", "fp4_e2m1"]
STATIC = ["fp8_e4m3", "fp8_e4m3:head", "fp8_e5m2:channel"]
PAIRS = ["int8/fp8_e4m3:token_head", "fp4_e2m1/auto", "auto/mxfp8", "auto"]


@pytest.fixture(autouse=True)
def _reference() -> Iterator[None]:
    with kvbackend.use("reference", CODES):
        yield


def filled(cache: PagedCache, count: int) -> int:
    seq = cache.new_sequence()
    write(cache, cache.append(seq, count), list(range(count)))
    return seq


def attend_rows(q: Any, rows: tuple[Tensor, Tensor], latent: bool, q_len: int, **options: Any) -> tuple[Tensor, Tensor]:
    """One call over plain pages that hold these rows."""
    length = len(rows[0])
    pages = [part[None].contiguous() for part in rows]  # one block
    batch = dict(
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, q_len], dtype=torch.int32),
        max_seqlen_q=q_len,
        return_lse=True,
        **options,
    )
    return ops.mla_attention(*q, *pages, **batch) if latent else ops.paged_attention(q, *pages, **batch)


def queries(latent: bool, count: int) -> Any:
    torch.manual_seed(count)
    return (torch.randn(count, 3, 32), torch.randn(count, 3, 8)) if latent else torch.randn(count, 4, 32)


# ------------------------------------------------------------------------------------------------------ contents


@pytest.mark.parametrize("kv_format", [*BY_TOKEN, *STATIC, *PAIRS])
@pytest.mark.parametrize("layer", [GQA, MLA], ids=["gqa", "mla"])
def test_ops_read_what_pages_wrote(layer: Any, kv_format: str) -> None:
    latent = layer is MLA
    if latent and ("/" in kv_format or kv_format.endswith("channel")):
        pytest.skip("refused for MLA: see test_refusals")
    cache = nan_cache((layer,), 8, 4, kv_format=kv_format)
    filled(cache, 3)
    seq = filled(cache, 11)
    (pages,) = cache.layers
    for got, want in zip(cache.read(0, seq), stored(cache, 0, list(range(11))), strict=True):
        assert torch.equal(got, want)
    q = queries(latent, 3)
    named = dict(zip(("q_nope", "q_pe"), q, strict=True)) if latent else {"q": q}
    op = ops.mla_attention if latent else ops.paged_attention
    out, lse = op(**named, **pages.arguments, **cache.batch([seq], [3]), softmax_scale=0.2, return_lse=True)
    want, want_lse = attend_rows(q, cache.read(0, seq), latent, 3, softmax_scale=0.2)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_format", ["int8", "fp4_e2m1", "auto"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_come_back_in_the_dtype_of_the_cache(kv_format: str, dtype: torch.dtype) -> None:
    cache = PagedCache([GQA, MLA], 4, 4, dtype, kv_format=kv_format)
    seq = cache.new_sequence()
    slots = cache.append(seq, 5)
    for i, pages in enumerate(cache.layers):
        pages.write(slots, *(rows.to(dtype) for rows in layer_rows(cache, i, [3, 1, 4, 1, 5])))
        assert {part.dtype for part in cache.read(i, seq)} == {dtype}


@pytest.mark.parametrize("kv_format", ["int8", "mxfp4", "int8/fp4_e2m1"])
def test_copy_on_write_copies_codes_and_scales(kv_format: str) -> None:
    cache = nan_cache((GQA,), 6, 4, kv_format=kv_format)
    parent = filled(cache, 6)
    child = cache.fork(parent)
    before = snapshot(cache)
    assert len(before) == 4  # keys, values, and the scales of both
    slots = cache.append(child, 1)
    (_, old), (_, new) = tables(cache, [parent, child])
    assert new == int(slots) // 4 != old
    for then, now in zip(before, snapshot(cache), strict=True):
        assert torch.equal(now[old], then[old])
        assert torch.equal(now[new], then[old])
    write(cache, slots, [99])
    assert all(map(torch.equal, cache.read(0, parent), stored(cache, 0, list(range(6)))))
    assert all(map(torch.equal, cache.read(0, child), stored(cache, 0, [*range(6), 99])))


def test_formats_by_list_by_function_and_by_name() -> None:
    layers = [GQA] * 4
    by_list = PagedCache(layers, 2, 4, torch.bfloat16, kv_format=["fp4_e2m1"] * 2 + ["fp8_e4m3:token_head"] * 2)
    rule = PagedCache(
        layers, 2, 4, torch.bfloat16, kv_format=lambda layer: "fp4_e2m1" if layer < 2 else "fp8_e4m3:token_head"
    )
    assert by_list.kv_formats == rule.kv_formats
    assert [pages.kv_format for pages in by_list.layers] == list(rule.kv_formats)
    assert by_list.bytes_per_token == 2 * 2 * 2 * (16 + 2) + 2 * 2 * 2 * (32 + 4)


def test_scales_given_are_copied_and_used() -> None:
    given = torch.tensor([0.5])
    cache = nan_cache((GQA,), 2, 4, kv_format="fp8_e4m3", scales=[dict(v_scale=given)])
    given.fill_(7.0)
    (pages,) = cache.layers
    assert (float(pages.k_scale), float(pages.v_scale)) == (1.0, 0.5)
    seq = filled(cache, 3)
    assert all(map(torch.equal, cache.read(0, seq), stored(cache, 0, [0, 1, 2])))


# --------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_format", [*BY_TOKEN, *STATIC, "int8/fp8_e4m3:token_head", "bf16"])
@pytest.mark.parametrize("model", ["smollm2-135m", "deepseek-v2-lite"])
def test_bytes_are_those_of_the_plan(model: str, kv_format: str, layout: str) -> None:
    made = plan(model, kv_format=kv_format) if not ("/" in kv_format and "deepseek" in model) else None
    if made is None or ("deepseek" in model and kv_format.endswith("channel")):
        pytest.skip("refused for MLA: see test_refusals")
    vectors = [layer.keeps[0].vectors for layer in made.model.layers]
    specs = [
        MlaLayer(first.dim, second.dim) if second.name == "rope" else GqaLayer(first.heads, first.dim, second.dim)
        for first, second in vectors
    ]
    cache = PagedCache(specs, 3, made.cache.block_size, torch.bfloat16, layout=layout, kv_format=kv_format)
    assert cache.bytes_per_token == made.bytes_per_token
    assert cache.fixed_scale_bytes == made.cache.fixed_scale_bytes
    assert cache.allocated_bytes == made.cache.pool_bytes(3) + made.cache.fixed_scale_bytes
    assert cache.allocated_bytes == 3 * cache.block_bytes + cache.fixed_scale_bytes
    cache.append(cache.new_sequence(), made.cache.block_size + 1)
    assert cache.used_bytes == made.bytes_at(made.cache.block_size + 1)
    assert cache.blocks_used * cache.block_bytes == made.allocated_bytes_at(made.cache.block_size + 1)


@pytest.mark.parametrize("kv_format", ["int8", "fp8_e4m3:channel", ["mxfp4", "nvfp4"]])
def test_with_memory_counts_scales(kv_format: Any) -> None:
    one = PagedCache([GQA] * 2, 1, 4, torch.bfloat16, kv_format=kv_format)
    for spare in (0, one.block_bytes - 1):
        memory_bytes = 5 * one.block_bytes + one.fixed_scale_bytes + spare
        cache = PagedCache.with_memory(memory_bytes, [GQA] * 2, 4, torch.bfloat16, kv_format=kv_format)
        assert cache.blocks_total == 5
        assert memory_bytes - spare == cache.allocated_bytes
    with pytest.raises(ArgumentError, match="memory_bytes is"):
        PagedCache.with_memory(one.allocated_bytes - 1, [GQA] * 2, 4, torch.bfloat16, kv_format=kv_format)


def test_kept_blocks_are_counted() -> None:
    options = dict(kv_format=["int8", "auto"], keep_recent=4, keep_blocks=3)
    cache = PagedCache([GQA] * 2, 8, 4, torch.bfloat16, **options)
    assert cache.kept_bytes_per_token == 2 * 2 * 32 * 2  # of the one layer that has codes
    assert cache.allocated_bytes == 8 * cache.block_bytes + 3 * 4 * cache.kept_bytes_per_token
    seq = cache.new_sequence()
    cache.append(seq, 10)  # the last four tokens lie in two blocks, of four rows and of two
    assert cache.used_bytes == 10 * cache.bytes_per_token + (4 + 2) * cache.kept_bytes_per_token
    cache.fork(seq)
    assert cache.used_bytes == 10 * cache.bytes_per_token + (4 + 2) * cache.kept_bytes_per_token


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("int8,recent=40,sinks=6", dict(kv_format="int8", keep_recent=40, keep_sinks=6)),
        ("mxfp4,recent=32", dict(kv_format="mxfp4", keep_recent=32)),
        ("int8,sinks=20", dict(kv_format="int8", keep_sinks=20)),
        ("int4", dict(kv_format="int4")),
        ("int4,recent=70,sinks=4", dict(kv_format="int4", keep_recent=70, keep_sinks=4)),
    ],
)
def test_kept_bytes_reach_those_of_the_plan_and_never_pass_them(scheme: str, options: dict[str, Any]) -> None:
    made = plan("smollm2-135m", kv_format=scheme, block_size=32)
    specs = [GqaLayer(made.model.layers[0].keeps[0].vectors[0].heads, 64)] * len(made.model.layers)
    met = False
    for step in (1, 3, 32, 48, 119):
        cache = PagedCache(specs, 20, 32, torch.bfloat16, keep_blocks=20, **options)
        seq = cache.new_sequence()
        for length in range(step, 400, step):
            cache.append(seq, step)
            assert cache.kept is not None
            blocks = cache.blocks_used * cache.block_bytes + cache.kept.pool.num_used * 32 * cache.kept_bytes_per_token
            assert cache.used_bytes <= made.bytes_at(length)
            assert blocks <= made.allocated_bytes_at(length)
            met |= length > 200 and cache.used_bytes == made.bytes_at(length)
    assert met


# -------------------------------------------------------------------------------------------- recent and first tokens


@pytest.mark.parametrize("kv_format", ["int8", "fp4_e2m1"])
@pytest.mark.parametrize(("recent", "sinks"), [(5, 3), (1, 0), (0, 1), (100, 0)])
@pytest.mark.parametrize("layer", [GQA, MLA], ids=["gqa", "mla"])
def test_attention_over_kept_rows_is_one_call_over_mixed_rows(layer: Any, recent: int, sinks: int, kv_format: str):
    latent = layer is MLA
    cache = nan_cache((layer,), 40, 4, kv_format=kv_format, keep_recent=recent, keep_sinks=sinks, keep_blocks=40)
    seqs = [filled(cache, 21), filled(cache, 2)]
    cache.truncate(seqs[0], 20)
    write(cache, cache.append_batch(seqs, [6, 1]), [*range(100, 107)])
    seqs.append(cache.fork(seqs[0]))
    write(cache, cache.append(seqs[2], 1), [200])
    q_lens = [6, 1, 4]  # of the first, queries that see kept keys only in part
    q = queries(latent, sum(q_lens))
    options: list[dict[str, Any]] = [{}, {"causal": False}]
    if not latent:
        options += [{"window": 4}, {"softcap": 2.0, "sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])}]
    for more in options:
        out, lse = cache.attend(0, q, seqs, q_lens, 0.3, return_lse=True, **more)
        start = 0
        for seq, q_len in zip(seqs, q_lens, strict=True):
            where = slice(start, start + q_len)
            mine = tuple(part[where] for part in q) if latent else q[where]
            want, want_lse = attend_rows(mine, cache.read(0, seq), latent, q_len, softmax_scale=0.3, **more)
            torch.testing.assert_close(out[where], want, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(lse[where], want_lse, rtol=1e-5, atol=1e-5)
            start += q_len
    assert cache.attend(0, q, seqs, q_lens, 0.3)[1].shape == (0,)


def test_which_rows_are_kept() -> None:
    cache = nan_cache((GQA,), 16, 4, kv_format="int8", keep_recent=3, keep_sinks=2)
    seq = cache.new_sequence()
    numbers: list[int] = []

    def kept() -> list[int]:
        exact = cache.read(0, seq)[0].eq(layer_rows(cache, 0, numbers)[0]).flatten(1).all(1)
        return exact.nonzero().flatten().tolist()

    def append(count: int) -> None:
        new = list(range(len(numbers), len(numbers) + count))
        write(cache, cache.append(seq, count), new)
        numbers.extend(new)

    append(14)
    assert kept() == [0, 1, 2, 3, 8, 9, 10, 11, 12, 13]  # whole blocks
    append(1)
    assert kept() == [0, 1, 2, 3, 12, 13, 14]
    cache.truncate(seq, 10)
    del numbers[10:]
    assert kept() == [0, 1, 2, 3]
    append(1)  # to a block whose first rows are codes only
    assert kept() == [0, 1, 2, 3]
    append(2)
    assert kept() == [0, 1, 2, 3, 12]
    assert cache.kept is not None
    cache.free(seq)
    assert cache.kept.pool.num_used == 0


def test_kept_blocks_that_are_shared_are_copied_on_write() -> None:
    cache = nan_cache((GQA,), 12, 4, kv_format="fp4_e2m1", keep_recent=3)
    parent = filled(cache, 6)
    child = cache.fork(parent)
    write(cache, cache.append(child, 1), [50])
    write(cache, cache.append(parent, 1), [60])
    for seq, last in ((parent, 60), (child, 50)):
        kept = torch.tensor([False] * 4 + [True] * 3)
        assert all(map(torch.equal, cache.read(0, seq), stored(cache, 0, [*range(6), last], kept)))


def test_too_few_blocks_in_full_precision_change_nothing() -> None:
    cache = nan_cache((GQA,), 12, 4, kv_format="int8", keep_recent=4, keep_blocks=3)
    a, b = filled(cache, 6), cache.new_sequence()
    assert cache.kept is not None
    with pytest.raises(OutOfBlocks, match=r"2 full-precision blocks \(keep_blocks\) are wanted; 1 of 3"):
        cache.append(b, 8 - 1)
    assert (cache.length(b), cache.blocks_used, cache.kept.pool.num_used) == (0, 2, 2)
    cache.append(b, 4)
    assert cache.length(a) == 6


# ------------------------------------------------------------------------------------------------------- growing


@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved"])
@pytest.mark.parametrize("kv_format", ["auto", "int8", "fp8_e4m3", "mxfp8", "nvfp4"])
def test_growing_keeps_what_sequences_hold(kv_format: str, layout: str) -> None:
    layers = (GQA,) if layout == "interleaved" else (GQA, MLA)
    cache = nan_cache(layers, 3, 4, layout=layout, kv_format=kv_format, keep_recent=3, keep_blocks=3)
    seq = filled(cache, 10)
    child = cache.fork(seq)
    before = [cache.read(i, seq) for i in range(len(layers))]
    fixed = cache.fixed_scale_bytes
    with pytest.raises(OutOfBlocks):
        cache.append(seq, 8)
    cache.grow(6, 6)
    assert (cache.blocks_total, cache.blocks_free, cache.fixed_scale_bytes) == (6, 3, fixed)
    assert cache.allocated_bytes == 6 * cache.block_bytes + fixed + 6 * 4 * cache.kept_bytes_per_token
    for i, rows in enumerate(before):
        for which in (seq, child):
            assert all(map(torch.equal, cache.read(i, which), rows))
    write(cache, cache.append(seq, 8), [*range(10, 18)])
    for i, rows in enumerate(before):
        assert all(map(torch.equal, cache.read(i, child), rows))
        assert len(cache.read(i, seq)[0]) == 18


def test_a_cache_cannot_shrink_or_gain_kept_blocks() -> None:
    cache = nan_cache((GQA,), 3, 4)
    with pytest.raises(ArgumentError, match="num_blocks is 2; the cache has 3 and can only grow"):
        cache.grow(2)
    with pytest.raises(ArgumentError, match="keep_blocks is 1; the cache has 0 and can only grow where keep_recent"):
        cache.grow(4, 1)
    assert cache.blocks_total == 3


# ------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        (GQA, dict(kv_format="fp9"), "kv_format is 'fp9'; it must be one of"),
        (GQA, dict(kv_format="int8:64"), "int8 takes token_head after the colon"),
        (GQA, dict(kv_format="v4_fp8_584"), "a record of 584 bytes"),
        (GqaLayer(1, 48), dict(kv_format="mxfp4"), "head_dim is 48; mxfp4 needs a multiple of its group of 32"),
        (GqaLayer(1, 32, 33), dict(kv_format="fp4_e2m1:tensor"), "head_dim is 33.*packs 2 codes"),
        (GQA, dict(kv_format="int4"), "block_size is 4; keys in int4 share scales across 32 tokens"),
        (GqaLayer(2, 48), dict(kv_format="int8/int4"), "head_dim is 48; int4 needs a multiple of its group of 32"),
        (MLA, dict(kv_format="int4"), "scales keys per channel and values per token; MLA's latent row is both"),
        (GQA, dict(kv_format="bf16"), "kv_format is 'bf16' but dtype is torch.float32"),
        (GQA, dict(kv_format=["int8"] * 2), "kv_format has 2 entries for 1 layers"),
        (GQA, dict(kv_format="int8/mxfp4", layout="interleaved"), "which has one row size and one dtype"),
        (GQA, dict(kv_format="fp4_e2m1:tensor"), r"scales has no k_scale.*shape \[1\], from calibration"),
        (GQA, dict(kv_format="int8", scales=[dict(k_scale=torch.ones(1))]), "has no such scale"),
        (GQA, dict(kv_format="fp8_e4m3", scales=[dict(scale=torch.ones(1))]), "takes k_scale and v_scale"),
        (GQA, dict(kv_format="fp8_e4m3", scales=[dict(k_scale=torch.ones(2))]), r"of shape \[2\].*has scales of"),
        (GQA, dict(kv_format="fp8_e4m3", scales=[dict(v_scale=torch.zeros(1))]), "not positive and finite"),
        (GQA, dict(kv_format="nvfp4", scales=[dict(k_scale=torch.tensor([torch.inf]))]), "not positive and finite"),
        (GQA, dict(kv_format="fp8_e4m3", scales=[]), "scales has 0 entries for 1 layers"),
        (MLA, dict(kv_format="int8/int8"), "MLA's latent row is key and value"),
        (MLA, dict(kv_format="fp8_e4m3:channel"), "with scales per channel"),
        (MLA, dict(kv_format="int8", layout="interleaved"), "stores the latent in another dtype"),
        (MLA, dict(kv_format="fp8_e4m3", scales=[dict(v_scale=torch.ones(1))]), "a MlaLayer takes k_scale"),
        (GQA, dict(kv_format="int8", keep_recent=-1), "keep_recent is -1"),
        (GQA, dict(kv_format="int8", keep_recent=4, keep_blocks=9), "keep_blocks is 9; it must be from 1 to"),
        (GQA, dict(kv_format="int8", keep_blocks=4), "keep_recent and keep_sinks are 0"),
    ],
)  # fmt: skip
def test_refusals(layer: Any, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocated(*_: Any, **__: Any) -> None:
        raise AssertionError("refusals come before any allocation")

    for name in ("empty", "full"):
        monkeypatch.setattr(torch, name, allocated)
    with pytest.raises(ArgumentError, match=message):
        PagedCache([layer], 8, 4, torch.float32, **options)


def test_every_format_is_taken_by_name() -> None:
    for name in formats.names():
        fmt = formats.get(name)
        for choice in fmt.choices or ("",):
            kv_format = f"{name}:{choice}" if choice else name
            static = fmt.name == "fp4_e2m1" and choice in ("tensor", "channel")
            shape = {"tensor": (1,), "channel": (1, 128)}.get(choice, (1,))
            scales = [dict(k_scale=torch.ones(shape), v_scale=torch.ones(shape))] if static else None
            dtype = getattr(torch, fmt.storage) if not fmt.quantized else torch.bfloat16
            PagedCache([GqaLayer(1, 128)], 1, 128, dtype, kv_format=kv_format, scales=scales)
