"""``tune``: measure on this card which candidate to emit at which sizes, as a plan.

The function is compiled once with the named dimensions dynamic. At every site that plans can
describe, the operation and what fuses behind it are taken out of the graph, all of its tensors are
given the sizes that follow from a value of the dimension, and the candidates are checked and timed
as in the max-autotune modes; ``measured_ranges.search`` says at which values.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import inspect
import itertools
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from . import (
    choosing,
    compat,
    compat_dynamo,
    measure,
    measured_ranges,
    ranges,
    report,
    tuning_launches,
)
from .measured_site import MeasuredSite, Timer
from .plan import Box, Entry, Plan
from .tuning_arguments import Marks, called, followers, owned, resized

log = logging.getLogger("inductor_ext")

_BANDS = 4  # of every dimension but the one ranges are found along


class _Dim(NamedTuple):
    """A dimension to vary: as the user called it, which argument, and its bounds."""

    label: str
    argument: str
    position: int
    dim: int
    lo: int
    hi: int

    def __str__(self) -> str:
        where = f"{self.argument}.{self.dim}"
        return (
            repr(where)
            if where == self.label
            else f"{self.label!r} (dimension {self.dim} of {self.argument!r})"
        )


class Tally:
    """What tuning took: seconds, and how much was timed and compiled."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._sizes: set[tuple[str, int]] = set()
        self._candidates: set[tuple[str, str]] = set()
        self.programs = 0

    def add(self, site: str, size: int, names: Sequence[str]) -> None:
        """Count one measurement."""
        self._sizes.add((site, size))
        self._candidates.update((site, name) for name in names)

    def __str__(self) -> str:
        seconds = time.monotonic() - self._started
        return (
            f"took {seconds:.0f} s: {len(self._sizes)} sizes, {len(self._candidates)} candidates, "
            f"{self.programs} programs compiled"
        )


def tune(
    fn: Callable[..., Any],
    *args: Any,
    dims: Mapping[str, tuple[int, int]],
    progress: bool = True,
    max_ranges: int = 8,
    max_memory: int | None = None,
    _measure: Timer | None = None,
    _card: str | None = None,
    _tally: Tally | None = None,
) -> Plan:
    """Measure, for every site of ``fn``, which candidate is fastest over ranges of ``dims``.

    ``fn`` (a function, module or compiled function) is called many times, with copies of ``args``:
    what it writes to besides them is written to each time. Where one of them requires a gradient it
    is called backward too, for the launches there. ``dims`` maps a dimension to its least and
    largest size, both inclusive. "x.0" is dimension 0 of the argument x; a name without a dot is
    the one dimension marked with ``torch._dynamo.mark_dynamic``, or, where none is, dimension 0 of
    the first tensor, which is then logged. At most ``max_ranges`` ranges a site; of several
    dimensions, ranges are found along the first and the others are cut into at most four bands.
    What operations launch is tuned along one dimension after another, the others being as they are
    in ``args``, with ``args`` repeated or cut to size.

    ``max_memory`` bounds the bytes of what is measured at the largest size (default: 80% of what is
    free on the card). With ``progress`` a bar counts the measurements. Times are those of
    ``measure.compare``: medians, cold L2, each candidate checked first: against fp64, a launch's
    against its rule's tiling.

    Raises RuntimeError without a card, ValueError for dims that name nothing, are out of order or
    not dynamic in the graph, MemoryError where the largest size would exceed ``max_memory``.
    """
    if _measure is None:
        measure.require_cuda()
    original = getattr(fn, "_torchdynamo_orig_callable", None) or getattr(fn, "_orig_mod", fn)
    found = _resolve(original, args, dims)
    if max_memory is None:
        max_memory = sys.maxsize if _measure else int(0.8 * torch.cuda.mem_get_info()[0])
    tally = Tally() if _tally is None else _tally
    with _bar(progress) as tick, _compiled_anew():
        for alike in ("", "others", "all"):
            tuner = _Tuner(found, max_ranges, max_memory, _measure, tick, tally)
            marks = _marks(found, args, alike)
            if _run(tuner, original, args, marks, _card):
                break
        else:
            names = " or ".join(str(d) for d in found)
            raise ValueError(
                f"expected dims that are dynamic in the graph, and {names} is specialised there "
                '(TORCH_LOGS="+dynamic" says where)'
            )
        if tuner.program is not None:
            tuner.launches(args, marks)
    for d in found:
        if d.label not in tuner.reached:
            raise ValueError(
                "expected dims that are dynamic in the graph, and "
                f"no site depends on {d}, nor a launch"
            )
    log.info("tune: %s", tally)
    settings = ", ".join(f"{d.argument}.{d.dim}={d.lo}..{d.hi}" for d in found)
    name = getattr(original, "__qualname__", type(original).__qualname__)
    return Plan(
        tuner.card,
        compat.minor_version("torch"),
        compat.minor_version("triton"),
        tuple(tuner.entries.values()),
        f"inductor_ext.tune({name}; {settings})",
    )


