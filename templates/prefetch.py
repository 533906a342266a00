"""Asking for memory before it is wanted."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def into_l2(pointers, nbytes, wanted):
    """Ask for ``nbytes`` at each of the pointers, both multiples of 16, where ``wanted``.

    L2 is where all multiprocessors meet: what a kernel before still writes there is updated, never
    stale, so this is allowed before waiting for that kernel (``dependent``).
    """
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $3, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r,r",
        [pointers, tl.zeros(pointers.shape, tl.int32) + nbytes, wanted.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def possible(*tensors: torch.Tensor) -> bool:
    """Whether rows of the tensors can be asked for: on sm_90 or newer, of and at multiples of 16
    bytes."""
    first = tensors[0]
    if first.is_cuda and torch.cuda.get_device_capability(first.device) < (9, 0):
        return False
    return all(
        t.storage_offset() * t.itemsize % 16 == 0
        and t.shape[-1] * t.itemsize % 16 == 0
        and all(s * t.itemsize % 16 == 0 for s in t.stride()[:-1])
        and (t.device.type != "cuda" or t.data_ptr() % 16 == 0)
        for t in tensors
    )
