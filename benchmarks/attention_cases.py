"""What ``benchmarks.attention`` measures: its cases, and every column's function of one.

A case draws q, k, v as models have them, [B, S, H, D] transposed, and whatever its mask needs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

DEVICE = "cuda"
WINDOW, PREFIX, CAP, DOCUMENTS = 1024, 1024, 30.0, 12
MASKS = (
    "causal", "full", "window", "documents", "prefix", "softcap", "alibi", "bias", "slot_bias",
)  # fmt: skip
FAMILIES = "ABCDEFGH"


@dataclasses.dataclass(frozen=True)
class Case:
    """``mask``: one of MASKS, "colsum64" or "colsum" (causal, with column sums), or "family A" ...
    for a body of model code. ``kind``: "fwd" or "bwd"."""

    mask: str
    batch: int
    heads: int
    own: int
    size: int
    dim: int
    kind: str = "fwd"

    @property
    def name(self) -> str:
        heads = f"H{self.heads}" if self.heads == self.own else f"H{self.heads}:{self.own}"
        return f"{self.mask} B{self.batch} {heads} S{self.size} D{self.dim}"

    @property
    def scores_bytes(self) -> int:
        """Of one matrix of 16-bit scores, which eager programs hold several of."""
        return 2 * self.batch * self.heads * self.size**2

    @functools.cached_property
    def pairs(self) -> float:
        """Pairs of a query row and a key that are kept, by head."""
        n = self.size
        triangle = n * (n + 1) / 2
        if self.mask in ("full", "bias", "slot_bias"):
            return float(n * n)
        if self.mask == "window":
            w = min(WINDOW, n - 1)
            return (w + 1) * n - w * (w + 1) / 2
        if self.mask == "prefix":
            p = min(PREFIX, n)
            return triangle + p * (p - 1) / 2
        if self.mask == "documents":
            return sum(m * (m + 1) / 2 for m in document_sizes(n))
        return triangle

    @property
    def flops(self) -> float:
        products = 2 if self.kind == "fwd" else 5
        return products * 2 * self.batch * self.heads * self.dim * self.pairs


def document_sizes(size: int) -> list[int]:
    """Mixed lengths that add up to ``size``."""
    shares = [(i * 7919 % 31 + 1) for i in range(DOCUMENTS)]
    sizes = [size * s // sum(shares) for s in shares]
    sizes[-1] += size - sum(sizes)
    return sizes


def _shape(mask: str, size: int, dim: int, group: int, kind: str) -> Case:
    heads = 2048 // dim
    return Case(mask, max(16384 // size, 1), heads, heads // group, size, dim, kind)


def _family(name: str, kind: str) -> Case:
    return Case(f"family {name}", 1, 32, 8 if name in "AEFG" else 32, 4096, 128, kind)


def _cases() -> list[Case]:
    """The most telling first."""
    both = ("fwd", "bwd")
    masks = ("window", "documents", "softcap", "slot_bias", "alibi", "prefix", "bias")
    found = [_shape("causal", 4096, 128, 1, k) for k in both]
    found += [_shape(m, 4096, 128, 1, k) for k in both for m in masks]
    found += [_shape(m, 4096, 128, 1, "fwd") for m in ("colsum64", "colsum")]
    found += [_family(f, "fwd") for f in FAMILIES]
    found += [_shape("full", 8192, 128, 1, k) for k in both]
    found += [_shape("causal", 4096, d, 1, k) for d in (64, 256) for k in both]
    found += [_shape("causal", 4096, 128, 4, k) for k in both]
    found += [_family(f, "bwd") for f in FAMILIES]
    found += [_shape("causal", s, 128, 1, k) for s in (16384, 2048, 8192) for k in both]
    found += [_shape("full", s, 128, 1, k) for s in (4096, 16384, 2048) for k in both]
    found += [
        _shape(m, s, d, g, k)
        for d in (64, 256) for m in ("full", "causal") for s in (4096, 8192, 2048, 16384)
        for g in (1, 4) for k in both
    ]  # fmt: skip
    return list(dict.fromkeys(found))


CASES = _cases()


# --- inputs ---------------------------------------------------------------------------------------


def draw(case: Case) -> list[Any]:
    """q, k, v and the mask's own tensor, if it has one."""
    import torch

    make: Any = {"device": DEVICE, "dtype": torch.bfloat16}
    b, n = case.batch, case.size
    inputs = [
        torch.randn(b, n, h, case.dim, **make).transpose(1, 2)
        for h in (case.heads, case.own, case.own)
    ]
    own: Any = None
    if case.mask == "documents":
        sizes = torch.tensor(document_sizes(n), device=DEVICE)
        own = torch.repeat_interleave(torch.arange(DOCUMENTS, device=DEVICE), sizes)
        own = own.to(torch.int32)[None]
    elif case.mask == "alibi":
        own = 2.0 ** (-8.0 * torch.arange(1, case.heads + 1, device=DEVICE) / case.heads)
        own = own.view(1, -1, 1, 1)
    elif case.mask == "bias":
        own = torch.randn(1, case.heads, n, n, **make)
    elif case.mask == "slot_bias":
        own = torch.randn(b, case.own, n, device=DEVICE)
    elif case.mask == "family D":
        own = torch.randn(1, case.heads, n, n, **make)
    elif case.mask in ("family F", "family G"):
        own = torch.randn(case.heads, **make)
    return inputs if own is None else [*inputs, own]