@contextlib.contextmanager
def _compiled_anew() -> Iterator[None]:
    """What is compiled within is for tuning only: nobody is to run it afterwards."""
    try:
        yield
    finally:
        torch._dynamo.reset()


@contextlib.contextmanager
def _bar(on: bool) -> Iterator[Callable[[str], None]]:
    """A progress bar, or nothing; ``tick(text)`` counts one measurement, and says what it found."""
    from tqdm import tqdm

    with tqdm(disable=not on, unit=" measurements", desc="tune") as bar:

        def tick(text: str) -> None:
            bar.set_postfix_str(text, refresh=False)
            bar.update()

        yield tick


# --- which dimension is meant ---------------------------------------------------------------------


def _resolve(fn: Any, args: Sequence[Any], dims: Mapping[str, tuple[int, int]]) -> list[_Dim]:
    names = _argument_names(fn, args)
    tensors = {n: i for i, n in enumerate(names) if isinstance(args[i], torch.Tensor)}
    if not dims:
        raise ValueError('expected dims like {"tokens": (1, 8192)}, got none')
    if not tensors:
        raise ValueError("expected a tensor among the arguments, got none")
    free = [label for label in dims if "." not in label]
    if len(free) > 1:
        raise ValueError(
            f"expected at most one dimension without its argument, got {', '.join(free)}; "
            f'write "{next(iter(tensors))}.0"'
        )
    found: list[_Dim] = []
    for label, bounds in dims.items():
        if not (isinstance(bounds, (tuple, list)) and len(bounds) == 2) or not all(
            type(b) is int for b in bounds
        ):
            raise ValueError(f"expected {label!r} as a pair of whole numbers, got {bounds!r}")
        lo, hi = bounds
        if lo < 1 or lo > hi:
            raise ValueError(f"expected 1 <= lo <= hi for {label!r}, got lo={lo} and hi={hi}")
        argument, dim = _bind(label, args, tensors)
        position = tensors[argument]
        size = args[position].shape[dim]
        d = _Dim(label, argument, position, dim, lo, hi)
        if not max(lo, 2) <= size <= max(hi, 2):
            raise ValueError(
                f"expected {d} to be traced at a size within {max(lo, 2)}..{hi}, got {size}"
            )
        if any((d.position, d.dim) == (o.position, o.dim) for o in found):
            raise ValueError(f"expected each dimension once, got {d} twice")
        found.append(d)
    return found


def _argument_names(fn: Any, args: Sequence[Any]) -> list[str]:
    call = fn.forward if isinstance(fn, torch.nn.Module) else fn
    names: list[str] = []
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):  # a builtin
        return [f"args[{i}]" for i in range(len(args))]
    for p in parameters.values():
        if p.kind is p.VAR_POSITIONAL:
            names += [f"{p.name}[{i}]" for i in range(len(args) - len(names))]
        elif p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            names.append(p.name)
    return names[: len(args)]


def _bind(label: str, args: Sequence[Any], tensors: Mapping[str, int]) -> tuple[str, int]:
    if "." in label:
        argument, _, dim = label.rpartition(".")
        if argument not in tensors:
            raise ValueError(
                f"expected {label!r} to name a tensor argument out of {', '.join(tensors)}"
            )
        rank = args[tensors[argument]].dim()
        if not dim.isdigit() or int(dim) >= rank:
            raise ValueError(f"expected a dimension below {rank} in {label!r}, got {dim!r}")
        return argument, int(dim)
    marked = [
        (name, dim) for name, i in tensors.items() for dim in compat_dynamo.marked_dynamic(args[i])
    ]
    if len(marked) == 1:
        return marked[0]
    if marked:
        choices = ", ".join(f'"{name}.{dim}"' for name, dim in marked)
        raise ValueError(f"expected {label!r} to be one marked dimension, got {choices}: name one")
    argument = next(iter(tensors))
    log.warning("tune: %r is taken as dimension 0 of %r, the first tensor", label, argument)
    return argument, 0


