"""The cases of the mHC benchmark: stages, bytes, inputs, each column's function, the truth.

n = 4 streams of H in bf16, W and the coefficients in fp32, the constants of DeepSeek-V4. A *site*
is (W, scale, base); the chain is four layers, each of which is pre, a stand-in for the sublayer and
post. The stand-in is two thin products, which nobody fuses with anything and whose time by
themselves is taken off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks import common

DEVICE = "cuda"
N, LAYERS, RANK = 4, 4, 64
COLUMNS = ("eager", "compile", "max_autotune", "liger", "ours", "plugin")
DEFAULT_COLUMNS = ("ours", "eager", "plugin", "compile")
STOCK = ("eager", "compile", "max_autotune")
LOWERINGS = ("mhc_pre", "mhc_post", "mhc_post_pre")
TOKENS = (4096, 1, 8192, 64, 16384, 8, 1024, 256)  # the most telling first
HIDDEN = (7168, 4096)
QUICK_TOKENS, QUICK_HIDDEN = (4096, 1), (7168,)
CHECKED = 256  # tokens at either end whose results are compared
CHUNK = 512  # tokens that are computed in fp64 at once


@dataclasses.dataclass(frozen=True)
class Stage:
    """What is timed. A token moves at least ``per_hidden * H + per_token`` bytes and the ``sites``
    weights are read or written ``weights`` times; ``kind`` as in ``step``."""

    function: str
    kind: str
    per_hidden: int
    per_token: int
    weights: int = 0


# X is 8H bytes, U and Y 2H, post and comb 80, mixes and sum of squares 100. A pre reads X twice:
# all of the projection is needed before the first gate. A pre's backward reads dU and X for the
# gates' gradient, then dU and X again and writes dX.
STAGES = {
    "pre": Stage("pre", "fwd", 18, 280, 1),
    "post": Stage("post", "fwd", 18, 80),
    "kronecker": Stage("kronecker", "fwd", 18, 184, 1),
    "kronecker_bwd": Stage("kronecker", "bwd", 28, 284, 2),
    "post_pre": Stage("post_pre", "fwd", 28, 360, 1),
    "pre_bwd": Stage("pre", "bwd", 28, 380, 2),
    "post_bwd": Stage("post", "bwd", 28, 160),
    "post_pre_bwd": Stage("post_pre", "bwd", 48, 540, 2),
    "chain": Stage("chain", "fwd", 18 + 3 * 28 + 18, 280 + 3 * 360 + 80, LAYERS),
    "chain_both": Stage(
        "chain", "both", 120 + 28 + 3 * 48 + 28, 1440 + 380 + 3 * 540 + 160, 3 * LAYERS
    ),
}

# Stage -> (bytes over H, percent of copy speed) to reach from 4096 tokens on.
GOALS = {"pre": (18, 85), "post": (18, 90), "pre_bwd": (34, 75), "post_bwd": (28, 85)}


@dataclasses.dataclass(frozen=True)
class Case:
    """A stage at a size."""

    stage: str
    tokens: int
    hidden: int

    @property
    def name(self) -> str:
        return f"{self.tokens}x{self.hidden}"

    @property
    def function(self) -> str:
        return STAGES[self.stage].function

    @property
    def kind(self) -> str:
        return STAGES[self.stage].kind

    @property
    def bytes(self) -> int:
        s = STAGES[self.stage]
        weight = 4 * _columns(self.function) * N * self.hidden
        return self.tokens * (s.per_hidden * self.hidden + s.per_token) + s.weights * weight


def _columns(function: str) -> int:
    """Of the projection."""
    return 12 if function == "kronecker" else N * (N + 2)


def ordered(
    stages: Sequence[str], tokens: Sequence[int] | None, hidden: Sequence[int] | None, quick: bool
) -> list[Case]:
    """The cases of a run, the most telling first."""
    tokens = tokens or (QUICK_TOKENS if quick else TOKENS)
    hidden = hidden or (QUICK_HIDDEN if quick else HIDDEN)
    return [Case(s, t, h) for t in tokens for h in hidden for s in stages]


def passes(cases: Sequence[Case], columns: Sequence[str]) -> list[tuple[Case, tuple[str, ...]]]:
    """What is measured together, in order: what needs no long compile comes first, for all cases;
    then the compiled programs, then max-autotune and Liger."""
    groups = [
        tuple(c for c in columns if c in group)
        for group in (
            ("ours", "eager"),
            ("plugin", "compile"),
            ("max_autotune",),
            ("liger",),
        )
    ]
    return [(case, group) for group in groups if group for case in cases]


# --- inputs ---------------------------------------------------------------------------------------


def _site(hidden: int, columns: int = N * (N + 2)) -> list[Any]:
    import torch

    w = torch.randn(columns, N * hidden, device=DEVICE) * (N * hidden) ** -0.5
    scale = torch.tensor([0.7, 1.1, 1.6], device=DEVICE)
    return [w, scale, torch.randn(columns, device=DEVICE) * 0.5]


def _thin(hidden: int) -> list[Any]:
    import torch

    a = torch.randn(hidden, RANK, device=DEVICE) * hidden**-0.5
    b = torch.randn(RANK, hidden, device=DEVICE) * RANK**-0.5
    return [a.bfloat16(), b.bfloat16()]


def draw(case: Case) -> tuple[Any, ...]:
    """Fresh random inputs of the stage's function, of a realistic scale."""
    import torch

    t, h = case.tokens, case.hidden
    x = torch.randn(t, N, h, device=DEVICE).bfloat16()
    if case.function in ("pre", "kronecker"):
        return (x, *_site(h, _columns(case.function)))
    if case.function == "chain":
        return (x, *(v for _ in range(LAYERS) for v in (*_site(h), *_thin(h))))
    y = torch.randn(t, h, device=DEVICE).bfloat16()
    post = 2 * torch.rand(t, N, device=DEVICE)
    comb = _exact_sinkhorn(2 * torch.randn(t, N, N, device=DEVICE))  # far from symmetric
    return (x, y, post, comb, *(_site(h) if case.function == "post_pre" else ()))


