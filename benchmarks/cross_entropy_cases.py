"""The cases of the cross-entropy benchmark: shapes, bytes, inputs, and each column's function."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import common

DEVICE = "cuda"
COLUMNS = ("eager", "compile", "max_autotune", "liger", "torch_chunked", "plugin", "ours")
DEFAULT_COLUMNS = ("eager", "compile", "liger", "torch_chunked", "plugin", "ours")
LOWERINGS = ("softmax", "cross_entropy", "fused_loss", "linear_cross_entropy")
STOCK = ("eager", "compile", "max_autotune")
KINDS = ("fwd", "bwd", "both")
SHAPES = (
    (8192, 32000), (8192, 128256), (4096, 262144), (32768, 32768), (8, 131072), (65536, 1000),
)  # fmt: skip
QUICK_SHAPES = ((8192, 128256), (8192, 32000), (8, 131072))
LINEAR = (1024, 4096, 16384)
HIDDEN, CLASSES, TOP = 4096, 128256, 20
CHECKED_ROWS = 8
REPEATS, QUICK_REPEATS = 15, 7

# Reads and writes of [N, V] tensors in (fwd, bwd, both). In both, cross entropy needs to read once.
PASSES = {
    "plain": (1, 2, 2), "smoothing": (1, 2, 2), "z_loss": (1, 2, 2), "softcap": (1, 2, 2),
    "soft_targets": (2, 3, 3), "distillation": (1, 2, 2), "softmax": (2, 3, 5),
    "log_softmax": (2, 3, 5),
}  # fmt: skip
SUITES = (*PASSES, "linear")


@dataclasses.dataclass(frozen=True)
class Case:
    """A variant at a shape."""

    suite: str
    rows: int
    columns: int

    @property
    def name(self) -> str:
        return f"{self.rows}x{self.columns}"

    def bytes(self, kind: str) -> int:
        return 2 * self.rows * self.columns * PASSES[self.suite][KINDS.index(kind)]


def ordered(suites: Sequence[str], quick: bool) -> list[Case]:
    """The cases of a run in an order of which any beginning is representative."""
    groups = []
    for suite in suites:
        shapes = [(n, CLASSES) for n in LINEAR] if suite == "linear" else list(SHAPES)
        if quick:
            shapes = [(4096, CLASSES)] if suite == "linear" else list(QUICK_SHAPES)
        groups.append([Case(suite, *shape) for shape in shapes])
    return common.round_robin(groups)


# --- the functions --------------------------------------------------------------------------------


def as_written(suite: str) -> Callable[..., Any]:
    """What a user writes. Arguments: logits and the other inputs of ``draw``."""
    import torch
    import torch.nn.functional as F

    def plain(x: Any, t: Any) -> Any:
        return F.cross_entropy(x, t)

    def smoothing(x: Any, t: Any) -> Any:
        return F.cross_entropy(x, t, label_smoothing=0.1)

    def z_loss(x: Any, t: Any) -> Any:
        return F.cross_entropy(x.float(), t) + 1e-4 * x.float().logsumexp(-1).square().mean()

    def softcap(x: Any, t: Any) -> Any:
        return F.cross_entropy(30.0 * torch.tanh(x.float() / 30.0), t)

    def soft_targets(x: Any, t: Any) -> Any:
        return F.cross_entropy(x, t)

    def distillation(x: Any, ids: Any, logprobs: Any) -> Any:
        w = logprobs.float().softmax(-1)
        return -(w * x.float().log_softmax(-1).gather(1, ids)).sum(-1).mean()

    def softmax(x: Any) -> Any:
        return x.softmax(-1)

    def log_softmax(x: Any) -> Any:
        return x.log_softmax(-1)

    return locals()[suite]


def ours(suite: str, kind: str) -> Callable[..., Any]:
    """The same by ``inductor_ext.ops``; for "bwd", from saved statistics."""
    from inductor_ext import ops

    extra: dict[str, Any] = {
        "smoothing": {"label_smoothing": 0.1}, "z_loss": {"z_loss": 1e-4},
        "softcap": {"softcap": 30.0},
    }.get(suite, {})  # fmt: skip
    if suite == "distillation":
        reduction = "none" if kind == "bwd" else "mean"
        call = functools.partial(ops.sparse_distillation_loss, reduction=reduction)
        return (lambda *a: call(*a).mean()) if kind == "bwd" else call
    if suite in ("softmax", "log_softmax"):
        return getattr(ops, suite)
    if kind == "bwd":
        return lambda x, t: ops.cross_entropy(x, t, return_lse=True, **extra)[0]
    return functools.partial(ops.cross_entropy, **extra)


def liger(suite: str) -> Callable[..., Any] | None:
    """Liger's form of a variant; None where there is none."""
    extra: dict[str, Any] | None = {
        "plain": {}, "smoothing": {"label_smoothing": 0.1}, "z_loss": {"lse_square_scale": 1e-4},
        "softcap": {"softcap": 30.0},
    }.get(suite)  # fmt: skip
    if extra is None or importlib.util.find_spec("liger_kernel") is None:
        return None
    from liger_kernel.transformers.functional import liger_cross_entropy

    return lambda x, t: liger_cross_entropy(x, t, **extra)


