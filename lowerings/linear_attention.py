"""``linear_attention``: causal attention without a softmax, spelled with T x T scores, or with a
state for every token (``linear_attention_sums``).

    out = tril(scale q k^T) v

Found by structure in the graph in front of AOTAutograd and put into one operation, which needs no
scores: O(T) instead of O(T^2). The mask is a tril, a masked_fill or a where with 0, or a product
with zeros and ones, and must be made of ones in the program. Where tokens hold NaN or infinity,
their scores with earlier tokens are 0 here, and 0 times that, NaN, in the program.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
from inductor_ext.lowerings import linear_attention_sums
from inductor_ext.lowerings.attention_places import NoPlace
from inductor_ext.lowerings.linear_attention_sums import may_hold_states
from inductor_ext.lowerings.mhc_entries import aten, shape_of
from inductor_ext.lowerings.sites import (
    DTYPES,
    NoSite,
    Program,
    Replacement,
    apply,
    describe,
    leave,
    program_node,
)

from inductor_ext import compat, compat_fx, registry, shadow
from inductor_ext.ops import _linear_attention as operation

NAME = "linear_attention"
# Scores of fewer bytes stay in L2: the operation still was 1.1 to 4 times as fast on an H200, from
# 8 MB on, but by less than what the host takes to launch it.
LEAST_BYTES = 2**26
LEAST_TOKENS = 64
TIMED = torch.float16, torch.bfloat16
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_SAME = (*_VIEWS, aten.expand.default, aten.clone.default, aten.alias.default)


def may_hold_scores(graph: Any) -> bool:
    """Whether any value is [..., T, T] of many tokens; cheap, for the graphs that have none."""
    for node in graph.nodes:
        tensor = shadow.value_of(node)
        if isinstance(tensor, torch.Tensor) and 3 <= tensor.dim() <= 4:
            rows, columns = tensor.shape[-2:]
            if isinstance(rows, int) and isinstance(columns, int) and rows == columns >= 256:
                return True
    return False


def _source(node: Any) -> Any:
    """What a node is, in another shape of its leading dimensions; None for anything else."""
    if node.target not in _SAME or not isinstance(node.args[0], torch.fx.Node):
        return None
    source = node.args[0]
    before, after = shape_of(source), shape_of(node)
    if len(before) < 2 or before[-2:] != after[-2:]:
        return None
    return source if source.meta["val"].numel() == node.meta["val"].numel() else None


def _unwritten(seen: shadow.Shadow, node: Any) -> Any:
    """The node, which nothing in the graph writes to: what is written to has not one value."""
    if seen.is_mutated(node):
        raise NoSite(f"{node.name} is written to in this graph")
    return node


def _peeled(seen: shadow.Shadow, node: Any) -> Any:
    while (source := _source(_unwritten(seen, node))) is not None:
        node = source
    return node


def _number(value: Any) -> float | None:
    """A number, also as a tensor without dimensions that is filled with it."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, torch.fx.Node) and not value.meta["val"].dim():
        if value.target in (aten.full.default, aten.scalar_tensor.default):
            filled = value.args[1 if value.target is aten.full.default else 0]
            return float(filled) if isinstance(filled, (int, float)) else None
        if value.target is aten.zeros.default:
            return 0.0
    return None


_ONES = (aten.ones.default, aten.ones_like.default, aten.new_ones.default)
_FULL = (aten.full.default, aten.full_like.default)
_NOT = (aten.logical_not.default, aten.bitwise_not.default)


def triangle(seen: shadow.Shadow, node: Any) -> str:
    """ "lower" of a mask that is 1 where j <= i and 0 elsewhere, "upper" of its opposite, "ones",
    or "" for what is not known to be one of these; all of them [.., T, T]."""
    shape = shape_of(node)
    if seen.is_mutated(node) or len(shape) < 2 or shape[-1] != shape[-2]:
        return ""
    if node.target in _ONES:
        return "ones"
    if node.target in _FULL and node.args[1] in (1, True):
        return "ones"
    if not node.args or not isinstance(node.args[0], torch.fx.Node):
        return ""
    own = triangle(seen, node.args[0])
    if node.target in (aten.tril.default, aten.triu.default):
        diagonal = node.args[1] if len(node.args) > 1 else 0
        wanted = ("lower", 0) if node.target is aten.tril.default else ("upper", 1)
        return wanted[0] if own == "ones" and diagonal == wanted[1] else ""
    opposite = {"lower": "upper", "upper": "lower"}.get(own, "")
    if node.target in _NOT and node.meta["val"].dtype == torch.bool:
        return opposite
    if node.target is aten.eq.Scalar and node.args[1] == 0:
        return opposite
    if node.target is aten.ne.Scalar and node.args[1] == 0:
        return own
    keeps = (aten._to_copy.default, aten.unsqueeze.default, aten.detach.default, *_SAME)
    if node.target in keeps and shape_of(node)[-2:] == shape_of(node.args[0])[-2:]:
        return own
    return ""


