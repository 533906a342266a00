"""Attention as people write it: functions of q, k, v and what else they need.

``SPELLINGS`` maps a name to (function, shapes of its arguments). A shape is a tuple of letters and
numbers (B, H, G heads of keys, S tokens, D); "mask", "bool", "ids" and the like stand for tensors
that are no parameters.
"""

import math

import torch
import torch.nn.functional as F

INF = float("inf")


def positions(q, dim=-2):
    return torch.arange(q.shape[dim], device=q.device)


def repeated(x, n):
    b, heads, tokens, width = x.shape
    return x[:, :, None].expand(b, heads, n, tokens, width).reshape(b, heads * n, tokens, width)


def causal(q):
    i = positions(q)
    return i[None, :] > i[:, None]


# --- the families of the model library ------------------------------------------------------------


def grouped_with_mask(q, k, v, mask):
    k, v = repeated(k, q.shape[1] // k.shape[1]), repeated(v, q.shape[1] // v.shape[1])
    weights = torch.matmul(q, k.transpose(2, 3)) * 0.125
    weights = weights + mask[:, :, :, : k.shape[-2]]
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    weights = F.dropout(weights, p=0.0, training=False)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def with_mask(q, k, v, mask):
    weights = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    weights = torch.softmax(weights + mask, -1, torch.float32).to(q.dtype)
    return (weights @ v).transpose(1, 2).contiguous()


def in_its_own_dtype(q, k, v, mask):
    weights = F.softmax(torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.shape[-1]) + mask, dim=-1)
    return torch.matmul(weights, v).transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)


def position_bias(q, k, v, table, mask):
    scores = torch.matmul(q, k.transpose(3, 2))
    i = positions(q)
    distance = (i[None, :] - i[:, None]).clamp(-15, 15) + 15
    bias = F.embedding(distance, table).permute(2, 0, 1).unsqueeze(0)
    scores = scores + (bias + mask)
    return F.softmax(scores.float(), dim=-1).type_as(scores) @ v


