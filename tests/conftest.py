"""Shared by all tests: a ``gpu`` test is skipped where there is no card; numbers judged by fp64."""

import copy
import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores, and threads that find none free wait for one another, spinning.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from inductor_ext import config, measure, measured_ranges, plan_cache


def pytest_addoption(parser):
    help = "of each parametrised test, the first and the last case only"
    parser.addoption("--ends", action="store_true", help=help)


def _without_the_middle(items):
    """(kept, left out): of the cases of one test function, all but the first and the last."""
    cases = {}
    for item in items:
        cases.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    ends = {item for of_one in cases.values() for item in (of_one[0], of_one[-1])}
    return [i for i in items if i in ends], [i for i in items if i not in ends]


@pytest.hookimpl(trylast=True)  # behind the choice by marks
def pytest_collection_modifyitems(config, items):
    if config.getoption("--ends"):
        items[:], left_out = _without_the_middle(items)
        config.hook.pytest_deselected(items=left_out)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA card")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def own_plan_cache(monkeypatch, tmp_path_factory):
    """What one test measures, no other recalls."""
    kept = []

    def folder():
        if not kept:
            kept.append(tmp_path_factory.mktemp("plan_cache"))
        return kept[0]

    monkeypatch.setattr(plan_cache, "folder", folder)
    monkeypatch.setattr(measured_ranges, "_found", {})


@pytest.fixture(autouse=True)
def no_shipped_plan(monkeypatch):
    """The rule decides, on every torch, also in the processes that a test starts."""
    monkeypatch.setenv("INDUCTOR_EXT_SHIPPED_PLAN", "0")
    with config.patch(shipped_plan=False):
        yield


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


class _Products(TorchDispatchMode):
    """Products of 16-bit tensors as a card makes them, or everything in fp64 and never rounded.

    The CPU's own 16-bit products accumulate differently from machine to machine.
    """

    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if func.namespace == "aten" and name in _PRODUCTS:
            dtypes = [a for a in args if isinstance(a, torch.dtype)]
            dtypes += [kwargs.pop("out_dtype")] if "out_dtype" in kwargs else []
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            if self.wide:
                return getattr(torch, name)(*tensors, **kwargs)
            result = tensors[-1].dtype if not dtypes else dtypes[0]
            if tensors[-1].dtype in (torch.bfloat16, torch.float16):
                tensors = [t.float() for t in tensors]
            return getattr(torch, name)(*tensors, **kwargs).to(result)
        if self.wide and name == "_to_copy" and kwargs.get("dtype", torch.int).is_floating_point:
            return args[0]
        return func(*args, **kwargs)


def judge(fn, args, out, *, rounding=None, tf32=False):
    """Assert that ``out`` is ``fn(*args)``: by fp64, and twice the error of eager at most."""
    doubles = pytree.tree_map_only(
        torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, copy.deepcopy(args)
    )
    with torch.no_grad(), _Products(wide=True):
        references = pytree.tree_leaves(fn(*doubles))
    with torch.no_grad(), _Products(wide=False):
        baselines = pytree.tree_leaves(fn(*copy.deepcopy(args)))
    outputs = pytree.tree_leaves(out)
    assert len(outputs) == len(baselines)
    for got, reference, baseline in zip(outputs, references, baselines, strict=True):
        if not got.is_floating_point():
            assert torch.equal(got, baseline)
            continue
        verdict = measure.check(got, reference, baseline, rounding=rounding, tf32=tf32)
        assert verdict.ok, verdict.reason


@pytest.fixture(name="judge")
def _judge():
    return judge
