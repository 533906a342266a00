"""Eager mHC (manifold-constrained hyper-connections) as models spell it, for benchmarks and tests.

n streams, H hidden, X [..., n, H] the residual, Y [..., H] a sublayer's output, U [..., H] its
input, W [n(n+2), nH], scale [3], base [n(n+2)] in fp32, columns pre n | post n | comb n*n. All
forms of ``PRE`` compute (U, post, comb) with comb [..., in, out], all of ``POST`` the next residual

    X'_j = post_j Y + sum_i comb[i, j] X_i

and differ in how: the DeepSeek form multiplies and sums in fp32, the Hugging Face form divides by
the root mean square before the projection and mixes in the residual's dtype, the vLLM form flattens
the tokens and uses einsum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a model fixes; the defaults are those of DeepSeek-V4."""

    iters: int = 20
    rms_eps: float = 1e-6
    pre_eps: float = 1e-6
    sinkhorn_eps: float = 1e-6
    post_mult: float = 2.0


V4 = Settings()
Pre = Callable[..., tuple[Tensor, Tensor, Tensor]]
Post = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


# --- the DeepSeek form ----------------------------------------------------------------------------


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """[..., n, n]: a softmax over the last axis, then columns, then rows and columns in turn."""
    comb = logits.softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def deepseek_pre(
    x: Tensor, w: Tensor, scale: Tensor, base: Tensor, s: Settings = V4
) -> tuple[Tensor, Tensor, Tensor]:
    n = x.shape[-2]
    wide = x.flatten(-2).float()
    r = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + s.rms_eps)
    mixes = F.linear(wide, w) * r
    pre = torch.sigmoid(mixes[..., :n] * scale[0] + base[:n]) + s.pre_eps
    post = s.post_mult * torch.sigmoid(mixes[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = mixes[..., 2 * n :].unflatten(-1, (n, n)) * scale[2] + base[2 * n :].view(n, n)
    comb = sinkhorn(logits, s.iters, s.sinkhorn_eps)
    u = torch.sum(pre.unsqueeze(-1) * wide.view(x.shape), dim=-2)
    return u.to(x.dtype), post, comb


def deepseek_post(x: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    mixed = torch.sum(comb.unsqueeze(-1) * x.unsqueeze(-2), dim=-3)
    return (post.unsqueeze(-1) * y.unsqueeze(-2) + mixed).to(x.dtype)


def deepseek_head(x: Tensor, w: Tensor, scale: Tensor, base: Tensor, s: Settings = V4) -> Tensor:
    """n streams to one behind the last layer: W [n, nH], scale [1], base [n]."""
    wide = x.flatten(-2).float()
    r = torch.rsqrt(wide.square().mean(-1, keepdim=True) + s.rms_eps)
    mixes = F.linear(wide, w) * r
    pre = torch.sigmoid(mixes * scale + base) + s.pre_eps
    return torch.sum(pre.unsqueeze(-1) * wide.view(x.shape), dim=-2).to(x.dtype)


# --- the Hugging Face form ------------------------------------------------------------------------


def unweighted_rms_norm(x: Tensor, eps: float) -> Tensor:
    variance = x.float().pow(2).mean(-1, keepdim=True)
    return x * torch.rsqrt(variance + eps).to(x.dtype)


def huggingface_pre(
    x: Tensor, w: Tensor, scale: Tensor, base: Tensor, s: Settings = V4
) -> tuple[Tensor, Tensor, Tensor]:
    n = x.shape[-2]
    flat = unweighted_rms_norm(x.flatten(start_dim=-2).float(), s.rms_eps)
    columns = [n, n, n * n]
    z_pre, z_post, z_comb = F.linear(flat, w.float()).split(columns, dim=-1)
    b_pre, b_post, b_comb = base.split(columns)
    s_pre, s_post, s_comb = scale.unbind(0)
    pre = torch.sigmoid(z_pre * s_pre + b_pre) + s.pre_eps
    post = s.post_mult * torch.sigmoid(z_post * s_post + b_post)
    logits = z_comb.view(*z_comb.shape[:-1], n, n) * s_comb + b_comb.view(n, n)
    comb = torch.softmax(logits, dim=-1) + s.sinkhorn_eps
    comb = comb / (comb.sum(dim=-2, keepdim=True) + s.sinkhorn_eps)
    for _ in range(s.iters - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + s.sinkhorn_eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + s.sinkhorn_eps)
    u = (pre.unsqueeze(-1) * x).sum(dim=-2).to(x.dtype)
    return u, post, comb


def huggingface_post(x: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Mixes in x's dtype: post and comb are rounded to it first."""
    post, comb = post.to(x.dtype), comb.to(x.dtype)
    return post.unsqueeze(-1) * y.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), x)


# --- the vLLM form --------------------------------------------------------------------------------


def vllm_pre(
    x: Tensor, w: Tensor, scale: Tensor, base: Tensor, s: Settings = V4
) -> tuple[Tensor, Tensor, Tensor]:
    n, hidden = x.shape[-2:]
    lead = x.shape[:-2]
    tokens = x.reshape(-1, n, hidden)
    flat = tokens.reshape(-1, n * hidden).to(torch.float32)
    raw = torch.matmul(flat, w.t())
    squares = flat.square().sum(dim=-1, keepdim=True)
    mixes = raw * torch.rsqrt(squares / (n * hidden) + s.rms_eps)
    pre = torch.sigmoid(mixes[:, :n] * scale[0] + base[:n]) + s.pre_eps
    post = torch.sigmoid(mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n]) * s.post_mult
    logits = (mixes[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n)
    comb = sinkhorn(logits, s.iters, s.sinkhorn_eps)
    u = (pre.unsqueeze(-1) * tokens.to(torch.float32)).sum(dim=1).to(x.dtype)
    return u.view(*lead, hidden), post.view(*lead, n), comb.view(*lead, n, n)


def vllm_post(x: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    mixed = torch.einsum("...ij,...ih->...jh", comb, x.float())
    return (post.unsqueeze(-1) * y.float().unsqueeze(-2) + mixed).to(x.dtype)


# --- another form -----------------------------------------------------------------------------


def kronecker_pre(
    x: Tensor, w: Tensor, scale: Tensor, base: Tensor, s: Settings = V4
) -> tuple[Tensor, Tensor, Tensor]:
    """KromHC's of 4 streams: comb is the Kronecker product of two mixes of two streams, W [12, nH]
    with columns pre 4 | post 4 | the logits of either mix's two permutations."""
    wide = x.flatten(-2).float()
    r = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + s.rms_eps)
    z = F.linear(wide, w) * r
    pre = torch.sigmoid(z[..., :4] * scale[0] + base[:4])
    u = torch.sum(pre.unsqueeze(-1) * wide.view(x.shape), dim=-2).to(x.dtype)
    return u, *kronecker_coefficients(z, scale, base, s)


def kronecker_coefficients(
    z: Tensor, scale: Tensor, base: Tensor, s: Settings = V4
) -> tuple[Tensor, Tensor]:
    """post and comb of normalised columns z [..., 12]."""
    post = s.post_mult * torch.sigmoid(z[..., 4:8] * scale[1] + base[4:8])
    logits = (z[..., 8:] * scale[2] + base[8:]).unflatten(-1, (2, 2))
    same, other = logits.softmax(-1).unbind(-1)
    two = torch.stack([same, other, other, same], -1).unflatten(-1, (2, 2))
    product = two[..., 0, :, None, :, None] * two[..., 1, None, :, None, :]
    return post, product.flatten(-4, -3).flatten(-2)


# --- variants -------------------------------------------------------------------------------------


def transposed_post(x: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The other convention: comb [..., out, in], X'_j = post_j Y + sum_i comb[j, i] X_i."""
    mixed = torch.sum(comb.unsqueeze(-1) * x.unsqueeze(-3), dim=-2)
    return (post.unsqueeze(-1) * y.unsqueeze(-2) + mixed).to(x.dtype)


def broadcast(h: Tensor, n: int) -> Tensor:
    """The first residual: one stream [..., H], n times."""
    return h.unsqueeze(-2).expand(*h.shape[:-1], n, h.shape[-1])


PRE: dict[str, Pre] = {
    "deepseek": deepseek_pre,
    "huggingface": huggingface_pre,
    "vllm": vllm_pre,
}
POST: dict[str, Post] = {
    "deepseek": deepseek_post,
    "huggingface": huggingface_post,
    "vllm": vllm_post,
}


# --- layers ---------------------------------------------------------------------------------------


class HyperConnection(nn.Module):
    """The parameters of one mHC site, in fp32."""

    def __init__(self, n: int, hidden: int, columns: int | None = None) -> None:
        super().__init__()
        columns = n * (n + 2) if columns is None else columns
        scales = 1 if columns == n else 3
        self.w = nn.Parameter(torch.randn(columns, n * hidden) * (n * hidden) ** -0.5)
        self.scale = nn.Parameter(torch.rand(scales) * 0.5 + 0.5)
        self.base = nn.Parameter(torch.randn(columns) * 0.5)

    def parameters_of(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.w, self.scale, self.base


class Sublayer(nn.Module):
    """Stands in for attention or an expert: RMSNorm, one square matrix, SiLU."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden, dtype=dtype))
        self.proj = nn.Linear(hidden, hidden, bias=False, dtype=dtype)

    def forward(self, u: Tensor) -> Tensor:
        return F.silu(self.proj(F.rms_norm(u, u.shape[-1:], self.weight, 1e-6)))


class Stack(nn.Module):
    """``layers`` layers of two sublayers, from h [..., H] to [..., H]: broadcast, mHC, head."""

    def __init__(
        self,
        form: str,
        layers: int,
        n: int,
        hidden: int,
        dtype: torch.dtype = torch.bfloat16,
        settings: Settings = V4,
    ) -> None:
        super().__init__()
        self.pre, self.post, self.n, self.settings = PRE[form], POST[form], n, settings
        sites = range(2 * layers)
        self.connections = nn.ModuleList(HyperConnection(n, hidden) for _ in sites)
        self.sublayers = nn.ModuleList(Sublayer(hidden, dtype) for _ in sites)
        self.head = HyperConnection(n, hidden, n)

    def forward(self, h: Tensor) -> Tensor:
        x = broadcast(h, self.n)
        for connection, sublayer in zip(self.connections, self.sublayers, strict=True):
            u, post, comb = self.pre(x, *connection.parameters_of(), self.settings)
            x = self.post(x, sublayer(u), post, comb)
        return deepseek_head(x, *self.head.parameters_of(), self.settings)


def inputs(
    tokens: int | tuple[int, ...],
    n: int,
    hidden: int,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> dict[str, Tensor]:
    """x, y, w, scale, base, post and comb of a realistic scale; comb is far from symmetric."""
    lead = (tokens,) if isinstance(tokens, int) else tokens
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    columns, width = n * (n + 2), n * hidden
    x = normal(*lead, n, hidden)
    comb = sinkhorn(normal(*lead, n, n) * 2, 20, 1e-6)
    return {
        "x": x.to(dtype),
        "y": normal(*lead, hidden).to(dtype),
        "w": normal(columns, width) * width**-0.5,
        "scale": torch.tensor([0.7, 1.1, 1.6], device=device),
        "base": normal(columns) * 0.5,
        "post": 2 * torch.sigmoid(normal(*lead, n)),
        "comb": comb,
    }
