"""Softmaxes over a dimension in the middle whose classes lie last in memory: moved there.

``F.cross_entropy(logits.transpose(1, 2), y)`` asks for classes in dimension 1, which is where they
are in the view alone. In a joint graph everything between that view and the gradient, which is
transposed back, is written with the classes last instead: what is pointwise, reductions, gathers
and scatters along them. The elements and their order in memory stay as they were; the views cancel,
and the lowerings behind find the rows that they know. A graph in which something else sees a value
of that size in the other order is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from inductor_ext.lowerings.loss_rows import NoForm, by_number, check_size
from inductor_ext.lowerings.softmax_cores import (
    SUMS,
    Core,
    cores,
    is_long,
    keeps_value,
    reduced,
    why_not,
)

from inductor_ext import choosing, compat, compat_fx, editing, matching, registry, report
from inductor_ext.editing import Editor, same_size, value

aten, prims = torch.ops.aten, torch.ops.prims
NAME = "classes_last"
DEPTH = 64

# They may add or drop dimensions of size 1.
_RESHAPED = {
    aten.view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}
_REDUCTIONS = {aten.amax.default, aten.sum.dim_IntList, aten.mean.dim}
_COPIES = {aten.clone.default, aten.alias.default, aten.detach.default}
SAME = {*_COPIES, aten.tanh.default}


def _moved(shape: Any, along: int) -> list[Any]:
    """A shape, or a list with an entry for each dimension, with one moved to the end."""
    moved = list(shape)
    moved.append(moved.pop(along))
    return moved


def moved_order(rank: int, along: int) -> list[int]:
    return _moved(range(rank), along)


def _source(core: Core) -> tuple[Any, int] | None:
    """(the view that moves the classes, to which dimension) of a softmax's logits."""
    node = core.x
    while node.op == "call_function":
        if node.target is aten.permute.default:
            rank, along = value(node).dim(), core.dim
            dims = [d % rank for d in node.args[1]]
            last = [d for d in dims if d != rank - 1]
            moves = along != rank - 1 and dims[along] == rank - 1 and last == sorted(last)
            return (node, along) if moves else None
        by = by_number(node)
        if by is not None:
            node = by[0]
        elif keeps_value(node) or node.target in SAME:
            node = node.args[0]
        else:
            return None
    return None


