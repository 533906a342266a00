"""x <- g x in place for a number g on the card: nothing is moved where g is 1."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton


@triton.jit
def scale_kernel(X, G, rows, columns, stride, programs, BLOCK: tl.constexpr):
    g = tl.load(G).to(tl.float32)
    if g != 1.0:
        blocks = tl.cdiv(columns, BLOCK)  # of a row
        # A few programs walk over x, so that leaving at once costs as few.
        for k in range(tl.program_id(0), rows * blocks, programs):
            first = (k % blocks).to(tl.int64) * BLOCK
            i = tl.arange(0, BLOCK)
            at = X + (k // blocks).to(tl.int64) * stride + first + i
            if first + BLOCK <= columns:  # without a mask: 16 bytes at a time
                x = tl.load(at).to(tl.float32)
                tl.store(at, (x * g).to(X.dtype.element_ty))
            else:
                x = tl.load(at, mask=first + i < columns, other=0.0).to(tl.float32)
                tl.store(at, (x * g).to(X.dtype.element_ty), mask=first + i < columns)


def scale_in_place(x: torch.Tensor, g: torch.Tensor) -> None:
    """Multiply x by the one element of ``g``: dense, or [N, V] with unit stride along V."""
    size, block = x.numel(), 4096
    rows, columns, stride = 1, size, 0  # one row, which begins on a boundary
    if not x.is_contiguous():
        (rows, columns), stride = x.shape, x.stride(0)
        block = min(block, triton.next_power_of_2(columns))
    programs: Any = min(rows * triton.cdiv(columns, block), 132 * 8)
    if size:
        wrap_triton(scale_kernel)[(programs,)](
            x, g, rows, columns, stride, programs, BLOCK=block, num_warps=8
        )
