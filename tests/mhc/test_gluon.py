"""mHC's kernel for Hopper: emulated on the CPU, its machine code, where it applies."""

import importlib.util
import pathlib

import pytest
import reference
import torch
from inductor_ext.templates import mhc_gluon_launch as launch
from inductor_ext.templates import mhc_post_gluon, mhc_pre

from inductor_ext.testing import launch_binaries
from inductor_ext.testing.gluon import gluon_binary
from inductor_ext.testing.gluon_interpreter import interpret

BF16, FP32 = torch.bfloat16, torch.float32
V4 = (20, 1e-6, 1e-6, 1e-6, 2.0)


def emulated(module, name, grid, arguments, delay):
    """Run a kernel of a fresh copy of its module."""

    def define():
        path = pathlib.Path(module.__file__)
        spec = importlib.util.spec_from_file_location(module.__name__, path)
        own = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(own)
        return getattr(own, name)

    interpret(define, grid[0], arguments, delay)


def parts_of(w, parts):
    found, rest = [], w
    for _ in range(parts):
        found.append(rest.bfloat16())
        rest = rest - found[-1].float()
    return torch.cat(found)


@pytest.mark.parametrize(
    ("T", "H", "parts", "multiprocessors", "delay"),
    [(200, 128, 3, 1, 0.001), (100, 256, 1, 4, 0.0)],
)
def test_streams_and_sums(T, H, parts, multiprocessors, delay):
    """An odd number of tiles and an even one, one program a slab and several, slow copies;
    coefficients of any strides and 16 bits."""
    x, y = torch.randn(T, 4, H).to(BF16), torch.randn(T, H).to(BF16)
    post, comb = torch.rand(4, T).to(BF16).T, torch.rand(T, 4, 4).transpose(1, 2)
    w = torch.randn(24, 4 * H) / 30
    out, p = torch.full_like(x, torch.nan), torch.full((H // 128, T, 24), torch.nan)
    cut = parts_of(w, parts)
    grid, arguments = launch.post_launch(x, y, post, comb, cut, parts, out, p, multiprocessors)
    emulated(mhc_post_gluon, "post_projection_kernel", grid, arguments, delay)
    truth = reference.post(x, y, post, comb).to(BF16)
    assert (out != truth).sum() <= 1e-3 * out.numel()  # of double roundings
    torch.testing.assert_close(out, truth, rtol=2**-7, atol=1e-30)
    z = out.double().flatten(1) @ cut.double().view(parts, 24, 4 * H).sum(0).T
    assert (p.double().sum(0) - z).norm() <= 1e-6 * z.norm()


def meta(*size, dtype=FP32):
    return torch.empty(*size, dtype=dtype, device="meta")


def test_where_it_applies():
    def given(T=2048, n=4, H=4096, dtype=BF16, columns=24):
        return meta(T, n, H, dtype=dtype), meta(T, H, dtype=dtype), meta(columns, n * H)

    assert launch.shapes_apply(*given())
    assert not launch.shapes_apply(*given(n=2, columns=8))
    assert not launch.shapes_apply(*given(dtype=FP32))
    assert not launch.shapes_apply(*given(H=4096 + 64))
    assert not launch.shapes_apply(*given(H=1024))
    x, y, w = given()
    assert not launch.shapes_apply(x, y, w.new_empty(33, w.shape[1]))
    assert not launch.shapes_apply(x[:, :1].expand_as(x), y, w)
    assert not launch.shapes_apply(x, y[:, :1].expand_as(y), w)
    assert not launch.shapes_apply(x, y, meta(24 * w.shape[1] + 1, dtype=BF16)[1:].view(w.shape))
    assert not launch.applies(x, y, w)  # no card
    assert launch.pays(x[:1].expand(4096, -1, -1)) and not launch.pays(x)
    assert not launch.aligned(x, torch.empty(9, dtype=BF16)[1:])
    assert launch.busy(112, 132) and launch.busy(40, 132) and not launch.busy(144, 132)


@pytest.mark.codegen
@pytest.mark.skipif(not launch.available(), reason="a Triton the kernel was not checked with")
def test_machine_code():
    T, H = 4096, 7168
    x, y, w = meta(T, 4, H, dtype=BF16), meta(T, H, dtype=BF16), meta(72, 4 * H, dtype=BF16)
    p = meta(H // 128, T, 24)
    grid, arguments = launch.post_launch(x, y, meta(T, 4), meta(T, 4, 4), w, 3, x, p, 132)
    assert grid == (112,)
    binary, sass = gluon_binary(mhc_post_gluon.post_projection_kernel, arguments)
    runs_free(binary, sass)
    assert binary.spills == 0
    assert "ld.shared.v4" in binary.ptx and "st.shared.v4" in binary.ptx
    run = lambda: mhc_pre.fuse(x, p, meta(3), meta(24), *V4)  # noqa: E731
    fuse = next(b for b in launch_binaries(run, mhc_pre) if b.name == "fuse_kernel")
    assert fuse.spills == 0 and fuse.registers <= 80


def runs_free(binary, sass):
    """Products run one behind another: nothing waits between them."""
    assert sass.count("HGMMA") > 10 * sass.count("WARPGROUP.DEPBAR") > 0
    assert binary.shared_bytes <= 227 << 10
