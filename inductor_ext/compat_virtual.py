"""The test kit's half of ``compat.py``: a CUDA card that is not there.

Every name of ``torch._inductor``, ``torch._dynamo``, ``torch._subclasses`` and ``triton.runtime``
that ``inductor_ext.testing`` needs and that is not public is reached through ``private`` and
changed through ``Patches`` (``compat_patches``), which name what a torch release moved.

How the card is made to seem there:

* Questions about the device (``torch.cuda.*``, Dynamo's ``CudaInterface``, Triton's active driver)
  are answered from the card's data sheet.
* Tensors of the card have no data (``testing/cardtensors.py``).
* ``GraphLowering.compile_to_module`` hands over the generated code in place of loading it.
* What would have to run a kernel (autotuning, padding benchmarks) is decided by name.

The patches are process-global, since the backward may be compiled in another thread. They are
undone in reverse order when the context ends, exception or not.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from inductor_ext import active_plan
from inductor_ext.compat_patches import MovedName, Patches, private
from inductor_ext.compat_virtual_cpp import cpp_of, patch_cpp_wrapper
from inductor_ext.testing.cards import Card

CARD_DEVICE = torch.device("cuda", 0)
_LOCK = threading.Lock()
_active: Card | None = None
_owner: int | None = None  # the thread that opened it


def active_card() -> Card | None:
    """The card of the ``virtual_card`` context that is open in this process, if any.

    While one is open no kernel can run: code that wants to benchmark asks here first.
    """
    return _active


# ----------------------------------------------------------------------------------------
# the device


class _Stream:
    """Stands in for a CUDA stream; nothing is ever launched on it."""

    device = CARD_DEVICE
    device_index = 0
    device_type = 1
    stream_id = 0
    cuda_stream = 0

    def wait_stream(self, other: Any) -> None: ...
    def synchronize(self) -> None: ...


def _patch_torch_cuda(patches: Patches, card: Card) -> None:
    cuda = torch.cuda
    stream = _Stream()
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_properties": lambda device=None: card,
        "get_device_capability": lambda device=None: (card.major, card.minor),
        "get_device_name": lambda device=None: card.name,
        "is_bf16_supported": lambda including_emulation=True: card.major >= 8,
        "is_tf32_supported": lambda: card.major >= 8,
        "mem_get_info": lambda device=None: (card.total_memory, card.total_memory),
        "memory_allocated": lambda device=None: 0,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "synchronize": lambda device=None: None,
        "is_current_stream_capturing": lambda: False,
        "can_device_access_peer": lambda a, b: False,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
        "_lazy_init": lambda: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
    }
    for name, value in answers.items():
        patches.set(cuda, name, value)
    if torch.version.cuda is None:
        patches.set(torch.version, "cuda", "12.8")
    # Names that a torch without CUDA lacks and generated code or Inductor ask for.
    patches.set(torch._C, "_cuda_cudaCachingAllocator_is_enabled", lambda: True, create=True)
    patches.set(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, create=True)

    interface = private("torch._dynamo.device_interface:CudaInterface")
    for name in (
        "current_device",
        "set_device",
        "device_count",
        "current_stream",
        "synchronize",
        "get_device_properties",
        "memory_allocated",
        "is_bf16_supported",
        "is_available",
    ):
        patches.set_if_there(interface, name, staticmethod(answers[name]))
    patches.set(interface, "get_raw_stream", staticmethod(lambda index: 0))
    patches.set(interface, "exchange_device", staticmethod(lambda device: 0))
    patches.set(interface, "maybe_exchange_device", staticmethod(lambda device: 0))
    registered = private("torch._dynamo.device_interface:get_interface_for_device")
    registered("cpu")  # fills the table before it is copied
    table = private("torch._dynamo.device_interface:device_interfaces")
    patches.fresh_dict(table, **{**table, "cuda": interface, "cuda:0": interface})
    patches.fresh_dict(
        private("torch._dynamo.device_interface:caching_worker_device_properties"), cuda=[card]
    )
    patches.fresh_dict(
        private("torch._dynamo.device_interface:caching_worker_current_devices"), cuda=0
    )


# Answers about the card that torch keeps for the life of the process.
_DEVICE_CACHES = (
    "torch.utils._triton:_device_supports_tma",
    "torch.utils._triton:has_triton_experimental_host_tma",
    "torch.utils._triton:has_triton_tensor_descriptor_host_tma",
    "torch.utils._triton:has_triton_tma",
    "torch.utils._triton:has_triton_tma_device",
    "torch.utils._triton:has_datacenter_blackwell_tma_device",
    "torch.utils._triton:has_triton_stable_tma_api",
    "torch.utils._triton:has_triton",
    "torch.utils._triton:triton_backend",
    "torch.utils._triton:triton_hash_with_backend",
    "torch._inductor.utils:get_gpu_type",
    "torch._inductor.utils:is_big_gpu",
    "torch._inductor.utils:get_max_num_sms",
    "torch._inductor.utils:using_b200",
    "torch._inductor.utils:use_decompose_k_choice",
    "torch._inductor.utils:use_contiguous",
    "torch._inductor.utils:get_k_splits",
    "torch._inductor.utils:get_backend_num_stages",
    "torch._inductor.utils:get_device_tflops",
    "torch._inductor.utils:get_gpu_dram_gbps",
    "torch._inductor.utils:_triton_supported_fp8_dtypes",
    "torch._inductor.kernel.mm:_is_sm7x_or_older_gpu",
    "torch._inductor.runtime.hints:DeviceProperties.create",
    "torch._inductor.codecache:CacheBase.get_system",
    "torch._inductor.codegen.cuda.cuda_env:get_cuda_arch",
    "torch._inductor.codegen.cuda.cuda_env:is_datacenter_blackwell_arch",
    "torch._inductor.codegen.triton:gen_attr_descriptor_import",
    "torch._inductor.codegen.triton:TritonScheduling.gen_common_triton_imports",
    "torch._inductor.codegen.triton:TritonKernel.gen_common_triton_imports",
)


def _forget_device() -> None:
    """Drop every cached answer about the card. Names that a version lacks have nothing to drop."""
    for path in _DEVICE_CACHES:
        with contextlib.suppress(MovedName):
            clear = getattr(private(path), "cache_clear", None)
            if clear is not None:
                clear()
    active_plan.forget()


def _patch_triton_driver(patches: Patches, card: Card) -> None:
    from triton.backends.compiler import GPUTarget

    base = private("triton.backends.driver:GPUDriver")

    class VirtualDriver(base):  # type: ignore[misc, valid-type]
        """Knows the target; cannot load or launch."""

        def __init__(self) -> None:
            pass

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", card.capability, card.warp_size)

        def get_current_device(self) -> int:
            return 0

        def set_current_device(self, device: int) -> None:
            pass

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

        def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
            return card.major, card.minor

        def get_active_torch_device(self) -> torch.device:
            return CARD_DEVICE

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return private("triton.backends.nvidia.driver:ty_to_cpp")(ty)

        def get_benchmarker(self) -> Any:
            return _no_benchmark

        def get_empty_cache_for_benchmark(self) -> Any:
            _no_benchmark()

    driver = VirtualDriver()
    config = private("triton.runtime:driver")
    patches.set(config, "_active", driver)
    patches.set(config, "_default", driver)


def _no_benchmark(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "inductor_ext.testing expected no benchmark under a virtual card, got a request to time a "
        "kernel: no kernel can run here"
    )


# ----------------------------------------------------------------------------------------
# the compiler


def _patch_inductor(
    patches: Patches, choose: Callable[[str, list[Any]], Any], on_code: Callable[..., Any]
) -> None:
    lowering = private("torch._inductor.graph:GraphLowering")

    def compile_to_module(graph: Any) -> Any:
        if graph.cpp_wrapper:
            wrapper_code, _ = graph.codegen_with_cpp_wrapper()
            return _Module(on_code(graph, cpp_of(wrapper_code.value)))
        wrapper_code, _ = graph.codegen()
        return _Module(on_code(graph, getattr(wrapper_code, "value", wrapper_code)))

    patches.set(lowering, "compile_to_module", compile_to_module)
    # A constant that a kernel needs on the card stays on the host, where it has data.
    patches.set(lowering, "constant_name", lambda graph, name, device: name)

    compiled = private("torch._inductor.output_code:CompiledFxGraph")
    report_strides = private("torch._inductor.output_code:set_tracing_context_output_strides")

    def post_compile(self: Any, example_inputs: Any, *args: Any, **kwargs: Any) -> None:
        # No CUDA graphs and no realigning of inputs: there is nothing to capture or to copy.
        report_strides(example_inputs, self)

    patches.set(compiled, "post_compile", post_compile)

    selector = private("torch._inductor.select_algorithm:AlgorithmSelectorCache")

    def do_autotuning(
        self: Any,
        name: str,
        input_nodes: Any,
        layout: Any,
        input_gen_fns: Any,
        inputs_key: Any,
        choices: list[Any],
        *args: Any,
        **kwargs: Any,
    ) -> dict[Any, float]:
        chosen = choose(name, choices)
        return {choice: 1.0 if choice is chosen else 2.0 for choice in choices}

    patches.set(selector, "do_autotuning", do_autotuning)
    patches.set(selector, "make_precompile_fn", lambda *a, **k: lambda *a, **k: {})
    # The warnings about TF32 concern a card the user does not have.
    for module in ("fx_passes.fuse_attention", "compile_fx"):
        patches.set_if_there(
            private(f"torch._inductor.{module}"), "_warn_tf32_disabled", lambda: None
        )
    # Constants are folded with real tensors, which can only be on the host.
    for path in (
        "constant_folding:ConstantFolder",
        "fx_passes.joint_graph:UniformValueConstantFolder",
    ):
        folder = private(f"torch._inductor.{path}")
        for name in ("_deduce_value", "_add_peephole_patterns"):
            if name in vars(folder):
                patches.set(folder, name, _on_host(vars(folder)[name]))
    # Candidate names carry a running number: start it anew, so that they are the same every time.
    for path in ("select_algorithm:TritonTemplate", "codegen.subgraph:SubgraphTemplate"):
        patches.set(private(f"torch._inductor.{path}"), "index_counter", itertools.count())
    # Padding a matmul is decided by timing it; unpadded is what the same code does when told to be
    # deterministic.
    patches.set(private("torch._inductor.fx_passes.pad_mm"), "_should_pad", lambda *a, **k: False)
    benchmarker = private("torch._inductor.runtime.benchmarking:Benchmarker")
    family = [benchmarker]
    for cls in family:
        family += cls.__subclasses__()
        for name in ("benchmark", "benchmark_gpu", "benchmark_many_gpu"):
            if name in vars(cls):
                patches.set(cls, name, _no_benchmark)


def _patch_gradient_copies(
    patches: Patches, on_copy: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    runtime = private("torch._functorch._aot_autograd.runtime_wrappers")
    coerce = private(f"{runtime.__name__}:coerce_to_expected_memory_format")

    def coerce_and_tell(gradient: torch.Tensor, memory_format: Any) -> torch.Tensor:
        coerced = coerce(gradient, memory_format)
        if coerced is not gradient:
            on_copy(gradient, coerced)
        return coerced

    patches.set(runtime, "coerce_to_expected_memory_format", coerce_and_tell)


class OnHost(torch.utils._python_dispatch.TorchDispatchMode):
    """Operators asked for a tensor on the card make it on the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(kwargs.get("device"), "type", None) == "cuda":
            kwargs = {**kwargs, "device": torch.device("cpu")}
        args = tuple(
            torch.device("cpu") if isinstance(a, torch.device) and a.type == "cuda" else a
            for a in args
        )
        return func(*args, **kwargs)


