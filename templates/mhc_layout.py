# mypy: disable-error-code="assignment"
"""What the mHC kernels and their launches know of streams in memory."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def load_streams(at, x_stream, h, mask, N: tl.constexpr):
    x = ()
    for i in tl.static_range(N):
        x = x + (tl.load(at + i * x_stream + h, mask=mask, other=0.0),)
    return x


def divisor(size: Any, itemsize: int) -> int:
    """The largest that kernels make use of: 16 bytes of elements."""
    if not isinstance(size, int):
        return 1
    return next(p for p in (16 // itemsize, 4, 2, 1) if size % p == 0 and p * itemsize <= 16)


def stride_divisor(x: torch.Tensor) -> int:
    """That of the first element of every stream of every token, counted in elements."""
    return min(divisor(x.stride(d), x.element_size()) for d in (0, 1))


def results(x: torch.Tensor, columns: int, head: bool = False) -> tuple[torch.Tensor, ...]:
    """Memory for what ``fuse`` returns, of as many ``columns`` of the projection."""
    tokens, n, hidden = x.shape

    def empty(*shape: Any) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    u = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    sums = empty(tokens, columns), empty(tokens)
    return (u, *sums) if head else (u, empty(tokens, n), empty(tokens, n, n), *sums)


def dense(t: torch.Tensor) -> torch.Tensor:
    return t if t.is_contiguous() else t.contiguous()
