"""The private names that ``compat*.py`` use are where they expect them; the version gate."""

from __future__ import annotations

import importlib
import inspect
import logging
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from compat_names import VERSION, X, accepts, find, is_a

from inductor_ext import (
    compat,
    compat_dynamo,
    compat_ir,
    compat_pre_grad,
    compat_runtime,
    registry,
)

pytestmark = pytest.mark.codegen  # a torch that moved a name must turn CI red

# --- registries -----------------------------------------------------------------------------------


def test_lowering_table():
    is_a("torch._inductor.lowering:lowerings", dict)
    accepts("torch._inductor.lowering:fallback_handler", X, add_to_fallback_set=False)
    accepts("torch._inductor.lowering:to_dtype", X, torch.float32)
    table = find("torch._inductor.lowering:lowerings")
    for op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
        assert callable(table[op]), f"the lowering table has no function for {op}"
        assert compat.lowering_of(op) is table[op]


def test_the_compiler_reads_the_lowering_table_at_each_call():
    """A wrapped entry is seen because GraphLowering looks it up by name in the global table."""
    graph = importlib.import_module("torch._inductor.graph")
    assert graph.lowerings is find("torch._inductor.lowering:lowerings")


def test_pass_lists():
    for stage in ("joint_graph", "post_grad"):
        is_a(f"torch._inductor.fx_passes.{stage}:pass_patterns", list)
    for entry in find("torch._inductor.fx_passes.post_grad:pass_patterns")[:1]:
        assert callable(entry.apply), "the entries of pass_patterns no longer have apply(graph)"
    with pytest.raises(
        ValueError, match=r"expected a stage among .*joint.*post_grad.*, got 'late'"
    ):
        compat.append_graph_pass("late", None)


def test_the_graph_in_front_of_autograd():
    """Inductor's function that edits it is a global, looked up at each call; ours wraps it."""
    from torch._inductor import compile_fx

    source = inspect.getsource(find("torch._inductor.compile_fx:_recursive_pre_grad_passes"))
    assert "pre_grad_passes(gm, example_inputs, add_passes, remove_passes)" in source
    assert compat_pre_grad.is_installed() and compat_pre_grad.entries()
    ours = compile_fx.pre_grad_passes
    compile_fx.pre_grad_passes = ours.__wrapped__
    try:
        assert not compat_pre_grad.is_installed()
        bad = [what for what, ok, _ in registry.self_check() if not ok]
    finally:
        compile_fx.pre_grad_passes = ours
    assert bad == ["passes in front of AOTAutograd"]


def test_running_a_graph_again_on_its_fake_tensors():
    fake_mode = find("torch._subclasses:FakeTensorMode")(
        shape_env=find("torch.fx.experimental.symbolic_shapes:ShapeEnv")()
    )
    x = fake_mode.from_tensor(torch.randn(3, 4))
    parameter = fake_mode.from_tensor(torch.nn.Parameter(torch.randn(3, 4)))
    assert compat_pre_grad.fake_mode_of(x) is fake_mode
    assert compat_pre_grad.fake_mode_of(parameter) is fake_mode
    assert compat_pre_grad.fake_mode_of(torch.randn(3)) is None
    with compat_pre_grad.replaying(fake_mode):
        assert not (x + parameter).requires_grad
    key = compat_pre_grad.storage_key
    assert key(x) == key(x.view(12)[2:]) != key(parameter)


def test_nodes_that_change_how_a_program_runs():
    def fn(x):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    seen = []
    torch._dynamo.reset()
    torch.compile(fn, backend=lambda graph, inputs: seen.append(graph) or graph)(torch.ones(3))
    targets = [n.target for n in seen[0].graph.nodes]
    for asks in (
        compat_pre_grad.sets_gradients,
        compat_pre_grad.enters_autocast,
        compat_pre_grad.exits_autocast,
        compat_pre_grad.is_higher_order,
    ):
        assert any(map(asks, targets)), asks.__name__


def test_cache_key_hook():
    is_a("torch._inductor.codegen.common:custom_backend_passes", dict)
    base = find("torch._inductor.custom_graph_pass:CustomGraphModulePass")
    assert {"__call__", "uuid"} <= base.__abstractmethods__
    assert compat.salt_installed()
    from torch._inductor.codecache import FxGraphHashDetails

    source = inspect.getsource(FxGraphHashDetails)
    assert "custom_backend_passes" in source, "the cache key no longer hashes custom_backend_passes"


