"""Private Inductor names: registries, cache keys, the graph being lowered.

Only the ``compat_*`` modules touch any: ``compat_ir`` builds, ``compat_dispatch`` branches,
``compat_launch`` launches kernels, ``compat_runtime`` asks what runs, ``compat_dynamo`` which sizes
are dynamic, ``compat_trace`` writes to the trace, ``compat_virtual`` and ``compat_patches`` are the
test kit's half.

Supported: torch 2.11 to 2.15. Each access is covered by ``tests/core/test_compat*.py``, which fail
with the name that moved. Nothing here decides anything; it translates.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import sympy
import torch

SUPPORTED = "torch>=2.11,<2.16"


def supported(version: str) -> bool:
    """Whether a torch version string lies in the supported range."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return (2, 11) <= (major, minor) < (2, 16)


def import_inductor() -> None:
    """Import Inductor without waking CUDA.

    Its modules ask for a card while they are imported, which by torch's default makes CUDA unusable
    in processes forked later; torch has a variable to ask the driver's library instead.
    """
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        importlib.import_module("torch._inductor.lowering")
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


# --- registries -----------------------------------------------------------------------------------


def _lowering_table() -> dict[Any, Callable[..., Any]]:
    from torch._inductor.lowering import lowerings

    return lowerings


def lowering_of(op: Any) -> Callable[..., Any] | None:
    """The function Inductor lowers ``op`` with at present."""
    return _lowering_table().get(op)


def wrap_lowering(op: Any, around: Callable[..., Any]) -> Callable[..., Any]:
    """Put ``around(stock, *args, **kwargs)`` in place of the lowering of ``op``; returns it.

    An operation without a lowering (a user's custom op) gets Inductor's fallback as its stock.
    """
    table = _lowering_table()
    stock = table.get(op)
    if stock is None:
        stock = fallback(op)

    @functools.wraps(stock)
    def lowering(*args: Any, **kwargs: Any) -> Any:
        return around(stock, *args, **kwargs)

    lowering.stock = stock  # type: ignore[attr-defined]
    table[op] = lowering
    return lowering


def fallback(op: Any) -> Callable[..., Any]:
    """What Inductor makes of an operation it has no lowering for, at its first call."""
    from torch._inductor import lowering
    from torch._library.utils import get_layout_constraint_tag

    tag = get_layout_constraint_tag(op, with_default=True)
    lowering.make_fallback(
        op,
        layout_constraint=lowering.tag_to_layout_constraint(tag),
        warn=False,
        override_decomp=True,
    )
    return _lowering_table()[op]


def append_graph_pass(stage: str, entry: Any) -> None:
    """Append an object with ``apply(graph) -> int`` to the pattern passes of a stage.

    These lists are module globals that Inductor runs in order, so no custom-pass slot is taken.
    "traced_joint" comes right behind the fused attention patterns, which want the graph as it was
    traced; "early_joint" behind that and before the rewriting of scaled softmaxes. "pre_grad" is
    the graph of torch functions in front of AOTAutograd, for which Inductor has no list.
    """
    from torch._inductor.fx_passes import joint_graph, post_grad

    lists = {
        "traced_joint": joint_graph.pass_patterns,
        "early_joint": joint_graph.pass_patterns,
        "joint": joint_graph.pass_patterns,
        "post_grad": post_grad.pass_patterns,
    }
    if stage not in (*lists, "pre_grad"):
        raise ValueError(f"expected a stage among {sorted([*lists, 'pre_grad'])}, got {stage!r}")
    if stage == "pre_grad":
        from . import compat_pre_grad

        compat_pre_grad.append_pass(entry)
        return
    if stage == "early_joint":
        from .compat_fx import scaled_softmax_patterns

        lists[stage].insert(lists[stage].index(scaled_softmax_patterns()), entry)
    elif stage == "traced_joint":
        first = lists[stage].index(joint_graph.patterns) + 1
        lists[stage].insert(first + _traced.get(stage, 0), entry)
        _traced[stage] = _traced.get(stage, 0) + 1
    else:
        lists[stage].append(entry)


_traced: dict[str, int] = {}  # entries that stand at the stage, in order


_SALT_KEY = "inductor_ext"


def install_salt(revision: Callable[[], str]) -> None:
    """Hash ``revision()`` into the FX-graph and AOTAutograd cache keys.

    Every entry of ``custom_backend_passes`` is hashed; the pass itself only runs for graphs on a
    device of that name, and no device is called inductor_ext.
    """
    from torch._inductor.codegen.common import custom_backend_passes
    from torch._inductor.custom_graph_pass import CustomGraphModulePass

    class Salt(CustomGraphModulePass):
        def __call__(self, gm: Any) -> None:
            return None

        def uuid(self) -> str:
            return revision()

    custom_backend_passes[_SALT_KEY] = Salt()


def salt_installed() -> bool:
    """Whether the revision is (still) part of the cache keys."""
    from torch._inductor.codegen.common import custom_backend_passes

    return _SALT_KEY in custom_backend_passes


