"""Losses from unmodified code on the card, forward and backward: `pytest -m gpu tests/gpu`."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.cross_entropy_variants import VARIANTS
from inductor_ext import measure, registry, report

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def on(clean_setting):
    with registry.only("fused_loss", "linear_cross_entropy"):
        yield


class Wide(TorchDispatchMode):
    """Conversions to other floating-point types do nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        dtype = kwargs.get("dtype")
        if dtype is not None and dtype.is_floating_point:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def step(fn, tensors, g=1.0):
    """(loss, gradients) of fresh leaves, the loss scaled by ``g``."""
    leaves = [t.detach().clone() for t in tensors]
    leaves = [t.requires_grad_() if t.is_floating_point() else t for t in leaves]
    loss = fn(*leaves)
    wanted = [t for t in leaves if t.requires_grad]
    return loss.detach(), *torch.autograd.grad(loss, wanted, torch.full_like(loss, g))


def judge_step(fn, compiled, tensors, g=1.0):
    got = step(compiled, tensors, g)
    eager = step(fn, tensors, g)
    wide = [t.double() if t.is_floating_point() else t for t in tensors]
    with Wide():
        truth = step(fn, wide, g)
    for i, (mine, right, baseline) in enumerate(zip(got, truth, eager, strict=True)):
        verdict = measure.check(mine, right, baseline)
        assert verdict.ok, f"result {i}: {verdict.reason}"
    return got


@contextlib.contextmanager
def taken_by(lowering):
    with report.collect() as decisions:
        yield
    fired = {d.lowering for d in decisions if d.fired and d.sites.startswith("loss")}
    assert fired == {lowering}


def inputs(name, n, v, dtype=BF16):
    return VARIANTS[name].inputs(n, v, dtype, DEVICE)


@pytest.mark.parametrize(
    "name", ["plain", "label smoothing", "z-loss, softcap, smoothing", "gathered"]
)
@pytest.mark.parametrize(("n", "v"), [(2048, 32000), (799, 50257), (17, 131072)])
def test_variant(name, n, v, poison):
    fn, tensors = VARIANTS[name].fn, inputs(name, n, v)
    compiled = torch.compile(fn)
    poison()
    with taken_by("fused_loss"):
        judge_step(fn, compiled, tensors)
    judge_step(fn, compiled, tensors, g=-0.3)


def test_two_runs_agree_bit_for_bit():
    fn, tensors = VARIANTS["plain"].fn, inputs("plain", 4096, 32000)
    compiled = torch.compile(fn)
    first, second = step(compiled, tensors), step(compiled, tensors)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_in_a_cuda_graph():
    fn, tensors = VARIANTS["plain"].fn, inputs("plain", 512, 32000)
    compiled = torch.compile(fn, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        judge_step(fn, compiled, tensors)


def linear(h, w, y):
    x = F.linear(h, w)[:, :-1].float()
    loss = F.cross_entropy(x.reshape(-1, len(w)), y[:, 1:].reshape(-1))
    return loss + 1e-4 * torch.logsumexp(x, -1).square().mean()


def test_linear_layer_in_chunks(poison):
    """Judged by the loss of rounded logits, as those of the layer are."""
    h = torch.randn(8, 2048, 1024, device=DEVICE).to(BF16)
    w = (torch.randn(128256, 1024, device=DEVICE) / 32).to(BF16)
    tensors = [h, w, torch.randint(0, len(w), (8, 2048), device=DEVICE)]
    compiled = torch.compile(linear)
    poison()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with taken_by("linear_cross_entropy"):
        got = step(compiled, tensors)
    logits = 8 * 2048 * len(w) * 2
    assert torch.cuda.max_memory_allocated() - before < logits
    eager = step(linear, tensors)
    for mine, right in zip(got, eager, strict=True):
        assert (mine - right).float().norm() <= 1e-2 * right.float().norm()


def test_number_of_rows_does_not_recompile():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("inductor")
    fn = VARIANTS["label smoothing"].fn
    compiled = torch.compile(fn, backend=counter)
    for n in (64, 96, 4096, 1000):
        tensors = inputs("label smoothing", n, 32000)
        for t in tensors:
            torch._dynamo.mark_dynamic(t, 0)
        loss = compiled(*tensors)
        (got,) = torch.autograd.grad(loss, tensors[0])
        (right,) = torch.autograd.grad(fn(*tensors), tensors[0])
        torch.testing.assert_close(got, right, rtol=2e-2, atol=1e-6)
    assert counter.frame_count == 1
