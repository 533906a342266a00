"""What the operations of manifold-constrained hyper-connections expect of their arguments."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

STREAMS = (2, 4, 8)
MOST_COLUMNS = 80  # of a projection: n (n + 2) of 8 streams


def check_residual(X: Tensor) -> None:
    if X.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise TypeError(f"X is expected as fp16, bf16, fp32 or fp64, got {X.dtype}")
    if X.dim() < 2 or X.shape[-2] not in STREAMS:
        raise ValueError(
            f"X is expected as [..., n, H] with n = 2, 4 or 8 streams, got {list(X.shape)}"
        )


def check(
    name: str, t: Tensor, shape: Any, X: Tensor, dtypes: tuple[torch.dtype, ...] = ()
) -> None:
    wanted = dtypes or ((torch.float64,) if X.dtype == torch.float64 else (torch.float32,))
    if t.dtype not in wanted:
        said = " or ".join(str(d) for d in wanted)
        raise TypeError(f"{name} is expected as {said} beside X of {X.dtype}, got {t.dtype}")
    if t.dim() != len(shape) or any(a != b for a, b in zip(t.shape, shape, strict=True)):
        raise ValueError(f"{name} is expected of shape {list(shape)}, got {list(t.shape)}")
    if t.device != X.device:
        raise ValueError(f"{name} is expected on {X.device}, where X is, got {t.device}")


def wide_or_bf16(X: Tensor) -> tuple[torch.dtype, ...]:
    if X.dtype == torch.float64:
        return (torch.float64,)
    return torch.float32, torch.bfloat16


def check_number(name: str, value: float, positive: bool = False) -> None:
    if not 0.0 <= value < math.inf or (positive and value == 0.0):
        wanted = "a positive number" if positive else "0 or a positive number"
        raise ValueError(f"{name} is expected as {wanted}, got {value}")


def check_iters(iters: int) -> None:
    if not isinstance(iters, int) or iters < 1:
        raise ValueError(f"iters is expected as a whole number of 1 or more, got {iters}")


def check_gates(
    X: Tensor, scale: Tensor, base: Tensor, iters: int, rms_eps: float, pre_eps: float,
    sinkhorn_eps: float, post_mult: float,
) -> None:  # fmt: skip
    check_residual(X)
    n = X.shape[-2]
    check("scale", scale, (3,), X)
    check("base", base, (n * (n + 2),), X)
    check_iters(iters)
    eps = {"rms_eps": rms_eps, "pre_eps": pre_eps, "sinkhorn_eps": sinkhorn_eps}
    for name, value in eps.items():
        check_number(name, value)
    check_number("post_mult", post_mult, positive=True)


def check_pre(X: Tensor, W: Tensor, scale: Tensor, base: Tensor, *options: Any) -> None:
    check_gates(X, scale, base, *options)
    n, hidden = X.shape[-2:]
    check("W", W, (n * (n + 2), n * hidden), X, wide_or_bf16(X))


def check_collapse(
    X: Tensor, W: Tensor, scale: Tensor, base: Tensor, rms_eps: float, pre_eps: float
) -> None:
    check_residual(X)
    n, hidden = X.shape[-2:]
    if W.dim() != 2 or not n <= W.shape[0] <= MOST_COLUMNS:
        raise ValueError(
            f"W is expected as [columns, {n * hidden}] with {n} to {MOST_COLUMNS} columns, got "
            f"{list(W.shape)}"
        )
    check("W", W, (W.shape[0], n * hidden), X, wide_or_bf16(X))
    check("scale", scale, (1,), X)
    check("base", base, (n,), X)
    check_number("rms_eps", rms_eps)
    check_number("pre_eps", pre_eps)


def check_head(X: Tensor, W: Tensor, *others: Any) -> None:
    check_residual(X)
    n, hidden = X.shape[-2:]
    check("W", W, (n, n * hidden), X, wide_or_bf16(X))
    check_collapse(X, W, *others)


def check_post(X: Tensor, Y: Tensor, post: Tensor, comb: Tensor) -> None:
    check_residual(X)
    *lead, n, hidden = X.shape
    check("Y", Y, (*lead, hidden), X, (X.dtype,))
    check("post", post, (*lead, n), X, wide_or_bf16(X))
    check("comb", comb, (*lead, n, n), X, wide_or_bf16(X))
