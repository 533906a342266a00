"""Which implementation computes an attention: a pure function of what is known at its launch.

Measured on an H200 (bf16, TFLOP/s in one run, benchmarks/results/attention.csv): forward of heads
of 128, causal 4 x 16 x 4096: cuDNN 568, the Gluon kernel 617 (2048 rows 512 and 550, 16384 rows 619
and 675); full: 664 and 669, but of 2048 rows 645 and 635. Heads of 64 and 256: cuDNN 431 and 596,
kernels 430 and 477. Backward: cuDNN 479 and 369 of heads of 128 and 256, ours 423 and 207. So where
cuDNN's semantics are the program's, it is the choice but for the forward of heads of 128, and a
kernel of ours everywhere else. torch refuses cuDNN under ``use_deterministic_algorithms``; ours is
deterministic by construction.
"""

from __future__ import annotations

import dataclasses

import torch

NARROW = (torch.bfloat16, torch.float16)
FEW_ROWS = 64  # query rows of a group, up to which its keys are split over programs
# Rows from which the Gluon kernel is ahead of cuDNN
LEAST_ROWS = {"causal": 2048, "full": 4096}
# Head sizes that the kernels are generated for.
LARGEST, LARGEST_BACKWARD = 576, 256


@dataclasses.dataclass(frozen=True)
class Case:
    """``plain``: "full" where the score is nothing but a scale, "causal" where also query row q
    sees the keys up to q, else "". ``has_program``: whether kernels can compute the score.
    ``cudnn``: whether torch would let cuDNN do it, by shapes, strides, settings and versions;
    ``gluon``: whether the forward kernel is the one of warps that specialise, and long enough for
    its launch; ``dropout``: whether kernels would drop weights out."""

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
    dropout: bool = False

    @property
    def kernels(self) -> bool:
        known = self.dtype in (*NARROW, torch.float32)
        return self.on_card and self.has_program and known


def forward(case: Case) -> str:
    """ "cudnn", "decode", "kernel" or "composed"."""
    if not case.kernels or max(case.dim, case.value_dim) > LARGEST:
        return "composed"
    if case.rows * (case.heads // case.own_heads) <= FEW_ROWS and not case.dropout:
        return "decode"
    ours = case.gluon and case.dim == case.value_dim == 128
    ours = ours and case.rows >= LEAST_ROWS.get(case.plain, 0)
    return "cudnn" if _by_cudnn(case) and not ours else "kernel"


def backward(case: Case, of_lse: bool) -> str:
    """The same without "decode"; ``of_lse``: whether the log-sum-exp has a gradient too."""
    if not case.kernels or max(case.dim, case.value_dim) > LARGEST_BACKWARD:
        return "composed"
    return "cudnn" if _by_cudnn(case) and not of_lse else "kernel"


def _by_cudnn(case: Case) -> bool:
    if not case.plain or case.dtype not in NARROW or case.capability[0] not in (9, 10):
        return False
    if case.deterministic or not case.cudnn:
        return False
    # Of one query row or one key its gradients are wrong or refused in some versions.
    return max(case.dim, case.value_dim) <= 256 and min(case.rows, case.columns) > 1
