"""Causal linear attention: attention without a softmax, as a state that every token updates.

    S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T        o_t = scale q_t S_t

(Katharopoulos et al., arXiv 2006.16236; with decays RetNet, arXiv 2307.08621, and gated linear
attention, arXiv 2312.06635.) O(T) work and memory, computed a chunk of tokens at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from inductor_ext.compat import float32_precision
from inductor_ext.compat_runtime import under_functorch
from inductor_ext.ops import _linear_attention_composed as composed
from inductor_ext.ops._opaque import opaque_op
from inductor_ext.ops._rows import beside
from inductor_ext.templates import linear_attention_channel_launch as of_channels
from inductor_ext.templates import linear_attention_launch as kernels

LARGEST = 256  # head size of the kernels
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def kernels_apply(q: Tensor, v: Tensor) -> bool:
    """Whether kernels compute on such heads: on a card, not fp64, of 256 or less."""
    if not q.is_cuda or q.dtype == torch.float64:
        return False
    return max(q.shape[-1], v.shape[-1]) <= LARGEST


# --- operations -----------------------------------------------------------------------------------


@opaque_op("inductor_ext::linear_attention", taped=True)
def _attention(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial_state: Tensor | None,
    scale: float, chunk: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not kernels_apply(q, v):
        out, state = composed.attention(q, k, v, decay, initial_state, scale)
        return kernels.like(v).copy_(out), state.contiguous()
    if decay is not None and decay.dim() == 4:
        return of_channels.forward(q, k, v, decay, initial_state, scale, float32_precision())
    return kernels.forward(q, k, v, decay, initial_state, scale, float32_precision(), chunk)


@_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial_state: Tensor | None,
    scale: float, chunk: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return kernels.like(v), _state_of(q, v)


def _state_of(q: Tensor, v: Tensor) -> Tensor:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:2], q.shape[-1], v.shape[-1]), dtype=dtype)


@opaque_op("inductor_ext::linear_attention_backward", taped=True)
def _backward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial_state: Tensor | None,
    scale: float, chunk: int, do: Tensor, dstate: Tensor | None, need_decay: bool,
    need_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if kernels_apply(q, v):
        given: Any = q, k, v, decay, initial_state, scale, float32_precision()
        asked: Any = do, dstate, need_decay, need_state
        found: Any
        if decay is not None and decay.dim() == 4:
            found = of_channels.backward(*given, *asked)
        else:
            found = kernels.backward(*given, chunk, *asked)
        ddecay, dinitial = found[3:]
    else:
        grads = composed.gradients(q, k, v, decay, initial_state, scale, do, dstate)
        found = [kernels.like(t).copy_(g) for t, g in zip((q, k, v), grads[:3], strict=True)]
        ddecay, dinitial = (
            g if needed else None
            for g, needed in zip(grads[3:], (need_decay, need_state), strict=True)
        )
    ddecay = q.new_empty(0) if ddecay is None else ddecay.to(decay.dtype)  # type: ignore[union-attr]
    dinitial = q.new_empty(0) if dinitial is None else dinitial.contiguous()
    return *found[:3], ddecay.contiguous(), dinitial


@_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial_state: Tensor | None,
    scale: float, chunk: int, do: Tensor, dstate: Tensor | None, need_decay: bool,
    need_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    ddecay = decay.new_empty(decay.shape) if decay is not None and need_decay else q.new_empty(0)
    dinitial = _state_of(q, v) if need_state else q.new_empty(0)
    return kernels.like(q), kernels.like(k), kernels.like(v), ddecay, dinitial


# --- gradients ------------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.scale, ctx.chunk = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, do: Tensor | None, dstate: Tensor | None) -> Any:
    tensors: Any = ctx.saved_tensors
    if do is None and dstate is None:
        return (None,) * 7
    if do is None:
        do = torch.zeros_like(tensors[2])
    if torch.is_grad_enabled() or under_functorch():
        return (*_again(tensors, ctx.scale, do, dstate), None, None)
    need_decay, need_state = ctx.needs_input_grad[3:5]
    dq, dk, dv, ddecay, dinitial = _backward(
        *tensors, ctx.scale, ctx.chunk, do, dstate, need_decay, need_state
    )
    given = dq, dk, dv, ddecay if need_decay else None, dinitial if need_state else None
    return (*given, None, None)


def _again(tensors: Any, scale: float, do: Tensor, dstate: Tensor | None) -> Any:
    """The gradients as differentiable functions, for ``create_graph``."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Nodes of their own: differentiating an input itself would run through what made it.
        own: Any = [None if t is None else t.view_as(t) for t in tensors]
        own = [t if t is None or t.requires_grad else t.detach().requires_grad_() for t in own]
        out, state = composed.attention(own[0], own[1], own[2], own[3], own[4], scale)
        pairs = [(out, do.to(out.dtype))]
        pairs += [] if dstate is None else [(state, dstate)]
        grads = iter(torch.autograd.grad(
            [o for o, _ in pairs], [t for t in own if t is not None], [d for _, d in pairs],
            create_graph=again, allow_unused=True,
        ))  # fmt: skip
        return [None if t is None else next(grads) for t in own]


