"""One dynamic program against the best static ones: a router's scores from 1 to 16384 tokens.

One command, ``python -m benchmarks.dispatch``. At every number of tokens all columns are checked
against fp64 in a CUDA graph with poisoned outputs, then timed by graph replay with cold L2, one
captured graph each, all in turn, as independent calls and as a dependent chain (net of its
producer). It writes CSV, JSON, a plot of time against tokens with the edges of the ranges, and a
summary. Times are us.

Columns
  eager         the function as written
  compile       stock torch.compile, one dynamic program for every number of tokens
  max_autotune  stock torch.compile, max-autotune-no-cudagraphs, a static program for each number
  ours          torch.compile with the plugin, one dynamic program that branches on the host

Suites: sigmoid, softmax: score(x @ w.T) + bias over [T,7168] x [7168,256], bf16, scores in fp32. A
top-k behind it is the same aten operation in every column and is left out.

The host cost of the branches is the host time of a call of our program less that of the same
program compiled with the bounds of one range, where no branch is emitted: the median over pairs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common

LOWERING = "decompose_k"
DEVICE = "cuda"
HIDDEN, EXPERTS = 7168, 256
TOKENS = (1, 2, 7, 8, 9, 16, 31, 32, 33, 64, 128, 256, 512, 768, 4096, 16384)
COLUMNS = ("eager", "compile", "max_autotune", "ours")
STOCK = ("eager", "compile", "max_autotune")
DRAWS = 3  # input sets of different values that every column is checked on
REPEATS = 12
QUICK_TOKENS, QUICK_REPEATS = (1, 33, 4096), 6
HOST_TOKENS, HOST_PAIRS = 64, 41

Spans = list[tuple[int, "int | None", str]]


@dataclasses.dataclass(frozen=True)
class Case:
    """One number of tokens of a suite."""

    suite: str
    tokens: int

    @property
    def name(self) -> str:
        return str(self.tokens)

    @property
    def bytes(self) -> int:
        """Each input read once, the output written once."""
        read = 2 * (self.tokens * HIDDEN + HIDDEN * EXPERTS) + 4 * EXPERTS
        return read + 4 * self.tokens * EXPERTS

    @property
    def flops(self) -> int:
        return 2 * self.tokens * HIDDEN * EXPERTS


SUITES = ("sigmoid", "softmax")


def ordered(suites: Sequence[str], quick: bool) -> list[Case]:
    """The cases of a run in an order of which any beginning is representative."""
    tokens = QUICK_TOKENS if quick else common.representative(TOKENS)
    return common.round_robin([Case(suite, t) for t in tokens] for suite in suites)


def site(suite: str) -> Callable[..., Any]:
    """What a user writes."""
    import torch

    def sigmoid(x: Any, w: Any, bias: Any) -> Any:
        return torch.nn.functional.linear(x, w).float().sigmoid() + bias

    def softmax(x: Any, w: Any, bias: Any) -> Any:
        return torch.nn.functional.linear(x, w).float().softmax(-1) + bias

    return {"sigmoid": sigmoid, "softmax": softmax}[suite]


def draw(tokens: int) -> tuple[Any, Any, Any]:
    """Fresh random inputs on the card, scaled so that the logits are about N(0, 1)."""
    import torch

    x = torch.randn(tokens, HIDDEN, device=DEVICE).bfloat16()
    w = (torch.randn(EXPERTS, HIDDEN, device=DEVICE) * HIDDEN**-0.5).bfloat16()
    return x, w, torch.randn(EXPERTS, device=DEVICE) * 0.1


def reference(suite: str, inputs: Sequence[Any]) -> Any:
    """The scores in fp64, not rounded on the way."""
    x, w, bias = (t.double() for t in inputs)
    logits = x @ w.t()
    return (logits.sigmoid() if suite == "sigmoid" else logits.softmax(-1)) + bias


# --- programs -------------------------------------------------------------------------------------


def dynamic(
    suite: str, column: str, bounds: tuple[int, int] = (1, max(TOKENS)), first: int = 1
) -> tuple[Callable[..., Any], Spans]:
    """A program for ``bounds`` tokens, compiled by a call with ``first``; its ranges, if ours."""
    import torch
    from torch._inductor import config as inductor_config

    import inductor_ext
    from inductor_ext import report

    own = common.own_code(site(suite), f"{suite}_{column}_{bounds[0]}_{bounds[1]}")
    call = torch.compile(own)
    inputs = draw(first)
    torch._dynamo.mark_dynamic(inputs[0], 0, min=bounds[0], max=bounds[1])
    switch = inductor_ext.enable if column == "ours" else inductor_ext.disable
    with (
        switch(LOWERING),
        # One token is no special case then, if the first call has one.
        torch.fx.experimental._config.patch(backed_size_oblivious=True),
        # Kernels may come from Triton's cache; the graph is lowered here, so that it is reported.
        inductor_config.patch(fx_graph_cache=False),
        report.collect() as decisions,
    ):
        call(*inputs)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
    return call, [(r.lo, r.hi, r.chosen) for d in decisions for r in d.ranges]


def static(case: Case) -> Callable[..., Any]:
    """The stock max-autotune program for this number of tokens."""
    import torch

    import inductor_ext

    own = common.own_code(site(case.suite), f"{case.suite}_static_{case.tokens}")
    call = torch.compile(own, mode="max-autotune-no-cudagraphs", dynamic=False)
    with inductor_ext.disable(LOWERING):
        call(*draw(case.tokens))
    return call


def _settings() -> None:
    import torch

    torch.set_grad_enabled(False)


def _prewarm_one(suite: str, column: str, tokens: int) -> None:
    from torch._inductor import config as inductor_config

    _settings()
    if column == "max_autotune":
        # Only for its kernels: what is timed beside other processes must not be remembered.
        with inductor_config.patch(autotune_local_cache=False, fx_graph_cache=False):
            static(Case(suite, tokens))
    else:
        dynamic(suite, column)


def prewarm(cases: Sequence[Case], columns: Sequence[str], workers: int, left: Any) -> None:
    """Fill Triton's cache from ``workers`` processes; nothing timed there is kept."""
    suites = list(dict.fromkeys(c.suite for c in cases))
    tasks = [(s, c, 0) for c in ("ours", "compile") if c in columns for s in suites]
    if "max_autotune" in columns:  # the suites' products are the same
        tasks += [(suites[0], "max_autotune", c.tokens) for c in cases if c.suite == suites[0]]
    common.run_in_pool(_prewarm_one, tasks, workers, left)


