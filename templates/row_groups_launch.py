"""Launches of ``row_groups``: how many programs share a row, and what of it each keeps."""

from __future__ import annotations

import dataclasses
import functools
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


# Bytes of a row, in all tensors, of each of its programs; the first where several are as good.
_PARTS = ((1 << 15, Group(0, 8, 3, 2)), (1 << 16, Group(0, 16, 3)))
_LARGEST = 24


def group_of(
    columns: int, itemsize: int, tensors: int, again: int, processors: int
) -> Group | None:
    """The group for rows of ``tensors`` that are read, of which ``again`` are needed twice, on a
    card of so many multiprocessors; None where one program a row is as fast: where L2 holds what is
    needed twice of the rows under way, and where parts or groups would leave much of a card idle
    (benchmarks/NOTES.md).
    """
    row, found = tensors * columns * itemsize, None
    if again * columns * itemsize <= (458752 if tensors > 1 else 393216):
        return None
    # A result as large as what is read hides less of the exchange, and two programs were not timed.
    best, parts = (0.8, _PARTS) if tensors > 1 else (0.92, _PARTS[1:])
    for part, group in parts:
        size, most = triton.cdiv(row, part), processors * group.resident
        used = row / (size * part) * (most // size * size / most)
        if size <= _LARGEST and used > best:
            best, found = used, dataclasses.replace(group, size=size)
    return found


def takes(again: int, x: torch.Tensor, *others: torch.Tensor) -> Group | None:
    """The group for rows of x [N, V] and of others that are read beside it, ``again`` of them
    twice; None where they are left to one program each."""
    rows, columns = x.shape
    # While a program is traced there are no rows yet, and its launches are other kernels.
    real = type(x) in (torch.Tensor, torch.nn.Parameter) and x.is_cuda
    if not real or not triton.__version__.startswith(VERSIONS):
        return None
    if torch.cuda.get_device_capability(x.device) != (9, 0):
        return None
    elements = 16 // x.element_size()
    tensors = (x, *others)
    on_16_bytes = all(t.stride(0) % elements == 0 and t.data_ptr() % 16 == 0 for t in tensors)
    if columns % elements or not on_16_bytes:
        return None
    programs = _multiprocessors(x.device)
    group = group_of(columns, x.element_size(), len(tensors), again, programs)
    if group is None or rows * group.size < 4 * programs * group.resident:
        return None  # too few rows to have some of them under way all the time
    return group


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


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
    most = _multiprocessors(x.device) * group.resident
    programs, given = arguments(kind, x, g, y, scale, group, most)
    kernels().group_kernel[(programs,)](**given, launch_cooperative_grid=True)


def forward(x: torch.Tensor, scale: float, log: bool, group: Group) -> torch.Tensor:
    """``softmax.forward``."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(LOG_SOFTMAX if log else SOFTMAX, x, x, y, scale, group)
    return y


def backward(
    y: torch.Tensor, g: torch.Tensor, scale: float, log: bool, group: Group
) -> torch.Tensor:
    """``softmax.backward``."""
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    launch(LOG_SOFTMAX_BACKWARD if log else SOFTMAX_BACKWARD, y, g, dx, scale, group)
    return dx
