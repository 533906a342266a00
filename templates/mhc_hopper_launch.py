"""Launches of ``mhc_hopper``: where its kernels apply, their tensor maps."""

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
POST_TOKENS = 128
MOST_COLUMNS = 32  # of W
LEAST_HIDDEN = 2048
# Elements of a stream, from which on the card takes longer than the host, which describes tensors
# to the copy engine.
LEAST = 1 << 24
# The tensor cores cut off what does not fit into a sum: a part of dW may not grow longer.
LONGEST = 1024


def available() -> bool:
    """Whether the Triton at hand is one that the kernels are known to work with."""
    return triton.__version__.startswith(VERSIONS)


def pays(x: torch.Tensor) -> bool:
    """Whether X [T, n, H] is large enough for the kernels."""
    tokens, _, hidden = x.shape
    return tokens > FEW and tokens * hidden >= LEAST


def _mapped(x: torch.Tensor) -> bool:
    return x.is_contiguous() and x.storage_offset() % 8 == 0


def shapes_apply(x: torch.Tensor, y: torch.Tensor | None, w: torch.Tensor) -> bool:
    """As ``applies``, on whatever device; launches nothing."""
    n, hidden = x.shape[1:]
    return (
        y is not None
        and x.dtype == torch.bfloat16 == y.dtype
        and n == STREAMS
        and w.shape[0] <= MOST_COLUMNS
        and w.shape[0] % 4 == 0
        and isinstance(hidden, int)
        and hidden >= LEAST_HIDDEN
        and hidden % WIDTH == 0
        and _mapped(x)
        and _mapped(y)
    )


def applies(x: torch.Tensor, y: torch.Tensor | None, w: torch.Tensor) -> bool:
    """Whether the kernels take X [T, n, H], W, and [T, H] (Y, or dU), of any number of tokens."""
    return (
        available()
        and x.is_cuda
        and torch.cuda.get_device_capability(x.device) == (9, 0)
        and shapes_apply(x, y, w)
    )


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


def _finished(tokens: int, tile: int, device: torch.device) -> torch.Tensor:
    """Zeros for DONE."""
    return torch.zeros(triton.cdiv(tokens, tile), dtype=torch.int32, device=device)


def post_launch(
    x: torch.Tensor, y: torch.Tensor, gates: torch.Tensor, comb: torch.Tensor, w: torch.Tensor,
    parts: int, out: torch.Tensor, p: torch.Tensor, done: torch.Tensor, multiprocessors: int,
) -> tuple[tuple[int], dict[str, Any]]:  # fmt: skip
    """(grid, arguments by name) of the launch that fills ``out`` and p [slabs, T, columns]; w:
    [parts columns, n H] in bf16; done: zeros, one per tile of tokens."""
    tokens, n, hidden = x.shape
    slabs = hidden // WIDTH
    ranges = max(1, min(multiprocessors // slabs, triton.cdiv(tokens, POST_TOKENS)))
    flat, block = (tokens, n * hidden), [POST_TOKENS, WIDTH]
    arguments = {
        "x_desc": _described(x.view(flat), block), "y_desc": _described(y, block),
        "w_desc": _described(w, [32, WIDTH]), "out_desc": _described(out.view(flat), block),
        "P": p, "POST": gates, "COMB": comb, "DONE": done, "tokens": tokens, "hidden": hidden,
        "ranges": ranges, "strides": (*gates.stride(), *comb.stride()), "C": p.shape[2],
        "PARTS": parts, "STAGES": 2, "BLOCK": 16, "PDL": True, "num_warps": 8, "maxnreg": 168,
    }  # fmt: skip
    return (slabs * ranges,), arguments


def post_and_partials(
    x: torch.Tensor, y: torch.Tensor, gates: torch.Tensor, comb: torch.Tensor, w: torch.Tensor,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(X' [T, n, H], P [slabs, T, columns] in fp32, how many slabs of each tile of tokens are
    there): the next launch may begin before they are, and has to wait for what it reads."""
    from .mhc_hopper import post_projection_kernel

    tokens, _, hidden = x.shape
    done = _finished(tokens, POST_TOKENS, x.device)
    parts = parts_of(x.dtype, w.dtype, precision)
    cut, _ = weights(x.dtype, dense(w), precision, False)
    out = torch.empty_like(x)
    p = torch.empty((hidden // WIDTH, tokens, w.shape[0]), dtype=torch.float32, device=x.device)
    grid, arguments = post_launch(
        x, y, gates, comb, cut.view(-1, cut.shape[-1]), parts, out, p, done,
        _multiprocessors(x.device),
    )  # fmt: skip
    post_projection_kernel[grid](**arguments, launch_pdl=True)
    return out, p, done


def gradient_launch(
    x: torch.Tensor, du: torch.Tensor, w: torch.Tensor, draw: torch.Tensor,
    known: torch.Tensor, added: torch.Tensor | None, dx: torch.Tensor, done: torch.Tensor | None,
    multiprocessors: int,
) -> tuple[tuple[int], dict[str, Any]]:  # fmt: skip
    """(grid, arguments by name) of the launch that fills dx and, among the arguments, PARTS of dW;
    w: [1 or 2, columns, n H] in bf16."""
    tokens, n, hidden = x.shape
    columns = w.shape[1]
    slabs, tiles = hidden // WIDTH, triton.cdiv(tokens, TOKENS)
    turns = max(1, min(multiprocessors // slabs, tiles))
    steps = triton.cdiv(tiles, turns)
    each = triton.cdiv(steps, triton.cdiv(steps * TOKENS, LONGEST))
    last = (tiles - 1) // (each * turns)
    parts = last * turns + min(turns, tiles - last * each * turns)
    flat, block = (tokens, n * hidden), [TOKENS, WIDTH]
    sums = torch.empty((parts, columns, n * hidden), dtype=torch.float32, device=x.device)
    arguments = {
        "x_desc": _described(x.view(flat), block), "du_desc": _described(du, block),
        "draw_desc": _described(draw.view(tokens, 2 * columns), [TOKENS, 32]),
        "added_desc": _described((x if added is None else added).view(flat), block),
        "w_desc": _described(w, [1, 32, WIDTH]), "dx_desc": _described(dx.view(flat), block),
        "COEFFICIENTS": known, "PARTS": sums, "DONE": done, "tokens": tokens, "hidden": hidden,
        "turns": turns, "each": each, "C": columns, "SPLIT": w.shape[0] > 1,
        "ADDED": added is not None, "STAGES": 2 if added is not None else 3,
        "PDL": done is not None, "num_warps": 8, "maxnreg": 168,
    }  # fmt: skip
    return (slabs * turns,), arguments


def gradient(
    x: torch.Tensor, du: torch.Tensor, w: torch.Tensor, draw: torch.Tensor, known: torch.Tensor,
    added: torch.Tensor | None, counted: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """(dX, parts of dW) of X [T, n, H], dU [T, H] and what ``mhc_pre_backward.slopes`` gives; and,
    if ``counted``, how many slabs of dX each tile has, as in ``post_and_partials``."""
    from .mhc_hopper import gradient_kernel

    tokens, device = x.shape[0], x.device
    done = _finished(tokens, TOKENS, device) if counted else None
    dx = torch.empty_like(x)
    w = w[None] if w.dtype == torch.bfloat16 else weights(x.dtype, w, "tf32", False)[0]
    grid, arguments = gradient_launch(
        x, du, w, draw, known, added, dx, done, _multiprocessors(device)
    )
    gradient_kernel[grid](**arguments, launch_pdl=counted)
    return dx, arguments["PARTS"], done
