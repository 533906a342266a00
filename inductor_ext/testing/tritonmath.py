"""Arithmetic that Triton's interpreter lacks or rounds differently from the hardware.

The interpreter keeps a tensor as a NumPy array; NumPy has no bfloat16 and no 8-bit floats, so these
are arrays of their bit patterns. Here they are decoded, computed in float32 and rounded to nearest
even again, as the hardware does. Conversions go through torch, whose rounding is exact; conversions
to 8-bit floats saturate, as the conversion instruction does.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from inductor_ext.compat_patches import Patches, private

_BITS = {
    "bf16": (torch.bfloat16, torch.int16, np.uint16),
    "fp8e4nv": (torch.float8_e4m3fn, torch.uint8, np.uint8),
    "fp8e5": (torch.float8_e5m2, torch.uint8, np.uint8),
    "fp8e4b8": (torch.float8_e4m3fnuz, torch.uint8, np.uint8),
    "fp8e5b16": (torch.float8_e5m2fnuz, torch.uint8, np.uint8),
}
# What ``triton.language`` calls them.
_LANGUAGE_NAMES = {
    "bf16": "bfloat16",
    "fp8e4nv": "float8e4nv",
    "fp8e5": "float8e5",
    "fp8e4b8": "float8e4b8",
    "fp8e5b16": "float8e5b16",
}


def _coded(dtype: Any) -> bool:
    """Whether arrays of this Triton dtype hold bit patterns."""
    return dtype.scalar.name in _BITS


def decode(data: np.ndarray, dtype: Any) -> np.ndarray:
    """The values of an array of ``dtype``; float32 where it holds bit patterns."""
    if not _coded(dtype):
        return data
    torch_dtype, carrier, _ = _BITS[dtype.scalar.name]
    bits = torch.from_numpy(np.ascontiguousarray(data)).view(carrier)
    return bits.view(torch_dtype).float().numpy()


@functools.cache
def _numpy_dtype(name: str) -> Any:
    dtype = private("triton.language:dtype")(name)
    return private("triton.runtime.interpreter:_get_np_dtype")(dtype)


def encode(values: np.ndarray, dtype: Any, toward_zero: bool = False) -> np.ndarray:
    """Round values to ``dtype``, as an array the interpreter can hold."""
    if not _coded(dtype):
        return values.astype(_numpy_dtype(dtype.scalar.name))
    torch_dtype, carrier, numpy_bits = _BITS[dtype.scalar.name]
    floats = values if values.dtype in (np.float32, np.float64) else values.astype(np.float32)
    if toward_zero and dtype.scalar.name == "bf16":
        return (floats.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    source = torch.from_numpy(np.ascontiguousarray(floats))
    if torch_dtype.itemsize == 1:
        limit = torch.finfo(torch_dtype).max
        source = torch.where(source.isnan(), source, source.clamp(-limit, limit))
    return source.to(torch_dtype).view(carrier).numpy().view(numpy_bits)


def patch_arithmetic(patches: Patches) -> None:
    """Make the interpreter compute as described above until ``patches`` closes."""
    interpreter = private("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle
    int1 = private("triton.language:int1")
    rounding = private("triton._C.libtriton:ir").ROUNDING_MODE
    before_binary = builder.binary_op

    def cast(self: Any, src: Any, dst_type: Any) -> Any:
        return handle(encode(decode(src.data, src.dtype), dst_type), dst_type.scalar)

    def fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        values = decode(src.data, src.dtype)
        return handle(encode(values, dst_type, rounding_mode == rounding.RTZ), dst_type.scalar)

    def binary(self: Any, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
        bitwise = op in (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
        if _coded(lhs.dtype) and not bitwise:
            out = op(decode(lhs.data, lhs.dtype), decode(rhs.data, rhs.dtype))
            if out.dtype != np.bool_:
                return handle(encode(out, lhs.dtype), lhs.dtype.scalar)
        else:
            out = before_binary(self, lhs, rhs, op)
            if out.data.dtype != np.bool_:
                return out
            out = out.data
        return handle(out, int1)

    def unary(self: Any, arg: Any, op: Callable[..., Any]) -> Any:
        return handle(encode(op(decode(arg.data, arg.dtype)), arg.dtype), arg.dtype.scalar)

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        # Exact for float32: its products fit float64; the sum is then rounded twice at worst.
        product = np.multiply(*(decode(t.data, t.dtype).astype(np.float64) for t in (x, y)))
        return handle(encode(product + decode(z.data, z.dtype), z.dtype), z.dtype.scalar)

    def dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        wide = np.float64 if d.data.dtype == np.float64 else np.float32
        if np.issubdtype(d.data.dtype, np.integer) and not _coded(d.dtype):
            wide = d.data.dtype
        product = np.matmul(
            decode(a.data, a.dtype).astype(wide), decode(b.data, b.dtype).astype(wide)
        )
        return handle(encode(product + decode(d.data, d.dtype), d.dtype), d.dtype.scalar)

    def inline_asm(
        self: Any, asm: Any, constraints: Any, values: Any, types: Any, pure: Any, pack: Any
    ) -> Any:
        if re.search(r"(^|[;}]\s*)mov\.b32 \$0, \$1;$", asm):  # and waits, asks for something
            return _Results([values[0]])
        known = instruction(asm)
        if known is not None:
            return _Results([handle(_by_torch(known)(values[0].data), values[0].dtype)])
        # Prefetches and dependency controls: no result that a program may use.
        return _Results([_zeros(interpreter, t) for t in types])

    def extern(
        self: Any, lib: Any, path: Any, symbol: str, args: Any, ret_type: Any, pure: Any
    ) -> Any:
        values = [decode(a.data, a.dtype) for a in args]
        return handle(encode(call_libdevice(symbol, values), ret_type), ret_type.scalar)

    def constant(name: str) -> Callable[[Any, float], Any]:
        dtype = private(f"triton.language:{_LANGUAGE_NAMES[name]}")
        return lambda self, value: handle(encode(np.array([value], np.float64), dtype), dtype)

    for name in _BITS:
        patches.set(builder, f"get_{name}", constant(name), create=True)
    for name, function in {
        "cast_impl": cast,
        "create_fp_to_fp": fp_to_fp,
        "binary_op": binary,
        "unary_op": unary,
        "create_fma": fma,
        "create_dot": dot,
        "create_inline_asm": inline_asm,
        "create_extern_elementwise": extern,
        # Versions with an operation of their own for programmatic dependent launch.
        "create_grid_dependency_wait": lambda self: None,
        "create_grid_dependency_launch_dependents": lambda self: None,
        "create_erf": lambda self, arg: unary(self, arg, _by_torch(torch.erf)),
        "create_rsqrt": lambda self, arg: unary(self, arg, _by_torch(torch.rsqrt)),
    }.items():
        patches.set(builder, name, function, create="grid_dependency" in name)


def _zeros(interpreter: Any, ty: Any) -> Any:
    shape = tuple(int(n) for n in getattr(ty, "shape", ())) or (1,)
    return interpreter.TensorHandle(
        np.zeros(shape, interpreter._get_np_dtype(ty.scalar)), ty.scalar
    )


class _Results:
    """What the builder returns for inline assembly: an operation with results."""

    def __init__(self, results: list[Any]) -> None:
        self.results = results

    def get_result(self, index: int) -> Any:
        return self.results[index]


# ----------------------------------------------------------------------------------------
# CUDA's libdevice


def _by_torch(function: Callable[..., torch.Tensor]) -> Callable[..., np.ndarray]:
    def call(*arrays: np.ndarray) -> np.ndarray:
        arrays = np.broadcast_arrays(*arrays)
        return function(*(torch.from_numpy(np.ascontiguousarray(a)) for a in arrays)).numpy()

    return call


def _round_half_away(x: torch.Tensor) -> torch.Tensor:
    return torch.trunc(x + torch.copysign(torch.full_like(x, 0.5), x))


def _tanh_approx(x: torch.Tensor) -> torch.Tensor:
    """With a relative error of up to 2^-11, as the instruction's."""
    mantissa, exponent = torch.frexp(torch.tanh(x))
    return torch.ldexp(torch.round(mantissa * 2048) / 2048, exponent)


