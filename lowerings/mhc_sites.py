"""Sites of hyper-connections: where the residual streams are."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable
from typing import Any

import torch
from inductor_ext.lowerings import mhc_arithmetic as _arithmetic  # noqa: F401  (adds rules)
from inductor_ext.lowerings.mhc_entries import Reader, aten, shape_of
from inductor_ext.lowerings.sites import DTYPES

from inductor_ext import compat, compat_fx, compat_pre_grad
from inductor_ext.ops import _mhc  # noqa: F401  (a program out of a cache calls the operations)
from inductor_ext.shadow import Shadow

STREAMS = (2, 4, 8)


def streams_of(node: Any) -> tuple[int, int] | None:
    """(n, H) of a value [..., n, H] that can be residual streams on a card."""
    tensor = node.meta["val"]
    if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2 or tensor.dtype not in DTYPES:
        return None
    if compat_pre_grad.fake_mode_of(tensor) is None:
        return None  # a tensor of another kind (a DTensor), for which the operations have no rules
    n, hidden = shape_of(node)[-2:]
    if not compat.is_static(n) or not compat.is_static(hidden) or int(n) not in STREAMS:
        return None
    if int(hidden) <= max(STREAMS) or not compat_fx.writes_triton(tensor.device):
        return None
    return int(n), int(hidden)


def _below(node: Any) -> Any:
    """What a node is a view or an exact conversion of; None for anything else."""
    if node.target not in _SAME_NUMBERS:
        return None
    source = node.args[0]
    before, after = source.meta["val"].dtype, node.meta["val"].dtype
    exact = before in DTYPES and after in (torch.float32, torch.float64)
    return source if before == after or exact else None


_SAME_NUMBERS = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
    aten.permute.default,
    aten.transpose.int,
    aten.clone.default,
    aten.alias.default,
    aten._to_copy.default,
}


def residuals(shadow: Shadow, node: Any, width: int | None = None) -> list[Any]:
    """The nodes [..., n, H] of which ``node`` is a view or a conversion, those that come first in
    the program first. With a ``width`` n H is that, and multiples by token are looked through."""
    found = []
    while node is not None:
        streams = streams_of(node) if node in shadow.first else None
        if streams is not None and width in (None, streams[0] * streams[1]):
            found.append(node)
        wide = []
        if width is not None and node.target is aten.mul.Tensor:
            wide = [a for a in node.args if isinstance(a, torch.fx.Node) and _is_wide(a, node)]
        elif width is not None:
            wide = _normalised(node)
        node = wide[0] if wide else _below(node)
    return found[::-1]


def _normalised(node: Any) -> list[Any]:
    """What a node is the RMS norm of."""
    whole = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else node
    norms = (aten.rms_norm.default, aten._fused_rms_norm.default)
    return [whole.args[0]] if whole.target in norms else []


def _is_wide(operand: Any, whole: Any) -> bool:
    tensor, out = operand.meta["val"], whole.meta["val"]
    return tensor.dim() == out.dim() and shape_of(operand) == shape_of(whole)


def read_from(
    reader: Reader, shadow: Shadow, positions: dict[Any, int], goes_on: Callable[[Any], bool]
) -> None:
    """Read what depends on the reader's streams, in order, behind each node that ``goes_on``.
    What is written to has not one value: it is not read."""
    heap: list[tuple[int, Any]] = []
    seen = {reader.source}

    def push(node: Any) -> None:
        for user in node.users:
            if user not in seen and user.op == "call_function":
                seen.add(user)
                heapq.heappush(heap, (positions[user], user))

    push(reader.source)
    while heap:
        _, node = heapq.heappop(heap)
        if not shadow.is_mutated(node) and reader.read(node) is not None and goes_on(node):
            push(node)


# In the meta of a call that a pass put in: nobody writes to its values.
FOUND = "inductor_ext_found"


def operation(name: str) -> Any:
    """An operation of ``ops._mhc``."""
    return getattr(torch.ops.inductor_ext, name).default
