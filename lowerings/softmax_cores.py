"""The softmaxes of a joint graph: where a row's maximum and its sum of exponentials are computed.

A core is ``sum(exp(x - m))`` over one dimension with ``m`` the maximum of ``x`` over it, in
whatever graph it stands: softmax, log_softmax, logsumexp (whose maximum is 0 where it is infinite),
or written out by hand with ``amax`` or ``max``.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from inductor_ext import compat, compat_fx, matching
from inductor_ext.editing import Editor, Numbers, same_shape, value

aten, prims = torch.ops.aten, torch.ops.prims

NARROW = (torch.float32, torch.bfloat16, torch.float16)
PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten._scaled_mm.default,
}
MEANS = {aten.mean.dim, aten.mean.default}
SUMS = {aten.sum.dim_IntList, aten.sum.default, *MEANS}
LONG = 1024  # up to here Inductor keeps a row in registers
_MADE = "inductor_ext_softmaxes"  # in the meta of an operation on rows
_RESHAPED = {
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.view.default,
    aten.reshape.default,
    aten.alias.default,
    aten.detach.default,
}


@dataclasses.dataclass(frozen=True)
class Core:
    """``total`` is the sum of exp(``x`` - ``peak``) over dimension ``dim`` of ``x``.

    ``x`` is the first of the equal nodes; ``guarded`` where an infinite peak counts as 0.
    """

    x: Any
    dim: int
    peak: Any
    total: Any
    guarded: bool

    def site(self) -> str:
        """The place, for a report."""
        return site(self.x, self.dim)


def site(x: Any, dim: int, what: str = "softmax", dtype: torch.dtype | None = None) -> str:
    """ "softmax [4096,32000] bfloat16 over dimension 1", the dtype that of the logits."""
    tensor = value(x)
    if dtype is None:
        converted = x.target is prims.convert_element_type.default
        dtype = value(x.args[0] if converted else x).dtype
    sizes = ",".join(str(s) for s in tensor.shape)
    return f"{what} [{sizes}] {str(dtype).removeprefix('torch.')} over dimension {dim}"


def uncast(node: Any) -> Any:
    """What a chain of conversions between floating-point types begins at."""
    while isinstance(node, torch.fx.Node) and keeps_value(node):
        node = node.args[0]
    return node


def keeps_value(node: Any) -> bool:
    """Whether a node is a conversion between floating-point types, the same but for rounding."""
    return (
        node.target is prims.convert_element_type.default
        and value(node).dtype in NARROW
        and value(node.args[0]).dtype in NARROW
    )


def lies_in_memory(node: Any) -> bool:
    """Whether a value is written to memory whoever reads it: no code that could fuse makes it."""
    if node.target is operator.getitem:
        node = node.args[0]
    if node.op != "call_function":
        return node.op in ("placeholder", "get_attr")
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target is aten.convolution.default and node.args[2] is not None:
        return False  # Inductor adds the bias where the result is read
    return node.target in PRODUCTS or compat_fx.is_extern(node.target)


def row_shape(x: Any, dim: int) -> list[Any]:
    """The shape of ``x`` with one entry along ``dim``."""
    shape = list(value(x).shape)
    shape[dim] = 1
    return shape


def reduced_dim(node: Any) -> int | None:
    """The one dimension that a reduction over a list of them reduces; None for several."""
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    dims = [dims] if isinstance(dims, int) else list(dims or ())
    rank = value(node.args[0]).dim()
    return dims[0] % rank if len(dims) == 1 and rank else None


def reduced(node: Any) -> list[int]:
    """The dimensions that a sum or mean reduces."""
    rank = value(node.args[0]).dim()
    dims = node.args[1] if len(node.args) > 1 else None
    return [d % rank for d in dims] if dims else list(range(rank))


def peak_of(node: Any, numbers: Numbers) -> tuple[Any, Any, int, bool] | None:
    """(the maximum, of what, over which dimension, whether it is 0 where infinite), if ``node`` is
    a maximum over one dimension in some shape."""
    guarded = False
    while isinstance(node, torch.fx.Node) and node.op == "call_function":
        inner: Any = node.args[0] if node.args else None
        if node.target in _RESHAPED:
            node = inner
        elif node.target is aten.where.self and not guarded:
            finite = _infinite_is_zero(node, numbers)
            if finite is None:
                return None
            node, guarded = finite, True
        elif node.target is aten.amax.default:
            dim = reduced_dim(node)
            return None if dim is None else (node, numbers.of(inner), dim, guarded)
        elif node.target is operator.getitem and node.args[1] == 0:
            if inner.target is aten.max.dim:
                dim = inner.args[1] % max(value(inner.args[0]).dim(), 1)
                return node, numbers.of(inner.args[0]), dim, guarded
            return None
        else:
            return None
    return None


def _infinite_is_zero(where: Any, numbers: Numbers) -> Any:
    """m of ``where(abs(m) == inf, 0, m)``; None for anything else."""
    condition, zero, node = where.args
    if condition.target is not aten.eq.Scalar or condition.args[1] != float("inf"):
        return None
    magnitude = condition.args[0]
    if magnitude.target is not aten.abs.default or constant(zero) != 0:
        return None
    return node if numbers.of(magnitude.args[0]) is numbers.of(node) else None


def constant(node: Any) -> float | int | None:
    """The number that every element of ``node`` is; None where that is not known."""
    if isinstance(node, (int, float)) and not isinstance(node, bool):
        return node
    if not isinstance(node, torch.fx.Node) or node.op != "call_function":
        return None
    if node.target is aten.full.default:
        found = node.args[1]
    elif node.target is aten.scalar_tensor.default:
        found = node.args[0]
    elif node.target in (aten.expand.default, prims.convert_element_type.default, *_RESHAPED):
        if not value(node).is_floating_point():
            return None
        return constant(node.args[0])
    else:
        return None
    return found if isinstance(found, (int, float)) and not isinstance(found, bool) else None


def xlogy(node: Any) -> Any:
    """w, where a node is what ``xlogy(w, w)`` decomposes into; None for any other."""
    node = uncast(node) if isinstance(node, torch.fx.Node) else node
    if not isinstance(node, torch.fx.Node) or node.target is not aten.where.self:
        return None
    unknown, nan, inner = node.args
    number = constant(nan)
    if unknown.target is not aten.isnan.default or number is None or not math.isnan(number):
        return None
    w = unknown.args[0]
    if inner.target is not aten.where.self or constant(inner.args[1]) != 0:
        return None
    zero, product = inner.args[0], inner.args[2]
    if zero.target is not aten.eq.Scalar or zero.args != (w, 0):
        return None
    if product.target is not aten.mul.Tensor or product.args[0] is not w:
        return None
    log = product.args[1]
    return w if log.target is aten.log.default and log.args[0] is w else None


def cores(graph: Any, numbers: Numbers) -> Iterator[Core]:
    """Every core of the graph, in its order."""
    for total in graph.nodes:
        if total.target is not aten.sum.dim_IntList:
            continue
        exp, dim = uncast(total.args[0]), reduced_dim(total)
        if dim is None or exp.target is not aten.exp.default:
            continue
        shifted = uncast(exp.args[0])
        if shifted.target is not aten.sub.Tensor or shifted.kwargs.get("alpha", 1) != 1:
            continue
        x, shift = shifted.args
        if not all(isinstance(n, torch.fx.Node) for n in (x, shift)):
            continue
        found = peak_of(shift, numbers)
        if (
            found is not None
            and found[1] is numbers.of(x)
            and found[2] == dim
            and same_shape(value(shift).shape, row_shape(x, dim))
        ):
            yield Core(numbers.of(x), dim, found[0], total, found[3])


def remember(operation: Any, made: Iterable[Core]) -> None:
    """Note the cores whose maxima and sums an operation makes, for ``remembered``."""
    operation.meta[_MADE] = list(made)


def noted(operation: Any) -> list[Core]:
    """What ``remember`` noted of an operation."""
    return list(operation.meta.get(_MADE, ()))


def remembered(graph: Any) -> Iterator[tuple[Any, Core]]:
    """(operation, core) of what ``remember`` noted and is still there."""
    for node in graph.nodes:
        for core in noted(node):
            if not any(map(compat_fx.is_erased, (core.x, core.peak, core.total))):
                yield node, core


def stored(row: Any, editor: Editor) -> Any:
    """A row value in memory."""
    strides = value(row).stride()
    if not strides or not all(isinstance(s, int) for s in strides) or 0 in strides:
        return row
    return editor.call(compat_fx.into_memory(), row, list(strides))


def store_rows(graph: Any, made: Iterable[Any]) -> None:
    """Put in memory what is computed from row values and used beside whole rows: pointwise code
    would compute it again for each entry."""
    editor, stack = Editor(graph), list(made)
    seen = set(stack)
    while stack:
        node = stack.pop()
        wide = []
        for user in list(node.users):
            if not (matching.is_pointwise(user) or matching.is_view(user)):
                continue
            if not same_shape([value(user).numel()], [value(node).numel()]):
                wide.append(user)
            elif user not in seen:
                seen.add(user)
                stack.append(user)
        source = matching.viewed(node)
        if wide and matching.is_pointwise(source):
            editor.before(node.next)
            editor.forget()
            kept = stored(node, editor)
            for user in wide:
                user.replace_input_with(node, kept)


def replaced(group: list[Core]) -> list[Any]:
    """What may be left unused once the maxima and sums of a group are made otherwise."""
    return [node for core in group for node in (core.total, core.peak)]


def put_pair(editor: Editor, group: list[Core], peak: Any, total: Any) -> None:
    """Put a maximum and a sum, in the shape of the logits with one entry along the row, in place of
    those of a group with equal logits."""

    x, dim = group[0].x, group[0].dim

    def put(node: Any, new: Any) -> None:
        if value(node).dim() < value(x).dim():
            new = editor.call(aten.squeeze.dim, new, dim)
        node.replace_all_uses_with(editor.to(new, value(node).dtype))

    for core in group:
        if core.peak.users:
            put(core.peak, peak)
        new = total
        if core.guarded:  # an infinite maximum counted as 0 there: the sum is 0 or infinite
            infinite = editor.call(aten.eq.Scalar, editor.call(aten.abs.default, peak), torch.inf)
            new = editor.call(aten.where.self, infinite, editor.call(aten.exp.default, peak), total)
        put(core.total, new)


def is_long(x: Any, dim: int, longer: int = LONG) -> bool:
    """Whether rows are too long for registers. Shorter ones are no site: stock reads them once."""
    size = compat.expr(value(x).shape[dim])
    return compat.has_unbacked([size]) or compat.hint(size) > longer


def why_not(x: Any, dim: int) -> str | None:
    """A reason to leave long rows to stock."""
    tensor = value(x)
    if not compat_fx.writes_triton(tensor.device):
        return "not Triton code for CUDA"
    if tensor.dtype not in NARROW:
        return f"computed in {tensor.dtype}; fp32, bf16 or fp16 are handled"
    if compat.has_unbacked([compat.expr(s) for s in tensor.shape]):
        return "a size depends on data"
    return None