# --- measurement ----------------------------------------------------------------------------------


def comparison(columns: Sequence[str]) -> common.Comparison:
    """How these columns are set against each other."""
    order = {suite: [str(t) for t in sorted({*TOKENS, *QUICK_TOKENS})] for suite in SUITES}
    return common.Comparison(columns, [c for c in STOCK if c in columns], order)


def fields(columns: Sequence[str]) -> list[str]:
    """The CSV header for these columns."""
    names = ["suite", "case", "tokens", "bytes", "flops", "floor_us", "ours_range", "ours_choice"]
    names += ["failure"]
    for c in columns:
        names += [f"{c}_{kind}{x}" for kind in common.KINDS for x in ("us", "spread_us")]
        names += [f"{c}_check", f"{c}_error_of_allowed"]
    return names + list(comparison(columns).speedups({}))


def verify(call: Callable[..., Any], draws: Any, twice: bool) -> tuple[str, float]:
    """("ok" or what is wrong, largest error over the allowed one), from poisoned graph replays."""
    import torch

    from inductor_ext import measure

    inputs, references, baselines = draws
    outputs = measure.graph_outputs(call, inputs)
    worst = 0.0
    for out, ref, base in zip(outputs, references, baselines, strict=True):
        verdict = measure.check(out, ref, base, rounding=torch.bfloat16)
        if verdict.allowed > 0:
            worst = max(worst, verdict.error / verdict.allowed)
        if not verdict.ok:
            return verdict.reason, worst
    if twice and not all(map(torch.equal, outputs, measure.graph_outputs(call, inputs))):
        return "two runs differ in their bits.", worst
    return "ok", worst


def span_at(spans: Spans, tokens: int) -> tuple[str, str]:
    """("lo..hi", candidate) of the range around a number of tokens; empty without ranges."""
    for lo, hi, chosen in spans:
        if lo <= tokens and (hi is None or tokens <= hi):
            return f"{lo}..{'' if hi is None else hi}", chosen
    return "", ""


