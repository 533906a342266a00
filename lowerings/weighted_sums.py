"""Sums of log-probabilities weighted along the row, by the operation that takes the softmax.

``row_sums`` meets them as products of what a row is weighted with and of the logits less their
maximum: weights that lie in memory (probabilities as targets), the exponentials of other logits (a
teacher), or of these logits (an entropy). One operation makes such a sum in a read of both, and all
statistics with it, so that it takes the place of the operations that make those alone.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from inductor_ext.lowerings import softmax
from inductor_ext.lowerings.loss_rows import NoForm, RowValues, is_contiguous, levels_of
from inductor_ext.lowerings.row_forms import Exponential, Form, Key, SelfWeighted, Shifted
from inductor_ext.lowerings.softmax_cores import (
    NARROW,
    lies_in_memory,
    noted,
    remember,
    row_shape,
    uncast,
    xlogy,
)

from inductor_ext import compat, compat_fx, editing, matching
from inductor_ext.editing import Editor, Numbers, same_shape, value
from inductor_ext.ops import _weighted
from inductor_ext.ops._weighted import FINITE, GIVEN, NO, OWN, SOFTMAX, YES

aten = torch.ops.aten
WEIGHTED = _weighted.weighted_statistics._opoverload
FEW = 132  # rows, below which one program per row leaves multiprocessors idle
MASS, LINEAR, SELF = 4, 5, 6  # places among the results
_KIND, _OWN, _BELOW = 2, 3, 4  # places among the arguments


@dataclasses.dataclass(frozen=True)
class Apart:
    """Weights times the difference of two log-probabilities, their own and the logits': the
    operation sums it column by column."""

    exponential: Exponential
    shifted: Shifted
    own: int


@dataclasses.dataclass(frozen=True)
class _Want:
    """A sum that an operation may make: the logits, their weights, which result, what ``own``."""

    shifted: Shifted
    weights: Any  # an Exponential, or a node in memory
    place: int
    own: int = NO


def signed(c: Any) -> tuple[int, Any]:
    """(sign, the rest) of a coefficient: two are each other's negative if only the sign differs."""
    if not isinstance(c, torch.fx.Node):
        return (-1, -c) if c < 0 else (1, c)
    if c.target is aten.neg.default:
        sign, rest = signed(c.args[0])
        return -sign, rest
    if c.target is aten.mul.Tensor:
        (a, left), (b, right) = map(signed, c.args)
        return a * b, (aten.mul.Tensor, left, right)
    return 1, c


def paired(form: Form) -> Form:
    """The form with (w log w - w log p) as one factor where the form has both."""
    made = dict(form)
    for key, c in form.items():
        own = _self_of(key.factors)
        if own is None or key not in made:
            continue
        exponential, kind = own
        for other, b in form.items():
            found = _shifted_and_weights(other.factors)
            if other not in made or found is None or found[1] != exponential:
                continue
            if other.where != key.where:
                continue
            (sign, size), (other_sign, other_size) = signed(c), signed(b)
            if found[0].x == exponential.x or size != other_size or sign == other_sign:
                continue
            apart = Key((Apart(exponential, found[0], kind),), key.where)
            if apart in made:  # of another order of the factors
                continue
            del made[key], made[other]
            made[apart] = c
            break
    return made


def _self_of(factors: tuple[Any, ...]) -> tuple[Exponential, int] | None:
    """(w, how) of factors that are w times its own logarithm, but for the log of its sum."""
    if len(factors) == 1 and isinstance(factors[0], SelfWeighted):
        return factors[0].exponential, FINITE
    found = _shifted_and_weights(factors)
    if found is not None and isinstance(found[1], Exponential) and found[0].x == found[1].x:
        return found[1], YES
    return None


def _shifted_and_weights(factors: tuple[Any, ...]) -> tuple[Shifted, Any] | None:
    """(the logits less their maximum, what they are weighted with) of a product of the two."""
    if len(factors) != 2:
        return None
    for shifted, weights in (factors, factors[::-1]):
        if isinstance(shifted, Shifted) and isinstance(weights, (Exponential, torch.fx.Node)):
            return shifted, weights
    return None


