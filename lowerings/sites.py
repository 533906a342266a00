"""Sites in a graph in front of AOTAutograd: what takes their place; how a program is edited."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from inductor_ext.lowerings.mhc_entries import aten

from inductor_ext import compat, compat_fx, compat_pre_grad, editing, registry, report
from inductor_ext.shadow import Shadow, value_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class NoSite(Exception):
    """Why something that looks like a site is left alone; one sentence."""


def describe(name: str, source: Any, tensor: Any = None) -> str:
    """A site as reports name it: the operation, shape and dtype of its first tensor."""
    tensor = source.meta["val"] if tensor is None else tensor
    sizes = ",".join(str(compat.expr(s)) for s in tensor.shape)
    return f"{name} [{sizes}] {str(tensor.dtype).removeprefix('torch.')}"


def leave(lowering: str, site: str, reason: str) -> None:
    report.record(report.Decision(lowering, False, "stock", reason, site))


def fired(lowering: str, chosen: str, site: str, reason: str) -> None:
    report.record(report.Decision(lowering, True, chosen, reason, site, source="heuristic"))


# --- editing --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Replacement:
    """``emit`` makes the operation out of ``inputs``, nodes of the program. ``outputs`` maps nodes
    to functions of (Program, what ``emit`` returned) to their new value; ``inside`` are the nodes
    that must not be needed any more, ``drawn`` those that draw random numbers which the operation
    draws instead."""

    lowering: str
    chosen: str
    site: str
    reason: str
    inputs: list[Any]
    outputs: dict[Any, Callable[[Program, Any], Any]]
    inside: set[Any]
    emit: Callable[[Program], Any]
    place: Any = None
    drawn: set[Any] = dataclasses.field(default_factory=set)


class Program:
    """New nodes in a program's graph, each with its fake value."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self._place: Any = None
        self._replaced: dict[Any, Any] = {}

    def replace(self, old: Any, new: Any) -> None:
        old.replace_all_uses_with(new)
        self._replaced[old] = new

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Where an error ends it, what was replaced since then is not."""
        before = dict(self._replaced)
        try:
            yield
        except BaseException:
            self._replaced = before
            raise

    def before(self, place: Any) -> None:
        self._place = place

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """A function, or a method by its name."""
        now = lambda n: self._replaced.get(n, n)  # noqa: E731
        args, kwargs = torch.fx.node.map_arg((args, kwargs), now)
        with self.graph.inserting_before(self._place):
            create = self.graph.call_method if isinstance(target, str) else self.graph.call_function
            node = create(target, args, kwargs)
        fake, named = torch.fx.node.map_arg((args, kwargs), value_of)
        if isinstance(target, str):
            value = getattr(fake[0], target)(*fake[1:], **named)
        else:
            value = target(*fake, **named)
        key = "val" if "val" in self._place.meta else "example_value"
        node.meta[key] = value
        if "stack_trace" in self._place.meta:
            node.meta["stack_trace"] = self._place.meta["stack_trace"]
        return node

    def vector(self, elements: list[tuple[Any, int]]) -> Any:
        """fp32 [len(elements)] of entries (node, index in row-major order)."""
        parts = [self._run(*run) for run in _runs(elements)]
        return parts[0] if len(parts) == 1 else self.call(torch.cat, parts)

    def _run(self, node: Any, begin: int, end: int) -> Any:
        tensor = value_of(node)
        flat = node if tensor.dim() == 1 else self.call("reshape", node, -1)
        if (begin, end) != (0, tensor.numel()):
            flat = self.call(operator.getitem, flat, slice(begin, end))
        return flat if tensor.dtype == torch.float32 else self.call("float", flat)

    def rows(self, rows: list[tuple[Any, bool, int]]) -> Any:
        """The weight whose rows are these: (node, whether they are its columns, which)."""
        parts = []
        runs = _runs([((node, transposed), row) for node, transposed, row in rows])
        dtypes = {value_of(node).dtype for (node, _), _, _ in runs}
        for (node, transposed), begin, end in runs:
            part = self.call("t", node) if transposed else node
            if (begin, end) != (0, value_of(part).shape[0]):
                part = self.call(operator.getitem, part, slice(begin, end))
            if dtypes not in ({torch.float32}, {torch.bfloat16}):
                part = self.call("float", part)
            parts.append(part)
        return parts[0] if len(parts) == 1 else self.call(torch.cat, parts)

    def shaped(self, node: Any, like: Any) -> Any:
        """``node`` in the shape of another node, and laid out so that what can be viewed of that
        one can be viewed of it."""
        node = self.sized(node, value_of(like).shape)
        own, wanted = value_of(node), value_of(like)
        if own.dim() < 2 or own.stride() == wanted.stride():
            return node
        if wanted.is_contiguous():
            return node if own.is_contiguous() else self.call("contiguous", node)
        if wanted.mT.is_contiguous() and not own.mT.is_contiguous():
            turned = self.call("contiguous", self.call("transpose", node, -1, -2))
            return self.call("transpose", turned, -1, -2)
        steps = [compat.hint(compat.expr(s)) for s in wanted.stride()]
        order = sorted(range(wanted.dim()), key=lambda d: (-steps[d], d))
        if not wanted.permute(order).is_contiguous() or own.permute(order).is_contiguous():
            return node
        back = [order.index(d) for d in range(len(order))]
        dense = self.call("contiguous", self.call("permute", node, *order))
        return self.call("permute", dense, *back)

    def sized(self, node: Any, wanted: Any) -> Any:
        own = value_of(node).shape
        if [compat.expr(s) for s in own] == [compat.expr(s) for s in wanted]:
            return node
        return self.call("reshape", node, *sizes_for_view(wanted))


def sizes_for_view(wanted: Iterable[Any]) -> list[int]:
    """A shape without symbols: one of them is inferred. Raises NoSite for more."""
    sizes = [s if isinstance(s, int) else -1 for s in wanted]
    if sizes.count(-1) > 1:
        raise NoSite("its shape has two symbolic sizes that its streams do not have so")
    return sizes


def _runs(elements: list[tuple[Any, int]]) -> list[tuple[Any, int, int]]:
    runs: list[list[Any]] = []
    for node, index in elements:
        if runs and runs[-1][0] == node and runs[-1][2] == index:
            runs[-1][2] += 1
        else:
            runs.append([node, index, index + 1])
    return [(node, begin, end) for node, begin, end in runs]


def follow_writes(seen: Shadow, graph: Any) -> None:
    """Let what reads a tensor behind a method that wrote to it read what the method returned, the
    same tensor: so every value of a loop that writes in place is a node of its own."""
    for node in list(graph.nodes):
        if node.op != "call_method" or not node.target.endswith("_") or not node.args:
            continue
        tensor = node.args[0]
        if tensor in seen.of and seen.of.get(node) is seen.of[tensor]:
            tensor.replace_all_uses_with(
                node, lambda user, now=node: seen.order[user] > seen.order[now]
            )


def program_node(shadow: Shadow, leaf: Any) -> Any:
    """The node of the program for an input of an operation. Raises NoSite."""
    node = shadow.first.get(leaf)
    if node is None:
        raise NoSite("an input is computed inside a function of torch")
    tensor = value_of(node)
    if compat_pre_grad.fake_mode_of(tensor) is None:
        raise NoSite(f"{node.name} is a {type(tensor).__name__}")
    if shadow.is_mutated(leaf) or shadow.is_outdated(node):
        raise NoSite(f"{node.name} is written to in this graph")
    return node


def place_of(shadow: Shadow, replacement: Replacement) -> Any:
    """In front of which node the operation can stand. Raises NoSite."""
    order, latest = shadow.order, max(shadow.order[n] for n in replacement.inputs)
    region = sorted((*replacement.inside, *replacement.outputs), key=order.__getitem__)
    place = next((n for n in region if order[n] > latest), None)
    if place is None:
        raise NoSite("its inputs come after its results")
    for out in replacement.outputs:
        for user in out.users:
            if order[user] < order[place] and user not in replacement.inside:
                raise NoSite(f"{user.name} uses a result before all inputs are there")
    if len({shadow.grad[n] for n in _between(replacement)}) > 1:
        raise NoSite("gradients are recorded for a part of it only")
    return place


def _between(replacement: Replacement) -> set[Any]:
    """The nodes of the program by which the results come from the inputs."""
    found: set[Any] = set()
    stack = list(replacement.outputs)
    while stack:
        node = stack.pop()
        if node not in found and node not in replacement.inputs:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def apply(shadow: Shadow, graph: Any, found: list[Replacement]) -> list[Replacement]:
    """Edit the program; returns what was done. Each replacement is reported."""
    ready = []
    for replacement in found:
        try:
            replacement.place = place_of(shadow, replacement)
        except NoSite as reason:
            leave(replacement.lowering, replacement.site, str(reason))
        else:
            ready.append(replacement)
    while ready:
        needed = _needed(shadow, graph, ready)
        kept = []
        for replacement in ready:
            users = [needed[n] for n in replacement.inside if n in needed]
            user = next((u for u in users if u not in replacement.inside), None)
            if user is None:
                kept.append(replacement)
            else:
                why = f"{user.name} uses a value in between"
                leave(replacement.lowering, replacement.site, why)
        if len(kept) == len(ready):
            break
        ready = kept
    if not ready:
        return []
    done = []
    mode = compat_pre_grad.fake_mode_of(value_of(ready[0].inputs[0]))
    try:
        with compat_pre_grad.replaying(mode):
            program = Program(graph)
            for replacement in ready:
                try:
                    with editing.all_or_nothing(graph), program.kept():
                        _edit(shadow, program, replacement)
                    done.append(replacement)
                except Exception as error:
                    registry.failed(replacement.lowering, replacement.site, error)
    finally:
        graph.lint()
        graph.owning_module.recompile()
    return done


# What an export puts behind conversions: of tensors that are known, which need no check.
_ASSERTION = aten._assert_tensor_metadata.default


def _needed(shadow: Shadow, graph: Any, found: list[Replacement]) -> dict[Any, Any]:
    """The nodes of the program that are needed once all is replaced, each with a user."""
    of_output = {out: r for r in found for out in r.outputs}
    needed: dict[Any, Any] = {}
    computed = shadow.pure.union(shadow.settled, *(r.drawn for r in found))
    stack = [n for n in graph.nodes if n not in computed and n.op != "placeholder"]
    stack = [n for n in stack if n.target is not _ASSERTION]
    for node in stack:
        needed.setdefault(node, node)
    while stack:
        node = stack.pop()
        sources = of_output[node].inputs if node in of_output else node.all_input_nodes
        for source in sources:
            if source not in needed:
                needed[source] = node
                stack.append(source)
    return needed


def _requires_grad(node: Any) -> bool | None:
    """None where a value is no tensor, or not known."""
    found = value_of(node)
    return found.requires_grad if isinstance(found, torch.Tensor) else None


def _edit(shadow: Shadow, program: Program, replacement: Replacement) -> None:
    program.before(replacement.place)
    operation = replacement.emit(program)
    recorded = any(shadow.grad[n] for n in replacement.outputs)
    learns = recorded and any(_requires_grad(n) for n in replacement.inputs)
    dead = []
    for out, make in replacement.outputs.items():
        new = make(program, operation)
        if learns and _requires_grad(out) is False:  # of an operation with others, which do
            new = program.call("detach", new)
        program.replace(out, new)
        dead.append(out)
    while dead:
        node = dead.pop()
        if compat_fx.is_erased(node) or not (node in shadow.pure or node in replacement.drawn):
            continue
        if any(user.target is not _ASSERTION for user in node.users):
            continue
        for user in list(node.users):
            program.graph.erase_node(user)
        sources = node.all_input_nodes
        program.graph.erase_node(node)
        dead.extend(sources)
    fired(replacement.lowering, replacement.chosen, replacement.site, replacement.reason)
