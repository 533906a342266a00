"""Attention: forward and backward of every mask, side by side.

One command, ``python -m benchmarks.attention``. Every column's results are compared with fp64 on
one group of heads, then timed; CSV, JSON, a table in Markdown and a plot. ``--report`` makes table
and plot of the CSV again, and needs no card. Decoding and index lists are in
``benchmarks.attention_decode``.

Columns
  ours     inductor_ext.ops.attention: a kernel of its own, or cuDNN where that is the choice
  kernel   the same without cuDNN
  cudnn    scaled_dot_product_attention by cuDNN; fa2: by FlashAttention-2
  flex     FlexAttention, compiled; with ``--peers`` its tilings are measured first (max-autotune)
  plugin   torch.compile of the program as model code writes it, with the plugin
  compile  the same without it; eager: not compiled

``tflops`` counts two products of every pair that the mask keeps, five for a backward; ``peak_mib``
is the memory that a call adds at its peak. Programs with all scores in memory are left out where
those would need more than 2 GB in 16 bits.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import attention_cases as cases_of
from benchmarks import common
from benchmarks.attention_cases import CASES, Case

COLUMNS = ("ours", "kernel", "cudnn", "fa2", "flex", "plugin", "compile", "eager")
WHOLE = ("plugin", "compile", "eager")  # may have all scores in memory
FIELDS = [
    "case", "kind", "column", "us", "tflops", "error", "check", "peak_mib", "failure",
]  # fmt: skip
LARGEST_ERROR = 2e-2  # relative, of the norm of a result in bf16 against fp64
LARGEST_SCORES = 2.2e9  # bytes of one matrix of scores
RUN_US, REPEATS = 10e3, 3


def columns_of(case: Case, asked: Sequence[str]) -> tuple[list[str], list[str]]:
    """The columns that have such a program: those that say most, and the others."""
    plain, family = case.mask in ("causal", "full"), case.mask.startswith("family")
    if plain:
        most, others = ["ours", "kernel", "cudnn", "flex"], ["fa2"]
    elif family:
        most, others = ["plugin", "compile"], ["ours"]
    elif case.mask.startswith("colsum"):
        most, others = ["ours"], []
    else:
        most, others = ["ours", "flex"], []
    if case.scores_bytes <= LARGEST_SCORES and (not plain or case.size == 4096):
        others += [c for c in WHOLE if c not in most]
    return [c for c in asked if c in most], [c for c in asked if c in others]


def jobs_of(cases: Sequence[Case], asked: Sequence[str]) -> list[tuple[Case, str]]:
    """What is measured, in this order: of all cases what says most, then the others."""
    each = [(case, *columns_of(case, asked)) for case in cases]
    return [(case, c) for case, most, _ in each for c in most] + [
        (case, c) for case, _, others in each for c in others
    ]


def program(case: Case, column: str, tuned: bool) -> Callable[..., Any] | None:
    """A column's function of ``draw``'s tensors."""
    import functools

    import torch

    if column in ("ours", "kernel"):
        return functools.partial(cases_of.ours, case)
    if column in ("cudnn", "fa2"):
        return cases_of.sdpa(case, column)
    if column == "flex":
        return cases_of.flex(case, tuned)
    fn = functools.partial(cases_of.eager, case)
    if column == "eager":
        return fn

    def as_written(*tensors: Any) -> Any:
        return fn(*tensors)

    return torch.compile(common.own_code(as_written, column), dynamic=False)


@contextlib.contextmanager
def setting(column: str) -> Iterator[None]:
    """The plugin and torch's settings as a column has them."""
    import torch

    import inductor_ext

    before = torch.backends.cuda.cudnn_sdp_enabled()
    switch = inductor_ext.enable() if column == "plugin" else inductor_ext.disable()
    torch.backends.cuda.enable_cudnn_sdp(before and column != "kernel")
    try:
        with switch:
            yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


