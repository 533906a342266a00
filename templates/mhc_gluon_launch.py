"""Launches of ``mhc_post_gluon`` and ``mhc_gradient_gluon``: where they apply, tensor maps."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from .mhc_layout import dense
from .mhc_projection import FEW, parts_of, weights

# Versions of Triton whose Gluon compiles the kernels and on which they were checked on a card.
VERSIONS = ("3.6.",)
STREAMS = 4
TOKENS, WIDTH = 64, 64  # of a block
POST_WIDTH = 2 * WIDTH  # columns of a program behind a layer
MOST_COLUMNS = 32  # of W
LEAST_HIDDEN = 2048
# Elements of a stream, from which on the card takes longer than the host, which describes tensors
# to the copy engine.
LEAST = 1 << 24
# The tensor cores cut off what does not fit into a sum: a part of dW may not grow longer.
LONGEST = 1024
CONSUMERS = 2  # of tiles, in a program
_WARPS = {"CONSUMER_REGISTERS": 240, "PRODUCER_REGISTERS": 24, "num_warps": TOKENS // 16}
LEAST_SHARE = 0.75  # of the multiprocessors, that have work


def available() -> bool:
    """Whether the Triton at hand is one that the kernels are known to work with."""
    return triton.__version__.startswith(VERSIONS)


def pays(x: torch.Tensor) -> bool:
    """Whether X [T, n, H] is large enough for the kernels."""
    tokens, _, hidden = x.shape
    return tokens > FEW and tokens * hidden >= LEAST


def _mapped(x: torch.Tensor | None) -> bool:
    return x is None or (x.is_contiguous() and x.storage_offset() % 8 == 0)


def aligned(*tensors: torch.Tensor | None) -> bool:
    """Whether the copy engine can read tensors, which only shows when they are there."""
    return all(t is None or t.data_ptr() % 16 == 0 for t in tensors)


def shapes_apply(
    x: torch.Tensor, y: torch.Tensor | None, w: torch.Tensor, added: torch.Tensor | None = None
) -> bool:
    """As ``applies``, on whatever device; launches nothing."""
    n, hidden = x.shape[1:]
    return (
        y is not None
        and x.dtype == torch.bfloat16 == y.dtype
        and (added is None or added.dtype == x.dtype)
        and n == STREAMS
        and w.shape[0] <= MOST_COLUMNS
        and w.shape[0] % 4 == 0
        and isinstance(hidden, int)
        and hidden >= LEAST_HIDDEN
        and hidden % POST_WIDTH == 0
        and all(map(_mapped, (x, y, added)))
        and (w.dtype != torch.bfloat16 or _mapped(w))
    )


def applies(
    x: torch.Tensor, y: torch.Tensor | None, w: torch.Tensor, width: int,
    added: torch.Tensor | None = None,
) -> bool:  # fmt: skip
    """Whether a kernel whose programs have ``width`` columns takes X [T, n, H], [T, H] (Y, or dU),
    W and what is added to dX, of any number of tokens."""
    return (
        available()
        and x.is_cuda
        and torch.cuda.get_device_capability(x.device) == (9, 0)
        and shapes_apply(x, y, w, added)
        and busy(x.shape[2] // width, _multiprocessors(x.device))
    )


def busy(slabs: int, multiprocessors: int) -> bool:
    """Whether programs, of which a multiprocessor has one at a time, leave few without work."""
    programs = slabs * max(1, multiprocessors // slabs)
    return programs >= LEAST_SHARE * multiprocessors * triton.cdiv(programs, multiprocessors)


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
    parts: int, out: torch.Tensor, p: torch.Tensor, multiprocessors: int,
) -> tuple[tuple[int], dict[str, Any]]:  # fmt: skip
    """(grid, arguments by name) of the launch that fills ``out`` and p [slabs, T, columns]; w:
    [parts columns, n H] in bf16."""
    tokens, n, hidden = x.shape
    slabs = hidden // POST_WIDTH
    ranges = max(1, min(multiprocessors // slabs, triton.cdiv(tokens, TOKENS)))
    flat, block = (tokens, n * hidden), [TOKENS, WIDTH]
    arguments = {
        "x_desc": _described(x.view(flat), block), "y_desc": _described(y, block),
        "w_desc": _described(w, [32, WIDTH]), "out_desc": _described(out.view(flat), block),
        "P": p, "POST": gates, "COMB": comb, "tokens": tokens, "hidden": hidden, "ranges": ranges,
        "strides": (*gates.stride(), *comb.stride()), "C": p.shape[2], "PARTS": parts,
        "BLOCKS": POST_WIDTH // WIDTH, "STAGES": 3, **_WARPS,
    }  # fmt: skip
    return (slabs * ranges,), arguments


def post_and_partials(
    x: torch.Tensor, y: torch.Tensor, gates: torch.Tensor, comb: torch.Tensor, w: torch.Tensor,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(X' [T, n, H], P [slabs, T, columns] in fp32, partial sums of the projection)."""
    from .mhc_post_gluon import post_projection_kernel

    tokens, _, hidden = x.shape
    cut, _ = weights(x.dtype, dense(w), precision, False)
    cut = cut.view(-1, cut.shape[-1])
    out, shape = torch.empty_like(x), (hidden // POST_WIDTH, tokens, w.shape[0])
    p = torch.empty(shape, dtype=torch.float32, device=x.device)
    parts = parts_of(x.dtype, w.dtype, precision)
    grid, arguments = post_launch(
        x, y, gates, comb, cut, parts, out, p, _multiprocessors(x.device)
    )  # fmt: skip
    post_projection_kernel[grid](**arguments)
    return out, p


def gradient_launch(
    x: torch.Tensor, du: torch.Tensor, w: torch.Tensor, draw: torch.Tensor, known: torch.Tensor,
    added: torch.Tensor | None, dx: torch.Tensor, multiprocessors: int,
) -> tuple[tuple[int], dict[str, Any]]:  # fmt: skip
    """(grid, arguments by name) of the launch that fills dx and, among the arguments, PARTS of dW;
    w: [1 or 2, columns, n H] in bf16."""
    tokens, n, hidden = x.shape
    columns = w.shape[1]
    slabs, tiles = hidden // WIDTH, triton.cdiv(tokens, TOKENS)
    turns = max(1, min(multiprocessors // slabs, triton.cdiv(tiles, CONSUMERS)))
    pairs = triton.cdiv(triton.cdiv(tiles, turns), CONSUMERS)
    each = triton.cdiv(pairs, triton.cdiv(pairs * TOKENS, LONGEST))
    segments = triton.cdiv(pairs, each)
    flat, block = (tokens, n * hidden), [TOKENS, WIDTH]
    shape = (segments * turns * CONSUMERS, columns, n * hidden)
    arguments = {
        "x_desc": _described(x.view(flat), block), "du_desc": _described(du, block),
        "draw_desc": _described(draw.view(tokens, 2 * columns), [TOKENS, 32]),
        "added_desc": _described((x if added is None else added).view(flat), block),
        "w_desc": _described(w, [1, 32, WIDTH]), "dx_desc": _described(dx.view(flat), block),
        "COEFFICIENTS": known, "PARTS": torch.empty(shape, device=x.device), "tokens": tokens,
        "hidden": hidden, "turns": turns, "each": each, "segments": segments, "C": columns,
        "W_PARTS": w.shape[0], "STAGES": 4 if added is None else 2, "ADDED": added is not None,
        **_WARPS,
    }  # fmt: skip
    return (slabs * turns,), arguments


def gradient(
    x: torch.Tensor, du: torch.Tensor, w: torch.Tensor, draw: torch.Tensor, known: torch.Tensor,
    added: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dX, parts of dW) of X [T, n, H], dU [T, H] and what ``mhc_pre_backward.slopes`` gives."""
    from .mhc_gradient_gluon import gradient_kernel

    dx = torch.empty_like(x)
    w = w[None] if w.dtype == torch.bfloat16 else weights(x.dtype, w, "tf32", False)[0]
    grid, arguments = gradient_launch(
        x, du, w, draw, known, added, dx, _multiprocessors(x.device)
    )  # fmt: skip
    gradient_kernel[grid](**arguments)
    return dx, arguments["PARTS"]
