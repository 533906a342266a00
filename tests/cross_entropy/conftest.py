"""Shared by the cross-entropy tests: seeded, and results judged by fp64 and eager's own error."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from inductor_ext.templates import cross_entropy_launch, softmax, weighted_rows

from inductor_ext import measure
from inductor_ext.ops import _rows, _softmax
from inductor_ext.testing import launches_interpreted


@pytest.fixture(autouse=True)
def clean_setting():
    torch.manual_seed(0)


@contextlib.contextmanager
def on_cpu():
    """The kernels apply to CPU tensors, and run on them in the interpreter."""
    with (
        launches_interpreted(cross_entropy_launch, softmax, weighted_rows),
        pytest.MonkeyPatch.context() as patch,
    ):
        for module in (_rows, _softmax):
            patch.setattr(module, "kernels_apply", _rows.shapes_apply)
        yield


@contextlib.contextmanager
def with_tile(tile, few=0):
    """Every kernel has this tile; fewer rows than ``few`` are split."""
    launch = cross_entropy_launch
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fused_tile", "read_tile", "gradient_tile"):
            held = tile.held if name == "fused_tile" else 0
            own = launch.Tile(tile.r, tile.warps, held, tile.stages)
            patch.setattr(launch, name, lambda *_, own=own, **__: own)
        patch.setattr(launch, "_FEW", few)
        yield


def formula(x, target, weight=None, *, ignore_index=-100, reduction="mean", label_smoothing=0.0,
            softcap=None, scale=1.0, z_loss=0.0):  # fmt: skip
    """What ``ops.cross_entropy`` computes, as a user writes it, in the dtype of x."""
    z = softcap * torch.tanh(x / softcap) if softcap else x
    z = z * scale if scale != 1.0 else z
    if weight is not None:
        weight = weight.to(z.dtype)
    target = target.to(z.dtype) if target.is_floating_point() else target.long()
    out = F.cross_entropy(
        z, target, weight, ignore_index=ignore_index, reduction=reduction,
        label_smoothing=label_smoothing,
    )  # fmt: skip
    if z_loss:
        classes = 0 if x.dim() == 1 else 1
        penalty = z_loss * z.logsumexp(classes).square()
        rows = target.sum(classes) > -1 if target.is_floating_point() else target != ignore_index
        penalty = torch.where(rows, penalty, 0.0)
        if reduction == "mean":
            penalty = penalty.sum() / rows.sum()
        out = out + (penalty.sum() if reduction == "sum" else penalty)
    return out


def run(fn, x, *args, dtype=None, g=None, **options):
    """(loss, gradient of x) of ``fn``, with ``g`` as the incoming gradient."""
    own = x.detach().to(dtype or x.dtype).requires_grad_()
    loss = fn(own, *args, **options)
    g = torch.ones_like(loss) if g is None else g.to(loss.dtype)
    (dx,) = torch.autograd.grad(loss, own, g)
    return loss.detach(), dx


def judge(ours, x, *args, capped=False, **options):
    """Assert that ``ours``, (loss, gradient), is the formula's: by fp64, and eager's error."""
    g = options.pop("g", None)
    truth = run(formula, x, *args, dtype=torch.float64, g=g, **options)
    eager = run(formula, x, *args, g=g, **options)
    for name, got, reference, baseline in zip(("loss", "dx"), ours, truth, eager, strict=True):
        verdict = measure.check(got, reference, baseline)
        assert verdict.ok, f"{name}: {verdict.reason}"


@pytest.fixture(name="formula")
def _formula():
    return formula


@pytest.fixture(name="run")
def _run():
    return run


@pytest.fixture(name="judge")
def _judge():
    return judge


@pytest.fixture(name="on_cpu")
def _on_cpu():
    return on_cpu


@pytest.fixture(name="with_tile")
def _with_tile():
    return with_tile
