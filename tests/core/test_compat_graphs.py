"""What graphs, gradients and launches ask of torch: see ``test_compat``."""

from __future__ import annotations

import importlib
import inspect
import types
from typing import Any

import pytest
import sympy
import torch
from compat_names import X, accepts, find
from functorch.compile import aot_function, default_partition, make_boxed_func
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import CheckpointPolicy

from inductor_ext import (
    compat,
    compat_fx,
    compat_replay,
    compat_runtime,
    compat_scans,
    compat_user_kernels,
)

pytestmark = pytest.mark.codegen  # a torch that moved a name must turn CI red


def test_softmax_patterns_of_the_joint_graph():
    """The entry that lowerings on "early_joint" stand before; what makes softmaxes one sweep."""
    entry = compat_fx.scaled_softmax_patterns()
    joint = find("torch._inductor.fx_passes.joint_graph:pass_patterns")
    assert entry in joint and entry is not find("torch._inductor.fx_passes.joint_graph:patterns")
    functions = [p.handler.__name__ for ps in entry.patterns.values() for p in ps]
    assert {"mul_softmax_pattern", "div_softmax_pattern"} <= set(functions), (
        "the scaled softmax patterns moved to another entry of pass_patterns"
    )
    from torch._inductor import config

    assert config.cuda_backend == "triton"
    assert compat_fx.writes_triton(torch.device("cuda"))
    assert not compat_fx.writes_triton(torch.device("cpu"))


def test_what_is_called_and_what_is_inlined():
    """``lowering.lowerings`` and ``fallbacks``; ``config.realize_reads_threshold``."""
    aten = torch.ops.aten
    assert compat_fx.is_extern(torch.ops.inductor_ext.row_statistics.default)
    assert compat_fx.is_extern(aten._scaled_dot_product_flash_attention.default)
    assert not compat_fx.is_extern(aten.exp.default)
    assert compat_fx.reads_inlined() > 1


def test_scores_are_traced_in_a_thread_apart():
    """``make_fx`` of fake tensors beside constants; what FakeTensorMode asks of CUDA first."""
    assert callable(find("torch._C:_ensureCUDADeviceGuardSet"))

    def filled(x):
        return torch.where(x > 0, x, torch.tensor(2.0)).mul_(3)

    graph = compat_fx.apart(lambda: compat_fx.pointwise_graph(filled, [torch.ones(2)]))
    called = [n.target.overloadpacket for n in graph.nodes if n.op == "call_function"]
    aten = torch.ops.aten
    assert called[0] == aten.gt and {aten.where, aten.mul} <= set(called)
    assert aten.mul_ not in called


def test_what_the_partitioner_is_told():
    """A tag on nodes of a joint graph, and the budget of memory."""
    node = torch.fx.Graph().placeholder("primals_1")
    assert not compat_fx.may_be_recomputed(node)
    node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    assert compat_fx.may_be_recomputed(node)
    partitioners = importlib.import_module("torch._functorch.partitioners")
    assert '"recompute"' in inspect.getsource(partitioners.must_recompute)
    assert not compat_fx.has_memory_budget()
    with functorch_config.patch(activation_memory_budget=0.5):
        assert compat_fx.has_memory_budget()


def test_traced_joint_is_right_behind_the_attention_patterns():
    joint = find("torch._inductor.fx_passes.joint_graph:pass_patterns")
    at = joint.index(find("torch._inductor.fx_passes.joint_graph:patterns"))
    own = [entry for entry in joint if type(entry).__name__ == "_GuardedPass"]
    assert joint[at + 1] is own[0]


def test_into_memory():
    x = torch.randn(3, 1)
    assert torch.equal(compat_fx.into_memory()(x, [1, 1]), x)
    lowering = compat.lowering_of(compat_fx.into_memory())
    assert lowering is not None and "require_stride_order" in inspect.getsource(lowering)


def test_nodes_of_a_joint_graph():
    graph = torch.fx.Graph()
    node, tangent = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    assert compat_fx.is_tangent(tangent) and not compat_fx.is_tangent(node)
    graph.erase_node(tangent)
    assert compat_fx.is_erased(tangent) and not compat_fx.is_erased(node)
    partitioners = importlib.import_module("torch._functorch.partitioners")
    assert "tangents" in inspect.getsource(partitioners._is_tangent)
    assert compat_fx.tensor_meta(torch.zeros(2, 3)).shape == (2, 3)


