"""mHC's kernels for Hopper: emulated on the CPU, their machine code, where they apply."""

import importlib.util
import pathlib

import pytest
import reference
import torch
from inductor_ext.templates import mhc_hopper, mhc_post_backward, mhc_pre
from inductor_ext.templates import mhc_hopper_launch as launch

from inductor_ext.testing import launch_binaries
from inductor_ext.testing.gluon import gluon_binary
from inductor_ext.testing.gluon_interpreter import interpret

BF16, FP32 = torch.bfloat16, torch.float32
V4 = (20, 1e-6, 1e-6, 1e-6, 2.0)


def emulated(name, grid, arguments, delay):
    """Run a kernel of a fresh copy of its module."""

    def define():
        path = pathlib.Path(mhc_hopper.__file__)
        spec = importlib.util.spec_from_file_location(mhc_hopper.__name__, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, name)

    interpret(define, grid[0], arguments, delay)


def parts_of(w, parts):
    found, rest = [], w
    for _ in range(parts):
        found.append(rest.bfloat16())
        rest = rest - found[-1].float()
    return torch.cat(found)


@pytest.mark.parametrize(
    ("T", "H", "parts", "multiprocessors", "delay"),
    [(200, 192, 3, 8, 0.0), (64, 64, 2, 9, 0.002), (449, 128, 1, 2, 0.0), (500, 64, 3, 1, 0.002)],
)
def test_streams_and_sums(T, H, parts, multiprocessors, delay):
    """Fewer tiles than stages and more, one program a slab and several, slow copies; coefficients
    of any strides and 16 bits."""
    x, y = torch.randn(T, 4, H).to(BF16), torch.randn(T, H).to(BF16)
    post, comb = torch.rand(4, T).to(BF16).T, torch.rand(T, 4, 4).transpose(1, 2)
    w = torch.randn(24, 4 * H) / 30
    out, p = torch.full_like(x, torch.nan), torch.full((H // 64, T, 24), torch.nan)
    done = torch.zeros((T + 127) // 128, dtype=torch.int32)
    cut = parts_of(w, parts)
    given = x, y, post, comb, cut, parts, out, p, done, multiprocessors
    grid, arguments = launch.post_launch(*given)
    emulated("post_projection_kernel", grid, arguments, delay)
    assert (done == H // 64).all()
    truth = reference.post(x, y, post, comb).to(BF16)
    assert (out != truth).sum() <= 1e-3 * out.numel()  # of double roundings
    torch.testing.assert_close(out, truth, rtol=2**-7, atol=1e-30)
    z = out.double().flatten(1) @ cut.double().view(parts, 24, 4 * H).sum(0).T
    assert (p.double().sum(0) - z).norm() <= 1e-6 * z.norm()


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
    done = torch.zeros((T + 63) // 64, dtype=torch.int32)
    given = x, du, w, parts, known, more, dx, done, multiprocessors
    grid, arguments = launch.gradient_launch(*given)
    arguments["PARTS"].fill_(torch.nan)
    emulated("gradient_kernel", grid, arguments, 0.001 if added else 0.0)
    assert (done == H // 64).all()
    wide = known.double()[..., None]
    right = (draw.double() @ w.double().sum(0)).view(T, 4, H) - wide[4, :, None] * x.double()
    right += wide[:4].transpose(0, 1) * du.double()[:, None] + (more.double() if added else 0)
    torch.testing.assert_close(dx.double(), right, rtol=2**-8, atol=1e-4)
    dw = draw.double().T @ x.double().flatten(1)
    assert (arguments["PARTS"].double().sum(0) - dw).norm() <= 1e-5 * dw.norm()


def test_where_it_applies():
    def given(T=2048, n=4, H=4096, dtype=BF16, columns=24):
        x, y = (torch.empty(T, *s, dtype=dtype, device="meta") for s in ((n, H), (H,)))
        return x, y, torch.empty(columns, n * H, device="meta")

    assert launch.shapes_apply(*given())
    assert not launch.shapes_apply(*given(n=2, columns=8))
    assert not launch.shapes_apply(*given(dtype=FP32))
    assert not launch.shapes_apply(*given(H=4096 + 32))
    assert not launch.shapes_apply(*given(H=1024))
    x, y, w = given()
    assert not launch.shapes_apply(x, None, w)
    assert not launch.shapes_apply(x, y, w.new_empty(33, w.shape[1]))
    assert not launch.shapes_apply(x[:, :1].expand_as(x), y, w)
    assert not launch.shapes_apply(x, y[:, :1].expand_as(y), w)
    assert not launch.applies(x, y, w)  # no card
    assert launch.pays(x[:1].expand(4096, -1, -1)) and not launch.pays(x)


def meta(*size, dtype=FP32):
    return torch.empty(*size, dtype=dtype, device="meta")


@pytest.mark.skipif(not launch.available(), reason="a Triton the kernel was not checked with")
@pytest.mark.parametrize("H", [4096, 7168])
def test_machine_code(H):
    T = 4096
    x, y, w = meta(T, 4, H, dtype=BF16), meta(T, H, dtype=BF16), meta(72, 4 * H, dtype=BF16)
    p, done = meta(H // 64, T, 24), meta(T // 128, dtype=torch.int32)
    given = x, y, meta(T, 4), meta(T, 4, 4), w, 3, x, p, done, 132
    grid, arguments = launch.post_launch(*given)
    assert 100 < grid[0] <= 132
    binary, sass = gluon_binary(mhc_hopper.post_projection_kernel, arguments)
    assert binary.spills == 0
    # Products run one behind another: nothing waits between them.
    assert sass.count("HGMMA") > 10 * sass.count("WARPGROUP.DEPBAR") > 0
    assert binary.shared_bytes <= 227 << 10
    assert "ld.shared.v4" in binary.ptx and "st.shared.v4" in binary.ptx
    run = lambda: mhc_pre.fuse(x, p, meta(3), meta(24), *V4, done=done, tile=128)  # noqa: E731
    fuse = next(b for b in launch_binaries(run, mhc_pre) if b.name == "fuse_kernel")
    assert fuse.spills == 0
    # Both are on a multiprocessor at once.
    threads = 256 * binary.registers, 32 * fuse.num_warps * fuse.registers
    assert sum(threads) <= 65536
    assert binary.shared_bytes + fuse.shared_bytes + 2048 <= 228 << 10


@pytest.mark.skipif(not launch.available(), reason="a Triton the kernel was not checked with")
@pytest.mark.parametrize("added", [False, True])
def test_machine_code_of_the_gradient(added):
    T, H = 4096, 7168
    x, du, w = meta(T, 4, H, dtype=BF16), meta(T, H, dtype=BF16), meta(2, 24, 4 * H, dtype=BF16)
    done = meta(T // 64, dtype=torch.int32)
    given = x, du, w, meta(T, 2, 24, dtype=BF16), meta(5, T), x if added else None, x, done, 132
    grid, arguments = launch.gradient_launch(*given)
    assert grid == (112,)
    binary, sass = gluon_binary(mhc_hopper.gradient_kernel, arguments)
    assert binary.spills == 0
    # Products run one behind another: nothing waits between them.
    assert sass.count("HGMMA") > 10 * sass.count("WARPGROUP.DEPBAR") > 0
    assert binary.shared_bytes <= 227 << 10
    comb = meta(T, 4, 4)
    given = x, du, meta(T, 4), comb, x, done, 64
    (post,) = launch_binaries(lambda: mhc_post_backward.backward(*given), mhc_post_backward)
    threads = 256 * binary.registers, 32 * post.num_warps * post.registers
    assert sum(threads) <= 65536
