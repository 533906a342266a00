"""A loss in a joint graph whose gradient can be made where its logits are read: found, and emitted.

``find`` reads the gradient g (dz/dx) (A p - b [target] - c) off the graph, and what the forward
sums of the logits besides. Where an operation makes it (``Emitter``), its factors move in front of
it, its statistics take the place of the softmaxes', and the backward multiplies by g.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable
from typing import Any

import torch
from inductor_ext.lowerings.loss_forms import (
    BELOW,
    HOT,
    MEANS,
    ONE,
    PICKED,
    PICKS,
    SUMS,
    Form,
    Forms,
    P,
    Term,
    Z,
    reduced,
)
from inductor_ext.lowerings.loss_rows import VIEWS, NoForm, is_contiguous
from inductor_ext.lowerings.softmax_cores import PRODUCTS, Core, put_pair, replaced, row_shape

from inductor_ext import compat_fx, editing, matching
from inductor_ext.editing import Editor, Numbers, same_shape, value

aten = torch.ops.aten
_OF_ROW = (BELOW, PICKED)


@dataclasses.dataclass
class Gradient:
    """``node`` is the whole gradient of ``x``: the logits of ``forms`` at ``level``.

    ``g`` is the number that comes in, ``a0, a1, b, c`` the factors (numbers or flat nodes) for 1.
    ``sums`` and ``picks`` are what the forward sums over rows of logits, and picks at the target,
    with their forms.
    """

    forms: Forms
    node: Any
    level: int
    x: Any
    scale: float
    softcap: float
    g: Any
    a0: Any
    a1: Any
    b: Any
    c: Any
    sums: list[tuple[Any, Form]] = dataclasses.field(default_factory=list)
    picks: list[tuple[Any, Form]] = dataclasses.field(default_factory=list)


def find(graph: Any, numbers: Numbers, of_tangent: set[Any], group: list[Core]) -> Gradient | None:
    """The gradient of a group of softmaxes with equal logits; None where there is no backward, or
    probabilities are more than a loss's.

    ``of_tangent``: the nodes that need a gradient that comes in. Raises NoForm where the gradient
    is not of the form.
    """
    editor = Editor(graph)
    editor.before(next(iter(reversed(graph.nodes))))  # what is needed earlier is moved
    forms = Forms(graph, numbers, of_tangent, editor, group)
    try:
        whole = _whole(forms)
        incoming = [node for node in whole if node in of_tangent]
        if not incoming or _leaves(forms, whole):
            return None
        gradient = _read(forms, _end(forms, incoming))
        _look_at_forward(gradient, whole)
    except Exception:
        editor.undo()
        raise
    return gradient


def _whole(forms: Forms) -> list[Any]:
    """What is computed from the logits in their shape, in the order of the graph."""
    base = forms.levels[-1].base
    found, stack = {base}, [base]
    while stack:
        for user in stack.pop().users:
            if user not in found and user.op != "output" and forms.kind(user)[0] == "whole":
                found.add(user)
                stack.append(user)
    return sorted(found)


def _leaves(forms: Forms, whole: list[Any]) -> bool:
    """Whether what is made of the softmax leaves in the shape of logits: attention, a gate."""
    return any(
        user.op == "output" or user.target in PRODUCTS
        for node in whole
        if node in forms.of_sweep and node not in forms.of_tangent
        for user in node.users
        if user not in forms.of_tangent
    )


def _end(forms: Forms, incoming: list[Any]) -> Any:
    """The node that is the whole gradient of the logits."""
    ends: dict[Any, None] = {}
    for node in incoming:
        if not forms.has_form(node) or not any(t.factor == P for t in forms.form(node)):
            continue
        if any(forms.kind(u)[0] == "whole" and forms.has_form(u) for u in node.users):
            continue
        while node.target in VIEWS:
            node = node.args[0]
        ends[node] = None
    if not ends:
        for node in incoming:
            forms.form(node)
        raise NoForm("no gradient of it is made of its probabilities")
    if len(ends) > 1:
        raise NoForm("several gradients are made of its probabilities")
    (end,) = ends
    for user in behind_views(end):
        if matching.is_pointwise(user):
            forms.form(user)
            raise NoForm(f"{user} reads its gradient again")
    return end


def behind_views(node: Any) -> list[Any]:
    """What uses a node, or views of it."""
    found: list[Any] = []
    stack = [node]
    while stack:
        for user in stack.pop().users:
            (stack if user.target in VIEWS else found).append(user)
    return found


def _read(forms: Forms, node: Any) -> Gradient:
    """The factors of a gradient."""
    level = forms.kind(node)[1]
    low = forms.levels[level]
    x, scale, softcap = low.base, low.scale, low.softcap
    if value(node).dtype != value(x).dtype:
        raise NoForm(f"the gradient of {value(x).dtype} logits is {value(node).dtype}")
    if not same_shape([value(node).numel()], [value(x).numel()]):
        raise NoForm("its gradient has another shape")
    if not (scale > 0 and softcap >= 0):
        raise NoForm("its scale is not positive")
    a0: Any = 0
    lse: dict[str, Any] = {}
    b: Any = 0
    c: Any = 0
    form = forms.form(node)
    incoming = {term.g for term in form}
    if len(incoming) > 1:
        raise NoForm("more than one gradient comes in")
    (g,) = incoming
    for term, factor in form.items():
        if g is None or term.s or term.damped != (softcap > 0):
            raise NoForm("its gradient is not linear in what comes in")
        factor = forms.over(factor, scale) if scale != 1 else factor
        powers = term.m, term.l
        if term.factor == P and powers == (0, 0):
            a0 = factor
        elif term.factor == P and powers in ((1, 0), (0, 1)):
            lse["m" if term.m else "l"] = factor
        elif term.factor == HOT and powers == (0, 0):
            b = forms.mul(factor, -1)
        elif term.factor == ONE and powers == (0, 0):
            c = forms.mul(factor, -1)
        elif term.factor == Z:
            raise NoForm("its gradient is not that of a loss alone")
        else:
            raise NoForm("its gradient depends on the softmax otherwise than by lse")
    if lse and (len(lse) != 2 or not _same(*lse.values())):
        raise NoForm("its gradient depends on the maximum otherwise than by lse")
    return Gradient(forms, node, level, x, scale, softcap, g, a0, lse.get("l"), b, c)


def _same(a: Any, b: Any) -> bool:
    return a is b or (not isinstance(a, torch.fx.Node) and a == b)


# --- the forward ----------------------------------------------------------------------------------


def _look_at_forward(gradient: Gradient, whole: list[Any]) -> None:
    """Find what is summed over rows of the logits, and picked, in the forward.

    A sum that only somebody looks at stays: of the maximum and what is below it, it would lose
    digits, and infinities.
    """
    forms = gradient.forms
    tangents = [node for node in _needed([gradient.g]) if compat_fx.is_tangent(node)]
    of_loss = _needed(n for t in tangents for n in compat_fx.differentiated(forms.graph, t))
    totals = {core.total for core in forms.group}
    for node in sorted({user for source in whole for user in source.users}):
        made = node in forms.of_tangent or node in totals or not node.users
        if made or node.target not in SUMS | PICKS or forms.kind(node.args[0]) != ("whole", 0):
            continue
        try:
            if node.target in PICKS:
                form = forms.form(node)
                where = gradient.picks
            else:
                if value(node.args[0]).dim() - 1 not in reduced(node):
                    continue
                form = forms.sum_of(forms.form(node.args[0]), node.target in MEANS)
                where = gradient.sums
        except NoForm:
            continue
        if Term(BELOW) in form and node not in of_loss:
            continue
        of_logits = any(t.factor != ONE for t in form)
        if (
            of_logits
            and all(map(_is_of_row, form))
            and not any(_is_conditional(forms, c) for c in form.values())
        ):
            where.append((node, form))


def _needed(roots: Iterable[Any]) -> set[Any]:
    """Nodes, and all that they are computed from."""
    found = set(roots)
    stack = list(found)
    while stack:
        new = [n for n in stack.pop().all_input_nodes if n not in found]
        found.update(new)
        stack.extend(new)
    return found


def _is_of_row(term: Term) -> bool:
    """Whether a term is the row's statistics."""
    alone = term.factor == ONE or term == Term(term.factor)
    return alone and term.factor in (ONE, *_OF_ROW) and not (term.damped or term.g or term.s)