class Run:
    """One column of one case: what is called, and its inputs."""

    def __init__(self, case: Case, fn: Callable[..., Any]) -> None:
        import torch

        torch.manual_seed(0)
        self.case, self.fn, self.inputs = case, fn, cases_of.draw(case)
        self.given = torch.randn_like(self.inputs[0]) if case.kind == "bwd" else None
        self.leaves: list[Any] = []

    def prepare(self) -> Callable[[], Any]:
        """What is timed; the forward of a backward is run here."""
        import torch

        if self.case.kind == "fwd":

            def forward() -> Any:
                with torch.no_grad():
                    return self.fn(*self.inputs)

            return forward
        count = cases_of.leaves(self.case)
        self.leaves = [t.detach().requires_grad_() for t in self.inputs[:count]]
        out = first(self.fn(*self.leaves, *self.inputs[count:]))
        return lambda: torch.autograd.grad(out, self.leaves, self.given, retain_graph=True)

    def results(self, call: Callable[[], Any]) -> list[Any]:
        """The output, or the gradients of q, k and v, of the last group of heads."""
        group = self.case.heads // self.case.own
        if self.case.kind == "fwd":
            return [first(call())[-1:, -group:]]
        dq, dk, dv = call()[:3]
        return [dq[-1:, -group:], dk[-1:, -1:], dv[-1:, -1:]]

    def truth(self) -> list[Any]:
        """The same in fp64, by torch functions on blocks of query rows."""
        import torch

        from inductor_ext import ops

        group = self.case.heads // self.case.own
        q, k, v = (
            t[-1:, -n:].detach().double().requires_grad_()
            for t, n in zip(self.inputs, (group, 1, 1), strict=False)
        )
        own = self.inputs[3].detach() if len(self.inputs) > 3 else None
        if own is not None and own.dtype.is_floating_point:
            own = own.double()
            if self.case.mask == "slot_bias":
                own = own[-1:, -1:]
            else:
                own = own[-group:] if own.dim() == 1 else own[:, -group:]
        out = first(ops.attention(q, k, v, **cases_of.options(self.case, own)))
        if self.given is None:
            return [out.detach()]
        return [*torch.autograd.grad(out, (q, k, v), self.given[-1:, -group:].double())]