def softcap(q, k, v, mask):
    k, v = repeated(k, q.shape[1] // k.shape[1]), repeated(v, q.shape[1] // v.shape[1])
    weights = torch.matmul(q, k.transpose(2, 3)) * 0.125
    weights = torch.tanh(weights / 5.0) * 5.0
    weights = weights + mask
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def sink_column(q, k, v, sink):
    weights = (q @ k.transpose(-1, -2) * 0.125).masked_fill(causal(q), -INF)
    column = sink.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    joined = torch.cat([weights, column], dim=-1)
    joined = joined - joined.max(dim=-1, keepdim=True).values
    return F.softmax(joined, dim=-1, dtype=joined.dtype)[..., :-1] @ v


def sink_in_front(q, k, v, sink):
    weights = q @ k.transpose(-1, -2) * 0.125
    column = sink.view(1, -1, 1, 1).expand(*weights.shape[:3], 1)
    weights = torch.softmax(torch.cat([column, weights], -1).float(), -1)[..., 1:].to(v.dtype)
    return weights @ v


def sink_by_sigmoid(q, k, v, sink):
    weights = (q @ k.transpose(-1, -2) * 0.125).masked_fill(causal(q), -INF)
    total = torch.logsumexp(weights.float(), dim=-1, keepdim=True)
    out = F.softmax(weights, dim=-1, dtype=torch.float32).to(v.dtype) @ v
    return out * torch.sigmoid(total - sink.view(1, -1, 1, 1)).to(v.dtype)


def upcast(q, k, v):
    weights = torch.matmul(q.to(torch.float32), k.to(torch.float32).transpose(-1, -2))
    n = q.shape[-2]
    kept = torch.tril(torch.ones((n, n), dtype=torch.bool, device=q.device)).view(1, 1, n, n)
    least = torch.full([], torch.finfo(weights.dtype).min, dtype=weights.dtype, device=q.device)
    weights = torch.where(kept, weights, least) / math.sqrt(q.shape[-1])
    return F.softmax(weights, dim=-1).to(v.dtype) @ v


# --- masks ----------------------------------------------------------------------------------------


def plain(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v


def scaled_before(q, k, v):
    q = q * (1.0 / math.sqrt(q.shape[-1]))
    return torch.softmax((q @ k.mT).masked_fill(causal(q), -INF), -1) @ v


def scaled_by_roots(q, k, v):
    root = q.shape[-1] ** -0.25
    return F.softmax((q * root) @ (k * root).transpose(-2, -1) + 0.0, -1) @ v


def triangle(q, k, v):
    n = q.shape[-2]
    mask = torch.triu(torch.full((n, n), -INF, device=q.device, dtype=q.dtype), diagonal=1)
    return torch.softmax(q @ k.mT * 0.125 + mask, -1) @ v


def triangle_in_place(q, k, v):
    n = q.shape[-2]
    mask = torch.full((n, n), -INF, device=q.device).triu_(1)
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores *= 0.125
    scores += mask.to(scores.dtype)
    return scores.softmax(dim=-1).type_as(q) @ v


def filled_in_place(q, k, v):
    scores = q @ k.transpose(-1, -2)
    scores.div_(8.0)
    scores.masked_fill_(causal(q), -INF)
    return scores.softmax(-1) @ v


def buffer(q, k, v, ones):
    n = q.shape[-2]
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    scores = scores.masked_fill(ones[:, :, :n, :n] == 0, -INF)
    return F.softmax(scores, dim=-1) @ v


def window(q, k, v):
    i = positions(q)
    distance = i[:, None] - i[None, :]
    scores = torch.where((distance >= 0) & (distance < 16), q @ k.mT * 0.125, -INF)
    return scores.softmax(-1) @ v


def sinks_and_window(q, k, v):
    i, j = positions(q).view(1, 1, -1, 1), positions(q).view(1, 1, 1, -1)
    kept = (j <= i) & ((i - j < 16) | (j < 4))
    return (q @ k.mT * 0.125).masked_fill(~kept, -INF).softmax(-1) @ v


def prefix(q, k, v):
    i, j = positions(q)[:, None], positions(q)[None]
    kept = torch.logical_or(j < 7, j <= i)
    mask = torch.zeros(kept.shape, dtype=q.dtype, device=q.device)
    return (q @ k.mT * 0.125 + mask.masked_fill(kept.logical_not(), -INF)).softmax(-1) @ v


def documents(q, k, v, ids):
    kept = (ids[:, None, :, None] == ids[:, None, None, :]) & ~causal(q)
    return (q @ k.mT * 0.125).masked_fill(~kept, -INF).softmax(-1) @ v


def padding(q, k, v, ones):
    mask = (1.0 - ones[:, None, None, :].to(q.dtype)) * torch.finfo(q.dtype).min
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1]) + mask
    context = torch.matmul(torch.nn.Softmax(dim=-1)(scores), v).permute(0, 2, 1, 3).contiguous()
    return context.view(*context.shape[:2], -1)


def padding_and_causal(q, k, v, ones):
    i = positions(q)
    kept = (i[None, None, None, :] <= i[None, None, :, None]) & (ones[:, None, None, :] > 0)
    least = torch.finfo(q.dtype).min
    mask = torch.where(kept, torch.zeros((), dtype=q.dtype, device=q.device), least)
    return torch.softmax(q @ k.mT * 0.125 + mask.to(q.dtype), -1, torch.float32).to(q.dtype) @ v


def booleans(q, k, v, mask):
    return torch.where(mask, q @ k.mT * 0.125, -INF).softmax(-1) @ v


def mask_first(q, k, v, mask):
    return (mask + (q @ k.mT) * 0.125).softmax(-1) @ v


