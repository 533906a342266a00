"""Pointwise fx nodes as Triton statements, with Inductor's rounding.

Values of 16-bit floating-point types are computed in fp32 and rounded where the graph converts to
such a type; whoever stores rounds as well. What is not in the tables here is not translated:
nothing is guessed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from . import compat_fx
from .editing import value
from .scan_operations import Unknown as Unknown
from .scan_operations import computed_type as computed_type
from .scan_operations import literal, rule_of
from .scan_operations import stored_type as stored_type


class Translator:
    """Writes statements; ``names`` says what the inputs are called.

    ``of(node)`` is the name of a node's value in the type it is computed in, once ``names`` or a
    statement has it. ``prefix`` begins the names of local values.
    """

    def __init__(self, names: Mapping[Any, str], prefix: str = "v") -> None:
        self.statements: list[str] = []
        self._inputs, self._prefix = dict(names), prefix
        self._names: dict[Any, str] = {}
        self._count = 0

    def named(self, expression: str) -> str:
        """A local name of an expression."""
        name = f"{self._prefix}{self._count}"
        self._count += 1
        self.statements.append(f"{name} = {expression}")
        return name

    def given(self, node: Any, name: str) -> None:
        """One more input."""
        self._inputs[node] = name

    def state(self) -> Any:
        """What ``back_to`` needs to forget all that is written from here on."""
        return len(self.statements), dict(self._names), self._count

    def back_to(self, state: Any) -> None:
        """Forget what was written since ``state()``."""
        length, self._names, self._count = state[0], dict(state[1]), state[2]
        del self.statements[length:]

    def of(self, node: Any) -> str:
        if node not in self._names:
            if node not in self._inputs:
                raise Unknown(f"{node} is neither an input nor translated before it is read")
            name, dtype = self._inputs[node], value(node).dtype
            computed_type(dtype)
            if dtype in (torch.bfloat16, torch.float16, torch.bool):
                name = self.named(f"{name}.to({computed_type(dtype)})")
            self._names[node] = name
        return self._names[node]

    def dtype_of(self, arg: Any) -> torch.dtype:
        if isinstance(arg, torch.fx.Node):
            return value(arg).dtype
        return torch.bool if isinstance(arg, bool) else torch.result_type(arg, arg)

    def promoted(self, *args: Any) -> torch.dtype:
        """The dtype that operands of a comparison are compared in."""
        first, second = (value(a) if isinstance(a, torch.fx.Node) else a for a in args)
        return torch.result_type(first, second)

    def operand(self, arg: Any, dtype: torch.dtype) -> str:
        """An argument in the type that ``dtype`` is computed in."""
        if not isinstance(arg, torch.fx.Node):
            return literal(arg, dtype)
        name, own = self.of(arg), value(arg).dtype
        if computed_type(own) == computed_type(dtype):
            return name
        if dtype == torch.bool:
            return f"({name} != 0)"
        if dtype == torch.uint8 and own.is_floating_point:
            return f"{name}.to(tl.int16).to(tl.uint8)"  # of a negative number it is undefined
        return f"{name}.to({computed_type(dtype)})"

    def add(self, node: Any) -> str:
        """Write a node's statement; its inputs are there. Raises Unknown."""
        rule = self.rule(node)
        if rule is None:
            raise Unknown(f"{node.target} has no translation")
        dtype = value(node).dtype
        computed_type(dtype)
        for source in node.all_input_nodes:
            if not isinstance(value(source), torch.Tensor):
                raise Unknown(f"{node.target} reads a number that is not known while compiling")
        expression = rule(self, node)
        if compat_fx.rounds_in_between() and dtype in (torch.bfloat16, torch.float16):
            expression = f"({expression}).to({stored_type(dtype)}).to({computed_type(dtype)})"
        self._names[node] = self.named(expression)
        return self._names[node]

    def rule(self, node: Any) -> Any:
        """How a node's operation is written; None where that is not known."""
        return rule_of(node)

    def stored(self, node: Any) -> str:
        """A node's value in the type it has in memory."""
        return f"{self.of(node)}.to({stored_type(value(node).dtype)})"


def is_translatable(node: Any) -> bool:
    """Whether ``translate`` knows a node, whatever its inputs are called."""
    if not isinstance(value(node), torch.Tensor) or rule_of(node) is None:
        return False
    try:
        Translator({n: f"x{i}" for i, n in enumerate(node.all_input_nodes)}).add(node)
    except Unknown:
        return False
    return True


def is_constant(node: Any) -> bool:
    """Whether a node is one number everywhere, known while compiling."""
    return is_translatable(node) and not any(
        isinstance(value(n), torch.Tensor) for n in node.all_input_nodes
    )


def translate(
    nodes: Iterable[Any], names: Mapping[Any, str], prefix: str = "v"
) -> tuple[str, Callable[[Any], str]]:
    """Pointwise nodes in graph order as Triton statements.

    ``names`` are the inputs' names, as stored or wider; ``meta["val"]`` of every node says its
    dtype. Returns the statements and a function from a node to the name of its value, in the type
    it is computed in (fp32 of bf16). Raises Unknown.
    """
    translator = Translator(names, prefix)
    for node in nodes:
        translator.add(node)
    return "\n".join(translator.statements), translator.of


_NARROW = (torch.int16, torch.int8, torch.uint8)


def combine(graph: Any) -> str:
    """The text of ``Program.combine`` for a combine function traced to an fx graph.

    Its placeholders are the leaves of the earlier state, then those of the later, then what it does
    not read; it returns leaves of the same dtypes, each in the type it is computed in. Raises
    Unknown where it does not, reads anything else, or is not pointwise.
    """
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    outputs = graph.output_node().args[0]
    outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    k = len(outputs)
    if len(inputs) < 2 * k or any(n.users for n in inputs[2 * k :]):
        raise Unknown(f"a combine of {len(inputs)} values to {k} reads something else")
    inputs = inputs[: 2 * k]
    names = {n: f"a{i}" if i < k else f"b{i - k}" for i, n in enumerate(inputs)}
    for i, (before, after) in enumerate(zip(inputs, outputs, strict=False)):
        if not isinstance(after, torch.fx.Node):
            raise Unknown(f"leaf {i} of a combine is no tensor")
        if value(before).dtype != value(after).dtype:
            raise Unknown(
                f"leaf {i} of a combine goes from {value(before).dtype} to {value(after).dtype}"
            )
    inner = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    text, of = translate([n for n in inner if n.users and not _is_view(n)], names)
    # a state has 32 bits at least, and arithmetic of narrower integers wraps around as theirs
    narrow = {i: value(n).dtype for i, n in enumerate(inputs) if value(n).dtype in _NARROW}
    lines = [
        f"{names[inputs[i]]} = {names[inputs[i]]}.to({stored_type(dtype)})"
        for i, dtype in narrow.items()
    ]
    lines += [text] if text else []
    for i, n in enumerate(outputs):
        lines.append(f"r{i} = {of(n)}.to(tl.int32)" if i in narrow else f"r{i} = {of(n)}")
    return "\n".join(lines)


def _is_view(node: Any) -> bool:
    return node.target is operator.getitem
