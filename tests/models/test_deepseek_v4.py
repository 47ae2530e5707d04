"""DeepseekV4Attention: transformers' own layer, chunks, batches, forks, rollback, and records."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from kvbackend import use
from kvbackend.cache import SharedKvCache, SharedKvLayer
from kvbackend.models import DeepseekV4Attention, SharedKvConfig
from kvbackend.rope import Yarn, cos_sin_table

WINDOW, TOKENS = 8, 61
# 32 index heads: with few, scores that are exactly 0 are common, and torch.topk orders ties by chance
CONFIG = SharedKvConfig(
    hidden_size=24, num_heads=4, head_dim=16, rope_dim=4, q_lora_rank=12, o_groups=2, o_lora_rank=8, index_heads=32,
    index_dim=8, index_topk=3,
)  # fmt: skip
LAYERS = {"window": SharedKvLayer(), "CSA": SharedKvLayer(4, True, 8, True), "HCA": SharedKvLayer(8)}
EVERY_KIND = pytest.mark.parametrize("kind", LAYERS)
YARN = Yarn(4.0, 32, mscale_all_dim=1.0)  # cosines are not scaled
CUTS = ([1], [30], [7, 12, 21], [3, 4, 5, 6, 40], list(range(1, TOKENS)))


@pytest.fixture(autouse=True)
def _reference():
    with use("reference"), torch.no_grad():
        yield


def random_(module: torch.nn.Module) -> None:
    """Numbers of ordinary size in every parameter, so that none could be lost unnoticed."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in module.named_parameters():
        std = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 and "bias" not in name else 0.3
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * std
        parameter.copy_(noise + ("norm" in name))


def table(kind: str, dtype: torch.dtype) -> torch.Tensor:
    base, yarn = (1e4, None) if kind == "window" else (1.6e5, YARN)
    return cos_sin_table(128, CONFIG.rope_dim, base, yarn, dtype=dtype)


def hidden_of(tokens: int = TOKENS, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, CONFIG.hidden_size, generator=generator, dtype=torch.float64).to(dtype)


class Run:
    """One layer and its cache, all NaN."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.float64, **options: Any) -> None:
        config = options.pop("config", CONFIG)
        layer = options.pop("layer", LAYERS[kind])
        self.module = DeepseekV4Attention(config, layer).to(dtype)
        random_(self.module)
        sizes = dict(num_blocks=32, block_size=8, num_sequences=4, dtype=dtype, head_dim=config.head_dim, window=WINDOW)
        self.cache = SharedKvCache([layer], **{**sizes, **options})
        (self.pages,) = self.cache.layers
        for tensor in self.pages.by_block + self.pages.by_sequence:
            tensor.view(torch.uint8).fill_(255)  # NaN in every float dtype
        self.cos_sin = table(kind, dtype)

    def step(self, *parts: tuple[int, torch.Tensor]) -> torch.Tensor:
        """New tokens of some sequences."""
        seqs, counts = [seq for seq, _ in parts], [len(x) for _, x in parts]
        self.cache.append_batch(seqs, counts)
        batch = self.cache.batch(seqs, counts)
        return self.module(torch.cat([x for _, x in parts]), self.cos_sin, self.pages, batch)

    def chunks(self, hidden: torch.Tensor, cuts: list[int]) -> torch.Tensor:
        seq = self.cache.new_sequence()
        ends = [0, *cuts, len(hidden)]
        return torch.cat([self.step((seq, hidden[start:end])) for start, end in pairwise(ends)])


@EVERY_KIND
def test_equals_transformers(kind):
    """In float32, as a whole and in chunks: the layer's own code with the same weights, without a cache."""
    pytest.importorskip("transformers", reason="transformers is absent: no outside implementation")
    modeling = pytest.importorskip(
        "transformers.models.deepseek_v4.modeling_deepseek_v4", reason="this transformers has no deepseek_v4"
    )
    from transformers.models.deepseek_v4 import DeepseekV4Config

    names = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    index = list(LAYERS).index(kind)
    config = DeepseekV4Config(
        hidden_size=24, num_hidden_layers=3, num_attention_heads=4, head_dim=16, q_lora_rank=12, o_groups=2,
        o_lora_rank=8, index_n_heads=32, index_head_dim=8, index_topk=3, sliding_window=WINDOW, layer_types=names,
        compress_rates={names[1]: 4, names[2]: 8}, partial_rotary_factor=0.25, attn_implementation="eager",
        rope_parameters=dict(
            rope_type="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=32, beta_slow=1
        ),
    )  # fmt: skip
    theirs = modeling.DeepseekV4Attention(config, index)
    random_(theirs)
    hidden, positions = hidden_of(dtype=torch.float32), torch.arange(TOKENS)[None]
    rotary = modeling.DeepseekV4RotaryEmbedding(config)
    embeddings = {name: rotary(hidden[None], positions, layer_type=name) for name in ("main", "compress")}
    age = positions.mT - positions
    mask = torch.zeros(1, 1, TOKENS, TOKENS).masked_fill((age < 0) | (age >= WINDOW), -torch.inf)
    want, _ = theirs(hidden[None], embeddings, positions, mask)
    for cuts in ([], [7, 12, 21], list(range(1, TOKENS))):
        ours = Run(kind, torch.float32)
        ours.module.load_state_dict(theirs.state_dict())
        assert_close(ours.chunks(hidden, cuts), want[0], rtol=1e-5, atol=1e-5)


