"""What every benchmark shares: fresh compiles, comparing columns, CSV, JSON, tables and plots.

Imports nothing beyond the standard library at the top, so that ``--help`` and ``--list`` answer at
once on a machine without torch, a card or matplotlib. Benchmarks keep torch out of their module
level too: a ``torch`` in ``__main__`` changes the compile cache keys (pickle names torch's objects
by the first module that shows them), and what ``run_in_pool`` has compiled would not be found.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import csv
import dataclasses
import datetime
import json
import math
import multiprocessing
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")
Row = Mapping[str, Any]

# A column holds two times: of independent calls and of a link of a dependent chain.
KINDS = {"": "independent calls", "chain_": "dependent chain"}


def geometric_mean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers; NaN of none."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def number(text: Any) -> float:
    """A CSV cell as a float; NaN where it is empty or no number."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return math.nan


def ratio(time: float, ours: float) -> float:
    """``time`` over ``ours``; NaN where ours is not positive, as noise can leave a net time."""
    return time / ours if ours > 0 else math.nan


def representative(items: Sequence[T]) -> list[T]:
    """The items in golden-ratio steps, so that the first few already span the whole sequence."""
    n = len(items)
    step = max(round(n * 0.618), 1)
    while math.gcd(step, n) > 1:
        step += 1
    return [items[i * step % n] for i in range(n)]


def round_robin(groups: Iterable[Sequence[T]]) -> list[T]:
    """One item of each group in turn, until all are used up."""
    queues = [list(g) for g in groups]
    longest = max((len(q) for q in queues), default=0)
    return [q[i] for i in range(longest) for q in queues if i < len(q)]


