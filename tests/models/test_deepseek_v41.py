"""DeepseekV41Attention: a plain reading of its formulas, chunks, two-level selection, batches, rollback, records."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn.functional import linear
from torch.testing import assert_close

from kvbackend import ops, use
from kvbackend.cache import SharedKvCache, deepseek_v41_layers
from kvbackend.models import DeepseekV41Attention, Role, Selection, SharedKvConfig, roles
from kvbackend.rope import Yarn, cos_sin_table, inv_freq

WINDOW, TOKENS = 8, 53
RATIOS, KV_SOURCES, INDEX_SOURCES, CANDIDATE_SOURCE = [0, 2, 2, 2, 1, 1, 1, 1], [1, 3, 4], [1, 3, 4, 6, 7], 4
ROLES = roles(RATIOS, KV_SOURCES, INDEX_SOURCES, CANDIDATE_SOURCE)
CANDIDATES = dict(candidate_topk_blocks=3, candidate_block_size=4)
YARN = Yarn(4.0, 32, mscale_all_dim=1.0)  # cosines are not scaled
CUTS = ([1], [30], [7, 12, 21], [3, 4, 5, 6, 40], list(range(1, TOKENS)))
RECORDS = dict(window_format="v41_fp8_528", kv_format="v41_fp4_288", index_format="index_mxfp4_68")
EXACT = dict(rtol=1e-12, atol=1e-12)


def config_of(head_dim: int = 16, index_dim: int = 8) -> SharedKvConfig:
    return SharedKvConfig(
        hidden_size=24, num_heads=4, head_dim=head_dim, rope_dim=4, q_lora_rank=12, o_groups=2, o_lora_rank=8,
        index_heads=32, index_dim=index_dim, index_topk=5, rms_norm_eps=1e-20,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _reference():
    with use("reference"), torch.no_grad():
        yield


def hidden_of(tokens: int = TOKENS, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, 24, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Model:
    """All layers with a residual stream, and their cache, all NaN."""

    def __init__(
        self, config: SharedKvConfig | None = None, limits: dict[str, int] = CANDIDATES, **options: Any
    ) -> None:
        self.config = config or config_of()
        generator = torch.Generator().manual_seed(3)
        self.modules = [DeepseekV41Attention(self.config, role, **limits).double() for role in ROLES]
        for module in self.modules:
            for name, parameter in module.named_parameters():
                std = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.3
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * std
                parameter.copy_(noise + ("norm" in name))
        sizes = dict(num_blocks=32, block_size=8, num_sequences=4, dtype=torch.float64, window=WINDOW)
        layers = deepseek_v41_layers(RATIOS, KV_SOURCES, self.config.index_dim)
        self.cache = SharedKvCache(layers, head_dim=self.config.head_dim, **{**sizes, **options})
        for pages in self.cache.layers:
            for tensor in pages.by_block + pages.by_sequence:
                tensor.view(torch.uint8).fill_(255)  # NaN in every float dtype
        rope, dtype = self.config.rope_dim, torch.float64
        self.tables = cos_sin_table(1100, rope, 1e4, dtype=dtype), cos_sin_table(1100, rope, 1.6e5, YARN, dtype=dtype)
        self.selections: list[torch.Tensor] = []

    def step(self, *parts: tuple[int, torch.Tensor]) -> torch.Tensor:
        seqs, counts = [seq for seq, _ in parts], [len(x) for _, x in parts]
        self.cache.append_batch(seqs, counts)
        batch, selection, x = self.cache.batch(seqs, counts), Selection(), torch.cat([x for _, x in parts])
        for module, pages in zip(self.modules, self.cache.layers, strict=True):
            x = x + module(x, self.tables[module.role.compress_ratio > 0], pages, batch, selection)
        self.selections.append(selection.topk_indices)
        return x

    def chunks(self, hidden: torch.Tensor, cuts: list[int]) -> torch.Tensor:
        seq = self.cache.new_sequence()
        return torch.cat([self.step((seq, hidden[a:b])) for a, b in pairwise([0, *cuts, len(hidden)])])

    def pool(self) -> list[torch.Tensor]:
        return [tensor.view(torch.uint8) for pages in self.cache.layers for tensor in pages.by_block]


# ------------------------------------------------------------------------------------------- a plain reading of it


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt() * weight


def turn(x: torch.Tensor, positions: list[int], frequencies: torch.Tensor, back: bool = False) -> torch.Tensor:
    """The last dims of x [T, ..., D] as complex numbers, times exp(i * angle)."""
    width = 2 * len(frequencies)
    angles = torch.tensor(positions, dtype=torch.float64)[:, None] * frequencies * (-1 if back else 1)
    pairs = torch.view_as_complex(x[..., -width:].unflatten(-1, (-1, 2)).contiguous())
    shape = [len(positions), *[1] * (x.dim() - 2), -1]
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles).view(shape)).flatten(-2)
    return torch.cat((x[..., :-width], turned), -1)


def best(scores: torch.Tensor, count: int) -> list[int]:
    """Positions of the highest scores, of equal ones the first."""
    ranked = sorted((-float(score), index) for index, score in enumerate(scores) if score > -torch.inf)
    return sorted(index for _, index in ranked[:count])


def plainly(model: Model, x: torch.Tensor) -> torch.Tensor:
    """The whole text at once, one query after the other."""
    config, rows, keys, chosen, kept = model.config, None, None, None, None
    tokens, scale = list(range(len(x))), config.head_dim**-0.5
    for layer, module in enumerate(model.modules):
        weights, ratio = dict(module.named_parameters()), RATIOS[layer]
        f = inv_freq(config.rope_dim, 1.6e5, YARN) if ratio else inv_freq(config.rope_dim, 1e4)
        latent_q = norm(linear(x, weights["wq_a.weight"]), weights["q_norm.weight"])
        q = turn(linear(latent_q, weights["wq_b.weight"]).unflatten(-1, (4, -1)), tokens, f)
        window = turn(norm(linear(x, weights["wkv.weight"]), weights["kv_norm.weight"]), tokens, f)
        if layer in KV_SOURCES:
            latents = linear(x, weights["compressor.wkv.weight"])
            if ratio == 2:
                pairs = latents[: len(x) // 2 * 2].unflatten(0, (-1, 2))
                gates = linear(x, weights["compressor.wgate.weight"])[: len(x) // 2 * 2].unflatten(0, (-1, 2))
                latents = (gates.softmax(1) * pairs).sum(1)
            latents = norm(latents, weights["compressor.norm.weight"])
            first = [ratio * i for i in range(len(latents))]
            rows = turn(latents, first, f)
            keys = turn(norm(linear(latents, weights["indexer.wk.weight"]), weights["indexer.k_norm.weight"]), first, f)
        if layer in INDEX_SOURCES:
            index_q = turn(linear(latent_q, weights["indexer.wq_b.weight"]).unflatten(-1, (32, -1)), tokens, f)
            head_weights = linear(x, weights["indexer.weights_proj.weight"]) / (32 * config.index_dim) ** 0.5
            scores = ((index_q @ keys.T).relu() * head_weights[..., None]).sum(1)
            for t in tokens:
                scores[t, (t + 1) // ratio :] = -torch.inf
            if layer == CANDIDATE_SOURCE:
                size, count = model.modules[0].candidate_block_size, model.modules[0].candidate_topk_blocks
                kept = []
                for t in tokens:
                    blocks = torch.stack([block.max() for block in scores[t].split(size)])
                    blocks[t // size] = torch.inf  # the newest
                    kept.append({p for block in best(blocks, count) for p in range(block * size, block * size + size)})
            elif layer > CANDIDATE_SOURCE:
                for t in tokens:
                    scores[t, [p for p in range(len(keys)) if p not in kept[t]]] = -torch.inf
            chosen = [best(scores[t], config.index_topk) for t in tokens]
        out = torch.empty_like(q)
        for t in tokens:
            seen = [window[max(t - WINDOW + 1, 0) : t + 1]] + ([rows[chosen[t]]] if ratio else [])
            seen = torch.cat(seen)
            logits = torch.cat((q[t] @ seen.T * scale, weights["attn_sink"][:, None]), -1)
            out[t] = logits.softmax(-1)[:, :-1] @ seen
        out = turn(out, tokens, f, back=True).reshape(len(x), 2, -1)
        grouped = torch.einsum("tgi,gri->tgr", out, weights["wo_a.weight"].unflatten(0, (2, -1))).flatten(1)
        x = x + linear(grouped, weights["wo_b.weight"])
    return x


@pytest.mark.parametrize("cuts", [[], [17, 18, 40]])
def test_equals_a_plain_reading_of_the_formulas(cuts):
    model = Model()
    assert_close(model.chunks(hidden_of(), cuts), plainly(Model(), hidden_of()), rtol=1e-10, atol=1e-10)


def test_roles_of_the_published_model():
    found = roles([0, 0] + [2] * 18 + [1] * 20, [2, 8, 14, 20], [2, 8, 14, 20, 24, 28, 32, 36], 20)
    assert found[0] == Role()
    assert found[8] == Role(2, owns_rows=True, selects=True)
    assert found[9] == Role(2)
    assert found[20] == Role(1, owns_rows=True, selects=True, makes_candidates=True)
    assert found[24] == Role(1, selects=True, limited=True)
    assert sum(role.owns_rows for role in found) == 4
    assert sum(role.selects for role in found) == 8


# ------------------------------------------------------------------------------------------------------------ chunks


def test_chunks_change_nothing():
    """Also one token at a time, where a source with an open group scores its own keys as in prefill."""
    model = Model()
    whole = model.chunks(hidden_of(), [])
    for cuts in CUTS:
        other = Model()
        assert_close(other.chunks(hidden_of(), cuts), whole, **EXACT)
        assert torch.equal(torch.cat(other.selections), model.selections[0])


@pytest.mark.parametrize(
    ("tokens", "heads"),
    [(1, 16), (2, 32), (63, 64), (64, 16), (65, 32), (127, 64), (128, 16), (129, 32), (1025, 16), (1026, 16)],
)
def test_lengths_and_heads_that_found_faults_elsewhere(tokens, heads):
    """In one piece, and cut after an odd number of tokens, short ones after an even one too."""
    config, hidden = replace(config_of(), num_heads=heads), hidden_of(tokens)
    whole = Model(config, num_blocks=140).chunks(hidden, [])
    assert whole.isfinite().all()
    for cut in {tokens // 2 | 1, tokens // 2 if tokens < 1000 else 0} - {0, tokens}:
        assert_close(Model(config, num_blocks=140).chunks(hidden, [cut]), whole, **EXACT)


def test_chunks_of_quantized_rows_change_no_bit_of_them():
    options = dict(config=config_of(512, 128), **RECORDS)
    model = Model(**options)
    whole, plain = model.chunks(hidden_of(), []), Model(options["config"]).chunks(hidden_of(), [])
    for cuts in CUTS:
        other = Model(**options)
        assert_close(other.chunks(hidden_of(), cuts), whole, rtol=1e-10, atol=1e-10)
        assert all(torch.equal(a, b) for a, b in zip(other.pool(), model.pool(), strict=True))
        assert torch.equal(torch.cat(other.selections), model.selections[0])
    assert (whole - plain).abs().max() > 1e-2


def test_a_suffix_changes_no_prefix():
    before = Model().chunks(hidden_of(), [])
    after = Model().chunks(torch.cat((hidden_of()[:37], hidden_of(16, seed=9))), [])
    assert torch.equal(before[:37], after[:37])
    assert (before[37:] - after[37:]).abs().amax(-1).min() > 1e-6


def test_sequences_of_a_batch_are_alone():
    texts = [hidden_of(seed=i) for i in range(3)]
    alone = [Model().chunks(text, []) for text in texts]
    model, done = Model(), [0, 0, 0]
    seqs = [model.cache.new_sequence() for _ in texts]
    for counts in ((11, 0, 3), (0, 0, 0), (1, 20, 1), (5, 1, 1), (1, 1, 12), (1, 9, 1)):
        order = sorted(range(3), key=lambda i: (counts[i], i))
        out = model.step(*((seqs[i], texts[i][done[i] : done[i] + counts[i]]) for i in order))
        for i, part in zip(order, out.split([counts[i] for i in order]), strict=True):
            assert_close(part, alone[i][done[i] : done[i] + counts[i]], **EXACT)
            done[i] += counts[i]


@pytest.mark.parametrize("drafts", [0, 1, 2, 5, 31])
def test_rejected_tokens_leave_no_trace(drafts):
    hidden, model = hidden_of(), Model(rewind=drafts)
    whole = Model().chunks(hidden, [])
    seq, done, generator = model.cache.new_sequence(), 16, torch.Generator().manual_seed(0)
    model.step((seq, hidden[:done]))
    while done < TOKENS - drafts - 1:
        accepted = int(torch.randint(0, drafts + 1, (1,), generator=generator))
        guess = torch.cat((hidden[done : done + 1 + accepted], hidden_of(drafts - accepted, seed=done)))
        assert_close(model.step((seq, guess))[: 1 + accepted], whole[done : done + 1 + accepted], **EXACT)
        done += 1 + accepted
        model.cache.truncate(seq, done)
    assert_close(model.step((seq, hidden[done:])), whole[done:], **EXACT)


@pytest.mark.parametrize("length", [31, 32, 127, 128, 129])
def test_a_prefix_may_be_continued_from_its_blocks(length):
    """At an even length ratio 2 leaves nothing open; at an odd one the fork's copy of the open groups counts."""
    options = dict(num_blocks=64)
    hidden, model = hidden_of(length + 9), Model(**options)
    parent = model.cache.new_sequence()
    model.step((parent, hidden[:length]))
    child, other = model.cache.fork(parent), torch.cat((hidden[:length], hidden_of(9, seed=4)))
    model.step((parent, hidden[length:]))
    assert_close(model.step((child, other[length:])), Model(**options).chunks(other, [])[length:], **EXACT)


