"""Low-rank projections of keys and values: which one is best for what, and how many dims each layer keeps.

    method             from                              best for
    weight_svd         the weight of k_proj or v_proj    keys of inputs that are white; needs no text
    whitened           the weight and its inputs         the keys (values) themselves, as the inputs really are (Palu)
    pca                the keys or values                the same, without the weight
    query_weighted     keys and queries                  the logits q.k

Everything here is a pure function of matrices, computed in float64 for all kv heads at once. Data enter as second
moments, sums of x x^T over tokens, which add up over batches: `second_moment`. Columns come in order of importance, so
a pair of lower rank is the beginning of one of higher rank: `Projection.truncated`.

`ranks_*` choose the rank of each layer: by ratios, by a number of bytes, or by the energy that is to be kept.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from ..arrays import need
from ..errors import ArgumentError

MULTIPLE = 16  # ranks are multiples of this: whole 32-byte words in 16-bit formats, whole groups of quantized ones
PSD_MARGIN = 1e-3  # what whitening leaves as the smallest eigenvalue of a matrix that has no Cholesky factor


@dataclass(frozen=True, eq=False)
class Projection:
    """A pair of matrices per kv head: z = x down is stored, z up stands for x.

    down     [Hk, D, r], `projection` of ops.lowrank_project
    up       [Hk, r, D], `basis` of ops.lowrank_reconstruct
    mean     [Hk, D] that the pair was fitted about, else None: then x is about z up + `offset`
    """

    down: Tensor
    up: Tensor
    mean: Tensor | None = None

    @property
    def rank(self) -> int:
        """Dims that are stored for each head."""
        return self.down.shape[2]

    @property
    def head_dim(self) -> int:
        """Dims of a head before."""
        return self.down.shape[1]

    @property
    def offset(self) -> Tensor | None:
        """[Hk, D] to add after reconstruction: the part of the mean that the pair does not carry."""
        if self.mean is None:
            return None
        return self.mean - torch.einsum("hd,hdr,hre->he", self.mean, self.down, self.up)

    def truncated(self, rank: int) -> Projection:
        """The pair's first `rank` dims: the same method's pair of that rank."""
        _need_rank(rank, self.rank)
        return Projection(self.down[..., :rank].contiguous(), self.up[:, :rank].contiguous(), self.mean)

    def to(self, dtype: torch.dtype, device: torch.device | str | None = None) -> Projection:
        """The pair in the dtype, and on the device, of the rows it is for."""
        mean = None if self.mean is None else self.mean.to(device, dtype)
        return Projection(self.down.to(device, dtype), self.up.to(device, dtype), mean)

    def for_queries(self, num_heads: int) -> Tensor:
        """[H, D, r]: `projection` of ops.lowrank_project that takes queries to the latent keys.

        q.(z up) = (q up^T).z, so attention over latent keys is ordinary attention with r dims and the softmax scale of
        D dims. Only where nothing stands between reconstruction and the logits: not for keys stored before RoPE.
        """
        _need_groups(num_heads, self.up.shape[0])
        return self.up.mT.repeat_interleave(num_heads // self.up.shape[0], 0)


def identity(kv_heads: int, head_dim: int) -> Projection:
    """The pair of full rank that changes nothing, to the bit."""
    eye = torch.eye(head_dim, dtype=torch.float64).repeat(kv_heads, 1, 1)
    return Projection(eye, eye.clone())


# ------------------------------------------------------------------------------------------------------- moments


def second_moment(x: Tensor, name: str = "x") -> Tensor:
    """Sum of x x^T over tokens and over the members of a group, in float64.

    x      [T, Hk, D]; or [T, Hk, G, D], the query heads of a kv head side by side; or [T, h], which gives [h, h]
    name   what an error calls it
    Returns [Hk, D, D].
    """
    need(
        x.dim() in (2, 3, 4),
        f"x has {x.dim()} dims, shape {list(x.shape)}; it must be [T, h], [T, Hk, D] or [T, Hk, G, D]: reshape it",
    )
    rows = x.double()
    if x.dim() == 4:
        rows = rows.transpose(1, 2).flatten(0, 1)  # [T * G, Hk, D]
    if x.dim() > 2:
        rows = rows.transpose(0, 1)  # [Hk, T, D]
    moment = rows.mT @ rows
    _need_finite(name, moment)  # as the rows are: a NaN or infinity reaches the diagonal
    return moment


def grouped(q: Tensor, kv_heads: int) -> Tensor:
    """Queries [T, H, D] as [T, Hk, G, D]: query head h reads kv head h // G."""
    _need_groups(q.shape[1], kv_heads)
    return q.unflatten(1, (kv_heads, q.shape[1] // kv_heads))


# ------------------------------------------------------------------------------------------------------- methods


def weight_svd(weight: Tensor, rank: int) -> Projection:
    """The best rank-r approximation of the weight itself.

    weight   [Hk, D, h]: k = W x for each kv head (rows of k_proj.weight), or for a group of heads with D their dims
    rank     from 1 to min(D, h)
    W = U S V^T; up = (U_r S_r^1/2)^T, and R = S_r^1/2 V_r^T takes x to z (`absorb_into_input`). Since R x equals
    S_r^-1/2 U_r^T k, down = U_r S_r^-1/2 takes keys to the same z.
    Source: Palu (arXiv 2407.21118).
    """
    _need_weight(weight)
    _need_rank(rank, min(weight.shape[1:]))
    left, sizes, _ = torch.linalg.svd(weight.double(), full_matrices=False)
    return _balanced(left, sizes, rank)


def whitened(weight: Tensor, inputs: Tensor, rank: int) -> Projection:
    """The best rank-r approximation of the keys (values) that the weight makes of real inputs: Palu.

    weight   [Hk, D, h], as in weight_svd
    inputs   [h, h], second moment C of the inputs x
    rank     from 1 to min(D, h)
    C = S S^T (Cholesky; where C is not positive definite, 1e-3 minus its smallest eigenvalue is added to its diagonal
    first); W S = U T V^T; up = (U_r T_r^1/2)^T, down = U_r T_r^-1/2, and R = T_r^1/2 V_r^T S^-1.
    Source: Palu (arXiv 2407.21118); whitening as in SVD-LLM (arXiv 2403.07378).
    """
    _need_weight(weight)
    _need_square("inputs", inputs, (weight.shape[2],) * 2)
    _need_rank(rank, min(weight.shape[1:]))
    left, sizes, _ = torch.linalg.svd(weight.double() @ _cholesky(inputs.double()), full_matrices=False)
    return _balanced(left, sizes, rank)


def pca(keys: Tensor, rank: int, mean: Tensor | None = None) -> Projection:
    """The best rank-r approximation of given keys (values): their principal axes.

    keys   [Hk, D, D], their second moment
    rank   from 1 to D
    mean   [Hk, D]: `keys` is the second moment about this mean, which is then kept in full
    down = V_r of K = U S V^T, orthonormal; up = down^T.
    Source: Eckart and Young, Psychometrika 1 (1936).
    """
    _need_square("keys", keys, (keys.shape[0], keys.shape[-1], keys.shape[-1]))
    _need_rank(rank, keys.shape[-1])
    axes = torch.linalg.eigh(keys.double())[1].flip(-1)[..., :rank].contiguous()
    if mean is None:
        return Projection(axes, axes.mT.contiguous())
    need(
        mean.shape == keys.shape[:2],
        f"mean has shape {list(mean.shape)}; it must be [Hk, D] = {list(keys.shape[:2])}: pass each head's mean",
    )
    _need_finite("mean", mean)
    return Projection(axes, axes.mT.contiguous(), mean.double())


def query_weighted(keys: Tensor, queries: Tensor, rank: int) -> Projection:
    """The best rank-r approximation of the logits q.k.

    keys      [Hk, D, D], second moment of the keys
    queries   [Hk, D, D], second moment C of the queries, summed over the query heads of a kv head (`grouped`)
    rank      from 1 to D
    K C^1/2 = U S V^T; down = C^1/2 V_r, up = V_r^T C^-1/2. C is first divided by its mean eigenvalue, which cancels
    in q.k and leaves z about as large as k. Dims that no query has are dropped: no logit can tell.
    Source: KQ-SVD (arXiv 2512.05916); Eckart and Young, Psychometrika 1 (1936).
    """
    _need_square("keys", keys, (keys.shape[0], keys.shape[-1], keys.shape[-1]))
    _need_square("queries", queries, tuple(keys.shape))
    _need_rank(rank, keys.shape[-1])
    root, inverse = _roots(queries.double())
    axes = torch.linalg.eigh(root @ keys.double() @ root)[1].flip(-1)[..., :rank]
    return Projection((root @ axes).contiguous(), (axes.mT @ inverse).contiguous())


def _balanced(left: Tensor, sizes: Tensor, rank: int) -> Projection:
    """The pair of U_r S_r^-1/2 and S_r^1/2 U_r^T; an axis of size 0 carries nothing and stays 0."""
    left, sizes = left[..., :rank], sizes[:, None, :rank]
    smallest = sizes[..., :1] * torch.finfo(torch.float64).eps * left.shape[1]
    root = torch.where(sizes > smallest, sizes, 0).sqrt()
    inverse = torch.where(root > 0, 1 / root.clamp(min=1e-300), 0)
    return Projection((left * inverse).contiguous(), (left * root).mT.contiguous())


def _cholesky(matrix: Tensor) -> Tensor:
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if not failed:
        return factor
    lift = PSD_MARGIN - torch.linalg.eigvalsh(matrix)[0]
    return torch.linalg.cholesky(matrix + lift * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device))


def _roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """C^1/2 and its pseudo-inverse, C divided by its mean eigenvalue."""
    values, axes = torch.linalg.eigh(matrix)
    values = values / values.mean(-1, keepdim=True).clamp(min=1e-300)
    smallest = values[:, -1:] * torch.finfo(values.dtype).eps * values.shape[-1]
    root = torch.where(values > smallest, values, 0).sqrt()
    inverse = torch.where(root > 0, 1 / root.clamp(min=1e-300), 0)
    return (axes * root[:, None]) @ axes.mT, (axes * inverse[:, None]) @ axes.mT


# ---------------------------------------------------------------------------------------------------- absorption


def absorb_into_input(weight: Tensor, pair: Projection) -> Tensor:
    """R [Hk, r, h] with z = R x: the projection inside k_proj or v_proj, so that keys are never made.

    weight   [Hk, D, h], as in weight_svd; a bias is one more column, for an input of 1
    """
    _need_weight(weight)
    need(
        weight.shape[:2] == pair.down.shape[:2],
        f"weight is {list(weight.shape)}; for this pair it must be [{pair.down.shape[0]}, {pair.head_dim}, h]: view it "
        f"by kv heads",
    )
    return pair.down.mT.to(weight) @ weight


def absorb_into_output(weight: Tensor, pair: Projection) -> Tensor:
    """The output projection of latent values: [out, H * r] from o_proj's weight [out, H * D].

    For latent attention results o [T, H, r] and O = `weight`, O' o = O (o up): exact, whatever the attention weights.
    """
    kv_heads, head_dim = pair.up.shape[0], pair.head_dim
    need(
        weight.dim() == 2 and weight.shape[1] % (kv_heads * head_dim) == 0,
        f"weight has shape {list(weight.shape)}; it must be [out, H * {head_dim}] with H a multiple of {kv_heads}: "
        f"pass o_proj.weight",
    )
    need(
        pair.mean is None,
        "pair has a mean; an output projection without bias cannot take it: use a pair fitted without a mean",
    )
    by_head = weight.unflatten(1, (kv_heads, -1, head_dim))  # [out, Hk, G, D]
    return torch.einsum("okgd,krd->okgr", by_head, pair.up.to(weight)).flatten(1).contiguous()


# -------------------------------------------------------------------------------------------------------- errors


def relative_error(pair: Projection, keys: Tensor, queries: Tensor | None = None) -> Tensor:
    """[Hk] ||x - x down up|| / ||x||, Frobenius over all tokens; of the logits q.x where `queries` is given.

    keys      [Hk, D, D], second moment of the rows x that the error is asked for
    queries   [Hk, D, D], second moment of the queries
    Float64 resolves errors down to about 1e-8.
    """
    need(
        pair.mean is None,
        "pair has a mean; second moments cannot tell its error: reconstruct the rows and compare them",
    )
    down, up = pair.down.double(), pair.up.double()
    lost = torch.eye(pair.head_dim, dtype=torch.float64, device=keys.device) - down @ up
    keys = keys.double()
    missing, whole = lost.mT @ keys @ lost, keys  # second moment of x - x down up, and of x
    if queries is not None:
        missing, whole = queries.double() @ missing, queries.double() @ whole
    return (_trace(missing).clamp(min=0) / _trace(whole).clamp(min=1e-300)).sqrt()


def energies(pair: Projection, keys: Tensor, queries: Tensor | None = None) -> Tensor:
    """[Hk, r] what each dim of a pair keeps of ||x||^2; of the logits' energy where `queries` is given.

    The methods' dims are orthogonal in their own measure, so the energy of rank r is the sum of the first r.
    """
    kept = torch.einsum("hdr,hde,her->hr", pair.down.double(), keys.double(), pair.down.double())
    up = pair.up.double()
    weight = up.square().sum(-1) if queries is None else torch.einsum("hrd,hde,hre->hr", up, queries.double(), up)
    return kept * weight


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)