def timed(call: Callable[[], Any]) -> float:
    """Median us of a call, the card kept busy ahead of the host."""
    import torch

    def once(count: int, lead_us: float) -> tuple[float, float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(int(lead_us * 2000))  # cycles
        start.record()
        begun = time.perf_counter()
        for _ in range(count):
            call()
        host = (time.perf_counter() - begun) * 1e6
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / count, host / count

    once(1, 0.0)
    us, host = once(2, 1000.0)
    count = int(min(max(RUN_US / us, 3), 50))
    lead = 1.3 * host * count + 200
    return statistics.median(once(count, min(lead, 5e4))[0] for _ in range(REPEATS))


def error(mine: Sequence[Any], right: Sequence[Any]) -> float:
    """The largest relative error of a result's norm."""
    return max(
        ((x.double() - y).norm() / y.norm()).item() for x, y in zip(mine, right, strict=True)
    )


_truths: dict[Case, list[Any]] = {}  # of the case that is being measured


def measure_column(case: Case, column: str, tuned: bool) -> dict[str, Any]:
    """A CSV row."""
    import torch

    from inductor_ext import measure

    row: dict[str, Any] = {"case": case.name, "kind": case.kind, "column": column}
    try:
        fn = program(case, column, tuned)
        assert fn is not None
        run = Run(case, fn)
        if case not in _truths:
            _truths.clear()
            _truths[case] = run.truth()
        with setting(column):
            call = run.prepare()
            row["error"] = error(run.results(call), _truths[case])
            row["check"] = "ok" if row["error"] <= LARGEST_ERROR else "wrong"
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call()
            row["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
            us = timed(call)
        row |= {"us": us, "tflops": case.flops / us * 1e-6}
    except Exception as failure:
        row["failure"] = measure.one_line(failure)
    return row


# --- compiling ahead ------------------------------------------------------------------------------

_slots: Any = None


def _share(slots: Any) -> None:
    global _slots
    _slots = slots


def warm(case: Case, column: str) -> None:
    """Compile what a column needs, for the caches on disk."""
    import torch

    fn = program(case, column, tuned=False)
    assert fn is not None
    with _slots if column in WHOLE else contextlib.nullcontext():
        run = Run(case, fn)
        with setting(column):
            call = run.prepare()
            call()
        torch.cuda.synchronize()
        del run, call
        torch.cuda.empty_cache()


def _compiled(jobs: Sequence[tuple[Case, str]]) -> list[tuple[Case, str]]:
    """The jobs that compile something, in their order. A kernel of ours serves all sizes, and a
    backward compiles its forward too."""
    found: dict[Any, tuple[Case, str]] = {}
    for case, column in jobs:
        if column in ("cudnn", "fa2", "eager"):
            continue
        key: Any = case, column
        if column in ("ours", "kernel"):
            key = case.mask, case.dim, column
        if case.kind == "bwd" or key not in found:
            found.setdefault(key, (case, column))
            if found[key][0].kind == "fwd":
                found[key] = case, column  # where the forward stood
    return list(found.values())


def prewarm(jobs: Sequence[tuple[Case, str]], workers: int, budget: common.Budget) -> None:
    """Compile in processes of their own, a third of the time at most; few of them hold scores."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, TimeoutError, as_completed

    from tqdm import tqdm

    context = multiprocessing.get_context("spawn")
    left = budget.left()
    begun = time.monotonic()
    name = "TORCHINDUCTOR_COMPILE_THREADS"
    before = os.environ.get(name)
    os.environ[name] = "1"  # inherited: the processes are the parallelism
    pool = ProcessPoolExecutor(workers, context, _share, (context.Semaphore(6),))
    waiting = [pool.submit(warm, *job) for job in _compiled(jobs)]
    try:
        done = as_completed(waiting, None if left is None else 0.32 * left)
        for future in tqdm(done, "compiling", len(waiting), mininterval=5):
            future.exception()  # the measurement says what failed
    except TimeoutError:
        pass
    for process in list(pool._processes.values()):
        process.kill()
    pool.shutdown(wait=False, cancel_futures=True)
    os.environ.pop(name)
    if before is not None:
        os.environ[name] = before
    finished = sum(future.done() and not future.cancelled() for future in waiting)
    took = time.monotonic() - begun
    print(f"compiled ahead {finished} of {len(waiting)} in {took:.0f} s", file=sys.stderr)


# --- report ---------------------------------------------------------------------------------------


def _on_top(found: dict[tuple[str, str], dict[str, common.Row]]) -> list[str]:
    """What column sums cost beside the forward alone."""
    notes = []
    for (case, kind), of in found.items():
        mask, _, shape = case.partition(" ")
        alone = found.get((f"causal {shape}", kind), {}).get("kernel")
        if mask.startswith("colsum") and alone is not None and "ours" in of:
            times = (common.number(row["us"]) for row in (of["ours"], alone))
            notes.append(f"{case}: {100 * common.ratio(*times) - 100:.0f}% on top of the forward")
    return notes


def report(rows: Sequence[common.Row], out: Path, name: str) -> None:
    """A table of the rows (printed, and as Markdown) and a plot."""
    found: dict[tuple[str, str], dict[str, common.Row]] = {}
    notes = []
    for row in rows:
        where = f"{row['case']} {row['kind']}, {row['column']}"
        if row.get("failure"):
            notes.append(f"{where}: {row['failure']}")
        elif row.get("check") == "ok":
            found.setdefault((row["case"], row["kind"]), {})[row["column"]] = row
        else:
            notes.append(f"{where}: wrong by {common.number(row.get('error')):.2g}")
    columns: list[str] = [c for c in COLUMNS if any(c in of for of in found.values())]
    table: list[tuple[Any, ...]] = []
    for key, of in found.items():
        rates: dict[str, float] = {
            c: common.number(of[c]["tflops"]) if c in of else math.nan for c in columns
        }
        us: dict[str, float] = {
            c: common.number(of[c]["us"]) if c in of else math.nan for c in columns
        }
        peers = (us.get(c, math.nan) for c in ("cudnn", "fa2", "flex"))
        best = [x for x in peers if not math.isnan(x)]
        own = us.get("ours", math.nan)
        stock = common.ratio(us.get("compile", math.nan), us.get("plugin", math.nan))
        room = [common.number(of[c]["peak_mib"]) if c in of else math.nan for c in WHOLE[:2]]
        peer = common.ratio(min(best, default=math.nan), own)
        table.append((*key, *rates.values(), peer, stock, *room))
    notes += _on_top(found)
    heads = ["case", "kind", *columns, "best peer/ours", "compile/plugin"]
    heads += ["plugin MiB", "compile MiB"]
    common.print_table("TFLOP/s of kept pairs", heads, table)
    print("\n".join(notes))
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for case, kind, *numbers in table:
        cells = ["-" if math.isnan(x) else f"{x:.2f}" if x < 10 else f"{x:.0f}" for x in numbers]
        lines.append(f"| {' | '.join([case, kind, *cells])} |")
    text = "TFLOP/s of the pairs that a mask keeps, bf16, on one card.\n\n" + "\n".join(lines)
    text += "\n\n" + "\n".join(f"- {note}" for note in notes) + "\n"
    (out / f"{name}_summary.md").write_text(text)
    panels = []
    for kind in ("fwd", "bwd"):
        keys = [k for k in found if k[1] == kind]
        lines_of = {
            c: [common.number(found[k][c]["us"]) if c in found[k] else math.nan for k in keys]
            for c in columns
        }
        panels.append((kind, [k[0] for k in keys], lines_of))
    try:
        common.plot_panels(out / f"{name}.png", "Attention, bf16", panels, 1)
    except ImportError as failure:
        print(f"no plot: {failure}", file=sys.stderr)


# --- command line ---------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "benchmarks.attention", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--cases", default="", help="only cases whose name or kind has this in it")
    add("--first", type=int, help="only so many of them")
    add("--columns", type=common.names_of(COLUMNS), default=list(COLUMNS), help="comma-separated")
    add("--peers", action="store_true", help="FlexAttention with max-autotune: slow to compile")
    add("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the files")
    add("--name", default="attention", help="what the files are called")
    add("--budget-seconds", type=float, help="stop between columns before this is used up")
    add("--prewarm", type=int, default=0, help="compile in this many processes first")
    add("--report", action="store_true", help="table and plot of the CSV that is there, and stop")
    add("--list", action="store_true", help="print what is measured in its order and stop")
    return parser


def main() -> None:
    """The command line."""
    args = _parser().parse_args()
    budget = common.Budget(args.budget_seconds)
    cases = [case for case in CASES if args.cases in f"{case.name} {case.kind}"][: args.first]
    if args.list:
        for case, column in jobs_of(cases, args.columns):
            print(case.name, case.kind, column)
        return
    if args.report:
        report(common.read_csv(args.out / f"{args.name}.csv"), args.out, args.name)
        return

    import torch
    from tqdm import tqdm

    from inductor_ext import measure

    try:
        measure.require_cuda()
    except RuntimeError as failure:
        sys.exit(str(failure))
    jobs = jobs_of(cases, args.columns)
    if args.prewarm:
        prewarm(jobs, args.prewarm, budget)
    meta = common.metadata("benchmarks.attention")
    meta |= {"ceilings_per_us": dataclasses.asdict(measure.ceilings())}
    common.write_json(args.out / f"{args.name}.json", meta)
    table = common.CsvFile(args.out / f"{args.name}.csv", FIELDS)
    rows = []
    for case, column in budget.take(tqdm(jobs, "measuring", mininterval=5)):
        torch._dynamo.reset()
        row = measure_column(case, column, args.peers)
        torch.cuda.empty_cache()
        rows.append(row)
        table.write(row)
        print(*row.values(), flush=True)
    table.close()
    report(rows, args.out, args.name)


if __name__ == "__main__":
    main()
