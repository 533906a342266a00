"""Softmaxes in one sweep: every softmax of the same logits shares one online (max, sum) pair.

Inductor computes both in one sweep, where it recognises a softmax in its last passes. It does not
behind a scale or a temperature, whose rewriting (for exactness with large scales, with flags for
rows that are not finite) hides it; nor in logsumexp; and the same sums over two copies of the
logits are two sweeps. So the pair is put into the joint graph, before that rewriting: what is
computed from the logits stays as the program has it, with its own results for infinities and NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from inductor_ext.lowerings.softmax_cores import (
    SCALES,
    Core,
    cores,
    is_long,
    share,
    uncast,
    why_not,
)

from inductor_ext import choosing, editing, registry, report

aten = torch.ops.aten
NAME = "softmax"


def _why(group: list[Core]) -> str | None:
    """What hides the group from Inductor, or makes it sweep twice; None if nothing does."""
    first = group[0]
    if len({core.total for core in group}) > 1:
        return f"{len(group)} softmaxes of these logits share one sweep"
    if uncast(first.x).target in SCALES:
        return "one sweep: a scale would have hidden the softmax"
    if first.guarded:
        return "one sweep of logsumexp"
    if first.peak.target is not aten.amax.default:
        return "one sweep of a softmax written out with max"
    return None


def rewrite(graph: Any) -> None:
    """The pass over a joint graph."""
    if not graph.find_nodes(op="call_function", target=aten.exp.default):
        return
    numbers = editing.Numbers(graph)
    groups: dict[Any, list[Core]] = {}
    for core in cores(graph, numbers):
        if is_long(core.x, core.dim):
            groups.setdefault((core.x, core.dim), []).append(core)
    for group in groups.values():
        first = {numbers.of(core.total): core for core in reversed(group)}
        site, x, dim = group[0].site(), group[0].x, group[0].dim
        reason = why_not(x, dim)
        if reason is not None:
            choosing.leave(NAME, site, reason)
            continue
        why = _why(list(first.values()))
        if why is None:
            choosing.leave(NAME, site, "stock reads the logits once for its maximum and sum")
            continue
        share(graph, group)
        report.record(report.Decision(NAME, True, "online", why, site, source="heuristic"))
    editing.check(graph)


registry.register(
    registry.Lowering(
        NAME, passes={"early_joint": rewrite}, off="the default, until it has been timed on a card"
    )
)
