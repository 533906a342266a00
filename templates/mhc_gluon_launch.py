"""Launches of ``mhc_post_gluon``: where it applies, its tensor maps."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from .mhc_layout import dense
from .mhc_projection import FEW, parts_of, weights

# Versions of Triton whose Gluon compiles the kernel and on which it was checked on a card.
VERSIONS = ("3.6.",)
STREAMS = 4
TOKENS, WIDTH = 64, 64  # of a block
POST_WIDTH = 2 * WIDTH  # columns of a program behind a layer
COLUMNS = 24  # of W: a pre's; others never ran on a card
LEAST_HIDDEN = 2048
# Elements of a stream, from which on the card takes longer than the host, which describes tensors
# to the copy engine.
LEAST = 1 << 24
_WARPS = {"CONSUMER_REGISTERS": 240, "PRODUCER_REGISTERS": 24, "num_warps": TOKENS // 16}
LEAST_SHARE = 0.75  # of the multiprocessors, that have work


def available() -> bool:
    """Whether the Triton at hand is one that the kernel is known to work with."""
    return triton.__version__.startswith(VERSIONS)


def pays(x: torch.Tensor) -> bool:
    """Whether X [T, n, H] is large enough for the kernel."""
    tokens, _, hidden = x.shape
    return tokens > FEW and tokens * hidden >= LEAST


def _mapped(x: torch.Tensor) -> bool:
    return x.is_contiguous() and x.storage_offset() % 8 == 0


def aligned(*tensors: torch.Tensor) -> bool:
    """Whether the copy engine can read tensors, which only shows when they are there."""
    return all(t.data_ptr() % 16 == 0 for t in tensors)


def shapes_apply(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> bool:
    """As ``applies``, on whatever device; launches nothing."""
    n, hidden = x.shape[1:]
    return (
        x.dtype == torch.bfloat16 == y.dtype
        and n == STREAMS
        and w.shape[0] == COLUMNS
        and isinstance(hidden, int)
        and hidden >= LEAST_HIDDEN
        and hidden % POST_WIDTH == 0
        and all(map(_mapped, (x, y)))
        and (w.dtype != torch.bfloat16 or _mapped(w))
    )


def applies(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether the kernel takes X [T, n, H], Y [T, H] and W, of any number of tokens."""
    return (
        available()
        and x.is_cuda
        and torch.cuda.get_device_capability(x.device) == (9, 0)
        and shapes_apply(x, y, w)
        and busy(x.shape[2] // POST_WIDTH, _multiprocessors(x.device))
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
