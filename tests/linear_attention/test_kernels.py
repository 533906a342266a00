"""The kernels of linear attention in the interpreter, against the recurrence in fp64."""

import linear_attention_reference as reference
import pytest
import torch

from inductor_ext import measure, ops

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FORMS = ("", "head", "token", "channel")


def ours(q, k, v, g, scale, S, **options):
    return ops.linear_attention(
        q, k, v, decay=g, scale=scale, initial_state=S, return_state=True, **options
    )


def judge(found, truth, eager, rounding=None):
    """``rounding``: what eager rounds to where the result is wider."""
    for mine, right, baseline in zip(found, truth, eager, strict=True):
        narrow = rounding if mine.dtype == FP32 else None
        verdict = measure.check(mine, right, baseline.to(mine.dtype), rounding=narrow)
        assert verdict.ok, verdict.reason


def check(inputs, scale, on_cpu, fn=ours, with_state=True):
    """Outputs and all gradients, by the recurrence and by the quadratic form's own error."""
    q, k, v, g, S = inputs
    wide = [None if t is None else t.double() for t in inputs]
    given = [torch.randn(v.shape).to(v.dtype), torch.randn(*q.shape[:2], q.shape[-1], v.shape[-1])]
    if not with_state:
        given[1] = None
    with on_cpu():
        found = fn(q, k, v, g, scale, S)
        grads = reference.gradients(fn, inputs, scale, given)
        again = reference.gradients(fn, inputs, scale, given)
    assert all(map(torch.equal, grads, again))
    assert found[0].dtype == v.dtype and found[1].dtype == FP32
    assert [x.dtype for x in grads] == [t.dtype for t in inputs if t is not None]
    narrow = q.dtype if q.dtype != FP32 else None
    truth = reference.attention(*wide[:4], scale, wide[4])
    judge(found, truth, reference.quadratic(q, k, v, g, scale, S), narrow)
    given = [None if d is None else d.double() for d in given]
    right = reference.gradients(reference.attention, wide, scale, given)
    eager = reference.gradients(reference.quadratic, inputs, scale, given)
    judge(grads, right, eager, narrow)


@pytest.mark.parametrize("decay", FORMS)
@pytest.mark.parametrize(
    ("dtype", "T", "K", "V", "state"),
    [(FP32, 70, 16, 24, True), (BF16, 150, 32, 40, True), (FP16, 64, 24, 16, False)],
)
def test_forms(decay, dtype, T, K, V, state, on_cpu):
    check(reference.draw(1, 2, T, K, V, dtype, decay, state=state), 0.3, on_cpu)


@pytest.mark.parametrize("decay", FORMS)
@pytest.mark.parametrize("T", [1, 17, 65])
def test_lengths(decay, T, on_cpu):
    inputs = reference.draw(2, 1, T, 16, 16, FP32, decay, state=True)
    check(inputs, 1.0, on_cpu, with_state=T != 17)


@pytest.mark.parametrize("decay", FORMS)
def test_no_tokens(decay, on_cpu):
    q, k, v, g, S = reference.draw(2, 2, 0, 16, 8, FP32, decay, state=True)
    with on_cpu():
        out, state = ours(q, k, v, g, 1.0, S)
        zero = ours(q, k, v, g, 1.0, None)[1]
        grads = reference.gradients(ours, (q, k, v, g, S), 1.0, [None, torch.ones_like(S)])
    assert out.shape == v.shape and torch.equal(state, S) and not zero.any()
    assert torch.equal(grads[-1], torch.ones_like(S))
    if decay == "head":
        assert grads[3].eq(S.sum((0, 2, 3)) * 0).all()


