"""The only module that touches private Inductor names (with ``compat_virtual`` for the test kit).

Supported: torch 2.11 to 2.15. Each access is covered by ``tests/core/test_compat.py``, which fails
with the name that moved. Nothing here decides anything; it translates.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import sympy
import torch

log = logging.getLogger("inductor_ext")

SUPPORTED = "torch>=2.11,<2.16"


def supported(version: str) -> bool:
    """Whether a torch version string lies in the supported range."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return (2, 11) <= (major, minor) < (2, 16)


# --- registries -----------------------------------------------------------------------------------


def _lowering_table() -> dict[Any, Callable[..., Any]]:
    from torch._inductor.lowering import lowerings

    return lowerings


def lowering_of(op: Any) -> Callable[..., Any] | None:
    """The function Inductor lowers ``op`` with at present."""
    return _lowering_table().get(op)


def wrap_lowering(op: Any, around: Callable[..., Any]) -> Callable[..., Any]:
    """Put ``around(stock, *args, **kwargs)`` in place of the lowering of ``op``; returns it.

    An operation without a lowering (a user's custom op) gets Inductor's fallback as its stock.
    """
    table = _lowering_table()
    stock = table.get(op)
    if stock is None:
        stock = _fallback(op)

    @functools.wraps(stock)
    def lowering(*args: Any, **kwargs: Any) -> Any:
        return around(stock, *args, **kwargs)

    lowering.stock = stock  # type: ignore[attr-defined]
    table[op] = lowering
    return lowering


def _fallback(op: Any) -> Callable[..., Any]:
    """What Inductor makes of an operation it has no lowering for, at its first call."""
    from torch._inductor import lowering
    from torch._library.utils import get_layout_constraint_tag

    tag = get_layout_constraint_tag(op, with_default=True)
    lowering.make_fallback(
        op,
        layout_constraint=lowering.tag_to_layout_constraint(tag),
        warn=False,
        override_decomp=True,
    )
    return _lowering_table()[op]


def append_graph_pass(stage: str, entry: Any) -> None:
    """Append an object with ``apply(graph) -> int`` to the pattern passes of a stage.

    These lists are module globals that Inductor runs in order, so no custom-pass slot is taken.
    """
    from torch._inductor.fx_passes import joint_graph, post_grad

    lists = {"joint": joint_graph.pass_patterns, "post_grad": post_grad.pass_patterns}
    if stage not in lists:
        raise ValueError(f"expected a stage among {sorted(lists)}, got {stage!r}")
    lists[stage].append(entry)


_SALT_KEY = "inductor_ext"


def install_salt(revision: Callable[[], str]) -> None:
    """Hash ``revision()`` into the FX-graph and AOTAutograd cache keys.

    Every entry of ``custom_backend_passes`` is hashed; the pass itself only runs for graphs on a
    device of that name, and no device is called inductor_ext.
    """
    from torch._inductor.codegen.common import custom_backend_passes
    from torch._inductor.custom_graph_pass import CustomGraphModulePass

    class Salt(CustomGraphModulePass):
        def __call__(self, gm: Any) -> None:
            return None

        def uuid(self) -> str:
            return revision()

    custom_backend_passes[_SALT_KEY] = Salt()


def salt_installed() -> bool:
    """Whether the revision is (still) part of the cache keys."""
    from torch._inductor.codegen.common import custom_backend_passes

    return _SALT_KEY in custom_backend_passes


_SLOTS = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
    "_pre_fusion_custom_pass",
    "_post_fusion_custom_pass",
    "custom_partitioner_fn",
    "inductor_choices_class",
    "external_matmul",
)


def pass_slots() -> dict[str, Any]:
    """Inductor's single-occupant slots and what sits in them. The plugin uses none."""
    from torch._inductor import config

    return {name: getattr(config, name, None) or None for name in _SLOTS}


