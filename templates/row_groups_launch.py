"""Launches of ``row_groups``: how many programs share a row, and what of it each keeps."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton

from . import row_groups as kernels

SHARED_BYTES = 227 << 10


@dataclasses.dataclass(frozen=True)
class Group:
    """``size`` programs of ``warps`` warps share a row, ``resident`` of them on a multiprocessor;
    ``stages`` rows are under way."""

    size: int
    warps: int
    stages: int
    resident: int = 1

    def blocks(self, columns: int, elements: int) -> int:
        """Blocks of 32 warps elements of a program's part of a row."""
        return triton.cdiv(self.segment(columns, elements), 32 * self.warps * elements)

    def segment(self, columns: int, elements: int) -> int:
        """Columns of a program, whole 16 bytes."""
        return triton.cdiv(columns, self.size * elements) * elements

    def shared(self, columns: int, itemsize: int, tensors: int) -> int:
        """Bytes of a program's ring."""
        blocks = self.blocks(columns, 16 // itemsize)
        return self.stages * tensors * blocks * 32 * self.warps * 16


def launch(
    kind: int, x: torch.Tensor, g: torch.Tensor, y: torch.Tensor, scale: float, group: Group
) -> None:
    rows, columns = x.shape
    elements = 16 // x.element_size()
    most = torch.cuda.get_device_properties(x.device).multi_processor_count * group.resident
    groups = min(most // group.size, rows)
    words = torch.zeros((rows, group.size), dtype=torch.int64, device=x.device)
    options: dict[str, Any] = {"launch_cooperative_grid": True, "num_warps": group.warps}
    kernels.group_kernel[(groups * group.size,)](
        x, g, y, words, rows, columns, x.stride(0), g.stride(0), y.stride(0),
        group.segment(columns, elements), scale,
        KIND=kind, GROUP=group.size, PADDED=triton.next_power_of_2(group.size),
        K=group.blocks(columns, elements), STAGES=group.stages, E=elements, LOOKS=1 << 12,
        WARPS=group.warps, **options,
    )  # fmt: skip
