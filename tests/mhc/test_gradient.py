"""The gradient of pre by the copy engine: emulated on the CPU, its machine code."""

import importlib.util
import pathlib

import pytest
import torch
from inductor_ext.templates import mhc_gradient
from inductor_ext.templates import mhc_gradient_launch as launch

from inductor_ext.testing.gluon import gluon_binary
from inductor_ext.testing.gluon_interpreter import interpret

BF16, FP32 = torch.bfloat16, torch.float32


def define():
    """The kernel of a fresh copy of its module."""
    path = pathlib.Path(mhc_gradient.__file__)
    spec = importlib.util.spec_from_file_location(mhc_gradient.__name__, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.gradient_kernel


def split(x):
    high = x.to(BF16)
    return torch.stack([high, (x - high.float()).to(BF16)])


@pytest.mark.parametrize(
    ("T", "H", "columns", "added", "split_w", "multiprocessors", "longest"),
    [(200, 128, 24, True, True, 8, 4096), (321, 64, 12, False, True, 3, 128),
     (449, 64, 32, True, False, 1, 64), (130, 64, 4, False, False, 1, 4096)],
)  # fmt: skip
def test_gradients(T, H, columns, added, split_w, multiprocessors, longest, monkeypatch):
    """Ranges of one tile and of many, of which a program has several or one; slow copies."""
    monkeypatch.setattr(launch, "LONGEST", longest)
    x, du = torch.randn(T, 4, H).to(BF16), torch.randn(T, H).to(BF16)
    w, draw, known = torch.randn(columns, 4 * H) / 8, torch.randn(T, columns), torch.randn(5, T)
    more = torch.randn(T, 4, H).to(BF16) if added else None
    w = split(w) if split_w else w.to(BF16)[None]
    parts = split(draw).transpose(0, 1).contiguous()
    dx = torch.full_like(x, torch.nan)
    given = x, du, w, parts, known, more, dx, multiprocessors
    grid, arguments = launch.launch(*given)
    arguments["PARTS"].fill_(torch.nan)
    interpret(define, grid[0], arguments, 0.001 if added else 0.0)
    wide = known.double()[..., None]
    right = (draw.double() @ w.double().sum(0)).view(T, 4, H) - wide[4, :, None] * x.double()
    right += wide[:4].transpose(0, 1) * du.double()[:, None] + (more.double() if added else 0)
    torch.testing.assert_close(dx.double(), right, rtol=2**-8, atol=1e-4)
    dw = draw.double().T @ x.double().flatten(1)
    assert (arguments["PARTS"].double().sum(0) - dw).norm() <= 1e-5 * dw.norm()


def meta(*size, dtype=FP32):
    return torch.empty(*size, dtype=dtype, device="meta")


def test_where_it_applies():
    x, du, w = meta(4096, 4, 4096, dtype=BF16), meta(4096, 4096, dtype=BF16), meta(24, 4 * 4096)
    assert launch.shapes_apply(x, w, du)
    assert not launch.shapes_apply(x, w, None)
    assert not launch.shapes_apply(x, meta(33, 4 * 4096), du)
    assert not launch.shapes_apply(x[:, :2], w, du)
    assert not launch.shapes_apply(x, w, du[:, :1].expand_as(du))
    assert not launch.applies(x, w, du)  # no card
    assert launch.pays(x) and not launch.pays(x[:4095])


@pytest.mark.skipif(not launch.available(), reason="a Triton the kernel was not checked with")
@pytest.mark.parametrize("added", [False, True])
def test_machine_code(added):
    T, H = 4096, 7168
    x, du, w = meta(T, 4, H, dtype=BF16), meta(T, H, dtype=BF16), meta(2, 24, 4 * H, dtype=BF16)
    given = x, du, w, meta(T, 2, 24, dtype=BF16), meta(5, T), x if added else None, x, 132
    grid, arguments = launch.launch(*given)
    assert grid == (112,)
    binary, sass = gluon_binary(mhc_gradient.gradient_kernel, arguments)
    assert binary.spills <= 32 * added and "HGMMA" in sass
    assert binary.shared_bytes <= 227 << 10
