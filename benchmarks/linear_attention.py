"""Causal linear attention: time of forward and backward, side by side.

One command, ``python -m benchmarks.linear_attention``. Every column's results are compared with
fp64 on two heads, then timed by graph replay with cold L2. It writes CSV, JSON and a table. Times
are us.

Columns
  ours      inductor_ext.ops.linear_attention
  fla       flash-linear-attention's chunk kernels for the same decay, where it can be imported:
            each tunes itself among its four configurations nearest to 4 warps and 3 stages
  compile   torch.compile of chunks as torch functions (no decay only)

``percent`` is the least bytes (every input read and every output written once) at this card's copy
speed, over the time; ``tflops`` counts the products that chunks of 64 need, each once.
``--parts check`` compares only and ``--parts time`` times only; ``--checks FILE`` has what an
earlier run compared. ``--tilings`` instead times the kernels at launch parameters around the chosen
ones, and ``--spellings`` ``tril(q @ k.mT) @ v`` as stock compiles it beside the operation, by size.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import importlib.util
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common

COLUMNS = ("ours", "fla", "compile")
SHAPES = ((4, 16, 8192, 128), (1, 16, 32768, 128), (8, 32, 2048, 64))
DECAYS = ("none", "head", "token", "channel")
KINDS = ("fwd", "bwd")
FIELDS = [
    "case", "kind", "decay", "column", "us", "percent", "tflops", "error", "check", "failure",
]  # fmt: skip
LARGEST_ERROR = 2e-2  # relative, of a result in bf16 against fp64
PARTS = ("check", "time")
CONFIGURATIONS = 4  # of each kernel of fla's that tunes itself


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape (B, H, T, D), a decay, and whether the forward or the backward is timed."""

    shape: tuple[int, int, int, int]
    decay: str
    kind: str

    @property
    def name(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def bytes(self) -> int:
        b, h, t, d = self.shape
        gates = {"none": 0, "head": 0, "token": 4, "channel": 4 * d}[self.decay]
        streams = {"fwd": (4, 1), "bwd": (7, 2)}[self.kind]  # q, k, v, o; and do, dq, dk, dv
        return b * h * t * (streams[0] * 2 * d + streams[1] * gates)

    @property
    def flops(self) -> float:
        b, h, t, d = self.shape
        products = {"fwd": 1, "bwd": 3}[self.kind]
        return products * b * h * t * (2 * 2 * 64 * d + 2 * 2 * d * d)


def draw(case: Case) -> list[Any]:
    """q, k, v and the decay, [B, T, H, D] transposed, as models have them."""
    import torch

    b, h, t, d = case.shape
    make: Any = {"device": "cuda", "dtype": torch.bfloat16}
    q, k, v = (torch.randn(b, t, h, d, **make).transpose(1, 2) for _ in range(3))
    k = k * d**-0.5
    shape = {"none": None, "head": (h,), "token": (b, t, h), "channel": (b, t, h, d)}[case.decay]
    if shape is None:
        return [q, k, v]
    g = -0.1 * torch.rand(shape, device="cuda")
    return [q, k, v, g if case.decay == "head" else g.transpose(1, 2)]


def ours(q: Any, k: Any, v: Any, g: Any = None) -> Any:
    """inductor_ext.ops.linear_attention."""
    from inductor_ext import ops

    return ops.linear_attention(q, k, v, decay=g)


def in_chunks(q: Any, k: Any, v: Any) -> Any:
    """Chunks of 64 as torch functions, without a decay."""
    import torch

    def cut(x: Any) -> Any:
        return x.unflatten(2, (-1, 64))

    scale = q.shape[-1] ** -0.5
    q, k, v = cut(q), cut(k), cut(v)
    states = k.transpose(-1, -2) @ v
    fronts = (states.float().cumsum(2) - states.float()).to(q.dtype)
    mask = torch.ones(64, 64, dtype=torch.bool, device=q.device).tril()
    scores = torch.where(mask, q @ k.transpose(-1, -2), 0.0)
    return ((scores @ v + q @ fronts) * scale).flatten(2, 3)


def by_fla(case: Case) -> Callable[..., Any] | None:
    """fla's function for the case's decay, from and to [B, H, T, D]."""
    if importlib.util.find_spec("fla") is None:
        return None
    from fla.ops.gla import chunk_gla
    from fla.ops.linear_attn import chunk_linear_attn
    from fla.ops.simple_gla import chunk_simple_gla

    def call(q: Any, k: Any, v: Any, g: Any = None) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scale = q.shape[-1] ** -0.5
        if case.decay == "none":
            out = chunk_linear_attn(q, k, v, scale=scale, normalize=False)[0]
        elif case.decay == "channel":
            out = chunk_gla(q, k, v, g.transpose(1, 2), scale=scale)[0]
        else:
            gates = g.transpose(1, 2) if g.dim() == 3 else g.expand(*q.shape[:3])
            out = chunk_simple_gla(q, k, v, gates, scale=scale)[0]
        return out.transpose(1, 2)

    fewer_configurations("fla.")
    return call


def fewer_configurations(package: str) -> None:
    """Leave each self-tuning kernel of the package the CONFIGURATIONS nearest to 4 warps and 3
    stages: all of them take minutes to compile."""
    from triton.runtime.autotuner import Autotuner

    def distance(config: Any) -> float:
        return abs(math.log2(config.num_warps) - 2) + abs(config.num_stages - 3)

    for name, module in list(sys.modules.items()):
        if not name.startswith(package) or module is None:
            continue
        for kernel in list(vars(module).values()):
            while kernel is not None and not isinstance(kernel, Autotuner):
                kernel = getattr(kernel, "fn", None) if hasattr(kernel, "run") else None
            if kernel is not None:
                kernel.configs = sorted(kernel.configs, key=distance)[:CONFIGURATIONS]


def program(case: Case, column: str) -> Callable[..., Any] | None:
    """A column's function of ``draw``'s tensors; None where it has none."""
    import torch

    if column == "ours":
        return ours
    if column == "fla":
        return by_fla(case)
    if case.decay != "none" or case.shape[2] % 64:
        return None
    return torch.compile(common.own_code(in_chunks, "in_chunks"), dynamic=False)


def truth(case: Case, inputs: list[Any], given: Any) -> list[Any]:
    """In fp64, of the first head of the first and the last head of the last sequence: the output,
    or the gradients (but that of a decay per head, which all sequences are in)."""
    import torch

    from inductor_ext.ops import _linear_attention_composed as composed

    found = []
    for b, h in ((0, 0), (-1, -1)):
        part = [x[h].view(1) if x.dim() == 1 else x[b, h][None, None] for x in inputs]
        part = [x.detach().double().requires_grad_() for x in part]
        g = part[3] if len(part) > 3 else None
        out, _ = composed.attention(part[0], part[1], part[2], g, None, case.shape[-1] ** -0.5)
        if case.kind == "fwd":
            found.append([out.detach()])
            continue
        grads = torch.autograd.grad(out, part, given[b, h][None, None].double())
        found.append([x for x, t in zip(grads, inputs, strict=True) if t.dim() > 1])
    return [torch.cat(pair) for pair in zip(*found, strict=True)]


def error(case: Case, fn: Callable[..., Any], inputs: list[Any], given: Any) -> float:
    """The largest relative error of a result's norm."""
    import torch

    from benchmarks.mhc import leaves_of

    right = truth(case, inputs, given)
    if case.kind == "fwd":
        with torch.no_grad():
            results = [fn(*inputs)]
    else:
        leaves = leaves_of(inputs)
        grads = torch.autograd.grad(fn(*leaves), leaves, given)
        results = [x for x in grads if x.dim() > 1]
    ends = [torch.stack([x[0, 0], x[-1, -1]])[:, None] for x in results]
    return max(
        ((x.double() - y).norm() / y.norm()).item() for x, y in zip(ends, right, strict=True)
    )


def earlier_checks(path: Path | None) -> dict[tuple[str, ...], dict[str, str]]:
    """The rows of a CSV file of an earlier run."""
    if path is None:
        return {}
    with path.open() as file:
        return {tuple(row[n] for n in FIELDS[:4]): row for row in csv.DictReader(file)}


def measure_column(
    case: Case, column: str, timer: Any, parts: Sequence[str], checked: dict[str, str] | None
) -> dict[str, Any] | None:
    """A CSV row; None where the column has no such program."""
    import torch

    from benchmarks.mhc import times
    from inductor_ext import measure

    fn = program(case, column)
    if fn is None:
        return None
    row: dict[str, Any] = {"case": case.name, "kind": case.kind, "decay": case.decay}
    row |= {"column": column}
    inputs = draw(case)
    given = torch.randn_like(inputs[2])
    if checked is not None:
        row |= {name: checked[name] for name in ("error", "check")}
    try:
        if "check" in parts:
            row["error"] = error(case, fn, inputs, given)
            row["check"] = "ok" if row["error"] <= LARGEST_ERROR else "wrong"
            torch.cuda.empty_cache()
        if "time" not in parts:
            return row
        us = times(case, fn, inputs, [given] if case.kind == "bwd" else [], timer)  # type: ignore[arg-type]
        row |= {"us": us, "percent": 100 * measure.copy_floor_us(case.bytes) / us}
        row["tflops"] = case.flops / us * 1e-6
    except Exception as failure:
        row["failure"] = measure.one_line(failure)
    torch.cuda.empty_cache()
    return row


# --- launch parameters ----------------------------------------------------------------------------


def _grid(case: Case) -> Iterator[tuple[Any, ...]]:
    """Launch parameters around the chosen ones."""
    from inductor_ext.templates import linear_attention_channel_launch as of_channels

    if case.decay != "channel":
        grid = itertools.product((64, 128), (32, 64, 128), (4, 8), (1, 2, 3), (1, 2, 4))
        yield from (g for g in grid if g[1] <= case.shape[-1])
        return
    import torch

    base = dataclasses.astuple(of_channels.tiling(torch.bfloat16, case.shape[-1]))
    yield base
    states = ((64, 64, 4, 3), (64, 64, 4, 1), (64, 32, 4, 3), (64, 128, 8, 2))
    if case.kind == "fwd":
        yield from ((base[0], *given, *base[5:]) for given in states)
    whole = itertools.product((64,), (64, 32, 16), (8, 4))
    for chunk, part, warps in (*whole, (32, 64, 4), (32, 32, 4)):
        given = (part, warps, *base[7:]) if case.kind == "fwd" else (*base[5:7], part, warps)
        yield (chunk, *base[1:5], *given)


def tilings(case: Case, timer: Any) -> Any:
    """(launch parameters, us) of the forward's or the backward's launches."""
    import torch
    from inductor_ext.templates import linear_attention_channel_launch as of_channels
    from inductor_ext.templates import linear_attention_launch as launch

    from inductor_ext import compat_launch, measure

    inputs = draw(case)
    q, k, v, g = (*inputs, None)[:4]
    do = torch.randn_like(v)
    scale = q.shape[-1] ** -0.5
    module: Any = of_channels if case.decay == "channel" else launch
    chunk = () if case.decay == "channel" else (0,)
    for given in _grid(case):
        chosen = module.Tiling(*given)

        def call(*tensors: Any, chosen: Any = chosen) -> Any:
            if case.kind == "fwd":
                return module.forward(*tensors[:3], g, None, scale, "ieee", *chunk, chosen)
            return module.backward(
                *tensors[:3], g, None, scale, "ieee", *chunk, tensors[3], None, g is not None,
                False, chosen,
            )[:3]  # fmt: skip

        try:
            with compat_launch.direct_launches():
                us = timer(call, measure.rotate((q, k, v, do)))
        except Exception as failure:
            yield given, math.nan, measure.one_line(failure)[:80]
            continue
        yield given, us, ""


# --- spellings ------------------------------------------------------------------------------------

# (heads of all sequences, tokens, head size)
SPELLED = (
    (64, 512, 64), (64, 512, 128), (16, 1024, 64), (256, 256, 64), (64, 1024, 128), (16, 2048, 64),
    (256, 512, 64), (4, 4096, 128), (64, 2048, 64), (64, 256, 128), (16, 512, 128),
)  # fmt: skip


def spelled(q: Any, k: Any, v: Any) -> Any:
    """Causal linear attention with scores of T x T."""
    import torch

    return torch.tril(q @ k.transpose(-1, -2)) @ v


def spellings(timer: Any, kinds: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """(heads, T, D, kind, us compiled by stock torch, us of the operation): forward alone, and
    forward and backward together for the kind "bwd"."""
    import torch

    import inductor_ext
    from benchmarks.mhc import times
    from inductor_ext import ops

    def operation(q: Any, k: Any, v: Any) -> Any:
        return ops.linear_attention(q, k, v, scale=1.0)

    stock = torch.compile(common.own_code(spelled, "spelled"), dynamic=False)
    for (heads, tokens, size), kind in itertools.product(SPELLED, kinds):
        case = Case((1, heads, tokens, size), "none", "both" if kind == "bwd" else kind)
        inputs = [x.contiguous() for x in draw(case)]
        given = [torch.randn_like(inputs[2])] if kind == "bwd" else []
        found = []
        for fn in (stock, operation):
            with inductor_ext.disable():
                found.append(times(case, fn, inputs, given, timer))  # type: ignore[arg-type]
        yield heads, tokens, size, kind, *(round(us, 2) for us in found)


# --- command line ---------------------------------------------------------------------------------


def _shapes(text: str) -> list[tuple[int, ...]]:
    shapes = [tuple(int(n) for n in part.split("x")) for part in text.split(",")]
    if any(len(s) != 4 for s in shapes):
        raise argparse.ArgumentTypeError(f"shapes are BxHxTxD, and {text!r} came")
    return shapes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "benchmarks.linear_attention", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--shapes", type=_shapes, default=list(SHAPES), help="BxHxTxD, comma-separated")
    add("--decays", type=common.names_of(DECAYS), default=list(DECAYS), help="comma-separated")
    add("--kinds", type=common.names_of(KINDS), default=list(KINDS), help="comma-separated")
    add("--columns", type=common.names_of(COLUMNS), default=list(COLUMNS), help="comma-separated")
    add("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the files")
    add("--name", default="linear_attention", help="what the files are called")
    add("--budget-seconds", type=float, help="stop between columns before this is used up")
    add("--parts", type=common.names_of(PARTS), default=list(PARTS), help="comma-separated")
    add("--checks", type=Path, help="a CSV file of this benchmark with what was compared before")
    add("--spellings", action="store_true", help="time tril(q @ k.mT) @ v beside the operation")
    add("--tilings", action="store_true", help="time launch parameters of the kernels")
    add("--list", action="store_true", help="print the cases in their order and stop")
    return parser


def main() -> None:
    """The command line."""
    args = _parser().parse_args()
    budget = common.Budget(args.budget_seconds)
    cases = [
        Case(s, g, k) for s in args.shapes for g in args.decays for k in args.kinds
    ]  # the most telling first
    if args.list:
        for case in cases:
            print(case.name, case.kind, case.decay)
        return

    import torch

    from benchmarks.mhc import QUICK_REPEATS, Timer
    from inductor_ext import measure

    try:
        measure.require_cuda()
    except RuntimeError as failure:
        sys.exit(str(failure))
    torch.manual_seed(0)
    meta = common.metadata("benchmarks.linear_attention")
    meta |= {"ceilings_per_us": dataclasses.asdict(measure.ceilings())}
    timer = Timer(QUICK_REPEATS)
    if args.spellings:
        for found in budget.take(spellings(timer, args.kinds)):
            print(*found, flush=True)
        return
    if args.tilings:
        for case in cases:
            print(case.name, case.kind, case.decay, flush=True)
            for found in budget.take(tilings(case, timer)):
                print(*found, flush=True)
        return
    rows = []
    checked = earlier_checks(args.checks)
    table = common.CsvFile(args.out / f"{args.name}.csv", FIELDS)
    for case, column in budget.take(list(itertools.product(cases, args.columns))):
        known = checked.get((case.name, case.kind, case.decay, column))
        row = measure_column(case, column, timer, args.parts, known)
        if row is not None:
            rows.append(row)
            table.write(row)
            print(*row.values(), flush=True)
    table.close()
    common.write_json(args.out / f"{args.name}.json", meta)
    by_case: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        of_case = by_case.setdefault((row["case"], row["kind"], row["decay"]), {})
        of_case[row["column"]] = row.get("us", math.nan) if row.get("check") == "ok" else math.nan
    common.print_table(
        "us of each column, and its time over ours",
        ["case", "kind", "decay", *args.columns, *(f"{c}/ours" for c in args.columns)],
        [
            (*key, *(us.get(c, math.nan) for c in args.columns),
             *(common.ratio(us.get(c, math.nan), us.get("ours", math.nan)) for c in args.columns))
            for key, us in by_case.items()
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