_SLOTS = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
    "_pre_fusion_custom_pass",
    "_post_fusion_custom_pass",
    "custom_partitioner_fn",
    "inductor_choices_class",
    "external_matmul",
)


def pass_slots() -> dict[str, Any]:
    """Inductor's single-occupant slots and what sits in them. The plugin uses none."""
    from torch._inductor import config

    return {name: getattr(config, name, None) or None for name in _SLOTS}


def cache_dir() -> str:
    """Inductor's cache directory."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir as directory

    return directory()


# --- the graph being lowered ----------------------------------------------------------------------


def graph() -> Any:
    """The GraphLowering in progress."""
    from torch._inductor.virtualized import V

    return V.graph


def current_node() -> Any:
    """The fx node being lowered; None when a lowering is called outside ``call_function``."""
    return getattr(graph(), "current_node", None)


def shape_env() -> Any:
    """The ShapeEnv of the compile in progress, in a graph pass or in a lowering; None without."""
    from torch._inductor.virtualized import V

    sizevars = getattr(V.graph, "sizevars", None)
    if sizevars is not None:
        return sizevars.shape_env
    env = getattr(V.fake_mode, "shape_env", None)
    # In front of autograd only the tracing context knows it.
    return getattr(torch._guards.detect_fake_mode(), "shape_env", None) if env is None else env


def expr(size: Any) -> Any:
    """The sympy expression of a SymInt; an int as it is."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


class Assumed(NamedTuple):
    """What holds for a size expression in one branch: a typical value, and bounds (None: open)."""

    value: int
    lo: int
    hi: int | None


_assumptions = threading.local()


@contextlib.contextmanager
def assume(sizes: Mapping[Any, Assumed]) -> Iterator[None]:
    """``hint`` and ``upper_bound`` answer for these sympy expressions in this thread."""
    before = getattr(_assumptions, "sizes", {})
    _assumptions.sizes = {**before, **sizes}
    try:
        yield
    finally:
        _assumptions.sizes = before


def substitute(expr: Any, sizes: Mapping[Any, Any]) -> Any:
    """``expr`` with the sympy expressions ``sizes`` replaced, the largest first."""
    expr = sympy.sympify(expr)
    for key in sorted(sizes, key=lambda k: -len(k.free_symbols)):
        expr = expr.xreplace({key: sizes[key]}) if key.is_Symbol else expr.subs(key, sizes[key])
    return expr


def assuming(expr: Any, sizes: Mapping[Any, Any]) -> Any:
    """The same, but ``expr`` as it is where it has no value at these sizes."""
    try:
        return substitute(expr, sizes)
    except ZeroDivisionError:
        return sympy.sympify(expr)


def hint(expr: Any) -> int:
    """A size as an int: its value, the value assumed here, or the value seen at tracing."""
    if isinstance(expr, int):
        return expr
    assumed = getattr(_assumptions, "sizes", {})
    expr = assuming(expr, {key: sympy.Integer(a.value) for key, a in assumed.items()})
    if expr.is_number:
        return int(expr)
    sizevars = getattr(graph(), "sizevars", None)
    if sizevars is None:  # in a graph pass
        return int(substitute(expr, _traced_sizes()))
    get = getattr(sizevars, "optimization_hint", None) or sizevars.size_hint
    return int(get(expr))


def _traced_sizes() -> Mapping[Any, Any]:
    env = shape_env()
    return getattr(env, "backed_var_to_val", None) or env.var_to_val


def is_static(expr: Any) -> bool:
    """Whether a size is a number in this graph."""
    return isinstance(expr, int) or sympy.sympify(expr).is_number


