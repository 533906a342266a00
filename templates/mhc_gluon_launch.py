"""Launches of ``mhc_post_gluon``."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from .mhc_layout import dense
from .mhc_projection import parts_of, weights

TOKENS, WIDTH = 64, 64  # of a block


@functools.cache
def _layout(swizzle: int, rank: int) -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(swizzle, 16, rank=rank)


def _described(x: torch.Tensor, block: list[int]) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = _layout(2 * block[-1], len(block))
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def post_launch(
    x: torch.Tensor, y: torch.Tensor, gates: torch.Tensor, comb: torch.Tensor, w: torch.Tensor,
    parts: int, out: torch.Tensor, p: torch.Tensor, multiprocessors: int, halves: int = 2, **more: Any,
) -> tuple[tuple[int], dict[str, Any]]:  # fmt: skip
    """(grid, arguments by name) of the launch that fills ``out`` and p [slabs, T, columns]; w:
    [parts columns, n H] in bf16."""
    tokens, n, hidden = x.shape
    slabs = hidden // (WIDTH * halves)
    ranges = max(1, min(multiprocessors // slabs, triton.cdiv(tokens, TOKENS)))
    flat, block = (tokens, n * hidden), [TOKENS, WIDTH]
    arguments = {
        "x_desc": _described(x.view(flat), block), "y_desc": _described(y, block),
        "w_desc": _described(w, [32, WIDTH]), "out_desc": _described(out.view(flat), block),
        "P": p, "POST": gates, "COMB": comb, "tokens": tokens, "hidden": hidden, "ranges": ranges,
        "strides": (*gates.stride(), *comb.stride()), "C": p.shape[2], "PARTS": parts,
        "HALVES": halves, "STAGES": 3 if halves == 2 else 4, "WIDTH": 32, "CONSUMER_REGISTERS": 240,
        "PRODUCER_REGISTERS": 24, "num_warps": TOKENS // 16,
    } | more  # fmt: skip
    return (slabs * ranges,), arguments


def post_and_partials(
    x: torch.Tensor, y: torch.Tensor, gates: torch.Tensor, comb: torch.Tensor, w: torch.Tensor,
    precision: str, halves: int = 2, **more: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(X' [T, n, H], P [slabs, T, columns] in fp32, partial sums of the projection)."""
    from .mhc_post_gluon import post_projection_kernel

    tokens, _, hidden = x.shape
    cut, _ = weights(x.dtype, dense(w), precision, False)
    cut = cut.view(-1, cut.shape[-1])
    out, shape = torch.empty_like(x), (hidden // (WIDTH * halves), tokens, w.shape[0])
    p = torch.empty(shape, dtype=torch.float32, device=x.device)
    parts = parts_of(x.dtype, w.dtype, precision)
    grid, arguments = post_launch(
        x, y, gates, comb, cut, parts, out, p, _multiprocessors(x.device), halves, **more
    )  # fmt: skip
    post_projection_kernel[grid](**arguments)
    return out, p


# The tensor cores cut off what does not fit into a sum: a part of dW may not grow longer.
LONGEST = 1024
CONSUMERS = 2


def gradient_launch(
    x: torch.Tensor, du: torch.Tensor, w: torch.Tensor, draw: torch.Tensor,
    known: torch.Tensor, added: torch.Tensor, dx: torch.Tensor, multiprocessors: int, **more: Any,
) -> tuple[tuple[int], dict[str, Any]]:  # fmt: skip
    """(grid, arguments by name) of the launch that fills dx and, among the arguments, PARTS of dW;
    w: [1 or 2, columns, n H] in bf16."""
    tokens, n, hidden = x.shape
    columns = w.shape[1]
    slabs, tiles = hidden // WIDTH, triton.cdiv(tokens, TOKENS)
    turns = max(1, min(multiprocessors // slabs, triton.cdiv(tiles, CONSUMERS)))
    pairs = triton.cdiv(triton.cdiv(tiles, turns), CONSUMERS)
    segments = triton.cdiv(pairs * TOKENS, LONGEST)
    each = triton.cdiv(pairs, segments)
    segments = triton.cdiv(pairs, each)
    flat, block = (tokens, n * hidden), [TOKENS, WIDTH]
    parts = segments * turns * CONSUMERS
    sums = torch.empty((parts, columns, n * hidden), dtype=torch.float32, device=x.device)
    arguments = {
        "x_desc": _described(x.view(flat), block), "du_desc": _described(du, block),
        "draw_desc": _described(draw.view(tokens, 2 * columns), [TOKENS, 32]),
        "added_desc": _described(added.view(flat), block),
        "w_desc": _described(w, [1, 32, WIDTH]), "dx_desc": _described(dx.view(flat), block),
        "COEFFICIENTS": known, "PARTS": sums, "tokens": tokens, "hidden": hidden,
        "turns": turns, "each": each, "segments": segments, "C": columns, "W_PARTS": w.shape[0],
        "DOWN": False, "STAGES": 2, "CONSUMER_REGISTERS": 240, "PRODUCER_REGISTERS": 24,
        "num_warps": TOKENS // 16,
    } | more  # fmt: skip
    return (slabs * turns,), arguments


def gradient(
    x: torch.Tensor, du: torch.Tensor, w: torch.Tensor, draw: torch.Tensor, known: torch.Tensor,
    added: torch.Tensor, **more: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dX, parts of dW) of X [T, n, H], dU [T, H] and what ``mhc_pre_backward.slopes`` gives."""
    from .mhc_gradient_gluon import gradient_kernel

    dx = torch.empty_like(x)
    w = w[None] if w.dtype == torch.bfloat16 else weights(x.dtype, w, "tf32", False)[0]
    multiprocessors = _multiprocessors(x.device)
    grid, arguments = gradient_launch(x, du, w, draw, known, added, dx, multiprocessors, **more)
    gradient_kernel[grid](**arguments)
    return dx, arguments["PARTS"]
