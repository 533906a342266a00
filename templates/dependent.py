"""Programmatic dependent launch: a kernel's launch overlaps the end of the one before it.

Every program of such a kernel first waits until the kernel before has finished and its results can
be seen, then lets the next one start, whose programs wait in turn: "what came before has finished"
carries over a chain of them, and nothing is read or written early.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def in_turn(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def launched(kernel: Any, wrapped: Any, x: torch.Tensor, grid: Any) -> Callable[..., Any]:
    """``wrapped[grid]`` of a kernel with a parameter PDL, dependent where it is launched directly,
    on a card that can: sm_90 or newer."""
    pdl = wrapped is kernel and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
    options = {"launch_pdl": True} if pdl else {}
    return lambda *args, **more: wrapped[grid](*args, PDL=pdl, **more, **options)