def cache_dir() -> str:
    """Inductor's cache directory."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir as directory

    return directory()


# --- the graph being lowered ----------------------------------------------------------------------


def graph() -> Any:
    """The GraphLowering in progress."""
    from torch._inductor.virtualized import V

    return V.graph


def current_node() -> Any:
    """The fx node being lowered; None when a lowering is called outside ``call_function``."""
    return getattr(graph(), "current_node", None)


def hint(expr: Any) -> int:
    """A size as an int: its value, or the value seen when the graph was traced."""
    if isinstance(expr, int):
        return expr
    expr = sympy.sympify(expr)
    if expr.is_number:
        return int(expr)
    sizevars = graph().sizevars
    get = getattr(sizevars, "optimization_hint", None) or sizevars.size_hint
    return int(get(expr))


def is_static(expr: Any) -> bool:
    """Whether a size is a number in this graph."""
    return isinstance(expr, int) or sympy.sympify(expr).is_number


def has_unbacked(exprs: Sequence[Any]) -> bool:
    """Whether any size depends on data (no hint exists)."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return any(bool(free_unbacked_symbols(sympy.sympify(e))) for e in exprs)


def upper_bound(expr: Any) -> int | None:
    """The largest value a size can take (mark_dynamic(max=)); None when unbounded."""
    if is_static(expr):
        return int(expr)
    from torch.utils._sympy.value_ranges import bound_sympy

    shape_env = graph().sizevars.shape_env
    upper = bound_sympy(sympy.sympify(expr), shape_env.var_to_range).upper
    return int(upper) if upper.is_number and upper < 2**31 - 1 else None


def statically_divisible(expr: Any, by: int) -> bool:
    """Whether a size is a multiple of ``by`` for every value it can take."""
    if is_static(expr):
        return int(expr) % by == 0
    return graph().sizevars.statically_known_multiple_of(expr, by)


def wants_measurement() -> bool:
    """Whether this compile runs in a max-autotune mode for matrix products."""
    from torch._inductor import config

    return bool(config.max_autotune or config.max_autotune_gemm) and not getattr(
        config, "deterministic", False
    )


def ahead_of_time() -> bool:
    """Whether the wrapper is C++ (AOTInductor or cpp_wrapper): a launch there has no attributes."""
    return bool(graph().aot_mode or graph().cpp_wrapper)


def float32_precision() -> str:
    """ "ieee" or "tf32": what torch's float32 matmul setting asks for on the card."""
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if precision in ("ieee", "tf32"):
        return precision
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def on_real_card() -> bool:
    """Whether kernels can run: a card is present, and no virtual one stands in for it."""
    from . import compat_virtual

    return compat_virtual.active_card() is None and torch.cuda.is_available()


def without_caches() -> Any:
    """A context in which nothing is read from or written to Inductor's caches."""
    from torch._inductor import config

    return config.patch(force_disable_caches=True)


def strict() -> Any:
    """A context in which a failing lowering raises (``patch`` is added to the config module)."""
    from . import config

    return getattr(config, "patch")(strict=True)  # noqa: B009


def exceeds_int32(*sizes: Any) -> bool:
    """Whether a tensor of these sizes may need 64-bit offsets."""
    numel = 1
    for size in sizes:
        bound = upper_bound(size)
        if bound is None:
            return True
        numel *= bound
    return numel >= 2**31


def too_large_for_int32(x: Any) -> bool:
    """Whether the offsets into a realized tensor may need 64 bits."""
    span = 1
    for size, stride in zip(x.get_size(), x.get_stride(), strict=True):
        size_bound, stride_bound = upper_bound(size), upper_bound(stride)
        if size_bound is None or stride_bound is None:
            return True
        span += max(size_bound - 1, 0) * abs(stride_bound)
    return span >= 2**31


