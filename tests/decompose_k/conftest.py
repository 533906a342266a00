"""Shared by the Decompose-K tests: a clean setting, and numbers of the generated code."""

import copy
import functools

import pytest
import torch

import inductor_ext
from inductor_ext.testing import compile_for, run_interpreted


def compile_and_judge(
    judge, fn, args, *, fires=True, rounding=None, tf32=False, run=None, **options
):
    """Generate the H200's code of ``fn``, run it in Triton's interpreter, judge the numbers.

    ``run``: the arguments to run with, where they differ from those compiled for. Returns the code.
    """
    code = compile_for("h200", fn, *args, **options)
    assert [d.fired for d in code.decisions[:1]] == [fires]
    inputs = args if run is None else run
    out = run_interpreted(code, *copy.deepcopy(inputs))
    judge(fn, inputs, out, rounding=rounding, tf32=tf32)
    return code


@pytest.fixture(name="compile_and_judge")
def _compile_and_judge(judge):
    return functools.partial(compile_and_judge, judge)


@pytest.fixture(autouse=True)
def clean_setting():
    """Strict, seeded, and torch's float32 precision as it was."""
    torch.manual_seed(0)
    precision = torch.get_float32_matmul_precision()
    with inductor_ext.config.patch(strict=True):
        yield
    torch.set_float32_matmul_precision(precision)
