"""The mathematics of sparse_mla_attention's reference, in float64, and DeepSeek-V3.2 in transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvbackend
from kvbackend import formats
from kvbackend.codecs import pack_record, unpack_record
from kvbackend.ops import (
    absorb_q,
    lightning_indexer,
    merge_attn_states,
    mla_attention,
    project_out,
    sparse_mla_attention,
)
from tests.ops.test_mla_attention import batch, draw, reference

MLA_RECORDS = [name for name in formats.record_names() if formats.record(name).holds == "mla"]


def example(q_lens: list[int], seq_lens: list[int], heads: int = 3, rank: int = 16, rope: int = 4) -> dict[str, Any]:
    call = batch(q_lens, seq_lens)
    num_tokens, num_blocks = sum(q_lens), call["block_table"].numel()
    cache = draw(0, num_blocks, 4, rank + rope)
    return dict(
        q_nope=draw(1, num_tokens, heads, rank), q_pe=draw(2, num_tokens, heads, rope), ckv_cache=cache[..., :rank],
        kpe_cache=cache[..., rank:], softmax_scale=0.2, return_lse=True, **call,
    )  # fmt: skip


def all_positions(call: dict[str, Any], tokens: int, length: int) -> torch.Tensor:
    return torch.arange(length, dtype=torch.int32).expand(tokens, -1)


def assert_close(got: Any, want: Any) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6 if b.dtype is torch.float32 else 1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_all_positions_are_dense_attention(causal: bool) -> None:
    call = example([3, 1, 2], [9, 7, 2])
    want = reference(mla_attention, causal=causal, **call)
    got = reference(sparse_mla_attention, topk_indices=all_positions(call, 6, 12), causal=causal, **call)
    assert_close(got, want)


def test_is_dense_attention_over_the_chosen_rows() -> None:
    """Each query on its own, over a cache that holds its choice and nothing else."""
    call = example([4, 2], [11, 6])
    generator = torch.Generator().manual_seed(3)
    positions = [7, 8, 9, 10, 4, 5]
    chosen = [torch.randperm(p + 1, generator=generator)[:5].tolist() for p in positions]
    indices = torch.tensor([row + [-1] * (7 - len(row)) for row in chosen], dtype=torch.int32)
    out, lse = reference(sparse_mla_attention, topk_indices=indices, **call)
    for row, selection in enumerate(chosen):
        table = call["block_table"][0 if row < 4 else 1].long()
        rows = [(table[j // 4], j % 4) for j in selection]
        small = {key: torch.stack([call[key][at] for at in rows])[None] for key in ("ckv_cache", "kpe_cache")}
        one = {key: call[key][row : row + 1] for key in ("q_nope", "q_pe")}
        want = reference(
            mla_attention, **one, **small, **batch([1], [len(selection)], len(selection)), softmax_scale=0.2,
            return_lse=True,
        )  # fmt: skip
        assert_close((out[row : row + 1], lse[row : row + 1]), want)


def test_parts_of_a_selection_merge_to_the_whole() -> None:
    call = example([1, 2], [9, 12])
    indices = torch.tensor([[0, 3, 8, 5, -1, 2], [10, 1, -1, -1, 4, 7], [-1, -1, -1, 0, 6, 11]], dtype=torch.int32)
    whole = reference(sparse_mla_attention, topk_indices=indices, **call)
    parts = [reference(sparse_mla_attention, topk_indices=indices[:, part], **call) for part in (slice(3), slice(3, 6))]
    outs, lses = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    merged = reference(merge_attn_states, outs=outs, lses=lses)
    torch.testing.assert_close(merged[0], whole[0], rtol=1e-6, atol=1e-6)  # lse is float32
    torch.testing.assert_close(merged[1], whole[1])


def test_order_does_not_matter_and_duplicates_count_twice() -> None:
    call = example([1], [9])
    got = reference(sparse_mla_attention, topk_indices=torch.tensor([[5, -1, 2, 8]], dtype=torch.int32), **call)
    assert_close(
        reference(sparse_mla_attention, topk_indices=torch.tensor([[8, 5, 2]], dtype=torch.int32), **call), got
    )
    once = reference(sparse_mla_attention, topk_indices=torch.tensor([[3]], dtype=torch.int32), **call)
    twice = reference(sparse_mla_attention, topk_indices=torch.tensor([[3, 3]], dtype=torch.int32), **call)
    torch.testing.assert_close(twice[0], once[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(twice[1], once[1] + torch.tensor(2.0).log())


def test_rows_without_a_token_are_empty() -> None:
    """All -1, nothing cached, past the sequence, past the query, or in a block that is gone: 0 and -inf."""
    call = example([2, 2, 1, 1], [9, 1, 0, 5])
    call["block_table"][3, 0] = -1
    indices = torch.tensor([[-1, -1], [9, 700], [0, 1], [-1, -2], [0, 1], [3, 0]], dtype=torch.int32)
    for causal in (True, False):
        out, lse = reference(sparse_mla_attention, topk_indices=indices, causal=causal, **call)
        assert not out.any()
        assert (lse == -torch.inf).all()


@pytest.mark.parametrize("name", MLA_RECORDS)
def test_records_are_read_as_what_they_hold(name: str) -> None:
    call = example([2, 1], [9, 7], heads=2, rank=512, rope=64)
    rows = torch.cat((call.pop("ckv_cache"), call.pop("kpe_cache")), -1).float()
    pages = pack_record(rows, name)
    held = unpack_record(pages, name, 4).double()
    indices = torch.tensor([[0, 3, 5], [8, 2, -1], [6, 6, 1]], dtype=torch.int32)
    got = reference(sparse_mla_attention, ckv_cache=pages, kpe_cache=None, kv_format=name, topk_indices=indices, **call)
    want = reference(
        sparse_mla_attention, ckv_cache=held[..., :512], kpe_cache=held[..., 512:], topk_indices=indices, **call
    )
    assert_close(got, want)


def test_both_orders_of_the_656_byte_record_read_alike() -> None:
    call = example([2], [9], heads=2, rank=512, rope=64)
    rows = torch.cat((call.pop("ckv_cache"), call.pop("kpe_cache")), -1).float()
    call |= dict(topk_indices=torch.tensor([[0, 3, 5], [8, 2, -1]], dtype=torch.int32), kpe_cache=None)
    for rule in ("pow2_ceil", "amax"):
        cuda, ascend = (
            reference(sparse_mla_attention, ckv_cache=pack_record(rows, name, rule), kv_format=name, **call)
            for name in ("v32_fp8_656", "v32_fp8_656_ascend")
        )
        assert_close(cuda, ascend)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q_pe=torch.zeros(5, 2, 8)), "q_pe.*has H = 2; it must be 3, the H of q_nope"),
        (dict(q_nope=torch.zeros(5, 3, 16)), "ckv_cache holds rows of 32 numbers; q_nope has 16"),
        (dict(kpe_cache=torch.zeros(14, 5, 8)), "ckv_cache has blocks of 4 tokens and kpe_cache of 5"),
        (dict(kpe_cache=torch.zeros(14, 4, 8).half()), "kpe_cache is torch.float16 but q_nope is torch.float32"),
        (dict(kpe_cache=None), "kpe_cache is None with kv_format 'auto'.*pass kpe_cache"),
        (dict(kv_format="v32_fp8_656"), "kpe_cache is given with kv_format 'v32_fp8_656'.*pass None"),
        (dict(kv_format="v4_fp8_584", kpe_cache=None), "whose records hold shared_kv; ckv_cache takes mla"),
        (dict(topk_indices=torch.zeros(4, 2, dtype=torch.int32)), "topk_indices.*has T = 4; it must be 5"),
        (dict(topk_indices=torch.zeros(5, 2, dtype=torch.int64)), "topk_indices is torch.int64; it must be"),
        (dict(cu_seqlens_q=torch.tensor([2, 3, 5], dtype=torch.int32)), "cu_seqlens_q starts with 2"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_wrong_calls(change: dict[str, Any], message: str, backend: str) -> None:
    good = dict(sparse_mla_attention.make_samples("cpu", torch.float32))["not causal"]
    with kvbackend.use(backend):
        sparse_mla_attention(**good)
        with pytest.raises(kvbackend.ArgumentError, match=message):
            sparse_mla_attention(**(good | change))


def test_queries_of_another_model_are_refused() -> None:
    good = dict(sparse_mla_attention.make_samples("cpu", torch.float32))["v32_fp8_656"]
    with kvbackend.use("reference"):
        sparse_mla_attention(**good)
        with pytest.raises(
            kvbackend.ArgumentError, match="q_nope and q_pe have 512 and 32 dims; rows of 'v32_fp8_656' have"
        ):
            sparse_mla_attention(**good | dict(q_pe=good["q_pe"][..., :32]))


def test_positions_are_checked_under_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBACKEND_CHECK", "values")
    good = dict(sparse_mla_attention.make_samples("cpu", torch.float32))["not causal"]
    capacity = good["block_table"].shape[1] * 4
    with kvbackend.use("reference"):
        for wrong in (-2, capacity):
            indices = good["topk_indices"].clone()
            indices[1, 2] = wrong
            with pytest.raises(kvbackend.ArgumentError, match=f"topk_indices holds position {wrong} at index 7"):
                sparse_mla_attention(**good | dict(topk_indices=indices))


def test_transformers_attention_over_selected_tokens() -> None:
    """DeepseekV32Attention whole, against our indexer, selection and absorbed attention on its own projections."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    v32 = pytest.importorskip(
        "transformers.models.deepseek_v32.modeling_deepseek_v32", reason="this transformers has no deepseek_v32"
    )
    from transformers import DeepseekV32Config

    heads, nope, rope, v_dim, rank, length, hidden_size = 4, 8, 8, 6, 16, 40, 48
    config = DeepseekV32Config(
        hidden_size=hidden_size, q_lora_rank=24, num_attention_heads=heads, num_key_value_heads=heads,
        kv_lora_rank=rank, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=v_dim, index_n_heads=32,
        index_head_dim=16, index_topk=7, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(5)
    module = v32.DeepseekV32Attention(config, 0).double().eval()
    hidden = draw(0, 1, length, hidden_size)
    angles = torch.arange(length).double()[:, None] * draw(2, 1, rope // 2).abs()
    cos, sin = (torch.cat((f, f), -1)[None] for f in (angles.cos(), angles.sin()))
    mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    additive = torch.zeros(1, 1, length, length, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)

    with torch.no_grad():
        want, _ = module(hidden, (cos, sin), additive)

        q_resid = module.q_a_layernorm(module.q_a_proj(hidden))
        q = module.q_b_proj(q_resid).view(1, length, heads, nope + rope).transpose(1, 2)
        latent, k_pe = module.kv_a_proj_with_mqa(hidden).split([rank, rope], -1)
        latent = module.kv_a_layernorm(latent)
        q_pe, k_pe = v32.apply_rotary_pos_emb_interleave(q[..., nope:], k_pe[:, None], cos, sin)
        indexer = module.indexer
        q_index = indexer.wq_b(q_resid).view(1, length, 32, 16)
        k_index = indexer.k_norm(indexer.wk(hidden))[:, :, None]
        q_rot, k_rot = v32.apply_rotary_pos_emb(q_index[..., :rope], k_index[..., :rope], cos, sin, unsqueeze_dim=2)
        q_index = torch.cat((q_rot, q_index[..., rope:]), -1)[0]
        k_index = torch.cat((k_rot, k_index[..., rope:]), -1)[0, :, 0]
        weights = indexer.weights_proj(hidden)[0] * 32**-0.5 * 16**-0.5

        call = batch([length], [length], 8)
        table = call["block_table"][0].long()

        def paged(rows: torch.Tensor) -> torch.Tensor:
            pages = torch.zeros(5, 8, rows.shape[-1], dtype=rows.dtype)
            pages[table] = rows.view(5, 8, -1)
            return pages

        indices = reference(lightning_indexer, q=q_index, weights=weights, key_cache=paged(k_index), k=7, **call)
        w_uk, w_uv = module.kv_b_proj.weight.view(heads, nope + v_dim, rank).split([nope, v_dim], 1)
        q_nope = reference(absorb_q, q_nope=q[0, ..., :nope].transpose(0, 1), w_uk=w_uk)
        out, _ = reference(
            sparse_mla_attention, q_nope=q_nope, q_pe=q_pe[0].transpose(0, 1), ckv_cache=paged(latent[0]),
            kpe_cache=paged(k_pe[0, 0]), topk_indices=indices, softmax_scale=module.scaling, **call,
        )  # fmt: skip
        got = module.o_proj(reference(project_out, latent=out, w_uv=w_uv).flatten(1))
    torch.testing.assert_close(got, want[0], rtol=1e-5, atol=1e-6)  # transformers' norms and softmax are float32
