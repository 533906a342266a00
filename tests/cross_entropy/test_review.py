"""What callers pass and frameworks do: strided and unused targets, frozen parts, autocast,
transforms, no rows, gradients that would be missing."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from inductor_ext.templates import cross_entropy_launch as launch
from inductor_ext.templates.cross_entropy_launch import Tile

from inductor_ext import ops
from inductor_ext.ops import _linear_chunks, _rows, _softmax
from inductor_ext.ops import _linear_cross_entropy as linear

TILE = Tile(1, 1, 1, 1)
INF = math.inf


@pytest.fixture(params=["kernels", "composed"])
def way(request, on_cpu, with_tile):
    """On one of the two ways."""
    with on_cpu() if request.param == "kernels" else contextlib.nullcontext(), with_tile(TILE):
        yield request.param


@pytest.fixture
def kernels(on_cpu, with_tile):
    with on_cpu(), with_tile(TILE):
        yield


# --- targets, and entries of a teacher ------------------------------------------------------------


@pytest.mark.parametrize("stride", [0, 2])
def test_strided_targets(stride, way):
    x, w = torch.randn(6, 30), torch.randn(30, 30)
    target = torch.tensor(3).expand(6)
    if stride:
        # Every other number is no target at all.
        target = torch.tensor([[1, -5], [2, -5], [-100, 40], [4, 40], [5, 40], [6, 40]])[:, 0]
    assert target.stride() == (stride,)
    for reduction in ("mean", "none"):
        x.requires_grad_()
        found = ops.cross_entropy(x, target, reduction=reduction)
        theirs = F.cross_entropy(x, target, reduction=reduction)
        torch.testing.assert_close(found, theirs)
        dx, truth = (torch.autograd.grad(loss.sum(), x)[0] for loss in (found, theirs))
        torch.testing.assert_close(dx, truth)
        found = ops.linear_cross_entropy(x, w, target, reduction=reduction)
        theirs = F.cross_entropy(F.linear(x, w), target, reduction=reduction)
        torch.testing.assert_close(found, theirs)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("unused", [-1, 10**6])
def test_a_row_whose_entries_are_all_unused(unused, reduction, way):
    rows = 140
    x = torch.randn(rows, 40, requires_grad=True)
    ids, logprobs = torch.randint(0, 40, (rows, 3)), torch.randn(rows, 3)
    ids[1], logprobs[1] = unused, -INF
    loss = ops.sparse_distillation_loss(x, ids, logprobs, reduction=reduction)
    (dx,) = torch.autograd.grad(loss, x)
    keep = torch.arange(rows) != 1
    each = logprobs[keep].softmax(1) * x[keep].log_softmax(1).gather(1, ids[keep])
    theirs = -each.sum() / (1 if reduction == "sum" else rows - 1)
    torch.testing.assert_close(loss, theirs)
    torch.testing.assert_close(dx, torch.autograd.grad(theirs, x)[0])
    assert (dx[1] == 0).all()


def test_entries_in_any_layout(kernels):
    x, ids = torch.randn(5, 40), torch.randint(0, 40, (3, 5))
    logprobs = torch.randn(3, 5)
    found = ops.sparse_distillation_loss(x, ids.t(), logprobs.t())
    expected = ops.sparse_distillation_loss(x, ids.t().contiguous(), logprobs.t().contiguous())
    assert torch.equal(found, expected)


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("linear", [True, False])
def test_a_backward_is_handed_no_zeros(linear, kernels):
    """Zeros would be as large as the logits, or as W."""
    x = torch.randn(3, 30, requires_grad=True)
    target = torch.tensor([1, 2, 3])
    loss = ops.cross_entropy(x, target)
    if linear:
        loss = ops.linear_cross_entropy(x, torch.randn(40, 30), target)
    seen = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, fn, types, args=(), kwargs=None):
            out = fn(*args, **(kwargs or {}))
            seen.append((fn.name(), out.numel()))
            return out

    with Record():
        loss.backward()
    assert not [name for name, size in seen if "zero" in name and size > 1]


def test_more_chunks_only_where_they_save_memory():
    hidden, classes, budget = 4096, 262144, _linear_chunks.MEMORY
    assert _linear_chunks.chunk_rows(5000, hidden, classes, 2, budget) == 5000
    assert _linear_chunks.chunk_rows(50000, hidden, classes, 2, budget) == 1024
    assert (
        _linear_chunks.chunk_rows(10**4, hidden, 128256, 4, budget)
        == budget // (4 * 128256) // 128 * 128
    )
    for rows in (4000, 9000, 20000):
        size = _linear_chunks.chunk_rows(rows, hidden, classes, 2, budget)
        assert size == rows or size * classes * 2 + 4 * hidden * classes < rows * classes * 2


# --- the linear layer -----------------------------------------------------------------------------


def draw(*frozen):
    h, w, b = torch.randn(20, 24), torch.randn(130, 24) * 0.5, torch.randn(130)
    tensors = {"h": h, "w": w, "bias": b}
    wanted = [t.requires_grad_() for name, t in tensors.items() if name not in frozen]
    return tensors, wanted, torch.randint(0, 130, (20,))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_statistics_do_not_hang_on_the_number_of_rows(reduction, kernels, monkeypatch):
    """A compiled program for any number of rows has their shapes from the operation's fake."""
    monkeypatch.setattr(launch, "_COUNT_BLOCK", 16)
    options = (_linear_chunks.MEMORY, -100, 0.0, 1.0, 0.0, 0.0, reduction == "mean")
    for rows in (9, 40):
        h, w = torch.randn(rows, 4), torch.randn(9, 4)
        args = (h, w, None, torch.randint(0, 9, (rows,)), None, *options)
        found = linear._forward(*args)
        meta = [t.to("meta") if isinstance(t, torch.Tensor) else t for t in args]
        fake = linear._forward(*meta)
        assert [t.shape for t in found] == [t.shape for t in fake]
        assert [t.stride() for t in found] == [t.stride() for t in fake]
        assert found[3].shape == (2, 1)


