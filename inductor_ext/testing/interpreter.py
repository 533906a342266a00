"""Generated programs and Triton kernels, run on CPU tensors in Triton's interpreter.

What runs is the generated text: its kernels one program after the other in NumPy, its wrapper as it
is, its allocations filled with NaN, its library calls as the CPU's operators. Every load and store
of a kernel is checked to stay inside the tensors it was given. One process can interpret and
cross-compile: Triton is switched to interpretation for the length of a call only.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import math
import textwrap
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from inductor_ext import compat_virtual
from inductor_ext.compat_patches import Patches, private
from inductor_ext.testing.tritonmath import patch_arithmetic


def run_kernel_interpreted(
    kernel: Any,
    grid: tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Run a ``@triton.jit`` kernel on CPU tensors, as ``kernel[grid](*args, **kwargs)`` would.

    Launch options (``num_warps``, ``num_stages``, ``launch_pdl``, ...) are accepted and ignored,
    bf16, fp16 and fp8 are rounded as on the hardware, ``tl.dot`` accumulates in fp32, inline
    assembly yields zeros (but a plain move its operand), and PDL instructions do nothing.
    ``tl.device_assert`` of a kernel with ``debug=True`` is an AssertionError. The programs of the
    grid run one after the other, so a kernel whose programs wait for each other does not terminate.

    Raises IndexError when a program accesses memory outside the tensors it was given; ValueError
    for a tensor that is not on the CPU.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            raise ValueError(
                f"run_kernel_interpreted expected tensors on cpu, got one on {value.device}"
            )
    with interpreting() as run:
        run(kernel, grid, args, kwargs)


@contextlib.contextmanager
def interpreting(
    order: Callable[[int], Iterable[int]] = range,
) -> Iterator[Callable[..., None]]:
    """Triton is in interpretation; yields ``run(kernel, grid, args, kwargs)``. ``order`` of a size
    gives the numbers of the programs along a grid's first dimension, one after the other."""
    # Triton's compiler keeps references to builtins it sees when it is first imported; it must not
    # be imported while they are the interpreter's.
    import triton.compiler.code_generator  # noqa: F401

    with Patches() as patches, np.errstate(all="ignore"):
        yield _Interpretation(patches, order).run


_codes: weakref.WeakKeyDictionary[Any, tuple[types.CodeType, frozenset[str]]]
_codes = weakref.WeakKeyDictionary()


def _rewritten(fn: Callable[..., Any]) -> tuple[types.CodeType, frozenset[str]]:
    """The definition of ``fn`` as the interpreter wants it, compiled, and the names it uses."""
    if fn not in _codes:
        tree = ast.parse(textwrap.dedent(inspect.getsource(fn)))
        definition = tree.body[0]
        assert isinstance(definition, ast.FunctionDef)
        definition.decorator_list = []
        transformer = private("triton.runtime.interpreter:FunctionRewriter.ast_transformer")
        tree = transformer.visit(tree)
        ast.fix_missing_locations(tree)
        ast.increment_lineno(tree, fn.__code__.co_firstlineno - 1)
        code = compile(tree, inspect.getsourcefile(fn) or "<kernel>", "exec")
        used, inside = set[str](), [code]
        for part in inside:
            used.update(part.co_names)
            inside += [c for c in part.co_consts if isinstance(c, types.CodeType)]
        _codes[fn] = code, frozenset({*used, *fn.__code__.co_freevars})
    return _codes[fn]


