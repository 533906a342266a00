"""Kernels that are going to be launched, compiled before that, side by side."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import Any

from inductor_ext.compat_patches import Patches


def compile_ahead(calls: Iterable[Callable[[], Any]]) -> None:
    """Compile the kernels that ``calls`` launch, side by side in threads: nothing is launched.

    The calls run in this thread, on fake tensors, so that no memory is taken nor read. What can't
    be told from those, or can't be compiled, is left to whoever launches it.
    """
    import triton
    from torch._subclasses import FakeTensor, FakeTensorMode
    from triton.runtime.jit import JITFunction

    if not hasattr(triton, "AsyncCompileMode"):  # until triton 3.4
        return
    here, before = threading.get_ident(), JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        only = warmup or threading.get_ident() == here
        return before(kernel, *args, grid=grid, warmup=only, **kwargs)

    def address(t: Any) -> int:  # memory begins at a multiple of 16
        return int(t.storage_offset() * t.element_size())

    with Patches() as patches, concurrent.futures.ThreadPoolExecutor() as pool:
        patches.set(JITFunction, "run", run)
        patches.set(FakeTensor, "data_ptr", address)
        with triton.AsyncCompileMode(pool, ignore_errors=True):
            for call in calls:
                with contextlib.suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True):
                    call()
