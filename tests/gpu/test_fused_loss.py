"""Losses as users write them, compiled with the plugin on the card: loss and gradients by fp64."""

import pytest
import torch
import torch.nn.functional as F

import inductor_ext
from inductor_ext import measure, report

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
LOWERINGS = ("softmax", "cross_entropy", "fused_loss", "linear_cross_entropy")


def plain(x, t):
    return F.cross_entropy(x.float(), t)


def smoothed(x, t):
    return F.cross_entropy(x.float(), t, label_smoothing=0.1)


def everything(x, t):
    z = 30 * torch.tanh(x.float() / 30) / 0.8
    return F.cross_entropy(z, t, label_smoothing=0.1) + 1e-3 * z.logsumexp(-1).square().mean()


def written_out(x, t):
    z = x.float()
    return (z.logsumexp(-1) - z.gather(-1, t.clamp(min=0)[:, None])[:, 0]).mean()


def per_row(x, t):
    return F.cross_entropy(x.float(), t, reduction="none", label_smoothing=0.1)


def shifted(x, t):
    x, t = x.view(4, -1, x.shape[-1]), t.view(4, -1)
    return F.cross_entropy(x[:, :-1].flatten(0, 1).float(), t[:, 1:].flatten())


def top_of_a_teacher(x, t):
    steps = torch.arange(32, device=t.device) // 2 * 20  # each column twice
    ids = (t.clamp(min=0)[:, None] + steps) % x.shape[-1]
    logprobs = torch.linspace(-6, 0, 32, device=t.device).log_softmax(-1)
    student = x.float().log_softmax(-1).gather(-1, ids)
    return (logprobs.exp() * (logprobs - student)).sum(-1).mean()


def transposed(x, t):
    x, t = x.view(4, -1, x.shape[-1]), t.view(4, -1)
    return F.cross_entropy(x.transpose(1, 2), t, label_smoothing=0.1)


def log_probabilities(x, t):
    return x.float().log_softmax(-1)


LOSSES = (plain, smoothed, everything, written_out, per_row, shifted, transposed, top_of_a_teacher)


def draw(rows, columns):
    x = (torch.randn(rows, columns, device="cuda") * 3).to(BF16)
    t = torch.randint(0, columns, (rows,), device="cuda")
    t[::7] = -100
    return x, t


def gradients(fn, tensors, t, g=None):
    own = [x.detach().requires_grad_() for x in tensors]
    out = fn(*own, t)
    torch.manual_seed(1)
    g = torch.full_like(out, 3.0) if out.dim() == 0 else torch.randn_like(out)
    return [out.detach(), *torch.autograd.grad(out, own, g)]


