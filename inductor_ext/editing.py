"""Editing an fx graph before it is lowered: wholly or not at all; equal nodes, new nodes with
values, dead nodes."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from . import compat, compat_fx, config

# What a new node inherits from the node it stands for: where it came from, for names and traces.
_ORIGIN = ("original_aten", "stack_trace", "seq_nr", "from_node", "source_fn_stack")


@contextlib.contextmanager
def all_or_nothing(graph: Any) -> Iterator[None]:
    """Edit a graph, or leave it as it was: an error on the way undoes what was edited."""
    before = compat_fx.Snapshot(graph)
    try:
        yield
    except BaseException:
        before.restore()
        raise


def follow_views(graph: Any) -> None:
    """Give views the memory of what they are views of now.

    AOTAutograd compares the memory of values to see which saved tensors the backward may overwrite,
    so a view of a result that was put in for another must not be seen on the other's memory.
    """
    for node in graph.nodes:
        source = node.args[0] if node.op == "call_function" and node.args else None
        of = value(source) if isinstance(source, torch.fx.Node) else None
        if node.target is operator.getitem and isinstance(of, (list, tuple)):
            if _moved(value(node), of[node.args[1]]):
                node.meta["val"] = of[node.args[1]]
        elif _is_view(node.target):
            found = value(node)
            first = found[0] if isinstance(found, (list, tuple)) and found else found
            if _moved(first, of):
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value)
                with torch.no_grad():
                    node.meta["val"] = node.target(*args, **kwargs)


def _is_view(target: Any) -> bool:
    also = (torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default)
    return isinstance(target, torch._ops.OpOverload) and (target.is_view or target in also)


def _moved(view: Any, of: Any) -> bool:
    both = isinstance(view, torch.Tensor) and isinstance(of, torch.Tensor)
    return both and not compat_fx.same_memory(view, of)


def value(node: Any) -> Any:
    """The fake tensor (or symbolic number) that a node computes; None where it is unknown."""
    return node.meta.get("val")


def is_pure(node: Any) -> bool:
    """Whether a node's value follows from its arguments and nothing else happens."""
    if node.target is operator.getitem:
        return True
    return (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and not node.target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in node.target.tags
        and node.target.namespace in ("aten", "prims")
        and not node.is_impure()
    )


class Numbers:
    """``of(node)``: the first node of the graph that computes the same from the same inputs."""

    def __init__(self, graph: Any) -> None:
        self._first: dict[Any, Any] = {}
        self._seen: dict[Any, Any] = {}
        for node in graph.nodes:
            self.of(node)

    def of(self, node: Any) -> Any:
        if node.target is torch.ops.aten.alias.default:
            return self.of(node.args[0])
        first = self._first.get(node)
        if first is None or compat_fx.is_erased(first):
            key = self._key(node)
            first = node if key is None else self._seen.get(key)
            if first is None or compat_fx.is_erased(first):
                first = self._seen[key] = node
            self._first[node] = first
        return first

    def _key(self, node: Any) -> Any:
        if not is_pure(node):
            return None
        args = _frozen(node.args, self.of)
        kwargs = _frozen(node.kwargs, self.of)
        try:
            hash((args, kwargs))
        except TypeError:
            return None
        return node.target, args, kwargs


def _frozen(arg: Any, of: Callable[[Any], Any]) -> Any:
    if isinstance(arg, torch.fx.Node):
        return of(arg)
    if isinstance(arg, (list, tuple)):
        return tuple(_frozen(a, of) for a in arg)
    if isinstance(arg, dict):
        return tuple((k, _frozen(v, of)) for k, v in sorted(arg.items()))
    return type(arg), repr(arg)  # 0, 0.0, -0.0 and False differ


class Editor:
    """New nodes of a graph, in front of ``at``, each with the value that later passes read.

    The same call twice is one node: nodes are added in graph order, so the first comes earlier.
    """

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.made: list[Any] = []
        self._at: Any = None
        self._known: dict[Any, Any] = {}

    def before(self, node: Any) -> None:
        """Add what follows in front of ``node``, under its origin."""
        self._at = node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        key = target, _frozen(args, lambda n: n), _frozen(kwargs, lambda n: n)
        if key not in self._known:
            with self.graph.inserting_before(self._at):
                node = self.graph.call_function(target, args, kwargs)
            node.meta.update({k: self._at.meta[k] for k in _ORIGIN if k in self._at.meta})
            of = lambda n: n.meta["val"]  # noqa: E731
            fakes = torch.fx.node.map_arg((args, kwargs), of)
            with torch.no_grad():
                result = target(*fakes[0], **fakes[1])
            # An assertion has no value, and torch's partitioner asks every node for its size.
            node.meta["val"] = () if result is None else result
            if isinstance(result, torch.Tensor):
                node.meta["tensor_meta"] = compat_fx.tensor_meta(result)
            self._known[key] = node
            self.made.append(node)
        return self._known[key]

    def forget(self) -> None:
        """Make what is called from here on anew: what is there may come later in the graph."""
        self._known.clear()

    def to(self, node: Any, dtype: torch.dtype) -> Any:
        """``node`` in another dtype."""
        if value(node).dtype == dtype:
            return node
        return self.call(torch.ops.prims.convert_element_type.default, node, dtype)

    def undo(self) -> None:
        """Erase the nodes made that nothing uses, also those that only assert."""
        for node in reversed(self.made):
            if not compat_fx.is_erased(node) and not node.users:
                self.graph.erase_node(node)
        self.made, self._known = [], {}

    def drop_unused(self) -> None:
        """Erase the nodes made that nothing uses."""
        self.made = erase_unused(self.graph, self.made)
        alive = set(self.made)
        self._known = {k: n for k, n in self._known.items() if n in alive}


def erase_unused(graph: Any, nodes: Iterable[Any]) -> list[Any]:
    """Erase those of ``nodes`` that are pure and unused, then what only they used; returns the
    rest of ``nodes``."""
    nodes = list(dict.fromkeys(nodes))
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if compat_fx.is_erased(node) or node.users or not is_pure(node):
            continue
        sources = node.all_input_nodes
        graph.erase_node(node)
        stack.extend(sources)
    return [n for n in nodes if not compat_fx.is_erased(n)]


def check(graph: Any) -> None:
    """Raise where an edited graph uses what is not there (yet); in the tests only."""
    if config.strict:
        graph.lint()


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for all that is known, without a guard."""
    return bool(compat.expr(a) == compat.expr(b))


def same_shape(a: Iterable[Any], b: Iterable[Any]) -> bool:
    a, b = list(a), list(b)
    return len(a) == len(b) and all(same_size(x, y) for x, y in zip(a, b, strict=True))
