"""Custom-op autotuning: several implementations of one operation, the fastest right one emitted.

Call-compatible with Inductor's ``register_custom_op_autotuning``, on every supported torch, without
its limits: operations may have several outputs, candidates are timed by graph replay with cold L2
together with the pointwise region that follows, each is checked against the default implementation
before it may win, and the winner is inlined by the same code path that was measured. The default
implementation is always a candidate, called ``stock``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from . import choosing, compat, compat_ir, matching, plan, ranged_op, registry

log = logging.getLogger("inductor_ext")


class CustomOpConfig:
    """One candidate: a decomposition of the operation and the parameters it is called with.

    ``CustomOpConfig(fn, block=64)`` calls ``fn(*tensors, block=64, **runtime_kwargs)``; without a
    function the operation itself is called with those parameters. ``config_patches`` are Inductor
    config values in force while this candidate's kernels are generated (torch 2.12 and newer).
    """

    def __init__(
        self,
        decomposition: Callable[..., Any] | None = None,
        config_patches: Mapping[str, Any] | None = None,
        **params: Any,
    ) -> None:
        if decomposition is not None and not callable(decomposition):
            raise TypeError(
                f"expected a callable decomposition, got {type(decomposition).__name__}"
            )
        self.decomposition = decomposition
        self.config_patches = dict(config_patches or {})
        self.params = params


@dataclasses.dataclass
class _Registration:
    op: Any
    name: str
    configs: Sequence[Any] | None
    config_generator: Callable[[dict[str, torch.Tensor]], Sequence[Any]] | None
    input_gen_fns: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]
    min_speedup: float
    include_fallback: bool
    dispatch_on: ranged_op.DispatchOn | None

    def how(self) -> choosing.Measure:
        """How a site is measured."""
        return choosing.Measure(
            always=True,
            threshold=self.min_speedup,
            stock_may_win=self.include_fallback,
            input_gen_fns=self.input_gen_fns,
        )

    def candidates_for(self, fakes: dict[str, torch.Tensor]) -> Sequence[Any]:
        if self.configs is not None:
            return self.configs
        assert self.config_generator is not None
        return _checked(self.config_generator(fakes), allow_empty=True)

    def salt(self) -> str:
        """Functions of the user's decide what is compiled; their text belongs to the cache key."""
        parts = [self.name, str(self.op), str(self.min_speedup), str(self.include_fallback)]
        parts.append(str(self.dispatch_on))
        functions = [self.config_generator] if self.config_generator else []
        for config in self.configs or ():
            functions.append(config.decomposition)
            parts.append(
                repr((sorted(config.params.items()), sorted(config.config_patches.items())))
            )
        for fn in functions:
            if fn is not None:
                parts.append(_text(fn))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _text(fn: Any) -> str:
    """What can change what a function computes: its module's text and what it is bound to."""
    if isinstance(fn, functools.partial):
        return f"partial {_text(fn.func)} {fn.args!r} {sorted(fn.keywords.items())!r}"
    code = getattr(fn, "__code__", None)
    if code is None:
        return repr(fn)
    try:
        source = inspect.getsource(inspect.getmodule(fn) or fn)
    except (OSError, TypeError):
        source = repr((code.co_code, code.co_consts, code.co_names))
    bound = [_text(cell.cell_contents) for cell in fn.__closure__ or ()]
    return "\n".join([fn.__qualname__, source, repr((fn.__defaults__, fn.__kwdefaults__)), *bound])


_registrations: dict[Any, _Registration] = {}
# Kept alive: when torch collects a replaced definition it also drops the new one's operator object.
_definitions: list[Any] = []
_active = threading.local()


def _checked(configs: Any, *, allow_empty: bool = False) -> Sequence[Any]:
    if not isinstance(configs, (list, tuple)):
        raise TypeError(f"expected configs as a list, got {type(configs).__name__}")
    if not configs and not allow_empty:
        raise ValueError("expected at least one config, got an empty list")
    for config in configs:
        if not all(hasattr(config, a) for a in ("decomposition", "params")):
            raise TypeError(
                f"expected each config as a CustomOpConfig, got {type(config).__name__}"
            )
    return [
        c  # Inductor's own has no config_patches on torch 2.11
        if hasattr(c, "config_patches")
        else CustomOpConfig(c.decomposition, **c.params)
        for c in configs
    ]


