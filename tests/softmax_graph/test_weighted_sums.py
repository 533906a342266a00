"""Log-probabilities weighted along the row: entropies, a teacher's divergence, probabilities."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks.cross_entropy_variants import VARIANTS
from inductor_ext import measure
from inductor_ext.testing import compile_for, run_interpreted

N, V, BF16 = 4, 1283, torch.bfloat16
SUM = "weighted_statistics"


def reads(source):
    """How often each operation on rows is called."""
    return {
        name: n
        for name in ("row_statistics", SUM)
        if (n := source.count(f"= torch.ops.inductor_ext.{name}.default("))
    }


@pytest.mark.parametrize("name", ["kl", "kl, teacher logits", "soft targets, smoothing"])
def test_one_read_without_a_gradient(name):
    variant = VARIANTS[name]
    with torch.no_grad():
        inputs = [x.detach() for x in variant.inputs(N, V, BF16, "cpu")]
        code = compile_for("h200", variant.fn, *inputs)
        out = run_interpreted(code, *inputs)
        exact, eager = variant.fn(*(x.double() for x in inputs)), variant.fn(*inputs)
    assert reads(code.source) == {SUM: 1}
    verdict = measure.check(out, exact, eager)
    assert verdict.ok, verdict.reason


def masked_rows(x, q, mask):
    """A teacher with a temperature of its own, a mask over rows, a student that comes first."""
    logp = F.log_softmax(x.float() / 0.7, -1)
    shifted = logp + 0.0 * logp.exp().sum(-1, keepdim=True)
    logq = F.log_softmax(q.float(), -1)
    rows = (logq.exp() * (logq - shifted)).sum(-1)
    return torch.where(mask, rows, 0.0).sum() / mask.sum() - (logp.exp() * logp).sum(-1).mean()


def two_teachers(x, q, mask):
    logp = F.log_softmax(x.float(), -1)
    first, second = F.softmax(q.float(), -1), F.softmax(q.float() * 0.5, -1)
    return -(first * logp).sum(-1).mean() - 0.5 * (second * logp).sum(-1).mean()


def signed_weights(x, q, mask):
    """What a user multiplies log-probabilities by may have any sign (advantages)."""
    return -(q * F.log_softmax(x.float(), -1) * mask[:, None]).sum()


@pytest.mark.parametrize("fn", [masked_rows, two_teachers, signed_weights])
def test_numbers(fn, judged):
    x, q = (torch.randn(N, V).mul(3).to(BF16) for _ in range(2))
    code = judged(fn, [x, q, torch.arange(N) % 3 != 1])
    assert SUM in reads(code.forward) and "row_statistics" not in code.source


def two_orders(x, q, mask):
    p, logp = F.softmax(q.float(), -1), F.log_softmax(x.float(), -1)
    d = F.log_softmax(q.float(), -1) - logp
    return (p * d + 2 * d * p).sum(-1).mean() + 0.1 * (p.detach() * d * d).sum(-1).mean()


def dropped_rows(x, q, mask):
    """A teacher of zeros: 0 log 0 is 0."""
    teacher = F.softmax(q.float(), -1) * mask[:, None]
    return F.kl_div(F.log_softmax(x.float(), -1), teacher, reduction="sum")


def less_a_baseline(x, q, mask):
    """Advantages: what their offsets have in common cancels in each entry, not between sums."""
    offset = 1000.0 + mask[:, None]
    return -(((q.float() + offset) - offset) * F.log_softmax(x.float(), -1)).sum(-1).mean()


def an_ensemble(x, q, mask):
    """No operation reads these logits."""
    teacher = F.softmax((q.float() + x.detach().float()) / 2, -1)
    return F.kl_div(F.log_softmax(x.float(), -1), teacher, reduction="batchmean")


def of_each_other(x, q, mask):
    y = mask.long()
    loss = F.cross_entropy(x.float(), y, label_smoothing=0.1)
    loss = loss + F.cross_entropy(q.float(), y, label_smoothing=0.1)
    teacher = F.softmax(q.float(), -1).detach()
    return loss + F.kl_div(F.log_softmax(x.float(), -1), teacher, reduction="batchmean")


def over_everything(x, q, mask):
    return F.log_softmax(x.float(), -1).mean()


@pytest.mark.parametrize(
    "fn", [two_orders, dropped_rows, less_a_baseline, an_ensemble, of_each_other, over_everything]
)
def test_numbers_of_sums_that_are_near_misses(fn, judged):
    x, q = (torch.randn(N, V).mul(2).to(BF16) for _ in range(2))
    judged(fn, [x, q, torch.arange(N) % 3 != 1])


def divergence(x, q):
    return F.kl_div(F.log_softmax(x, -1), F.softmax(q, -1), reduction="none").sum(-1)


def log_divergence(x, q):
    logq = F.log_softmax(q, -1)
    return F.kl_div(F.log_softmax(x, -1), logq, reduction="none", log_target=True).sum(-1)


def entropy(x, q):
    return -(F.softmax(x, -1) * F.log_softmax(x, -1)).sum(-1)


def hard_rows():
    """Rows that are hard on the algebra, of a student and of a teacher."""
    x, q = torch.randn(10, V), torch.randn(10, V)
    x[1] += 1e6
    q[2] -= 1e8
    x[3, 700:] = -torch.inf  # a vocabulary that both pad
    q[3, 700:] = -torch.inf
    q[4, 700:] = -torch.inf  # that the teacher masks
    x[5, 6] = torch.nan
    q[6] = -torch.inf
    x[7, :500] = q[7, :500] = torch.finfo(torch.float32).min / 4
    x[8, 17], q[8, 17] = 60.0, 60.0  # both are sure
    q[9] = x[9]
    return x, q


@pytest.mark.parametrize("fn", [divergence, log_divergence, entropy])
def test_hard_rows_give_what_eager_gives(fn, generated, with_gradient):
    x, q = hard_rows()
    code, out, gradient = generated(fn, [x, q])
    assert SUM in reads(code.forward)
    expected, slope = with_gradient(fn, [x, q])
    torch.testing.assert_close(out, expected, equal_nan=True, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(gradient, slope, equal_nan=True, rtol=2e-5, atol=2e-6)


def test_a_teacher_that_is_made_behind_the_student(judged):
    """Its logits come out of a product that stands between the two softmaxes."""

    def loss(x, h, w):
        logp = F.log_softmax(x.float(), -1)
        q = F.softmax((h @ w).float(), -1)
        return F.kl_div(logp, q, reduction="batchmean")

    inputs = [torch.randn(N, V), torch.randn(N, 8), torch.randn(8, V)]
    code = judged(loss, inputs)
    assert reads(code.source) in ({SUM: 1}, {SUM: 1, "row_statistics": 2})


def test_few_rows_have_no_program_each(monkeypatch):
    from inductor_ext.lowerings import weighted_sums

    monkeypatch.setattr(weighted_sums, "FEW", 132)
    variant = VARIANTS["entropy"]
    code = compile_for("h200", variant.fn, *variant.inputs(N, V, BF16, "cpu"), grad=True)
    assert reads(code.source) == {"row_statistics": 1}
