"""Sums over a row by the forms of what is summed."""

from __future__ import annotations

from typing import Any

import torch
from inductor_ext.lowerings import softmax
from inductor_ext.lowerings.loss_rows import NoForm
from inductor_ext.lowerings.row_forms import (
    Exponential,
    Form,
    Forms,
    Key,
    NotLinear,
    OneHot,
    SelfWeighted,
    Shifted,
)
from inductor_ext.lowerings.softmax import below_of
from inductor_ext.lowerings.softmax_cores import (
    Core,
    cores,
    lies_in_memory,
    remembered,
    uncast,
    xlogy,
)
from inductor_ext.lowerings.weighted_sums import Apart, Weighted, paired

from inductor_ext.editing import Editor, Numbers, same_shape, same_size, value

aten, prims = torch.ops.aten, torch.ops.prims


class Rows(Forms):
    """Forms, and their sums over the row as new nodes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.weighted = Weighted(self.graph, self.numbers, self.editor, self.dim)
        self._weights: set[Any] = set()  # what is summed in a sweep that the forward needs anyway

    def forget(self) -> None:
        super().forget()
        self.weighted.forget()

    def sum(self, form: Form) -> Any:
        """The sum of a form over the row, fp32, with one entry per row. Raises NotLinear."""
        form = paired(self._opened(form))
        made = self.weighted.sums(form, self.operations)
        weighted = self._is_weighted(form)
        by_condition: dict[Any, Any] = {}
        for key, c in form.items():
            total = made.get(key.factors)
            if total is None:
                total = self._sum_of(key.factors, weighted)
            term = self._op(aten.mul.Tensor, total, c)
            before = by_condition.get(key.where, 0)
            by_condition[key.where] = self._op(aten.add.Tensor, before, term)
        total = 0
        for where, term in by_condition.items():
            for condition, holds in reversed(where):
                if not isinstance(term, torch.fx.Node):
                    sides = (float(term), 0.0) if holds else (0.0, float(term))
                    term = self.editor.call(aten.where.Scalar, condition, *sides)
                elif holds:
                    term = self.editor.call(aten.where.ScalarOther, condition, term, 0.0)
                else:
                    term = self.editor.call(aten.where.ScalarSelf, condition, 0.0, term)
            total = self._op(aten.add.Tensor, total, term)
        return self._as_row(total)

    def _opened(self, form: Form) -> Form:
        """The form with weights that are made of what lies in memory, and of row values, written as
        that, so that an operation can read it."""
        if not self.weighted.given() and not any(len(key.factors) > 1 for key in form):
            return form
        opened: Form = {}
        for key, c in form.items():
            product: Form = {Key((), key.where): c}
            for factor in key.factors:
                inner: Form = {Key((factor,)): 1}
                if isinstance(factor, torch.fx.Node) and xlogy(factor) is None:
                    inner = self._parts(factor)
                product = self._times(product, inner)
            opened = self._plus(opened, product, 1)
        return opened

    def _parts(self, factor: Any) -> Form:
        """A factor as a sum of parts that lie in memory, times row values; itself if it is none."""
        whole: Form = {Key((factor,)): 1}
        node = uncast(factor)
        if lies_in_memory(node) or self._is_column(factor):
            return whole
        try:
            form = self.form(node, whole=False)
        except NotLinear:
            return whole
        parts = [key.factors for key in form]
        simple = all(
            len(f) == 0
            or (len(f) == 1 and isinstance(f[0], torch.fx.Node) and lies_in_memory(uncast(f[0])))
            for f in parts
        )
        # Of a difference, what cancels in each entry would cancel between sums of large terms.
        offset = len(form) > 1 and any(isinstance(c, torch.fx.Node) or c < 0 for c in form.values())
        return form if simple and not offset else whole

    def _is_weighted(self, form: Form) -> bool:
        """Whether a form is a target's probabilities times log-probabilities, t (x - m) - t log s,
        whose gradient needs the sum of t. No term of it is larger than the sum, as m and the logits
        are one factor."""
        if not self.is_differentiated():
            return False
        beside: dict[bool, set[Any]] = {True: set(), False: set()}
        for key in form:
            others = tuple(f for f in key.factors if not isinstance(f, Shifted))
            beside[len(others) < len(key.factors)].add((others, key.where))
        return beside[True] == beside[False] and all(
            all(isinstance(f, torch.fx.Node) and not any(self.depends(f)) for f in others)
            and not all(map(self._is_column, others))
            for others, _ in beside[True]
        )

    def mean(self, total: Any) -> Any:
        """A sum over the row as the mean over it."""
        return self._over(total, self._columns())

    def _as_row(self, total: Any) -> Any:
        """A coefficient with one entry for each row there is."""
        call = self.editor.call
        sizes: list[Any] = [
            s if isinstance(s, int) else call(aten.sym_size.int, self.logits[0], i)
            for i, s in enumerate(self.shape)
        ]
        sizes[self.dim] = 1
        if not isinstance(total, torch.fx.Node):
            total = call(
                aten.full.default,
                [],
                float(total),
                dtype=torch.float32,
                device=value(self.logits[0]).device,
            )
        shape = [1 if i == self.dim else s for i, s in enumerate(self.shape)]
        same = same_shape(value(total).shape, shape)
        return total if same else call(aten.expand.default, total, sizes)

    def _sum_of(self, factors: tuple[Any, ...], weighted: bool = False) -> Any:
        call = self.editor.call
        if not factors:
            return self._columns()
        if any(isinstance(f, (Apart, SelfWeighted)) for f in factors):
            raise NotLinear("its weights' own logarithms are summed in a sweep")
        one_hots = [f for f in factors if isinstance(f, OneHot)]
        others = [f for f in factors if not isinstance(f, OneHot)]
        shifted = [f for f in others if isinstance(f, Shifted)]
        if shifted:
            if len(factors) == 1:
                return self._below(shifted[0])
            if not weighted or len(shifted) > 1:
                raise NotLinear("a weighted sum of the logits reads them again")
        if len(one_hots) == 1 and all(map(self._is_column, others)):
            return self._picked(one_hots[0], others)
        if len(factors) == 1 and isinstance(factors[0], Exponential):
            return factors[0].total
        if len(factors) == 1 and (closed := self._closed(factors[0])) is not None:
            return closed
        product = self._plain(factors[0])
        for factor in factors[1:]:
            product = call(aten.mul.Tensor, product, self._plain(factor))
        if any(self.depends(product)) and not shifted:
            raise NotLinear("a factor needs a reduction of its own")
        along = self.dim - len(self.shape)
        if weighted:
            self._weights.add(product)
        elif not self._is_column(product) and product not in self._weights:
            raise NotLinear("what it is weighted with is summed in a sweep")
        return call(aten.sum.dim_IntList, product, [along], True)

    def _below(self, shifted: Shifted) -> Any:
        """The sum of the logits less their maximum."""
        if shifted.operation is None:  # in ``closes``
            return shifted.core.peak
        try:
            return below_of(self.graph, self.numbers, self.editor, shifted.operation, shifted.core)
        except NoForm as why:
            raise NotLinear(str(why)) from why

    def _is_column(self, factor: Any) -> bool:
        """Whether a factor is the same in every row."""
        if not isinstance(factor, torch.fx.Node):
            return False
        shape = value(factor).shape
        along = self.dim - (len(self.shape) - len(shape))
        return all(same_size(s, 1) for i, s in enumerate(shape) if i != along)

    def _picked(self, one_hot: OneHot, columns: list[Any]) -> Any:
        """The sum of a one-hot times columns: their entry there. An infinity elsewhere would have
        been multiplied by 0."""
        call, index, size = self.editor.call, one_hot.index, self._columns()
        first, last = call(aten.ge.Scalar, index, 0), call(aten.lt.Scalar, index, size)
        inside = call(aten.logical_and.default, first, last)
        picked = call(prims.convert_element_type.default, inside, torch.float32)
        if columns:
            product = columns[0]
            for column in columns[1:]:
                product = call(aten.mul.Tensor, product, column)
            all_of_it = self._sum_of((product,))
            at = call(aten.where.ScalarOther, inside, index, 0)
            entry = call(aten.index.Tensor, call(aten.view.default, product, [-1]), [at])
            nothing = call(aten.mul.Tensor, all_of_it, 0.0)
            picked = call(aten.add.Tensor, call(aten.mul.Tensor, picked, entry), nothing)
        return picked

    def _columns(self) -> Any:
        size = self.shape[self.dim]
        if isinstance(size, int):
            return size
        return self.editor.call(aten.sym_size.int, self.logits[0], self.dim)

    def _closed(self, node: Any) -> Any:
        """The sum of a factor that needs no sweep; None if it does."""
        if node.target is prims.convert_element_type.default and node not in self._depends:
            node = node.args[0]  # the factor's own conversion
        try:
            form = self.form(node, whole=False)
        except NotLinear:
            return None
        simple = all(
            not key.factors or (len(key.factors) == 1 and isinstance(key.factors[0], OneHot))
            for key in form
        )
        return self.sum(form) if simple else None


def closes(graph: Any, numbers: Numbers, node: Any, dim: int) -> bool:
    """Whether no sweep is left of a sum over rows, once operations make the statistics of the
    softmaxes that they can."""
    shape = value(node.args[0]).shape
    found: dict[Any, Core] = {}
    made: dict[Any, Core] = {}
    for where, every in ((found, cores(graph, numbers)), (made, (c for _, c in remembered(graph)))):
        for core in every:
            if core.dim == dim and same_shape(value(core.x).shape, shape):
                where[numbers.of(core.x)] = core
    editor = Editor(graph)
    rows = Rows(graph, numbers, editor, [*made, *found], dim)
    editor.before(node)
    try:
        for x, core in found.items():
            if x not in rows.operations:
                softmax.check(graph, numbers, [core])
                rows.operations[x] = Shifted(core, None, x)
        rows.sum(rows.form(node.args[0]))
    except (NotLinear, NoForm):
        return False
    finally:
        editor.undo()
        for shifted in rows.operations.values():
            if shifted.operation is not None:
                softmax.settle(shifted.operation)
    return True
