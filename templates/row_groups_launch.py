"""Launches of ``row_groups``: how many programs share a row, and what of it each keeps."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import torch
import triton

# Versions of Triton whose Gluon compiles the kernel and on which it was checked on a card.
VERSIONS = ("3.6.",)
SHARED_BYTES = 227 << 10
PATIENCE = 1 << 22  # looks at what another program has, about a microsecond each
SOFTMAX, LOG_SOFTMAX, SOFTMAX_BACKWARD, LOG_SOFTMAX_BACKWARD = range(4)


@dataclasses.dataclass(frozen=True)
class Group:
    """``size`` programs of ``warps`` warps share a row, ``resident`` of them on a multiprocessor;
    ``stages`` rows are under way."""

    size: int
    warps: int
    stages: int
    resident: int = 1

    def segment(self, columns: int, elements: int) -> int:
        """Columns of a program, whole 16 bytes."""
        return triton.cdiv(columns, self.size * elements) * elements

    def blocks(self, columns: int, elements: int) -> int:
        """Blocks of 32 warps elements of a program's part of a row."""
        return triton.cdiv(self.segment(columns, elements), 32 * self.warps * elements)

    def shared(self, columns: int, itemsize: int, tensors: int) -> int:
        """Bytes of a program's ring."""
        blocks = self.blocks(columns, 16 // itemsize)
        return self.stages * tensors * blocks * 32 * self.warps * 16


def kernels() -> ModuleType:
    from . import row_groups  # which needs a Triton that has Gluon

    return row_groups


def arguments(
    kind: int, x: torch.Tensor, g: torch.Tensor, y: torch.Tensor, scale: float, group: Group,
    programs: int,
) -> tuple[int, dict[str, Any]]:  # fmt: skip
    """(number of programs, arguments) of a launch on at most so many programs."""
    rows, columns = x.shape
    elements = 16 // x.element_size()
    words = torch.zeros((rows, group.size), dtype=torch.int64, device=x.device)
    return min(programs // group.size, rows) * group.size, {
        "X": x, "G": g, "Y": y, "WORDS": words, "rows": rows, "columns": columns,
        "x_stride": x.stride(0), "g_stride": g.stride(0), "y_stride": y.stride(0),
        "segment": group.segment(columns, elements), "scale": scale, "KIND": kind,
        "GROUP": group.size, "PADDED": triton.next_power_of_2(group.size),
        "K": group.blocks(columns, elements), "STAGES": group.stages, "E": elements,
        "PATIENCE": PATIENCE, "WARPS": group.warps, "num_warps": group.warps,
    }  # fmt: skip


def launch(
    kind: int, x: torch.Tensor, g: torch.Tensor, y: torch.Tensor, scale: float, group: Group
) -> None:
    """Write y, from x, and g of a gradient: rows of one dtype on 16 bytes."""
    card = torch.cuda.get_device_properties(x.device)
    programs, given = arguments(
        kind, x, g, y, scale, group, card.multi_processor_count * group.resident
    )
    kernels().group_kernel[(programs,)](**given, launch_cooperative_grid=True)