# ------------------------------------------------------------------------------------------------- two-level selection


def test_two_levels_are_one_while_all_blocks_are_kept():
    """Candidates for 12 positions: token 12 is the first that sees more."""
    one = Model(limits=dict(candidate_topk_blocks=2048, candidate_block_size=4)).chunks(hidden_of(), [])
    two = Model().chunks(hidden_of(), [])
    assert torch.equal(one[:12], two[:12])
    assert not torch.equal(one[12:], two[12:])


@pytest.mark.parametrize(("visible", "kept"), [(16384, 2048), (16385, 2048)])
def test_two_levels_are_one_up_to_16384_positions(visible, kept):
    """The published sizes: 2048 blocks of 8. One more position, and a block is dropped for every query."""
    generator = torch.Generator().manual_seed(0)
    blocks = -(-visible // 128)
    call = dict(
        key_cache=torch.randn(blocks, 128, 8, generator=generator),
        block_table=torch.arange(blocks, dtype=torch.int32)[None],
        seq_lens=torch.tensor([visible], dtype=torch.int32), cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        max_seqlen_q=1,
    )  # fmt: skip
    q, weights = torch.randn(1, 32, 8, generator=generator), torch.randn(1, 32, generator=generator)
    candidates = ops.candidate_blocks(q, weights, num_candidates=2048, **call)
    assert (candidates >= 0).sum() == kept
    other = torch.randn(1, 32, 8, generator=generator)  # a later layer's query
    free = ops.lightning_indexer(other, weights, k=512, **call)
    limited = ops.lightning_indexer(other, weights, k=512, candidates=candidates, **call)
    dropped = set(range(-(-visible // 8))) - set(candidates[0].tolist())
    assert len(dropped) == (visible > 16384)
    if visible == 16384:
        assert torch.equal(free, limited)
    assert not {index // 8 for index in limited[0].tolist()} & dropped
