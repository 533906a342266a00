"""Chunks of the rows of ``linear_cross_entropy``: how long they are, their logits, and the
gradients that are added up over them.

How long a chunk is: each reads W twice and W's fp32 gradient, which it also writes, 12 H V bytes
beside 6 H V flops a row, so that C rows are C/2 flops a byte: 1024 rows are 512, where an H200
needs 206 to be kept busy. More rows cost memory only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LEAST_ROWS = 1024
MEMORY = 2_500_000_000


def chunk_rows(rows: int, hidden: int, classes: int, itemsize: int, memory: int) -> int:
    """Rows of a chunk: all, if their logits fit into ``memory`` bytes; else what fits beside the
    fp32 sum of W's gradient, in steps of 128, and never less than LEAST_ROWS. All as well, if that
    takes no more. The sum is W's gradient itself, not an addition, where W is fp32."""
    row = classes * itemsize
    added = 0 if itemsize == 4 else 4 * hidden * classes
    fit = max((memory - added) // row // 128 * 128, LEAST_ROWS)
    if rows * row <= max(memory, added + fit * row):
        return max(rows, 1)
    return min(rows, fit)


def rows_of_chunk(h: Tensor, w: Tensor, memory: int, wanted: Sequence[bool]) -> int:
    """Rows of a chunk of h against w, which may have no rows, where only ``wanted`` is made."""
    hidden = h.shape[1] if wanted[1] else 0
    return chunk_rows(h.shape[0], hidden, max(w.shape[0], 1), h.element_size(), memory)


def computing(h: Tensor) -> Any:
    """A context in which products are made in the dtype of h, whatever autocast would have."""
    return torch.autocast(h.device.type, enabled=False)


def logits_into(h: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """h Wᵀ + bias in their dtype, written into the first rows of ``out``."""
    out = out[: h.shape[0]]
    if bias is None:
        return torch.mm(h, w.t(), out=out)
    return torch.addmm(bias, h, w.t(), out=out)


class Gradients:
    """dh, dW and db, filled chunk by chunk from the gradient of the chunk's logits. dW and db are
    added up in fp32 (fp64 for fp64), in which dh is kept as well if it is ``partial``, one of
    several that make a sum."""

    def __init__(
        self, h: Tensor, w: Tensor, bias: Tensor | None, chunks: int, wanted: Sequence[bool],
        partial: bool = False,
    ) -> None:  # fmt: skip
        self.h, self.w, self.bias, self.wanted = h, w, bias, wanted
        self.wide = torch.float64 if h.dtype == torch.float64 else torch.float32
        self.dh = self.dw = self.db = None
        if wanted[0]:
            dtype = self.wide if partial else h.dtype
            self.dh = torch.empty_like(h, dtype=dtype, memory_format=torch.contiguous_format)
        if wanted[1] and chunks > 1:
            self.dw = torch.zeros(w.shape, dtype=self.wide, device=w.device)
        if wanted[2] and bias is not None:
            self.db = torch.zeros(bias.shape, dtype=self.wide, device=w.device)

    def add(self, part: slice, dx: Tensor) -> None:
        with computing(dx):
            self._add(part, dx)

    def _add(self, part: slice, dx: Tensor) -> None:
        if self.dh is not None and not dx.shape[1]:  # a shard may have no classes
            self.dh[part].zero_()
        elif self.dh is not None and self.dh.dtype == dx.dtype:
            torch.mm(dx, self.w, out=self.dh[part])
        elif self.dh is not None and dx.is_cuda:
            torch.mm(dx, self.w, out_dtype=self.wide, out=self.dh[part])
        elif self.dh is not None:
            torch.mm(dx.to(self.wide), self.w.to(self.wide), out=self.dh[part])
        h = self.h[part]
        if self.db is not None:
            self.db += dx.sum(0, dtype=self.wide)
        if not self.wanted[1]:
            return
        if self.dw is None:
            self.dw = torch.mm(dx.t(), h)
        elif h.dtype == self.wide:
            self.dw.addmm_(dx.t(), h)
        elif h.is_cuda:
            torch.addmm(self.dw, dx.t(), h, out_dtype=torch.float32, out=self.dw)
        else:
            self.dw.addmm_(dx.t().float(), h.float())

    def done(self) -> tuple[Tensor, Tensor, Tensor]:
        """An empty tensor stands for what is not wanted."""
        none, dtype = self.w.new_empty, self.w.dtype
        dh, dw, db = (none(0) if t is None else t.to(dtype) for t in (self.dh, self.dw, self.db))
        return dh, dw, db


def empty_gradients(
    h: Tensor, w: Tensor, bias: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """What ``Gradients`` returns, without values."""
    dh, dw, db = (
        w.new_empty(0)
        if t is None or not want
        else torch.empty_like(t, memory_format=torch.contiguous_format)
        for t, want in zip((h, w, bias), wanted, strict=True)
    )
    return dh, dw, db


def parts_of(rows: int, size: int) -> list[slice]:
    """The chunks of the rows; one of no rows if there are none."""
    return [slice(first, min(first + size, rows)) for first in range(0, rows, size)] or [
        slice(0, 0)
    ]


def buffer_of(h: Tensor, w: Tensor, size: int) -> Tensor:
    """Memory for the logits of a chunk: rows begin on 16-byte boundaries, as fast matrix products
    want."""
    columns = w.shape[0]
    whole = 128 // h.element_size()
    aligned = columns * h.element_size() % 16 == 0
    width = columns if aligned else -(-columns // whole) * whole
    return torch.empty((size, width), dtype=h.dtype, device=h.device)[:, :columns]


def by_chunks(
    h: Tensor, w: Tensor, bias: Tensor | None, wanted: Sequence[bool], memory: int,
    visit: Callable[[slice, Tensor], Any],
) -> tuple[list[Any], tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """(what ``visit`` returns of each chunk, (dh, dW, db)).

    ``visit(rows, x)`` is handed the chunk's rows and their logits, and leaves the logits' gradient
    in x if any is ``wanted``.
    """
    size = rows_of_chunk(h, w, memory, wanted)
    logits, parts = buffer_of(h, w, size), parts_of(h.shape[0], size)
    gradients, results = Gradients(h, w, bias, len(parts), wanted), []
    for part in parts:
        with computing(h):
            x = logits_into(h[part], w, bias, logits)
        results.append(visit(part, x))
        gradients.add(part, x)
    return results, gradients.done()