def register_custom_op_autotuning(
    custom_op: Any,
    configs: Sequence[Any] | None = None,
    config_generator: Callable[[dict[str, torch.Tensor]], Sequence[Any]] | None = None,
    name: str | None = None,
    input_gen_fns: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] | None = None,
    dispatch_on: Mapping[str, Any] | None = None,
    split_points: Sequence[int] | None = None,
    min_speedup_threshold: float = 1.0,
    benchmark_with_cudagraphs: bool = True,
    include_fallback: bool = True,
) -> None:
    """Let compiled code choose among implementations of ``custom_op``.

    ``custom_op`` is a ``torch.library.custom_op`` or an aten ``OpOverload``. Give ``configs``
    (``CustomOpConfig`` values, Inductor's own accepted) or ``config_generator``, which gets the
    tensor arguments by schema name as fake tensors and returns configs. ``input_gen_fns`` maps
    argument names to functions from a fake tensor to a tensor on the card, used for measuring
    (default: random). A candidate must beat stock by ``min_speedup_threshold``. Timing always
    replays CUDA graphs, whatever ``benchmark_with_cudagraphs`` says. Registering an operation again
    replaces what was registered. Measures on the first compile on a card, in every mode; on a
    virtual card the choice is stock unless forced. Without ``include_fallback`` stock only
    serves as the reference: the fastest right candidate is taken, or the first where nothing can be
    measured. Outputs are as deterministic as what is chosen.

    ``dispatch_on={"tensor_name": "x", "dim": 0}`` lets the choice depend on that size of x (a
    negative ``dim`` counts from the end) where it is one dynamic dimension or an expression of one:
    the compiled program has one branch on the host around the operation and what fuses behind it,
    and runs for every size without compiling anew. The ranges are ``split_points`` (at most 7, each
    the last size of its range), each scored by the geometric mean at three sizes; left out, they
    are found by a sweep and bisection, at most 8, from at most 40 measured sizes (each measured up
    to 8 times where the times are noisy). All tensors that share the dimension are resized.
    Sizes beyond ``range_upper_bound`` (default 65536), or beyond what fits into 80% of the card's
    free memory, are not measured and get the last range's choice. A static size is measured as it
    is. Ranges of a loaded plan come before, and then nothing is measured. A candidate that compares
    a dynamic size in Python is none, and the report says so: it would make the graph hold for some
    sizes only.

    Raises TypeError for a wrong kind of argument, ValueError for contradictory ones; a ``dim`` that
    the tensor does not have is an IndexError when a graph is compiled: a warning and stock code,
    as for every failure then.
    """
    op = getattr(custom_op, "_opoverload", custom_op)
    if not isinstance(op, torch._ops.OpOverload):
        raise TypeError(
            f"expected a torch.library.custom_op or an OpOverload, got {type(custom_op).__name__}"
        )
    if (configs is None) == (config_generator is None):
        raise ValueError("expected exactly one of configs and config_generator")
    ranged = ranged_op.checked(dispatch_on, split_points, op)
    if min_speedup_threshold < 1.0:
        raise ValueError(f"expected min_speedup_threshold >= 1, got {min_speedup_threshold}")
    arguments = [a.name for a in op._schema.arguments]
    unknown = set(input_gen_fns or ()) - set(arguments)
    if unknown:
        raise ValueError(
            f"expected input_gen_fns keys among {arguments}, got {', '.join(sorted(unknown))}"
        )
    entry = _Registration(
        op,
        name or f"{op._name}_autotuned",
        None if configs is None else list(_checked(configs)),
        config_generator,
        dict(input_gen_fns or {}),
        min_speedup_threshold,
        include_fallback,
        ranged,
    )
    for other in [o for o, r in _registrations.items() if o is not op and r.name == entry.name]:
        if other._name == op._name:  # defined anew, as when a notebook cell runs twice
            registry.unregister(entry.name)
            del _registrations[other]
    _definitions.append(custom_op)
    known = op in _registrations
    if known:
        entry.name = _registrations[op].name
    if not known:
        registry.register(
            registry.Lowering(
                entry.name,
                {op: lambda *a, **k: _lower(op, *a, **k)},
                sizes={op: functools.partial(_sizes, op)},
            ),
            first=True,
        )
    _registrations[op] = entry
    registry.add_salt(f"custom_op {op}", entry.salt)