def test_compiled_with_everything_dynamic(kernels):
    fn = torch.compile(ops.linear_cross_entropy, dynamic=True, backend="aot_eager", fullgraph=True)
    w = torch.randn(30, 8, requires_grad=True)
    for rows in (20, 33):
        h, target = torch.randn(rows, 8, requires_grad=True), torch.randint(0, 30, (rows,))
        loss = fn(h, w, target, reduction="none")
        theirs = F.cross_entropy(F.linear(h, w), target, reduction="none")
        torch.testing.assert_close(loss, theirs)
        (dw,), (truth,) = (torch.autograd.grad(own.sum(), w) for own in (loss, theirs))
        torch.testing.assert_close(dw, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_changes_nothing(reduction, way):
    tensors, wanted, target = draw()
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = ops.linear_cross_entropy(**tensors, target=target, reduction=reduction).sum()
            grads = torch.autograd.grad(loss, wanted)
        results.append((loss, *grads))
    if way == "kernels":
        assert all(map(torch.equal, *results))
    else:
        assert torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("frozen", [("w",), ("h", "bias"), ("w", "bias"), ("bias",)])
def test_frozen_parts(frozen, reduction, chunks, kernels, monkeypatch):
    monkeypatch.setattr(_linear_chunks, "LEAST_ROWS", 10)
    tensors, wanted, target = draw(*frozen)
    options = {"reduction": reduction, "memory": 1 if chunks == 2 else _linear_chunks.MEMORY}
    products = []
    for name in ("mm", "addmm"):
        own = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, f=own, **k: (products.append(f), f(*a, **k))[1])
    loss = ops.linear_cross_entropy(**tensors, target=target, **options).sum()
    grads = torch.autograd.grad(loss, wanted, retain_graph=True)
    again = 2 if reduction == "none" else 1
    own_mm = chunks if "h" not in frozen else 0
    own_mm += 1 if "w" not in frozen and chunks == 1 else 0  # else in place, by a method
    assert len(products) == chunks * again + own_mm
    z = F.linear(tensors["h"], tensors["w"], tensors["bias"])
    theirs = F.cross_entropy(z, target, reduction=reduction).sum()
    truth = torch.autograd.grad(theirs, wanted, create_graph=True)
    second = torch.autograd.grad(loss, wanted, create_graph=True)
    for mine, other, reference in zip(grads, second, truth, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(other, reference, rtol=1e-4, atol=1e-6)


# --- functorch ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_batched_gradients(reduction, kernels, monkeypatch):
    monkeypatch.setattr(_rows, "launch_applies", lambda x: True)
    x, w = torch.randn(3, 30, requires_grad=True), torch.randn(30, 30, requires_grad=True)
    target = torch.tensor([1, -100, 3])
    functions = {
        "index": lambda: ops.cross_entropy(x, target, reduction=reduction),
        "linear": lambda: ops.linear_cross_entropy(x, w, target, reduction=reduction),
    }
    for fn in functions.values():
        g = torch.randn(4, *fn().shape)
        (found,) = torch.autograd.grad(fn(), x, g, is_grads_batched=True)
        each = [torch.autograd.grad(fn(), x, own, retain_graph=True)[0] for own in g]
        torch.testing.assert_close(found, torch.stack(each))


def test_transforms(kernels):
    x, target = torch.randn(2, 3, 12), torch.tensor([1, -100, 3])
    w, entries = torch.randn(12, 12), (torch.tensor([[1], [2], [3]]), torch.zeros(3, 1))
    pairs = [
        (lambda x: ops.cross_entropy(x, target), lambda x: F.cross_entropy(x, target)),
        (
            lambda x: ops.linear_cross_entropy(x, w, target),
            lambda x: F.cross_entropy(F.linear(x, w), target),
        ),
        (
            lambda x: ops.sparse_distillation_loss(x, *entries),
            lambda x: F.cross_entropy(x, entries[0][:, 0]),
        ),
        (lambda x: ops.softmax(x).square().sum(), lambda x: x.softmax(-1).square().sum()),
    ]
    for ours, theirs in pairs:
        truth = torch.func.vmap(torch.func.grad(theirs))(x)
        torch.testing.assert_close(torch.func.vmap(torch.func.grad(ours))(x), truth)
        truth = torch.func.hessian(theirs)(x[0])
        torch.testing.assert_close(torch.func.hessian(ours)(x[0]), truth)


# --- cards ----------------------------------------------------------------------------------------


def test_kernels_are_launched_on_the_card_of_their_rows(kernels, monkeypatch):
    current = []

    @contextlib.contextmanager
    def beside(x):
        current.append(x.shape)
        yield
        current.pop()

    for module, names in (
        (_rows, ("_forward", "_forward_backward")),
        (linear, ("_forward", "_with_gradient")),
        (_softmax, ("_forward",)),
    ):
        monkeypatch.setattr(module, "beside", beside, raising=False)
        for name in names:
            own = getattr(module, name)
            monkeypatch.setattr(
                module, name, lambda *a, f=own: (launched.append([*current]), f(*a))[1]
            )
    launched: list[list[torch.Size]] = []
    x, target = torch.randn(3, 12), torch.tensor([1, 2, 3])
    w = torch.randn(12, 12)
    for grad in (False, True):
        own = x.clone().requires_grad_(grad)
        ops.cross_entropy(own, target)
        ops.linear_cross_entropy(own, w, target)
        ops.softmax(own)
    assert launched == [[x.shape]] * 6 and not current


def test_the_card_of_rows():
    class OnCard:
        is_cuda, device = True, torch.device("cuda", 1)

    assert isinstance(_rows.beside(torch.zeros(1)), contextlib.nullcontext)
    assert _rows.beside(OnCard()).idx == 1


# --- no rows, no columns --------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_rows(reduction, way):
    x, none = torch.randn(0, 12), torch.zeros(0, dtype=torch.int64)
    w = torch.randn(12, 12, requires_grad=True)
    for grad in (True, False):
        own = x.clone().requires_grad_(grad)
        found = [
            ops.cross_entropy(own, none, reduction=reduction),
            ops.cross_entropy(own, own.detach(), reduction=reduction),
            ops.cross_entropy(own, none, reduction=reduction, return_lse=True)[0],
            ops.sparse_distillation_loss(
                own, none[:, None].expand(0, 3), torch.zeros(0, 3), reduction=reduction
            ),
            ops.linear_cross_entropy(own, w, none, reduction=reduction),
        ]
        expected = F.cross_entropy(own, none, reduction=reduction)
        for loss in found:
            torch.testing.assert_close(loss, expected, equal_nan=True)
        if grad:
            (dx,) = torch.autograd.grad(found[0].sum(), own)
            assert dx.shape == x.shape


def test_a_linear_layer_without_inputs(way):
    target = torch.tensor([1, 2, 3])
    h, w = torch.empty(3, 0, requires_grad=True), torch.empty(12, 0, requires_grad=True)
    loss = ops.linear_cross_entropy(h, w, target)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(12)) and w.grad.shape == (12, 0)


