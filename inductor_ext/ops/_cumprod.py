"""``torch.cumprod`` with a gradient of its own, for graphs in front of AOTAutograd.

    dx_i = y_(i-1) R_i   R_i = g_i + x_(i+1) R_(i+1)

is one scan the other way that divides by nothing, so that zeros are no case of their own. torch's
is three scans, a gather and a scatter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inductor_ext.compat_runtime import under_functorch
from inductor_ext.ops._opaque import traced_op
from inductor_ext.ops._scan import _backward
from inductor_ext.ops._scan_gradients import gradient


@traced_op("inductor_ext::cumprod")
def cumprod(x: Tensor, dim: int) -> Tensor:
    """The cumulative product of floating-point numbers along ``dim`` >= 0: in a traced graph
    torch's own, with this gradient."""
    return torch.cumprod(x, dim)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.dim = inputs
    ctx.save_for_backward(x, output)


def _grad(ctx: Any, g: Any) -> Any:
    x, y = ctx.saved_tensors
    order = None, "prod", ctx.dim, False, False
    if torch.is_grad_enabled() or under_functorch():  # create_graph, batched gradients
        return gradient(g, x, y, *order), None
    return _backward(g, x, y, *order), None


cumprod.register_autograd(_grad, setup_context=_setup)
