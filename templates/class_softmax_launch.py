"""Launches of ``class_softmax``."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
from torch.library import wrap_triton

from . import class_softmax as kernels


@dataclasses.dataclass(frozen=True)
class Tile:
    """Blocks of ``r`` classes per thread, ``split`` threads to a place, of ``warps`` warps."""

    r: int
    split: int
    warps: int
    stages: int = 1


def _layout(chosen: Tile, x: torch.Tensor) -> dict[str, Any]:
    elements = 16 // x.element_size()
    places = x.shape[2]
    of = next(p for p in (16, 8, 4, 2, 1) if places % p == 0)
    size = 32 * chosen.warps * elements // chosen.split
    return {
        "PLACES_OF": of, "R": chosen.r, "SPLIT": chosen.split, "PLACES": size,
        "STAGES": chosen.stages, "num_warps": chosen.warps,
    }  # fmt: skip


def _grid(x: torch.Tensor, layout: dict[str, Any]) -> tuple[int]:
    return (x.shape[0] * triton.cdiv(x.shape[2], layout["PLACES"]),)


def statistics(
    x: torch.Tensor, scale: float, softcap: float, chosen: Tile
) -> tuple[torch.Tensor, torch.Tensor]:
    n, classes, places = x.shape
    peak, total = (torch.empty((n, places), dtype=torch.float32, device=x.device) for _ in "ab")
    layout = _layout(chosen, x)
    wrap_triton(kernels.class_statistics_kernel)[_grid(x, layout)](
        x, peak, total, classes, places, scale, softcap or 1.0, CAPPED=softcap != 0, **layout
    )
    return peak, total


def forward(x: torch.Tensor, scale: float, log: bool, chosen: Tile) -> torch.Tensor:
    _, classes, places = x.shape
    y = torch.empty_like(x)
    layout = _layout(chosen, x)
    wrap_triton(kernels.class_softmax_kernel)[_grid(x, layout)](
        x, y, classes, places, scale, LOG=log, ONE=classes <= chosen.r * chosen.split, **layout
    )
    return y


def backward(
    y: torch.Tensor, g: torch.Tensor, scale: float, log: bool, chosen: Tile
) -> torch.Tensor:
    _, classes, places = y.shape
    dx = torch.empty_like(y)
    layout = _layout(chosen, y)
    wrap_triton(kernels.class_softmax_backward_kernel)[_grid(y, layout)](
        y, g, dx, classes, places, scale, LOG=log, ONE=classes <= chosen.r * chosen.split, **layout
    )
    return dx