# --- what does not fit ----------------------------------------------------------------------------


def test_gradients_that_would_be_missing():
    x, target, ids = torch.randn(3, 5), torch.tensor([1, 2, 3]), torch.tensor([[1], [2], [3]])
    q, weight, logs = torch.rand(3, 5), torch.rand(5), torch.zeros(3, 1)
    for tensor in (q, weight, logs):
        tensor.requires_grad_()
    calls = [
        lambda: ops.cross_entropy(x, q),
        lambda: ops.cross_entropy(x, target, weight),
        lambda: ops.linear_cross_entropy(x, torch.randn(5, 5), target, weight=weight),
        lambda: ops.sparse_distillation_loss(x, ids, logs),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="expected without a gradient"):
            call()
        with torch.no_grad():
            assert call().isfinite()


def test_options_that_do_not_fit():
    x, q, ids = torch.randn(3, 5), torch.rand(3, 5), torch.tensor([[1], [2], [3]])
    with pytest.raises(ValueError, match="ignore_index is expected to be negative"):
        ops.cross_entropy(x, q, ignore_index=0)
    bad = {"softcap": math.nan, "scale": INF, "target_logprob": math.nan}
    for name, value in bad.items():
        with pytest.raises(ValueError, match=f"{name} is expected"):
            ops.sparse_distillation_loss(x, ids, torch.zeros(3, 1), **{name: value})


def test_dtypes_that_do_not_fit():
    x, target = torch.randn(3, 5).to(torch.float8_e5m2), torch.tensor([1, 2, 3])
    calls = [
        lambda: ops.cross_entropy(x, target),
        lambda: ops.softmax(x),
        lambda: ops.linear_cross_entropy(x, x, target),
        lambda: ops.sparse_distillation_loss(x, target[:, None], torch.zeros(3, 1)),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="expected as fp16, bf16, fp32 or fp64, got"):
            call()