_attention.register_autograd(_grad, setup_context=_setup)


# --- public ---------------------------------------------------------------------------------------


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 4:
            raise ValueError(f"{name} is expected as [B, H, T, D], got {list(t.shape)}")
        if t.dtype not in _DTYPES or t.dtype != q.dtype:
            wanted = "fp16, bf16, fp32 or fp64" if name == "q" else f"{q.dtype}, as q is"
            raise TypeError(f"{name} is expected as {wanted}, got {t.dtype}")
        if t.device != q.device:
            raise ValueError(f"{name} is expected on {q.device}, where q is, got {t.device}")
    if k.shape != q.shape:
        raise ValueError(f"k is expected of q's shape {list(q.shape)}, got {list(k.shape)}")
    if v.shape[:3] != q.shape[:3]:
        raise ValueError(f"v is expected as {[*q.shape[:3], 'Dv']}, got {list(v.shape)}")
    if q.shape[-1] == 0 or v.shape[-1] == 0:
        raise ValueError(
            f"q and v are expected with a head size of 1 or more, got {q.shape[-1]} and "
            f"{v.shape[-1]}"
        )


def _as_decay(decay: float | Tensor | None, q: Tensor) -> Tensor | None:
    """None, [H], [B, H, T] or [B, H, T, Dk]."""
    if decay is None:
        return None
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, heads, tokens, dk = q.shape
    if not isinstance(decay, Tensor):
        if not decay <= 0:
            raise ValueError(f"decay is expected as a log of 0 or less, got {decay}")
        return torch.full((heads,), decay, dtype=wide, device=q.device)
    if decay.dtype not in (wide, q.dtype):
        raise TypeError(f"decay is expected as {wide} or {q.dtype}, got {decay.dtype}")
    if decay.device != q.device:
        raise ValueError(f"decay is expected on {q.device}, where q is, got {decay.device}")
    shapes: list[tuple[Any, ...]] = [(heads,), (batch, heads, tokens), (batch, heads, tokens, dk)]
    if decay.dim() == 0:
        return decay.expand(heads)
    if not any(
        len(s) == decay.dim() and all(a == b for a, b in zip(s, decay.shape, strict=True))
        for s in shapes
    ):
        raise ValueError(
            "decay is expected as a number, [H], [B, H, T] or [B, H, T, Dk] with "
            f"[B, H, T, Dk] = {list(q.shape)}, got {list(decay.shape)}"
        )
    return decay


def _check_state(state: Tensor, q: Tensor, columns: Any) -> None:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    wanted = (*q.shape[:2], q.shape[-1], columns)
    if state.dtype != wide:
        raise TypeError(f"initial_state is expected as {wide}, got {state.dtype}")
    if state.device != q.device:
        raise ValueError(f"initial_state is expected on {q.device}, where q is, got {state.device}")
    if state.dim() != 4 or any(a != b for a, b in zip(state.shape, wanted, strict=True)):
        raise ValueError(
            f"initial_state is expected of shape {list(wanted)}, got {list(state.shape)}"
        )


