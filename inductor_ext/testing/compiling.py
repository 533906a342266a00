"""``compile_for``: what torch.compile would generate on a card that is not there."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree

from inductor_ext import choosing, compat_virtual, registry, report
from inductor_ext.compat_patches import private
from inductor_ext.testing.cards import card as find_card
from inductor_ext.testing.generated import (
    Copy,
    GeneratedCode,
    GraphCall,
    GraphKind,
    Program,
    Ref,
    Value,
)


class _CannotFollow(Exception):
    """A generated graph cannot be run on tensors without data."""


def compile_for(
    card: str,
    fn: Callable[..., Any],
    *args: Any,
    grad: bool = False,
    dynamic: bool | Mapping[int, Mapping[int, Any]] | None = None,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    force: Mapping[str, str] | None = None,
) -> GeneratedCode:
    """What ``torch.compile(fn)(*args)`` generates on ``card``, without the card.

    Dynamo, AOTAutograd and Inductor run as they would there, every registered lowering and pass
    included, but no kernel is loaded or launched: the compiled function is followed on tensors
    without data, so that code after a graph break is compiled too. Works on a torch built without
    CUDA, and gives the same code where a GPU is present. Torch's state (``torch.cuda``, Dynamo and
    Inductor configuration, Triton's driver, the environment) is as before when it returns or
    raises; Dynamo's caches are emptied, so functions compiled earlier are compiled again at their
    next call. One call runs at a time; others wait.

    Args:
        card: "a100", "h100", "h200" or "b200".
        fn: a function or an ``nn.Module``. Its parameters, buffers and the tensors in its closure
            and defaults and in the globals it names are read as tensors of the card, like ``args``.
            ``torch.autocast("cuda")`` acts as on the card when entered inside it; torch itself
            turns off, with a warning, one that was made outside on a machine without a card.
        args: positional arguments. Tensors, plain and dense, on "cpu" or "meta" (in any nesting of
            tuples, lists, dicts) stand for tensors of the card with the same dtype, sizes, strides,
            offset and requires_grad. Other values are passed on.
        grad: compile for training. The backward is generated for contiguous gradients of all
            floating-point outputs. False compiles under ``torch.no_grad()``.
        dynamic: as for torch.compile; or ``{argument: {dimension: range}}``, ``range`` being a
            ``torch.export.Dim``, a ``(min, max)`` pair or None (any size). Dimensions already
            marked with ``torch._dynamo.mark_dynamic`` stay marked.
        mode: as for torch.compile. In the max-autotune modes nothing can be timed: each operation
            takes its first external candidate (the stock library call) unless forced.
        options: Inductor configuration, as for torch.compile, on top of ``mode``. With
            ``{"cpp_wrapper": True}`` the program is C++: of the result, its text and the decisions.
        force: ``{operation: regular expression}``; where Inductor autotunes ``operation`` ("mm",
            "addmm", the name of a custom operation), the first candidate whose "name description"
            contains a match is taken. ``{lowering: regular expression}``: that lowering of the
            plugin takes its first candidate whose whole name matches.

    Raises:
        ValueError: unknown card; a tensor that is not on cpu or meta, or is not a plain dense one;
            nothing to differentiate with ``grad=True``; a ``force`` entry that decides nothing.
        Whatever Dynamo or Inductor raise on ``fn``.
    """
    target = find_card(card)
    if not callable(fn):
        raise ValueError(f"compile_for expected a function or a module, got {type(fn).__name__}")
    settings = _settings(mode, options)
    lowerings = {name for name, *_ in registry.status()}
    ours = {name: p for name, p in (force or {}).items() if name in lowerings}
    choices = _Choices({op: p for op, p in (force or {}).items() if op not in lowerings})
    trace = _Trace()
    fn = getattr(fn, "_orig_mod", None) or getattr(fn, "_torchdynamo_orig_callable", None) or fn
    with (
        compat_virtual.virtual_card(
            target, choices.choose, trace.on_code, trace.on_copy
        ) as on_card,
        report.collect() as decisions,
        choosing.force(ours),
        contextlib.ExitStack() as stack,
    ):
        trace.mode = on_card.mode

        def convert(tensor: torch.Tensor, where: str) -> torch.Tensor:
            _check_tensor(tensor, where)
            return on_card(tensor)

        leaves, spec = pytree.tree_flatten(args)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[i] = convert(leaf, f"argument tensor {i}")
                trace.program.args.append((i, trace.ref(leaves[i])))
        fake_args = pytree.tree_unflatten(leaves, spec)
        shape_mode = _mark_dynamic(fake_args, dynamic)
        captured = _captured_tensors(fn)
        for name, real, put in captured:
            fake = convert(real, name)
            trace.program.captured.append((name, real, trace.ref(fake)))
            put(fake)
            stack.callback(put, real)
        wanted = _to_differentiate(trace, leaves, captured, on_card) if grad else []
        compiled = torch.compile(fn, dynamic=shape_mode, options=settings or None)
        no_further: tuple[type[BaseException], ...] = (_CannotFollow, *compat_virtual.needs_data())
        try:
            with on_card.mode, torch.set_grad_enabled(grad):
                outputs = compiled(*fake_args)
                trace.finish(outputs, wanted)
        except no_further as e:
            trace.stopped = str(e) or type(e).__name__
        except Exception:
            if choices.error is not None:
                raise choices.error from None
            raise
        choices.check_used()
        _check_forced(ours, decisions)
        return GeneratedCode(
            card=target,
            graphs=trace.graphs,
            graph_kinds=trace.kinds,
            decisions=list(decisions),
            stopped=trace.stopped,
            autotuned=choices.seen,
            program=trace.program,
        )


def _settings(mode: str | None, options: dict[str, Any] | None) -> dict[str, Any]:
    list_mode_options = private("torch._inductor:list_mode_options")
    known = sorted(list_mode_options())
    if mode not in (None, *known):
        raise ValueError(f"compile_for expected mode None or one of {known}, got {mode!r}")
    return {**(list_mode_options(mode) if mode else {}), **(options or {})}


def _check_tensor(tensor: torch.Tensor, where: str) -> None:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if not plain or tensor.layout != torch.strided or tensor.is_nested:
        raise ValueError(
            f"compile_for expected plain dense tensors, got a {type(tensor).__name__} of layout "
            f"{tensor.layout} as {where}"
        )
    if tensor.device.type not in ("cpu", "meta"):
        raise ValueError(
            f"compile_for expected tensors on cpu or meta, got one on {tensor.device} as {where}"
        )


def _mark_dynamic(
    args: tuple[Any, ...], dynamic: bool | Mapping[int, Mapping[int, Any]] | None
) -> bool | None:
    if dynamic is None or isinstance(dynamic, bool):
        return dynamic
    for index, dims in dynamic.items():
        tensor = args[index] if 0 <= index < len(args) else None
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"compile_for expected dynamic to name tensor arguments 0..{len(args) - 1}, "
                f"got {index}"
            )
        for dim, bounds in dims.items():
            if isinstance(bounds, tuple):
                low, high = bounds
            else:  # a torch.export.Dim, Dim.DYNAMIC or None
                low, high = getattr(bounds, "min", None), getattr(bounds, "max", None)
            high = None if high is not None and high >= 2**31 else high
            low = low or (None if high is None else 0)
            torch._dynamo.mark_dynamic(tensor, dim, min=low, max=high)
    return None


# ----------------------------------------------------------------------------------------
# the tensors that a function brings along

Put = Callable[[torch.Tensor], None]


def _captured_tensors(fn: Any) -> list[tuple[str, torch.Tensor, Put]]:
    """(name, tensor, how to replace it) of parameters, buffers, closures and named globals."""
    found: list[tuple[str, torch.Tensor, Put]] = []
    seen: set[int] = set()

    def slot(owner: Any, key: str) -> Put:
        return functools.partial(owner.__setitem__, key)

    def look(value: Any, name: str, put: Put | None) -> None:
        if isinstance(value, torch.Tensor):
            if put is not None:
                found.append((name, value, put))
            return
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            prefix = f"{name}." if name else ""
            for table in (value._parameters, value._buffers, vars(value)):
                for key, tensor in list(table.items()):
                    if isinstance(tensor, torch.Tensor):
                        look(tensor, prefix + key, slot(table, key))
            for key, child in value._modules.items():
                look(child, prefix + key, None)
        elif isinstance(value, functools.partial):
            look(value.func, name, None)
            # functools.partial is immutable: tensors bound in it cannot be replaced in place.
            for bound in (*value.args, *value.keywords.values()):
                if isinstance(bound, torch.Tensor):
                    raise ValueError(
                        "compile_for expected tensors as arguments or in a closure, got one bound "
                        "by functools.partial"
                    )
                look(bound, name, None)
        elif isinstance(value, types.MethodType):
            look(value.__self__, name, None)
            look(value.__func__, name, None)
        elif isinstance(value, types.FunctionType):
            look_function(value)
        elif isinstance(value, (list, dict)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in list(items):
                look(item, f"{name}[{key!r}]", functools.partial(value.__setitem__, key))

    def look_defaults(function: types.FunctionType, holder: str) -> None:
        defaults = getattr(function, holder)
        items = defaults.items() if isinstance(defaults, dict) else enumerate(defaults or ())
        for key, value in list(items):

            def put(tensor: torch.Tensor, key: Any = key) -> None:
                now = getattr(function, holder)
                if isinstance(now, dict):
                    setattr(function, holder, {**now, key: tensor})
                else:
                    setattr(function, holder, (*now[:key], tensor, *now[key + 1 :]))

            look(value, f"{holder}[{key!r}]", put)

    def look_function(function: types.FunctionType) -> None:
        if function.__module__ and function.__module__.split(".")[0] in ("torch", "triton"):
            return
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            with contextlib.suppress(ValueError):  # an empty cell
                look(cell.cell_contents, name, functools.partial(setattr, cell, "cell_contents"))
        for holder in ("__defaults__", "__kwdefaults__"):
            look_defaults(function, holder)
        for name in _global_names(function.__code__):
            if name in function.__globals__:
                value = function.__globals__[name]
                if isinstance(value, (torch.Tensor, torch.nn.Module, types.FunctionType)):
                    look(value, name, slot(function.__globals__, name))

    look(fn, "", None)
    if not isinstance(fn, (torch.nn.Module, types.FunctionType, types.MethodType)):
        inner = inspect.unwrap(fn)
        if inner is not fn:
            look(inner, "", None)
    return found


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _to_differentiate(
    trace: _Trace, leaves: list[Any], captured: list[Any], on_card: Callable[[Any], torch.Tensor]
) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor on the card) of everything that requires a gradient, each tensor once."""
    named = [(f"args[{i}]", t) for i, t in enumerate(leaves) if isinstance(t, torch.Tensor)]
    named += [(name, on_card(real)) for name, real, _ in captured]
    wanted = {id(t): (name, t) for name, t in reversed(named) if t.requires_grad}
    if not wanted:
        raise ValueError(
            "compile_for expected an argument or a parameter that requires a gradient for "
            "grad=True, got none"
        )
    order = [id(t) for _, t in named]
    return sorted(wanted.values(), key=lambda pair: order.index(id(pair[1])))


