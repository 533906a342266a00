"""The operations for joint graphs in the interpreter and composed, judged by fp64's autograd."""

import math

import pytest
import torch
from inductor_ext.templates import cross_entropy_launch as launch
from inductor_ext.templates import scaling
from inductor_ext.templates.cross_entropy_launch import Tile

from inductor_ext import measure
from inductor_ext.ops import _joint
from inductor_ext.ops import _linear_chunks as linear
from inductor_ext.testing import compile_for, launch_binaries

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
HELD, BOTH, STREAMED = Tile(1, 1, 3, 1), Tile(1, 1, 1, 1), Tile(2, 1, 0, 1)
WAYS = {"held": HELD, "held and streamed": BOTH, "streamed": STREAMED, "split": STREAMED,
        "composed": None}  # fmt: skip
# What a loss by cross entropy of smoothing e and z-loss k, a mean over 4 rows, has as factors.
LOSSES = {
    "plain": {},
    "smoothing": {"smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "unlike": {"unlike": True},
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 5.0},
    "everything": {"smoothing": 0.2, "z_loss": 1e-2, "unlike": True, "scale": 1.5, "softcap": 8.0},
}


@pytest.fixture(params=WAYS)
def compute(request, on_cpu, with_tile):
    """``rows_and_gradient`` on one of its ways."""
    way = request.param

    def run(*args):
        if way == "composed":
            return _joint.rows_and_gradient(*args)
        with on_cpu(), with_tile(WAYS[way], few=132 if way == "split" else 0):
            return _joint.rows_and_gradient(*args)

    return run


