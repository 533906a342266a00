"""Ranges of a symbolic size -> one host-side branch around the whole region.

A lowering may name the symbolic sizes its choice depends on (``Lowering.sizes``). Where the choice
changes within the values these sizes can take, a pass after Inductor's own takes the operation and
everything that fuses with it out of the graph, and puts one call in its place. At lowering that
becomes an ``if`` on the sizes with the region compiled anew in each branch: by the same code as a
static graph, told that branch's sizes and choice.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from . import (
    choosing,
    compat,
    compat_dispatch,
    compat_ir,
    editing,
    known,
    matching,
    registry,
    report,
)
from .boxes import MAX_RANGES, Axis, Box, Known, Sensitivity, along, axes_of, boxes_of

__all__ = ["MAX_RANGES", "Axis", "Box", "Known", "Sensitivity", "along", "axes_of", "boxes_of"]


# --- the pass -------------------------------------------------------------------------------------


class Pass:
    """A graph pass in Inductor's list, behind those of the lowerings."""

    def apply(self, graph: Any) -> int:
        """Replace every region whose choice depends on its sizes; returns how many."""
        taken: set[Any] = set()
        count = 0
        for node in list(graph.nodes):
            if node in taken:
                continue
            for name, rule in registry.sensitive(node.target):
                if choosing.forced_choice(name) is not None:
                    continue
                try:
                    site = _site(name, node, rule(node), taken, count)
                    if site is not None:
                        with editing.all_or_nothing(graph):
                            new = site.put_into(graph)
                        taken.update(new)
                        count += 1
                        break
                except Exception as error:
                    registry.failed(name, f"ranges of {node.target}", error)
        return count


def _site(
    lowering: str, node: Any, sensitivity: Sensitivity | None, taken: set[Any], number: int
) -> Site | None:
    """The site to branch at; None where one choice holds for all sizes, or none is to be made."""
    if sensitivity is None or compat.has_unbacked(sensitivity.sizes):
        return None
    axes = axes_of(sensitivity.sizes)
    found = known.cover(axes, sensitivity, boxes_of)
    boxes = found.boxes
    if len({box.choice for box in boxes}) == 1:
        node.meta[choosing.RANGES] = tuple(_size_range(axes, box) for box in boxes)
        if any(box.known for box in boxes):
            source, times = _known_source(boxes), _times(axes, boxes, sensitivity.sizes)
            reason = _reason(axes, found)
            node.meta[choosing.DECIDED] = {
                lowering: choosing.Decided(boxes[0].choice, source, reason, times)
            }
        return None
    if compat_dispatch.lacks_kernels():  # one choice for all sizes, or stock
        return None
    region = matching.fusible_region(node, taken)
    if region is None:
        return None
    times = _times(axes, boxes, sensitivity.sizes)
    return Site(lowering, sensitivity.site, region, tuple(axes), found, times, number)


def _known_source(boxes: Sequence[Box]) -> str:
    """Where the choices come from, the rule where nothing is known."""
    sources = dict.fromkeys(k.source for box in boxes for _, k in box.known)
    return next(iter(sources), "heuristic")


def _times(
    axes: Sequence[Axis], boxes: Sequence[Box], sizes: Sequence[Any]
) -> tuple[report.CandidateTime, ...]:
    """The times behind every known range, at the measured point nearest to its middle."""
    found = []
    for box in boxes:
        for ends, part in box.known:
            with compat.assume(known.assumed(axes, ends)):
                point, us = part.nearest_times([compat.hint(size) for size in sizes])
            span = _size_range(axes, dataclasses.replace(box, ends=ends)).span()
            how = "for the plan " if part.source == "plan" else ""
            note = f"{span}: measured {how}at {point}"
            found += [report.CandidateTime(name, t, note) for name, t in us.items()]
    rest = {box.choice for box in boxes} - {t.name for t in found}
    names = dict.fromkeys(box.choice for box in boxes if box.choice in rest)
    if not found:
        names = dict.fromkeys([choosing.STOCK, *names])
    return (*found, *(report.CandidateTime(name, note="not timed") for name in names))


def _reason(axes: Sequence[Axis], found: known.Cover) -> str:
    """What decides over the axes' values, and where a rule does because nothing is known."""
    on = " and ".join(str(axis.expr) for axis in axes)
    places = dict.fromkeys(k.where for box in found.boxes for _, k in box.known)
    parts = [f"what is best depends on {on}", *places, found.dropped, found.note]
    if not places:
        parts = [found.rest, *parts]
    elif found.rest:
        parts.append(f"{found.rest}: by the heuristic")
    return "; ".join(part for part in parts if part)


def _size_range(axes: Sequence[Axis], box: Box) -> report.SizeRange:
    parts = [(str(axis.expr), *ends) for axis, ends in zip(axes, box.ends, strict=True)]
    bounded = [p for p, axis in zip(parts, axes, strict=True) if p[1:] != (axis.lo, axis.hi)]
    first, *others = bounded or parts[:1]
    return report.SizeRange(*first, box.choice, tuple(others))