def _marks(dims: Sequence[_Dim], args: Sequence[Any], alike: str) -> Marks:
    """What to mark dynamic. With ``alike`` also the dimensions that are as large, of the "others"
    among the arguments or of "all": tensors that share a dimension are all dynamic in it, or none
    can be."""
    marks: Marks = {}
    for d in dims:
        bounds = (d.lo, max(d.hi, d.lo + 1))  # torch takes bounds that are one size for a number
        marks.setdefault(d.position, {})[d.dim] = bounds
        for i, arg in enumerate(args):
            if (alike == "all" or (alike and i != d.position)) and isinstance(arg, torch.Tensor):
                for dim, size in enumerate(arg.shape):
                    if size == args[d.position].shape[d.dim]:
                        marks.setdefault(i, {}).setdefault(dim, bounds)
    return marks


def _run(tuner: _Tuner, fn: Any, args: Sequence[Any], marks: Marks, card: str | None) -> bool:
    """Compile and measure; False where a dimension turned out to be specialised."""
    # Dynamo logs at length what is answered here by marking more, or by an error.
    guards, mute = logging.getLogger("torch._guards"), lambda record: False
    with choosing.recording(tuner.record), report.muted(), contextlib.ExitStack() as stack:
        guards.addFilter(mute)
        stack.callback(guards.removeFilter, mute)
        try:
            tuner.program = _compile(fn, args, marks, card)
        except Exception as error:
            if tuner.error is None and compat_dynamo.is_constraint_violation(error):
                return False
            if tuner.error is None:
                raise
    if isinstance(tuner.error, _Specialised):
        return False
    if tuner.error is not None:
        raise tuner.error
    return True


def _compile(fn: Any, args: Sequence[Any], marks: Marks, card: str | None) -> Any:
    """The compiled program, if it launches what can be tuned; else None."""
    # Other tensors than the caller's, because marks stay on a tensor object.
    if card is not None:
        from .testing import compile_for

        compile_for(card, fn, *resized(args, {}), dynamic=marks)
        return None
    own = owned(args)
    for position, bounds in marks.items():
        for dim, (lo, hi) in bounds.items():
            torch._dynamo.mark_dynamic(own[position], dim, min=lo, max=hi)
    torch._dynamo.reset()
    program = torch.compile(fn)
    with compat.without_caches():
        launches = tuning_launches.recorded(lambda: called(program, own))
    return program if launches else None


# --- measuring a site -----------------------------------------------------------------------------


class _Specialised(Exception):
    """A dimension marked dynamic is a number in the graph."""