def minus_ten_thousand(q, k, v):
    n = q.shape[-2]
    kept = torch.tril(torch.ones(n, n, dtype=q.dtype, device=q.device))
    return ((q @ k.mT) * 0.125 * kept - 1e4 * (1 - kept)).softmax(-1) @ v


def cache(q, k, v):
    new, all_ = q.shape[-2], k.shape[-2]
    at = torch.arange(all_ - new, all_, device=q.device)
    kept = torch.arange(all_, device=q.device)[None, :] <= at[:, None]
    return torch.where(kept, q @ k.mT * 0.125, torch.finfo(q.dtype).min).softmax(-1) @ v


# --- biases ---------------------------------------------------------------------------------------


def alibi(q, k, v):
    i, heads = positions(q), q.shape[1]
    slopes = 2.0 ** -(torch.arange(1, heads + 1, device=q.device) * 8 / heads)
    scores = q @ k.mT * 0.125 + slopes.view(heads, 1, 1) * (i[None, :] - i[:, None])
    return scores.masked_fill(causal(q), -INF).softmax(-1).to(v.dtype) @ v


def added_by_the_product(q, k, v, alibi):
    b, heads, n, d = q.shape
    scores = torch.baddbmm(
        alibi, q.reshape(b * heads, n, d), k.reshape(b * heads, n, d).transpose(1, 2), beta=1.0,
        alpha=0.125,
    )  # fmt: skip
    scores = scores.view(b, heads, n, n).masked_fill(causal(q), torch.finfo(q.dtype).min)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    out = torch.bmm(weights.view(b * heads, n, n), v.reshape(b * heads, n, d))
    return out.view(b, heads, n, d).permute(0, 2, 1, 3).reshape(b, n, heads * d)


def learned(q, k, v, bias):
    return torch.softmax(q @ k.mT * 0.125 + bias, -1) @ v


def per_slot(q, k, v, bias):
    n = q.shape[1] // k.shape[1]
    scores = q @ repeated(k, n).mT * 0.125 + bias.repeat_interleave(n, 1)[:, :, None, :]
    return scores.softmax(-1) @ repeated(v, n)


# --- layouts --------------------------------------------------------------------------------------


