"""Tables, goals, plots and merged files of the mHC benchmark; needs no card."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks import mhc_cases as cases_of
from benchmarks.mhc_cases import COLUMNS, STAGES, Case

MINE = ("ours", "plugin")
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
    mine = [c for c in MINE if c in columns]
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
        if column not in MINE:
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