def per_token(case: Case) -> int:
    """How many of the inputs have a row per token; the others are parameters."""
    return 4 if case.function in ("post", "post_pre") else 1


def names(case: Case) -> list[str]:
    """What each input is; gradients of one name are judged together."""
    if case.function in ("pre", "kronecker"):
        return ["x", "w", "scale", "base"]
    if case.function == "chain":
        return ["x", *LAYERS * ["w", "scale", "base", "a", "b"]]
    return ["x", "y", "post", "comb", "w", "scale", "base"]


def seeds(case: Case, outputs: Sequence[Any]) -> list[Any]:
    """Random gradients of the outputs."""
    import torch

    return [torch.randn_like(o) for o in outputs]


# --- the functions --------------------------------------------------------------------------------


def _composition(pre: Any, post: Any, post_pre: Any, thin: Any) -> dict[str, Callable[..., Any]]:
    """The stages' functions out of those of one implementation; each gives a tuple."""

    def only_pre(x: Any, w: Any, scale: Any, base: Any) -> Any:
        return pre(x, w, scale, base)

    def only_post(x: Any, y: Any, p: Any, c: Any) -> Any:
        return (post(x, y, p, c),)

    def both(x: Any, y: Any, p: Any, c: Any, w: Any, scale: Any, base: Any) -> Any:
        return post_pre(x, y, p, c, w, scale, base)

    def chain(x: Any, *parameters: Any) -> Any:
        u, p, c = pre(x, *parameters[:3])
        for i in range(0, len(parameters), 5):
            y = thin(u, *parameters[i + 3 : i + 5])
            if i + 5 < len(parameters):
                x, u, p, c = post_pre(x, y, p, c, *parameters[i + 5 : i + 8])
        return (post(x, y, p, c),)

    return {"pre": only_pre, "post": only_post, "post_pre": both, "chain": chain}


def _product(u: Any, a: Any, b: Any) -> Any:
    return (u @ a) @ b


def as_written(function: str) -> Callable[..., Any]:
    """What a model has: the DeepSeek form."""
    from benchmarks import mhc_forms as forms

    if function == "kronecker":
        return forms.kronecker_pre
    pre, post = forms.PRE["deepseek"], forms.POST["deepseek"]

    def post_pre(x: Any, y: Any, p: Any, c: Any, *site: Any) -> Any:
        after = post(x, y, p, c)
        return (after, *pre(after, *site))

    return _composition(pre, post, post_pre, _product)[function]


