"""``mhc_collapse``: a layer's input by sigmoid gates, whatever the other coefficients are.

The gates' projection, norm and sum of streams become one operation, which returns the other columns
of the projection too. What a program makes of those (no Sinkhorn, another loop, a softmax over
permutations, a product of smaller matrices) is left as it is, pointwise code of a few numbers a
token. The model's head is the same without other columns.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from inductor_ext.lowerings import mhc_operands, mhc_sites
from inductor_ext.lowerings.mhc_gates import Logit
from inductor_ext.lowerings.mhc_terms import Entries
from inductor_ext.lowerings.sites import NoSite, Program, Replacement, describe

from inductor_ext.ops._mhc_checks import MOST_COLUMNS
from inductor_ext.shadow import value_of

LOWERING = "mhc_pre"
NAME = "mhc_collapse"


def head(site: Any, u: Any, logits: list[Logit], pre_eps: float) -> Replacement:
    """The replacement of a head. Raises NoSite."""
    return _replacement(site, u, logits, [], {}, pre_eps, "mhc_head", "the head of a model, ")


def gates_alone(site: Any, u: Any, logits: list[Logit], pre_eps: float, why: str) -> Replacement:
    """The replacement of the gates where, for the reason ``why``, the rest stays. Raises NoSite."""
    columns = _columns(site, logits[0])
    if not columns:
        raise NoSite(why)
    rows = [e.row for e in logits]
    others = list(dict.fromkeys(
        e for found in columns.values() for e in found if e.row not in rows
    ))  # fmt: skip
    if len(rows) + len(others) > MOST_COLUMNS:
        raise NoSite(f"{len(rows) + len(others)} columns are more than {MOST_COLUMNS}")
    place = {row: i for i, row in enumerate([*rows, *(e.row for e in others)])}
    wanted = {node: [place[e.row] for e in found] for node, found in columns.items()}
    said = f"the gates alone, as {why}; "
    found = _replacement(site, u, logits, others, wanted, pre_eps, NAME, said)
    if not _products(site, rows) <= found.inside | found.outputs.keys():
        raise NoSite("the projection of the gates is used in another way too")
    return found


def _products(site: Any, rows: Any) -> set[Any]:
    """The nodes of the program that hold columns as they come out of the projection."""
    found = set()
    for node in site.nodes:
        entries = site.entries(node)
        terms = [] if entries is None else [site.terms[t] for t in entries.array.flat]
        if any(t[0] == "projected" and t[1:4] in rows for t in terms):
            found.add(node)
    return found


def _columns(site: Any, like: Logit) -> dict[Any, list[Logit]]:
    """The first nodes of the program that hold nothing but columns z, each with its own."""
    holds: dict[Any, list[Logit]] = {}
    for node in site.nodes:
        found = site.entries(node)
        if found is None or found.wide is not None:
            continue
        columns = [site.gates.column(t) for t in found.array.flat]
        if all(c is not None and _normed_alike(c, like) for c in columns):
            holds[node] = columns
    return {node: found for node, found in holds.items() if not _made_of(node, holds)}


def _normed_alike(a: Logit, b: Logit) -> bool:
    return (a.rms_eps, a.norm_weight) == (b.rms_eps, b.norm_weight)


def _made_of(node: Any, holds: Any) -> bool:
    return any(
        source in holds
        or (not isinstance(value_of(source), torch.Tensor) and _made_of(source, holds))
        for source in node.all_input_nodes
    )


def _replacement(
    site: Any, u: Any, logits: list[Logit], others: list[Logit], wanted: dict[Any, list[int]],
    pre_eps: float, chosen: str, said: str,
) -> Replacement:  # fmt: skip
    operands = mhc_operands.given(site, (logits,))
    rows, scales, bases, norm_weight, rms_eps = operands
    rows = [*rows, *mhc_operands.rows_of(site, others)]
    operands = rows, *operands[1:]
    x = mhc_operands.program_node(site, site.x)
    width = site.n * site.hidden

    def emit(program: Program) -> Any:
        w = mhc_operands.weight(program, rows, norm_weight)
        scale, base = program.vector(scales), program.vector(bases)
        op = mhc_sites.operation(NAME)
        whole = program.call(op, x, w, scale, base, rms_eps, pre_eps)
        own = program.call(operator.getitem, whole, 0)
        if not wanted:
            return own, None
        mixes, sqrsum = (program.call(operator.getitem, whole, i) for i in (1, 2))
        mean = program.call(operator.truediv, sqrsum, width)
        r = program.call(torch.rsqrt, program.call(operator.add, mean, rms_eps))
        return own, program.call(operator.mul, mixes, program.call("unsqueeze", r, -1))

    def columns(node: Any, indices: list[int]) -> Callable[[Program, Any], Any]:
        def make(program: Program, parts: Any) -> Any:
            z = parts[1]
            if indices != list(range(len(rows))):
                runs = [program.call(operator.getitem, z, (..., slice(*r))) for r in _runs(indices)]
                z = runs[0] if len(runs) == 1 else program.call(torch.cat, runs, -1)
            return program.shaped(z, node)

        return make

    made: dict[Any, Any] = {node: columns(node, indices) for node, indices in wanted.items()}
    made[u] = lambda program, parts: program.shaped(parts[0], u)
    reason = f"{said}eps {rms_eps:g} and {pre_eps:g}"
    return Replacement(
        LOWERING, chosen, describe(chosen, site.x), reason, mhc_operands.inputs(x, operands), made,
        _inside(site, u, set(made)), emit,
    )  # fmt: skip


def _inside(site: Any, u: Any, outputs: set[Any]) -> set[Any]:
    """As ``mhc_operands.inside``, but the gates, which the columns that are returned make again."""
    behind = mhc_operands.inside(site, outputs)
    kept = mhc_operands.inside(site, outputs - {u})

    def is_wide(node: Any) -> bool:
        found = site.reader.found.get(site.shadow.of[node])
        return isinstance(found, Entries) and found.wide is not None

    return kept | {node for node in behind if is_wide(node)} if len(outputs) > 1 else behind


def _runs(indices: list[int]) -> list[tuple[int, int]]:
    runs: list[list[int]] = []
    for i in indices:
        if runs and runs[-1][1] == i:
            runs[-1][1] += 1
        else:
            runs.append([i, i + 1])
    return [(a, b) for a, b in runs]
