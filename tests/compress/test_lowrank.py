"""Low-rank projections against the optimum of Eckart and Young, and the calibration of a tiny random Llama."""

from __future__ import annotations

import itertools
import json
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from kvbackend import ArgumentError, rope
from kvbackend.compress import Calibration, PostRopeWarning, Projection, calibrate, lowrank
from kvbackend.ops import apply_rope, lowrank_project, lowrank_reconstruct


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Matrices this small cost more to share between threads than to multiply."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


DOUBLE = dict(rtol=1e-9, atol=1e-9)  # float64 by way of second moments, whose condition is the square of the data's


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 1000 * seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def skewed(*shape: int, seed: int = 0) -> torch.Tensor:
    """Rows whose dims are mixed and differ in size by a factor of 100."""
    dim = shape[-1]
    return randn(*shape, seed=seed) * torch.logspace(0, -2, dim, dtype=torch.float64) @ randn(dim, dim, seed=seed + 1)


def through(pair: Projection, x: torch.Tensor) -> torch.Tensor:
    """x [T, Hk, D] projected and reconstructed by the ops."""
    rows = lowrank_reconstruct.reference(lowrank_project.reference(x, pair.down), pair.up)
    return rows if pair.offset is None else rows + pair.offset


def error(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """[Hk] relative Frobenius error of [T, Hk, D]."""
    return ((got - want).square().sum((0, 2)) / want.square().sum((0, 2))).sqrt()


def optimum(matrix: torch.Tensor, rank: int) -> float:
    """The smallest relative error of any matrix of that rank (Eckart-Young)."""
    sizes = torch.linalg.svdvals(matrix)
    return float((sizes[rank:].square().sum() / sizes.square().sum()).sqrt())


# ------------------------------------------------------------------------------------------------------- methods


@pytest.mark.parametrize("rank", [1, 7, 16])
def test_pca_is_the_optimum_and_the_error_is_measured_as_it_is(rank):
    keys = skewed(200, 3, 16)
    moment = lowrank.second_moment(keys)
    pair = lowrank.pca(moment, rank)
    got = error(through(pair, keys), keys)
    want = torch.tensor([optimum(keys[:, head], rank) for head in range(3)], dtype=torch.float64)
    assert_close(got, want, rtol=1e-6, atol=1e-7)
    assert_close(lowrank.relative_error(pair, moment), got, rtol=1e-6, atol=1e-7)
    assert_close(pair.down.mT @ pair.down, torch.eye(rank, dtype=torch.float64).repeat(3, 1, 1), **DOUBLE)


def test_pca_about_the_mean_keeps_the_mean():
    keys = skewed(300, 2, 12) + 50 * randn(1, 2, 12, seed=5)
    mean = keys.mean(0)
    pair = lowrank.pca(lowrank.second_moment(keys - mean), 4, mean=mean)
    want = torch.tensor([optimum(keys[:, head] - mean[head], 4) for head in range(2)], dtype=torch.float64)
    got = through(pair, keys)
    assert_close(error(got - mean, keys - mean), want, rtol=1e-6, atol=1e-7)
    assert_close(got.mean(0), mean, rtol=1e-8, atol=1e-8)
    cut = lowrank.pca(lowrank.second_moment(keys - mean), 12, mean=mean).truncated(4)
    assert_close(through(cut, keys), got, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(("rank", "level"), [(64, 0.628), (32, 0.815), (16, 0.907)])
def test_levels_of_gaussian_rows(rank, level):
    """White rows have no low rank: 2048 of them in 128 dims."""
    moment = lowrank.second_moment(randn(2048, 1, 128))
    assert float(lowrank.relative_error(lowrank.pca(moment, rank), moment)) == pytest.approx(level, abs=0.005)


@cache
def turned() -> tuple[torch.Tensor, torch.Tensor]:
    """Second moments of keys of rank 24 with 5 percent of noise, before RoPE and after that of Llama 3."""
    keys = randn(2048, 24) @ randn(24, 128, seed=1) / 24**0.5
    keys = (keys + 0.05 * randn(2048, 128, seed=2))[:, None]
    table = rope.cos_sin_table(2048, 128, 500000.0, dtype=torch.float64)
    after = apply_rope.reference(keys, torch.arange(2048), table, interleaved=False)
    return lowrank.second_moment(keys), lowrank.second_moment(after)


@pytest.mark.parametrize(
    ("rank", "before", "after"), [(16, 0.42, None), (32, 0.042, 0.624), (64, None, 0.370), (96, None, 0.047)]
)
def test_keys_are_of_low_rank_before_rope_only(rank, before, after):
    for moment, level in zip(turned(), (before, after), strict=True):
        if level is not None:
            got = float(lowrank.relative_error(lowrank.pca(moment, rank), moment))
            assert got == pytest.approx(level, rel=0.15)


@pytest.mark.parametrize("bias", [False, True])
def test_whitening_is_the_optimum_where_weight_svd_is_not(bias):
    weight, x = randn(2, 16, 24), skewed(500, 24)
    if bias:
        x = torch.cat((x, x.new_ones(500, 1)), 1)
        weight = torch.cat((weight, 3 * randn(2, 16, 1)), 2)
    keys = torch.einsum("hdn,tn->thd", weight, x)
    got = {
        "plain": error(through(lowrank.weight_svd(weight, 5), keys), keys),
        "whitened": error(through(lowrank.whitened(weight, lowrank.second_moment(x), 5), keys), keys),
    }
    want = torch.tensor([optimum(keys[:, head], 5) for head in range(2)], dtype=torch.float64)
    assert_close(got["whitened"], want, rtol=1e-6, atol=1e-8)
    assert (got["plain"] > 1.3 * want).all()


@pytest.mark.parametrize("tokens", [500, 10], ids=["definite", "lifted"])
def test_weight_methods_are_their_formulas(tokens):
    """up and the input matrix R against the SVDs written out, with S^-1; singular vectors have a sign of their own."""
    weight, x = randn(1, 16, 24), skewed(tokens, 24)
    second = x.T @ x
    if tokens < 24:
        second = second + (1e-3 - torch.linalg.eigvalsh(second)[0]) * torch.eye(24, dtype=torch.float64)
    factor = torch.linalg.cholesky(second)
    for pair, root in (
        (lowrank.weight_svd(weight, 5), torch.eye(24, dtype=torch.float64)),
        (lowrank.whitened(weight, x.T @ x, 5), factor),
    ):
        left, sizes, right = torch.linalg.svd(weight[0] @ root, full_matrices=False)
        inner = torch.diag(sizes[:5].sqrt())
        up, into = (left[:, :5] @ inner).T, inner @ right[:5] @ torch.linalg.inv(root)
        sign = torch.sign((up * pair.up[0]).sum(1))[:, None]
        assert_close(pair.up[0], up * sign, rtol=1e-6, atol=1e-8 * float(up.abs().max()))
        r = lowrank.absorb_into_input(weight, pair)[0]
        assert_close(r, into * sign, rtol=1e-6, atol=1e-6 * float(into.abs().max()))
        z = lowrank_project.reference(torch.einsum("hdn,tn->thd", weight, x), pair.down)
        assert_close(z[:, 0], x @ r.T, rtol=1e-8, atol=1e-8 * float(z.abs().max()))


def test_weight_svd_is_the_optimum_of_the_weight():
    weight = skewed(3, 16, 24)
    pair = lowrank.weight_svd(weight, 6)
    got = torch.einsum("hrd,hrn->hdn", pair.up, lowrank.absorb_into_input(weight, pair))
    for head in range(3):
        gone = float((got[head] - weight[head]).norm() / weight[head].norm())
        assert gone == pytest.approx(optimum(weight[head], 6), rel=1e-6)


@pytest.mark.parametrize("rank", [3, 8])
def test_query_weighting_is_the_optimum_of_the_logits(rank):
    """Query heads of one kv head count together: their logits, stacked, are one matrix."""
    kv_heads, group, dim = 2, 3, 16
    keys, q = skewed(150, kv_heads, dim), skewed(120, kv_heads * group, dim, seed=7)
    moments = lowrank.second_moment(keys), lowrank.second_moment(lowrank.grouped(q, kv_heads))
    pair = lowrank.query_weighted(*moments, rank)
    plain = lowrank.pca(moments[0], rank)
    z, latent_q = (
        lowrank_project.reference(keys, pair.down),
        lowrank_project.reference(q, pair.for_queries(kv_heads * group)),
    )
    for head in range(kv_heads):
        mine = range(head * group, (head + 1) * group)
        logits = torch.cat([q[:, h] @ keys[:, head].T for h in mine])
        got = torch.cat([latent_q[:, h] @ z[:, head].T for h in mine])
        gone = float((got - logits).norm() / logits.norm())
        assert gone == pytest.approx(optimum(logits, rank), rel=1e-5)
        assert gone == pytest.approx(float(lowrank.relative_error(pair, *moments)[head]), rel=1e-5)
        assert gone < 0.8 * float(lowrank.relative_error(plain, *moments)[head])
    assert 0.1 < float(z.square().mean() / keys.square().mean()) < 10  # z fits the formats that k fits


def test_query_weighting_drops_what_no_query_sees():
    keys, q = randn(90, 1, 8), randn(70, 1, 8)
    q[..., 5:] = 0
    pair = lowrank.query_weighted(lowrank.second_moment(keys), lowrank.second_moment(q), 6)
    logits = q[:, 0] @ keys[:, 0].T
    assert_close(q[:, 0] @ through(pair, keys)[:, 0].T, logits, rtol=1e-7, atol=1e-7)
    assert pair.up.isfinite().all()


@pytest.mark.parametrize("method", ["weight_svd", "whitened", "pca", "query_weighted"])
def test_lower_ranks_begin_higher_ones_and_energies_add_up(method):
    weight, x, q = randn(2, 12, 20), skewed(300, 20), skewed(200, 2, 12)
    keys = torch.einsum("hdn,tn->thd", weight, x)
    moment, queries = lowrank.second_moment(keys), lowrank.second_moment(q)
    fit = {
        "weight_svd": lambda rank: lowrank.weight_svd(weight, rank),
        "whitened": lambda rank: lowrank.whitened(weight, lowrank.second_moment(x), rank),
        "pca": lambda rank: lowrank.pca(moment, rank),
        "query_weighted": lambda rank: lowrank.query_weighted(moment, queries, rank),
    }[method]
    cut, direct = fit(12).truncated(4), fit(4)
    assert_close(cut.down @ cut.up, direct.down @ direct.up, rtol=1e-6, atol=1e-7)
    measure = (moment, queries) if method == "query_weighted" else (moment,)
    parts = lowrank.energies(fit(12), *measure)
    assert_close(
        (1 - parts[:, :4].sum(1) / parts.sum(1)).sqrt(), lowrank.relative_error(direct, *measure), rtol=1e-6, atol=1e-7
    )


def test_grouped_queries_are_summed_over_the_group():
    q = randn(30, 6, 8)
    got = lowrank.second_moment(lowrank.grouped(q, 2))
    for head in range(2):
        assert_close(got[head], sum(q[:, h].T @ q[:, h] for h in range(3 * head, 3 * head + 3)), **DOUBLE)


def test_values_absorbed_into_the_output_projection():
    """out (P (V down)) with up inside o_proj equals o_proj of attention over reconstructed values."""
    kv_heads, group, dim, rank = 2, 3, 8, 5
    values, output = randn(11, kv_heads, dim), randn(20, kv_heads * group * dim)
    weights = randn(4, kv_heads * group, 11).softmax(-1)
    pair = lowrank.pca(lowrank.second_moment(values), rank)

    def attend(rows: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ths,shd->thd", weights, rows.repeat_interleave(group, 1)).flatten(1)

    want = attend(through(pair, values)) @ output.T
    latent = attend(lowrank_project.reference(values, pair.down))
    absorbed = lowrank.absorb_into_output(output, pair)
    assert absorbed.shape == (20, kv_heads * group * rank)
    assert_close(latent @ absorbed.T, want, **DOUBLE)


def test_identity_changes_nothing():
    x = randn(9, 3, 8)
    assert torch.equal(through(lowrank.identity(3, 8), x), x)


# --------------------------------------------------------------------------------------------------------- ranks


def test_ratios_stand_for_equally_many_layers():
    ratios = [1, 1, 2, 2, 4, 4, 4, 4]
    ranks = lowrank.ranks_from_ratios(ratios, 40, 128)
    assert ranks == [128] * 10 + [64] * 10 + [32] * 20
    assert sum(ranks) / (40 * 128) == 0.5  # twice as small, not four times
    assert lowrank.ranks_from_ratios(ratios, 8, 64) == [64, 64, 32, 32, 16, 16, 16, 16]


@pytest.mark.parametrize(
    ("ratio", "head_dim", "rank"),
    [
        (3, 128, 48),
        (100, 128, 16),
        (1.1, 128, 112),
        (1, 72, 72),
        (1.01, 72, 64),
        (5, 128, 32),
        (2.0, 80, 48),
        (4, 8, 8),
    ],
)
def test_ranks_are_clipped_multiples_of_16(ratio, head_dim, rank):
    assert lowrank.ranks_from_ratios([ratio], 3, head_dim) == [rank] * 3


def test_energy_takes_the_lowest_rank_that_keeps_it():
    falling = torch.tensor([[50.0, 20, 10, 10, 4, 3, 2, 1]])
    assert lowrank.ranks_for_energy([falling, torch.ones(2, 8)], 0.9, multiple=2) == [4, 8]
    assert lowrank.ranks_for_energy([falling], 0.901, multiple=2) == [6]
    assert lowrank.ranks_for_energy([falling], 1.0, multiple=3) == [8]


def test_bytes_are_spent_where_they_keep_most():
    """The greedy choice against every choice there is."""
    parts = [randn(2, 8, seed=i).square().sort(-1, descending=True).values * 4.0**i for i in range(4)]
    for budget in (32, 50, 67, 96, 200):
        ranks = lowrank.ranks_within_bytes(parts, budget, element_bytes=2, multiple=2)

        def kept(choice: Any) -> float:
            return sum(float(part[:, :r].sum() / part.sum()) for part, r in zip(parts, choice, strict=True))

        fitting = [c for c in itertools.product([2, 4, 6, 8], repeat=4) if sum(c) * 2 * 2 <= budget]
        assert sum(ranks) * 4 <= budget
        assert kept(ranks) == pytest.approx(max(map(kept, fitting)))


# ------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lowrank.pca(torch.eye(8)[None], 9), "rank is 9; it must be a whole number from 1 to 8"),
        (lambda: lowrank.pca(torch.eye(8)[None], 0), "rank is 0; .*: choose a lower rank"),
        (lambda: lowrank.weight_svd(torch.zeros(2, 8, 6), 7), "rank is 7; .* from 1 to 6"),
        (lambda: lowrank.pca(torch.full((1, 8, 8), torch.nan), 2), "NaN or infinity in keys; .*: check"),
        (lambda: lowrank.second_moment(torch.full((3, 1, 8), torch.inf)), "NaN or infinity in x;"),
        (
            lambda: lowrank.whitened(torch.zeros(1, 8, 9), torch.eye(8), 2),
            r"inputs has shape \[8, 8\]; it must be \[9, 9\]",
        ),
        (lambda: lowrank.query_weighted(torch.eye(8)[None], torch.eye(8), 2), r"queries has shape \[8, 8\]"),
        (lambda: lowrank.grouped(torch.zeros(3, 5, 8), 2), "5 query heads for 2 kv heads"),
        (
            lambda: lowrank.ranks_from_ratios([1, 2, 4], 8, 128),
            "ratios has 3 entries for 8 layers; .*: pass one, 8, or",
        ),
        (lambda: lowrank.ranks_from_ratios([0.5], 8, 128), "ratios holds 0.5; a ratio must be at least 1"),
        (lambda: lowrank.ranks_from_ratios([], 8, 128), "ratios has 0 entries"),
        (lambda: lowrank.ranks_for_energy([torch.ones(1, 8)], 1.5), "energy is 1.5; it must be a share"),
        (lambda: lowrank.ranks_within_bytes([torch.ones(1, 32)] * 2, 63), "budget_bytes is 63 .* need 64: raise it"),
    ],
)
def test_refuses(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


# ---------------------------------------------------------------------------------------------------- calibration


HEAD_DIM, HEADS, KV_HEADS, LAYERS, VOCABULARY = 16, 4, 2, 4, 60


def build(kind: str = "llama", **options: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=64, num_hidden_layers=LAYERS, head_dim=HEAD_DIM,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=512, initializer_range=0.2,
        pad_token_id=0, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **options})).eval().float()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=1.0)
    return model


