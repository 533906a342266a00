"""A scan's combine function as text, and its derivatives.

``f(a, b)`` takes the k leaves of the earlier state, then those of the later. As text it is one line
of pointwise aten operations, so that an operation can carry it and two equal functions are equal:

    v0 = mul.Tensor(a0, b0); v1 = mul.Tensor(b0, a1); v2 = add.Tensor(v1, b1); v0, v2

16-bit values are fp32 in it: a scan carries its state wide.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from inductor_ext import compat, compat_fx, pointwise_text
from inductor_ext.pointwise_text import CONVERSIONS, FILLED, SAME
from inductor_ext.pointwise_text import NotPointwise as NotPointwise

aten, prims = torch.ops.aten, torch.ops.prims
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a leaf's state is carried in: fp32 of 16-bit floats."""
    return _WIDE.get(dtype, dtype)


def sizes(tensor: Tensor) -> tuple[Any, ...]:
    """The shape of a tensor, its symbols as such."""
    return tuple(compat.expr(s) for s in tensor.shape)


# --- writing --------------------------------------------------------------------------------------


def write(combine: Callable[..., Any], slices: Sequence[Tensor]) -> str:
    """The text of a function of 2k tensors, traced on fake tensors like ``slices``, k leaves at one
    position. Raises NotPointwise."""
    leaves = [s.new_empty(s.shape, dtype=wide(s.dtype)) for s in (*slices, *slices)]
    graph = compat_fx.functional_graph(combine, leaves)
    results = list(graph.output_node().args[0])
    if len(results) != len(slices):
        raise NotPointwise(
            f"expected {len(slices)} results of the combine function, got {len(results)}"
        )
    for i, (node, leaf) in enumerate(zip(results, leaves, strict=False)):
        dtype = wide(node.meta["val"].dtype)
        if dtype != leaf.dtype:
            raise NotPointwise(
                f"expected leaf {i} to stay {leaf.dtype}, its combination is {dtype}"
            )
    return _Writer(graph, leaves).text(results)


def _arguments(graph: Any) -> dict[Any, str]:
    """The names of a graph's inputs, 2k leaves."""
    inputs = graph.find_nodes(op="placeholder")
    k = len(inputs) // 2
    return {n: f"a{i}" if i < k else f"b{i - k}" for i, n in enumerate(inputs)}


class _Writer:
    """Names the values of a graph whose inputs are 2k leaves at one position; ``numbers`` are the
    nodes that are one number everywhere."""

    def __init__(
        self, graph: Any, leaves: Sequence[Tensor], numbers: Mapping[Any, float] | None = None
    ) -> None:
        self.graph, self.shapes = graph, [*map(sizes, leaves), ()]
        self.names, self.numbers = _arguments(graph), numbers or {}
        self.lines: list[str] = []
        self._written: dict[str, str] = {}

    def text(self, results: Sequence[Any]) -> str:
        needed = set(results)
        for node in reversed(self.graph.nodes):
            if node in needed and node not in self.numbers and node.target not in FILLED:
                needed.update(node.all_input_nodes)
        for node in self.graph.nodes:
            if node in needed and node.op != "placeholder":
                self.names[node] = self._name(node)
        return "; ".join([*self.lines, ", ".join(self.names[n] for n in results)])

    def _name(self, node: Any) -> str:
        """The name of a node's value, written down where it is computed."""
        if node.op == "get_attr":
            return self._constant(node)
        op, value = node.target, node.meta.get("val")
        if node.op != "call_function" or not isinstance(op, torch._ops.OpOverload):
            raise NotPointwise(f"{node.format_node()} is no operation of tensors")
        if not isinstance(value, Tensor) or sizes(value) not in self.shapes:
            raise NotPointwise(f"{op} does not give a value per position")
        if node in self.numbers or op in FILLED:
            number = self.numbers[node] if node in self.numbers else FILLED[op](node)
            return self._filled(number, value.dtype)
        source = node.args[0] if node.args else None
        if op in CONVERSIONS:
            return self._line(f"_to_copy.default({self._of(source)}, dtype={_dtype(value.dtype)})")
        if op in SAME:
            before = source.meta["val"]  # type: ignore[union-attr]
            if sizes(before) not in ((), sizes(value)):
                raise NotPointwise(f"{op} moves values between positions")
            return self._of(source)
        name = pointwise_text.operator(op)
        args = [self._of(a) for a in node.args]
        args += [f"{key}={self._of(a)}" for key, a in node.kwargs.items() if a is not None]
        return self._line(f"{name}({', '.join(args)})")

    def _line(self, call: str) -> str:
        if call not in self._written:
            self._written[call] = f"v{len(self.lines)}"
            self.lines.append(f"{self._written[call]} = {call}")
        return self._written[call]

    def _constant(self, node: Any) -> str:
        found = getattr(node.graph.owning_module, node.target)
        number = compat_fx.known_number(found)
        if number is None:
            raise NotPointwise(f"{node.target} is a tensor from outside")
        return self._filled(number, found.dtype)

    def _filled(self, number: Any, dtype: torch.dtype) -> str:
        return self._line(
            f"full_like.default(a0, {pointwise_text.number(number)}, dtype={_dtype(dtype)})"
        )

    def _of(self, arg: Any) -> str:
        if isinstance(arg, torch.fx.Node):
            return self.names[arg]
        return _dtype(arg) if isinstance(arg, torch.dtype) else pointwise_text.number(arg)