def by_the_rule(fn, tensors, t, found):
    class Wide(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.Tensor.float:
                return args[0]
            return func(*args, **(kwargs or {}))

    with Wide():
        truth = gradients(fn, [x.double() for x in tensors], t)
    eager = gradients(fn, tensors, t)
    for got, exact, baseline in zip(found, truth, eager, strict=True):
        verdict = measure.check(got, exact, baseline)
        assert verdict.ok, verdict.reason


# 128 MB of logits and more: fewer are left.
SHARED = [(fn, *size) for fn in LOSSES for size in ((2112, 32000), (1400, 50257), (528, 128256))]
MANY = [(log_probabilities, 2200, 32000)]


@pytest.mark.parametrize(("fn", "rows", "columns"), [*SHARED, *MANY])
def test_losses(fn, rows, columns, poison):
    x, t = draw(rows, columns)
    with inductor_ext.enable(*LOWERINGS), report.collect() as decisions:
        compiled = torch.compile(fn, dynamic=False)
        found = gradients(compiled, [x], t)
    assert any(d.fired for d in decisions), decisions
    poison()
    again = gradients(compiled, [x], t)
    for a, b in zip(found, again, strict=True):
        assert torch.equal(a, b)
    by_the_rule(fn, [x], t, found)


def per_place(x, t):
    return F.cross_entropy(x, t, reduction="none")


def scored(x, t):
    z = 30 * torch.tanh(x.float() / 30)
    return F.cross_entropy(z, t, label_smoothing=0.1) + 1e-3 * z.logsumexp(1).square().mean()


@pytest.mark.parametrize("fn", [plain, scored, per_place])
@pytest.mark.parametrize("shape", [(4, 19, 512, 512), (3, 150, 333, 257), (16, 1203, 5000)])
def test_strided_classes(fn, shape, poison):
    torch.manual_seed(0)
    x = (torch.randn(shape, device="cuda") * 3).to(BF16)
    t = torch.randint(0, shape[1], (shape[0], *shape[2:]), device="cuda")
    t.view(-1)[::7] = -100
    with inductor_ext.enable(*LOWERINGS), report.collect() as decisions:
        compiled = torch.compile(fn, dynamic=False)
        found = gradients(compiled, [x], t)
    assert {d.chosen for d in decisions} & {"one sweep, strided", "class_statistics"}, decisions
    poison()
    for a, b in zip(found, gradients(compiled, [x], t), strict=True):
        assert torch.equal(a, b)
    by_the_rule(fn, [x], t, found)


def placed(x, t):
    return x.softmax(1)


def placed_logs(x, t):
    return (x / 2).log_softmax(1)


@pytest.mark.parametrize("fn", [placed, placed_logs])
@pytest.mark.parametrize("shape", [(4, 19, 512, 512), (3, 150, 333, 257)])
def test_values_of_strided_classes(fn, shape, poison):
    x = (torch.randn(shape, device="cuda") * 3).to(BF16)
    x[0, 5:, 7, 9], x[0, :, 7, 10], x[1, 3, 8, 8] = -torch.inf, -torch.inf, torch.nan
    with inductor_ext.enable(*LOWERINGS), report.collect() as decisions:
        compiled = torch.compile(fn, dynamic=False)
        found = gradients(compiled, [x], None)
    assert "softmax_forward" in {d.chosen for d in decisions}, decisions
    poison()
    for a, b in zip(found, gradients(compiled, [x], None), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
    by_the_rule(fn, [x], None, found)


def divergence(x, q):
    return F.kl_div(x.float().log_softmax(-1), q.softmax(-1), reduction="batchmean")


def divergence_of_logs(x, q):
    student, teacher = x.float().log_softmax(-1), (q / 2).log_softmax(-1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def entropy(x, q):
    logp = x.float().log_softmax(-1)
    return -(logp.exp() * logp).sum(-1).mean()


def signed(x, q):
    return (q * x.float().log_softmax(-1)).sum(-1)


@pytest.mark.parametrize("fn", [divergence, divergence_of_logs, entropy, signed])
@pytest.mark.parametrize(("rows", "columns"), [(2112, 32000), (1400, 50257)])
def test_weighted_sums(fn, rows, columns, poison):
    x, q = draw(rows, columns)[0], torch.randn(rows, columns, device="cuda") * 2
    with inductor_ext.enable(*LOWERINGS):
        compiled = torch.compile(fn, dynamic=False)
        found = gradients(compiled, [x], q)
        poison()
        assert all(map(torch.equal, found, gradients(compiled, [x], q)))
        with torch.no_grad():
            assert torch.equal(compiled(x, q), found[0])
    by_the_rule(fn, [x], q, found)


@pytest.mark.parametrize("mode", [None, "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_a_linear_layer_in_front(mode):
    w = (torch.randn(32000, 512, device="cuda") * 512**-0.5).to(BF16)

    def fn(h, w, t):
        return F.cross_entropy(F.linear(h, w).float(), t)

    with inductor_ext.enable(*LOWERINGS), report.collect() as decisions:
        compiled = torch.compile(fn, dynamic=False, mode=mode)
        for rows in (2112,) * 3:
            h = torch.randn(rows, 512, device="cuda").to(BF16)
            t = torch.randint(0, 32000, (rows,), device="cuda")
            found = [x.clone() for x in gradients(compiled, [h, w], t)]
    assert any(d.lowering == "linear_cross_entropy" and d.fired for d in decisions), decisions
    by_the_rule(fn, [h, w], t, found)


def test_any_number_of_rows():
    with inductor_ext.enable(*LOWERINGS), torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(smoothed, dynamic=True)
        for rows in (2200, 131, 4096):
            x, t = draw(rows, 32000)
            by_the_rule(smoothed, [x], t, gradients(compiled, [x], t))


def test_nothing_waits_for_the_card():
    x, t = draw(2112, 32000)
    with inductor_ext.enable(*LOWERINGS):
        compiled = torch.compile(plain, dynamic=False)
        gradients(compiled, [x], t)
        own = x.requires_grad_()
        torch.cuda.set_sync_debug_mode("error")
        try:
            compiled(own, t).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
