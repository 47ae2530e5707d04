import torch

from . import launching, rows


def unsupported(outs, **_):
    yield from launching.floats(outs=outs)


def run(outs, lses, sinks):
    from ...triton.merge_attn_states import merge_attn_states

    parts, num_tokens, heads, dim = outs.shape
    out = torch.empty(outs.shape[1:], dtype=outs.dtype, device=outs.device)
    lse = torch.empty(lses.shape[1:], dtype=torch.float32, device=outs.device)
    tiles = rows.tile(dim, 2048)
    launching.launch(
        merge_attn_states, (launching.cdiv(num_tokens * heads, tiles["ROWS"]),),
        outs, *outs.stride(), lses, *lses.stride(), lses if sinks is None else sinks.contiguous(), out, lse, parts,
        num_tokens * heads, heads, dim, HAS_SINKS=sinks is not None, **tiles,
    )  # fmt: skip
    return out, lse
