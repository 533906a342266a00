"""What every benchmark shares: fresh compiles, CSV and JSON output, means, tables and plots.

Imports nothing beyond the standard library at the top, so that ``--help`` and ``--list`` answer at
once on a machine without torch, a card or matplotlib.
"""

from __future__ import annotations

import csv
import datetime
import json
import math
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


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
