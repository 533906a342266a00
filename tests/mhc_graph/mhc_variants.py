"""Spellings of a pre that mean the same, and programs that look like one and are not."""

import itertools

import torch
import torch.nn.functional as F

from benchmarks import mhc_forms as forms


def rms(wide):
    return torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)


def normalise(c, dim, eps=1e-6):
    return c / (c.sum(dim, keepdim=True) + eps)


def default_sinkhorn(logits):
    return forms.sinkhorn(logits, 3, 1e-6)


def pre_gate(z):
    return torch.sigmoid(z) + 1e-6


def post_gate(z):
    return 2 * torch.sigmoid(z)


def collapse(pre, x, wide):
    return (pre.unsqueeze(-1) * wide.view(x.shape)).sum(-2).to(x.dtype)


def gates_of(
    mixes,
    x,
    wide,
    scale,
    base,
    sinkhorn=default_sinkhorn,
    pre_gate=pre_gate,
    post_gate=post_gate,
    collapse=collapse,
):
    """pre, U, post, comb."""
    n = x.shape[-2]
    own = pre_gate(mixes[..., :n] * scale[0] + base[:n])
    post = post_gate(mixes[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = mixes[..., 2 * n :].unflatten(-1, (n, n)) * scale[2] + base[2 * n :].view(n, n)
    return own, collapse(own, x, wide), post, sinkhorn(logits)


def build(
    sinkhorn=default_sinkhorn,
    pre_gate=pre_gate,
    post_gate=post_gate,
    norm=rms,
    collapse=collapse,
    also=None,
    before=None,
):
    """A pre of these parts; ``also`` returns one more value, ``before`` changes the arguments."""

    def pre(x, w, scale, base):
        if before is not None:
            x, w, scale, base = before(x, w, scale, base)
        wide = x.flatten(-2).float()
        mixes = F.linear(wide, w) * norm(wide)
        results = gates_of(mixes, x, wide, scale, base, sinkhorn, pre_gate, post_gate, collapse)
        own, *results = results
        return tuple(results) if also is None else (*results, also(mixes, own))

    return pre


def loop(iters, *, start=None, eps=1e-6, at=None, other=1e-5, swapped=False):
    """A Sinkhorn loop whose step ``at`` has another eps, or is swapped."""

    def sinkhorn(logits):
        c = logits.softmax(-1) + eps if start is None else start(logits)
        c = normalise(c, -2, eps)
        for i in range(iters - 1):
            dims = (-2, -1) if swapped and i == at else (-1, -2)
            c = normalise(c, dims[0], other if i == at and not swapped else eps)
            c = normalise(c, dims[1], eps)
        return c

    return sinkhorn


def clamped(logits):
    c = logits.softmax(-1)
    c = c / c.sum(-1, keepdim=True).clamp_min(1e-6)
    return c / c.sum(-2, keepdim=True).clamp_min(1e-6)


def from_powers(logits, dims=(-2, -1), below=None, eps=0.0):
    """The paper's form: powers of e, columns, then rows, without an eps."""
    c = torch.exp(logits if below is None else logits - logits.amax(below, keepdim=True))
    for dim in dims * 3:
        c = c / (c.sum(dim, keepdim=True) + eps)
    return c


def softmax_written_out(logits):
    powers = (logits - logits.amax(-1, keepdim=True)).exp()
    return loop(3, start=lambda z: powers / powers.sum(-1, keepdim=True) + 1e-6)(logits)


def by_operators(logits):
    c = logits.softmax(-1) + 1e-6
    for dim in (-2, -1, -2):
        c /= c.sum(dim, keepdim=True) + 1e-6
    return c


def by_methods(logits):
    c = logits.softmax(-1) + 1e-6
    for dim in (-2, -1, -2):
        c.div_(c.sum(dim, keepdim=True).add_(1e-6))
    return c


def without_gradient(wide):
    with torch.no_grad():
        return rms(wide)


def in_place(pre, x, wide):
    wide.add_(1)
    return collapse(pre, x, wide)


def columns_written_to(x, w, scale, base):
    wide = x.flatten(-2).float()
    mixes = F.linear(wide, w) * rms(wide)
    own = pre_gate(mixes[..., : x.shape[-2]] * scale[0] + base[: x.shape[-2]])
    return collapse(own, x, wide), mixes.mul_(2)


def other_order(x, w, scale, base):
    """Columns comb | post | pre."""
    n, wide = x.shape[-2], x.flatten(-2).float()
    mixes = F.linear(wide, w) * rms(wide)
    square, last = n * n, n * (n + 2)
    logits = mixes[..., :square].unflatten(-1, (n, n)) * scale[0] + base[:square].view(n, n)
    post = post_gate(mixes[..., square : last - n] * scale[1] + base[square : last - n])
    own = pre_gate(mixes[..., last - n :] * scale[2] + base[last - n :])
    return collapse(own, x, wide), post, default_sinkhorn(logits)


def three_projections(x, w, scale, base):
    n, wide = x.shape[-2], x.reshape(-1, x.shape[-2] * x.shape[-1]).float()
    parts = zip(w.split([n, n, n * n]), scale, base.split([n, n, n * n]), strict=True)
    own, post, comb = ((wide @ v.t()) * rms(wide) * s + b for v, s, b in parts)
    lead = x.shape[:-2]
    u = collapse(pre_gate(own).view(*lead, n), x, x.float().flatten(-2))
    return u, post_gate(post).view(*lead, n), default_sinkhorn(comb.view(*lead, n, n))


def normed_by_torch(x, w, scale, base):
    wide = x.flatten(-2).float()
    mixes = F.linear(F.rms_norm(wide, wide.shape[-1:], None, 1e-6), w)
    return gates_of(mixes, x, wide, scale, base)[1:]


def one_scale(x, w, scale, base):
    return build()(x, w, scale[:1].expand(3), base)


def transposed_weight(x, w, scale, base):
    return build(before=lambda x, w, s, b: (x, w.t().contiguous().t(), s, b))(x, w, scale, base)


ACCEPTED = {
    "one iteration": build(loop(1)),
    "two iterations": build(loop(2)),
    "other numbers": build(
        loop(4, eps=1e-4),
        lambda z: torch.sigmoid(z) + 1e-3,
        lambda z: torch.sigmoid(z) * 1.5,
        lambda wide: torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5),
    ),
    "no eps, no multiplier": build(pre_gate=torch.sigmoid, post_gate=torch.sigmoid),
    "matrix [out, in]": build(lambda logits: loop(3)(logits.mT).mT),
    "softmax over columns": build(lambda logits: normalise(logits.softmax(-2) + 1e-6, -1)),
    "1 / sqrt": build(
        norm=lambda wide: 1 / torch.sqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)
    ),
    "power": build(
        norm=lambda wide: ((wide**2).sum(-1, keepdim=True) / wide.shape[-1] + 1e-6) ** -0.5
    ),
    "einsum": build(
        collapse=lambda pre, x, wide: torch.einsum("...n,...nh->...h", pre, x.float()).to(x.dtype)
    ),
    "product": build(
        collapse=lambda pre, x, wide: (pre.unsqueeze(-2) @ x.float()).squeeze(-2).to(x.dtype)
    ),
    "comb, post, pre": other_order,
    "three projections": three_projections,
    "F.rms_norm": normed_by_torch,
    "one scale": one_scale,
    "weight of strides": transposed_weight,
    "powers of e": build(from_powers),
    "rows first": build(lambda z: from_powers(z, (-1, -2))),
    "powers of e and an eps": build(lambda z: from_powers(z, eps=1e-3)),
    "less the first axis' maximum": build(lambda z: from_powers(z, below=-2)),
    "less the largest": build(lambda z: from_powers(z, below=(-1, -2))),
    "a softmax written out": build(softmax_written_out),
    "in place, operators": build(by_operators),
    "in place, methods": build(by_methods),
}


