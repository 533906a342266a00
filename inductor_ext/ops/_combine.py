"""``associative_scan``: the scan of any pointwise combine function, with its gradient.

    y_0 = x_0   y_t = f(y_(t-1), x_t)
    G_t = g_t + (df/da)(y_t, x_(t+1))^T G_(t+1)   dx_t = (df/db)(y_(t-1), x_t)^T G_t   dx_0 = G_0

G is a linear recurrence the other way. A leaf whose state only goes into its own result is a
recurrence of numbers, leaves that go into one another are one of small matrices, whose product is
associative: linear in time and memory, whatever f is. The function is a text of
``_combine_text``, so that an operation carries it and the caches of compiled programs know it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from inductor_ext.compat_runtime import under_functorch
from inductor_ext.ops import _combine_programs as programs
from inductor_ext.ops import _combine_text as texts
from inductor_ext.ops._opaque import opaque_op
from inductor_ext.ops._recurrence import recurrence
from inductor_ext.ops._rows import beside
from inductor_ext.templates.scan_launch import launch
from inductor_ext.templates.scan_program import Program

# --- operations -----------------------------------------------------------------------------------


@opaque_op("inductor_ext::associative_scan")
def _scan(xs: list[Tensor], combine: str, dim: int, reverse: bool) -> list[Tensor]:
    _check(xs, combine)
    ys = [torch.empty_like(x) for x in xs]
    program = _program(xs, combine, reverse)
    if program is not None:
        launch(program, xs, ys, dim)
        return ys
    for y, found in zip(ys, _composed(xs, combine, dim, reverse), strict=True):
        y.copy_(found)
    return ys


def _check(xs: Sequence[Tensor], combine: str) -> None:
    for x in xs:
        if x.shape != xs[0].shape:
            got = f"{list(xs[0].shape)} and {list(x.shape)}"
            raise ValueError(f"expected leaves of one shape in an associative scan, got {got}")
    texts.read(combine, len(xs))


def _program(xs: Sequence[Tensor], combine: str, reverse: bool) -> Program | None:
    if not programs.kernels_apply(xs[0]):
        return None
    try:
        return programs.forward(combine, tuple(x.dtype for x in xs), reverse)
    except programs.NoProgram:
        return None


@_scan.register_fake
def _(xs: list[Tensor], combine: str, dim: int, reverse: bool) -> list[Tensor]:
    _check(xs, combine)
    return [torch.empty_like(x) for x in xs]


@opaque_op("inductor_ext::associative_scan_backward")
def _backward(
    grads: list[Tensor], xs: list[Tensor], ys: list[Tensor], combine: str, dim: int,
    reverse: bool, present: list[int],
) -> list[Tensor]:  # fmt: skip
    """The gradients of the leaves that have one, by those of the results ``present``."""
    dtypes = tuple(x.dtype for x in xs)
    leaves = programs.reached(combine, dtypes, present)[1]
    found = [torch.empty_like(xs[i]) for i in leaves]
    if programs.kernels_apply(xs[0]):
        made = programs.backward(
            combine, dtypes, tuple(g.dtype for g in grads), tuple(present), reverse
        )
        given: dict[str, Any] = {"g": dict(zip(present, grads, strict=True)), "x": xs, "y": ys}
        launch(made.program, [given[kind][i] for kind, i in made.inputs], found, dim)
        return found
    rows: list[Tensor | None] = [None] * len(xs)
    for i, grad in zip(present, grads, strict=True):
        rows[i] = grad
    composed: Any = _Gradient(xs, ys, combine, dim, reverse).of_inputs(rows)
    for own, i in zip(found, leaves, strict=True):
        own.copy_(composed[i])
    return found


@_backward.register_fake
def _(
    grads: list[Tensor], xs: list[Tensor], ys: list[Tensor], combine: str, dim: int,
    reverse: bool, present: list[int],
) -> list[Tensor]:  # fmt: skip
    leaves = programs.reached(combine, tuple(x.dtype for x in xs), present)[1]
    return [torch.empty_like(xs[i]) for i in leaves]


@opaque_op("inductor_ext::no_scan_gradient")
def _no_gradient(ys: list[Tensor], xs: list[Tensor], reason: str) -> list[Tensor]:
    """ys, results of a scan of xs whose gradient is not known; asked for it, autograd raises."""
    return [y.clone() for y in ys]


@_no_gradient.register_fake
def _(ys: list[Tensor], xs: list[Tensor], reason: str) -> list[Tensor]:
    return [torch.empty_like(y) for y in ys]


def associative_scan(
    xs: Sequence[Tensor], combine: str, dim: int, reverse: bool = False
) -> list[Tensor]:
    """The scan of leaves of one shape by a text of ``_combine_text``, differentiable any number of
    times; each result has the dtype of its leaf, its state is carried in fp32 at least."""
    with beside(xs[0]):
        return _scan(list(xs), combine, dim, reverse)


# --- composed of torch functions ------------------------------------------------------------------


def _composed(xs: Sequence[Tensor], combine: str, dim: int, reverse: bool) -> list[Tensor]:
    function = texts.read(combine, len(xs))
    states = [x.to(texts.wide(x.dtype)) for x in xs]
    if reverse:
        states = [s.flip(dim) for s in states]
    ys = _halving(function, states, dim)
    return [y.flip(dim) for y in ys] if reverse else ys


def _halving(function: Callable[..., Any], xs: list[Tensor], dim: int) -> list[Tensor]:
    """Pairs are combined and scanned, then the positions between them: linear work."""
    length = xs[0].shape[dim]
    if length < 2:
        return xs
    pairs = function(
        *(_cut(x, dim, 0, length - 1, 2) for x in xs), *(_cut(x, dim, 1, None, 2) for x in xs)
    )
    odd = _halving(function, pairs, dim)
    later = [_cut(x, dim, 2, None, 2) for x in xs]
    before = [_cut(y, dim, 0, later[0].shape[dim]) for y in odd]
    ys = [torch.empty_like(x) for x in xs]
    for y, x, at_odd, at_even in zip(ys, xs, odd, function(*before, *later), strict=True):
        _cut(y, dim, 0, 1).copy_(_cut(x, dim, 0, 1))
        _cut(y, dim, 1, None, 2).copy_(at_odd)
        _cut(y, dim, 2, None, 2).copy_(at_even)
    return ys


def _cut(x: Tensor, dim: int, start: Any, stop: Any, step: int = 1) -> Tensor:
    return x[(slice(None),) * dim + (slice(start, stop, step),)]


# --- gradients ------------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    xs, ctx.combine, ctx.dim, ctx.reverse = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*xs, *output)


def _grad(ctx: Any, grads: Any) -> Any:
    k = len(ctx.saved_tensors) // 2
    xs, ys = ctx.saved_tensors[:k], ctx.saved_tensors[k:]
    present = [i for i, g in enumerate(grads) if g is not None]
    if _has_kernel(xs, grads, ctx.combine, ctx.reverse, present):
        given = [grads[i] for i in present]
        found = _backward(given, list(xs), list(ys), ctx.combine, ctx.dim, ctx.reverse, present)
        dtypes = tuple(x.dtype for x in xs)
        at = dict(zip(programs.reached(ctx.combine, dtypes, present)[1], found, strict=True))
        return [at.get(i) for i in range(k)], None, None, None
    rule = _Gradient(xs, ys, ctx.combine, ctx.dim, ctx.reverse)
    return rule.of_inputs(grads), None, None, None


def _has_kernel(
    xs: Sequence[Tensor], grads: Sequence[Tensor | None], combine: str, reverse: bool,
    present: Sequence[int],
) -> bool:  # fmt: skip
    """Whether one kernel makes the gradient; not one that will be differentiated."""
    if not xs[0].is_cuda or torch.is_grad_enabled() or under_functorch() or not present:
        return False
    of = tuple(grads[i].dtype for i in present)  # type: ignore[union-attr]
    try:
        programs.backward(combine, tuple(x.dtype for x in xs), of, tuple(present), reverse)
    except programs.NoProgram:
        return False
    return True


def _refuse(ctx: Any, grads: Any) -> Any:
    raise NotImplementedError(ctx.reason)


def _setup_refusal(ctx: Any, inputs: Any, output: Any) -> None:
    _, _, ctx.reason = inputs
    ctx.set_materialize_grads(False)


_scan.register_autograd(_grad, setup_context=_setup)
_no_gradient.register_autograd(_refuse, setup_context=_setup_refusal)


class _Gradient:
    """The formula above of torch functions and scans, differentiable."""

    def __init__(
        self, xs: Sequence[Tensor], ys: Sequence[Tensor], combine: str, dim: int, reverse: bool
    ) -> None:
        self.xs, self.ys, self.dim, self.reverse = xs, ys, dim, reverse
        self.dtypes = tuple(texts.wide(x.dtype) for x in xs)
        self.jacobian = texts.jacobian(combine, self.dtypes)
        # The pairs (y_(t-1), x_t) from the second position scanned on, at which all entries are.
        before = [self._without_last(y) for y in ys]
        here = [self._without_first(x) for x in xs]
        self.arguments = [t.to(texts.wide(t.dtype)) for t in (*before, *here)]
        self.entries = self.jacobian.compute(self.arguments)

    def of_inputs(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the leaves, None where there is none."""
        leaves = [i for i, dtype in enumerate(self.dtypes) if dtype.is_floating_point]
        totals: dict[int, Tensor] = {}
        for block in texts.blocks(self.jacobian, leaves):
            incoming = {i: self._incoming(i, grads[i], block, totals) for i in block}
            if all(g is None for g in incoming.values()):
                continue
            rows = [
                torch.zeros_like(self.xs[i], dtype=self.dtypes[i]) if g is None else g
                for i, g in incoming.items()
            ]
            totals.update(zip(block, self._accumulated(block, rows), strict=True))
        return [self._of_input(i, totals) for i in range(len(self.xs))]

    def _incoming(
        self, i: int, grad: Tensor | None, block: list[int], totals: dict[int, Tensor]
    ) -> Tensor | None:
        """What reaches a leaf's state from its own result and from leaves of other blocks."""
        rest = [
            self._times(entry, self._without_first(totals[j]))
            for (j, at), entry in self.jacobian.of_a.items()
            if at == i and j not in block and j in totals
        ]
        found = None if grad is None else grad.to(self.dtypes[i])
        if rest:
            later = self._padded(_sum(rest), behind=True)
            found = later if found is None else found + later
        return None if found is None else found.to(self.dtypes[i])

    def _accumulated(self, block: list[int], rows: list[Tensor]) -> list[Tensor]:
        """G of a block: the recurrence the other way."""
        back = not self.reverse
        if len(block) == 1:
            (i,), (row,) = block, rows
            entry = self.jacobian.of_a.get((i, i), 0.0)
            if texts.is_number(entry, 0):
                return [row]
            if texts.is_number(entry, 1):
                return [_suffix_sum(row, self.dim) if back else row.cumsum(self.dim)]
            factor = self._padded(self._entry(entry, row), behind=True)
            return [recurrence(factor.to(row.dtype), row, None, self.dim, back)]
        matrix = []
        for i in block:
            for j in block:
                entry = self.jacobian.of_a.get((j, i), 0.0)
                matrix.append(self._padded(self._entry(entry, rows[0]), behind=True))
        leaves = [m.to(rows[0].dtype) for m in matrix] + [r.to(rows[0].dtype) for r in rows]
        text = _affine(len(block))
        return list(associative_scan(leaves, text, self.dim, back)[len(matrix) :])

    def _of_input(self, i: int, totals: dict[int, Tensor]) -> Tensor | None:
        whole, rest, first = [], [], None
        for (j, at), entry in self.jacobian.of_b.items():
            if at != i or j not in totals:
                continue
            if j == i and texts.is_number(entry, 1):
                whole.append(totals[i])
            else:
                rest.append(self._times(entry, self._without_first(totals[j])))
        if i in totals and not whole:  # dx_0 = G_0
            first = self._first(totals[i])
            rest = rest or [self._without_first(torch.zeros_like(totals[i]))]
        if rest:
            whole.append(self._padded(_sum(rest), behind=False, edge=first))
        return _sum(whole).to(self.xs[i].dtype) if whole else None

    # Positions: "first" and "behind" are along the scan.

    def _first(self, x: Tensor) -> Tensor:
        return _cut(x, self.dim, -1, None) if self.reverse else _cut(x, self.dim, 0, 1)

    def _without_first(self, x: Tensor) -> Tensor:
        return _cut(x, self.dim, 0, -1) if self.reverse else _cut(x, self.dim, 1, None)

    def _without_last(self, x: Tensor) -> Tensor:
        return _cut(x, self.dim, 1, None) if self.reverse else _cut(x, self.dim, 0, -1)

    def _padded(self, x: Tensor, behind: bool, edge: Tensor | None = None) -> Tensor:
        """One position more: behind the last or in front of the first, of zeros or ``edge``."""
        ahead = behind == self.reverse  # in memory
        if edge is None:
            sides = [0, 0] * (x.dim() - 1 - self.dim) + ([1, 0] if ahead else [0, 1])
            return torch.nn.functional.pad(x, sides)
        return torch.cat([edge, x] if ahead else [x, edge], self.dim)

    def _entry(self, entry: texts.Entry, like: Tensor) -> Tensor:
        if isinstance(entry, int):
            return self.entries[entry]
        if isinstance(entry, str):
            side, leaf = entry[0], int(entry[1:])
            return self.arguments[leaf if side == "a" else leaf + len(self.xs)]
        return torch.full_like(self._without_first(like), entry)

    def _times(self, entry: texts.Entry, total: Tensor) -> Tensor:
        if isinstance(entry, float):
            return total if entry == 1 else total * entry
        return total * self._entry(entry, total)


def _suffix_sum(x: Tensor, dim: int) -> Tensor:
    return x.flip(dim).cumsum(dim).flip(dim)


def _sum(terms: Iterable[Tensor]) -> Tensor:
    first, *others = terms
    for term in others:
        first = first + term
    return first


def _affine(size: int) -> str:
    """The text of (M, v) -> (M_b M_a, M_b v_a + v_b), M row by row."""
    lines: list[str] = []

    def line(call: str) -> str:
        lines.append(f"v{len(lines)} = {call}")
        return f"v{len(lines) - 1}"

    def total(terms: list[str]) -> str:
        while len(terms) > 1:
            terms = [line(f"add.Tensor({terms[0]}, {terms[1]})"), *terms[2:]]
        return terms[0]

    def product(row: int, column: range) -> list[str]:
        matrix = range(row * size, (row + 1) * size)
        return [line(f"mul.Tensor(b{m}, a{v})") for m, v in zip(matrix, column, strict=True)]

    square = size * size
    results = [total(product(i // size, range(i % size, square, size))) for i in range(square)]
    vector = range(square, square + size)
    results += [total([*product(row, vector), f"b{vector[row]}"]) for row in range(size)]
    return "; ".join([*lines, ", ".join(results)])
