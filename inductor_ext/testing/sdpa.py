"""Which attention kernel ``scaled_dot_product_attention`` stands for on a card.

Torch decides that in C++ from the properties of the device in use, and there is none here. What it
decides without one (the plain formula) would not be what the card runs. So the decision is made
here by the published rules in torch's default order: flash, memory-efficient, plain formula.
cuDNN's attention, which recent versions prefer on some cards when the cuDNN that is installed is
new enough, is not chosen.

The CPU has neither kernel. In the interpreter both are the published formula in float32
(Vaswani et al. 2017, https://arxiv.org/abs/1706.03762), which is what they round from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree

from inductor_ext.compat_patches import Patches

_KEY = torch._C.DispatchKey.CompositeImplicitAutograd


def patch_attention(patches: Patches) -> None:
    """Decompose attention for tensors of the virtual card as described above."""
    op = torch.ops.aten.scaled_dot_product_attention.default
    before = op.py_kernels.get(_KEY)

    def restore() -> None:
        op.py_kernels.pop(_KEY, None)
        if before is not None:
            op.py_kernels[_KEY] = before
        op._dispatch_cache.clear()

    patches.callback(restore)
    op.py_kernels[_KEY] = functools.partial(_attention, op)
    op._dispatch_cache.clear()


def _attention(
    op: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    aten = torch.ops.aten
    rest = {"scale": scale}
    tensors = (query, key, value)
    half = all(t.dtype in (torch.float16, torch.bfloat16) for t in tensors)
    width = query.size(-1)
    fits = (
        query.device.type == "cuda"
        and all(t.dim() == 4 and t.stride(-1) == 1 for t in tensors)
        and key.size(-1) == width == value.size(-1)
    )
    flash = torch.backends.cuda.flash_sdp_enabled() and attn_mask is None
    # Its causal mask is aligned to the last key, that of the public function to the first.
    flash = flash and (not is_causal or query.size(-2) == key.size(-2))
    if fits and half and flash and width <= 256 and width % 8 == 0:
        return aten._scaled_dot_product_flash_attention.default(
            query, key, value, dropout_p, is_causal, False, **rest
        )[0]
    efficient = torch.backends.cuda.mem_efficient_sdp_enabled()
    aligned = width % (16 // query.element_size()) == 0
    if fits and aligned and efficient and not enable_gqa and _mask_fits(query, attn_mask):
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                bias = torch.zeros_like(attn_mask, dtype=query.dtype)
                attn_mask = bias.masked_fill(attn_mask.logical_not(), float("-inf"))
            attn_mask = attn_mask.expand(*query.shape[:3], key.size(-2))
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        return aten._scaled_dot_product_efficient_attention.default(
            query, key, value, attn_mask, needs_grad, dropout_p, is_causal, **rest
        )[0]
    return op._op_dk(
        _KEY, *tensors, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _mask_fits(query: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """The efficient kernel reads masks 16 bytes at a time; torch pads other masks, the rest not."""
    return mask is None or (mask.dtype in (torch.bool, query.dtype) and mask.size(-1) % 8 == 0)


# ----------------------------------------------------------------------------------------
# the kernels, on the CPU


def on_cpu(op: Any) -> Callable[..., Any] | None:
    """What computes an attention kernel's call on CPU tensors; None for any other operator."""
    aten = torch.ops.aten
    known = {
        aten._scaled_dot_product_flash_attention.default: _forward,
        aten._scaled_dot_product_efficient_attention.default: _forward,
        aten._scaled_dot_product_flash_attention_backward.default: _backward,
        aten._scaled_dot_product_efficient_attention_backward.default: _backward,
    }
    return functools.partial(known[op], op) if op in known else None


def _named(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    named = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    names = [argument.name for argument in op._schema.arguments]
    named |= {**dict(zip(names, args, strict=False)), **kwargs}
    if named["dropout_p"]:
        raise NotImplementedError(
            f"interpretation expected attention without dropout, got dropout_p={named['dropout_p']}"
            ": the kernel's random numbers are not known here"
        )
    return named


def _weights(named: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Attention weights, log of the sum of exponentials, and the scale; in float32."""
    query, key = named["query"].float(), _per_query_head(named, "key")
    scale = named["scale"] if named["scale"] is not None else query.size(-1) ** -0.5
    scores = query @ key.transpose(-2, -1) * scale
    if named.get("attn_bias") is not None:
        scores = scores + named["attn_bias"]
    if named["is_causal"]:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    total = scores.logsumexp(-1)
    # A row that sees nothing is zero.
    return (scores - total[..., None]).exp().nan_to_num(0.0), total, scale


def _per_query_head(named: dict[str, Any], name: str) -> torch.Tensor:
    groups = named["query"].size(1) // named[name].size(1)
    return named[name].float().repeat_interleave(groups, 1)


def _forward(op: Any, *args: Any, **kwargs: Any) -> Any:
    named = _named(op, args, kwargs)
    weights, total, _ = _weights(named)
    # Sizes, strides and the rest (random state, numbers) as the kernel returns them.
    shapes = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
    results = [
        torch.empty_strided(r.shape, r.stride(), dtype=r.dtype).zero_()
        if isinstance(r, torch.Tensor)
        else r
        for r in op(*shapes[0], **shapes[1])
    ]
    results[0].copy_(weights @ _per_query_head(named, "value"))
    rows = min(results[1].size(-1), total.size(-1))  # padded, or left out
    results[1].fill_(float("nan"))[..., :rows].copy_(total[..., :rows])
    return tuple(results)


def _backward(op: Any, *args: Any, **kwargs: Any) -> Any:
    named = _named(op, args, kwargs)
    gradient = named["grad_out" if "grad_out" in named else "grad_out_"].float()
    weights, _, scale = _weights(named)
    to_weights = gradient @ _per_query_head(named, "value").transpose(-2, -1)
    to_scores = weights * (to_weights - (weights * to_weights).sum(-1, keepdim=True))
    found = {
        "query": to_scores @ _per_query_head(named, "key") * scale,
        "key": to_scores.transpose(-2, -1) @ named["query"].float() * scale,
        "value": weights.transpose(-2, -1) @ gradient,
    }
    for name in ("key", "value"):  # query heads that share one add up
        found[name] = found[name].unflatten(1, (named[name].size(1), -1)).sum(2)
    results: list[Any] = [found[name].to(named[name].dtype) for name in found]
    if "grad_input_mask" not in named:
        return tuple(results)
    bias = named["attn_bias"]
    results.append(None if bias is None else to_scores.sum_to_size(bias.shape).to(bias.dtype))
    wanted = named["grad_input_mask"]
    return tuple(r if want else None for r, want in zip(results, wanted, strict=True))
