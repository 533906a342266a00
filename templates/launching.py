"""How launch functions launch kernels, ``wrap_triton(kernel)[grid](...)``, seen by who records."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch


class Recorder(Protocol):
    """Who is told of the launches of its thread."""

    def launch(self, kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Launch a kernel."""


class _Here(threading.local):
    recorder: Recorder | None = None


here = _Here()


class Recorded:
    """A kernel whose launches are recorded."""

    def __init__(self, kernel: Any, recorder: Recorder) -> None:
        self.kernel, self.recorder = kernel, recorder

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.recorder.launch(self.kernel, grid, args, kwargs)


def recorded(kernel: Any) -> Any:
    """A kernel that is launched directly, seen by a recorder."""
    return kernel if here.recorder is None else Recorded(kernel, here.recorder)


def wrap_triton(kernel: Any) -> Any:
    """``torch.library.wrap_triton``, seen by a recorder."""
    wrapped = torch.library.wrap_triton(kernel)
    return recorded(kernel) if wrapped is kernel else wrapped


def is_direct(kernel: Any, wrapped: Any) -> bool:
    """Whether ``wrap_triton`` gave a kernel that is launched directly, not one that is traced."""
    return wrapped is kernel or isinstance(wrapped, Recorded)
