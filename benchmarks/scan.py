"""Scans: cumulative operations and linear recurrences, forward and backward, side by side.

One command, ``python -m benchmarks.scan``. Every column's result is checked in fp64 (a recurrence by
its own equation), then timed by graph replay with cold L2; CSV, JSON, a table and a plot.

Columns
  ours     inductor_ext.ops.scan and linear_recurrence
  plugin   torch.compile of torch's own spelling, with the plugin
  compile  the same without it
  eager    torch's own operation; none for recurrences
  accel    accelerated-scan's Triton kernel, where it can be imported (time last, fp32)

``percent`` is the least bytes (inputs read once, results written once) at this card's copy speed,
over the time.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import common

COLUMNS = ("ours", "plugin", "compile", "eager", "accel")
FIELDS = ["case", "kind", "column", "us", "percent", "error", "check", "failure"]
LARGEST_ERROR = {"fp32": 1e-5, "bf16": 1e-2, "int64": 0.0, "int32": 0.0}


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation along ``dim`` of a shape; ``kind``: "fwd" or "bwd"."""

    op: str
    shape: tuple[int, ...]
    dim: int
    dtype: str = "fp32"
    kind: str = "fwd"

    @property
    def name(self) -> str:
        shape = "x".join(
            f"2^{n.bit_length() - 1}" if n & (n - 1) == 0 else str(n) for n in self.shape
        )
        return f"{self.op} {shape} dim {self.dim} {self.dtype}"

    @property
    def bytes(self) -> int:
        size = {"bf16": 2, "fp32": 4, "int32": 4, "int64": 8}[self.dtype]
        streams = {"recurrence": (3, 5), "cumprod": (2, 4)}.get(self.op, (2, 2))
        per = streams[self.kind == "bwd"] * size
        if self.op == "cummax":
            per += 8
        if self.dtype == "int32":
            per += 4  # sums of int32 are int64
        return math.prod(self.shape) * per


CASES = [
    Case("cumsum", (1 << 28,), 0),
    Case("cumsum", (4096, 65536), 1),
    Case("cumsum", (1 << 20, 32), 0),
    Case("recurrence", (8, 2048, 4096), 2),
    Case("recurrence", (8, 4096, 2048), 1),
    Case("recurrence", (8, 2048, 4096), 2, kind="bwd"),
    Case("recurrence", (8, 4096, 2048), 1, kind="bwd"),
    Case("recurrence", (1, 1 << 24), 1),
    Case("cumsum", (256, 262144), 1),
    Case("cumsum", (8, 1 << 22), 1),
    Case("reversed", (4096, 65536), 1),
    Case("cumsum", (4096, 4096), 0),
    Case("cumsum", (8, 4096, 256), 1),
    Case("cumsum", (65536, 128), 0),
    Case("cumsum", (1 << 20, 2), 0),
    Case("cummax", (4096, 16384), 1),
    Case("logcumsumexp", (4096, 16384), 1),
    Case("cumprod", (4096, 16384), 1, kind="bwd"),
    Case("cumsum", (65536, 4096), 1),
    Case("cumsum", (1 << 20, 128), 1),
    Case("cumsum", (1 << 28,), 0, "bf16"),
    Case("cumsum", (1 << 28,), 0, "int32"),
    Case("cumsum", (1 << 27,), 0, "int64"),
    Case("cummax", (1 << 28,), 0),
    Case("logcumsumexp", (1 << 28,), 0),
    Case("cumsum", (1 << 24,), 0),
    Case("cumsum", (1 << 20,), 0),
    Case("cumsum", (1 << 30,), 0),
]  # the most telling first


def draw(case: Case) -> list[Any]:
    """The operation's inputs."""
    import torch

    if case.dtype.startswith("int"):
        dtype = {"int32": torch.int32, "int64": torch.int64}[case.dtype]
        return [torch.randint(-1000, 1000, case.shape, device="cuda", dtype=dtype)]
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[case.dtype]
    x = torch.randn(case.shape, device="cuda", dtype=dtype)
    if case.op == "cumprod":
        return [1 + 1e-3 * x]
    return [torch.rand_like(x), x] if case.op == "recurrence" else [x]


