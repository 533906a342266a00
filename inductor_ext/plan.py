"""Plans: what to emit for which sizes on one card, with the times each decision rests on.

A plan is a value. ``plan_file`` reads and writes it, ``active_plan`` holds those that are in force,
``tune`` measures one. Sizes are plain ints, times microseconds.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

Bounds = tuple[int, "int | None"]  # both inclusive; None: unbounded


class PlanError(ValueError):
    """A plan that can't be used; the message is one sentence that names the file."""


@dataclasses.dataclass(frozen=True)
class Key:
    """The problem of an entry: everything but the sizes that have ranges.

    ``lowering`` is a registered name, ``op`` the operation ("mm"), ``dtype`` that of the operands
    (and "->" that of the result where it differs), ``layout`` one word per operand ("row",
    "column", "other"), comma between, ``sizes`` the static sizes by name.

    Of what an operation launches (``templates.tilings``) ``op`` is the launch, ``layout`` what else
    its rule looks at; choices are tilings, or "heuristic" where the rule's own is the fastest.
    """

    lowering: str
    op: str
    dtype: str
    layout: str
    sizes: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def of(lowering: str, op: str, dtype: str, layout: str, sizes: Mapping[str, int]) -> Key:
        """A key with its sizes in order."""
        return Key(lowering, op, dtype, layout, tuple(sorted(sizes.items())))

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes)
        return f"{self.lowering} {self.op} {self.dtype} {self.layout} {sizes}".rstrip()


@dataclasses.dataclass(frozen=True)
class Box:
    """One choice: it holds where every named size lies within its bounds.

    ``times`` maps a measured point ("4", or "2,4" for several sizes, in the order of ``bounds``) to
    us by candidate.
    """

    bounds: tuple[tuple[str, Bounds], ...]
    choice: str
    times: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict, hash=False)

    def covers(self, sizes: Mapping[str, int]) -> bool:
        """Whether the sizes lie inside."""
        return all(within(sizes[name], bounds) for name, bounds in self.bounds)

    def overlaps(self, other: Box) -> bool:
        """Whether a point lies in both; they bound the same sizes."""
        theirs = dict(other.bounds)
        return all(intersection(bounds, theirs[name]) is not None for name, bounds in self.bounds)

    def nearest_times(self, sizes: Mapping[str, int]) -> tuple[str, Mapping[str, float]]:
        """The measured point nearest to ``sizes`` on a log scale, and its times."""
        names = [name for name, _ in self.bounds]

        def distance(point: str) -> float:
            return sum(
                abs(math.log((int(at) + 1) / (sizes[name] + 1)))
                for name, at in zip(names, point.split(","), strict=True)
            )

        point = min(self.times, key=distance, default="")
        return point, self.times.get(point, {})

    def __str__(self) -> str:
        return " ".join(f"{name}={show(bounds)}" for name, bounds in self.bounds)


def within(size: int, bounds: Bounds) -> bool:
    """Whether a size lies within bounds."""
    return bounds[0] <= size and (bounds[1] is None or size <= bounds[1])


def show(bounds: Bounds) -> str:
    """Bounds for a table: "1..8", "9.." or "7"."""
    low, high = bounds
    return str(low) if low == high else f"{low}..{'' if high is None else high}"


def intersection(a: Bounds, b: Bounds) -> Bounds | None:
    """What lies within both; None: nothing."""
    low = max(a[0], b[0])
    highs = [high for high in (a[1], b[1]) if high is not None]
    high = min(highs) if highs else None
    return (low, high) if high is None or low <= high else None


@dataclasses.dataclass(frozen=True)
class Entry:
    """The boxes of one problem, measured in one go.

    ``measured`` is the UTC time of that in ISO 8601; ``max_memory_bytes`` bounded the tensors of
    the largest size then.
    """

    key: Key
    boxes: tuple[Box, ...]
    measured: str
    max_memory_bytes: int

    @property
    def dims(self) -> tuple[str, ...]:
        """The names of the sizes that have ranges."""
        return tuple(name for name, _ in self.boxes[0].bounds)

    def box_at(self, sizes: Mapping[str, int]) -> Box | None:
        """The box around a point, of which there is one at most."""
        return next((box for box in self.boxes if box.covers(sizes)), None)