# --------------------------------------------------------------------------------------------------------- ranks


def ranks_from_ratios(ratios: Sequence[float], num_layers: int, head_dim: int, multiple: int = MULTIPLE) -> list[int]:
    """The rank of each layer, head_dim / ratio, from a list that each entry of stands for equally many layers.

    ratios   such as [1, 1, 2, 2, 4, 4, 4, 4], from the first layer to the last; 40 layers take five of each
    Ranks are rounded to the nearest multiple (halves up) and lie in [multiple, head_dim]; ratio 1 keeps head_dim dims.
    Bytes go with the mean of 1 / ratio: the list above halves the cache.
    """
    _need_sizes(num_layers, head_dim, multiple)
    need(
        len(ratios) > 0 and num_layers % len(ratios) == 0,
        f"ratios has {len(ratios)} entries for {num_layers} layers; each must stand for as many layers as the others: "
        f"pass one, {num_layers}, or a number that divides {num_layers}",
    )
    for ratio in ratios:
        need(
            math.isfinite(ratio) and ratio >= 1,
            f"ratios holds {ratio}; a ratio must be at least 1 (1 keeps all dims): 4 means a quarter of the dims",
        )
    repeat = num_layers // len(ratios)
    return [_rounded(ratio, head_dim, multiple) for ratio in ratios for _ in range(repeat)]


