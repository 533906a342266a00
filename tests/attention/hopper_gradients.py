"""Gradients of the Hopper kernels, asked for directly, and what they should be."""

import dataclasses

import torch
from backward_programs import CAUSAL, SCORES, Score, draw_inputs, gradients
from inductor_ext.templates.attention_program import Input, Program

LOG2E = 1.4426950408889634
# Those whose gradient is one number times ds, and that read nothing along the axis of the loop.
BOTH = (
    "scale", "negative scale", "causal", "lower right", "window", "sinks", "two spans", "head bias",
)  # fmt: skip
PAIRED = "pairs", "causal pairs"
NAMES = {
    "keys": (*BOTH, "slot bias", "causal slot bias", "shared slot bias", *PAIRED),
    "rows": (*BOTH, "row bias", "slot bias", "causal slot bias", "shared slot bias", *PAIRED),
}
PAIRS = Score(
    Program(
        inputs=(Input(torch.bfloat16, "hqk"),), differentiable=(0,), slope=0.25,
        score=f"r = (s * 0.25 + x0.to(tl.float32)) * {LOG2E!r}", gradient="ds = g * 0.25\nd0 = g",
    ),
    lambda s, b, h, q, k, x, *_: s * 0.25 + x[0],
    (("hqk", torch.bfloat16, True),),
)  # fmt: skip

MATRICES = {
    "pairs": PAIRS,
    "causal pairs": Score(
        dataclasses.replace(PAIRS.program, keep="keep = q >= k", **CAUSAL),
        lambda s, b, h, q, k, x, *_: (s * 0.25 + x[0]).masked_fill(q < k, -torch.inf),
        PAIRS.inputs,
    ),
}


class Problem:
    """Tensors as projections leave them, [B, S, H, D] transposed, and their gradients: ``right`` by
    fp64, ``eager`` in their own dtype. delta and lse2 are those of fp64."""

    def __init__(self, name, B, heads, kv_heads, rows, columns, d, dv, dtype=torch.bfloat16):
        self.score = score = (SCORES | MATRICES)[name]
        sizes = (heads, rows, d), (kv_heads, columns, d), (kv_heads, columns, dv), (heads, rows, dv)
        drawn = [torch.randn(B, n, h, e).to(dtype).transpose(1, 2) for h, n, e in sizes]
        self.q, self.k, self.v, self.do = q, k, v, do = drawn
        self.inputs = draw_inputs(score, B, heads, rows, columns)
        wide = [x.double() if x.is_floating_point() else x for x in self.inputs]
        given = [t.double() for t in (q, k, v)]
        out, lse, right = gradients(score, *given, wide, do.double())
        _, _, eager = gradients(score, q, k, v, self.inputs, do)
        self.right, self.eager = right[:3], eager[:3]
        padded = -(-rows // 128) * 128
        self.delta = torch.zeros(B, heads, padded)
        self.shift = torch.full((B, heads, padded), torch.inf)
        self.delta[..., :rows] = (out * do.double()).sum(-1)
        self.shift[..., :rows] = (lse * LOG2E).masked_fill(lse == -torch.inf, torch.inf)

    def arguments(self, part):
        """What ``attention_backward_gluon_launch.keys`` or ``rows`` is given, and its results, of
        NaN."""
        tensors = (self.k, self.v) if part == "keys" else (self.q,)
        results = tuple(torch.full_like(t, torch.nan) for t in tensors)
        given = (self.q, self.k, self.v, self.do, self.delta, self.shift, self.inputs)
        return (*given, self.score.numbers, self.score.program, *results), results

    def pairs(self):
        """ds for each pair, in fp64."""
        group = self.q.shape[1] // self.k.shape[1]
        q, do = self.q.double(), self.do.double()
        k, v = (t.repeat_interleave(group, 1).double() for t in (self.k, self.v))
        s = q @ k.mT * 0.25 + self.inputs[0].double()
        rows = slice(0, q.shape[2])
        p = torch.exp2(s * LOG2E - self.shift[..., rows, None].double())
        return p * (do @ v.mT - self.delta[..., rows, None].double())

    def judge(self, part, results):
        """By fp64: twice eager's error and the dtype's rounding."""
        which = slice(1, 3) if part == "keys" else slice(1)
        for mine, right, eager in zip(results, self.right[which], self.eager[which], strict=True):
            allowed = 2 * (eager.double() - right).abs().max()
            allowed = allowed + right.abs().max() * torch.finfo(mine.dtype).eps
            assert (mine.double() - right).abs().max() <= allowed
