"""Operations that no tracer looks into."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from inductor_ext import compat_launch


def opaque_op(
    name: str, *, mutates_args: Sequence[str] = (), tags: Sequence[torch.Tag] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """``torch.library.custom_op`` whose kernels are launched without a detour.

    A launch function wraps its kernels for operations that are traced (``triton_op``); in one that
    is not, the wrapper only costs the host time.
    """

    def define(fn: Callable[..., Any]) -> Any:
        @functools.wraps(fn)
        def launching(*args: Any, **kwargs: Any) -> Any:
            with compat_launch.direct_launches():
                return fn(*args, **kwargs)

        schema = torch.library.infer_schema(fn, mutates_args=mutates_args)
        return torch.library.custom_op(
            name, launching, mutates_args=mutates_args, schema=schema, tags=tags
        )

    return define
