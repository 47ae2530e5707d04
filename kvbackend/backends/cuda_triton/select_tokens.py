import torch

from ...ops.select_tokens import need_sizes
from . import launching

BLOCK = 1024  # scores of a tile, at most


def unsupported(scores, **_):
    yield from launching.floats(scores=scores)


def run(scores, seq_lens, budget, num_sinks, num_recent, pooling, kernel, budgets):
    from ...triton.select_tokens import pool_scores, select_tokens

    need_sizes(budget, num_sinks, num_recent, kernel)
    num_seqs, num_sets, width = scores.shape
    out = torch.full((num_seqs, num_sets, budget), -1, dtype=torch.int32, device=scores.device)
    if 0 in (*out.shape, width):
        return out
    sizes, block = (num_sets, width), min(launching.power_of_two(width), BLOCK)
    if pooling != "none" and kernel > 1:
        pooled = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
        launching.launch(
            pool_scores, (num_seqs * num_sets, launching.cdiv(width, block)), scores, *scores.stride(), seq_lens,
            seq_lens.stride(0), pooled, *sizes, num_recent, kernel, AVERAGE=pooling == "avg", BLOCK=block, num_warps=4,
        )  # fmt: skip
        scores = pooled
    launching.launch(
        select_tokens, (num_seqs * num_sets,), scores, *scores.stride(), seq_lens, seq_lens.stride(0),
        seq_lens if budgets is None else budgets, 0 if budgets is None else budgets.stride(0), out, *sizes, budget,
        num_sinks, num_recent, HAS_BUDGETS=budgets is not None, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return out
