"""The mathematics of sparse_attention: one query and head at a time, and the dense op where all is chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvbackend
from kvbackend.ops import paged_attention, sparse_attention

from .test_page_logits import CASES, batch, draw, middle, paged

KV_HEADS, GROUP, DIM = 2, 3, 8


def made(count: int = 20, length: int = 45, block_size: int = 7) -> tuple[dict[str, Any], Tensor, Tensor]:
    keys, values = draw(0, length, KV_HEADS, DIM), draw(1, length, KV_HEADS, DIM + 2)
    call = batch([count], [length], -(-length // block_size)) | dict(softmax_scale=0.3, return_lse=True)
    table = call["block_table"][0]
    call |= dict(q=draw(2, count, KV_HEADS * GROUP, DIM), key_cache=paged(keys, table, block_size))
    return call | dict(value_cache=paged(values, table, block_size)), keys, values


def reference(op: Any, **arguments: Any) -> tuple[Tensor, Tensor]:
    return op.reference(**op.bind((), arguments))


@pytest.mark.parametrize(("page_size", "sinks", "recent"), CASES)
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_attends_to_what_is_chosen_and_to_both_ends(page_size: int, sinks: int, recent: int, softcap: float) -> None:
    call, keys, values = made()
    chosen = torch.randint(-1, 50, (20, KV_HEADS, 9), generator=torch.Generator().manual_seed(3))
    rule = dict(page_size=page_size, num_sinks=sinks, num_recent=recent)
    out, lse = reference(sparse_attention, **call, topk_indices=chosen, **rule, softcap=softcap)
    for i in range(20):
        position = 25 + i
        inside = middle(position, page_size, sinks, recent)
        forced = [token for token in range(position + 1) if token not in inside]
        for head in range(KV_HEADS):
            seen = forced + [token for token in chosen[i, head].tolist() if token in inside]  # twice counts twice
            for one in range(head * GROUP, (head + 1) * GROUP):
                logits = (keys[seen, head] @ call["q"][i, one]).numpy() * 0.3
                logits = softcap * np.tanh(logits / softcap) if softcap else logits
                weights = np.exp(logits)
                np.testing.assert_allclose(lse[i, one], np.log(weights.sum()) if seen else -np.inf, rtol=1e-6)
                want = weights @ values[seen, head].numpy() / weights.sum() if seen else np.zeros(DIM + 2)
                np.testing.assert_allclose(out[i, one], want, rtol=1e-9, atol=1e-12)


def test_all_chosen_is_dense_attention() -> None:
    call, _, _ = made()
    every = torch.arange(45).flip(0).expand(20, KV_HEADS, -1)
    sinks = draw(5, KV_HEADS * GROUP)
    for rule in (dict(page_size=1), dict(page_size=4, num_sinks=3, num_recent=9)):
        got = reference(sparse_attention, **call, topk_indices=every, **rule, sinks=sinks)
        torch.testing.assert_close(got, reference(paged_attention, **call, sinks=sinks))


def test_nan_of_a_token_that_is_not_attended_to_stays_there() -> None:
    call, _, _ = made(count=1)
    chosen = torch.tensor([3, 17, 30]).expand(1, KV_HEADS, -1)
    call |= dict(topk_indices=chosen, page_size=4, num_sinks=2, num_recent=3)
    clean = reference(sparse_attention, **call)
    for side in ("key_cache", "value_cache"):
        for token in set(range(45)) - {0, 1, 3, 17, 30, *range(40, 45)}:
            call[side][call["block_table"][0, token // 7], token % 7] = torch.nan
    torch.testing.assert_close(reference(sparse_attention, **call), clean, rtol=0, atol=0)
    call["value_cache"][call["block_table"][0, 2], 3, 1] = torch.nan  # token 17 of the second kv head
    out, _ = reference(sparse_attention, **call)
    assert out[:, GROUP:].isnan().all()
    assert not out[:, :GROUP].isnan().any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(page_size=0), "page_size is 0; it must be at least 1"),
        (dict(num_recent=-1), "num_recent is -1; it must be at least 0"),
        (dict(softcap=-1.0), "softcap is -1.0"),
        (dict(topk_indices=torch.zeros(7, 3, 4).int()), "topk_indices.*has Hk = 3; it must be 2"),
        (dict(q=torch.zeros(7, 5, 16)), "q has 5 heads and key_cache 2"),
        (dict(value_cache=torch.zeros(14, 4, 2, 16).half()), "value_cache is torch.float16 but q is torch.float32"),
        (dict(kv_format="int8"), "key_cache is torch.float32; kv_format 'int8' stores torch.int8"),
    ],
)
def test_wrong_calls(change: dict[str, Any], message: str) -> None:
    good = dict(sparse_attention.make_samples("cpu", torch.float32))["softcap"]
    with kvbackend.use("reference"):
        sparse_attention(**good)
        with pytest.raises(kvbackend.ArgumentError, match=message):
            sparse_attention(**(good | change))