def tokens_first(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = (q @ k.transpose(-1, -2) * 0.125).masked_fill(causal(q), -INF)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def einsum(q, k, v):
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.125
    scores = scores.masked_fill(causal(q.transpose(1, 2)), -INF)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def three_dimensions(q, k, v):
    scores = torch.bmm(q, k.transpose(1, 2)) * 0.125
    return torch.bmm(scores.masked_fill(causal(q), -INF).softmax(2), v)


def turned(q, k, v):
    """S^T = K Q^T and O^T = V^T P^T."""
    scores = k @ q.transpose(-1, -2) * 0.125
    weights = scores.masked_fill(causal(q).mT, -INF).softmax(-2)
    return (v.transpose(-1, -2) @ weights).transpose(-1, -2)


def grouped_queries(q, k, v):
    b, heads, n, d = q.shape
    q = q.view(b, k.shape[1], -1, n, d)
    scores = torch.einsum("bhgqd,bhkd->bhgqk", q, k) * 0.125
    i = positions(q)
    weights = scores.masked_fill(i[None, :] > i[:, None], -INF).softmax(-1)
    return torch.einsum("bhgqk,bhkd->bhgqd", weights, v).reshape(b, heads, n, d)


def interleaved(q, k, v):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return (q @ k.mT * 0.125).masked_fill(causal(q), -INF).softmax(-1) @ v


def one_head_of_keys(q, k, v):
    b, heads, n, d = q.shape
    scores = torch.bmm(q.reshape(b, heads * n, d), k[:, 0].transpose(1, 2)) * 0.125
    scores = scores.view(b, heads, n, n).masked_fill(causal(q), -INF)
    out = torch.bmm(scores.softmax(-1).view(b, heads * n, n), v[:, 0])
    return out.view(b, heads, n, d)


def packed(x, weight):
    b, n, width = x.shape
    q, k, v = (y.view(b, n, 8, -1).transpose(1, 2) for y in (x @ weight).split(width, dim=2))
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    out = F.softmax(scores.masked_fill(causal(q), -INF), dim=-1) @ v
    return out.transpose(1, 2).contiguous().view(b, n, width)


def two_products(q, k, v, q_rope, k_rope):
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
    scores = (scores + torch.einsum("bhqd,bkd->bhqk", q_rope, k_rope)) * 0.1
    weights = scores.masked_fill(causal(q), -INF).softmax(-1, dtype=torch.float32).type_as(q)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def not_a_transpose(q, k, v):
    """Of sizes that all agree: the product is along the tokens of k."""
    return torch.softmax(q @ k.permute(0, 2, 3, 1) * 0.125, -1) @ v


def one_query(q, k, v, mask):
    return grouped_with_mask(q, k, v, mask)


def assembled(q, k, v):
    """Keys that are written half by half."""
    keys = k.new_empty(k.shape)
    keys[..., :32] = k[..., :32]
    keys[..., 32:] = k[..., 32:]
    return (q @ keys.transpose(2, 3) * 0.125).softmax(-1) @ v


def gathered_positions(q, k, v):
    """Masks by indices, as libraries make them, with documents that are all one."""
    b, n = q.shape[0], q.shape[2]
    at = (torch.arange(n, device=q.device) + 0).unsqueeze(0).expand(b, -1)
    document = (torch.diff(at, prepend=at[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    batch = torch.arange(b, device=q.device)[:, None, None, None]
    row = torch.arange(n, device=q.device)[None, None, :, None]
    column = torch.arange(n, device=q.device)[None, None, None, :]
    kept = at[batch, column] <= at[batch, row]
    kept = kept & (document[batch, row] == document[batch, column])
    return torch.where(kept, q @ k.mT * 0.125, -INF).softmax(-1) @ v


# --- softmaxes ------------------------------------------------------------------------------------


def by_hand(q, k, v):
    scores = (q @ k.transpose(-1, -2)).float() * 0.125
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (weights / weights.sum(-1, keepdim=True)).to(v.dtype) @ v


def by_logarithm(q, k, v):
    scores = (q @ k.transpose(-1, -2)).float() * 0.125
    return torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True)).to(v.dtype) @ v


def by_log_softmax(q, k, v):
    return F.log_softmax(q @ k.mT * 0.125, -1).exp() @ v


def shifted(q, k, v):
    scores = q @ k.mT * 0.125
    return (scores - torch.max(scores, -1, keepdim=True)[0].detach()).softmax(-1) @ v


def wide_values(q, k, v):
    return (q @ k.mT * 0.125).softmax(-1).float() @ v.float()


# --- torch's own ----------------------------------------------------------------------------------


def call_with_mask(q, k, v, mask):
    k, v = repeated(k, q.shape[1] // k.shape[1]), repeated(v, q.shape[1] // v.shape[1])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def call_with_positions(q, k, v):
    i = positions(q)
    kept = (i[None, :] <= i[:, None]) & (i[:, None] - i[None, :] < 16)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=kept, enable_gqa=True, scale=0.2)


def call_of_repeated(q, k, v):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


MHA, GQA = ("BHSD",) * 3, ("BHSD", "BGSD", "BGSD")
FIRST = ("BSHD",) * 3

SPELLINGS = {
    "grouped with mask": (grouped_with_mask, (*GQA, "mask")),
    "with mask": (with_mask, (*MHA, "mask")),
    "in its own dtype": (in_its_own_dtype, (*MHA, "mask")),
    "position bias": (position_bias, (*MHA, (31, "H"), "mask")),
    "softcap": (softcap, (*GQA, "mask")),
    "sink column": (sink_column, (*MHA, "H")),
    "sink in front": (sink_in_front, (*MHA, "H")),
    "sink by sigmoid": (sink_by_sigmoid, (*MHA, "H")),
    "upcast": (upcast, MHA),
    "plain": (plain, MHA),
    "scaled before": (scaled_before, MHA),
    "scaled by roots": (scaled_by_roots, MHA),
    "triangle": (triangle, MHA),
    "triangle in place": (triangle_in_place, MHA),
    "filled in place": (filled_in_place, MHA),
    "buffer": (buffer, (*MHA, "triangle")),
    "window": (window, MHA),
    "sinks and window": (sinks_and_window, MHA),
    "prefix": (prefix, MHA),
    "documents": (documents, (*MHA, "ids")),
    "padding": (padding, (*MHA, "ones")),
    "padding and causal": (padding_and_causal, (*MHA, "ones")),
    "booleans": (booleans, (*MHA, "bool")),
    "mask first": (mask_first, (*MHA, "mask")),
    "minus ten thousand": (minus_ten_thousand, MHA),
    "cache": (cache, (("B", "H", 16, "D"), "BHSD", "BHSD")),
    "alibi": (alibi, MHA),
    "added by the product": (added_by_the_product, (*MHA, ("BH", 1, "S"))),
    "learned": (learned, (*MHA, (1, "H", "S", "S"))),
    "per slot": (per_slot, (*GQA, "BGS")),
    "tokens first": (tokens_first, FIRST),
    "einsum": (einsum, FIRST),
    "three dimensions": (three_dimensions, ("HSD",) * 3),
    "turned": (turned, MHA),
    "grouped queries": (grouped_queries, GQA),
    "interleaved": (interleaved, GQA),
    "one head of keys": (one_head_of_keys, ("BHSD", ("B", 1, "S", "D"), ("B", 1, "S", "D"))),
    "packed": (packed, ("BSE", ("E", "3E"))),
    "two products": (two_products, (*MHA, ("B", "H", "S", 16), ("B", "S", 16))),
    "not a transpose": (not_a_transpose, (("B", 64, 64, 64),) * 3),
    "one query": (one_query, (("B", "H", 1, "D"), "BGSD", "BGSD", "row")),
    "assembled": (assembled, MHA),
    "gathered positions": (gathered_positions, MHA),
    "by hand": (by_hand, MHA),
    "by logarithm": (by_logarithm, MHA),
    "by log softmax": (by_log_softmax, MHA),
    "shifted": (shifted, MHA),
    "wide values": (wide_values, MHA),
    "call with mask": (call_with_mask, (*GQA, "mask")),
    "call with positions": (call_with_positions, GQA),
    "call of repeated": (call_of_repeated, GQA),
}


def arguments(shapes, dtype, tokens=64, batch=2, heads=8, groups=2, width=64, make=None):
    """Tensors of a spelling; parameters take gradients. ``make(size)`` draws one."""
    sizes = {
        "B": batch, "H": heads, "G": groups, "S": tokens, "D": width, "E": heads * width,
        "3E": 3 * heads * width, "BH": batch * heads,
    }  # fmt: skip
    ones = torch.ones(batch, tokens, dtype=torch.int64)
    ones[0, tokens - tokens // 5 :] = 0
    least = torch.full((tokens, tokens), torch.finfo(dtype).min)
    mask = torch.triu(least, 1).to(dtype).expand(batch, 1, tokens, tokens).contiguous()
    named = {
        "mask": mask, "row": mask[:, :, -1:].contiguous(), "bool": mask == 0, "ones": ones,
        "ids": (torch.arange(tokens) // 20).expand(batch, tokens).contiguous(),
        "triangle": torch.tril(torch.ones(1, 1, 2 * tokens, 2 * tokens)),
    }  # fmt: skip
    found = []
    for shape in shapes:
        if shape in named:
            found.append(named[shape])
            continue
        size = [sizes.get(n, n) for n in shape]
        tensor = torch.randn(size) if make is None else make(size)
        if len(size) == 2:
            tensor = tensor / 16
        found.append(tensor.to(dtype).requires_grad_())
    return found
