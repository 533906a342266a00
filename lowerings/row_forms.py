"""What is linear in the statistics of a row, in a form whose sum over the row is known.

A value over ``[..., V]`` is written as a *form*: a sum of terms, each a product of factors that
vary along the row (the key) and of a coefficient that does not. With m the maximum and s the sum of
exponentials of a row, log p = x - m - log s is ``{(x - m,): 1, (): -log s}``. The sum over the row
is then the coefficients times sums of the keys: that of x - m comes out of the operation that finds
m and s, and an offset common to the logits cancels before it is multiplied by V.

A key may be one entry of the row (``OneHot``), whose sum is 1; the empty key's is V. What is only
computed where a condition on the row holds keeps that condition: a NaN elsewhere has to stay out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from inductor_ext.lowerings.softmax import STATISTICS, settle
from inductor_ext.lowerings.softmax_cores import (
    Core,
    constant,
    cores,
    keeps_value,
    remembered,
    uncast,
    xlogy,
)

from inductor_ext import compat_fx
from inductor_ext.editing import Editor, Numbers, same_shape, same_size, value
from inductor_ext.ops import _weighted

aten, prims = torch.ops.aten, torch.ops.prims
WEIGHTED = _weighted.weighted_statistics._opoverload
DEPTH, TERMS = 64, 8

_MUL = {aten.mul.Tensor, aten.mul.Scalar}
_DIV = {aten.div.Tensor, aten.div.Scalar}
_ADD = {aten.add.Tensor: 1, aten.add.Scalar: 1, aten.sub.Tensor: -1, aten.sub.Scalar: -1}
_WHERE = {aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar}
_REDUCTIONS = {
    aten.amax.default,
    aten.amin.default,
    aten.max.dim,
    aten.min.dim,
    aten.mean.dim,
    aten.sum.dim_IntList,
    aten.prod.dim_int,
    aten.any.dim,
}


class NotLinear(Exception):
    """Why a value has no form."""


@dataclasses.dataclass(frozen=True)
class OneHot:
    """1 in column ``index`` of each row, 0 elsewhere; ``node`` compares columns with the index."""

    index: Any
    node: Any


@dataclasses.dataclass(frozen=True)
class Exponential:
    """``node`` is exp of one of the logits plus a row value; ``total`` is its sum over the row.

    It is ``scale``, a row value, times the exponential of the logits ``x`` less their maximum.
    """

    total: Any
    node: Any
    x: Any
    scale: Any


@dataclasses.dataclass(frozen=True)
class SelfWeighted:
    """An exponential times its logits less their maximum, 0 where it is 0 itself."""

    exponential: Exponential


@dataclasses.dataclass(frozen=True)
class Shifted:
    """The logits ``x`` less their maximum, of a core that ``operation`` makes."""

    core: Core
    operation: Any
    x: Any


@dataclasses.dataclass(frozen=True)
class Key:
    """Factors that vary along the row, where the conditions (row, whether it must hold) do hold."""

    factors: tuple[Any, ...] = ()
    where: tuple[tuple[Any, bool], ...] = ()


ONE = Key()
Form = dict[Key, Any]  # coefficients are numbers or fp32 nodes with one entry per row


class Forms:
    """The forms of values that broadcast to ``logits``, for sums over dimension ``dim``.

    ``logits``: those of the cores over ``dim`` that have one shape. New nodes go in front of what
    ``editor`` points at.
    """

    def __init__(
        self, graph: Any, numbers: Numbers, editor: Editor, logits: list[Any], dim: int
    ) -> None:
        self.graph, self.numbers, self.editor = graph, numbers, editor
        self.logits, self.dim = logits, dim
        self.shape = list(value(logits[0]).shape)
        self._whole = list(self.shape)
        self.pairs, self.operations = _pairs(graph, numbers, logits, dim)
        self._depends: dict[Any, tuple[bool, bool]] = {}
        for node in graph.nodes:
            self.depends(node)
        self._forms: dict[Any, Form] = {}

    def forget(self) -> None:
        """Drop what was added for nothing, and all that refers to it."""
        self._forms.clear()
        self.editor.drop_unused()
        for made in self.operations.values():
            settle(made.operation)

    # --- what a value depends on ------------------------------------------------------------------

    def depends(self, node: Any) -> tuple[bool, bool]:
        """Whether a node needs a reduction of such rows, and whether it needs a gradient that
        comes in: what does can't be summed beforehand."""
        if node not in self._depends:
            sources = [self.depends(n) for n in node.all_input_nodes]
            reduces = node.target in (STATISTICS, WEIGHTED) or (
                node.target in _REDUCTIONS
                and same_shape(value(node.all_input_nodes[0]).shape, self._whole)
            )
            self._depends[node] = (
                reduces or any(r for r, _ in sources),
                compat_fx.is_tangent(node) or any(t for _, t in sources),
            )
        return self._depends[node]

    def is_differentiated(self) -> bool:
        """Whether the graph has a backward."""
        return any(of_tangent for _, of_tangent in self._depends.values())

    def is_row(self, node: Any) -> bool:
        """Whether a value has one entry along the row."""
        tensor = value(node)
        if not isinstance(tensor, torch.Tensor):
            return True
        along = self.dim - (len(self.shape) - tensor.dim())
        return along < 0 or same_size(tensor.shape[along], 1)

    # --- nodes ------------------------------------------------------------------------------------

    def _op(self, op: Any, a: Any, b: Any) -> Any:
        """op(a, b) of numbers or nodes; the numbers 0, 1 and -1 cost nothing."""
        if not any(isinstance(n, torch.fx.Node) for n in (a, b)):
            return a + b if op is aten.add.Tensor else a * b
        if op is aten.add.Tensor:
            if a == 0 or b == 0:
                return b if a == 0 else a
            for plus, minus in ((a, b), (b, a)):  # a + (-b) is a - b
                negated = isinstance(minus, torch.fx.Node) and minus.target is aten.neg.default
                if negated and isinstance(plus, torch.fx.Node):
                    return self.editor.call(aten.sub.Tensor, plus, minus.args[0])
        elif a in (1, -1) or b in (1, -1):
            one, other = (a, b) if a in (1, -1) else (b, a)
            return other if one == 1 else self.editor.call(aten.neg.default, other)
        if not isinstance(a, torch.fx.Node):
            a, b = b, a
        return self.editor.call(op, a, b)

    def _float(self, node: Any) -> Any:
        """A row value as a coefficient."""
        number = constant(node)
        if number is not None or not isinstance(node, torch.fx.Node):
            return number if number is not None else node
        tensor = value(node)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype == torch.float64:
            raise NotLinear(f"{node} is not computed in fp32")
        return self.editor.to(node, torch.float32)

    # --- forms ------------------------------------------------------------------------------------

    def form(self, node: Any, whole: bool = True, depth: int = 0) -> Form:
        """The form of a value. With ``whole``, what needs no such reduction is one factor."""
        if not isinstance(node, torch.fx.Node):
            return {ONE: node}
        if (node, whole) not in self._forms:
            self._forms[node, whole] = self._form(node, whole, depth)
        return self._forms[node, whole]

    def _form(self, node: Any, whole: bool, depth: int) -> Form:
        if depth > DEPTH:
            raise NotLinear("its expression is too deep")
        while node.target is aten.expand.default and not self.is_row(node):
            if not self.is_row(node.args[0]):
                break
            node = node.args[0]
        if self.is_row(node):
            return {ONE: self._float(node)}
        if self.numbers.of(node) in self.logits:
            made = self.operations.get(self.numbers.of(node))
            if made is None:
                raise NotLinear("a sum of the logits needs a sweep")
            return {Key((made,)): 1, ONE: made.core.peak}
        if whole and not any(self.depends(node)) and not self._is_one_hot(node):
            return {Key((self._factor(node),)): 1}
        form = self._descend(node, lambda n: self.form(n, whole, depth + 1))
        if form is not None:
            return form
        if any(self.depends(node)):
            raise NotLinear(f"{_name(node)} is not linear in them")
        return {Key((self._factor(node),)): 1}

    def _factor(self, node: Any) -> Any:
        tensor = value(node)
        narrow = tensor.is_floating_point() and tensor.dtype != torch.float64
        if not narrow and tensor.dtype != torch.bool:
            raise NotLinear(f"{_name(node)} is {tensor.dtype}")
        return self.editor.to(self.numbers.of(node), torch.float32)

    def _descend(self, node: Any, form: Callable[[Any], Form]) -> Form | None:
        """The form by that of the arguments; None for an operation that is not linear."""
        target, args = node.target, node.args
        if target in _ADD and _alpha(node) == 1:
            return self._plus(form(args[0]), form(args[1]), _ADD[target])
        if target is aten.neg.default:
            return self._scaled(form(args[0]), -1)
        if target in _MUL:
            return self._times(form(args[0]), form(args[1]))
        if target in _DIV and len(args) == 2 and self._is_row_or_number(args[1]):
            by = args[1] if not isinstance(args[1], torch.fx.Node) else self._float(args[1])
            return {key: self._over(c, by) for key, c in form(args[0]).items()}
        if target is prims.convert_element_type.default:
            return self._converted(node, form)
        if target is aten.expand.default:
            same = same_size(value(args[0]).shape[-1], value(node).shape[-1])
            return form(args[0]) if self.dim == len(self.shape) - 1 and same else None
        if target is aten.exp.default:
            return self._exponential(node)
        if target is aten.view.default:
            return self._reshaped(node, form)
        if (p := xlogy(node)) is not None:
            return self._own_logarithm(p, form)
        if target in _WHERE:
            return self._where(args[0], args[1], args[2], form)
        return None

    def _exponential(self, node: Any) -> Form | None:
        """exp(x - c) sums to s exp(m - c), where the logits x have the maximum m and the sum s."""
        x, rows = node.args[0], []
        while isinstance(x, torch.fx.Node) and self.numbers.of(x) not in self.logits:
            if x.target in _ADD and _alpha(x) == 1 and self._is_row_or_number(x.args[1]):
                rows.append((_ADD[x.target], x.args[1]))
            elif uncast(x) is x:
                return None
            x = x.args[0]
        pair = self.pairs.get(self.numbers.of(x)) if isinstance(x, torch.fx.Node) else None
        if pair is None or any(map(compat_fx.is_erased, pair)):
            return None
        (peak, total), first = pair, True
        shift: Any = peak
        for sign, row in reversed(rows):
            if first and sign == -1 and row is peak:
                shift = 0
            else:
                row = self._op(aten.mul.Tensor, self._float(row), sign)
                shift = self._op(aten.add.Tensor, shift, row)
            first = False
        scale: Any = 1
        if isinstance(shift, torch.fx.Node):
            scale = self.editor.call(aten.exp.default, shift)
            total = self.editor.call(aten.mul.Tensor, total, scale)
        return {Key((Exponential(total, node, self.numbers.of(x), scale),)): 1}

    def _own_logarithm(self, p: Any, form: Callable[[Any], Form]) -> Form | None:
        """p log p of one exponential times a row value."""
        ((key, c),) = form(p).items() if len(form(p)) == 1 else ((ONE, 0),)
        if len(key.factors) != 1 or not isinstance(key.factors[0], Exponential):
            return None
        log = self._op(aten.mul.Tensor, c, key.factors[0].scale)
        if isinstance(log, torch.fx.Node):
            zero = self.editor.call(aten.eq.Scalar, log, 0)  # 0 log 0 is 0: a row that a mask drops
            log = self.editor.call(aten.log.default, log)
            log = self.editor.call(aten.where.ScalarSelf, zero, 0.0, log)
        elif log > 0:
            log = math.log(log)
        else:
            return None
        own = Key((SelfWeighted(key.factors[0]),), key.where)
        return {own: c, key: self._op(aten.mul.Tensor, c, log)}

    def _reshaped(self, node: Any, form: Callable[[Any], Form]) -> Form | None:
        """A view that adds or drops dimensions of size 1."""
        source, shape = node.args[0], list(value(node).shape)
        sizes = list(value(source).shape)
        if (
            not all(isinstance(s, int) for s in (*shape, *sizes))
            or len(shape) != len(self.shape)
            or [s for s in shape if s != 1] != [s for s in sizes if s != 1]
        ):
            return None
        rank = [i for i, s in enumerate(shape) if s != 1].index(self.dim)
        before = self.shape, self.dim
        self.shape, self.dim = sizes, [i for i, s in enumerate(sizes) if s != 1][rank]
        try:
            inner = form(source)
        finally:
            self.shape, self.dim = before

        def put(n: Any) -> Any:
            if isinstance(n, OneHot):
                return OneHot(put(n.index), put(n.node))
            if isinstance(n, (Exponential, SelfWeighted, Shifted)):
                raise NotLinear("a softmax of another shape")
            if not isinstance(n, torch.fx.Node):
                return n
            own = [1] * (len(sizes) - value(n).dim()) + list(value(n).shape)
            kept = iter(o for o, s in zip(own, sizes, strict=True) if s != 1)
            return self.editor.call(
                aten.view.default, n, [1 if s == 1 else next(kept) for s in shape]
            )

        return {
            Key(tuple(map(put, k.factors)), tuple((put(c), holds) for c, holds in k.where)): put(c)
            for k, c in inner.items()
        }

    def _is_row_or_number(self, node: Any) -> bool:
        return not isinstance(node, torch.fx.Node) or self.is_row(node)

    def _over(self, a: Any, b: Any) -> Any:
        if not any(isinstance(n, torch.fx.Node) for n in (a, b)):
            return a / b if b else a * torch.inf
        if not isinstance(a, torch.fx.Node):
            if a == 1:
                return self.editor.call(aten.reciprocal.default, b)
            return self.editor.call(aten.mul.Tensor, self._over(1, b), a)
        return self.editor.call(aten.div.Tensor, a, b)

    def _plus(self, a: Form, b: Form, sign: int) -> Form:
        total = dict(a)
        for key, c in b.items():
            c = self._op(aten.mul.Tensor, c, sign)
            total[key] = self._op(aten.add.Tensor, total[key], c) if key in total else c
        return total

    def _scaled(self, form: Form, by: Any) -> Form:
        return {key: self._op(aten.mul.Tensor, c, by) for key, c in form.items()}

    def _times(self, a: Form, b: Form) -> Form:
        if len(a) * len(b) > TERMS:
            raise NotLinear("its product has too many terms")
        product: Form = {}
        for ka, ca in a.items():
            for kb, cb in b.items():
                key = Key((*ka.factors, *kb.factors), (*ka.where, *kb.where))
                c = self._op(aten.mul.Tensor, ca, cb)
                product = self._plus(product, {key: c}, 1)
        return product

    def _plain(self, factor: Any) -> Any:
        """A factor as a node."""
        if isinstance(factor, torch.fx.Node):
            return factor
        if isinstance(factor, Exponential):
            return self.editor.to(factor.node, torch.float32)
        if isinstance(factor, SelfWeighted):
            raise NotLinear("what it is weighted with is made in a sweep")
        if isinstance(factor, Shifted):
            x = self.editor.to(factor.core.x, torch.float32)
            return self.editor.call(aten.sub.Tensor, x, factor.core.peak)
        return self.editor.call(prims.convert_element_type.default, factor.node, torch.float32)

    def _converted(self, node: Any, form: Callable[[Any], Form]) -> Form | None:
        source = node.args[0]
        if value(source).dtype == torch.bool:
            one_hot = self._compared(source)
            return None if one_hot is None else {Key((one_hot,)): 1}
        # Rounding in between is left out: Inductor leaves it out as well.
        return form(source) if keeps_value(node) else None

    def _where(self, condition: Any, yes: Any, no: Any, form: Callable[[Any], Form]) -> Form | None:
        if self.is_row(condition):
            total: Form = {}
            for side, holds in ((yes, True), (no, False)):
                if constant(side) != 0:
                    for key, c in form(side).items():
                        where = ((self.numbers.of(condition), holds), *key.where)
                        total = self._plus(total, {Key(key.factors, where): c}, 1)
            return total
        one_hot = self._compared(condition)
        if one_hot is None or not all(map(self._is_row_or_number, (yes, no))):
            return None
        at, elsewhere = self._float(yes), self._float(no)
        if elsewhere == 0:
            return {Key((one_hot,)): at}
        difference = self._op(aten.add.Tensor, at, self._op(aten.mul.Tensor, elsewhere, -1))
        return {Key((one_hot,)): difference, ONE: elsewhere}

    # --- one entry of a row -----------------------------------------------------------------------

    def _compared(self, node: Any) -> OneHot | None:
        """``eq(index, columns)``, either way round."""
        if node.target is not aten.eq.Tensor:
            return None
        for index, columns in (node.args, node.args[::-1]):
            if self._numbers_columns(columns):
                while index.target is aten.expand.default:
                    index = index.args[0]
                if self.is_row(index) and not value(index).is_floating_point():
                    return OneHot(self.numbers.of(index), self.numbers.of(node))
        return None

    def _is_one_hot(self, node: Any) -> bool:
        """Whether a node is a choice between two row values by a comparison with the column."""
        while node.target is prims.convert_element_type.default:
            node = node.args[0]
        if node.target not in _WHERE:
            return self._compared(node) is not None
        condition, *sides = node.args
        return (
            all(map(self._is_row_or_number, sides))
            and not self.is_row(condition)
            and self._compared(condition) is not None
        )

    def _numbers_columns(self, node: Any) -> bool:
        """Whether a node is 0, 1, ... along the row."""
        shape = value(node).shape
        while node.target in (aten.view.default, aten.unsqueeze.default, aten.expand.default):
            node = node.args[0]
        if node.target is not prims.iota.default:
            return False
        along = self.dim - (len(self.shape) - len(shape))
        return (
            along >= 0
            and same_size(shape[along], self.shape[self.dim])
            and same_size(value(node).shape[0], shape[along])
            and all(same_size(s, 1) for i, s in enumerate(shape) if i != along)
            and node.kwargs.get("start", 0) == 0
            and node.kwargs.get("step", 1) == 1
        )


def _pairs(
    graph: Any, numbers: Numbers, logits: list[Any], dim: int
) -> tuple[dict[Any, Any], dict[Any, Shifted]]:
    """logits -> (maximum, sum of exponentials), where both are already there in that shape; and
    what is made by an operation."""
    found: dict[Any, Any] = {}
    shifted: dict[Any, Shifted] = {}
    rank = value(logits[0]).dim()
    made = list(remembered(graph))
    for core in (*(core for _, core in made), *cores(graph, numbers)):
        x = numbers.of(core.x)
        same = x in logits and core.dim == dim and not core.guarded
        if same and all(value(n).dim() == rank for n in (core.peak, core.total)):
            found.setdefault(x, (core.peak, core.total))
    for operation, core in made:
        x = numbers.of(core.x)
        if x in found:
            shifted.setdefault(x, Shifted(core, operation, x))
    return found, shifted


def _alpha(node: Any) -> Any:
    return node.args[2] if len(node.args) > 2 else node.kwargs.get("alpha", 1)


def _name(node: Any) -> str:
    return str(getattr(node.target, "overloadpacket", node.target)).removeprefix("aten.")
