"""What the ranks of test_vocab_parallel.py check of DTensors, and of compiled programs."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from vocab_parallel_checks import OPTIONS, SIZES, attempt, own, reference

from inductor_ext import ops
from inductor_ext.ops import _linear_shards, _shards


def dtensor(rank, world, classes, replicated):
    mesh = dist.init_device_mesh("cpu", (world,))
    x = torch.randn(6, classes) * 3
    target, weight = torch.randint(0, classes, (6,)), torch.rand(classes)
    target[1] = -100
    spread = [Replicate() if replicated else Shard(1)]
    for options in ({}, {"reduction": "none"}, OPTIONS["everything"]):
        for split in (None, Replicate(), Shard(0)):
            if split is Shard(0) and replicated:
                continue
            sharded = distribute_tensor(x, mesh, spread).requires_grad_()
            whole = weight if split is None else distribute_tensor(weight, mesh, [split])
            rows = target if split is None else distribute_tensor(target, mesh, [Replicate()])
            if replicated and split is not None:
                whole = distribute_tensor(weight, mesh, [Replicate()])
            loss = ops.cross_entropy(sharded, rows, whole, **options)
            assert loss.placements == (Replicate(),) and loss.device_mesh == mesh
            # Not by .grad, for which torch 2.11 replicates what to_local gives of uneven shards.
            (found,) = torch.autograd.grad(loss.sum(), sharded)
            assert found.placements == tuple(spread)
            truth, dx = reference(torch.float64, x, target, weight, **options)
            torch.testing.assert_close(loss.full_tensor().double(), truth, rtol=1e-5, atol=1e-6)
            found = found.full_tensor().double()
            torch.testing.assert_close(found, dx, rtol=1e-5, atol=1e-6)
    loss, lse = ops.cross_entropy(sharded, target, return_lse=True)
    assert lse.placements == (Replicate(),) and lse.shape == (6,)


def dtensor_linear(rank, world, classes, replicated):
    mesh = dist.init_device_mesh("cpu", (world,))
    whole = [torch.randn(6, 8), torch.randn(classes, 8), torch.randn(classes)]
    target = torch.randint(0, classes, (6,))
    wide = [t.double().requires_grad_() for t in whole]
    truth = F.cross_entropy(F.linear(*wide), target)
    truths = torch.autograd.grad(truth, wide)
    spread = [Replicate() if replicated else Shard(0)]
    for plain in (True, False):
        h = whole[0].clone() if plain else distribute_tensor(whole[0], mesh, [Replicate()])
        tensors = [h, *(distribute_tensor(t, mesh, spread) for t in whole[1:])]
        h, w, b = (t.requires_grad_() for t in tensors)
        loss = ops.linear_cross_entropy(h, w, target, b)
        dh, dw, db = torch.autograd.grad(loss, tensors)
        torch.testing.assert_close(loss.full_tensor().double(), truth, rtol=1e-6, atol=0)
        assert dw.placements == db.placements == tuple(spread)
        assert plain or dh.placements == (Replicate(),)
        found = [dh if plain else dh.full_tensor(), dw.full_tensor(), db.full_tensor()]
        for mine, theirs in zip(found, truths, strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-6)


def dtensor_error(rank, world, which):
    mesh = dist.init_device_mesh("cpu", (world,))
    x, target = torch.randn(8, 12), torch.arange(8)
    sharded = distribute_tensor(x, mesh, [Shard(1)])
    if which == "rows":
        return attempt(lambda: ops.cross_entropy(distribute_tensor(x, mesh, [Shard(0)]), target))
    if which == "group":
        return attempt(lambda: ops.cross_entropy(sharded, target, group=dist.group.WORLD))
    if which == "target":
        rows = distribute_tensor(target, mesh, [Shard(0)])
        return attempt(lambda: ops.cross_entropy(sharded, rows))
    if which == "plain logits":
        rows = distribute_tensor(target, mesh, [Replicate()])
        return attempt(lambda: ops.cross_entropy(x, rows))
    if which == "plain w":
        h = distribute_tensor(x, mesh, [Replicate()])
        return attempt(lambda: ops.linear_cross_entropy(h, torch.randn(9, 12), target))
    if which == "bias":
        w = distribute_tensor(torch.randn(10, 12), mesh, [Shard(0)])
        bias = torch.randn(10, requires_grad=True)
        return attempt(lambda: ops.linear_cross_entropy(x, w, target, bias))
    mesh = dist.init_device_mesh("cpu", (2, world // 2))
    sharded = distribute_tensor(x, mesh, [Shard(0), Shard(1)])
    return attempt(lambda: ops.cross_entropy(sharded, target))


# --- torch.compile --------------------------------------------------------------------------------


def compiled(rank, world):
    """The same numbers as one graph, also of another number of rows."""
    from torch._dynamo.testing import CompileCounterWithBackend

    sizes = SIZES[world]["unequal"]
    classes, group = sum(sizes), dist.group.WORLD
    own_w = own(torch.randn(classes, classes), sizes, rank, 0)
    mesh = dist.init_device_mesh("cpu", (world,))

    def rows(x, target):
        return ops.cross_entropy(x, target, group=group, reduction="none", label_smoothing=0.1)

    def total(x, target):
        return ops.cross_entropy(x * 2, target, group=group) * 3

    def linear(x, target):
        return ops.linear_cross_entropy(x * 2, own_w, target, group=group) * 3

    def sharded(x, target):
        return ops.cross_entropy(x * 2, target) * 3

    x, target = own(torch.randn(6, classes), sizes, rank).requires_grad_(), torch.arange(6)
    h, options = torch.randn(6, classes, requires_grad=True), (-100, 0.1, 1.0, 0.0, 1e-3, True)
    place = (group.group_name, -1, -1)
    torch.library.opcheck(_shards._forward, (x, target, None, *place, *options))
    args = (h, own_w, None, target, None, [True, False, False], 10**9, *place, *options)
    for op in (_linear_shards._forward, _linear_shards._with_gradient):
        torch.library.opcheck(op, args)

    # Inductor has no kernel to write of the rows alone, which saves a C++ compiler's time.
    for fn in (rows, total, linear, sharded):
        counter = CompileCounterWithBackend("inductor" if fn is rows else "aot_eager")
        program = torch.compile(fn, fullgraph=True, dynamic=True, backend=counter)
        frames = []
        for number in (6, 9):
            x, target = torch.randn(number, classes), torch.randint(0, classes, (number,))
            mine = {linear: x.clone(), sharded: distribute_tensor(x, mesh, [Shard(1)])}
            mine = mine.get(fn, own(x, sizes, rank)).requires_grad_()
            expected, loss = fn(mine, target), program(mine, target)
            (dx,) = torch.autograd.grad(expected.sum(), mine)
            (found,) = torch.autograd.grad(loss.sum(), mine)
            if fn is sharded:
                loss, found, expected, dx = (t.full_tensor() for t in (loss, found, expected, dx))
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(found, dx)
            frames.append(counter.frame_count)
        assert frames[0] == frames[1], f"{fn.__name__}: {frames}"
