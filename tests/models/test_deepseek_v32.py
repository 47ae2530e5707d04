"""DeepseekV32Attention and its cache: transformers' own layers, chunks, batches, forks, records of index keys."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

from kvbackend import ArgumentError, use
from kvbackend.cache import DsaLayer, PagedCache
from kvbackend.models import DeepseekV32Attention, DsaConfig
from kvbackend.planner import plan
from kvbackend.rope import cos_sin_table, softmax_scale

TOKENS, TOPK = 41, 6
SIZES = dict(
    hidden_size=24, num_heads=4, q_lora_rank=12, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
    index_heads=32, index_dim=8, index_topk=TOPK,
)  # fmt: skip
CONFIG = DsaConfig(softmax_scale(12), **SIZES)
CUTS = ([1], [20], [7, 12, 21], list(range(1, TOKENS)))
EXACT = dict(rtol=1e-12, atol=1e-12)


@pytest.fixture(autouse=True)
def _reference():
    with use("reference"), torch.no_grad():
        yield


def random_(module: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for name, parameter in module.named_parameters():
        std = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.3
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * std
        parameter.copy_(noise + ("norm.weight" in name))


def hidden_of(seed: int = 0, tokens: int = TOKENS, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, 24, generator=generator, dtype=torch.float64).to(dtype)


class Run:
    """Two layers, the second of which may reuse the first one's selection, and their cache, all NaN."""

    def __init__(
        self,
        config: DsaConfig = CONFIG,
        dtype: torch.dtype = torch.float64,
        selects: tuple[bool, ...] = (True,),
        index_format: str = "auto",
    ) -> None:
        self.modules = [DeepseekV32Attention(config, own).to(dtype) for own in selects]
        for module in self.modules:
            random_(module)
        layers = [config.layer(own, index_format) for own in selects]
        self.cache = PagedCache(layers, 48, 4, torch.float32)
        # PagedCache holds no float64, so the pages are others; block tables and slots are the same
        self.pages = [
            replace(
                pages,
                ckv_cache=pages.ckv_cache.to(dtype),
                kpe_cache=pages.kpe_cache.to(dtype),
                index_keys=pages.index_keys.to(dtype) if own and index_format == "auto" else pages.index_keys,
            )
            for own, pages in zip(selects, self.cache.layers, strict=True)
        ]
        for tensor in (tensor for pages in self.pages for tensor in pages.tensors):
            tensor.view(torch.uint8).fill_(255)  # NaN in every float dtype
        self.cos_sin = cos_sin_table(64, 4, 1e4, dtype=dtype)
        self.selected: list[torch.Tensor] = []

    def step(self, *parts: tuple[int, torch.Tensor]) -> torch.Tensor:
        seqs, counts = [seq for seq, _ in parts], [len(x) for _, x in parts]
        starts = [self.cache.length(seq) for seq in seqs]
        slots, batch = self.cache.append_batch(seqs, counts), self.cache.batch(seqs, counts)
        positions = torch.cat([torch.arange(a, a + n) for a, n in zip(starts, counts, strict=True)])
        x, selected = torch.cat([x for _, x in parts]), None
        for module, pages in zip(self.modules, self.pages, strict=True):
            x, selected = module(x, positions, self.cos_sin, pages, slots, batch, selected)
        self.selected.append(selected)
        return x

    def chunks(self, hidden: torch.Tensor, cuts: list[int]) -> torch.Tensor:
        seq = self.cache.new_sequence()
        return torch.cat([self.step((seq, hidden[a:b])) for a, b in pairwise([0, *cuts, len(hidden)])])


@pytest.mark.parametrize("model", ["deepseek_v32", "glm_moe_dsa"])
def test_equals_transformers(model):
    """In float32, as a whole and in chunks: the layer's own code with the same weights, without a cache."""
    pytest.importorskip("transformers", reason="transformers is absent: no outside implementation")
    modeling = pytest.importorskip(
        f"transformers.models.{model}.modeling_{model}", reason=f"this transformers has no {model}"
    )
    from transformers import AutoConfig

    name = "GlmMoeDsa" if model == "glm_moe_dsa" else "DeepseekV32"
    config = AutoConfig.for_model(
        model, hidden_size=24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=12,
        kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, head_dim=4, v_head_dim=6, index_n_heads=32,
        index_head_dim=8, index_topk=TOPK, attn_implementation="eager", rope_parameters=dict(rope_theta=1e4,
        rope_type="default"),
    )  # fmt: skip
    theirs = getattr(modeling, f"{name}Attention")(config, 0)
    random_(theirs)
    hidden, positions = hidden_of(dtype=torch.float32), torch.arange(TOKENS)[None]
    embeddings = getattr(modeling, f"{name}RotaryEmbedding")(config)(hidden[None], positions)
    mask = torch.zeros(1, 1, TOKENS, TOKENS).masked_fill(positions.mT < positions, torch.finfo(torch.float32).min)
    want = theirs(hidden[None], embeddings, mask, position_ids=positions)[0]
    options = dict(index_interleaved=model == "glm_moe_dsa", rms_norm_eps=theirs.q_a_layernorm.variance_epsilon)
    sizes = DsaConfig(theirs.scaling, **SIZES, **options)
    for cuts in ([], [7, 12, 21], list(range(1, TOKENS))):
        ours = Run(sizes, torch.float32)
        ours.modules[0].load_state_dict(theirs.state_dict())
        assert_close(ours.chunks(hidden, cuts), want[0], rtol=1e-5, atol=1e-5)


