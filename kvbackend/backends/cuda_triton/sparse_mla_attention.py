from ...ops import _math, _pages
from . import launching, records
from .attending import DECODE_QUERIES, latent_tiles, merge, parts

SPLIT_TOKENS = 256


def unsupported(q_nope, q_pe, kv_format, **_):
    yield from launching.floats(q_nope=q_nope)
    yield from records.unsupported(kv_format)
    if q_nope.shape[2] > 512 or q_pe.shape[2] > 64:
        yield (
            f"q_nope and q_pe have {q_nope.shape[2]} and {q_pe.shape[2]} dims; the Triton kernel takes up to 512 and "
            f"64: use the reference"
        )


def run(
    q_nope, q_pe, ckv_cache, kpe_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, topk_indices, softmax_scale,
    causal, kv_format, block_size, return_lse,
):  # fmt: skip
    from ...triton.sparse_mla_attention import sparse_mla_attention

    num_tokens, num_heads, dim = q_nope.shape
    out, lse = _math.nothing_seen(q_nope, dim, return_lse)
    num_seqs, topk = seq_lens.shape[0], topk_indices.shape[1]
    if 0 in (num_tokens, topk, *block_table.shape, ckv_cache.shape[0]) or max_seqlen_q <= 0:
        return out, lse
    keys, rotary = records.operand(ckv_cache, kv_format, block_size)
    rotary = kpe_cache if rotary is None else rotary
    splits = launching.cdiv(topk, SPLIT_TOKENS)
    few = min(DECODE_QUERIES, max_seqlen_q)
    part_out, part_lse = parts(q_nope, num_seqs, splits, few, dim)
    seq_lens, cu_seqlens_q = seq_lens.contiguous(), cu_seqlens_q.contiguous()
    args = (
        q_nope, *q_nope.stride(), q_pe, *q_pe.stride(), *keys.rows, *keys.scales, keys.number,
        rotary, *rotary.stride(), block_table, *block_table.stride(), block_table.shape[1], seq_lens, cu_seqlens_q,
        topk_indices, *topk_indices.stride(), topk, out, lse, part_out, part_lse, num_seqs, num_heads, dim,
        q_pe.shape[2], _pages.block_size_of(ckv_cache, kv_format, block_size), float(softmax_scale), few,
    )  # fmt: skip
    constants = dict(
        **keys.constants, SPLIT_TOKENS=SPLIT_TOKENS, CAUSAL=causal, LSE=return_lse,
        DOT=launching.dot_type(q_nope.dtype), BLOCK_D=launching.dot_block(dim),
        BLOCK_PE=launching.dot_block(q_pe.shape[2]),
    )  # fmt: skip
    short, long = (
        latent_tiles(num_heads, q_nope.dtype, keys.quantized, spare) for spare in (not keys.quantized, False)
    )
    launching.launch(
        sparse_mla_attention, (num_seqs * few, launching.cdiv(num_heads, short.block_m), splits), *args, SPLIT=True,
        **constants, **short.sizes(),
    )  # fmt: skip
    if max_seqlen_q > few:
        launching.launch(
            sparse_mla_attention, (num_tokens, launching.cdiv(num_heads, long.block_m), 1), *args, SPLIT=False,
            **constants, **long.sizes(),
        )  # fmt: skip
    merge(part_out, part_lse, out, lse, seq_lens, cu_seqlens_q, whole=True)
    return out, lse