class _Tuner:
    """Measures the sites of one compile as they are lowered."""

    def __init__(
        self,
        dims: Sequence[_Dim],
        max_ranges: int,
        max_memory: int,
        timer: Timer | None,
        tick: Callable[[str], None],
        tally: Tally,
    ) -> None:
        self._dims, self._max_ranges, self._max_memory = dims, max_ranges, max_memory
        self._timer, self._tick, self.tally = timer, tick, tally
        self.entries: dict[Any, Entry] = {}
        self.reached: set[str] = set()
        self.program: Any = None
        self.error: Exception | None = None
        self.card = compat.card_name() or ""

    def record(
        self,
        lowering: str,
        site: str,
        problem: choosing.Problem,
        names: Sequence[str],
        how: choosing.Measure,
    ) -> None:
        """Measure the site being lowered. An error is kept, and nothing more is measured."""
        if self.error is not None:
            return
        self.card = compat.card_name() or ""
        node = compat.current_node()
        try:
            at = MeasuredSite(lowering, site, problem, names, how, self._timer, node)
            try:
                self._site(at)
            finally:
                self.tally.programs += at.compiled
        except Exception as error:  # raised here, it would be taken for a failing lowering
            self.error = error

    def _site(self, at: MeasuredSite) -> None:
        problem = at.problem
        symbols = self._symbols(problem)
        self.reached.update(d.label for d, _ in symbols)
        name = (problem.key, tuple(sorted(problem.dims)))
        known = {symbol for _, symbol in symbols}
        if name in self.entries or any(
            compat.symbols_of(size) - known for size in problem.dims.values()
        ):
            return  # measured already, or it depends on sizes that were not asked for
        lead, others = symbols[:1], symbols[1:]
        boxes: list[Box] = []
        memory = 0
        for bands in itertools.product(*(_bands(d.lo, d.hi) for d, _ in others)):
            fixed = {
                symbol: math.isqrt(lo * hi)
                for (_, symbol), (lo, hi) in zip(others, bands, strict=True)
            }
            ends = dict(zip((s for _, s in others), bands, strict=True))
            found, used = self._along(at, lead[0] if lead else None, fixed)
            memory = max(memory, used)
            boxes += at.boxes(lead[0][1] if lead else None, found, ends, fixed)
        if boxes:
            self.entries[name] = Entry(problem.key, tuple(boxes), _now(), memory)

    def launches(self, args: Sequence[Any], marks: Marks) -> None:
        """Tune what the operations of the program launch, along one dimension after another."""
        program = self.program
        with compat.without_caches(), report.muted():
            for d in self._dims:
                others = {(o.position, o.dim) for o in self._dims if o is not d}
                follow = followers((d.position, d.dim), args, marks) - others
                along = self._launches(
                    lambda size, follow=follow: called(
                        program, owned(resized(args, {place: size for place in follow}))
                    ),
                    d.lo,
                    d.hi,
                )
                found = along.boxes(self._max_ranges)
                self.reached.update([d.label] if found else [])
                for key, boxes in found.items():
                    name = (key, tuple(n for n, _ in boxes[0].bounds))
                    self.entries.setdefault(name, Entry(key, boxes, _now(), along.memory))

    def _launches(self, run: Any, lo: int, hi: int) -> tuning_launches.Launches:
        return tuning_launches.Launches(run, lo, hi, self._timer, self._timed, self._max_memory)

    def _timed(
        self, site: str, size: int, names: Sequence[str], times: Mapping[str, float]
    ) -> None:
        self.tally.add(site, size, names)
        best = min(times, key=times.__getitem__, default="")
        found = f", fastest {best} {times[best]:.2f} us" if best else ""
        self._tick(f"{site} at {size}: {len(names)} timed{found}")

    def _symbols(self, problem: choosing.Problem) -> list[tuple[_Dim, Any]]:
        """The dimensions that the site's sizes depend on, with their symbols in this graph."""
        symbols = compat_dynamo.size_symbols()
        found = []
        for d in self._dims:
            symbol = symbols.get((d.argument, d.dim))
            if symbol is not None and compat.is_static(symbol):
                raise _Specialised(str(d))
            if symbol is not None and any(
                symbol in compat.symbols_of(size) for size in problem.dims.values()
            ):
                found.append((d, symbol))
        return found

    def _count(
        self, at: MeasuredSite, size: int, names: Sequence[str], times: Mapping[str, float]
    ) -> None:
        self._timed(at.site, size, names, times)

    def _along(
        self, at: MeasuredSite, lead: tuple[_Dim, Any] | None, fixed: Mapping[Any, int]
    ) -> tuple[list[ranges.MeasuredRange], int]:
        """Ranges along one symbol, and the bytes that the largest measured size took."""
        if lead is None:
            dim, symbol, lo, hi = None, None, 1, 1
        else:
            dim, symbol = lead
            lo, hi = dim.lo, dim.hi

        def values(size: int) -> dict[Any, int]:
            return {**fixed, **({symbol: size} if symbol is not None else {})}

        top = measured_ranges.plausible_top(at, values, lo, hi)
        if top is None:
            return [], 0
        need = at.memory(values(top))
        if need > self._max_memory:
            gib = 2**30
            which = f"{dim} = {top}" if dim is not None else "its sizes"
            raise MemoryError(
                f"measuring {at.site} at {which} needs {need / gib:.2f} GiB, and max_memory is "
                f"{self._max_memory / gib:.2f} GiB; lower the upper end, or raise max_memory"
            )
        found = measured_ranges.search(
            at,
            values,
            lo,
            top,
            max_ranges=self._max_ranges - (top < hi),
            count=functools.partial(self._count, at),
        )
        if top < hi:  # by the lowering's rule, without times
            found.append(ranges.MeasuredRange(top + 1, hi, choosing.STOCK))
        return found, need


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _bands(lo: int, hi: int) -> list[tuple[int, int]]:
    """lo..hi in at most four parts of like factors."""
    edges = {round(lo * (hi / lo) ** (i / _BANDS)) for i in range(1, _BANDS)}
    starts = sorted({lo, *(e for e in edges if lo < e <= hi)})
    return [(a, b - 1) for a, b in itertools.pairwise([*starts, hi + 1])]
