"""The options of ``ops.attention`` as the text of a score, with the tensors and numbers it reads.

Sizes and windows are numbers of the operation, not of the text: one program serves all of them.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_scalar

from inductor_ext.ops import _attention_score as attention_score


class Score:
    """A score that is being written: ``value`` is the name of what it is so far."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.inputs: list[Tensor] = []
        self.numbers: list[Any] = []
        self.value = "s"

    def op(self, name: str, *args: str) -> str:
        """The name of what an aten operation gives."""
        result = f"v{len(self.lines)}"
        self.lines.append(f"{result} = {name}({', '.join(args)})")
        return result

    def input(self, tensor: Tensor) -> str:
        self.inputs.append(tensor)
        return f"x{len(self.inputs) - 1}"

    def number(self, number: Any) -> str:
        self.numbers.append(number)
        return f"n{len(self.numbers) - 1}"

    def keep(self, conditions: list[str]) -> None:
        """-inf where any of the conditions does not hold."""
        if not conditions:
            return
        kept = conditions[0]
        for condition in conditions[1:]:
            kept = self.op("bitwise_and.Tensor", kept, condition)
        self.value = self.op("where.ScalarOther", kept, self.value, "-inf")

    @property
    def text(self) -> str:
        return "; ".join([*self.lines, self.value])


