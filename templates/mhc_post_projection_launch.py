"""Launch of ``mhc_post_projection``: where it applies, its tensor maps."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from .mhc_layout import dense
from .mhc_projection import FEW, parts_of, weights

# Versions of Triton whose Gluon compiles the kernel and on which it was checked on a card.
VERSIONS = ("3.6.",)
STREAMS, COLUMNS = 4, 24
TOKENS, WIDTH = 64, 64  # of a block
LEAST_HIDDEN = 2048
# Elements of a stream, from which on the card takes longer than the host, which describes tensors
# to the copy engine.
LEAST = 1 << 24


def available() -> bool:
    """Whether the Triton at hand is one that the kernel is known to work with."""
    return triton.__version__.startswith(VERSIONS)


def pays(x: torch.Tensor) -> bool:
    """Whether X [T, n, H] is large enough for the kernel."""
    tokens, _, hidden = x.shape
    return tokens > FEW and tokens * hidden >= LEAST


def _mapped(x: torch.Tensor) -> bool:
    return x.is_contiguous() and x.storage_offset() % 8 == 0


def shapes_apply(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether the kernel takes such tensors, on whatever device; launches nothing."""
    n, hidden = x.shape[1:]
    return (
        x.dtype == torch.bfloat16 == y.dtype
        and n == STREAMS
        and w.shape[0] == COLUMNS
        and isinstance(hidden, int)
        and hidden >= LEAST_HIDDEN
        and hidden % WIDTH == 0
        and _mapped(x)
        and _mapped(y)
    )


def applies(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether ``partials`` takes these, X [T, n, H], Y [T, H] and W."""
    return (
        available()
        and x.is_cuda
        and torch.cuda.get_device_capability(x.device) == (9, 0)
        and shapes_apply(x, y, w)
    )


@functools.cache
def _layout() -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(128, 16, rank=2)


def _described(x: torch.Tensor, rows: int) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    flat = x.view(-1, x.shape[-1]) if x.dim() != 2 else x
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [rows, WIDTH], _layout())


def launch(
    x: torch.Tensor, y: torch.Tensor, gates: torch.Tensor, comb: torch.Tensor, w: torch.Tensor,
    parts: int, out: torch.Tensor, p: torch.Tensor, done: torch.Tensor | None,
    multiprocessors: int, stages: int = 4, block: int = 32, pdl: bool = True,
) -> tuple[tuple[int], dict[str, Any]]:  # fmt: skip
    """(grid, arguments by name) of the launch that fills ``out`` and p [slabs, T, columns]; w:
    [parts columns, n H]; done: zeros, a number per tile of tokens that counts its slabs."""
    tokens, n, hidden = x.shape
    slabs = hidden // WIDTH
    ranges = max(1, min(multiprocessors // slabs, triton.cdiv(tokens, TOKENS)))
    arguments = {
        "x_desc": _described(x.view(tokens, n * hidden), TOKENS),
        "y_desc": _described(y, TOKENS), "w_desc": _described(w, 32),
        "out_desc": _described(out.view(tokens, n * hidden), TOKENS),
        "P": p, "POST": gates, "COMB": comb, "DONE": done, "tokens": tokens, "hidden": hidden,
        "ranges": ranges, "strides": (*gates.stride(), *comb.stride()),
        "C": COLUMNS, "PARTS": parts, "STAGES": stages, "BLOCK": block, "PDL": pdl,
        "num_warps": 4,
    }  # fmt: skip
    return (slabs * ranges,), arguments


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def partials(
    x: torch.Tensor, y: torch.Tensor, gates: torch.Tensor, comb: torch.Tensor, w: torch.Tensor,
    precision: str, **how: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(X' [T, n, H], P [slabs, T, columns] in fp32, the slabs that each tile of tokens has)."""
    from .mhc_post_projection import post_projection_kernel

    tokens, _, hidden = x.shape
    done = torch.zeros(triton.cdiv(tokens, TOKENS), dtype=torch.int32, device=x.device)
    parts = parts_of(x.dtype, w.dtype, precision)
    cut, _ = weights(x.dtype, dense(w), precision, False)
    out = torch.empty((tokens, STREAMS, hidden), dtype=x.dtype, device=x.device)
    p = torch.empty((hidden // WIDTH, tokens, COLUMNS), dtype=torch.float32, device=x.device)
    grid, arguments = launch(
        x, y, gates, comb, cut, parts, out, p, done, _multiprocessors(x.device), **how
    )
    post_projection_kernel[grid](**arguments, launch_pdl=arguments["PDL"])
    return out, p, done
