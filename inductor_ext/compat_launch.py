"""Launches with programmatic dependent launch, without a C compiler.

Inductor's static launcher sets no launch attributes, so a kernel with programmatic dependent launch
goes through Triton's launcher, which up to triton 3.6 the C compiler builds for every signature and
cache directory, longer than the kernel itself takes. Here the driver is called through ctypes
instead: nothing is built, and a launch costs the host less. Newer Tritons build none, and nothing
here acts. The structures are those of cuda.h (a test compares them).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

PROGRAMMATIC_STREAM_SERIALIZATION = 6  # of CUlaunchAttributeID


class _Value(ctypes.Union):
    _fields_ = [("pad", ctypes.c_char * 64), ("on", ctypes.c_int)]


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_char * 4), ("value", _Value)]


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("x", "y", "z", "block_x", "block_y", "block_z")),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


_NUMBERS = {
    "i1": ctypes.c_int8,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
}


@functools.cache
def _driver() -> Any:
    """The driver's cuLaunchKernelEx(config, function, parameters, extra) and cuGetErrorString."""
    library = ctypes.CDLL("libcuda.so.1")  # the interpreter's lock is free during a call
    library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return library


def _raise(status: int) -> None:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(text))
    said = (text.value or b"unknown").decode()
    raise RuntimeError(f"Triton Error [CUDA]: {said}")  # as Triton's own launcher says it


_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


def _bind_context() -> None:
    """Make the current device's context this thread's, as Triton's own launcher does."""
    import torch

    context = ctypes.c_void_p()
    for status in (
        _driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), torch.cuda.current_device()),
        _driver().cuCtxSetCurrent(context),
    ):
        if status:
            _raise(status)


def _too_wide(name: str, kind: str, value: int) -> None:
    raise OverflowError(f"{name} of a kernel is expected as {kind}, got {value}")


def _stored(name: str, kind: str) -> str:
    """A line that stores an argument."""
    if kind[0] == "*":
        return f"values.{name} = {name} if type({name}) is int else {name}.data_ptr()"
    if kind == "i32":  # the kind that sizes have
        fits = f"-0x80000000 <= {name} <= 0x7fffffff"
        return f"values.{name} = {name} if {fits} else wide({name!r}, {kind!r}, {name})"
    return f"values.{name} = {name}"


def _is_ours(name: str, module: str) -> bool:
    """Whether a kernel is a template in a compiled graph, or one of the package's own."""
    return name.startswith("triton_tem_") or module.startswith("inductor_ext.")


def dependent_launch(src: Any, metadata: Any) -> Callable[..., None] | None:
    """What launches a kernel of the package with programmatic dependent launch; None: Triton's.

    ``src`` and ``metadata`` are what Triton makes a launcher of, and the result is called as that
    is: tensors or their addresses. Any thread may call it, also while it is under way in the same
    thread (a finaliser): each call has memory of its own. OverflowError for a number that is not of
    the signature's width.
    """
    types = list(src.signature.values())
    plain = metadata.launch_pdl and metadata.num_ctas == 1 and not metadata.launch_cooperative_grid
    scratch = metadata.global_scratch_size or metadata.profile_scratch_size
    known = all(isinstance(t, str) and (t[0] == "*" or t in _known()) for t in types)
    if not plain or scratch or not known:
        return None
    if not _is_ours(metadata.name, getattr(src.fn, "module", "")):
        return None

    names = [f"arg{i}" for i in range(len(types))]
    passed = [(n, t) for n, t in zip(names, types, strict=True) if t != "constexpr"]
    fields = [(n, ctypes.c_void_p if t[0] == "*" else _NUMBERS[t]) for n, t in passed]
    fields += [("global_scratch", ctypes.c_void_p), ("profile_scratch", ctypes.c_void_p)]
    arguments = type("Arguments", (ctypes.Structure,), {"_fields_": fields})
    offsets = [getattr(arguments, name).offset for name, _ in fields]
    pdl = Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, value=_Value(on=1))
    threads, shared = 32 * metadata.num_warps, metadata.shared

    def memory() -> tuple[Any, ...]:
        values = arguments()
        first = ctypes.addressof(values)
        parameters = (ctypes.c_void_p * len(fields))(*[first + offset for offset in offsets])
        config = Config(0, 0, 0, threads, 1, 1, shared, None, ctypes.pointer(pdl), 1)
        addresses = [ctypes.c_void_p(ctypes.addressof(x)) for x in (config, parameters)]
        return values, config, *addresses, parameters

    scope = {
        "free": [], "memory": memory, "launch": _driver().cuLaunchKernelEx, "fail": _raise,
        "bind": _bind_context, "wide": _too_wide,
    }  # fmt: skip
    store = "; ".join(_stored(n, t) for n, t in passed)
    # Written out, because a loop over the arguments would double what a launch costs the host.
    names_of = ", ".join(names)
    exec(_LAUNCHER.format(names=names_of, store=store or "pass", no_context=_NO_CONTEXT), scope)
    launcher: Callable[..., None] = scope["run"]
    return launcher


_LAUNCHER = """
def run(x, y, z, stream, function, packed, metadata, on_enter, on_exit, {names}):
    if x * y * z <= 0:
        return
    if on_enter is not None:
        on_enter(metadata)
    try:
        mine = free.pop()
    except IndexError:
        mine = memory()
    values, config, config_at, parameters_at, _ = mine
    {store}
    config.x = x; config.y = y; config.z = z; config.stream = stream
    status = launch(config_at, function, parameters_at, None)
    if status == {no_context}:  # a thread's first word to the card
        bind()
        status = launch(config_at, function, parameters_at, None)
    free.append(mine)
    if status:
        fail(status)
    if on_exit is not None:
        on_exit(metadata)
"""


@functools.cache
def _known() -> frozenset[str]:
    return frozenset((*_NUMBERS, "constexpr"))


def install() -> None:
    """Let Triton's driver ask ``dependent_launch`` first, where its launchers would be built."""
    import triton

    try:
        from triton.backends.nvidia import driver
    except ImportError:  # a Triton for other makers' cards
        return
    if getattr(driver, "make_launcher", None) is None:
        return
    stock = driver.CudaLauncher

    class Launcher(stock):  # type: ignore[misc, valid-type]
        """Triton's launcher, or a function that launches."""

        def __new__(cls, src: Any, metadata: Any) -> Any:
            return dependent_launch(src, metadata) or super().__new__(cls)

    driver.CudaLauncher = Launcher
    active = triton.runtime.driver._active  # None: no kernel has run yet; or somebody's own
    if getattr(active, "launcher_cls", None) is stock:
        active.launcher_cls = Launcher


def direct_launches() -> Any:
    """A context in which ``wrap_triton(kernel)`` is the kernel: for code that sees no tracing.

    Outside it each launch goes through a higher-order operation, which costs the host 1 ms.
    """
    from torch._library.triton import set_wrap_triton_enabled

    return set_wrap_triton_enabled(False)
