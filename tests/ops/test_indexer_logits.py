"""The mathematics of indexer_logits' reference, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvbackend
from kvbackend import formats
from kvbackend.codecs import pack_record, unpack_record
from kvbackend.ops import indexer_logits
from tests.golden import wave


def reference(op: Any, **arguments: Any) -> torch.Tensor:
    return op.reference(**op.bind((), arguments))


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch(q_lens: list[int], seq_lens: list[int], block_size: int = 4, ratio: int = 1) -> dict[str, Any]:
    width = max(1, *(-(-(length // ratio) // block_size) for length in seq_lens))
    return dict(
        block_table=torch.arange(len(seq_lens) * width, dtype=torch.int32).flip(0).view(len(seq_lens), width),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, *q_lens]).cumsum(0).int(),
        max_seqlen_q=max(q_lens),
        compress_ratio=ratio,
    )


def scores_by_formula(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return torch.einsum("th,thn->tn", weights, torch.einsum("thd,nd->thn", q, keys).clamp(min=0))


def test_golden() -> None:
    """Fixed numbers: 3 queries of 4 heads over the same 6 keys, each of which sees all."""
    call = batch([1, 1, 1], [6, 6, 6], block_size=6) | dict(block_table=torch.zeros(3, 1, dtype=torch.int32))
    got = reference(
        indexer_logits, q=wave(5.0, 3, 4, 8), weights=wave(7.0, 3, 4), key_cache=wave(6.0, 6, 8)[None], **call
    )
    want = torch.tensor([1.41186964, 4.1420877, 7.46264178, 9.6449298, 9.9636308, 8.35716558])
    assert got.dtype is torch.float32
    torch.testing.assert_close(got[0], want, rtol=1e-6, atol=0)
    assert got[2].sort(descending=True, stable=True).indices[:3].tolist() == [0, 1, 2]


def test_is_the_formula_over_the_pages_of_each_sequence() -> None:
    call = batch([2, 3, 0, 1], [9, 3, 5, 1])
    keys, q, weights = draw(0, 12, 4, 24), draw(1, 6, 5, 24), draw(2, 6, 5)
    got = reference(indexer_logits, q=q, weights=weights, key_cache=keys, **call)
    assert got.shape == (6, 12)
    row = 0
    for index, (q_len, length) in enumerate(zip([2, 3, 0, 1], [9, 3, 5, 1], strict=True)):
        own = keys[call["block_table"][index].long()].flatten(0, 1)
        for position in range(length - q_len, length):
            want = torch.full((12,), -torch.inf, dtype=torch.float64)
            want[: position + 1] = scores_by_formula(q[row, None], weights[row, None], own[: position + 1])[0]
            torch.testing.assert_close(got[row], want.float(), rtol=1e-6, atol=1e-6)
            row += 1


@pytest.mark.parametrize("ratio", [1, 2, 4, 128])
@pytest.mark.parametrize("start", [0, 1, 6, 127])
def test_a_query_sees_the_groups_that_it_completes(ratio: int, start: int) -> None:
    """Chunks of any size and start show the same keys to the same positions: (p + 1) // ratio of them."""
    length, heads, dim = 300, 3, 8
    keys = draw(0, -(-(length // ratio) // 4), 4, dim)
    q, weights = draw(1, length, heads, dim), draw(2, length, heads)
    whole = reference(indexer_logits, q=q, weights=weights, key_cache=keys, **batch([length], [length], 4, ratio))
    seen = (whole > -torch.inf).sum(1)
    assert torch.equal(seen, (torch.arange(length) + 1) // ratio)
    assert (whole[torch.arange(whole.shape[1])[None] >= seen[:, None]] == -torch.inf).all()
    at = start
    for count in (1, 2, 63, 65, length - start - 131):
        if at + count > length:
            break
        call = batch([count], [at + count], 4, ratio)
        blocks = call["block_table"].shape[1]
        part = slice(at, at + count)
        call["block_table"] = batch([length], [length], 4, ratio)["block_table"][:, :blocks]
        got = reference(indexer_logits, q=q[part], weights=weights[part], key_cache=keys, **call)
        width = got.shape[1]
        torch.testing.assert_close(got, whole[part, :width], rtol=1e-6, atol=1e-6)
        assert (whole[part, width:] == -torch.inf).all()
        at += count


@pytest.mark.parametrize("name", [name for name in formats.record_names() if formats.record(name).holds == "index_key"])
@pytest.mark.parametrize("block_size", [4, 64])
def test_records_are_scored_as_what_they_hold(name: str, block_size: int) -> None:
    keys = draw(0, 3, block_size, 128).float()
    pages = pack_record(keys, name)
    held = unpack_record(pages, name, block_size)
    q, weights = draw(1, 4, 6, 128).float(), draw(2, 4, 6).float()
    call = batch([4], [2 * block_size + 3], block_size)
    got = reference(
        indexer_logits, q=q, weights=weights, key_cache=pages, kv_format=name, block_size=block_size, **call
    )
    want = reference(indexer_logits, q=q, weights=weights, key_cache=held, **call)
    assert torch.equal(got, want)
    exact = reference(indexer_logits, q=q, weights=weights, key_cache=keys, **call)
    assert not torch.equal(got, exact), "codes round"
    seen = got > -torch.inf
    apart = 1 - 2 * (got * exact)[seen].sum() / (got.square() + exact.square())[seen].sum()  # DeepGEMM's measure
    assert apart < (0.02 if "fp4" in name else 1e-3)


def test_raw_and_power_of_two_scales_of_the_132_byte_record_read_alike() -> None:
    """The scale is a float32 number: whoever wrote it, it multiplies."""
    keys = draw(0, 1, 4, 128).float()
    pages = pack_record(keys, "index_fp8_132")
    scales = pages[:, 4 * 128 :].view(torch.float32)
    scales.copy_(torch.tensor([[0.3, 1e-3, 0.125, 7.7]]))
    codes = pages[:, : 4 * 128].view(torch.float8_e4m3fn).view(1, 4, 128).float()
    q, weights = draw(1, 1, 6, 128).float(), draw(2, 1, 6).float()
    call = dict(q=q, weights=weights, **batch([1], [4]))
    got = reference(indexer_logits, key_cache=pages, kv_format="index_fp8_132", **call)
    assert torch.equal(got, reference(indexer_logits, key_cache=codes * scales[..., None], **call))


def test_nan_reaches_its_own_scores_only() -> None:
    call = batch([1, 2], [9, 7])
    keys, q, weights = draw(0, 6, 4, 8), draw(1, 3, 2, 8), draw(2, 3, 2)
    clean = reference(indexer_logits, q=q, weights=weights, key_cache=keys, **call)
    spoiled = keys.clone()
    spoiled[call["block_table"][0, 0], 1] = torch.nan  # a real key
    spoiled[call["block_table"][0, 2], 1:] = torch.nan  # past the sequence
    got = reference(indexer_logits, q=q, weights=weights, key_cache=spoiled, **call)
    assert got[0, 1].isnan()
    assert torch.equal(got.isnan().nonzero(), torch.tensor([[0, 1]]))
    assert torch.equal(
        got.nan_to_num(), clean.index_put((torch.tensor(0), torch.tensor(1)), torch.tensor(torch.nan)).nan_to_num()
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(weights=torch.zeros(5, 2)), "weights.*has Hi = 2; it must be 3, the Hi of q"),
        (dict(key_cache=torch.zeros(14, 4, 8)), "key_cache holds rows of 8 numbers; q has 16"),
        (dict(key_cache=torch.zeros(14, 4, 16).half()), "key_cache is torch.float16 but q is torch.float32"),
        (dict(key_cache=torch.zeros(14, 4)), "key_cache has 2 dims; kv_format 'auto' has"),
        (dict(kv_format="v41_fp8_528"), "whose records hold shared_kv; key_cache takes index_key"),
        (dict(kv_format="index_fp8_132"), "key_cache is torch.float32 with 3 dims; records of 'index_fp8_132' are"),
        (dict(kv_format="int8"), "record is 'int8'; it must be one of"),
        (dict(compress_ratio=0), "compress_ratio is 0; it must be at least 1"),
        (dict(cu_seqlens_q=torch.tensor([2, 3, 5], dtype=torch.int32)), "cu_seqlens_q starts with 2"),
    ],
)
def test_wrong_calls(change: dict[str, Any], message: str) -> None:
    good = dict(indexer_logits.make_samples("cpu", torch.float32))["slice of a cache"]
    with kvbackend.use("reference"):
        indexer_logits(**good)
        with pytest.raises(kvbackend.ArgumentError, match=message):
            indexer_logits(**(good | change))


def test_pages_of_another_block_size_are_refused() -> None:
    call = batch([1], [4]) | dict(q=torch.zeros(1, 2, 128), weights=torch.zeros(1, 2))
    pages = torch.zeros(2, 512, dtype=torch.uint8)
    with (
        kvbackend.use("reference"),
        pytest.raises(kvbackend.ArgumentError, match="pages of 512 bytes; 4 rows of 'index_mxfp4_68' take 272"),
    ):
        indexer_logits(key_cache=pages, kv_format="index_mxfp4_68", block_size=4, **call)


@pytest.mark.parametrize(("length", "good"), [(-1, False), (0, True), (1, True), (49, True), (50, False)])
def test_lengths_are_checked_in_tokens(length: int, good: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """24 keys of two tokens each are 48 tokens, and one more may wait for its partner."""
    monkeypatch.setenv("KVBACKEND_CHECK", "values")
    call = dict(q=torch.zeros(0, 1, 4), weights=torch.zeros(0, 1), key_cache=torch.zeros(8, 4, 4), compress_ratio=2)
    call |= dict(
        block_table=torch.arange(6, dtype=torch.int32)[None], seq_lens=torch.tensor([length], dtype=torch.int32),
        cu_seqlens_q=torch.zeros(2, dtype=torch.int32), max_seqlen_q=0,
    )  # fmt: skip
    with kvbackend.use("reference"):
        if good:
            indexer_logits(**call)
        else:
            with pytest.raises(kvbackend.ArgumentError, match=rf"seq_lens holds length {length}.*\[0, 50\)"):
                indexer_logits(**call)
