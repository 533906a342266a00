"""The logits of a loss, from its softmaxes down to where they come from, and values of its rows.

Between the softmaxes' input z and the logits x in memory stand scales, a tanh softcap, conversions,
views, and slices of rows (logits shifted by a token): z = scale cap tanh(x / cap) of some rows of
x. Each slice begins a new *level*; level 0 are the rows of z. Values of a row are kept flat, [N] or
one number [], whatever shapes they have in between.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from inductor_ext.lowerings.softmax_cores import NARROW, SUMS, constant
from torch.fx.experimental.symbolic_shapes import statically_known_true

from inductor_ext import compat, compat_fx, matching
from inductor_ext.editing import Editor, Numbers, same_shape, same_size, value

aten, prims = torch.ops.aten, torch.ops.prims
MUL = {aten.mul.Tensor, aten.mul.Scalar}
DIV = {aten.div.Tensor, aten.div.Scalar}
WHOLE = (torch.int64, torch.int32)
# They keep the order of the elements.
VIEWS = {
    aten.view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.alias.default,
    aten.detach.default,
    aten.clone.default,
}

# Fewer bytes of logits are swept by stock in less time than a launch out of Python takes; more hide
# it behind the card.
LEAST_BYTES = 2**27
LEAST_STRIDED_BYTES = 2**25  # where stock takes five times as long

# Besides what is pointwise, Inductor computes their input where they read it.
_INLINING = {aten.amax.default, aten.gather.default, aten.index.Tensor, *SUMS}


class NoForm(Exception):
    """Why a value is not what is looked for."""


@dataclasses.dataclass(frozen=True)
class Level:
    """z = scale softcap tanh(base / softcap), or scale base where softcap is 0, of the rows of
    ``base`` [..., V] that remain. ``cut`` is the slice of rows behind which ``base`` stands;
    ``tanh`` the node of the softcap; ``rounded`` what on the way is rounded to 16 bits."""

    base: Any
    scale: float
    softcap: float
    tanh: Any
    cut: Any
    rounded: tuple[Any, ...] = ()


def by_number(node: Any) -> tuple[Any, float] | None:
    """(x, k) of x k or x / k."""
    if node.target in MUL | DIV and len(node.args) == 2:
        pairs = [node.args] if node.target in DIV else [node.args, node.args[::-1]]
        for x, k in pairs:
            number = constant(k)
            if isinstance(x, torch.fx.Node) and number:
                return x, float(number) if node.target in MUL else 1.0 / number
    return None


def _rounds(node: Any, source: Any, factor: float | None) -> bool:
    """Whether a step from ``source`` to ``node`` rounds to 16 bits; ``factor`` is that of x k."""
    dtype = value(node).dtype
    if dtype == torch.float32:
        return False
    if factor is not None:  # fp16 may overflow
        return dtype != torch.bfloat16 or abs(math.frexp(factor)[0]) != 0.5
    if node.target is prims.convert_element_type.default:
        return bool(dtype != value(source).dtype)
    return node.target is aten.tanh.default


def levels_of(z: Any, numbers: Numbers) -> list[Level]:
    """The levels of z, its own first."""
    levels: list[Level] = []
    rounded: list[Any] = []
    node, outer, inner, tanh, cut = z, 1.0, 1.0, None, None
    columns = value(z).shape[-1]

    def level() -> Level:
        if tanh is None:
            return Level(node, outer, 0.0, None, cut, tuple(rounded))
        return Level(node, outer * inner, 1.0 / inner, tanh, cut, tuple(rounded))

    while True:
        node = numbers.of(node)
        source: Any = node.args[0] if node.args else None
        by = by_number(node) if node.op == "call_function" else None
        factor = None
        if by is not None:
            source, factor = by
        elif node.target is aten.tanh.default and tanh is None:
            pass
        elif node.target is aten.slice.Tensor:
            rank = value(node).dim()
            if (node.args[1] if len(node.args) > 1 else 0) % rank == rank - 1:
                break
            levels.append(level())
            cut = node
        elif node.target in VIEWS:
            if not value(source).dim() or not same_size(value(source).shape[-1], columns):
                break
        elif node.target is not prims.convert_element_type.default:
            break
        dtypes = value(node).dtype, value(source).dtype
        if not set(dtypes) <= set(NARROW) or (dtypes[0] == torch.float16 and len(set(dtypes)) > 1):
            break  # fp16 has no room for all of the others
        if node.target is aten.tanh.default:
            tanh = node
        elif factor is not None:
            outer, inner = (outer * factor, inner) if tanh is None else (outer, inner * factor)
        if _rounds(node, source, factor):
            rounded.append(node)
        node = source
    return [*levels, level()]


def numel(tensor: torch.Tensor) -> int:
    """The number of elements, at the sizes seen at tracing."""
    return math.prod(compat.hint(compat.expr(s)) for s in tensor.shape)


def check_size(tensor: torch.Tensor, least: int | None = None) -> None:
    """Raise for logits in memory that are too few for an operation."""
    if numel(tensor) * tensor.element_size() < (LEAST_BYTES if least is None else least):
        raise NoForm("logits of this size are swept as fast as a kernel is launched")


def check_rounding(graph: Any, numbers: Numbers, level: Level) -> None:
    """Raise where somebody sees that logits are rounded to 16 bits on their way from ``level``.

    Inductor's code leaves that rounding out, as an operation that reads the base does, for as long
    as what is rounded is not stored: then there is one version of the logits.
    """
    rounded = set(map(numbers.of, level.rounded))
    if rounded and compat_fx.rounds_in_between():
        raise NoForm("its logits are rounded on the way")
    stack = [node for node in graph.nodes if numbers.of(node) in rounded]
    while stack:
        for user in stack.pop().users:
            if user.target in VIEWS or user.target is aten.slice.Tensor:
                stack.append(user)
            elif not (matching.is_pointwise(user) or user.target in _INLINING):
                raise NoForm(f"its logits are rounded on the way, where {user} reads them")


def key_of(levels: list[Level], numbers: Numbers) -> Any:
    """Equal for logits that are computed alike, in whatever shape and steps."""
    last = levels[-1]
    cuts = [(tuple(map(str, value(low.cut.args[0]).shape)), bounds(low.cut)) for low in levels[1:]]
    rounded = tuple(map(numbers.of, last.rounded))
    return numbers.of(last.base), last.scale, last.softcap, tuple(cuts), rounded


def bounds(node: Any, of: Any = None) -> tuple[Any, ...]:
    """(dimension, start, end, step) of a slice, or of a slice_scatter, of the tensor ``of``."""
    args: list[Any] = list(node.args[1 if of is None else 2 :])
    source = value(node.args[0])
    dim, start, end, step = args + [None] * (4 - len(args))
    dim, start, step = (dim or 0) % source.dim(), start or 0, step or 1
    size = source.shape[dim]
    if all(isinstance(n, int) for n in (size, start, step)) and (end is None or type(end) is int):
        start, end, step = slice(start, end, step).indices(size)
    elif end is None or (isinstance(end, int) and end == 2**63 - 1):
        end = 2**63 - 1
    return dim, start, end, step


class RowValues:
    """Flat values of the rows: how they are made, by new nodes through ``editor``."""

    def __init__(
        self, graph: Any, numbers: Numbers, editor: Editor, z: Any, levels: list[Level]
    ) -> None:
        self.graph, self.numbers, self.editor = graph, numbers, editor
        self.z, self.levels = z, levels
        self.columns = value(z).shape[-1]
        self.rows = [_product(value(z).shape[:-1])]
        self.rows += [_product(value(low.base).shape[:-1]) for low in levels[1:]]

    # --- shapes -----------------------------------------------------------------------------------

    def kind(self, node: Any) -> tuple[str, int]:
        """("one" | "row" | "whole", level): a number, a number per row, or all logits in shape;
        ("", 0) for anything else."""
        tensor = value(node)
        if not isinstance(tensor, torch.Tensor):
            return "one", 0
        numel = tensor.numel()
        if same_size(numel, 1):
            return "one", 0
        for level, rows in enumerate(self.rows):
            if equal(numel, rows):
                return "row", level
            wide = tensor.dim() and same_size(tensor.shape[-1], self.columns)
            if wide and equal(numel, rows * self.columns):
                return "whole", level
        return "", 0

    def sizes(self, shape: Any) -> list[Any]:
        """A shape as arguments of a node, made of the graph's own sizes."""
        return [s if isinstance(s, int) else self._size(compat.expr(s)) for s in shape]

    def _size(self, expr: Any) -> Any:
        """A size as a number or node; raises NoForm where it is not made of inputs' sizes."""
        if expr.is_Integer:
            return int(expr)
        for node in self.graph.nodes:
            if node.op != "placeholder":
                break
            if isinstance(value(node), torch.SymInt) and compat.expr(value(node)) == expr:
                return node
        if not (expr.is_Mul or expr.is_Add):
            raise NoForm(f"{expr} is not made of the sizes of inputs")
        op = operator.mul if expr.is_Mul else operator.add
        total, *others = (self._size(part) for part in expr.args)
        for other in others:
            total = self.editor.call(op, total, other)
        return total

    # --- flat values ------------------------------------------------------------------------------

    def flat(self, node: Any) -> Any:
        """A known value of the rows (or one number) as it is computed, flat."""
        if not isinstance(node, torch.fx.Node):
            return node
        while node.target is aten.expand.default and self.kind(node.args[0])[0] == "one":
            node = node.args[0]
        number = constant(node)
        if number is not None:
            return number
        tensor = value(node)
        if not isinstance(tensor, torch.Tensor):
            return self._number(node)
        shape = [] if self.kind(node)[0] == "one" else [-1]
        if tensor.dim() == len(shape):
            return node
        return self.shaped(node, shape)

    def _number(self, number: Any) -> Any:
        """A number as a node."""
        device = value(self.z).device
        number = float(number) if isinstance(number, int) else number
        return self.editor.call(aten.full.default, [], number, dtype=torch.float32, device=device)

    def shaped(self, node: Any, shape: list[Any]) -> Any:
        """The elements of a node in another shape."""
        op = aten.view.default if is_contiguous(value(node)) else aten.reshape.default
        return self.editor.call(op, node, shape)

    def factor(self, node: Any) -> Any:
        """The same in fp32."""
        node = self.flat(node)
        if not isinstance(node, torch.fx.Node):
            return node
        if value(node).dtype == torch.float64 or value(node).is_complex():
            raise NoForm(f"{node} is not computed in fp32")
        return self.editor.to(node, torch.float32)

    def add(self, a: Any, b: Any) -> Any:
        """a + b of numbers or flat nodes."""
        if not any(isinstance(n, torch.fx.Node) for n in (a, b)):
            return a + b
        if not isinstance(a, torch.fx.Node):
            a, b = b, a
        return a if isinstance(b, (int, float)) and b == 0 else self._two(aten.add.Tensor, a, b)

    def mul(self, a: Any, b: Any) -> Any:
        """a b of numbers or flat nodes. An infinite factor of what is not looked at elsewhere is
        the program's own."""
        if not any(isinstance(n, torch.fx.Node) for n in (a, b)):
            return a * b
        if not isinstance(a, torch.fx.Node):
            a, b = b, a
        if isinstance(b, (int, float)) and b in (1, -1):
            return a if b == 1 else self.editor.call(aten.neg.default, a)
        return self._two(aten.mul.Tensor, a, b)

    def over(self, a: Any, b: Any) -> Any:
        """a / b of numbers or flat nodes."""
        if not isinstance(b, torch.fx.Node):
            if isinstance(a, torch.fx.Node):
                return self.editor.call(aten.div.Tensor, a, b)
            return a / b if b else a * math.inf
        if not isinstance(a, torch.fx.Node):
            inverse = self.editor.call(aten.reciprocal.default, b)
            return self.mul(inverse, a)
        return self._two(aten.div.Tensor, a, b)

    def _two(self, op: Any, a: Any, b: Any) -> Any:
        """An operation on flat values of the same rows."""
        shapes = [value(n).shape for n in (a, b) if isinstance(n, torch.fx.Node)]
        if len({len(s) for s in shapes}) == 1 and not _equal_rows(shapes[0], shapes[-1]):
            raise NoForm("values of other rows meet")
        return self.editor.call(op, a, b)

    def only_where(self, condition: Any, c: Any, holds: bool) -> Any:
        """c where a condition on the row holds, or does not, and 0 elsewhere."""
        if not isinstance(c, torch.fx.Node):
            c = self._number(c)
        shapes = value(condition).shape, value(c).shape
        if len(shapes[0]) == len(shapes[1]) and not _equal_rows(*shapes):
            raise NoForm("values of other rows meet")
        if holds:
            return self.editor.call(aten.where.ScalarOther, condition, c, 0.0)
        return self.editor.call(aten.where.ScalarSelf, condition, 0.0, c)

    def spread(self, c: Any, level: int = 0) -> Any:
        """A factor with one entry per row, in memory of its own."""
        rows = self.sizes([self.rows[level]])
        if not isinstance(c, torch.fx.Node):
            c = self._number(c)
        if value(c).dim() == 1:
            return c
        return self.editor.call(aten.clone.default, self.editor.call(aten.expand.default, c, rows))

    # --- levels -----------------------------------------------------------------------------------

    def lift(self, c: Any, level: int, fill: float) -> Any:
        """A flat value of the rows of z as one of the rows of ``level``; ``fill`` in the others."""
        call = self.editor.call
        for low in self.levels[1 : level + 1]:
            source, cut = value(low.cut.args[0]), value(low.cut)
            device = source.device
            rows = self.sizes(source.shape[:-1])
            other = call(aten.full.default, rows, fill, dtype=value(c).dtype, device=device)
            inner = self.shaped(c, self.sizes(cut.shape[:-1]))
            whole = call(aten.slice_scatter.default, other, inner, *bounds(low.cut))
            c = self.shaped(whole, [-1])
        return c

    def lower(self, c: Any, level: int) -> Any:
        """A flat value of the rows of ``level`` as one of the rows of z."""
        for low in reversed(self.levels[1 : level + 1]):
            source = value(low.cut.args[0])
            rows = self.shaped(c, self.sizes(source.shape[:-1]))
            c = self.shaped(self.editor.call(aten.slice.Tensor, rows, *bounds(low.cut)), [-1])
        return c

    # --- equal values -----------------------------------------------------------------------------

    def same_rows(self, a: Any, b: Any, depth: int = 0) -> bool:
        """Whether two values of as many rows are equal in order, whatever their shapes: computed
        alike."""
        a, b = self._bare(a), self._bare(b)
        if self.numbers.of(a) is self.numbers.of(b):
            return True
        number = self._filled(a)
        if number is not None:
            return number == self._filled(b)
        if a.target is not b.target or depth > 16 or not matching.is_pointwise(a):
            return False
        if len(a.args) != len(b.args) or a.kwargs != b.kwargs:
            return False
        same_shapes = same_shape(value(a).shape, value(b).shape)
        for x, y in zip(a.args, b.args, strict=True):
            if not isinstance(x, torch.fx.Node) or not isinstance(y, torch.fx.Node):
                same = type(x) is type(y) and x == y
            elif self._in_order(x, a) and self._in_order(y, b):
                same = self.same_rows(x, y, depth + 1)
            else:  # what is repeated counts where it is
                same = same_shapes and self.numbers.of(x) is self.numbers.of(y)
            if not same:
                return False
        return True

    def _in_order(self, operand: Any, result: Any) -> bool:
        """Whether an operand is one number, or has an entry for each of the result's, in order."""
        tensor = value(operand)
        if not isinstance(tensor, torch.Tensor):
            return False
        return same_size(tensor.numel(), 1) or equal(tensor.numel(), value(result).numel())

    def _bare(self, node: Any) -> Any:
        while node.target in VIEWS or (
            node.target is aten.expand.default
            and self.kind(node) == self.kind(node.args[0])
            and self.kind(node)[0]
        ):
            node = node.args[0]
        return node

    def _filled(self, node: Any) -> Any:
        return node.args[1] if node.target is aten.full.default else None


