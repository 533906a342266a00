"""What a compile for a virtual card produced, and how to read it."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from inductor_ext.report import Decision
from inductor_ext.testing.cards import Card

if TYPE_CHECKING:
    from inductor_ext.testing.binaries import KernelBinary


class Kernel(NamedTuple):
    """One Triton kernel of a generated program; ``name`` is how the program calls it.

    ``kind`` is Inductor's heuristic for it: "pointwise", "reduction", "persistent_reduction",
    "template", "foreach", "split_scan", ...; "user" for a kernel the user (or a lowering) wrote.
    ``source`` is a Python module that defines the kernel with its heuristics decorator.
    """

    name: str
    source: str
    kind: str


GraphKind = Literal["inference", "forward", "backward"]


@dataclasses.dataclass(frozen=True)
class Value:
    """A number that a compiled graph was called with; ``symbol`` names its size, if it is one."""

    number: Any
    symbol: str = ""


@dataclasses.dataclass(frozen=True)
class Ref:
    """A tensor of the traced program, known by its storage and by how that storage is viewed."""

    storage: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any


@dataclasses.dataclass(frozen=True)
class GraphCall:
    """The traced program called graph number ``graph`` with these inputs and got these outputs."""

    graph: int
    inputs: tuple[Ref | Value | None, ...]
    outputs: tuple[Ref | Value | None, ...]


@dataclasses.dataclass(frozen=True)
class Copy:
    """Between two graphs, a tensor was copied into another memory format."""

    source: Ref
    target: Ref


@dataclasses.dataclass
class Program:
    """How the generated graphs make up the function: what ``run_interpreted`` follows.

    ``constants`` are the tensors that each graph's text names but does not hold. ``args`` and
    ``captured`` (parameters, buffers, tensors of closures: name, tensor, ref) say
    where graph inputs come from, ``tangents`` the gradients of ``output_refs[i] for i in
    tangent_of``, ``grad_refs`` the gradient of each of ``grad_names``.
    """

    calls: list[GraphCall | Copy] = dataclasses.field(default_factory=list)
    graph_inputs: list[list[Any]] = dataclasses.field(default_factory=list)
    constants: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    args: list[tuple[int, Ref]] = dataclasses.field(default_factory=list)
    captured: list[tuple[str, Any, Ref]] = dataclasses.field(default_factory=list)
    output_refs: list[Any] = dataclasses.field(default_factory=list)
    output_spec: Any = None
    tangent_of: list[int] = dataclasses.field(default_factory=list)
    tangents: list[Ref] = dataclasses.field(default_factory=list)
    grad_names: list[str] = dataclasses.field(default_factory=list)
    grad_refs: list[Ref | None] = dataclasses.field(default_factory=list)
    keep_alive: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class GeneratedCode:
    """The programs Inductor wrote for one function on one virtual card.

    ``graphs`` are the generated Python modules in the order they were compiled, ``graph_kinds``
    says which is an "inference", "forward" or "backward" one. ``stopped`` is "" or one sentence on
    why the function could not be followed to its end on tensors without data (what was generated up
    to there is complete); ``autotuned`` maps each autotuned operation to the names it chose from.
    """

    card: Card
    graphs: list[str]
    graph_kinds: list[GraphKind]
    decisions: list[Decision]
    stopped: str = ""
    autotuned: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    program: Program = dataclasses.field(default_factory=Program, repr=False)

    @property
    def source(self) -> str:
        """All generated programs, one after the other."""
        return "\n".join(self.graphs)

    @property
    def forward(self) -> str:
        """The forward (or inference) programs."""
        return self._part("forward", "inference")

    @property
    def backward(self) -> str:
        """The backward programs; "" unless compiled with ``grad=True``."""
        return self._part("backward")

    def _part(self, *kinds: str) -> str:
        parts = zip(self.graphs, self.graph_kinds, strict=True)
        return "\n".join(source for source, kind in parts if kind in kinds)

    @property
    def frames(self) -> int:
        """How many graphs Dynamo captured: 1 without graph breaks and recompiles."""
        return sum(kind != "backward" for kind in self.graph_kinds)

    @functools.cached_property
    def kernels(self) -> list[Kernel]:
        """The Triton kernels, in order of definition."""
        return [kernel for graph in self.graphs for kernel in kernels_of(graph)]

    @functools.cached_property
    def calls(self) -> list[str]:
        """Kernel launches and external calls of all graphs, in the order they are issued."""
        return [call for graph in self.graphs for call in calls_of(graph)]

    @property
    def extern_calls(self) -> list[str]:
        """The entries of ``calls`` that are not Triton kernels: "extern_kernels.mm", ..."""
        return [call for call in self.calls if "." in call]

    def cross_compile(self, configs: Literal["first", "all"] = "first") -> list[KernelBinary]:
        """Compile every Triton kernel for the card's architecture with the tools Triton ships.

        A kernel with several launch configurations is compiled with its first, or with ``configs=
        "all"`` once for each (one ``KernelBinary`` each). Needs no GPU.
        """
        from inductor_ext.testing.binaries import cross_compile

        return cross_compile(self, configs)


@functools.lru_cache(maxsize=64)
def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError as e:
        raise ValueError("expected a Python program to look for kernels and calls in") from e


def _dotted(node: ast.expr) -> str:
    """``a.b.c`` of an attribute chain, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def kernels_of(source: str) -> list[Kernel]:
    """The Triton kernels that a generated module defines through ``async_compile.triton``."""
    found = []
    for node in ast.walk(_parsed(source)):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
            continue
        call, target = node.value, node.targets[0]
        if _dotted(call.func) != "async_compile.triton" or not isinstance(target, ast.Name):
            continue
        text = getattr(call.args[1], "value", None)
        if isinstance(text, str):
            found.append((node.lineno, Kernel(target.id, text, _kind(text))))
    return [kernel for _, kernel in sorted(found, key=lambda pair: pair[0])]