def draw(rows=5, columns=997, dtype=FP32, spread=3.0, offset=0.0):
    x = (torch.randn(rows, columns) * spread + offset).to(dtype)
    target = torch.randint(0, columns, (rows,))
    target[rows // 2] = -100
    return x, target


def factors(target, columns, smoothing=0.0, z_loss=0.0, unlike=False, **_):
    counts = ((target >= 0) & (target < columns)).float() / 4
    a0 = counts.clone()
    a1 = 2 * z_loss * counts if z_loss else None
    b = counts * (1 - smoothing) * (torch.linspace(0, 2, len(target)) if unlike else 1.0)
    return a0, a1, b, counts * smoothing / columns if smoothing else None


def truth(x, target, a0, a1, b, c, scale, softcap):
    """(peak, total, below, picked, dx) by autograd, of a loss whose gradient has these factors."""
    a0, a1, b, c = (
        torch.zeros_like(x[:, 0]) if f is None else f.to(x.dtype) for f in (a0, a1, b, c)
    )
    x = x.detach().requires_grad_()
    z = softcap * torch.tanh(x / softcap) if softcap else x
    z = z * scale
    peak = z.amax(1)
    lse = z.logsumexp(1)
    there = (target >= 0) & (target < x.shape[1])
    own = z.gather(1, torch.where(there, target, 0).long()[:, None])[:, 0]
    parts = a0 * lse + 0.5 * a1 * lse.square() - torch.where(there, b * own, 0.0)
    loss = parts - c * (z - peak[:, None].detach()).sum(1)
    # Nothing of rows that have no factors.
    used = (a0 != 0) | (a1 != 0) | (b != 0) | (c != 0)
    (dx,) = torch.autograd.grad(torch.where(used, loss, 0.0).sum(), x)
    shifted = z - peak[:, None]
    rows = peak, shifted.exp().sum(1), shifted.sum(1), torch.where(there, own, 0.0)
    return *(t.detach() for t in rows), torch.where(used[:, None], dx, 0.0)


def judge(found, x, target, given, scale=1.0, softcap=0.0):
    reference = truth(x.double(), target, *given, scale, softcap)
    baseline = truth(x.float(), target, *given, scale, softcap)
    for name, mine, right, eager in zip(
        ("peak", "total", "below", "picked", "dx"), found, reference, baseline, strict=True
    ):
        if name == "below" and given[3] is None:
            assert mine.numel() == 0
            continue
        verdict = measure.check(mine, right, eager.to(mine.dtype))
        assert verdict.ok, f"{name}: {verdict.reason}"


@pytest.mark.parametrize("loss", LOSSES)
def test_options(compute, loss):
    options = LOSSES[loss]
    x, target = draw(columns=400)
    given, numbers = factors(target, 400, **options), {
        k: options[k] for k in ("scale", "softcap") if k in options
    }  # fmt: skip
    args = x, target, *given, numbers.get("scale", 1.0), numbers.get("softcap", 0.0)
    found = compute(*args)
    assert all(map(torch.equal, found, compute(*args)))
    judge(found, x, target, given, **numbers)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("columns", [2, 17, 257, 799])
def test_odd_sizes(compute, columns, dtype):
    x, target = draw(columns=columns, dtype=dtype)
    given = factors(target, columns, **LOSSES["everything"])
    found = compute(x, target, *given, 1.5, 8.0)
    assert found[-1].dtype == dtype and found[0].dtype == FP32
    judge(found, x, target, given, 1.5, 8.0)


def test_layouts_and_targets(compute):
    wide, target = draw(rows=6, columns=900)
    target[0], target[1] = 900, 0
    twice = torch.stack([target, target], 1).int()
    padded = wide[:, :895]
    for x in (wide[:, 3:400], wide[::2, 8:408].repeat(2, 1), wide.t().contiguous().t()[:, :397],
              padded):  # fmt: skip
        given = factors(target, x.shape[1], **LOSSES["smoothing"])
        found = compute(x, twice[:, 0], *given, 1.0, 0.0)
        judge(found, x, target, given)
        assert found[-1].stride() == ((900, 1) if x is padded else (x.shape[1], 1))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_without_factors_may_hold_anything(compute, bad):
    x, target = draw()
    x[2, 5:7] = bad  # row 2 has no target
    given = factors(target, 997, **LOSSES["smoothing"])
    peak, total, below, _, dx = compute(x, target, *given, 1.0, 0.0)
    assert torch.equal(dx[2], torch.zeros(997)) and dx.isfinite().all()
    assert dx[0].abs().sum() > 0
    shifted = x - x.amax(1, keepdim=True)
    for mine, theirs in ((peak, x.amax(1)), (total, shifted.exp().sum(1)), (below, shifted.sum(1))):
        torch.testing.assert_close(mine, theirs, equal_nan=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_with_factors_are_as_torch_has_them(compute, bad):
    x, target = draw()
    x[0, 7], x[1, :], x[3, target[3]] = bad, bad, bad
    given = factors(target, 997, z_loss=1e-2)
    peak, total, _, _, dx = compute(x, target, *given, 1.0, 0.0)
    expected = truth(x.double(), target, *given, 1.0, 0.0)
    for mine, theirs in (
        (peak, expected[0]),
        (total, expected[1]),
        (dx[[0, 2, 4]], expected[-1][[0, 2, 4]]),
    ):
        torch.testing.assert_close(mine.double(), theirs, equal_nan=True, rtol=1e-5, atol=1e-7)
    assert not dx[1].isfinite().any()


@pytest.mark.parametrize("offset", [1e6, -1e6, 1e8, -1e8])
def test_offsets_cancel(compute, offset):
    x, target = draw(spread=20.0, offset=offset)
    x[0] = offset
    given = factors(target, 997, **LOSSES["smoothing"])
    judge(compute(x, target, *given, 1.0, 0.0), x, target, given)


def test_a_confident_row_keeps_its_gradient(compute):
    x = torch.randn(3, 300)
    target = torch.tensor([7, 0, 299])
    x[torch.arange(3), target] = torch.tensor([30.0, 60.0, 1e8])
    given = factors(target, 300)
    dx = compute(x, target, *given, 1.0, 0.0)[-1]
    z = x.double()
    others = z.scatter(1, target[:, None], -math.inf).logsumexp(1)
    own = z.gather(1, target[:, None])[:, 0]
    expected = -given[2].double() * torch.sigmoid(others - own)
    mine = dx.gather(1, target[:, None])[:, 0].double()
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-45)


def test_over_the_logits_themselves(on_cpu, with_tile):
    for tile in (HELD, STREAMED):
        x, target = draw(columns=403)
        given, own = factors(target, 403, **LOSSES["smoothing"]), x.clone()
        with on_cpu(), with_tile(tile):
            *rows, dx = launch.rows_and_gradient(
                own, target, *given[:1], None, *given[2:], 1.0, 0.0, dx=own
            )
        assert dx is own
        judge((*rows, dx), x, target, given)


# --- with the product that makes the logits -------------------------------------------------------


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("way", ["streamed", "composed"])
@pytest.mark.parametrize(
    ("loss", "wanted"),
    [("plain", (True, True, False)), ("everything", (True, True, True)),
     ("smoothing", (False, True, False))],
)  # fmt: skip
def test_linear(loss, wanted, way, chunks, on_cpu, with_tile, monkeypatch):
    monkeypatch.setattr(linear, "LEAST_ROWS", 16)
    options = LOSSES[loss]
    scale, softcap = options.get("scale", 1.0), options.get("softcap", 0.0)
    h, w, bias = torch.randn(37, 24), torch.randn(130, 24) * 0.5, torch.randn(130)
    bias = bias if wanted[2] else None
    target = torch.randint(0, 130, (37,))
    target[3] = -100
    given = factors(target, 130, **options)
    memory = linear.MEMORY if chunks == 1 else 1000
    args = h, w, bias, target, *given, list(wanted), memory, scale, softcap
    if way == "composed":
        found = _joint.linear_rows_and_gradient(*args)
    else:
        with on_cpu(), with_tile(BOTH):
            found = _joint.linear_rows_and_gradient(*args)
    h, w = h.double(), w.double()
    z = h @ w.t() + (0.0 if bias is None else bias.double())
    peak, total, below, picked, dx = truth(z, target, *given, scale, softcap)
    below = below if given[3] is not None else below[:0]
    gradients = [t if want else t.new_empty(0) for t, want in
                 zip((dx @ w, dx.t() @ h, dx.sum(0)), wanted, strict=True)]  # fmt: skip
    for mine, theirs in zip(found, (peak, total, below, picked, *gradients), strict=True):
        assert mine.dtype == FP32 and mine.shape == theirs.shape
        if mine.numel():
            assert (mine.double() - theirs).norm() / theirs.norm() < 1e-5


def test_linear_in_16_bits_is_summed_in_fp32(on_cpu, with_tile, monkeypatch):
    monkeypatch.setattr(linear, "LEAST_ROWS", 8)
    h, w = torch.randn(96, 24).bfloat16(), (torch.randn(130, 24) * 0.5).bfloat16()
    target = torch.randint(0, 130, (96,))
    given = factors(target, 130)
    with on_cpu(), with_tile(BOTH):
        *_, dh, dw, db = _joint.linear_rows_and_gradient(
            h, w, None, target, *given, [True, True, False], 1, 1.0, 0.0
        )
    assert db.numel() == 0
    wide_h, wide_w = h.double(), w.double()
    dx = truth(wide_h @ wide_w.t(), target, *given, 1.0, 0.0)[-1]
    eager = truth((h @ w.t()).float(), target, *given, 1.0, 0.0)[-1].bfloat16()
    pairs = ((dh, dx @ wide_w, eager @ w), (dw, dx.t() @ wide_h, eager.t() @ h))
    for mine, reference, baseline in pairs:
        verdict = measure.check(mine, reference, baseline)
        assert verdict.ok, verdict.reason


# --- as operations of a program -------------------------------------------------------------------


def test_what_torch_checks_of_an_operation():
    x, target = draw(rows=4, columns=30)
    h, w = torch.randn(4, 8), torch.randn(30, 8)
    checks = ("test_schema", "test_faketensor")
    for loss in ("plain", "everything"):
        given = factors(target, 30, **LOSSES[loss])
        torch.library.opcheck(
            _joint.rows_and_gradient, (x, target, *given, 1.0, 0.0), test_utils=checks
        )
        args = (h, w, None, target, *given, [True, False, False], 10, 1.0, 0.0)
        torch.library.opcheck(_joint.linear_rows_and_gradient, args, test_utils=checks)
    for op in (_joint.scaled_gradient, _joint.scale_gradient_):
        torch.library.opcheck(op, (x.clone(), torch.tensor(0.5)), test_utils=checks)


@pytest.mark.codegen
def test_any_number_of_rows():
    def fn(h, w, target, a, b):
        x = h @ w.t()
        ops = torch.ops.inductor_ext
        peak, total, *_, dx = ops.rows_and_gradient(x, target, a, None, b, None, 1.0, 0.0)
        made = ops.linear_rows_and_gradient(
            h, w, None, target, a, None, b, a, [True, True, False], 100, 1.0, 0.0
        )
        return peak + total.log(), dx.sum(), *(t.sum() for t in made)

    meta = lambda *size, dtype=BF16: torch.empty(*size, dtype=dtype, device="meta")  # noqa: E731
    args = meta(40, 32), meta(500, 32), meta(40, dtype=torch.int64), *(meta(40, dtype=FP32),) * 2
    dynamic = {i: {0: (8, 1000)} for i in (0, 2, 3, 4)}
    code = compile_for("h200", fn, *args, dynamic=dynamic)
    calls = [c for c in code.extern_calls if "inductor_ext" in c]
    assert calls == [f"torch.ops.inductor_ext.{name}.default" for name in (
        "rows_and_gradient", "linear_rows_and_gradient")]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"x": torch.zeros(4)}, ValueError),
        ({"target": torch.zeros(4)}, TypeError),
        ({"target": torch.zeros(3, dtype=torch.int64)}, ValueError),
        ({"a0": torch.zeros(4, dtype=FP64)}, TypeError),
        ({"c": torch.zeros(4, 1)}, ValueError),
        ({"scale": -1.0}, ValueError),
        ({"softcap": math.inf}, ValueError),
    ],
)
def test_bad_input(change, error):
    zeros = torch.zeros(4)
    given = {"x": torch.zeros(4, 9), "target": torch.zeros(4, dtype=torch.int64), "a0": zeros,
             "a1": None, "b": zeros, "c": None, "scale": 1.0, "softcap": 0.0}  # fmt: skip
    with pytest.raises(error, match="expected"):
        _joint.rows_and_gradient(**(given | change))


