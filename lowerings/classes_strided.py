"""Softmaxes over classes that are strided in memory: a class per pixel, [N, C, H, W] and the like.

Which logits are taken as they lie, and how what is made of them is written with the classes last.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from inductor_ext.lowerings import classes_last
from inductor_ext.lowerings.loss_rows import by_number, is_contiguous
from inductor_ext.lowerings.softmax_cores import Core, is_long, keeps_value, lies_in_memory
from inductor_ext.templates import class_softmax_launch

from inductor_ext import compat
from inductor_ext.editing import value

aten = torch.ops.aten
CLASSES = 16  # below which what is stored per place outweighs the logits
# Of a softmax's gradient, which stock makes of more in one kernel: 143 us with 150 for our 186.
GRADIENT = 32
# Next to each other, and in all: fewer leave threads or multiprocessors idle.
PLACES, ROWS = 32, 32 * 132


def strided(core: Core) -> Any:
    """The logits in memory of a softmax over a dimension that is strided there; None for others."""
    node = core.x
    while True:
        tensor = value(node)
        if lies_in_memory(node):
            along = core.dim
            last = tensor.dim() < 2 or along == tensor.dim() - 1
            return None if last or not _occupies(tensor, along) else node
        by = by_number(node)
        if by is not None:
            node = by[0]
        elif node.op == "call_function" and (keeps_value(node) or node.target in classes_last.SAME):
            node = node.args[0]
        else:
            return None


def move(graph: Any, core: Core, logits: Any) -> None:
    """Write a softmax over strided classes, and all that is made of it, with the classes last, of
    a view of the logits: ``rows_of_view`` reads it. Raises NoForm, and has changed nothing then."""
    classes_last.rewrite_from(graph, logits, core.dim, strided=True)


def memory_of(view: Any) -> tuple[Any, int] | None:
    """(logits in memory, the dimension of their classes) of a view that has them last."""
    if view.op != "call_function" or view.target is not aten.permute.default:
        return None
    logits, dims = view.args
    rank = value(view).dim()
    dims = [d % rank for d in dims]
    along = dims[-1]
    if dims != classes_last.moved_order(rank, along) or along == rank - 1:
        return None
    fits = lies_in_memory(logits) and _occupies(value(logits), along)
    return (logits, along) if fits else None


def places_apart(rows: Any, base: Any, dim: int) -> Any:
    """``base``, or what has its shape, as [N, C, D] around its classes."""
    shape = value(base).shape
    sizes = rows.sizes([math.prod(shape[:dim]), shape[dim]])
    return rows.editor.call(aten.view.default, base, [*sizes, -1])


def has_values(core: Core) -> bool:
    """Whether one kernel writes a softmax's values faster than stock: a thread has all classes of
    its places, so that no threads meet."""
    shape = [compat.hint(compat.expr(s)) for s in value(core.x).shape]
    samples, places = math.prod(shape[: core.dim]), math.prod(shape[core.dim + 1 :])
    facts = samples, shape[core.dim], places, value(core.x).element_size()
    return class_softmax_launch.tile.rule(*facts, of="values").split == 1


def _occupies(tensor: torch.Tensor, along: int) -> bool:
    """Whether logits in memory have enough places beside their classes to be read as they lie."""
    sizes = [compat.expr(s) for s in tensor.shape]
    if compat.has_unbacked(sizes) or not is_contiguous(tensor):
        return False
    hints = [compat.hint(s) for s in sizes]
    places = math.prod(hints[along + 1 :])
    return places >= PLACES and math.prod(hints[:along]) * places >= ROWS


def is_strided(core: Core) -> bool:
    """Whether a softmax is one over many classes that are strided in memory."""
    return strided(core) is not None and is_long(core.x, core.dim, CLASSES - 1)
