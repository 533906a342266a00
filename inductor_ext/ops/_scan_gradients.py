"""Gradients of scans by torch functions, differentiable again.

Each is one affine scan the other way, with the positions t along the scan, Y the inclusive result,
g the gradient of Y_t, and no division:

    R_t = g_t + c_(t+1) R_(t+1)        dx_t = f_t R_t

    sum         c_(t+1) = 1                                f_t = 1
    prod        c_(t+1) = x_(t+1)                          f_t = Y_(t-1)
    max, min    c_(t+1) = 0 where x_(t+1) is taken, or 1   f_t = 1 where x_t is taken, or 0
    logsumexp   c_(t+1) = exp(Y_t - Y_(t+1)) <= 1          f_t = exp(x_t - Y_t) <= 1

with c = 0 at a segment's first position. Of an exclusive scan, Y_t is y_(t+1).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inductor_ext.ops import _scan_composed as composed


def taken(x: Tensor, Y: Tensor) -> Tensor:
    """Where a maximum or minimum is x's own: a NaN, or equal, the last one of equals."""
    return (x == Y) | x.isnan()


def gradient(
    g: Tensor, x: Tensor, y: Tensor, resets: Tensor | None, op: str, dim: int, reverse: bool,
    exclusive: bool,
) -> Tensor:  # fmt: skip
    """The gradient of x from that of y, for all operations but sum."""
    if reverse:
        g, x, y = (t.flip(dim) for t in (g, x, y))
        resets = None if resets is None else composed.forward_resets(resets, dim)
    wide = composed.wide_dtype(x.dtype, y.dtype)
    dx = _forward(g.to(wide), x.to(wide), y.to(wide), resets, op, dim, exclusive).to(x.dtype)
    return dx.flip(dim) if reverse else dx


def _forward(
    g: Tensor, x: Tensor, y: Tensor, resets: Tensor | None, op: str, dim: int, exclusive: bool
) -> Tensor:
    # What begins behind t.
    ends = None if resets is None else composed.shifted(resets, dim, -1, True)
    Y = y
    if exclusive:
        g = composed.shifted(g, dim, -1, 0)
        g = g if ends is None else g.masked_fill(ends, 0)
        # Where a segment ends, Y is not known, and not needed: R is 0 there.
        Y = composed.shifted(y, dim, -1, -math.inf)
    if op == "prod":
        c, f = x, y
        if not exclusive:
            f = composed.shifted(y, dim, 1, 1)
            f = f if resets is None else f.masked_fill(resets, 1)
    elif op == "logsumexp":
        c, f = _quotients(Y, dim), _exp_of_difference(x, Y)
    else:
        own = taken(x, Y)
        R = _group_sums(g, own if resets is None else own | resets, dim)
        return torch.where(own, R, 0)
    c, g, ends = (
        None if t is None else t.flip(dim) for t in (composed.shifted(c, dim, -1, 0), g, ends)
    )
    return f * composed.affine(c, g, ends, dim).flip(dim)


def _exp_of_difference(early: Tensor, late: Tensor) -> Tensor:
    """exp(early - late), 0 where nothing has been added up yet."""
    nothing = (early == -math.inf) | (late == -math.inf)
    return torch.where(nothing, -math.inf, early - late).exp()


def _quotients(Y: Tensor, dim: int) -> Tensor:
    """exp(Y_(t-1) - Y_t); 0 behind an infinity, in which all that came before is lost."""
    before = composed.shifted(Y, dim, 1, -math.inf)
    return torch.where((before == -math.inf) | Y.isinf(), -math.inf, before - Y).exp()


def _group_sums(g: Tensor, begins: Tensor, dim: int) -> Tensor:
    """For each position, the sum from there to the end of its group, whose first is flagged."""
    return composed.scan(g, begins, "sum", dim, True, False, g.dtype)
