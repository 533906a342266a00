"""Launch parameters of the mHC kernels: each kernel timed with several, and its results compared.

Names are those of the launch functions' own options; ``block`` replaces the function of that name.
"error" is the largest relative error of a result by its norm: of the projection and of what follows
from it against fp64, of the others against the default parameters. What is not rounded to 16 bits
has to stay below 1e-5: a tiling that the compiler gets wrong shows there and nowhere else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks import mhc_cases as cases_of
from benchmarks.mhc_cases import Case

SHAPES = ((4096, 7168), (1, 7168), (8192, 4096), (64, 7168))
V4 = (20, 1e-6, 1e-6, 1e-6, 2.0)
Options = dict[str, Any]


def _grid(**values: Sequence[Any]) -> list[Options]:
    return [dict(zip(values, v, strict=True)) for v in itertools.product(*values.values())]


def _columns_tile(x: Any, warps: int, elements: int) -> Options:
    from inductor_ext.templates.mhc_pre_backward import divisor, even

    hidden, threads = x.shape[2], 32 * warps
    return {
        "THREADS": threads, "E": elements, "HIDDEN_OF": divisor(hidden),
        "EVEN": even(hidden, threads * elements), "num_warps": warps,
    }  # fmt: skip


@contextlib.contextmanager
def _replaced(module: Any, options: Options, *names: str) -> Iterator[None]:
    """Constants of a launch module, and functions that give some, out of ``options``, which loses
    them."""
    before = {name: getattr(module, name) for name in names if name in options}
    for name, old in before.items():
        new = options.pop(name)
        setattr(
            module, name, functools.partial(lambda v, *_, **__: v, new) if callable(old) else new
        )
    try:
        yield
    finally:
        for name, old in before.items():
            setattr(module, name, old)


def _gradient(
    options: Options, x: Any, w: Any, scale: Any, base: Any, du: Any, dpost: Any, dcomb: Any,
    mixes: Any, sqrsum: Any, added: Any = None,
) -> Any:  # fmt: skip
    from inductor_ext.templates import mhc_pre_backward as module

    known = {
        "tokens": x.shape[0], "n": x.shape[1], "hidden": x.shape[2], "dtype": x.dtype,
        "itemsize": x.element_size(), "w_dtype": w.dtype, "added": added is not None,
    }  # fmt: skip
    default = module.tile(**{k: known[k] for k in inspect.signature(module.tile).parameters})
    return module.backward(
        x, w, scale, base, mixes, sqrsum, added, du, dpost, dcomb, *V4,
        dataclasses.replace(default, **options),
    )  # fmt: skip


# A kernel: its inputs at a size, its launch, bytes over H of a token, the options to try.


class Kernel:
    """A launch that takes options; ``stage`` is the benchmark's, whose inputs it takes."""

    def __init__(self, stage: str, per_hidden: int, launch: Callable[..., Any]) -> None:
        self.stage, self.per_hidden, self.launch = stage, per_hidden, launch

    def inputs(self, tokens: int, hidden: int) -> tuple[Any, ...]:
        """Fresh inputs, with what a backward needs from its forward and gradients behind them."""
        import torch

        case = Case(self.stage, tokens, hidden)
        inputs = cases_of.draw(case)
        if case.kind == "fwd":
            return inputs
        from inductor_ext.templates import mhc_pre

        given: list[Any] = []
        x = inputs[0]
        if case.function != "pre":
            x = cases_of.exact("post")(*(i.double() for i in inputs[:4]))[0].bfloat16()
            given.append(torch.randn_like(x))
        if case.function != "post":
            *_, mixes, sqrsum = mhc_pre.pre(x, *inputs[-3:], *V4, "ieee")
            u, post, comb = x[:, 0], mixes[:, : cases_of.N], mixes[:, 2 * cases_of.N :]
            given += [torch.randn_like(u).contiguous(), torch.randn_like(post).contiguous()]
            given += [torch.randn_like(comb.unflatten(-1, (cases_of.N, cases_of.N))).contiguous()]
            given += [mixes, sqrsum]
            if case.function == "post_pre":
                given.append(x)
        return (*inputs, *given)


@contextlib.contextmanager
def _projection_by(options: Options, x: Any) -> Iterator[None]:
    from inductor_ext.templates import mhc_projection

    own = dict(options)
    with _replaced(mhc_projection, own, "block"):
        own = {"tiling": mhc_projection.tiling(x.shape[0], x.shape[1], x.dtype) | own}
        with _replaced(mhc_projection, own, "tiling"):
            yield


def _projection(options: Options, x: Any, w: Any, *_: Any) -> Any:
    from inductor_ext.templates import mhc_projection

    with _projection_by(options, x):
        return mhc_projection.partials(x, w, "ieee")