@dataclasses.dataclass
class Options:
    """What ``ops.attention`` was asked for, checked. ``window``: keys kept in front of and behind a
    query's position, None where there is no end. ``segments``: the ids of rows [B, Sq] and of keys
    [B, Sk], and [Sq] what takes a row to its place among the keys where that is not one number."""

    scale: float
    softcap: float | None = None
    bias: Tensor | None = None
    slot_bias: Tensor | None = None
    causal: str = ""
    window: tuple[Any, Any] = (None, None)
    sinks: Any = None
    segments: tuple[Tensor, Tensor, Tensor | None] | None = None
    score_mod: Callable[..., Tensor] | None = None
    score_inputs: tuple[Tensor, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether there is nothing but a scale and ``causal``."""
        others = self.softcap, self.bias, self.slot_bias, self.segments, self.score_mod
        return all(x is None for x in (*others, *self.window))


def constant(number: Any) -> str:
    """A number in a text; a symbolic one becomes the number that it is."""
    return repr(float(guard_scalar(number)))


def score_of(options: Options, heads: Any, group: Any) -> Score:
    """The score of the options. Query row q is at key q + columns - rows, but in "upper_left"."""
    score = Score()
    _arithmetic(score, options, heads, group)
    if options.score_mod is not None:
        _modify(score, options)
    conditions = []
    if options.bias is not None and options.bias.dtype == torch.bool:
        conditions.append(score.input(options.bias))
    _places(score, options, conditions)
    score.keep(conditions)
    return score


def _arithmetic(score: Score, options: Options, heads: Any, group: Any) -> None:
    if options.softcap is None:
        score.value = score.op("mul.Tensor", score.value, constant(options.scale))
    else:
        part = constant(options.scale / options.softcap)
        score.value = score.op("mul.Tensor", score.value, part)
        score.value = score.op("tanh.default", score.value)
        score.value = score.op("mul.Tensor", score.value, constant(options.softcap))
    if options.bias is not None and options.bias.dtype != torch.bool:
        score.value = score.op("add.Tensor", score.value, score.input(options.bias))
    if options.slot_bias is not None:
        beta = options.slot_bias
        if group != 1:
            beta = beta.unsqueeze(2).expand(-1, -1, group, -1)
            beta = beta.reshape(beta.shape[0], heads, beta.shape[-1])
        score.value = score.op("add.Tensor", score.value, score.input(beta.unsqueeze(2)))


def _modify(score: Score, options: Options) -> None:
    at = len(score.inputs)
    score.inputs.extend(options.score_inputs)
    kinds = tuple(
        (x.dtype, tuple(guard_scalar(size == 1) for size in x.shape)) for x in score.inputs
    )
    text = _modified(options.score_mod, score.text, at, kinds, len(score.numbers))
    parts = text.split("; ")
    score.lines, score.value = list(parts[:-1]), parts[-1]


@torch.compiler.assume_constant_result
def _modified(fn: Any, before: str, at: int, kinds: Any, numbers: int) -> str:
    """The text of a user's function of a score and of the inputs from ``at`` on; ``kinds``: dtype
    of each input and which of its sizes are 1."""

    known = _identity(fn)
    key = None if known is None else (known, before, at, kinds, numbers)
    if key in _TEXTS:
        return _TEXTS[key]

    def whole(s: Any, b: Any, h: Any, q: Any, k: Any, rows: Any, columns: Any, counts: Any,
              inputs: Any) -> Any:  # fmt: skip
        so_far = attention_score.read(before)(s, b, h, q, k, rows, columns, counts, inputs)
        return fn(so_far, b, h, q, k, *inputs[at:])

    like = [torch.empty([1 if one else 2 for one in ones], dtype=dtype) for dtype, ones in kinds]
    try:
        text = attention_score.write(whole, like, [0] * numbers)
    except attention_score.NotPointwise as reason:
        raise ValueError(
            f"score_mod is expected as a function of torch's pointwise functions, but {reason}"
        ) from reason
    if key is not None:
        if len(_TEXTS) >= 256:
            _TEXTS.clear()
        _TEXTS[key] = text
    return text


_TEXTS: dict[Any, str] = {}  # tracing a function takes 15 ms


def _identity(fn: Any) -> Any:
    """What a function computes, as a key; None where it reads what may change unseen."""
    if isinstance(fn, (int, float, str, type(None), torch.dtype)):
        return type(fn), fn
    module = fn.__name__ if isinstance(fn, types.ModuleType) else getattr(fn, "__module__", None)
    if (module or "").partition(".")[0] in ("torch", "math", "builtins"):
        return id(fn)
    if not isinstance(fn, types.FunctionType) or fn.__kwdefaults__:
        return None
    if any(isinstance(c, types.CodeType) for c in fn.__code__.co_consts):
        return None  # a function inside
    read = [fn.__globals__[n] for n in fn.__code__.co_names if n in fn.__globals__]
    try:
        read += [cell.cell_contents for cell in fn.__closure__ or ()]
    except ValueError:  # not bound yet
        return None
    parts = [None if x is fn else _identity(x) for x in (*read, *(fn.__defaults__ or ()))]
    return None if None in parts else (fn.__code__, *parts)


def _places(score: Score, options: Options, conditions: list[str]) -> None:
    """Conditions on positions and segments."""
    left, right = options.window
    if options.causal:
        right = None
    place = "q"
    if options.causal or left is not None or right is not None:
        place = _place(score, options)
    if options.causal:
        conditions.append(score.op("ge.Tensor", place, "k"))
    near = []
    if left is not None or right is not None:
        distance = score.op("sub.Tensor", place, "k")
        if left is not None:
            near.append(score.op("le.Tensor", distance, score.number(left)))
        if right is not None:
            near.append(score.op("ge.Tensor", distance, score.number(-right)))
    if near:
        within = near[0] if len(near) == 1 else score.op("bitwise_and.Tensor", *near)
        if options.sinks is not None:
            sink = score.op("lt.Tensor", "k", score.number(options.sinks))
            within = score.op("bitwise_or.Tensor", within, sink)
        conditions.append(within)
    if options.segments is not None:
        of_q, of_k, _ = options.segments
        names = score.input(of_q[:, None, :, None]), score.input(of_k[:, None, None, :])
        conditions.append(score.op("eq.Tensor", *names))


def _place(score: Score, options: Options) -> str:
    """The position of a query row among the keys."""
    if options.segments is not None and options.segments[2] is not None:
        return score.op("add.Tensor", "q", score.input(options.segments[2][None, None, :, None]))
    if options.causal == "upper_left":
        return "q"
    return score.op("sub.Tensor", score.op("add.Tensor", "q", "columns"), "rows")


# --- segments -------------------------------------------------------------------------------------


def ids_of(offsets: Tensor, size: Any) -> Tensor:
    """[1, size]: the segment of every position, of offsets [segments + 1]; -1 behind the last."""
    at = torch.arange(size, device=offsets.device, dtype=offsets.dtype)
    ids = torch.searchsorted(offsets[1:].contiguous(), at, right=True, out_int32=True)
    return ids[None]


def shift_of(of_q: Tensor, of_k: Tensor, rows: Any) -> Tensor:
    """[rows]: what takes a query row to its place among the keys where each segment's last row is
    at its last key."""
    ids = ids_of(of_q, rows)[0].clamp(max=of_q.shape[0] - 2)
    return (of_k[1:] - of_q[1:])[ids].to(torch.int32)


def packed(
    of_q: Tensor, of_k: Tensor, rows: Any, columns: Any, causal: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``Options.segments`` of checked ids or offsets of rows and keys."""
    if of_q.dim() == 2:
        return of_q, of_k, None
    own = of_q is of_k or causal == "upper_left"
    shift = None if own else shift_of(of_q, of_k, rows)
    return ids_of(of_q, rows), ids_of(of_k, columns), shift


# --- keys by batch --------------------------------------------------------------------------------


def with_lengths(text: str, lengths: Tensor, inputs: list[Tensor]) -> tuple[str, list[Tensor]]:
    """The score of dense keys of which a sequence has ``lengths`` [B], where ``columns`` are."""
    return _with_lengths(text, len(inputs)), [*inputs, lengths[:, None, None, None]]


@torch.compiler.assume_constant_result
def _with_lengths(text: str, inputs: int) -> str:
    *lines, value = re.sub(r"\bcolumns\b", f"x{inputs}", text).split("; ")
    kept, result = f"v{len(lines)}", f"v{len(lines) + 1}"
    lines.append(f"{kept} = lt.Tensor(k, x{inputs})")
    lines.append(f"{result} = where.ScalarOther({kept}, {value}, -inf)")
    return "; ".join([*lines, result])
