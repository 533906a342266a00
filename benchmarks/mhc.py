"""mHC (manifold-constrained hyper-connections): time and bytes, side by side.

One command, ``python -m benchmarks.mhc``. Every column is checked against fp64 and eager's own
error, then timed by graph replay with cold L2 (the input sets in turn exceed it). It writes CSV,
JSON, a plot and a summary. Times are us.

Columns
  eager, compile, max_autotune   the DeepSeek form as models have it; stock torch.compile
  liger                          liger-kernel in a process of its own, given ``--liger-seconds``
  ours                           inductor_ext.ops, called as they are
  plugin                         torch.compile of the eager column's code, with the plugin

Stages: pre (gates and layer input), post (next residual), post_pre (post and the next layer's pre),
kronecker (KromHC's pre), the same with _bwd (of a kept graph), chain and chain_both (four layers,
forward; forward and backward; net_us is without the stand-ins for the sublayers).

``percent`` is the least bytes of a stage at this card's copy speed, over the (net) time. chain_us
is the time of a link of a dependent chain of calls, at few tokens. ``--tilings`` instead times
single kernels at launch parameters around the chosen ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks import mhc_cases as cases_of
from benchmarks import mhc_tilings as tilings
from benchmarks.mhc_cases import COLUMNS, STAGES, Case
from benchmarks.mhc_report import FIELDS, merge, write

REPEATS, QUICK_REPEATS = 15, 7
LEAST_US, MOST_US = 500.0, 1e6  # of one replay; of all replays of a column
CHAINED_TOKENS = 64  # up to so many, latency is told as well
CHAINED = ("ours", "plugin", "compile")
OFF_BY_DESIGN = {"liger": 2e-2}  # relative error of another Sinkhorn and of W in bf16

# --- measurement ----------------------------------------------------------------------------------


class Timer:
    """Median time of a call over its input sets, by graph replay, in us."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats

    def __call__(self, call: Callable[..., Any], sets: Sequence[Any]) -> float:
        from inductor_ext import measure

        captured = measure.capture(call, sets, calls=len(sets))
        host_us, us = self._replay(captured, 0.0)
        passes = math.ceil(LEAST_US / us)
        if passes > 1:
            captured = measure.capture(call, sets, calls=len(sets) * passes)
            host_us, us = self._replay(captured, 0.0)
        # What the first replay took the host, it spins ahead of the others.
        lead = 1.5 * host_us + 200
        repeats = max(min(self.repeats, round(MOST_US / (us + lead))), 3)
        times = [self._replay(captured, lead)[1] for _ in range(repeats + 1)]
        return statistics.median(times[1:]) / captured.calls

    def _replay(self, captured: Any, lead_us: float) -> tuple[float, float]:
        """(host us of enqueueing, us on the card)."""
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(int(lead_us * 2000))  # cycles
        start.record()
        begun = time.perf_counter()
        captured.graph.replay()
        host_us = (time.perf_counter() - begun) * 1e6
        end.record()
        end.synchronize()
        return host_us, start.elapsed_time(end) * 1e3

    def chained(self, call: Callable[..., Any], inputs: Sequence[Any]) -> float:
        """The time of a link of a dependent chain of calls."""
        from inductor_ext import measure

        return measure.chain_time(call, inputs, repeats=self.repeats).us