def _fuse(options: Options, x: Any, w: Any, scale: Any, base: Any, p: Any) -> Any:
    from inductor_ext.templates import mhc_pre

    chosen = mhc_pre.row_tile(x.shape[1], x.shape[2], x.element_size()) | options
    return mhc_pre.fuse(x, p, scale, base, *V4, chosen)


def _slabs(options: Options, x: Any, w: Any, scale: Any, base: Any, p: Any) -> Any:
    """The same where somebody has the sums of squares, here none but zeros."""
    import torch
    from inductor_ext.templates import mhc_slabs

    q = torch.zeros(1, x.shape[0], dtype=torch.float32, device=x.device)
    chosen = mhc_slabs.slab_tile(x.shape[1], x.element_size()) | options
    return mhc_slabs.fuse(x, p, q, scale, base, *V4, chosen)


def _post(options: Options, x: Any, y: Any, post: Any, comb: Any) -> Any:
    from inductor_ext.templates import mhc_post

    return mhc_post.post(x, y, post, comb, mhc_post.tile(x.shape[1], x.element_size()) | options)


def _pre(options: Options, x: Any, *site: Any) -> Any:
    """Whole; options are the projection's."""
    from inductor_ext.templates import mhc_pre

    with _projection_by(options, x):
        return mhc_pre.pre(x, *site, *V4, "ieee")


def _slopes(
    options: Options, x: Any, w: Any, scale: Any, base: Any, du: Any, dpost: Any, dcomb: Any,
    mixes: Any, sqrsum: Any,
) -> Any:  # fmt: skip
    from inductor_ext.templates import mhc_pre_backward

    own = dict(options)
    if "elements" in own:
        own["columns_tile"] = _columns_tile(x, own.pop("threads"), own.pop("elements"))
    with _replaced(mhc_pre_backward, own, "columns_tile"):
        return mhc_pre_backward.slopes(x, scale, base, mixes, sqrsum, du, dpost, dcomb, *V4, **own)


def _post_bwd(options: Options, x: Any, y: Any, post: Any, comb: Any, dx1: Any) -> Any:
    from inductor_ext.templates import mhc_post_backward

    own: Options = {}
    if options:
        own["columns_tile"] = _columns_tile(x, **options)
    with _replaced(mhc_post_backward, own, "columns_tile"):
        return mhc_post_backward.backward(x, y, post, comb, dx1)


def _post_pre_bwd(
    options: Options, x: Any, y: Any, post: Any, comb: Any, w: Any, scale: Any, base: Any,
    dx1: Any, du: Any, dpost1: Any, dcomb1: Any, mixes: Any, sqrsum: Any, x1: Any,
) -> Any:  # fmt: skip
    from inductor_ext.templates import mhc_post_backward

    dx1, *rest = _gradient(
        options, x1, w, scale, base, du, dpost1, dcomb1, mixes, sqrsum, added=dx1
    )
    return (*mhc_post_backward.backward(x, y, post, comb, dx1), *rest)


KERNELS = {
    "projection": Kernel("pre", 8, _projection),
    "fuse": Kernel("pre", 10, _fuse),
    "slabs": Kernel("pre", 10, _slabs),
    "pre": Kernel("pre", 18, _pre),
    "post": Kernel("post", 18, _post),
    "slopes": Kernel("pre_bwd", 10, _slopes),
    "pre_bwd": Kernel("pre_bwd", 28, _gradient),
    "post_bwd": Kernel("post_bwd", 28, _post_bwd),
    "post_pre_bwd": Kernel("post_pre_bwd", 64, _post_pre_bwd),
}
GRADIENT = [
    *_grid(tokens=(16,), columns=(64,), ranges=(1, 2, 4), warps=(2, 4), ahead=(1, 2)),
    *_grid(tokens=(16, 32), columns=(128,), ranges=(1, 2), warps=(4, 8), ahead=(1, 2)),
    *_grid(tokens=(32, 64), columns=(64,), ranges=(1, 2), warps=(4,), ahead=(1, 2)),
    *_grid(tokens=(16,), columns=(32, 64), streams=(2, 4), ranges=(2, 4, 7, 10), warps=(4,)),
]
TRIED = {
    "projection": [
        *_grid(BM=(128,), GROUPS=(4, 8, 16), num_stages=(2, 3, 4), num_warps=(4, 8)),
        *_grid(BM=(256,), GROUPS=(8, 16), num_stages=(2, 3), num_warps=(8, 16)),
        *_grid(BM=(64,), GROUPS=(8, 32), LOG=(0, 1), num_stages=(3, 4), num_warps=(4,)),
        *_grid(BM=(64,), GROUPS=(64, 128), LOG=(0, 1, 2), num_stages=(3, 4), num_warps=(4,)),
        *_grid(block=(128,), GROUPS=(8, 16), num_stages=(2, 3)),
        *_grid(BEFORE=(True, False)),
    ],
    "fuse": _grid(BLOCK=(512, 1024, 2048), HELD=(1, 2, 4), STREAM=(True,), num_warps=(4, 8)),
    "slabs": _grid(BLOCK=(512, 1024, 2048), HELD=(1, 2, 4), num_warps=(4, 8)),
    "pre": _grid(GROUPS=(4, 8, 16, 64, 128), LOG=(0, 1), num_stages=(3, 4)),
    "post": _grid(BLOCK=(512, 1024, 2048, 4096), num_warps=(4, 8, 16)),
    "slopes": [
        *_grid(warps=(1, 2, 8)),
        *_grid(threads=(1, 2, 4, 8), elements=(4, 8)),
    ],
    "pre_bwd": GRADIENT,
    "post_bwd": _grid(warps=(1, 2, 4, 8), elements=(4, 8)),
    "post_pre_bwd": GRADIENT,
}  # fmt: skip


