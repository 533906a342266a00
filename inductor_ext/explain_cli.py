"""``python -m inductor_ext explain TARGET``: what a compile decides, as a table, JSON and plot.

Exit codes: 0; 2 for bad input, with one sentence on stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import active_plan, plots, report, target


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m inductor_ext explain",
        description="Compile a program afresh and say what was decided at every site, and why.",
        epilog=target.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("target", metavar="TARGET", help="what to compile, see below")
    add("--json", type=Path, metavar="FILE", help="write the decisions (Report.to_json)")
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="write a plot: time against size from the plans in force, with the chosen edges",
    )
    add("--card", help="generate the code of a virtual card instead (h200, h100, a100, b200)")
    return parser


def _compile(wanted: str, card: str | None) -> report.Report:
    """The decisions of a fresh compile. Raises TargetError."""
    fn, args = target.load(wanted)
    try:
        if card is None:
            return report.explain(fn, *args)
        from .testing import compile_for

        return report.Report(tuple(compile_for(card, fn, *args).decisions))
    except Exception as error:
        raise target.TargetError(target.describe_failure(error, f"compiling {wanted}")) from error


def main(argv: Sequence[str]) -> int:
    """Print the report of a target; write it as JSON and as a plot where asked to."""
    args = _parser().parse_args(argv)
    try:
        if args.json is not None and args.json.is_dir():
            raise target.TargetError(f"{args.json}: can't be written (it is a folder).")
        if args.json is not None and not args.json.absolute().parent.is_dir():
            raise target.TargetError(f"{args.json}: can't be written (there is no such folder).")
        if args.plot is not None:
            plots.require(args.plot)
        with active_plan.consulted() as entries:
            found = _compile(args.target, args.card)
        print(found)
        if args.json is not None:
            args.json.write_text(found.to_json() + "\n", encoding="utf-8")
        if args.plot is not None:
            panels = plots.of_entries(entries)
            panels += [panel for d in found.decisions for panel in plots.of_decision(d)]
            plots.draw(panels, args.plot, f"inductor_ext: {args.target}")
    except (target.TargetError, plots.PlotError) as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{args.json}: can't be written ({error.strerror}).", file=sys.stderr)
        return 2
    return 0