@EVERY_KIND
def test_chunks_change_nothing(kind):
    hidden = hidden_of()
    whole = Run(kind).chunks(hidden, [])
    for cuts in CUTS:
        assert_close(Run(kind).chunks(hidden, cuts), whole, rtol=1e-12, atol=1e-12)


@EVERY_KIND
def test_a_suffix_changes_no_prefix(kind):
    hidden = hidden_of()
    other = torch.cat((hidden[:37], hidden_of(24, seed=9)))
    before, after = Run(kind).chunks(hidden, []), Run(kind).chunks(other, [])
    assert torch.equal(before[:37], after[:37])
    assert (before[37:] - after[37:]).abs().amax(-1).min() > 1e-6


@EVERY_KIND
def test_sequences_of_a_batch_are_alone(kind):
    """Prefill, a chunk, and decode in one call, in another order each time."""
    texts = [hidden_of(seed=i) for i in range(3)]
    alone = [Run(kind).chunks(text, []) for text in texts]
    run, done = Run(kind), [0, 0, 0]
    seqs = [run.cache.new_sequence() for _ in texts]
    for counts in ((11, 0, 3), (0, 0, 0), (1, 20, 1), (5, 1, 1), (1, 1, 12), (1, 9, 1)):
        order = sorted(range(3), key=lambda i: (counts[i], i))
        out = run.step(*((seqs[i], texts[i][done[i] : done[i] + counts[i]]) for i in order))
        for i, part in zip(order, out.split([counts[i] for i in order]), strict=True):
            assert_close(part, alone[i][done[i] : done[i] + counts[i]], rtol=1e-12, atol=1e-12)
            done[i] += counts[i]
    assert done == [19, 31, 18]


@EVERY_KIND
def test_rejected_tokens_leave_no_trace(kind):
    """Speculative decoding: 3 drafts each time, of which some are taken back."""
    hidden, run = hidden_of(), Run(kind, rewind=3)
    whole = Run(kind).chunks(hidden, [])
    seq, done, generator = run.cache.new_sequence(), 17, torch.Generator().manual_seed(0)
    run.step((seq, hidden[:done]))
    while done < TOKENS - 4:
        accepted = int(torch.randint(0, 4, (1,), generator=generator))
        drafts = torch.cat((hidden[done : done + 1 + accepted], hidden_of(3 - accepted, seed=done)))
        out = run.step((seq, drafts))
        assert_close(out[: 1 + accepted], whole[done : done + 1 + accepted], rtol=1e-12, atol=1e-12)
        done += 1 + accepted
        run.cache.truncate(seq, done)
    assert_close(run.step((seq, hidden[done:])), whole[done:], rtol=1e-12, atol=1e-12)


@EVERY_KIND
def test_forks_go_their_own_ways(kind):
    hidden, other = hidden_of(), hidden_of(seed=5)
    run = Run(kind)
    parent = run.cache.new_sequence()
    run.step((parent, hidden[:29]))
    child = run.cache.fork(parent)
    mixed = torch.cat((hidden[:29], other[29:]))
    wanted = {parent: Run(kind).chunks(hidden, []), child: Run(kind).chunks(mixed, [])}
    for start, end in pairwise([29, 30, 31, 40, 41, TOKENS]):
        out = run.step((child, mixed[start:end]), (parent, hidden[start:end]))
        assert_close(out, torch.cat([wanted[child][start:end], wanted[parent][start:end]]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("index_format", ["index_fp8_132", "index_mxfp4_68"])
@pytest.mark.parametrize("kv_format", ["v4_fp8_584", "v4_fp8_640_ascend"])
def test_records_in_any_chunks(kv_format, index_format):
    """Rows are quantized before anyone sees them, so a chunk's border does not show; but they are quantized."""
    config = SharedKvConfig(
        hidden_size=24, num_heads=4, q_lora_rank=12, o_groups=2, o_lora_rank=8, index_heads=32, index_topk=3, rope_dim=4
    )
    options = dict(config=config, layer=SharedKvLayer(4, True, 128, True))
    formats = dict(window_format=kv_format, kv_format=kv_format, index_format=index_format)
    hidden = hidden_of()
    plain = Run("CSA", **options).chunks(hidden, [])
    whole = Run("CSA", **options, **formats).chunks(hidden, [])
    for cuts in CUTS:
        assert_close(Run("CSA", **options, **formats).chunks(hidden, cuts), whole, rtol=1e-10, atol=1e-10)
    assert (whole - plain).abs().max() > 1e-3
