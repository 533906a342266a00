"""A generated program's wrapper, bound to CPU tensors and interpreted kernels."""

from __future__ import annotations

import contextlib
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inductor_ext import compat_virtual
from inductor_ext.compat_patches import Patches, private
from inductor_ext.testing import sdpa
from inductor_ext.testing.interpreter import constexpr_names


def load_program(
    source: str,
    run: Callable[..., None],
    stack: contextlib.ExitStack,
    constants: Mapping[str, torch.Tensor],
) -> Callable[[list[Any]], Any]:
    """The ``call`` of a generated program whose kernels go to ``run``. Under a virtual device."""
    compiler = private("torch._inductor.async_compile")
    patches = stack.enter_context(Patches())
    patches.set(compiler, "AsyncCompile", lambda: _Kernels(run))
    module = types.ModuleType("interpreted_program")
    module.__file__ = "<generated code>"
    # A library call may return other strides on the CPU: put it in the layout the program expects.
    source = re.sub(
        r"^(\s*)(assert_size_stride|assert_size_stride_grouped|assert_tensor_metadata)"
        r"\((\w+|\([\w, ]*\)), ",
        r"\1\3 = \2(\3, ",
        source,
        flags=re.MULTILINE,
    )
    exec(compile(source, module.__file__, "exec"), vars(module))
    vars(module).update(
        {
            **constants,
            "empty_strided_cuda": poisoned,
            "empty_strided_cpu": poisoned,
            "extern_kernels": _Externs(private("torch._inductor.select_algorithm:extern_kernels")),
            "get_raw_stream": lambda index: 0,
            "assert_size_stride": _in_layout,
            "assert_size_stride_grouped": _all_in_layout,
            "assert_tensor_metadata": lambda t, size, stride, dtype, op: _in_layout(
                t, size, stride, op
            ),
            # These speak about addresses, which the CPU's allocator chooses.
            "assert_alignment": lambda *args: None,
            "copy_if_misaligned": lambda tensor: tensor,
        }
    )

    def call(inputs: list[Any]) -> Any:
        with torch.no_grad(), _ProgramOps():
            return module.call(inputs)

    return call


def poisoned(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    """Memory nobody has written: NaN, or the largest value of an integer type."""
    tensor = torch.empty_strided(size, stride, dtype=dtype, device="cpu")
    if dtype.is_floating_point or dtype.is_complex:
        fill: Any = float("nan")
    else:
        fill = True if dtype == torch.bool else torch.iinfo(dtype).max
    base = torch.empty(0, dtype=dtype).set_(tensor.untyped_storage())  # the gaps too
    if dtype.itemsize == 1 and dtype.is_floating_point:
        base.view(torch.uint8).fill_(0x7F)  # NaN in both 8-bit formats
    else:
        base.fill_(fill)
    return tensor


def _in_layout(
    tensor: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], op: str = "input"
) -> torch.Tensor:
    strides_matter = [n > 1 for n in size]
    same = all(
        a == b or not m for a, b, m in zip(tensor.stride(), stride, strides_matter, strict=True)
    )
    if tuple(tensor.shape) != tuple(size) or (op == "input" and not same):
        raise ValueError(
            f"interpretation expected {op} of size {tuple(size)} and stride {tuple(stride)}, got "
            f"size {tuple(tensor.shape)} and stride {tuple(tensor.stride())}"
        )
    return tensor if same else torch.empty_strided(size, stride, dtype=tensor.dtype).copy_(tensor)


def _all_in_layout(
    tensors: Any, sizes: Any, strides: Any, op: str = "input"
) -> tuple[torch.Tensor, ...]:
    each = zip(tensors, sizes, strides, strict=True)
    return tuple(_in_layout(t, size, stride, op) for t, size, stride in each)