@cache
def llama(kind: str = "llama") -> Any:
    return build(kind)


@cache
def small(compress: str = "kv") -> Calibration:
    return calibrate(llama(), tokens(), rank=4, compress=compress)


def tokens(count: int = 100, seed: int = 0, rows: int = 2) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(seed))


def cached(model: Any, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the model's own cache holds after RoPE: [B * T, Hk, D] of each layer."""
    with torch.no_grad():
        output = model.base_model(ids, use_cache=True)
    layers = (output.cache if "cache" in output else output.past_key_values).layers
    return [(layer.keys.transpose(1, 2).flatten(0, 1), layer.values.transpose(1, 2).flatten(0, 1)) for layer in layers]


def before_rope(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """The cached keys, turned back by kvbackend's own RoPE."""
    table = rope.cos_sin_table(ids.shape[1], HEAD_DIM, 10000.0)
    positions = torch.arange(ids.shape[1]).repeat(len(ids))
    return [apply_rope.reference(k, positions, table, interleaved=False, inverse=True) for k, _ in cached(model, ids)]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("method", ["query_weighted", "pca", "whitened", "weight_svd"])
def test_errors_are_those_of_the_models_own_cache(method, kind):
    """Nothing of the calibration's own capture: keys come from the cache that the model made. qwen2 has biases."""
    model, ids = llama(kind), tokens()
    found = calibrate(model, ids, method=method, rank=6)
    keys, values = before_rope(model, ids), [v for _, v in cached(model, ids)]
    assert found.key_ranks == found.value_ranks == [6] * LAYERS
    for layer in range(LAYERS):
        for fitted, rows in ((found.keys[layer], keys[layer]), (found.values[layer], values[layer])):
            want = error(through(fitted.pair, rows), rows)
            assert_close(fitted.error, want, rtol=1e-3, atol=1e-4)
            best = torch.tensor([optimum(rows[:, head], 6) for head in range(KV_HEADS)])
            assert (fitted.error >= best * 0.999).all()
            if method in ("pca", "whitened"):
                assert_close(fitted.error, best, rtol=2e-3, atol=1e-4)


def test_query_weighting_serves_the_logits_of_the_model():
    """Logits after RoPE, all queries at all keys: the measured error, and less of it than plain PCA has."""
    model, ids = llama(), tokens(160, rows=1)
    found = {method: calibrate(model, ids, method=method, rank=6, compress="k") for method in ("query_weighted", "pca")}
    table, positions = rope.cos_sin_table(160, HEAD_DIM, 10000.0), torch.arange(160)
    shown: dict[int, torch.Tensor] = {}
    handles = [
        block.self_attn.q_proj.register_forward_hook(lambda _, __, out, i=i: shown.__setitem__(i, out))
        for i, block in enumerate(model.model.layers)
    ]
    keys = before_rope(model, ids)
    for handle in handles:
        handle.remove()

    def turn(x: torch.Tensor) -> torch.Tensor:
        return apply_rope.reference(x, positions, table, interleaved=False)

    totals = dict.fromkeys(found, 0.0)
    for layer in range(LAYERS):
        q = lowrank.grouped(turn(shown[layer][0].unflatten(-1, (HEADS, HEAD_DIM))), KV_HEADS)
        exact = torch.einsum("tkgd,skd->kgts", q, turn(keys[layer]))
        for method, calibration in found.items():
            fitted = calibration.keys[layer]
            lost = torch.einsum("tkgd,skd->kgts", q, turn(through(fitted.pair, keys[layer]))) - exact
            real = (lost.square().sum((1, 2, 3)) / exact.square().sum((1, 2, 3))).sqrt()
            assert_close(fitted.logit_error, real, rtol=0.15, atol=0)  # errors that vary with the position are averaged
            totals[method] += float(real.square().sum())
    assert totals["query_weighted"] < 0.97 * totals["pca"]


def test_post_rope_keys_are_warned_of_with_the_measured_error():
    model, ids = llama(), tokens()
    with pytest.warns(
        PostRopeWarning, match=r"after RoPE with a relative error of 0\.\d+ .*before RoPE .*: pass rope='pre'"
    ):
        post = calibrate(model, ids, method="pca", rank=6, rope="post")
    for layer, (keys, _) in enumerate(cached(model, ids)):
        assert_close(post.keys[layer].error, error(through(post.keys[layer].pair, keys), keys), rtol=1e-3, atol=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pre = calibrate(model, ids, method="pca", rank=6)
        calibrate(model, ids, method="pca", rank=6, rope="post", compress="v")
    overall = {
        name: torch.stack([fitted.error for fitted in c.keys]).mean() for name, c in dict(pre=pre, post=post).items()
    }
    assert overall["pre"] < overall["post"]


def test_latent_values_inside_the_model():
    """v_proj and o_proj with the pair absorbed give what the model gives whose v_proj has the reconstruction inside."""
    ids = tokens(20, seed=3)
    found = calibrate(llama(), tokens(), method="pca", rank=5, compress="v")
    reconstructing, model = build(), build()
    for layer, fitted in enumerate(found.values):
        attention = reconstructing.model.layers[layer].self_attn
        weight = attention.v_proj.weight.detach().unflatten(0, (KV_HEADS, HEAD_DIM))
        latent = lowrank.absorb_into_input(weight, fitted.pair)  # [Hk, r, h]
        with torch.no_grad():
            attention.v_proj.weight.copy_((fitted.pair.up.mT @ latent).flatten(0, 1))
        output = lowrank.absorb_into_output(attention.o_proj.weight.detach(), fitted.pair)
        other = model.model.layers[layer].self_attn
        other.v_proj.weight.data, other.o_proj.weight.data = _padded(latent), _padded_output(output, fitted.rank)
    with torch.no_grad():
        assert_close(model(ids).logits, reconstructing(ids).logits, rtol=1e-3, atol=1e-3)
        assert not torch.allclose(model(ids).logits, llama()(ids).logits, rtol=1e-3, atol=1e-3)


def _padded(latent: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(latent, (0, 0, 0, HEAD_DIM - latent.shape[1])).flatten(0, 1)


def _padded_output(output: torch.Tensor, rank: int) -> torch.Tensor:
    by_head = output.unflatten(1, (HEADS, rank))
    return torch.nn.functional.pad(by_head, (0, HEAD_DIM - rank)).flatten(1)


def test_ranks_by_layer():
    model, ids = llama(), tokens()
    ratios = calibrate(model, ids, ratios=[1, 4], multiple=4)
    assert ratios.key_ranks == ratios.value_ranks == [16, 16, 4, 4]
    assert ratios.ratio == 1.6
    assert ratios.keys[0].error.count_nonzero() == 0  # ratio 1 is not touched
    budget = calibrate(model, ids, bytes_per_token=300, multiple=4)
    assert 300 - 16 < budget.bytes_per_token() <= 300  # a step is 2 heads * 4 dims * 2 bytes
    only = calibrate(model, ids, bytes_per_token=400, multiple=4, compress="v")
    assert only.key_ranks == [16] * LAYERS
    assert 400 - 16 < only.bytes_per_token() <= 400
    enough = calibrate(model, ids, energy=0.9, method="pca", multiple=1)
    for fitted in (*enough.keys, *enough.values):
        assert fitted.rank < HEAD_DIM
        assert fitted.error.square().mean() < 0.25


def test_energy_bounds_the_error():
    """All heads together: the lost share of the energy is at most what was allowed, and one rank less loses more."""
    model, ids = llama(), tokens()
    found = calibrate(model, ids, energy=0.9, method="pca", multiple=1, compress="k")
    for fitted, keys in zip(found.keys, before_rope(model, ids), strict=True):
        assert (through(fitted.pair, keys) - keys).square().sum() <= 0.1001 * keys.square().sum()
        less = lowrank.pca(lowrank.second_moment(keys), fitted.rank - 1).to(torch.float32)
        assert (through(less, keys) - keys).square().sum() > 0.0999 * keys.square().sum()


def test_held_out_text_measures():
    model = llama()
    short = calibrate(model, tokens(10), method="pca", rank=6, held_out=tokens(300, seed=9))
    own = calibrate(model, tokens(10), method="pca", rank=6)
    assert short.about["measured_on"] == "held out"
    assert (short.about["tokens"], short.about["held_out_tokens"]) == (20, 600)
    assert torch.equal(short.keys[1].pair.down, own.keys[1].pair.down)
    assert (short.keys[1].error > own.keys[1].error).all()


def test_batches_texts_and_training_mode():
    """One text in two batches is one text; strings go through the tokenizer, cut to max_length; the model stays."""
    model, ids = build(attention_dropout=0.5), tokens(100, rows=4)
    whole = calibrate(model, ids, rank=4)
    steps: list[tuple[int, int]] = []
    model.train()
    parts = calibrate(model, [ids[:1], ids[1:]], rank=4, progress=lambda done, total: steps.append((done, total)))
    assert model.training
    assert steps == [(1, 2), (2, 2)]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    for one, other in zip((*whole.keys, *whole.values), (*parts.keys, *parts.values), strict=True):
        assert_close(one.pair.down @ one.pair.up, other.pair.down @ other.pair.up, rtol=1e-3, atol=1e-4)

    def tokenizer(text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % VOCABULARY for letter in text]}

    text = "low rank is where keys are before they turn"
    spelled = calibrate(model, [text], tokenizer, rank=4, max_length=20)
    ids = torch.tensor(tokenizer(text)["input_ids"])
    assert_close(spelled.keys[2].error, calibrate(model, ids.split(20), rank=4).keys[2].error, rtol=0, atol=0)


def test_save_and_load(tmp_path):
    found = calibrate(llama(), tokens(), ratios=[1, 2], multiple=4)
    path = tmp_path / "smaller.safetensors"
    path.write_bytes(b"old")
    found.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["smaller.safetensors"]
    back = Calibration.load(path)
    assert back.about == found.about
    assert (back.key_ranks, back.value_ranks, str(back)) == (found.key_ranks, found.value_ranks, str(found))
    for one, other in zip((*found.keys, *found.values), (*back.keys, *back.values), strict=True):
        for got, want in ((other.pair.down, one.pair.down), (other.pair.up, one.pair.up), (other.error, one.error)):
            assert torch.equal(got, want)
        assert (one.logit_error is None) == (other.logit_error is None)
    assert Calibration.load(_saved(small("v"), tmp_path)).keys == ()


def _saved(found: Calibration, folder: Any) -> Any:
    found.save(folder / "v.safetensors")
    return folder / "v.safetensors"


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    found = small()
    path = tmp_path / "kept.safetensors"
    found.save(path)
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        small("v").save(path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ArgumentError, match=r"cannot be written .*; its folder must exist"):
        found.save(tmp_path / "absent" / "x.safetensors")


def test_load_refuses(tmp_path):
    from safetensors.torch import load_file, save_file

    path = _saved(small("v"), tmp_path)
    data = path.read_bytes()
    cut, strange, lacking, other = (tmp_path / f"{name}.safetensors" for name in ("cut", "strange", "lacking", "other"))
    cut.write_bytes(data[:-10])
    save_file({"a": torch.zeros(1)}, strange)
    tensors = load_file(path)
    metadata = {"schema": "kvbackend-lowrank/1", "about": json.dumps(Calibration.load(path).about)}
    save_file({k: v for k, v in tensors.items() if not k.startswith("layers.3")}, lacking, metadata)
    save_file(tensors | {"layers.1.values.up": torch.zeros(KV_HEADS, 5, HEAD_DIM)}, other, metadata)
    for file, message in (
        (tmp_path / "absent", "is no file; .*: check the path"),
        (cut, "cannot be read .*; it must be whole"),
        (strange, "has schema None; it must be 'kvbackend-lowrank/1'"),
        (lacking, "lacks a part of layers.3.values"),
        (other, r"holds layers.1.values of shapes .*\[2, 5, 16\].*; they must be"),
    ):
        with pytest.raises(ArgumentError, match=message):
            Calibration.load(file)


def poisoned(name: str) -> Any:
    model = build()
    with torch.no_grad():
        model.get_parameter(name).view(-1)[5] = torch.inf
    return model


REFUSED: list[tuple[dict[str, Any], str]] = [
    (dict(rank=17), "rank is 17; it must be a whole number from 1 to 16"),
    (dict(rank=0), "rank is 0; it must be a whole number"),
    (dict(), "no rank is given; ranks come from exactly one of rank, ratios, bytes_per_token or energy: pass one"),
    (dict(rank=4, energy=0.9), "rank and energy are given; .*: pass one"),
    (dict(ratios=[1, 2, 3]), "ratios has 3 entries for 4 layers"),
    (dict(energy=0), "energy is 0; it must be a share"),
    (dict(bytes_per_token=511), "bytes_per_token is 511; rank 16 in all layers takes 512: raise it"),
    (dict(bytes_per_token=300, compress="v", multiple=4), "bytes_per_token is 300; .* takes 320"),
    (dict(rank=4, method="svd"), "method is 'svd'; it must be 'query_weighted', 'pca', 'whitened' or 'weight_svd'"),
    (dict(rank=4, rope="after"), "rope is 'after'"),
    (dict(rank=4, compress="q"), "compress is 'q'"),
    (dict(rank=4, rope="post", method="whitened"), "method is 'whitened' with rope='post'; .*: pass rope='pre'"),
    (dict(rank=4, text=tokens(7)), "text has 14 tokens; it must have at least head_dim = 16"),
    (dict(rank=4, held_out=tokens(7)), "held_out has 14 tokens"),
    (dict(rank=4, text=[]), "text is empty; .*: pass text"),
    (dict(rank=4, text="words"), "text is a string but there is no tokenizer; .*: pass tokenizer="),
    (dict(rank=4, text=torch.zeros(2, 40)), "text holds a torch.float32 tensor .*; token ids must be integers"),
    (dict(rank=4, text=tokens() + 1), "text holds token ids from 1 to 60; the model knows 0 to 59"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_calibrate_refuses_before_any_work(change, message, monkeypatch):
    monkeypatch.setattr(type(llama().base_model), "forward", lambda *_, **__: pytest.fail("the model ran"))
    with pytest.raises(ArgumentError, match=message):
        calibrate(**dict(model=llama(), text=tokens()) | change)


def test_calibrate_refuses_other_structures():
    with pytest.raises(ArgumentError, match="it is a Linear; it must be a transformers PreTrainedModel"):
        calibrate(torch.nn.Linear(2, 2), tokens(), rank=4)  # type: ignore[arg-type]
    mla = dict(num_key_value_heads=4, head_dim=4, q_lora_rank=12, kv_lora_rank=16, qk_nope_head_dim=8,
               qk_rope_head_dim=4, v_head_dim=6, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
               n_group=2, topk_group=1, first_k_dense_replace=1)  # fmt: skip
    with pytest.raises(ArgumentError, match="0 modules have q_proj, k_proj, v_proj, o_proj; every one of its 4 layers"):
        calibrate(build("deepseek_v3", **mla), tokens(), rank=4)
    with pytest.raises(ArgumentError, match=r"does not cache RoPE\(k_proj\(x\)\).*no norm of keys"):
        calibrate(build("qwen3"), tokens(), rank=4)
    with pytest.raises(ArgumentError, match=r"k_proj of layer 2 holds NaN or infinity; .*: check the checkpoint"):
        calibrate(poisoned("model.layers.2.self_attn.k_proj.weight"), tokens(), rank=4)


def test_calibrate_refuses_activations_that_are_not_finite():
    model = poisoned("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ArgumentError, match=r"NaN or infinity in keys of layer 2; .*: check what made it"):
        calibrate(model, tokens(), rank=4)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