def label(options: Options) -> str:
    """Options in one word."""
    return " ".join(f"{k}={v}" for k, v in options.items()) or "default"


def inputs_of(kernel: str, tokens: int, hidden: int) -> tuple[Any, ...]:
    """Inputs of a kernel: those of its stage and, for what follows a projection, its partials."""
    inputs = KERNELS[kernel].inputs(tokens, hidden)
    if kernel in ("fuse", "slabs"):
        return (*inputs, _projection({}, *inputs))
    return inputs


def compile_one(kernel: str, tokens: int, hidden: int, options: tuple[tuple[str, Any], ...]) -> str:
    """Launch once, for Triton's cache."""
    import torch

    from inductor_ext.compat_launch import direct_launches

    with direct_launches():
        KERNELS[kernel].launch(dict(options), *inputs_of(kernel, tokens, hidden))
    torch.cuda.synchronize()
    return label(dict(options))


def tasks(kernels: Sequence[str], shapes: Sequence[tuple[int, int]]) -> list[tuple[Any, ...]]:
    """What ``compile_one`` is to be called with. A kernel is the same at all of many tokens."""
    return [(k, *shape, tuple(o.items())) for shape in shapes for k in kernels for o in TRIED[k]]


def truth_of(kernel: str, inputs: Sequence[Any], default: Any) -> list[Any]:
    """What results are compared with, in fp64."""
    import torch

    if kernel == "projection":
        u = inputs[0].flatten(1)
        return [torch.cat([part.double() @ inputs[1].double().t() for part in u.split(512)])]
    return [t.double() for t in default]


def results(kernel: str, options: Options, inputs: Sequence[Any]) -> list[Any]:
    """A kernel's results, of the projection their sum over the partials."""
    out = KERNELS[kernel].launch(options, *inputs)
    out = list(out) if isinstance(out, tuple) else [out]
    return [o.double().sum(0) for o in out] if kernel == "projection" else out


def errors(got: Sequence[Any], truth: Sequence[Any]) -> tuple[float, float]:
    """(of 16-bit results, of the others): the largest relative error by the norm."""
    worst = {2: 0.0, 4: 0.0}
    for g, t in zip(got, truth, strict=True):
        if g.shape != t.shape:  # partials, whose number is one of the options
            continue
        size = 2 if g.element_size() == 2 else 4
        scale = t.norm().item() or 1.0
        worst[size] = max(worst[size], (g.double() - t).norm().item() / scale)
    return worst[2], worst[4]


def measure(
    kernel: str, tokens: int, hidden: int, timer: Any, tried: Sequence[Options] | None = None
) -> Iterator[dict[str, Any]]:
    """A CSV row per options of a kernel at a size, the default first.

    Launched as the operations do in eager, that is dependent on one another where a card can.
    """
    from inductor_ext.compat_launch import direct_launches

    with direct_launches():
        yield from _measure(
            kernel, tokens, hidden, timer, TRIED[kernel] if tried is None else tried
        )


def _measure(
    kernel: str, tokens: int, hidden: int, timer: Any, tried: Sequence[Options]
) -> Iterator[dict[str, Any]]:
    from inductor_ext import measure

    inputs = inputs_of(kernel, tokens, hidden)
    truth = truth_of(kernel, inputs, results(kernel, {}, inputs))
    sets = measure.rotate(inputs)
    nbytes = KERNELS[kernel].per_hidden * hidden * tokens
    for options in [{}, *tried]:
        row: dict[str, Any] = {"kernel": kernel, "tokens": tokens, "hidden": hidden}
        row["options"] = label(options)
        try:
            row["error_16"], row["error"] = errors(results(kernel, options, inputs), truth)
            row["us"] = timer(functools.partial(KERNELS[kernel].launch, options), sets)
            row["percent"] = 100 * measure.copy_floor_us(nbytes) / row["us"]
        except Exception as error:
            row["failure"] = measure.one_line(error)
        yield row


FIELDS = [
    "kernel", "tokens", "hidden", "options", "us", "percent", "error", "error_16", "failure"
]  # fmt: skip
