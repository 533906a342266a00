"""The half of ``compat.py`` that builds: IR, templates, traced and inlined graphs, nested compiles.

With the other ``compat`` modules the only ones that touch private Inductor names.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import sympy
import torch

from . import compat, compat_dispatch
from .compat import graph, hint, lowering_of, on_real_card, shape_env

# --- building IR ----------------------------------------------------------------------------------


def realize(x: Any) -> Any:
    """A tensor as a buffer in memory whose layout no longer changes; views stay views."""
    from torch._inductor import ir

    node = ir.ExternKernel.realize_input(x)
    node.freeze_layout()
    return node


def has_layout(x: Any) -> bool:
    """Whether a tensor is in memory, or a view of one that is, with its strides decided."""
    from torch._inductor import ir

    return ir.is_storage_and_layout(x)


def _behind(x: Any) -> Any:
    """What a tensor is a view of: a buffer, or the computation that will become one."""
    from torch._inductor import ir

    while not isinstance(x, ir.Buffer) and hasattr(x, "data"):
        x = x.data
    return x


def is_aligned_graph_input(x: Any) -> bool:
    """Whether a tensor lies in an input or constant of the graph that begins at 16 bytes.

    In a branch that means the graph around it: an operand which that computes is no graph input.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    buffer = _behind(x)
    if not isinstance(buffer, (ir.InputBuffer, ir.ConstantBuffer)):
        return False
    if buffer.get_name() in graph().unaligned_buffers:
        return False
    operand = getattr(graph(), "inductor_ext_operands", {}).get(buffer.get_name())
    if operand is None:
        return True
    with V.set_graph_handler(graph().parent):
        whole = isinstance(getattr(operand.data, "data", None), ir.Buffer)  # no view: no offset
        return whole and is_aligned_graph_input(operand)


def is_bitcast(x: Any) -> bool:
    """Whether a tensor is a view in another dtype; a template would bind the buffer's own."""
    return _behind(x).get_dtype() != x.get_dtype()