class Weighted:
    """The operations that one graph's sums over rows of one shape ask for."""

    def __init__(self, graph: Any, numbers: Numbers, editor: Editor, dim: int) -> None:
        self.graph, self.numbers, self.editor, self.dim = graph, numbers, editor, dim
        self._made: dict[Any, tuple[Any, Shifted, Shifted | None]] = {}

    # --- what operations can make -----------------------------------------------------------------

    def sums(self, form: Form, operations: dict[Any, Shifted]) -> dict[Any, Any]:
        """factors -> their sum over the row, of those that operations make."""
        wants = {key.factors: w for key in form if (w := self._want(key.factors, operations))}
        given = {w.weights: w.shifted for w in wants.values() if not _is_softmax(w.weights)}
        given |= self.given()
        for key in form:  # sums of the weights alone, where they are read anyway
            for weights, shifted in given.items():
                if not isinstance(weights, torch.fx.Node) or len(key.factors) != 1:
                    continue
                of_log = xlogy(key.factors[0])
                if self._same(key.factors[0], weights):
                    wants[key.factors] = _Want(shifted, weights, MASS)
                elif of_log is not None and self._same(of_log, weights):
                    wants[key.factors] = _Want(shifted, weights, SELF, YES)
        sums: dict[Any, Any] = {}
        for factors, want in wants.items():
            try:
                sums[factors] = self._sum(want, operations)
            except NoForm:
                continue
        return sums

    def given(self) -> dict[Any, Shifted]:
        """The weights in memory that operations read, with the logits that they read beside."""
        return {
            key[1]: shifted
            for key, (node, shifted, _) in self._made.items()
            if node.args[_KIND] == GIVEN
        }

    def _want(self, factors: tuple[Any, ...], operations: dict[Any, Shifted]) -> _Want | None:
        if len(factors) == 1 and isinstance(factors[0], Apart):
            apart = factors[0]
            if apart.exponential.x not in operations:  # a teacher that is computed where it is read
                return None
            return _Want(apart.shifted, apart.exponential, SELF, apart.own)
        found = _shifted_and_weights(factors)
        if found is None:
            return None
        shifted, weights = found
        if isinstance(weights, torch.fx.Node):
            source = uncast(weights)
            narrow = value(source).dtype in NARROW
            if not narrow or not lies_in_memory(source) or not self._rows(shifted, source):
                return None
            weights = self.numbers.of(source)
        elif weights.x not in operations:
            return None
        return _Want(shifted, weights, LINEAR)

    def _rows(self, shifted: Shifted, source: Any) -> bool:
        """Whether weights are rows of one memory, one for each of the logits."""
        tensor = value(source)
        if not same_shape(tensor.shape, value(shifted.core.x).shape):
            return False
        return is_contiguous(tensor) or (tensor.dim() == 2 and tensor.stride(1) == 1)

    def _same(self, node: Any, weights: Any) -> bool:
        return isinstance(node, torch.fx.Node) and self.numbers.of(uncast(node)) is weights

    # --- nodes ------------------------------------------------------------------------------------

    def _sum(self, want: _Want, operations: dict[Any, Shifted]) -> Any:
        """A result of an operation, in the shape of the logits' maximum. Raises NoForm."""
        core = want.shifted.core
        levels, rows = self._logits(want.shifted)
        key, teacher = self._key(want, operations)
        if key not in self._made:
            self._made[key] = (self._emit(want, teacher, levels, rows), want.shifted, teacher)
        node = self._made[key][0]
        own = node.args[_OWN]
        if want.own not in (NO, own):
            if own != NO:
                raise NoForm("its weights' own logarithms are summed in two ways")
            _change(node, _OWN, want.own)
        flat = self.editor.call(operator.getitem, node, want.place)
        total = rows.shaped(flat, rows.sizes(row_shape(core.x, -1)))
        if not _is_softmax(want.weights) or not isinstance(want.weights.scale, torch.fx.Node):
            return total
        return self.editor.call(aten.mul.Tensor, total, want.weights.scale)

    def _key(self, want: _Want, operations: dict[Any, Shifted]) -> tuple[Any, Shifted | None]:
        weights = want.weights
        if not _is_softmax(weights):
            return (want.shifted.x, weights), None
        if weights.x == want.shifted.x:
            return (want.shifted.x, None), None
        return (want.shifted.x, weights.x), operations[weights.x]

    def _logits(self, shifted: Shifted) -> tuple[list[Any], RowValues]:
        x = shifted.core.x
        levels = levels_of(x, self.numbers)
        if len(levels) > 1:
            raise NoForm("its rows are some of those in memory")
        if compat.hint(compat.expr(value(x).numel())) < FEW * compat.hint(
            compat.expr(value(x).shape[-1])
        ):
            raise NoForm("too few rows for a program each")
        softmax.check_levels(x, levels)
        return levels, RowValues(self.graph, self.numbers, self.editor, x, levels)

    def _emit(self, want: _Want, teacher: Shifted | None, levels: Any, rows: RowValues) -> Any:
        call, last = self.editor.call, levels[-1]

        def flat(node: Any) -> Any:
            if value(node).dim() == 2:
                return node
            return call(aten.view.default, node, rows.sizes([-1, value(node).shape[-1]]))

        kind, w, w_scale, w_softcap = OWN, None, 1.0, 0.0
        if teacher is not None:
            (other, *_), kind = self._logits(teacher)[0], SOFTMAX
            w, w_scale, w_softcap = other.base, other.scale, other.softcap
            if not same_shape(value(w).shape, value(last.base).shape):
                raise NoForm("its weights lie in another shape")
            w = flat(w)
        elif not _is_softmax(want.weights):
            kind, w = GIVEN, flat(want.weights)
        base = flat(last.base)
        return call(
            WEIGHTED, base, w, kind, NO, False, last.scale, last.softcap, w_scale, w_softcap
        )

    # --- afterwards -------------------------------------------------------------------------------

    def forget(self) -> None:
        """Erase the operations that nothing uses, once nodes that use them for nothing are gone."""
        for key, (node, _, _) in list(self._made.items()):
            if not node.users:
                sources = node.all_input_nodes
                self.graph.erase_node(node)
                editing.erase_unused(self.graph, sources)
                del self._made[key]
            elif not any(user.args[1] == SELF for user in node.users):
                _change(node, _OWN, NO)

    def merge(self) -> None:
        """Have each operation make what those made that it makes as well."""
        for node, shifted, teacher in self._made.values():
            self._take(node, shifted.operation, (0, 1, 2))
            if teacher is not None:
                self._take(node, teacher.operation, (3, MASS))
        self._made.clear()

    def _take(self, node: Any, operation: Any, places: tuple[int, ...]) -> None:
        if compat_fx.is_erased(operation):
            return
        # What it makes besides stays its own.
        if any(user.users and user.args[1] >= len(places) for user in operation.users):
            return
        if not self._hoist(node, operation):
            return
        for user in list(operation.users):
            place = places[user.args[1]] if user.args[1] < len(places) else None
            if not user.users or place is None:
                continue
            if place == 2 and not node.args[_BELOW]:
                _change(node, _BELOW, True)
            self.editor.before(node.next)
            self.editor.forget()
            user.replace_all_uses_with(self.editor.call(operator.getitem, node, place))
        kept = [*noted(operation), *noted(node)]
        for user in list(operation.users):
            self.graph.erase_node(user)
        sources = operation.all_input_nodes
        self.graph.erase_node(operation)
        editing.erase_unused(self.graph, sources)
        remember(node, kept)

    def _hoist(self, node: Any, operation: Any) -> bool:
        """Move a node, and what it is computed from, in front of an operation that comes earlier;
        False where that can't be."""
        order = {n: i for i, n in enumerate(self.graph.nodes)}
        if order[node] < order[operation]:
            return True
        moved, stack = {node}, [node]
        while stack:
            for source in stack.pop().all_input_nodes:
                if order[source] > order[operation] and source not in moved:
                    if not (editing.is_pure(source) or matching.is_view(source)):
                        return False
                    moved.add(source)
                    stack.append(source)
                elif source is operation:
                    return False
        for each in sorted(moved, key=order.__getitem__):
            operation.prepend(each)
        return True


def _is_softmax(weights: Any) -> bool:
    return isinstance(weights, Exponential)


def _change(node: Any, place: int, new: Any) -> None:
    """Give an operation another argument."""
    if node.args[place] == new:
        return
    node.args = (*node.args[:place], new, *node.args[place + 1 :])
    with torch.no_grad():
        arguments = torch.fx.node.map_arg(node.args, value)
        node.meta["val"] = WEIGHTED(*arguments)