def draw(case: Case) -> tuple[Any, ...]:
    """Fresh random logits and what else the variant takes, on the card."""
    import torch

    n, v = case.rows, case.columns
    x = (torch.randn(n, v, device=DEVICE) * 2).bfloat16()
    if case.suite in ("softmax", "log_softmax"):
        return (x,)
    if case.suite == "soft_targets":
        return x, torch.randn(n, v, device=DEVICE).bfloat16().softmax(-1)
    if case.suite == "distillation":
        ids = torch.randint(0, v, (n, TOP), device=DEVICE)
        return x, ids, torch.randn(n, TOP, device=DEVICE).log_softmax(-1)
    return x, torch.randint(0, v, (n,), device=DEVICE)


def program(case: Case, column: str, kind: str) -> Callable[..., Any] | None:
    """The function of a column."""
    if column == "ours":
        return ours(case.suite, kind)
    if column == "liger":
        return liger(case.suite)
    if column == "torch_chunked":
        return None
    written = as_written(case.suite)
    if column == "eager":
        return written
    # One code object per case, column and kind: no recompile and no shared cache entry.
    own = common.own_code(written, f"{case.suite}_{column}_{kind}_{case.rows}_{case.columns}")
    return compiled(own, column, donated=kind != "bwd")


def compiled(fn: Callable[..., Any], column: str, donated: bool = True) -> Callable[..., Any]:
    """``fn`` by torch.compile, to be called within ``setting(column)``. A graph that is kept for
    another backward may not give its buffers away (``donated``)."""
    import torch

    mode = "max-autotune-no-cudagraphs" if column == "max_autotune" else None
    program = torch.compile(fn, mode=mode, dynamic=False)

    def call(*args: Any) -> Any:
        with torch._functorch.config.patch(donated_buffer=donated):
            return program(*args)

    return call


def setting(column: str) -> contextlib.AbstractContextManager[Any]:
    """What a column's programs are compiled in, their backward too, which is at its first call."""
    import inductor_ext

    if column == "plugin":
        return inductor_ext.enable(*LOWERINGS)
    return inductor_ext.disable()


def in_fp64(suite: str) -> Callable[..., Any]:
    """What a user writes, without its casts."""
    import torch
    import torch.nn.functional as F

    def z_loss(x: Any, t: Any) -> Any:
        return F.cross_entropy(x, t) + 1e-4 * x.logsumexp(-1).square().mean()

    def softcap(x: Any, t: Any) -> Any:
        return F.cross_entropy(30.0 * torch.tanh(x / 30.0), t)

    def distillation(x: Any, ids: Any, logprobs: Any) -> Any:
        return -(logprobs.softmax(-1) * x.log_softmax(-1).gather(1, ids)).sum(-1).mean()

    own: dict[str, Callable[..., Any]] = {
        "z_loss": z_loss, "softcap": softcap, "distillation": distillation
    }  # fmt: skip
    return own.get(suite) or as_written(suite)


def linear_program(column: str, rows: int) -> Callable[..., Any] | None:
    """loss(h, w, t) of a column; None where there is none."""
    import torch
    import torch.nn.functional as F

    from inductor_ext import ops

    def written(h: Any, w: Any, t: Any) -> Any:
        return F.cross_entropy(F.linear(h, w), t)

    if column == "ours":
        return lambda h, w, t: ops.linear_cross_entropy(h, w, t)
    if column == "eager":
        return written
    if column == "liger":
        if importlib.util.find_spec("liger_kernel") is None:
            return None
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        return lambda h, w, t: liger_fused_linear_cross_entropy(h, w, t)
    if column == "torch_chunked":
        chunked = getattr(F, "linear_cross_entropy", None)
        options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
        options = options or getattr(F, "LinearCrossEntropyOptions", None)
        if chunked is None or options is None:
            return None
        return lambda h, w, t: chunked(h, w, t, options=options())
    return compiled(common.own_code(written, f"linear_{column}_{rows}"), column)
