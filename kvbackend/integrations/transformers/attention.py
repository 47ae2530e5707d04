"""The attention and the mask function that transformers calls under the name "kvbackend"."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from ... import ops
from ...cache import GqaLayer, MlaLayer
from ...errors import ArgumentError
from .cache import HANDLE, PagedCache, PagedLayer, Step
from .store import Store

NAME = "kvbackend"
WINDOW = "_kvbackend_window"  # attribute of a mask: the window it stands for, or None

# Tensors that models hand to their attention function and that change nothing in it.
_HARMLESS = {"position_ids", "cache_position", "labels", "token_type_ids", "mm_token_type_ids", "input_ids"}


def register() -> None:
    """Make `attn_implementation="kvbackend"` known to transformers. Attention and mask belong together: without a mask
    function of the name, transformers passes no mask and padding is lost silently."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, padding_mask)


# ---------------------------------------------------------------------------------------------------------- mask


def padding_mask(
    batch_size: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    mask_function: Callable[..., Any] = causal_mask_function,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor:
    """Which tokens are real, [batch, 1, 1, kv_length] bool: all that the ops need besides causality and the window.

    Takes what transformers passes to every mask function. Refuses masks that are more than causal, windowed and padded.
    """
    window = _window_of(mask_function)
    if attention_mask is None:
        mask = torch.ones(batch_size, 1, 1, kv_length, dtype=torch.bool, device=device)
    else:
        mask = attention_mask.to(torch.bool)[:, None, None]
    setattr(mask, WINDOW, window)
    return mask


def _window_of(mask_function: Callable[..., Any]) -> int | None:
    window = None
    for part in _parts(mask_function):
        if part is causal_mask_function:
            continue
        name = part.__qualname__
        if name != "sliding_window_overlay.<locals>.inner_mask":
            raise ArgumentError(
                f"the model's mask contains {name.split('.')[0]}; kvbackend's attention is causal, with or without a "
                f"window: pass a padding mask for packed sequences, or call unpatch(model)"
            )
        window = inspect.getclosurevars(part).nonlocals["sliding_window"]
    return window


def _parts(mask_function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    if mask_function.__qualname__ == "and_masks.<locals>.and_mask":
        for part in inspect.getclosurevars(mask_function).nonlocals["mask_functions"]:
            yield from _parts(part)
    else:
        yield mask_function


# ----------------------------------------------------------------------------------------------------- attention


def latent_rows(kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """Stands in for the `expand_kv` of an MLA module: cached rows stay latent, the attention function absorbs."""
    return kv_nope, k_rot


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Write the new rows of a PagedCache and attend over its pages.

    query [batch, heads, new, dim]; key and value [batch, kv_heads, new, dim] as `PagedCache.update` returned them, or
    MLA's latent and rotary rows; attention_mask from `padding_mask`. Returns ([batch, new, heads, value_dim], None).
    A forward without a cache runs over pages that live for this call.
    """
    mask = _need_expressible(module, attention_mask, dropout, kwargs)
    expand = getattr(module, "expand_kv", None)
    latent = expand is latent_rows
    if expand is not None and not latent:
        raise ArgumentError(
            f"{type(module).__name__} expands its latent rows; kvbackend caches them as they are: call patch(model), "
            f"which also sets the attention"
        )
    layer = getattr(key, HANDLE, None) or _layer_of_one_call(query, key, value)
    owner = layer.owner
    dims = key.shape[1], key.shape[-1], value.shape[-1]
    spec = MlaLayer(*dims[1:]) if latent else GqaLayer(*dims)
    step = owner.step(layer, spec, query, mask, key.dtype)
    store = owner.store
    assert store is not None
    dtype = store.pages.dtype
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    q, k, v = step.rows(query), step.rows(key), step.rows(value)
    if latent:
        out = _latent_attention(module, owner, layer.index, q, k[:, 0], v[:, 0], scaling)
    else:
        if owner.options.before_rope:
            _need_text_positions(step, store, kwargs.get("position_ids"))
        window = getattr(mask, WINDOW, sliding_window)
        options = dict(window=window or -1, softcap=softcap or 0.0, sinks=s_aux)
        out = store.attend(layer.index, q.to(dtype), k.to(dtype), v.to(dtype), scaling, **options)
    if layer.index == len(owner.layers) - 1:
        owner.end_forward()
    return step.padded(out.to(query.dtype)), None


def _latent_attention(
    module: Any, owner: PagedCache, layer: int, q: Tensor, ckv: Tensor, kpe: Tensor, scaling: float
) -> Tensor:
    store = owner.store
    assert store is not None
    dtype = store.pages.dtype
    nope, rope, value_dim = module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim
    # a view, so that weights that change are never stale: [H, nope + v, kv_lora_rank]
    weight = module.kv_b_proj.weight.view(q.shape[1], nope + value_dim, -1)
    q_nope, q_pe = q.split([nope, rope], -1)
    q_nope = _call(owner, "absorb_q", q_nope, weight[:, :nope])
    queries = q_nope.to(dtype), q_pe.to(dtype)
    out = store.attend_latent(layer, queries, ckv.to(dtype), kpe.to(dtype), scaling)
    projected: Tensor = _call(owner, "project_out", out.to(q.dtype), weight[:, nope:])
    return projected


def _need_text_positions(step: Step, store: Store, position_ids: Tensor | None) -> None:
    """Keys that are turned again at read are turned by the count of real tokens: the model must have done the same."""
    if step.checked or position_ids is None:
        return
    given = position_ids.expand(step.shape).reshape(-1)
    given = given if step.keep is None else given[step.keep]
    if not torch.equal(given, store.positions.to(given)):  # type: ignore[union-attr]  # set by append
        raise ArgumentError(
            f"position_ids are {given[:4].tolist()}... for tokens {store.positions[:4].tolist()}...; keys that "  # type: ignore[index]
            f"are kept before RoPE are turned by the count of real tokens: pass the position_ids that generate makes"
        )
    step.checked = True


def _call(owner: PagedCache, name: str, *args: Any) -> Any:
    """Call an op; note in the cache who runs it."""
    op = ops.get(name)
    owner.note(name, op.bind(args, {}))
    return op(*args)


def _layer_of_one_call(query: Tensor, key: Tensor, value: Tensor) -> PagedLayer:
    """The layer of a cache that is dropped after this call: for a forward that keeps nothing."""
    if key.shape[2] != query.shape[2]:
        raise ArgumentError(
            f"keys of {key.shape[2]} tokens did not come from PagedCache.update; kvbackend's attention reads its own "
            f"pages: pass a PagedCache (generate of a patched model does), or call unpatch(model)"
        )
    owner = PagedCache(1)
    owner.backends = None
    layer = owner.layers[0]
    layer.update(key, value)
    return layer


def _need_expressible(
    module: nn.Module, attention_mask: Tensor | None, dropout: float, kwargs: dict[str, Any]
) -> Tensor:
    """Refuse a call that the ops would answer with other results than the model's own attention."""
    if attention_mask is None:
        raise ArgumentError(
            "attention_mask is None; kvbackend needs its own padding mask, or padding would be read as text: call "
            "register() before the model runs, and do not replace the mask"
        )
    shape = list(attention_mask.shape)
    if attention_mask.dtype is not torch.bool or len(shape) != 4 or shape[1:3] != [1, 1]:
        raise ArgumentError(
            f"attention_mask is {attention_mask.dtype} {shape}; it must be torch.bool [batch, 1, 1, tokens], which "
            f"tells padding only: pass the 2D mask of the tokenizer"
        )
    if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
        raise ArgumentError(
            "is_causal is False; kvbackend serves causal decoders: call unpatch(model), or patch the decoder alone"
        )
    if dropout:
        raise ArgumentError(f"dropout is {dropout}; cached attention has none: call model.eval()")
    if kwargs.get("output_attentions"):
        raise ArgumentError("output_attentions is True; paged attention never has the weights: pass False")
    for name, argument in kwargs.items():
        if isinstance(argument, Tensor) and name not in _HARMLESS:
            raise ArgumentError(
                f"the model passes {name} {list(argument.shape)} to its attention; kvbackend does not know what it "
                f"means: call unpatch(model)"
            )
    return attention_mask