def test_a_selection_of_everything_is_dense_attention():
    """And one of 6 tokens is not."""
    hidden, everything = hidden_of(), DsaConfig(CONFIG.softmax_scale, **SIZES | dict(index_topk=64))
    dense = Run(everything).chunks(hidden, [])
    module = Run(everything).modules[0]
    q_latent = module.q_a_layernorm(module.q_a_proj(hidden))
    q = module.q_b_proj(q_latent).view(TOKENS, 4, 12)
    row = module.kv_a_proj_with_mqa(hidden)
    latent = module.kv_a_layernorm(row[:, :16])
    k, v = module.kv_b_proj(latent).view(TOKENS, 4, 14).split((8, 6), -1)
    angles = torch.view_as_complex(Run().cos_sin[:TOKENS].view(TOKENS, 2, 2).mT.contiguous())

    def turn(x: torch.Tensor) -> torch.Tensor:  # [T, heads, 4]
        pairs = torch.view_as_complex(x.unflatten(-1, (2, 2)).contiguous()) * angles[:, None]
        return torch.view_as_real(pairs).flatten(-2)

    q, k = torch.cat((q[..., :8], turn(q[..., 8:])), -1), torch.cat((k, turn(row[:, None, 16:]).expand(-1, 4, -1)), -1)
    logits = torch.einsum("thd,shd->hts", q, k) * 12**-0.5
    future = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    out = torch.einsum("hts,shd->thd", logits.masked_fill(future, -torch.inf).softmax(-1), v)
    assert_close(dense, module.o_proj(out.flatten(1)), **EXACT)
    sparse = Run().chunks(hidden, [])
    assert_close(sparse[:TOPK], dense[:TOPK], **EXACT)
    assert (sparse[TOPK:] - dense[TOPK:]).abs().amax() > 1e-3


@pytest.mark.parametrize("selects", [(True,), (True, False)])
def test_chunks_change_nothing(selects):
    run = Run(selects=selects)
    whole = run.chunks(hidden_of(), [])
    for cuts in CUTS:
        other = Run(selects=selects)
        assert_close(other.chunks(hidden_of(), cuts), whole, **EXACT)
        assert torch.equal(torch.cat(other.selected), run.selected[0])


@pytest.mark.parametrize("index_format", ["index_fp8_132", "index_mxfp4_68", "v41_index_fp8_132"])
def test_index_keys_in_records(index_format):
    config = DsaConfig(CONFIG.softmax_scale, **SIZES | dict(index_dim=128))
    plain = Run(config)
    plain.chunks(hidden_of(), [])
    run = Run(config, index_format=index_format)
    whole = run.chunks(hidden_of(), [])
    for cuts in CUTS:
        other = Run(config, index_format=index_format)
        assert_close(other.chunks(hidden_of(), cuts), whole, **EXACT)
    assert not torch.equal(run.selected[0], plain.selected[0])
    same = (run.selected[0][:, :, None] == plain.selected[0][:, None]).any(-1).float().mean()
    assert same > 0.8  # another selection, of much the same tokens


def test_sequences_of_a_batch_are_alone():
    texts = [hidden_of(seed=i) for i in range(3)]
    alone = [Run().chunks(text, []) for text in texts]
    run, done = Run(), [0, 0, 0]
    seqs = [run.cache.new_sequence() for _ in texts]
    for counts in ((11, 0, 3), (0, 0, 0), (1, 20, 1), (5, 1, 1)):
        order = sorted(range(3), key=lambda i: (counts[i], i))
        out = run.step(*((seqs[i], texts[i][done[i] : done[i] + counts[i]]) for i in order))
        for i, part in zip(order, out.split([counts[i] for i in order]), strict=True):
            assert_close(part, alone[i][done[i] : done[i] + counts[i]], **EXACT)
            done[i] += counts[i]


