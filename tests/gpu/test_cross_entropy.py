"""The softmax family on the card, at sizes that fill it: `pytest -m gpu tests/gpu`."""

import gc
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F

from inductor_ext import measure, ops

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def room():
    yield
    gc.collect()
    torch.cuda.empty_cache()


def draw(rows, columns, dtype=BF16, integer=torch.int64):
    x = (torch.randn(rows, columns, device="cuda") * 3).to(dtype)
    target = torch.randint(0, columns, (rows,), device="cuda", dtype=integer)
    target[::7] = -100
    return x, target


def formula(x, target, softcap=None, z_loss=0.0, **options):
    z = softcap * torch.tanh(x / softcap) if softcap else x
    out = F.cross_entropy(z, target, **options)
    if z_loss:
        penalty = z_loss * z.logsumexp(1).square()
        rows = target != -100
        penalty = torch.where(rows, penalty, 0.0)
        if options.get("reduction", "mean") == "mean":
            penalty = penalty.sum() / rows.sum()
        out = out + (penalty.sum() if options.get("reduction") == "sum" else penalty)
    return out


def judged(fn, reference, x, *others, poison, repeats=3, **options):
    """``fn`` and its gradient by the rule, several times, into poisoned memory."""

    def run(f, dtype=None):
        own = x.detach().to(dtype or x.dtype).requires_grad_()
        wide = [t.to(dtype) if dtype and t.is_floating_point() else t for t in others]
        out = f(own, *wide, **options)
        torch.manual_seed(1)
        g = torch.randn(out.shape, device="cuda").to(out.dtype) if out.dim() else None
        return out.detach(), torch.autograd.grad(out, own, g)[0]

    poison()
    found = run(fn)
    for _ in range(repeats - 1):
        poison()
        for before, again in zip(found, run(fn), strict=True):  # a mean of no rows is NaN
            torch.testing.assert_close(again, before, rtol=0, atol=0, equal_nan=True)
    truth, eager = run(reference, torch.float64), run(reference)
    for name, got, exact, baseline in zip(("result", "dx"), found, truth, eager, strict=True):
        verdict = measure.check(got, exact, baseline)
        assert verdict.ok, f"{name}: {verdict.reason}"


