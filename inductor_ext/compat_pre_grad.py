"""Private names about the graph in front of AOTAutograd: where Inductor edits it, and how to run it
once more on its own fake tensors without leaving a trace."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

_entries: list[Any] = []


def append_pass(entry: Any) -> None:
    """Run ``entry.apply(graph)`` behind Inductor's own passes over the graph in front of
    AOTAutograd. Inductor keeps no list of these, so the function that runs them is wrapped."""
    from torch._inductor import compile_fx

    if not is_installed():
        stock = compile_fx.pre_grad_passes

        @functools.wraps(stock)
        def pre_grad_passes(gm: Any, *args: Any, **kwargs: Any) -> Any:
            gm = stock(gm, *args, **kwargs)
            for own in _entries:
                own.apply(gm.graph)
            return gm

        pre_grad_passes.inductor_ext = True  # type: ignore[attr-defined]
        compile_fx.pre_grad_passes = pre_grad_passes
    _entries.append(entry)


def is_installed() -> bool:
    """Whether Inductor runs what was appended; another package may have replaced the function, and
    is in front of ours then if it calls what it found."""
    from torch._inductor import compile_fx

    found: Any = compile_fx.pre_grad_passes
    while found is not None and not getattr(found, "inductor_ext", False):
        found = getattr(found, "__wrapped__", None)
    return found is not None


def entries() -> list[Any]:
    """What was appended, in order."""
    return _entries


def fake_mode_of(tensor: Any) -> Any:
    """The fake mode of a plain fake tensor; None for anything else."""
    from torch._subclasses.fake_tensor import FakeTensor

    kinds = (FakeTensor, torch.nn.Parameter)
    if isinstance(tensor, kinds) and hasattr(tensor, "fake_mode"):
        return tensor.fake_mode
    return None


@contextlib.contextmanager
def replaying(fake_mode: Any) -> Iterator[None]:
    """Run torch functions on the fake tensors of ``fake_mode`` as AOTAutograd would, without
    gradients and without guards on sizes: those of the program are taken already."""
    from torch._dispatch.python import enable_python_dispatcher

    env = fake_mode.shape_env
    unguarded = contextlib.nullcontext() if env is None else env.suppress_guards()
    with torch.no_grad(), enable_python_dispatcher(), unguarded, fake_mode:
        yield


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, while both live."""
    return tensor.untyped_storage()._cdata


def is_higher_order(target: Any) -> bool:
    """Whether a node calls an operation that takes functions."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def sets_gradients(target: Any) -> bool:
    """Whether a node turns the recording of gradients on or off, by its argument."""
    return target is torch._C._set_grad_enabled


def enters_autocast(target: Any) -> bool:
    return target is torch.amp.autocast_mode._enter_autocast


def exits_autocast(target: Any) -> bool:
    return target is torch.amp.autocast_mode._exit_autocast


def accept_lifted_sizes(wanted: Callable[[], bool]) -> None:
    """Let Dynamo go on at an ``associative_scan`` with gradients whose combine function was given
    symbolic sizes, which torch before 2.15 takes for tensors; while ``wanted()``."""
    from torch._C import DispatchKey

    kernels = torch.ops.higher_order.associative_scan.py_kernels
    stock = kernels[DispatchKey.Autograd]
    if hasattr(stock, "inductor_ext"):
        return

    @functools.wraps(stock)
    def kernel(combine: Any, xs: Any, lifted: Any) -> Any:
        if not lifted or any(isinstance(x, torch.Tensor) for x in lifted) or not wanted():
            return stock(combine, xs, lifted)
        return stock(lambda *leaves: combine(*leaves, *lifted), xs, ())

    kernel.inductor_ext = True  # type: ignore[attr-defined]
    kernels[DispatchKey.Autograd] = kernel
    torch.ops.higher_order.associative_scan._dispatch_cache.clear()
