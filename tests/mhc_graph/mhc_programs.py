"""Programs as the passes in front of AOTAutograd leave them, and their numbers by fp64."""

import contextlib
import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import mhc_forms
from inductor_ext import compat_pre_grad, measure, report
from inductor_ext.testing import compile_for


class _Stop(BaseException):
    pass


@dataclasses.dataclass
class Program:
    """The program's graph behind the passes, and what they decided."""

    graph: Any
    decisions: list

    @property
    def operations(self):
        """The operations of ours, in order."""
        found = [n.target for n in self.graph.nodes if n.op == "call_function"]
        ours = [t for t in found if getattr(t, "namespace", "") == "inductor_ext"]
        return [t._schema.name.removeprefix("inductor_ext::") for t in ours]

    def calls(self, name):
        return [
            n.args
            for n in self.graph.nodes
            if str(getattr(n.target, "_schema", "")).startswith(f"inductor_ext::{name}(")
        ]

    @property
    def left(self):
        return [d.reason for d in self.decisions if not d.fired]

    def run(self, fn):
        """A function with the parameters of ``fn`` that runs the edited program."""
        wanted = [n.target.removeprefix("L_").removesuffix("_") for n in self._inputs()]
        parameters = list(inspect.signature(fn).parameters)

        def program(*args):
            given = dict(zip(parameters, args, strict=True))
            out = self.graph.owning_module(*[given[name] for name in wanted])
            return tuple(out) if len(out) > 1 else out[0]

        return program

    def _inputs(self):
        return [n for n in self.graph.nodes if n.op == "placeholder"]


def edited(fn, *args, grad=True, card=True, graphs=1, **options):
    """What the passes make of a program, for a card or here; nothing behind them is compiled. Of
    several ``graphs``, that many in all, the first is returned: those inside others come first."""
    seen = []

    class Entry:
        def apply(self, graph):
            seen.append(graph)
            if len(seen) == graphs:
                raise _Stop

    entries = compat_pre_grad.entries()
    entry = Entry()
    entries.append(entry)
    try:
        with report.collect() as decisions, pytest.raises(_Stop):
            if card:
                compile_for("h200", fn, *args, grad=grad, **options)
            else:
                torch._dynamo.reset()
                torch.compile(fn, **options)(*args)
    finally:
        entries.remove(entry)
    return Program(seen[0], list(decisions))


class _Wide(TorchDispatchMode):
    """Everything in fp64: conversions to other floating-point types do nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        dtype = kwargs.get("dtype")
        if dtype is not None and dtype.is_floating_point:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def with_gradients(fn, args, wide=False):
    """Results and gradients of all arguments, for gradients of random numbers that come in."""
    leaves = [x.detach().clone() for x in args]
    leaves = [(x.double() if wide else x).requires_grad_() for x in leaves]

    with _Wide() if wide else contextlib.nullcontext():
        out = fn(*leaves)
    out = out if isinstance(out, tuple) else (out,)
    generator = torch.Generator().manual_seed(5)
    given = [torch.randn(o.shape, generator=generator).bfloat16().to(o.dtype) for o in out]
    with _Wide() if wide else contextlib.nullcontext():
        gradients = torch.autograd.grad(out, leaves, given)
    return [*(o.detach() for o in out), *gradients]


def judge_all(got, fn, args, rounding=None):
    """Assert the rule for numbers for each result and gradient; ``rounding`` is a dtype to which
    the program rounds what it returns in fp32."""
    wide, plain = with_gradients(fn, args, wide=True), with_gradients(fn, args)
    for i, one in enumerate(zip(got, wide, plain, strict=True)):
        verdict = measure.check(*one, rounding=rounding)
        assert verdict.ok, f"number {i}: {verdict.reason}"


def pre_inputs(tokens=(2, 5), n=4, hidden=64, dtype=torch.bfloat16):
    found = mhc_forms.inputs(tokens, n, hidden, dtype)
    return [found[k].requires_grad_() for k in ("x", "w", "scale", "base")]


def post_inputs(tokens=(2, 5), n=4, hidden=64, dtype=torch.bfloat16):
    found = mhc_forms.inputs(tokens, n, hidden, dtype)
    return [found[k].requires_grad_() for k in ("x", "y", "post", "comb")]