def as_written(case: Case) -> Callable[..., Any]:
    """torch's own spelling."""
    import torch
    from torch._higher_order_ops.associative_scan import associative_scan

    dim, op = case.dim, case.op

    def reversed_sum(x: Any) -> Any:
        return x.flip(dim).cumsum(dim).flip(dim)

    def after(first: Any, second: Any) -> Any:
        return first[0] * second[0], second[0] * first[1] + second[1]

    def recurrence(a: Any, b: Any) -> Any:
        return associative_scan(after, (a, b), dim, combine_mode="pointwise")[1]

    def cumulative(x: Any) -> Any:
        return getattr(torch, op)(x, dim)

    return {"reversed": reversed_sum, "recurrence": recurrence}.get(op, cumulative)


def by_ours(case: Case) -> Callable[..., Any]:
    """The package's operation."""
    from inductor_ext import ops

    if case.op == "recurrence":
        return functools.partial(ops.linear_recurrence, dim=case.dim)
    names = {"cumsum": "sum", "reversed": "sum", "cumprod": "prod", "logcumsumexp": "logsumexp"}
    op = names.get(case.op, case.op)
    return lambda x: ops.scan(x, op, case.dim, reverse=case.op == "reversed")


def program(case: Case, column: str) -> Callable[..., Any] | None:
    """A column's function of ``draw``'s tensors; None where it has none."""
    import torch

    if column == "ours":
        return by_ours(case)
    if column == "eager":
        return None if case.op == "recurrence" else as_written(case)
    if column == "accel":
        power = case.shape[-1] & (case.shape[-1] - 1) == 0
        fits = case.op == "recurrence" and case.dim == len(case.shape) - 1 == 2 and power
        if not fits or importlib.util.find_spec("accelerated_scan") is None:
            return None
        from accelerated_scan.triton import scan

        return scan
    return torch.compile(common.own_code(as_written(case), column), dynamic=False)


def error(case: Case, results: tuple[Any, ...], inputs: list[Any], given: Any) -> float:
    """The relative error of the results' norm; of a recurrence, of what its equation leaves."""
    import torch

    dim = case.dim

    def cut(x: Any, start: int) -> Any:
        return x.narrow(dim, start, x.shape[dim] - 1)

    if case.op == "recurrence":
        a, b = inputs
        if case.kind == "fwd":
            h = results[0]
            left = cut(h, 1).double() - (cut(a, 1).double() * cut(h, 0) + cut(b, 1))
            return (left.norm() / h.double().norm()).item()
        da, db = results
        left = cut(db, 0).double() - (cut(a, 1).double() * cut(db, 1) + cut(given, 0))
        h = by_ours(case)(a.detach(), b.detach()).double()
        off = cut(da, 1) - cut(db, 1).double() * cut(h, 0)
        return max((left.norm() / db.double().norm()).item(), (off.norm() / da.norm()).item())
    exact = inputs[0].detach() if case.dtype.startswith("int") else inputs[0].detach().double()
    fn = as_written(case)
    if case.kind == "bwd":
        exact = exact.requires_grad_()
        truth = torch.autograd.grad(fn(exact), exact, given.double())[0]
    else:
        truth = fn(exact)
        truth = truth[0] if case.op == "cummax" else truth
    off = results[0].to(truth.dtype) - truth
    return (off.double().norm() / truth.double().norm()).item()


