"""Softmax, cross entropy and linear cross entropy: time, bytes and memory, side by side.

One command, ``python -m benchmarks.cross_entropy``. Every column is checked against fp64 on some
rows, then timed: the median over repeats of one call between two events, behind a spinning card (so
that the host is ahead) and a written buffer larger than the L2. It writes CSV, JSON, a plot and a
summary. Times are us.

Columns
  eager, compile, max_autotune   the function as written; stock torch.compile, default, max-autotune
  liger                          liger-kernel, where it can be imported and has the variant
  torch_chunked                  F.linear_cross_entropy, where torch has it
  plugin                         torch.compile of the function as written, with the plugin
  ours                           inductor_ext.ops

Kinds: fwd (no gradient wanted), bwd (of a kept graph; ours: from saved statistics), both.

``percent`` is the least bytes of a kind at this card's copy speed, over the time. ``--tilings``
instead times the kernels at launch parameters around the chosen ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks import cross_entropy_cases as cases_of
from benchmarks.cross_entropy_cases import COLUMNS, KINDS, SUITES, Case, draw, ordered, program

# --- measurement ----------------------------------------------------------------------------------


class Timer:
    """Median time of a call on the card, in us."""

    def __init__(self, repeats: int) -> None:
        import torch

        self.repeats = repeats
        self.flush = torch.empty(192 << 20, dtype=torch.int8, device=cases_of.DEVICE)

    def __call__(self, call: Callable[[], Any]) -> float:
        import torch

        times = []
        for i in range(self.repeats + 2):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.flush.zero_()
            torch.cuda._sleep(2_000_000)  # the host enqueues the whole call meanwhile
            start.record()
            out = call()
            end.record()
            end.synchronize()
            del out
            if i >= 2:
                times.append(start.elapsed_time(end) * 1e3)
        return statistics.median(times)


def step(fn: Callable[..., Any], kind: str, inputs: Sequence[Any]) -> Callable[[], Any]:
    """A call of that kind without arguments."""
    import torch

    x, *rest = inputs
    if kind == "fwd":

        def forward() -> Any:
            with torch.no_grad():
                return fn(x, *rest)

        return forward
    x = x.detach().requires_grad_()
    out = fn(x, *rest)
    g = torch.ones_like(out) if out.dim() == 0 else torch.randn_like(out)
    if kind == "bwd":
        return functools.partial(torch.autograd.grad, out, x, g, retain_graph=True)
    return lambda: torch.autograd.grad(fn(x, *rest), x, g)


def check(case: Case, fn: Callable[..., Any], inputs: Sequence[Any]) -> str:
    """ "ok", or how far the gradient of some rows is off fp64's."""
    import torch

    x = inputs[0].detach().requires_grad_()
    out = fn(x, *inputs[1:])
    g = torch.ones_like(out)
    if out.dim():
        g = torch.randn_like(out)
    (dx,) = torch.autograd.grad(out, x, g)
    rows = slice(0, cases_of.CHECKED_ROWS)
    few = [t[rows].detach() for t in inputs]
    few = [t.double() if t.is_floating_point() else t for t in few]
    z = few[0].requires_grad_()
    written = cases_of.in_fp64(case.suite)
    (truth,) = torch.autograd.grad(
        written(z, *few[1:]),
        z,
        g[rows].double() if g.dim() else torch.ones((), device=cases_of.DEVICE).double(),
    )
    if out.dim() == 0:
        truth = truth * (min(cases_of.CHECKED_ROWS, case.rows) / case.rows)
    error = ((dx[rows].double() - truth).norm() / truth.norm()).item()
    return "ok" if error < 2e-2 else f"relative error {error:.2g} of the gradient"