@contextlib.contextmanager
def _inside(op: Any) -> Iterator[None]:
    """While a candidate of ``op`` is lowered, ``op`` within it means the default implementation."""
    before: frozenset[Any] = getattr(_active, "ops", frozenset())
    _active.ops = before | {op}
    try:
        yield
    finally:
        _active.ops = before


def _lower(op: Any, *args: Any, **kwargs: Any) -> Any:
    if op in getattr(_active, "ops", frozenset()):
        return None
    entry = _registrations[op]
    arguments = [a.name for a in op._schema.arguments]
    bound = {**dict(zip(arguments, args, strict=False)), **kwargs}
    tensors = {n: v for n, v in bound.items() if compat_ir.is_tensor_ir(v)}
    scalars = {n: v for n, v in bound.items() if n not in tensors}
    site = _site(op, tensors)
    if any(compat_ir.holds_tensor_ir(v) for v in scalars.values()):
        return choosing.leave(entry.name, site, "an argument is a list of tensors")
    if not tensors:
        return choosing.leave(entry.name, site, "the operation has no tensor input")
    if entry.dispatch_on is not None:
        size = _dispatched_size(entry.dispatch_on, tensors)
        if compat.has_unbacked([size]):
            return choosing.leave(entry.name, site, f"{size}, which decides, depends on data")
    for tensor in tensors.values():
        compat_ir.realize(tensor)
    fakes = {n: compat_ir.fake_of(t) for n, t in tensors.items()}
    configs = entry.candidates_for(fakes)
    if not configs:
        return choosing.leave(entry.name, site, "the generator returned no config")
    names = _named(configs)
    node = compat.current_node()

    def emit(config: Any) -> Any:
        return _inline(op, config, tensors, fakes, scalars, node)

    candidates = [
        choosing.Candidate(n, functools.partial(emit, config)) for n, config in names.items()
    ]
    if entry.include_fallback:
        unmeasured = choosing.STOCK, "no card to measure on: the default implementation"
    else:
        unmeasured = candidates[0].name, "no card to measure on: the first candidate"
    return choosing.choose(
        entry.name,
        site,
        candidates,
        lambda: unmeasured,
        key=f"{entry.salt()} {site} {matching.consumers_key()}",
        measure=entry.how(),
        problem=_described(entry, tensors, scalars),
    )


def _site(op: Any, tensors: Mapping[str, Any]) -> str:
    sizes = " ".join("[" + ",".join(str(s) for s in t.get_size()) + "]" for t in tensors.values())
    return f"{op} {sizes}"


def _named(configs: Sequence[Any]) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for config in configs:
        names[_unique(_name(config), names)] = config
    return names


def _dispatched_size(on: ranged_op.DispatchOn, tensors: Mapping[str, Any]) -> Any:
    """The size that the choice depends on."""
    if on.tensor not in tensors:
        raise ValueError(f"expected a tensor as {on.tensor!r}, which dispatch_on names, got none")
    size = tensors[on.tensor].get_size()
    if not -len(size) <= on.dim < len(size):
        raise IndexError(
            f"expected dispatch_on's dim below {len(size)} for {on.tensor!r}, got {on.dim}"
        )
    return size[on.dim]


def _sizes(op: Any, node: Any) -> Any:
    """How the choice at a call in the fx graph depends on its sizes."""
    entry = _registrations[op]
    if entry.dispatch_on is None:
        return None
    arguments = [a.name for a in op._schema.arguments]
    bound = {**dict(zip(arguments, node.args, strict=False)), **node.kwargs}
    factors = {
        n: matching.Traced(v)
        for n, v in bound.items()
        if isinstance(getattr(v, "meta", {}).get("val"), torch.Tensor)
    }
    scalars = {n: v for n, v in bound.items() if n not in factors}
    if any(isinstance(v, torch.fx.Node) for v in torch.utils._pytree.tree_leaves(scalars)):
        return None
    size = _dispatched_size(entry.dispatch_on, factors)
    if compat.has_unbacked([s for t in factors.values() for s in t.get_size()]):
        return None
    fakes = {n: t.value for n, t in factors.items()}
    names, note = [], ""
    for name, config in _named(entry.candidates_for(fakes)).items():
        try:
            if not compat.is_static(size):
                with compat.no_new_guards():
                    _trace(op, config, fakes, scalars)
        except compat.SizeDecides as error:
            note = f"{name} is no candidate, it compares a dynamic size in Python ({error})"
            continue
        except Exception:  # the measurement will say so
            log.debug("tracing %s for %s failed", name, op, exc_info=True)
        names.append(name)
    if not names:
        return None
    problem = _described(entry, factors, scalars)
    site = _site(op, factors)
    symbols = compat.symbols_of(size)
    others = [compat.hint(s) for s in problem.dims.values() if compat.symbols_of(s) - symbols]
    bounds = [compat.bounds(s) for s in sorted(symbols, key=str)]
    return ranged_op.OpSite(
        entry.name,
        site,
        node,
        entry.dispatch_on,
        size,
        problem,
        names,
        entry.how(),
        choosing.STOCK if entry.include_fallback else names[0],
        note,
        f"{entry.salt()} {site} {scalars} {matching.consumers_key(node)} {others} {bounds}",
    ).sensitivity()


