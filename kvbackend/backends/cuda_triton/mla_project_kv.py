"""torch's matrix product, which is cuBLAS and rounds to hidden's dtype, then one kernel for all the rest."""

from . import launching


def unsupported(hidden, cos_sin, **_):
    yield from launching.floats(hidden=hidden, cos_sin=cos_sin)


def run(
    hidden, w_kva, norm_weight, cos_sin, positions, eps, interleaved, ckv_cache, kpe_cache, slot_mapping
):  # fmt: skip
    from ...triton.mla_project_kv import norm_and_rope

    num_tokens, rank, rope = hidden.shape[0], norm_weight.shape[0], cos_sin.shape[1]
    ckv, kpe = hidden.new_empty(num_tokens, rank), hidden.new_empty(num_tokens, rope)
    cached = ckv_cache is not None and 0 not in ckv_cache.shape[:2]
    caches = (
        (slot_mapping, slot_mapping.stride(0), ckv_cache, *ckv_cache.stride(), kpe_cache, *kpe_cache.stride())
        if cached
        else (positions, 0, ckv, 0, 0, 0, kpe, 0, 0, 0)
    )
    projected = hidden @ w_kva.T
    launching.launch(
        norm_and_rope, (num_tokens,), projected, projected.stride(0), norm_weight, norm_weight.stride(0), positions,
        positions.stride(0), cos_sin, *cos_sin.stride(), ckv, kpe, *caches, ckv_cache.shape[1] if cached else 1,
        slot_mapping.shape[0] if cached else 0, rank, rope // 2, float(eps), INTERLEAVED=interleaved, CACHED=cached,
        BLOCK_D=launching.power_of_two(rank), BLOCK_PE=launching.power_of_two(rope), num_warps=4,
    )  # fmt: skip
    return ckv, kpe