class _Scores:
    """The product q k^T that is masked and scaled, reading down from a value [..., T, T]."""

    def __init__(self, seen: shadow.Shadow, node: Any) -> None:
        self.seen = seen
        self.scale, self.masked, self.product = 1.0, False, None
        while node is not None and self.product is None:
            if not self.masked and seen.is_mutated(node):
                return  # not known to be scores
            node = self._step(_peeled(seen, node))

    def _step(self, node: Any) -> Any:
        if node.target is aten.bmm.default:
            self.product = node
            return None
        if not node.args or not isinstance(node.args[0], torch.fx.Node):
            return None
        first, *rest = node.args
        if node.target is aten.tril.default and rest in ([], [0]):
            return self._mask(first)
        if node.target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
            factor = _number(rest[0])
            if factor:
                divided = node.target in (aten.div.Tensor, aten.div.Scalar)
                self.scale *= 1 / factor if divided else factor
                return first
        if node.target is aten.mul.Tensor and isinstance(rest[0], torch.fx.Node):
            for one, other in ((first, rest[0]), (rest[0], first)):
                if (
                    triangle(self.seen, other) == "lower"
                    and one.meta["val"].dtype == node.meta["val"].dtype
                ):
                    return self._mask(one)
        if node.target is aten.masked_fill.Scalar and _number(rest[1]) == 0:
            return self._mask(first) if triangle(self.seen, rest[0]) == "upper" else None
        if node.target in (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf):
            mask = triangle(self.seen, first)
            kept, zero = {"lower": rest, "upper": rest[::-1]}.get(mask, (None, None))
            if isinstance(kept, torch.fx.Node) and _number(zero) == 0:
                return self._mask(kept)
        return None

    def _mask(self, node: Any) -> Any:
        self.masked = True
        return node


def _heads(seen: shadow.Shadow, node: Any, dims: int) -> Any:
    """The node of the program with ``dims`` dimensions that an operand of a product is; or None."""
    while node is not None:
        if node in seen.first and node.meta["val"].dim() == dims:
            return node
        node = _source(_unwritten(seen, node))
    return None


def _result(seen: shadow.Shadow, node: Any) -> Any:
    while node not in seen.first:
        users = [user for user in node.users if user.target in _VIEWS]
        if len(users) != 1 or len(node.users) != 1:
            raise NoSite("the result is used inside a function of torch")
        node = users[0]
    return node


def _check(tensor: torch.Tensor, sizes: Any, dk: Any, dv: Any) -> None:
    """Where the operation can run on such tensors, and is known to be faster. Raises NoSite."""
    if tensor.dtype not in TIMED:
        raise NoSite(f"in {str(tensor.dtype).removeprefix('torch.')} the operation was not timed")
    if not compat_fx.writes_triton(tensor.device):
        raise NoSite("it is not on a card")
    if any(not compat.is_static(s) for s in sizes):
        raise NoSite("its sizes are symbolic, and at few tokens scores are faster")
    if compat.ahead_of_time():
        raise NoSite("a C++ wrapper can't hold an operation in Python")
    if 0 in sizes:
        raise NoSite("a size is 0")
    if max(int(dk), int(dv)) > operation.LARGEST:
        raise NoSite(f"its heads are of more than {operation.LARGEST}")


def _of_sums(seen: shadow.Shadow, node: Any) -> Replacement | None:
    """A state for every token instead of scores."""
    site = linear_attention_sums.find(seen, node)
    if site is None:
        return None
    state = site.state.meta["val"]
    dk, dv = site.axes.size(site.keys), site.axes.size(site.values)
    _check(state, shape_of(site.state), dk, dv)
    if (size := state.numel() * state.element_size()) < LEAST_BYTES:
        raise NoSite(f"its states are {size} bytes: sums are as fast")
    if site.axes.size(site.tokens) < LEAST_TOKENS:
        raise NoSite(f"the sums are of fewer than {LEAST_TOKENS} tokens, which is a chunk")
    return linear_attention_sums.replacement(seen, site, NAME)


