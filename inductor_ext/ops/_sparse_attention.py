"""Attention of every token over its own list of entries of a latent cache.

DeepSeek's multi-head latent attention with the projections absorbed (arXiv 2405.04434), of the
entries that an indexer chose (DeepSeek-V3.2): all heads share an entry, whose first numbers are its
value too.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import Tensor

from inductor_ext.compat import float32_precision
from inductor_ext.compat_runtime import under_functorch
from inductor_ext.ops import _attention_checks as checks
from inductor_ext.ops._opaque import opaque_op
from inductor_ext.templates import sparse_attention_launch as kernels

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_WHOLE = (numbers.Integral, torch.SymInt)
_NUMBERS = (numbers.Real, torch.SymInt, torch.SymFloat)
_GATHERED = 1 << 26  # numbers that the composed form gathers at once


def kernels_apply(q: Tensor, d_v: int) -> bool:
    """Whether kernels compute on such entries: on a card, of sizes that they cut well."""
    return q.is_cuda and kernels.fits(q, d_v)


# --- composed of torch functions ------------------------------------------------------------------


def _wide(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _gathered(kv: Tensor, indices: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(entries [B, T, K, D], 0 for padding; which are there [B, T, K]; where they lie in
    [B S, D])."""
    batch, entries, dim = kv.shape
    there = (indices >= 0) & (indices < entries)
    first = torch.arange(batch, device=kv.device)[:, None, None] * entries
    at = torch.where(there, indices, 0) + first
    flat = kv.reshape(-1, dim) if entries else kv.new_zeros(1, dim)
    return torch.where(there[..., None], flat[at].to(wide), 0), there, at


def _composed(q: Tensor, kv: Tensor, indices: Tensor, scale: float, d_v: int) -> Any:
    """(out, lse) of q [B, T, H, D], kv [B, S, D], indices [B, T, K], in fp32 or fp64 all along."""
    gathered, there, _ = _gathered(kv, indices, _wide(q))
    outside = ((indices < -1) | (indices >= kv.shape[1])).any(-1)[..., None]
    scores = (q.to(_wide(q)) @ gathered.transpose(-1, -2)) * scale
    scores = scores.masked_fill(~there[..., None, :], -math.inf)
    some = there.any(-1)[..., None]
    # A row of nothing but -inf has no softmax, and a gradient of NaN.
    sane = torch.where(some[..., None], scores, 0.0)
    out = torch.where(some[..., None], sane.softmax(-1) @ gathered[..., :d_v], 0.0)
    lse = sane.logsumexp(-1) if indices.shape[2] else sane.sum(-1)
    lse = torch.where(some, lse, -math.inf)
    out = torch.where(outside[..., None], math.nan, out)
    return out.to(q.dtype), torch.where(outside, math.nan, lse)


