"""The arguments of a program that is tuned, at other sizes and in memory of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from . import measure

Marks = dict[int, dict[int, tuple[int, int]]]  # argument -> dimension -> bounds
Place = tuple[int, int]  # an argument and a dimension of it


def followers(place: Place, args: Sequence[Any], marks: Marks) -> set[Place]:
    """What is marked and as large as a dimension: it is taken for the same size."""
    size = args[place[0]].shape[place[1]]
    return {(i, dim) for i, dims in marks.items() for dim in dims if args[i].shape[dim] == size}


def resized(args: Sequence[Any], sizes: Mapping[Place, int]) -> list[Any]:
    """The arguments, with these dimensions repeated or cut to size, in the same order in memory."""
    out: list[Any] = []
    for i, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            t = arg.detach()
            order = sorted(range(t.dim()), key=lambda d: -t.stride(d))
            mine = {dim: n for (at, dim), n in sizes.items() if at == i and n != t.shape[dim]}
            for dim, size in mine.items():
                t = t.index_select(dim, torch.arange(size, device=t.device) % t.shape[dim])
            if mine:
                t = t.permute(order).contiguous().permute([order.index(d) for d in range(t.dim())])
            arg = t.requires_grad_(arg.requires_grad)
        out.append(arg)
    return out


def owned(args: Sequence[Any]) -> list[Any]:
    """The arguments as copies, so that what a program writes to is not its caller's."""
    leaves, spec = pytree.tree_flatten(list(args))
    plain = (torch.Tensor, torch.nn.Parameter)
    own = [
        i for i, t in enumerate(leaves)
        if type(t) in plain and t.layout is torch.strided and t.device.type != "meta"
    ]  # fmt: skip
    with torch.no_grad():
        copies = measure.cloned(tuple(leaves[i] for i in own))
    for i, copy in zip(own, copies, strict=True):
        leaves[i] = copy
    return pytree.tree_unflatten(leaves, spec)


def called(program: Callable[..., Any], args: Sequence[Any]) -> None:
    """A forward, and a backward where an argument has a gradient."""
    outputs = [t for t in pytree.tree_leaves(program(*args)) if isinstance(t, torch.Tensor)]
    wanted = [t for t in args if isinstance(t, torch.Tensor) and t.requires_grad]
    outputs = [t for t in outputs if t.requires_grad]
    if wanted and outputs:
        gradients = [torch.randn_like(t) for t in outputs]
        torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