@functools.cache
def _shape_of(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """A shape and its number of entries as Triton holds them."""
    import triton.language as tl

    sizes = tl.core.tuple([tl.core.constexpr(size) for size in shape])
    return sizes, tl.core.constexpr(math.prod(shape))


def _make_tensor(tensor: Any, handle: Any, type: Any) -> None:
    """``tl.tensor.__init__``, which makes the shape anew for the result of every operation."""
    tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
    tensor.shape, tensor.numel = _shape_of(tuple(type.shape) if type.is_block() else ())


def _make_block_type(before: Callable[..., None]) -> Callable[..., None]:
    """``tl.block_type.__init__``, which works out alike for every result of one type and shape."""
    made: dict[Any, dict[str, Any]] = {}

    def make(block: Any, element: Any, shape: Any) -> None:
        sizes = tuple(shape)
        key = type(element), element.name, sizes
        if element.is_ptr() or not all(type(size) is int for size in sizes):
            before(block, element, shape)
            return
        if key not in made:
            before(block, element, shape)
            made[key] = dict(vars(block))
        vars(block).update(made[key])

    return make


class _Interpretation:
    """Triton's language, bound to NumPy until the patches close."""

    def __init__(self, patches: Patches, order: Callable[[int], Iterable[int]]) -> None:
        import triton
        import triton.language as tl

        self.triton_interpreter = private("triton.runtime.interpreter")
        self.jit_function = private("triton.runtime.jit:JITFunction")
        self.order = order
        self.rewritten: dict[Any, Callable[..., Any]] = {}
        self.extents: np.ndarray | None = None

        patches.set(triton.knobs.runtime, "interpret", True)
        both = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
        scope = self.triton_interpreter._patch_lang(both)
        patches.callback(scope.restore)
        # The interpreter's scalars are arrays of one element, which NumPy no longer converts.
        patches.set(tl.tensor, "__index__", lambda tensor: int(tensor.handle.data.reshape(-1)[0]))
        self._bind_extras(scope)
        patches.set(tl.tensor, "__init__", _make_tensor)
        block_type = tl.core.block_type
        patches.set(block_type, "__init__", _make_block_type(block_type.__init__))
        patch_arithmetic(patches)
        self._check_accesses(patches)

        # Device functions and the library's own (tl.sum, tl.sigmoid) stay compiled-mode objects;
        # those of a module loaded meanwhile (combine functions of scans) are interpreted ones,
        # whose call would bind the language anew and leave it so.
        interpretation = self

        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            return interpretation.rewrite(function.fn)(*args, **kwargs)

        for kind in (self.jit_function, self.triton_interpreter.InterpretedFunction):
            patches.set(kind, "__call__", call)
        for name, member in list(vars(tl.tensor).items()):
            if isinstance(member, self.jit_function):
                patches.set(tl.tensor, name, _as_method(member))
        standard = private("triton.language.standard")
        self.at_once = {
            standard._sum_combine.fn: np.add,
            standard._elementwise_max.fn: np.maximum,
            standard._elementwise_min.fn: np.minimum,
        }
        for module in (tl, tl.core):
            patches.set(module, "reduce", self._reduce)
            patches.set(module, "associative_scan", self._scan)

    def _bind_extras(self, scope: Any) -> None:
        """CUDA's own builtins and libdevice, which the interpreter leaves out."""
        import triton.language.extra.cuda as cuda
        from triton.language.extra import libdevice

        builder = self.triton_interpreter.interpreter_builder
        for module in (cuda, cuda.gdc, cuda.utils, cuda.libdevice):
            self.triton_interpreter._patch_builtin(module, builder, scope)
        for name, member in list(vars(libdevice).items()):
            if isinstance(member, types.FunctionType) and hasattr(cuda.libdevice, name):
                scope.set_attr(libdevice, name, getattr(cuda.libdevice, name))

    # ------------------------------------------------------------------------------------

    def rewrite(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn`` in the form the interpreter wants, defined in a copy of its module's names."""
        if fn not in self.rewritten:
            code, used = _rewritten(fn)
            names = {**vars(self.triton_interpreter), **fn.__globals__}
            cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
            names.update({name: cell.cell_contents for name, cell in cells})
            scope = {name: self._bound(names[name]) for name in used if name in names}
            exec(code, scope)
            self.rewritten[fn] = scope[fn.__name__]
        return self.rewritten[fn]

    def _bound(self, value: Any) -> Any:
        """A builtin that a module imported by name, in the form its own module now has it."""
        if not isinstance(value, types.FunctionType):
            return value
        import triton.language as tl
        from triton.language.extra import libdevice

        if tl.core.is_builtin(value):
            semantic = self.triton_interpreter.interpreter_semantic
            return functools.partial(value, _semantic=semantic)
        if value.__module__ == libdevice.__name__:
            return getattr(libdevice, value.__name__)
        return value

    def run(self, kernel: Any, grid: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        asserts = False
        while not isinstance(kernel, types.FunctionType):  # autotuners, heuristics, jit
            asserts = asserts or bool(getattr(kernel, "debug", False))
            kernel = kernel.fn
        signature = inspect.signature(kernel)
        kwargs = {name: v for name, v in kwargs.items() if name in signature.parameters}
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        grid = grid(values) if callable(grid) else grid
        grid = (*(int(n) for n in grid), 1, 1)[:3]
        constant = {name for name, p in signature.parameters.items() if _is_constexpr(p.annotation)}
        convert = self.triton_interpreter._implicit_cvt
        inputs = {n: v if n in constant else convert(v) for n, v in values.items()}
        function = self.rewrite(kernel)
        builder = self.triton_interpreter.interpreter_builder
        builder.set_grid_dim(*grid)
        outer, self.extents = self.extents, _extents(values.values())
        options = builder.options
        builder.options = dataclasses.replace(options, debug=asserts, sanitize_overflow=False)
        try:
            for z in range(grid[2]):
                for y in range(grid[1]):
                    for x in self.order(grid[0]):
                        builder.set_grid_idx(x, y, z)
                        function(**inputs)
        except IndexError as e:
            raise IndexError(f"kernel {kernel.__name__}, program {(x, y, z)}: {e}") from None
        finally:
            self.extents = outer
            builder.options = options

    def _check_accesses(self, patches: Patches) -> None:
        builder = self.triton_interpreter.InterpreterBuilder
        load, store = builder.create_masked_load, builder.create_masked_store
        cas, rmw = builder.create_atomic_cas, builder.create_atomic_rmw

        def checked_load(this: Any, ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
            self._check("load", ptrs, mask)
            return load(this, ptrs, mask, *rest, **named)

        def checked_store(
            this: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **named: Any
        ) -> Any:
            self._check("store", ptrs, mask)
            return store(this, ptrs, value, mask, *rest, **named)

        def checked_cas(this: Any, ptr: Any, *rest: Any) -> Any:
            self._check("atomic", ptr, None)
            return cas(this, *(self._dense(handle) for handle in (ptr, *rest)))

        def checked_rmw(this: Any, op: Any, ptr: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self._check("atomic", ptr, mask)
            return rmw(this, op, *(self._dense(handle) for handle in (ptr, value, mask)), *rest)

        patches.set(builder, "create_masked_load", checked_load)
        patches.set(builder, "create_masked_store", checked_store)
        patches.set(builder, "create_atomic_cas", checked_cas)
        patches.set(builder, "create_atomic_rmw", checked_rmw)

    def _dense(self, handle: Any) -> Any:
        """An operand of an atomic, which some versions read past its strides if it is broadcast."""
        tensor_handle = self.triton_interpreter.TensorHandle
        if not isinstance(handle, tensor_handle):
            return handle
        return tensor_handle(np.array(handle.data, order="C"), handle.dtype)

    def _check(self, what: str, ptrs: Any, mask: Any) -> None:
        starts, ends = self.extents if self.extents is not None else np.zeros((2, 0))
        used = np.broadcast_to(ptrs.data, np.shape(ptrs.data)).ravel()
        if mask is not None:
            used = used[np.broadcast_to(mask.data, np.shape(ptrs.data)).ravel().astype(bool)]
        if not used.size:
            return
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        used = used.astype(np.int64)
        home = np.searchsorted(starts, used, side="right") - 1
        outside = (home < 0) | (used + size > ends[home])
        if outside.any():
            raise IndexError(
                f"{what} expected addresses inside the tensors passed, got {int(outside.sum())} of "
                f"{used.size} outside"
            )

    # ------------------------------------------------------------------------------------
    # reductions and scans: the combine function on whole slices at a time

    def _tensor(self, data: np.ndarray, dtype: Any) -> Any:
        import triton.language as tl

        if data.ndim == 0:
            data = data.reshape(1)
            return tl.core.tensor(self.triton_interpreter.TensorHandle(data, dtype), dtype)
        handle = self.triton_interpreter.TensorHandle(np.ascontiguousarray(data), dtype)
        return tl.core.tensor(handle, tl.block_type(dtype, list(data.shape)))

    def _combine(
        self, function: Any, left: list[np.ndarray], right: list[np.ndarray], dtypes: list[Any]
    ) -> list[np.ndarray]:
        one = self.at_once.get(getattr(function, "fn", None))
        if one is not None and left[0].dtype in (np.float32, np.float64):
            return [one(left[0], right[0])]  # what the function comes to
        out = function(
            *(self._tensor(d, t) for d, t in zip(left, dtypes, strict=True)),
            *(self._tensor(d, t) for d, t in zip(right, dtypes, strict=True)),
        )
        out = out if isinstance(out, tuple) else (out,)
        # A combine function may widen; the accumulator keeps the type of the input.
        return [
            np.broadcast_to(o.to(t).handle.data.reshape(np.shape(o.handle.data)), like.shape)
            for o, t, like in zip(out, dtypes, left, strict=True)
        ]

    def _reduce(
        self, input: Any, axis: Any, combine_fn: Any, keep_dims: bool = False, **_: Any
    ) -> Any:
        tensors = input if isinstance(input, tuple) else (input,)
        dtypes = [t.dtype for t in tensors]
        axis = getattr(axis, "value", axis)
        shape = np.shape(tensors[0].handle.data)
        data = [t.handle.data for t in tensors]
        if axis is None:
            data = [d.reshape(-1) for d in data]
        else:
            data = [np.moveaxis(d, int(axis), 0) for d in data]
        while len(data[0]) > 1:  # neighbours first, so that the order is kept
            even = len(data[0]) // 2 * 2
            joined = self._combine(
                combine_fn, [d[0:even:2] for d in data], [d[1:even:2] for d in data], dtypes
            )
            data = [np.concatenate([j, d[even:]]) for j, d in zip(joined, data, strict=True)]
        data = [d[0] for d in data]
        if getattr(keep_dims, "value", keep_dims):
            kept = [1] * len(shape) if axis is None else list(shape)
            if axis is not None:
                kept[int(axis)] = 1
            data = [d.reshape(kept) for d in data]
        out = tuple(self._tensor(np.asarray(d), t) for d, t in zip(data, dtypes, strict=True))
        return out if isinstance(input, tuple) else out[0]

    def _scan(self, input: Any, axis: Any, combine_fn: Any, reverse: bool = False, **_: Any) -> Any:
        tensors = input if isinstance(input, tuple) else (input,)
        dtypes = [t.dtype for t in tensors]
        axis = int(getattr(axis, "value", axis))
        backwards = bool(getattr(reverse, "value", reverse))
        data = [np.moveaxis(t.handle.data, axis, 0) for t in tensors]
        if backwards:
            data = [np.flip(d, 0) for d in data]
        step = 1
        while step < len(data[0]):
            # Blocks have power-of-two sizes, so the first ``step`` entries are combined for
            # nothing.
            earlier = [np.concatenate([d[:step], d[:-step]]) for d in data]
            joined = self._combine(combine_fn, earlier, data, dtypes)
            data = [np.concatenate([d[:step], j[step:]]) for d, j in zip(data, joined, strict=True)]
            step *= 2
        if backwards:
            data = [np.flip(d, 0) for d in data]
        out = tuple(
            self._tensor(np.moveaxis(d, 0, axis), t) for d, t in zip(data, dtypes, strict=True)
        )
        return out if isinstance(input, tuple) else out[0]


def _as_method(function: Any) -> Callable[..., Any]:
    return lambda tensor, *args, **kwargs: function(tensor, *args, **kwargs)


def _is_constexpr(annotation: Any) -> bool:
    return "constexpr" in (annotation if isinstance(annotation, str) else repr(annotation))


def constexpr_names(kernel: Any) -> list[str]:
    """The parameters that a kernel declares as ``tl.constexpr``."""
    while not isinstance(kernel, types.FunctionType):
        kernel = kernel.fn
    parameters = inspect.signature(kernel).parameters.items()
    return [name for name, p in parameters if _is_constexpr(p.annotation)]


def _extents(values: Any) -> np.ndarray:
    """Start and end address of every storage among ``values``, by start."""
    spans = {(0, 0)}
    stack = list(values)
    while stack:
        value = stack.pop()
        if isinstance(value, (tuple, list)):
            stack.extend(value)
        elif hasattr(value, "base") and hasattr(value, "block_shape"):  # a tensor descriptor
            stack.append(value.base)
        elif isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            if storage.data_ptr() == 0:  # no memory (a meta tensor): nothing inside it to access
                continue
            spans.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    return np.array(sorted(spans), dtype=np.int64).T


# ----------------------------------------------------------------------------------------
# whole generated programs


def interpret_source(
    source: str,
    inputs: Sequence[Any],
    card: str = "h200",
    constants: Mapping[str, torch.Tensor] | None = None,
) -> list[Any]:
    """Run one generated program on CPU tensors, in the calling convention of its ``call``.

    Args:
        source: one entry of ``GeneratedCode.graphs``.
        inputs: the graph's inputs in order: CPU tensors with the sizes and strides it was generated
            for, and the numbers it takes (sizes of dynamic dimensions).
        card: the virtual card that it was generated for.
        constants: CPU tensors that the program names but does not hold, by name: the entry of
            ``GeneratedCode.program.constants``.

    Returns the graph's outputs. A graph that writes to an input writes to the tensor passed.

    Memory the program allocates is filled with NaN (the largest value, for integers) before it is
    used, so a value that is never written shows. A kernel with several launch configurations runs
    with its first. Matrix products of 16-bit tensors accumulate in
    fp32.
    """
    from inductor_ext.testing.cards import card as find_card
    from inductor_ext.testing.wrapper import load_program

    with (
        compat_virtual.virtual_device(find_card(card)),
        interpreting() as run,
        contextlib.ExitStack() as stack,
    ):
        call = load_program(source, run, stack, constants or {})
        return list(call(list(inputs)))


def run_interpreted(
    code: Any, *args: Any, grad_outputs: Sequence[torch.Tensor] | None = None
) -> Any:
    """Run the generated code of a whole function on CPU tensors and return its outputs.

    Args:
        code: from ``compile_for``.
        args: as given to ``compile_for``, on the CPU. Other sizes are possible along dynamic
            dimensions. Parameters and captured tensors are those of the compiled function.
        grad_outputs: for code compiled with ``grad=True``: the gradients of the outputs that depend
            on something differentiable, in order. The backward is then run too.

    Returns the function's outputs; with ``grad_outputs`` the pair (outputs, gradients), gradients
    being a dict from the names "args[0]", "weight", ... of what requires a gradient.

    Raises NotImplementedError where the function computed something outside the generated graphs.
    """
    from inductor_ext.testing.replay import replay

    return replay(code, args, grad_outputs, functools.partial(interpret_source, card=code.card.key))