def measure_case(case: Case, columns: Sequence[str], timer: Timer) -> Iterator[dict[str, Any]]:
    """One CSV row per column: times of the three kinds."""
    import torch

    from inductor_ext import measure

    inputs = draw(case)
    copy = measure.ceilings().copy
    for column in columns:
        row: dict[str, Any] = {"suite": case.suite, "case": case.name, "column": column}
        if program(case, column, "both") is None:
            continue
        with cases_of.setting(column):
            try:
                for kind in KINDS:
                    fn = program(case, column, kind)
                    assert fn is not None
                    # Liger writes the gradient over the logits.
                    own = (inputs[0].clone(), *inputs[1:]) if column == "liger" else inputs
                    if kind == "both":
                        row["check"] = check(case, fn, own)
                    if column in ("liger", "plugin") and kind == "bwd":
                        continue  # the gradient is made in the forward
                    us = timer(step(fn, kind, own))
                    percent = 100 * case.bytes(kind) / copy / us
                    row |= {f"{kind}_us": us, f"{kind}_percent": percent}
                    torch.cuda.empty_cache()
            except Exception as error:
                row["check"] = measure.one_line(error)
        yield row


# --- linear cross entropy -------------------------------------------------------------------------


def measure_linear(case: Case, columns: Sequence[str], timer: Timer) -> Iterator[dict[str, Any]]:
    """One CSV row per column: time of forward and backward, peak memory beyond the gradients."""
    import torch

    from inductor_ext import measure

    flops = 6 * case.rows * cases_of.HIDDEN * case.columns
    rate = measure.ceilings().flops(torch.bfloat16)
    for column in columns:
        row: dict[str, Any] = {"suite": "linear", "case": case.name, "column": column}
        fn = cases_of.linear_program(column, case.rows)
        if fn is None:
            continue
        h = (
            torch.randn(case.rows, cases_of.HIDDEN, device=cases_of.DEVICE)
            .bfloat16()
            .requires_grad_()
        )
        w = (
            torch.randn(case.columns, cases_of.HIDDEN, device=cases_of.DEVICE)
            * cases_of.HIDDEN**-0.5
        ).bfloat16()
        w.requires_grad_()
        t = torch.randint(0, case.columns, (case.rows,), device=cases_of.DEVICE)

        def call(fn: Any = fn, h: Any = h, w: Any = w, t: Any = t) -> Any:
            return torch.autograd.grad(fn(h, w, t), (h, w))

        with cases_of.setting(column):
            try:
                gradients = call()
                row["check"] = _check_linear(h, w, t, gradients[0])
                del gradients
                torch.cuda.empty_cache()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                gradients = call()
                peak = torch.cuda.max_memory_allocated() - before
                row["extra_gb"] = (peak - sum(g.nbytes for g in gradients)) / 1e9
                del gradients
                us = timer(call)
                row |= {"both_us": us, "both_percent": 100 * flops / rate / us}
            except Exception as error:
                row["check"] = measure.one_line(error)
        del h, w, t, call
        torch.cuda.empty_cache()
        yield row


def _check_linear(h: Any, w: Any, t: Any, dh: Any) -> str:
    import torch

    few = h[: cases_of.CHECKED_ROWS].detach().float().requires_grad_()
    logits = few @ w.detach().float().t()
    loss = torch.nn.functional.cross_entropy(logits, t[: cases_of.CHECKED_ROWS], reduction="sum")
    (truth,) = torch.autograd.grad(loss / h.shape[0], few)
    error = ((dh[: cases_of.CHECKED_ROWS].float() - truth).norm() / truth.norm()).item()
    return "ok" if error < 2e-2 else f"relative error {error:.2g} of the gradient of h"


# --- tilings --------------------------------------------------------------------------------------

TILED_SHAPES = ((8192, 128256), (4096, 262144), (8192, 32000), (32768, 32768))


