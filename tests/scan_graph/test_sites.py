"""Which scans are taken, which are left to stock, and why."""

import pytest
import torch
from torch._higher_order_ops.associative_scan import associative_scan

from inductor_ext import compat_user_kernels
from inductor_ext.testing import compile_for, cpp_errors, no_cpp_check, package_for


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def affine(p, q):
    return p[0] * q[0], q[0] * p[1] + q[1]


def recurrence(a, x):
    return associative_scan(affine, (a, x), dim=1, combine_mode="pointwise")[1]


def sums(dim):
    return lambda x: x.cumsum(dim)


CUT, COLUMNS = "stock cuts the scan", "stock walks the columns one by one"
MANY = "stock loops over many columns at half the speed of memory"
PAIR = "stock is at half the speed of memory at best with several values"
LOOP = "stock loops over rows at 70% of the speed of memory"
TAKEN = {
    "one_long": (sums(0), (2**24,), CUT),
    "few_rows": (sums(1), (256, 262144), CUT),
    "few_columns": (sums(0), (2**20, 8), COLUMNS),
    "columns": (sums(0), (65536, 128), COLUMNS),
    "middle": (sums(1), (8, 4096, 256), COLUMNS),
    "many_columns": (sums(0), (1024, 16384), MANY),
    "many_short_columns": (sums(0), (128, 65536), MANY),
    "long_rows": (sums(1), (8192, 4096), LOOP),
    "long_pair": (lambda x: x.cummax(0), (2**24,), PAIR),
    "rows_of_pairs": (lambda x: x.cummax(1), (4096, 16384), PAIR),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), (4096, 16384), PAIR),
    "columns_of_pairs": (lambda x: x.cummax(0), (256, 16384), PAIR),
    # Stock cuts it, and what is cut fuses with no reduction.
    "few_rows_of_probabilities": (lambda x: x.softmax(1).cumsum(1), (64, 128_256), CUT),
    "reverse_rows": (
        lambda x: x.flip(1).cumsum(1).flip(1),
        (8192, 4096),
        "stock turns the tensor around by a kernel of its own",
    ),
}
FAST = "at the speed of memory"
SWEEP = "in one sweep with a reduction over the same entries"
LEFT = {
    "many_short_rows": (sums(1), (2**20, 128), f"1048576 lanes of 128 {FAST}"),
    "short_rows": (sums(1), (128, 1024), f"128 lanes of 1024 {FAST}"),
    "short_columns": (sums(0), (100, 16384), f"16384 lanes of 100 {FAST}"),
    "rows_of_pairs": (lambda x: x.cummax(1), (1024, 1024), FAST),
    "short_columns_of_pairs": (lambda x: x.cummax(0), (128, 16384), FAST),
    "probabilities": (lambda x: x.softmax(1).cumsum(1), (2048, 8192), SWEEP),
    "normalised": (lambda x: (x * x.square().mean(1, True).rsqrt()).cumsum(1), (512, 8192), SWEEP),
    "summed": (lambda x: x.cumsum(1).tanh().sum(1), (4096, 8192), SWEEP),
    "small": (sums(0), (4096,), "4096 elements are fewer than 100000"),
    "empty": (sums(0), (0,), "nothing to scan"),
    "one": (sums(0), (1,), "1 elements are fewer"),
    "complex": (
        lambda x: torch.view_as_complex(x).cumsum(0),
        (2**20, 2),
        "torch.complex64 have no translation",
    ),
}


@pytest.mark.codegen
@pytest.mark.parametrize("name", TAKEN)
def test_taken(name, decision):
    fn, shape, reason = TAKEN[name]
    found = decision(compile_for("h200", fn, meta(*shape)))
    assert (found.fired, found.chosen, found.source) == (True, "scan", "heuristic")
    assert found.reason.startswith(reason)


@pytest.mark.codegen
@pytest.mark.parametrize("name", LEFT)
def test_left(name, decision):
    fn, shape, reason = LEFT[name]
    found = decision(compile_for("h200", fn, meta(*shape)))
    assert (found.fired, found.chosen) == (False, "stock")
    assert reason in found.reason


def test_several_leaves_are_taken_unless_they_are_short(decision):
    for shape in ((4, 2**20), (512, 65536), (8192, 2048)):
        a = meta(*shape)
        assert decision(compile_for("h200", recurrence, a, a)).reason.startswith(PAIR)
    short = meta(8192, 1024)
    assert FAST in decision(compile_for("h200", recurrence, short, short)).reason


def test_a_reduction_over_other_entries_does_not_matter(decision):
    fn = lambda x: (x * x.mean(0)).cumsum(1).sum(0)  # noqa: E731
    assert decision(compile_for("h200", fn, meta(4096, 8192))).reason.startswith(LOOP)