def reached(roots: Iterable[Any]) -> set[Any]:
    """Nodes, and all that is computed from them."""
    found = set(roots)
    stack = list(found)
    while stack:
        for user in stack.pop().users:
            if user not in found:
                found.add(user)
                stack.append(user)
    return found


def _equal_rows(a: Any, b: Any) -> bool:
    return all(equal(x, y) for x, y in zip(a, b, strict=True))


def counts(node: Any, along: int, size: Any) -> bool:
    """Whether a node is 0, 1, ... along a dimension, and has no other."""
    shape = list(value(node).shape)
    if not shape or not same_size(shape.pop(along), size):
        return False
    while (
        node.target in VIEWS
        or node.target is aten.expand.default
        or (node.target is prims.convert_element_type.default and value(node).dtype in WHOLE)
    ):
        node = node.args[0]
    return (
        node.target is prims.iota.default
        and value(node).dtype in WHOLE
        and all(same_size(s, 1) for s in shape)
        and same_size(value(node).shape[0], size)
        and node.kwargs.get("start", 0) == 0
        and node.kwargs.get("step", 1) == 1
    )


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie in order, for all that is known."""
    expected: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not same_size(size, 1):
            if not same_size(stride, expected):
                return False
            expected = expected * size
    return True


def equal(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for all that the program has found: also products of sizes."""
    if same_size(a, b):
        return True
    symbolic = any(isinstance(n, torch.SymInt) for n in (a, b))
    return symbolic and statically_known_true(a == b)


def _product(sizes: Any) -> Any:
    total: Any = 1
    for size in sizes:
        total = total * size
    return total
