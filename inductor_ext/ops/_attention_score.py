"""An attention's score as text: what stands between the two products, softmax apart.

A score is a function of ``s`` (dot products, fp32, unscaled), of ``b``, ``h``, ``q``, ``k`` (int64
numbers of batch, query head, query row and key: [B, 1, 1, 1], [1, H, 1, 1], [1, 1, Sq, 1],
[1, 1, 1, Sk]), of ``rows`` and ``columns`` (Sq and Sk), of numbers ``n0, n1, ...`` and of tensors
``x0, x1, ...`` that broadcast to [B, H, Sq, Sk]. It gives the score in natural units, -inf where
nothing is kept. As text it is one line of pointwise aten operations without any size in it:

    v0 = mul.Tensor(s, 0.125); v1 = ge.Tensor(q, k); v2 = where.ScalarOther(v1, v0, -inf); v2
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from inductor_ext import compat_fx, pointwise_text
from inductor_ext.pointwise_graph import Builder
from inductor_ext.pointwise_text import NotPointwise as NotPointwise
from inductor_ext.pointwise_values import Const, Value

Score = Callable[..., Tensor]
_SIZES = ((3, 5, 7, 11), (2, 3, 5, 13))  # of B, H, Sq, Sk while a score is traced
INDICES = ("b", "h", "q", "k", "rows", "columns")


def names(numbers: int, inputs: int) -> list[str]:
    """What a text of so many numbers and inputs may read, in the order of ``write``'s function."""
    own = ["s", *INDICES]
    return [*own, *(f"n{i}" for i in range(numbers)), *(f"x{i}" for i in range(inputs))]


def positions(sizes: Sequence[int], device: torch.device | None = None) -> list[Tensor]:
    """``b``, ``h``, ``q``, ``k`` of sizes B, H, Sq, Sk."""
    found = []
    for axis, size in enumerate(sizes):
        shape = [1, 1, 1, 1]
        shape[axis] = -1
        found.append(torch.arange(size, device=device).view(shape))
    return found


# --- writing --------------------------------------------------------------------------------------


def write(fn: Score, inputs: Sequence[Tensor] = (), numbers: Sequence[Any] = ()) -> str:
    """The text of ``fn(s, b, h, q, k, rows, columns, numbers, inputs)``.

    ``inputs`` are 4-D tensors (any device, fake ones too) of which the dtypes and which sizes are 1
    are read; of ``numbers`` only how many there are. While it is traced, ``rows``, ``columns`` and
    the numbers are int64 tensors without axes, so they can be computed with but not branched upon,
    and all tensors are small ones in CPU memory: tensors that ``fn`` makes are to be made on
    ``s.device``, and no size or tensor from outside is to be read. Equal functions in different
    spellings mostly have one text. Raises NotPointwise (one sentence) for what has no text.
    """
    for i, x in enumerate(inputs):
        if x.dim() != 4:
            raise NotPointwise(f"expected input {i} to have 4 axes, got {x.dim()}")
    kinds = [(x.dtype, tuple(_is_one(size) for size in x.shape)) for x in inputs]
    texts = [_traced(fn, kinds, len(numbers), sizes) for sizes in _SIZES]
    if texts[0] != texts[1]:
        raise NotPointwise("the score reads a size that is neither rows nor columns nor a number")
    return texts[0]


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _traced(fn: Score, kinds: Sequence[Any], numbers: int, sizes: Sequence[int]) -> str:
    def traced() -> Any:
        with torch.no_grad():
            return _values(fn, kinds, numbers, sizes)

    try:
        result = compat_fx.apart(traced)
    except NotPointwise:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise NotPointwise(f"the score is no function of tensors alone ({reason})") from error
    shape = result.meta["val"].shape if not isinstance(result, Const) else ()
    if not all(a in (1, b) for a, b in zip(reversed(shape), reversed(sizes), strict=False)):
        raise NotPointwise("the score has not one number per pair of a query and a key")
    return to_text(result)


def _values(fn: Score, kinds: Sequence[Any], numbers: int, sizes: Sequence[int]) -> Value:
    """The score in a builder's graph."""
    inputs = [
        torch.ones([1 if one else n for one, n in zip(ones, sizes, strict=True)]).to(dtype)
        for dtype, ones in kinds
    ]
    counts = [torch.tensor(n) for n in (*sizes[2:], *range(17, 17 + numbers))]
    tensors = [torch.ones(tuple(sizes)), *positions(sizes), *counts, *inputs]

    def flat(*args: Tensor) -> Tensor:
        found = fn(*args[:7], list(args[7 : 7 + numbers]), list(args[7 + numbers :]))
        if not isinstance(found, Tensor):
            raise NotPointwise(f"it gives no tensor but {type(found).__name__}")
        return found

    graph = compat_fx.pointwise_graph(flat, tensors)
    builder = Builder(like="b")
    values = {}
    placeholders = graph.find_nodes(op="placeholder")
    for name, node in zip(names(numbers, len(inputs)), placeholders, strict=True):
        val = node.meta["val"]  # may be a fake tensor
        values[node] = builder.input(name, torch.empty(val.shape, dtype=val.dtype, device="meta"))
    results = builder.merge(graph, values, typed=True)
    if len(results) != 1:
        raise NotPointwise(f"expected one score, got {len(results)}")
    return results[0]


def to_text(result: Value) -> str:
    """The text of a builder's value."""
    lines: list[str] = []
    known: dict[Any, str] = {}

    def name(value: Value) -> str:
        if isinstance(value, torch.dtype):
            return str(value).removeprefix("torch.")
        if not isinstance(value, torch.fx.Node):
            return pointwise_text.number(value)
        if value.op == "placeholder":
            return str(value.target)
        if value not in known:
            args = [name(a) for a in value.args]
            args += [f"{key}={name(a)}" for key, a in value.kwargs.items()]
            op = str(value.target).removeprefix("aten.")
            known[value] = f"v{len(lines)}"
            lines.append(f"{known[value]} = {op}({', '.join(args)})")
        return known[value]

    if isinstance(result, Const):
        return f"v0 = full_like.default(s, {pointwise_text.number(result.value)}); v0"
    last = name(result)
    return "; ".join([*lines, last])


# --- reading --------------------------------------------------------------------------------------


def read(text: str) -> Score:
    """The function of a text, with the arguments of ``write``'s, in torch operations: for any
    device and any floating dtype of ``s``, differentiable. Sizes and numbers are ints or SymInts.

    Raises ValueError, when called, for a text of other arguments or operations.
    """

    def score(
        s: Tensor,
        b: Tensor,
        h: Tensor,
        q: Tensor,
        k: Tensor,
        rows: Any,
        columns: Any,
        numbers: Sequence[Any] = (),
        inputs: Sequence[Tensor] = (),
    ) -> Tensor:
        module, used = _module(text, len(numbers), len(inputs))
        args: list[Any] = [s, b, h, q, k, rows, columns, *numbers, *inputs]
        for i in range(5, 7 + len(numbers)):
            if not isinstance(args[i], Tensor):
                args[i] = torch.full((), args[i] if i in used else 0, device=s.device)
        return module(*args)

    return score


@functools.lru_cache(maxsize=256)
def _module(text: str, numbers: int, inputs: int) -> tuple[torch.fx.GraphModule, frozenset[int]]:
    graph, results = pointwise_text.read(text, names(numbers, inputs))
    if len(results) != 1:
        raise ValueError(f"expected the text of one score, got {text!r}")
    graph.output(results[0])
    used = [i for i, n in enumerate(graph.find_nodes(op="placeholder")) if n.users]
    return torch.fx.GraphModule({}, graph), frozenset(used)