def test_slots_that_are_left_free():
    from torch._inductor import config

    missing = [name for name in compat.pass_slots() if not hasattr(config, name)]
    assert not missing, f"torch {torch.__version__} has no config {missing}; update compat._SLOTS"


def test_cache_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert compat.cache_dir() == str(tmp_path)


# --- the graph being lowered ----------------------------------------------------------------------


def test_graph_in_progress():
    find("torch._inductor.virtualized:V")
    for name in ("set_graph_handler", "fake_mode"):
        assert hasattr(type(find("torch._inductor.virtualized:V")), name), f"V.{name} is gone"
    source = inspect.getsource(find("torch._inductor.graph:GraphLowering"))
    for name in ("current_node", "sizevars", "aot_mode", "cpp_wrapper", "operations", "_shape_env"):
        assert f"self.{name}" in source, f"GraphLowering.{name} is gone"
    for name in ("is_inference", "is_backward"):
        assert f"self.{name}" in source, f"GraphLowering.{name} is gone"


def test_sizes():
    allocator = find("torch._inductor.sizevars:SizeVarAllocator")
    hint = getattr(allocator, "optimization_hint", None) or getattr(allocator, "size_hint", None)
    assert hint is not None, "SizeVarAllocator has neither optimization_hint nor size_hint"
    accepts("torch._inductor.sizevars:SizeVarAllocator.statically_known_multiple_of", X, X, 8)
    assert "self.shape_env" in inspect.getsource(allocator.__init__), "sizevars.shape_env is gone"
    accepts("torch.fx.experimental.symbolic_shapes:free_unbacked_symbols", X)
    accepts("torch.utils._sympy.value_ranges:bound_sympy", X, X)
    shape_env = find("torch.fx.experimental.symbolic_shapes:ShapeEnv")()
    assert isinstance(shape_env.var_to_range, dict), "ShapeEnv.var_to_range is no dict"


def test_sizes_without_a_graph():

    assert compat.hint(7) == compat.hint(sympy.Integer(7)) == compat.upper_bound(7) == 7
    assert compat.is_static(7) and compat.is_static(sympy.Integer(7))
    assert not compat.is_static(sympy.Symbol("s0"))
    assert compat.statically_divisible(48, 16) and not compat.statically_divisible(49, 16)
    assert not compat.has_unbacked([7, sympy.Integer(7), sympy.Symbol("s0")])
    assert compat.exceeds_int32(2**16, 2**15) and not compat.exceeds_int32(2**16, 2**15 - 1)


def test_settings_are_those_of_every_thread():
    from inductor_ext import config

    heard, there = [], []
    config.on_change(lambda: heard.append(config.pdl))
    with config.patch(pdl=False):
        thread = threading.Thread(target=lambda: there.append(config.pdl))
        thread.start(), thread.join()
    assert there == [False] and heard == [False, True] and config.pdl
    with pytest.raises(AttributeError, match="pld does not exist"):
        config.pld = True


def test_the_interpreters_tensors_and_types_are_as_triton_makes_them():
    import triton.language as tl

    from inductor_ext.testing import interpreter

    make = interpreter._make_block_type(tl.block_type.__init__)
    for element, shape in ((tl.int64, [4, 8]), (tl.float16, [16]), (tl.float16, [16])):
        mine, theirs = object.__new__(tl.block_type), tl.block_type(element, shape)
        make(mine, element, shape)
        assert vars(mine).keys() == vars(theirs).keys() and mine == theirs
        assert (mine.name, mine.numel) == (theirs.name, theirs.numel)
    pointers = tl.block_type(tl.pointer_type(tl.float32), [8])
    for kind in (tl.float32, tl.block_type(tl.int64, [4, 8]), pointers):
        mine, theirs = object.__new__(tl.tensor), tl.tensor("handle", kind)
        interpreter._make_tensor(mine, "handle", kind)
        assert vars(mine).keys() == vars(theirs).keys()
        assert (mine.handle, mine.type, mine.dtype) == ("handle", kind, theirs.dtype)
        assert [n.value for n in mine.shape] == [n.value for n in theirs.shape]
        assert mine.numel.value == theirs.numel.value and type(mine.shape) is type(theirs.shape)


