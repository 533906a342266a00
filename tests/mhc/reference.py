"""Manifold-constrained hyper-connections written from the formulas, one token at a time, in fp64.

Deliberately plain: loops over tokens, streams and rounds, nothing shared with the package. ``X`` is
[..., n, H]; the columns of the projection are pre | post | comb, comb row-major as [in, out].
"""

from __future__ import annotations

import torch


def sigmoid(v):
    return 1.0 / (1.0 + torch.exp(-v))


def sinkhorn_one(logits, iters, eps, powers=False):
    """[n, n]: a softmax of each row plus eps, columns, then (iters - 1) times rows and columns;
    of ``powers`` of e the rows are divided like all others."""
    n = logits.shape[0]
    rows = []
    for i in range(n):
        e = torch.exp(logits[i] - (0 if powers else logits[i].max()))
        rows.append(e / (e.sum() + eps) if powers else e / e.sum() + eps)
    c = torch.stack(rows)
    c = torch.stack([c[:, j] / (c[:, j].sum() + eps) for j in range(n)], 1)
    for _ in range(iters - 1):
        c = torch.stack([c[i] / (c[i].sum() + eps) for i in range(n)], 0)
        c = torch.stack([c[:, j] / (c[:, j].sum() + eps) for j in range(n)], 1)
    return c


def sinkhorn(logits, iters=20, eps=1e-6, powers=False):
    n = logits.shape[-1]
    flat = logits.double().reshape(-1, n, n)
    out = [sinkhorn_one(one, iters, eps, powers) for one in flat]
    return torch.stack(out).reshape(logits.shape) if out else flat.reshape(logits.shape)


def pre_one(
    x, w, scale, base, iters=20, rms_eps=1e-6, pre_eps=1e-6, sinkhorn_eps=1e-6, post_mult=2.0,
    powers=False,
):  # fmt: skip
    """(U [H], post [n], comb [n, n]) of one token x [n, H]."""
    n, h = x.shape
    u = torch.cat([x[i] for i in range(n)])
    r = 1.0 / torch.sqrt((u * u).sum() / (n * h) + rms_eps)
    z = r * (w @ u)
    pre = sigmoid(scale[0] * z[:n] + base[:n]) + pre_eps
    post = post_mult * sigmoid(scale[1] * z[n : 2 * n] + base[n : 2 * n])
    logits = (scale[2] * z[2 * n :] + base[2 * n :]).reshape(n, n)
    comb = sinkhorn_one(logits, iters, sinkhorn_eps, powers)
    return sum(pre[i] * x[i] for i in range(n)), post, comb


def pre(X, W, scale, base, *, norm_weight=None, **options):
    n, h = X.shape[-2:]
    X, W, scale, base = (t.double() for t in (X, W, scale, base))
    if norm_weight is not None:
        W = W * norm_weight.double()
    lead = X.shape[:-2]
    found = [pre_one(x, W, scale, base, **options) for x in X.reshape(-1, n, h)]
    if not found:
        return X.new_empty(*lead, h), X.new_empty(*lead, n), X.new_empty(*lead, n, n)
    U, post, comb = (torch.stack(part) for part in zip(*found, strict=True))
    return U.reshape(*lead, h), post.reshape(*lead, n), comb.reshape(*lead, n, n)


def post(X, Y, post, comb):
    n, h = X.shape[-2:]
    flat = [X.double().reshape(-1, n, h), Y.double().reshape(-1, h)]
    flat += [post.double().reshape(-1, n), comb.double().reshape(-1, n, n)]
    out = []
    for x, y, p, c in zip(*flat, strict=True):
        out.append(
            torch.stack([p[j] * y + sum(c[i, j] * x[i] for i in range(n)) for j in range(n)])
        )
    return torch.stack(out).reshape(X.shape) if out else X.double()


def post_pre(X, Y, p, comb, W, scale, base, *, dtype=None, **options):
    """``dtype``: what X' is rounded to before it is projected; None leaves it in fp64."""
    X1 = post(X, Y, p, comb)
    if dtype is not None:
        rounded = X1.detach().to(dtype).double()
        X1 = X1 + (rounded - X1.detach())  # differentiable as if nothing were rounded
    return X1, *pre(X1, W, scale, base, **options)


def head(X, W, scale, base, *, rms_eps=1e-6, pre_eps=1e-6, norm_weight=None):
    n, h = X.shape[-2:]
    X, W, scale, base = (t.double() for t in (X, W, scale, base))
    if norm_weight is not None:
        W = W * norm_weight.double()
    out = []
    for x in X.reshape(-1, n, h):
        u = x.reshape(-1)
        z = (W @ u) / torch.sqrt((u * u).sum() / (n * h) + rms_eps)
        gates = sigmoid(scale[0] * z + base) + pre_eps
        out.append(sum(gates[i] * x[i] for i in range(n)))
    return torch.stack(out).reshape(*X.shape[:-2], h) if out else X.new_empty(*X.shape[:-2], h)


def draw(T, n, H, dtype=torch.bfloat16, *, lead=None, w_dtype=torch.float32, head=False, seed=0):
    """(X, W, scale, base) of a realistic scale: X about 1 in the root mean square, z about 1 too.

    The logits of comb spread by a few units, so that comb is far from symmetric and from uniform.
    """
    make = torch.Generator().manual_seed(seed)
    columns, gates = (n, 1) if head else (n * (n + 2), 3)
    # Tokens of very different sizes, and one stream larger than the others.
    size = torch.exp(torch.randn(*(lead or (T,)), 1, 1, generator=make) * 0.5)
    streams = torch.linspace(0.5, 2.0, n)[:, None]
    X = torch.randn(*(lead or (T,)), n, H, generator=make) * size * streams
    W = torch.randn(columns, n * H, generator=make) / (n * H) ** 0.5
    scale = torch.rand(gates, generator=make) + 0.5
    base = torch.randn(columns, generator=make)
    return X.to(dtype), W.to(w_dtype), scale, base
