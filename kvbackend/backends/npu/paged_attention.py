"""torch_npu.npu_fused_infer_attention_score_v2 in layout TND over pages [nb, bs, Hk * D]."""

from ...facts import fact
from ...ops import registry
from . import fused_infer, host_lengths, takes
from .vendor_ops import FUSED_INFER_ATTENTION as VENDOR

op = registry["paged_attention"]


def unsupported(
    q, key_cache, value_cache, seq_lens, window, softcap, sinks, kv_format, key_positions, rope_cos_sin, key_bias,
    return_lse, **_,
):  # fmt: skip
    yield from VENDOR.missing()
    yield from takes.plain_formats(VENDOR, kv_format)
    yield from VENDOR.refuse("dtype", q.dtype, "q is", "convert it, and allocate the caches alike")
    yield from takes.dense(key_cache=key_cache, value_cache=value_cache)
    num_heads, head_dim = q.shape[1], q.shape[2]
    block_size, kv_heads, value_dim = key_cache.shape[1], key_cache.shape[2], value_cache.shape[3]
    yield from VENDOR.refuse("head_dim", head_dim, "the dims of a head are", "use the reference for this model")
    if value_dim != head_dim and (head_dim, value_dim) != (192, 128):
        yield (
            f"value_cache has {value_dim} dims and q {head_dim}; {VENDOR.name} in layout TND takes equal ones, or 192 "
            f"with values of 128 ({VENDOR.source}): use the reference for this model"
        )
    yield from VENDOR.refuse("num_heads", num_heads, "q's heads are", "split them over devices")
    yield from VENDOR.refuse("group", num_heads // kv_heads, "query heads of one kv head are", "split them")
    yield from VENDOR.refuse("row_width", kv_heads * head_dim, "numbers of a cached token are", "split the kv heads")
    name = "block_size_64_128" if head_dim in (64, 128) else "block_size"
    yield from VENDOR.refuse(name, block_size, "tokens of a block are", "allocate blocks of 128")
    if fact("seq_lens.shape[0] > 4096", seq_lens=seq_lens):
        yield from VENDOR.refuse("batch", seq_lens.shape[0], "sequences are", "split the batch")
    if window > 0:
        yield (
            f"window is {window}; where the band of sparse_mode 4 is anchored for fewer queries than keys is not "
            f"documented ({VENDOR.source}): pass -1, or use the reference"
        )
    if softcap > 0:
        yield f"softcap is {softcap}; {VENDOR.name} has none ({VENDOR.source}): pass 0.0, or use the reference"
    yield from takes.without(VENDOR, key_positions=key_positions, rope_cos_sin=rope_cos_sin, key_bias=key_bias)
    if sinks is not None:
        yield from VENDOR.refuse("sink_dtype", sinks.dtype, "sinks are", "convert them once")
        if value_dim > 128:
            yield f"sinks are given with values of {value_dim} dims; learnable_sink takes up to 128: leave them out"
        if return_lse:
            yield (
                "return_lse is True with sinks; whether Ascend's lse counts the sink is not documented "
                f"({VENDOR.source}): ask for one of the two"
            )


def run(
    q, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, window,
    softcap, sinks, k_scale, v_scale, k_scale_cache, v_scale_cache, kv_format, key_positions, rope_cos_sin,
    rope_interleaved, key_bias, return_lse,
):  # fmt: skip
    num_blocks, block_size, kv_heads, _ = key_cache.shape
    batch = None
    if 0 not in (q.shape[0], *block_table.shape, num_blocks) and max_seqlen_q > 0:
        batch = host_lengths.read(op.name, block_table, seq_lens, cu_seqlens_q, block_size)
    if batch is None or batch.num_tokens == 0:  # nothing to attend to, or a sequence with evicted blocks
        return op.reference(
            q, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, softmax_scale, causal,
            sinks=sinks, return_lse=return_lse,
        )  # fmt: skip
    return fused_infer.attend(
        q, key_cache.flatten(2), value_cache.flatten(2), batch, kv_heads=kv_heads, block_size=block_size,
        softmax_scale=softmax_scale, causal=causal, return_lse=return_lse, learnable_sink=sinks,
    )  # fmt: skip
