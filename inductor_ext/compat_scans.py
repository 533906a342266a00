"""Private names about torch's own scans: their higher-order operation, their shapes."""

from __future__ import annotations

import functools
from typing import Any

import torch


def associative_scan() -> Any:
    """The higher-order operation of ``associative_scan(combine, leaves, lifted)``."""
    return torch.ops.higher_order.associative_scan


def takes_sizes() -> bool:
    """Whether Inductor lowers an associative_scan that is given sizes besides its leaves, as all
    are whose leaves vary in size."""
    from . import compat

    major, minor = (int(part) for part in compat.minor_version("torch").split("."))
    return (major, minor) >= (2, 13)


def trace_long_scans() -> None:
    """Let cumsum and cumprod of a few 10^9 elements be traced.

    torch works out the shape of their result from a mask of the length squared, whose number of
    elements is no int64 then ("integer multiplication overflow"). Only such calls are changed.
    """
    from torch import _refs

    stock = _refs._cumsumprod_common
    if hasattr(stock, "inductor_ext"):
        return

    @functools.wraps(stock)
    def common(func: Any, init: Any, a: Any, dim: int, **kwargs: Any) -> Any:
        sizes = a.shape
        if a.dim() == 0 or not all(type(s) is int for s in sizes) or kwargs.get("out") is not None:
            return stock(func=func, init=init, a=a, dim=dim, **kwargs)
        if a.numel() * sizes[dim] < 2**63:
            return stock(func=func, init=init, a=a, dim=dim, **kwargs)
        whole = not (a.dtype.is_floating_point or a.dtype.is_complex)
        dtype = kwargs.get("dtype") or (torch.int64 if whole else a.dtype)
        return torch.empty(sizes, dtype=dtype, device=a.device)

    common.inductor_ext = True  # type: ignore[attr-defined]
    _refs._cumsumprod_common = common