class _Images:
    """Nodes of a graph, with the classes last.

    ``of(node, along)`` is the image of a node whose dimension ``along`` the classes have, made in
    front of it. Raises NoForm for what can't be written so.
    """

    def __init__(self, graph: Any) -> None:
        self.graph, self.editor = graph, Editor(graph)
        self.made: dict[Any, tuple[Any, int]] = {}
        self._view: Any = None
        self._base: Any = None
        self._operands: dict[Any, Any] = {}  # what is read beside them, and stays as it is

    def start(self, view: Any, along: int) -> None:
        """Begin at the view that moves the classes away from the end."""
        self._view, self._base = view, view.args[0]
        self.made[view] = self._base, along

    def start_strided(self, logits: Any, along: int) -> Any:
        """Begin at logits in memory, whose classes are strided there: their view with the classes
        last is returned."""
        self.editor.before(_behind(logits))
        view = self.call(aten.permute.default, logits, moved_order(value(logits).dim(), along))
        self._view, self._base = logits, view
        self.made[logits] = view, along
        return view

    def back(self, node: Any) -> Any:
        """A value in the program's order again, as a view of its image."""
        image, along = self.made[node]
        order = moved_order(value(node).dim(), along)
        return self.call(aten.permute.default, image, [order.index(d) for d in range(len(order))])

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        return self.editor.call(target, *args, **kwargs)

    def of(self, node: Any, along: int, depth: int = 0) -> Any:
        """The image of an operand."""
        if node in self.made:
            image, own = self.made[node]
            if own != along:
                raise NoForm("its classes are in two dimensions")
            return image
        if (node, along) in self._operands:
            return self._operands[node, along]
        if depth > DEPTH:
            raise NoForm("its expression is too deep")
        shape = value(node).shape
        narrow = [s for i, s in enumerate(shape) if i != along and not same_size(s, 1)]
        reduces = node.target in _REDUCTIONS and along in _dims_of(node)
        if not reduces and (same_size(shape[along], 1) or not narrow):  # no element moves
            image = self.call(aten.view.default, node, self.sizes(_moved(shape, along)))
        else:
            found = self.image(node, along, depth + 1)
            if found is None:
                raise NoForm(f"{node} lies otherwise in memory")
            image = found
        self._operands[node, along] = image
        return image

    def sizes(self, shape: list[Any]) -> list[Any]:
        """Sizes for an argument; dynamic ones are read off the logits."""
        sizes = []
        for size in shape:
            if not isinstance(size, int):
                known = value(self._base).shape
                at = [i for i, s in enumerate(known) if same_size(s, size)]
                if not at:
                    raise NoForm("its sizes are not those of the logits")
                size = self.call(aten.sym_size.int, self._base, at[0])
            sizes.append(size)
        return sizes

    def read_lightly(self, node: Any) -> bool:
        """Whether a node reads nothing in the other order but the logits, converted maybe."""
        return all(map(self._is_light, (s for s in node.all_input_nodes if s in self.made)))

    def _is_light(self, node: Any) -> bool:
        while node in self.made and (keeps_value(node) or node.target in _COPIES):
            node = node.args[0]
        return node is self._view

    def image(self, node: Any, along: int, depth: int = 0) -> Any:
        """The image of a node by those of its operands; None where there is no such."""
        target, args = node.target, node.args
        rank = value(node).dim()
        if node.op != "call_function":
            return None
        if target is aten.expand.default:
            inner = self._operand(args[0], rank, along, depth)
            return self.call(target, inner, self.sizes(_moved(value(node).shape, along)))
        if target is aten.full.default:
            sizes = self.sizes(_moved(value(node).shape, along))
            return self.call(target, sizes, *args[1:], **node.kwargs)
        if target in _RESHAPED:
            return self._reshaped(node, along, depth)
        if target is aten.clone.default:
            return self.of(args[0], along, depth)
        if matching.is_pointwise(node) or target is prims.convert_element_type.default:
            return self._pointwise(node, rank, along, depth)
        if target in _REDUCTIONS and len(args) > 2 and args[2]:
            inner = self.of(args[0], along, depth)
            rest = args[3:]
            return self.call(target, inner, self._dims(node, rank, along), True, *rest,
                             **node.kwargs)  # fmt: skip
        if target in (aten.gather.default, aten.scatter_add.default, aten.scatter.src,
                      aten.scatter.value) and args[1] % rank == along:  # fmt: skip
            inner = [self.of(a, along, depth) if isinstance(a, torch.fx.Node) else a
                     for a in (args[0], *args[2:])]  # fmt: skip
            return self.call(target, inner[0], rank - 1, *inner[1:], **node.kwargs)
        return None

    def _dims(self, node: Any, rank: int, along: int) -> list[int]:
        order = moved_order(rank, along)
        return sorted(order.index(d) for d in _dims_of(node))

    def _pointwise(self, node: Any, rank: int, along: int, depth: int) -> Any:
        def put(arg: Any) -> Any:
            if not isinstance(arg, torch.fx.Node) or not isinstance(value(arg), torch.Tensor):
                return arg
            return self._operand(arg, rank, along, depth)

        args = tuple(put(a) for a in node.args)
        if any(isinstance(a, (list, tuple, dict)) for a in args):
            return None
        return self.call(node.target, *args, **{k: put(v) for k, v in node.kwargs.items()})

    def _operand(self, node: Any, rank: int, along: int, depth: int) -> Any:
        """The image of an operand that is broadcast to ``rank`` dimensions."""
        tensor = value(node)
        own = along - (rank - tensor.dim())
        if tensor.dim() == 0 or all(same_size(s, 1) for s in tensor.shape):
            return node
        if own >= 0:
            return self.of(node, own, depth)
        return self.call(aten.unsqueeze.default, node, -1)

    def _reshaped(self, node: Any, along: int, depth: int) -> Any:
        """A view that adds or drops dimensions of size 1."""
        source, shape = node.args[0], value(node).shape
        sizes = value(source).shape
        for at in range(len(sizes)):
            if _kept(sizes, shape, at) == along:
                inner = self.of(source, at, depth)
                return self.call(aten.view.default, inner, self.sizes(_moved(shape, along)))
        kept = [(i, s) for i, s in enumerate(sizes) if not same_size(s, 1)]
        new = [(i, s) for i, s in enumerate(shape) if not same_size(s, 1)]
        if len(kept) != len(new) or not all(
            same_size(a, b) for (_, a), (_, b) in zip(kept, new, strict=True)
        ):
            return None
        own = next((i for (i, _), (j, _) in zip(kept, new, strict=True) if j == along), None)
        if own is None and source in self.made:  # the classes are one entry, wherever it is
            own = self.made[source][1]
        if own is None:
            return None
        inner = self.of(source, own, depth)
        return self.call(aten.view.default, inner, self.sizes(_moved(shape, along)))


