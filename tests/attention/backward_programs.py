"""Programs of scores written by hand, each beside the same score as torch functions, and attention
of it with torch's own gradients."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from inductor_ext.templates.attention_program import LOG2E, Input, Program, Span


@dataclasses.dataclass(frozen=True)
class Score:
    """``fn(s, b, h, q, k, x, n, columns - rows)``: the score in natural units, -inf if not kept.
    ``inputs``: (axes, dtype or None for q's, whether a gradient is asked for)."""

    program: Program
    fn: Callable[..., torch.Tensor]
    inputs: tuple[tuple[str, Any, bool], ...] = ()
    numbers: tuple[int, ...] = ()


CAUSAL = {
    "row_spans": (Span("0", "q1 + 1", "0", "q0 + 1"),),
    "column_spans": (Span("k0", "rows", "k1", "rows"),),
}
WINDOW = {
    "row_spans": (Span("q0 - n0 + 1", "q1 + 1", "q1 - n0 + 1", "q0 + 1"),),
    "column_spans": (Span("k0", "k1 + n0", "k1", "k0 + n0"),),
}
SINKS = {  # the first n1 keys, and a window of n0
    "row_spans": (
        Span("0", "tl.minimum(n1, q1 + 1)", "0", "tl.minimum(n1, q0 + 1)"),
        Span("q0 - n0 + 1", "q1 + 1", "q1 - n0 + 1", "q0 + 1"),
    ),
    "column_spans": (
        Span("k0", "tl.where(k0 < n1, rows, k1 + n0)", "k1", "tl.where(k1 < n1, rows, k0 + n0)"),
    ),
}
TWO_SPANS = {  # columns of a key in two pieces: rows k to k + 9, and from row 50 on
    "row_spans": (Span("0", "columns", "0", "0"),),
    "column_spans": (
        Span("k0", "k1 + 10", "k1", "k0 + 10"),
        Span("tl.maximum(50, k0)", "rows", "tl.maximum(50, k1)", "rows"),
    ),
}
LOWER = {
    "row_spans": (Span("0", "q1 + 1 + columns - rows", "0", "q0 + 1 + columns - rows"),),
    "column_spans": (Span("k0 - columns + rows", "rows", "k1 - columns + rows", "rows"),),
}


def _scaled(factor=0.25, keep="", **spans):
    options = {"scale": factor, "score": f"r = s * {factor * LOG2E!r}", "keep": keep}
    return Program(**options, gradient=f"ds = g * {factor!r}", **spans)


def _kept(keep):
    return lambda s, b, h, q, k, x, n, ahead: (s * 0.25).masked_fill(
        ~keep(q, k, n, ahead), -torch.inf
    )


def _bias(axes, **spans):
    """A bias along ``axes``."""
    keep = spans.get("keep")
    program = Program(
        inputs=(Input(torch.float32, axes),),
        score=f"r = (s * 0.25 + x0) * {LOG2E!r}",
        gradient="ds = g * 0.25\nd0 = g",
        differentiable=(0,),
        slope=0.25,
        **spans,
    )

    def fn(s, b, h, q, k, x, n, ahead):
        r = s * 0.25 + x[0]
        return r.masked_fill(q < k, -torch.inf) if keep else r

    return Score(program, fn, ((axes, torch.float32, True),))


TANH = "1 - 2 / (1 + tl.exp2({} * (2 * 1.4426950408889634)))"
SCORES = {
    "scale": Score(_scaled(), lambda s, *_: s * 0.25),
    "negative scale": Score(_scaled(-0.25), lambda s, *_: s * -0.25),
    "causal": Score(_scaled(keep="keep = q >= k", **CAUSAL), _kept(lambda q, k, n, a: q >= k)),
    "lower right": Score(
        _scaled(keep="keep = q + columns - rows >= k", **LOWER),
        _kept(lambda q, k, n, a: q + a >= k),
    ),
    "window": Score(
        dataclasses.replace(_scaled(keep="keep = (q >= k) & (q - k < n0)", **WINDOW), numbers=1),
        _kept(lambda q, k, n, a: (q >= k) & (q - k < n[0])),
        numbers=(37,),
    ),
    "sinks": Score(
        dataclasses.replace(
            _scaled(keep="keep = (q >= k) & ((q - k < n0) | (k < n1))", **SINKS), numbers=2
        ),
        _kept(lambda q, k, n, a: (q >= k) & ((q - k < n[0]) | (k < n[1]))),
        numbers=(21, 4),
    ),
    "two spans": Score(
        _scaled(keep="keep = (q >= k) & ((q - k < 10) | (q >= 50))", **TWO_SPANS),
        _kept(lambda q, k, n, a: (q >= k) & ((q - k < 10) | (q >= 50))),
    ),
    "softcap": Score(
        Program(
            score=f"tmp = s * 0.0625\nr = ({TANH.format('tmp')}) * {4 * LOG2E!r}",
            gradient=f"tmp1 = {TANH.format('(s * 0.0625)')}\nds = g * (1 - tmp1 * tmp1) * 0.25",
        ),
        lambda s, *_: 4 * torch.tanh(s * 0.0625),
    ),
    "documents": Score(
        dataclasses.replace(
            _scaled(keep="keep = x0 == x1", row_spans=(Span("0", "columns", "0", "0"),),
                    column_spans=(Span("0", "rows", "0", "0"),)),
            inputs=(Input(torch.int32, "bq"), Input(torch.int32, "bk")), documents=(0, 1),
        ),
        lambda s, b, h, q, k, x, *_: (s * 0.25).masked_fill(x[0] != x[1], -torch.inf),
        (("bq", torch.int32, False), ("bk", torch.int32, False)),
    ),
    "slot bias": _bias("bhk"),
    "causal slot bias": _bias("bhk", keep="keep = q >= k", **CAUSAL),
    "shared slot bias": _bias("k"),
    "row bias": _bias("bhq"),
    "head bias": _bias("h"),
    "learned bias": _bias("hqk", keep="keep = q >= k", **CAUSAL),
    "full bias": _bias("bhqk"),
    "bias of a batch": _bias("bqk"),
    "two biases": Score(
        Program(
            inputs=(Input(torch.float32, "bhqk"), Input(torch.float32, "qk")),
            differentiable=(0, 1), score=f"r = (s * 0.25 + x0 + x1) * {LOG2E!r}",
            gradient="ds = g * 0.25\nd0 = g\nd1 = g", slope=0.25,
        ),
        lambda s, b, h, q, k, x, *_: s * 0.25 + x[0] + x[1],
        (("bhqk", torch.float32, True), ("qk", torch.float32, True)),
    ),
    "documents and a bias": Score(
        Program(
            (Input(torch.int32, "bq"), Input(torch.int32, "bk"), Input(torch.float32, "hqk")),
            documents=(0, 1), differentiable=(2,), score=f"r = (s * 0.25 + x2) * {LOG2E!r}",
            gradient="ds = g * 0.25\nd2 = g", keep="keep = (x0 == x1) & (q >= k)", **CAUSAL,
        ),
        lambda s, b, h, q, k, x, *_: (s * 0.25 + x[2]).masked_fill(
            (x[0] != x[1]) | (q < k), -torch.inf),
        (("bq", torch.int32, False), ("bk", torch.int32, False), ("hqk", torch.float32, True)),
    ),
    "one bias": _bias("qk"),
    "slopes": Score(
        Program(
            inputs=(Input(torch.float32, "h"),), differentiable=(0,),
            score=f"r = (s * 0.25 + x0 * (k - q).to(tl.float32)) * {LOG2E!r}",
            gradient="ds = g * 0.25\nd0 = g * (k - q).to(tl.float32)",
        ),
        lambda s, b, h, q, k, x, *_: s * 0.25 + x[0] * (k - q),
        (("h", torch.float32, True),),
    ),
    "temperature": Score(  # two inputs, each with a gradient of its own
        Program(
            inputs=(Input(torch.float32, "bq"), Input(torch.float32, "k")), differentiable=(0, 1),
            score=f"r = s * x0 * x1 * {LOG2E!r}",
            gradient="ds = g * x0 * x1\nd0 = g * s * x1\nd1 = g * s * x0",
        ),
        lambda s, b, h, q, k, x, *_: s * x[0] * x[1],
        (("bq", torch.float32, True), ("k", torch.float32, True)),
    ),
}  # fmt: skip


def draw_inputs(score, batch, heads, rows, columns):
    """The inputs, of size 1 where they are broadcast."""
    sizes = {"b": batch, "h": heads, "q": rows, "k": columns}
    found = []
    for axes, kind, _ in score.inputs:
        shape = [sizes[axis] if axis in axes else 1 for axis in "bhqk"]
        if kind == torch.int32:
            found.append(torch.randint(0, 3, shape, dtype=kind).sort(2 if "q" in axes else 3)[0])
        else:
            found.append(torch.randn(shape, dtype=kind))
    return found


def attention(score, q, k, v, inputs, factors=None):
    """(out, lse), quadratic, in the dtype of the tensors; scores and softmax in fp32 or fp64.
    ``factors``: of the weights, by a dropout."""
    wide = torch.promote_types(q.dtype, torch.float32)
    heads, kv_heads = q.shape[1], k.shape[1]
    k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
    (b, h, rows), columns = q.shape[:3], k.shape[2]
    index = [
        torch.arange(n).reshape([-1 if i == j else 1 for j in range(4)])
        for i, n in enumerate((b, h, rows, columns))
    ]
    s = (q.to(wide) @ k.to(wide).transpose(-1, -2)).to(q.dtype).to(wide)
    r = score.fn(s, *index, inputs, score.numbers, columns - rows)
    r = r.broadcast_to(s.shape)
    none = (r == -torch.inf).all(-1, keepdim=True)
    lse = torch.logsumexp(r.masked_fill(none, 0.0), -1).masked_fill(none[..., 0], -torch.inf)
    p = torch.softmax(r.masked_fill(none, 0.0), -1).masked_fill(none, 0.0)
    p = p.to(q.dtype)
    p = p if factors is None else p * factors.to(q.dtype)
    return (p.to(wide) @ v.to(wide)).to(q.dtype), lse


def gradients(score, q, k, v, inputs, do, dlse=None, factors=None):
    """(out, lse, (dq, dk, dv, *those of the inputs that ask for one)) by torch's autograd."""
    asked = [wanted for *_, wanted in score.inputs]
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    own = [x.detach().requires_grad_(a) for x, a in zip(inputs, asked, strict=True)]
    out, lse = attention(score, *leaves, own, factors)
    total = (out * do).sum()
    if dlse is not None:
        total = total + (lse.masked_fill(lse == -torch.inf, 0.0) * dlse).sum()
    leaves += [x for x in own if x.requires_grad]
    return out.detach(), lse.detach(), torch.autograd.grad(total, leaves)
