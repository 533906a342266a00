"""Losses over classes that are strided in memory: a class per pixel, or per token in front."""

import pytest
import torch
import torch.nn.functional as F
from inductor_ext.lowerings import classes_strided, loss_rows

import inductor_ext
from inductor_ext import measure
from inductor_ext.testing import compile_for, run_interpreted

BF16 = torch.bfloat16
HAS_VALUES = classes_strided.has_values


@pytest.fixture(autouse=True)
def all_on(monkeypatch):
    monkeypatch.setattr(classes_strided, "PLACES", 1)
    monkeypatch.setattr(classes_strided, "ROWS", 1)
    monkeypatch.setattr(classes_strided, "has_values", lambda core: True)
    with inductor_ext.enable("fused_loss"):
        yield


def plain(x, y):
    return F.cross_entropy(x, y)


def smoothed(x, y):
    return F.cross_entropy(x.float(), y, label_smoothing=0.1)


def with_z_loss(x, y):
    z = 30 * torch.tanh(x.float() / 30)
    return F.cross_entropy(z, y) + 1e-4 * z.logsumexp(1).square().mean()


def gathered(x, y):
    return -(0.7 * x.float()).log_softmax(1).gather(1, y.clamp(0)[:, None]).mean()


def masked_mean(x, y):
    keep = (y % 3 != 0).float()
    return (F.cross_entropy(x.float(), y, reduction="none") * keep).sum() / keep.sum()


def with_an_accuracy(x, y):
    return F.cross_entropy(x, y) + 0.0 * (x.detach().argmax(1) == y).float().mean()


LOSSES = (smoothed, with_z_loss, gathered, masked_mean, with_an_accuracy)


def drawn(*shape, dtype=BF16):
    y = torch.randint(0, shape[1], (shape[0], *shape[2:]))
    y.view(-1)[1::5] = -100
    return [torch.randn(shape).mul(3).to(dtype), y]


def taken(code):
    return [d.lowering for d in code.decisions if d.fired and d.chosen == "one sweep, strided"]


@pytest.mark.parametrize("fn", LOSSES)
def test_numbers(fn, judged):
    assert taken(judged(fn, drawn(2, 19, 5, 7)))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 17, 2, 3, 4), BF16), ((1, 1200, 9), torch.float32)],
)
def test_shapes(shape, dtype, judged):
    assert taken(judged(plain, drawn(*shape, dtype=dtype)))


def test_sizes_that_change(judged):
    places = {0: None, 2: None}
    run, changes = drawn(3, 19, 4, 7), {0: places, 1: {0: None, 1: None}}
    assert taken(judged(plain, drawn(2, 19, 5, 7), run=run, dynamic=changes))


@pytest.mark.codegen
def test_nothing_of_their_size_is_read_or_written_beside():
    x = torch.empty(8, 19, 512, 512, dtype=BF16, device="meta", requires_grad=True)
    y = torch.empty(8, 512, 512, dtype=torch.int64, device="meta")
    code = compile_for("h200", plain, x, y, grad=True)
    assert "torch.ops.inductor_ext.class_rows_and_gradient.default" in code.calls
    assert "39845888" not in "".join(k.source for k in code.kernels)
    assert [d.chosen for d in code.decisions] == ["one sweep, strided", "in place"]


def per_place(x, y):
    return F.cross_entropy(x, y, reduction="none")


def log_sum(x, y):
    return (0.5 * x.float()).logsumexp(1)


@pytest.mark.parametrize("fn", [per_place, log_sum])
def test_numbers_of_statistics(fn, judged):
    code = judged(fn, drawn(2, 19, 5, 7))
    assert [d.chosen for d in code.decisions if d.fired] == ["class_statistics"]


