"""The half of ``compat.py`` that branches: one IR node whose wrapper code is an ``if`` on sizes.

Inductor's own node for ``torch.cond`` would split the CUDA graph and switch CUDA graphs off, since
its predicate may be on the card. Here the predicate is a size, known to the host before the call,
so the branch is taken once at capture. The branches' code is written into the ``if`` itself: no
function is called, no input is checked a second time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import sympy
import torch

from . import compat
from .compat import graph


class CallAtLowering:
    """What an fx node calls with Inductor IR when its graph is lowered.

    ``metadata`` is called with fake tensors instead, by whoever propagates them. Written out as
    ``name``: generated code quotes it.
    """

    _inductor_lowering_function = True

    def __init__(self, name: str, target: Callable[..., Any], metadata: Callable[..., Any]) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = "inductor_ext"
        self._target = target
        self._inductor_lowering_output_metadata_fn = metadata

    def __call__(self, *args: Any) -> Any:
        if any(isinstance(a, torch.Tensor) for a in args):
            return self._inductor_lowering_output_metadata_fn(*args)
        return self._target(*args)

    def __repr__(self) -> str:
        return self.__name__


def can_branch() -> str:
    """Why no branch can be generated in this graph; empty where it can."""
    from torch._inductor import config

    if getattr(graph(), "fx_wrapper", False):
        return "the wrapper is an fx graph"
    if lacks_kernels():
        return "the C++ wrapper would have the kernels of one branch only"
    if config.memory_planning:  # one pool from the first allocation to the last, in any branch
        return "memory planning does not follow branches"
    return ""


def lacks_kernels() -> bool:
    """Whether a C++ wrapper would have the kernels of one branch only, that of the traced sizes.

    With ``autotune_at_compile_time`` each kernel is called once beforehand, whatever branch it is
    in, and kernels that are compiled at their first launch (torch 2.12 on, not ahead of time) are
    all there as source. Otherwise a program is run on the example's sizes: what it did not launch
    is missing.
    """
    from torch._inductor import config
    from torch._inductor.codegen.cpp_wrapper_gpu import DeferredTritonCallWrapper

    if not compat.ahead_of_time() or config.triton.autotune_at_compile_time:
        return False
    return compat.in_aot_mode() or not hasattr(DeferredTritonCallWrapper, "generate_lazy")


class Bound(NamedTuple):
    """lo <= expr <= hi; None where that side always holds."""

    expr: Any
    lo: int | None
    hi: int | None


class Branch(NamedTuple):
    """One way to compute a region: when it is taken, and its lowered graph."""

    when: Sequence[Bound]
    subgraph: Any  # torch._inductor.ir.Subgraph


def lower_branch(
    gm: torch.fx.GraphModule,
    name: str,
    operands: Sequence[Any],
    fakes: Sequence[Any],
    assumed: Mapping[Any, compat.Assumed],
) -> Any:
    """Lower ``gm`` as a subgraph whose outputs are new tensors with the strides of ``gm``'s.

    ``operands`` are the outer graph's IR (tensors and sizes) behind the placeholders, ``fakes``
    their fake values, ``assumed`` what Inductor's own hints are to answer inside.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    inner = graph().make_subgraph(gm=gm, example_inputs=list(fakes), subgraph_name=name)
    # Which inputs of the outer backward may be overwritten says nothing about ours.
    inner.bw_donated_idxs = None
    inner.inductor_ext_operands = {}
    # A product of sizes (ps0 = 64*s0) has one name in the whole program: calls of kernels are
    # written when the graph around is at hand.
    for table in ("precomputed_replacements", "inv_precomputed_replacements"):
        setattr(inner.sizevars, table, getattr(graph().sizevars, table))
    assume_in(inner.sizevars, assumed)
    placeholders = [n.target for n in gm.graph.nodes if n.op == "placeholder"]
    for target, operand in zip(placeholders, operands, strict=True):
        if isinstance(operand, ir.TensorBox):
            inner.inductor_ext_operands[inner.qualify_name(target)] = operand
            if _may_be_unaligned(operand):
                inner.unaligned_buffers.add(inner.qualify_name(target))
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    with V.set_graph_handler(inner), compat.assume(assumed):
        inner.run(*fakes)
        taken = set(inner.graph_inputs)
        results = []
        for result, node in zip(inner.graph_outputs, output.args[0], strict=True):
            strides = node.meta["val"].stride()
            box = ir.TensorBox(result)
            box = ir.ExternKernel.require_exact_strides(box, strides, allow_padding=False)
            if box.get_name() in taken:
                box = ir.ExternKernel.copy_input(box)
                box = ir.ExternKernel.require_exact_strides(box, strides, allow_padding=False)
            taken.add(box.get_name())
            results.append(box)
        inner.graph_outputs = results
        inner.finalize()
    if inner.constants:
        raise NotImplementedError("a branch made a constant tensor")
    reason = getattr(inner, "disable_cudagraphs_reason", None)
    if reason:
        graph().disable_cudagraphs_reason = reason
    subgraph = ir.Subgraph(name=name, graph_module=gm)
    subgraph.graph = inner
    return subgraph


