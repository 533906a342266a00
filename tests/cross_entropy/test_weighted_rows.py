"""Weighted row sums in the interpreter and composed, judged by fp64; machine code."""

import math

import pytest
import torch
from inductor_ext.templates import cross_entropy_launch, weighted_rows
from inductor_ext.templates.cross_entropy_launch import Tile

from inductor_ext import measure
from inductor_ext.ops import _weighted
from inductor_ext.ops._weighted import FINITE, GIVEN, NO, OWN, SOFTMAX, YES
from inductor_ext.testing import launch_binaries

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NAMES = ("peak", "total", "below", "top", "mass", "linear", "own")
CASES = [(OWN, NO), (GIVEN, NO), (GIVEN, YES), (SOFTMAX, NO), (SOFTMAX, YES), (SOFTMAX, FINITE)]


def composed(x, w, kind, own, below=True, numbers=(1.0, 0.0, 1.0, 0.0)):
    return _weighted.weighted_statistics(x, None if kind == OWN else w, kind, own, below, *numbers)


@pytest.fixture
def compute(on_cpu, monkeypatch):
    """``weighted_statistics`` by its kernel."""

    def run(*args):
        monkeypatch.setattr(weighted_rows, "tile", lambda *_, **__: Tile(2, 1, 0, 1))
        with on_cpu():
            return composed(*args)

    return run


def truth(x, w, kind, own, below=True, numbers=(1.0, 0.0, 1.0, 0.0)):
    """The formulas, in the dtype of x."""

    def logits(x, scale, softcap):
        return scale * (softcap * torch.tanh(x / softcap) if softcap else x)

    nothing = x.new_empty(0)
    z = logits(x, *numbers[:2])
    peak = z.amax(1)
    y = z - peak[:, None]
    top, mass, sum_own, weights = nothing, nothing, nothing, y.exp()
    if kind == GIVEN:
        weights, sum_own = w, torch.special.xlogy(w, w).sum(1)
    elif kind == SOFTMAX:
        u = logits(w, *numbers[2:])
        top = u.amax(1)
        v = u - top[:, None]
        weights = v.exp()
        v = torch.where(weights == 0, 0, v) if own == FINITE else v
        sum_own = (weights * (v - y)).sum(1)
    if kind != OWN:
        mass = weights.sum(1)
    linear = (weights * y).sum(1)
    smooth = y.sum(1) if below else nothing
    return peak, y.exp().sum(1), smooth, top, mass, linear, sum_own if own else nothing


def judge(found, x, w, *args, **options):
    exact = truth(x.double(), w.double(), *args, **options)
    eager = truth(x.float(), w.float(), *args, **options)
    for name, *one in zip(NAMES, found, exact, eager, strict=True):
        assert one[0].dtype == FP32 and one[0].shape == one[1].shape, name
        if one[0].numel():
            verdict = measure.check(*one)
            assert verdict.ok, f"{name}: {verdict.reason}"


def drawn(kind, rows, columns, dtype, like=False):
    """Logits and weights; ``like``: a teacher that is nearly the student."""
    x = torch.randn(rows, columns) * 3
    w = x + 0.01 * torch.randn(rows, columns) if like else torch.randn(rows, columns) * 2
    return x.to(dtype), (w.softmax(1) if kind == GIVEN else w).to(dtype)


@pytest.mark.parametrize(("kind", "own"), CASES)
def test_kinds(compute, kind, own):
    x, w = drawn(kind, 3, 1105, BF16)
    found = compute(x, w, kind, own)
    judge(found, x, w, kind, own)
    assert all(map(torch.equal, found, compute(x, w, kind, own)))
    judge(composed(x, w, kind, own), x, w, kind, own)


@pytest.mark.parametrize(("columns", "dtype"), [(2, FP32), (17, BF16), (799, FP16), (1024, FP32)])
def test_sizes_and_dtypes(compute, columns, dtype):
    x, w = drawn(SOFTMAX, 2, columns, dtype)
    judge(compute(x, w, SOFTMAX, YES), x, w, SOFTMAX, YES)


@pytest.mark.parametrize("kind", [OWN, GIVEN, SOFTMAX])
def test_scales_and_softcaps(compute, kind):
    x, w = drawn(kind, 2, 997, FP32)
    for numbers in ((0.5, 0.0, 0.7, 0.0), (1.5, 8.0, 1.0, 5.0)):
        own = NO if kind == OWN else YES
        judge(compute(x, w, kind, own, False, numbers), x, w, kind, own, False, numbers)


def test_layouts(compute):
    kind, own = GIVEN, YES
    x, w = drawn(kind, 4, 900, FP32)
    for cut in (lambda t: t[:, 3:400], lambda t: t[::2, 8:408], lambda t: t.t().contiguous().t()):
        judge(compute(cut(x), w[: len(cut(x)), : cut(x).shape[1]], kind, own),
              cut(x), w[: len(cut(x)), : cut(x).shape[1]], kind, own)  # fmt: skip
    judge(compute(x.half(), w, kind, own), x.half(), w, kind, own)  # of different dtypes
    assert [t.numel() for t in compute(x[:0], w[:0], kind, own)] == [0] * len(NAMES)


