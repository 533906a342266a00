"""Which attention kernel ``scaled_dot_product_attention`` stands for on a card.

Torch decides that in C++ from the properties of the device in use, and there is none here. What it
decides without one (the plain formula) would not be what the card runs. So the decision is made
here by the published rules in torch's default order: flash, memory-efficient, plain formula.
cuDNN's attention, which recent versions prefer on some cards when the cuDNN that is installed is
new enough, is not chosen.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from inductor_ext.compat_virtual import Patches

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
    flash = torch.backends.cuda.flash_sdp_enabled()
    if fits and half and flash and attn_mask is None and width <= 256 and width % 8 == 0:
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