def without_grad(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The forward alone."""
    import torch

    def forward(*inputs: Any) -> Any:
        with torch.no_grad():
            return fn(*inputs)

    return forward


def leaves_of(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The inputs as what gradients are asked for."""
    return tuple(t.detach().requires_grad_() for t in inputs)


def gradients(fn: Callable[..., Any], inputs: Sequence[Any], given: Sequence[Any]) -> Any:
    """Forward and backward: the gradients of all inputs, which are leaves."""
    import torch

    return torch.autograd.grad(fn(*inputs), inputs, given)


def kept_backward(outputs: Any, leaves: Any, given: Any) -> Any:
    """The backward of a graph that is kept."""
    import torch

    return torch.autograd.grad(outputs, leaves, given, retain_graph=True)


def times(
    case: Case, fn: Callable[..., Any], inputs: Sequence[Any], given: Sequence[Any], timer: Timer
) -> float:
    """us of the case's kind."""
    import torch

    from inductor_ext import measure

    if case.kind == "fwd":
        return timer(without_grad(fn), measure.rotate(inputs))
    count = len(inputs)
    sets = [(leaves_of(s[:count]), s[count:]) for s in measure.rotate((*inputs, *given))]
    if case.kind == "both":
        return timer(functools.partial(gradients, fn), sets)
    # A backward runs on the stream that its forward ran on: the one that captures.
    stream = measure.capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        recorded = [(fn(*leaves), leaves, seeds) for leaves, seeds in sets]
    return timer(kept_backward, recorded)


class Judge:
    """The truth and eager's own results of a case, for as many columns as are measured."""

    def __init__(self, case: Case, inputs: Sequence[Any]) -> None:
        self.case, self.inputs = case, inputs
        self.alone: float | None = None
        eager = cases_of.as_written(case.function)
        with cases_of.setting("eager"):
            outputs = without_grad(eager)(*inputs)
            self.given = cases_of.seeds(case, outputs) if case.kind != "fwd" else []
            del outputs
            self.truth = cases_of.truth(case, inputs, self.given)
            self.baseline = cases_of.compared(case, self.results(eager))
        _release()

    def results(self, fn: Callable[..., Any], column: str = "eager") -> Any:
        """What the case's kind computes."""
        inputs = cases_of.adapted(self.case, column, self.inputs)
        if self.case.kind == "fwd":
            return without_grad(fn)(*inputs)
        return gradients(fn, leaves_of(inputs), self.given)

    def __call__(self, fn: Callable[..., Any], column: str) -> str:
        """ "ok", or what is wrong; of what is off by design, what is in 16 bits."""
        import torch

        from inductor_ext import measure

        got = cases_of.compared(self.case, self.results(fn, column))
        names = cases_of.names(self.case) if self.case.kind != "fwd" else map(str, range(len(got)))
        groups: dict[str, list[tuple[Any, Any, Any]]] = {}
        for name, *values in zip(names, got, self.truth, self.baseline, strict=False):
            groups.setdefault(name, []).append(tuple(values))
        for name, members in groups.items():
            if column in OFF_BY_DESIGN:
                near = (_relative(g, t) for g, t, b in members if b.dtype == torch.bfloat16)
                worst = max(near, default=0.0)
                if not worst < OFF_BY_DESIGN[column]:
                    return f"{name}: relative error {worst:.2g}"
                continue
            # One layer's scale has three numbers, whose luck says little of eager's error.
            parts = [torch.cat([m[i].flatten() for m in members]) for i in range(3)]
            verdict = measure.check(*parts, tf32=True)
            if not verdict.ok:
                return f"{name}: {verdict.reason}"
        return "ok"


def _relative(got: Any, truth: Any) -> float:
    return ((got.double() - truth).norm() / truth.norm()).item()


def _release() -> None:
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def measure_column(case: Case, column: str, judge: Judge, timer: Timer) -> dict[str, Any] | None:
    """A CSV row; None where the column has no such program."""
    import torch

    from inductor_ext import measure

    row: dict[str, Any] = {"stage": case.stage, "tokens": case.tokens, "hidden": case.hidden}
    row |= {"column": column, "bytes": case.bytes}
    fn = cases_of.program(case, column)
    if fn is None:
        return None
    with cases_of.setting(column):
        try:
            begun = time.perf_counter()
            row["check"] = judge(fn, column)
            torch.cuda.synchronize()
            row["first_call_s"] = time.perf_counter() - begun
            _release()
            inputs = cases_of.adapted(case, column, judge.inputs)
            us = times(case, fn, inputs, judge.given, timer)
            net = us
            if case.function == "chain":
                net -= stand_ins(case, judge, timer)
            percent = common.ratio(100 * measure.copy_floor_us(case.bytes), net)
            row |= {"us": us, "net_us": net, "percent": percent}
            if column in CHAINED and case.kind == "fwd" and case.tokens <= CHAINED_TOKENS:
                row["chain_us"] = timer.chained(without_grad(fn), judge.inputs)
        except Exception as error:
            row["failure"] = measure.one_line(error)
    _release()
    return row


def stand_ins(case: Case, judge: Judge, timer: Timer) -> float:
    """us of a chain's stand-ins by themselves, eager, forward or both; measured once per case."""
    import torch

    if judge.alone is None:
        u = torch.randn_like(judge.inputs[0][:, 0])
        thin = [v for i, v in enumerate(judge.inputs[1:]) if i % 5 > 2]
        given = [torch.randn_like(u)] if case.kind == "both" else []
        judge.alone = times(case, cases_of.thin_alone, [u, *thin], given, timer)
    return judge.alone


def measure_case(case: Case, columns: Sequence[str], timer: Timer) -> Iterator[dict[str, Any]]:
    """The CSV rows of some columns of a case."""
    judge = Judge(case, cases_of.draw(case))
    for column in columns:
        row = measure_column(case, column, judge, timer)
        if row is not None:
            yield row


# --- ahead of time, and within a limit ------------------------------------------------------------


def _prewarm_one(case: Case, column: str) -> str:
    """Compile a column of a case, for the caches."""
    import torch

    inputs = cases_of.draw(case)
    fn = cases_of.program(case, column)
    assert fn is not None
    with cases_of.setting(column):
        if case.kind == "fwd":
            without_grad(fn)(*inputs)
        else:
            leaves = leaves_of(inputs)
            outputs = fn(*leaves)
            torch.autograd.grad(outputs, leaves, [torch.ones_like(o) for o in outputs])
    torch.cuda.synchronize()
    return column


def _limited(queue: Any, case: Case, column: str, repeats: int) -> None:
    timer = Timer(repeats)
    queue.put(list(measure_case(case, [column], timer)))


def within(seconds: float, case: Case, column: str, repeats: int) -> list[dict[str, Any]]:
    """The rows of a column measured in a process of its own, which is ended when time is up."""
    context = multiprocessing.get_context("spawn")
    queue: Any = context.Queue()
    process = context.Process(target=_limited, args=(queue, case, column, repeats))
    process.start()
    deadline = time.monotonic() + seconds
    rows = None
    while rows is None and time.monotonic() < deadline and process.is_alive():
        if not queue.empty():
            rows = queue.get()
        time.sleep(0.1)
    if rows is None and not queue.empty():
        rows = queue.get()
    if rows is None:
        failure = f"not done within {seconds:.0f} s" if process.is_alive() else "ended early"
        row = {"stage": case.stage, "tokens": case.tokens, "hidden": case.hidden}
        rows = [row | {"column": column, "bytes": case.bytes, "failure": failure}]
    process.kill()
    process.join()
    return rows


# --- command line ---------------------------------------------------------------------------------


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "benchmarks.mhc", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    stages = common.names_of(tuple(STAGES))
    add("--stage", type=stages, default=list(STAGES), help="comma-separated")
    add("--tokens", type=_integers, help="comma-separated numbers of tokens")
    add("--hidden", type=_integers, help="comma-separated hidden sizes")
    known = common.names_of(COLUMNS)
    add("--columns", type=known, default=list(cases_of.DEFAULT_COLUMNS), help="comma-separated")
    add("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the files")
    add("--name", default="mhc", help="what the files are called")
    add("--quick", action="store_true", help="fewer sizes and repeats")
    add("--budget-seconds", type=float, help="stop between columns before this is used up")
    add("--prewarm", type=int, default=0, metavar="N", help="compile ahead in N processes")
    add("--liger-seconds", type=float, default=60.0, help="what one of Liger's cases may take")
    add("--tilings", action="store_true", help="time launch parameters of the kernels")
    kernels = common.names_of(tuple(tilings.KERNELS))
    add("--kernel", type=kernels, default=list(tilings.KERNELS), help="of --tilings, by commas")
    add("--merge", nargs="+", type=Path, metavar="CSV", help="join the files of earlier runs")
    add("--list", action="store_true", help="print the cases in their order and stop")
    return parser


def measure_tilings(
    args: argparse.Namespace, budget: common.Budget, timer: Timer, meta: dict[str, Any]
) -> None:
    """``--tilings``: a CSV row per kernel, size and options, each kernel in its share of time."""
    from inductor_ext import measure

    shapes = list(tilings.SHAPES[:1] if args.quick else tilings.SHAPES)
    if args.tokens or args.hidden:
        shapes = [(t, h) for t in args.tokens or (4096,) for h in args.hidden or (7168,)]
    if args.prewarm:
        left = budget.left()
        half = None if left is None else left / 2
        tasks = tilings.tasks(args.kernel, shapes)
        common.run_in_pool(tilings.compile_one, tasks, args.prewarm, half)
    meta |= {"ceilings_per_us": dataclasses.asdict(measure.ceilings())}
    table = common.CsvFile(args.out / f"{args.name}_tilings.csv", tilings.FIELDS)
    work = [(shape, kernel) for shape in shapes for kernel in args.kernel]
    for i, (shape, kernel) in enumerate(work):
        left = budget.left()
        share = common.Budget(None if left is None else left / (len(work) - i))
        try:
            for row in share.take(tilings.measure(kernel, *shape, timer)):
                table.write(row)
                print(
                    *(f"{v:.4g}" if isinstance(v, float) else v for v in row.values()), flush=True
                )
        except Exception as error:
            print(kernel, *shape, measure.one_line(error), file=sys.stderr, flush=True)
        _release()
    table.close()
    common.write_json(args.out / f"{args.name}_tilings.json", meta)


def main() -> None:
    """The command line."""
    args = _parser().parse_args()
    budget = common.Budget(args.budget_seconds)
    cases = cases_of.ordered(args.stage, args.tokens, args.hidden, args.quick)
    work = cases_of.passes(cases, args.columns)
    if args.list:
        for case, columns in work:
            print(case.stage, case.name, *columns)
        return
    if args.merge:
        merge(args.merge, args.out)
        return

    import torch
    from tqdm import tqdm

    from inductor_ext import measure

    try:
        measure.require_cuda()
    except RuntimeError as error:
        sys.exit(str(error))
    torch.manual_seed(0)
    meta = common.metadata("benchmarks.mhc")
    repeats = QUICK_REPEATS if args.quick else REPEATS
    timer = Timer(repeats)
    if args.tilings:
        measure_tilings(args, budget, timer, meta)
        return
    if args.prewarm:
        left = budget.left()
        compiled = [c for c in args.columns if c in CHAINED]
        tasks = [(case, c) for case in cases for c in compiled]
        common.run_in_pool(_prewarm_one, tasks, args.prewarm, None if left is None else left / 2)
    meta |= {"ceilings_per_us": dataclasses.asdict(measure.ceilings())}
    rows: list[dict[str, Any]] = []
    table = common.CsvFile(args.out / f"{args.name}.csv", FIELDS)
    for case, columns in tqdm(budget.take(work), "cases", len(work), mininterval=5):
        if columns == ("liger",):
            found: Any = within(args.liger_seconds, case, "liger", repeats)
        else:
            found = measure_case(case, columns, timer)
        try:
            for row in found:
                rows.append(row)
                table.write(row)
                print(*row.values(), flush=True)
        except Exception as error:
            print(case.stage, case.name, measure.one_line(error), file=sys.stderr, flush=True)
    table.close()
    write(args.out, args.name, rows, meta | {"cases_asked": len(work)})


if __name__ == "__main__":
    main()