def tilings(columns: int) -> list[tuple[str, tuple[int, int, int, int]]]:
    """(kernel, (r, warps, held, stages)) to try; a block is r * 32 * warps * 8 columns."""
    fused = [(2, 16, 4, 3), (2, 16, 4, 1), (1, 16, 8, 3), (2, 16, 2, 3), (2, 16, 0, 3),
             (4, 16, 0, 1), (4, 8, 0, 1), (2, 8, 8, 3), (2, 8, 4, 3), (4, 8, 4, 1), (2, 8, 0, 4),
             (2, 16, 5, 3), (1, 16, 12, 4), (1, 32, 4, 3), (1, 32, 6, 3), (2, 4, 0, 4)]  # fmt: skip
    if columns <= 32768:
        whole = [(r, w) for w, r in ((8, 2), (8, 1), (16, 1), (16, 2), (16, 4), (32, 1), (4, 4))]
        full = [(r, w, -(-columns // (r * 32 * w * 8)), 1) for r, w in whole]
        fused = [*full, (2, 8, 0, 1), (4, 8, 0, 1), (2, 8, 4, 3), (2, 16, 2, 1), (2, 4, 0, 3)]
    read = [(4, 8, 0, 1), (2, 8, 0, 1), (2, 8, 0, 3), (2, 8, 0, 4), (4, 4, 0, 1), (2, 4, 0, 3),
            (4, 16, 0, 1), (8, 4, 0, 1), (2, 16, 0, 3)]  # fmt: skip
    gradient = [(2, 8, 0, 1), (1, 8, 0, 1), (2, 4, 0, 1), (4, 4, 0, 1), (4, 8, 0, 1), (1, 4, 0, 1)]
    return [
        *(("both", t) for t in fused), *(("fwd", t) for t in read), *(("bwd", t) for t in gradient)
    ]  # fmt: skip


def measure_tilings(shape: tuple[int, int], budget: common.Budget, timer: Timer) -> Iterator[Any]:
    """One CSV row per (kernel, tile) of plain cross entropy, mean."""
    import torch
    from inductor_ext.templates import cross_entropy_launch as launch

    from inductor_ext import measure

    case = Case("plain", *shape)
    x, t = draw(case)
    loss = launch.Loss(launch.INDEX, mean=True)
    counts = launch.count(loss, t, None, *shape, x)
    *_, stats, _ = launch.forward(loss, x, t, None, None, counts=counts)
    g = torch.ones(1, device=cases_of.DEVICE).expand(shape[0])
    for kind, sizes in budget.take(tilings(shape[1])):
        tile = launch.Tile(*sizes)
        plain = loss, x, t, None, None
        calls: dict[str, Callable[[], Any]] = {
            "both": functools.partial(launch.forward_backward, *plain, counts, tile),
            "fwd": functools.partial(launch.forward, *plain, counts, tile),
            "bwd": functools.partial(
                launch.backward, loss, g, None, x, t, None, None, stats, counts, tile
            ),
        }
        row: dict[str, Any] = {"case": case.name, "kernel": kind, "tile": "x".join(map(str, sizes))}
        try:
            row["us"] = timer(calls[kind])
            row["percent"] = 100 * case.bytes(kind) / measure.ceilings().copy / row["us"]
        except Exception as error:
            row["failure"] = measure.one_line(error)
        yield row


# --- output ---------------------------------------------------------------------------------------

FIELDS = ["suite", "case", "column", "check", "extra_gb"]
FIELDS += [f"{kind}_{x}" for kind in KINDS for x in ("us", "percent")]
TILING_FIELDS = ["case", "kernel", "tile", "us", "percent", "failure"]


def markdown(rows: Sequence[common.Row]) -> str:
    """A table per suite: time and percent of the bound of every column and kind."""
    lines: list[str] = []
    for suite in dict.fromkeys(r["suite"] for r in rows):
        group = [r for r in rows if r["suite"] == suite]
        columns = list(dict.fromkeys(r["column"] for r in group))
        for kind in KINDS if suite != "linear" else ("both",):
            mine = [c for c in ("plugin", "ours") if c in columns]
            heads = " | ".join([*columns, *(f"compile over {c}" for c in mine)])
            lines += ["", f"## {suite}, {kind}", "", f"| case | {heads} |"]
            lines += ["|---|" + "---|" * (len(columns) + len(mine))]
            for case in dict.fromkeys(r["case"] for r in group):
                found = {r["column"]: r for r in group if r["case"] == case}
                cells = [_cell(found.get(c, {}), kind) for c in columns]
                times = {c: common.number(found.get(c, {}).get(f"{kind}_us")) for c in COLUMNS}
                ratios = [common.ratio(times["compile"], times[c]) for c in mine]
                cells += [f"{r:.2f}x" if r == r else "-" for r in ratios]
                lines.append(f"| {case} | {' | '.join(cells)} |")
    wrong = [r for r in rows if r.get("check") not in (None, "", "ok")]
    lines += ["", *(f"{r['suite']} {r['case']} {r['column']}: {r['check']}" for r in wrong)]
    return "\n".join(lines) + "\n"


def _cell(row: common.Row, kind: str) -> str:
    us, percent = (common.number(row.get(f"{kind}_{x}")) for x in ("us", "percent"))
    if us != us:
        return "-"
    extra = common.number(row.get("extra_gb"))
    return f"{us:.1f} ({percent:.0f}%)" + (f" +{extra:.2f} GB" if extra == extra else "")


def write(out: Path, stem: str, rows: Sequence[common.Row], meta: dict[str, Any]) -> None:
    """JSON, summary and plot of rows whose CSV is on disk."""
    common.write_json(out / f"{stem}.json", meta)
    title = f"Cross entropy on {meta['card']}, torch {meta['torch']}, triton {meta['triton']}"
    text = f"{title}, {meta['date']}. us (percent of the bound).\n" + markdown(rows)
    (out / f"{stem}_summary.md").write_text(text)
    panels = []
    for suite in dict.fromkeys(r["suite"] for r in rows):
        group = [r for r in rows if r["suite"] == suite]
        cases = list(dict.fromkeys(r["case"] for r in group))
        lines = {
            c: [
                next((common.number(r.get("both_us")) for r in group
                      if r["case"] == case and r["column"] == c), float("nan"))
                for case in cases
            ]
            for c in dict.fromkeys(r["column"] for r in group)
        }  # fmt: skip
        panels.append((f"{suite}, forward and backward", cases, lines))
    try:
        common.plot_panels(out / f"{stem}.png", title, panels, columns=3)
    except ImportError as error:
        print(f"no plot: {error}", file=sys.stderr)
    print(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "benchmarks.cross_entropy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--suite", type=common.names_of([*SUITES, "all"]), default=["all"], help="comma-separated")
    known = common.names_of(COLUMNS)
    add("--columns", type=known, default=list(cases_of.DEFAULT_COLUMNS), help="comma-separated")
    add("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the files")
    add("--quick", action="store_true", help="fewer shapes and repeats")
    add("--budget-seconds", type=float, help="stop between cases before this is used up")
    add("--tilings", action="store_true", help="time launch parameters of the main kernels")
    add("--list", action="store_true", help="print the cases in their order and stop")
    return parser


def main() -> None:
    """The command line."""
    args = _parser().parse_args()
    budget = common.Budget(args.budget_seconds)
    cases = ordered(SUITES if "all" in args.suite else args.suite, args.quick)
    if args.list:
        for case in cases:
            print(case.suite, case.name)
        return

    from tqdm import tqdm

    from inductor_ext import measure

    try:
        measure.require_cuda()
    except RuntimeError as error:
        sys.exit(str(error))
    timer = Timer(cases_of.QUICK_REPEATS if args.quick else cases_of.REPEATS)
    meta = common.metadata("benchmarks.cross_entropy")
    meta |= {"ceilings_per_us": dataclasses.asdict(measure.ceilings())}
    rows: list[dict[str, Any]] = []
    if args.tilings:
        table = common.CsvFile(args.out / "cross_entropy_tilings.csv", TILING_FIELDS)
        for i, shape in enumerate(TILED_SHAPES):
            left = budget.left()
            share = None if left is None else left / (len(TILED_SHAPES) - i)
            for row in measure_tilings(shape, common.Budget(share), timer):
                rows.append(row)
                table.write(row)
                print(*row.values(), flush=True)
        table.close()
        common.write_json(args.out / "cross_entropy_tilings.json", meta)
        return
    stem = "cross_entropy" + ("" if "all" in args.suite else "_" + "_".join(args.suite))
    table = common.CsvFile(args.out / f"{stem}.csv", FIELDS)
    for case in tqdm(budget.take(cases), "cases", len(cases), mininterval=5):
        run = measure_linear if case.suite == "linear" else measure_case
        for row in run(case, args.columns, timer):
            rows.append(row)
            table.write(row)
            print(*row.values(), flush=True)
    table.close()
    write(args.out, stem, rows, meta | {"cases_asked": len(cases)})


if __name__ == "__main__":
    main()
