"""Scans, recurrences and their gradients as programs of the scan kernels.

Each function says which tensors its program reads, in which order. ``resets`` are flags of x's
shape, True where a segment begins, in the order of memory. A gradient is the scan of
``_scan_gradients`` the other way: its positions run from the end of the forward's.
"""

from __future__ import annotations

import functools
import re

import torch
from torch import Tensor

from inductor_ext.ops import _scan_composed as composed
from inductor_ext.templates.scan_forms import LOGARITHM, Form, form, segmented, state_type
from inductor_ext.templates.scan_program import Input, Program

_FLAG = torch.bool
_LIMIT = 2**31  # lengths below it have positions of 32 bits


def kernels_apply(x: Tensor) -> bool:
    """Whether kernels compute on such a tensor."""
    return x.is_cuda


def is_short(x: Tensor, dim: int) -> bool:
    """Whether positions along ``dim`` are kept in 32 bits."""
    return x.shape[dim] < _LIMIT


def _type(state: str) -> str:
    return {"fp32": "tl.float32", "fp64": "tl.float64"}.get(state, f"tl.{state}")


def _literal(value: float) -> str:
    return f'float("{value}")' if isinstance(value, float) else str(value)


def _numbered(text: str, first: int) -> str:
    """States s0, s1, ... of a text with numbers from ``first`` on."""
    return re.sub(r"\bs([01])\b", lambda m: f"s{int(m[1]) + first}", text)


def _resettable(base: Form, resets: bool) -> tuple[Form, int]:
    """The form and the number of its first value: a flag is in front where there are segments."""
    return (segmented(base), 1) if resets else (base, 0)


@functools.cache
def scan(
    x: torch.dtype, resets: bool, op: str, reverse: bool, exclusive: bool, dtype: torch.dtype,
    short: bool = False,
) -> Program:  # fmt: skip
    """(x, resets if any) to y of ``dtype``, or to (y, positions) of "cummax" and "cummin".

    ``short``: lengths are known to be below 2^31.
    """
    accumulator = composed.accumulator(dtype)
    base = form(op, accumulator, wide=not short)
    found, first = _resettable(base, resets)
    inputs = [Input(x, shift=int(exclusive))]
    produce = [f"v = x0.to({_type(base.states[0])})"]
    begins = "(t == 0)"
    if resets:
        inputs.append(Input(_FLAG, shift=int(reverse)))
        begins = "((t == 0) | (x1 != 0))"
        produce.append("s0 = x1.to(tl.int32)")
    if exclusive:
        identity = _literal(composed.identity_of(op, dtype))
        produce.append(f"v = tl.where({begins}, {identity}, v)")
    lift, results = ["s0 = v"], ["y0 = s0"]
    outputs = [dtype]
    if op == "logsumexp":
        lift.append("s1 = tl.zeros_like(v)")
        results = [f"y0 = {LOGARITHM}"]
    elif op in ("cummax", "cummin"):
        position = f"tl.where({begins}, -1, t - 1)" if exclusive else "t"
        lift.append(f"s1 = ({position}).to(tl.{base.states[1]})")
        results.append("p = s1.to(tl.int64)")
        if reverse:
            results.append("p = tl.where(p < 0, p, length - 1 - p)")
        results.append("y1 = p")
        outputs.append(torch.int64)
    if dtype == torch.bool:
        results[0] = "y0 = s0 != 0"
    return Program(
        tuple(inputs), tuple(outputs), found.states,
        "\n".join([*produce, _numbered("\n".join(lift), first)]), found.combine,
        _numbered("\n".join(results), first), reverse,
    )  # fmt: skip


_LOST = '({early} == float("-inf")) | (tl.abs({late}) == float("inf"))'
_NONE = '({early} == float("-inf")) | ({late} == float("-inf"))'


def _exponential(name: str, early: str, late: str, nothing: str) -> list[str]:
    """exp(early - late), 0 where ``nothing`` holds."""
    nothing = nothing.format(early=early, late=late)
    return [
        f'{name} = tl.where({nothing}, float("-inf"), {early} - {late})',
        f"{name} = tl.exp({name})",
    ]


