"""What does not fit is said in one sentence: what was expected, what came."""

import pytest
import torch

from inductor_ext import ops

X = torch.zeros(2, 5, 3)


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "says"),
    [
        ((X, "mean"), {}, ValueError, r"op is expected to be one of sum, prod, .* got 'mean'"),
        ((X, "sum", 3), {}, ValueError, r"dim is expected in \[-3, 3\), got 3"),
        ((X, "sum", -4), {}, ValueError, r"dim is expected in \[-3, 3\), got -4"),
        ((X[0, 0, 0], "sum"), {}, ValueError, "x is expected to have at least one dimension"),
        ((X.to(torch.complex64), "sum"), {}, TypeError, "x is expected .* got torch.complex64"),
        ((X.long(), "logsumexp"), {}, TypeError, "x is expected .* logsumexp, got torch.int64"),
        ((X, "sum"), {"dtype": torch.complex64}, TypeError, "dtype is .* got torch.complex64"),
        ((X, "sum"), {"dtype": torch.bool}, TypeError, "dtype is expected .* got torch.bool"),
        ((X, "logsumexp"), {"dtype": torch.int32}, TypeError, "dtype is expected .* torch.int32"),
        (
            (X, "sum"), {"segments": torch.zeros(2, 4, 3) > 0}, ValueError,
            r"broadcast to the shape \[2, 5, 3\] of x, got \[2, 4, 3\]",
        ),
        (
            (X, "sum"), {"segments": torch.zeros(1, 2, 5, 3) > 0}, ValueError,
            r"broadcast to the shape \[2, 5, 3\] of x, got \[1, 2, 5, 3\]",
        ),
        ((X, "sum"), {"segments": X}, TypeError, "bool flags or int32 .* got torch.float32"),
        (
            (X, "sum"), {"segments": torch.zeros(2, 2).int()}, ValueError,
            r"\[number of segments \+ 1\], got \[2, 2\]",
        ),
        (
            (X, "sum", 1), {"segments": torch.tensor([0, 2])}, ValueError,
            r"rise from 0 to 5, the size of dimension 1, got \[0, 2\]",
        ),
        (
            (X, "sum", 1), {"segments": torch.tensor([0, 3, 2, 5])}, ValueError,
            r"rise from 0 to 5, .* got \[0, 3, 2, 5\]",
        ),
        ((X, "sum", 1), {"segments": torch.tensor([1, 5])}, ValueError, "rise from 0 to 5"),
        (
            (X, "sum"), {"segments": torch.empty(2, 5, 3, dtype=torch.bool, device="meta")},
            ValueError, "segments are expected on cpu as x, got meta",
        ),
    ],
)  # fmt: skip
def test_scan(args, kwargs, error, says):
    with pytest.raises(error, match=says):
        ops.scan(*args, **kwargs)


@pytest.mark.parametrize(
    ("a", "b", "h0", "dim", "error", "says"),
    [
        (X, X[:, :4], None, 1, ValueError, r"broadcast to one, got \[2, 5, 3\] and \[2, 4, 3\]"),
        (X, X.double(), None, 1, TypeError, "a is expected in torch.float64 as b, got .*float32"),
        (X, X, X[:, 0].double(), 1, TypeError, "h0 is expected in torch.float32 as b, got .*64"),
        (X.long(), X.long(), None, 1, TypeError, "b is expected to be one of .* got torch.int64"),
        (X.cfloat(), X.cfloat(), None, 1, TypeError, "b is expected .* got torch.complex64"),
        (X.to("meta"), X, None, 1, ValueError, "a is expected on cpu as b, got meta"),
        (X, X, None, 3, ValueError, r"dim is expected in \[-3, 3\), got 3"),
        (X[0, 0, 0], X[0, 0, 0], None, 0, ValueError, "b is expected to have at least one dim"),
        (X, X, X, 1, ValueError, r"h0 is expected as \[2, 3\], .*without dimension 1, got \[2, 5"),
        (X, X, X[:, 0, :1], -1, ValueError, r"h0 is expected as \[2, 5\], .* dimension 2, got"),
    ],
)
def test_linear_recurrence(a, b, h0, dim, error, says):
    with pytest.raises(error, match=says):
        ops.linear_recurrence(a, b, h0, dim)