def _on_host(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def on_host(*args: Any, **kwargs: Any) -> Any:
        with OnHost():
            return method(*args, **kwargs)

    return on_host


class _Module:
    """What Inductor sees of the module it believes was loaded."""

    __file__ = "<virtual card>"

    def __init__(self, call: Callable[[list[Any]], Any]) -> None:
        self.call = call


def needs_data() -> tuple[type[Exception], ...]:
    """What FakeTensors raise where a program depends on the values in a tensor."""
    names = ("DynamicOutputShapeException", "DataDependentOutputException")
    return tuple(private(f"torch._subclasses.fake_tensor:{name}") for name in names)


def output_strides(graph: Any) -> list[tuple[int, ...] | None]:
    """Strides of a GraphLowering's outputs at the sizes it was traced with; None where unknown."""
    strides: list[tuple[int, ...] | None] = []
    for out in graph.graph_outputs:
        try:
            strides.append(tuple(int(_hint(graph, s)) for s in out.get_stride()))
        except Exception:  # not a tensor, or a size only known at run time
            strides.append(None)
    return strides


def _hint(graph: Any, expr: Any) -> int:
    substituted = graph.sizevars.shape_env.replace(expr)
    hints = (
        graph.sizevars.shape_env.backed_var_to_val
        if hasattr(graph.sizevars.shape_env, "backed_var_to_val")
        else graph.sizevars.shape_env.var_to_val
    )
    return int(substituted.subs(hints) if hasattr(substituted, "subs") else substituted)


@contextlib.contextmanager
def virtual_device(card: Card) -> Iterator[Patches]:
    """Every question about the CUDA device is answered for ``card`` until the context ends.

    One context may be open at a time: another thread waits, the same thread gets RuntimeError.
    """
    global _active, _owner
    if _owner == threading.get_ident():
        raise RuntimeError(
            "inductor_ext.testing expected no open virtual card, got one inside another"
        )
    with _LOCK, Patches() as patches:
        patches.callback(_restore_environment, dict(os.environ))
        _forget_device()
        patches.callback(_forget_device)
        _patch_torch_cuda(patches, card)
        _patch_triton_driver(patches, card)
        # Generated kernels ask for the GPU driver, which is the one that was just set.
        helpers = private("torch._inductor.runtime.triton_helpers")
        patches.set(helpers, "set_driver_to_gpu", lambda: None)
        _active, _owner = card, threading.get_ident()
        try:
            yield patches
        finally:
            _active = _owner = None


@contextlib.contextmanager
def virtual_card(
    card: Card,
    choose: Callable[[str, list[Any]], Any],
    on_code: Callable[..., Any],
    on_copy: Callable[[torch.Tensor, torch.Tensor], None],
    on_package: Callable[[str, list[str]], str] | None = None,
) -> Iterator[Any]:
    """``virtual_device``, and the compiler generates code for it instead of running it.

    ``choose(name, choices)`` answers each autotuning question; ``on_code(graph, code)`` is given
    every generated program with its GraphLowering and returns the callable to use in its place;
    ``on_copy(gradient, copy)`` is told of each gradient that is copied into the memory format that
    the backward was generated for; ``on_package(cpp, kernel_files)`` is given AOTInductor's
    program. Yields a ``CardTensors``.
    """
    from inductor_ext.testing.autocast import patch_autocast
    from inductor_ext.testing.cardtensors import CardTensors, patch_fake_tensors
    from inductor_ext.testing.sdpa import patch_attention

    inductor = private("torch._inductor.config")
    functorch = private("torch._functorch.config")
    with virtual_device(card) as patches:
        torch._dynamo.reset()
        patches.callback(torch._dynamo.reset)
        patches.enter_context(
            inductor.patch(
                fx_graph_cache=False,
                fx_graph_remote_cache=False,
                compile_threads=1,
                **{_fusion_benchmark(inductor): False},
            )
        )
        patches.enter_context(functorch.patch(enable_autograd_cache=False))
        patch_fake_tensors(patches)
        patch_attention(patches)
        patch_autocast(patches)
        _patch_inductor(patches, choose, on_code)
        patch_cpp_wrapper(patches, on_package)
        _patch_gradient_copies(patches, on_copy)
        yield CardTensors()


def _fusion_benchmark(inductor: Any) -> str:
    """The option that times a template with and without its epilogue, by its current name."""
    names = ("benchmark_template_fusion", "benchmark_epilogue_fusion")
    return next(name for name in names if hasattr(inductor, name))


def _restore_environment(before: dict[str, str]) -> None:
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


# ----------------------------------------------------------------------------------------
# generated kernels


def load_kernel(source: str, purpose: str = "") -> Any:
    """The CachingAutotuner that a generated kernel module defines, not compiled. Under a card.

    Modules are kept by source and ``purpose``: a kernel made for interpretation does not compile.
    """
    module = private("torch._inductor.codecache:PyCodeCache").load(source, extra=purpose)
    autotuner = private("torch._inductor.runtime.triton_heuristics:CachingAutotuner")
    found = [value for value in vars(module).values() if isinstance(value, autotuner)]
    if len(found) != 1:
        raise MovedName(
            "inductor_ext.testing expected a generated kernel module to define one "
            f"CachingAutotuner in torch {torch.__version__}, got {len(found)}"
        )
    return found[0]


def compile_kernel(autotuner: Any, config: Any) -> Any:
    """Triton's CompiledKernel of one launch configuration, not loaded. Under a card."""
    with private("torch._inductor.config").patch(use_static_cuda_launcher=False):
        return autotuner._precompile_config(config).kernel


def kernel_grid(autotuner: Any, config: Any, values: dict[str, Any]) -> tuple[int, int, int]:
    """The launch grid for these argument values."""
    grid = private("torch._inductor.runtime.triton_heuristics:GridExpr")
    return grid.from_meta(autotuner.inductor_meta, config).eval_slow(values)
