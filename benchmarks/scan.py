"""Scans: cumulative operations and linear recurrences, forward and backward, side by side.

One command, ``python -m benchmarks.scan``. Every column's result is checked in fp64 (a recurrence
by its own equation), then timed by graph replay with cold L2; CSV, JSON, a table and a plot.
``--report`` makes table and plot of the CSV again, and needs no card.

Columns
  ours     inductor_ext.ops.scan and linear_recurrence
  plugin   torch.compile of torch's own spelling, with the plugin
  compile  the same without it; not the backward of a recurrence, which is quadratic
  eager    torch's own operation; none for recurrences
  accel    accelerated-scan's scalar kernel, where it can be imported (time last, fp32)

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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common

COLUMNS = ("ours", "plugin", "compile", "eager", "accel")
FIELDS = ["case", "kind", "column", "us", "percent", "error", "check", "failure"]
SLOW_US = 20_000  # calls that take longer are timed once, by themselves: the host no longer counts
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

    torch.manual_seed(0)
    if case.dtype.startswith("int"):
        dtype = {"int32": torch.int32, "int64": torch.int64}[case.dtype]
        return [torch.randint(-1000, 1000, case.shape, device="cuda", dtype=dtype)]
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[case.dtype]
    x = torch.randn(case.shape, device="cuda", dtype=dtype)
    if case.op == "cumprod":
        return [1 + 1e-3 * x]
    return [torch.rand_like(x), x] if case.op == "recurrence" else [x]


def incoming(case: Case) -> Any:
    """The incoming gradient of a backward."""
    import torch

    return torch.randn_like(draw(case)[0])


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
    if column == "compile" and (case.op, case.kind) == ("recurrence", "bwd"):
        return None
    if column == "accel":
        last = case.dim == len(case.shape) - 1 == 2
        if case.op != "recurrence" or not last or not importlib.util.find_spec("accelerated_scan"):
            return None
        from accelerated_scan import scalar

        return scalar.scan
    return torch.compile(common.own_code(as_written(case), column), dynamic=False)


def error(case: Case, results: tuple[Any, ...], inputs: list[Any], given: Any) -> float:
    """The relative error of the results' norm; of a recurrence, of what its equation leaves."""
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
    truth = _truth(case)
    off = results[0].to(truth.dtype) - truth
    return (off.double().norm() / truth.double().norm()).item()


@functools.lru_cache(1)
def _truth(case: Case) -> Any:
    """What ``draw``'s inputs have as results, or gradients, in fp64; of integers exactly."""
    import torch

    x = draw(case)[0]
    fn, exact = as_written(case), x if case.dtype.startswith("int") else x.double()
    if case.kind == "bwd":
        exact = exact.requires_grad_()
        return torch.autograd.grad(fn(exact), exact, incoming(case).double())[0]
    truth = fn(exact)
    return truth[0] if case.op == "cummax" else truth


def _plugin(column: str) -> Any:
    """The plugin as the column has it."""
    import inductor_ext

    off = column == "compile"
    return inductor_ext.disable("scan", "scan_gradient") if off else inductor_ext.enable("scan")


def _results(case: Case, fn: Callable[..., Any], inputs: list[Any], given: Any) -> Any:
    """What the case's kind computes."""

    from benchmarks.mhc import gradients, leaves_of, without_grad

    if case.kind == "bwd":
        return gradients(fn, leaves_of(inputs), [given])
    return without_grad(fn)(*inputs)


