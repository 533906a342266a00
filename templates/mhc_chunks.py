"""mHC in chunks of tokens whose streams stay in the L2 cache from one kernel to the next.

Post writes a chunk of X', the projection and the fuse kernel read it again: from L2, so that of a
token 20 H elements move to and from memory where post and then pre of all tokens move 36 H, and
pre alone reads X once, 10 H for 18 H. The kernels and their results are those without chunks.
"""

from __future__ import annotations

from typing import Any

import torch

from . import mhc_projection as projection
from .mhc_post import post
from .mhc_pre import dense, fuse, results

BYTES = 20 << 20  # of a chunk's streams: well below the 50 MB of an H100, in two halves


def chunk_of(x: torch.Tensor) -> int:
    """Tokens of a chunk: a multiple of a tile's."""
    fitting = BYTES // (x.shape[1] * x.shape[2] * x.element_size())
    return max(1, fitting // projection.ROWS) * projection.ROWS


def _pre_chunk(
    x: Any, w: Any, how: Any, scale: Any, base: Any, options: Any, tile: Any, out: Any
) -> None:
    p, q = projection.partials_of(x, w, how, tile)
    fuse(x, p, q, scale, base, *options, out=out)


def _prepared(x: torch.Tensor, w: torch.Tensor, precision: str, chunk: int, tile: Any) -> Any:
    tile = dict(tile or projection.tiling(chunk, x.shape[1], x.dtype) | {"BEFORE": True})
    return *projection.weights(x.dtype, dense(w), precision, tile.pop("BEFORE")), tile


def pre(
    x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *rest: Any,
    chunk: int | None = None, tile: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """As ``mhc_pre.pre``; ``tile`` is the projection's."""
    *options, precision = rest
    chunk = chunk or chunk_of(x)
    w, how, tile = _prepared(x, w, precision, chunk, tile)
    out, scale, base = results(x, how["C"]), dense(scale), dense(base)
    for first in range(0, x.shape[0], chunk):
        part = slice(first, first + chunk)
        _pre_chunk(x[part], w, how, scale, base, options, tile, tuple(t[part] for t in out))
    return out


def post_pre(
    x: torch.Tensor, y: torch.Tensor, gates: torch.Tensor, comb: torch.Tensor, w: torch.Tensor,
    scale: torch.Tensor, base: torch.Tensor, *rest: Any, chunk: int | None = None,
    tile: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """As ``mhc_post_pre.post_pre``: post, projection and fuse of a chunk, one after the other."""
    *options, precision = rest
    chunk = chunk or chunk_of(x)
    w, how, tile = _prepared(x, w, precision, chunk, tile)
    x1 = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out, scale, base = results(x, how["C"]), dense(scale), dense(base)
    for first in range(0, x.shape[0], chunk):
        part = slice(first, first + chunk)
        post(x[part], y[part], gates[part], comb[part], out=x1[part])
        _pre_chunk(x1[part], w, how, scale, base, options, tile, tuple(t[part] for t in out))
    return x1, *out
