"""Launch of ``mhc_gradient``: where it applies, its tensor maps."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from .mhc_post_projection_launch import (
    LEAST_HIDDEN,
    STREAMS,
    TOKENS,
    WIDTH,
    _mapped,
    _multiprocessors,
    available,
    pays,
)
from .mhc_projection import weights

__all__ = ["applies", "gradient", "launch", "pays", "shapes_apply"]

# The tensor cores cut off what does not fit into a sum: a range's part of dW may not grow longer.
LONGEST = 4096


def shapes_apply(x: torch.Tensor, w: torch.Tensor, du: torch.Tensor | None) -> bool:
    """Whether the kernel takes such tensors, on whatever device; launches nothing."""
    n, hidden = x.shape[1:]
    columns = w.shape[0]
    return (
        du is not None
        and x.dtype == torch.bfloat16 == du.dtype
        and n == STREAMS
        and columns <= 32
        and columns % 4 == 0
        and isinstance(hidden, int)
        and hidden >= LEAST_HIDDEN
        and hidden % WIDTH == 0
        and _mapped(x)
        and _mapped(du)
    )


def applies(x: torch.Tensor, w: torch.Tensor, du: torch.Tensor | None) -> bool:
    """Whether ``gradient`` takes these: X [T, n, H], W, dU [T, H]."""
    return (
        available()
        and x.is_cuda
        and torch.cuda.get_device_capability(x.device) == (9, 0)
        and shapes_apply(x, w, du)
    )


@functools.cache
def _layout(swizzle: int, rank: int) -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(swizzle, 16, rank=rank)


def _described(x: torch.Tensor, block: list[int]) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = _layout(2 * block[-1], len(block))
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


def launch(
    x: torch.Tensor, du: torch.Tensor, w: torch.Tensor, draw: torch.Tensor,
    coefficients: torch.Tensor, added: torch.Tensor | None, dx: torch.Tensor,
    multiprocessors: int,
) -> tuple[tuple[int], dict[str, Any]]:  # fmt: skip
    """(grid, arguments by name) of the launch that fills dx and parts of dW; w: [1 or 2, columns,
    n H] in bf16."""
    tokens, n, hidden = x.shape
    columns = w.shape[1]
    slabs, tiles = hidden // WIDTH, triton.cdiv(tokens, TOKENS)
    turns = max(1, multiprocessors // slabs)
    least = max(turns, triton.cdiv(tokens, LONGEST))
    each = triton.cdiv(tiles, triton.cdiv(least, turns) * turns)
    parts = triton.cdiv(tiles, each)
    turns = min(turns, parts)
    flat = (tokens, n * hidden)
    block = [TOKENS, WIDTH]
    sums = torch.empty((parts, columns, n * hidden), dtype=torch.float32, device=x.device)
    arguments = {
        "x_desc": _described(x.view(flat), block), "du_desc": _described(du, block),
        "draw_desc": _described(draw.view(tokens, 2 * columns), [TOKENS, 32]),
        "added_desc": _described((x if added is None else added).view(flat), block),
        "w_desc": _described(w, [1, 32, WIDTH]), "dx_desc": _described(dx.view(flat), block),
        "COEFFICIENTS": coefficients, "PARTS": sums, "tokens": tokens, "hidden": hidden,
        "parts": parts, "turns": turns, "each": each, "C": columns, "SPLIT": w.shape[0] > 1,
        "ADDED": added is not None, "STAGES": 2 if added is not None else 3, "num_warps": 4,
    }  # fmt: skip
    return (slabs * turns,), arguments


def gradient(
    x: torch.Tensor, du: torch.Tensor, w: torch.Tensor, draw: torch.Tensor,
    coefficients: torch.Tensor, added: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dX, parts of dW) of X [T, n, H], dU [T, H] and what ``mhc_pre_backward.slopes`` gives."""
    from .mhc_gradient import gradient_kernel

    dx = torch.empty_like(x)
    if w.dtype != torch.bfloat16:
        w, _ = weights(x.dtype, w, "tf32", False)  # in two parts
    else:
        w = w[None]
    grid, arguments = launch(x, du, w, draw, coefficients, added, dx, _multiprocessors(x.device))
    gradient_kernel[grid](**arguments)
    return dx, arguments["PARTS"]