@dataclasses.dataclass(frozen=True)
class Site:
    """A region and the boxes of sizes between which its choice changes."""

    lowering: str
    name: str
    region: matching.Region
    axes: tuple[Axis, ...]
    found: known.Cover
    times: tuple[report.CandidateTime, ...]
    number: int
    copies: tuple[Any, ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        # Before the graph is edited: the region's nodes are erased from it.
        copies = tuple(self.region.copy() for _ in (*self.boxes, None))
        object.__setattr__(self, "copies", copies)

    @property
    def boxes(self) -> tuple[Box, ...]:
        return self.found.boxes

    def put_into(self, graph: Any) -> list[Any]:
        """Replace the region by one call; returns the new nodes."""
        order = {node: i for i, node in enumerate(graph.nodes)}
        region = self.region
        last = max((*region.erased, *region.operands), key=order.__getitem__)
        early = sorted((n for n in region.later if order[n] < order[last]), key=order.__getitem__)
        if any(n.op == "output" or n.is_impure() for n in early):
            raise NotImplementedError("what follows the region can't be moved behind it")
        target = compat_dispatch.CallAtLowering("size_dispatch", self.lower, self.copies[-1])
        with graph.inserting_after(last):
            call = graph.call_function(target, region.operands)
        call.meta["val"] = tuple(out.meta["val"] for out in region.outputs)
        call.meta.update({k: v for k, v in region.site.meta.items() if k == "stack_trace"})
        new = [call]
        erased = set(region.erased)
        for i, out in enumerate(region.outputs):
            with graph.inserting_after(new[-1]):
                result = graph.call_function(operator.getitem, (call, i))
            result.meta = dict(out.meta)
            new.append(result)
            out.replace_all_uses_with(result, delete_user_cb=lambda user: user not in erased)
        for node in reversed(region.erased):
            graph.erase_node(node)
        end = new[-1]
        for node in early:
            end.append(node)
            end = node
        return new

    def lower(self, *operands: Any) -> list[Any]:
        """IR of the region's outputs, when the graph around is lowered."""
        node = compat.current_node()
        fakes = [arg.meta["val"] for arg in node.args]
        why_not = compat_dispatch.can_branch()
        if not why_not:
            try:
                found, inside, failed = self._branch(operands, fakes)
                self._report(failed)
                for decision in inside:
                    report.record(decision)
                return found
            except Exception as error:
                registry.failed(self.lowering, self.name, error)
        else:
            report.record(report.Decision(self.lowering, False, choosing.STOCK, why_not, self.name))
        with choosing.force_here(self.lowering, choosing.STOCK), report.held() as decisions:
            out = list(compat_ir.inline(self.copies[-1], operands, {}))
        for decision in self._of_others(decisions):
            report.record(decision)
        return out

    def _of_others(self, decisions: Sequence[report.Decision]) -> list[report.Decision]:
        """Without those about the site itself, which is forced and reported as a whole."""
        return [d for d in decisions if d.lowering != self.lowering]

    def _branch(
        self, operands: Sequence[Any], fakes: Sequence[Any]
    ) -> tuple[list[Any], list[report.Decision], dict[int, str]]:
        """IR of the outputs, what other lowerings decided in the branches, by range, and which
        branches are stock code because their candidate failed."""
        realized = [
            compat_dispatch.realize_operand(x, fake)
            for x, fake in zip(operands, fakes, strict=True)
        ]
        branches = []
        failed: dict[int, str] = {}
        inside: dict[Any, list[tuple[report.SizeRange, report.Decision]]] = {}
        for i, box in enumerate(self.boxes):
            with choosing.force_here(self.lowering, box.choice), report.held() as decisions:
                subgraph = compat_dispatch.lower_branch(
                    self.copies[i],
                    f"range{self.number}_{i}",
                    realized,
                    fakes,
                    self._assumed(box),
                )
            if why := self._failure(box, decisions):
                failed[i] = f"{_size_range(self.axes, box).span()}: {why}"
            branches.append(compat_dispatch.Branch(self._when(box), subgraph))
            seen: Counter[Any] = Counter()
            for decision in self._of_others(decisions):
                site = (decision.lowering, decision.sites)
                seen[site] += 1  # two sites of one branch may read alike
                span = _size_range(self.axes, box)
                inside.setdefault((*site, seen[site]), []).append((span, decision))
        outputs = [out.meta["val"] for out in self.region.outputs]
        results = compat_dispatch.emit(branches, realized, outputs)
        return results, [report.by_range(found) for found in inside.values()], failed

    def _failure(self, box: Box, decisions: Sequence[report.Decision]) -> str:
        """Why a branch is stock code and not its candidate; "" where it is what was asked for."""
        own = [d for d in decisions if d.lowering == self.lowering]
        asked = box.choice != choosing.STOCK and own and not any(d.fired for d in own)
        return own[0].reason if asked else ""

    def _assumed(self, box: Box) -> Mapping[Any, compat.Assumed]:
        return {
            axis.expr: compat.Assumed(value, *ends)
            for axis, value, ends in zip(self.axes, box.typical, box.ends, strict=True)
        }

    def _when(self, box: Box) -> list[compat_dispatch.Bound]:
        """What of a box is to be asked: in a row of ranges, only the upper end of each."""
        found = []
        for axis, (lo, hi) in zip(self.axes, box.ends, strict=True):
            below = None if lo == axis.lo or len(self.axes) == 1 else lo
            above = None if hi == axis.hi else hi
            if below is not None or above is not None:
                found.append(compat_dispatch.Bound(axis.expr, below, above))
        return found

    def _report(self, failed: Mapping[int, str]) -> None:
        boxes = [
            dataclasses.replace(box, choice=choosing.STOCK) if i in failed else box
            for i, box in enumerate(self.boxes)
        ]
        chosen = {box.choice for box in boxes}
        report.record(
            report.Decision(
                self.lowering,
                True,
                f"{len(boxes)} ranges, {len(chosen)} implementations",
                "; ".join([_reason(self.axes, self.found), *failed.values()]),
                self.name,
                _known_source(self.boxes),
                self.times,
                tuple(_size_range(self.axes, box) for box in boxes),
            )
        )