def _dtype(dtype: torch.dtype) -> str:
    return str(wide(dtype)).removeprefix("torch.")


# --- reading --------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def read(text: str, leaves: int) -> torch.fx.GraphModule:
    """The function of a text on 2k tensors, ``leaves`` = k, as aten operations; it returns a list.

    Raises ValueError for what ``write`` does not write.
    """
    names = [f"{side}{i}" for side in "ab" for i in range(leaves)]
    try:
        graph, results = pointwise_text.read(text, names)
    except ValueError as error:
        raise ValueError(
            f"expected the text of a combine function of {leaves} leaves, got {text!r}"
        ) from error
    graph.output(results)
    return torch.fx.GraphModule({}, graph)


# --- derivatives ----------------------------------------------------------------------------------


Entry = float | int | str  # of a matrix of derivatives, see Jacobian


def is_number(entry: Entry, number: float) -> bool:
    """Whether an entry is this number everywhere."""
    return isinstance(entry, float) and entry == number


@dataclasses.dataclass(frozen=True)
class Jacobian:
    """The entries of df/da and df/db that are not zero.

    ``of_a`` and ``of_b`` map (output j, leaf i) to a number where the entry is one everywhere, to
    "a0", "b1", ... where it is that argument, else to its place among the results of ``text``, a
    text as above. Only floating-point leaves have entries.
    """

    of_a: dict[tuple[int, int], Entry]
    of_b: dict[tuple[int, int], Entry]
    text: str
    leaves: int

    def compute(self, args: Sequence[Tensor]) -> list[Tensor]:
        """The entries that are computed, at all positions of ``args``."""
        return read(self.text, self.leaves)(*args) if self.text else []


@functools.lru_cache(maxsize=256)
def jacobian(text: str, dtypes: tuple[torch.dtype, ...]) -> Jacobian:
    """The derivatives of a text at leaves of these (wide) dtypes. Raises NotPointwise where torch
    knows none."""
    k = len(dtypes)
    function = read(text, k)
    places: list[tuple[int, int]] = []

    def derivatives(*args: Tensor) -> list[Tensor]:
        args = tuple(a.detach().requires_grad_(a.is_floating_point()) for a in args)
        inputs = [i for i in range(2 * k) if args[i].is_floating_point()]
        found: list[Tensor] = []
        places.clear()
        with torch.enable_grad():
            for j, out in enumerate(function(*args)):
                if not out.requires_grad:
                    continue
                wanted, one = [args[i] for i in inputs], torch.ones_like(out)
                grads = torch.autograd.grad(out, wanted, one, retain_graph=True, allow_unused=True)
                for i, grad in zip(inputs, grads, strict=True):
                    if grad is not None:
                        places.append((j, i))
                        found.append(grad)
        return found

    def traced() -> tuple[list[Tensor], Any]:
        samples = [torch.ones(2, dtype=dtype) for dtype in (*dtypes, *dtypes)]
        return samples, compat_fx.functional_graph(derivatives, samples, decompose=True)

    try:
        samples, graph = compat_fx.apart(traced)
    except Exception as error:
        raise NotPointwise(f"torch has no derivative of it ({error})") from error
    numbers, arguments = _fold(graph), _arguments(graph)
    of_a: dict[tuple[int, int], Entry] = {}
    of_b: dict[tuple[int, int], Entry] = {}
    computed: list[Any] = []
    for (j, i), node in zip(places, list(graph.output_node().args[0]), strict=True):
        side, place = (of_a, (j, i)) if i < k else (of_b, (j, i - k))
        if node in arguments:
            side[place] = arguments[node]
        elif node not in numbers:
            side[place] = len(computed)
            computed.append(node)
        elif numbers[node] != 0:
            side[place] = float(numbers[node])
    written = _Writer(graph, samples, numbers).text(computed) if computed else ""
    return Jacobian(of_a, of_b, written, k)


