"""Which implementation computes an attention: a pure function of what is known at its launch.

Measured on an H200 (bf16, B4 H16 S4096 D128 causal; TFLOP/s in one run each): forward cuDNN 541,
the Gluon kernel 554 to 568 (at 16k 572 and 602 to 620, full at 8k 612 and 628), plain Triton 480;
of heads of 64 cuDNN 421 and Gluon 408. Backward cuDNN 400, ours 411, full at 8k 563 and 476. So
where cuDNN's semantics are the program's, it is the choice but for Gluon's heads of 128, and a
kernel of ours everywhere else. torch refuses cuDNN under ``use_deterministic_algorithms``; ours is
deterministic by construction.
"""

from __future__ import annotations

import dataclasses

import torch

NARROW = (torch.bfloat16, torch.float16)
FEW_ROWS = 64  # query rows of a group, up to which its keys are split over programs
LEAST_ROWS = 2048  # from which the Gluon kernel was measured beside cuDNN
# Head sizes that the kernels are generated for.
LARGEST, LARGEST_BACKWARD = 576, 256


@dataclasses.dataclass(frozen=True)
class Case:
    """``plain``: "full" where the score is nothing but a scale, "causal" where also query row q
    sees the keys up to q, else "". ``has_program``: whether kernels can compute the score.
    ``cudnn``: whether torch would let cuDNN do it, by shapes, strides, settings and versions;
    ``gluon``: whether the forward kernel is the one of warps that specialise, and long enough for
    its launch."""

    on_card: bool
    capability: tuple[int, int]
    dtype: torch.dtype
    heads: int
    own_heads: int
    rows: int
    columns: int
    dim: int
    value_dim: int
    plain: str
    has_program: bool
    cudnn: bool
    gluon: bool
    deterministic: bool

    @property
    def kernels(self) -> bool:
        known = self.dtype in (*NARROW, torch.float32)
        return self.on_card and self.has_program and known


def forward(case: Case) -> str:
    """ "cudnn", "decode", "kernel" or "composed"."""
    if not case.kernels or max(case.dim, case.value_dim) > LARGEST:
        return "composed"
    if case.rows * (case.heads // case.own_heads) <= FEW_ROWS:
        return "decode"
    ours = case.gluon and case.dim == case.value_dim == 128 and case.rows >= LEAST_ROWS
    return "cudnn" if _by_cudnn(case, 256) and not ours else "kernel"


def backward(case: Case, of_lse: bool) -> str:
    """The same without "decode"; ``of_lse``: whether the log-sum-exp has a gradient too."""
    if not case.kernels or max(case.dim, case.value_dim) > LARGEST_BACKWARD:
        return "composed"
    return "cudnn" if _by_cudnn(case, 128) and not of_lse else "kernel"


def _by_cudnn(case: Case, largest: int) -> bool:
    if not case.plain or case.dtype not in NARROW or case.capability[0] not in (9, 10):
        return False
    if case.deterministic or not case.cudnn:
        return False
    # Of one query row or one key its gradients are wrong or refused in some versions.
    return max(case.dim, case.value_dim) <= largest and min(case.rows, case.columns) > 1
