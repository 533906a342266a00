"""Scans of any combine function, and their gradients, as programs of the scan kernels.

The gradient is one scan the other way, of (M, G): G = M_b G_a + G_b with M = (df/da)^T at
(y_t, x_(t+1)), of which only the entries that can be other than 0 are states. What it makes of G
and df/db at (y_(t-1), x_t) is written where G is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import torch

from inductor_ext import compat_fx, scan_operations, scan_pointwise
from inductor_ext.ops import _combine_text as texts
from inductor_ext.templates.scan_forms import state_type
from inductor_ext.templates.scan_program import Input, Program

MOST_STATES = 12  # with more, a thread's registers do not hold its positions

Dtypes = tuple[torch.dtype, ...]
_Place = tuple[int, int, texts.Entry]  # row and column of a matrix, and what is there


class NoProgram(Exception):
    """Why something is composed of torch functions; one sentence."""


def kernels_apply(x: torch.Tensor) -> bool:
    """Whether kernels compute on such a tensor."""
    return x.is_cuda


def _state(dtype: torch.dtype) -> str:
    return "int1" if dtype == torch.bool else state_type(dtype)


def _graph(text: str, dtypes: Dtypes) -> torch.fx.Graph:
    """A text of leaves of (wide) dtypes as the operations that the translator knows."""
    function = texts.read(text, len(dtypes))

    def traced() -> torch.fx.Graph:
        samples = [torch.ones((), dtype=dtype) for dtype in (*dtypes, *dtypes)]
        return compat_fx.inductor_graph(function, samples)

    return compat_fx.apart(traced)


def _wide(name: str, dtype: torch.dtype) -> str:
    """A value as it is stored, as it is computed with."""
    kind = scan_operations.computed_type(texts.wide(dtype))
    return name if kind == scan_operations.stored_type(dtype) else f"{name}.to({kind})"


@functools.lru_cache(maxsize=128)
def forward(combine: str, dtypes: Dtypes, reverse: bool) -> Program:
    """Leaves x to their scans y, all of ``dtypes``. Raises NoProgram."""
    wides = tuple(map(texts.wide, dtypes))
    k = len(dtypes)
    if k > MOST_STATES:
        raise NoProgram(f"it has {k} leaves, more than {MOST_STATES}")
    try:
        text = scan_pointwise.combine(_graph(combine, wides))
        stored = [scan_operations.stored_type(dtype) for dtype in dtypes]
    except scan_operations.Unknown as reason:
        raise NoProgram(str(reason)) from reason
    return Program(
        inputs=tuple(map(Input, dtypes)),
        outputs=dtypes,
        states=tuple(map(_state, wides)),
        produce="\n".join(f"s{i} = {_wide(f'x{i}', dtype)}" for i, dtype in enumerate(dtypes)),
        combine=text,
        consume="\n".join(f"y{i} = s{i}.to({kind})" for i, kind in enumerate(stored)),
        reverse=reverse,
    )


@dataclasses.dataclass(frozen=True)
class Backward:
    """``program`` reads ``inputs``: ("g", i), ("x", i) or ("y", i) of a leaf; it writes the
    gradients of the leaves ``results``."""

    program: Program
    inputs: tuple[tuple[str, int], ...]
    results: tuple[int, ...]


def reached(combine: str, dtypes: Dtypes, present: Sequence[int]) -> tuple[list[int], list[int]]:
    """The leaves whose states have a gradient where the results ``present`` have one, and the
    leaves that have one."""
    jacobian = texts.jacobian(combine, tuple(map(texts.wide, dtypes)))
    states = set(present)
    while True:
        more = {i for j, i in jacobian.of_a if j in states} - states
        if not more:
            break
        states |= more
    leaves = states | {i for j, i in jacobian.of_b if j in states}
    return sorted(states), sorted(leaves)


@functools.lru_cache(maxsize=128)
def backward(
    combine: str, dtypes: Dtypes, grads: Dtypes, present: tuple[int, ...], reverse: bool
) -> Backward:
    """The gradients of leaves of ``dtypes`` by the results ``present``, whose gradients are of the
    dtypes ``grads``; ``reverse`` is the forward's. Raises NoProgram."""
    try:
        return _Backward(combine, dtypes, grads, present, reverse).made()
    except scan_operations.Unknown as reason:
        raise NoProgram(str(reason)) from reason