def device_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of the card (virtual in the test kit)."""
    return torch.cuda.get_device_capability(device)


def multiprocessors(device: torch.device) -> int:
    """Number of SMs of the card (virtual in the test kit)."""
    return torch.cuda.get_device_properties(device).multi_processor_count


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


def is_graph_input(x: Any) -> bool:
    """Whether a realized tensor is, or is a view of, an input or constant of the graph."""
    from torch._inductor import ir

    while not isinstance(x, ir.Buffer):
        x = x.data
    return isinstance(x, (ir.InputBuffer, ir.ConstantBuffer))


def call(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Emit ``op`` through Inductor's lowering of it."""
    return _lowering_table()[op](*args, **kwargs)


def call_stock(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Emit ``op`` through the lowering that was there before the plugin's."""
    lowering = _lowering_table()[op]
    return getattr(lowering, "stock", lowering)(*args, **kwargs)


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


@functools.cache
def _launcher_builders() -> Any:
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(4, thread_name_prefix="inductor_ext_launcher")


_launchers_built: set[tuple[Any, ...]] = set()


def _build_launcher(signature: tuple[str, ...]) -> None:
    """Have Triton build the C launcher of a signature while the kernel itself compiles.

    Inductor's static launcher can't set launch attributes, so a kernel with PDL goes through
    Triton's, which up to triton 3.6 is compiled per signature by the C compiler: 0.35 s that would
    otherwise come after everything else. The result is found in Triton's cache; a failure is not.
    """
    from triton.backends.nvidia import driver

    make, cache = getattr(driver, "make_launcher", None), os.environ.get("TRITON_CACHE_DIR", "")
    if make is None or (cache, signature) in _launchers_built:
        return
    _launchers_built.add((cache, signature))

    def build() -> None:
        from triton.runtime.build import compile_module_from_src

        try:
            compile_module_from_src(
                src=make({}, dict(enumerate(signature)), None),
                name="__triton_launcher",
                library_dirs=driver.library_dirs(),
                include_dirs=driver.include_dirs,
                libraries=driver.libraries,
            )
        except Exception as error:  # the kernel's own launch builds it again and reports
            log.debug("a launcher could not be built ahead: %s", error)

    _launcher_builders().submit(build)


class Template:
    """A Triton template whose epilogue Inductor fuses, launched with PDL where asked.

    ``grid(*sizes, meta, cdiv)`` gets the output's sizes (ints or sympy). ``source`` is a template
    in Inductor's dialect: ``def_kernel``, ``size``, ``stride``, ``store_output``. Two constants are
    ours: ``PDL`` launches with programmatic dependent launch, ``FLAT`` names the variable that
    already holds the offset into a contiguous output, so that it is not put together again.
    """

    def __init__(self, name: str, grid: Callable[..., Any], source: str) -> None:
        self.name, self._grid, self._source = name, grid, source

    @functools.cached_property
    def _template(self) -> Any:
        from torch._inductor.select_algorithm import (
            SymbolicGridFn,
            TritonTemplate,
            TritonTemplateKernel,
        )

        class Kernel(TritonTemplateKernel):
            triton_meta: Any

            def jit_lines(self) -> Any:
                pdl = self.meta.get("PDL")
                if pdl:
                    self.triton_meta = {**(self.triton_meta or {}), "launch_pdl": True}
                lines = super().jit_lines()
                if pdl and on_real_card():
                    _build_launcher(tuple(self.triton_meta["signature"].values()))
                return lines

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
        return caller.output_node()


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


# --- nested compiles ------------------------------------------------------------------------------


def compile_region(gm: torch.fx.GraphModule, fake_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile an already decomposed fx graph inside a running compile; returns ``f(*tensors)``.

    Uses the same lowering and code generation as the graph around it, under its config, so what is
    measured is what the outer compile emits for the same nodes.
    """
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    outer = V.graph
    lowering = GraphLowering(
        gm,
        example_inputs=list(fake_inputs),
        shape_env=outer._shape_env,
        is_inference=outer.is_inference,
        is_backward=outer.is_backward,
        name="inductor_ext_candidate",
    )
    with V.set_graph_handler(lowering):
        lowering.run(*fake_inputs)
        module = lowering.compile_to_module()
    return lambda *tensors: module.call(list(tensors))


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
