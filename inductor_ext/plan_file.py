"""A plan as a file: JSON with one range per line, and errors that name the line at fault.

{
  "format": 1,
  "card": "NVIDIA H200", "torch": "2.13", "triton": "3.7",    each on a line of its own
  "command": "python -m ...",                                 what made the file (optional)
  "entries": [
    {"lowering": "decompose_k", "op": "mm", "dtype": "bfloat16", "layout": "row,column",
     "sizes": {"k": 7168, "n": 256}, "measured": "2026-01-31T12:00:00Z",
     "max_memory_bytes": 1073741824, "ranges": [
      {"m": [1, 8], "choice": "stock", "times_us": {"4": {"stock": 5.6}}},
      {"m": [9, null], "choice": "stock"}
    ]},
    {"lowering": "softmax", "op": "rows", "dtype": "any", "layout": "any", ...
      {"rows": [16, 8192], "choice": "r=4,warps=16,held=0,stages=1"}      of a launch: a tiling
  ]
}
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .plan import Box, Entry, Key, Plan, PlanError

FORMAT = 1
_HEADER = ("card", "torch", "triton")
_NOT_DIMS = ("choice", "times_us")


def dump(plan: Plan) -> str:
    """The text of a plan's file."""
    head = [f'  "format": {FORMAT}']
    head += [f'  "{name}": {_json(getattr(plan, name))}' for name in _HEADER]
    head += [f'  "command": {_json(plan.command)}'] if plan.command else []
    entries = ",\n".join(_dump_entry(entry) for entry in plan.entries)
    body = f'  "entries": [\n{entries}\n  ]' if entries else '  "entries": []'
    return "{\n" + ",\n".join([*head, body]) + "\n}\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _dump_entry(entry: Entry) -> str:
    key = entry.key
    names = {"lowering": key.lowering, "op": key.op, "dtype": key.dtype, "layout": key.layout}
    lines = [
        ", ".join(f'"{name}": {_json(value)}' for name, value in names.items()),
        f'"sizes": {_json(dict(key.sizes))}',
        f'"measured": {_json(entry.measured)}, "max_memory_bytes": {entry.max_memory_bytes}',
        '"ranges": [',
    ]
    ranges = ",\n".join(f"        {_dump_box(box)}" for box in entry.boxes)
    return "    {\n      " + ",\n      ".join(lines) + f"\n{ranges}\n      ]\n    }}"


def _dump_box(box: Box) -> str:
    value: dict[str, Any] = {name: list(bounds) for name, bounds in box.bounds}
    value["choice"] = box.choice
    if box.times:
        value["times_us"] = {
            point: {name: float(f"{us:.4g}") for name, us in times.items()}
            for point, times in box.times.items()
        }
    return _json(value)