def call(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Emit ``op`` through Inductor's lowering of it."""
    lowering: Any = lowering_of(op)
    return lowering(*args, **kwargs)


def call_stock(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Emit ``op`` through the lowering that was there before the plugin's."""
    lowering: Any = lowering_of(op)
    return getattr(lowering, "stock", lowering)(*args, **kwargs)


def call_custom(op: Any, *args: Any) -> Any:
    """Emit a call of a custom operation, which may mutate its arguments as its schema says."""
    return (lowering_of(op) or compat.fallback(op))(*args)


def is_donated(x: Any) -> bool:
    """Whether a tensor is all of an input of a backward graph that nobody sees after it."""
    from torch._inductor import ir

    return isinstance(getattr(getattr(x, "data", None), "data", None), ir.DonatedBuffer)


def has_dense_rows(x: Any) -> bool:
    """Whether a tensor in memory is dense, or [N, V] with unit stride along V and no overlap."""
    layout = x.get_layout()
    if layout.is_contiguous():
        return True
    sizes = [*layout.size, *layout.stride]
    if len(sizes) != 4 or not all(compat.is_static(s) for s in sizes):
        return False
    return bool(layout.stride[1] == 1 and layout.stride[0] >= layout.size[1])


def view(x: Any, size: Sequence[Any]) -> Any:
    """A reshaped view of IR."""
    return call(torch.ops.aten.view.default, x, list(size))


def to_dtype(x: Any, dtype: torch.dtype) -> Any:
    """A cast; nothing when the dtype is right already."""
    from torch._inductor import lowering

    return x if x.get_dtype() == dtype else lowering.to_dtype(x, dtype)


def sum_unrolled(partials: Any, dtype: torch.dtype) -> Any:
    """Sum over the first dimension as a pointwise node: a fixed pairwise tree of loads.

    Unlike a reduction it fuses into whatever follows, row reductions included.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import ops

    loader = partials.make_loader()
    splits, *size = partials.get_size()

    def inner(index: Any) -> Any:
        terms = [loader([sympy.Integer(s), *index]) for s in range(int(splits))]
        while len(terms) > 1:
            pairs = [ops.add(a, b) for a, b in zip(terms[::2], terms[1::2], strict=False)]
            terms = pairs + terms[2 * len(pairs) :]
        return ops.to_dtype(terms[0], dtype)

    out = ir.Pointwise.create(
        device=partials.get_device(), dtype=dtype, inner_fn=inner, ranges=list(size)
    )
    out.realize()
    return out


class Template:
    """A Triton template whose epilogue Inductor fuses, launched with PDL where asked.

    ``grid(*sizes, meta, cdiv)`` gets the output's sizes (ints or sympy). ``source`` is a template
    in Inductor's dialect: ``def_kernel``, ``size``, ``stride``, ``store_output``. Two constants are
    ours: ``PDL`` launches with programmatic dependent launch, ``FLAT`` names the variable that
    already holds the offset into a contiguous output, so that it is not put together again.

    ``alone``: nothing ever fuses into the kernel, so its text is known when it is emitted. It has
    the template's own name then, so that equal problems anywhere are one text, which is compiled
    once, and Inductor's workers are given it at once, not when the graph has been scheduled.
    """

    def __init__(
        self, name: str, grid: Callable[..., Any], source: str, *, alone: bool = False
    ) -> None:
        # Inductor hands a kernel to its workers when its code is written and asks for it again by
        # the text in the wrapper, which is stripped. Up to torch 2.14 a template that is not so
        # itself is another text, is compiled twice, and the second, begun late, is waited for.
        self.name, self._grid, self._alone = name, grid, alone
        self._source = "{% filter trim %}" + source + "{% endfilter %}\n\n"

    @functools.cached_property
    def _template(self) -> Any:
        from torch._inductor.select_algorithm import (
            SymbolicGridFn,
            TritonTemplate,
            TritonTemplateKernel,
        )

        alone, name_of_kernel = self._alone, self._kernel_name

        class Kernel(TritonTemplateKernel):
            triton_meta: Any

            def def_kernel(self, *argnames: str) -> str:
                key = super().def_kernel(*argnames)
                if alone and _texts_are_shared():
                    hook = self.render_hooks[key]
                    self.render_hooks[key] = lambda: _renamed(self, name_of_kernel, hook)
                return key

            def jit_lines(self) -> Any:
                if self.meta.get("PDL"):
                    self.triton_meta = {**(self.triton_meta or {}), "launch_pdl": True}
                return super().jit_lines()

            def store_output(self, *args: Any, **kwargs: Any) -> str:
                name = super().store_output(*args, **kwargs)
                flat = self.meta.get("FLAT")
                if flat is not None:
                    hook = self.render_hooks[name]
                    line = f"xindex = {flat.strip(chr(39))}"
                    self.render_hooks[name] = lambda: re.sub(r"xindex = [^\n]*", line, hook())
                return name

        class PdlTemplate(TritonTemplate):
            kernel_type = Kernel

        return PdlTemplate(self.name, SymbolicGridFn(self._grid), self._source)

    def emit(
        self,
        inputs: Sequence[Any],
        size: Sequence[Any],
        dtype: torch.dtype,
        *,
        num_warps: int,
        num_stages: int,
        **constants: Any,
    ) -> Any:
        """IR of the template's output: a contiguous tensor of ``size`` and ``dtype``."""
        from torch._inductor import ir

        layout = ir.FixedLayout(inputs[0].get_device(), dtype, list(size))
        caller = self._template.generate(
            input_nodes=tuple(inputs),
            layout=layout,
            num_stages=num_stages,
            num_warps=num_warps,
            **constants,
        )
        if self._alone and on_real_card() and _texts_are_shared():
            with open(caller.bmreq.module_path) as file:
                _begin_compile(self._kernel_name, file.read())
        return caller.output_node()

    @property
    def _kernel_name(self) -> str:
        return f"triton_tem_{self.name}"  # Inductor's word for kernels made of templates


def _texts_are_shared() -> bool:
    """Whether kernels are Python modules of which nothing but the kernel is asked."""
    from torch._inductor import config

    extended = config.benchmark_kernel or config.profile_bandwidth  # a benchmark is written below
    return not (extended or graph().cpp_wrapper or compat.ahead_of_time())


# Whatever a graph calls the kernel, the module has it.
_ANY_NAME = """
def __getattr__(name):
    if name.startswith("triton_"):
        return {name}
    raise AttributeError(name)
"""


def _renamed(kernel: Any, name: str, hook: Callable[[], str]) -> str:
    """The text up to the kernel's body with ``name`` for what Inductor would put in later."""
    from torch._inductor.utils import Placeholder

    before, kernel.kernel_name = kernel.kernel_name, name
    try:
        text = hook()
    finally:
        kernel.kernel_name = before
    return _ANY_NAME.format(name=name) + text.replace(str(Placeholder.DESCRIPTIVE_NAME), name)


def _begin_compile(name: str, text: str) -> None:
    """Let a worker compile the kernel, to be had by this text; nothing where no worker is up."""
    from torch._inductor.async_compile import AsyncCompile

    if AsyncCompile.use_process_pool():
        AsyncCompile().triton(name, f"\n{text.strip()}\n")


# --- tracing and inlining -------------------------------------------------------------------------


def is_tensor_ir(x: Any) -> bool:
    """Whether a lowering argument is a tensor."""
    from torch._inductor import ir

    return isinstance(x, ir.TensorBox)


def holds_tensor_ir(x: Any) -> bool:
    """Whether a lowering argument is a list or tuple with tensors in it."""
    return isinstance(x, (list, tuple)) and any(is_tensor_ir(e) for e in x)


def fake_of(x: Any) -> Any:
    """The fake tensor of a realized IR tensor."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    with V.fake_mode:
        return ir.ir_node_to_tensor(x)


class Traced(NamedTuple):
    """An fx graph of aten operations and the fake outputs it was traced to."""

    gm: torch.fx.GraphModule
    outputs: Any


def trace(fn: Callable[..., Any], fakes: Sequence[Any]) -> Traced:
    """Trace ``fn`` on fake tensors with the decompositions of the compile in progress."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    with V.fake_mode:
        gm = make_fx(fn, decomposition_table=select_decomp_table())(*fakes)
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    outputs = torch.fx.node.map_arg(output.args[0], lambda n: n.meta["val"])
    return Traced(gm, outputs)


def inline(gm: torch.fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any]) -> Any:
    """Lower ``gm``'s nodes into the graph in progress; its results fuse like any other IR."""
    from torch._inductor import config
    from torch._inductor.codegen.subgraph import inline_subgraph_to_ir_nodes

    if not patches:
        return inline_subgraph_to_ir_nodes(gm, list(inputs), "inductor_ext")
    before = len(graph().operations)
    with config.patch(dict(patches)):
        out = inline_subgraph_to_ir_nodes(gm, list(inputs), "inductor_ext")
    operations = graph().operations[before:]
    if any(not hasattr(op, "set_config_patches") for op in operations):
        raise NotImplementedError("config_patches need torch 2.12 or newer")
    for op in operations:
        op.set_config_patches(dict(patches))
    return out


def scan(combine: Callable[..., Any], xs: Sequence[Any], dim: int, reverse: bool) -> Any:
    """Inductor's scan of k leaves: ``combine`` takes 2k tensors at a position and gives k. None
    where Inductor has no code for it."""
    from torch._inductor import ir
    from torch._inductor.subgraph_lowering import InputDescriptor, lower_pointwise_subgraph
    from torch._inductor.virtualized import V

    pairs = [(x.get_dtype(), x.get_device()) for x in (*xs, *xs)]
    with V.fake_mode:
        fakes = [torch.empty((), dtype=dtype, device=device) for dtype, device in pairs]
    subgraph = ir.Subgraph(name="combine", graph_module=trace(combine, fakes).gm)
    function = lower_pointwise_subgraph(subgraph, [InputDescriptor(*pair) for pair in pairs])
    size = xs[0].get_size()

    def loader(x: Any) -> Any:
        load = x.make_loader()
        last = size[dim] - 1
        turn = lambda index: [*index[:dim], last - index[dim], *index[dim + 1 :]]  # noqa: E731
        return (lambda index: load(turn(index))) if reverse else load

    ys = ir.Scan.create(
        device=xs[0].get_device(),
        dtypes=tuple(x.get_dtype() for x in xs),
        inner_fns=tuple(map(loader, xs)),
        size=size,
        axis=dim,
        combine_fn=lambda earlier, later: function(*earlier, *later),
        can_fallback_to_aten=False,
    )
    if ys[0] is None:
        return None
    flip = torch.ops.prims.rev.default
    return [call(flip, y, [dim]) for y in ys] if reverse else ys


# --- nested compiles ------------------------------------------------------------------------------


def compile_region(gm: torch.fx.GraphModule, fake_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile an already decomposed fx graph inside a running compile; returns ``f(*tensors)``.

    Uses the same lowering and code generation as the graph around it, under its config, so what is
    measured is what the outer compile emits for the same nodes. In a graph pass, where there is no
    graph around it yet, it is compiled as for inference.
    """
    return generate_region(gm, fake_inputs, {})()


def generate_region(
    gm: torch.fx.GraphModule,
    fake_inputs: Sequence[Any],
    assumed: Mapping[Any, compat.Assumed],
) -> Callable[[], Callable[..., Any]]:
    """The same in two steps: the code is written, calling the result loads it.

    Inductor hands a kernel to its compile workers when its code is written, so the kernels of what
    is written before the first is loaded compile side by side. ``assumed`` is what Inductor's hints
    answer for symbolic sizes, as in a branch.
    """
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    outer = V.graph
    if on_real_card() and any(getattr(f, "is_cuda", False) for f in fake_inputs):
        _await_workers()
    lowering = GraphLowering(
        gm,
        example_inputs=list(fake_inputs),
        shape_env=shape_env(),
        is_inference=getattr(outer, "is_inference", True),
        is_backward=getattr(outer, "is_backward", False),
        name="inductor_ext_candidate",
    )
    compat_dispatch.assume_in(lowering.sizevars, assumed)
    write = "codegen_with_cpp_wrapper" if lowering.cpp_wrapper else "codegen"
    with V.set_graph_handler(lowering), compat.assume(assumed):
        lowering.run(*fake_inputs)
        code = getattr(lowering, write)()
    setattr(lowering, write, lambda: code)

    def load() -> Callable[..., Any]:
        with V.set_graph_handler(lowering), compat.assume(assumed):
            module = lowering.compile_to_module()
        return lambda *inputs: module.call(list(inputs))

    return load


@contextlib.contextmanager
def without_descent() -> Iterator[None]:
    """A context in which the kernels written are not tuned by coordinate descent when they run, as
    those of a max-autotune mode are: that is dozens of variants, compiled one by one, of each."""
    from torch._inductor import config

    with config.patch(coordinate_descent_tuning=False):
        yield


def _await_workers() -> None:
    """Before the workers are up, writing code hands them nothing and every load would wait."""
    from torch._inductor.async_compile import AsyncCompile

    with contextlib.suppress(TimeoutError):
        AsyncCompile.wait_pool_ready(timeout=60)


def no_fake_mode() -> Any:
    """A context without the fake-tensor mode of the compile in progress: kernels really run."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def static_fake(value: Any) -> Any:
    """A fake tensor like ``value`` with every symbolic size at its hint."""
    from torch._inductor.virtualized import V

    with V.fake_mode:
        return torch.empty_strided(
            [_number(s) for s in value.shape],
            [_number(s) for s in value.stride()],
            dtype=value.dtype,
            device=value.device,
        )


def static_args(args: Any) -> Any:
    """Arguments of an fx node with symbolic ints at their hints."""
    return torch.utils._pytree.tree_map(
        lambda a: _number(a) if isinstance(a, torch.SymInt) else a, args
    )


def _number(value: Any) -> int:
    return hint(value.node.expr) if isinstance(value, torch.SymInt) else int(value)


def propagate_fakes(gm: torch.fx.GraphModule, fakes: Sequence[Any]) -> None:
    """Fill ``meta["val"]`` of every node from the fake inputs."""
    from torch._inductor.virtualized import V
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    FakeTensorProp(gm, V.fake_mode).propagate_dont_convert_inputs(*fakes)


def random_like(fake: Any, device: torch.device) -> Any:
    """A random tensor with the sizes (hints), strides and dtype of a fake one."""
    from torch._dynamo.testing import rand_strided

    size = [_number(s) for s in fake.shape]
    stride = [_number(s) for s in fake.stride()]
    with no_fake_mode():
        return rand_strided(size, stride, fake.dtype, device)
