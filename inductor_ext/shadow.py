"""A graph in front of AOTAutograd read as aten operations, without being changed.

That graph holds torch functions and methods in hundreds of spellings. Run once on its own fake
tensors it is a sequence of aten operations, the *shadow*, in which structure can be matched; which
node of the program has which value is remembered, so that an edit is made in the program's graph.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import compat, compat_pre_grad


class NotFollowed(Exception):
    """Why a graph has no shadow."""


@dataclasses.dataclass
class Shadow:
    """``graph`` holds the aten nodes, each with its fake tensor in ``meta["val"]``; what could not
    be followed is a placeholder there.

    ``of`` maps a node of the program to the shadow node of its value (tensors only), ``first`` the
    other way to the first such node, ``order`` to its position, ``grad`` to whether gradients are
    recorded where it runs. ``pure`` are the program's nodes that only compute. ``mutated`` are the
    keys of memory that is written to.
    """

    graph: Any
    of: dict[Any, Any]
    first: dict[Any, Any]
    order: dict[Any, int]
    grad: dict[Any, bool]
    pure: set[Any]
    mutated: set[int]

    def is_mutated(self, node: Any) -> bool:
        """Whether anything writes to the memory of a shadow node's value."""
        value = node.meta["val"]
        if not self.mutated or not isinstance(value, torch.Tensor):
            return False
        return compat_pre_grad.storage_key(value) in self.mutated


class Symbol(str):
    """A symbolic number among a shadow node's arguments: its text, and the ``number`` itself."""

    number: Any

    def __new__(cls, number: Any) -> Symbol:
        made = super().__new__(cls, number)
        made.number = number
        return made


def value_of(node: Any) -> Any:
    """What the tracer put down for a node of the program; None where it did not."""
    found = node.meta.get("example_value")
    return node.meta.get("val") if found is None else found


class _Recorder(TorchDispatchMode):
    """Writes down each aten operation on fake tensors, and lets none write to memory."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = torch.fx.Graph()
        self.nodes: dict[int, Any] = {}
        self.alive: list[Any] = []  # so that an id stands for one tensor
        self.owners: dict[int, int] = {}  # memory -> how many tensors look at it
        self.shared: set[int] = set()  # memory that nodes of the program hold
        self.mutated: set[int] = set()
        self.pure = True

    def leaf(self, tensor: torch.Tensor) -> Any:
        """The node of a tensor; a placeholder for one from outside."""
        node = self.nodes.get(id(tensor))
        if node is None:
            node = self.graph.placeholder(f"leaf{len(self.nodes)}")
            self.put(tensor, node)
        return node

    def put(self, tensor: torch.Tensor, node: Any) -> None:
        node.meta["val"] = tensor
        self.nodes[id(tensor)] = node
        self.alive.append(tensor)
        key = compat_pre_grad.storage_key(tensor)
        self.owners[key] = self.owners.get(key, 0) + 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return self._mutation(func, args, kwargs)
        out = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags or not func._schema.returns:
            self.pure = False
        self._record(func, args, kwargs, out)
        return out

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        def node_of(arg: Any) -> Any:
            if isinstance(arg, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                return Symbol(arg)
            return self.leaf(arg) if isinstance(arg, torch.Tensor) else arg

        if isinstance(out, torch.Tensor):
            if id(out) not in self.nodes:
                args, kwargs = torch.fx.node.map_aggregate((args, kwargs), node_of)
                self.put(out, self.graph.call_function(func, args, kwargs))
        elif isinstance(out, (tuple, list)):
            args, kwargs = torch.fx.node.map_aggregate((args, kwargs), node_of)
            whole = self.graph.call_function(func, args, kwargs)
            whole.meta["val"] = out
            for i, one in enumerate(out):
                if isinstance(one, torch.Tensor) and id(one) not in self.nodes:
                    self.put(one, self.graph.call_function(operator.getitem, (whole, i)))

    def _mutation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Not run. A tensor that nothing else looks at is given the value of the operation's twin
        that returns it; else the memory counts as written to."""
        if torch.Tag.inplace_view in func.tags:
            raise NotFollowed(f"{func} changes a tensor's shape in place")
        written = []
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[i] if i < len(args) else kwargs.get(argument.name)
                many = given if isinstance(given, (tuple, list)) else [given]
                written += [t for t in many if isinstance(t, torch.Tensor)]
        twin = self._twin(func, written)
        if twin is not None:
            out = twin(*args, **kwargs)
            self._record(twin, args, kwargs, out)
            self.nodes[id(written[0])] = self.nodes[id(out)]
            if torch.Tag.nondeterministic_seeded in twin.tags:
                self.pure = False
            return written[0]
        self.pure = False
        self.mutated.update(map(compat_pre_grad.storage_key, written))
        returns = func._schema.returns
        if not returns:
            return None
        if len(returns) > 1 or not written:
            raise NotFollowed(f"{func} returns what it writes in a way that is not followed")
        return written[0]

    def _twin(self, func: Any, written: list[Any]) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if len(written) != 1 or not name.endswith("_") or func.namespace != "aten":
            return None
        key = compat_pre_grad.storage_key(written[0])
        if id(written[0]) not in self.nodes or self.owners[key] != 1 or key in self.shared:
            return None
        packet = getattr(torch.ops.aten, name[:-1], None)
        return getattr(packet, func._overloadname, None)