@pytest.mark.parametrize(("kind", "own"), CASES)
def test_infinities_and_nan_are_as_torch_has_them(compute, kind, own):
    x, w = torch.randn(9, 997), torch.rand(9, 997)
    x[0, 5], x[1, 6], x[2, 7], x[3], x[4] = math.nan, math.inf, -math.inf, -math.inf, math.nan
    x[5] -= 1e4  # whole blocks masked by a finite number, the rest far below 0
    x[5, 3:900] = torch.finfo(FP32).min / 4
    x[6] = torch.finfo(FP32).min
    w[7, 9], w[8, 3:900] = 0.0, 0.0
    if kind == SOFTMAX:
        w[7, 9], w[8, 3:900] = -math.inf, -1e9
    for way in (compute, composed):
        pairs = way(x, w, kind, own), truth(x, w, kind, own)
        for name, mine, theirs in zip(NAMES, *pairs, strict=True):
            message = lambda m, n=name: f"{n}: {m}"  # noqa: E731
            torch.testing.assert_close(mine, theirs, equal_nan=True, msg=message)


@pytest.mark.parametrize(("kind", "own", "offset"), [(OWN, NO, -1e8), (SOFTMAX, YES, 1e6)])
def test_offsets_cancel(compute, kind, own, offset):
    x, w = drawn(kind, 3, 997, FP32)
    x = x * 8 + offset
    w = w * 8 - offset if kind == SOFTMAX else w
    judge(compute(x, w, kind, own), x, w, kind, own)


def test_a_teacher_that_is_nearly_the_student(compute):
    """What is left of the logarithms is no difference of two long sums."""
    x, w = drawn(SOFTMAX, 4, 1600, FP32, like=True)

    def divergence(peak, total, below, top, mass, linear, own):
        return own / mass - mass.log() + total.log()

    found = divergence(*compute(x, w, SOFTMAX, YES))
    exact = divergence(*truth(x.double(), w.double(), SOFTMAX, YES))
    p, q = x.log_softmax(1), w.log_softmax(1)
    eager = (q.exp() * (q - p)).sum(1)
    assert exact.max() < 1e-3
    assert (found - exact).norm() < (eager - exact).norm()


def test_weights_of_any_sign(compute):
    x, w = drawn(GIVEN, 4, 1600, FP32)
    w = torch.randn_like(w)
    judge(compute(x, w, GIVEN, NO), x, w, GIVEN, NO)


def test_what_torch_checks_of_an_operation():
    checks = ("test_schema", "test_faketensor")
    for dtype in (FP32, FP64, FP16):
        x = torch.randn(4, 30, dtype=dtype)
        for kind, own in CASES:
            args = (x, None if kind == OWN else x, kind, own, True, 2.0, 0.0, 1.0, 3.0)
            torch.library.opcheck(_weighted.weighted_statistics, args, test_utils=checks)


@pytest.mark.parametrize(
    ("change", "error"),
    [({"kind": 3}, "kind"), ({"own": 1}, "own"), ({"w": torch.zeros(4, 9)}, "w is"),
     ({"w": torch.zeros(4, 8), "kind": GIVEN}, "w is"), ({"kind": SOFTMAX}, "w is"),
     ({"scale": -1.0}, "scale"), ({"w_softcap": math.inf}, "w_softcap"),
     ({"x": torch.zeros(4)}, "x is")],
)  # fmt: skip
def test_bad_input(change, error):
    good = {"x": torch.zeros(4, 9), "w": None, "kind": OWN, "own": NO, "below": False,
            "scale": 1.0, "softcap": 0.0, "w_scale": 1.0, "w_softcap": 0.0}  # fmt: skip
    with pytest.raises(ValueError, match=error):
        _weighted.weighted_statistics(**{**good, **change})


@pytest.mark.parametrize(
    ("columns", "kind", "own", "dtype"),
    [(128256, OWN, NO, BF16), (128256, SOFTMAX, FINITE, BF16), (50257, GIVEN, YES, BF16),
     (32000, GIVEN, YES, FP32), (50257, SOFTMAX, YES, FP32)],
)  # fmt: skip
def test_one_kernel(columns, kind, own, dtype):
    x = torch.empty(8192, columns, dtype=dtype, device="meta")
    args = (x, None if kind == OWN else x, kind, own, False, 1.0, 0.0, 1.0, 0.0)
    (kernel,) = launch_binaries(
        lambda: weighted_rows.weighted_statistics(*args), weighted_rows, cross_entropy_launch
    )
    assert kernel.name == "weighted_kernel" and kernel.target == "sm_90a"
    assert kernel.spills == 0 and kernel.widest_load == 16