# ----------------------------------------------------------------------------------------
# what happens while the compiled function is followed


class _Choices:
    """Answers autotuning questions by name."""

    def __init__(self, force: dict[str, str]) -> None:
        self.force = force
        self.used: set[str] = set()
        self.seen: dict[str, list[str]] = {}
        self.error: ValueError | None = None  # the compiler wraps what is raised inside it

    def choose(self, operation: str, choices: list[Any]) -> Any:
        names = [f"{c.name} {getattr(c, 'description', '')}".strip() for c in choices]
        self.seen.setdefault(operation, names)
        pattern = self.force.get(operation)
        if pattern is None:
            extern = private("torch._inductor.select_algorithm:ExternKernelCaller")
            return next((c for c in choices if isinstance(c, extern)), choices[0])
        self.used.add(operation)
        for choice, name in zip(choices, names, strict=True):
            if re.search(pattern, name):
                return choice
        self.error = ValueError(
            f"force[{operation!r}] expected to match a candidate out of "
            f"{[n.split()[0] for n in names]}, got {pattern!r}"
        )
        raise self.error

    def check_used(self) -> None:
        for operation in self.force:
            if operation not in self.used:
                raise ValueError(
                    f"force expected operations that were autotuned ({sorted(self.seen)}), "
                    f"got {operation!r}"
                )


