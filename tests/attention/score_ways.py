"""Scores of every kind, and a program's statements computed by torch on whole tensors."""

import operator
import struct
import types

import torch
from hypothesis import strategies as st
from inductor_ext.templates.attention_program import Input

from inductor_ext.ops._attention_score import write
from inductor_ext.ops._attention_translate import program

LOG2E = 1.4426950408889634


def instruction(asm, _, args, **options):
    if asm.startswith("tanh"):
        return torch.tanh(args[0])
    (factor,) = struct.unpack(">f", bytes.fromhex(asm.removesuffix(";").split("0f")[1]))
    exact = args[0].double() * factor
    near = exact.float()
    toward_zero = near.nextafter(torch.zeros_like(near))
    return torch.where(near.abs() > exact.abs(), toward_zero, near)


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
    inline_asm_elementwise=instruction,
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


# --- scores ---------------------------------------------------------------------------------------

INF = float("inf")
LEAST = torch.finfo(torch.float32).min
SIZES = 2, 3, 6, 9
AXES = "bk", "h", "bqk", "bhqk", "bq", "b", "qk"


def tensors(sizes=SIZES):
    """Document ids of keys, slopes, a mask, a bias, document ids of queries, lengths, another bias
    with a dtype's least number and -inf in it."""
    gen, (b, h, q, k) = torch.Generator().manual_seed(1), sizes
    least = torch.randn(1, 1, q, k, generator=gen)
    least[..., 1::3], least[..., 2::3] = LEAST, -INF
    return [
        torch.randint(0, 3, (b, 1, 1, k), generator=gen),
        torch.rand(1, h, 1, 1, generator=gen),
        torch.rand(b, 1, q, k, generator=gen) > 0.3,
        torch.randn(b, h, q, k, generator=gen).to(torch.bfloat16),
        torch.randint(0, 3, (b, 1, q, 1), generator=gen),
        torch.randint(0, k, (b, 1, 1, 1), generator=gen, dtype=torch.int32),
        least,
    ]


def made(fn, numbers=(3,), empty="zero"):
    """The text and program of a function of all ``tensors``."""
    inputs = tensors()
    text = write(fn, inputs, numbers)
    described = tuple(Input(x.dtype, a) for x, a in zip(inputs, AXES, strict=True))
    return text, program(text, described, len(numbers), empty)


def score(body):
    """A function as ``write`` takes it, of those of its arguments that the body reads."""
    return lambda s, b, h, q, k, rows, columns, n, x: body(
        s=s, b=b, h=h, q=q, k=k, rows=rows, columns=columns, n=n, x=x
    )


def where(keep, value, other=-INF):
    return torch.where(keep, value, other)