def _mapped(feature_map: Any, t: Tensor) -> Tensor:
    if feature_map == "elu+1":
        return torch.nn.functional.elu(t) + 1
    return torch.relu(t) if feature_map == "relu" else feature_map(t)


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *,
    feature_map: str | Callable[[Tensor], Tensor] | None = None,
    decay: float | Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, return_state: bool = False, normalize: bool = False,
    chunk: int | None = None,
) -> Any:  # fmt: skip
    """Causal attention without a softmax, in O(T): each token updates a state and reads it.

        S_t = diag(e^{g_t}) S_{t-1} + f(k_t) v_t^T        o_t = scale f(q_t) S_t

    and with ``normalize`` o_t is divided by ``scale f(q_t) . z_t``, z_t the state's own sum of
    ``f(k)``, decayed alike (0 there gives what 0 / 0 does).

    Args:
        q, k: [B, H, T, Dk]; v: [B, H, T, Dv], as for ``scaled_dot_product_attention``; one of fp16,
            bf16, fp32, fp64 for all. Any strides: [B, T, H, D] transposed is not copied, as long as
            the last dimension is dense.
        feature_map: f, applied to q and k; "elu+1", "relu", a function of one tensor, or None.
        decay: g, the natural log of what is kept of the state at each token, 0 or less: a number or
            tensor of no dimensions for all, [H], [B, H, T] or per channel [B, H, T, Dk], in fp32 or
            q's dtype. -inf forgets everything. Values of a tensor are not looked at: those above 0
            let the state grow, and are right as long as nothing overflows within a chunk.
        scale: of q; None for Dk^-0.5. Not 0.
        initial_state: S_0 in fp32 (fp64 for fp64), [B, H, Dk, Dv], with ``normalize``
            [B, H, Dk, Dv + 1], whose last column is z_0. None for 0.
        return_state: return S_T as well, of the same form.
        chunk: tokens computed at once: 16, 32 or 64, or None to have it chosen. It changes rounding
            only, and nothing where decays are per channel.

    Returns o [B, H, T, Dv] in v's dtype, with v's order of dimensions in memory, or (o, S_T).
    Products are of the inputs' dtype (fp32: as ``torch.set_float32_matmul_precision`` says), sums
    and the state in fp32 (fp64 for fp64). Gradients of q, k, v, decay and initial_state, any number
    of times. Deterministic. Any T, also 0; a compiled program does not depend on T.

    Raises ValueError or TypeError for what does not fit.
    """
    _check_heads(q, k, v)
    if isinstance(feature_map, str) and feature_map not in ("elu+1", "relu"):
        raise ValueError(
            f'feature_map is expected as "elu+1", "relu", a function or None, got {feature_map!r}'
        )
    if chunk not in (None, 16, 32, 64):
        raise ValueError(f"chunk is expected as None, 16, 32 or 64, got {chunk}")
    if feature_map is not None:
        q, k = _mapped(feature_map, q), _mapped(feature_map, k)
        _check_heads(q, k, v)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    elif not 0 < abs(scale) < math.inf:
        raise ValueError(f"scale is expected as a finite number other than 0, got {scale}")
    g = _as_decay(decay, q)
    columns = v.shape[-1]
    if initial_state is not None:
        _check_state(initial_state, q, columns + 1 if normalize else columns)
    if not normalize:
        out, state = _one(q, k, v, g, initial_state, scale, chunk)
        return (out, state) if return_state else out
    front = (None, None)
    if initial_state is not None:
        front = initial_state[..., :columns], initial_state[..., columns:]
    out, state = _one(q, k, v, g, front[0], scale, chunk)
    ones = v.new_ones((*v.shape[:3], 1))
    sums, z = _one(q, k, ones, g, front[1], scale, chunk)
    out = (out / sums).to(v.dtype)
    return (out, torch.cat([state, z], -1)) if return_state else out


def _one(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor | None, scale: float,
    chunk: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if under_functorch():
        return composed.attention(q, k, v, g, state, scale)
    with beside(q):
        return _attention(q, k, v, g, state, scale, chunk or 0)
