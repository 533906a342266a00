"""Shared by the tests on a card: a clean setting, compiling with its decisions, judging by fp64."""

import copy
import math

import pytest
import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import inductor_ext
from inductor_ext import compat, measure, report


class _Wide(TorchDispatchMode):
    """A program of fp64 tensors, never rounded on the way."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if func.namespace == "aten" and name in ("mm", "addmm", "bmm", "baddbmm"):
            kwargs.pop("out_dtype", None)
            tensors = [a for a in args if not isinstance(a, torch.dtype)]
            return getattr(torch, name)(*tensors, **kwargs)
        if name == "_to_copy" and kwargs.get("dtype", torch.int).is_floating_point:
            return args[0]
        return func(*args, **kwargs)


def in_fp64(fn, args):
    """The leaves of ``fn(*args)`` in fp64."""
    wide = pytree.tree_map_only(
        torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, copy.deepcopy(args)
    )
    with torch.no_grad(), _Wide():
        return pytree.tree_leaves(fn(*wide))


def judge(fn, args, out, *, rounding=None, tf32=False):
    """Assert that ``out`` is ``fn(*args)``: by fp64, and twice the error of eager at most."""
    references = in_fp64(fn, args)
    with torch.no_grad():
        baselines = pytree.tree_leaves(fn(*copy.deepcopy(args)))
    outputs = pytree.tree_leaves(out)
    assert len(outputs) == len(baselines)
    for got, reference, baseline in zip(outputs, references, baselines, strict=True):
        verdict = measure.check(got, reference, baseline, rounding=rounding, tf32=tf32)
        assert verdict.ok, verdict.reason


def poison():
    """Leave NaN in the memory that the next allocations get."""
    sizes = [1 << n for n in range(7, 23, 3)]
    blocks = [torch.full((n,), math.nan, device="cuda") for n in sizes for _ in range(16)]
    torch.cuda.synchronize()
    del blocks


def compile_and_fire(fn, *args, **options):
    """(compiled function, its first output) of a program in which a site fires."""
    compiled = torch.compile(fn, **options)
    poison()
    with report.collect() as decisions:
        out = compiled(*args)
    assert decisions, "no site was looked at"
    assert decisions[0].fired, decisions[0].reason
    return compiled, out


@pytest.fixture(name="judge")
def _judge():
    return judge


@pytest.fixture(name="poison")
def _poison():
    return poison


@pytest.fixture(name="compile_and_fire")
def _compile_and_fire():
    return compile_and_fire


@pytest.fixture(autouse=True)
def clean_setting():
    """Strict, seeded, compiled anew, and torch's float32 precision as it was."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    precision = torch.get_float32_matmul_precision()
    with inductor_ext.config.patch(strict=True), compat.without_caches():
        yield
    torch.set_float32_matmul_precision(precision)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