# --- the gates alone ------------------------------------------------------------------------------


def whole(mix):
    """A pre with a post behind it, whose matrix is ``mix`` of the last columns and a constant."""

    def both(x, w, scale, base, y, constant):
        n, wide = x.shape[-2], x.flatten(-2).float()
        z = F.linear(wide, w) * rms(wide)
        own = torch.sigmoid(z[..., :n] * scale[0] + base[:n])
        post = post_gate(z[..., n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = mix(z[..., 2 * n :] * scale[2] + base[2 * n :], constant)
        return collapse(own, x, wide), forms.deepseek_post(x, y, post, comb)

    return both


def plain(rest, one):
    """Hyper-connections without a constraint."""
    return one + torch.tanh(rest).unflatten(-1, one.shape)


def of_permutations(rest, matrices):
    """mHC-lite: a convex mix of all permutation matrices."""
    return (rest.softmax(-1) @ matrices.flatten(1)).unflatten(-1, matrices.shape[1:])


def of_factors(rest, one):
    """KromHC: the Kronecker product of two mixes of two streams."""
    weights = rest.unflatten(-1, (2, 2)).softmax(-1)[..., None, None]
    a, b = (weights[..., 0, :, :] * one + weights[..., 1, :, :] * one.flip(0)).unbind(-3)
    product = a[..., :, None, :, None] * b[..., None, :, None, :]
    return product.flatten(-4, -3).flatten(-2)


PERMUTATIONS = torch.stack([torch.eye(4)[list(p)] for p in itertools.permutations(range(4))])
FORMS = {
    "plain": (plain, 24, torch.eye(4)),
    "permutations": (of_permutations, 32, PERMUTATIONS),
    "factors": (of_factors, 12, torch.eye(2)),
}

LOOP = "the Sinkhorn loop "
PARTLY = {
    "another eps in the 5th step": (build(loop(8, at=4)), LOOP + "adds several eps: 1e-06, 1e-05"),
    "7th step swapped": (
        build(loop(12, at=6, swapped=True)),
        LOOP + "ends with rows where it begins with them",
    ),
    "rows last": (
        build(lambda logits: normalise(loop(3)(logits), -1)),
        LOOP + "ends with rows where it begins with them",
    ),
    "clamps": (build(clamped), "sums in the Sinkhorn loop are clamped, not added eps to"),
    "exp": (build(loop(1, start=torch.exp)), LOOP + "begins with exp, not with a softmax"),
    "softmax without eps": (
        build(loop(1, start=lambda z: z.softmax(-1))),
        LOOP + "adds several eps: 0, 1e-06",
    ),
    "post eps": (
        build(post_gate=lambda z: post_gate(z) + 1e-6),
        "the post gates are not a multiple of a sigmoid",
    ),
    "no post gates": (build(post_gate=torch.tanh), "no second group of gates was found"),
    "negative multiplier": (
        build(post_gate=lambda z: torch.sigmoid(z) * -2),
        "the multiplier of the post gates is -2, not positive",
    ),
    "less a maximum, and an eps": (
        build(lambda z: from_powers(z, below=-2, eps=1e-3)),
        LOOP + "begins with exp, not with a softmax",
    ),
    "less another axis' maximum": (
        build(lambda z: from_powers(z, below=-1)),
        LOOP + "begins with exp, not with a softmax",
    ),
}

REFUSED = {
    "tanh": (build(pre_gate=torch.tanh), "a gate is not a sigmoid"),
    "eps outside the root": (
        build(norm=lambda wide: 1 / (wide.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6)),
        "the norm is not rsqrt(mean of squares + eps)",
    ),
    "norm of one stream": (
        build(norm=lambda wide: rms(wide[..., : wide.shape[-1] // 4])),
        "the mean of squares is not over all 256 numbers of a token",
    ),
    "norm over H": (
        build(norm=lambda wide: torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) / 64 + 1e-6)),
        "the mean of squares is not over all 256 numbers of a token",
    ),
    "norm without a gradient": (
        build(norm=without_gradient),
        "gradients are recorded for a part of it only",
    ),
    "mixes returned": (build(also=lambda *found: found[0]), "output uses a value in between"),
    "gates returned": (build(also=lambda *found: found[1]), "output uses a value in between"),
    "16-bit products": (
        build(collapse=lambda pre, x, wide: (pre.to(x.dtype).unsqueeze(-1) * x).sum(-2)),
        "no sum of gates times streams, rounded once, was found",
    ),
    "streams in another order": (
        build(collapse=lambda pre, x, wide: collapse(pre, x, wide.view(x.shape).flip(-2))),
        "no sum of gates times streams, rounded once, was found",
    ),
    "streams written to": (
        build(collapse=in_place),
        "no sum of gates times streams, rounded once, was found",
    ),
    "columns written to": (
        columns_written_to,
        "the projection of the gates is used in another way too",
    ),
    "negative eps": (
        build(pre_gate=lambda z: torch.sigmoid(z) - 0.5),
        "an eps is -0.5, not 0 or positive",
    ),
    "a multiplied difference": (
        build(pre_gate=lambda z: torch.rsub(torch.sigmoid(z), 1.0, alpha=-2.0)),
        "no sum of gates times streams, rounded once, was found",
    ),
    "gates in 8 bits": (
        build(pre_gate=lambda z: pre_gate(z).to(torch.float8_e5m2).float()),
        "no sum of gates times streams, rounded once, was found",
    ),
}
