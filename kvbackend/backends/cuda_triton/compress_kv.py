import torch

from . import launching


def unsupported(kv, norm_weight, position_bias, cos_sin, **_):
    yield from launching.floats(kv=kv, norm_weight=norm_weight, position_bias=position_bias, cos_sin=cos_sin)
    if norm_weight.shape[0] > 1024:
        yield f"norm_weight has {norm_weight.shape[0]} dims; the Triton kernel takes up to 1024: use the reference"
    yield from launching.even_pairs(norm_weight.shape[0], cos_sin)


def run(
    kv, norm_weight, seq_lens, cu_seqlens_q, compress_ratio, eps, overlap, gate, position_bias, state, state_slots,
    cos_sin, block_table, block_size,
):  # fmt: skip
    from ...triton.compress_kv import compress_rows, keep_tokens

    num_tokens, num_seqs, dim = kv.shape[0], seq_lens.shape[0], norm_weight.shape[0]
    num_rows = min(num_tokens, num_tokens // compress_ratio + num_seqs)
    rows = kv.new_empty(num_rows, dim)
    positions = kv.new_empty(num_rows, dtype=torch.int64)
    slots = kv.new_empty(0 if block_table is None else num_rows, dtype=torch.int64)
    seq_lens, cu_seqlens_q = seq_lens.contiguous(), cu_seqlens_q.contiguous()
    tokens = (
        kv, *kv.stride(), kv if gate is None else gate, *((0, 0) if gate is None else gate.stride()),
        kv if position_bias is None else position_bias, *((0, 0) if position_bias is None else position_bias.stride()),
    )  # fmt: skip
    kept = (
        kv if state is None else state, *((0, 0, 0) if state is None else state.stride()),
        1 if state is None else state.shape[1], seq_lens if state is None else state_slots,
        0 if state is None else state_slots.stride(0),
    )  # fmt: skip
    launching.launch(
        compress_rows, (num_rows,), *tokens, *kept, norm_weight, norm_weight.stride(0), seq_lens, cu_seqlens_q,
        kv if cos_sin is None else cos_sin, *((0, 0) if cos_sin is None else cos_sin.stride()),
        seq_lens if block_table is None else block_table, *((0, 0) if block_table is None else block_table.stride()),
        0 if block_table is None else block_table.shape[1], block_size, rows, positions, slots, num_seqs, dim,
        float(eps), 0 if cos_sin is None else cos_sin.shape[1] // 2, RATIO=compress_ratio, STAGES=2 if overlap else 1,
        GATED=gate is not None, BIAS=position_bias is not None, STATE=state is not None, TURNS=cos_sin is not None,
        SLOTS=block_table is not None, BLOCK_B=min(launching.power_of_two(num_seqs), 1024),
        BLOCK_P=min(launching.power_of_two(compress_ratio), 8), BLOCK_D=launching.power_of_two(dim), num_warps=8,
    )  # fmt: skip
    if state is not None and num_seqs:
        width = kv.shape[1]
        block = min(launching.power_of_two(width), 1024)
        launching.launch(
            keep_tokens, (num_tokens, launching.cdiv(width, block)), *tokens, *kept, seq_lens, cu_seqlens_q, num_seqs,
            width, RATIO=compress_ratio, BIAS=position_bias is not None, BLOCK_W=block, num_warps=4,
        )  # fmt: skip
    return rows, positions, slots
