"""What one kernel computes around a scan, and that its numbers are the program's."""

import re

import pytest
import torch
from torch._higher_order_ops.associative_scan import associative_scan
from torch.nn.functional import pad

import inductor_ext
from inductor_ext.testing import assert_golden, compile_for

R, N = 6, 300


def affine(p, q):
    return p[0] * q[0], q[0] * p[1] + q[1]


def recurrence(a, x, reverse=False):
    leaves = a.sigmoid(), x * 2
    return associative_scan(affine, leaves, dim=1, reverse=reverse, combine_mode="pointwise")[1]


def by_loop(a, x, reverse=False):
    """``recurrence`` position by position."""
    a, x = a.sigmoid(), x * 2
    order = range(x.shape[1])
    h, out = torch.zeros_like(x[:, 0]), torch.empty_like(x)
    for t in reversed(order) if reverse else order:
        h = out[:, t] = a[:, t] * h + x[:, t]
    return out


def several(x, w):
    y = (x * w).cumsum(1)
    return y.tanh(), y * w, y @ y.t()


def summed_twice(a, x):
    product = a * x
    return product.cumsum(1), product.sum(1)


# (program, the arguments it takes): x, w is a row, a of x's shape
PROGRAMS = {
    "plain": (lambda x: x.cumsum(1), "x"),
    "around": (lambda x: (x * 2).exp().cumsum(1).relu() + 1, "x"),
    "row_of_weights": (lambda x, w: (x * w.exp()).cumsum(1) * w, "x w"),
    "columns": (lambda x, w: (x * w).cumsum(0) - x, "x w"),
    "transposed": (lambda x: x.t().cumsum(0).t() * 2, "x"),
    "reverse": (lambda x: (x * 2).flip(1).cumsum(1).flip(1) + x, "x"),
    "reverse_pair": (lambda x: [t.flip(1) for t in x.flip(1).cummin(1)], "x"),
    "pair": (lambda x: x.cummax(1), "x"),
    "exclusive_by_difference": (lambda x: x.exp().cumsum(1) - x.exp(), "x"),
    "exclusive_by_pad": (lambda x: pad(x.exp().cumsum(1)[:, :-1], (1, 0)) * 2, "x"),
    "exclusive_by_cat": (
        lambda x: torch.cat([x.new_zeros(R, 1), x.cumsum(1)[:, :-1]], 1),
        "x",
    ),
    "exclusive_product": (
        lambda x: pad((x * 0.1 + 1).cumprod(0)[:-1], (0, 0, 1, 0), value=1.0),
        "x",
    ),
    "exclusive_reverse": (
        lambda x: pad(x.flip(1).cumsum(1).flip(1)[:, 1:], (0, 1)) + x,
        "x",
    ),
    "shifted_and_not": (lambda x: (pad(x.cumsum(1)[:, :-1], (1, 0)), x.cumsum(1)), "x"),
    "flipped_and_not": (lambda x: (x.flip(1).cumsum(1), x.flip(1).cumsum(1).flip(1)), "x"),
    "several_results": (several, "x w"),
    "needed_elsewhere": (lambda x: (x.exp().cumsum(1), x.exp().sum(1)), "x"),
    "needed_elsewhere_of_two": (summed_twice, "a x"),
    "read_by_a_sum": (lambda x, w: (x.cumsum(1), (x.cumsum(1) * w).sum(1)), "x w"),
    "through_a_view": (lambda x: (x.view(R, N // 4, 4) * 2).reshape(R, N).cumsum(1), "x"),
    "logcumsumexp": (lambda x: x.logcumsumexp(1) - x, "x"),
    "product": (lambda x: (x * 0.1 + 1).cumprod(1), "x"),
    "counts": (lambda x: (x > 0).cumsum(1) - 1, "x"),
    "a_scan_behind_a_scan": (lambda x: (x.cumsum(1) * 0.1).cummax(1)[0] + 1, "x"),
}


def arguments(names, dtype=torch.float32):
    made = {"x": torch.randn(R, N), "w": torch.randn(N), "a": torch.randn(R, N)}
    return [made[name].to(dtype) for name in names.split()]


@pytest.mark.codegen
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_launched_and_its_numbers(name, forced, launches, run, judge):
    fn, names = PROGRAMS[name]
    args = arguments(names)
    code = forced(fn, *args)
    assert_golden(name, launches(code))
    judge(fn, args, run(code, *args))


@pytest.mark.parametrize("name", ["around", "reverse", "columns", "exclusive_by_pad", "pair"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(name, dtype, forced, run, judge):
    fn, names = PROGRAMS[name]
    args = arguments(names, dtype)
    code = forced(fn, *args)
    judge(fn, args, run(code, *args))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.cumsum(1),
        lambda x: x.cumsum(1, dtype=torch.float32),
        lambda x: x.cumprod(1, dtype=torch.int32),
        lambda x: (x > 0).cumsum(0),
        lambda x: x.cummax(1)[1],
    ],
)
def test_whole_numbers_are_exact(fn, forced, run):
    x = torch.randint(-100, 100, (R, N)).to(torch.int8)
    got = run(forced(fn, x), x)
    assert got.dtype == fn(x).dtype and torch.equal(got, fn(x))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
def test_a_combine_of_narrow_integers_wraps_around(dtype, forced, launches, run):
    def fn(x):
        def combine(a, b):
            return torch.maximum(a[0], b[0]), a[1] * 3 * b[1]

        return associative_scan(combine, (x, x), 1, combine_mode="pointwise")

    x = torch.randint(0, 256, (2, 40)).to(dtype)
    code = forced(fn, x)
    assert launches(code).count("scan") == 1
    expected = [x[:, 0]]
    for t in range(1, 40):
        expected.append(expected[-1] * 3 * x[:, t])
    largest, product = run(code, x)
    assert torch.equal(largest, x.cummax(1).values)
    assert torch.equal(product, torch.stack(expected, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_result_in_16_bits_of_wider_values(dtype, forced, run):
    x = torch.rand(R, N)
    got = run(forced(lambda x: x.cumsum(1, dtype=dtype), x), x)
    exact = x.to(dtype).double().cumsum(1)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.codegen
@pytest.mark.parametrize("reverse", [False, True])
def test_a_recurrence_of_two_leaves(reverse, forced, launches, run, decision):
    a, x = arguments("a x")
    code = forced(lambda a, x: recurrence(a, x, reverse).tanh(), a, x)
    assert launches(code) == "inference\n  scan_rows reads=2 writes=1\n"
    assert decision(code).sites == f"associative_scan {N}x{R} float32 along 0"
    want = by_loop(a.double(), x.double(), reverse).tanh()
    torch.testing.assert_close(run(code, a, x).double(), want, rtol=1e-5, atol=1e-6)


def by_products(a, x):
    products = a.sigmoid().cumprod(1)
    return products * (x / products).cumsum(1)


def by_inverses(a, x):
    products = a.sigmoid().cumprod(1)
    return (x * (1 / products)).cumsum(1) * products


def by_logarithms(a, x):
    sums = a.sigmoid().log().cumsum(1)
    return sums.exp() * ((-sums).exp() * x).cumsum(1)


def by_a_quotient(a, x):
    decay = a.sigmoid().log().cumsum(1).exp()
    return decay * (x / decay).cumsum(1)


@pytest.mark.parametrize("fn", [by_products, by_inverses, by_logarithms, by_a_quotient])
def test_a_recurrence_by_cumulative_products(fn, forced, launches, run, decision):
    """One scan, also where the products have left the range of fp32."""
    a, x = arguments("a x")
    code = forced(fn, a, x)
    assert launches(code) == "inference\n  scan_rows reads=2 writes=1\n"
    assert "cumsum(b / " in decision(code).sites
    assert not fn(a, x).isfinite().all()
    wide = by_loop(a.double(), x.double() / 2)
    torch.testing.assert_close(run(code, a, x).double(), wide, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, x: (a.cumprod(1), a.cumprod(1) * (x / a.cumprod(1)).cumsum(1)),
        lambda a, x: a.cumprod(1) * (x / a.cumprod(1)).cumsum(0),
        lambda a, x: a.cumprod(1) * (a.cumprod(1) / x).cumsum(1),
        lambda a, x: a.cumsum(1).exp() * (a.cumsum(1).exp() * x).cumsum(1),
    ],
)
def test_what_is_no_recurrence(fn, forced, run):
    a, x = (t[:, :20].abs() + 0.5 for t in arguments("a x"))
    code = forced(fn, a, x)
    assert not any("cumsum(b" in d.sites for d in code.decisions)
    torch.testing.assert_close(run(code, a, x), fn(a, x), rtol=1e-4, atol=1e-4)


@pytest.mark.codegen
def test_a_combine_of_three_leaves_with_a_condition(forced, launches, run):
    """Mean, count and largest value at once."""

    def combine(p, q):
        return p[0] + q[0], p[1] + q[1], torch.where(p[2] > q[2], p[2], q[2])

    def fn(x):
        leaves = x, torch.ones_like(x), x.abs()
        total, count, largest = associative_scan(combine, leaves, dim=0, combine_mode="pointwise")
        return total / count, largest

    (x,) = arguments("x")
    code = forced(fn, x)
    assert launches(code) == "inference\n  scan_columns reads=1 writes=2\n"
    mean, largest = run(code, x)
    steps = torch.arange(1, R + 1).double()[:, None]
    torch.testing.assert_close(mean.double(), x.double().cumsum(0) / steps, rtol=1e-5, atol=1e-6)
    assert torch.equal(largest, x.abs().cummax(0)[0])


@pytest.mark.codegen
def test_a_gradient_is_one_kernel_without_flips(forced, launches, run):
    x = torch.randn(R, N, requires_grad=True)

    def fn(x):
        return (x * 2).cumsum(1).tanh()

    code = forced(fn, x, grad=True)
    assert_golden("gradient", launches(code))
    g = torch.randn(R, N)
    out, grads = run(code, x, grad_outputs=[g])
    wide = x.detach().double().requires_grad_()
    fn(wide).backward(g.double())
    for got, want in ((out, fn(wide).detach()), (grads["args[0]"], wide.grad)):
        assert (got.double() - want).norm() <= 1e-5 * want.norm()


def test_what_memory_must_hold_is_stored_on_the_way(forced, launches, run, judge):
    """The factors are a result: the kernel that computes them for the scan writes them."""
    a, x = arguments("a x")

    def fn(a, x):
        factors = a.sigmoid()
        return (factors * x).cumsum(1), factors

    code = forced(fn, a, x)
    assert launches(code) == "inference\n  scan_rows reads=2 writes=2\n"
    judge(fn, [a, x], run(code, a, x))


def test_a_value_that_the_kernel_also_reads_another_way_is_not_stored_by_it(forced, run, judge):
    """Through the product, the transposed factor depends on what the kernel would store."""

    def fn(x):
        y = x.exp()
        return y.cumsum(0) * (y @ y)

    x = torch.randn(40, 40) * 0.1
    judge(fn, [x], run(forced(fn, x), x))


def test_special_values(forced, run):
    x = torch.randn(R, N)
    x[0, 7], x[1, 9], x[2, 3], x[2, 8] = float("nan"), float("inf"), float("inf"), -float("inf")
    for fn in (lambda x: x.cumsum(1), lambda x: x.cummax(1)[0], lambda x: x.cummin(1)[1]):
        torch.testing.assert_close(run(forced(fn, x), x), fn(x), equal_nan=True)


@pytest.mark.codegen
def test_a_result_has_the_layout_that_was_traced(forced, run):
    x = torch.randn(4, 5, 60)
    for fn in (
        lambda x: x.transpose(0, 2).cumsum(1),
        lambda x: x.permute(1, 2, 0).cumsum(1).permute(2, 0, 1),
        lambda x: x[:, ::2].cumsum(2),
    ):
        got = run(forced(fn, x), x)
        assert got.stride() == fn(x).stride()
        torch.testing.assert_close(got, fn(x))


@pytest.mark.codegen
def test_off_gives_stock_code_byte_for_byte(forced):
    (x,) = arguments("x")
    fn = PROGRAMS["reverse"][0]
    stock = compile_for("h200", fn, x, force={"scan": "stock"})
    with inductor_ext.disable("scan"):
        off = compile_for("h200", fn, x)
    assert "scan_rows" not in off.source and off.decisions == []
    assert numbered(off) == numbered(stock)


def numbered(code):
    """Generated text without the number that every graph has."""
    return re.sub(r"# AOT ID: .*", "", code.source)