def _is_conditional(forms: Forms, c: Any) -> bool:
    """Whether a factor is 0 for what must not be looked at there, which may be NaN."""
    made, stack = set(forms.editor.made), [c]
    while stack:
        node = stack.pop()
        if isinstance(node, torch.fx.Node) and node in made:
            if node.target in (aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar):
                return True
            stack.extend(node.all_input_nodes)
    return False


# --- emission -------------------------------------------------------------------------------------


class Emitter:
    """Puts what an operation makes in the place of a loss's softmaxes and of its gradient.

    ``ready`` moves the operation's inputs in front of where it will stand; ``statistics`` takes its
    outputs, [N] of the rows of ``x``.
    """

    def __init__(self, gradient: Gradient) -> None:
        self.gradient, self.forms = gradient, gradient.forms
        self.editor = gradient.forms.editor
        self.graph = gradient.forms.graph
        self.folds = sorted([*gradient.sums, *gradient.picks], key=lambda fold: fold[0])

    def sized(self, node: Any) -> None:
        """Put what it is made of in place of a size of the logits."""
        self.editor.before(node)
        self.editor.forget()
        (size,) = self.forms.sizes([value(node)])
        node.replace_all_uses_with(size)
        self.graph.erase_node(node)
        self.editor.forget()
        self.editor.before(next(iter(reversed(self.graph.nodes))))

    def ready(self) -> tuple[Any, list[Any]]:
        """(target, [a0, a1, b, c]) for the rows of ``x``, in front of the first softmax; a1 and c
        None where they are 0. Raises NoForm where they are not known there."""
        gradient, forms, level = self.gradient, self.forms, self.gradient.level
        needs_below = any(Term(BELOW) in form for _, form in gradient.sums)
        factors: list[Any] = []
        for name in ("a0", "a1", "b", "c"):
            factor = getattr(gradient, name)
            nothing = factor is None or (isinstance(factor, (int, float)) and factor == 0)
            if nothing and (name == "a1" or (name == "c" and not needs_below)):
                factors.append(None)
            else:
                factors.append(forms.lift(forms.spread(factor or 0), level, 0.0))
        if forms.index is None:
            index = self.editor.call(
                aten.full.default,
                forms.sizes([forms.rows[level]]),
                -1,
                dtype=torch.int64,
                device=value(forms.z).device,
            )
        else:
            index = forms.lift(forms.shaped(forms.column(), [-1]), level, -1)
        used = [c for _, form in self.folds for c in form.values()]
        if any(Term(PICKED) in form for _, form in self.folds):
            used.append(forms.inside())
        self._check_shapes()
        self._move([n for n in (index, *factors, *used) if isinstance(n, torch.fx.Node)])
        return index, factors

    def _check_shapes(self) -> None:
        """Raise where a shape is not known that is needed later, when it is too late."""
        gradient, forms = self.gradient, self.forms
        for low in forms.levels[1 : gradient.level + 1]:
            forms.sizes(value(low.cut.args[0]).shape[:-1])
        replaced = [*(core.total for core in forms.group), *(node for node, _ in self.folds)]
        for node in (*replaced, gradient.node):
            forms.sizes(value(node).shape)

    def _first(self) -> Any:
        """The first node that the operation takes the place of."""
        places = {
            *(core.peak for core in self.forms.group),
            *(core.peak.args[0] for core in self.forms.group if core.peak.args),
            *(core.total for core in self.forms.group),
            *(node for node, _ in self.folds),
        } - {self.forms.z}
        places = {n for n in places if n in self.forms.of_sweep or n.target is aten.max.dim} | {
            node for node, _ in self.folds
        }
        return next(n for n in self.graph.nodes if n in places)

    def _move(self, needed: list[Any]) -> None:
        """Compute nodes in front of where the operation will stand."""
        first = self._first()
        late: dict[Any, None] = {}
        stack = list(needed)
        while stack:
            node = stack.pop()
            if node < first or node in late or node.op == "placeholder":
                continue
            sizes = not isinstance(value(node), (torch.Tensor, tuple, list))
            if node.op != "call_function" or not (editing.is_pure(node) or sizes):
                raise NoForm(f"{node} is not known before the softmax")
            if any(node is fold for fold, _ in self.folds):
                raise NoForm(f"a factor of it depends on {node}")
            late[node] = None
            stack.extend(node.all_input_nodes)
        for node in sorted(late):
            first.prepend(node)
        self.editor.before(first)
        self._assert()
        self.editor.forget()  # what was not needed stands behind

    def _assert(self) -> None:
        """Let a target outside the columns be the error that it was to the picks that go."""
        if any(node.target in PICKS for node, _ in self.folds):
            call = self.editor.call
            outside = call(aten.logical_not.default, self.forms.inside())
            none = call(aten.logical_not.default, call(aten.any.dims, outside))
            said = "index out of bounds: a target is no column of the logits"
            call(aten._assert_async.msg, none, said)

    def operation(self, op: Any, *args: Any) -> list[Any]:
        """The outputs of an operation, as nodes."""
        made = self.editor.call(op, *args)
        return [self.editor.call(operator.getitem, made, i) for i in range(len(made.meta["val"]))]

    def statistics(self, peak: Any, total: Any, below: Any, picked: Any) -> None:
        """Put them in place of the softmaxes' own and of what the forward sums and picks."""
        gradient, forms, editor = self.gradient, self.forms, self.editor
        made = {"m": peak, "s": total, "z": picked, BELOW: below}
        made = {name: n for name, n in made.items() if n is not None and value(n).numel()}
        rows = {name: forms.lower(node, gradient.level) for name, node in made.items()}
        for x in dict.fromkeys(core.x for core in forms.group):  # in several shapes, maybe
            shape = forms.sizes(row_shape(x, -1))
            pair = [forms.shaped(rows[name], shape) for name in ("m", "s")]
            put_pair(editor, [core for core in forms.group if core.x is x], *pair)
        for node, form in self.folds:
            editor.before(node)
            if Term(PICKED) in form:
                above = editor.call(aten.sub.Tensor, rows["z"], rows["m"])
                rows[PICKED] = editor.call(aten.where.ScalarOther, forms.inside(), above, 0.0)
            self._fold(node, form, rows)
        folded = [node for node, _ in self.folds]
        editing.erase_unused(self.graph, [*replaced(forms.group), *folded])

    def _fold(self, node: Any, form: Form, rows: dict[str, Any]) -> None:
        """A sum over rows of logits, or an entry of each, by the rows' statistics."""
        forms, editor = self.forms, self.editor
        form = dict(form)
        total: Any = 0
        for factor in _OF_ROW:
            if Term(factor) in form:
                total = forms.add(total, forms.mul(rows[factor], form.pop(Term(factor))))
        for term, c in form.items():
            for name, power in (("m", term.m), ("l", term.l)):
                for _ in range(power):
                    c = forms.mul(rows["m"] if name == "m" else self._log(rows["s"]), c)
            total = forms.add(total, c)
        shape = list(value(node).shape)
        total = forms.spread(total)
        if node.target in SUMS:
            source = value(node.args[0])
            others = [d for d in reduced(node) if d != source.dim() - 1]
            if others:
                total = forms.shaped(total, forms.sizes(source.shape[:-1]))
                overload = aten.mean.dim if node.target in MEANS else aten.sum.dim_IntList
                total = editor.call(overload, total, others)
        total = forms.shaped(total, forms.sizes(shape))
        node.replace_all_uses_with(editor.to(total, value(node).dtype))

    def _log(self, total: Any) -> Any:
        return self.editor.call(aten.log.default, total)

    def scaled(self, made: Any, node: Any, transposed: bool = False, strided: Any = None) -> None:
        """Put what was made for an incoming gradient of 1, or its transpose, in place of a node.
        ``strided``: it is that of the shape, permuted as said."""
        editor, forms = self.editor, self.forms
        editor.before(node)
        scaled = editor.call(torch.ops.inductor_ext.scaled_gradient.default, made, self.gradient.g)
        if transposed:
            scaled = editor.call(aten.permute.default, scaled, [1, 0])
        if strided is not None:
            scaled = editor.call(aten.view.default, scaled, strided[0])
            scaled = editor.call(aten.permute.default, scaled, strided[1])
        if not same_shape(value(scaled).shape, value(node).shape):
            scaled = forms.shaped(scaled, forms.sizes(value(node).shape))
        node.replace_all_uses_with(editor.to(scaled, value(node).dtype))

    def done(self, nodes: list[Any]) -> None:
        """Drop what was replaced, and what nothing uses."""
        editing.erase_unused(self.graph, nodes)
        self.editor.drop_unused()


def rows_of(x: Any) -> bool:
    """Whether logits are rows of one memory."""
    tensor = value(x)
    return is_contiguous(tensor) or (tensor.dim() == 2 and tensor.stride(1) == 1)


__all__ = ["Emitter", "Gradient", "NoForm", "Z", "find", "rows_of"]