def _described(
    entry: _Registration, tensors: Mapping[str, Any], scalars: Mapping[str, Any]
) -> choosing.Problem:
    """The problem as plans know it: sizes are called "x.0", dynamic ones have ranges."""
    sizes = {f"{n}.{i}": s for n, t in tensors.items() for i, s in enumerate(t.get_size())}
    static = {name: int(size) for name, size in sizes.items() if compat.is_static(size)}
    dtypes = [str(t.get_dtype()).removeprefix("torch.") for t in tensors.values()]
    settings = ",".join(f"{n}={v}" for n, v in scalars.items()).replace(" ", "")
    key = plan.Key.of(
        entry.name,
        f"{entry.op}({settings})",
        ",".join(dtypes),
        ",".join(choosing.layout(t.get_stride()) for t in tensors.values()),
        static,
    )
    return choosing.Problem(key, {n: s for n, s in sizes.items() if n not in static})


def _name(config: Any) -> str:
    fn = config.decomposition
    named = fn.func if isinstance(fn, functools.partial) else fn
    label = getattr(named, "__name__", "default")
    settings = {**config.params, **config.config_patches}
    return label + "".join(f"_{k}{v}" for k, v in settings.items())


def _unique(name: str, taken: Mapping[str, Any]) -> str:
    number = 2
    unique = name
    while unique in taken or unique == choosing.STOCK:
        unique, number = f"{name}_{number}", number + 1
    return unique


def _trace(
    op: Any, config: Any, fakes: Mapping[str, Any], scalars: Mapping[str, Any]
) -> compat_ir.Traced:
    """A candidate traced on fake tensors.

    Tensors that lead the schema go by position (a decomposition may name them as it likes), the
    others by name, as everything that is no tensor.
    """
    fn = config.decomposition or op
    settings = {**scalars, **config.params}
    names = list(fakes)
    leading = 0
    for argument, name in zip(op._schema.arguments, names, strict=False):
        if argument.name != name or argument.kwarg_only:
            break
        leading += 1

    def call(*inputs: Any) -> Any:
        by_name = dict(zip(names[leading:], inputs[leading:], strict=True))
        return fn(*inputs[:leading], **by_name, **settings)

    return compat_ir.trace(call, list(fakes.values()))


def _inline(
    op: Any,
    config: Any,
    tensors: dict[str, Any],
    fakes: dict[str, Any],
    scalars: dict[str, Any],
    node: Any,
) -> Any:
    """Trace a candidate on fake tensors and lower it in place of the operation."""
    traced = _trace(op, config, fakes, scalars)
    _same_outputs(traced.outputs, node.meta["val"])
    with _inside(op):
        return compat_ir.inline(traced.gm, list(tensors.values()), config.config_patches)


def _same_outputs(got: Any, expected: Any) -> None:
    """A candidate must return what the operation does: number, shapes and dtypes of outputs."""
    got_list = list(got) if isinstance(got, (list, tuple)) else [got]
    want = list(expected) if isinstance(expected, (list, tuple)) else [expected]

    def show(tensors: list[Any]) -> str:
        return ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in tensors)

    same = len(got_list) == len(want) and all(
        g.dtype == w.dtype and tuple(g.shape) == tuple(w.shape)
        for g, w in zip(got_list, want, strict=True)
    )
    if not same:
        raise TypeError(f"expected outputs {show(want)}, got {show(got_list)}")