def leaves(case: Case) -> int:
    """How many of the inputs have gradients."""
    return 4 if case.mask in ("bias", "slot_bias", "family F", "family G") else 3


# --- ours -----------------------------------------------------------------------------------------


def alibi(s: Any, b: Any, h: Any, q: Any, k: Any, slopes: Any) -> Any:
    return s + slopes * (k - q)


def prefix(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    import torch

    return torch.where((q >= k) | (k < PREFIX), s, -math.inf)


def options(case: Case, own: Any = None) -> dict[str, Any]:
    """The case as keyword arguments of ``ops.attention``."""
    return {
        "full": {},
        "window": {"causal": True, "window": (WINDOW, 0)},
        "documents": {"causal": True, "segments": own},
        "prefix": {"score_mod": prefix},
        "softcap": {"causal": True, "softcap": CAP},
        "alibi": {"causal": True, "score_mod": alibi, "score_inputs": (own,)},
        "bias": {"bias": own},
        "slot_bias": {"slot_bias": own},
        "colsum64": {"causal": True, "return_colsum": True, "colsum_rows": 64},
        "colsum": {"causal": True, "return_colsum": True},
        "family D": {"causal": True, "bias": own},
        "family E": {"causal": True, "softcap": CAP},
        "family F": {"causal": True, "sink": own},
        "family G": {"causal": True, "sink": own},
    }.get(case.mask, {"causal": True})


def ours(case: Case, q: Any, k: Any, v: Any, own: Any = None) -> Any:
    """inductor_ext.ops.attention."""
    from inductor_ext import ops

    return ops.attention(q, k, v, **options(case, own))


# --- torch's own ----------------------------------------------------------------------------------


def repeated(x: Any, group: int) -> Any:
    """Heads of a group side by side, in memory, as model code has it."""
    if group == 1:
        return x
    b, h, n, d = x.shape
    return x[:, :, None].expand(b, h, group, n, d).reshape(b, h * group, n, d)


def keep_of(case: Case, n: int, own: Any) -> Any:
    """[.., S, S] of bool, or None."""
    import torch

    at = torch.arange(n, device=DEVICE)
    q, k = at[:, None], at[None, :]
    causal = q >= k
    if case.mask in ("full", "bias", "slot_bias"):
        return None
    if case.mask == "window":
        return causal & (q - k <= WINDOW)
    if case.mask == "prefix":
        return causal | (k < PREFIX)
    if case.mask == "documents":
        return causal & (own[:, :, None] == own[:, None, :])
    return causal


def eager(case: Case, q: Any, k: Any, v: Any, own: Any = None) -> Any:
    """As model code writes it."""
    import torch

    if case.mask.startswith("family"):
        return family(case, q, k, v, own)
    group = case.heads // case.own
    k, v = repeated(k, group), repeated(v, group)
    s = q @ k.transpose(-1, -2) * case.dim**-0.5
    if case.mask == "softcap":
        s = CAP * torch.tanh(s / CAP)
    if case.mask == "bias":
        s = s + own
    if case.mask == "slot_bias":
        s = s + own.to(s.dtype)[:, :, None]
    if case.mask == "alibi":
        at = torch.arange(case.size, device=q.device)
        s = s + (own * (at[None, :] - at[:, None])).to(s.dtype)
    keep = keep_of(case, case.size, own)
    if keep is not None:
        s = s.masked_fill(~keep, -math.inf)
    p = s.softmax(-1, dtype=torch.float32).to(q.dtype)
    out = p @ v
    if case.mask.startswith("colsum"):
        last = p if case.mask == "colsum" else p[:, :, -64:]
        return out, last.float().sum(-2)
    return out


def family(case: Case, q: Any, k: Any, v: Any, own: Any = None) -> Any:
    """The bodies of eager attention in Hugging Face's models, from their formulas; the mask is made
    in the program, as it is where whole models are compiled."""
    import torch
    import torch.nn.functional as F

    name, group, n = case.mask[-1], case.heads // case.own, case.size
    k, v = repeated(k, group), repeated(v, group)
    at = torch.arange(n, device=q.device)
    least = torch.finfo(q.dtype).min
    mask = torch.where(at[:, None] >= at[None, :], 0.0, least).to(q.dtype)[None, None]
    scale = case.dim**-0.5
    if name == "H":
        s = torch.matmul(q.float(), k.float().transpose(-1, -2)) * scale + mask
        return torch.matmul(s.softmax(-1).to(v.dtype), v)
    s = torch.matmul(q, k.transpose(2, 3)) * scale
    if name == "E":
        s = torch.tanh(s / CAP) * CAP
    if name == "D":
        s = s + own
    s = s + mask
    if name == "F":
        column = own.reshape(1, -1, 1, 1).expand(q.shape[0], -1, n, -1)
        s = torch.cat([s, column], -1)
        s = s - s.max(-1, keepdim=True).values
        p = F.softmax(s, -1, dtype=s.dtype)[..., :-1]
    elif name == "C":
        p = F.softmax(s, -1)
    else:
        p = F.softmax(s, -1, dtype=torch.float32).to(q.dtype)
    out = torch.matmul(F.dropout(p, 0.0, training=False), v)
    if name == "G":
        lse = torch.logsumexp(s.float(), -1, keepdim=True)
        out = (out * torch.sigmoid(lse - own.view(1, -1, 1, 1))).to(q.dtype)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def sdpa(case: Case, backend: str) -> Callable[..., Any] | None:
    """scaled_dot_product_attention by one backend; None where it has no such semantics."""
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if case.mask not in ("causal", "full"):
        return None
    chosen = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}[backend]

    def call(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(chosen):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=case.mask == "causal", enable_gqa=case.heads != case.own
            )

    return call


