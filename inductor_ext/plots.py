"""Plots of time against size: what a plan measured, where the edges lie, what was decided.

What is shown is a list of ``Panel``, plain data; only ``draw`` needs matplotlib, an optional extra.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .plan import Bounds, Box, Entry, show
from .report import Decision

_MOST_BARS = 24


class PlotError(ValueError):
    """A plot that can't be made; the message is one sentence."""


@dataclasses.dataclass(frozen=True)
class Panel:
    """One plot. ``lines``: candidate -> (size, us) in order; ``ranges``: (lo, hi or None, choice)
    along the size; ``bars``: us by candidate where the times are of one size only."""

    title: str
    size: str = ""
    lines: Mapping[str, Sequence[tuple[int, float]]] = dataclasses.field(default_factory=dict)
    ranges: Sequence[tuple[int, int | None, str]] = ()
    bars: Mapping[str, float] = dataclasses.field(default_factory=dict)


# --- what to show ---------------------------------------------------------------------------------


def of_entry(entry: Entry) -> list[Panel]:
    """A plan's entry along the size with the most ranges, one panel per band of the others."""
    dims = entry.dims
    bounds = [dict(box.bounds) for box in entry.boxes]
    lead = max(dims, key=lambda name: len({b[name] for b in bounds}))
    bands: dict[tuple[tuple[str, Bounds], ...], list[Box]] = defaultdict(list)
    for box in entry.boxes:
        bands[tuple((n, b) for n, b in box.bounds if n != lead)].append(box)
    panels = []
    for others, boxes in bands.items():
        where = " ".join(f"{name}={show(b)}" for name, b in others)
        lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for box in boxes:
            for point, times in box.times.items():
                at = int(point.split(",")[dims.index(lead)])
                for name, us in times.items():
                    lines[name].append((at, us))
        spans = sorted((*dict(box.bounds)[lead], box.choice) for box in boxes)
        title = f"{entry.key} {where}".rstrip()
        panels.append(Panel(title, lead, {n: sorted(p) for n, p in lines.items()}, spans))
    return panels


def of_entries(entries: Iterable[Entry]) -> list[Panel]:
    """The panels of several entries."""
    return [panel for entry in entries for panel in of_entry(entry)]


def of_decision(decision: Decision) -> list[Panel]:
    """The ranges of a decision, one panel per band of further sizes; else the times at its size."""
    title = f"{decision.lowering} {decision.sites}"
    bands: dict[tuple[Any, ...], list[tuple[int, int | None, str]]] = defaultdict(list)
    for r in decision.ranges:
        bands[r.size, r.and_also].append((r.lo, r.hi, r.chosen))
    panels = []
    for (size, also), spans in bands.items():
        where = ", ".join(f"{name} {show((lo, hi))}" for name, lo, hi in also)
        panels.append(Panel(f"{title} {where}".rstrip(), size, ranges=spans))
    timed = {c.name: c.us for c in decision.candidates if c.us is not None}
    if timed and not panels:
        panels.append(Panel(title, bars=timed))
    return panels


# --- drawing --------------------------------------------------------------------------------------


def require(path: Path) -> None:
    """Raise PlotError unless ``draw`` will be able to write this file: asked before measuring."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotError(
            'a plot needs matplotlib, which is not installed (pip install "inductor_ext[plot]").'
        ) from None
    kinds = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix[1:].lower() not in kinds:
        raise PlotError(f"expected a plot's file to end in one of {', '.join(kinds)}, got {path}.")
    if not path.absolute().parent.is_dir():
        raise PlotError(f"{path}: the plot can't be written (there is no such folder).")


def draw(panels: Sequence[Panel], path: Path, title: str) -> None:
    """Write the panels below each other; both axes are logarithmic. Raises PlotError."""
    require(path)
    if not panels:
        raise PlotError(
            "there is nothing to plot: no time was measured here and no plan in force has any "
            "(make one with: python -m inductor_ext tune)."
        )
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8 * len(panels) + 0.6), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        axis.set_title(panel.title, fontsize=9)
        if panel.bars:
            _draw_bars(axis, panel.bars)
        else:
            _draw_ranges(axis, panel)
    figure.suptitle(title, fontsize=11)
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise PlotError(f"{path}: the plot can't be written ({error.strerror}).") from None


def _draw_bars(axis: Any, bars: Mapping[str, float]) -> None:
    fastest = sorted(bars, key=bars.__getitem__)[:_MOST_BARS]
    axis.barh(fastest[::-1], [bars[name] for name in fastest[::-1]], height=0.6)
    axis.set_xlabel("us")
    axis.tick_params(labelsize=7)


def _ends(panel: Panel) -> tuple[float, float]:
    """Least and largest size to show; an unbounded range is shown up to twice its beginning."""
    sizes = [float(size) for points in panel.lines.values() for size, _ in points]
    for lo, hi, _ in panel.ranges:
        sizes += [lo, 2 * max(lo, 1) if hi is None else hi]
    low, high = max(min(sizes), 1.0), max(*sizes, 1.0)
    return low / 1.1, high * 1.1


def _draw_ranges(axis: Any, panel: Panel) -> None:
    from matplotlib.ticker import LogFormatter

    low, high = _ends(panel)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(LogFormatter(base=2))
    axis.set_xlim(low, high)
    axis.set_xlabel(panel.size)
    shades = ("0.93", "1.0")
    for i, (lo, hi, choice) in enumerate(panel.ranges):
        # Half-way to the neighbouring size: an edge lies between two sizes.
        left, right = max(lo - 0.5, low), min(high, math.inf if hi is None else hi + 0.5)
        axis.axvspan(left, right, color=shades[i % 2], zorder=0)
        if i:
            axis.axvline(left, color="0.4", lw=0.8, ls="--", zorder=1)
        axis.text(
            math.sqrt(left * right),
            0.02,
            choice,
            transform=axis.get_xaxis_transform(),
            rotation=90,
            fontsize=6,
            ha="center",
            va="bottom",
            color="0.35",
        )
    for name, points in panel.lines.items():
        axis.plot(*zip(*points, strict=True), marker=".", lw=1, label=name)
    if panel.lines:
        axis.set_yscale("log")
        axis.set_ylabel("us")
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=6)
    else:
        axis.set_yticks([])
        axis.set_ylabel("not timed")
