"""Where the elements of a node are, seen from a scan: the views in between, and what a flip of the
scanned dimension leaves to do."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch

from inductor_ext import compat
from inductor_ext.editing import same_size, value

aten, prims = torch.ops.aten, torch.ops.prims

NOWHERE = -1  # the scanned dimension is none of the node's, or one entry serves it all


@dataclasses.dataclass(frozen=True)
class Step:
    """A view, ``target(x, *args)``; without a target expanded to the shape of the node ``like``,
    whose size expressions are the arguments then."""

    target: Any
    args: tuple[Any, ...]
    like: Any = dataclasses.field(default=None, compare=False)


def expansion(like: Any) -> Step:
    """To the shape of a node."""
    return Step(None, tuple(compat.expr(s) for s in value(like).shape), like)


@dataclasses.dataclass(frozen=True)
class Place:
    """``steps`` lead from a node's shape to that of the scan. ``dim`` is the scanned dimension in
    the node: NOWHERE, or None where views hide it. ``mirrored``: its positions along there run
    against those of the memory that is scanned."""

    steps: tuple[Step, ...]
    dim: int | None
    mirrored: bool

    def is_direct(self) -> bool:
        """Whether an element lies where the scan looks for it."""
        return not self.mirrored or self.dim == NOWHERE


class NoPlace(Exception):
    """A view that can't be looked through."""


def _frozen(arg: Any) -> Any:
    return tuple(_frozen(a) for a in arg) if isinstance(arg, (list, tuple)) else arg


def thawed(arg: Any) -> Any:
    """Arguments of a step as arguments of a node."""
    return [thawed(a) for a in arg] if isinstance(arg, tuple) else arg


def _argument(node: Any, index: int, name: str, default: Any) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def _permutation(node: Any, rank: int) -> list[int]:
    if node.target is aten.permute.default:
        return [d % rank for d in node.args[1]]
    order = list(range(rank))
    if rank:
        a, b = (0, rank - 1) if node.target is aten.t.default else node.args[1:3]
        order[a % rank], order[b % rank] = order[b % rank], order[a % rank]
    return order


_PERMUTES = {aten.permute.default, aten.transpose.int, aten.t.default}
_SQUEEZES = {aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims}
_RESHAPES = {aten.view.default, aten.reshape.default}
_SAME = {aten.alias.default, aten.detach.default}
FLIPS = {prims.rev.default, aten.flip.default}


def is_flip(node: Any, dim: int | None) -> bool:
    """Whether a node turns dimension ``dim`` around and nothing else."""
    if node.target not in FLIPS or dim in (None, NOWHERE):
        return False
    rank = value(node).dim()
    return [d % rank for d in node.args[1]] == [dim]


def is_flip_or_view(node: Any) -> bool:
    """Whether ``below`` may look through a node."""
    return node.op == "call_function" and node.target in (
        _PERMUTES
        | _SQUEEZES
        | _RESHAPES
        | _SAME
        | FLIPS
        | {
            aten.unsqueeze.default,
            aten.expand.default,
            aten.slice.Tensor,
            aten.select.int,
        }
    )


def _kept(node: Any) -> list[int]:
    """The dimensions of its input that a squeeze keeps."""
    source = value(node.args[0])
    rank = source.dim()
    if node.target is aten.squeeze.default:
        dims = list(range(rank))
    else:
        given = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
        dims = [d % rank for d in given] if rank else []
    return [d for d in range(rank) if d not in dims or not same_size(source.shape[d], 1)]


def _dim_below(node: Any, dim: int) -> int | None:
    """The scanned dimension in the input of a view, which has it as ``dim``."""
    target, rank, source = node.target, value(node).dim(), value(node.args[0])
    if target in _PERMUTES:
        return _permutation(node, rank)[dim]
    if target is aten.unsqueeze.default:
        new = node.args[1] % rank
        return NOWHERE if dim == new else dim - (dim > new)
    if target in _SQUEEZES:
        return _kept(node)[dim]
    if target is aten.expand.default:
        return broadcast_dim(source, value(node), dim)
    if target is aten.select.int:
        return dim + (dim >= node.args[1] % source.dim())
    if target is aten.slice.Tensor:
        return None if _argument(node, 1, "dim", 0) % rank == dim else dim
    return dim if target in _SAME else None


def broadcast_dim(source: Any, out: Any, dim: int | None) -> int | None:
    """Dimension ``dim`` of ``out`` in a tensor that is broadcast to it."""
    if dim is None or dim == NOWHERE:
        return dim
    below = dim - (out.dim() - source.dim())
    if below < 0:
        return NOWHERE
    one = same_size(source.shape[below], 1) and not same_size(out.shape[dim], 1)
    return NOWHERE if one else below