def _dims_of(node: Any) -> list[int]:
    dims = node.args[1] if len(node.args) > 1 else None
    rank = value(node.args[0]).dim()
    dims = [dims] if isinstance(dims, int) else list(dims or range(rank))
    return [d % rank for d in dims]


def _classes(images: _Images, node: Any) -> int | None:
    """The dimension of a node's result that the classes of its operands have; None if it has
    none. Raises NoForm where that is not known."""
    rank = value(node).dim()
    for source in node.all_input_nodes:
        if source not in images.made:
            continue
        along, tensor = images.made[source][1], value(source)
        if node.target in SUMS and not (len(node.args) > 2 and node.args[2]):
            return None
        if node.target in _RESHAPED:
            return _place(tensor.shape, value(node).shape, along)
        if tensor.dim() == rank:
            return along
        if matching.is_pointwise(node) or node.target is aten.expand.default:
            return along + rank - tensor.dim()
        raise NoForm(f"{node} changes its dimensions")
    return None


def _kept(sizes: Any, shape: Any, along: int) -> int | None:
    """Where a dimension goes in a view that merges or splits only what lies on one side of it;
    None where that is not known."""
    if not all(isinstance(s, int) for s in (*sizes, *shape)) or sizes[along] == 1:
        return None
    before, after = math.prod(sizes[:along]), math.prod(sizes[along + 1 :])
    for i, size in enumerate(shape):
        if size == sizes[along] and math.prod(shape[:i]) == before:
            return i if math.prod(shape[i + 1 :]) == after else None
    return None


def _place(sizes: Any, shape: Any, along: int) -> int | None:
    """Where a dimension goes as others are added, dropped or merged; None: it is dropped."""
    kept = _kept(sizes, shape, along)
    if kept is not None:
        return kept
    if same_size(sizes[along], 1):
        before = sum(not same_size(s, 1) for s in sizes[:along])
        seen = 0
        for i, s in enumerate(shape):
            if seen == before and same_size(s, 1):
                return i
            seen += not same_size(s, 1)
        return None
    rank = sum(not same_size(s, 1) for s in sizes[:along])
    places = [i for i, s in enumerate(shape) if not same_size(s, 1)]
    if rank >= len(places) or not same_size(shape[places[rank]], sizes[along]):
        raise NoForm("a view takes its classes apart")
    return places[rank]


def _leave(images: _Images, node: Any, along: int | None) -> Callable[[], None] | None:
    """How a node reads images, which itself is none: what is to be done; None if it can't."""
    sources = [s for s in node.all_input_nodes if s in images.made]
    if node.target is aten.permute.default:
        (source,) = sources
        image, own = images.made[source]
        rank = value(node).dim()
        back = [d % rank for d in node.args[1]]
        if back == moved_order(rank, own):
            return lambda: node.replace_all_uses_with(image)
        return None
    if node.target in SUMS:
        image, own = images.made[node.args[0]]
        dims = reduced(node)
        keeps = len(node.args) > 2 and node.args[2]
        if keeps or own not in dims:
            return None
        rank = value(node.args[0]).dim()
        order = moved_order(rank, own)
        mapped = sorted(order.index(d) for d in dims)

        def put() -> None:
            node.args = (image, mapped, *node.args[2:]) if len(node.args) > 1 else (image,)

        return put
    if along is None and node.target in _RESHAPED:
        image, _ = images.made[node.args[0]]

        def squeeze() -> None:
            images.editor.before(node)
            shape = images.sizes(list(value(node).shape))
            node.replace_all_uses_with(images.call(aten.view.default, image, shape))

        return squeeze
    return None