# --- machine code ---------------------------------------------------------------------------------


def binaries(rows, columns, dtype=BF16, loss="plain", **options):
    meta = lambda *size, dtype: torch.empty(*size, dtype=dtype, device="meta")  # noqa: E731
    x, target = meta(rows, columns, dtype=dtype), meta(rows, dtype=torch.int64)
    given = factors(torch.zeros(rows, dtype=torch.int64), columns, **LOSSES[loss])
    given = [None if f is None else f.to("meta") for f in given]
    softcap = LOSSES[loss].get("softcap", 0.0)
    return launch_binaries(
        lambda: launch.rows_and_gradient(x, target, *given, 1.0, softcap, **options), launch
    )


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "loss"),
    [(8192, 32000, BF16, "plain"), (8192, 128256, BF16, "plain"), (8192, 128256, BF16, "z-loss"),
     (8192, 128256, BF16, "smoothing"), (8192, 128256, BF16, "softcap"),
     (8192, 50257, BF16, "plain"), (65536, 1000, BF16, "plain"), (4096, 32000, FP32, "plain"),
     (4096, 128256, FP32, "smoothing")],
)  # fmt: skip
def test_statistics_and_gradient_in_one_kernel(rows, columns, dtype, loss):
    (kernel,) = binaries(rows, columns, dtype, loss)
    assert kernel.name == "rows_kernel" and kernel.target == "sm_90a"
    assert kernel.spills == 0 and kernel.registers <= 128
    assert kernel.widest_load == kernel.widest_store == 16


