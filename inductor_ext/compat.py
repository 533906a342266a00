"""Private Inductor names: registries, cache keys, the graph being lowered.

``compat_ir`` (which builds) and ``compat_virtual`` (the test kit's half) are the only other modules
that touch any.

Supported: torch 2.11 to 2.15. Each access is covered by ``tests/core/test_compat.py``, which fails
with the name that moved. Nothing here decides anything; it translates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

SUPPORTED = "torch>=2.11,<2.16"


def supported(version: str) -> bool:
    """Whether a torch version string lies in the supported range."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return (2, 11) <= (major, minor) < (2, 16)


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
        stock = _fallback(op)

    @functools.wraps(stock)
    def lowering(*args: Any, **kwargs: Any) -> Any:
        return around(stock, *args, **kwargs)

    lowering.stock = stock  # type: ignore[attr-defined]
    table[op] = lowering
    return lowering


def _fallback(op: Any) -> Callable[..., Any]:
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
    """
    from torch._inductor.fx_passes import joint_graph, post_grad

    lists = {"joint": joint_graph.pass_patterns, "post_grad": post_grad.pass_patterns}
    if stage not in lists:
        raise ValueError(f"expected a stage among {sorted(lists)}, got {stage!r}")
    lists[stage].append(entry)


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


def hint(expr: Any) -> int:
    """A size as an int: its value, or the value seen when the graph was traced."""
    if isinstance(expr, int):
        return expr
    expr = sympy.sympify(expr)
    if expr.is_number:
        return int(expr)
    sizevars = graph().sizevars
    get = getattr(sizevars, "optimization_hint", None) or sizevars.size_hint
    return int(get(expr))


def is_static(expr: Any) -> bool:
    """Whether a size is a number in this graph."""
    return isinstance(expr, int) or sympy.sympify(expr).is_number


def has_unbacked(exprs: Sequence[Any]) -> bool:
    """Whether any size depends on data (no hint exists)."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return any(bool(free_unbacked_symbols(sympy.sympify(e))) for e in exprs)


def upper_bound(expr: Any) -> int | None:
    """The largest value a size can take (mark_dynamic(max=)); None when unbounded."""
    if is_static(expr):
        return int(expr)
    from torch.utils._sympy.value_ranges import bound_sympy

    shape_env = graph().sizevars.shape_env
    upper = bound_sympy(sympy.sympify(expr), shape_env.var_to_range).upper
    return int(upper) if upper.is_number and upper < 2**31 - 1 else None


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


def ahead_of_time() -> bool:
    """Whether the wrapper is C++ (AOTInductor or cpp_wrapper): a launch there has no attributes."""
    return bool(graph().aot_mode or graph().cpp_wrapper)


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


def without_caches() -> Any:
    """A context in which nothing is read from or written to Inductor's caches."""
    from torch._inductor import config

    return config.patch(force_disable_caches=True)


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


def device_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of the card (virtual in the test kit)."""
    return torch.cuda.get_device_capability(device)


def multiprocessors(device: torch.device) -> int:
    """Number of SMs of the card (virtual in the test kit)."""
    return torch.cuda.get_device_properties(device).multi_processor_count