def _call_us(case: Case, fn: Callable[..., Any], inputs: list[Any], given: Any) -> float:
    """us of one call as it is, host and all."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    _results(case, fn, inputs, given)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def measure_column(case: Case, column: str, timer: Any) -> dict[str, Any] | None:
    """A CSV row; None where the column has no such program."""
    import torch

    from benchmarks.mhc import times
    from inductor_ext import measure

    row: dict[str, Any] = {"case": case.name, "kind": case.kind, "column": column}
    try:
        fn = program(case, column)
        if fn is None:
            return None
        inputs = draw(case)
        given = incoming(case) if case.kind == "bwd" else None
        with _plugin(column):
            results = _results(case, fn, inputs, given)
            results = results if isinstance(results, tuple) else (results,)
            row["error"] = error(case, results, inputs, given)
            row["check"] = "ok" if row["error"] <= LARGEST_ERROR[case.dtype] else "wrong"
            del results
            torch.cuda.empty_cache()
            us = _call_us(case, fn, inputs, given)
            if us < SLOW_US or case.kind == "bwd":
                us = times(case, fn, inputs, [given] if case.kind == "bwd" else [], timer)  # type: ignore[arg-type]
        row |= {"us": us, "percent": 100 * measure.copy_floor_us(case.bytes) / us}
    except Exception as failure:
        row["failure"] = measure.one_line(failure)
    torch.cuda.empty_cache()
    return row


def warm(job: tuple[Case, str]) -> None:
    """Compile what a column needs, for the caches on disk."""
    import torch

    case, column = job
    fn = program(case, column)
    if fn is None:
        return
    inputs = draw(case)
    with _plugin(column):
        _results(case, fn, inputs, incoming(case) if case.kind == "bwd" else None)
    torch.cuda.synchronize()


def report(rows: Sequence[common.Row], out: Path, name: str) -> None:
    """A table of the rows (printed, and as Markdown) and a plot."""
    found: dict[tuple[str, str], dict[str, common.Row]] = {}
    for row in rows:
        if row.get("check") == "ok" and not math.isnan(common.number(row.get("us"))):
            found.setdefault((row["case"], row["kind"]), {})[row["column"]] = row
    columns = [c for c in COLUMNS if any(c in of for of in found.values())]
    table = []
    for key, of in found.items():
        us = {c: common.number(of[c]["us"]) if c in of else math.nan for c in columns}
        best = common.number(of["ours"]["percent"]) if "ours" in of else math.nan
        stock = common.ratio(us.get("compile", math.nan), us.get("plugin", math.nan))
        table.append((*key, *us.values(), best, stock))
    heads = ["case", "kind", *columns, "% of a copy", "compile/plugin"]
    common.print_table("us of each column; how near ours is to a copy of the bytes", heads, table)
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for case, kind, *numbers in table:
        cells = ["-" if math.isnan(x) else f"{x:.3g}" if x < 100 else f"{x:.0f}" for x in numbers]
        lines.append(f"| {' | '.join([case, kind, *cells])} |")
    (out / f"{name}_summary.md").write_text("us on one card.\n\n" + "\n".join(lines) + "\n")
    labels = [f"{case} {kind}" for case, kind in found]
    times = {c: [row[2 + i] for row in table] for i, c in enumerate(columns)}
    floor = [row[2 + columns.index("ours")] * row[-2] / 100 for row in table]
    try:
        common.plot_panels(
            out / f"{name}.png", "Scans", [("us", labels, times | {"floor": floor})], 1
        )
    except ImportError as error:
        print(f"no plot: {error}", file=sys.stderr)


# --- command line ---------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "benchmarks.scan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cases", default="", help="only cases whose name or kind has this in it")
    add("--shard", type=common.shard, default=(1, 1), help="i/n: only every n-th case")
    add("--columns", type=common.names_of(COLUMNS), default=list(COLUMNS), help="comma-separated")
    add("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the files")
    add("--name", default="scan", help="what the files are called")
    add("--budget-seconds", type=float, help="stop between columns before this is used up")
    add("--prewarm", type=int, default=0, help="compile in this many processes first")
    add("--report", action="store_true", help="table and plot of the CSV that is there, and stop")
    add("--list", action="store_true", help="print the cases in their order and stop")
    return parser


def main() -> None:
    """The command line."""
    args = _parser().parse_args()
    budget = common.Budget(args.budget_seconds)
    cases = [case for case in CASES if args.cases in f"{case.name} {case.kind}"]
    cases = cases[args.shard[0] - 1 :: args.shard[1]]
    if args.list:
        for case in cases:
            print(case.name, case.kind)
        return

    if args.report:
        report(common.read_csv(args.out / f"{args.name}.csv"), args.out, args.name)
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
        left = budget.left()
        tasks = [(job,) for job in jobs if job[1] not in ("eager", "accel")]
        common.run_in_pool(warm, tasks, args.prewarm, None if left is None else left / 2)
    torch.manual_seed(0)
    meta = common.metadata("benchmarks.scan")
    meta |= {"ceilings_per_us": dataclasses.asdict(measure.ceilings())}
    timer = Timer(QUICK_REPEATS)
    table = common.CsvFile(args.out / f"{args.name}.csv", FIELDS)
    rows = []
    for case, column in budget.take(jobs):
        row = measure_column(case, column, timer)
        if row is not None:
            rows.append(row)
            table.write(row)
            print(*row.values(), flush=True)
    table.close()
    common.write_json(args.out / f"{args.name}.json", meta)
    report(rows, args.out, args.name)


if __name__ == "__main__":
    main()