def measure_column(case: Case, column: str, timer: Any) -> dict[str, Any] | None:
    """A CSV row; None where the column has no such program."""
    import torch

    import inductor_ext
    from benchmarks.mhc import leaves_of, times
    from inductor_ext import measure

    fn = program(case, column)
    if fn is None:
        return None
    row: dict[str, Any] = {"case": case.name, "kind": case.kind, "column": column}
    inputs = draw(case)
    given = torch.randn_like(inputs[0]) if case.kind == "bwd" else None
    try:
        with (
            inductor_ext.disable("scan", "scan_gradient")
            if column == "compile"
            else inductor_ext.enable("scan")
        ):
            if case.kind == "bwd":
                leaves = leaves_of(inputs)
                results = torch.autograd.grad(fn(*leaves), leaves, given)
            else:
                with torch.no_grad():
                    results = fn(*inputs)
            results = results if isinstance(results, tuple) else (results,)
            row["error"] = error(case, results, inputs, given)
            row["check"] = "ok" if row["error"] <= LARGEST_ERROR[case.dtype] else "wrong"
            del results
            torch.cuda.empty_cache()
            us = times(case, fn, inputs, [given] if case.kind == "bwd" else [], timer)  # type: ignore[arg-type]
        row |= {"us": us, "percent": 100 * measure.copy_floor_us(case.bytes) / us}
    except Exception as failure:
        row["failure"] = measure.one_line(failure)
    torch.cuda.empty_cache()
    return row


def warm(job: tuple[Case, str]) -> None:
    """Compile what a column needs, for the caches on disk."""
    import torch

    import inductor_ext
    from benchmarks.mhc import leaves_of

    case, column = job
    fn = program(case, column)
    if fn is None:
        return
    inputs = draw(case)
    with (
        inductor_ext.disable("scan", "scan_gradient")
        if column == "compile"
        else inductor_ext.enable("scan")
    ):
        if case.kind == "bwd":
            leaves = leaves_of(inputs)
            torch.autograd.grad(fn(*leaves), leaves, torch.randn_like(inputs[0]))
        else:
            with torch.no_grad():
                fn(*inputs)
    torch.cuda.synchronize()


# --- command line ---------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "benchmarks.scan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cases", default="", help="only cases whose name or kind has this in it")
    add("--columns", type=common.names_of(COLUMNS), default=list(COLUMNS), help="comma-separated")
    add("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the files")
    add("--name", default="scan", help="what the files are called")
    add("--budget-seconds", type=float, help="stop between columns before this is used up")
    add("--prewarm", type=int, default=0, help="compile in this many processes first")
    add("--list", action="store_true", help="print the cases in their order and stop")
    return parser


def main() -> None:
    """The command line."""
    args = _parser().parse_args()
    budget = common.Budget(args.budget_seconds)
    cases = [case for case in CASES if args.cases in f"{case.name} {case.kind}"]
    if args.list:
        for case in cases:
            print(case.name, case.kind)
        return

    import torch

    from benchmarks.mhc import QUICK_REPEATS, Timer
    from inductor_ext import measure

    try:
        measure.require_cuda()
    except RuntimeError as failure:
        sys.exit(str(failure))
    jobs = list(itertools.product(cases, args.columns))
    if args.prewarm:
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor, as_completed

        from tqdm import tqdm

        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(args.prewarm, context) as pool:
            waiting = [pool.submit(warm, job) for job in jobs if job[1] not in ("eager", "accel")]
            for done in tqdm(as_completed(waiting), "compiling", len(waiting)):
                done.exception()  # the measurement says what failed
    torch.manual_seed(0)
    meta = common.metadata("benchmarks.scan")
    meta |= {"ceilings_per_us": dataclasses.asdict(measure.ceilings())}
    timer = Timer(QUICK_REPEATS)
    table = common.CsvFile(args.out / f"{args.name}.csv", FIELDS)
    us: dict[tuple[str, str], dict[str, float]] = {}
    percents: dict[tuple[str, str], float] = {}
    for case, column in budget.take(jobs):
        row = measure_column(case, column, timer)
        if row is None:
            continue
        table.write(row)
        print(*row.values(), flush=True)
        if row.get("check") == "ok" and "us" in row:
            us.setdefault((case.name, case.kind), {})[column] = row["us"]
            if column == "ours":
                percents[case.name, case.kind] = row["percent"]
    table.close()
    common.write_json(args.out / f"{args.name}.json", meta)
    common.print_table(
        "us of each column, and how near ours is to a copy of the bytes",
        ["case", "kind", *args.columns, "percent"],
        [
            (*key, *(times.get(c, math.nan) for c in args.columns), percents.get(key, math.nan))
            for key, times in us.items()
        ],
    )


if __name__ == "__main__":
    main()
