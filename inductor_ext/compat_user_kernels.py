"""Private names about Triton kernels of one's own in an fx graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def kernel_call(
    kernel: Any, constants: Mapping[str, Any], grid: Sequence[Any], arguments: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """(target, keyword arguments) of a node that launches ``kernel`` and gives new values to the
    tensors ``written`` of its arguments: the key to add. The node's value is a dict of them."""
    from torch._higher_order_ops import triton_kernel_wrap

    table = triton_kernel_wrap.kernel_side_table
    return triton_kernel_wrap.triton_kernel_wrapper_functional, {
        "kernel_idx": table.add_kernel(kernel),
        "constant_args_idx": table.add_constant_args(dict(constants)),
        "grid": [tuple(grid)],
        "tma_descriptor_metadata": {},
        "kwargs": dict(arguments),
    }


def takes_wide() -> bool:
    """Whether a kernel's argument may be a number from 2^31 on: Inductor asked its digits for
    symbols before 2.13."""
    from . import compat

    major, minor = (int(part) for part in compat.minor_version("torch").split("."))
    return (major, minor) >= (2, 13)


def sort_graph(graph: Any) -> None:
    """Put every node behind those it reads; a node that need not move does not."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)


def is_floor_division(expr: Any) -> bool:
    """Whether a size expression is a // b, its arguments being a and b."""
    from torch.utils._sympy.functions import FloorDiv

    return isinstance(expr, FloorDiv)


def is_maximum(expr: Any) -> bool:
    """Whether a size expression is the largest of its arguments, as strides of what is cut are."""
    from torch.utils._sympy.functions import Max

    return isinstance(expr, Max)
