"""Losses of several gathered entries of a row: their gradient is written once, without zeros."""

import math
import re

import pytest
import torch
import torch.nn.functional as F

FP32 = torch.float32
V, K = 1283, 5


def kl(x, ids, logprobs):
    student = F.log_softmax(x, -1).gather(-1, ids)
    return F.kl_div(student, logprobs, log_target=True, reduction="batchmean")


def tempered(x, ids, logprobs):
    student = F.log_softmax(30 * torch.tanh(x.float() / 60), -1).gather(-1, ids)
    return (logprobs.exp() * (logprobs - student)).sum(-1)


def beside_targets(x, ids, logprobs):
    x = x.float()
    student = F.log_softmax(x, -1).gather(-1, ids)
    return F.cross_entropy(x, ids[:, 0]) - 0.5 * (logprobs.exp() * student).sum(-1).mean()


def of_masked_rows(x, ids, logprobs):
    student = F.log_softmax(x.float(), -1).gather(-1, ids)
    losses = -(logprobs.exp() * student).sum(-1)
    return losses.masked_fill(ids[..., 0] % 2 == 0, 0.0).sum() / 3


def drawn(*rows, dtype=torch.bfloat16, entries=K):
    ids = torch.randint(0, V, (*rows, entries))
    ids[..., 1] = ids[..., 0]  # what is there twice adds up
    logprobs = torch.randn(*rows, entries).log_softmax(-1)
    return [torch.randn(*rows, V).mul(2).to(dtype), ids, logprobs]


def placed(code):
    return [d.fired for d in code.decisions if d.chosen == "entries placed"]


@pytest.mark.parametrize(
    ("loss", "inputs"),
    [(kl, drawn(4)), (kl, drawn(3, dtype=FP32)), (kl, drawn(2, dtype=torch.float16)),
     (tempered, drawn(2, 3)), (beside_targets, drawn(4)), (of_masked_rows, drawn(2, 2))],
)  # fmt: skip
def test_numbers(loss, inputs, judged):
    code = judged(loss, inputs)
    assert placed(code) == [True]
    assert "tl.atomic_add(" not in code.backward
    rows = math.prod(inputs[0].shape[:-1])
    large = re.findall(r"empty_strided_cuda\(\(([\d, ]+)\)", code.backward)
    sizes = [math.prod(map(int, filter(None, text.replace(" ", "").split(",")))) for text in large]
    assert sum(size >= rows * V for size in sizes) == 1  # the gradient itself


def test_symbolic_number_of_rows(judged):
    dynamic = {i: {0: None} for i in range(3)}
    code = judged(beside_targets, drawn(3), run=drawn(7), dynamic=dynamic)
    assert placed(code) == [True] and code.frames == 1


def of_two_lists(x, ids, logprobs):
    p = F.log_softmax(x, -1)
    return p.gather(-1, ids).square().sum() + p.gather(-1, ids + 1 - ids // (V - 1)).sum()


class _Scaled(torch.autograd.Function):
    """The gradient gets a part of x, by a keyword."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.add(grad, *ctx.saved_tensors, alpha=0.01) * 2


@pytest.mark.parametrize("twice", [False, True])
def test_keywords_behind_the_entries(twice, judged):
    def loss(x, ids, logprobs):
        x = _Scaled.apply(x)
        return kl(_Scaled.apply(x) if twice else x, ids, logprobs)

    assert placed(judged(loss, drawn(4, dtype=FP32))) == [True]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_scatters_of_other_numbers_are_left(dtype, judged):
    def counted(x, ids, logprobs):
        given = (1 << 24) + torch.ones_like(ids, dtype=dtype)
        counts = torch.zeros(x.shape, dtype=dtype, device=x.device).scatter_add(-1, ids, given)
        return (x.logsumexp(-1) + ((counts + 1).sum(-1) % 1000).to(x.dtype)).sum()

    assert not placed(judged(counted, drawn(2, dtype=FP32)))


@pytest.mark.parametrize(
    ("loss", "inputs"),
    [(kl, drawn(2, dtype=FP32, entries=129)), (of_two_lists, drawn(2, dtype=FP32))],
)
def test_left(loss, inputs, judged):
    assert not placed(judged(loss, inputs))
