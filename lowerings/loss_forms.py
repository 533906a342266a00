"""The gradient of logits of a loss, read off a joint graph as a formula.

Every value around the softmaxes of logits z [..., V] is written as a *form*: a sum of terms, each a
coefficient that is known before the logits are (a number, or a number per row) times

- a factor along the row: 1, z, the probability p = exp(z - lse), or 1 in the target's column and 0
  elsewhere;
- the derivative 1 - tanh^2 of a softcap, or not;
- powers of the gradient that comes in (g), of the row's maximum (m), of the log of its sum of
  exponentials (l) and of that sum (s); lse = m + l.

The gradient of cross entropy, with z-loss, smoothing, masked rows, in whatever spelling, comes out
as g (A p - b [target] - c), A affine in lse. A sum over the row, a gather of the target, are forms
as well: p sums to 1. What is only computed where a condition on the row holds has its coefficients
0 elsewhere. Rounding in between to 16 bits is left out, as Inductor leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from inductor_ext.lowerings.loss_rows import (
    DIV,
    MUL,
    VIEWS,
    WHOLE,
    NoForm,
    RowValues,
    bounds,
    counts,
    key_of,
    levels_of,
    reached,
)
from inductor_ext.lowerings.softmax_cores import (
    MEANS,
    NARROW,
    SUMS,
    Core,
    constant,
    keeps_value,
    reduced,
)

from inductor_ext import compat_fx
from inductor_ext.editing import Editor, Numbers, same_shape, same_size, value

aten, prims = torch.ops.aten, torch.ops.prims

# Along the row: 1, z, p, 1 in the target's column.
ONE, Z, P, HOT = "1", "z", "p", "target"
# Of the row: the sum of z - m, and z - m at the target. So an offset of the logits cancels before
# anything is multiplied.
BELOW, PICKED = "below", "picked"
_ADD = {aten.add.Tensor: 1, aten.add.Scalar: 1, aten.sub.Tensor: -1, aten.sub.Scalar: -1}
_WHERE = {aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar}
PICKS = {aten.gather.default, aten.index.Tensor}
_WRAPPING = {aten.index.Tensor, aten.index_put.default}
_DEPTH, _TERMS = 100, 16


class Term(NamedTuple):
    """What a coefficient is multiplied by; ``g`` is a node, one number that comes in."""

    factor: str = ONE
    damped: bool = False
    g: Any = None
    m: int = 0
    l: int = 0  # noqa: E741
    s: int = 0


Form = dict[Term, Any]  # coefficients are numbers or flat fp32 nodes


def name_of(node: Any) -> str:
    """An operation as a user knows it."""
    return str(getattr(node.target, "overloadpacket", node.target)).removeprefix("aten.")


class Forms(RowValues):
    """The forms around a group of softmaxes with equal logits.

    ``of_tangent`` are the nodes that need a gradient that comes in. New nodes go in front of what
    ``editor`` points at. ``index`` [N] is the target, once one was seen.
    """

    def __init__(
        self,
        graph: Any,
        numbers: Numbers,
        of_tangent: set[Any],
        editor: Editor,
        group: list[Core],
    ) -> None:
        z = group[0].x
        super().__init__(graph, numbers, editor, z, levels_of(z, numbers))
        self.group = group
        self._key = key_of(self.levels, numbers)
        self.peaks = {numbers.of(core.peak) for core in group}
        self.totals = {numbers.of(core.total) for core in group}
        self.index: Any = None
        self.wraps: bool | None = None  # whether -1 is the last column; None where it is an error
        self._forms: dict[Any, Form | NoForm] = {}
        # What is known before the sweep: neither of these.
        self.of_tangent = of_tangent
        self.of_sweep = reached(node for core in group for node in (core.peak, core.total))

    def is_known(self, node: Any) -> bool:
        """Whether a node needs neither the sweep nor a gradient that comes in."""
        return not isinstance(node, torch.fx.Node) or (
            node not in self.of_sweep and node not in self.of_tangent
        )

    # --- forms ------------------------------------------------------------------------------------

    def form(self, node: Any, depth: int = 0) -> Form:
        """The form of a value; raises NoForm."""
        if not isinstance(node, torch.fx.Node):
            return {Term(): node} if node else {}
        if node not in self._forms:
            try:
                self._forms[node] = self._form(node, depth)
            except NoForm as why:
                # Whatever it is made of, the backward may take one number as it comes.
                number = node in self.of_tangent and self.kind(node)[0] == "one"
                self._forms[node] = {Term(g=node): 1} if number else why
        found = self._forms[node]
        if isinstance(found, NoForm):
            raise found
        return found

    def has_form(self, node: Any) -> bool:
        """Whether a value has a form."""
        try:
            self.form(node)
        except NoForm:
            return False
        return True

    def _form(self, node: Any, depth: int) -> Form:
        if depth > _DEPTH:
            raise NoForm("its expression is too deep")
        number = constant(node)
        if number is not None:
            return {Term(): number} if number else {}
        kind, level = self.kind(node)
        first = self.numbers.of(node)
        if not kind:
            raise NoForm(f"{name_of(node)} has another shape")
        if (kind, level) == ("whole", 0) and self.is_known(node) and self._is_z(first):
            return {Term(Z): 1}
        if first in self.peaks:
            return {Term(m=1): 1}
        if first in self.totals:
            return {Term(s=1): 1}
        if compat_fx.is_tangent(node):
            raise NoForm("the gradient that comes in is not one number")
        if kind != "whole" and self.is_known(node):
            return {Term(): self.factor(node)}

        def of(n: Any) -> Form:
            self._check_operand(n, kind)
            return self.form(n, depth + 1)

        found = self._descend(node, of, kind, level)
        if found is None and kind == "whole" and self.is_known(node):
            raise NoForm(f"{name_of(node)} varies along the row")
        if found is None:
            what = "it" if kind == "whole" else "the softmax's statistics"
            raise NoForm(f"{name_of(node)} of {what} is not handled")
        if len(found) > _TERMS:
            raise NoForm("it has too many terms")
        return found

    def _is_z(self, node: Any) -> bool:
        return node is self.z or key_of(levels_of(node, self.numbers), self.numbers) == self._key

    def _check_operand(self, node: Any, kind: str) -> None:
        """Logits take values of the row in, and numbers: not what varies along it."""
        if kind == "whole" and isinstance(node, torch.fx.Node):
            own = self.kind(node)[0]
            if own == "row" and not same_size(value(node).shape[-1], 1):
                raise NoForm(f"{name_of(node)} varies along the row")
            if not own:
                raise NoForm(f"{name_of(node)} varies along the row or has another shape")

    def _descend(self, node: Any, of: Callable[[Any], Form], kind: str, level: int) -> Form | None:
        """The form by those of the arguments; None for an operation that is not handled."""
        target, args = node.target, node.args
        if node.op != "call_function":
            raise NoForm(f"{node} varies along the row")
        if kind == "whole" and level and target not in (aten.slice_scatter.default,):
            self._check_level(node, args, level)
        if target in _ADD and node.kwargs.get("alpha", 1) == 1 and len(args) == 2:
            if self._is_derivative(node):
                return {Term(damped=True): 1}
            return self._plus(of(args[0]), of(args[1]), _ADD[target])
        if target is aten.neg.default:
            return self._scaled(of(args[0]), -1)
        if target in MUL:
            return self._times(of(args[0]), of(args[1]))
        if target in DIV and len(args) == 2:
            return self._over(of(args[0]), of(args[1]))
        if target is aten.reciprocal.default:
            return self._over({Term(): 1}, of(args[0]))
        if target is aten.pow.Tensor_Scalar and args[1] == 1:
            return of(args[0])
        if target is aten.log.default:
            return {Term(l=1): 1} if of(args[0]) == {Term(s=1): 1} else None
        if target is aten.exp.default:
            return self._exponential(of(args[0]))
        if target in VIEWS or target is aten.expand.default:
            return of(args[0])
        if target is aten.select.int and same_size(value(args[0]).shape[args[1]], 1):
            return of(args[0])
        if target is aten.select_scatter.default and same_size(value(node).shape[args[2]], 1):
            return of(args[1])
        if target is prims.convert_element_type.default:
            return self._converted(node, of)
        if target in _WHERE:
            return self._where(node, of, kind)
        if target in SUMS and kind != "whole":
            if self.kind(args[0]) != ("whole", 0) or reduced(node) != [value(args[0]).dim() - 1]:
                return None
            return self.sum_of(self.form(args[0]), target in MEANS)
        if target in PICKS and kind != "whole":
            return self._picked(node)
        if kind == "whole":
            return self._placed(node, level)
        return None

    def _check_level(self, node: Any, args: Any, level: int) -> None:
        """Rows that were cut off are 0 in a form behind the cut: one number may scale it, and it
        may be added to its like."""
        derivative = node.target in _ADD and self._is_derivative(node)
        for arg in args:
            if isinstance(arg, torch.fx.Node) and constant(arg) != 0:
                own = self.kind(arg)
                scales = own[0] == "one" and node.target in MUL | DIV
                if own != ("whole", level) and not scales:
                    raise NoForm(f"{name_of(node)} follows a slice of the logits")
            elif node.target in _ADD and isinstance(arg, (int, float)) and arg and not derivative:
                raise NoForm(f"{name_of(node)} follows a slice of the logits")

    def _is_derivative(self, node: Any) -> bool:
        """1 - tanh^2."""
        one, square = node.args
        if node.target is not aten.sub.Tensor or constant(one) != 1:
            return False
        if not isinstance(square, torch.fx.Node) or square.target is not aten.mul.Tensor:
            return False
        tanhs = {low.tanh for low in self.levels} - {None}
        return all(
            isinstance(n, torch.fx.Node) and self.numbers.of(n) in tanhs for n in square.args
        )

    # --- algebra ----------------------------------------------------------------------------------

    def _plus(self, a: Form, b: Form, sign: int) -> Form:
        total = dict(a)
        for term, c in b.items():
            total[term] = self.add(total.get(term, 0), self.mul(c, sign))
        return {t: c for t, c in total.items() if isinstance(c, torch.fx.Node) or c != 0}

    def _scaled(self, form: Form, by: Any) -> Form:
        return {term: self.mul(c, by) for term, c in form.items()}

    def _times(self, a: Form, b: Form) -> Form:
        product: Form = {}
        for (ta, ca), (tb, cb) in ((x, y) for x in a.items() for y in b.items()):
            factors = {ta.factor, tb.factor} - {ONE} or {ONE}
            alone = ONE in (ta.factor, tb.factor) or factors == {HOT}
            if not alone or (ta.damped and tb.damped):
                raise NoForm("it is not linear in the probabilities")
            if ta.g is not None and tb.g is not None:
                raise NoForm("it is not linear in the gradient that comes in")
            (factor,) = factors
            powers = (x + y for x, y in zip(ta[3:], tb[3:], strict=True))
            term = Term(factor, ta.damped or tb.damped, ta.g or tb.g, *powers)
            product = self._plus(product, {term: self.mul(ca, cb)}, 1)
        return product

    def _over(self, a: Form, b: Form) -> Form | None:
        if len(b) == 0:
            raise NoForm("it is divided by 0")
        ((term, c),) = b.items() if len(b) == 1 else ((None, None),)
        if term == Term():
            return {t: self.over(ca, c) for t, ca in a.items()}
        if term == Term(s=1) and isinstance(c, (int, float)) and c == 1:
            return {t._replace(s=t.s - 1): ca for t, ca in a.items()}
        return None

    def _exponential(self, form: Form) -> Form | None:
        """exp(z - m) is s p, and exp(z - m - l) is p."""
        shift = {Term(Z): 1, Term(m=1): -1}
        if form == shift:
            return {Term(P, s=1): 1}
        if form == {**shift, Term(l=1): -1}:
            return {Term(P): 1}
        raise NoForm("exp of something else than z - lse")

    # --- the other operations ---------------------------------------------------------------------

    def _converted(self, node: Any, of: Callable[[Any], Form]) -> Form | None:
        source, into = node.args[0], value(node).dtype
        dtype = value(source).dtype
        if dtype == torch.bool and into in (*NARROW, *WHOLE):
            return {Term(HOT): 1} if self._compares(source) else None
        if keeps_value(node):
            narrows = into == torch.float16 != dtype
            if narrows and value(self.levels[-1].base).dtype != torch.float16:
                raise NoForm("fp16 has no room for all of its gradient")
            return of(source)
        return of(source) if dtype in WHOLE and into in (*NARROW, *WHOLE) else None

    def _where(self, node: Any, of: Callable[[Any], Form], kind: str) -> Form | None:
        condition, yes, no = node.args
        if kind == "row" and constant(yes) == 0 and self._is_infinite_peak(condition, no):
            return of(no)
        if not self.is_known(condition):
            raise NoForm("a condition depends on the softmax")
        if kind == "whole" and self.kind(condition)[0] == "whole":
            if not self._compares(condition):
                return None
            at, elsewhere = of(yes), of(no)
            if any(t.factor != ONE for t in (*at, *elsewhere)):
                return None
            placed = {t._replace(factor=HOT): c for t, c in self._plus(at, elsewhere, -1).items()}
            return self._plus(elsewhere, placed, 1)
        self._check_operand(condition, kind)
        flat = self.flat(condition)
        total: Form = {}
        for side, holds in ((yes, True), (no, False)):
            part = {t: self.only_where(flat, c, holds) for t, c in of(side).items()}
            total = self._plus(total, part, 1)
        return total

    def _is_infinite_peak(self, condition: Any, peak: Any) -> bool:
        """abs(m) == inf, where logsumexp takes 0 for the maximum: its gradient is not finite in
        such a row, by whichever maximum."""
        if condition.target is not aten.eq.Scalar or condition.args[1] != torch.inf:
            return False
        size = condition.args[0]
        return (
            size.target is aten.abs.default
            and {
                self.numbers.of(size.args[0]),
                self.numbers.of(peak),
            }
            <= self.peaks
        )

    def _compares(self, node: Any) -> bool:
        """``eq(target, columns)``, either way round."""
        if node.target is not aten.eq.Tensor:
            return False
        for index, columns in (node.args, node.args[::-1]):
            if counts(columns, -1, self.columns):
                while index.target is aten.expand.default:
                    index = index.args[0]
                if self._is_rows(index):
                    self._take(index, wraps=False)
                    return True
        return False

    def _is_rows(self, node: Any) -> bool:
        """Whether a value has an integer for each row, in the shape of logits."""
        tensor = value(node)
        return (
            self.kind(node) in (("row", 0), ("one", 0))
            and tensor.dim() > 0
            and same_size(tensor.shape[-1], 1)
            and tensor.dtype in WHOLE
            and self.is_known(node)
        )

    def _take(self, index: Any, wraps: bool | None) -> None:
        """Remember the target, or raise where it is not the one known."""
        if self.index is None:
            self.index = index
        elif not self.same_rows(index, self.index):
            raise NoForm("more than one column of a row stands out")
        if self.wraps is None:
            self.wraps = wraps
        elif wraps not in (None, self.wraps):
            raise NoForm("a negative target is a column here and none there")

    def sum_of(self, form: Form, mean: bool = False) -> Form:
        """The sum (or mean) over the row of a form of logits."""
        total: Form = {}
        columns = self.flat(self._columns())
        for term, c in form.items():
            if term.damped:
                raise NoForm("a sum over the row needs a sweep")
            if term.factor == Z:
                part = {
                    term._replace(factor=BELOW): c,
                    term._replace(factor=ONE, m=term.m + 1): self.mul(c, columns),
                }
            else:
                by = {ONE: columns, P: 1}[term.factor] if term.factor != HOT else self.once()
                part = {term._replace(factor=ONE): self.mul(c, by)}
            total = self._plus(total, part, 1)
        if mean:
            total = {t: self.over(c, columns) for t, c in total.items()}
        return total

    def _columns(self) -> Any:
        if isinstance(self.columns, int):
            return self.columns
        raise NoForm("the length of the row is symbolic")

    def once(self) -> Any:
        """How often the target is a column, 1 or 0."""
        return self.factor(self.inside())

    def column(self) -> Any:
        """The target's column, flat; any other number where there is none."""
        call, index = self.editor.call, self.flat(self.index)
        if isinstance(index, torch.fx.Node):
            index = self.spread(index)
        else:  # one number for all rows
            device = value(self.z).device
            rows = self.sizes([self.rows[0]])
            index = call(aten.full.default, rows, index, dtype=torch.int64, device=device)
        if not self.wraps:
            return index
        last = call(aten.add.Scalar, index, self._columns())
        return call(aten.where.self, call(aten.lt.Scalar, index, 0), last, index)

    def inside(self) -> Any:
        """Whether the target is a column, flat."""
        call, index = self.editor.call, self.column()
        first, last = call(aten.ge.Scalar, index, 0), call(aten.lt.Scalar, index, self._columns())
        return call(aten.logical_and.default, first, last)

    def _picked(self, node: Any) -> Form | None:
        """The target's entry of each row: a gather, or an index that counts the rows."""
        form = self.form(node.args[0])
        index = self._index_of(node)
        if index is None or self.kind(node.args[0]) != ("whole", 0):
            return None
        self._take(index, True if node.target in _WRAPPING else None)
        if any(t.damped or t.factor == P for t in form):
            raise NoForm("the target's probability is not known without a sweep")
        total: Form = {}
        for term, c in form.items():
            part = {term._replace(factor=ONE): c}
            if term.factor == Z:
                part = {term._replace(factor=PICKED): c, term._replace(factor=ONE, m=term.m + 1): c}
            total = self._plus(total, part, 1)
        return total

    def _index_of(self, node: Any) -> Any:
        """The target's column by which a node picks or places one entry per row; or None."""
        shape = value(node.args[0]).shape
        if node.target in _WRAPPING:
            indices = node.args[1]
            if len(shape) != 2 or len(indices) != 2 or None in indices:
                return None
            rows, index = indices
            own = self.kind(index) == ("row", 0) and value(index).dim() == 1
            found = own and self.is_known(index) and counts(rows, 0, shape[0])
            return index if found else None
        dim, index = node.args[1:3]
        return index if dim % len(shape) == len(shape) - 1 and self._is_rows(index) else None

    def _placed(self, node: Any, level: int) -> Form | None:
        """Values of rows in their place: in the target's column, or in front of a slice."""
        target, args = node.target, node.args
        if target is aten.slice_scatter.default:
            cut = self.levels[level].cut if level else None
            if cut is None or constant(args[0]) != 0 or self.kind(args[1]) != ("whole", level - 1):
                return None
            source = value(cut.args[0]).shape
            if not same_shape(value(node).shape, source) or bounds(cut) != bounds(node, node):
                raise NoForm("the rows of its gradient are not those of a slice of the logits")
            return self.form(args[1])
        if target in (aten.scatter_add.default, aten.scatter.value, aten.scatter.src):
            source = args[3]
        elif target is aten.index_put.default and len(args) > 3 and args[3]:
            source = args[2]
        else:
            return None
        if constant(args[0]) != 0:
            return None
        index = self._index_of(node)
        if index is None:
            return None
        self._take(index, True if node.target in _WRAPPING else None)
        form = self.form(source)
        if any(t.factor != ONE for t in form):
            return None
        return {t._replace(factor=HOT): c for t, c in form.items()}
