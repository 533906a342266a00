"""Linear attention on the card, at sizes that fill it: `pytest -m gpu tests/gpu`."""

import pathlib
import sys

import pytest
import torch

from inductor_ext import measure, ops
from inductor_ext.ops import _linear_attention_composed as composed

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "linear_attention"))
import linear_attention_reference as reference

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FORMS = ("", "head", "token", "channel")


def ours(q, k, v, g, scale, S):
    return ops.linear_attention(q, k, v, decay=g, scale=scale, initial_state=S, return_state=True)


def by_fp64(q, k, v, g, scale, S):
    return composed.attention(q, k, v, g, S, scale)


def on_card(inputs):
    return [None if t is None else t.cuda() for t in inputs]


def one_head(inputs, b, h):
    """[1, 1, ...] of every input, in fp64."""
    return [
        None if t is None else (t[h].view(1) if t.dim() == 1 else t[b, h][None, None]).double()
        for t in inputs
    ]


def relative(mine, right):
    return ((mine.double() - right).norm() / right.norm()).item()


# Of results in bf16, fp16 and fp32, whose products are rounded once more on the way.
LIMIT = {BF16: 6e-3, FP16: 1e-3, FP32: 1e-5}


@pytest.mark.parametrize("decay", FORMS)
@pytest.mark.parametrize(
    ("B", "H", "T", "K", "V", "dtype"),
    [(4, 16, 2048, 128, 128, BF16), (1, 2, 799, 64, 80, BF16), (8, 32, 257, 128, 64, FP16),
     (2, 8, 1030, 64, 64, FP32), (1, 3, 515, 256, 256, BF16), (2, 66, 1024, 32, 16, BF16),
     (1, 1, 17, 16, 100, FP32), (2, 4, 300, 128, 128, FP32)],
)  # fmt: skip
def test_everything(decay, B, H, T, K, V, dtype, poison):
    inputs = on_card(reference.draw(B, H, T, K, V, dtype, decay, state=True))
    given = [torch.randn_like(inputs[2]), torch.randn(B, H, K, V, device="cuda")]
    runs = []
    for _ in range(3):
        poison()
        runs.append([*ours(*inputs[:4], 0.3, inputs[4]),
                     *reference.gradients(ours, inputs, 0.3, given)])  # fmt: skip
    for again in runs[1:]:
        assert all(map(torch.equal, runs[0], again))
    for b, h in ((0, 0), (-1, -1), (B // 2, H // 3)):
        part, seeds = one_head(inputs, b, h), one_head(given, b, h)
        right = [*by_fp64(*part[:4], 0.3, part[4])]
        right += reference.gradients(by_fp64, part, 0.3, seeds)
        names = ["o", "state", "dq", "dk", "dv", *["dg"] * (decay != ""), "dstate"]
        for name, mine, truth in zip(names, runs[0], right, strict=True):
            if mine.dim() == 1:
                continue  # a decay per head: all sequences are in its gradient
            # A gradient of decays is a sum of both signs.
            limit = LIMIT[dtype] * (3 if name == "dg" else 1)
            assert relative(mine[b, h], truth[0, 0]) <= limit, name


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("decay", FORMS)
def test_by_eagers_own_error(decay, dtype):
    """By the rule: twice the error of the quadratic form in the same dtype, of one T x T."""
    inputs = on_card(reference.draw(2, 4, 200, 32, 32, dtype, decay, state=True))
    given = [torch.randn_like(inputs[2]), torch.randn(2, 4, 32, 32, device="cuda")]
    wide = [None if t is None else t.double() for t in inputs]
    found = [*ours(*inputs[:4], 0.3, inputs[4]), *reference.gradients(ours, inputs, 0.3, given)]
    right = [*by_fp64(*wide[:4], 0.3, wide[4])]
    right += reference.gradients(by_fp64, wide, 0.3, [d.double() for d in given])
    eager = [*reference.quadratic(*inputs[:4], 0.3, inputs[4])]
    eager += reference.gradients(reference.quadratic, inputs, 0.3, given)
    for mine, truth, baseline in zip(found, right, eager, strict=True):
        narrow = dtype if mine.dtype == FP32 and dtype != FP32 else None
        verdict = measure.check(mine, truth, baseline.to(mine.dtype), rounding=narrow)
        assert verdict.ok, verdict.reason


@pytest.mark.parametrize("decay", ["head", "token", "channel"])
def test_strong_decay(decay):
    inputs = on_card(reference.draw(2, 4, 1000, 64, 64, BF16, decay, strength=40.0, state=True))
    given = [torch.randn_like(inputs[2]), None]
    found = [ours(*inputs[:4], 0.3, inputs[4])[0], *reference.gradients(ours, inputs, 0.3, given)]
    wide = [t.double() for t in inputs]
    right = [by_fp64(*wide[:4], 0.3, wide[4])[0]]
    right += reference.gradients(by_fp64, wide, 0.3, [given[0].double(), None])
    for mine, truth in zip(found, right, strict=True):
        assert relative(mine, truth) <= 1.5e-2


@pytest.mark.parametrize("decay", FORMS)
def test_layouts(decay):
    """[B, T, H, D] transposed is computed as it lies, to the same bits."""
    q, k, v, g, S = on_card(reference.draw(2, 5, 333, 64, 64, BF16, decay, state=True))
    laid = [
        t if t is None or t.dim() == 1 else t.transpose(1, 2).contiguous().transpose(1, 2)
        for t in (q, k, v, g)
    ]
    given = [torch.ones((), device="cuda", dtype=BF16).expand_as(v), None]
    plain = reference.gradients(ours, (q, k, v, g, S), 0.3, given)
    other = reference.gradients(ours, (*laid, S), 0.3, given)
    assert all(map(torch.equal, plain, other))
    assert torch.equal(ours(*laid, 0.3, S)[0], ours(q, k, v, g, 0.3, S)[0])


def test_compiled_and_captured():
    """One program for all lengths, also inside a CUDA graph."""

    def fn(q, k, v, g):
        return ops.linear_attention(q, k, v, decay=g, feature_map="elu+1", normalize=True)

    compiled = torch.compile(fn, dynamic=True, fullgraph=True)
    for T in (100, 65, 700):
        q, k, v, g, _ = on_card(reference.draw(2, 4, T, 64, 64, BF16, "token"))
        with torch.compiler.set_stance("fail_on_recompile" if T != 100 else "default"):
            assert relative(compiled(q, k, v, g), fn(q, k, v, g).double()) <= 1e-2
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fn(q, k, v, g)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fn(q, k, v, g)
    graph.replay()
    assert torch.equal(out, fn(q, k, v, g))


def test_more_than_31_bits():
    """Offsets of the last tokens beyond 2^31 elements."""
    T = (1 << 31) // 128 + 1000
    q = torch.randn(1, 1, T, 128, device="cuda", dtype=BF16)
    out = ops.linear_attention(q, q, q, decay=-0.5)
    last = q[:, :, -200:].double()
    right, _ = composed.attention(last, last, last, torch.tensor([-0.5]).cuda(), None, 128**-0.5)
    assert relative(out[:, :, -100:], right[:, :, -100:]) <= 6e-3