def _check_forced(force: dict[str, str], decisions: list[report.Decision]) -> None:
    for lowering, pattern in force.items():
        sites = [d for d in decisions if d.lowering == lowering]
        if any(d.source == "forced" and re.fullmatch(pattern, d.chosen) for d in sites):
            continue
        reasons = "; ".join(f"{d.sites}: {d.reason}" for d in sites) or "it looked at no site"
        raise ValueError(
            f"force[{lowering!r}] expected to decide a site with {pattern!r}, got none ({reasons})"
        )


class _Trace:
    """Collects the generated graphs and how the function calls them."""

    def __init__(self) -> None:
        self.mode: Any = None
        self.graphs: list[str] = []
        self.kinds: list[GraphKind] = []
        self.program = Program()
        self.stopped = ""

    def ref(self, tensor: torch.Tensor) -> Ref:
        self.program.keep_alive.append(tensor)  # so that no later storage takes its place
        return Ref(
            tensor.untyped_storage()._cdata,
            tensor.storage_offset(),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
        )

    def on_code(self, graph: Any, code: str) -> Callable[[list[Any]], Any]:
        """Inductor generated ``code`` for ``graph``; returns what runs in its place."""
        index = len(self.graphs)
        self.graphs.append(code)
        kind: GraphKind = "forward"
        if graph.is_backward:
            kind = "backward"
        elif graph.is_inference:
            kind = "inference"
        self.kinds.append(kind)
        names = list(graph.graph_input_names)
        symbols = [_size_text(graph, graph.graph_inputs.get(name, "")) for name in names]
        sizes = [_symbolic_sizes(graph, graph.graph_inputs.get(name)) for name in names]
        self.program.graph_inputs.append(sizes)
        self.program.constants.append({n: t.detach() for n, t in graph.constants.items()})
        strides = compat_virtual.output_strides(graph)
        module = graph.orig_gm

        def call(boxed: list[Any]) -> list[Any]:
            inputs = list(boxed)
            boxed.clear()
            try:
                with self.mode, torch.no_grad():
                    outputs = list(torch.fx.Interpreter(module).run(*inputs))
                    outputs = [
                        _restride(o, s, inputs) for o, s in zip(outputs, strides, strict=True)
                    ]
            except Exception as e:
                raise _CannotFollow(
                    f"graph {index} cannot be followed on tensors without data: "
                    f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
                ) from e
            self.program.calls.append(
                GraphCall(
                    index,
                    tuple(self._seen(v, s) for v, s in zip(inputs, symbols, strict=True)),
                    tuple(self._seen(v, "") for v in outputs),
                )
            )
            return outputs

        return call

    def on_copy(self, source: torch.Tensor, copy: torch.Tensor) -> None:
        """A gradient was copied into another memory format on the way to a backward graph."""
        self.program.calls.append(Copy(self.ref(source), self.ref(copy)))

    def _seen(self, value: Any, symbol: str) -> Ref | Value | None:
        if isinstance(value, torch.Tensor):
            return self.ref(value)
        return None if value is None else Value(value, symbol)

    def finish(self, outputs: Any, wanted: list[tuple[str, torch.Tensor]]) -> None:
        """The function returned ``outputs``; with ``wanted``, go back to those tensors."""
        leaves, self.program.output_spec = pytree.tree_flatten(outputs)
        self.program.output_refs = [
            self.ref(o) if isinstance(o, torch.Tensor) else o for o in leaves
        ]
        if not wanted:
            return
        roots = [
            (i, o) for i, o in enumerate(leaves) if isinstance(o, torch.Tensor) and o.requires_grad
        ]
        if not roots:
            raise ValueError(
                "compile_for expected an output that depends on a tensor that requires a gradient "
                "for grad=True, got none"
            )
        tangents = [torch.empty(o.shape, dtype=o.dtype, device=o.device) for _, o in roots]
        gradients = torch.autograd.grad(
            [o for _, o in roots], [t for _, t in wanted], tangents, allow_unused=True
        )
        self.program.tangent_of = [i for i, _ in roots]
        self.program.tangents = [self.ref(t) for t in tangents]
        self.program.grad_names = [name for name, _ in wanted]
        self.program.grad_refs = [None if g is None else self.ref(g) for g in gradients]


def _symbolic_sizes(graph: Any, graph_input: Any) -> list[str]:
    """The sizes of a graph input as text, so that "s0" can be looked up; [] for a number."""
    sizes = getattr(graph_input, "get_size", None)
    return [_size_text(graph, s) for s in sizes()] if sizes is not None else []


def _size_text(graph: Any, value: Any) -> str:
    """A size as text; one of two symbols found equal stands for both."""
    return str(graph.sizevars.simplify(value) if hasattr(value, "free_symbols") else value)


def _restride(output: Any, stride: tuple[int, ...] | None, inputs: list[Any]) -> Any:
    """``output`` with the strides that the generated code gives it, which the trace cannot know."""
    if not isinstance(output, torch.Tensor) or stride is None or tuple(output.stride()) == stride:
        return output
    storage = output.untyped_storage()._cdata
    if len(stride) != output.dim() or any(
        isinstance(i, torch.Tensor) and i.untyped_storage()._cdata == storage for i in inputs
    ):
        return output
    return torch.empty_strided(output.shape, stride, dtype=output.dtype, device=output.device)