def below(node: Any, place: Place) -> tuple[Any, Place]:
    """The input of a view at ``place``, and its own place. Raises NoPlace."""
    source = node.args[0]
    if is_flip(node, place.dim):
        return source, Place(place.steps, place.dim, not place.mirrored)
    if node.target in FLIPS or not is_flip_or_view(node):
        raise NoPlace
    dim = place.dim if place.dim in (None, NOWHERE) else _dim_below(node, place.dim)
    if dim is None and not place.is_direct():
        raise NoPlace
    if node.target in _SAME:
        return source, Place(place.steps, dim, place.mirrored)
    names = ("dim", "start", "end", "step") if node.target is aten.slice.Tensor else ()
    args = list(node.args[1:])
    if node.kwargs:
        defaults = {"dim": 0, "start": None, "end": None, "step": 1}
        if not set(node.kwargs) <= set(names):
            raise NoPlace
        args += [node.kwargs.get(n, defaults[n]) for n in names[len(args) :]]
    step = Step(node.target, _frozen(args))
    return source, Place((step, *place.steps), dim, place.mirrored)


def above(node: Any, place: Place) -> tuple[Place, Step | None]:
    """The place of a view whose input is at ``place``, and the step that leads to it from there
    (None: none). Only views that can be undone; raises NoPlace."""
    if not isinstance(value(node), torch.Tensor):
        raise NoPlace
    dim, rank = place.dim, value(node).dim()
    assert dim is not None
    if is_flip(node, dim):
        return Place(place.steps, dim, not place.mirrored), None
    if node.target in _SAME:
        return place, None
    if node.target in _PERMUTES:
        order = _permutation(node, rank)
        inverse = tuple(order.index(d) for d in range(rank))
        back = Step(aten.permute.default, (inverse,))
        there = Step(aten.permute.default, (tuple(order),))
        return Place((back, *place.steps), order.index(dim), place.mirrored), there
    if node.target is aten.unsqueeze.default:
        new = node.args[1] % rank
        back, there = Step(aten.squeeze.dim, (new,)), Step(aten.unsqueeze.default, (new,))
        return Place((back, *place.steps), dim + (dim >= new), place.mirrored), there
    raise NoPlace


def cut(node: Any, dim: int) -> str:
    """ "last" or "first" where a node is its input without its last or first entry along ``dim``;
    else ""."""
    if node.target is not aten.slice.Tensor or value(node).dim() == 0:
        return ""
    size = value(node.args[0]).shape[dim]
    start, end = _argument(node, 2, "start", None), _argument(node, 3, "end", None)
    if (
        _argument(node, 1, "dim", 0) % value(node).dim() != dim
        or _argument(node, 4, "step", 1) != 1
        or not same_size(value(node).shape[dim], size - 1)
    ):
        return ""
    if start in (None, 0):
        return "last"
    beyond = end is None or (isinstance(end, int) and end >= 2**63 - 1)
    whole = beyond or (not isinstance(end, torch.fx.Node) and same_size(end, size))
    return "first" if start == 1 and whole else ""


def filled(node: Any, dim: int) -> tuple[Any, str, Any] | None:
    """(x, "first" or "last", number) where a node is x with one entry of that number more along
    ``dim``, in front or behind; else None."""
    if node.target is aten.constant_pad_nd.default:
        rank, pad = value(node).dim(), list(node.args[1])
        own = 2 * (rank - 1 - dim)
        pad += [0] * (2 * rank - len(pad))
        if any(not isinstance(p, int) for p in pad) or any(pad[:own] + pad[own + 2 :]):
            return None
        number = _argument(node, 2, "value", 0)
        where = {(1, 0): "first", (0, 1): "last"}.get((pad[own], pad[own + 1]))
        return None if where is None else (node.args[0], where, number)
    if node.target is aten.cat.default and len(node.args[0]) == 2:
        if _argument(node, 1, "dim", 0) % value(node).dim() != dim:
            return None
        for i, entry in enumerate(node.args[0]):
            if entry.target in _FULL and same_size(value(entry).shape[dim], 1):
                number = entry.args[1] if entry.target is aten.full.default else 0
                return node.args[0][1 - i], ("first", "last")[i], number
    return None


_FULL = {aten.full.default, aten.zeros.default, aten.zeros_like.default}


def broadcast(source: Any, to: Any, place: Place) -> Place:
    """The place of an operand of the pointwise node ``to`` at ``place``."""
    if len(value(source).shape) == len(value(to).shape) and all(
        same_size(a, b) for a, b in zip(value(source).shape, value(to).shape, strict=True)
    ):
        return place
    dim = broadcast_dim(value(source), value(to), place.dim)
    return Place((expansion(to), *place.steps), dim, place.mirrored)


def viewed(tensor: Any, steps: tuple[Step, ...]) -> Any:
    """A fake tensor behind ``steps``. Raises NoPlace where it has to be copied."""
    symbolic = compat.shape_env() is not None
    try:
        with compat.no_new_guards() if symbolic else contextlib.nullcontext(), torch.no_grad():
            for step in steps:
                args = torch.fx.node.map_arg(step.args, value)
                if step.target is None:
                    tensor = tensor.expand(value(step.like).shape)
                elif step.target in _RESHAPES:
                    tensor = tensor.view(thawed(args[0]))
                else:
                    tensor = step.target(tensor, *thawed(args))
    except (RuntimeError, compat.SizeDecides) as error:
        raise NoPlace from error
    return tensor