def measure_case(
    case: Case, programs: Mapping[str, Callable[..., Any]], columns: Sequence[str], spans: Spans,
    repeats: int,
) -> dict[str, Any]:  # fmt: skip
    """All columns at one number of tokens, as a CSV row."""
    import torch

    from inductor_ext import measure

    ceilings = measure.ceilings()
    floor = max(case.bytes / ceilings.copy, case.flops / ceilings.flops(torch.bfloat16))
    row: dict[str, Any] = {"suite": case.suite, "case": case.name, "tokens": case.tokens}
    row |= {"bytes": case.bytes, "flops": case.flops, "floor_us": floor}
    row["ours_range"], row["ours_choice"] = span_at(spans, case.tokens)
    inputs = [draw(case.tokens) for _ in range(DRAWS)]
    eager = site(case.suite)
    draws = inputs, [reference(case.suite, i) for i in inputs], [eager(*i) for i in inputs]
    calls: dict[str, Callable[..., Any]] = {}
    for column in columns:
        try:
            if column == "max_autotune":
                calls[column] = static(case)
            else:
                calls[column] = eager if column == "eager" else programs[column]
        except Exception as error:
            row[f"{column}_check"] = measure.one_line(error)
    # A recompile would be a second program, and run under the wrong switch.
    with torch._dynamo.config.patch(error_on_recompile=True):
        for column in list(calls):
            try:
                found = verify(calls[column], draws, twice=column == "ours")
            except Exception as error:
                found = measure.one_line(error), float("nan")
                del calls[column]
            row[f"{column}_check"], row[f"{column}_error_of_allowed"] = found
        del draws
        for kind in common.KINDS:
            timed = measure.compare(calls, inputs[0], repeats=repeats, chained=bool(kind))
            for column, timing in timed.items():
                if isinstance(timing, measure.Timing):
                    row[f"{column}_{kind}us"] = timing.us
                    row[f"{column}_{kind}spread_us"] = timing.spread_us
                else:
                    row[f"{column}_check"] = timing
    return row | comparison(columns).speedups(row)


def branch_cost(call: Callable[..., Any], suite: str, spans: Spans) -> dict[str, Any]:
    """Host us of a call with branches, without, and of the branches: the median of the pairs."""
    import torch

    from inductor_ext import measure

    lo, hi = next((lo, hi) for lo, hi, _ in spans if lo <= HOST_TOKENS <= (hi or max(TOKENS)))
    bounds = (lo, hi or max(TOKENS))
    alone, left = dynamic(suite, "ours", bounds, first=HOST_TOKENS)
    if len(left) > 1:
        raise RuntimeError(f"expected no branch within {bounds}, got {len(left)} ranges")
    inputs = draw(HOST_TOKENS)
    with torch._dynamo.config.patch(error_on_recompile=True):
        pairs = [
            (measure.host_overhead(call, *inputs), measure.host_overhead(alone, *inputs))
            for _ in range(HOST_PAIRS)
        ]
    differences = sorted(a - b for a, b in pairs)
    low, median, high = statistics.quantiles(differences, n=4)
    return {
        "suite": suite,
        "tokens": HOST_TOKENS,
        "ranges": len(spans),
        "with_branches_us": statistics.median(a for a, _ in pairs),
        "without_us": statistics.median(b for _, b in pairs),
        "branches_us": median,
        "spread_us": high - low,
        "pairs": len(pairs),
    }


# --- output ---------------------------------------------------------------------------------------


def markdown(rows: Sequence[common.Row], columns: Sequence[str], host: Sequence[Any]) -> str:
    """Tables of times per number of tokens, where ours is behind, and the branches' host cost."""
    versus = comparison(columns)
    lines = []
    for suite, group in versus.grouped(rows).items():
        heads = [*columns, "ours over max_autotune", "ours over compile"]
        lines += [f"## {suite}", "", f"| tokens | range | choice | {' | '.join(heads)} |"]
        lines += ["|---|---|---|" + "---|" * len(heads)]
        for row in group:
            times = {c: versus.time(row, c, "")[0] for c in columns}
            ours = times.get("ours", float("nan"))
            ratios = [common.ratio(times.get(c, float("nan")), ours) for c in STOCK[:0:-1]]
            cells = [f"{t:.2f}" if t == t else "-" for t in times.values()]
            cells += [f"{r:.2f}x" if r == r else "-" for r in ratios]
            names = row.get("ours_range") or "-", row.get("ours_choice") or "-"
            lines.append(f"| {row['case']} | {' | '.join([*names, *cells])} |")
        lines.append("")
    for h in host:
        lines.append(
            f"Host cost of the branches, {h['suite']}, {h['ranges']} ranges: "
            f"{h['branches_us']:.2f} us a call ({h['with_branches_us']:.1f} with, "
            f"{h['without_us']:.1f} without; spread {h['spread_us']:.2f}, {h['pairs']} pairs)."
        )
    return "\n".join(lines) + "\n"


