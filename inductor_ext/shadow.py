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
    recorded where it runs. ``pure`` are the program's nodes that only compute, ``drawing`` those
    that also draw random numbers. ``mutated`` are the keys of memory that is written to.
    """

    graph: Any
    of: dict[Any, Any]
    first: dict[Any, Any]
    order: dict[Any, int]
    grad: dict[Any, bool]
    pure: set[Any]
    mutated: set[int]
    settled: set[Any] = dataclasses.field(default_factory=set)
    rewritten: dict[int, Any] = dataclasses.field(default_factory=dict)
    homes: dict[int, int] = dataclasses.field(default_factory=dict)
    writers: dict[int, list[Any]] = dataclasses.field(default_factory=dict)
    drawing: set[Any] = dataclasses.field(default_factory=set)

    def last_write(self, node: Any) -> Any:
        """The node of the program that is the last to write to a shadow node's memory, of what is
        mutated; None where that is not known."""
        found = self.writers.get(self._memory(node), [None])
        return None if None in found else max(found, key=self.order.__getitem__)

    def _memory(self, node: Any) -> int:
        """The key of the memory that holds a shadow node's value in the program."""
        key = compat_pre_grad.storage_key(node.meta["val"])
        return self.homes.get(key, key)

    def is_outdated(self, node: Any) -> bool:
        """Whether a node of the program runs before its memory is given its last value."""
        held = self.of.get(node)
        last = None if held is None else self.rewritten.get(self._memory(held))
        return last is not None and self.order[node] < self.order[last]

    def is_mutated(self, node: Any) -> bool:
        """Whether anything writes to the memory of a shadow node's value."""
        value = node.meta["val"]
        if not self.mutated or not isinstance(value, torch.Tensor):
            return False
        return self._memory(node) in self.mutated


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
        self.owners: dict[int, list[Any]] = {}  # memory -> the tensors that look at it
        self.shared: set[int] = set()  # memory that nodes of the program hold
        self.outside: set[int] = set()  # memory that is not made here
        self.stale: dict[int, int] = {}  # tensors that are no values any more -> their memory
        self.mutated: set[int] = set()
        self.writers: dict[int, list[Any]] = {}  # of memory; None among them if not all known
        self.pure = True
        self.drawing = False
        self.settled = True  # nothing but values of memory of the program's own is written
        self.homes: dict[int, int] = {}
        self.running: Any = None  # the node of the program that is run
        self.versions: list[Any] = []  # what was written in place

    def leaf(self, tensor: torch.Tensor) -> Any:
        """The node of a tensor; a placeholder for one from outside."""
        node = self.nodes.get(id(tensor))
        if node is None:
            node = self.graph.placeholder(f"leaf{len(self.nodes)}")
            self.put(tensor, node)
            self.outside.add(compat_pre_grad.storage_key(tensor))
        return node

    def reads(self, tensor: torch.Tensor) -> None:
        """A tensor whose memory another one has written to since is not followed."""
        if id(tensor) in self.stale:
            self.mutated.add(self.stale[id(tensor)])

    def writes(self, key: int, node: Any) -> None:
        self.mutated.add(key)
        self.writers.setdefault(key, []).append(node)

    def put(self, tensor: torch.Tensor, node: Any) -> None:
        node.meta["val"], node.meta["made_in"] = tensor, self.running
        self.nodes[id(tensor)] = node
        self.alive.append(tensor)
        self.owners.setdefault(compat_pre_grad.storage_key(tensor), []).append(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return self._mutation(func, args, kwargs)
        out = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drawing = True
        if not func._schema.returns:
            self.pure = self.settled = False
        self._record(func, args, kwargs, out)
        return out

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        def node_of(arg: Any) -> Any:
            if isinstance(arg, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                return Symbol(arg)
            if not isinstance(arg, torch.Tensor):
                return arg
            self.reads(arg)
            return self.leaf(arg)

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
        """Not run. A tensor is given the value of the operation's twin that returns it; where there
        is none, or the memory is from outside, that counts as written to."""
        if torch.Tag.inplace_view in func.tags:
            raise NotFollowed(f"{func} changes a tensor's shape in place")
        written = []
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[i] if i < len(args) else kwargs.get(argument.name)
                many = given if isinstance(given, (tuple, list)) else [given]
                written += [t for t in many if isinstance(t, torch.Tensor)]
        twin = self._twin(func, written)
        out = None if twin is None else twin(*args, **kwargs)
        if out is not None and (out.dtype, out.shape) == (written[0].dtype, written[0].shape):
            self._record(twin, args, kwargs, out)
            self._next_value(written[0], out)
            if torch.Tag.nondeterministic_seeded in twin.tags:
                self.drawing = True
            return written[0]
        self.pure = self.settled = False
        for tensor in written:
            self.writes(compat_pre_grad.storage_key(tensor), self.running)
        returns = func._schema.returns
        if not returns:
            return None
        if len(returns) > 1 or not written:
            raise NotFollowed(f"{func} returns what it writes in a way that is not followed")
        return written[0]

    def _next_value(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        self.nodes[id(tensor)] = self.nodes[id(value)]
        key = compat_pre_grad.storage_key(tensor)
        self.homes[compat_pre_grad.storage_key(value)] = key
        others = [t for t in self.owners[key] if t is not tensor]
        if others or key in self.shared:
            self.pure = False
            self.versions.append((self.nodes[id(value)], key))
        self.writers.setdefault(key, []).append(self.running)
        for other in others:
            self.stale[id(other)] = key

    def _twin(self, func: Any, written: list[Any]) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if len(written) != 1 or not name.endswith("_") or func.namespace != "aten":
            return None
        if id(written[0]) not in self.nodes:
            return None
        if compat_pre_grad.storage_key(written[0]) in self.outside:
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
        self.settled: set[Any] = set()
        self.drawing: set[Any] = set()
        self.made_at: dict[Any, Any] = {}
        self.rewritten: dict[int, Any] = {}
        self.autocast: dict[Any, Any] = {}

    def shadow(self) -> Shadow:
        self.grad_now = True
        try:
            with self.recorder:
                for node in self.program.nodes:
                    self.grad[node] = self.grad_now
                    if node.op == "output":
                        self._arguments(node)
                    else:
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
            first.setdefault(of_node, self.made_at.get(of_node, node))
        order = {node: i for i, node in enumerate(self.program.nodes)}
        recorder = self.recorder
        return Shadow(
            recorder.graph, of, first, order, self.grad, self.pure, recorder.mutated, self.settled,
            self.rewritten, recorder.homes, recorder.writers, self.drawing,
        )  # fmt: skip

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
        followed = target is operator.setitem or not _depends_on_data(known)
        if _may_run(node) and args is not None and followed:
            self.recorder.pure = self.recorder.settled = True
            self.recorder.drawing = False
            self.recorder.versions, self.recorder.running = [], node
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
                self._ran(node)
                return out
        if node.op not in ("placeholder", "get_attr"):
            self._outside(node)
        return known

    def _ran(self, node: Any) -> None:
        recorder = self.recorder
        if recorder.drawing:
            if recorder.pure:
                self.drawing.add(node)
        elif recorder.pure:
            self.pure.add(node)
        elif recorder.settled and recorder.versions:
            self.settled.add(node)
        for value, key in recorder.versions:
            self.made_at[value] = self.rewritten[key] = node

    def _arguments(self, node: Any) -> tuple[Any, Any]:
        try:
            return torch.fx.node.map_arg((node.args, node.kwargs), self._argument)
        except LookupError:
            return None, None

    def _argument(self, node: Any) -> Any:
        found = self.values[node]
        if found is None:
            raise LookupError(node)
        for one in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(one, torch.Tensor):
                self.recorder.reads(one)
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
                    self.recorder.writes(compat_pre_grad.storage_key(one), None)


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