# --- where a value stands -------------------------------------------------------------------------

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}:,]|[^\s\[\]{}:,"]+')

Where = tuple["str | int", ...]


class _Lines:
    """Line of every member and element of a JSON text that is known to be well formed."""

    def __init__(self, text: str) -> None:
        self._tokens = [
            (m.group(), text.count("\n", 0, m.start()) + 1) for m in _TOKEN.finditer(text)
        ]
        self._at = 0
        self.of: dict[Where, int] = {}
        self.twice: list[Where] = []
        self._value(())

    def _next(self) -> tuple[str, int]:
        self._at += 1
        return self._tokens[self._at - 1]

    def _value(self, path: Where) -> None:
        token, line = self._next()
        self.of.setdefault(path, line)
        if token not in "[{":
            return
        index = 0
        while self._tokens[self._at][0] not in "]}":
            member: str | int = index
            if token == "{":
                member = json.loads(self._next()[0])
                if (*path, member) in self.of:
                    self.twice.append((*path, member))
                self._next()  # the colon
            self._value((*path, member))
            index += 1
            if self._tokens[self._at][0] == ",":
                self._next()
        self._next()


# --- reading --------------------------------------------------------------------------------------


_LONGEST = 1e15  # us; whole numbers of any size, infinities and NaN are compared with it exactly


class _Reader:
    """One text being read; every complaint is a PlanError with file, line and one sentence."""

    def __init__(self, text: str, name: str, tested: bool = False) -> None:
        self.name, self._content, self._tested = name, text, tested
        self._twice = False
        try:
            self.value = json.loads(
                text, parse_constant=self._constant, object_pairs_hook=self._object
            )
            json.dumps(self.value, ensure_ascii=False).encode()  # no half of a surrogate pair
        except json.JSONDecodeError as error:
            raise PlanError(
                f"{name}, line {error.lineno}: not JSON ({error.msg}, column {error.colno})."
            ) from None
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{name}: not a plan ({error}).") from None
        if self._twice:
            where = self.lines.twice[0]
            raise self.error(where, f"{where[-1]!r} stands twice in one object")

    @functools.cached_property
    def lines(self) -> _Lines:
        """Where everything stands: for complaints only, since it takes ten times the reading."""
        return _Lines(self._content)

    def _object(self, members: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(members)
        self._twice |= len(value) < len(members)
        return value

    @staticmethod
    def _constant(name: str) -> float:
        raise ValueError(f"{name} is not JSON")

    def error(self, where: Where, sentence: str) -> PlanError:
        while where not in self.lines.of:
            where = where[:-1]
        return PlanError(f"{self.name}, line {self.lines.of[where]}: {sentence}.")

    def expect(self, where: Where, ok: bool, wanted: str, got: Any) -> None:
        if not ok:
            shown = json.dumps(got, ensure_ascii=False)
            shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
            label = f" as {where[-1]!r}" if where and isinstance(where[-1], str) else ""
            raise self.error(where, f"expected {wanted}{label}, got {shown}")

    def members(self, where: Where, value: Any, needed: tuple[str, ...], more: Any = ()) -> None:
        """An object with the needed members and none but ``more`` besides (None: any)."""
        self.expect(where, isinstance(value, dict), "an object", value)
        for name in needed:
            if name not in value:
                raise self.error(where, f"{name!r} is missing")
        for name in value if more is not None else ():
            if name not in needed and name not in more:
                known = ", ".join([*needed, *more])
                raise self.error((*where, name), f"unknown key {name!r}, expected {known}")

    def text(self, where: Where, value: Any, pattern: str = r".+", wanted: str = "text") -> str:
        ok = isinstance(value, str) and re.fullmatch(pattern, value) is not None
        self.expect(where, ok, wanted, value)
        return value

    def whole(self, where: Where, value: Any, at_least: int) -> int:
        ok = type(value) is int and value >= at_least
        self.expect(where, ok, f"a whole number of at least {at_least}", value)
        return value

    # --- the parts of a plan ---

    def plan(self, known: Callable[[str], bool]) -> Plan:
        top = self.value
        self.expect((), isinstance(top, dict), "an object", top)
        # Of a newer format nothing else can be said.
        if "format" in top:
            self.expect(
                ("format",),
                type(top["format"]) is int and top["format"] == FORMAT,
                f"{FORMAT} (other formats need another version of inductor_ext)",
                top["format"],
            )
        self.members((), top, ("format", *_HEADER, "entries"), ("command",))
        card = self.text(("card",), top["card"], wanted="a card's name")
        torch, triton = (
            self.text((name,), top[name], r"\d+\.\d+", 'a minor version like "2.13"')
            for name in ("torch", "triton")
        )
        command = self.text(("command",), top.get("command", ""), ".*")
        self.expect(("entries",), isinstance(top["entries"], list), "a list", top["entries"])
        entries: dict[Any, Entry] = {}
        for i, value in enumerate(top["entries"]):
            entry = self.entry(("entries", i), value, known)
            problem = (entry.key, entry.dims)
            if problem in entries:
                raise self.error(("entries", i), f"a second entry for {entry.key}")
            entries[problem] = entry
        return Plan(card, torch, triton, tuple(entries.values()), command)

    def entry(self, where: Where, value: Any, known: Callable[[str], bool]) -> Entry:
        texts = ("lowering", "op", "dtype", "layout")
        needed = (*texts, "sizes", "measured", "max_memory_bytes", "ranges")
        self.members(where, value, needed)
        for name in texts:
            pattern = r"[^\s]+" if name != "layout" else r"[^\s]*"
            self.text((*where, name), value[name], pattern, "one word")
        if not known(value["lowering"]):
            raise self.error((*where, "lowering"), f"unknown lowering {value['lowering']!r}")
        sizes = value["sizes"]
        self.members((*where, "sizes"), sizes, (), None)
        for name, size in sizes.items():
            self.whole((*where, "sizes", name), size, 0)
        self.text((*where, "measured"), value["measured"], wanted="a time in ISO 8601")
        self.expect((*where, "measured"), _is_time(value["measured"]), "a time like "
                    "2026-01-31T12:00:00Z", value["measured"])  # fmt: skip
        memory = self.whole((*where, "max_memory_bytes"), value["max_memory_bytes"], 0)
        ranges = value["ranges"]
        ok = isinstance(ranges, list) and bool(ranges)
        self.expect((*where, "ranges"), ok, "a list of at least one range", ranges)
        boxes: list[Box] = []
        for i, one in enumerate(ranges):
            here = (*where, "ranges", i)
            box = self.box(here, one)
            names = [name for name, _ in box.bounds]
            if boxes and names != [name for name, _ in boxes[0].bounds]:
                raise self.error(
                    here, f"this range bounds {', '.join(names)}, the first other sizes"
                )
            for name in names:
                if name in sizes:
                    raise self.error((*here, name), f"{name!r} is a static size of this entry")
            for j, other in enumerate(boxes):
                if box.overlaps(other):
                    there: Where = (*where, "ranges", j)
                    line = self.lines.of[there]
                    raise self.error(here, f"the range {box} overlaps {other} of line {line}")
            boxes.append(box)
        lowering, op, dtype, layout = (value[name] for name in texts)
        for i, box in enumerate([] if self._tested else boxes):
            if why := _launch_fault(lowering, op, box.choice):
                raise self.error((*where, "ranges", i, "choice"), why)
        key = Key.of(lowering, op, dtype, layout, sizes)
        return Entry(key, tuple(boxes), value["measured"], memory)

    def box(self, where: Where, value: Any) -> Box:
        self.members(where, value, ("choice",), None)
        self.text((*where, "choice"), value["choice"], wanted="a candidate's name")
        bounds = []
        for name in value:
            if name in _NOT_DIMS:
                continue
            here, pair = (*where, name), value[name]
            self.expect(here, isinstance(pair, list) and len(pair) == 2, "[lo, hi]", pair)
            low, high = pair
            self.whole(here, low, 0)
            if high is not None:
                self.whole(here, high, 0)
                if low > high:
                    raise self.error(here, f"the range is empty, lo {low} is above hi {high}")
            bounds.append((name, (low, high)))
        if not bounds:
            raise self.error(where, 'a range bounds no size, expected a member like "m": [1, 8]')
        times = value.get("times_us", {})
        self.members((*where, "times_us"), times, (), None)
        for point, us in times.items():
            here = (*where, "times_us", point)
            ok = re.fullmatch(r"\d+(,\d+)*", point) and len(point.split(",")) == len(bounds)
            self.expect(here, bool(ok), "a size for each bound", point)
            self.members(here, us, (), None)
            for name, t in us.items():
                number = type(t) in (int, float) and 0 < t < _LONGEST
                self.expect((*here, name), number, "a positive number of us", t)
        return Box(tuple(bounds), value["choice"], times)


def _is_time(text: str) -> bool:
    try:
        datetime.datetime.fromisoformat(text.removesuffix("Z"))
    except ValueError:
        return False
    return text.endswith("Z")


def _launch_fault(lowering: str, op: str, choice: str) -> str:
    from . import planned_launches

    return planned_launches.fault(lowering, op, choice)


def _known_lowering(name: str) -> bool:
    """Registered here, or a user's own operation, which may be registered later."""
    from . import registry

    return "::" in name or name in {n for n, *_ in registry.status()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise PlanError(f"{path}: not a plan (it is not UTF-8 text).") from None
    except OSError as error:
        raise PlanError(f"{path}: the plan can't be read ({error.strerror}).") from None


def read(path: Path, tested: bool = False) -> Plan:
    """The plan in a file. Raises PlanError, one sentence naming file and line.

    ``tested`` is for the plans of the package, which its tests check: what they name for launches
    is not compared with the kernels here, for which all of those would have to be imported.
    """
    return _Reader(_text(path), str(path), tested).plan(_known_lowering)


def check(path: Path) -> Iterator[str]:
    """Everything amiss in a file, a sentence each: what ``read`` raises (then nothing more), and
    candidates that their lowering can't have."""
    from . import registry

    try:
        reader = _Reader(_text(path), str(path))
        plan = reader.plan(_known_lowering)
    except PlanError as error:
        yield str(error)
        return
    for i, entry in enumerate(plan.entries):
        pattern = registry.candidate_pattern(entry.key.lowering)
        for j, box in enumerate(entry.boxes):
            if box.choice != "stock" and pattern and not pattern.fullmatch(box.choice):
                where = ("entries", i, "ranges", j, "choice")
                yield str(
                    reader.error(where, f"{entry.key.lowering} has no candidate {box.choice!r}")
                )