@pytest.mark.parametrize("index_format", ["auto", "index_mxfp4_68"])
def test_index_keys_are_copied_with_their_block(index_format):
    layer = DsaLayer(16, 4, 128, index_format)
    cache = PagedCache([layer], 4, 4, torch.float32)
    (pages,) = cache.layers
    for number, tensor in enumerate(pages.tensors):
        tensor.view(torch.uint8).fill_(number + 1)
    parent = cache.new_sequence()
    slots = cache.append(parent, 3)
    pages.write_index_keys(slots, torch.randn(3, 128, generator=torch.Generator().manual_seed(0)))
    child = cache.fork(parent)
    cache.append(child, 1)
    first, second = (cache.batch([seq], [0])["block_table"][0, 0] for seq in (parent, child))
    assert first != second
    assert torch.equal(pages.index_keys[first], pages.index_keys[second])


def test_bytes_are_those_that_were_planned():
    config = DsaConfig(0.1)
    made = plan("deepseek-v3.2", kv_format="bf16", block_size=64)
    cache = PagedCache([config.layer(index_format="index_fp8_132")] * 61, 1, 64, torch.bfloat16)
    assert cache.bytes_per_token == made.cache.per_token == 61 * (1152 + 132)
    assert cache.allocated_bytes == made.cache.pool_bytes(1)
    assert config.layer().bytes_per_token(torch.bfloat16) == 1152 + 256
    assert config.layer(selects=False).bytes_per_token(torch.bfloat16) == 1152


def test_latents_in_records():
    """Rows come back within what eight bits hold, are copied with their block, and take 656 bytes."""
    layer = DsaConfig(0.1).layer(index_format="index_fp8_132", latent_format="v32_fp8_656")
    assert layer.bytes_per_token(torch.bfloat16) == 656 + 132
    cache = PagedCache([layer], 6, 8, torch.bfloat16)
    (pages,) = cache.layers
    for tensor in pages.tensors:
        tensor.fill_(255)
    parent, generator = cache.new_sequence(), torch.Generator().manual_seed(0)
    ckv, kpe = torch.randn(19, 512, generator=generator).bfloat16(), torch.randn(19, 64, generator=generator).bfloat16()
    pages.write(cache.append(parent, 19), ckv, kpe)
    child = cache.fork(parent)
    pages.write(cache.append(child, 1), ckv[:1], kpe[:1])
    for seq, count in ((parent, 19), (child, 20)):
        got_ckv, got_kpe = cache.read(0, seq)
        assert got_ckv.shape == (count, 512)
        assert_close(got_ckv[:19].float(), ckv.float(), rtol=1 / 16, atol=0.01)
        assert not torch.equal(got_ckv[:19], ckv)
        assert torch.equal(got_kpe[:19], kpe)
    assert torch.equal(cache.read(0, child)[1][19], kpe[0])


def test_a_layer_over_latents_in_records():
    """Chunks of a text give the same rows; what the codes lose is small beside what the layer makes."""
    wide = SIZES | dict(kv_lora_rank=512, qk_rope_head_dim=64, index_dim=128)
    config, plain = DsaConfig(0.05, **wide), None
    for latent_format in ("auto", "v32_fp8_656"):
        found = []
        for cuts in ([], [1, 7, 20]):
            module = DeepseekV32Attention(config).to(torch.float32)
            random_(module)
            cache = PagedCache([config.layer(latent_format=latent_format)], 48, 4, torch.float32)
            seq, out, hidden = cache.new_sequence(), [], hidden_of(dtype=torch.float32)
            for a, b in pairwise([0, *cuts, len(hidden)]):
                slots, batch = cache.append_batch([seq], [b - a]), cache.batch([seq], [b - a])
                where = torch.arange(a, b), cos_sin_table(64, 64, 1e4)
                out.append(module(hidden[a:b], *where, *cache.layers, slots, batch)[0])
            found.append(torch.cat(out))
        assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
        if plain is None:
            plain = found[0]
        else:
            assert 1e-4 < (found[0] - plain).norm() / plain.norm() < 0.04


def test_refuses():
    with pytest.raises(
        ArgumentError, match="latent_format is 'v32_fp8_656', rows of 512 and 64 numbers; kv_lora_rank and"
    ):
        PagedCache([DsaLayer(16, 4, latent_format="v32_fp8_656")], 4, 4, torch.float32)
    with pytest.raises(ArgumentError, match="kv_format is 'int8'; sparse_mla_attention reads latents as they are"):
        PagedCache([DsaLayer(16, 4)], 4, 4, torch.float32, kv_format="int8")
    with pytest.raises(ArgumentError, match="index_format is 'index_fp8_132', rows of 128 numbers; index_dim is 8"):
        PagedCache([DsaLayer(16, 4, 8, "index_fp8_132")], 4, 4, torch.float32)
