"""mHC across a boundary of layers: post of one and pre of the next.

Three or four launches, each dependent on the one before where they are launched directly. X' is
written once and read twice. One pass that projects X' where it is computed was slower on an H200:
a tile of tokens of all streams, beside what a product needs, leaves too few programs on a
multiprocessor (414 us where post and pre took 320, T = 4096, H = 7168).
"""

from __future__ import annotations

from typing import Any

import torch

from . import mhc_post, mhc_pre


def post_pre(
    x: torch.Tensor, y: torch.Tensor, gates: torch.Tensor, comb: torch.Tensor, w: torch.Tensor,
    scale: torch.Tensor, base: torch.Tensor, iters: int, rms_eps: float, pre_eps: float,
    sinkhorn_eps: float, post_mult: float, precision: str,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """(X', U, post', comb', mixes', sqrsum'); the operands as for ``post`` and ``pre``."""
    x1 = mhc_post.post(x, y, gates, comb)
    options: Any = iters, rms_eps, pre_eps, sinkhorn_eps, post_mult, precision
    return x1, *mhc_pre.pre(x1, w, scale, base, *options)
