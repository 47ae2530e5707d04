"""lightning_indexer is topk_indices of indexer_logits, in less memory; transformers selects the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvbackend
from kvbackend.matrix import DTYPES
from kvbackend.ops import candidate_blocks, indexer_logits, lightning_indexer, topk_indices
from tests.ops.test_indexer_logits import batch, draw

BACKENDS = pytest.mark.parametrize("backend", ["cpu", "reference"])
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def in_two_steps(call: dict[str, Any]) -> torch.Tensor:
    call = dict(call)
    k, order = call.pop("k"), call.pop("order", "position")
    candidates, size = call.pop("candidates", None), call.pop("candidate_block_size", 8)
    scores = indexer_logits(**call)
    if candidates is not None:
        block = torch.arange(scores.shape[1]) // size
        scores[~(candidates[:, None] == block[None, :, None]).any(-1)] = -torch.inf
    return topk_indices(scores, k, order=order)


@BACKENDS
@EVERY_DTYPE
def test_equals_the_two_steps(backend: str, dtype: torch.dtype) -> None:
    """To the bit: the scores of both are the same, ties included."""
    with kvbackend.use(backend):
        for name, call in lightning_indexer.make_samples("cpu", dtype):
            for order in ("score", "position"):
                call["order"] = order
                assert torch.equal(lightning_indexer(**call), in_two_steps(call)), name


@BACKENDS
@EVERY_DTYPE
@pytest.mark.parametrize("visible", [0, 1, 511, 512, 513, 1100])
@pytest.mark.parametrize("ratio", [1, 2])
def test_few_and_many_visible_keys(backend: str, dtype: torch.dtype, visible: int, ratio: int) -> None:
    """Up to k keys all are selected, in order; beyond, the two steps agree. Keys of few values, so there are ties."""
    length = visible * ratio + ratio - 1  # the open group is not seen
    call = batch([1, 1], [length, max(length - ratio, 0)], 64, ratio)
    blocks = max(int(call["block_table"].max()) + 1, 1)
    keys = draw(0, blocks, 64, 16).sign().to(dtype)
    call |= dict(q=draw(1, 2, 32, 16).sign().to(dtype), weights=draw(2, 2, 32).sign().to(dtype), key_cache=keys, k=512)
    with kvbackend.use(backend):
        got = lightning_indexer(**call)
        assert torch.equal(got, in_two_steps(call))
    for row, count in enumerate((visible, max(length - ratio, 0) // ratio)):
        assert (got[row] >= 0).sum() == min(count, 512)
        if count <= 512:
            assert got[row, :count].tolist() == list(range(count))


@BACKENDS
def test_a_query_depends_on_its_own_sequence_alone(backend: str) -> None:
    """Exact ties everywhere: permuted, alone, and again, the same positions in the same order."""
    lengths = [700, 1, 90, 1300, 0, 512]
    call = batch([1] * 6, lengths, 16)
    keys = draw(0, int(call["block_table"].max()) + 1, 16, 8).sign().float()
    q, weights = draw(1, 6, 3, 8).sign().float(), draw(2, 6, 3).sign().float()
    call |= dict(key_cache=keys, k=64, order="score")
    with kvbackend.use(backend):
        first = lightning_indexer(q=q, weights=weights, **call)
        for seed in range(4):
            order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
            permuted = call | dict(block_table=call["block_table"][order], seq_lens=call["seq_lens"][order])
            assert torch.equal(lightning_indexer(q=q[order], weights=weights[order], **permuted), first[order])
        for row in range(6):
            one = slice(row, row + 1)
            alone = dict(
                block_table=call["block_table"][one],
                seq_lens=call["seq_lens"][one],
                cu_seqlens_q=torch.tensor([0, 1]).int(),
            )
            assert torch.equal(lightning_indexer(q=q[one], weights=weights[one], **call | alone), first[one])


@BACKENDS
@pytest.mark.parametrize("start", [0, 1, 62])
def test_chunks_select_what_the_whole_prompt_selects(backend: str, start: int) -> None:
    length, ratio = 200, 2
    whole = batch([length], [length], 16, ratio) | dict(k=20)
    keys = draw(0, int(whole["block_table"].max()) + 1, 16, 8).float()
    q, weights = draw(1, length, 4, 8).float(), draw(2, length, 4).float()
    with kvbackend.use(backend):
        want = lightning_indexer(q=q, weights=weights, key_cache=keys, **whole)
        at = start
        while at < length:
            count = min(37, length - at)
            chunk = dict(
                seq_lens=torch.tensor([at + count]).int(),
                cu_seqlens_q=torch.tensor([0, count]).int(),
                max_seqlen_q=count,
            )
            rows = slice(at, at + count)
            got = lightning_indexer(q=q[rows], weights=weights[rows], key_cache=keys, **whole | chunk)
            assert torch.equal(got, want[rows])
            at += count


@BACKENDS
def test_nan_is_never_selected(backend: str) -> None:
    call = batch([1, 1, 1], [40, 40, 40], 4)
    keys, q, weights = draw(0, 30, 4, 8).float(), draw(1, 3, 2, 8).float(), draw(2, 3, 2).float()
    keys[call["block_table"][0, ::2].long(), 1] = torch.nan  # 5 keys of the first
    keys[call["block_table"][1].long()] = torch.nan  # all of the second
    weights[2, 0] = -torch.nan
    with kvbackend.use(backend):
        got = lightning_indexer(q=q, weights=weights, key_cache=keys, k=40, **call)
    assert got[0].tolist() == [j for j in range(40) if j % 8 != 1] + [-1] * 5
    assert got[1:].eq(-1).all()


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes, in elements."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and not function.is_view:
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("op", [lightning_indexer, candidate_blocks], ids=lambda op: op.name)
def test_memory_of_the_reference_does_not_grow_with_the_context(op: Any) -> None:
    """No tensor of queries x context: four times the context makes the largest no larger."""
    found = []
    for length in (16384, 65536):
        call = batch([64], [length], 64) | dict(q=torch.ones(64, 2, 4), weights=torch.ones(64, 2))
        call |= dict(key_cache=torch.ones(length // 64, 64, 4)) | (
            dict(k=32) if op is lightning_indexer else dict(num_candidates=32)
        )
        with Largest() as largest:
            op.reference(**op.bind((), call))
        found.append(largest.elements)
    assert found[0] == found[1] < 64 * 16384 / 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(k=0), "k is 0; it must be at least 1"),
        (dict(order="any"), "order is 'any'; it must be score or position"),
        (dict(candidate_block_size=0), "candidate_block_size is 0; it must be at least 1"),
        (dict(candidate_block_size=2**31), "candidate_block_size is 2147483648; it must be below"),
        (
            dict(candidates=torch.zeros(5, 8, dtype=torch.int32)),
            "candidates lists more blocks of 8 keys than block_table covers",
        ),
        (dict(candidates=torch.zeros(4, 2, dtype=torch.int32)), "candidates.*has T = 4; it must be 5"),
        (dict(candidates=torch.zeros(5, 2)), "candidates is torch.float32; it must be torch.int32"),
    ],
)
@BACKENDS
def test_wrong_calls(backend: str, change: dict[str, Any], message: str) -> None:
    good = dict(lightning_indexer.make_samples("cpu", torch.float32))["candidates"]
    assert good["block_table"].shape[1] * 4 == 56
    with kvbackend.use(backend):
        lightning_indexer(**good)
        lightning_indexer(**good | dict(candidates=torch.zeros(5, 7, dtype=torch.int32)))
        with pytest.raises(kvbackend.ArgumentError, match=message):
            lightning_indexer(**(good | change))


def test_block_ids_are_checked_under_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBACKEND_CHECK", "values")
    good = dict(lightning_indexer.make_samples("cpu", torch.float32))["candidates"]
    for wrong in (-2, 7):
        candidates = good["candidates"].clone()
        candidates[1, 2] = wrong
        with (
            kvbackend.use("reference"),
            pytest.raises(
                kvbackend.ArgumentError, match=rf"candidates holds block {wrong} at index 5; it must be in \[-1, 7\)"
            ),
        ):
            lightning_indexer(**good | dict(candidates=candidates))


# ------------------------------------------------------------------------------------------------------ transformers


def test_transformers_indexer_selects_the_same_tokens() -> None:
    """DeepseekV32Indexer as it is, and our ops on its own queries, keys and weights."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    v32 = pytest.importorskip(
        "transformers.models.deepseek_v32.modeling_deepseek_v32", reason="this transformers has no deepseek_v32"
    )
    from transformers import DeepseekV32Config

    config = DeepseekV32Config(
        hidden_size=48, q_lora_rank=24, num_attention_heads=4, index_n_heads=32, index_head_dim=16, qk_rope_head_dim=8,
        index_topk=7,
    )  # fmt: skip
    torch.manual_seed(3)
    indexer = v32.DeepseekV32Indexer(config, 0).double()
    length = 40
    hidden, q_resid = draw(0, 1, length, 48), draw(1, 1, length, 24)
    angles = torch.arange(length).double()[:, None] * draw(2, 1, 4).abs()
    cos, sin = (torch.cat((f, f), -1)[None] for f in (angles.cos(), angles.sin()))
    mask = torch.ones(length, length, dtype=torch.bool).tril()[None]
    want = indexer(hidden, q_resid, (cos, sin), mask, torch.arange(length)[None])[0]

    q = indexer.wq_b(q_resid).view(1, length, 32, 16)
    k = indexer.k_norm(indexer.wk(hidden))[:, :, None]
    q_rot, k_rot = v32.apply_rotary_pos_emb(q[..., :8], k[..., :8], cos, sin, unsqueeze_dim=2)
    q, k = torch.cat((q_rot, q[..., 8:]), -1)[0], torch.cat((k_rot, k[..., 8:]), -1)[0, :, 0]
    weights = indexer.weights_proj(hidden)[0] * 32**-0.5 * 16**-0.5
    call = batch([length], [length], 8)
    keys = torch.zeros(5, 8, 16, dtype=torch.float64)
    keys[call["block_table"][0].long()] = k.view(5, 8, 16)
    with torch.no_grad(), kvbackend.use("reference"):
        got = lightning_indexer(q=q, weights=weights, key_cache=keys, k=7, order="score", **call)
    for row in range(length):
        count = min(row + 1, 7)
        assert sorted(got[row, :count].tolist()) == sorted(want[row, :count].tolist())
        assert (got[row, count:] == -1).all()