def _rounded(ratio: float, head_dim: int, multiple: int) -> int:
    if ratio == 1:
        return head_dim
    dims = Fraction(round(Fraction(head_dim) / Fraction(ratio)))
    nearest = math.floor(dims / multiple + Fraction(1, 2)) * multiple
    return min(max(nearest, multiple), head_dim)


def ranks_for_energy(parts: Sequence[Tensor], share: float, multiple: int = MULTIPLE) -> list[int]:
    """The lowest rank of each part that keeps a share of its energy; the relative error is then sqrt(1 - share).

    parts   [Hk, D] each, from `energies` of a pair of full rank: one for each layer, or each layer's keys and values
    share   in (0, 1]
    """
    need(
        0 < share <= 1,
        f"energy is {share}; it must be a share in (0, 1]: 0.99 keeps all but a relative error of 0.1",
    )
    ranks = []
    for part in parts:
        _need_sizes(1, part.shape[-1], multiple)
        kept = _relative(part).cumsum(0)
        tolerance = 1e-12  # of float64 sums: share 1 need not find the last 1e-16
        enough = [rank for rank in _steps(part.shape[-1], multiple) if kept[rank - 1] >= share - tolerance]
        ranks.append(enough[0] if enough else part.shape[-1])
    return ranks


def ranks_within_bytes(
    parts: Sequence[Tensor], budget_bytes: float, element_bytes: float = 2, multiple: int = MULTIPLE
) -> list[int]:
    """Ranks that keep the most energy within a number of bytes per token, all parts together.

    parts           as in ranks_for_energy
    budget_bytes    of one token over all parts: sum of Hk * rank * element_bytes
    element_bytes   bytes of a stored number: 2 for bf16, 0.5625 for 4.5 bits
    Each part starts with `multiple` dims; then the step with the most energy per byte, as a share of its part's, is
    taken until none fits. Optimal where steps cost the same and each part's energies fall.
    """
    need(element_bytes > 0, f"element_bytes is {element_bytes}; a stored number takes room: pass 2 for 16 bits")
    steps = [_steps(part.shape[-1], multiple) for part in parts]
    costs = [part.shape[0] * element_bytes for part in parts]
    kept = [torch.cat((torch.zeros(1, dtype=torch.float64), _relative(part).cumsum(0))).tolist() for part in parts]
    taken = [0] * len(parts)
    spent = sum(costs[i] * steps[i][0] for i in range(len(parts)))
    need(
        spent <= budget_bytes,
        f"budget_bytes is {budget_bytes} per token; {len(parts)} parts of rank {multiple} need {spent:g}: raise it, "
        f"or store narrower numbers",
    )

    def offer(i: int) -> tuple[float, int] | None:
        if taken[i] + 1 >= len(steps[i]):
            return None
        now, then = steps[i][taken[i]], steps[i][taken[i] + 1]
        return -(kept[i][then] - kept[i][now]) / (costs[i] * (then - now)), i

    offers = [found for i in range(len(parts)) if (found := offer(i))]
    heapq.heapify(offers)
    while offers:
        _, i = heapq.heappop(offers)
        cost = costs[i] * (steps[i][taken[i] + 1] - steps[i][taken[i]])
        if spent + cost > budget_bytes:
            continue  # another part's step may be smaller
        taken[i], spent = taken[i] + 1, spent + cost
        if found := offer(i):
            heapq.heappush(offers, found)
    return [steps[i][taken[i]] for i in range(len(parts))]


