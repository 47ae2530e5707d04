import torch

from . import launching, rows


def unsupported(x, **_):
    yield from launching.floats(x=x)


def run(x, positions, cos_sin, interleaved, trailing, inverse):
    from ...triton.apply_rope import apply_rope

    num_tokens, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rotary_dim, tiles = cos_sin.shape[1], rows.tile(dim)
    launching.launch(
        apply_rope, (launching.cdiv(num_tokens * heads, tiles["ROWS"]),), x, *x.stride(), positions,
        positions.stride(0), cos_sin, *cos_sin.stride(), out, num_tokens * heads, heads, dim,
        dim - rotary_dim if trailing else 0, rotary_dim // 2, INTERLEAVED=interleaved, INVERSE=inverse, **tiles,
    )  # fmt: skip
    return out