def test_config_values():
    from torch._inductor import config

    for name in (
        "max_autotune", "max_autotune_gemm", "force_disable_caches", "coordinate_descent_tuning",
    ):  # fmt: skip
        assert isinstance(getattr(config, name), bool), f"torch._inductor.config.{name} is no bool"
    assert not compat.wants_measurement()
    for name in ("max_autotune", "max_autotune_gemm"):
        with config.patch({name: True}):
            assert compat.wants_measurement()
            if hasattr(config, "deterministic"):
                with config.patch(deterministic=True):
                    assert not compat.wants_measurement()
    assert not compat.replays_graphs()
    with config.patch({"triton.cudagraphs": True}):
        assert compat.replays_graphs()
    with compat.without_caches():
        assert config.force_disable_caches


def test_compile_workers():
    path = "torch._inductor.async_compile:AsyncCompile"
    accepts(f"{path}.wait_pool_ready", timeout=60)
    accepts(f"{path}.use_process_pool")
    accepts(f"{path}.triton", X, "name", "text")


@pytest.mark.parametrize(("setting", "expected"), [("highest", "ieee"), ("high", "tf32")])
def test_float32_precision_is_what_torch_was_told(setting, expected):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(setting)
        assert compat.float32_precision() == expected
    finally:
        torch.set_float32_matmul_precision(before)


def test_pointwise_operations_are_tagged():
    aten, tag = torch.ops.aten, torch.Tag.pointwise
    for op in (aten.relu.default, aten.add.Tensor, aten.sigmoid.default, aten.where.self):
        assert tag in op.tags, f"{op} is not tagged pointwise"
    for op in (aten.mm.default, aten.sum.default, aten.view.default):
        assert tag not in op.tags


# --- building IR ----------------------------------------------------------------------------------


def test_ir():
    accepts("torch._inductor.ir:ExternKernel.realize_input", X)
    accepts("torch._inductor.ir:ExternKernel.copy_input", X)
    accepts("torch._inductor.ir:ir_node_to_tensor", X)
    accepts("torch._inductor.ir:FixedLayout", X, torch.float32, [4])
    is_a("torch._inductor.ir:TensorBox", type)
    assert issubclass(find("torch._inductor.ir:DonatedBuffer"), find("torch._inductor.ir:Buffer"))
    assert callable(find("torch._inductor.ir:Layout.is_contiguous"))
    accepts("torch._inductor.lowering:make_fallback", X, layout_constraint=X, warn=False,
            override_decomp=True)  # fmt: skip
    fields = {
        f
        for c in find("torch._inductor.ir:Pointwise").__mro__
        for f in vars(c).get("__dataclass_fields__", ())
    }
    assert {"device", "dtype", "inner_fn", "ranges"} <= fields, "ir.Pointwise has other fields"
    accepts("torch._inductor.ir:Pointwise.create", device=X, dtype=X, inner_fn=X, ranges=X)
    for name in ("freeze_layout", "get_size", "get_stride", "get_dtype", "get_device"):
        find(f"torch._inductor.ir:Buffer.{name}")
    find("torch._inductor.virtualized:ops")


def test_template():
    path = "torch._inductor.select_algorithm:"
    accepts(f"{path}TritonTemplate", "name", X, "source")
    accepts(f"{path}SymbolicGridFn", X)
    generate = inspect.signature(find(f"{path}TritonTemplate.generate"))
    generate.bind(X, input_nodes=(), layout=X, num_stages=1, num_warps=1, BLOCK=8)
    assert "kernel_type" in vars(find(f"{path}TritonTemplate")), (
        "TritonTemplate.kernel_type is gone"
    )
    kernel = find(f"{path}TritonTemplateKernel")
    accepts(f"{path}TritonTemplateKernel.jit_lines", X)
    accepts(f"{path}TritonTemplateKernel.store_output", X, ("i",), "acc", None, val_shape=("B",))
    source = "".join(inspect.getsource(c) for c in kernel.__mro__ if c.__module__[:5] == "torch")
    for name in ("render_hooks", "triton_meta", "meta", "kernel_name"):
        assert f"self.{name}" in source, f"TritonTemplateKernel.{name} is gone"
    accepts(f"{path}TritonTemplateKernel.def_kernel", X, "A", "B")
    find("torch._inductor.utils:Placeholder.DESCRIPTIVE_NAME")
    request = inspect.getsource(find("torch._inductor.autotune_process:BenchmarkRequest"))
    request += inspect.getsource(find("torch._inductor.autotune_process:TritonBenchmarkRequest"))
    assert "self.module_path" in request, "the text of a template is in no file"
    callers = inspect.getsource(find(f"{path}TritonTemplateCaller"))
    assert "def output_node" in callers, "TritonTemplateCaller.output_node is gone"