def own_code(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A copy of a function with a code object of its own, called ``name``.

    Dynamo caches compiled code per code object. Two candidates compiled from one code object (stock
    and plugin, say) would share the first one's entry; with their own they live side by side.
    """
    assert isinstance(fn, types.FunctionType)
    code = fn.__code__.replace(co_name=name)
    return types.FunctionType(code, fn.__globals__, name, fn.__defaults__, fn.__closure__)


class Budget:
    """Wall-clock seconds (None: no limit) that a series may use, counted from the construction."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.start = time.monotonic()

    def left(self) -> float | None:
        """Seconds left; None without a limit."""
        return None if self.seconds is None else self.start + self.seconds - time.monotonic()

    def take(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items while one more, as slow as the slowest so far, still fits."""
        slowest = 0.0
        for item in items:
            left = self.left()
            if left is not None and left < slowest:
                return
            begun = time.monotonic()
            yield item
            slowest = max(slowest, time.monotonic() - begun)


def run_in_pool(
    worker: Callable[..., R], tasks: Sequence[tuple], workers: int, timeout: float | None
) -> dict[tuple, R]:
    """``worker(*task)`` of every task in fresh processes, each compiling with one thread.

    Returns the results by task. A task that fails, or that ``timeout`` seconds leave no room for,
    is missing there: this only prepares a run, which meets the same error and reports it.
    """
    from tqdm import tqdm

    name = "TORCHINDUCTOR_COMPILE_THREADS"
    before = os.environ.get(name)
    os.environ[name] = "1"  # inherited: the processes are the parallelism
    results: dict[tuple, R] = {}
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=context)
    try:
        futures = {pool.submit(worker, *task): task for task in tasks}
        done = concurrent.futures.as_completed(futures, timeout=timeout)
        for future in tqdm(done, "prewarm", len(tasks), mininterval=5):
            if future.exception() is None:
                results[futures[future]] = future.result()
    except concurrent.futures.TimeoutError:
        for process in multiprocessing.active_children():
            process.terminate()  # what is still running may go on for minutes
    finally:
        pool.shutdown(cancel_futures=True)
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    print(f"prewarm: {len(results)} of {len(tasks)} compiles are cached", file=sys.stderr)
    return results


def shard(text: str) -> tuple[int, int]:
    """Parse ``i/n``, for argparse."""
    i, _, n = text.partition("/")
    if not (i.isdigit() and n.isdigit() and 1 <= int(i) <= int(n)):
        raise argparse.ArgumentTypeError(f"a shard is i/n with 1 <= i <= n, and {text!r} came")
    return int(i), int(n)


def names_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """A parser of comma-separated names out of ``known``, for argparse."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [n for n in names if n not in known]:
            raise argparse.ArgumentTypeError(
                f"names are {', '.join(known)}, and {', '.join(unknown)} came"
            )
        return names

    return parse


class CsvFile:
    """A CSV file with a fixed header whose rows are on disk as soon as they are written."""

    def __init__(self, path: Path, fields: Sequence[str]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", newline="")
        self._writer = csv.DictWriter(self._file, fields, restval="", extrasaction="raise")
        self._writer.writeheader()
        self._file.flush()

    def write(self, row: Mapping[str, Any]) -> None:
        """Write one row; floats with 5 significant digits, NaN as an empty cell."""
        cells = {
            k: ("" if math.isnan(v) else f"{v:.5g}") if isinstance(v, float) else v
            for k, v in row.items()
        }
        self._writer.writerow(cells)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, as text."""
    with path.open(newline="") as f:
        return list(csv.DictReader(f))


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.stdout.strip().splitlines()[0]


def metadata(module: str) -> dict[str, Any]:
    """Card, driver, versions, date and command of this run. Output folders are left out."""
    import torch
    import triton

    argv = sys.argv[1:]
    argv = [
        a
        for i, a in enumerate(argv)
        if a.split("=")[0] != "--out" and (i == 0 or argv[i - 1] != "--out")
    ]
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "card": properties.name,
        "driver": _driver(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(["python -m", module, *argv]),
    }


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table to stdout; floats with 2 decimals, NaN as a dash."""
    from rich.console import Console
    from rich.table import Table

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return "-" if math.isnan(value) else f"{value:.2f}"
        return str(value)

    table = Table(title=title, title_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(cell, row))
    # A fixed width: the output usually goes to a file or a pipe, where rich would assume 80.
    Console(width=150).print(table)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How the column "ours" is set against the other ``columns`` of CSV rows.

    ``stock`` are the columns of which the fastest is "best_stock"; ``order`` gives the case names
    of every suite. In a row, column c has ``c_us``, ``c_spread_us`` and both with ``c_chain_``, and
    ``c_check``, "ok" where the result is right; the time of a wrong one is never counted.
    """

    columns: Sequence[str]
    stock: Sequence[str]
    order: Mapping[str, Sequence[str]]

    @property
    def rivals(self) -> list[str]:
        return [*(c for c in self.columns if c != "ours"), "best_stock"]

    def time(self, row: Row, column: str, kind: str) -> tuple[float, float]:
        """(us, spread) of a column, NaN where it is wrong or missing."""
        if column == "best_stock":
            times = [self.time(row, c, kind) for c in self.stock]
            return min(times, key=lambda t: (math.isnan(t[0]), t[0]))
        if row.get(f"{column}_check") != "ok":
            return math.nan, math.nan
        us, spread = (number(row.get(f"{column}_{kind}{x}")) for x in ("us", "spread_us"))
        return us, spread

    def speedups(self, row: Row) -> dict[str, float]:
        """Every rival's time over ours: ``ours_vs_<rival>`` and ``ours_chain_vs_<rival>``."""
        out = {}
        for kind in KINDS:
            ours = self.time(row, "ours", kind)[0]
            for rival in self.rivals:
                out[f"ours_{kind}vs_{rival}"] = ratio(self.time(row, rival, kind)[0], ours)
        return out

    def grouped(self, rows: Iterable[Row]) -> dict[str, list[Row]]:
        """The rows of every suite that has some, in the suite's order."""
        rows = list(rows)
        groups: dict[str, list[Row]] = {}
        for suite, names in self.order.items():
            position = {name: i for i, name in enumerate(names)}
            group = [(position[r["case"]], i) for i, r in enumerate(rows) if r["suite"] == suite]
            if group:
                groups[suite] = [rows[i] for _, i in sorted(group)]
        return groups

    def summary(self, rows: Iterable[Row], versus: Sequence[str]) -> None:
        """Print what lost or is wrong, then the mean speed-ups and the wins over ``versus``."""
        table, notes = [], []
        for suite, group in self.grouped(rows).items():
            for kind, label in KINDS.items():
                cells: list[Any] = [suite, label, len(group)]
                for rival in self.rivals:
                    ratios = [self.speedups(r)[f"ours_{kind}vs_{rival}"] for r in group]
                    ratios = [r for r in ratios if not math.isnan(r)]
                    cells.append(geometric_mean(ratios))
                    if rival in versus:
                        cells.append(f"{sum(r > 1 for r in ratios)}/{len(group)}")
                table.append(cells)
                for r in group:
                    ours, stock = self.time(r, "ours", kind), self.time(r, "best_stock", kind)
                    if ours[0] - stock[0] > ours[1] + stock[1]:
                        times = f"{ours[0]:.2f} against {stock[0]:.2f} us"
                        notes.append(f"slower than stock: {suite} {r['case']}, {label}: {times}")
            for r in group:
                if r.get("failure"):
                    notes.append(f"failed: {suite} {r['case']}: {r['failure']}")
                for c in self.columns:
                    if (r.get(f"{c}_check") or "ok") != "ok":
                        notes.append(f"not counted: {suite} {r['case']} {c}: {r[f'{c}_check']}")
        print("\n".join(notes))
        heads = [h for v in self.rivals for h in ([v, "wins"] if v in versus else [v])]
        title = "ours: geometric mean of the speed-up over each column, and wins"
        print_table(title, ["suite", "calls", "cases", *heads], table)

    def markdown(self, rows: Iterable[Row], rivals: Sequence[str]) -> str:
        """A table of geometric means (and wins) over ``rivals``, one row per suite and kind."""
        heads = " | ".join(f"over {r}" for r in rivals)
        lines = [f"| suite | shapes | {heads} |", "|---|---|" + "---|" * len(rivals)]
        for suite, group in self.grouped(rows).items():
            for kind in KINDS:
                cells = []
                for rival in rivals:
                    ratios = [self.speedups(r)[f"ours_{kind}vs_{rival}"] for r in group]
                    ratios = [r for r in ratios if not math.isnan(r)]
                    wins = sum(r > 1 for r in ratios)
                    mean = geometric_mean(ratios)
                    cells.append(f"{mean:.2f}x ({wins}/{len(ratios)})" if ratios else "-")
                name = suite + ("-chain" if kind else "")
                lines.append(f"| `{name}` | {len(group)} | {' | '.join(cells)} |")
        return "\n".join(lines) + "\n"

    def plot(self, path: Path, rows: Iterable[Row], title: str) -> None:
        """A PNG of two panels per suite, one per kind: us of every column, and ``floor_us``."""
        panels: list[tuple[str, list[str], dict[str, list[float]]]] = []
        for suite, group in self.grouped(rows).items():
            for kind, label in KINDS.items():
                lines = {c: [self.time(r, c, kind)[0] for r in group] for c in self.columns}
                lines["floor"] = [number(r.get("floor_us")) for r in group]
                panels.append((f"{suite}, {label}", [r["case"] for r in group], lines))
        try:
            plot_panels(path, title, panels, columns=len(KINDS))
        except ImportError as error:
            print(f"no plot: {error}", file=sys.stderr)


def plot_panels(
    path: Path,
    title: str,
    panels: Sequence[tuple[str, Sequence[str], Mapping[str, Sequence[float]]]],
    columns: int,
) -> None:
    """Write a PNG of line plots, ``columns`` side by side.

    A panel is (title, x labels, {line: us per label}).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = math.ceil(len(panels) / columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(8 * columns, 3.6 * rows), squeeze=False, layout="constrained"
    )
    for axis, (name, labels, lines) in zip(axes.flat, panels, strict=False):
        for line, values in lines.items():
            # The floor is a bound, not a candidate.
            style = {"ls": "--", "color": "black", "lw": 1} if line == "floor" else {"marker": "."}
            axis.plot(range(len(values)), values, label=line, **style)
        axis.set_title(name, fontsize=10)
        axis.set_yscale("log")
        axis.set_ylabel("us per call")
        axis.set_xticks(range(len(labels)), labels, rotation=90, fontsize=7)
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=7, ncols=2)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
