"""Launches of compiled Triton kernels that are done again, with other addresses."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from inductor_ext import compat


def is_watched() -> bool:
    """Whether somebody follows operations or launches: a mode of torch's, a hook of Triton's."""
    if torch._C._len_torch_dispatch_stack():
        return True
    enter, leave = _launch_hooks()
    return bool(enter or leave)


@functools.cache
def _knobs() -> Any:
    from triton import knobs

    return knobs.runtime


def _launch_hooks() -> tuple[Any, Any]:
    """What Triton calls around each launch: a chain of functions in the versions that have one."""
    found = _knobs().launch_enter_hook, _knobs().launch_exit_hook
    return tuple(getattr(h, "calls", h) for h in found)


_watching = threading.Lock()


@contextlib.contextmanager
def watched(tape: Any) -> Iterator[Callable[[], int] | None]:
    """Within, ``tape.launch`` is called for each launch of a kernel of Triton's in this thread that
    is not below an operation (``tape.below``). Yields how many there were; None where another
    thread is watched or Triton's hooks can't be added to."""
    from triton.runtime.jit import JITFunction

    chain = _knobs().launch_enter_hook
    # None or a function of a user's own in the place of Triton's chain can't be added to.
    if not hasattr(chain, "add") or not _watching.acquire(blocking=False):
        yield None
        return
    seen: list[None] = []
    here = threading.get_ident()
    before = JITFunction.run

    def counted(_: Any) -> None:
        if threading.get_ident() == here and not tape.below:
            seen.append(None)

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        def launch() -> Any:
            return before(kernel, *args, grid=grid, warmup=warmup, **kwargs)

        if warmup or threading.get_ident() != here or tape.below:
            return launch()
        return tape.launch(launch, kernel, grid, args, kwargs)

    try:
        JITFunction.run = run
        chain.add(counted)
        yield lambda: len(seen)
    finally:
        JITFunction.run = before
        _watching.release()
        chain.remove(counted)


def call_directly(name: str, run: Callable[..., Any]) -> None:
    """Let programs that Inductor writes in Python call ``run`` for the operation ``NS::NAME``, not
    torch's dispatcher, which takes the host as long as the launches. Such a program runs behind
    autograd. Where a mode or a profiler follows operations they see the operation as before."""
    from torch._inductor.codegen import custom_extern_kernel_codegen as registry
    from torch._inductor.virtualized import V

    namespace, _, own = name.partition("::")
    op = getattr(getattr(torch.ops, namespace), own).default

    def launched(*args: Any, **kwargs: Any) -> Any:
        profiled = torch.autograd.profiler._is_profiler_enabled
        if profiled or torch._C._len_torch_dispatch_stack():
            return op(*args, **kwargs)
        return run(*args, **kwargs)

    op.launched = launched
    path = f"torch.ops.{namespace}.{own}.default"

    def write(node: Any, writeline: Callable[[str], None]) -> None:
        from torch._inductor.codegen import wrapper

        if getattr(V.graph, "fx_wrapper", False):  # lines there are no text
            writeline(wrapper.ExternKernelAllocLine(writeline.__self__, node))  # type: ignore
            return
        # Arguments by their places: what is named is not told apart by its order.
        args = list(node.codegen_args())
        named = dict(text.split("=", 1) for text in node.codegen_kwargs())
        for argument in op._schema.arguments[len(args) :]:
            if argument.name not in named:
                break
            args.append(named.pop(argument.name))
        args += [f"{name}={text}" for name, text in named.items()]
        writeline(f"{node.get_name()} = {path}.launched({', '.join(args)})")

    registry.CUSTOM_EXTERN_KERNEL_CODEGEN[path] = registry.CustomCodegen(python=write)


def settings(device: torch.device, exact: bool) -> tuple[Any, ...]:
    """What a launch follows from besides its arguments; ``exact``: whether fp32 is among them."""
    return (
        device.index,
        torch._C._cuda_getDevice(),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch.is_grad_enabled(),
        torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None,
        compat.float32_precision() if exact else "",
    )


class _At:
    """A tensor as Triton's launchers ask for it: an address."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class _Described:
    """A tensor descriptor whose tensor is given at the launch."""

    __slots__ = ("base", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(self, like: Any) -> None:
        self.base: Any = None
        self.shape, self.strides, self.padding = list(like.shape), list(like.strides), like.padding
        self.round_f32_to_tf32 = getattr(like, "round_f32_to_tf32", False)

    def at(self, address: int) -> _Described:
        made = object.__new__(_Described)
        made.base, made.shape, made.strides = _At(address), self.shape, self.strides
        made.padding, made.round_f32_to_tf32 = self.padding, self.round_f32_to_tf32
        return made


class Bound:
    """A launch of a compiled kernel: all its arguments but the addresses of tensors."""

    def __init__(self, compiled: Any, grid: Sequence[int], device: int, args: list[Any]) -> None:
        self.compiled, self.device = compiled, device
        self.grid = (*grid, 1, 1)[:3]
        self.args = args
        self.pointers: list[tuple[int, int, int]] = []  # argument, tensor, bytes behind its start
        self.descriptors: list[tuple[int, int, int, _Described]] = []
        self.tuples: list[tuple[int, Any]] = []
        self.run, self.function = compiled.run, compiled.function
        self.packed = compiled.packed_metadata

    @property
    def roots(self) -> set[int]:
        found = {p[1] for p in self.pointers} | {d[1] for d in self.descriptors}
        return found.union(*(_roots_in(t) for _, t in self.tuples))

    def __call__(self, tensors: Sequence[Any], addresses: Sequence[int]) -> None:
        args = self.args.copy()
        for i, root, offset in self.pointers:
            args[i] = addresses[root] + offset
        for i, root, offset, described in self.descriptors:
            args[i] = described.at(addresses[root] + offset)
        for i, template in self.tuples:
            args[i] = _filled(template, addresses)
        self.run(
            *self.grid, torch._C._cuda_getCurrentRawStream(self.device), self.function, self.packed,
            None, None, None, *args,
        )  # fmt: skip


class _Pointer:
    """An address inside of a tuple of arguments."""

    def __init__(self, root: int, offset: int) -> None:
        self.root, self.offset = root, offset


def _roots_in(template: Any) -> set[int]:
    if isinstance(template, _Pointer):
        return {template.root}
    return set().union(*map(_roots_in, template)) if isinstance(template, tuple) else set()


def _filled(template: Any, addresses: Sequence[int]) -> Any:
    if isinstance(template, _Pointer):
        return addresses[template.root] + template.offset
    if isinstance(template, tuple):
        return tuple([_filled(one, addresses) for one in template])
    return template


def bind(
    kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: Any, tape: Any
) -> Bound:
    """A launch that was done, to be done again. Raises what ``tape.place`` does for a tensor that
    is not known, and TypeError for an argument that is none of Triton's."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    # What is left of ``given`` are options of the compiler.
    values = [given.get(p.name, p.default) for p in kernel.params]
    bound = Bound(compiled, grid, torch._C._cuda_getDevice(), values)

    def inside(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            at = tape.place(value)
            return _Pointer(at.root, at.offset)
        return tuple(map(inside, value)) if isinstance(value, tuple) else value

    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            at = tape.place(value)
            bound.pointers.append((i, at.root, at.offset))
            bound.args[i] = None
        elif hasattr(value, "block_shape"):
            at = tape.place(value.base)
            bound.descriptors.append((i, at.root, at.offset, _Described(value)))
            bound.args[i] = None
        elif isinstance(value, tuple) and _holds_tensors(value):
            bound.tuples.append((i, inside(value)))
            bound.args[i] = None
        elif hasattr(value, "data_ptr"):
            raise TypeError(
                f"argument {kernel.arg_names[i]} is expected as a tensor, got {value!r}"
            )
    return bound


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    return isinstance(value, tuple) and any(map(_holds_tensors, value))