def _pieces(q: Tensor, indices: Tensor) -> list[slice]:
    """A few tokens at a time."""
    each = q.shape[0] * indices.shape[2] * q.shape[3]
    per = max(_GATHERED // max(each, 1), 1)
    return [slice(i, i + per) for i in range(0, max(q.shape[1], 1), per)]


def _in_pieces(q: Tensor, kv: Tensor, indices: Tensor, scale: float, d_v: int) -> Any:
    parts = [_composed(q[:, s], kv, indices[:, s], scale, d_v) for s in _pieces(q, indices)]
    return tuple(torch.cat(some, 1) for some in zip(*parts, strict=True))


def _gradients(
    q: Tensor, kv: Tensor, indices: Tensor, scale: float, d_v: int, do: Tensor | None,
    dlse: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dq and dkv: ds = p (dp - sum of p dp + dlse), in pieces."""
    wide = _wide(q)
    dq, dkv = torch.zeros_like(q, dtype=wide), torch.zeros_like(kv, dtype=wide).contiguous()
    for s in _pieces(q, indices):
        gathered, there, at = _gathered(kv, indices[:, s], wide)
        outside = ((indices[:, s] < -1) | (indices[:, s] >= kv.shape[1])).any(-1, keepdim=True)
        values, queries = gathered[..., :d_v], q[:, s].to(wide)
        scores = (queries @ gathered.transpose(-1, -2)) * scale
        scores = scores.masked_fill(~there[..., None, :], -math.inf)
        p = torch.where(there.any(-1)[..., None, None], scores, 0.0).softmax(-1)
        p = torch.where((there & ~outside)[..., None, :], p, 0.0)
        ds = torch.zeros_like(p)
        dgathered = torch.zeros_like(gathered)
        if do is not None:
            given = do[:, s].to(wide)
            dp = given @ values.transpose(-1, -2)
            ds = p * (dp - (p * dp).sum(-1, keepdim=True))
            dgathered[..., :d_v] = p.transpose(-1, -2) @ given
        if dlse is not None:
            ds = ds + p * dlse[:, s].to(wide)[..., None]
        ds = ds * scale
        dq[:, s] = ds @ gathered
        dgathered += ds.transpose(-1, -2) @ queries
        if kv.shape[1]:
            # Of padding it is 0.
            dkv.view(-1, kv.shape[2]).index_add_(0, at.flatten(), dgathered.flatten(0, 2))
    return dq.to(q.dtype), dkv.to(kv.dtype)


# --- operations -----------------------------------------------------------------------------------


@opaque_op("inductor_ext::sparse_attention", taped=True)
def _attention(
    q: Tensor, kv: Tensor, indices: Tensor, scale: float, d_v: int
) -> tuple[Tensor, Tensor]:
    if kernels_apply(q, d_v):
        return kernels.attend(q, kv, indices, scale, d_v, float32_precision())
    return _in_pieces(q, kv, indices, scale, d_v)


def _results(q: Tensor, d_v: int) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], d_v)), q.new_empty(q.shape[:3], dtype=_wide(q))


@_attention.register_fake
def _(q: Tensor, kv: Tensor, indices: Tensor, scale: float, d_v: int) -> tuple[Tensor, Tensor]:
    return _results(q, d_v)


@opaque_op("inductor_ext::sparse_attention_backward", taped=True)
def _backward(
    q: Tensor, kv: Tensor, indices: Tensor, scale: float, d_v: int, do: Tensor | None,
    dlse: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dq, dkv = _gradients(q, kv, indices, scale, d_v, do, dlse)
    return dq.contiguous(), dkv.contiguous()


@_backward.register_fake
def _(
    q: Tensor, kv: Tensor, indices: Tensor, scale: float, d_v: int, do: Tensor | None,
    dlse: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), kv.new_empty(kv.shape)


def _again(
    q: Tensor, kv: Tensor, indices: Tensor, scale: float, d_v: int, do: Tensor | None,
    dlse: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of q and kv by the composed form, as differentiable functions where asked."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Nodes of their own: differentiating an input itself would run through what made it.
        own = [t.view_as(t) for t in (q, kv)]
        own = [t if t.requires_grad else t.detach().requires_grad_() for t in own]
        results = _composed(own[0], own[1], indices, scale, d_v)
        given = [
            (r, d.to(r.dtype)) for r, d in zip(results, (do, dlse), strict=True) if d is not None
        ]
        dq, dkv = torch.autograd.grad(
            [r for r, _ in given], own, [d for _, d in given], create_graph=again
        )
    return dq, dkv


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.scale, ctx.d_v = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:
    if do is None and dlse is None:
        return None, None, None, None, None
    q, kv, indices = ctx.saved_tensors
    # Differentiated again, or mapped over, the gradients are functions; else an operation.
    functional = torch.is_grad_enabled() or under_functorch()
    backward = _again if functional else _backward
    dq, dkv = backward(q, kv, indices, ctx.scale, ctx.d_v, do, dlse)
    return dq, dkv, None, None, None


_attention.register_autograd(_grad, setup_context=_setup)


# --- public ---------------------------------------------------------------------------------------


def _check(q: Tensor, kv: Tensor, indices: Tensor, scale: float, d_v: int) -> None:
    for name, t in (("q", q), ("kv", kv), ("indices", indices)):
        checks.check_tensor(name, t)
    for name, n, kinds in (("scale", scale, _NUMBERS), ("d_v", d_v, _WHOLE)):
        if not isinstance(n, kinds) or isinstance(n, bool):
            said = "a number" if kinds is _NUMBERS else "a whole number"
            raise TypeError(f"{name} is expected as {said}, got {type(n).__name__}")
    if q.dim() not in (3, 4):
        raise ValueError(f"q is expected as [T, H, D] or [B, T, H, D], got {list(q.shape)}")
    if q.dtype not in _DTYPES:
        raise TypeError(f"q is expected as fp16, bf16, fp32 or fp64, got {q.dtype}")
    if kv.dtype != q.dtype:
        raise TypeError(f"kv is expected as {q.dtype}, as q is, got {kv.dtype}")
    if indices.dtype != torch.int32:
        raise TypeError(f"indices is expected as torch.int32, got {indices.dtype}")
    for name, t in (("kv", kv), ("indices", indices)):
        if t.device != q.device:
            raise ValueError(f"{name} is expected on {q.device}, where q is, got {t.device}")
    dims = (2,) if q.dim() == 3 else (2, 3)
    if kv.dim() not in dims or (kv.dim() == 3 and kv.shape[0] != q.shape[0]):
        wanted = "[S, D]" if q.dim() == 3 else f"[S, D] or [{q.shape[0]}, S, D]"
        raise ValueError(f"kv is expected as {wanted}, got {list(kv.shape)}")
    if kv.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"kv is expected with {q.shape[-1]} numbers of an entry, as q has, got {kv.shape[-1]}"
        )
    front = list(q.shape[:-2])
    if indices.dim() != q.dim() - 1 or list(indices.shape[:-1]) != front:
        wanted = ", ".join(map(str, front))
        raise ValueError(f"indices is expected as [{wanted}, K], got {list(indices.shape)}")
    if not 1 <= d_v <= q.shape[-1]:
        raise ValueError(f"d_v is expected between 1 and D = {q.shape[-1]}, got {d_v}")
    if not (math.isfinite(scale) and scale != 0):
        raise ValueError(f"scale is expected as a finite number other than 0, got {scale}")


def sparse_attention(
    q: Tensor, kv: Tensor, indices: Tensor, *, scale: float, d_v: int = 512,
    return_lse: bool = False,
) -> Any:  # fmt: skip
    """Attention of each token over the entries that its own list names.

        s[h, j] = scale q[h] . kv[index_j]        out[h] = sum_j softmax(s[h])_j kv[index_j][:d_v]

    Args:
        q: [T, H, D] or [B, T, H, D]; fp16, bf16, fp32 or fp64.
        kv: [S, D], shared by all sequences, or [B, S, D]; q's dtype. Its first ``d_v`` numbers are
            the value, all D the key. Rows may have any stride; entries that no list names are not
            read.
        indices: [T, K] or [B, T, K] in int32, entries 0 to S - 1 in any order; one that stands
            there twice counts twice. -1 is padding.
        scale: of q . kv; not 0. Of a projection that was absorbed it is that of the heads before,
            e.g. (128 + 64)^-0.5, so there is no default.
        d_v: numbers of a value, 1 to D.
        return_lse: return the log of the sum of exp(s) as well.

    Returns out [..., T, H, d_v] in q's dtype, contiguous, or (out, lse), lse [..., T, H] in fp32
    (fp64 for fp64), natural log. A token whose list is all padding, or empty, gets 0 and -inf.

    An index below -1 or above S - 1 makes the results of its token NaN: nothing else is read or
    changed, and the host does not wait for the card to raise.

    Kernels compute where d_v (16 to 512) and D - d_v (0, or 16 or more) are powers of two and an
    entry is 1152 bytes or less, with products of the inputs' dtype (fp32: as
    ``torch.set_float32_matmul_precision`` says), sums and the softmax in fp32; else, on the CPU and
    in fp64, torch functions, a few tokens at a time. Gradients of q and kv, any number of times, by
    torch functions that gather all entries: right, and not fast. Deterministic, but for kv's
    gradient on a card: torch adds what several tokens give an entry in any order there, unless
    ``torch.use_deterministic_algorithms`` is on. A compiled program does not depend on T, S or K.

    Raises ValueError or TypeError for what does not fit.
    """
    _check(q, kv, indices, scale, d_v)
    checks.check_flags(return_lse=return_lse)
    single = q.dim() == 3
    if single:
        q, indices = q[None], indices[None]
    if kv.dim() == 2:
        kv = kv[None].expand(q.shape[0], -1, -1)
    out, lse = _attention(q, kv, indices, float(scale), d_v)
    if single:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out
