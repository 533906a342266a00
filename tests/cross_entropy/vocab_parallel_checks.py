"""What the ranks of test_vocab_parallel.py check: each a function of (rank, world, *args)."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import formula

from inductor_ext import measure, ops

SIZES = {
    1: {"equal": (96,), "unequal": (95,), "empty": (97,), "large": (32000,)},
    2: {"equal": (48, 48), "unequal": (5, 90), "empty": (97, 0), "large": (20000, 12001)},
    4: {
        "equal": (24, 24, 24, 24),
        "unequal": (1, 60, 7, 29),
        "empty": (0, 50, 0, 47),
        "large": (8000, 8001, 9000, 7000),
    },
}
OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss and scale": {"z_loss": 1e-2, "scale": 0.7},
    "everything": {"softcap": 8.0, "scale": 1.5, "z_loss": 1e-3, "label_smoothing": 0.1},
}


def own(whole, sizes, rank, dim=-1):
    """This rank's shard of a dimension."""
    return whole.split(sizes, dim)[rank].detach().clone()


def everyones(tensor):
    """The tensors of all ranks."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, tensor.cpu())
    return [other.to(tensor.device) for other in found]


def same_everywhere(tensor):
    bits = tensor.reshape(-1).contiguous().view(torch.uint8)  # NaN is NaN
    assert all(torch.equal(bits, other) for other in everyones(bits)), "ranks differ"


def close(name, got, truth, baseline):
    verdict = measure.check(got, truth, baseline)
    assert verdict.ok, f"{name}: {verdict.reason}"


def parallel(x, target, weight, sizes, rank, g=None, **options):
    """(loss, whole dx) over the world, the loss the same everywhere."""
    mine = own(x, sizes, rank).requires_grad_()
    weight = None if weight is None else own(weight, sizes, rank)
    loss = ops.cross_entropy(mine, target, weight, group=dist.group.WORLD, **options)
    (dx,) = torch.autograd.grad(loss, mine, torch.ones_like(loss) if g is None else g)
    same_everywhere(loss.detach())
    assert dx.shape == mine.shape and dx.dtype == x.dtype
    return loss.detach(), torch.cat(everyones(dx), -1)


def reference(dtype, x, target, *args, g=None, **options):
    x = x.to(dtype).requires_grad_()
    loss = formula(x, target, *args, **options)
    g = torch.ones_like(loss) if g is None else g.to(loss.dtype)
    return loss.detach(), torch.autograd.grad(loss, x, g)[0]


def numbers(rank, world, split, option, rows=11):
    """Every reduction, dtype, weights or none, int32 and int64."""
    sizes, options = SIZES[world][split], OPTIONS[option]
    classes = sum(sizes)
    reductions = {"float32": ("mean", "none"), "bfloat16": ("mean", "sum"), "float64": ("none",),
                  "float16": ("mean",)}  # fmt: skip
    for kind, some in reductions.items():
        for reduction in some:
            dtype, weighted = getattr(torch, kind), kind in ("float32", "float16")
            x = (torch.randn(rows, classes) * 3).to(dtype)
            integer = torch.int32 if weighted else torch.int64
            target = torch.randint(0, classes, (rows,), dtype=integer)
            target[4] = target[7] = -100
            weight = torch.rand(classes) if weighted else None
            g = torch.randn(rows).to(dtype) if reduction == "none" else torch.tensor(1.5).to(dtype)
            args = (x, target, weight)
            every = {"g": g, "reduction": reduction, **options}
            found = parallel(*args, sizes, rank, **every)
            if dtype == torch.bfloat16:
                again = parallel(*args, sizes, rank, **every)
                assert all(map(torch.equal, found, again))
            truth = reference(torch.float64, *args, **every)
            eager = reference(dtype, *args, **every)
            for name, *pair in zip(("loss", "dx"), found, truth, eager, strict=True):
                close(f"{name} {dtype} {reduction}", *pair)


def with_lse(rank, world):
    """Also of images, whose classes are not the last dimension; and with the lse alone."""
    sizes = SIZES[world]["unequal"]
    x, target = torch.randn(3, sum(sizes), 2, 2) * 3, torch.randint(0, sum(sizes), (3, 2, 2))
    target[1, 0, 1] = -100
    wide = x.double().requires_grad_()
    lse = torch.where(target == -100, 0.0, wide.logsumexp(1))
    truth = torch.autograd.grad(F.cross_entropy(wide, target) + (lse**2).sum(), wide)[0]
    mine = own(x, sizes, rank, 1).requires_grad_()
    loss, found = ops.cross_entropy(mine, target, group=dist.group.WORLD, return_lse=True)
    same_everywhere(torch.stack([loss.detach().expand_as(found), found.detach()]))
    torch.testing.assert_close(found.double(), lse, rtol=1e-6, atol=1e-6)
    (dx,) = torch.autograd.grad(loss + (found**2).sum(), mine, retain_graph=True)
    torch.testing.assert_close(dx.double(), own(truth, sizes, rank, 1), rtol=1e-5, atol=1e-6)
    (dx,) = torch.autograd.grad(found.sum(), mine)
    p = torch.where((target == -100)[:, None], 0.0, wide.softmax(1)).detach()
    torch.testing.assert_close(dx.double(), own(p, sizes, rank, 1), rtol=1e-5, atol=1e-7)


def one_row(rank, world):
    """[C] logits, and C of 1."""
    sizes = SIZES[world]["unequal"]
    x, target = torch.randn(sum(sizes)), torch.tensor(3)
    loss, dx = parallel(x, target, None, sizes, rank)
    for found, truth in zip((loss, dx), reference(torch.float64, x, target), strict=True):
        torch.testing.assert_close(found.double(), truth, rtol=1e-6, atol=1e-7)
    loss, dx = parallel(x[:1], torch.tensor(0), None, (1,) + (0,) * (world - 1), rank)
    assert loss.item() == 0 and dx.item() == 0


def offsets(rank, world):
    sizes = (1, 2) + (0,) * (world - 2) if world > 1 else (3,)
    for column in range(3):
        x = torch.tensor([[2.0, -1.0, 0.5]])
        target = torch.tensor([column])
        for smoothing in (0.0, 0.1):
            options = {"label_smoothing": smoothing}
            expected = F.cross_entropy(x.double(), target, **options).item()
            for offset in (1e6, -1e6):
                loss, dx = parallel(x + offset, target, None, sizes, rank, **options)
                assert math.isclose(loss.item(), expected, rel_tol=1e-5), (loss, expected)
                assert abs(dx.sum()) < 1e-6
        loss, dx = parallel(torch.full((1, 3), 1e8), target, None, sizes, rank)
        assert math.isclose(loss.item(), math.log(3), rel_tol=1e-5)
        expected = [-2 / 3 if j == column else 1 / 3 for j in range(3)]
        torch.testing.assert_close(dx[0], torch.tensor(expected), rtol=1e-5, atol=0)


def confident(rank, world):
    """Wherever the target is."""
    sizes = SIZES[world]["unequal"]
    for column in (0, sizes[0] - 1, sum(sizes[:-1]), sum(sizes) - 1):
        for margin in (17.0, 40.0, 80.0):
            x = torch.zeros(1, sum(sizes))
            x[0, column] = margin
            loss, dx = parallel(x, torch.tensor([column]), None, sizes, rank)
            expected = math.log1p((sum(sizes) - 1) * math.exp(-margin))
            assert math.isclose(loss.item(), expected, rel_tol=1e-5)
            assert math.isclose(dx[0, column].item(), math.expm1(-expected), rel_tol=1e-5)
            other = dx[0, (column + 1) % sum(sizes)].item()
            assert math.isclose(other, math.exp(-margin - expected), rel_tol=1e-5)


def infinities(rank, world, smoothing):
    sizes = SIZES[world]["unequal"]
    classes = sum(sizes)
    cut = classes - sizes[-1]
    x = torch.randn(8, classes)
    x[0, ::3] = -math.inf  # columns
    x[1, :] = -math.inf  # a row
    x[2, 5] = -math.inf  # the target
    x[3, :] = -math.inf
    x[3, 5] = 2.0  # all but the target
    x[4, 7] = math.inf
    x[5, 5] = math.inf
    x[6, cut:] = -math.inf  # a shard without the target
    x[7, :cut] = -math.inf  # the others
    target = torch.tensor([5, 5, 5, 5, 5, 5, 5, cut])
    if smoothing:
        x, target = x[4:6], target[4:6]
    options = {"reduction": "none", "label_smoothing": smoothing}
    found = parallel(x, target, None, sizes, rank, **options)
    truth = reference(torch.float64, x, target, **options)
    for mine, theirs in zip(found, truth, strict=True):
        torch.testing.assert_close(mine.double(), theirs, equal_nan=True, rtol=1e-5, atol=1e-6)
    masked = torch.where(x == -math.inf, -1e9, x)[: None if smoothing else 1]
    target = target[: len(masked)]
    found = parallel(masked, target, None, sizes, rank, label_smoothing=0.1)
    eager = reference(torch.float32, masked, target, label_smoothing=0.1)
    truth = reference(torch.float64, masked, target, label_smoothing=0.1)
    for mine, theirs, base in zip(found, truth, eager, strict=True):
        if theirs.isfinite().all():
            close("a mask of -1e9", mine, theirs, base)


def ignored(rank, world):
    sizes = SIZES[world]["unequal"]
    classes = sum(sizes)
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0}):
        for reduction in ("mean", "sum", "none"):
            options = {**options, "reduction": reduction, "ignore_index": 2}
            x, target = torch.randn(5, classes), torch.tensor([3, 2, classes - 1, 2, 2])
            weight = torch.rand(classes)
            clean = parallel(x, target, weight, sizes, rank, **options)
            x[1], x[3], x[4, 7] = math.nan, math.inf, -math.inf
            found = parallel(x, target, weight, sizes, rank, **options)
            assert all(map(torch.equal, found, clean))
            assert (found[1][[1, 3, 4]] == 0).all() and (found[1][[0, 2]] != 0).all()
            nothing = torch.full((5,), 2)
            loss, dx = parallel(x, nothing, None, sizes, rank, **options)
            assert loss.isnan().all() if reduction == "mean" else (loss == 0).all()
            assert (dx == 0).all()
    loss, _ = parallel(torch.randn(3, classes), torch.tensor([1, 1, -100]), torch.zeros(classes),
                       sizes, rank)  # fmt: skip
    assert loss.isnan()
    for reduction in ("mean", "sum"):
        nothing = torch.zeros(0, dtype=torch.int64)
        loss, dx = parallel(torch.randn(0, classes), nothing, None, sizes, rank,
                            reduction=reduction)  # fmt: skip
        assert (loss.isnan() if reduction == "mean" else loss == 0) and dx.shape == (0, classes)


def linear(rank, world, split, dtype):
    """Loss, dh, dw, db; one chunk and several; with and without the gradient made early."""
    from inductor_ext.ops import _linear_chunks

    _linear_chunks.LEAST_ROWS = 8
    dtype, sizes = getattr(torch, dtype), SIZES[world][split]
    classes = sum(sizes)
    weight = torch.rand(classes)
    whole = [torch.randn(3, 9, 24), torch.randn(classes, 24) * 0.5, torch.randn(classes)]
    whole = [t.to(dtype) for t in whole]
    target = torch.randint(0, classes, (3, 9))
    target[0, 2] = -100
    for options in (
        {},
        {"memory": 1000},
        {"weight": weight, "reduction": "sum", **OPTIONS["everything"]},
        {"reduction": "none", "label_smoothing": 0.1, "memory": 1},
        {"reduction": "none", "weight": weight, "z_loss": 1e-2},
    ):
        g = torch.randn(3, 9) if options.get("reduction") == "none" else torch.tensor(2.0)
        g = g.to(dtype)
        own_options = dict(options)
        if "weight" in options:
            own_options["weight"] = own(weight, sizes, rank)

        def call(own_options=own_options, g=g):
            h = whole[0].clone().requires_grad_()
            w, b = (own(t, sizes, rank, 0).requires_grad_() for t in whole[1:])
            loss = ops.linear_cross_entropy(h, w, target, b, group=dist.group.WORLD, **own_options)
            dh, dw, db = torch.autograd.grad(loss, (h, w, b), g)
            same_everywhere(loss.detach())
            same_everywhere(dh)
            return loss.detach(), dh, torch.cat(everyones(dw)), torch.cat(everyones(db))

        found = call()
        assert all(map(torch.equal, found, call()))
        truth, eager = ([], [])
        options = {k: v for k, v in options.items() if k != "memory"}
        for results, precision in ((truth, torch.float64), (eager, dtype)):
            tensors = [t.to(precision).requires_grad_() for t in whole]
            z = F.linear(*tensors).flatten(0, 1)
            loss = formula(z, target.flatten(), **options)
            loss = loss.reshape(g.shape)
            results += [loss.detach(), *torch.autograd.grad(loss, tensors, g.to(precision))]
        for name, *pair in zip(("loss", "dh", "dw", "db"), found, truth, eager, strict=True):
            if dtype == torch.float32:
                error = (pair[0].double() - pair[1]).norm() / pair[1].norm()
                assert error < 1e-5, f"{name} {options}: {error}"
            else:
                close(f"{name} {options}", *pair)


def linear_parts(rank, world):
    """Frozen parts, lse, fp16, an output scale of its own, no gradient at all."""
    sizes = SIZES[world]["empty"]
    h, w, target = torch.randn(6, 8), torch.randn(sum(sizes), 8), torch.arange(6) * 7
    group = dist.group.WORLD
    truth = F.cross_entropy((h @ w.t()).double(), target)
    mine = own(w, sizes, rank, 0)
    with torch.no_grad():
        loss = ops.linear_cross_entropy(h, mine, target, group=group)
    torch.testing.assert_close(loss.double(), truth, rtol=1e-6, atol=0)
    only_h, only_w = h.clone().requires_grad_(), mine.clone().requires_grad_()
    (dh,) = torch.autograd.grad(ops.linear_cross_entropy(only_h, mine, target, group=group), only_h)
    (dw,) = torch.autograd.grad(ops.linear_cross_entropy(h, only_w, target, group=group), only_w)
    wide = [h.double().requires_grad_(), w.double().requires_grad_()]
    truths = torch.autograd.grad(F.cross_entropy(F.linear(*wide), target), wide)
    torch.testing.assert_close(dh.double(), truths[0], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(torch.cat(everyones(dw)).double(), truths[1], rtol=1e-5, atol=1e-7)
    half, other = h.half().requires_grad_(), mine.half().requires_grad_()
    loss, lse = ops.linear_cross_entropy(half, other, target, group=group, return_lse=True)
    (loss * 1024 + lse.sum()).backward()
    same_everywhere(half.grad)
    assert lse.shape == (6,) and half.grad.isfinite().all() and other.grad.isfinite().all()


def part_of_the_world(rank, world):
    """Two groups of two of four ranks, each with a loss of its own."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    x, target = torch.randn(2, 5, 30), torch.randint(0, 30, (2, 5))
    pair, place = rank % 2, rank // 2
    mine = own(x[pair], (11, 19), place).requires_grad_()
    loss = ops.cross_entropy(mine, target[pair], group=groups[pair])
    loss.backward()
    truth, dx = reference(torch.float64, x[pair], target[pair])
    torch.testing.assert_close(loss.double(), truth, rtol=1e-6, atol=0)
    dx = own(dx, (11, 19), place)
    torch.testing.assert_close(mine.grad.double(), dx, rtol=1e-5, atol=1e-7)
    try:
        ops.cross_entropy(mine, target[pair], group=groups[1 - pair])
    except TypeError as error:
        return str(error)


