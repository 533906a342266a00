"""``mhc_post``: the residual streams behind a layer, as one operation.

    X'_j = post_j Y + sum_i comb[i, j] X_i

Found by structure in the graph in front of AOTAutograd, whether the streams are mixed by products
and a sum, by a product of matrices or by einsum, and whether the matrix is [in, out] or [out, in].
The coefficients may be any tensors of the tokens.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from inductor_ext.lowerings import mhc_sites
from inductor_ext.lowerings.mhc_entries import (
    Reader,
    aten,
    is_move,
    lead_of_view,
    shape_of,
)
from inductor_ext.lowerings.mhc_pre import name_of
from inductor_ext.lowerings.mhc_sites import STREAMS, read_from, residuals
from inductor_ext.lowerings.mhc_terms import NARROW, Entries, Terms
from inductor_ext.lowerings.sites import (
    NoSite,
    Program,
    Replacement,
    apply,
    describe,
    leave,
    program_node,
)

from inductor_ext import compat, registry, shadow

NAME = "mhc_post"
# Streams of fewer bytes are mixed by stock's pointwise kernel in less time: 1.2 us for a token of
# 4 x 4096, 2.5 by a kernel that waits for its coefficients.
LEAST_BYTES = 2**20
_MIXES = {"sum", "bmm", "baddbmm", "matmul", "einsum"}


def may_mix_streams(graph: Any) -> bool:
    """Whether a graph has what every post has; cheap, for the graphs that have not."""
    names = {name_of(n) for n in graph.nodes if n.op in ("call_function", "call_method")}
    return not names.isdisjoint(_MIXES) and any(map(_holds_matrices, graph.nodes))


def _holds_matrices(node: Any) -> bool:
    """Whether a value is [..., n, n] or [..., n, n, *]."""
    tensor = shadow.value_of(node)
    if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2:
        return False
    last = [s if isinstance(s, int) else 0 for s in tensor.shape[-3:]]
    return any(a == b and a in STREAMS for a, b in itertools.pairwise(last))


def mixtures(seen: shadow.Shadow) -> list[list[Any]]:
    """Of each place where a matrix may mix streams, the nodes that may be the streams."""
    found: dict[Any, list[Any]] = {}
    for node in seen.graph.nodes:
        if node.target is aten.bmm.default:
            operands = node.args[:2]
        elif node.target is aten.sum.dim_IntList and node.args[0].target is aten.mul.Tensor:
            if not _holds_matrices(node.args[0]):
                continue
            operands = node.args[0].args
        else:
            continue
        for operand in operands:
            if isinstance(operand, torch.fx.Node):
                candidates = residuals(seen, operand)
                if candidates:
                    found[candidates[0]] = candidates
    return list(found.values())


class _Site:
    """What depends on the streams ``x`` and on other tensors of the same tokens."""

    def __init__(self, seen: shadow.Shadow, x: Any, positions: Any) -> None:
        self.shadow, self.x = seen, x
        self.terms = Terms()
        self.reader = Reader(self.terms, x, self._outside)
        self.n, self.hidden = self.reader.streams, self.reader.hidden
        self.lead = self.reader.lead_sizes
        self.result: Any = None
        self.reason: NoSite | None = None
        self.parts: Any = None
        read_from(self.reader, seen, positions, self._goes_on)

    def _goes_on(self, node: Any) -> bool:
        found = self.reader.found[node]
        if not isinstance(found, Entries):
            return True
        if self.result is not None:
            return False
        if found.wide is None:
            del self.reader.found[node]  # a coefficient is a tensor of its own here
            return False
        fits = node in self.shadow.first and found.array.size == self.n
        if fits and node.meta["val"].dtype == self.x.meta["val"].dtype:
            self._try(node, list(found.array.flat))
        return self.result is None

    # --- other tensors ----------------------------------------------------------------------------

    def _outside(self, reader: Reader, node: Any, lead: int) -> Entries | None:
        if self.shadow.is_mutated(node):
            return None
        if node in reader.found:
            entries = reader.of(node)
            return entries if entries is not None and entries.lead == lead else None
        sizes = shape_of(node)
        tail = sizes[lead:]
        if not all(compat.is_static(s) for s in tail):
            return None
        tail = [int(s) for s in tail]
        wide = next((a for a, s in enumerate(tail) if s and s % self.hidden == 0), None)
        in_program = node in self.shadow.first
        whole = sizes[:lead] == self.lead
        if wide is None:
            turned = node.target in (aten.transpose.int, aten.permute.default)
            if in_program and whole and tail in ([self.n], [self.n, self.n]) and not turned:
                return reader.leaf(node, lead, "coefficient")
        elif math.prod(tail) == self.hidden:
            same = node.meta["val"].dtype == self.x.meta["val"].dtype
            if in_program and whole and tail == [self.hidden] and same:
                return reader.leaf(node, lead, "output", 0)
        if is_move(node) and isinstance(node.args[0], torch.fx.Node):
            return self._moved(reader, node, lead, math.prod(tail))
        if wide is None:
            fits = math.prod(tail) in (self.n, self.n**2)
            return reader.leaf(node, lead, "coefficient") if in_program and fits else None
        if math.prod(tail) == self.hidden:
            return reader.leaf(node, lead, "output", wide) if in_program else None
        if node.target in (aten.mul.Tensor, aten.bmm.default):
            reader.leads[node] = lead
            reader.read(node)
            return reader.of(node)
        return None

    def _moved(self, reader: Reader, node: Any, lead: int, kept: int) -> Entries | None:
        source = node.args[0]
        before = shape_of(source)
        own: int | None = lead
        if node.target in _VIEWS:
            own = lead_of_view(reader, before, shape_of(node)[:lead], kept)
        elif len(before) < lead or before[:lead] != shape_of(node)[:lead]:
            return None
        if own is None or self._outside(reader, source, own) is None:
            return None
        reader.read(node)
        return reader.of(node)

    # --- the form ---------------------------------------------------------------------------------

    def _try(self, node: Any, terms: list[int]) -> None:
        try:
            self.parts = self._parts(terms)
        except NoSite as reason:
            self.reason = self.reason or reason
        else:
            if self.parts is not None:
                self.result = node

    def _parts(self, terms: list[int]) -> Any:
        """(output, post, comb, whether comb is [out, in]) of n streams; None for another form."""
        dtype = self.x.meta["val"].dtype
        through = str(dtype) if dtype in NARROW else None
        outputs, posts, matrix = set(), [], []
        for term in terms:
            row: dict[int, Any] = {}
            own = []
            for part in self.terms.summands(term, through):
                pair = [self.terms[f] for f in self.terms.factors(part)]
                kinds = sorted(t[0] for t in pair)
                if kinds == ["coefficient", "stream"]:
                    pair.sort()
                    if pair[1][1] in row:
                        return None
                    row[pair[1][1]] = pair[0][1:]
                elif kinds == ["coefficient", "output"]:
                    pair.sort()
                    own.append(pair[0][1:])
                    outputs.add(pair[1][1])
                else:
                    return self._other_form(kinds)
            if len(row) != self.n or len(own) != 1:
                return None
            posts.append(own[0])
            matrix.append([row[i] for i in range(self.n)])
        if len(outputs) != 1:
            raise NoSite("the streams get different outputs of layers")
        post = self._whole([posts], [[j for j in range(self.n)]])
        order = range(self.n)
        comb = self._whole(matrix, [[i * self.n + j for i in order] for j in order])
        turned = comb is None
        if turned:
            comb = self._whole(matrix, [[j * self.n + i for i in order] for j in order])
        if post is None or comb is None:
            raise NoSite("the coefficients are entries of several tensors or in another order")
        return outputs.pop(), post, comb, turned

    def _other_form(self, kinds: list[str]) -> None:
        if "parameter" in kinds and "stream" in kinds:
            raise NoSite("the streams are mixed by a matrix without tokens")
        if "round" in kinds:
            raise NoSite("a coefficient is rounded where it is used")

    def _whole(self, found: Any, wanted: Any) -> int | None:
        """The leaf whose entries are these."""
        leaves = {leaf for row in found for leaf, _ in row}
        order = [[index for _, index in row] for row in found]
        return leaves.pop() if len(leaves) == 1 and order == wanted else None

    # --- the replacement --------------------------------------------------------------------------

    def replacement(self) -> Replacement:
        output, post, comb, turned = self.parts
        leaf = lambda i: program_node(self.shadow, self.reader.leaves[i])  # noqa: E731
        x, y = program_node(self.shadow, self.x), leaf(output)
        post, comb = leaf(post), leaf(comb)
        value = shadow.value_of
        if value(y).dtype != value(x).dtype:
            raise NoSite(f"the layer's output is {value(y).dtype} beside {value(x).dtype}")
        lead = list(value(x).shape[:-2])
        size = math.prod(value(x).shape) * value(x).element_size()
        if isinstance(size, int) and size < LEAST_BYTES:
            raise NoSite("so few streams are mixed by stock as fast")
        result = self.shadow.first[self.result]

        def coefficient(program: Program, node: Any, sizes: list[int]) -> Any:
            if node.target == "contiguous":
                node = node.args[0]  # any strides will do
            node = program.sized(node, [*lead, *sizes])
            if value(node).dtype in (torch.float32, torch.bfloat16):
                return node
            return program.call("float", node)

        def emit(program: Program) -> Any:
            n = self.n
            c = coefficient(program, comb, [n, n])
            if turned:
                c = program.call("transpose", c, -1, -2)
            p = coefficient(program, post, [n])
            outcome = program.sized(y, [*lead, self.hidden])
            call = program.call(mhc_sites.operation(NAME), x, outcome, p, c)
            call.meta[mhc_sites.FOUND] = True
            return call

        reason = "one read of the streams, one write"
        if turned:
            reason += "; the matrix is [out, in]"
        made = {result: lambda program, operation: program.shaped(operation, result)}
        return Replacement(
            NAME, NAME, describe(NAME, self.x), reason, list(dict.fromkeys((x, y, post, comb))),
            made, self._inside(result), emit,
        )  # fmt: skip

    def _inside(self, result: Any) -> set[Any]:
        plain = ("stream", "output", "coefficient")
        inside: set[Any] = set()
        stack = list(result.all_input_nodes)
        while stack:
            node = stack.pop()
            own = self.reader.found.get(self.shadow.of.get(node))
            if node in inside or not isinstance(own, Entries):
                continue
            if any(self.terms[t][0] not in plain for t in own.array.flat):
                inside.add(node)
                stack.extend(node.all_input_nodes)
        return inside


_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def rewrite(graph: Any) -> None:
    """The pass over a graph in front of AOTAutograd."""
    if not may_mix_streams(graph):
        return
    try:
        seen = shadow.trace(graph)
    except shadow.NotFollowed:
        return
    positions = {node: i for i, node in enumerate(seen.graph.nodes)}
    found = []
    for candidates in mixtures(seen):
        why: NoSite | None = None
        for x in candidates:
            try:
                site = _Site(seen, x, positions)
                if site.result is not None:
                    found.append(site.replacement())
                    break
                why = why or site.reason
            except NoSite as reason:
                why = why or reason
        else:
            if why is not None:
                leave(NAME, describe(NAME, candidates[0]), str(why))
    apply(seen, graph, found)


registry.register(registry.Lowering(NAME, passes={"pre_grad": rewrite}))