def _behind(node: Any) -> Any:
    """The first node that may stand behind another."""
    behind = node.next
    while behind.op == "placeholder":
        behind = behind.next
    return behind


def _back(images: _Images, node: Any) -> Callable[[], None]:
    """Have a node read values in the program's order that are no longer computed so."""

    def put() -> None:
        images.editor.before(node)
        images.editor.forget()
        for source in dict.fromkeys(node.all_input_nodes):
            if source in images.made and not images._is_light(source):
                node.replace_input_with(source, images.back(source))

    return put


def rewrite_from(graph: Any, view: Any, along: int, strided: bool = False) -> None:
    """``strided``: ``view`` are logits in memory, and what leaves is transposed back."""
    images = _Images(graph)
    nodes = list(graph.nodes)
    if strided:
        images.start_strided(view, along)
    else:
        images.start(view, along)
    exits = []
    try:
        for node in nodes:
            if node in images.made or not any(s in images.made for s in node.all_input_nodes):
                continue
            if node.op == "output" or not isinstance(value(node), torch.Tensor):
                if images.read_lightly(node):
                    continue
                if strided:
                    exits.append((node, _back(images, node)))
                    continue
                what = "a result" if node.op == "output" else f"read by {node.target}"
                raise NoForm(f"a value in that order is {what}")
            if compat_fx.may_be_recomputed(node):
                raise NoForm("activation checkpointing computes it again in the backward")
            images.editor.before(node)
            image, exit_ = None, None
            try:
                place = _classes(images, node)
                if place is not None:
                    image = images.image(node, place)
                if image is not None:
                    images.made[node] = image, place  # type: ignore[assignment]
                    continue
                exit_ = _leave(images, node, place)
            except NoForm:
                if not images.read_lightly(node):
                    raise
            if exit_ is None and images.read_lightly(node):
                continue  # it stays beside them, and reads memory as before
            if exit_ is None and strided:
                exit_ = _back(images, node)
            if exit_ is None:
                raise NoForm(f"{node.target} reads it in that order")
            exits.append((node, exit_))
    except NoForm:
        images.editor.undo()
        raise
    old = [node for node in images.made if node is not view]
    images.editor.forget()
    for _, exit_ in exits:
        exit_()
    ended = [node for node, _ in exits if node.op != "output"]
    editing.erase_unused(graph, ended + old + ([] if strided else [view]))
    images.editor.drop_unused()
    _lay_out(graph, [image for image, _ in images.made.values()])


def _lay_out(graph: Any, changed: list[Any]) -> None:
    """Give what is computed from images the strides that it has now."""
    found = {node for node in changed if not compat_fx.is_erased(node)}
    for node in graph.nodes:
        if node in found or not any(source in found for source in node.all_input_nodes):
            continue
        if matching.is_pointwise(node) or node.target is prims.convert_element_type.default:
            arguments = torch.fx.node.map_arg((node.args, node.kwargs), value)
            with torch.no_grad():
                node.meta["val"] = node.target(*arguments[0], **arguments[1])
            found.add(node)


def rewrite(graph: Any) -> None:
    """The pass over a joint graph, or one without a gradient."""
    if not graph.find_nodes(op="call_function", target=aten.permute.default):
        return
    if not graph.find_nodes(op="call_function", target=aten.exp.default):
        return
    numbers = editing.Numbers(graph)
    for core in list(cores(graph, numbers)):
        if compat_fx.is_erased(core.x) or compat_fx.is_erased(core.total):
            continue
        if core.dim == value(core.x).dim() - 1 or not is_long(core.x, core.dim):
            continue
        found = _source(core)
        if found is None or why_not(core.x, core.dim) is not None:
            continue
        here = core.site()
        try:
            check_size(value(found[0]))
            if compat.ahead_of_time():
                raise NoForm("a C++ wrapper can't hold an operation in Python")
            rewrite_from(graph, *found)
        except NoForm as reason:
            choosing.leave(NAME, here, str(reason))
        else:
            why = "in memory they are: the views cancel"
            report.record(report.Decision(NAME, True, "classes last", why, here, "heuristic"))
    editing.check(graph)


registry.register(registry.Lowering(NAME, passes={"traced_joint": rewrite}))