class _Kernels:
    """Stands in for AsyncCompile: a kernel is loaded, not compiled."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def triton(self, name: str, source: str, device_str: str = "cuda") -> _Launch:
        return _Launch(name, source, self._run)

    def wait(self, scope: dict[str, Any]) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(
            f"interpretation expected Triton kernels only, got one for async_compile.{name}"
        )


class _Launch:
    def __init__(self, name: str, source: str, run: Callable[..., None]) -> None:
        self.name = name
        self.autotuner = compat_virtual.load_kernel(source, "interpret")
        self._run = run

    def run(self, *args: Any, stream: Any = None, **kwargs: Any) -> None:
        config = self.autotuner.configs[0]
        fn = self.autotuner.fn
        constants = {**self.autotuner.triton_meta.get("constants", {}), **config.kwargs}
        for option in ("num_warps", "num_stages"):
            constants.setdefault(option, getattr(config, option))
        constants = {name: v for name, v in constants.items() if name in fn.arg_names}
        grid_args = list(self.autotuner.inductor_meta.get("extra_launcher_args", ()))
        free = [name for name in fn.arg_names if name not in constants] + grid_args
        declared = constexpr_names(fn)
        if len(args) != len(free) and declared:
            # An integer that is 1 is compiled in, and passed all the same.
            free = [name for name in fn.arg_names if name not in declared] + grid_args
        if len(args) != len(free):  # constants that the wrapper passes all the same
            free = [name for name in fn.arg_names if name not in config.kwargs] + grid_args
        if len(args) > len(free):
            raise TypeError(
                f"kernel {self.name} expected arguments {free}, got {len(args)} of them"
            )
        values = {**constants, **dict(zip(free, args, strict=False)), **kwargs}
        grid = compat_virtual.kernel_grid(self.autotuner, config, values)
        if all(n > 0 for n in grid):
            self._run(fn, grid, (), values)


_16_BIT = (torch.float16, torch.bfloat16)


def _wide(value: Any) -> Any:
    narrow = isinstance(value, torch.Tensor) and value.dtype in _16_BIT
    return value.float() if narrow else value


class _Externs:
    """``extern_kernels`` with matrix products that accumulate in fp32."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        plain = {
            "mm": torch.mm,
            "bmm": torch.bmm,
            "addmm": torch.addmm,
            "baddbmm": torch.baddbmm,
            "bias_addmm": torch.addmm,
            "mm_dtype": torch.mm,
            "bmm_dtype": torch.bmm,
        }.get(name)
        return getattr(self._real, name) if plain is None else _product(plain)


def _product(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def product(
        *args: Any, out: torch.Tensor | None = None, out_dtype: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        dtypes = [a for a in args if isinstance(a, torch.dtype)]
        result = plain(*(_wide(t) for t in tensors), **kwargs)
        if out is not None:
            return out.copy_(result)
        wanted = out_dtype or (dtypes[0] if dtypes else tensors[-1].dtype)
        return result.to(wanted)

    return product


class _ProgramOps(TorchDispatchMode):
    """Operators the wrapper calls: on the CPU, products of 16-bit tensors and attention in fp32."""

    _PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(kwargs.get("device"), "type", None) == "cuda":
            kwargs["device"] = torch.device("cpu")
        args = tuple(
            torch.device("cpu") if isinstance(a, torch.device) and a.type == "cuda" else a
            for a in args
        )
        name = getattr(getattr(func, "overloadpacket", None), "__name__", "")
        if func.namespace == "aten" and name in self._PRODUCTS:
            narrow = any(isinstance(a, torch.Tensor) and a.dtype in _16_BIT for a in args)
            if narrow or "dtype" in func._overloadname:
                return _product(getattr(torch, name))(*args, **kwargs)
        attention = sdpa.on_cpu(func)
        if attention is not None:
            return attention(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except NotImplementedError as e:
            if "'CPU' backend" not in str(e):
                raise
            raise NotImplementedError(
                f"interpretation expected library calls that torch can make on the CPU, got {func}"
            ) from e