def flex(case: Case, tuned: bool) -> Callable[..., Any] | None:
    """FlexAttention, compiled; its block mask is made here, outside of what is timed."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if case.mask.startswith(("family", "colsum")):
        return None
    mode = "max-autotune-no-cudagraphs" if tuned else None

    def call(q: Any, k: Any, v: Any, tensor: Any = None, block: Any = None) -> Any:
        def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            if case.mask == "softcap":
                return CAP * torch.tanh(s / CAP)
            if case.mask == "alibi":
                return s + tensor[0, h, 0, 0] * (j - i)
            if case.mask == "bias":
                return s + tensor[0, h, i, j]
            if case.mask == "slot_bias":
                return s + tensor[b, h // (case.heads // case.own), j]
            return s

        return flex_attention(q, k, v, score, block, enable_gqa=case.heads != case.own)

    compiled = torch.compile(call, dynamic=False, mode=mode)
    blocks: list[Any] = []

    def with_block(q: Any, k: Any, v: Any, tensor: Any = None) -> Any:
        keep = _flex_mask(case, tensor)
        if keep is not None and not blocks:
            blocks.append(create_block_mask(keep, None, None, case.size, case.size, device=DEVICE))
        return compiled(q, k, v, tensor, blocks[0] if blocks else None)

    return with_block


def _flex_mask(case: Case, tensor: Any) -> Callable[..., Any] | None:
    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    def window(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k <= WINDOW)

    def of_prefix(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) | (k < PREFIX)

    def documents(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (tensor[0, q] == tensor[0, k])

    masks: dict[str, Any] = {
        "full": None, "bias": None, "slot_bias": None, "window": window, "prefix": of_prefix,
        "documents": documents,
    }  # fmt: skip
    return masks.get(case.mask, causal)