def _mul_toward_zero(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    exact = x.double() * y.double()
    nearest = exact.to(x.dtype)
    return torch.where(nearest.abs() > exact.abs(), nearest.nextafter(torch.zeros_like(x)), nearest)


def instruction(asm: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What an instruction of one operand computes, as far as kernels here have any."""
    if asm == "tanh.approx.f32 $0, $1;":
        return _tanh_approx
    product = re.fullmatch(r"mul\.rz\.f32 \$0, \$1, 0f([0-9A-F]{8});", asm)
    if product is None:
        return None
    (factor,) = struct.unpack(">f", bytes.fromhex(product[1]))
    return lambda x: _mul_toward_zero(x, torch.full_like(x, factor))


_special = torch.special
_SAME_NAME = (
    "acos acosh asin asinh atan atanh atan2 ceil copysign cos cosh erf erfc erfinv exp exp2 expm1 "
    "floor fmax fmin fmod hypot isfinite isinf isnan lgamma log log10 log1p log2 nextafter pow "
    "rsqrt signbit sin sinh sqrt tan tanh trunc"
)
_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    **{name: getattr(torch, name) for name in _SAME_NAME.split()},
    "abs": torch.abs,
    "llabs": torch.abs,
    "fabs": torch.abs,
    "finite": torch.isfinite,
    "isfinited": torch.isfinite,
    "isnand": torch.isnan,
    "isinfd": torch.isinf,
    "signbitd": torch.signbit,
    "powi": torch.pow,
    "rint": torch.round,
    "nearbyint": torch.round,
    "llrint": torch.round,
    "round": _round_half_away,
    "llround": _round_half_away,
    "exp10": lambda x: torch.pow(torch.full_like(x, 10), x),
    "cbrt": lambda x: torch.copysign(x.abs().double().pow(1 / 3), x.double()).to(x.dtype),
    "rcbrt": lambda x: torch.copysign(x.abs().double().pow(-1 / 3), x.double()).to(x.dtype),
    "tgamma": lambda x: torch.exp(torch.lgamma(x.double())).to(x.dtype),
    "sinpi": lambda x: torch.sin(x.double() * torch.pi).to(x.dtype),
    "cospi": lambda x: torch.cos(x.double() * torch.pi).to(x.dtype),
    "normcdf": _special.ndtr,
    "normcdfinv": _special.ndtri,
    "erfcx": _special.erfcx,
    "cyl_bessel_i0": _special.i0,
    "cyl_bessel_i1": _special.i1,
    "j0": _special.bessel_j0,
    "j1": _special.bessel_j1,
    "y0": _special.bessel_y0,
    "y1": _special.bessel_y1,
    "ldexp": lambda x, n: torch.ldexp(x, n),
    "fma": lambda x, y, z: (x.double() * y.double() + z.double()).to(x.dtype),
    "fdim": lambda x, y: torch.clamp(x - y, min=0),
    "fdivide": torch.div,
    "saturate": lambda x: torch.clamp(x, 0, 1),
    "min": torch.minimum,
    "max": torch.maximum,
}
# Correctly rounded and fast versions differ from the plain operation in rounding only.
for _suffix in ("rn", "rz", "ru", "rd"):
    _FUNCTIONS |= {
        f"add_{_suffix}": torch.add,
        f"sub_{_suffix}": torch.sub,
        f"mul_{_suffix}": torch.mul,
        f"div_{_suffix}": torch.div,
        f"fadd_{_suffix}": torch.add,
        f"fsub_{_suffix}": torch.sub,
        f"fmul_{_suffix}": torch.mul,
        f"fdiv_{_suffix}": torch.div,
        f"fsqrt_{_suffix}": torch.sqrt,
        f"sqrt_{_suffix}": torch.sqrt,
        f"frcp_{_suffix}": torch.reciprocal,
        f"fma_{_suffix}": _FUNCTIONS["fma"],
    }
_FUNCTIONS["mul_rz"] = _FUNCTIONS["fmul_rz"] = _mul_toward_zero


def call_libdevice(symbol: str, values: list[np.ndarray]) -> np.ndarray:
    """The libdevice function ``symbol`` ("__nv_expf") on arrays, to float32 or float64 accuracy."""
    name = symbol.removeprefix("__nv_").removeprefix("fast_")
    function = _FUNCTIONS.get(name)
    if function is None or (values[0].dtype == np.float32 and name.removesuffix("f") in _FUNCTIONS):
        function = _FUNCTIONS.get(name.removesuffix("f"))
    if function is None:
        raise NotImplementedError(
            f"interpretation expected a libdevice function it has a CPU version of, got {symbol}"
        )
    return _by_torch(function)(*values)