def test_which_result_a_gradient_is_of():
    seen = []

    def partition(joint, inputs, **kwargs):
        graph = joint.graph
        tangents = [n for n in graph.nodes if compat_fx.is_tangent(n)]
        names = [[n.target for n in compat_fx.differentiated(graph, t)] for t in tangents]
        seen.append((names, compat_fx.differentiated(graph, next(iter(graph.nodes)))))
        return default_partition(joint, inputs, **kwargs)

    def fn(x):
        return x.sin().detach(), x.cos(), x.exp()

    args = torch.randn(3, requires_grad=True)
    aot_function(fn, lambda g, _: make_boxed_func(g), partition_fn=partition)(args)
    aten = torch.ops.aten
    assert seen == [([[aten.cos.default], [aten.exp.default]], [])]


def test_whether_roundings_are_kept():
    from torch._inductor import config

    assert compat_fx.rounds_in_between() is False
    with config.patch(emulate_precision_casts=True):
        assert compat_fx.rounds_in_between() is True


def test_whether_a_backward_frees_its_graph():
    find("torch._C:_len_torch_dispatch_stack")
    find("torch._C._autograd:_get_current_graph_task_keep_graph")
    seen = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            seen.append(compat_runtime.backward_frees_graph())
            return g

    y = Probe.apply(torch.ones((), requires_grad=True))
    y.backward(retain_graph=True)
    y.backward()
    assert seen == [False, True]


def test_whether_a_transform_runs():
    find("torch._C._functorch:peek_interpreter_stack")
    find("torch._C:_dispatch_tls_is_dispatch_key_included")
    find("torch.autograd.forward_ad:_current_level")
    find("torch._functorch.pyfunctorch:retrieve_all_functorch_interpreters")
    find("torch._functorch.pyfunctorch:TransformType.Vmap")
    seen = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append(compat_runtime.under_functorch())
        return x.sin()

    fn(torch.ones(2))
    torch.func.grad(fn)(torch.ones(()))
    torch.func.vmap(fn)(torch.ones(2))
    with torch.autograd.forward_ad.dual_level():
        fn(torch.ones(2))
    assert seen == [False, True, True, True]

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return fn(g) * (not compat_runtime.backward_frees_graph())

    x = torch.ones((), requires_grad=True)
    (dx,) = torch.autograd.grad(Probe.apply(x), x, torch.ones(2), is_grads_batched=True)
    assert seen[4] and (dx != 0).all()


def test_a_kernel_of_ones_own_in_a_graph():
    table = find("torch._higher_order_ops.triton_kernel_wrap:kernel_side_table")
    for name in ("add_kernel", "add_constant_args"):
        assert callable(getattr(table, name))
    accepts(
        "torch._higher_order_ops.triton_kernel_wrap:triton_kernel_wrapper_functional_dense",
        kernel_idx=0,
        constant_args_idx=0,
        grid=[(1, 1, 1)],
        tma_descriptor_metadata={},
        kwargs={},
        tensors_to_clone=[],
    )
    accepts("torch._inductor.pattern_matcher:stable_topological_sort", X)
    a, b = sympy.symbols("a b", integer=True, positive=True)
    division = find("torch.utils._sympy.functions:FloorDiv")(a, b)
    assert compat_user_kernels.is_floor_division(division) and division.args == (a, b)
    assert not compat_user_kernels.is_floor_division(a * b)
    largest = find("torch.utils._sympy.functions:Max")(1, a - b)
    assert compat_user_kernels.is_maximum(largest) and set(largest.args) == {1, a - b}
    assert not compat_user_kernels.is_maximum(a - b)


def test_scans_of_torch():
    assert compat_scans.associative_scan().name() == "associative_scan"
    accepts("torch._refs:_cumsumprod_common", func=X, init=0, a=X, dim=0, dtype=None)
    compat_scans.trace_long_scans()
    long = torch.empty(3_100_000_000, dtype=torch.int8, device="meta")
    assert long.cumsum(0).dtype == torch.int64
    assert long.cumprod(0, dtype=torch.bfloat16).shape == long.shape
    assert torch.equal(torch._refs.cumsum(torch.arange(4), 0), torch.tensor([0, 1, 3, 6]))


