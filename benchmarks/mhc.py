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
the same with _bwd (of a kept graph), chain and chain_both (four layers, forward; forward and
backward; net_us is without the stand-ins for the sublayers).

``percent`` is the least bytes of a stage at this card's copy speed, over the (net) time. chain_us
is the time of a link of a dependent chain of calls, at few tokens. ``--tilings`` instead times
single kernels at launch parameters around the chosen ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
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
from benchmarks.mhc_cases import COLUMNS, STAGES, Case

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

    def results(self, fn: Callable[..., Any]) -> Any:
        """What the case's kind computes."""
        if self.case.kind == "fwd":
            return without_grad(fn)(*self.inputs)
        return gradients(fn, leaves_of(self.inputs), self.given)

    def __call__(self, fn: Callable[..., Any], column: str) -> str:
        """ "ok", or what is wrong."""
        import torch

        from inductor_ext import measure

        got = cases_of.compared(self.case, self.results(fn))
        names = cases_of.names(self.case) if self.case.kind != "fwd" else map(str, range(len(got)))
        groups: dict[str, list[tuple[Any, Any, Any]]] = {}
        for name, *values in zip(names, got, self.truth, self.baseline, strict=False):
            groups.setdefault(name, []).append(tuple(values))
        for name, members in groups.items():
            if column in OFF_BY_DESIGN:
                worst = max(_relative(g, t) for g, t, _ in members)
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
            us = times(case, fn, judge.inputs, judge.given, timer)
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


# --- output ---------------------------------------------------------------------------------------

KEYS = ("stage", "tokens", "hidden", "column")
FIELDS = [*KEYS, "bytes", "us", "net_us", "percent", "chain_us", "first_call_s", "check", "failure"]


def _found(rows: Sequence[common.Row]) -> dict[tuple[str, ...], common.Row]:
    return {tuple(str(r[k]) for k in KEYS): r for r in rows}


def _time(row: common.Row | None) -> float:
    """The (net) time of a row whose result is right; NaN otherwise."""
    if row is None or row.get("check") != "ok":
        return math.nan
    return common.number(row.get("net_us"))


def markdown(rows: Sequence[common.Row]) -> str:
    """A table per stage: the time and percent of the bound of every column."""
    found, lines = _found(rows), []
    columns = [c for c in COLUMNS if any(r["column"] == c for r in rows)]
    mine = [c for c in ("ours", "plugin") if c in columns]
    for stage in (s for s in STAGES if any(r["stage"] == s for r in rows)):
        heads = [*columns, *(f"compile over {c}" for c in mine if "compile" in columns)]
        lines += ["", f"## {stage}", "", f"| tokens x hidden | {' | '.join(heads)} |"]
        lines += ["|---|" + "---|" * len(heads)]
        sizes = {(int(r["hidden"]), int(r["tokens"])) for r in rows if r["stage"] == stage}
        for hidden, tokens in sorted(sizes):
            key = stage, str(tokens), str(hidden)
            cells = [_cell(found.get((*key, c))) for c in columns]
            if "compile" in columns:
                stock = _time(found.get((*key, "compile")))
                ratios = [common.ratio(stock, _time(found.get((*key, c)))) for c in mine]
                cells += [f"{r:.2f}x" if r == r else "-" for r in ratios]
            lines.append(f"| {tokens} x {hidden} | {' | '.join(cells)} |")
    lines += ["", *goals(rows), ""]
    for r in rows:
        if r.get("failure") or r.get("check") not in (None, "", "ok"):
            what = r.get("failure") or r["check"]
            lines.append(f"- {r['stage']} {r['tokens']}x{r['hidden']} {r['column']}: {what}")
    return "\n".join(lines) + "\n"


def _cell(row: common.Row | None) -> str:
    us, percent = (common.number((row or {}).get(k)) for k in ("net_us", "percent"))
    if row is None or us != us:
        return "-"
    mark = "" if row.get("check") == "ok" else " wrong"
    chain = common.number(row.get("chain_us"))
    return f"{us:.3g} ({percent:.0f}%{f', chain {chain:.3g}' if chain == chain else ''}){mark}"