@pytest.mark.parametrize("decay", ["head", "token", "channel"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_strong_decay(decay, dtype, on_cpu):
    """Of -20 per token: a factor e^{-G} of its own would be e^{1280}, and infinite."""
    inputs = reference.draw(1, 2, 70, 16, 16, dtype, decay, strength=40.0, state=True)
    if decay != "head":
        inputs[3][:, :, ::3] *= 1e-3  # tokens that keep nearly everything between
    check(inputs, 1.0, on_cpu)


def test_gradients_of_decays_per_head(on_cpu):
    """Each summed over its tokens: a rounding error that stays in a suffix sum would be, too."""
    strengths = (-0.01, -0.5, -2.4, -8.0, -torch.inf)
    q, k, v, _, S = reference.draw(1, len(strengths), 100, 16, 16, BF16, state=True)
    g = torch.tensor(strengths)
    given = [torch.randn(v.shape).to(BF16), None]
    with on_cpu():
        mine = reference.gradients(ours, (q, k, v, g, S), 0.3, given)[3]
    wide = [t.double() for t in (q, k, v, g, S)]
    right = reference.gradients(reference.attention, wide, 0.3, [given[0].double(), None])[3]
    eager = reference.gradients(reference.quadratic, (q, k, v, g, S), 0.3, given)[3]
    assert mine[-1] == right[-1] == 0
    allowed = 2 * (eager - right).abs() + 1e-3 * right.abs()
    assert ((mine - right).abs() <= allowed).all()


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_mild_decays_beside_strong_ones(decay, on_cpu):
    """Each has kernels of its own, by the head or by the chunk."""
    inputs = reference.draw(1, 2, 140, 16, 16, BF16, decay, state=True)
    inputs[3][:, 1, 70:100] *= 60.0
    check(inputs, 0.5, on_cpu)


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_forgetting_everything(decay, on_cpu):
    q, k, v, g, _ = reference.draw(1, 1, 80, 16, 16, FP32, decay)
    g[:, :, 37] = -torch.inf
    with on_cpu():
        out, state = ours(q, k, v, g, 1.0, None)
        parts = [
            ours(*(t[:, :, s] for t in (q, k, v, g)), 1.0, None)
            for s in (slice(0, 37), slice(37, 80))
        ]
        grads = reference.gradients(ours, (q, k, v, g, None), 1.0, [torch.ones_like(v), None])
    together = torch.cat([o for o, _ in parts], 2)
    assert (out - together).norm() <= 1e-5 * together.norm()
    assert (state - parts[1][1]).norm() <= 1e-5 * state.norm()
    assert all(x.isfinite().all() for x in grads)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("decay", FORMS)
def test_nan_reaches_only_what_follows(decay, dtype, on_cpu):
    q, k, v, g, _ = reference.draw(1, 2, 40, 16, 16, dtype, decay)
    (g if decay in ("token", "channel") else k)[:, 0, 20] = torch.nan
    with on_cpu():
        out, _ = ours(q, k, v, g, 1.0, None)
    assert out[:, 1].isfinite().all() and out[:, 0, 20:].isnan().all()
    assert out[:, 0, :20].isfinite().all()


def test_fp16_state_out_of_range(on_cpu):
    """Sums over tokens that fp16 does not hold, of tokens that it does."""
    q, k, v, _, S = reference.draw(1, 1, 40, 16, 16, FP16, state=True)
    S = S.abs() * 1e5
    with on_cpu():
        out, _ = ours(q, k, v, None, 1e-3, S)
    right, _ = reference.attention(q, k, v, None, 1e-3, S)
    assert (out - right).norm() <= 2e-3 * right.norm()


@pytest.mark.parametrize("decay", FORMS)
def test_state_carries_over(decay, on_cpu):
    q, k, v, g, _ = reference.draw(1, 2, 96, 16, 16, FP32, decay)
    with on_cpu():
        whole, last = ours(q, k, v, g, 0.5, None)
        state, outs = None, []
        for s in (slice(0, 30), slice(30, 96)):
            gates = g if g is None or g.dim() == 1 else g[:, :, s]
            out, state = ours(q[:, :, s], k[:, :, s], v[:, :, s], gates, 0.5, state)
            outs.append(out)
    assert (torch.cat(outs, 2) - whole).norm() <= 1e-5 * whole.norm()
    assert (state - last).norm() <= 1e-5 * last.norm()


@pytest.mark.parametrize("decay", ["", "token", "channel"])
def test_layouts(decay, on_cpu):
    """[B, T, H, D] transposed, slices of one projection, and what is not dense in its last."""
    q, k, v, g, S = reference.draw(2, 2, 20, 16, 16, FP32, decay, state=True)

    def laid(t):
        return None if t is None else t.transpose(1, 2).contiguous().transpose(1, 2)

    packed = torch.cat([q, k, v], -1)
    layouts = [
        [*map(laid, (q, k, v, g)), S],
        [*packed.split(16, -1), g, S.transpose(-1, -2).contiguous().transpose(-1, -2)],
        [*(t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in (q, k, v)), g, S],
    ]
    given = [torch.ones(()).expand(2, 2, 20, 16), torch.randn(2, 2, 16, 16)]
    with on_cpu():
        plain = ours(q, k, v, g, 1.0, S), reference.gradients(ours, (q, k, v, g, S), 1.0, given)
        for inputs in layouts:
            out, state = ours(*inputs[:4], 1.0, inputs[4])
            assert torch.equal(out, plain[0][0]) and torch.equal(state, plain[0][1])
            grads = reference.gradients(ours, inputs, 1.0, given)
            assert all(map(torch.equal, grads, plain[1]))
        assert ours(*layouts[0][:4], 1.0, S)[0].stride() == layouts[0][2].stride()


def test_segments_and_tilings(on_cpu):
    """However the tokens are cut: the same but for rounding."""
    from inductor_ext.templates import linear_attention_launch as launch

    q, k, v, g, S = reference.draw(1, 1, 150, 16, 32, FP32, "token", state=True)
    do, dS = torch.randn_like(v), torch.randn_like(S)
    found = []
    with on_cpu():
        for chosen in [(16, 16, 4, 1, 1), (32, 32, 4, 1, 3), (16, 32, 4, 1, 100)]:
            options = {"chosen": launch.Tiling(*chosen)}
            out = launch.forward(q, k, v, g, S, 0.7, "ieee", **options)
            back = launch.backward(q, k, v, g, S, 0.7, "ieee", 0, do, dS, True, True, **options)
            found.append((*out, *back))
    for other in found[1:]:
        for mine, first in zip(other, found[0], strict=True):
            assert (mine - first).norm() <= 1e-5 * first.norm()


@pytest.mark.parametrize("feature_map", ["elu+1", "relu", torch.exp])
def test_feature_map_and_normalisation(feature_map, on_cpu):
    q, k, v, g, _ = reference.draw(1, 2, 50, 16, 24, FP32, "head")
    S = torch.rand(1, 2, 16, 25)
    maps = {"elu+1": lambda t: torch.nn.functional.elu(t) + 1, "relu": torch.relu}
    f = maps.get(feature_map, feature_map)
    options = {"feature_map": feature_map, "normalize": True}
    with on_cpu():
        out, state = ours(q, k, v, g, None, S, **options)
        alone = ops.linear_attention(q, k, v, decay=g, initial_state=S, **options)
    features = f(q.double()), f(k.double())
    sums, S1 = reference.attention(*features, v, g, 1.0, S[..., :24])
    norm, z = reference.attention(*features, torch.ones(1, 2, 50, 1), g, 1.0, S[..., 24:])
    assert (out - sums / norm).norm() <= 1e-5 * out.norm() and torch.equal(out, alone)
    assert (state - torch.cat([S1, z], -1)).norm() <= 1e-5 * state.norm()


def test_numbers_as_decay(on_cpu):
    q, k, v, _, _ = reference.draw(1, 2, 20, 16, 16)
    with on_cpu():
        one = ours(q, k, v, -0.25, 1.0, None)
        tensor = torch.tensor(-0.25, requires_grad=True)
        other = ours(q, k, v, tensor, 1.0, None)
        other[0].sum().backward()
    right = reference.attention(q, k, v, torch.full((2,), -0.25), 1.0)
    assert all(map(torch.equal, one, other)) and tensor.grad.shape == ()
    assert (one[0] - right[0]).norm() <= 1e-5 * right[0].norm()


def test_default_scale(on_cpu):
    q, k, v, _, _ = reference.draw(1, 1, 20, 16, 16)
    with on_cpu():
        out = ops.linear_attention(q, k, v)
    right = reference.attention(q, k, v, None, 0.25)[0]
    assert (out - right).norm() <= 1e-5 * right.norm()