def test_combine_functions_as_graphs():
    accepts("torch._inductor.ir:Subgraph", name="combine", graph_module=X)
    accepts("torch._inductor.subgraph_lowering:InputDescriptor", torch.float32, X)
    accepts("torch._inductor.subgraph_lowering:lower_pointwise_subgraph", X, [])
    accepts(
        "torch._inductor.ir:Scan.create",
        device=X,
        dtypes=(),
        inner_fns=(),
        size=[],
        axis=0,
        combine_fn=X,
        can_fallback_to_aten=False,
    )
    assert callable(compat.lowering_of(torch.ops.prims.rev.default))
    accepts("torch._decomp:core_aten_decompositions")
    ones = [torch.ones(2), torch.ones(2)]

    def halved(x, y):
        out = x + y
        out.mul_(0.5)
        return [torch.nn.functional.softplus(out)]

    kept = compat_fx.functional_graph(halved, ones)
    names = [n.target._opname for n in kept.nodes if n.op == "call_function"]
    assert names == ["add", "mul", "softplus"]
    apart = compat_fx.functional_graph(halved, ones, decompose=True)
    assert all("softplus" not in str(n.target) for n in apart.nodes)
    for node in compat_fx.inductor_graph(lambda x, y: x.addcmul(x, y), ones).nodes:
        assert node.op == "output" or isinstance(node.meta["val"], torch.Tensor)
    assert compat_fx.known_number(torch.tensor(2.5)) == 2.5
    assert compat_fx.known_number(torch.ones(2)) is None
    with torch.no_grad():
        assert compat_fx.apart(torch.is_grad_enabled)


def test_sizes_lifted_into_a_combine_function():
    scan = compat_scans.associative_scan()
    assert hasattr(scan.py_kernels[torch._C.DispatchKey.Autograd], "inductor_ext")
    scan._dispatch_cache.clear()


def test_attention_of_cudnn():
    aten = torch.ops.aten
    forward = aten._scaled_dot_product_cudnn_attention.default._schema
    assert [a.name for a in forward.arguments] == [
        "query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal",
        "return_debug_mask", "scale",
    ]  # fmt: skip
    assert [r.name for r in forward.returns][:2] == ["output", "logsumexp"]
    backward = aten._scaled_dot_product_cudnn_attention_backward.default._schema
    assert [a.name for a in backward.arguments] == [
        "grad_out", "query", "key", "value", "out", "logsumexp", "philox_seed", "philox_offset",
        "attn_bias", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "scale",
    ]  # fmt: skip
    find("torch.backends.cuda:can_use_cudnn_attention")
    find("torch.backends.cuda:cudnn_sdp_enabled")
    q = torch.empty(1, 2, 3, 8)
    torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, True, False)


def test_launches_that_are_done_again(monkeypatch):
    import triton
    from triton.backends.nvidia import driver
    from triton.compiler.compiler import CompiledKernel
    from triton.tools.tensor_descriptor import TensorDescriptor

    @triton.jit
    def kernel(x, size, BLOCK: triton.language.constexpr = 4):
        pass

    assert kernel.arg_names == ["x", "size", "BLOCK"]
    assert [p.name for p in kernel.params] == kernel.arg_names and kernel.params[2].default == 4
    assert "return kernel" in inspect.getsource(type(kernel).run)
    made = inspect.getsource(CompiledKernel.__init__) + inspect.getsource(CompiledKernel)
    for name in ("def run(self)", "self.function", "self.packed_metadata"):
        assert name in made
    given = list(inspect.signature(driver.CudaLauncher.__call__).parameters)
    assert given[:6] == ["self", "gridX", "gridY", "gridZ", "stream", "function"]
    # Descriptors, encoded or taken apart: what is asked of ours is what Triton's own has.
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda t: 4096)
    base = torch.empty(8, 16, dtype=torch.bfloat16)
    own = TensorDescriptor(base, [8, 16], [16, 1], [4, 16])
    ours = compat_replay._Described(own).at(4096)
    asked: list[Any] = []
    utils = types.SimpleNamespace()
    for name in ("fill_tma_descriptor", "fill_tma_descriptor_tiled"):
        setattr(utils, name, lambda *args: asked.append(args))
    monkeypatch.setattr(triton.runtime.driver, "_active", types.SimpleNamespace(utils=utils))
    meta = {
        "swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [4, 16], "fp4_padded": False,
    }  # fmt: skip
    more = len(inspect.signature(driver.make_tensordesc_arg).parameters) - 2
    for metadata in (meta, None):
        mine, theirs = (
            driver.make_tensordesc_arg(d, metadata, *[None] * more) for d in (ours, own)
        )
        assert mine[1:] == theirs[1:]
    assert asked[0] == asked[1] and asked[0][0] == 4096


