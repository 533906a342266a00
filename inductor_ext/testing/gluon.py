"""Machine code of a Gluon kernel for a card that is not there."""

from __future__ import annotations

import subprocess
import tempfile
from typing import Any, NamedTuple

import torch

from inductor_ext.compat_patches import private
from inductor_ext.testing.binaries import KernelBinary, describe
from inductor_ext.testing.launches import _POINTERS


class GluonBinary(NamedTuple):
    """``binary``: facts of the kernel. ``sass``: its instructions as nvdisasm prints them."""

    binary: KernelBinary
    sass: str


def gluon_binary(kernel: Any, arguments: dict[str, Any]) -> GluonBinary:
    """A launch of a Gluon kernel, given by its arguments' names (tensors may be meta tensors, and
    count as 16-byte aligned), compiled for an H200."""
    import triton
    from triton.backends.compiler import GPUTarget

    names = kernel.arg_names
    options = {name: value for name, value in arguments.items() if name not in names}
    signature: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        else:
            signature[parameter.name] = _type(value, (i,), constants, attributes)
    source = private("triton.experimental.gluon._runtime:GluonASTSource")(
        kernel, signature, constants, attributes
    )
    compiled: Any = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return GluonBinary(describe(compiled, kernel.fn.__name__), _sass(compiled.asm["cubin"]))


def _type(value: Any, at: tuple[int, ...], constants: Any, attributes: Any) -> Any:
    """The type of an argument, as Triton specialises it."""
    if isinstance(value, tuple):
        return tuple(_type(v, (*at, i), constants, attributes) for i, v in enumerate(value))
    if isinstance(value, torch.Tensor):
        attributes[at] = [["tt.divisibility", 16]]
        return _POINTERS[value.dtype]
    if value is None:
        constants[at] = None
        return "constexpr"
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, int):
        if len(at) > 1 and value == 1:  # the counts beside are not specialised
            constants[at] = value
            return "constexpr"
        if len(at) > 1 and value % 16 == 0:
            attributes[at] = [["tt.divisibility", 16]]
        return "i32"
    element = _POINTERS[value.base.dtype][1:]
    return f"tensordesc<{element}{list(value.block_shape)},{value.layout!r}>"


def _sass(cubin: bytes) -> str:
    tool = private("triton:knobs.nvidia.nvdisasm").path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True)
    return done.stdout
