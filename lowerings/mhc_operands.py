"""What an operation in place of a pre is given, and what of the program it stands for."""

from __future__ import annotations

import operator
from typing import Any

from inductor_ext.lowerings import sites
from inductor_ext.lowerings.mhc_gates import Logit
from inductor_ext.lowerings.mhc_terms import Entries
from inductor_ext.lowerings.sites import NoSite, Program

from inductor_ext.shadow import value_of


def shared(site: Any, logits: list[Logit]) -> tuple[float, Any]:
    """(eps of the norm, its weight) that all columns have."""
    if len({(e.rms_eps, e.norm_weight) for e in logits}) != 1:
        raise NoSite("the columns have different norms")
    if len({e.row for e in logits}) != len(logits):
        raise NoSite("two gates have the same column")
    weight = logits[0].norm_weight
    return logits[0].rms_eps, None if weight is None else site.reader.leaves[weight]


def program_node(site: Any, leaf: Any) -> Any:
    node = sites.program_node(site.shadow, leaf)
    if leaf.meta["val"].device != site.x.meta["val"].device:
        raise NoSite(f"{node.name} is on another device")
    return node


def rows_of(site: Any, logits: list[Logit]) -> list[Any]:
    """Rows of weights as ``Program.rows`` takes them."""
    leaves = site.reader.leaves
    return [(program_node(site, leaves[e.row[0]]), *e.row[1:]) for e in logits]


def given(site: Any, groups: tuple[list[Logit], ...]) -> Any:
    """(rows, scales, bases, norm weight, eps) as nodes of the program."""
    every = [e for group in groups for e in group]
    rms_eps, weight = shared(site, every)
    leaf = lambda i: program_node(site, site.reader.leaves[i])  # noqa: E731
    rows = rows_of(site, every)
    scales = []
    for group in groups:
        if len({e.scale for e in group}) != 1:
            raise NoSite("a group of gates has several scales")
        scales.append((leaf(group[0].scale[0]), group[0].scale[1]))
    bases = [(leaf(e.base[0]), e.base[1]) for e in every]
    return rows, scales, bases, None if weight is None else program_node(site, weight), rms_eps


def weight(program: Program, rows: Any, norm_weight: Any) -> Any:
    w = program.rows(rows)
    if norm_weight is None:
        return w
    weight, width = program.call("reshape", norm_weight, -1), value_of(w).shape[1]
    if value_of(weight).shape[0] != width:  # the first of several layers' in one tensor
        weight = program.call(operator.getitem, weight, slice(0, width))
    return program.call(operator.mul, w, weight)


def inputs(x: Any, operands: Any) -> list[Any]:
    rows, scales, bases, norm_weight, _ = operands
    found = [x, *(r[0] for r in rows), *(s[0] for s in scales), *(b[0] for b in bases)]
    return list(dict.fromkeys(found if norm_weight is None else [*found, norm_weight]))


def inside(site: Any, outputs: set[Any]) -> set[Any]:
    """The nodes of the program that depend on the projection, up to the results."""
    reached: set[Any] = set()
    for node in site.nodes:
        if node in outputs:
            continue
        sources = set(node.all_input_nodes)
        own = site.reader.found.get(site.shadow.of[node])
        made = isinstance(own, Entries) and any(
            site.terms[f][0] == "projected" for t in own.array.flat for f in site.terms.factors(t)
        )
        if made or not sources.isdisjoint(reached):
            reached.add(node)
    # What only lies behind the results may stay.
    inside: set[Any] = set()
    stack = [s for out in outputs for s in out.all_input_nodes]
    while stack:
        node = stack.pop()
        if node in reached and node not in inside and node not in outputs:
            inside.add(node)
            stack.extend(node.all_input_nodes)
    return inside
