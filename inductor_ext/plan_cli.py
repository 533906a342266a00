"""``python -m inductor_ext plan show|check|merge|diff``: plan files at the command line.

Exit codes: 0; 1 where ``check`` finds something or ``diff`` a difference; 2 for bad input, with one
sentence on stderr.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from . import plan_file, plots
from .plan import Box, Plan, PlanError


def _console() -> Console:
    # Names are text, not markup. A pipe has no width: 120 columns keep a table readable there.
    console = Console(markup=False, highlight=False, emoji=False)
    return console if console.is_terminal else Console(
        width=120, markup=False, highlight=False, emoji=False
    )  # fmt: skip


def headline(plan: Plan) -> str:
    """A plan in one line."""
    boxes = sum(len(entry.boxes) for entry in plan.entries)
    return (
        f"{plan.card}, torch {plan.torch}, triton {plan.triton}: "
        f"{len(plan.entries)} problems, {boxes} ranges"
    )


def _measured(box: Box) -> tuple[str, str, str]:
    """The points of a box: sizes, us of the choice and speed-up over stock, or over the rule's
    tiling of a launch, a line each."""
    points, us, speedups = [], [], []
    for point, times in box.times.items():
        points.append(point)
        chosen, stock = times.get(box.choice), times.get("stock", times.get("heuristic"))
        us.append("-" if chosen is None else f"{chosen:.2f}")
        speedups.append(f"{stock / chosen:.2f}x" if chosen and stock else "-")
    return "\n".join(points), "\n".join(us), "\n".join(speedups)


def show(path: Path, plot: Path | None = None) -> int:
    """Print a plan: a table per problem, a row per range; ``plot``: draw its times as well."""
    if plot is not None:
        plots.require(plot)
    plan, console = Plan.load(path), _console()
    console.print(headline(plan))
    if plan.command:
        console.print(f"made by: {plan.command}")
    for entry in plan.entries:
        table = Table(title=str(entry.key), title_justify="left")
        table.add_column("range", overflow="fold")
        table.add_column("choice", overflow="fold")
        table.add_column("measured at", overflow="fold")
        table.add_column("us", justify="right", no_wrap=True)
        launch = any("heuristic" in us for box in entry.boxes for us in box.times.values())
        table.add_column("over rule" if launch else "over stock", justify="right", no_wrap=True)
        for box in entry.boxes:
            table.add_row(str(box), box.choice, *_measured(box))
        console.print(table)
        memory = entry.max_memory_bytes / 2**30
        console.print(f"measured {entry.measured}, tensors of at most {memory:.2f} GiB")
    if plot is not None:
        plots.draw(plots.of_entries(plan.entries), plot, headline(plan))
    return 0


def check(paths: Sequence[Path]) -> int:
    """Say what is amiss in plan files, a sentence each on stderr."""
    bad = False
    for path in paths:
        faults = list(plan_file.check(path))
        for fault in faults:
            print(fault, file=sys.stderr)
        bad |= bool(faults)
        if not faults:
            print(f"{path}: in order ({headline(Plan.load(path))})")
    return int(bad)


def merge(paths: Sequence[Path], output: Path) -> int:
    """Write one plan that holds all; the newest measurement wins where they overlap."""
    merged = functools.reduce(Plan.merge, [Plan.load(path) for path in paths])
    try:
        merged.save(output)
    except OSError as error:
        raise PlanError(f"{output}: the plan can't be written ({error.strerror}).") from None
    print(f"{output}: {headline(merged)}")
    return 0


def diff(before: Path, after: Path) -> int:
    """Print what differs in the choices of two plans."""
    old, new = Plan.load(before), Plan.load(after)
    console = _console()
    heads = [(p.card, p.torch, p.triton) for p in (old, new)]
    if heads[0] != heads[1]:
        console.print(f"before: {headline(old)}\nafter:  {headline(new)}")
    changes = old.diff(new)
    if changes:
        table = Table()
        for title in ("problem", "range", "before", "after"):
            table.add_column(title, overflow="fold")
        for c in changes:
            absent = "not covered"
            table.add_row(str(c.key), c.where, c.before or absent, c.after or absent)
        console.print(table)
    elif heads[0] == heads[1]:
        print("The plans choose alike.")
    return int(bool(changes) or heads[0] != heads[1])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m inductor_ext plan", description="Looks into plan files, and combines them."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    one = commands.add_parser("show", help="print a plan as tables")
    one.add_argument("path", type=Path)
    one.add_argument(
        "--plot", type=Path, metavar="FILE", help="also draw time against size, with the edges"
    )
    several = commands.add_parser("check", help="say what is amiss; exit code 1 if anything is")
    several.add_argument("paths", type=Path, nargs="+")
    merged = commands.add_parser("merge", help="one plan of several; newer measurements win")
    merged.add_argument("paths", type=Path, nargs="+")
    merged.add_argument("-o", "--output", type=Path, required=True)
    two = commands.add_parser("diff", help="what differs; exit code 1 if anything does")
    two.add_argument("before", type=Path)
    two.add_argument("after", type=Path)
    args = parser.parse_args(argv)
    try:
        if args.command == "show":
            return show(args.path, args.plot)
        if args.command == "check":
            return check(args.paths)
        if args.command == "merge":
            return merge(args.paths, args.output)
        return diff(args.before, args.after)
    except (PlanError, plots.PlotError) as error:
        print(error, file=sys.stderr)
        return 2