def _kind(kernel_source: str) -> str:
    decorator = re.search(r"^@triton_heuristics\.(\w+)\(", kernel_source, re.MULTILINE)
    kind = decorator.group(1) if decorator else "unknown"
    return "user" if kind == "user_autotune" else kind


# Generated names that are allocation or views, not work.
_NOT_WORK = (
    "torch.ops.inductor._alloc_from_pool",
    "torch.ops.inductor._reinterpret_tensor",
)


def calls_of(source: str) -> list[str]:
    """Kernel launches (by name) and external calls (dotted) of a generated module's ``call``.

    Both sides of a generated ``if`` are listed; the functions that partitions and subgraphs are
    written to are listed where they are called.
    """
    module = _parsed(source)
    functions = {node.name: node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)}
    entry = functions.get("call")
    if entry is None:
        return []
    visitor = _Calls(functions)
    visitor.enter(entry)
    return visitor.found


class _Calls(ast.NodeVisitor):
    def __init__(self, functions: dict[str, ast.FunctionDef]) -> None:
        self.functions = functions
        self.found: list[str] = []
        self._inside: list[str] = []

    def enter(self, function: ast.FunctionDef) -> None:
        if function.name in self._inside:
            return
        self._inside.append(function.name)
        for statement in function.body:
            self.visit(statement)
        self._inside.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """A nested definition runs where it is called."""

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name = _dotted(node.func)
        if name.startswith("aten."):
            name = f"torch.ops.{name}"
        if name.endswith(".run") and name.count(".") == 1:
            self.found.append(name.removesuffix(".run"))
        elif name.startswith(("extern_kernels.", "torch.ops.")) and name not in _NOT_WORK:
            self.found.append(name.removesuffix(".launched"))
        elif name in self.functions:
            self.enter(self.functions[name])
        elif isinstance(node.func, ast.Subscript) and _dotted(node.func.value) == "self.partitions":
            partition = f"partition_{ast.unparse(node.func.slice)}"
            if partition in self.functions:
                self.enter(self.functions[partition])
