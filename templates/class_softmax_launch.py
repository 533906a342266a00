"""Launches of ``class_softmax``."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
from torch.library import wrap_triton

from . import class_gradient as gradient
from . import class_softmax as kernels
from .tilings import tunable


@dataclasses.dataclass(frozen=True)
class Tile:
    """Blocks of ``r`` classes per thread, ``split`` threads to a place, of ``warps`` warps."""

    r: int
    split: int
    warps: int
    stages: int = 1


_LEAST, MOST = 32, 2**24  # places of a sample
_FEW = 132  # programs that leave multiprocessors idle


def applies(x: torch.Tensor) -> bool:
    """Whether x [N, C, D] has the places that occupy a card, next to each other."""
    n, _, places = x.shape
    if not (isinstance(n, int) and isinstance(places, int)):
        return False
    return _LEAST <= places <= MOST and n * places >= _FEW * _LEAST


@tunable("cross_entropy", "strided", "classes places of", scaled="r")
def tile(samples: Any, classes: Any, places: Any, itemsize: int, of: str) -> Tile:
    """The tile for x [samples, classes, places].

    A thread has all classes of its places, where these occupy a card; else 8 or 32 threads share
    them (benchmarks/NOTES.md).
    """
    if all(isinstance(size, int) for size in (samples, classes, places)):
        for warps in (2,) if of == "gradient" else (8, 4, 2):
            if samples * places >= 2 * _FEW * 32 * warps * 16 // itemsize:
                return Tile(4, 1, warps)
        if of == "gradient" or (of == "statistics" and classes < 512):
            return Tile(2, 8, 4)
    return Tile(2, 32, 8)


def _layout(chosen: Tile | None, x: torch.Tensor, of: str) -> tuple[Tile, dict[str, Any]]:
    elements = 16 // x.element_size()
    samples, classes, places = x.shape
    chosen = chosen or tile(samples, classes, places, x.element_size(), of=of)
    divisor = 1
    if isinstance(places, int):
        divisor = next(p for p in (16, 8, 4, 2, 1) if places % p == 0)
    size = 32 * chosen.warps * elements // chosen.split
    return chosen, {
        "PLACES_OF": divisor, "R": chosen.r, "SPLIT": chosen.split, "PLACES": size,
        "STAGES": chosen.stages, "num_warps": chosen.warps,
    }  # fmt: skip


def _grid(x: torch.Tensor, layout: dict[str, Any]) -> tuple[int]:
    return (x.shape[0] * triton.cdiv(x.shape[2], layout["PLACES"]),)


def _one(classes: Any, chosen: Tile) -> bool:
    """Whether one block has all classes."""
    return isinstance(classes, int) and classes <= chosen.r * chosen.split


def statistics(
    x: torch.Tensor, scale: float, softcap: float, chosen: Tile | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    n, classes, places = x.shape
    peak, total = (torch.empty(n * places, dtype=torch.float32, device=x.device) for _ in "ab")
    chosen, layout = _layout(chosen, x, "statistics")
    wrap_triton(kernels.class_statistics_kernel)[_grid(x, layout)](
        x, peak, total, classes, places, scale, softcap or 1.0, CAPPED=softcap != 0, **layout
    )
    return peak, total


def forward(x: torch.Tensor, scale: float, log: bool, chosen: Tile | None = None) -> torch.Tensor:
    _, classes, places = x.shape
    y = torch.empty_like(x)
    chosen, layout = _layout(chosen, x, "values")
    wrap_triton(kernels.class_softmax_kernel)[_grid(x, layout)](
        x, y, classes, places, scale, LOG=log, ONE=_one(classes, chosen), **layout
    )
    return y


def backward(
    y: torch.Tensor, g: torch.Tensor, scale: float, log: bool, chosen: Tile | None = None
) -> torch.Tensor:
    _, classes, places = y.shape
    dx = torch.empty_like(y)
    chosen, layout = _layout(chosen, y, "backward")
    wrap_triton(kernels.class_softmax_backward_kernel)[_grid(y, layout)](
        y, g, dx, classes, places, scale, LOG=log, ONE=_one(classes, chosen), **layout
    )
    return dx


def rows_and_gradient(
    x: torch.Tensor, target: torch.Tensor, a0: torch.Tensor, a1: torch.Tensor | None,
    b: torch.Tensor, c: torch.Tensor | None, scale: float, softcap: float,
    chosen: Tile | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """(peak, total, below, picked, dx) of ``class_gradient``."""
    n, classes, places = x.shape
    rows = n * places
    results = [
        torch.empty(count, dtype=torch.float32, device=x.device)
        for count in (rows, rows, rows if c is not None else 0, rows)
    ]
    dx = torch.empty_like(x)
    chosen, layout = _layout(chosen, x, "gradient")
    wrap_triton(gradient.class_gradient_kernel)[_grid(x, layout)](
        x, dx, target, a0, a0 if a1 is None else a1, b, b if c is None else c, *results,
        classes, places, scale, softcap or 1.0,
        Z=a1 is not None, SMOOTH=c is not None, CAPPED=softcap != 0, **layout,
    )  # fmt: skip
    return *results, dx
