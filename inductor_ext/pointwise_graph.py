"""Building fx graphs of pointwise aten operations in one canonical form.

Equal operations are one node; constants are folded, operands of commutative operations ordered,
conversions that change nothing dropped; ``where``, comparisons and truth values are written one
way. So two spellings of a function are often one graph. Every node's ``meta["val"]`` is a meta
tensor with its dtype and the axes that it varies along (size 1 along the others).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import compat_fx, pointwise_text
from .pointwise_text import CONVERSIONS, FILLED, SAME, NotPointwise
from .pointwise_values import Const, Value, dtype_of, in_order, leaves, packet

aten = torch.ops.aten

# Places times less fit into int32, up to a million of them.
LARGEST_FACTOR = 1 << 11
_INFIX = (aten.add, aten.sub, aten.mul, aten.div)
_COMMUTATIVE = {
    aten.add, aten.mul, aten.eq, aten.ne, aten.maximum, aten.minimum,
    aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor,
}  # fmt: skip
_LOGICAL = {
    aten.logical_and: aten.bitwise_and,
    aten.logical_or: aten.bitwise_or,
    aten.logical_xor: aten.bitwise_xor,
}
_SWAPPED = {aten.lt: aten.gt, aten.le: aten.ge, aten.gt: aten.lt, aten.ge: aten.le}
_OPPOSITE = {aten.lt: aten.ge, aten.le: aten.gt, aten.gt: aten.le, aten.ge: aten.lt}
_COMPARISONS = {aten.eq, aten.ne, *_SWAPPED}
# Overloads by which operands are numbers: (none, the second, the first).
_OVERLOADS = {
    **{op: (op.Tensor, op.Tensor, op.Tensor) for op in _INFIX},
    **{op: (op.Tensor, op.Scalar, None) for op in _COMPARISONS},
    aten.pow: (aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar, aten.pow.Scalar),
    aten.remainder: (aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor),
    aten.maximum: (aten.maximum.default, aten.clamp_min.default, None),
    aten.minimum: (aten.minimum.default, aten.clamp_max.default, None),
}


class Builder:
    """``input`` adds inputs, ``call`` an operation's result.

    ``like`` names the input whose shape a constant tensor takes where no number will do.
    ``narrow`` names inputs of int64 that are int32 here, and with them what is made of them alone.
    """

    def __init__(self, like: str, narrow: frozenset[str] = frozenset()) -> None:
        self.graph = torch.fx.Graph()
        self.inputs: dict[str, Any] = {}
        self._like, self._narrow = like, narrow
        self._known: dict[Any, Any] = {}

    def input(self, name: str, val: Tensor) -> Any:
        """A new input like the meta tensor ``val``."""
        node = self.graph.placeholder(name)
        if name in self._narrow:
            val = val.to(torch.int32)
        node.meta.update(val=val, key=(0, name), leaves=frozenset({name}))
        self.inputs[name] = node
        return node

    def merge(self, graph: Any, values: Mapping[Any, Value], typed: bool = False) -> list[Value]:
        """The results of a graph whose placeholders are ``values`` here; ``typed``: its nodes have
        values, whose dtypes ours must have. Raises NotPointwise."""
        known: dict[Any, Value] = dict(values)
        results: Any = []
        for node in graph.nodes:
            if node.op == "output":
                results = node.args[0]
            elif node.op != "placeholder" and node.users:
                known[node] = self._merged(node, known, typed)
        results = results if isinstance(results, (list, tuple)) else [results]
        return [known[r] if isinstance(r, torch.fx.Node) else r for r in results]

    def _merged(self, node: Any, known: dict[Any, Value], typed: bool) -> Value:
        if node.op == "get_attr":
            tensor = getattr(node.graph.owning_module, node.target)
            number = compat_fx.known_number(tensor)
            if number is None:
                raise NotPointwise(f"{node.target} is a tensor from outside")
            return Const(number, tensor.dtype if tensor.dim() else None)
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            raise NotPointwise(f"{node.format_node()} is no operation of tensors")
        val = node.meta.get("val")
        if node.target in FILLED:
            number, dtype = FILLED[node.target](node), node.kwargs.get("dtype")
            if isinstance(number, torch.fx.Node):
                raise NotPointwise(f"{node.target} is filled with what is not a number")
            if isinstance(val, Tensor):
                return Const(number, val.dtype if val.dim() else None)
            return Const(number, dtype)
        args = [known[a] if isinstance(a, torch.fx.Node) else a for a in node.args]
        kwargs = {
            n: known[a] if isinstance(a, torch.fx.Node) else a for n, a in node.kwargs.items()
        }
        if typed and node.target in SAME:
            _check_same(node)
        result = self.call(node.target, *args, **kwargs)
        if typed and isinstance(val, Tensor) and dtype_of(result) not in (None, val.dtype):
            raise NotPointwise(f"{node.target} gives {val.dtype} of operands of unusual dtypes")
        return result

    def take(self, value: Value, known: dict[Any, Value] | None = None) -> Value:
        """A value of another builder, whose inputs have the names of inputs here."""
        if isinstance(value, Const):
            return value
        known = {} if known is None else known
        for node in in_order(value):
            if node in known:
                continue
            if node.op == "placeholder":
                known[node] = self.inputs[str(node.target)]
            elif node.target in FILLED:
                known[node] = Const(node.args[1], node.kwargs["dtype"])
            else:
                args = [known[a] if isinstance(a, torch.fx.Node) else a for a in node.args]
                known[node] = self.call(node.target, *args, **node.kwargs)
        return known[value]

    # --- operations ---

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Value:
        """The value of an operation of nodes, Consts and Python numbers. Raises NotPointwise."""
        kind = op.overloadpacket
        if op in SAME:
            return args[0]
        if op in CONVERSIONS:
            dtype = kwargs.get("dtype", args[1] if len(args) > 1 else None)
            return args[0] if dtype is None else self.convert(args[0], dtype)
        pointwise_text.operator(op)
        names = [a.name for a in op._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        given = {n: a for n, a in given.items() if a is not None}
        alpha, mode = given.pop("alpha", 1), given.pop("rounding_mode", None)
        operands = [Const(a) if isinstance(a, (bool, int, float)) else a for a in given.values()]
        if kind is aten.rsub:
            kind, operands = aten.sub, operands[::-1]
            if alpha != 1:
                operands[1] = self.operation(aten.mul, operands[1], Const(alpha))
        elif alpha != 1:
            operands[1] = self.operation(aten.mul, operands[1], Const(alpha))
        if kind is aten.masked_fill:
            into, mask, fill = operands
            fill = Const(fill.value) if isinstance(fill, Const) else fill
            return self.operation(aten.where, mask, fill, into)
        if mode == "floor":
            return self.operation(aten.floor_divide, *operands)
        if mode is not None:
            raise NotPointwise("division that truncates has no text")
        if kind in (aten.clamp, aten.clamp_min, aten.clamp_max):
            low = given.get("min") if kind is not aten.clamp_max else None
            high = given.get("max") if kind is not aten.clamp_min else None
            for bound, pick in ((low, aten.maximum), (high, aten.minimum)):
                if bound is not None:
                    bound = Const(bound) if isinstance(bound, (int, float)) else bound
                    operands[0] = self.operation(pick, operands[0], bound)
            return operands[0]
        return self.operation(kind, *operands, op=op)

    def operation(self, kind: Any, *operands: Value, op: Any = None) -> Value:
        """The value of an operation of nodes and Consts; ``op``: the overload, where it is not one
        of the usual binary ones."""
        if kind in _LOGICAL:
            operands = tuple(self._truth(a) for a in operands)
            kind = _LOGICAL[kind]
        if kind is aten.logical_not:
            return self.invert(self._truth(operands[0]))
        truths = all(dtype_of(a) is torch.bool or _is_truth(a) for a in operands)
        if kind is aten.mul and truths:
            kind = aten.bitwise_and
        if kind is aten.bitwise_not and truths:
            return self.invert(operands[0])
        if all(isinstance(a, Const) for a in operands):
            return self._folded(kind, operands, op)
        if kind is aten.where:
            return self._where(*operands)
        if kind in (aten.gt, aten.ge) and not isinstance(operands[1], Const):
            kind, operands = _SWAPPED[kind], operands[::-1]
        elif kind in _COMPARISONS and isinstance(operands[0], Const):
            kind, operands = _SWAPPED.get(kind, kind), operands[::-1]
        if kind in _COMMUTATIVE:
            operands = tuple(sorted(operands, key=_order))
        if kind is aten.mul and len(operands) == 2:
            for condition, other in (operands, operands[::-1]):
                if dtype_of(condition) == torch.bool and self._is_finite(other):
                    dtype = self._promoted(operands)
                    return self._where(condition, self.convert(other, dtype), Const(0.0, dtype))
        simple = self._simplified(kind, *operands)
        if simple is not None:
            return simple
        spread = self._into_where(kind, operands, op)
        return self._typed(kind, operands, op) if spread is None else spread

    def convert(self, value: Value, dtype: torch.dtype, always: bool = False) -> Value:
        """A value in a dtype."""
        if isinstance(value, Const):
            number = torch.full((), value.value, dtype=value.dtype or _own(value.value)).to(dtype)
            return Const(number.item(), dtype)
        if dtype_of(value) == dtype:
            return value
        if dtype == torch.bool:
            return self.operation(aten.ne, value, Const(0))
        narrow = dtype_of(value) == torch.int32 and leaves(value) <= self._narrow
        if dtype == torch.int64 and narrow and not always:
            return value
        if dtype_of(value) == torch.bool and dtype.is_floating_point:
            return self._where(value, Const(1.0, dtype), Const(0.0, dtype))
        if packet(value) is aten.where and dtype.is_floating_point:
            condition, *branches = self._operands(value)
            if all(isinstance(b, Const) for b in branches):
                branches = [Const(b.value, dtype_of(value)) for b in branches]
                return self._where(condition, *(self.convert(b, dtype) for b in branches))
        if packet(value) is aten._to_copy and _keeps(
            value.args[0].meta["val"].dtype, dtype_of(value)
        ):
            return self.convert(value.args[0], dtype)
        return self._node(aten._to_copy.default, (value,), {"dtype": dtype})

    def invert(self, value: Value) -> Value:
        """The opposite of a truth value."""
        if isinstance(value, Const):
            return Const(not value.value)
        kind = packet(value)
        if kind is aten.logical_not:
            return value.args[0]
        if kind in (aten.eq, aten.ne):
            return self.operation(aten.ne if kind is aten.eq else aten.eq, *self._operands(value))
        if kind in _OPPOSITE and not any(
            d is not None and d.is_floating_point for d in map(dtype_of, self._operands(value))
        ):
            return self.operation(_OPPOSITE[kind], *self._operands(value))
        return self._node(aten.logical_not.default, (value,), {})

    def _truth(self, value: Value) -> Value:
        return self.convert(value, torch.bool)

    def _operands(self, node: Any) -> list[Value]:
        return [self.constant(a) for a in node.args]

    def constant(self, arg: Any) -> Value:
        """An argument of a node of this graph as a node or a Const."""
        if isinstance(arg, (bool, int, float)):
            return Const(arg)
        if isinstance(arg, torch.fx.Node) and arg.target is aten.full_like.default:
            return Const(arg.args[1], arg.kwargs["dtype"])
        return arg

    def _where(self, condition: Value, a: Value, b: Value) -> Value:
        condition = self._truth(condition)
        if isinstance(condition, Const):
            dtype = self._promoted((a, b))
            return self.convert(a if condition.value else b, dtype)
        if packet(condition) is aten.logical_not or packet(condition) is aten.ne:
            return self._where(self.invert(condition), b, a)
        if all(dtype_of(v) == torch.bool or _is_truth(v) for v in (a, b)):
            yes = self.operation(aten.bitwise_and, condition, self._truth(a))
            no = self.operation(aten.bitwise_and, self.invert(condition), self._truth(b))
            return self.operation(aten.bitwise_or, yes, no)
        if a == b:
            return a
        numbers = isinstance(a, Const), isinstance(b, Const)
        op = {
            (False, False): aten.where.self,
            (False, True): aten.where.ScalarOther,
            (True, False): aten.where.ScalarSelf,
            (True, True): aten.where.Scalar,
        }[numbers]
        return self._checked(op, aten.where.self, (condition, a, b))

    def _simplified(self, kind: Any, *operands: Value) -> Value | None:
        """What needs no operation, or a simpler one."""
        first, last = operands[0], operands[-1]
        if kind in (aten.bitwise_and, aten.bitwise_or) and first == last:
            return first
        if kind is aten.neg and packet(first) is aten.neg:
            return first.args[0]
        if len(operands) != 2:
            return None
        if kind is aten.pow and isinstance(first, Const) and first.value > 0:
            log = Const(math.log2(first.value))
            return self.call(aten.exp2.default, self.operation(aten.mul, last, log))
        if not isinstance(last, Const):
            return None
        number, dtype = last.value, self._promoted(operands)
        if dtype == torch.bool and kind in (aten.bitwise_and, aten.bitwise_or):
            return first if bool(number) == (kind is aten.bitwise_and) else Const(bool(number))
        if kind is aten.sub and not isinstance(number, bool) and dtype != torch.uint8:
            return self.operation(aten.add, first, Const(-number, last.dtype))
        if (kind is aten.add and number == 0) or (kind is aten.mul and number == 1):
            return self.convert(first, dtype)
        if dtype_of(first) != torch.float32:
            return None
        if kind is aten.div and number != 0 and math.isfinite(1 / number):
            return self.operation(aten.mul, first, Const(1 / number, last.dtype))
        if kind is aten.mul and packet(first) is aten.mul:
            a, factor = self._operands(first)
            if isinstance(factor, Const) and math.isfinite(factor.value * number):
                return self.operation(aten.mul, a, Const(factor.value * number))
        if kind is aten.mul and packet(first) is aten.neg:
            return self.operation(aten.mul, first.args[0], Const(-number, last.dtype))
        return None

    def _into_where(self, kind: Any, operands: tuple[Value, ...], op: Any) -> Value | None:
        """f(where(c, 1, 0), 2) is where(c, f(1, 2), f(0, 2))."""
        nodes = [i for i, a in enumerate(operands) if not isinstance(a, Const)]
        if len(nodes) != 1 or packet(operands[nodes[0]]) is not aten.where:
            return None
        condition, *branches = self._operands(operands[nodes[0]])
        if kind not in (*_INFIX, aten.neg) or not all(isinstance(b, Const) for b in branches):
            return None
        dtype = dtype_of(operands[nodes[0]])
        results = []
        for branch in branches:
            given = list(operands)
            given[nodes[0]] = Const(branch.value, dtype)
            results.append(self._folded(kind, tuple(given), op))
        return self._where(condition, *results)

    def _is_finite(self, value: Value) -> bool:
        """Whether a value is surely a finite floating-point number: made of constants."""
        if isinstance(value, Const):
            return isinstance(value.value, float) and math.isfinite(value.value)
        if packet(value) is not aten.where or not dtype_of(value).is_floating_point:  # type: ignore[union-attr]
            return False
        branches = [Const(float(a)) if isinstance(a, (int, float)) else a for a in value.args[1:]]
        return all(self._is_finite(self.constant(b)) for b in branches)

    def _folded(self, kind: Any, operands: tuple[Value, ...], op: Any) -> Const:
        tensors = [
            torch.full((1,), a.value, dtype=a.dtype)
            if a.dtype is not None
            else torch.full((), a.value, dtype=_own(a.value))
            for a in operands
        ]
        op = _OVERLOADS[kind][0] if kind in _OVERLOADS else op or kind.default
        result = (aten.where.self if kind is aten.where else op)(*tensors)
        return Const(result.item(), result.dtype if result.dim() else None)

    # --- typing ---

    def _promoted(self, operands: tuple[Value, ...]) -> torch.dtype:
        parts = [_stand_in(a) for a in operands]
        dtype = parts[0].dtype if len(parts) == 1 else torch.result_type(*parts[:2])
        return dtype

    def _typed(self, kind: Any, operands: tuple[Value, ...], op: Any) -> Any:
        """The node of an operation, its operands converted where a number promotes otherwise than
        the constant tensor it stands for."""
        if self._overflows(kind, operands):
            operands = tuple(
                a if isinstance(a, Const) else self.convert(a, torch.int64, always=True)
                for a in operands
            )
        if kind in _OVERLOADS and len(operands) == 2:
            numbers = tuple(isinstance(a, Const) for a in operands)
            place = 2 if numbers[0] else int(numbers[1])
            form = _OVERLOADS[kind][place]
            if form is None:
                form, operands = _OVERLOADS[kind][1], operands[::-1]
            return self._checked(form, _OVERLOADS[kind][0], operands)
        if op is None or kind is aten.floor_divide:
            op = kind.Tensor if "Tensor" in kind.overloads() else kind.default
        if op._schema.arguments[0].name != "self" or any(
            isinstance(a, Const) for a in operands[:1]
        ):
            operands = tuple(self._tensor(a, _stand_in(a).dtype) for a in operands)
        return self._node(op, tuple(a.value if isinstance(a, Const) else a for a in operands), {})

    def _overflows(self, kind: Any, operands: tuple[Value, ...]) -> bool:
        """Whether a result of int32 may not fit: a product of places, or beside a large number."""
        nodes = [a for a in operands if not isinstance(a, Const)]
        if any(dtype_of(a) != torch.int32 or not leaves(a) <= self._narrow for a in nodes):
            return False
        numbers = [a.value for a in operands if isinstance(a, Const)]
        large = any(isinstance(n, int) and abs(n) >= 1 << 30 for n in numbers)
        if kind is not aten.mul:
            return large
        return len(nodes) == 2 or any(abs(n) >= LARGEST_FACTOR for n in numbers)

    def _checked(self, form: Any, full: Any, operands: tuple[Value, ...]) -> Any:
        """The node of ``form``, which takes numbers as such, where it promotes as ``full`` of
        tensors does; else that of ``full``."""
        args = tuple(a.value if isinstance(a, Const) else a for a in operands)
        if any(isinstance(a, Const) and a.dtype is not None for a in operands):
            parts = [_stand_in(a) for a in operands]
            given = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in args]
            same = full(*parts).dtype == form(*given).dtype
            if same and full.overloadpacket in _COMPARISONS:
                same = torch.result_type(*parts) == torch.result_type(*given)
            if not same:
                dtypes = [p.dtype for p in parts]
                return self._node(full, tuple(map(self._tensor, operands, dtypes)), {})
        return self._node(form, args, {})

    def _tensor(self, value: Value, dtype: torch.dtype) -> Any:
        """A number as a tensor that promotes like one."""
        if not isinstance(value, Const):
            return value
        like = self.inputs[self._like]
        return self._node(aten.full_like.default, (like, value.value), {"dtype": dtype})

    def _node(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parts = [a if isinstance(a, torch.fx.Node) else (type(a), repr(a)) for a in args]
        known = (op, tuple(parts), tuple(kwargs.items()))
        if known in self._known:
            return self._known[known]
        given = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in args]
        try:
            val = op(*given, **kwargs)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise NotPointwise(f"{op} does not take these operands ({error})") from error
        node = self.graph.call_function(op, args, kwargs)
        nodes = [a for a in args if isinstance(a, torch.fx.Node)]
        keys = [a.meta["key"] if isinstance(a, torch.fx.Node) else a for a in args]
        text = f"{op} {keys} {kwargs}"
        node.meta["val"] = val
        node.meta["leaves"] = frozenset().union(*(a.meta["leaves"] for a in nodes))
        size = 1 + sum(a.meta["key"][0] for a in nodes)
        node.meta["key"] = (size, hashlib.sha256(text.encode()).hexdigest()[:16])
        self._known[known] = node
        return node


def _own(number: Any) -> torch.dtype:
    if isinstance(number, bool):
        return torch.bool
    return torch.int64 if isinstance(number, int) else torch.float64


def _is_truth(value: Value) -> bool:
    return isinstance(value, Const) and isinstance(value.value, bool)


def _keeps(dtype: torch.dtype, wider: torch.dtype | None) -> bool:
    """Whether every value of a dtype is one of another."""
    return torch.promote_types(dtype, wider) == wider and dtype != torch.int64


def _stand_in(value: Value) -> Tensor:
    """A meta tensor with a value's dtype and weight in promotion."""
    if not isinstance(value, Const):
        return value.meta["val"]
    if value.dtype is not None:
        return torch.empty((1,), dtype=value.dtype, device="meta")
    dtype = {float: torch.get_default_dtype(), int: torch.int64, bool: torch.bool}
    return torch.empty((), dtype=dtype[type(value.value)], device="meta")


def _order(value: Value) -> tuple[Any, ...]:
    """Numbers last, else small values first."""
    return (1, 0, repr(value)) if isinstance(value, Const) else (0, *value.meta["key"])


def _check_same(node: Any) -> None:
    """That a view or expansion leaves every value at its axes. Raises NotPointwise."""
    before, after = (n.meta["val"].shape for n in (node.args[0], node))
    own, new = list(before), list(after)
    while len(own) < len(new):
        own.insert(0, 1)
    while len(new) < len(own):
        new.insert(0, 1)
    if any(a not in (1, b) for a, b in zip(own, new, strict=True)):
        raise NotPointwise(f"{node.target} moves values between axes")