def goals(rows: Sequence[common.Row]) -> list[str]:
    """What was set as a goal, and what came, for this project's columns."""
    found, lines = _found(rows), []

    def say(name: str, value: float, goal: float, unit: str, most: bool) -> None:
        if value == value:
            met = value <= goal if most else value >= goal
            sign = "at most" if most else "at least"
            verdict = "met" if met else "missed"
            lines.append(f"- {verdict}: {name} {value:.3g}{unit} ({sign} {goal:g}{unit})")

    for (stage, tokens, hidden, column), row in sorted(found.items()):
        if column not in ("ours", "plugin"):
            continue
        own, at = _time(row), f"{tokens}x{hidden} {column}"
        key = tokens, hidden
        if int(tokens) >= 4096:
            if stage in cases_of.GOALS:
                per_hidden, least = cases_of.GOALS[stage]
                share = per_hidden / STAGES[stage].per_hidden
                say(f"{stage} {at}", common.number(row["percent"]) * share, least, "%", False)
            if stage == "post_pre":
                parts = sum(_time(found.get((s, *key, column))) for s in ("post", "pre"))
                say(f"post_pre over its parts {at}", common.ratio(own, parts), 0.85, "x", True)
            if stage in ("chain", "chain_both"):
                stock = _time(found.get((stage, *key, "compile")))
                least = 5 if stage == "chain" else 4
                say(f"compile over {stage} {at}", common.ratio(stock, own), least, "x", False)
        elif tokens == "1" and stage in ("pre", "post"):
            say(f"{stage} {at}", own, 10 if stage == "pre" else 3, " us", True)
    return lines


def write(out: Path, stem: str, rows: Sequence[common.Row], meta: Any) -> None:
    """JSON, summary and plot of rows whose CSV is on disk."""
    common.write_json(out / f"{stem}.json", meta)
    first = meta[0] if isinstance(meta, list) else meta
    title = f"mHC on {first['card']}, torch {first['torch']}, triton {first['triton']}"
    text = f"{title}, {first['date']}. us (percent of the least bytes at copy speed), net.\n"
    text += markdown(rows)
    (out / f"{stem}_summary.md").write_text(text)
    found = _found(rows)
    panels = []
    for stage in (s for s in STAGES if any(r["stage"] == s for r in rows)):
        for hidden in sorted({r["hidden"] for r in rows if r["stage"] == stage}, key=int):
            mine = [r for r in rows if r["stage"] == stage and r["hidden"] == hidden]
            sizes = sorted({int(r["tokens"]) for r in mine})
            lines = {
                c: [_time(found.get((stage, str(t), str(hidden), c))) for t in sizes]
                for c in COLUMNS
                if any(r["column"] == c for r in mine)
            }
            copy = first.get("ceilings_per_us", {}).get("copy", math.nan)
            lines["floor"] = [Case(stage, t, int(hidden)).bytes / copy for t in sizes]
            panels.append((f"{stage}, H = {hidden}", [str(t) for t in sizes], lines))
    try:
        common.plot_panels(out / f"{stem}.png", title, panels, columns=2)
    except ImportError as error:
        print(f"no plot: {error}", file=sys.stderr)
    print(text)


def merge(paths: Sequence[Path], out: Path) -> None:
    """Join the CSV and JSON files of several runs; of equal rows the last counts. Needs no card."""
    found = _found([row for path in paths for row in common.read_csv(path)])
    order = list(STAGES)
    rows = [
        found[k] for k in sorted(found, key=lambda k: (order.index(k[0]), int(k[2]), int(k[1])))
    ]
    table = common.CsvFile(out / "mhc.csv", FIELDS)
    for row in rows:
        table.write(row)
    table.close()
    runs = [json.loads(path.with_suffix(".json").read_text()) for path in paths]
    write(out, "mhc", rows, [m for run in runs for m in (run if isinstance(run, list) else [run])])


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
    add("--merge", nargs="+", type=Path, metavar="CSV", help="join the files of earlier runs")
    add("--list", action="store_true", help="print the cases in their order and stop")
    return parser


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
    if args.prewarm:
        left = budget.left()
        compiled = [c for c in args.columns if c in ("ours", "plugin", "compile")]
        tasks = [(case, c) for case in cases for c in compiled]
        common.run_in_pool(_prewarm_one, tasks, args.prewarm, None if left is None else left / 2)
    meta |= {"ceilings_per_us": dataclasses.asdict(measure.ceilings())}
    repeats = QUICK_REPEATS if args.quick else REPEATS
    timer = Timer(repeats)
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