def test_few_rows_are_split():
    kernels = binaries(8, 131072, loss="everything")
    assert [k.name for k in kernels] == ["segments_kernel", "join_kernel", "spread_kernel"]
    assert all(k.spills == 0 for k in kernels)
    assert kernels[0].widest_load == kernels[2].widest_store == 16


def test_a_tile_of_ones_choice():
    (kernel,) = binaries(8, 131072, tile=Tile(4, 8, 0, 1))
    assert kernel.name == "rows_kernel" and kernel.num_warps == 8


@pytest.mark.parametrize("stride", [50304, 50257])
def test_scaling_moves_16_bytes_at_a_time(stride):
    made = torch.empty(300, stride, dtype=BF16, device="meta")[:, :50257]
    g = torch.empty((), device="meta")
    (kernel,) = launch_binaries(lambda: scaling.scale_in_place(made, g), scaling)
    assert kernel.spills == 0 and kernel.widest_load == kernel.widest_store == 16


def test_no_launch_takes_the_detour_of_a_traced_one(monkeypatch):
    launched = []
    monkeypatch.setattr(_joint, "_scales", lambda made: True)
    monkeypatch.setattr(
        scaling,
        "scale_in_place",
        lambda made, g: launched.append(torch.library.wrap_triton(scaling.scale_kernel)),
    )
    _joint.scale_gradient_(torch.ones(2, 3), torch.tensor(0.3))
    assert launched == [scaling.scale_kernel]
    assert torch.library.wrap_triton(scaling.scale_kernel) is not scaling.scale_kernel
