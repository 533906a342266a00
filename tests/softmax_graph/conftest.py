"""Shared: what the generated code sweeps, and its numbers judged by fp64, gradients included."""

import contextlib
import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from inductor_ext.lowerings import loss_rows, weighted_sums
from torch.utils._python_dispatch import TorchDispatchMode

import inductor_ext
from inductor_ext import measure
from inductor_ext.testing import compile_for, run_interpreted
from inductor_ext.testing.generated import kernels_of

sys.path.insert(0, str(Path(__file__).parents[2]))  # the benchmarks' table of variants


@pytest.fixture(name="judged")
def _judged():
    return judged


@pytest.fixture(name="judged_all")
def _judged_all():
    return judged_all


@pytest.fixture(name="generated")
def _generated():
    return generated


@pytest.fixture(name="with_gradient")
def _with_gradient():
    return with_gradient


@pytest.fixture(name="sweeps")
def _sweeps():
    return sweeps


@pytest.fixture
def fresh_status():
    """``registry.status()`` of a process that has only imported the plugin."""
    script = "import json; from inductor_ext import registry; print(json.dumps(registry.status()))"
    argv = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.fixture(autouse=True)
def clean_setting(monkeypatch):
    torch.manual_seed(0)
    for name in ("LEAST_BYTES", "LEAST_STRIDED_BYTES"):
        monkeypatch.setattr(loss_rows, name, 0)
    monkeypatch.setattr(weighted_sums, "FEW", 0)
    # Losses that are taken whole have tests of their own.
    on = inductor_ext.disable("fused_loss", "linear_cross_entropy")
    with inductor_ext.config.patch(strict=True), on:
        yield


class _Wide(TorchDispatchMode):
    """Everything in fp64: conversions to other floating-point types do nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        dtype = kwargs.get("dtype")
        if dtype is not None and dtype.is_floating_point:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def with_gradient(fn, inputs, wide=False):
    """(loss, gradient of the first input) of eager, in fp64 if ``wide``."""
    inputs = [x.detach().clone() for x in inputs]
    if wide:
        inputs = [x.double() if x.is_floating_point() else x for x in inputs]
    inputs[0].requires_grad_()
    if wide:
        with _Wide():
            out = fn(*inputs)
            (gradient,) = torch.autograd.grad(out.sum(), inputs[0])
    else:
        out = fn(*inputs)
        (gradient,) = torch.autograd.grad(out.sum(), inputs[0])
    return out.detach(), gradient


def generated(fn, inputs, run=None, **options):
    """(code, loss, gradient of the first input) of the H200's code in the interpreter."""
    inputs = copy.deepcopy([x.detach() for x in inputs])
    inputs[0].requires_grad_()
    code = compile_for("h200", fn, *inputs, grad=True, **options)
    if run is not None:
        inputs = [x.detach() for x in run]
        inputs[0].requires_grad_()
    shape = fn(*inputs)
    out, gradients = run_interpreted(code, *inputs, grad_outputs=[torch.ones_like(shape)])
    return code, out, gradients["args[0]"]


def judged(fn, inputs, run=None, rounding=None, **options):
    """Assert that loss and gradient keep the rule for numbers; returns the code."""
    code, *got = generated(fn, inputs, run, **options)
    used = inputs if run is None else run
    references, baselines = with_gradient(fn, used, wide=True), with_gradient(fn, used)
    for what, one in zip(
        ("loss", "gradient"), zip(got, references, baselines, strict=True), strict=True
    ):
        verdict = measure.check(*one, rounding=rounding)
        assert verdict.ok, f"{what}: {verdict.reason}"
    return code


def judged_all(fn, inputs, run=None, **options):
    """The same for the gradients of all floating-point inputs of a loss (the first of several
    results); returns (code, results)."""
    used = inputs if run is None else run

    def leaves(tensors, wide=False):
        tensors = [x.detach().clone() for x in tensors]
        if wide:
            tensors = [x.double() if x.is_floating_point() else x for x in tensors]
        return [x.requires_grad_() if x.is_floating_point() else x for x in tensors]

    def first(results):
        return results[0] if isinstance(results, tuple) else results

    def eager(wide):
        tensors = leaves(used, wide)
        with _Wide() if wide else contextlib.nullcontext():
            loss = first(fn(*tensors))
            wanted = [x for x in tensors if x.requires_grad]
            return loss.detach(), *torch.autograd.grad(loss, wanted)

    code = compile_for("h200", fn, *leaves(inputs), grad=True, **options)
    tensors = leaves(used)
    ones = [torch.ones_like(first(fn(*tensors)))]
    results, gradients = run_interpreted(code, *tensors, grad_outputs=ones)
    got = [first(results)]
    got += [gradients[f"args[{i}]"] for i, x in enumerate(tensors) if x.requires_grad]
    for i, one in enumerate(zip(got, eager(True), eager(False), strict=True)):
        verdict = measure.check(*one)
        assert verdict.ok, f"result {i}: {verdict.reason}"
    return code, results


def sweeps(source, v):
    """A line per kernel that touches whole rows of length ``v``: loops, loads, stores of such."""
    calls = len(re.findall(r"= torch\.ops\.inductor_ext\.row_statistics\.default\(", source))
    lines = ["row_statistics loads=1 stores=0"] * calls
    call = r"= torch\.ops\.inductor_ext\.weighted_statistics\.default\([^,]*, (\w+)"
    for weights in re.findall(call, source):
        lines.append(f"weighted_statistics loads={1 if weights == 'None' else 2} stores=0")
    for kernel in kernels_of(source):
        text = kernel.source
        flat = re.findall(r"(\w+) = xindex$", text, re.MULTILINE)
        pointwise = kernel.kind == "pointwise" and re.search(rf"// {v}\b|% {v}\b", text)

        def whole(index, flat=flat, pointwise=pointwise):
            row = re.search(rf"\br0_\d+ \+ {v}\*x|\br0_\d+ \+ x\d\*ks", index)
            return bool(row or (pointwise and index in flat))

        counts = {
            name: sum(whole(i) for i in re.findall(rf"tl\.{op}\(\w+ \+ \((.*?)\), ", text))
            for name, op in (("loads", "load"), ("stores", "store"), ("atomics", r"atomic_\w+"))
        }
        if any(counts.values()):
            loops = len(re.findall(r"^\s*for r0_offset in ", text, re.MULTILINE))
            parts = [f"{name}={n}" for name, n in counts.items() if n or name != "atomics"]
            lines.append(f"{kernel.kind} loops={loops} {' '.join(parts)}")
    return lines