def _may_be_unaligned(x: Any) -> bool:
    return any(name in graph().unaligned_buffers for name in x.get_read_names())


def assume_in(sizevars: Any, assumed: Mapping[Any, compat.Assumed]) -> None:
    """Inductor's hints for optimisation, at lowering and at code generation, in one subgraph.

    Guards ask other functions, except that torch before 2.12 decides by ``size_hint`` whether
    32-bit offsets are enough and then guards that: beyond them the answer is what was traced. It
    also pairs the dimensions of a view by it, where a product must agree with its factors: there
    only sizes that are one symbol are assumed.
    """
    every = {key: sympy.Integer(a.value) for key, a in assumed.items()}
    symbols = {key: value for key, value in every.items() if key.is_Symbol}

    def answering(ask: Callable[..., Any], values: Mapping[Any, Any]) -> Callable[..., Any]:
        @functools.wraps(ask)
        def answer(expr: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(expr, sympy.Expr) and not expr.is_number:
                expr = sizevars.remove_precomputed_replacements(expr)
                here = compat.assuming(expr, values)
                if here != expr:
                    traced = ask(expr, *args, **kwargs)
                    return traced if traced >= 2**31 else ask(here, *args, **kwargs)
            return ask(expr, *args, **kwargs)

        return answer

    for name, values in (("optimization_hint", every), ("size_hint", symbols)):
        if hasattr(sizevars, name):
            setattr(sizevars, name, answering(getattr(sizevars, name), values))
    guard_leq = sizevars.check_leq

    def check_leq(left: Any, right: Any) -> None:
        """Guard left <= right, unless it holds in the whole range of the branch: the program must
        not lose sizes to the width of a branch's offsets that it never takes there."""
        with compat.assume(assumed):
            top = compat.upper_bound(sizevars.remove_precomputed_replacements(sympy.sympify(left)))
        if top is None or not compat.is_static(right) or top > int(right):
            guard_leq(left, right)

    sizevars.check_leq = check_leq


def realize_operand(x: Any, fake: Any) -> Any:
    """A tensor in memory with the strides it was traced with, as a branch will see it."""
    from torch._inductor import ir

    if not isinstance(x, ir.TensorBox):
        return x
    x.realize()
    return ir.ExternKernel.require_exact_strides(x, fake.stride(), allow_padding=False)


def emit(branches: Sequence[Branch], operands: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """IR of the outputs of an ``if`` over ``branches``; the last is taken where no other is.

    ``outputs`` are fake tensors that say device, dtype, sizes and strides.
    """
    from torch._inductor import ir

    node = _node_type()(branches, operands, outputs[0].device)
    node.outputs = [
        ir.MultiOutput(
            ir.FixedLayout(
                device=fake.device,
                dtype=fake.dtype,
                size=[compat.expr(s) for s in fake.shape],
                stride=[compat.expr(s) for s in fake.stride()],
            ),
            node,
            [(list, i)],
            skip_size_stride_alignment_checks=True,  # the branches were lowered to these
        )
        for i, fake in enumerate(outputs)
    ]
    return [ir.TensorBox.create(out) for out in node.outputs]


@functools.cache
def _node_type() -> Any:
    from torch._inductor import ir

    class SizeDispatch(ir.ExternKernel):
        """A host-side ``if`` over subgraphs; no kernel of its own."""

        def __init__(
            self, branches: Sequence[Branch], operands: Sequence[Any], device: torch.device
        ) -> None:
            realize = ir.ExternKernel.realize_input
            self.branches = list(branches)
            self.operands = [realize(x) if isinstance(x, ir.TensorBox) else x for x in operands]
            self.outputs: list[Any] = []
            symbols = {
                s
                for x in operands
                if not isinstance(x, ir.TensorBox)
                for s in sympy.sympify(x).free_symbols
            }
            symbols |= {s for b in branches for c in b.when for s in c.expr.free_symbols}
            symbols |= {
                s
                for b in branches
                for value in b.subgraph.graph.graph_inputs.values()
                if isinstance(value, ir.TensorBox)
                for size in (*value.get_size(), *value.get_stride())
                for s in sympy.sympify(size).free_symbols
            }
            super().__init__(
                name=None,
                layout=ir.MultiOutputLayout(device=device),
                inputs=[
                    ir.ExternKernel.unwrap_storage_for_input(x)
                    for x in self.operands
                    if isinstance(x, ir.IRNode)
                ],
                constant_args=sorted(symbols, key=str),
            )
            self.name = graph().register_buffer(self)
            graph().register_operation(self)

        def get_subgraphs(self) -> list[Any]:
            return [b.subgraph for b in self.branches]

        def codegen(self, wrapper: Any) -> None:
            if graph().cpp_wrapper:
                _write_cpp(wrapper, self)
            else:
                _write_python(wrapper, self)

    return SizeDispatch


def _condition(wrapper: Any, when: Sequence[Bound], conjunction: str) -> str:
    terms = []
    for bound in when:
        size = wrapper.codegen_sizevar(bound.expr)
        if bound.lo is not None and bound.lo == bound.hi:
            terms.append(f"{size} == {bound.lo}")
            continue
        terms += [f"{size} >= {bound.lo}"] if bound.lo is not None else []
        terms += [f"{size} <= {bound.hi}"] if bound.hi is not None else []
    return conjunction.join(terms)


@contextlib.contextmanager
def _inside(wrapper: Any, subgraph: Any) -> Iterator[None]:
    """Between entering and leaving the block of one branch."""
    from torch._inductor import config
    from torch._inductor.codegen.wrapper import EnterSubgraphLine, ExitSubgraphLine

    # The device was selected around the whole ``if``.
    names = ("codegen_device_guard_enter", "codegen_device_guard_exit")
    wrapper.writeline(EnterSubgraphLine(wrapper, subgraph.graph))
    # A product of sizes that is computed in one branch is not there in the others, nor behind them.
    none_computed = type(wrapper.computed_sizes)
    wrapper.computed_sizes = none_computed()
    for name in names:
        setattr(wrapper, name, lambda *args, **kwargs: None)
    try:
        with config.patch(graph_partition=False):
            yield
    finally:
        for name in names:
            delattr(wrapper, name)
    # Allocations are planned for the whole program, with the outer graph at hand.
    graph().removed_buffers |= subgraph.graph.removed_buffers
    wrapper.writeline(ExitSubgraphLine(wrapper))
    if not graph().cpp_wrapper:
        wrapper.computed_sizes = none_computed()


def _write_python(wrapper: Any, node: Any) -> None:
    name = node.get_name()
    wrapper.writeline(f"{name} = [None] * {len(node.outputs)}")
    for i, branch in enumerate(node.branches):
        if i == len(node.branches) - 1:
            wrapper.writeline("else:")
        else:
            condition = _condition(wrapper, branch.when, " and ")
            wrapper.writeline(f"{'elif' if i else 'if'} {condition}:")
        with _inside(wrapper, branch.subgraph):
            _inline_python(wrapper, node, branch.subgraph.graph, name)


def _inline_python(wrapper: Any, node: Any, inner: Any, name: str) -> None:
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    outer = graph()
    wrapper.push_codegened_graph(inner)
    try:
        for (target, value), operand in zip(inner.graph_inputs.items(), node.operands, strict=True):
            if isinstance(value, ir.TensorBox):  # sizes keep their names
                wrapper.writeline(f"{target} = {operand.codegen_reference()}")
        with V.set_graph_handler(inner):
            inner.codegen_subgraph(parent_graph=outer)
            for i, result in enumerate(inner.graph_outputs):
                wrapper.writeline(f"{name}[{i}] = {result.codegen_reference()}")
            results = [r.get_name() for r in inner.graph_outputs]
        # Names that stay alive would keep memory that the graph around has freed.
        wrapper.writeline(f"del {', '.join(dict.fromkeys(results))}")
    finally:
        wrapper.pop_codegened_graph()


def _write_cpp(wrapper: Any, node: Any) -> None:
    """Outputs are declared before the ``if``; what a branch declares ends with its block."""
    from torch._inductor import ir

    results = []
    for out in node.outputs:
        wrapper.writeline(f"RAIIAtenTensorHandle {out.get_name()};")
        results.append(out.get_name())
    operands = [
        x.codegen_reference() if isinstance(x, ir.IRNode) else wrapper.codegen_sizevar(x)
        for x in node.operands
    ]
    for i, branch in enumerate(node.branches):
        if i == len(node.branches) - 1:
            wrapper.writeline("} else {")
        else:
            condition = _condition(wrapper, branch.when, " && ")
            wrapper.writeline(f"{'} else ' if i else ''}if ({condition}) {{")
        with _inside(wrapper, branch.subgraph):
            wrapper.codegen_subgraph(branch.subgraph, operands, results)
    wrapper.writeline("}")