class _Backward:
    def __init__(
        self, combine: str, dtypes: Dtypes, grads: Dtypes, present: tuple[int, ...], reverse: bool
    ) -> None:
        self.dtypes, self.wides = dtypes, tuple(map(texts.wide, dtypes))
        self.jacobian = texts.jacobian(combine, self.wides)
        self.active, self.results = reached(combine, dtypes, present)
        if any(not self.wides[i].is_floating_point for i in self.active):
            raise NoProgram("a result that is no floating-point number has a gradient")
        if len({self.wides[i] for i in self.active}) > 1:
            raise NoProgram("its states are of several dtypes")
        self.grads = dict(zip(present, grads, strict=True))
        self.reverse = reverse
        self.inputs: dict[tuple[str, int, int], Input] = {}
        text = self.jacobian.text
        self.graph = _graph(text, self.wides) if text else None

    # --- what is read -----------------------------------------------------------------------------

    def _input(self, kind: str, leaf: int, shift: int) -> str:
        """The name of a tensor's value, as stored."""
        dtype = self.grads[leaf] if kind == "g" else self.dtypes[leaf]
        self.inputs.setdefault((kind, leaf, shift), Input(dtype, shift))
        return f"x{list(self.inputs).index((kind, leaf, shift))}"

    def _argument(self, name: str, behind: int) -> str:
        """An argument of f: a is y, b is x of the next position. ``behind``: how many positions the
        state is in front of x along this scan: 0 for M, one for df/db."""
        kind, leaf = ("y", int(name[1:])) if name[0] == "a" else ("x", int(name[1:]))
        shift = -behind if kind == "y" else 1 - behind
        return _wide(self._input(kind, leaf, shift), self.dtypes[leaf])

    def _entries(self, entries: Sequence[texts.Entry], behind: int) -> tuple[str, list[str]]:
        """(statements, an expression for each entry)."""
        places = [e for e in entries if isinstance(e, int)]
        lines, values = self._computed(places, behind) if places else ([], {})
        found = []
        for entry in entries:
            if isinstance(entry, int):
                found.append(values[entry])
            elif isinstance(entry, str):
                found.append(self._argument(entry, behind))
            else:
                found.append(scan_operations.literal(entry, self.wides[self.active[0]]))
        return "\n".join(lines), found

    def _computed(self, places: Sequence[int], behind: int) -> tuple[list[str], dict[int, str]]:
        """(statements, the name of each of these results of the derivatives' text)."""
        assert self.graph is not None
        prefix, k = "qp"[behind], len(self.dtypes)
        results = self.graph.output_node().args[0]
        needed = {results[place] for place in places}
        for node in reversed(self.graph.nodes):
            if node in needed:
                needed.update(node.all_input_nodes)
        names, lines = {}, []
        for at, node in enumerate(self.graph.find_nodes(op="placeholder")):
            if node in needed:
                argument = f"a{at}" if at < k else f"b{at - k}"
                names[node] = f"{prefix}{argument}"
                lines.append(f"{names[node]} = {self._argument(argument, behind)}")
        inner = [n for n in self.graph.nodes if n in needed and n.op == "call_function"]
        text, of = scan_pointwise.translate(inner, names, f"{prefix}v")
        return [*lines, text], {place: of(results[place]) for place in places}

    # --- the state --------------------------------------------------------------------------------

    def made(self) -> Backward:
        jacobian, active = self.jacobian, self.active
        of_a = {(j, i): e for (j, i), e in jacobian.of_a.items() if {i, j} <= set(active)}
        groups = _components(active, of_a)
        # Equal matrices are one: a group's entries by its leaves' places in it.
        kinds: dict[tuple[_Place, ...], list[list[int]]] = {}
        for group in groups:
            at = {leaf: place for place, leaf in enumerate(group)}
            own = [(at[i], at[j], e) for (j, i), e in of_a.items() if i in at]
            kinds.setdefault(tuple(sorted(own, key=str)), []).append(group)
        produced: list[texts.Entry | tuple[str, int]] = []
        combined: list[str] = []
        G: dict[int, int] = {}
        for entries, members in kinds.items():
            size = len(members[0])
            # Of a sum M is 1 and no state.
            is_sum = size == 1 and all(texts.is_number(e, 1) for _, _, e in entries)
            matrix: dict[tuple[int, int], int] = {}
            for row, column in [] if is_sum else _closed(entries):
                matrix[row, column] = len(matrix) + len(produced)
            values = {(row, column): e for row, column, e in entries}
            produced += [values.get(place, 0.0) for place in matrix]
            for place, state in matrix.items():
                combined.append(f"r{state} = {_product(matrix, place, matrix, size)}")
            for group in members:
                vector = {(row, 0): len(produced) + row for row in range(size)}
                produced += [("g", leaf) for leaf in group]
                G.update({leaf: vector[row, 0] for row, leaf in enumerate(group)})
                for place, state in vector.items():
                    carried = f"a{state}" if is_sum and entries else ""
                    carried = carried or _product(matrix, place, vector, size)
                    combined.append(f"r{state} = {carried + ' + ' if carried else ''}b{state}")
        if len(produced) > MOST_STATES:
            raise NoProgram(f"its gradient has {len(produced)} states, more than {MOST_STATES}")
        program = Program(
            produce=self._produce(produced),
            consume=self._consume(G),
            combine="\n".join(combined),
            inputs=tuple(self.inputs.values()),
            outputs=tuple(self.dtypes[i] for i in self.results),
            states=tuple(_state(self.wides[active[0]]) for _ in produced),
            reverse=not self.reverse,
        )
        reads = tuple((kind, leaf) for kind, leaf, _ in self.inputs)
        return Backward(program, reads, tuple(self.results))

    def _produce(self, produced: Sequence[texts.Entry | tuple[str, int]]) -> str:
        entries = [e for e in produced if not isinstance(e, tuple)]
        text, found = self._entries(entries, 0)
        expressions = iter(found)
        kind = scan_operations.computed_type(self.wides[self.active[0]])
        lines = [text]
        for state, what in enumerate(produced):
            if not isinstance(what, tuple):
                value = next(expressions)
            elif what[1] in self.grads:
                value = f"{self._input('g', what[1], 0)}.to({kind})"
            else:
                value = scan_operations.literal(0.0, self.wides[self.active[0]])
            lines.append(f"s{state} = {value}")
        return "\n".join(lines)

    def _consume(self, G: dict[int, int]) -> str:
        jacobian = self.jacobian
        places = [(j, i) for j, i in jacobian.of_b if j in G]
        text, found = self._entries([jacobian.of_b[p] for p in places], 1)
        lines = [text, "first = t == length - 1"]
        for at, leaf in enumerate(self.results):
            whole, rest = [], []
            for (j, i), entry in zip(places, found, strict=True):
                if i == leaf and j == i and texts.is_number(jacobian.of_b[j, i], 1):
                    whole.append(f"s{G[j]}")
                elif i == leaf:
                    rest.append(f"{entry} * s{G[j]}")
            edge = f"s{G[leaf]}" if leaf in G and not whole else "0.0"
            terms = whole + ([f"tl.where(first, {edge}, {' + '.join(rest)})"] if rest else [])
            if not terms:
                terms = [f"tl.where(first, {edge}, 0.0)"]
            stored = scan_operations.stored_type(self.dtypes[leaf])
            lines.append(f"y{at} = ({' + '.join(terms)}).to({stored})")
        return "\n".join(lines)


def _components(active: Sequence[int], of_a: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Leaves in groups that go into one another, in either direction."""
    groups = [{i} for i in active]
    for j, i in of_a:
        joined = [g for g in groups if i in g or j in g]
        groups = [g for g in groups if g not in joined] + [set().union(*joined)]
    return [sorted(g) for g in groups]


def _closed(entries: Iterable[_Place]) -> list[tuple[int, int]]:
    """The places that can be other than 0 in a product of any number of such matrices."""
    places = {(row, column) for row, column, _ in entries}
    while True:
        more = {(r, d) for r, c in places for b, d in places if c == b} - places
        if not more:
            return sorted(places)
        places |= more


def _product(
    matrix: dict[tuple[int, int], int],
    place: tuple[int, int],
    earlier: dict[tuple[int, int], int],
    size: int,
) -> str:
    """An entry of the later matrix times what is earlier."""
    row, column = place
    terms = [
        f"b{matrix[row, m]} * a{earlier[m, column]}"
        for m in range(size)
        if (row, m) in matrix and (m, column) in earlier
    ]
    return " + ".join(terms)
