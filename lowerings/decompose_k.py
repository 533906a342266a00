"""Decompose-K: matrix products with tiny M, N and huge K, split along K.

Recognises mm, addmm, bmm and baddbmm (with their out_dtype overloads) at lowering time and emits
the partial products and the sum over them as two IR nodes, so that Inductor fuses whatever
pointwise region follows into the sum. The kernels are in templates/decompose_k.py.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from inductor_ext.lowerings.decompose_k_candidates import (
    NAME,
    Problem,
    Traced,
    along_k,
    candidates,
    extremes,
    has_layout,
    is_ieee,
    named,
)
from inductor_ext.lowerings.decompose_k_tilings import (
    CANDIDATE,
    dot_tiling,
    dot_wins,
    few_splits,
    names_of,
    pick,
    rows_name,
    tilings,
    worth_it,
)

from inductor_ext import (
    choosing,
    compat,
    compat_ir,
    config,
    dispatch,
    known,
    matching,
    measured_ranges,
    plan,
    registry,
)
from inductor_ext.measured_site import MeasuredSite

aten = torch.ops.aten
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _why_not(p: Problem) -> str | None:
    """A reason to leave the problem alone that no measurement could change."""
    device = p.a.get_device()
    if device is None or device.type != "cuda" or p.b.get_device() != device:
        return "not on one CUDA device"
    if p.dtype not in DTYPES or p.b.get_dtype() != p.dtype:
        return f"operands are {p.dtype} and {p.b.get_dtype()}; bf16, fp16 or fp32 are handled"
    if p.out_dtype not in (p.dtype, torch.float32):
        return f"output dtype {p.out_dtype} is not one aten offers for {p.dtype}"
    if compat.has_unbacked(p.sizes):
        return "a size depends on data"
    if compat.device_capability(device)[0] < 8:
        return "the card is older than sm_80"
    return None


def _unbounded(p: Problem) -> str | None:
    """A reason where one choice for all sizes would meet sizes of any magnitude."""
    for name, size in zip(("M", "N", "batch"), (p.m, p.n, p.batch), strict=True):
        if size is not None and compat.upper_bound(size) is None:
            return (
                f"{name} has no upper bound (mark_dynamic(max=) gives one): large sizes would lose"
            )
    return None


def _layout(x: Any) -> str:
    if not has_layout(x):
        return "row"  # it will be computed into memory of its own
    return choosing.layout(x.get_stride())


def _described(op_name: str, p: Problem, rowwise: bool) -> choosing.Problem:
    """The problem as plans know it: ranges over M and the batch, and over what else is dynamic."""
    dtype = str(p.dtype).removeprefix("torch.")
    if p.out_dtype != p.dtype and op_name in ("mm", "bmm"):  # with a bias the sum is fp32 always
        dtype += "->" + str(p.out_dtype).removeprefix("torch.")
    op = f"{op_name}+row_reduction" if rowwise else op_name
    sizes = {"m": p.m, "n": p.n, "k": p.k} | ({} if p.batch is None else {"batch": p.batch})
    static = {s: int(v) for s, v in sizes.items() if s in "nk" and compat.is_static(v)}
    key = plan.Key.of(NAME, op, dtype, f"{_layout(p.a)},{_layout(p.b)}", static)
    dims = {name: size for name, size in sizes.items() if name not in static}

    def plausible() -> bool:
        here, sms = extremes(p)[0], compat.multiprocessors(p.a.get_device())
        return 0 not in here and worth_it(*here, p.dtype.itemsize, sms) is None

    return choosing.Problem(
        key,
        dims,
        functools.partial(named, p),
        lambda: [c.name for c in candidates(p)],
        plausible,
    )


def measure_of(op_name: str) -> choosing.Measure:
    """How a product is measured: on random operands whose product has entries around 1, as models
    have them. Of entries around sqrt(K) an exponential behind it would overflow, and a right
    candidate would seem wrong."""
    first = {"addmm": "mat1", "baddbmm": "batch1"}.get(op_name, "self")
    return choosing.Measure(input_gen_fns={first: _contracted})


def _contracted(fake: Any) -> torch.Tensor:
    """Random, with deviation 1 / sqrt(K) for [..., K]."""
    x = compat_ir.random_like(fake, fake.device)
    with compat_ir.no_fake_mode():
        memory = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
        memory.mul_(max(x.shape[-1], 1) ** -0.5)  # x may be expanded
    return x


def _lower(op_name: str, p: Problem) -> Any:
    """IR of C where splitting K is chosen, None where stock stays."""
    site = f"{op_name} {p}"
    rowwise = matching.feeds_row_reduction()
    # Of sizes that vary the plans were asked before, for all of them: see ``_sizes``.
    device = p.a.get_device()
    static = all(compat.is_static(size) for size in p.sizes)
    asked = static and device is not None and device.type == "cuda"
    problem = _described(op_name, p, rowwise) if asked else None
    reason = _why_not(p)
    if reason is None and (compat_ir.is_bitcast(p.a) or compat_ir.is_bitcast(p.b)):
        reason = "an operand is a view in another dtype"
    if reason is None and any(compat.upper_bound(s) == 0 for s in p.sizes):
        reason = "a size is zero"
    if reason is None and all(compat.upper_bound(s) == 1 for s in p.out_size):
        reason = "the output is one element"
    if reason is not None:
        return choosing.leave(NAME, site, choosing.against_plan(problem, reason))
    sms = compat.multiprocessors(device)
    itemsize = p.dtype.itemsize
    here, *ends = extremes(p)
    losing = worth_it(*here, itemsize, sms)
    if losing is None or choosing.forced_choice(NAME) is not None:
        losing = _unbounded(p)
    if losing is None and choosing.forced_choice(NAME) is None:
        losing = next((why for e in ends if (why := worth_it(*e, itemsize, sms))), None)
    if choosing.decided(NAME) is not None:  # for each of its sizes, by what was measured
        losing = None
    if losing is not None:
        planned = choosing.planned(problem)
        if planned is None or not planned.name:
            why = "" if planned is None else f"{planned.reason}; "
            return choosing.leave(NAME, site, why + losing)
    found = candidates(p)

    def heuristic() -> tuple[str, str]:
        if losing is not None:  # asked where the plan's candidate can't be emitted
            return choosing.STOCK, losing
        fma = along_k(p) and is_ieee(p)
        return pick([c.name for c in found], rowwise, fma)

    return choosing.choose(
        NAME,
        site,
        found,
        heuristic,
        key=f"{site} {matching.consumers_key()}",
        problem=problem or _described(op_name, p, rowwise),
        measure=measure_of(op_name),
    )


def _sizes(position: int, node: Any) -> dispatch.Sensitivity | None:
    """How the choice at a product in the fx graph depends on M, N and batch."""
    a, b = (Traced(arg) for arg in node.args[position : position + 2])
    if node.kwargs.get("alpha", 1) == 0 or any(matching.is_bitcast(x.node) for x in (a, b)):
        return None
    p = Problem(a, b, torch.float32)
    if _why_not(p) is not None:
        return None
    sizes = {"m": p.m, "n": p.n, "batch": 1 if p.batch is None else p.batch}
    symbolic = [name for name, size in sizes.items() if not compat.is_static(size)]
    if not symbolic:
        return None
    itemsize, device = p.dtype.itemsize, p.a.get_device()
    sms, k = compat.multiprocessors(device), compat.hint(p.k)
    rowwise = matching.feeds_row_reduction(node)
    pdl = config.pdl and compat.device_capability(device)[0] >= 9
    ahead = b.fetched() if pdl else ""
    single, fma = p.batch is None and along_k(p), along_k(p) and is_ieee(p)
    fixed = {name: int(size) for name, size in sizes.items() if name not in symbolic}
    name, out = node.target.overloadpacket.__name__, node.meta["val"]
    described = _described(name, dataclasses.replace(p, out_dtype=out.dtype), rowwise)

    def choice(values: tuple[int, ...]) -> str:
        at = {**fixed, **dict(zip(symbolic, values, strict=True))}
        problem = (at["m"], at["n"], k, at["batch"])
        if 0 in problem or worth_it(*problem, itemsize, sms) is not None:
            return choosing.STOCK
        ranked = tilings(*problem, itemsize, sms, ahead)
        rows = [rows_name(few)] if (few := few_splits(ranked)) is not None else []
        dot = dot_tiling(at["m"], at["n"], k, sms) if single else None
        first = dot.names(pdl) if dot and dot_wins(at["m"], at["n"], k, itemsize) else []
        return pick([*first, *names_of(ranked[0], itemsize, pdl), *rows], rowwise, fma)[0]

    planned, rest = known.of_plans(described, symbolic)
    site = f"{name} {p}"
    by_rule = dispatch.Sensitivity(
        site,
        tuple(sizes[name] for name in symbolic),
        choice,
        planned,
        rest,
        lambda candidate: described.named(candidate) is not None,
    )

    def measured(timer: Any) -> MeasuredSite:
        return MeasuredSite(NAME, site, described, (), measure_of(name), timer, node)

    key = f"{described.key} {site} {matching.consumers_key(node)}"
    return measured_ranges.in_autotune_mode(measured, by_rule, key)


def _mm(a: Any, b: Any, out_dtype: torch.dtype | None = None, *, layout: Any = None) -> Any:
    return _lower("mm", Problem(a, b, out_dtype or a.get_dtype()))


def _bmm(a: Any, b: Any, out_dtype: torch.dtype | None = None, *, layout: Any = None) -> Any:
    return _lower("bmm", Problem(a, b, out_dtype or a.get_dtype()))


def _add_product(
    name: str,
    bias: Any,
    a: Any,
    b: Any,
    out_dtype: torch.dtype | None = None,
    *,
    beta: Any = 1,
    alpha: Any = 1,
    layout: Any = None,
) -> Any:
    """beta * bias + alpha * A B, added in fp32 on the store of the sum, rounded once."""
    problem = Problem(a, b, torch.float32)
    if alpha == 0:  # the library does not read A and B then: NaN in them must not show
        return choosing.leave(NAME, f"{name} {problem}", "alpha is 0")
    product = _lower(name, problem)
    if product is None:
        return None
    if alpha != 1:
        product = compat_ir.call(aten.mul.Tensor, product, alpha)
    if beta != 0:
        bias = compat_ir.to_dtype(bias, torch.float32)
        if beta != 1:
            bias = compat_ir.call(aten.mul.Tensor, bias, beta)
        product = compat_ir.call(aten.add.Tensor, product, bias)
    return compat_ir.to_dtype(product, out_dtype or a.get_dtype())


_addmm = functools.partial(_add_product, "addmm")
_baddbmm = functools.partial(_add_product, "baddbmm")

registry.register(
    registry.Lowering(
        NAME,
        lower={
            aten.mm.default: _mm,
            aten.mm.dtype: _mm,
            aten.addmm.default: _addmm,
            aten.addmm.dtype: _addmm,
            aten.bmm.default: _bmm,
            aten.bmm.dtype: _bmm,
            aten.baddbmm.default: _baddbmm,
            aten.baddbmm.dtype: _baddbmm,
        },
        sizes={
            getattr(getattr(aten, op), overload): functools.partial(_sizes, position)
            for op, position in {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}.items()
            for overload in ("default", "dtype")
        },
        candidate_name=CANDIDATE,
    )
)