# --- tracing, inlining, nested compiles -----------------------------------------------------------


def test_tracing_and_inlining():
    accepts("torch._inductor.decomposition:select_decomp_table")
    accepts("torch._inductor.codegen.subgraph:inline_subgraph_to_ir_nodes", X, [], "name")
    accepts("torch.fx.experimental.proxy_tensor:make_fx", X, decomposition_table={})
    if VERSION >= (2, 12):
        accepts("torch._inductor.ir:Operation.set_config_patches", X, {})
    else:
        assert not hasattr(find("torch._inductor.ir:Operation"), "set_config_patches")


def test_nested_compiles():
    accepts(
        "torch._inductor.graph:GraphLowering",
        X,
        example_inputs=[],
        shape_env=X,
        is_inference=True,
        is_backward=False,
        name="x",
    )
    accepts("torch._inductor.graph:GraphLowering.run", X)
    accepts("torch._inductor.graph:GraphLowering.compile_to_module", X)
    accepts("torch._subclasses.fake_tensor:unset_fake_temporarily")
    find("torch.fx.passes.fake_tensor_prop:FakeTensorProp.propagate_dont_convert_inputs")
    accepts("torch._dynamo.testing:rand_strided", [4], [1], torch.float32, X)


def test_random_like_keeps_sizes_strides_and_dtype():
    x = torch.empty(4, 6, dtype=torch.bfloat16).t()
    y = compat_ir.random_like(x, torch.device("cpu"))
    assert (y.shape, y.stride(), y.dtype) == (x.shape, x.stride(), x.dtype)
    assert 0.2 < y.float().std() < 5 and not torch.equal(y, torch.zeros_like(y))


def test_where_dynamic_sizes_come_from():
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    assert env.var_to_sources == {} and callable(env.replace)
    tensor = torch.empty(4, 4)
    torch._dynamo.mark_dynamic(tensor, 1)
    assert compat_dynamo.marked_dynamic(tensor) == [1]
    assert compat_dynamo.marked_dynamic(torch.empty(4)) == []


def test_guards_on_sizes_can_be_refused(monkeypatch):
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    accepts("torch.fx.experimental.symbolic_shapes:ShapeEnv._check_frozen", X, X, X)
    env = ShapeEnv()
    source = ConstantSource("x")
    symbol = env.create_symbol(16, source, DimDynamic.DYNAMIC, None)
    size = env.create_symintnode(symbol, hint=16, source=source)
    monkeypatch.setattr(compat, "shape_env", lambda: env)
    with compat.no_new_guards():
        assert size >= 0  # known, so nothing is guarded
        with pytest.raises(compat.SizeDecides):
            bool(size <= 20)
    assert env.guards == [] and size <= 20 and len(env.guards) == 1


def test_the_kind_of_wrapper_is_known_in_a_pass():
    from torch._inductor.virtualized import V

    assert not V.aot_compilation and not compat.ahead_of_time()
    with torch._inductor.config.patch(cpp_wrapper=True):
        assert compat.ahead_of_time()


def test_whose_random_numbers_are_wanted():
    assert not compat.draws_as_eager()
    with torch._inductor.config.patch(fallback_random=True):
        assert compat.draws_as_eager()


def test_the_store_of_a_job():
    accepts("torch.distributed.distributed_c10d:_get_default_store")
    assert compat_runtime.distributed_store() == (None, 0, 1)


def test_a_process_group_by_its_name():
    find("torch.distributed.distributed_c10d:_resolve_process_group")


