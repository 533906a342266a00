"""Hand-written kernels through their launch functions: on CPU tensors, and as machine code.

A launch function calls ``wrap_triton(kernel)[grid](...)`` with the name that its module imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch

from inductor_ext.compat_patches import Patches
from inductor_ext.testing.binaries import KernelBinary, describe
from inductor_ext.testing.interpreter import interpreting

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bool: "*i1",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class _Launch:
    def __init__(self, run: Callable[..., None], kernel: Any) -> None:
        self.run, self.kernel = run, kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: self.run(self.kernel, grid, args, kwargs)


@contextlib.contextmanager
def launches_interpreted(
    *modules: ModuleType, order: Callable[[int], Iterable[int]] = range
) -> Iterator[None]:
    """Within: kernels that ``modules`` launch run on CPU tensors in Triton's interpreter, the first
    dimension of their grids in the ``order`` of its size."""
    with interpreting(order) as run, Patches() as patches:
        for module in modules:
            patches.set(module, "wrap_triton", lambda kernel: _Launch(run, kernel))
        yield


def launch_binaries(fn: Callable[[], Any], *modules: ModuleType) -> list[KernelBinary]:
    """What ``fn``, called with meta tensors inside it, launches through ``modules``, in order,
    compiled for an H200. Tensors count as 16-byte aligned but for their storage offset."""
    launched: list[tuple[Any, ...]] = []
    with Patches() as patches:
        for module in modules:
            patches.set(
                module,
                "wrap_triton",
                lambda kernel: _Launch(lambda *launch: launched.append(launch), kernel),
            )
        fn()
    return [_binary(kernel, args, kwargs) for kernel, _, args, kwargs in launched]


def _binary(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> KernelBinary:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    options = {"debug": bool(kernel.debug)} | {k: v for k, v in kwargs.items() if k not in names}
    values = dict(zip(names, args, strict=False)) | {k: kwargs[k] for k in names if k in kwargs}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    # As Triton specialises: ones are constants, multiples of 16 are known as such.
    for i, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        one = type(value) is int and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or one:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
            divisible = value.storage_offset() * value.element_size() % 16 == 0
        elif hasattr(value, "block_shape"):  # a tensor descriptor
            element = _POINTERS[value.base.dtype].removeprefix("*")
            signature[parameter.name] = f"tensordesc<{element}{list(value.block_shape)}>"
            divisible = False
        elif type(value) is float:
            signature[parameter.name], divisible = "fp32", False
        else:
            signature[parameter.name] = "i64" if abs(value) >= 2**31 else "i32"
            divisible = value % 16 == 0 and not parameter.do_not_specialize
        if divisible:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return describe(compiled, kernel.fn.__name__)
