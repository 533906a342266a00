"""Operations that no tracer looks into."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from inductor_ext import compat_launch, compat_replay
from inductor_ext.ops._tape import Taped
from inductor_ext.templates import tilings


def opaque_op(
    name: str,
    *,
    mutates_args: Sequence[str] = (),
    tags: Sequence[torch.Tag] = (),
    taped: bool = False,
) -> Callable[[Callable[..., Any]], Any]:
    """``torch.library.custom_op`` whose kernels are launched without a detour.

    A launch function wraps its kernels for operations that are traced (``triton_op``); in one that
    is not, the wrapper only costs the host time. ``taped``: a call like an earlier one repeats its
    launches (see ``_tape``); what is launched must follow from sizes, strides and the like alone.
    """

    def define(fn: Callable[..., Any]) -> Any:
        def launching(*args: Any, **kwargs: Any) -> Any:
            with compat_launch.direct_launches():
                if tilings.watcher is not None and not mutates_args:
                    return tilings.watcher.operation(name, fn, args)
                return fn(*args, **kwargs)

        if taped:
            launching = Taped(launching)
        functools.update_wrapper(launching, fn)

        schema = torch.library.infer_schema(fn, mutates_args=mutates_args)
        op = torch.library.custom_op(
            name, launching, mutates_args=mutates_args, schema=schema, tags=tags
        )
        if taped:
            compat_replay.call_directly(name, launching)
        return op

    return define


def traced_op(name: str) -> Callable[[Callable[..., Any]], Any]:
    """``torch.library.triton_op`` of a function that changes no argument, taped where it runs.

    While launches are watched it is left whole, so that it runs on tensors that exist.
    """

    def define(fn: Callable[..., Any]) -> Any:
        @functools.cache
        def whole() -> Any:
            op = opaque_op(f"{name}_whole")(fn)
            op.register_fake(fn)
            return op

        run = Taped(fn)

        @functools.wraps(fn)
        def traced(*args: Any, **kwargs: Any) -> Any:
            if tilings.watcher is not None and tilings.watcher.whole:
                return whole()(*args, **kwargs)
            return run(*args, **kwargs)

        # The schema is read off it, and names in annotations are the other module's.
        traced.__signature__ = inspect.signature(fn, eval_str=True)  # type: ignore[attr-defined]
        return torch.library.triton_op(name, traced, mutates_args=())

    return define
