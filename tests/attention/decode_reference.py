"""What the tests of decode share: programs written by hand, and attention as a formula."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from inductor_ext.templates.attention_program import LOG2E, Input, Program, Span

FP32 = torch.float32
LAST = "q + columns - rows"  # the last key that query row q may see, bottom right


@dataclasses.dataclass(frozen=True)
class Kind:
    """A program, the same as a function of (s, b, h, q, k, rows, columns, inputs), and inputs of
    (B, Hq, Sq, Sk)."""

    program: Program
    score: Callable[..., torch.Tensor]
    inputs: Callable[..., list[torch.Tensor]] = lambda *sizes: []


def _where(keep, r):
    return torch.where(keep, r, -math.inf)


def plain(scale: float) -> Kind:
    return Kind(Program(scale=scale), lambda s, *_: s * scale)


def causal(scale: float) -> Kind:
    span = Span("0", "q1 + columns - rows + 1", "0", "q0 + columns - rows + 1")
    return Kind(
        Program(scale=scale, keep=f"keep = k <= {LAST}", row_spans=(span,)),
        lambda s, b, h, q, k, rows, columns, x: _where(k <= q + columns - rows, s * scale),
    )


def window(scale: float, size: int, empty: str = "zero") -> Kind:
    span = Span(f"q0 + columns - rows - {size - 1}", "q1 + columns - rows + 1", "0", "0")
    return Kind(
        Program(
            scale=scale, keep=f"keep = (k <= {LAST}) & (k > {LAST} - {size})", row_spans=(span,),
            empty=empty,
        ),
        lambda s, b, h, q, k, rows, columns, x: _where(
            (k <= q + columns - rows) & (k > q + columns - rows - size), s * scale
        ),
    )  # fmt: skip


def sinks(scale: float, first: int, size: int) -> Kind:
    low = f"q0 + columns - rows - {size - 1}"
    spans = (
        Span("0", str(first), "0", "0"),
        Span(f"tl.maximum({low}, {first})", "q1 + columns - rows + 1", "0", "0"),
    )
    return Kind(
        Program(
            scale=scale, row_spans=spans,
            keep=f"keep = (k <= {LAST}) & ((k > {LAST} - {size}) | (k < {first}))",
        ),
        lambda s, b, h, q, k, rows, columns, x: _where(
            (k <= q + columns - rows) & ((k > q + columns - rows - size) | (k < first)), s * scale
        ),
    )  # fmt: skip


def biased(scale: float) -> Kind:
    """A bias per head and key, of the input's dtype, and ALiBi's."""
    return Kind(
        Program(
            inputs=(Input(torch.bfloat16, "hk"),),
            score=f"r = (s * {scale} + x0.to(tl.float32) - 0.01 * (h + 1) * (columns - k))"
            f" * {LOG2E}",
        ),
        lambda s, b, h, q, k, rows, columns, x: (
            s * scale + x[0].to(s.dtype) - 0.01 * (h + 1) * (columns - k)
        ),
        lambda B, H, Sq, Sk: [torch.randn(1, H, 1, Sk).bfloat16()],
    )


def documents(scale: float) -> Kind:
    return Kind(
        Program(
            inputs=(Input(torch.int64, "bk"), Input(torch.int64, "bq")), scale=scale,
            documents=(0, 1), keep="keep = x0 == x1",
        ),
        lambda s, b, h, q, k, rows, columns, x: _where(x[0] == x[1], s * scale),
        lambda B, H, Sq, Sk: [
            torch.randint(0, 3, (B, 1, 1, Sk)).sort(-1).values,
            torch.randint(0, 3, (B, 1, Sq, 1)),
        ],
    )  # fmt: skip


def attention(q, k, v, kind, inputs, lengths=None):
    """(out, lse) of every sequence's own keys, computed in the tensors' dtype (16 bits: eagerly as
    models do, softmax in fp32). A row that keeps nothing gives 0, or NaN as the program says."""
    group = q.shape[1] // k.shape[1]
    outs, lses = [], []
    for i in range(q.shape[0]):
        n = k.shape[2] if lengths is None else int(lengths[i])
        mine = k[i, :, :n].repeat_interleave(group, 0)
        s = q[i] @ mine.transpose(-1, -2)
        s = s if s.dtype == torch.float64 else s.float()
        at = [torch.arange(m, device=q.device) for m in (q.shape[1], q.shape[2], n)]
        read = [x[i : i + 1] if x.shape[0] > 1 else x for x in inputs]
        read = [x[..., :n] if x.shape[-1] > 1 else x for x in read]
        r = kind.score(
            s[None], i, at[0][:, None, None], at[1][:, None], at[2], q.shape[2], n, read
        )[0]
        lse = r.logsumexp(-1) if n else torch.full(r.shape[:-1], -math.inf, device=q.device)
        p = r.softmax(-1).nan_to_num(0.0) if kind.program.empty == "zero" else r.softmax(-1)
        outs.append(p.to(q.dtype) @ v[i, :, :n].repeat_interleave(group, 0))
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def draw(B, kv_heads, group, rows, Sk, D, dtype, Dv=None):
    q = torch.randn(B, kv_heads * group, rows, D).to(dtype)
    k = torch.randn(B, kv_heads, Sk, D).to(dtype)
    return q, k, torch.randn(B, kv_heads, Sk, Dv or D).to(dtype)


def paged(k, v, page_size, spare=3):
    """(k pages, v pages, block table) with the pages shuffled, and NaN in those of nobody."""
    B, heads, Sk, _ = k.shape
    each = -(-Sk // page_size)
    order = torch.randperm(B * each + spare)[: B * each].to(torch.int32).view(B, each)
    found = []
    for t in (k, v):
        pages = torch.full((B * each + spare, page_size, heads, t.shape[-1]), math.nan)
        pages = pages.to(t.device, t.dtype)
        for b in range(B):
            for i in range(each):
                part = t[b, :, i * page_size : (i + 1) * page_size].transpose(0, 1)
                pages[order[b, i], : part.shape[0]] = part
        found.append(pages)
    return *found, order.to(k.device)
