"""Mistakes that an adapter could make: each changes one call, or one step of an adapter, and must be noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvbackend.backends.npu import fused_infer, host_lengths, rotary, shared_kv_attention, sparse_mla_attention

Change = Callable[[list[Any], dict[str, Any]], None]


@dataclass(frozen=True)
class CallMutation:
    """A call of a vendor op, or of each of several, with one thing changed."""

    name: str
    op: str
    vendor: str | tuple[str, ...]
    change: Change

    def is_of(self, vendor: str) -> bool:
        """Whether it changes the calls of a vendor op."""
        return vendor in (self.vendor if isinstance(self.vendor, tuple) else (self.vendor,))


@dataclass(frozen=True)
class StepMutation:
    """An adapter with one of its steps replaced."""

    name: str
    op: str
    module: Any
    attribute: str
    value: Any


def swap(i: int, j: int) -> Change:
    def change(args: list[Any], kwargs: dict[str, Any]) -> None:
        args[i], args[j] = args[j], args[i]

    return change


def swap_named(first: str, second: str) -> Change:
    def change(args: list[Any], kwargs: dict[str, Any]) -> None:
        kwargs[first], kwargs[second] = kwargs[second], kwargs[first]

    return change


def put(**values: Any) -> Change:
    return lambda args, kwargs: kwargs.update(values)


def drop(name: str) -> Change:
    def change(args: list[Any], kwargs: dict[str, Any]) -> None:
        del kwargs[name]

    return change


def edit(name: str, how: Callable[[Any], Any]) -> Change:
    def change(args: list[Any], kwargs: dict[str, Any]) -> None:
        kwargs[name] = how(kwargs[name])

    return change


def edit_at(index: int, how: Callable[[Any], Any]) -> Change:
    def change(args: list[Any], kwargs: dict[str, Any]) -> None:
        args[index] = how(args[index])

    return change


def lengths_of(running_sum: Any) -> Any:
    if isinstance(running_sum, list):
        return [b - a for a, b in zip([0, *running_sum], running_sum, strict=False)]
    return running_sum.diff(prepend=running_sum.new_zeros(1))


def _swap_pools(args: list[Any], kwargs: dict[str, Any]) -> None:
    if "cmp_kv" in kwargs:
        swap_named("ori_kv", "cmp_kv")(args, kwargs)
        swap_named("ori_block_table", "cmp_block_table")(args, kwargs)


SCATTER, FUSED, SPARSE = "npu_scatter_pa_kv_cache", "npu_fused_infer_attention_score_v2", "npu_sparse_flash_attention"
INDEXER, UPDATE, ROTARY = "npu_lightning_indexer", "npu_attention_update", "npu_rotary_mul"
GATHER, MATMUL = "npu_gather_pa_kv_cache", "npu_transpose_batchmatmul"
QUANT_SPARSE = "npu_kv_quant_sparse_flash_attention"
SHARED, MIXED = "cann_ops_transformer.sparse_flash_mla", "cann_ops_transformer.mixed_quant_sparse_flash_mla"
ENTRIES = "cann_ops_transformer.lightning_indexer"
BOTH_SHARED, BOTH_MIXED, BOTH_ENTRIES = ((name, f"{name}_metadata") for name in (SHARED, MIXED, ENTRIES))

MUTATIONS: list[CallMutation | StepMutation] = [
    CallMutation("key and value swapped", "reshape_and_cache", SCATTER, swap(0, 1)),
    CallMutation("key_cache and value_cache swapped", "reshape_and_cache", SCATTER, swap(2, 3)),
    CallMutation("cache_mode dropped: fractal NZ", "reshape_and_cache", SCATTER, drop("cache_mode")),
    CallMutation("cache_mode misspelled", "reshape_and_cache", SCATTER, put(cache_mode="Normal")),
    CallMutation(
        "all tokens although slots are fewer",
        "reshape_and_cache",
        SCATTER,
        edit_at(4, lambda slots: torch.cat((slots, slots[:1] * 0))),
    ),
    CallMutation(
        "padding slots not -1 but 0", "reshape_and_cache", SCATTER, edit_at(4, lambda slots: slots.clamp(min=0))
    ),
    CallMutation("slots as floats", "reshape_and_cache", SCATTER, edit_at(4, lambda slots: slots.float())),
    CallMutation("latent and rotary part swapped", "concat_and_cache_mla", SCATTER, swap(0, 1)),
    CallMutation("cache_mode dropped", "concat_and_cache_mla", SCATTER, drop("cache_mode")),
    CallMutation(
        "cache without its head dim", "concat_and_cache_mla", SCATTER, edit_at(2, lambda cache: cache[:, :, 0])
    ),
    CallMutation(
        "cache passed by position",
        "store_rows",
        "npu_scatter_pa_cache",
        lambda args, kwargs: args.append(kwargs.pop("key_cache")),
    ),
    CallMutation("running sum taken as lengths", "gather_cache", GATHER, drop("is_seq_lens_cumsum")),
    CallMutation("lengths taken as running sum", "gather_cache", GATHER, edit_at(3, lambda sums: sums.diff())),
    CallMutation("table and lengths swapped", "gather_cache", GATHER, swap(2, 3)),
    CallMutation("outputs swapped", "gather_cache", GATHER, swap(4, 5)),
    CallMutation("query lengths not a running sum", "paged_attention", FUSED, edit("actual_seq_qlen", lengths_of)),
    CallMutation(
        "query lengths with a leading 0", "paged_attention", FUSED, edit("actual_seq_qlen", lambda ends: [0, *ends])
    ),
    CallMutation(
        "kv lengths as a running sum",
        "paged_attention",
        FUSED,
        edit("actual_seq_kvlen", lambda lens: [sum(lens[: i + 1]) for i in range(len(lens))]),
    ),
    CallMutation("lengths as a tensor", "paged_attention", FUSED, edit("actual_seq_kvlen", torch.tensor)),
    CallMutation(
        "query and kv lengths swapped", "paged_attention", FUSED, swap_named("actual_seq_qlen", "actual_seq_kvlen")
    ),
    CallMutation("key and value swapped", "paged_attention", FUSED, swap(1, 2)),
    CallMutation("layout BSND for rows [T, N, D]", "paged_attention", FUSED, put(input_layout="BSND")),
    CallMutation("layout dropped", "paged_attention", FUSED, drop("input_layout")),
    CallMutation("scale dropped: 1.0", "paged_attention", FUSED, drop("softmax_scale")),
    CallMutation(
        "scale by its name in v1",
        "paged_attention",
        FUSED,
        lambda args, kwargs: kwargs.update(scale=kwargs.pop("softmax_scale")),
    ),
    CallMutation("kv heads dropped: as many as queries", "paged_attention", FUSED, drop("num_key_value_heads")),
    CallMutation("query heads dropped: 1", "paged_attention", FUSED, drop("num_query_heads")),
    CallMutation("causal mode dropped, mask kept", "paged_attention", FUSED, put(sparse_mode=0)),
    CallMutation("causal mode and mask dropped", "paged_attention", FUSED, put(sparse_mode=0, atten_mask=None)),
    CallMutation(
        "mask of what is seen",
        "paged_attention",
        FUSED,
        edit("atten_mask", lambda mask: None if mask is None else ~mask),
    ),
    CallMutation("block_size dropped", "paged_attention", FUSED, drop("block_size")),
    CallMutation("table as int64", "paged_attention", FUSED, edit("block_table", lambda table: table.long())),
    CallMutation(
        "table of the next sequence", "paged_attention", FUSED, edit("block_table", lambda table: table.flip(0))
    ),
    CallMutation("lse not asked for", "paged_attention", FUSED, put(return_softmax_lse=False)),
    CallMutation("sinks dropped", "paged_attention", FUSED, put(learnable_sink=None)),
    CallMutation("pages with a dim of heads", "paged_attention", FUSED, edit_at(1, lambda pages: pages[:, :, None])),
    CallMutation("ropes dropped", "mla_attention", FUSED, put(query_rope=None, key_rope=None)),
    CallMutation("query_rope and key_rope swapped", "mla_attention", FUSED, swap_named("query_rope", "key_rope")),
    CallMutation("a kv head for each query head", "mla_attention", FUSED, put(num_key_value_heads=0)),
    CallMutation("query lengths not a running sum", "mla_attention", FUSED, edit("actual_seq_qlen", lengths_of)),
    CallMutation("scale of the latent dims", "mla_attention", FUSED, put(softmax_scale=576**-0.5)),
    CallMutation("attention_mode dropped", "sparse_mla_attention", SPARSE, drop("attention_mode")),
    CallMutation("layout_kv dropped", "sparse_mla_attention", SPARSE, drop("layout_kv")),
    CallMutation("layout_kv PA_BNSD", "sparse_mla_attention", SPARSE, put(layout_kv="PA_BNSD")),
    CallMutation(
        "query lengths not a running sum", "sparse_mla_attention", SPARSE, edit("actual_seq_lengths_query", lengths_of)
    ),
    CallMutation(
        "kv lengths as a running sum",
        "sparse_mla_attention",
        SPARSE,
        edit("actual_seq_lengths_kv", lambda lens: lens.cumsum(0).int()),
    ),
    CallMutation(
        "query and kv lengths swapped",
        "sparse_mla_attention",
        SPARSE,
        swap_named("actual_seq_lengths_query", "actual_seq_lengths_kv"),
    ),
    CallMutation(
        "lengths as a list", "sparse_mla_attention", SPARSE, edit("actual_seq_lengths_kv", torch.Tensor.tolist)
    ),
    CallMutation("indices as int64", "sparse_mla_attention", SPARSE, edit_at(3, lambda indices: indices.long())),
    CallMutation(
        "indices without a kv head", "sparse_mla_attention", SPARSE, edit_at(3, lambda indices: indices[:, 0])
    ),
    CallMutation("scale and indices swapped", "sparse_mla_attention", SPARSE, swap(3, 4)),
    CallMutation("block table dropped", "sparse_mla_attention", SPARSE, drop("block_table")),
    CallMutation("rope of the query dropped", "sparse_mla_attention", SPARSE, drop("query_rope")),
    CallMutation("causal where the call is not", "sparse_mla_attention", SPARSE, put(sparse_mode=3)),
    CallMutation("quantization mode 0", "sparse_mla_attention", QUANT_SPARSE, edit_at(5, lambda mode: 0)),
    CallMutation(
        "query without its rotary part", "sparse_mla_attention", QUANT_SPARSE, edit_at(0, lambda q: q[..., :512])
    ),
    CallMutation(
        "records as int8", "sparse_mla_attention", QUANT_SPARSE, edit_at(1, lambda pages: pages.view(torch.int8))
    ),
    StepMutation(
        "indices passed as they come",
        "sparse_mla_attention",
        sparse_mla_attention,
        "packed",
        lambda topk_indices, *_: topk_indices,
    ),
    StepMutation(
        "indices packed but not masked",
        "sparse_mla_attention",
        sparse_mla_attention,
        "packed",
        lambda topk_indices, *_: topk_indices.sort(-1, descending=True).values,
    ),
    CallMutation(
        "query lengths not a running sum", "lightning_indexer", INDEXER, edit("actual_seq_lengths_query", lengths_of)
    ),
    CallMutation("sparse_count dropped: 2048", "lightning_indexer", INDEXER, drop("sparse_count")),
    CallMutation("not causal", "lightning_indexer", INDEXER, put(sparse_mode=0)),
    CallMutation("key and weights swapped", "lightning_indexer", INDEXER, swap(1, 2)),
    CallMutation("layout_key dropped", "lightning_indexer", INDEXER, drop("layout_key")),
    CallMutation("perm_x1 dropped", "absorb_q", MATMUL, drop("perm_x1")),
    CallMutation("perm_y dropped", "absorb_q", MATMUL, drop("perm_y")),
    CallMutation("input and weight swapped", "absorb_q", MATMUL, swap(0, 1)),
    CallMutation("update_type 0: no lse", "merge_attn_states", UPDATE, edit_at(2, lambda kind: 0)),
    CallMutation("lse in base 2", "merge_attn_states", UPDATE, edit_at(0, lambda lses: [lse * 1.4427 for lse in lses])),
    CallMutation("lse and outputs swapped", "merge_attn_states", UPDATE, swap(0, 1)),
    CallMutation(
        "empty parts as -inf",
        "merge_attn_states",
        UPDATE,
        edit_at(0, lambda lses: [lse.masked_fill(lse < -1e38, -torch.inf) for lse in lses]),
    ),
    CallMutation("cos and sin swapped", "apply_rope", ROTARY, swap(1, 2)),
    CallMutation("rotary_mode dropped: half", "apply_rope", ROTARY, lambda args, kwargs: args.__delitem__(3)),
    CallMutation(
        "rotary_mode of the other kind",
        "apply_rope",
        ROTARY,
        edit_at(3, lambda mode: "half" if mode == "interleave" else "interleave"),
    ),
    CallMutation("angles without a dim of heads", "apply_rope", ROTARY, edit_at(1, lambda cos: cos[:, :, 0])),
    CallMutation(
        "angles of half the dims", "apply_rope", ROTARY, edit_at(2, lambda sin: sin[..., : sin.shape[-1] // 2])
    ),
    StepMutation("keys not rotated", "mla_project_kv", rotary, "turn", lambda x, *_: x),
    CallMutation("latent norm with the default eps", "mla_project_kv", "npu_rms_norm", lambda args, kwargs: args.pop()),
    CallMutation("gamma and input swapped", "mla_project_kv", "npu_rms_norm", swap(0, 1)),
    CallMutation("latent and rotary part swapped", "mla_project_kv", SCATTER, swap(0, 1)),
    StepMutation("mask of 2047 rows", "paged_attention", fused_infer, "MASK_SIZE", 2047),
    StepMutation(
        "kv lengths in reverse order",
        "paged_attention",
        host_lengths,
        "Batch",
        lambda ends, lens, table, batch=host_lengths.Batch: batch(ends, lens[::-1], table),
    ),
    CallMutation(
        "a window of one token more", "shared_kv_attention", BOTH_SHARED, edit("ori_win_left", lambda n: n + 1)
    ),
    CallMutation(
        "window off by one in one of two calls", "shared_kv_attention", SHARED, edit("ori_win_left", lambda n: n + 1)
    ),
    CallMutation("no window", "shared_kv_attention", BOTH_SHARED, put(ori_win_left=-1)),
    CallMutation("mask mode of the window dropped", "shared_kv_attention", BOTH_SHARED, drop("ori_mask_mode")),
    CallMutation("mask mode of the entries dropped", "shared_kv_attention", BOTH_SHARED, drop("cmp_mask_mode")),
    CallMutation("layout_kv PA_BNBD", "shared_kv_attention", BOTH_SHARED, put(layout_kv="PA_BNBD")),
    CallMutation("layout_q dropped", "shared_kv_attention", BOTH_SHARED, drop("layout_q")),
    CallMutation("cmp_ratio dropped: 1", "shared_kv_attention", BOTH_SHARED, drop("cmp_ratio")),
    CallMutation(
        "query lengths not a running sum",
        "shared_kv_attention",
        BOTH_SHARED,
        edit("cu_seqlens_q", lambda sums: sums.diff(prepend=sums[:1])),
    ),
    CallMutation(
        "kv lengths as a running sum",
        "shared_kv_attention",
        BOTH_SHARED,
        edit("seqused_ori_kv", lambda lens: lens.cumsum(0).int()),
    ),
    CallMutation(
        "lengths of rows and entries swapped",
        "shared_kv_attention",
        BOTH_SHARED,
        lambda args, kwargs: (
            "seqused_cmp_kv" in kwargs and swap_named("seqused_ori_kv", "seqused_cmp_kv")(args, kwargs)
        ),
    ),
    CallMutation(
        "residuals of 0",
        "shared_kv_attention",
        BOTH_SHARED,
        lambda args, kwargs: (
            "cmp_residual_kv" in kwargs and edit("cmp_residual_kv", lambda left: left * 0)(args, kwargs)
        ),
    ),
    CallMutation(
        "metadata of other lengths",
        "shared_kv_attention",
        BOTH_SHARED[1],
        edit("seqused_ori_kv", lambda lens: lens + 1),
    ),
    CallMutation("metadata of one query each", "shared_kv_attention", BOTH_SHARED[1], put(max_seqlen_q=1)),
    CallMutation("metadata without entries", "shared_kv_attention", BOTH_SHARED[1], put(has_cmp_kv=False)),
    CallMutation("metadata dropped", "shared_kv_attention", SHARED, drop("metadata")),
    CallMutation("two pools swapped", "shared_kv_attention", SHARED, _swap_pools),
    CallMutation(
        "table of one ring", "shared_kv_attention", SHARED, edit("ori_block_table", lambda table: table[:, :1])
    ),
    CallMutation(
        "table from another block on",
        "shared_kv_attention",
        SHARED,
        edit("ori_block_table", lambda table: table.roll(1, 1)),
    ),
    CallMutation("table as int64", "shared_kv_attention", SHARED, edit("ori_block_table", lambda table: table.long())),
    CallMutation("scale dropped: 1.0", "shared_kv_attention", SHARED, drop("softmax_scale")),
    CallMutation("sinks dropped", "shared_kv_attention", SHARED, drop("sinks")),
    CallMutation("sinks of 0", "shared_kv_attention", SHARED, edit("sinks", lambda sinks: sinks * 0)),
    CallMutation("lse not asked for", "shared_kv_attention", SHARED, put(return_softmax_lse=False)),
    CallMutation(
        "pages without a kv head", "shared_kv_attention", SHARED, edit("ori_kv", lambda pages: pages[:, :, 0])
    ),
    CallMutation(
        "query passed by a name", "shared_kv_attention", SHARED, lambda args, kwargs: kwargs.update(query=args.pop())
    ),
    StepMutation(
        "indices passed as they come",
        "shared_kv_attention",
        shared_kv_attention,
        "packed",
        lambda topk_indices, *_: topk_indices,
    ),
    StepMutation("no sinks as sinks of 0", "shared_kv_attention", shared_kv_attention, "NO_SINK", 0.0),
    StepMutation("result not rotated back", "shared_kv_attention", rotary, "turn", lambda x, *_, **__: x),
    CallMutation(
        "the other quantization mode", "shared_kv_attention", BOTH_MIXED, edit("quant_mode", lambda mode: 3 - mode)
    ),
    CallMutation("records as int8", "shared_kv_attention", MIXED, edit("ori_kv", lambda pages: pages.view(torch.int8))),
    CallMutation("rotary dims dropped", "shared_kv_attention", BOTH_MIXED[1], drop("rope_head_dim")),
    CallMutation("cmp_ratio dropped: 1", "lightning_indexer", BOTH_ENTRIES, drop("cmp_ratio")),
    CallMutation("mask_mode dropped: 0", "lightning_indexer", BOTH_ENTRIES, drop("mask_mode")),
    CallMutation("residuals of 0", "lightning_indexer", BOTH_ENTRIES, edit("cmp_residual_k", lambda left: left * 0)),
    CallMutation(
        "one entry too few", "lightning_indexer", BOTH_ENTRIES, edit("seqused_k", lambda lens: (lens - 1).clamp(min=0))
    ),
    CallMutation(
        "query lengths without the leading 0",
        "lightning_indexer",
        BOTH_ENTRIES,
        edit("cu_seqlens_q", lambda sums: sums[1:]),
    ),
    CallMutation("keys of entries and weights swapped", "lightning_indexer", ENTRIES, swap(1, 2)),
    CallMutation("weights in q's dtype", "lightning_indexer", ENTRIES, edit_at(2, lambda w: w.bfloat16())),
    CallMutation("metadata of another k", "lightning_indexer", BOTH_ENTRIES[1], edit_at(3, lambda k: k + 1)),
    CallMutation("block table dropped", "lightning_indexer", ENTRIES, drop("block_table")),
    CallMutation(
        "k passed by torch_npu's name",
        "lightning_indexer",
        ENTRIES,
        lambda args, kwargs: kwargs.update(sparse_count=args.pop()),
    ),
]