SHAPES = [
    (4096, 32000), (1024, 128256), (1000, 50257), (1024, 129920), (528, 262144), (8, 131072),
    (1, 128256), (65536, 1000), (20000, 507), (3000, 257), (300, 17), (131, 799),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_cross_entropy(rows, columns, reduction, poison):
    x, target = draw(rows, columns)
    judged(ops.cross_entropy, formula, x, target, poison=poison, reduction=reduction)


OPTIONS = [
    {"label_smoothing": 0.1}, {"z_loss": 1e-3}, {"softcap": 30.0},
    {"softcap": 5.0, "label_smoothing": 0.2, "z_loss": 1e-3, "reduction": "sum"},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("rows", "columns"), [(1024, 50257), (2048, 32000), (8, 131072)])
def test_options(rows, columns, dtype, options, poison):
    x, target = draw(rows, columns, dtype)
    judged(ops.cross_entropy, formula, x, target, poison=poison, **options)


@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize("columns", [507, 32000, 128256])
def test_dtypes(dtype, columns, poison):
    x, target = draw(700, columns, dtype, torch.int32)
    judged(ops.cross_entropy, lambda x, t: formula(x, t.long()), x, target, poison=poison)


def test_weights_and_probabilities(poison):
    x, target = draw(1024, 50257)
    weight = torch.rand(50257, device="cuda")
    judged(
        lambda x, t, w: ops.cross_entropy(x, t, w, label_smoothing=0.1),
        lambda x, t, w: F.cross_entropy(x, t, w.to(x.dtype), label_smoothing=0.1),
        x, target, weight, poison=poison,
    )  # fmt: skip
    q = torch.randn(1024, 50257, device="cuda").to(BF16).softmax(-1)
    judged(ops.cross_entropy, lambda x, q: F.cross_entropy(x, q), x, q, poison=poison)


def test_strides_and_dimensions(poison):
    x, target = draw(512, 32008)
    judged(
        lambda x, t: ops.cross_entropy(x[:, 1:-3], t),
        lambda x, t: F.cross_entropy(x[:, 1:-3], t),
        x, target.clamp(max=32003), poison=poison,
    )  # fmt: skip
    x = torch.randn(4, 1000, 16, 16, device="cuda", dtype=BF16)
    target = torch.randint(0, 1000, (4, 16, 16), device="cuda")
    judged(ops.cross_entropy, F.cross_entropy, x, target, poison=poison)


def test_more_than_2_to_the_31_elements(poison):
    rows, columns = 2**31 // 128256 + 400, 128256
    x, target = draw(rows, columns)
    own = x.requires_grad_()
    for reduction in ("sum", "none"):
        poison()
        loss = ops.cross_entropy(own, target, reduction=reduction)
        (dx,) = torch.autograd.grad(loss.sum(), own)
        for part in (slice(0, 64), slice(rows - 64, rows)):
            y = x.detach()[part].double().requires_grad_()
            truth = F.cross_entropy(y, target[part], reduction="none")
            (dy,) = torch.autograd.grad(truth.sum(), y)
            assert (dx[part].double() - dy).abs().max() <= 2**-8
            if reduction == "none":
                torch.testing.assert_close(loss[part].double(), truth, rtol=1e-2, atol=1e-2)
        del dx


def test_extremes():
    for offset in (0.0, 1e6):
        x = torch.tensor([[2.0, -1.0]], device="cuda") + offset
        loss = ops.cross_entropy(x, torch.tensor([0], device="cuda"))
        assert loss.item() == pytest.approx(0.0485873, rel=1e-5)
    x = torch.zeros(1, 128256, device="cuda")
    x[0, 77] = 60.0
    x.requires_grad_()
    loss = ops.cross_entropy(x, torch.tensor([77], device="cuda"))
    loss.backward()
    expected = 128255 * torch.tensor(-60.0, dtype=torch.float64).exp().item()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert x.grad[0, 77].item() == pytest.approx(-expected, rel=1e-5)
    x, target = draw(300, 128256)
    target[:] = -100
    target[5] = 9
    x[6:] = float("nan")
    x.requires_grad_()
    loss = ops.cross_entropy(x, target)
    loss.backward()
    assert loss.isfinite() and (x.grad[6:] == 0).all() and x.grad[5, 9] != 0


def test_a_target_out_of_range_asserts_on_the_device():
    program = """
        import torch
        from inductor_ext import ops
        x = torch.randn(64, 1000, device="cuda")
        t = torch.full((64,), 1000, device="cuda")
        ops.cross_entropy(x, t)
        torch.cuda.synchronize()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert done.returncode != 0 and "device-side assert" in done.stderr


def test_nothing_waits_for_the_card():
    x, target = draw(512, 32000)
    x.requires_grad_()
    ops.cross_entropy(x, target).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.cross_entropy(x, target, label_smoothing=0.1).backward()
        ops.cross_entropy(x, target, reduction="none").sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_backward_scales_and_keeps():
    x, target = draw(512, 32000)
    x.requires_grad_()
    loss = ops.cross_entropy(x, target)
    (kept,) = torch.autograd.grad(loss, x, torch.tensor(2.0, device="cuda").to(BF16), True)
    copy = kept.clone()
    (last,) = torch.autograd.grad(loss, x, torch.tensor(2.0, device="cuda").to(BF16))
    assert torch.equal(kept, copy) and torch.equal(kept, last)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("rows", "columns"), [*SHAPES[:6], *SHAPES[7:]])
def test_softmax(name, dtype, rows, columns, poison):
    x = (torch.randn(rows // 2 + 1, columns, device="cuda") * 3).to(dtype)
    judged(getattr(ops, name), getattr(torch, name), x, poison=poison, dim=-1)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("shape", [(4, 19, 512, 128), (3, 150, 333, 57), (1203, 4999)])
def test_softmax_of_strided_classes(name, dtype, shape, poison):
    x = (torch.randn(shape, device="cuda") * 3).to(dtype)
    judged(getattr(ops, name), getattr(torch, name), x, poison=poison, dim=max(len(shape) - 3, 0))


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_of_shared_rows(name, poison):
    """More rows than are under way, with rows and columns of infinities; beside another stream."""
    x = (torch.randn(301, 128256, device="cuda") * 3).to(BF16)
    x[::17, 5000:] = -torch.inf
    x[1], x[2, 7] = -torch.inf, torch.nan
    own, fn = x.requires_grad_(), getattr(ops, name)
    y = fn(own)
    assert torch.equal(y.isnan(), getattr(torch, name)(x.float(), -1).isnan())
    g = torch.randn_like(x)
    (dx,) = torch.autograd.grad(y, own, g, retain_graph=True)
    other = torch.cuda.Stream()
    for _ in range(5):
        poison()
        with torch.cuda.stream(other):
            torch.mm(g[:, :8192].t(), g[:, :8192])
        assert torch.equal(y.nan_to_num(), fn(own).nan_to_num())
        (again,) = torch.autograd.grad(y, own, g, retain_graph=True)
        assert torch.equal(dx.nan_to_num(), again.nan_to_num())


@pytest.mark.parametrize(("rows", "columns"), [(1024, 128256), (2000, 50257), (8, 131072)])
def test_distillation(rows, columns, poison):
    x, target = draw(rows, columns)
    ids = torch.randint(0, columns, (rows, 20), device="cuda")
    logprobs = torch.randn(rows, 20, device="cuda").log_softmax(-1)

    def loss(x, ids, logprobs):
        w = logprobs.to(x.dtype).softmax(-1)
        return -(w * x.log_softmax(-1).gather(1, ids)).sum(-1).mean()

    judged(ops.sparse_distillation_loss, loss, x, ids, logprobs, poison=poison)
    own = x.requires_grad_()
    out = ops.sparse_distillation_loss(own, ids, logprobs, target)
    (dx,) = torch.autograd.grad(out, own)
    assert out.isfinite() and (dx[target == -100] == 0).all()


@pytest.mark.parametrize("memory", [None, 300_000_000])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_linear(memory, bias, reduction, poison):
    rows, hidden, classes = 3000, 512, 50257 if bias else 50264
    h = torch.randn(rows, hidden, device="cuda").to(BF16)
    w = (torch.randn(classes, hidden, device="cuda") * hidden**-0.5).to(BF16)
    b = [torch.randn(classes, device="cuda").to(BF16)] if bias else []
    target = torch.randint(0, classes, (rows,), device="cuda")
    target[::5] = -100
    options = {} if memory is None else {"memory": memory}

    def run(fn, dtype=BF16):
        own = [t.to(dtype).requires_grad_() for t in (h, w, *b)]
        loss = fn(*own)
        torch.manual_seed(1)
        g = torch.rand(loss.shape, device="cuda").to(loss.dtype)
        return [loss.detach(), *torch.autograd.grad(loss, own, g)]

    def ours(h, w, *b):
        return ops.linear_cross_entropy(h, w, target, *b, reduction=reduction, **options)

    def written(h, w, *b):
        return F.cross_entropy(F.linear(h, w, *b), target, reduction=reduction)

    poison()
    found, truth, eager = run(ours), run(written, torch.float64), run(written)
    for got, exact, baseline in zip(found, truth, eager, strict=True):
        verdict = measure.check(got, exact, baseline)
        assert verdict.ok, verdict.reason


@pytest.mark.parametrize("rows", [1024, 4096, 16384])
def test_memory_of_linear(rows):
    hidden, classes = 4096, 128256
    h = torch.randn(rows, hidden, device="cuda").to(BF16).requires_grad_()
    w = (torch.randn(classes, hidden, device="cuda") * 0.01).to(BF16).requires_grad_()
    target = torch.randint(0, classes, (rows,), device="cuda")
    torch.mm(h.detach()[:8], w.detach()[:8].t())  # the library's workspace is there then
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients = torch.autograd.grad(ops.linear_cross_entropy(h, w, target), (h, w))
    extra = torch.cuda.max_memory_allocated() - before - sum(g.nbytes for g in gradients)
    assert extra <= min(rows * classes * 2, 2.5e9) * 1.02 + 5e6


@pytest.mark.parametrize("fn", ["cross_entropy", "softmax", "linear"])
def test_compiled(fn):
    x, target = draw(300, 32000)
    w = (torch.randn(32000, 256, device="cuda") * 0.06).to(BF16)
    calls = {
        "cross_entropy": lambda x, t: ops.cross_entropy(x * 2, t, label_smoothing=0.1),
        "softmax": lambda x, t: ops.softmax(x * 2)[:, 0].float().sum(),
        "linear": lambda x, t: ops.linear_cross_entropy(x[:, :256], w, t),
    }
    compiled = torch.compile(calls[fn], dynamic=True)
    for rows in (300, 131, 200):
        own = x[:rows].clone().requires_grad_()
        twin = x[:rows].clone().requires_grad_()
        with torch._dynamo.config.patch(error_on_recompile=rows != 300):
            compiled(own, target[:rows].clone()).backward()
        calls[fn](twin, target[:rows]).backward()
        torch.testing.assert_close(own.grad, twin.grad, rtol=2e-2, atol=1e-5)