@functools.cache
def scan_backward(
    g: torch.dtype, x: torch.dtype, y: torch.dtype, resets: bool, op: str, reverse: bool,
    exclusive: bool,
) -> Program:  # fmt: skip
    """(g, what ``scan_backward_inputs`` names) to dx, for all operations but sum."""
    wide = composed.wide_dtype(x, y)
    to = _type(state_type(wide))
    inputs = [Input(g, shift=int(exclusive))]
    produce = [f"g = x0.to({to})"]
    # In the order of this scan, 1 position before is 1 behind in the forward's.
    after, at = int(exclusive) + 1, int(exclusive)  # where Y_(t+1) and Y_t are in y
    minus = 'float("-inf")'
    if op == "prod":
        inputs.append(Input(x, shift=1))
        inputs.append(Input(y) if exclusive else Input(y, shift=-1, fill="1"))
        produce.append(f"c = x1.to({to})")
        result = [f"f = x2.to({to})"]
    elif op == "logsumexp":
        inputs += [Input(x), Input(y, shift=at, fill=minus), Input(y, shift=after, fill=minus)]
        produce += [f"Y = x2.to({to})", f"Z = x3.to({to})", *_exponential("c", "Y", "Z", _LOST)]
        result = [f"v = x1.to({to})", *_exponential("f", "v", "Y", _NONE)]
    else:
        inputs += [Input(x), Input(y, shift=at), Input(x, shift=1), Input(y, shift=after)]
        for name, own, largest in (("taken", 1, 2), ("new", 3, 4)):
            produce.append(f"v = x{own}.to({to})")
            produce.append(f"{name} = (v == x{largest}.to({to})) | (v != v)")
        result = []
    if resets:
        flag = f"x{len(inputs)}"
        inputs.append(Input(_FLAG, shift=0 if reverse else 1))
        produce.append(f"ends = {flag} != 0")
        if exclusive:
            produce.append("g = tl.where(ends, 0.0, g)")
        if op == "prod" and not exclusive:
            flag = f"x{len(inputs)}"
            inputs.append(Input(_FLAG, shift=-1 if reverse else 0))
            result.append(f"f = tl.where({flag} != 0, 1.0, f)")
    if op in ("prod", "logsumexp"):
        found, first = _resettable(form("affine", wide), resets)
        produce.append(_numbered("s0 = c\ns1 = g", first))
        if resets:
            produce.append("s0 = ends.to(tl.int32)")
        result.append(f"y0 = f * s{first + 1}")
    else:
        found = segmented(form("sum", wide))
        produce.append(f"s0 = ({'new | ends' if resets else 'new'}).to(tl.int32)\ns1 = g")
        result.append("y0 = tl.where(taken, s1, 0.0)")
    return Program(
        tuple(inputs), (x,), found.states, "\n".join(produce), found.combine, "\n".join(result),
        not reverse,
    )  # fmt: skip


def scan_backward_inputs(
    g: Tensor, x: Tensor, y: Tensor, resets: Tensor | None, op: str, exclusive: bool
) -> list[Tensor]:
    """What the program of ``scan_backward`` reads, in its order."""
    read = {"prod": [g, x, y], "logsumexp": [g, x, y, y]}.get(op, [g, x, y, x, y])
    if resets is None:
        return read
    return [*read, resets, *([resets] if op == "prod" and not exclusive else [])]


@functools.cache
def recurrence(dtype: torch.dtype, initial: bool, reverse: bool) -> Program:
    """(a, b, h0 if ``initial``) to h; h0 expanded along the scan."""
    wide = composed.wide_dtype(dtype)
    to = _type(state_type(wide))
    inputs = [Input(dtype), Input(dtype)]
    produce = [f"s0 = x0.to({to})", f"s1 = x1.to({to})"]
    if initial:
        inputs.append(Input(dtype))
        produce.append(f"s1 = tl.where(t == 0, s0 * x2.to({to}) + s1, s1)")
    affine = form("affine", wide)
    return Program(
        tuple(inputs), (dtype,), affine.states, "\n".join(produce), affine.combine, "y0 = s1",
        reverse,
    )  # fmt: skip


@functools.cache
def recurrence_backward(
    dtype: torch.dtype, g: torch.dtype, initial: bool, reverse: bool
) -> Program:
    """(g, a, h, h0 if ``initial``) to (da, db); h0 expanded along the scan."""
    wide = composed.wide_dtype(dtype)
    to = _type(state_type(wide))
    inputs = [Input(g), Input(dtype, shift=1), Input(dtype, shift=-1)]
    consume = [f"h = x2.to({to})"]
    if initial:
        inputs.append(Input(dtype))
        consume.append(f"h = tl.where(t == length - 1, x3.to({to}), h)")
    affine = form("affine", wide)
    return Program(
        tuple(inputs), (dtype, dtype), affine.states, f"s0 = x1.to({to})\ns1 = x0.to({to})",
        affine.combine, "\n".join([*consume, "y0 = s1 * h", "y1 = s1"]), not reverse,
    )  # fmt: skip