SCORES = {
    "plain": lambda s, **_: s,
    "scale": lambda s, **_: s / 8 * 0.5,
    "causal": lambda s, q, k, **_: where(q >= k, s * 0.1),
    "lower right": lambda s, q, k, rows, columns, **_: (s * 0.1).masked_fill(
        k > q + columns - rows, -INF
    ),
    "window": lambda s, q, k, n, **_: where((k <= q) & (k > q - n[0]), s * 0.1),
    "sinks and window": lambda s, q, k, n, **_: where(
        (k <= q) & ((k > q - n[0]) | (k < 2)), s * 0.1
    ),
    "prefix": lambda s, q, k, n, **_: where((k < n[0]) | (k <= q), s * 0.1),
    "documents": lambda s, q, k, x, **_: where((x[4] == x[0]) & (k <= q), s * 0.1),
    "chunks": lambda s, q, k, **_: where((q // 4 == k // 4) & (k <= q), s),
    "later chunks": lambda s, q, k, **_: where((q // 4 >= 1) | (k < 3), s),
    "chunks by a remainder": lambda s, q, k, **_: where(k >= q - q % 4, s),
    "padding": lambda s, k, x, **_: where(k < x[5], s * 0.1),
    "loaded mask": lambda s, q, k, x, **_: where(x[2] & (k <= q), s * 0.1),
    "nested": lambda s, q, k, x, **_: where(q > 2, where(x[2], s, -INF), where(k < 4, s * 2, -INF)),
    "added masks": lambda s, q, k, x, **_: s * 0.1 + where(k <= q, 0.0) + where(x[2], 0.0),
    "scaled mask": lambda s, q, k, **_: (s + where(k <= q, 0.0)) * 0.1,
    "bias": lambda s, x, **_: s * 0.1 + x[3],
    "bias of fp32": lambda s, x, **_: x[6] + s * 0.1,
    "alibi": lambda s, q, k, x, **_: where(k <= q, s * 0.1 + x[1] * (k - q)),
    "alibi by the head": lambda s, h, q, k, **_: s * 0.1 - (q - k).abs() * 2.0 ** (-(h + 1) * 0.5),
    "temperature": lambda s, x, **_: s * x[1],
    "softcap": lambda s, **_: 30 * torch.tanh(s * 0.3 / 30),
    "softcap under a mask": lambda s, q, k, **_: where(k <= q, torch.tanh(s / 5) * 5, LEAST),
    "rounded": lambda s, x, **_: (s * 0.1).bfloat16() + x[3],
    "rounded to fp16": lambda s, **_: s.half() * torch.full((1, 1, 1, 1), 0.3),
    "least of bf16": lambda s, q, k, **_: (
        (s * 0.1).bfloat16() + (1.0 - (k <= q).bfloat16()) * torch.finfo(torch.bfloat16).min
    ),
    "a triangle times a mask": lambda s, q, k, n, **_: (
        s * 0.1 + where(k > q, torch.full_like(s, LEAST), 0.0) * (k > n[0])
    ),
    "least, perhaps everywhere": lambda s, x, **_: where(x[2], s * 0.1, LEAST),
    "clamped": lambda s, **_: s.clamp(-1, 1.5),
    "not itself": lambda s, q, k, **_: where(q != k, s),
    "equal weights": lambda q, k, **_: where(q >= k, torch.zeros_like(k * 1.0)),
    "a logarithm": lambda s, q, k, **_: where(q >= k, s - torch.log((q - k + 1).float())),
    "a logarithm of masked places": lambda s, q, k, x, **_: where(
        q >= k, torch.sqrt((q - k).float() + 1) * torch.log(1 + s.abs()) * x[1]
    ),
    "written in place": lambda s, k, n, x, **_: (s * 2).masked_fill_(x[2], -INF).add_(x[1]),
    "no keys": lambda s, k, **_: where(k < 0, s),
}


class Conditions:
    """Builds the text of a random condition with ``draw``."""

    def __init__(self, draw):
        self.draw, self.lines = draw, []

    def line(self, call):
        self.lines.append(f"v{len(self.lines)} = {call}")
        return f"v{len(self.lines) - 1}"

    def number(self):
        """An affine number, perhaps divided."""
        total = self.draw(st.sampled_from(["q", "k", "k"]))
        for _ in range(self.draw(st.integers(0, 2))):
            op = self.draw(st.sampled_from(["add.Tensor", "sub.Tensor"]))
            other = self.draw(st.sampled_from(["q", "k", "n0", "rows", "columns", "x1", 2, -3]))
            total = self.line(f"{op}({total}, {other})")
        if self.draw(st.booleans()):
            by = self.draw(
                st.sampled_from(
                    ["mul.Tensor({}, 2)", "floor_divide.default({}, 3)", "neg.default({})"]
                )
            )
            total = self.line(by.format(total))
        return total

    def condition(self, depth):
        kind = (
            self.draw(st.sampled_from(["compare"] * 3 + ["and", "or", "and", "not", "mask"]))
            if depth
            else "compare"
        )
        if kind == "compare":
            op = self.draw(st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"]))
            if self.draw(st.booleans()):
                return self.line(
                    f"{op}.Tensor({self.number()}, {self.draw(st.sampled_from('qk'))})"
                )
            return self.line(f"{op}.Scalar({self.number()}, {self.draw(st.integers(-4, 6))})")
        if kind == "mask":
            return "x0"
        if kind == "not":
            return self.line(f"logical_not.default({self.condition(depth - 1)})")
        return self.line(
            f"bitwise_{kind}.Tensor({self.condition(depth - 1)}, {self.condition(depth - 1)})"
        )


@st.composite
def texts(draw):
    found = Conditions(draw)
    condition = found.condition(3)
    last = found.line(f"where.ScalarOther({condition}, s, -inf)")
    return "; ".join([*found.lines, last])
