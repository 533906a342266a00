"""Kernels that are going to be launched, compiled before that, side by side."""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterable
from typing import Any

from inductor_ext.compat_patches import Patches

_alone = threading.Lock()  # what is patched is the process's


def compile_ahead(calls: Iterable[Callable[[], Any]]) -> None:
    """Compile the kernels that ``calls`` launch, side by side in threads: nothing is launched.

    The calls run in this thread, on fake tensors, so that no memory is taken nor read. What can't
    be told from those, or can't be compiled, is left to whoever launches it.
    """
    # In a context of its own: triton 3.6 leaves its mode behind where waiting is interrupted.
    contextvars.copy_context().run(_compile_ahead, calls)


def _compile_ahead(calls: Iterable[Callable[[], Any]]) -> None:
    import triton
    from torch._subclasses import FakeTensor, FakeTensorMode
    from triton.runtime.jit import JITFunction

    if not hasattr(triton, "AsyncCompileMode"):  # until triton 3.4
        return
    here = threading.get_ident()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        only = warmup or threading.get_ident() == here
        return before(kernel, *args, grid=grid, warmup=only, **kwargs)

    def address(t: Any) -> int:  # memory begins at a multiple of 16
        return int(t.storage_offset() * t.element_size())

    with _alone, Patches() as patches, concurrent.futures.ThreadPoolExecutor() as pool:
        before = JITFunction.run
        patches.set(JITFunction, "run", run)
        patches.set(FakeTensor, "data_ptr", address)
        with triton.AsyncCompileMode(pool, ignore_errors=True):
            for call in calls:
                with contextlib.suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True):
                    call()