def _fold(graph: Any) -> dict[Any, float]:
    """Nodes that are one number everywhere; products with 1 are replaced by the other factor."""
    numbers: dict[Any, float] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        op, args = node.target, node.args
        own = (a if isinstance(a, (int, float)) else None for a in args[:2])
        of: list[Any] = [numbers.get(a, n) for a, n in zip(args, own, strict=False)]
        if op in FILLED:
            numbers[node] = FILLED[op](node)
        elif op in SAME or (op in CONVERSIONS and of[0] is not None):
            if of[0] is not None:
                numbers[node] = of[0]
            elif op in SAME:
                node.replace_all_uses_with(args[0])
        elif op in (aten.mul.Tensor, aten.mul.Scalar):
            if None not in of:
                numbers[node] = of[0] * of[1]
            elif 1 in of:
                other = args[1 - of.index(1)]
                if other.meta["val"].dtype == node.meta["val"].dtype:
                    node.replace_all_uses_with(other)
        elif op is aten.neg.default and of[0] is not None:
            numbers[node] = -of[0]
        elif op in (aten.div.Tensor, aten.div.Scalar) and None not in of and not node.kwargs:
            numbers[node] = of[0] / of[1]
        elif op in (aten.add.Tensor, aten.sub.Tensor) and None not in of and not node.kwargs:
            numbers[node] = of[0] + of[1] if op is aten.add.Tensor else of[0] - of[1]
    return numbers


# --- what the derivatives say about the structure -------------------------------------------------


def blocks(jacobian: Jacobian, leaves: Iterable[int]) -> list[list[int]]:
    """Leaves in groups that depend on one another through the state, a leaf behind those whose
    results read it: the order in which their gradients can be accumulated."""
    reached: dict[int, set[int]] = {}
    order = list(leaves)
    for i in order:  # i reaches the outputs that its state goes into, and theirs
        found, stack = {i}, [i]
        while stack:
            at = stack.pop()
            for j in order:
                if (j, at) in jacobian.of_a and j not in found:
                    found.add(j)
                    stack.append(j)
        reached[i] = found
    groups: list[list[int]] = []
    for i in order:
        group = [j for j in order if j in reached[i] and i in reached[j]]
        if group not in groups:
            groups.append(group)
    return sorted(groups, key=lambda group: (len(reached[group[0]]), group))


def affine_leaf(text: str, leaves: int) -> int | None:
    """i where a text of two leaves says ``f_i = b_j a_i + b_i``, for whatever is the other leaf j;
    None where it does not."""
    graph = read(text, leaves).graph
    if leaves != 2:
        return None
    a0, a1, b0, b1 = graph.find_nodes(op="placeholder")
    results = graph.output_node().args[0]
    for i, (state, later, factor) in enumerate(((a0, b0, b1), (a1, b1, b0))):
        total = results[i]
        if total.target is not aten.add.Tensor or total.kwargs or later not in total.args:
            continue
        product = total.args[1 - total.args.index(later)]
        if getattr(product, "target", None) is not aten.mul.Tensor:
            continue
        if {*product.args} == {state, factor}:
            return i
    return None
