"""Values of which a part is written to, through a view, before they are used."""

import pytest
import torch
from edits import edited
from spellings import INF, arguments


def scores(q, k):
    return q @ k.mT * 0.125


def a_copy_of_keys(q, k, v):
    keys = k.clone()
    keys[..., 8:].neg_()
    return scores(q, keys).softmax(-1) @ v


def repeated_keys(q, k, v):
    keys = k.repeat(1, 2, 1, 1)
    keys[:, :3] *= 2
    return scores(q.repeat(1, 2, 1, 1), keys).softmax(-1) @ v.repeat(1, 2, 1, 1)


def converted_keys(q, k, v):
    q, k, v = (x.bfloat16() for x in (q, k, v))
    keys = k.float()
    keys[..., :32] = 0
    return scores(q.float(), keys).softmax(-1).bfloat16() @ v


def weights(q, k, v):
    found = scores(q, k).softmax(-1)
    found[..., 0] = 0
    return found @ v


def a_copy_of_weights(q, k, v):
    found = scores(q, k).softmax(-1).clone()
    found[..., 0] = 0
    return found @ v


def exponentials(q, k, v):
    found = scores(q, k)
    found = (found - found.amax(-1, keepdim=True)).exp()
    found[..., 0] = 0
    return (found / found.sum(-1, keepdim=True)) @ v


def one_of_two_products(q, k, v):
    found, other = q @ k.mT, (q + 1) @ k.mT
    found[..., 0] = 0
    return ((found + other) * 0.125).softmax(-1) @ v


def summed_weights(q, k, v):
    found = scores(q, k).softmax(-1)
    copied = found.clone()
    copied[..., 0] = 0
    return torch.cat([found @ v, copied.sum(2, keepdim=True)[..., : v.shape[-1]]], 2)


def beginnings_of_documents(q, k, v):
    begins = torch.zeros(q.shape[2], dtype=torch.int64, device=q.device)
    begins[10] = 1
    ids = begins.cumsum(0)
    return scores(q, k).masked_fill(ids[:, None] != ids[None, :], -INF).softmax(-1) @ v


WRITTEN = [
    a_copy_of_keys, repeated_keys, converted_keys, weights, a_copy_of_weights, exponentials,
    one_of_two_products, summed_weights, beginnings_of_documents,
]  # fmt: skip


@pytest.mark.parametrize("fn", WRITTEN, ids=lambda fn: fn.__name__)
def test_what_is_written_counts(fn, card_here):
    args = [a.detach() for a in arguments(("BHSD",) * 3, torch.float32, tokens=80)]
    out, _, _ = edited(fn, args)
    torch.testing.assert_close(out, fn(*args))
