"""torch's own attention kernels, by their private names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def cudnn_takes(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, differentiated: bool = False
) -> bool:  # fmt: skip
    """Whether torch would let cuDNN compute scaled attention of these tensors on their card;
    ``differentiated``: and its gradient."""
    if not q.is_cuda or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    if differentiated:
        q = q.detach().requires_grad_()
    params = torch.backends.cuda.SDPAParams(
        q, k, v, None, 0.0, causal, q.shape[1] != k.shape[1]
    )  # fmt: skip
    return bool(torch.backends.cuda.can_use_cudnn_attention(params))


def cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """(out, lse [B, Hq, Sq])."""
    found = aten._scaled_dot_product_cudnn_attention.default(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return found[0], found[1].view(q.shape[:3])


def cudnn_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv)."""
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of a dropout that there is not
    nothing: Any = None
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward.default(
        do, q, k, v, out, lse.unsqueeze(-1), seed, seed, nothing, nothing, nothing,
        q.shape[2], k.shape[2], 0.0, causal, scale=scale,
    )  # fmt: skip
    return dq, dk, dv
