"""Attention by its formula, with the whole matrix of scores, and masks position by position."""

import math

import torch


def kept(rows, columns, causal, window, sinks, segments, device):
    """[1 or B, 1, Sq, Sk] of bool, from positions."""
    at = torch.arange(rows, device=device) + (0 if causal == "upper_left" else columns - rows)
    p, j = at[:, None], torch.arange(columns, device=device)[None, :]
    left, right = window if isinstance(window, tuple) else (window, window)
    keep = torch.ones(rows, columns, dtype=torch.bool, device=device)
    if left is not None:
        keep &= j >= p - left
    if right is not None:
        keep &= j <= p + right
    keep |= j < sinks
    if causal:
        keep &= j <= p
    keep = keep[None, None]
    if segments is not None:
        of_q, of_k = segments
        keep = keep & (of_q[:, None, :, None] == of_k[:, None, None, :])
    return keep


def attention(
    q, k, v, *, scale=None, causal=False, window=None, sinks=0, segments=None, bias=None,
    slot_bias=None, softcap=None, sink=None, lengths=None, extra=None, empty=0.0,
):  # fmt: skip
    """(out, lse, probabilities [B, Hkv, G, Sq, Sk]), out in the dtype of the inputs; as model code
    has it, with the softmax of 16-bit scores in fp32."""
    B, heads, rows, D = q.shape
    own, columns = k.shape[1:3]
    group = heads // own
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    s = torch.einsum("bhid,bhjd->bhij", q, k) * (D**-0.5 if scale is None else scale)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None and bias.dtype != torch.bool:
        s = s + bias
    if slot_bias is not None:
        s = s + slot_bias.repeat_interleave(group, 1)[:, :, None]
    if extra is not None:
        s = s + extra
    counts = [columns] * B if lengths is None else lengths.tolist()
    keep = torch.zeros(B, 1, rows, columns, dtype=torch.bool, device=q.device)
    for b, count in enumerate(counts):
        part = segments
        if segments is not None:
            part = tuple(t[b % t.shape[0]][None] for t in segments)
            part = part[0], part[1][:, :count]
        keep[b, :, :, :count] = kept(
            rows, count, causal, window or (None, None), sinks, part, q.device
        )[0]  # fmt: skip
    if bias is not None and bias.dtype == torch.bool:
        keep = keep & bias
    s = s.to(torch.float64 if s.dtype == torch.float64 else torch.float32)
    s = s.masked_fill(~keep, -math.inf)
    none = (s == -math.inf).all(-1, keepdim=True)
    filled = s.masked_fill(none, 0.0)
    if sink is not None:
        column = sink.to(s.dtype)[None, :, None, None].expand(B, heads, rows, 1)
        lse = torch.cat([s, column], -1).logsumexp(-1)
        p = torch.cat([s, column], -1).softmax(-1)[..., :-1]
    else:
        lse = filled.logsumexp(-1).masked_fill(none[..., 0], -math.inf)
        p = filled.softmax(-1).masked_fill(none, empty)
    out = p.to(v.dtype) @ v
    return out, lse, p.unflatten(1, (own, group))