@pytest.mark.codegen
@pytest.mark.parametrize("fn", [per_place, with_z_loss])
def test_inference_reads_them_once(fn):
    x = torch.empty(8, 19, 512, 512, dtype=BF16, device="meta")
    y = torch.empty(8, 512, 512, dtype=torch.int64, device="meta")
    with torch.no_grad():
        code = compile_for("h200", fn, x, y)
    assert [d.chosen for d in code.decisions] == ["class_statistics"]
    assert code.calls[0] == "torch.ops.inductor_ext.class_statistics.default"
    assert "39845888" not in "".join(k.source for k in code.kernels)


def values(x):
    return x.softmax(1)


def log_values(x):
    return (x / 2).log_softmax(1)


PLACES = {0: {0: None, 2: None}}


@pytest.mark.parametrize(
    ("fn", "shape", "dynamic", "run"),
    [(log_values, (3, 32, 33), None, (3, 32, 33)),
     (values, (2, 19, 5, 7), PLACES, (3, 19, 4, 7))],
)  # fmt: skip
def test_numbers_of_values(fn, shape, dynamic, run):
    x = torch.randn(shape, dtype=BF16).requires_grad_()
    code = compile_for("h200", fn, x, grad=True, dynamic=dynamic)
    assert [d.chosen for d in code.decisions if d.fired] == ["softmax_backward", "softmax_forward"]
    assert len(code.calls) == 2
    x, g = torch.randn(2, *run).mul(3).to(BF16)
    out, gradients = run_interpreted(code, x.requires_grad_(), grad_outputs=[g])
    found = out.detach(), gradients["args[0]"]
    for one in zip(found, differentiated(fn, x.double(), g), differentiated(fn, x, g), strict=True):
        verdict = measure.check(*one)
        assert verdict.ok, verdict.reason


def differentiated(fn, x, g):
    x = x.detach().requires_grad_()
    out = fn(x)
    return out.detach(), torch.autograd.grad(out, x, g.to(out.dtype))[0]


@pytest.mark.parametrize(
    ("shape", "chosen"), [((8, 150, 256, 256), ["softmax_forward"]), ((16, 1000, 64, 64), [])]
)
def test_values_that_stock_writes_as_fast(shape, chosen, monkeypatch):
    monkeypatch.setattr(classes_strided, "has_values", HAS_VALUES)
    x = torch.empty(shape, dtype=BF16, device="meta", requires_grad=True)
    code = compile_for("h200", values, x, grad=True)
    assert [d.chosen for d in code.decisions if d.fired] == chosen


def test_a_convolution_in_front():
    """Its gradient reads what is transposed back."""
    x, y = torch.empty(2, 8, 16, 16, dtype=BF16), torch.empty(2, 16, 16, dtype=torch.int64)
    w = torch.empty(19, 8, 1, 1, dtype=BF16).requires_grad_()
    code = compile_for("h200", lambda w, x, y: plain(F.conv2d(x, w), y), w, x, y, grad=True)
    assert taken(code)


def read_on(x):
    return x.softmax(1).sub(0.1).relu()


def test_what_is_left_is_stocks_code():
    x = drawn(4, 19, 8, 8)[0].requires_grad_()
    code = compile_for("h200", read_on, x, grad=True)
    assert not any(d.fired for d in code.decisions)
    with inductor_ext.disable():
        assert [k.source for k in compile_for("h200", read_on, x, grad=True).kernels] == [
            k.source for k in code.kernels
        ]


@pytest.mark.parametrize(
    ("shape", "setting"),
    [((4, 15, 64, 64), {}), ((2, 19, 8, 8), {"LEAST_STRIDED_BYTES": 2**25}),
     ((400, 19, 4), {"PLACES": 32})],
)  # fmt: skip
def test_small_logits_are_left(shape, setting, monkeypatch):
    for name, value in setting.items():
        monkeypatch.setattr(loss_rows if name[0] == "L" else classes_strided, name, value)
    x, y = drawn(*shape)
    code = compile_for("h200", plain, x.requires_grad_(), y, grad=True)
    assert not any(d.fired for d in code.decisions)