def test_a_combine_function_without_translation_is_left(decision):
    def fn(x):
        combine = lambda p, q: torch.special.erfinv(p) + q  # noqa: E731
        return associative_scan(combine, x, dim=0, combine_mode="pointwise")

    found = decision(compile_for("h200", fn, meta(2**20)))
    assert not found.fired and "erfinv.default has no translation" in found.reason


def test_on_the_cpu_nothing_is_looked_at():
    x = torch.randn(10, 7)
    assert torch.equal(torch.compile(sums(1))(x), x.cumsum(1))


@pytest.mark.codegen
def test_a_length_that_torch_can_not_square(launches, decision):
    code = compile_for("h200", sums(0), meta(3_100_000_000, dtype=torch.int8))
    if not compat_user_kernels.takes_wide():
        assert "no sizes from 2^31 on" in decision(code).reason
        return
    assert launches(code) == "inference\n  pointwise\n  scan_rows reads=1 writes=1\n"
    assert "empty_strided_cuda((3100000000, ), (1, ), torch.int64)" in code.source


def test_positions_are_kept_in_as_many_bits_as_the_length_needs():
    for length, bits in ((2**24, 32), (3_100_000_000, 64)):
        code = compile_for("h200", lambda x: x.cummax(0), meta(length, dtype=torch.int8))
        assert f"s1 = t.to(tl.int{bits})" in code.source or not compat_user_kernels.takes_wide()


# --- sizes that vary ------------------------------------------------------------------------------


@pytest.mark.codegen
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x * 2).cumsum(1).relu(),
        lambda x: x.flip(1).cumsum(1).flip(1),
        lambda x: x.t().cumsum(0).t().unsqueeze(0) + 1,
        lambda x: torch.nn.functional.pad(x.cumsum(1)[:, :-1], (1, 0)),
        lambda x: (x * x[0]).cumsum(0),
        lambda x: x[:, 1:].cumsum(1) * 2,
    ],
)
def test_one_program_for_all_sizes(fn, forced, launches, run):
    code = forced(fn, torch.randn(6, 300), dynamic=True)
    assert code.frames == 1 and launches(code).count("scan") == 1
    for shape in ((6, 300), (9, 77), (2, 5000)):
        x = torch.randn(shape)
        torch.testing.assert_close(run(code, x), fn(x), rtol=1e-4, atol=1e-3)


def test_a_long_scan_of_any_length(decision, run, caplog):
    code = compile_for("h200", sums(0), torch.randn(200_000), dynamic=True)
    assert decision(code).fired and code.frames == 1
    assert "every input is mutated" not in caplog.text  # torch reads off what a kernel writes
    for length in (200_000, 77, 8193):
        x = torch.randint(-9, 9, (length,)).float()
        assert torch.equal(run(code, x), x.cumsum(0))


@pytest.mark.codegen
def test_a_longer_one_has_programs_that_stay(caplog):
    """As many of them as an H200 holds, whatever the length."""
    code = compile_for("h200", lambda x: x.cummax(0), meta(1 << 28))
    assert "'PROGRAMS': 264" in code.source
    assert "every input is mutated" not in caplog.text


def test_a_small_combine_of_leaves_whose_sizes_vary(run):
    """Torch 2.11 can't lower it: it is given the sizes."""
    a, x = torch.rand(4, 9), torch.randn(4, 9)
    code = compile_for("h200", recurrence, a, x, dynamic=True)
    a, x = torch.rand(3, 70), torch.randn(3, 70)
    h, want = torch.zeros(3), []
    for t in range(70):
        h = a[:, t] * h + x[:, t]
        want.append(h)
    torch.testing.assert_close(run(code, a, x), torch.stack(want, 1), rtol=1e-4, atol=1e-5)


# --- C++ wrappers ---------------------------------------------------------------------------------


@pytest.mark.codegen
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.skipif(no_cpp_check() != "", reason=no_cpp_check())
def test_a_cpp_wrapper_holds_the_kernel(dynamic, decision):
    options = {"cpp_wrapper": True}
    code = compile_for("h200", sums(1), meta(64, 100_000), dynamic=dynamic, options=options)
    assert decision(code).fired and "call_scan_rows" in code.source
    assert cpp_errors(code.source) == ""


def test_a_package_holds_the_kernel():
    class Model(torch.nn.Module):
        def forward(self, x):
            return (x * 2).cumsum(1)

    package = package_for("h200", Model(), torch.randn(64, 10_000))
    assert any(d.lowering == "scan" and d.fired for d in package.decisions)


@pytest.mark.parametrize("viewed", [False, True])
def test_equal_scans_of_two_results_are_two_tensors(viewed, run):
    def twice(x):
        return x.cumsum(-1).flatten() if viewed else x.cumsum(-1), x.cumsum(-1)

    x = torch.randn(4, 4096)
    one, other = run(compile_for("h200", twice, x), x)
    before = other.clone()
    one.add_(100)
    assert torch.equal(other, before)
