"""The piece of graph a choice is about: the operation being lowered and what fuses behind it.

In max-autotune modes every candidate is compiled with that whole region by the same lowering and
code generation as the graph around it, checked against fp64, and timed by graph replay with cold
L2. So the epilogue is part of the measurement and what wins is what is emitted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from . import compat, compat_ir, matching, measure

_COLD_BYTES = 512 << 20  # what the rotated copies of small inputs take: 2.5 of the largest L2


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Time of a candidate in us; None where it was not timed, and ``note`` says why."""

    us: float | None
    note: str = ""


class _Upcast(torch.fx.Interpreter):
    """Runs a region in fp64: casts between floating dtypes are skipped, products stay wide."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.prims.convert_element_type.default and args[1].is_floating_point:
            return args[0]
        if getattr(kwargs.get("dtype"), "is_floating_point", False):
            kwargs = {name: value for name, value in kwargs.items() if name != "dtype"}
        if getattr(target, "_overloadname", "") == "dtype":
            target, args = target.overloadpacket.default, args[:-1]
        return super().call_function(target, args, kwargs)


class Region:
    """A static fx graph of ``nodes`` operations, with the sizes the outer graph was traced at."""

    def __init__(
        self, gm: torch.fx.GraphModule, fakes: list[Any], names: list[str], device: torch.device
    ) -> None:
        self.gm, self.fakes, self.names, self.device = gm, fakes, names, device
        self.nodes = sum(n.op == "call_function" for n in gm.graph.nodes) - 1

    def compile(self) -> Callable[..., Any]:
        """The region compiled under the choices forced around this call."""
        return compat_ir.compile_region(self.gm, self.fakes)

    def measuring_bytes(self) -> int:
        """Bytes that ``compare`` needs at most, intermediates of the operations included.

        Timing rotates copies of the inputs: two, or as many as exceed the L2 cache; the reference
        holds everything once more in fp64.
        """
        values = [n.meta["val"] for n in self.gm.graph.nodes if "val" in n.meta]
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        inputs = sum(f.numel() * f.element_size() for f in self.fakes)
        computed = sum(t.numel() * t.element_size() for t in tensors)
        wide = sum(t.numel() * 8 for t in tensors)
        return inputs + max(inputs, _COLD_BYTES) + 2 * computed + wide

    def compare(
        self,
        builders: Mapping[str, Callable[[], Callable[..., Any]]],
        input_gen_fns: Mapping[str, Callable[[Any], Any]],
        repeats: int = 20,
    ) -> dict[str, Outcome]:
        """Build, check and time every candidate; a wrong or failing one is never timed."""
        inputs = [
            input_gen_fns[name](fake)
            if name in input_gen_fns
            else compat_ir.random_like(fake, self.device)
            for name, fake in zip(self.names, self.fakes, strict=True)
        ]
        with torch.no_grad(), compat_ir.no_fake_mode():
            eager = _list(torch.fx.Interpreter(self.gm).run(*inputs))
            reference = self._reference(inputs)
        outcomes: dict[str, Outcome] = {}
        calls: dict[str, Callable[..., Any]] = {}
        for name, build in builders.items():
            try:
                call = build()
                with compat_ir.no_fake_mode():
                    got = _list(call(*inputs))
            except Exception as error:
                outcomes[name] = Outcome(None, f"failed: {measure.one_line(error)}")
                continue
            wrong = self._wrong(got, reference, eager)
            if wrong and name != "stock":
                outcomes[name] = Outcome(None, f"wrong: {wrong}")
            else:
                calls[name] = call
        with compat_ir.no_fake_mode():
            timings = measure.compare(calls, inputs, repeats=repeats) if calls else {}
        for name, timing in timings.items():
            outcomes[name] = (
                Outcome(None, timing) if isinstance(timing, str) else Outcome(timing.us)
            )
        return {name: outcomes[name] for name in builders}

    def _reference(self, inputs: list[Any]) -> list[Any] | None:
        """The region in fp64; None where an operation has no fp64 (a user's own kernel)."""
        wide = [x.double() if x.is_floating_point() else x for x in inputs]
        try:
            return _list(_Upcast(self.gm).run(*wide))
        except Exception:
            return None

    def _wrong(self, got: list[Any], reference: list[Any] | None, eager: list[Any]) -> str:
        """Why the outputs are not those of the default implementation; empty when they are."""
        tf32 = compat.float32_precision() == "tf32"
        for i, (g, e) in enumerate(zip(got, eager, strict=True)):
            if reference is not None:
                verdict = measure.check(g, reference[i].double(), e, tf32=tf32)
                if not verdict.ok:
                    return verdict.reason
            elif g.shape != e.shape or g.dtype != e.dtype:
                want = f"{e.dtype} {tuple(e.shape)}"
                return f"{g.dtype} {tuple(g.shape)} where the default gives {want}."
            else:
                # No wider reference exists: both may be off by rounding at the largest magnitude.
                eps = torch.finfo(e.dtype).eps if e.is_floating_point() else 0.0
                off = (g.double() - e.double()).abs().nan_to_num(torch.inf).max().item()
                if not off <= 8 * eps * max(e.double().abs().max().item(), 1e-30):
                    return f"largest difference {off:.3g} from the default implementation."
        return ""


def _list(out: Any) -> list[Any]:
    return list(out) if isinstance(out, (list, tuple)) else [out]


def _whole(node: Any) -> matching.Region | None:
    """The region with its reductions, where it can be copied and judged by its values: integers (an
    argmax) may differ between two right results."""
    found = matching.fusible_region(node)
    if found is None or any(not out.meta["val"].is_floating_point() for out in found.outputs):
        return None
    plain = all(isinstance(n.target, torch._ops.OpOverload) for n in found.nodes)
    return found if plain else None


def extract(node: Any, *, reductions: bool = False) -> Region:
    """The region behind ``node`` as a static graph; inputs become placeholders in order of use.

    Sizes are those traced, or assumed around the call (``compat.assume``): every tensor follows.
    With ``reductions`` everything that may fuse belongs to it, else pointwise operations and views.
    """
    whole = _whole(node) if reductions else None
    members = list(whole.nodes) if whole else matching.pointwise_region(node)
    inside = set(members)
    graph = torch.fx.Graph()
    copies: dict[Any, Any] = {}
    fakes: list[Any] = []
    names: list[str] = []
    by_argument = _argument_names(node)

    def outside(source: Any) -> Any:
        value = source.meta["val"]
        if isinstance(value, torch.SymInt):
            return compat.hint(value.node.expr)
        if not isinstance(value, torch.Tensor):
            return value
        copies[source] = graph.placeholder(f"in{len(fakes)}")
        fakes.append(compat_ir.static_fake(value))
        names.append(by_argument.get(source, ""))
        return copies[source]

    placeholders: dict[Any, Any] = {}
    for member in members:
        for source in member.all_input_nodes:
            if source not in inside and source not in placeholders:
                placeholders[source] = outside(source)

    def argument(source: Any) -> Any:
        return copies.get(source, placeholders.get(source))

    for member in members:
        args, kwargs = torch.fx.node.map_arg((member.args, member.kwargs), argument)
        args, kwargs = compat_ir.static_args(args), compat_ir.static_args(kwargs)
        copies[member] = graph.call_function(member.target, args, kwargs)
    results = [m for m in members if any(u not in inside for u in m.users)]
    results = list(whole.outputs) if whole else results
    graph.output(tuple(copies[r] for r in results))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    compat_ir.propagate_fakes(gm, fakes)
    return Region(gm, fakes, names, fakes[0].device)


class Symbolic:
    """The region behind a node with its sizes left symbolic, as a branch over ranges emits it: one
    program runs at every size. Its tensors are those of the static region, in the same order."""

    def __init__(self, whole: matching.Region, symbols: Mapping[Any, Any]) -> None:
        self._gm = whole.copy()
        first = next(iter(self._gm.graph.nodes))
        with self._gm.graph.inserting_before(first):
            for symbol, value in symbols.items():  # a tensor's sizes need not name each of them
                self._gm.graph.placeholder(str(symbol)).meta["val"] = value
        self._gm.recompile()
        inputs = [*symbols.values(), *(operand.meta["val"] for operand in whole.operands)]
        self._fakes = inputs
        self._sizes = [compat.expr(v) if isinstance(v, torch.SymInt) else None for v in inputs]

    def generate(self, assumed: Mapping[Any, compat.Assumed]) -> Callable[[], Callable[..., Any]]:
        """Code under the choices forced around this call; see ``compat_ir.generate_region``.

        Raises ``compat.SizeDecides`` where it would hold for some of the sizes only.
        """
        with compat.no_new_guards():
            return compat_ir.generate_region(self._gm, self._fakes, assumed)

    def bind(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """The program as a function of the region's tensors, at the sizes assumed here."""
        sizes = [None if s is None else compat.hint(s) for s in self._sizes]

        def call(*tensors: Any) -> Any:
            rest = iter(tensors)
            return program(*(next(rest) if size is None else size for size in sizes))

        return call


def symbolic(node: Any) -> Symbolic | None:
    """The region behind ``node`` with symbolic sizes; None where it has none, or must be static."""
    whole = _whole(node)
    if whole is None:
        return None
    values = [operand.meta["val"] for operand in whole.operands]
    needed = {
        symbol
        for value in values
        for size in ([*value.shape, *value.stride()] if hasattr(value, "shape") else [value])
        for symbol in compat.symbols_of(compat.expr(size))
    }
    inputs = [n.meta.get("val") for n in node.graph.nodes if n.op == "placeholder"]
    known = {compat.expr(v): v for v in inputs if isinstance(v, torch.SymInt)}
    if not needed or not needed <= set(known):
        return None
    return Symbolic(whole, {s: known[s] for s in sorted(needed, key=str)})


def _argument_names(node: Any) -> dict[Any, str]:
    """fx node -> name of the argument of ``node``'s schema that it is."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {}
    named = {
        **dict(zip((a.name for a in schema.arguments), node.args, strict=False)),
        **node.kwargs,
    }
    return {value: name for name, value in named.items() if isinstance(value, torch.fx.Node)}