def ours(function: str) -> Callable[..., Any]:
    """The same by ``inductor_ext.ops``."""
    from inductor_ext import ops

    if function == "kronecker":
        return _kronecker_by_gates
    return _composition(ops.mhc_pre, ops.mhc_post, ops.mhc_post_pre, _product)[function]


def _kronecker_by_gates(x: Any, w: Any, scale: Any, base: Any) -> Any:
    from benchmarks import mhc_forms as forms
    from inductor_ext import ops

    u, z = ops.mhc_collapse(x, w, scale[:1], base[:N], pre_eps=0.0)
    return (u, *forms.kronecker_coefficients(z, scale, base))


def thin_alone(u: Any, *thin: Any) -> Any:
    """The chain's stand-ins without anything between them."""
    for i in range(0, len(thin), 2):
        u = _product(u, *thin[i : i + 2])
    return (u,)


def liger(function: str) -> Callable[..., Any] | None:
    """Liger's, of ``adapted`` inputs; its Sinkhorn begins along the other axis."""
    if importlib.util.find_spec("liger_kernel") is None or function == "kronecker":
        return None
    from liger_kernel.transformers import functional as F

    def pre(x: Any, phi: Any, scale: Any, base: Any) -> Any:
        gates, p, c = F.liger_mhc_coeffs(x, phi, base, *scale.unbind(), pre_eps=1e-6)
        return F.liger_mhc_pre(x, gates), p, c.mT

    def post(x: Any, y: Any, p: Any, c: Any) -> Any:
        return F.liger_mhc_post_res(x, y, p, c.mT)

    def post_pre(x: Any, y: Any, p: Any, c: Any, *site: Any) -> Any:
        after = post(x, y, p, c)
        return (after, *pre(after, *site))

    return _composition(pre, post, post_pre, _product)[function]