_MODULES = ("torch", "operator", "_operator", "builtins", "math")


def _may_run(node: Any) -> bool:
    target = node.target
    if node.op == "call_method":
        return True
    if node.op != "call_function" or compat_pre_grad.is_higher_order(target):
        return False
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return True
    module = getattr(target, "__module__", None) or "torch"  # C functions name none
    if "functorch" in module or "inference_mode" in getattr(target, "__name__", ""):
        raise NotFollowed(f"{module} changes how what follows runs")
    return module.split(".")[0] in _MODULES


def trace(graph: Any) -> Shadow:
    """The shadow of a program's graph. Raises NotFollowed."""
    modes = [compat_pre_grad.fake_mode_of(value_of(n)) for n in graph.nodes]
    fake_mode = next((mode for mode in modes if mode is not None), None)
    if fake_mode is None:
        raise NotFollowed("it holds no fake tensors")
    with compat_pre_grad.replaying(fake_mode):
        return _Run(graph).shadow()


class _Run:
    def __init__(self, graph: Any) -> None:
        self.program, self.recorder = graph, _Recorder()
        self.values: dict[Any, Any] = {}
        self.grad_now = torch.is_grad_enabled()
        self.grad: dict[Any, bool] = {}
        self.pure: set[Any] = set()
        self.autocast: dict[Any, Any] = {}

    def shadow(self) -> Shadow:
        self.grad_now = True
        try:
            with self.recorder:
                for node in self.program.nodes:
                    self.grad[node] = self.grad_now
                    if node.op != "output":
                        self.values[node] = self._run(node)
                        self._hold(self.values[node])
        finally:
            for context in reversed(list(self.autocast.values())):
                context.__exit__(None, None, None)
        of = {
            node: self.recorder.leaf(v)
            for node, v in self.values.items()
            if isinstance(v, torch.Tensor)
        }
        first: dict[Any, Any] = {}
        for node, of_node in of.items():
            first.setdefault(of_node, node)
        order = {node: i for i, node in enumerate(self.program.nodes)}
        recorder = self.recorder
        return Shadow(recorder.graph, of, first, order, self.grad, self.pure, recorder.mutated)

    def _hold(self, value: Any) -> None:
        for one in value if isinstance(value, (tuple, list)) else [value]:
            if isinstance(one, torch.Tensor):
                self.recorder.shared.add(compat_pre_grad.storage_key(one))

    def _run(self, node: Any) -> Any:
        target = node.target
        if compat_pre_grad.sets_gradients(target):
            self.grad_now = bool(node.args[0])
            return None
        if compat_pre_grad.enters_autocast(target):
            self.autocast[node] = entered = target(*node.args, **node.kwargs)
            return entered
        if compat_pre_grad.exits_autocast(target):
            target(self.autocast.pop(node.args[0]))
            return None
        known = value_of(node)
        args, kwargs = self._arguments(node)
        if _may_run(node) and args is not None and not _depends_on_data(known):
            self.recorder.pure = True
            function: Callable[..., Any]
            function = getattr(args[0], target) if node.op == "call_method" else target
            args = args[1:] if node.op == "call_method" else args
            try:
                out = function(*args, **kwargs)
            except NotFollowed:
                raise
            except Exception:
                pass
            else:
                if self.recorder.pure:
                    self.pure.add(node)
                return out
        if node.op not in ("placeholder", "get_attr"):
            self._outside(node)
        return known

    def _arguments(self, node: Any) -> tuple[Any, Any]:
        try:
            return torch.fx.node.map_arg((node.args, node.kwargs), self._argument)
        except LookupError:
            return None, None

    def _argument(self, node: Any) -> Any:
        found = self.values[node]
        if found is None:
            raise LookupError(node)
        return found

    def _outside(self, node: Any) -> None:
        """What a node does that is not run: it may write to everything it is given, unless it is
        an operation that says it writes nothing."""
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable:
            return
        for source in node.all_input_nodes:
            found = self.values.get(source)
            for one in found if isinstance(found, (tuple, list)) else [found]:
                if isinstance(one, torch.Tensor):
                    self.recorder.mutated.add(compat_pre_grad.storage_key(one))


def _depends_on_data(known: Any) -> bool:
    """Whether a value has a size, or is a number, that depends on data: it is not computed again,
    which would make new symbols."""
    if isinstance(known, (tuple, list)):
        return any(map(_depends_on_data, known))
    if isinstance(known, torch.Tensor):
        return compat.has_unbacked([compat.expr(s) for s in known.shape])
    if isinstance(known, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return compat.has_unbacked([known.node.expr])
    return known is None
