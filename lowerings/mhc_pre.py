"""``mhc_pre``: a layer's input and coefficients from its residual streams, as one operation.

The projection, the norm, the gates and the unrolled Sinkhorn loop are found by structure in the
graph in front of AOTAutograd (``shadow``), so that the operation's own gradient is what is traced.
Iterations, both eps, the multiplier, the order of the columns and the matrix's orientation are read
off the graph. Where only the pre gates are of this scheme, and for the model's head, which has no
others, ``mhc_collapse`` takes their place.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from inductor_ext.lowerings import mhc_collapse, mhc_operands, mhc_sites
from inductor_ext.lowerings.mhc_arrays import Array
from inductor_ext.lowerings.mhc_entries import Reader, aten, shape_of
from inductor_ext.lowerings.mhc_gates import Gates, Logit, Matrix, turned
from inductor_ext.lowerings.mhc_sites import STREAMS, read_from, residuals
from inductor_ext.lowerings.mhc_terms import NARROW, Entries, Terms
from inductor_ext.lowerings.sites import (
    NoSite,
    Program,
    Replacement,
    apply,
    describe,
    follow_writes,
    leave,
)

from inductor_ext import compat, registry, shadow
from inductor_ext.ops._mhc_checks import MOST_COLUMNS

NAME = "mhc_pre"
_PRODUCTS = {"linear", "matmul", "mm", "addmm", "einsum", "rmatmul"}
_ROOTS = ("rsqrt", "sqrt", "pow", "rms_norm", "_fused_rms_norm")


def name_of(node: Any) -> str:
    """The plain name of what a node calls: "sigmoid" of a method, a function or an overload."""
    if isinstance(node.target, str):
        return node.target
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[-1]
    return getattr(node.target, "__name__", "")


def may_hold_gates(graph: Any) -> bool:
    """Whether a graph has what every pre has; cheap, for the graphs that have not."""
    calls = [n for n in graph.nodes if n.op in ("call_function", "call_method")]
    names = {name_of(n) for n in calls}
    return (
        not names.isdisjoint(("sigmoid", "expit"))
        and not names.isdisjoint(_ROOTS)
        and any(name_of(n) in _PRODUCTS and _is_narrow(n) for n in calls)
    )


def _is_narrow(node: Any) -> bool:
    """Whether a product has as few columns as the gates of a site, or a group of them, and more
    inputs."""
    tensor = shadow.value_of(node)
    first = shadow.value_of(node.args[0]) if isinstance(node.args[0], torch.fx.Node) else None
    if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0:
        return False
    columns = tensor.shape[-1]
    if not isinstance(columns, int) or not min(STREAMS) <= columns <= MOST_COLUMNS:
        return False
    return not isinstance(first, torch.Tensor) or first.shape[-1] > columns


def projections(seen: shadow.Shadow) -> dict[Any, tuple[list[Any], int]]:
    """Residual streams -> (what else they may be, columns of their projections)."""
    found: dict[Any, tuple[list[Any], int]] = {}
    for node in seen.graph.find_nodes(op="call_function", target=aten.mm.default):
        width, columns = shape_of(node.args[1])
        if not compat.is_static(width) or not compat.is_static(columns):
            continue
        if int(columns) > MOST_COLUMNS:
            continue
        candidates = residuals(seen, node.args[0], int(width))
        if candidates:
            _, before = found.get(candidates[0], ([], 0))
            found[candidates[0]] = candidates, before + int(columns)
    return found


class _Site:
    """What depends on the streams ``x``."""

    def __init__(self, seen: shadow.Shadow, x: Any, positions: Any, stops: set[Any]) -> None:
        self.shadow, self.x = seen, x
        self.terms = Terms()
        self.reader = Reader(self.terms, x)
        self.n, self.hidden = self.reader.streams, self.reader.hidden
        self.gates = Gates(self.terms, self.n, self.hidden)
        read_from(self.reader, seen, positions, lambda node: node not in stops)
        ours = (n for n in self.reader.found if n in seen.first and n is not x)
        self.nodes = sorted((seen.first[n] for n in ours), key=seen.order.__getitem__)

    def entries(self, node: Any) -> Entries | None:
        """Those of a node of the program, with tokens."""
        found = self.reader.found.get(self.shadow.of[node])
        return found if isinstance(found, Entries) and found.lead else None

    def logits(self, numbers: list[int]) -> list[Logit]:
        return [self.gates.logit(t) for t in numbers]

    def collapsed(self) -> tuple[Any, list[int]] | None:
        """(U, its gates)."""
        dtype = self.x.meta["val"].dtype
        rounded = str(dtype) if dtype in NARROW else None
        for node in self.nodes:
            found = self.entries(node)
            if found is None or found.wide is None or found.array.size != 1:
                continue
            if self.shadow.of[node].meta["val"].dtype != dtype:
                continue
            gates = self.gates.collapse(found.array.flat[0], rounded)
            if gates is not None and all(self.terms.holds(g, "projected") for g in gates):
                return node, gates
        return None

    def small(self, size: int) -> list[tuple[Any, Array]]:
        """The nodes of ``size`` fp32 coefficients per token, later ones first."""
        found = []
        for node in reversed(self.nodes):
            entries = self.entries(node)
            if entries is not None and entries.wide is None and entries.array.size == size:
                found.append((node, entries.array))
        return found

    def post(self, pre: list[int]) -> tuple[Any, list[int]] | None:
        """(the node, its terms) of the other gates."""
        own = {self.gates.sigmoid(t)[2] for t in pre}
        best: tuple[Any, list[int]] | None = None
        for node, array in self.small(self.n):
            terms = list(array.flat)
            try:
                found = [self.gates.sigmoid(t) for t in terms]
            except NoSite:
                continue
            if own.isdisjoint(f[2] for f in found) and (
                best is None or best[1] == terms or self._contains(best[1], terms) is False
            ):
                best = node, terms
        return best

    def _contains(self, later: list[int], terms: list[int]) -> bool:
        """Whether ``later`` gates are made of these."""
        ours = {self.gates.sigmoid(t)[2] for t in terms}
        return not ours.isdisjoint(self.gates.sigmoid(t)[2] for t in later)

    def comb(self) -> tuple[Any, bool, Matrix, int, float, bool] | None:
        """(the node, whether it is [out, in], logits [in, out], iterations, eps, whether it begins
        with powers of e)."""
        last: NoSite | None = None
        best, own = None, set[int]()
        for node, array in self.small(self.n**2):
            kinds = {self.terms[t][0] for t in array.flat}
            if kinds != {"div"} and not (kinds & {"clamp", "exp", "softmax"}):
                continue
            if best is not None and set(array.flat) != own:
                break  # what lies before the last matrix is the loop's own
            square = array.reshape((self.n, self.n)).rows()
            for is_turned in (False, True):
                try:
                    found = self.gates.sinkhorn(turned(square) if is_turned else square)
                except NoSite as reason:
                    last = last or reason
                    continue
                best, own = (node, is_turned, *found), set(array.flat)
            if best is None and last is not None:
                break
        if best is None and last is not None:
            raise last
        return best


def _check_eps(*values: float) -> None:
    wrong = [f"{v:g}" for v in values if not 0.0 <= v < math.inf]
    if wrong:
        raise NoSite(f"an eps is {wrong[0]}, not 0 or positive")


def _match(site: _Site, columns: int) -> Replacement | None:
    """The replacement of a site; None where nothing looks like one. Raises NoSite."""
    whole = columns == site.n * (site.n + 2)
    collapsed = site.collapsed()
    if collapsed is None:
        sigmoids = any(
            site.terms[t][0] == "sigmoid"
            for found in site.reader.found.values()
            if isinstance(found, Entries)
            for t in found.array.flat
        )
        if whole and sigmoids:
            raise NoSite("no sum of gates times streams, rounded once, was found")
        return None
    u, pre = collapsed
    parsed = [site.gates.sigmoid(t) for t in pre]
    offsets = {(m, o) for m, o, _ in parsed}
    if len(offsets) != 1 or parsed[0][0] != 1.0:
        raise NoSite("the pre gates are not sigmoid + eps")
    pre_eps = parsed[0][1]
    logits = site.logits([a for _, _, a in parsed])
    _check_eps(pre_eps, logits[0].rms_eps)
    try:
        comb, post = site.comb(), site.post(pre)
        if comb is None or post is None:
            if columns == site.n:
                return mhc_collapse.head(site, u, logits, pre_eps)
            missing = "matrix of a Sinkhorn loop" if comb is None else "second group of gates"
            raise NoSite(f"no {missing} was found")
        return _whole(site, u, logits, pre_eps, post, comb)
    except NoSite as reason:
        return mhc_collapse.gates_alone(site, u, logits, pre_eps, str(reason))


def _whole(
    site: _Site, u: Any, logits: list[Logit], pre_eps: float, post: tuple[Any, list[int]], comb: Any
) -> Replacement:
    _check_eps(comb[4])
    posts = [site.gates.sigmoid(t) for t in post[1]]
    if len({m for m, _, _ in posts}) != 1 or any(o != 0.0 for _, o, _ in posts):
        raise NoSite("the post gates are not a multiple of a sigmoid")
    if not 0.0 < posts[0][0] < math.inf:
        raise NoSite(f"the multiplier of the post gates is {posts[0][0]:g}, not positive")
    groups = (
        logits,
        site.logits([a for _, _, a in posts]),
        site.logits([t for row in comb[2] for t in row]),
    )
    return _replace(site, (u, post[0], comb), groups, pre_eps, posts[0][0])


def _part(i: int) -> Any:
    return lambda program, parts: parts[i]


def _replace(
    site: _Site, outputs: Any, groups: tuple[list[Logit], ...], pre_eps: float, post_mult: float
) -> Replacement:
    u, post, (comb, is_turned, _, iters, eps, powers) = outputs
    operands = mhc_operands.given(site, groups)
    rows, scales, bases, norm_weight, rms_eps = operands
    x = mhc_operands.program_node(site, site.x)
    if compat.in_aot_mode() and not all(map(compat.is_static, site.reader.lead_sizes)):
        raise NoSite("a package would call Python for any number of tokens")

    def emit(program: Program) -> Any:
        w = mhc_operands.weight(program, rows, norm_weight)
        scale, base = program.vector(scales), program.vector(bases)
        options = iters, rms_eps, pre_eps, eps, post_mult, *([True] if powers else [])
        op = mhc_sites.operation(NAME)
        whole = program.call(op, x, w, scale, base, *options)
        whole.meta[mhc_sites.FOUND] = True
        parts = [program.call(operator.getitem, whole, i) for i in range(3)]
        if is_turned:
            parts[2] = program.call("transpose", parts[2], -1, -2)
        return [program.shaped(p, o) for p, o in zip(parts, (u, post, comb), strict=True)]

    made = {node: _part(i) for i, node in enumerate((u, post, comb))}
    plural = "" if iters == 1 else "s"
    reason = f"{iters} Sinkhorn iteration{plural}, eps {rms_eps:g}, {pre_eps:g} and {eps:g}"
    if powers:
        reason += ", of powers of e"
    if norm_weight is not None:
        reason += ", a weighted norm"
    return Replacement(
        NAME, NAME, describe(NAME, site.x), reason, mhc_operands.inputs(x, operands), made,
        mhc_operands.inside(site, set(made)), emit,
    )  # fmt: skip


def rewrite(graph: Any) -> None:
    """The pass over a graph in front of AOTAutograd."""
    if not may_hold_gates(graph):
        return
    try:
        seen = shadow.trace(graph)
    except shadow.NotFollowed:
        return
    sites = projections(seen)
    if not sites:
        return
    follow_writes(seen, graph)
    positions = {node: i for i, node in enumerate(seen.graph.nodes)}
    found: list[Replacement] = []
    for first, (candidates, columns) in sites.items():
        why: NoSite | None = None
        best: Replacement | None = None
        for x in candidates:
            try:
                site = _Site(seen, x, positions, set(sites))
                replacement = _match(site, columns)
            except NoSite as reason:
                why = why or reason
                continue
            if best is None or (replacement is not None and replacement.chosen == NAME):
                best = replacement
            if best is not None and best.chosen == NAME:
                break
        if best is not None:
            found.append(best)
        elif why is not None:
            leave(NAME, describe(NAME, first), str(why))
    apply(seen, graph, found)


registry.register(registry.Lowering(NAME, passes={"pre_grad": rewrite}))