Problem = tuple[Key, tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Choices for one card, torch and triton minor version ("2.13"), by problem and sizes."""

    card: str
    torch: str
    triton: str
    entries: tuple[Entry, ...] = ()
    command: str = ""

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan. Raises PlanError, one sentence with file and line, for anything amiss."""
        from . import plan_file

        return plan_file.read(Path(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, one range per line."""
        from . import plan_file

        Path(path).write_text(plan_file.dump(self), encoding="utf-8")

    @functools.cached_property
    def digest(self) -> str:
        """Hash of the content, the same wherever the file lies."""
        from . import plan_file

        return hashlib.sha256(plan_file.dump(self).encode()).hexdigest()

    @functools.cached_property
    def problems(self) -> frozenset[tuple[str, str]]:
        """(lowering, operation) of every entry."""
        return frozenset((entry.key.lowering, entry.key.op) for entry in self.entries)

    @functools.cached_property
    def _index(self) -> dict[_Kind, dict[tuple[str, ...], _Group]]:
        """Entries by kind of problem, then by their ranged sizes, those with the fewest first."""
        index: dict[_Kind, dict[tuple[str, ...], _Group]] = {}
        for entry in sorted(self.entries, key=lambda e: len(e.dims)):
            static = tuple(sorted(name for name, _ in entry.key.sizes))
            groups = index.setdefault(_kind(entry.key, {*static, *entry.dims}), {})
            group = groups.setdefault(tuple(sorted(entry.dims)), _Group(static, {}))
            sizes = dict(entry.key.sizes)
            group.entries.setdefault(tuple(sizes[name] for name in static), []).append(entry)
        return index

    def _near(
        self, key: Key, sizes: Mapping[str, int], free: Sequence[str] = ()
    ) -> Iterator[Entry]:
        """The entries of a problem, whatever their ranges, in the order in which they decide; of
        the sizes in ``free`` nothing is known."""
        for group in self._index.get(_kind(key, {*sizes, *free}), {}).values():
            if not {*free} & {*group.static}:
                yield from group.entries.get(tuple(sizes[name] for name in group.static), ())
                continue
            for values, entries in group.entries.items():
                given = zip(group.static, values, strict=True)
                if all(name in free or sizes[name] == size for name, size in given):
                    yield from entries

    def find(self, key: Key, dims: Mapping[str, int]) -> Box | None:
        """The box for a problem at these values of its ranged sizes.

        A size may be static in the key and ranged in the plan: every size of the problem counts,
        wherever it is named. Of several entries the one with the fewest ranged sizes decides.
        """
        sizes = {**dict(key.sizes), **dims}
        boxes = (entry.box_at(sizes) for entry in self._near(key, sizes))
        return next((box for box in boxes if box is not None), None)

    def boxes_of(
        self, key: Key, fixed: Mapping[str, int], names: Sequence[str]
    ) -> list[tuple[Box, tuple[Bounds, ...]]]:
        """The boxes that hold at ``fixed`` sizes, with their bounds of the others in ``names``.

        In the order in which ``find`` takes them: where two overlap, the first decides. A size that
        is static in an entry has bounds of one value.
        """
        here = {**dict(key.sizes), **fixed}
        found: list[tuple[Box, tuple[Bounds, ...]]] = []
        for entry in self._near(key, here, names):
            static: dict[str, Bounds] = {name: (size, size) for name, size in entry.key.sizes}
            for box in entry.boxes:
                bounds = {**static, **dict(box.bounds)}
                if all(within(size, bounds[name]) for name, size in here.items()):
                    found.append((box, tuple(bounds[name] for name in names)))
        return found

    def lookup(self, key: Key, dims: Mapping[str, int]) -> str | None:
        """The candidate for a problem at these values of its ranged sizes; None: not covered."""
        box = self.find(key, dims)
        return None if box is None else box.choice

    def why_not(self, key: Key, dims: Mapping[str, int]) -> str:
        """Why ``find`` gives None, as far as the plan can tell."""
        sizes = {**dict(key.sizes), **dims}
        if (near := next(self._near(key, sizes), None)) is not None:
            values = " ".join(f"{name}={sizes[name]}" for name in near.dims)
            return f"{values} lies in none of its ranges"
        if any(kind[:4] == _kind(key, ())[:4] for kind in self._index):
            return f"no entry for these sizes of {key.op} {key.dtype} {key.layout}"
        return f"no entry for {key.lowering} {key.op} {key.dtype} {key.layout}"

    def merge(self, other: Plan) -> Plan:
        """Both plans in one. Where they cover the same sizes, the newer measurement wins.

        Of two equally old ones ``other`` wins. An older range keeps the sizes that the newer does
        not cover, with the times measured there. Raises PlanError for plans of different cards or
        versions.
        """
        mine, theirs = ((p.card, p.torch, p.triton) for p in (self, other))
        if mine != theirs:
            raise PlanError(
                "expected plans of one card and version, got "
                f"{' and '.join(f'{c} with torch {t}, triton {r}' for c, t, r in (mine, theirs))}."
            )
        entries: dict[Problem, Entry] = {(e.key, e.dims): e for e in self.entries}
        for entry in other.entries:
            problem = (entry.key, entry.dims)
            before = entries.get(problem)
            entries[problem] = entry if before is None else _merge_entries(before, entry)
        commands = list(dict.fromkeys(c for c in (self.command, other.command) if c))
        return dataclasses.replace(
            self, entries=tuple(entries.values()), command=" ; ".join(commands)
        )

    def diff(self, other: Plan) -> list[Change]:
        """What differs in the choices from ``self`` to ``other``, in the order of ``self``."""
        before: dict[Problem, Entry] = {(e.key, e.dims): e for e in self.entries}
        after: dict[Problem, Entry] = {(e.key, e.dims): e for e in other.entries}
        changes = []
        for problem in [*before, *(p for p in after if p not in before)]:
            old, new = before.get(problem), after.get(problem)
            changes += list(_differences(problem[0], old, new))
        return changes


@dataclasses.dataclass(frozen=True)
class Change:
    """One difference between two plans; None: those sizes are not covered there."""

    key: Key
    where: str
    before: str | None
    after: str | None


_Kind = tuple[str, str, str, str, frozenset[str]]  # of a problem, with the names of all its sizes


class _Group(NamedTuple):
    """Entries of one kind with the same static sizes, by the values of those."""

    static: tuple[str, ...]
    entries: dict[tuple[int, ...], list[Entry]]


def _kind(key: Key, sizes: Collection[str]) -> _Kind:
    return key.lowering, key.op, key.dtype, key.layout, frozenset(sizes)


def _merge_entries(mine: Entry, theirs: Entry) -> Entry:
    older, newer = (mine, theirs) if mine.measured <= theirs.measured else (theirs, mine)
    kept = [part for box in older.boxes for part in outside(box, newer.boxes)]
    boxes = sorted([*newer.boxes, *kept], key=lambda box: [low for _, (low, _) in box.bounds])
    return dataclasses.replace(
        newer,
        boxes=tuple(boxes),
        max_memory_bytes=max(mine.max_memory_bytes, theirs.max_memory_bytes),
    )


def outside(box: Box, taken: tuple[Box, ...]) -> list[Box]:
    """The parts of a box that none of ``taken`` covers, each with its own times."""
    parts = [dict(box.bounds)]
    for other in taken:
        parts = [rest for part in parts for rest in _subtract(part, dict(other.bounds))]
    if len(parts) == 1 and parts[0] == dict(box.bounds):
        return [box]
    out = []
    for part in parts:
        names = list(part)
        times = {
            point: times
            for point, times in box.times.items()
            if all(within(int(v), part[n]) for n, v in zip(names, point.split(","), strict=True))
        }
        out.append(Box(tuple(part.items()), box.choice, times))
    return out


def _subtract(part: dict[str, Bounds], other: dict[str, Bounds]) -> Iterator[dict[str, Bounds]]:
    """``part`` without ``other``, cut along one size after another."""
    inside: dict[str, Bounds] = {}
    for name, bounds in part.items():
        common = intersection(bounds, other[name])
        if common is None:
            yield part
            return
        inside[name] = common
    rest = dict(part)
    for name, (low, high) in inside.items():
        first, last = rest[name]
        if first < low:
            yield {**rest, name: (first, low - 1)}
        if high is not None and (last is None or high < last):
            yield {**rest, name: (high + 1, last)}
        rest[name] = (low, high)


def _differences(key: Key, old: Entry | None, new: Entry | None) -> Iterator[Change]:
    olds, news = (() if e is None else e.boxes for e in (old, new))
    for box in olds:
        theirs = dict(box.bounds)
        for other in news:
            if box.overlaps(other) and box.choice != other.choice:
                common = tuple((n, intersection(theirs[n], b)) for n, b in other.bounds)
                where = Box(common, "")  # type: ignore[arg-type]  # they overlap
                yield Change(key, str(where), box.choice, other.choice)
        for part in outside(box, news):
            yield Change(key, str(part), box.choice, None)
    for box in news:
        for part in outside(box, olds):
            yield Change(key, str(part), None, box.choice)