def _steps(head_dim: int, multiple: int) -> list[int]:
    """The ranks a layer may have: multiples, and head_dim."""
    return [*range(multiple, head_dim, multiple), head_dim]


def _relative(part: Tensor) -> Tensor:
    """[D] energy of all heads together, as shares."""
    total = part.double().sum(0).cpu()
    return total / total.sum().clamp(min=1e-300)


# -------------------------------------------------------------------------------------------------------- checks


def _need_finite(name: str, tensor: Tensor) -> None:
    need(
        bool(tensor.isfinite().all()),
        f"NaN or infinity in {name}; a projection can be fitted to finite numbers only: check what made it, float16 "
        f"overflows beyond 65504",
    )


def _need_rank(rank: int, most: int) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= most:
        raise ArgumentError(
            f"rank is {rank!r}; it must be a whole number from 1 to {most}, the dims there are: choose a lower rank"
        )


def _need_weight(weight: Tensor) -> None:
    need(
        weight.dim() == 3 and 0 not in weight.shape,
        f"weight has shape {list(weight.shape)}; it must be [Hk, D, h]: view k_proj.weight by kv heads",
    )
    _need_finite("weight", weight)


def _need_square(name: str, matrix: Tensor, shape: tuple[int, ...]) -> None:
    need(
        tuple(matrix.shape) == shape and matrix.numel() > 0,
        f"{name} has shape {list(matrix.shape)}; it must be {list(shape)}, a second moment: pass second_moment(rows)",
    )
    _need_finite(name, matrix)


def _need_groups(num_heads: int, kv_heads: int) -> None:
    need(
        kv_heads > 0 and num_heads % kv_heads == 0,
        f"there are {num_heads} query heads for {kv_heads} kv heads; the first must be a multiple of the second: pass "
        f"all heads of the layer",
    )


def _need_sizes(num_layers: int, head_dim: int, multiple: int) -> None:
    for name, value in dict(num_layers=num_layers, head_dim=head_dim, multiple=multiple).items():
        need(value >= 1, f"{name} is {value}; it must be at least 1: check the model's config")


__all__ = [
    "MULTIPLE",
    "Projection",
    "absorb_into_input",
    "absorb_into_output",
    "energies",
    "grouped",
    "identity",
    "pca",
    "query_weighted",
    "ranks_for_energy",
    "ranks_from_ratios",
    "ranks_within_bytes",
    "relative_error",
    "second_moment",
    "weight_svd",
    "whitened",
]
