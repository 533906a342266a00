"""x <- g x in place for a number g on the card: nothing is moved where g is 1."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton


@triton.jit
def scale_kernel(X, G, size, programs, BLOCK: tl.constexpr):
    g = tl.load(G).to(tl.float32)
    if g != 1.0:
        # A few programs walk over x, so that leaving at once costs as few.
        for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), programs):
            i = (block + tl.zeros([BLOCK], tl.int64)) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(X + i, mask=i < size, other=0.0)
            tl.store(X + i, (x.to(tl.float32) * g).to(X.dtype.element_ty), mask=i < size)


def scale_in_place(x: torch.Tensor, g: torch.Tensor) -> None:
    """Multiply dense ``x`` by the one element of ``g``."""
    block, size = 4096, x.numel()
    programs: Any = min(triton.cdiv(size, block), 132 * 8)
    if size:
        wrap_triton(scale_kernel)[(programs,)](x, g, size, programs, BLOCK=block, num_warps=8)