def test_a_gather_into_one_tensor():
    single = hasattr(torch.distributed, "all_gather_single")
    name = "all_gather_single" if single else "all_gather_into_tensor"
    accepts(f"torch.distributed:{name}", "out", "mine", group="group")


def test_config_module():
    from inductor_ext import config

    accepts("torch.utils._config_module:install_config_module", types.ModuleType("m"))
    before = config.pdl
    with config.patch(pdl=not before):
        assert config.pdl is not before
    assert config.pdl is before


# --- branches -------------------------------------------------------------------------------------


def test_branches():
    accepts("torch._inductor.graph:GraphLowering.make_subgraph", X, X, [], "name")
    accepts("torch._inductor.graph:GraphLowering.codegen_subgraph", X, parent_graph=X)
    accepts("torch._inductor.ir:ExternKernel.require_exact_strides", X, [], allow_padding=False)
    accepts("torch._inductor.ir:ExternKernel.unwrap_storage_for_input", X)
    accepts("torch._inductor.ir:MultiOutputLayout", device=X)
    accepts("torch._inductor.ir:MultiOutput", X, X, [], skip_size_stride_alignment_checks=True)
    accepts("torch._inductor.ir:Subgraph", name="x", graph_module=X)
    lowering = inspect.getsource(find("torch._inductor.graph:GraphLowering"))
    for name in ("bw_donated_idxs", "unaligned_buffers", "removed_buffers", "constants"):
        assert f"self.{name}" in lowering, f"GraphLowering.{name} is gone"
    assert "_inductor_lowering_function" in lowering, "the graph no longer calls such targets"
    path = "torch._inductor.codegen.wrapper:"
    accepts(f"{path}EnterSubgraphLine", X, X)
    accepts(f"{path}ExitSubgraphLine", X)
    for name in ("writeline", "push_codegened_graph", "pop_codegened_graph", "codegen_sizevar"):
        find(f"{path}PythonWrapperCodegen.{name}")
    for name in ("codegen_device_guard_enter", "codegen_device_guard_exit"):
        find(f"{path}PythonWrapperCodegen.{name}")
    accepts("torch._inductor.codegen.cpp_wrapper_cpu:CppWrapperCpu.codegen_subgraph", X, X, [], [])
    find("torch._inductor.codegen.cpp_wrapper_gpu:DeferredTritonCallWrapper")
    find("torch._inductor.sizevars:SizeVarAllocator.remove_precomputed_replacements")


def test_structured_trace():
    is_a("torch._logging._internal:trace_log", logging.Logger)
    accepts(
        "torch._logging:trace_structured",
        "artifact",
        metadata_fn=X,
        payload_fn=X,
        expect_trace_id=False,
    )
    accepts("torch._inductor.graph:GraphLowering.codegen", X)
    compiling = inspect.getsource(importlib.import_module("torch._inductor.compile_fx"))
    lowering = inspect.getsource(find("torch._inductor.graph:GraphLowering"))
    assert "graph.codegen" in compiling, "code is no longer written by GraphLowering.codegen"
    assert "self.codegen()" in lowering, "the C++ wrapper no longer goes through codegen"


# --- the version gate -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.10.0", False),
        ("2.10.9+cu128", False),
        ("2.11.0+cu130", True),
        ("2.12.1", True),
        ("2.13.0+cpu", True),
        ("2.14.0a0+git1234567", True),
        ("2.15.3", True),
        ("2.16.0", False),
        ("2.16.0.dev20260901+cu130", False),
        ("3.0", False),
        ("3.12.0", False),
        ("1.13.1", False),
    ],
)
def test_supported_versions(version, expected):
    assert compat.supported(version) is expected


def test_this_torch_is_supported():
    assert compat.supported(torch.__version__)


def test_importing_on_another_torch_names_the_range(fresh: Callable[..., Any]):
    for version in ("2.10.1+cu128", "2.16.0"):
        done = fresh(f"import torch; torch.__version__ = {version!r}; import inductor_ext")
        assert done.status == 1
        last = done.output.splitlines()[-1]
        assert last == (
            f"ImportError: inductor_ext supports torch>=2.11,<2.16, got torch {version}; "
            "install a supported torch or remove the import"
        )