def test_who_watches_launches(monkeypatch):
    from triton.runtime.jit import JITFunction

    ran: list[Any] = []
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **kwargs: ran.append(args))
    own, tape = JITFunction.run, types.SimpleNamespace(below=False)
    tape.launch = lambda run, kernel, grid, args, kwargs: ran.append((run, grid, args, kwargs))
    kernel = object.__new__(JITFunction)
    assert compat_replay.is_watched() is False
    with compat_replay.watched(tape) as launches:
        assert compat_replay.is_watched()
        kernel[(4,)](1, size=2)
        assert ran[0][1:] == ((4,), (1,), {"size": 2})
        ran[0][0]()
        tape.below = True
        kernel[(4,)](3)
        compat_replay._knobs().launch_enter_hook(None)
        assert ran[1:] == [(1,), (3,)] and launches() == 0
        tape.below = False
        compat_replay._knobs().launch_enter_hook(None)
        with compat_replay.watched(tape) as second:
            assert second is None
        assert launches() == 1
    assert JITFunction.run is own and compat_replay.is_watched() is False
    assert torch.autograd.profiler._is_profiler_enabled is False
    with torch.profiler.profile():
        assert torch.autograd.profiler._is_profiler_enabled is True
    assert isinstance(torch._C._get_cudnn_sdp_enabled(), bool)
    assert inspect.isbuiltin(torch._C._len_torch_dispatch_stack)


def test_how_a_program_calls_an_operation():
    from torch._inductor.codegen.wrapper import ExternKernelAllocLine
    from torch._inductor.virtualized import V

    registry = importlib.import_module("torch._inductor.codegen.custom_extern_kernel_codegen")
    path = "torch.ops.inductor_ext.attention.default"
    written = registry.CUSTOM_EXTERN_KERNEL_CODEGEN[path]
    assert written.cpp is None and torch.ops.inductor_ext.attention.default.launched

    class Wrapper:
        def __init__(self):
            self.lines: list[Any] = []

        def writeline(self, line: Any) -> None:
            self.lines.append(line)

    def line(named: list[str], fx_wrapper: bool = False) -> Any:
        node = types.SimpleNamespace(
            get_name=lambda: "buf0", codegen_args=lambda: [*"qkvxnse"], codegen_kwargs=lambda: named
        )
        wrapper = Wrapper()
        with V.set_graph_handler(types.SimpleNamespace(fx_wrapper=fx_wrapper)):
            written.python(node, wrapper.writeline)
        (found,) = wrapper.lines
        return found

    call = f"buf0 = {path}.launched(q, k, v, x, n, s, e"
    assert line(["seed=None", "dropout=0.0"]) == f"{call}, None, 0.0)"
    assert line(["dropout=0.5"]) == f"{call}, dropout=0.5)"
    assert line([]) == f"{call})"
    assert isinstance(line([], fx_wrapper=True), ExternKernelAllocLine)


def test_a_graph_is_put_back_as_it_was():
    inner = torch.nn.Module()
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    a = graph.call_function(torch.add, (x, y))
    b = graph.call_function(torch.sin, (a,))
    c = graph.call_function(torch.cos, (a,))
    d = graph.call_function(torch.mul, (c, b))
    graph.output((d, a))
    module = torch.fx.GraphModule({"inner": inner}, graph)
    module.add_module("inner", inner)
    graph = module.graph
    x, y, a, b, c, d, out = graph.nodes
    c.meta["val"] = 1

    def state():
        named = [
            (n, n.name, n.op, n.target, n.args, n.kwargs, dict(n.meta), list(n.users))
            for n in graph.nodes
        ]
        found = graph.find_nodes(op="call_function", target=torch.cos)
        return named, found, list(reversed(graph.nodes)), module.code, dict(module.named_modules())

    before, snapshot = state(), compat_fx.Snapshot(graph)
    with graph.inserting_before(b):
        new = graph.call_function(torch.tanh, (a,))
        newer = graph.call_function(torch.exp, (new,))
    c.replace_all_uses_with(newer)
    graph.erase_node(c)
    out.prepend(b)
    d.target, d.meta["val"], new.name = torch.sub, 2, "sin_9"
    d.args = (newer, newer)
    graph.erase_node(b)
    module.delete_submodule("inner")
    module.recompile()
    assert state() != before
    snapshot.restore()
    assert state() == before
    graph.lint()
    module.recompile()
    given = torch.rand(3), torch.rand(3)
    total = given[0] + given[1]
    torch.testing.assert_close(module(*given)[0], total.cos() * total.sin())
    with graph.inserting_before(out):
        assert graph.call_function(torch.tanh, (a,)).name == "tanh"  # the name is free again
