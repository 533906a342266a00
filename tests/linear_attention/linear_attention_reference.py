"""Linear attention as its recurrence says, token by token, in fp64."""

import torch


def attention(q, k, v, decay=None, scale=1.0, initial_state=None):
    """(o, final state); decay: None, [H], [B, H, T] or [B, H, T, Dk]."""
    q, k, v = q.double(), k.double(), v.double()
    B, H, T, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state.double()
    w = torch.ones(B, H, T, K, dtype=torch.float64)
    if decay is not None:
        g = decay.double()
        g = g[None, :, None, None] if g.dim() == 1 else g[..., None] if g.dim() == 3 else g
        w = g.exp().expand(B, H, T, K)
    out = []
    for t in range(T):
        S = w[:, :, t, :, None] * S + k[:, :, t, :, None] * v[:, :, t, None, :]
        out.append(scale * (q[:, :, t, None, :] @ S).squeeze(-2))
    return torch.stack(out, 2) if out else v * 0, S


def quadratic(q, k, v, decay=None, scale=1.0, initial_state=None):
    """The same as a model spells it, T x T scores in the inputs' dtype: what eager's error is."""
    dtype, T = q.dtype, q.shape[2]
    G = None
    if decay is not None:
        g = decay.float() if dtype != torch.float64 else decay
        g = g.clamp_min(-1e3)
        g = g[None, :, None, None] if g.dim() == 1 else g[..., None] if g.dim() == 3 else g
        g = g.expand(*q.shape[:3], g.shape[-1])
        G = g.cumsum(2)
    mask = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    if G is None:
        scores = q @ k.transpose(-1, -2)
        ends = torch.ones(())
        out_of = q
    else:
        between = torch.where(mask[..., None], G[:, :, :, None] - G[:, :, None], 0.0)
        if G.shape[-1] == 1:
            scores = (q @ k.transpose(-1, -2)) * between[..., 0].exp().to(dtype)
        else:
            scores = (q[:, :, :, None] * k[:, :, None] * between.exp().to(dtype)).sum(-1)
        ends = (G[:, :, -1:] - G).exp().to(dtype)
        out_of = q * G.exp().to(dtype)
    scores = torch.where(mask, scores, 0.0)
    out = (scale * (scores @ v)).to(dtype)
    S = (k * ends).transpose(-1, -2) @ v
    if initial_state is not None:
        out = out + (scale * (out_of @ initial_state.to(dtype))).to(dtype)
        last = 1.0 if G is None else G[:, :, -1].exp().unsqueeze(-1)
        S = S + (last * initial_state).to(dtype)
    return out, S.to(torch.promote_types(dtype, torch.float32))


def draw(B, H, T, K, V, dtype=torch.float32, decay="", strength=0.3, state=False, seed=0):
    """(q, k, v, decay, initial state); decay: "", "head", "token" or "channel"."""
    make = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=make)

    q, k, v = normal(B, H, T, K), normal(B, H, T, K) * K**-0.25, normal(B, H, T, V)
    shape = {"": None, "head": (H,), "token": (B, H, T), "channel": (B, H, T, K)}[decay]
    g = None if shape is None else -strength * torch.rand(shape, generator=make)
    S = normal(B, H, K, V) if state else None
    return *(t.to(dtype) for t in (q, k, v)), g, S


def gradients(fn, inputs, scale, given):
    """Those of all inputs that are there, by autograd; given: for the output and the state."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in inputs]
    q, k, v, g, S = leaves
    outputs = fn(q, k, v, g, scale, S)
    pairs = [
        (o, d.to(o.dtype)) for o, d in zip(outputs, given, strict=True)
        if d is not None and o.requires_grad
    ]  # fmt: skip
    asked = [t for t in leaves if t is not None]
    return torch.autograd.grad([o for o, _ in pairs], asked, [d for _, d in pairs])