def has_unbacked(exprs: Sequence[Any]) -> bool:
    """Whether any size depends on data (no hint exists)."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return any(bool(free_unbacked_symbols(sympy.sympify(e))) for e in exprs)


def upper_bound(expr: Any) -> int | None:
    """The largest value a size can take (mark_dynamic(max=)); None when unbounded."""
    return bounds(expr)[1]


def bounds(expr: Any) -> tuple[int, int | None]:
    """The least and the largest value a size can take, within what is assumed here."""
    if is_static(expr):
        return int(expr), int(expr)
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    ranges = dict(shape_env().var_to_range)
    stands_for = {}
    for i, (key, a) in enumerate(getattr(_assumptions, "sizes", {}).items()):
        symbol = sympy.Symbol(f"assumed{i}", integer=True, nonnegative=True)
        ranges[symbol] = ValueRanges(a.lo, bound_sympy(key, ranges).upper if a.hi is None else a.hi)
        stands_for[key] = symbol
    found = bound_sympy(substitute(expr, stands_for), ranges)
    lower, upper = found.lower, found.upper
    return (
        max(int(lower), 0) if lower.is_number and lower > -(2**31) else 0,
        int(upper) if upper.is_number and upper < 2**31 - 1 else None,
    )


class SizeDecides(Exception):
    """Python code compared a dynamic size: what follows would hold for some sizes only."""


@contextlib.contextmanager
def no_new_guards() -> Iterator[None]:
    """SizeDecides is raised where a guard on a size would be taken."""
    env = shape_env()

    def refuse(expr: Any, value: Any) -> None:
        raise SizeDecides(f"{expr} was asked for")

    env._check_frozen = refuse  # asked before every guard is added
    try:
        yield
    finally:
        del env._check_frozen


def statically_divisible(expr: Any, by: int) -> bool:
    """Whether a size is a multiple of ``by`` for every value it can take."""
    if is_static(expr):
        return int(expr) % by == 0
    return graph().sizevars.statically_known_multiple_of(expr, by)


def wants_measurement() -> bool:
    """Whether this compile runs in a max-autotune mode for matrix products."""
    from torch._inductor import config

    return bool(config.max_autotune or config.max_autotune_gemm) and not getattr(
        config, "deterministic", False
    )


def replays_graphs() -> bool:
    """Whether this compile's program is meant to be replayed as a CUDA graph, where the time that a
    call takes the host does not count."""
    from torch._inductor import config

    return bool(config.triton.cudagraphs)


def ahead_of_time() -> bool:
    """Whether the wrapper is C++ (AOTInductor or cpp_wrapper): a launch there has no attributes."""
    from torch._inductor import config
    from torch._inductor.virtualized import V

    in_pass = bool(V.aot_compilation) or config.cpp_wrapper  # there is no graph yet
    cpp_wrapper = getattr(graph(), "cpp_wrapper", in_pass)
    return bool(getattr(graph(), "aot_mode", in_pass) or cpp_wrapper)


def draws_as_eager() -> bool:
    """Whether compiled programs are to draw the random numbers that eager would."""
    from torch._inductor import config

    return bool(config.fallback_random)


def in_aot_mode() -> bool:
    """Whether this is AOTInductor's compile: what is generated is packaged, not run."""
    from torch._inductor.virtualized import V

    return bool(getattr(graph(), "aot_mode", V.aot_compilation))


def float32_precision() -> str:
    """ "ieee" or "tf32": what torch's float32 matmul setting asks for on the card."""
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if precision in ("ieee", "tf32"):
        return precision
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def on_real_card() -> bool:
    """Whether kernels can run: a card is present, and no virtual one stands in for it."""
    from . import compat_virtual

    return compat_virtual.active_card() is None and torch.cuda.is_available()


@contextlib.contextmanager
def without_caches() -> Iterator[None]:
    """A context in which nothing is read from or written to Inductor's caches.

    Dynamo warns that its profile is off then, which is meant.
    """
    from torch._inductor import config

    with warnings.catch_warnings(), config.patch(force_disable_caches=True):
        warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
        yield


def caches_on() -> bool:
    """Whether anything may be read from or written to Inductor's caches."""
    from torch._inductor import config

    return not config.force_disable_caches


def settings_digest() -> str:
    """Inductor's settings that its own cache keys contain, as a hash."""
    from torch._inductor import config

    settings = config.save_config_portable(ignore_private_configs=False)
    text = repr(sorted((name, repr(value)) for name, value in settings.items()))
    return hashlib.sha256(re.sub(r" at 0x[0-9a-f]+", "", text).encode()).hexdigest()


def strict() -> Any:
    """A context in which a failing lowering raises (``patch`` is added to the config module)."""
    from . import config

    return getattr(config, "patch")(strict=True)  # noqa: B009


def exceeds_int32(*sizes: Any) -> bool:
    """Whether a tensor of these sizes may need 64-bit offsets."""
    numel = 1
    for size in sizes:
        bound = upper_bound(size)
        if bound is None:
            return True
        numel *= bound
    return numel >= 2**31


def too_large_for_int32(x: Any) -> bool:
    """Whether the offsets into a realized tensor may need 64 bits."""
    span = 1
    for size, stride in zip(x.get_size(), x.get_stride(), strict=True):
        size_bound, stride_bound = upper_bound(size), upper_bound(stride)
        if size_bound is None or stride_bound is None:
            return True
        span += max(size_bound - 1, 0) * abs(stride_bound)
    return span >= 2**31


def symbols_of(size: Any) -> frozenset[Any]:
    """The symbols in a size expression; none for an int."""
    return frozenset(getattr(size, "free_symbols", ()))


def card_name() -> str | None:
    """Name of the current card (virtual in the test kit); None without one."""
    if not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).name)


def device_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of the card (virtual in the test kit)."""
    return torch.cuda.get_device_capability(device)


def multiprocessors(device: torch.device) -> int:
    """Number of SMs of the card (virtual in the test kit)."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def version(package: str) -> str:
    """The whole version of an imported package."""
    return str(importlib.import_module(package).__version__)


def minor_version(package: str) -> str:
    """Major and minor version of an imported package: "2.13"."""
    return ".".join(version(package).split(".")[:2])