def _of_scores(seen: shadow.Shadow, node: Any) -> Replacement | None:
    if node.target is not aten.bmm.default:
        return None
    scores = _Scores(seen, node.args[0])
    if scores.product is None or not scores.masked or scores.product is node:
        return None
    _unwritten(seen, node)
    return _replacement(seen, node, scores)


def _replacement(seen: shadow.Shadow, product: Any, scores: _Scores) -> Replacement:
    inner: Any = scores.product
    result = _result(seen, product)
    operands = *inner.args[:2], product.args[1]
    q, turned, v = (_heads(seen, n, result.meta["val"].dim()) for n in operands)
    if q is None or turned is None or v is None:
        raise NoSite("q, k or v is computed inside a function of torch")
    sizes, of_keys, of_values = shape_of(q), shape_of(turned), shape_of(v)
    if len(sizes) not in (3, 4):
        raise NoSite(f"q is expected as [B, H, T, D] or [B, T, D], got {len(sizes)} dimensions")
    if sizes[:-2] != of_keys[:-2] or sizes[:-2] != of_values[:-2]:
        raise NoSite("q, k and v have different heads")
    if sizes[-2] != of_keys[-1]:
        raise NoSite("there are more keys than queries, or fewer")
    tensors = [n.meta["val"] for n in (q, turned, v, result)]
    if len({t.dtype for t in tensors}) > 1 or tensors[0].dtype not in DTYPES:
        raise NoSite("q, k and v are expected in one of fp16, bf16 and fp32")
    _check(tensors[0], (*sizes, *of_values), sizes[-1], of_values[-1])
    tokens, dk = (int(s) for s in sizes[-2:])
    size = tensors[0].numel() // dk * tokens * tensors[0].element_size()
    if size < LEAST_BYTES:
        raise NoSite(f"its scores are {size} bytes: products are as fast")
    if tokens < 2 * max(dk, int(of_values[-1])):
        raise NoSite(f"its states are as large as scores of {tokens} tokens")
    inputs = [program_node(seen, n) for n in (q, turned, v)]
    out = seen.first[result]

    def emit(program: Program) -> Any:
        own, keys, values = inputs
        keys = program.call("transpose", keys, -1, -2)
        if len(sizes) == 3:
            own, keys, values = (program.call("unsqueeze", n, 1) for n in (own, keys, values))
        target = torch.ops.inductor_ext.linear_attention.default
        both = program.call(target, own, keys, values, None, None, scores.scale, 0)
        found = program.call(operator.getitem, both, 0)
        return program.call("squeeze", found, 1) if len(sizes) == 3 else found

    made = {out: lambda program, found: program.shaped(found, out)}
    return Replacement(
        NAME, NAME, describe(NAME, q), "no scores of T x T", list(dict.fromkeys(inputs)), made,
        _inside(seen, out, inputs), emit,
    )  # fmt: skip


def _inside(seen: shadow.Shadow, result: Any, inputs: list[Any]) -> set[Any]:
    """The values of scores on the way."""
    size = shadow.value_of(result).numel() // shadow.value_of(result).shape[-1]
    inside: set[Any] = set()
    stack = list(result.all_input_nodes)
    while stack:
        node = stack.pop()
        tensor = shadow.value_of(node)
        if node in inside or node in inputs or not isinstance(tensor, torch.Tensor):
            continue
        square = tensor.dim() >= 3 and tensor.shape[-1] == tensor.shape[-2]
        if (
            square
            and tensor.numel() == size * tensor.shape[-1]
            and not triangle(seen, seen.of[node])
        ):
            inside.add(node)
            stack.extend(node.all_input_nodes)
    return inside


def rewrite(graph: Any) -> None:
    """The pass over a graph in front of AOTAutograd."""
    forms = [
        form for form, may in ((_of_scores, may_hold_scores), (_of_sums, may_hold_states))
        if may(graph)
    ]  # fmt: skip
    if not forms:
        return
    try:
        seen = shadow.trace(graph)
    except shadow.NotFollowed:
        return
    found: list[Replacement] = []
    for node, form in itertools.product(seen.graph.nodes, forms):
        try:
            if (replacement := form(seen, node)) is not None:
                found.append(replacement)
        except (NoSite, NoPlace) as reason:
            leave(NAME, describe(NAME, node), str(reason))
        except Exception as error:
            registry.failed(NAME, describe(NAME, node), error)
    apply(seen, graph, found)


registry.register(registry.Lowering(NAME, passes={"pre_grad": rewrite}))