def attempt(call):
    try:
        return ["ok", repr(call())]
    except Exception as error:
        return [type(error).__name__, str(error)]


def error(rank, world, which):
    group = dist.group.WORLD
    x, target = torch.randn(5, 10, requires_grad=True), torch.arange(5)
    if which == "target":
        target[2] = 10 * world
    elif which == "negative":
        target[2] = -1
    elif which == "rows":
        x, target = x[: 4 + rank % 2], target[: 4 + rank % 2]
    elif which == "group":
        group = "tensor parallel"
    elif which == "probabilities":
        target = torch.rand(5, 10)
    elif which == "weight":
        return attempt(lambda: ops.cross_entropy(x, target, torch.rand(10 * world), group=group))
    elif which == "options":
        return attempt(lambda: ops.cross_entropy(x, target, scale=1.0 + rank, group=group))
    elif which == "create_graph":
        loss = ops.cross_entropy(x, target, group=group)
        return attempt(lambda: torch.autograd.grad(loss, x, create_graph=True))
    elif which == "create_graph of linear":
        loss = ops.linear_cross_entropy(x, torch.randn(7, 10), target, group=group)
        return attempt(lambda: torch.autograd.grad(loss, x, create_graph=True))
    elif which == "linear":
        h = torch.randn(5, 8, requires_grad=rank == 0)
        return attempt(lambda: ops.linear_cross_entropy(h, x[:, :8], target, group=group))
    elif which == "functorch":
        fn = torch.func.grad(lambda x: ops.cross_entropy(x, target, group=group))
        return attempt(lambda: fn(x.detach()))
    return attempt(lambda: ops.cross_entropy(x, target, group=group))


def different_targets(rank, world):
    """Not a number that looks like a loss."""
    x = torch.randn(4, 10)
    return ops.cross_entropy(x, torch.full((4,), 10 * rank), group=dist.group.WORLD).item()
