"""Attention as an operation: every option by its formula, gradients, transforms, compiled programs
and bad input, on the fallback of torch functions."""

import math

import attention_reference as reference
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from inductor_ext import ops
from inductor_ext.ops import _attention_composed as composed
from inductor_ext.ops import _attention_score as attention_score
from inductor_ext.testing import compile_for

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
SIZES = [(1, 1), (64, 128), (239, 1), (113, 203), (17, 5), (128, 217), (257, 257), (3, 130)]


def draw(B=2, heads=4, own=2, rows=9, columns=13, D=6, Dv=5, dtype=FP64):
    shapes = (B, heads, rows, D), (B, own, columns, D), (B, own, columns, Dv)
    return [torch.randn(s, dtype=dtype) for s in shapes]


def close(mine, right, limit=1e-12):
    assert mine.dtype == right.dtype and mine.shape == right.shape
    assert torch.equal(mine.isfinite(), right.isfinite())
    mine, right = mine.nan_to_num(0, 0, 0), right.nan_to_num(0, 0, 0)
    assert (mine - right).norm() <= limit * right.norm() + 1e-30


def ids(B, size, least=1):
    return (torch.rand(B, size) < 0.2).cumsum(-1).to(torch.int32)


def options(rows, columns, B=2, heads=4, own=2):
    """Keyword arguments of ``ops.attention``, and the same for the formula where they differ."""
    extra = torch.randn(1, heads, 1, 1, dtype=FP64)
    expanded = torch.randn(1, 1, 1, columns, dtype=FP64).expand(B, heads, rows, -1)
    relative = torch.arange(columns) - torch.arange(rows)[:, None]
    bool_bias = torch.rand(B, 1, rows, columns) < 0.7
    some = {
        "plain": {},
        "scale": {"scale": 0.3},
        "causal": {"causal": True},
        "upper_left": {"causal": "upper_left"},
        "window": {"window": (3, 2)},
        "window and causal": {"window": (4, None), "causal": True},
        "window 0": {"window": (0, 0), "causal": "upper_left"},
        "sinks": {"window": (2, 0), "sinks": 2, "causal": True},
        "segments": {"segments": (ids(B, rows), ids(B, columns))},
        "packed and causal": {"segments": (ids(1, rows), ids(1, columns)), "causal": True},
        "bias": {"bias": torch.randn(B, 1, rows, columns, dtype=FP64)},
        "bias of heads": {"bias": torch.randn(heads, 1, columns, dtype=FP64)},
        "bool bias": {"bias": bool_bias},
        "expanded bias": {"bias": expanded},
        "slot bias": {"slot_bias": torch.randn(B, own, columns, dtype=FP64), "causal": True},
        "softcap": {"softcap": 1.5, "causal": True},
        "sink": {"sink": torch.randn(heads, dtype=FP64), "causal": True},
        "lengths": {"lengths": torch.tensor([columns, columns // 2]), "causal": True},
        "everything": {
            "scale": 0.5, "causal": True, "window": (7, 0), "sinks": 1, "softcap": 2.0,
            "segments": (ids(B, rows) // 3, ids(B, columns) // 3),
            "bias": torch.randn(1, heads, rows, 1, dtype=FP64),
            "slot_bias": torch.randn(1, own, columns, dtype=FP64),
            "sink": torch.randn(heads, dtype=FP64),
            "lengths": torch.tensor([columns - 1, columns]),
        },
    }  # fmt: skip
    found = {name: (given, given) for name, given in some.items()}
    found["score_mod"] = (
        {"score_mod": lambda s, b, h, q, k, slope: s + slope * (k - q), "score_inputs": (extra,)},
        {"extra": extra * relative},
    )
    return found


NAMES = [*options(2, 3)]


@pytest.mark.parametrize("name", NAMES)
def test_option(name):
    """Output, log-sum-exp, column sums and gradients of every option, by the formula."""
    for rows, columns in ((9, 13), (13, 9), (1, 7)):
        ours, theirs = options(rows, columns)[name]
        q, k, v = (t.requires_grad_() for t in draw(rows=rows, columns=columns))
        floating = (t for t in ours.values() if isinstance(t, torch.Tensor) and t.dtype == FP64)
        leaves = [q, k, v, *(t.requires_grad_() for t in floating if t.is_leaf)]
        out, lse, sums = ops.attention(q, k, v, **ours, return_lse=True, return_colsum=True)
        right = reference.attention(q, k, v, **theirs)
        close(out, right[0])
        close(lse, right[1])
        close(sums, right[2].sum((2, 3)))
        last = ops.attention(q, k, v, **ours, return_colsum=True, colsum_rows=1)[1]
        close(last, right[2][:, :, :, -1:].sum((2, 3)))
        seed, seed_of_lse = torch.randn_like(out), torch.randn_like(lse)
        seed_of_lse = seed_of_lse * lse.isfinite()

        def loss(out, lse, a=seed, b=seed_of_lse):
            # lse is used twice
            lse = lse.masked_fill(~lse.isfinite(), 0.0)
            return (out * a).sum() + (lse * b).sum() + (lse * b).sin().sum()

        grads = [torch.autograd.grad(loss(*r[:2]), leaves) for r in ((out, lse), right)]
        for mine, truth in zip(*grads, strict=True):
            close(mine, truth, 1e-11)


def test_expanded_bias():
    """One row for all heads and query rows, not copied; a leaf keeps a gradient of its own."""
    q, k, v = draw()
    row = torch.randn(1, 1, 1, 13, dtype=FP64).requires_grad_()
    leaf = row.detach().expand(2, 4, 9, 13).requires_grad_()
    grads = []
    for fn in (ops.attention, lambda *a, **o: reference.attention(*a, **o)[0]):
        grads += torch.autograd.grad(fn(q, k, v, bias=row.expand(2, 4, 9, 13)).sin().sum(), row)
        grads += torch.autograd.grad(fn(q, k, v, bias=leaf).sin().sum(), leaf)
    close(grads[0], grads[2])
    close(grads[1], grads[3])


@pytest.mark.parametrize("causal", [False, True, "upper_left"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_sizes(causal, dtype):
    """By the rule: at most twice the error of eager in the same dtype."""
    for rows, columns in SIZES:
        q, k, v = draw(1, 6, 2, rows, columns, 16, 24, dtype)
        right = reference.attention(*(t.double() for t in (q, k, v)), causal=causal)[0]
        eager = reference.attention(q, k, v, causal=causal)[0]
        mine = ops.attention(q, k, v, causal=causal)
        assert mine.dtype == dtype
        error, known = ((x.double() - right).abs().max() for x in (mine, eager))
        assert error <= 2 * known + torch.finfo(dtype).eps * right.abs().max()


def test_worked_example():
    """Two query rows and six keys, without scaling, in tiles of two: seeds of the project."""
    q = torch.tensor([[2.0, -1], [-2, 5]])[None, None]
    k = torch.tensor([[1.0, -2], [0, 3], [4, 1], [-1, 2], [5, 0], [2, -4]])[None, None]
    v = torch.tensor([[3.0, 0], [1, 2], [-2, 1], [5, -3], [4, 0], [-1, 2]])[None, None]
    out, lse = ops.attention(q, k, v, scale=1.0, return_lse=True)
    right = torch.tensor([[3.1766, 0.2698], [1.1897, 1.7629]])
    assert (out[0, 0] - right).abs().max() <= 2e-4
    assert (
        lse[0, 0] - torch.tensor([10 + math.log(1.1876), 15 + math.log(1.0498)])
    ).abs().max() <= 1e-4


def test_as_sdpa():
    q, k, v = draw(dtype=FP32)
    mask = torch.rand(2, 1, 9, 13) < 0.3
    mask[0, 0, 4] = False
    for given, theirs in (({"causal": "upper_left"}, {"is_causal": True}),
                          ({"bias": mask}, {"attn_mask": mask})):  # fmt: skip
        right = F.scaled_dot_product_attention(q, k, v, **theirs, enable_gqa=True)
        close(ops.attention(q, k, v, **given), right, 1e-6)
    assert (ops.attention(q, k, v, bias=mask)[0, :, 4] == 0).all()


def test_rows_without_keys():
    """0 and -inf, and gradients of 0; NaN where a plain softmax has it."""
    q, k, v = (t.requires_grad_() for t in draw(rows=5, columns=3))
    out, lse = ops.attention(q, k, v, causal=True, return_lse=True)
    assert (out[:, :, :2] == 0).all() and (lse[:, :, :2] == -math.inf).all()
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads) and (grads[0][:, :, :2] == 0).all()
    text = "v0 = ge.Tensor(q, k); v1 = where.ScalarOther(v0, s, -inf); v2 = sub.Tensor(v1, inf); v2"
    found = torch.ops.inductor_ext.attention(q, k, v, [], [], text, "nan")[0]
    assert found.isnan().all()


def test_softcap_knee():
    q, k, v = draw(rows=40, columns=50, D=16, dtype=BF16)
    q = q * 15 / 4
    right = reference.attention(*(t.double() for t in (q, k, v)), softcap=15.0)[0]
    eager = reference.attention(q, k, v, softcap=15.0)[0]
    mine = ops.attention(q, k, v, softcap=15.0)
    error, known = ((x.double() - right).abs().max() for x in (mine, eager))
    assert error <= 3 * known


def test_offsets_of_packed_sequences():
    """Each sequence as if it were alone; its last row at its last key."""
    counts = [(4, 6), (3, 3), (0, 2), (5, 9)]
    of_q, of_k = (torch.tensor([0, *torch.tensor(c).cumsum(0)]) for c in zip(*counts, strict=True))
    q, k, v = draw(B=1, rows=12, columns=20)
    for causal in (False, True):
        whole = ops.attention(q, k, v, segments=(of_q, of_k), causal=causal, window=(3, None))
        for i in range(4):
            part = slice(of_q[i], of_q[i + 1]), slice(of_k[i], of_k[i + 1])
            own = (q[:, :, part[0]], k[:, :, part[1]], v[:, :, part[1]])
            close(whole[:, :, part[0]], ops.attention(*own, causal=causal, window=(3, None)))
    same = ops.attention(q, k[:, :, :12], v[:, :, :12], segments=of_q, causal=True)
    pair = ops.attention(q, k[:, :, :12], v[:, :, :12], segments=(of_q, of_q.clone()), causal=True)
    close(same, pair)


def test_pages():
    """Keys in pages, of ragged lengths, as the same keys in a row."""
    q, k, v = draw(B=3, rows=2, columns=16)
    lengths = torch.tensor([16, 5, 0], dtype=torch.int32)
    table = torch.randperm(14)[:12].view(3, 4).int()
    pages = [torch.randn(14, 4, 2, t.shape[-1], dtype=FP64) for t in (k, v)]
    for place, t in zip(pages, (k, v), strict=True):
        place[table.long()] = t.transpose(1, 2).unflatten(1, (4, 4))
    given = {"lengths": lengths, "causal": True, "return_lse": True, "return_colsum": True}
    found = ops.attention(q, *pages, block_table=table, **given)
    for mine, dense in zip(found, ops.attention(q, k, v, **given), strict=True):
        close(mine, dense)
    right = reference.attention(q, k, v, causal=True, lengths=lengths)
    close(found[0], right[0])
    leaves = [t.requires_grad_() for t in (q, *pages)]
    found = ops.attention(leaves[0], *leaves[1:], block_table=table, lengths=lengths)
    assert all(g.isfinite().all() for g in torch.autograd.grad(found.sum(), leaves))


def test_blocks_of_rows(monkeypatch):
    """However few scores exist at once, the results are the same."""
    q, k, v = (t.requires_grad_() for t in draw(rows=20, columns=30))
    given = options(20, 30)["everything"][0]

    def results():
        found = ops.attention(q, k, v, **given, return_lse=True, return_colsum=True)
        return *found, *torch.autograd.grad(found[0].sin().sum() + found[1].sum(), (q, k, v))

    right = results()
    monkeypatch.setattr(composed, "LARGEST_BLOCK", 700)
    for mine, truth in zip(results(), right, strict=True):
        close(mine, truth)


def test_dropout():
    q, k, v = draw(rows=20, columns=30, dtype=FP32)
    for given in ({}, {"causal": True}, {"softcap": 2.0, "window": (9, 0)}):
        right = ops.attention(q, k, v, **given)
        runs = []
        for _ in range(2):
            torch.manual_seed(3)
            runs.append(ops.attention(q, k, v, **given, dropout=0.25))
        assert torch.equal(*runs) and not torch.equal(runs[0], right)
        mean = sum(ops.attention(q, k, v, **given, dropout=0.25) for _ in range(100)) / 100
        assert (mean - right).norm() <= 0.15 * right.norm()


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_opcheck(name):
    q, k, v = (t.float().requires_grad_() for t in draw(rows=5, columns=7))
    bias = torch.randn(1, 4, 1, 7).requires_grad_()
    op = torch.ops.inductor_ext.attention.default
    text = "v0 = mul.Tensor(s, 0.5); v0"
    read, numbers = [], []
    if name != "plain":
        text = (
            "v0 = add.Tensor(s, x0); v1 = ge.Tensor(q, k); v2 = le.Tensor(k, n0); "
            "v3 = bitwise_or.Tensor(v1, v2); v4 = where.ScalarOther(v3, v0, -inf); v4"
        )
        read, numbers = [bias], [1]
    torch.library.opcheck(op, (q, k, v, read, numbers, text, "zero"))
    laid = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    torch.library.opcheck(op, (laid, k, v[..., :3], read, numbers, text, "zero"))
    lse = op(q, k, v, read, numbers, text, "zero")[1].detach()
    columns = torch.ops.inductor_ext.attention_columns.default
    torch.library.opcheck(
        columns, (q.detach(), k.detach(), lse, [x.detach() for x in read], numbers, text, 2)
    )
    ragged = torch.ops.inductor_ext.attention_ragged.default
    lengths = torch.tensor([7, 3])
    torch.library.opcheck(
        ragged, (q.detach(), k.detach(), v.detach(), None, lengths, [x.detach() for x in read],
                 numbers, text, "zero"),
    )  # fmt: skip


def test_gradients_of_gradients():
    q, k, v = (t.requires_grad_() for t in draw(1, 2, 1, 3, 4, 2, 3))
    beta = torch.randn(1, 1, 4, dtype=FP64).requires_grad_()

    def fn(q, k, v, beta):
        given = {"slot_bias": beta, "causal": True, "softcap": 1.0}
        return ops.attention(q, k, v, **given, return_lse=True)

    torch.autograd.gradgradcheck(fn, (q, k, v, beta))


def test_transforms():
    q, k, v = draw(3)
    each = torch.vmap(lambda *t: ops.attention(*(x[None] for x in t), causal=True))
    close(each(q, k, v).squeeze(1), ops.attention(q, k, v, causal=True))
    slope = torch.func.grad(lambda t: ops.attention(t, k, v, window=(3, 0)).sum())(q)
    q.requires_grad_()
    close(slope, torch.autograd.grad(ops.attention(q, k, v, window=(3, 0)).sum(), q)[0])
    q = q.detach()
    pushed = torch.func.jvp(lambda t: ops.attention(t, k, v), (q,), (torch.ones_like(q),))[1]
    step = 1e-6
    ends = [ops.attention(q + s, k, v) for s in (step, -step)]
    close(pushed, (ends[0] - ends[1]) / (2 * step), 1e-6)


def test_a_compiled_vmap():
    q, k, v = draw(3)
    bias, rows = torch.randn(3, 1, 1, 13, dtype=FP64), torch.randn(4, 9, 1, dtype=FP64)

    def each(q, k, bias):
        out = ops.attention(q[None], k[None], v[:1], bias=bias, causal=True)
        return out + ops.attention(q[None], k[None], v[:1], bias=rows)

    def fn(q, k, bias):
        return torch.vmap(each)(q, k, bias)

    q.requires_grad_()
    results = [f(q, k, bias) for f in (torch.compile(fn, backend="aot_eager"), fn)]
    close(*results)
    close(*(torch.autograd.grad(r.sin().sum(), q)[0] for r in results))


def alibi(s, b, h, q, k, slope):
    return s + slope * (k - q)


def test_a_compiled_program_does_not_depend_on_lengths():
    def fn(q, k, v, beta, slopes, window):
        out, lse = ops.attention(
            q * 2, k, v, causal=True, window=(window, 0), sinks=2, slot_bias=beta, softcap=5.0,
            score_mod=alibi, score_inputs=(slopes,), return_lse=True,
        )  # fmt: skip
        return out * 2 + lse[..., None]

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fn, backend=counter, dynamic=True, fullgraph=True)
    frames = []
    for n in range(20):
        rows, columns = 11 + 3 * n % 17, 40 + 7 * n
        q, k, v = draw(7 + n % 3, rows=rows, columns=columns, dtype=FP32)
        beta, slopes = torch.randn(q.shape[0], 2, columns), torch.randn(1, 4, 1, 1)
        q.requires_grad_()
        args = q, k, v, beta, slopes, 3 + n
        out, right = compiled(*args), fn(*args)
        close(out, right, 1e-6)
        mine, other = (torch.autograd.grad(o.sum(), q)[0] for o in (out, right))
        close(mine, other, 1e-5)
        frames.append(counter.frame_count)
    assert frames[-1] == frames[0]


def test_compiled_options():
    """Every option in a compiled program, in one graph."""
    for name in NAMES:
        given = options(9, 13)[name][0]
        if name == "score_mod":
            given |= {"score_mod": alibi}
        q, k, v = draw()

        def fn(q, k, v, given=given):
            return ops.attention(q, k, v, **given, return_lse=True, return_colsum=True)

        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="aot_eager", fullgraph=True)
        for mine, right in zip(compiled(q, k, v), fn(q, k, v), strict=True):
            close(mine, right)
    q.requires_grad_()
    lengths = torch.tensor([13, 4])

    def ragged(q, k, v):
        return ops.attention(q, k, v, lengths=lengths, causal=True)

    results = [
        f(q, k, v) for f in (torch.compile(ragged, backend="aot_eager", fullgraph=True), ragged)
    ]
    close(*results)
    close(*(torch.autograd.grad(r.sin().sum(), q)[0] for r in results))


def test_empty_tensors():
    q, k, v = draw(rows=0)
    assert ops.attention(q, k, v).shape == (2, 4, 0, 5)
    q, k, v = (t.requires_grad_() for t in draw(columns=0))
    out, lse = ops.attention(q, k, v, return_lse=True)
    assert (out == 0).all() and (lse == -math.inf).all()
    assert (torch.autograd.grad(out.sum(), q)[0] == 0).all()


@pytest.mark.codegen
def test_generated_code():
    q, k, v = (t.requires_grad_() for t in draw(2, 4, 2, 128, 128, 64, 64, BF16))
    code = compile_for(
        "h200", lambda q, k, v: ops.attention(q, k, v, causal=True, window=32), q, k, v, grad=True
    )
    assert code.forward.count("inductor_ext.attention.default.launched(") == 1
    assert code.backward.count("inductor_ext.attention_backward.default.launched(") == 1


BAD = [
    ("q is expected as [B, Hq, Sq, D], got [2, 3]", ValueError, {"q": torch.ones(2, 3)}),
    ("q is expected as fp16, bf16, fp32 or fp64, got torch.int64", TypeError,
     {"q": torch.ones(2, 4, 9, 6).long()}),
    ("k is expected as torch.float32, as q is, got torch.bfloat16", TypeError,
     {"k": torch.ones(2, 2, 13, 6).bfloat16()}),
    ("k is expected on cpu, where q is, got meta", ValueError,
     {"k": torch.ones(2, 2, 13, 6, device="meta")}),
    ("q and k are expected with one head size of 1 or more, and v with one, got 6, 7 and 5",
     ValueError, {"k": torch.ones(2, 2, 13, 7)}),
    ("k is expected with q's batch of 2, got 3", ValueError, {"k": torch.ones(3, 2, 13, 6)}),
    ("v is expected as [2, 2, 13, Dv] beside k of [2, 2, 13, 6], got [2, 2, 12, 5]", ValueError,
     {"v": torch.ones(2, 2, 12, 5)}),
    ("q is expected with a multiple of the 3 heads of k and v, got 4 heads", ValueError,
     {"k": torch.ones(2, 3, 13, 6), "v": torch.ones(2, 3, 13, 5)}),
    ("q is expected as a tensor, got list", TypeError, {"q": [1.0]}),
    ("bias is expected as a dense tensor, got one of torch.sparse_coo", TypeError,
     {"bias": torch.zeros(9, 13).to_sparse()}),
    ("return_lse is expected as True or False, got Tensor", TypeError,
     {"return_lse": torch.ones(2)}),
    ("scale is expected as a finite number other than 0, got 0", ValueError, {"scale": 0}),
    ("scale is expected as a number, got Tensor", TypeError, {"scale": torch.ones(())}),
    ("scale is expected as a number, got complex", TypeError, {"scale": 1j}),
    ("softcap is expected as a number, got list", TypeError, {"softcap": [30.0]}),
    ("dropout is expected as a number, got NoneType", TypeError, {"dropout": None}),
    ('causal is expected as True, False, "lower_right" or "upper_left", got \'left\'', ValueError,
     {"causal": "left"}),
    ("window is expected as a whole number of 0 or more, or a pair of such or None, got -1",
     ValueError, {"window": -1}),
    ("window is expected as a whole number of 0 or more, or a pair of such or None, got (1, 2, 3)",
     ValueError, {"window": (1, 2, 3)}),
    ("sinks is expected as a whole number of 0 or more, got 1.5", ValueError, {"sinks": 1.5}),
    ("window is expected as a whole number of 0 or more, or a pair of such or None, got 1000",
     ValueError, {"window": 10**30}),
    ("segments are expected as int32 or int64, got torch.float32", TypeError,
     {"segments": torch.ones(2, 9)}),
    ("segments of the query rows are expected as [2, 9], got [2, 8]", ValueError,
     {"segments": torch.ones(2, 8, dtype=torch.int32)}),
    ("segments as offsets are expected as [segments + 1], as many for keys as for query rows, got "
     "[3] and [4]", ValueError,
     {"segments": (torch.arange(3), torch.arange(4))}),
    ("segments are expected as a tensor or a pair, got 3 of them", ValueError,
     {"segments": (1, 2, 3)}),
    ("bias is expected as torch.bool or torch.float32 beside q of torch.float32, got "
     "torch.float16", TypeError, {"bias": torch.ones(9, 13).half()}),
    ("bias is expected in a shape that broadcasts to [2, 4, 9, 13], [B, Hq, Sq, Sk], got [9, 12]",
     ValueError, {"bias": torch.ones(9, 12)}),
    ("slot_bias is expected as [2, 2, 13], [B, Hkv, Sk], got [2, 4, 13]", ValueError,
     {"slot_bias": torch.ones(2, 4, 13)}),
    ("slot_bias is expected as torch.float32, got torch.int64", TypeError,
     {"slot_bias": torch.ones(2, 2, 13).long()}),
    ("softcap is expected as a positive number or None, got 0.0", ValueError, {"softcap": 0.0}),
    ("sink is expected as [4], one per query head, got [2]", ValueError, {"sink": torch.ones(2)}),
    ("sink is expected as floating point, got torch.int64", TypeError,
     {"sink": torch.ones(4).long()}),
    ("score_mod is expected as a function, got int", TypeError, {"score_mod": 3}),
    ("score_mod is expected as a function of torch's pointwise functions, but", ValueError,
     {"score_mod": lambda s, b, h, q, k: s.cumsum(-1)}),
    ("score_mod is expected as a function of torch's pointwise functions, but it gives no tensor "
     "but int", ValueError, {"score_mod": lambda s, b, h, q, k: 1}),
    ("score_inputs are expected as a tuple or list of tensors, got Tensor", TypeError,
     {"score_mod": alibi, "score_inputs": torch.ones(1, 1, 1, 1)}),
    ("score_inputs are expected only beside a score_mod, got some", ValueError,
     {"score_inputs": (torch.ones(1, 1, 1, 1),)}),
    ("each of score_inputs is expected to broadcast to [2, 4, 9, 13] with four dimensions, got [4]",
     ValueError, {"score_mod": alibi, "score_inputs": (torch.ones(4),)}),
    ("lengths are expected beside a block_table, got None", ValueError,
     {"k": torch.ones(9, 4, 2, 6), "v": torch.ones(9, 4, 2, 5),
      "block_table": torch.zeros(2, 3).int()}),
    ("block_table is expected as [2, most pages of a sequence], got [3, 3]", ValueError,
     {"k": torch.ones(9, 4, 2, 6), "v": torch.ones(9, 4, 2, 5),
      "block_table": torch.zeros(3, 3).int(), "lengths": torch.ones(2).int()}),
    ("lengths are expected as int32 or int64, got torch.float32", TypeError,
     {"lengths": torch.ones(2)}),
    ("lengths are expected as [2], got [3]", ValueError, {"lengths": torch.ones(3).int()}),
    ("dropout is expected as 0 or a probability in [0.0009765625, 0.9990234375], got 1.0",
     ValueError, {"dropout": 1.0}),
    ("dropout is expected as 0 or a probability in [0.0009765625, 0.9990234375], got 1e-05",
     ValueError, {"dropout": 1e-5}),
    ("colsum_rows is expected only with return_colsum, got it without", ValueError,
     {"colsum_rows": 2}),
    ("colsum_rows is expected as 9, Sq, at most, got 10", ValueError,
     {"colsum_rows": 10, "return_colsum": True}),
    ("colsum_rows is expected as a whole number of 0 or more, got -1", ValueError,
     {"colsum_rows": -1, "return_colsum": True}),
    ("return_colsum is expected without dropout, which scales probabilities, got 0.1", ValueError,
     {"dropout": 0.1, "return_colsum": True}),
]  # fmt: skip


@pytest.mark.parametrize(("message", "kind", "changed"), BAD)
def test_bad_input(message, kind, changed):
    q, k, v = draw(dtype=FP32)
    given = {"q": q, "k": k, "v": v} | changed
    with pytest.raises(kind) as raised:
        ops.attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)
    assert str(raised.value).startswith(message), str(raised.value)


_FACTOR = 2.0


def _by_factor(s, b, h, q, k):
    return s * _FACTOR


def test_a_score_function_is_traced_again_when_what_it_reads_has_changed(monkeypatch):
    traced = []
    write = attention_score.write
    monkeypatch.setattr(attention_score, "write", lambda *args: traced.append(1) or write(*args))
    q, k, v = (torch.randn(1, 1, 8, 16) for _ in range(3))
    box = [2.0]
    twice = ops.attention(q, k, v, scale=2.0)
    for _ in range(2):
        torch.testing.assert_close(ops.attention(q, k, v, scale=1.0, score_mod=_by_factor), twice)
    assert len(traced) == 1
    monkeypatch.setitem(globals(), "_FACTOR", 3.0)
    thrice = ops.attention(q, k, v, scale=3.0)
    torch.testing.assert_close(ops.attention(q, k, v, scale=1.0, score_mod=_by_factor), thrice)

    def boxed(s, b, h, q, k):
        return s * box[0]

    torch.testing.assert_close(ops.attention(q, k, v, scale=1.0, score_mod=boxed), twice)
    box[0] = 3.0
    torch.testing.assert_close(ops.attention(q, k, v, scale=1.0, score_mod=boxed), thrice)
