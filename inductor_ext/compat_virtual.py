"""The test kit's half of ``compat.py``: a CUDA card that is not there.

Every name of ``torch._inductor``, ``torch._dynamo``, ``torch._subclasses`` and ``triton.runtime``
that ``inductor_ext.testing`` needs and that is not public is touched here and nowhere else. Each
access goes through :class:`Patches`, which names the attribute that a torch release moved.

How the card is made to seem there:

* Questions about the device (``torch.cuda.*``, Dynamo's ``CudaInterface``, Triton's active driver)
  are answered from the card's data sheet.
* Tensors of the card are FakeTensors: sizes, strides and a device, no data. In C++ autograd asks a
  tensor for its device to find a stream and a worker thread, which a torch without CUDA aborts on.
  So C++ (and only C++) is told "meta", which autograd runs in the calling thread; Python is told
  "cuda:0". Factory calls that C++ makes with such a tensor's options arrive as "meta" and are put
  back on the card. The same is done where a real card is present, so that the result is the same.
* ``GraphLowering.compile_to_module`` hands over the generated code in place of loading it.
* What would have to run a kernel (autotuning, padding benchmarks) is decided by name.

The patches are process-global, since the backward may be compiled in another thread. They are
undone in reverse order when the context ends, exception or not.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from inductor_ext.testing.cards import Card

_CARD = torch.device("cuda", 0)
_META = torch.device("meta")
_LOCK = threading.Lock()
_active: Card | None = None


def active_card() -> Card | None:
    """The card of the ``virtual_card`` context that is open in this process, if any.

    While one is open no kernel can run: code that wants to benchmark asks here first.
    """
    return _active


class MovedName(RuntimeError):
    """A private name of torch or triton is not where this version of the test kit expects it."""


def private(path: str) -> Any:
    """The object at ``package.module:attribute[.attribute]``; MovedName says which part is gone."""
    module, _, attributes = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in attributes.split(".") if attributes else ():
            found = getattr(found, name)
    except (ImportError, AttributeError) as e:
        raise MovedName(
            f"inductor_ext.testing expected {path} in torch {torch.__version__}, got: {e}"
        ) from e
    return found


_MISSING = object()


class Patches(contextlib.ExitStack):
    """An ExitStack of attribute changes that refuses to create what should already be there."""

    def set(self, owner: Any, name: str, value: Any, create: bool = False) -> Any:
        """Set ``owner.name`` until the stack closes; returns what was there."""
        own = vars(owner).get(name, _MISSING) if hasattr(owner, "__dict__") else _MISSING
        before = getattr(owner, name, _MISSING)
        if before is _MISSING and not create:
            raise MovedName(
                f"inductor_ext.testing expected {getattr(owner, '__name__', owner)}.{name} in torch "
                f"{torch.__version__}, got no such name"
            )
        if own is _MISSING and before is not _MISSING and not isinstance(owner, type):
            own = before  # a slot or a module-level __getattr__
        setattr(owner, name, value)
        self.callback(
            delattr if own is _MISSING else setattr, owner, name, *([] if own is _MISSING else [own])
        )
        return before

    def set_if_there(self, owner: Any, name: str, value: Any) -> None:
        """As ``set`` for a name that only some of the supported versions have."""
        if hasattr(owner, name):
            self.set(owner, name, value)

    def fresh_dict(self, owner: dict, **entries: Any) -> None:
        """Replace the contents of ``owner`` by ``entries`` until the stack closes."""
        before = dict(owner)

        def restore() -> None:
            owner.clear()
            owner.update(before)

        self.callback(restore)
        owner.clear()
        owner.update(entries)


# ---------------------------------------------------------------------------------------------------
# the device


class _Stream:
    """Stands in for a CUDA stream; nothing is ever launched on it."""

    device = _CARD
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
    "torch._inductor.fx_passes.fuse_attention:_warn_tf32_disabled",
    "torch._inductor.compile_fx:_warn_tf32_disabled",
)


def _forget_device() -> None:
    """Drop every cached answer about the card. Names that a version lacks have nothing to drop."""
    for path in _DEVICE_CACHES:
        with contextlib.suppress(MovedName):
            clear = getattr(private(path), "cache_clear", None)
            if clear is not None:
                clear()


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
            return _CARD

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


# ---------------------------------------------------------------------------------------------------
# tensors of the card


def _patch_fake_tensors(patches: Patches) -> None:
    fake_tensor = private("torch._subclasses.fake_tensor")
    fake_cls = private("torch._subclasses.fake_tensor:FakeTensor")
    fake_mode = private("torch._subclasses.fake_tensor:FakeTensorMode")
    functional = private("torch._subclasses.functional_tensor:FunctionalTensor")
    functional_mode = private("torch._subclasses.functional_tensor:FunctionalTensorMode")
    device_query = torch.ops.prim.device.default

    def told_to_cpp(fake: Any) -> torch.device:
        if fake.fake_mode.in_kernel_invocation or fake.fake_device.type == "cuda":
            return _META
        return fake.fake_device

    handlers = private("torch._subclasses.fake_tensor:_DISPATCH_META_HANDLERS")
    if device_query not in handlers:
        raise MovedName(
            f"inductor_ext.testing expected {fake_tensor.__name__}._DISPATCH_META_HANDLERS to answer "
            f"prim.device in torch {torch.__version__}, got no such entry"
        )
    before = handlers[device_query]
    patches.callback(handlers.__setitem__, device_query, before)
    handlers[device_query] = lambda args: told_to_cpp(args[0])

    dispatch = vars(fake_cls)["__torch_dispatch__"].__func__

    def fake_dispatch(
        cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is device_query:
            return told_to_cpp(args[0])
        return dispatch(cls, func, types, args, kwargs or {})

    patches.set(fake_cls, "__torch_dispatch__", classmethod(fake_dispatch))

    def functional_device(self: Any) -> torch.device:
        return torch._from_functional_tensor(self.elem).device

    patches.set(functional, "device", property(functional_device))
    # The other attributes that Python reads through C++.
    for cls in (fake_cls, functional):
        for kind in ("cpu", "cuda", "meta", "xpu", "mps"):
            patches.set(cls, f"is_{kind}", property(_device_is(kind)))
        patches.set(cls, "get_device", _get_device)

    for mode in (fake_mode, functional_mode):
        patches.set(mode, "__torch_dispatch__", _factories_on_card(mode.__torch_dispatch__))


def _device_is(kind: str) -> Callable[[torch.Tensor], bool]:
    return lambda tensor: tensor.device.type == kind


def _get_device(tensor: torch.Tensor) -> int:
    return -1 if tensor.device.type in ("cpu", "meta") else tensor.device.index or 0


def _factories_on_card(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """A mode's dispatch that puts factory calls from C++, which carry "meta", on the card."""

    @functools.wraps(dispatch)
    def on_card(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and kwargs.get("device") == _META:
            kwargs = {**kwargs, "device": _CARD}
        return dispatch(self, func, types, args, kwargs or {})

    return on_card


class CardTensors:
    """Makes the FakeTensors of one virtual card and remembers what each stands for."""

    def __init__(self) -> None:
        self.mode = private("torch._subclasses.fake_tensor:FakeTensorMode")(
            allow_non_fake_inputs=True
        )
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._storages: dict[int, Any] = {}

    def __call__(self, real: torch.Tensor) -> torch.Tensor:
        """``real``'s dtype, sizes, strides, offset, aliasing and requires_grad, on the card.

        A tensor whose shape a FakeTensor cannot take over (sparse, nested, a subclass) is refused.
        """
        if id(real) in self._made:
            return self._made[id(real)][1]
        no_dispatch = private("torch.utils._mode_utils:no_dispatch")
        fake_cls = private("torch._subclasses.fake_tensor:FakeTensor")
        storage = real.untyped_storage()
        with no_dispatch():
            if storage._cdata not in self._storages:
                self._storages[storage._cdata] = torch.UntypedStorage(
                    storage.nbytes(), device="meta"
                )
            meta = torch.empty(0, dtype=real.dtype, device="meta").set_(
                self._storages[storage._cdata], real.storage_offset(), real.shape, real.stride()
            )
            fake = fake_cls(self.mode, meta, _CARD)
        fake.requires_grad_(real.requires_grad)
        if isinstance(real, torch.nn.Parameter):
            fake._is_param = True
        for name, value in vars(real).items():
            if name.startswith(("_dynamo_", "_specialize_on")):
                setattr(fake, name, value)
        self._made[id(real)] = (real, fake)
        return fake


# ---------------------------------------------------------------------------------------------------
# the compiler


def _patch_inductor(
    patches: Patches, choose: Callable[[str, list[Any]], Any], on_code: Callable[..., Any]
) -> None:
    lowering = private("torch._inductor.graph:GraphLowering")

    def compile_to_module(graph: Any) -> Any:
        if graph.cpp_wrapper:
            raise ValueError("compile_for expected the Python wrapper, got cpp_wrapper=True")
        wrapper_code, _ = graph.codegen()
        return _Module(on_code(graph, getattr(wrapper_code, "value", wrapper_code)))

    patches.set(lowering, "compile_to_module", compile_to_module)

    compiled = private("torch._inductor.output_code:CompiledFxGraph")
    report_strides = private("torch._inductor.output_code:set_tracing_context_output_strides")

    def post_compile(self: Any, example_inputs: Any, *args: Any, **kwargs: Any) -> None:
        # No CUDA graphs and no realigning of inputs: there is nothing to capture or to copy.
        report_strides(example_inputs, self)

    patches.set(compiled, "post_compile", post_compile)

    # The patterns are traced with tensors of the machine, before the card is there.
    for module in ("joint_graph", "post_grad"):
        patches.set(
            private(f"torch._inductor.fx_passes.{module}"), "lazy_init", lambda *a, **k: None
        )

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
    # Padding a matmul is decided by timing it; unpadded is what the same code does when told to be
    # deterministic.
    patches.set(private("torch._inductor.fx_passes.pad_mm"), "_should_pad", lambda *a, **k: False)
    benchmarker = private("torch._inductor.runtime.benchmarking:Benchmarker")
    for name in ("benchmark", "benchmark_gpu", "benchmark_many_gpu"):
        patches.set_if_there(benchmarker, name, _no_benchmark)


class _Module:
    """What Inductor sees of the module it believes was loaded."""

    __file__ = "<virtual card>"

    def __init__(self, call: Callable[[list[Any]], Any]) -> None:
        self.call = call


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
    hints = graph.sizevars.shape_env.backed_var_to_val if hasattr(
        graph.sizevars.shape_env, "backed_var_to_val"
    ) else graph.sizevars.shape_env.var_to_val
    return int(substituted.subs(hints) if hasattr(substituted, "subs") else substituted)


@functools.cache
def _trace_patterns() -> None:
    """Trace Inductor's patterns once, with the devices this machine really has."""
    private("torch._inductor.fx_passes.joint_graph:lazy_init")()
    private("torch._inductor.fx_passes.post_grad:lazy_init")()


@contextlib.contextmanager
def virtual_card(
    card: Card,
    choose: Callable[[str, list[Any]], Any],
    on_code: Callable[..., Any],
    options: dict[str, Any],
) -> Iterator[CardTensors]:
    """Everything in this process believes that ``card`` is device cuda:0, until the context ends.

    ``choose(name, choices)`` answers each autotuning question; ``on_code(graph, code)`` is given
    every generated program with its GraphLowering and returns the callable to use in its place.
    One context may be open at a time: a second thread waits.
    """
    global _active
    inductor = private("torch._inductor.config")
    functorch = private("torch._functorch.config")
    with _LOCK, Patches() as patches:
        _trace_patterns()
        environment = dict(os.environ)
        patches.callback(_restore_environment, environment)
        torch._dynamo.reset()
        patches.callback(torch._dynamo.reset)
        patches.enter_context(
            inductor.patch(
                {
                    "fx_graph_cache": False,
                    "fx_graph_remote_cache": False,
                    "compile_threads": 1,
                    "benchmark_epilogue_fusion": False,
                    **options,
                }
            )
        )
        patches.enter_context(functorch.patch({"enable_autograd_cache": False}))
        _forget_device()
        patches.callback(_forget_device)
        _patch_torch_cuda(patches, card)
        _patch_triton_driver(patches, card)
        _patch_fake_tensors(patches)
        _patch_inductor(patches, choose, on_code)
        patches.callback(_set_active, _active)
        _active = card
        yield CardTensors()


def _set_active(card: Card | None) -> None:
    global _active
    _active = card


def _restore_environment(before: dict[str, str]) -> None:
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