def write(out: Path, stem: str, rows: Sequence[common.Row], meta: Mapping[str, Any]) -> None:
    """JSON, summary and plot of rows whose CSV is on disk."""
    from inductor_ext import plots

    columns = [c for c in COLUMNS if any(r.get(f"{c}_check") for r in rows)]
    versus = comparison(columns)
    common.write_json(out / f"{stem}.json", meta)
    title = f"Range dispatch on {meta['card']}, torch {meta['torch']}, triton {meta['triton']}"
    dated = f"{title}, {meta.get('date', '')}. us per call, graph replay, cold L2.\n\n"
    text = markdown(rows, columns, meta.get("host", []))
    (out / f"{stem}_summary.md").write_text(dated + text)
    panels = []
    for suite, group in versus.grouped(rows).items():
        for kind, label in common.KINDS.items():
            lines = {
                c: [(int(r["tokens"]), t) for r in group if (t := versus.time(r, c, kind)[0]) > 0]
                for c in columns
            }
            spans = [tuple(s) for s in meta.get("ranges", {}).get(suite, [])]
            lines = {c: points for c, points in lines.items() if points}
            panels.append(plots.Panel(f"{suite}, {label}", "tokens", lines, spans))
    try:
        plots.draw([p for p in panels if p.lines], out / f"{stem}.png", title)
    except plots.PlotError as error:
        print(f"no plot: {error}", file=sys.stderr)
    print(text)
    if "ours" in columns and versus.stock:
        versus.summary(rows, ("best_stock",))


def merge(paths: Sequence[Path], out: Path) -> None:
    """Join the CSV and JSON files of runs of one commit (a suite each, say); needs no card."""
    rows = [row for path in paths for row in common.read_csv(path)]
    metas = [json.loads(path.with_suffix(".json").read_text()) for path in paths]
    meta = metas[0] | {"host": [h for m in metas for h in m.get("host", [])]}
    meta["ranges"] = {suite: spans for m in metas for suite, spans in m.get("ranges", {}).items()}
    meta["commands"] = [m.get("command", "") for m in metas]
    table = common.CsvFile(out / "dispatch.csv", list(dict.fromkeys(k for r in rows for k in r)))
    for row in rows:
        table.write(row)
    table.close()
    write(out, "dispatch", rows, meta)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "benchmarks.dispatch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--suite", choices=[*SUITES, "all"], default="all")
    known = common.names_of(COLUMNS)
    add("--columns", type=known, default=list(COLUMNS), help="comma-separated")
    add("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the files")
    add("--quick", action="store_true", help=f"{len(QUICK_TOKENS)} sizes a suite, fewer repeats")
    add("--tokens", type=common.names_of(map(str, TOKENS)), help="comma-separated; default: all")
    add("--budget-seconds", type=float, help="stop between sizes before this is used up")
    add("--prewarm", type=int, default=0, metavar="N", help="compile ahead in N processes")
    add("--merge", nargs="+", type=Path, metavar="CSV", help="join the files of earlier runs")
    add("--list", action="store_true", help="print the cases in their order and stop")
    return parser


def main() -> None:
    """The command line."""
    args = _parser().parse_args()
    budget = common.Budget(args.budget_seconds)
    suites = list(SUITES) if args.suite == "all" else [args.suite]
    cases = ordered(suites, args.quick)
    if args.tokens:
        cases = [case for case in cases if case.name in args.tokens]
    if args.list:
        for case in cases:
            print(case.suite, case.name)
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
    _settings()
    stem = "dispatch" + ("" if args.suite == "all" else f"_{args.suite}")
    meta = common.metadata("benchmarks.dispatch") | {"seed": torch.seed()}
    if args.prewarm:
        left = budget.left()
        prewarm(cases, args.columns, args.prewarm, None if left is None else left / 2)
    # Many static programs beside the dynamic ones, each from code of its own.
    programs: dict[str, dict[str, Callable[..., Any]]] = {suite: {} for suite in suites}
    ranges: dict[str, Spans] = {suite: [] for suite in suites}
    host: list[dict[str, Any]] = []
    for suite in suites:
        for column in [c for c in ("compile", "ours") if c in args.columns]:
            programs[suite][column], spans = dynamic(suite, column)
            ranges[suite] = spans or ranges[suite]
        if len(ranges[suite]) > 1:
            try:
                host.append(branch_cost(programs[suite]["ours"], suite, ranges[suite]))
            except Exception as error:
                print(f"host cost: {measure.one_line(error)}", file=sys.stderr)
    meta |= {"ceilings_per_us": dataclasses.asdict(measure.ceilings()), "ranges": ranges}
    meta |= {"host": host}
    table = common.CsvFile(args.out / f"{stem}.csv", fields(args.columns))
    rows = []
    repeats = QUICK_REPEATS if args.quick else REPEATS
    for case in tqdm(budget.take(cases), "sizes", len(cases), mininterval=5):
        try:
            row = measure_case(
                case, programs[case.suite], args.columns, ranges[case.suite], repeats
            )
        except Exception as error:
            row = {"suite": case.suite, "case": case.name, "failure": measure.one_line(error)}
        rows.append(row)
        table.write(row)
    table.close()
    meta |= {"sizes_measured": len(rows), "sizes_asked": len(cases)}
    write(args.out, stem, rows, meta)


if __name__ == "__main__":
    main()