def adapted(case: Case, column: str, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The inputs as a column has them: Liger's W is transposed and here in bf16, its comb
    [out, in]."""
    import torch

    if column != "liger":
        return tuple(inputs)
    mix = torch.arange(N * N).view(N, N).t().flatten() + 2 * N
    order = torch.cat([torch.arange(2 * N), mix]).to(inputs[0].device)
    out = []
    for name, t in zip(names(case), inputs, strict=False):
        if name == "w":
            t = t[order].t().bfloat16().contiguous()
        elif name == "base":
            t = t[order]
        elif name == "comb":
            t = t.mT.contiguous().mT
        out.append(t)
    return tuple(out)


def program(case: Case, column: str) -> Callable[..., Any] | None:
    """The function of a column, to be called within ``setting(column)``."""
    import torch

    if column in ("ours", "liger"):
        return ours(case.function) if column == "ours" else liger(case.function)
    written = as_written(case.function)
    if column == "eager":
        return written
    # One code object per case and column: no recompile and no shared cache entry.
    own = common.own_code(written, f"{case.stage}_{column}_{case.tokens}_{case.hidden}")
    mode = "max-autotune-no-cudagraphs" if column == "max_autotune" else None
    compiled = torch.compile(own, mode=mode, dynamic=False)

    def call(*args: Any) -> Any:
        # A kept graph's backward may not give its buffers away, which no cache key knows.
        own = {"donated_buffer": False, "enable_autograd_cache": False}
        with torch._functorch.config.patch(own if case.kind == "bwd" else {}):
            return compiled(*args)

    return call


@contextlib.contextmanager
def setting(column: str) -> Iterator[None]:
    """What a column's programs are compiled in, their backward too, which is at its first call."""
    import torch

    import inductor_ext

    with (
        inductor_ext.disable(),
        inductor_ext.enable(*LOWERINGS) if column == "plugin" else contextlib.nullcontext(),
        torch.autograd.set_multithreading_enabled(False),  # a capture sees one thread
    ):
        yield


# --- what is right --------------------------------------------------------------------------------


def _exact_sinkhorn(logits: Any) -> Any:
    comb = logits.softmax(-1) + 1e-6
    comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    for _ in range(19):
        comb = comb / (comb.sum(-1, keepdim=True) + 1e-6)
        comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    return comb


def _rounded(value: Any) -> Any:
    """Rounded as the residual is between two stages; a gradient passes as if it were not."""
    return value + (value.detach().bfloat16().double() - value.detach())


def _exact_pre(x: Any, w: Any, scale: Any, base: Any) -> Any:
    import torch

    u = x.flatten(-2)
    z = (u @ w.t()) * torch.rsqrt(u.square().mean(-1, keepdim=True) + 1e-6)
    pre = torch.sigmoid(scale[0] * z[:, :N] + base[:N]) + 1e-6
    post = 2 * torch.sigmoid(scale[1] * z[:, N : 2 * N] + base[N : 2 * N])
    comb = _exact_sinkhorn((scale[2] * z[:, 2 * N :] + base[2 * N :]).unflatten(-1, (N, N)))
    return (pre.unsqueeze(-2) @ x).squeeze(-2), post, comb


def _exact_kronecker(x: Any, w: Any, scale: Any, base: Any) -> Any:
    import torch

    u = x.flatten(-2)
    z = (u @ w.t()) * torch.rsqrt(u.square().mean(-1, keepdim=True) + 1e-6)
    pre = torch.sigmoid(scale[0] * z[:, :N] + base[:N])
    post = 2 * torch.sigmoid(scale[1] * z[:, N : 2 * N] + base[N : 2 * N])
    first, second = (scale[2] * z[:, 2 * N :] + base[2 * N :]).unflatten(-1, (2, 2)).unbind(1)
    one = torch.eye(2, dtype=x.dtype, device=x.device)
    turned = one.flip(0)
    combs = []
    for a, b in zip(first.softmax(-1), second.softmax(-1), strict=True):
        combs.append(torch.kron(a[0] * one + a[1] * turned, b[0] * one + b[1] * turned))
    return (pre.unsqueeze(-2) @ x).squeeze(-2), post, torch.stack(combs)


def _exact_post(x: Any, y: Any, post: Any, comb: Any) -> Any:
    return post.unsqueeze(-1) * y.unsqueeze(-2) + comb.mT @ x


def _exact_post_pre(x: Any, y: Any, post: Any, comb: Any, *site: Any) -> Any:
    after = _rounded(_exact_post(x, y, post, comb))
    return (after, *_exact_pre(after, *site))


def _exact_thin(u: Any, a: Any, b: Any) -> Any:
    return _rounded(_rounded(_rounded(u) @ a) @ b)


@functools.cache
def exact(function: str) -> Callable[..., Any]:
    """The formulas in fp64; rounded where the residual and a sublayer's input and output are."""
    if function == "kronecker":
        return _exact_kronecker
    return _composition(_exact_pre, _exact_post, _exact_post_pre, _exact_thin)[function]


def compared(case: Case, values: Sequence[Any]) -> list[Any]:
    """Of results or gradients by the case's inputs: of what has a row per token, some of them."""
    few = per_token(case) if case.kind != "fwd" else len(values)
    return [_ends(v) if i < few else v for i, v in enumerate(values)]


def _ends(value: Any) -> Any:
    import torch

    if value.shape[0] <= 2 * CHECKED:
        return value
    return torch.cat([value[:CHECKED], value[-CHECKED:]])


def truth(case: Case, inputs: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """``compared`` results (of kind "fwd") or gradients, in fp64, a chunk of tokens at a time."""
    import torch

    few, function = per_token(case), exact(case.function)
    if case.kind == "fwd":
        args = [_ends(v) if i < few else v for i, v in enumerate(inputs)]
        with torch.no_grad():
            return [o.double() for o in function(*(a.double() for a in args))]
    parameters = [p.double().requires_grad_() for p in inputs[few:]]
    rows: list[list[Any]] = [[] for _ in range(few)]
    totals = [torch.zeros_like(p) for p in parameters]
    for start in range(0, case.tokens, CHUNK):
        part = slice(start, start + CHUNK)
        own = [v[part].double().requires_grad_() for v in inputs[:few]]
        outs = function(*own, *parameters)
        grads = torch.autograd.grad(outs, [*own, *parameters], [g[part].double() for g in given])
        at_an_end = start < CHECKED or start + CHUNK > case.tokens - CHECKED
        for kept, g in zip(rows, grads[:few], strict=True):
            kept.append(g if at_an_end else g[:0])
        for total, g in zip(totals, grads[few:], strict=True):
            total += g
    # Whether or not the middle is left out, the ends are the ends.
    return [*(_ends(torch.cat(kept)) for kept in rows), *totals]
