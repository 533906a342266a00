"""A program's statements, computed by torch on whole tensors instead of tiles."""

import operator
import types

import torch

LOG2E = 1.4426950408889634

tl = types.SimpleNamespace(
    where=lambda c, a, b: torch.where(torch.as_tensor(c), torch.as_tensor(a), torch.as_tensor(b)),
    full=lambda shape, value, dtype: torch.full(shape, value, dtype=dtype),
    zeros_like=torch.zeros_like,
    maximum=torch.maximum,
    minimum=torch.minimum,
    abs=torch.abs,
    exp=torch.exp,
    exp2=torch.exp2,
    sigmoid=torch.sigmoid,
    int1=torch.bool,
    **{str(d)[6:]: d for d in (torch.int32, torch.int64, torch.float16, torch.bfloat16)},
    float32=torch.float32,
)
libdevice = types.SimpleNamespace(log=torch.log, sqrt=torch.sqrt, exp=torch.exp)


def computed(program, s, g, rows, columns, numbers, inputs):
    """What a program's texts assign, for fp32 ``s`` and ``g`` of [B, H, Sq, Sk]."""
    known = {"tl": tl, "libdevice": libdevice, "s": s, "g": g, "rows": rows, "columns": columns}
    for axis, name in enumerate("bhqk"):
        shape = [1, 1, 1, 1]
        shape[axis] = -1
        known[name] = torch.arange(s.shape[axis], dtype=torch.int32).view(shape)
    known.update({f"n{i}": n for i, n in enumerate(numbers)})
    known.update({f"x{i}": x for i, x in enumerate(inputs)})
    for text in (program.score, program.keep, program.gradient):
        exec(text, known)
    return known


def _method(function):
    def method(self, other=None):
        other = other.value if isinstance(other, Whole) else other
        found = function(self.value, other)
        return found if isinstance(found, bool) else Whole(found)

    return method


class Whole:
    """A whole number that divides as Triton does: towards zero."""

    def __init__(self, value):
        self.value = value.value if isinstance(value, Whole) else int(value)

    __add__ = __radd__ = _method(operator.add)
    __mul__ = __rmul__ = _method(operator.mul)
    __sub__, __rsub__ = _method(operator.sub), _method(lambda a, b: b - a)
    __neg__ = _method(lambda a, _: -a)
    __lt__, __ge__ = _method(operator.lt), _method(operator.ge)
    __floordiv__ = _method(lambda a, b: int(a / b))
    __mod__ = _method(lambda a, b: a - b * int(a / b))


def evaluated(text, **scalars):
    """A span's expression."""
    whole = {name: Whole(value) for name, value in scalars.items()}
    functions = types.SimpleNamespace(
        where=lambda c, a, b: Whole(a if c else b),
        maximum=lambda a, b: Whole(max(Whole(a).value, Whole(b).value)),
        minimum=lambda a, b: Whole(min(Whole(a).value, Whole(b).value)),
    )
    return Whole(eval(text, {"tl": functions, **whole})).value
