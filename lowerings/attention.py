"""``attention``: attention as models spell it, with scores in memory, put into one operation.

    out = softmax(f(q k^T), -1) v

Found by structure in the graph in front of AOTAutograd, so that the operation's own gradient is
what is differentiated. f is whatever is pointwise: it becomes a line of text that the kernels
inline, with masks of positions as comparisons, so that no mask is read and dead tiles are skipped.
Keys and values that are repeated for groups of heads are given as they were.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from inductor_ext.lowerings import attention_columns as columns
from inductor_ext.lowerings import attention_replacement as replacing
from inductor_ext.lowerings import attention_sites as found
from inductor_ext.lowerings.attention_calls import calls
from inductor_ext.lowerings.attention_places import NoPlace
from inductor_ext.lowerings.attention_softmax import Reader
from inductor_ext.lowerings.sites import NoSite, Replacement, apply, describe, leave
from inductor_ext.templates.attention_program import Input

from inductor_ext import compat_fx, registry, shadow
from inductor_ext.ops import _attention_score as attention_score
from inductor_ext.ops import _attention_translate as attention_translate

NAME = replacing.NAME
_SOFTMAXES = ("softmax", "exp", "logsumexp", "log_softmax", "_softmax")


def may_hold_attention(graph: Any) -> bool:
    """Whether there is any softmax; cheap, for the graphs that have none."""
    for node in graph.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if name.partition(".")[0] in _SOFTMAXES or "scaled_dot_product" in name:
            return True
    return False


def _text(function: Any, sample: list[torch.Tensor], empty: str) -> tuple[str, bool]:
    """The text of scores, of which kernels can be made, and whether these know what is kept.
    Raises NoSite."""

    def made() -> tuple[str, bool]:
        text = attention_score.write(function, sample, function.numbers)
        inputs = tuple(Input(x.dtype, _axes(x)) for x in sample)
        program = attention_translate.program(text, inputs, len(function.numbers), empty)
        return text, bool(program.keep)

    try:
        return compat_fx.apart(made)  # in a thread of its own, where nothing is traced
    except (attention_score.NotPointwise, attention_translate.NoProgram) as reason:
        raise NoSite(str(reason)) from None


def _axes(x: torch.Tensor) -> str:
    return "".join(name for name, size in zip("bhqk", x.shape, strict=True) if size != 1)


def _replacement(site: Any) -> Replacement:
    try:
        found.read(site)
        uses = _uses(site)
        try:
            return replacing.replacement(replacing.plan(site), _text, uses)
        except NoSite as first:
            # Perhaps a mask as the program has it will do.
            try:
                found.read(site, whole=True)
                return replacing.replacement(replacing.plan(site), _text, uses)
            except NoSite:
                raise first from None
    except NoPlace as reason:
        raise NoSite(str(reason)) from None


def _uses(site: Any) -> Any:
    """What else than attention's result is made of its weights; None where nothing is."""
    if replacing.is_trained(site) or site.weights.dropout:
        return None
    sums = columns.found(site)

    def uses(plan: Any, sizes: Any, inside: set[Any]) -> list[tuple[Any, Any, list[Any]]]:
        made = [
            (s.result, columns.sums(plan, sizes, s.result, s.place, s.reduced, s.first, s.share),
             s.inside)
            for s in sums if columns.fits(plan, s)
        ]  # fmt: skip
        known = inside.union(*(between for _, _, between in made), (value for value, _, _ in made))
        for node, place in columns.rows_used(site, plan, known):
            made.append((node, columns.sums(plan, sizes, node, place, (), 0, 1.0), []))
        return made

    one_row = all(not index.axes for index in (site.rows,))
    return uses if sums or one_row else None


def _apart(found: list[Replacement]) -> list[Replacement]:
    """Those whose dropout nobody else has: operations would each draw their own."""
    drawn = Counter(node for replacement in found for node in replacement.drawn)
    alone = []
    for replacement in found:
        if any(drawn[node] > 1 for node in replacement.drawn):
            leave(NAME, replacement.site, "its dropped weights are used by another product")
        else:
            alone.append(replacement)
    return alone


def rewrite(graph: Any) -> None:
    """The pass over a graph in front of AOTAutograd."""
    if not may_hold_attention(graph):
        return
    try:
        seen = shadow.trace(graph)
    except shadow.NotFollowed:
        return
    done: list[Replacement] = []
    reader = Reader(seen.graph)
    for node, site in found.sites(seen, reader):
        try:
            if isinstance(site, NoSite):
                raise site
            done.append(_replacement(site))
        except NoSite as reason:
            leave(NAME, describe(NAME, node), str(reason))
        except Exception as error:
            registry.failed(NAME, describe(NAME, node), error)
    for call, plan in calls(seen):
        try:
            if isinstance(plan, NoSite):
                raise plan
            if plan is not None:
                done.append(replacing.replacement(plan, _text))
        except (NoPlace, NoSite) as reason:
            leave(NAME, describe(NAME, seen.of.get(call, call), shadow.value_of(call)), str(reason))
    apply(seen, graph, _apart(done))


registry.register(registry.Lowering(NAME, passes={"pre_grad": rewrite}))
