"""Scores as text, and the programs made of them, against the functions that were written."""

import re
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inductor_ext.templates.attention_program import Input, Span

from inductor_ext.ops import _attention
from inductor_ext.ops._attention_score import NotPointwise, positions, read, write
from inductor_ext.ops._attention_translate import NoProgram, program

sys.path.append(str(Path(__file__).parent))

from score_ways import (
    INF,
    LEAST,
    LOG2E,
    SCORES,
    SIZES,
    computed,
    evaluated,
    made,
    score,
    tensors,
    texts,
    tl,
    where,
)


@pytest.mark.parametrize("name", SCORES)
def test_texts_and_programs_say_what_was_written(name):
    fn = score(SCORES[name])
    text, made_of = made(fn)
    gen = torch.Generator().manual_seed(0)
    s, g = (torch.randn(SIZES, generator=gen) * 5 for _ in range(2))
    rows, columns, inputs = *SIZES[2:], tensors()
    numbers = [torch.tensor(3)]
    leaves = [x.requires_grad_() if x.is_floating_point() else x for x in tensors()]
    wide = s.double().requires_grad_() if "16" not in text else s.clone().requires_grad_()
    expected = read(text)(wide, *positions(SIZES), rows, columns, [3], leaves)
    expected = expected.expand(SIZES)
    direct = fn(
        s.clone(), *positions(SIZES), torch.tensor(rows), torch.tensor(columns), numbers, inputs
    )
    torch.testing.assert_close(expected.float(), direct.expand(SIZES).float(), rtol=1e-6, atol=1e-5)

    found = computed(made_of, s, g, rows, columns, [3], inputs)
    keep = torch.as_tensor(found.get("keep", True)).expand(SIZES)
    r = torch.where(keep, found["r"] / LOG2E, -INF)
    close = {"rtol": 1e-2, "atol": 1e-2} if "16" in text else {"rtol": 1e-5, "atol": 1e-5}
    # A dtype's least number times LOG2E stays finite, whatever it is then
    huge = expected < -1e30
    huge &= expected != -INF
    assert (r[huge] < -1e30).all() and (r[huge] > -INF).logical_or(~keep[huge]).all()
    torch.testing.assert_close(r[~huge].double(), expected[~huge].detach().double(), **close)

    g = g.masked_fill(r < -1e30, 0)
    found = computed(made_of, s, g, rows, columns, [3], inputs)
    assert [f"d{i}" for i in range(len(inputs)) if f"d{i}" in found] == [
        f"d{i}" for i in made_of.differentiable
    ]
    needed = [wide, *(leaves[i] for i in made_of.differentiable)]
    reached = expected.masked_fill(g == 0, 0)
    grads = [None] * len(needed)
    if reached.requires_grad:
        grads = torch.autograd.grad(reached, needed, g.to(reached.dtype), allow_unused=True)
    for i, leaf, grad in zip([None, *made_of.differentiable], needed, grads, strict=True):
        own = found["ds" if i is None else f"d{i}"].expand(SIZES).sum_to_size(leaf.shape)
        assert own.isfinite().all()
        grad = torch.zeros_like(leaf) if grad is None else grad
        coarse = "16" in text or leaf.dtype == torch.bfloat16
        close = {"rtol": 1e-2, "atol": 3e-2} if coarse else {"rtol": 1e-4, "atol": 1e-4}
        # torch says NaN where a masked place has an infinite derivative
        grad = torch.where(grad.isnan(), own, grad)
        torch.testing.assert_close(own.double(), grad.double(), **close)
    equal = keep
    if made_of.documents:  # what is full in spans takes them for equal
        i, j = made_of.documents
        equal = keep | (inputs[i] != inputs[j])
    check_spans(made_of, keep, equal, [3])


def check_spans(made_of, keep, full, numbers):
    """Spans hold all that is kept, in order and apart; what they call full is in ``full``."""
    some, every = keep.flatten(0, -3).any(0), full.flatten(0, -3).all(0)
    sizes = {"rows": some.shape[0], "columns": some.shape[1]}
    for axis, spans, turned in (("q", made_of.row_spans, False), ("k", made_of.column_spans, True)):
        any_kept, all_kept = (some.T, every.T) if turned else (some, every)
        length, limit = any_kept.shape
        for first in range(length):
            for last in {first, min(first + 2, length - 1), length - 1}:
                ends = {f"{axis}0": first, f"{axis}1": last, **sizes}
                ends |= {f"n{i}": n for i, n in enumerate(numbers)}
                covered, before = torch.zeros(limit, dtype=torch.bool), 0
                for span in spans:
                    lo, hi, full_lo, full_hi = (
                        min(max(evaluated(text, **ends), 0), limit)
                        for text in (span.lo, span.hi, span.full_lo, span.full_hi)
                    )
                    if lo < hi:
                        assert lo >= before
                        covered[lo:hi], before = True, hi
                        full_lo, full_hi = max(lo, full_lo), min(hi, full_hi)
                        if full_lo < full_hi:
                            assert all_kept[first : last + 1, full_lo:full_hi].all(), (span, ends)
                kept = any_kept[first : last + 1].any(0)
                assert not (kept & ~covered).any(), (spans, ends)


# --- random conditions ----------------------------------------------------------------------------


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(text=texts(), rows=st.integers(1, 9), columns=st.integers(1, 9), n=st.integers(-3, 8))
def test_spans_and_conditions_at_random(text, rows, columns, n):
    gen = torch.Generator().manual_seed(rows)
    inputs = [
        torch.rand(2, 1, rows, columns, generator=gen) > 0.3,
        torch.randint(0, 9, (2, 1, 1, columns), generator=gen),
    ]
    made_of = program(text, (Input(torch.bool, "bqk"), Input(torch.int64, "bk")), 1, "zero")
    sizes = (2, 1, rows, columns)
    s = torch.randn(sizes, generator=gen)
    expected = read(text)(s, *positions(sizes), rows, columns, [n], inputs) > -INF
    found = computed(made_of, s, s, rows, columns, [n], inputs)
    keep = torch.as_tensor(found.get("keep", True)).expand(sizes)
    assert torch.equal(keep, expected.expand(sizes))
    check_spans(made_of, keep, keep, [n])


# --- forms ----------------------------------------------------------------------------------------


def test_spellings_of_causal_are_one_program():
    spelled = {
        "ge": lambda s, q, k: where(q >= k, s * 0.125),
        "le": lambda s, q, k: where(k <= q, s / 8),
        "not gt": lambda s, q, k: where(~(k > q), s * 0.125),
        "filled": lambda s, q, k: (s * 0.125).masked_fill(k > q, -INF),
        "difference": lambda s, q, k: where(k - q < 1, s * 0.125),
        "added": lambda s, q, k: s * 0.125 + where(q < k, torch.full_like(s, -INF), 0.0),
        "scaled": lambda s, q, k: where(k <= q, s) / 8,
        "finite": lambda s, q, k: s / 8 + where(k <= q, 0.0, LEAST),
        "floats": lambda s, q, k: s / 8 + (1 - (k <= q).float()) * -1e38,
        "and": lambda s, q, k: where((k <= q) & (k <= q + 3) & (k >= 0), s / 8),
    }
    programs = {
        name: made(score(lambda s, q, k, fn=fn, **_: fn(s, q, k)))[1]
        for name, fn in spelled.items()
    }
    own = {name: p for name, p in programs.items() if name not in ("and",)}
    assert len(set(own.values())) == 1, own
    causal = programs["ge"]
    assert causal.scale == 0.125 and causal.keep == "keep = (k <= q)"
    assert causal.row_spans == (Span("0", "q1 + 1", "0", "q0 + 1"),)
    assert causal.column_spans == (Span("k0", "rows", "k1", "rows"),)


def test_sinks_and_a_window_are_two_spans():
    _, made_of = made(score(SCORES["sinks and window"]))
    assert len(made_of.row_spans) == 2 and len(made_of.column_spans) == 1


def test_documents_are_found_behind_other_conditions():
    assert made(score(SCORES["documents"]))[1].documents == (4, 0)
    assert made(score(lambda s, x, **_: where(x[0] == x[4], s)))[1].documents == (4, 0)
    either = score(lambda s, q, k, x, **_: where((x[0] == x[4]) | (q == k), s))
    assert made(either)[1].documents is None


def test_a_least_number_is_no_mask_where_a_row_may_consist_of_it():
    assert made(score(SCORES["least, perhaps everywhere"]))[1].keep == ""
    window = score(lambda s, q, k, **_: where((k <= q) & (k > q - 2), s, LEAST))
    assert made(window)[1].keep == ""  # rows beyond the keys keep nothing
    # A mask that is added may hold it at the keys that are kept.
    assert made(score(lambda s, q, k, x, **_: where(k <= q, s + x[6], LEAST)))[1].keep == ""
    assert made(score(lambda s, q, k, x, **_: where(k <= q, s * x[2], LEAST)))[1].keep


def test_numbers_beyond_32_bits():
    """Windows without an end are none, and places times a large number are of 64 bits."""
    for window in (2**31 - 1, 2**31, 2**32, 2**63 - 1):
        wide = score(lambda s, q, k, w=window, **_: where((k - q < w) & (q - k < w), s))
        assert made(wide)[1].keep == ""
    for number in (lambda q, k: q * 1000003 + k * 7919, lambda q, k: (k - q) * 4096 * 4096):
        _, hashed = made(score(lambda s, q, k, of=number, **_: where(of(q, k) % 5 < 3, s)))
        q, k = (
            torch.arange(1 << 20, (1 << 20) + 9, dtype=torch.int32).view(s)
            for s in ((9, 1), (1, 9))
        )
        scope = {"q": q, "k": k, "tl": tl}
        exec(hashed.keep, scope)
        assert torch.equal(scope["keep"], number(q.long(), k.long()) % 5 < 3)
        _, compared = made(score(lambda s, q, k, of=number, **_: where(of(q, k) >= q, s)))
        exec(compared.keep, scope)
        assert torch.equal(scope["keep"], number(q.long(), k.long()) >= q)


def test_a_scale_costs_one_multiplication():
    _, made_of = made(score(lambda s, q, k, x, **_: where(k <= q, s / 8 * 3 + x[1] * (k - q)) / 2))
    tiles = re.findall(r"\bs \* ", made_of.score)
    assert len(tiles) == 1 and repr(3 / 8 / 2 * LOG2E) in made_of.score
    _, capped = made(score(SCORES["softcap"]))
    assert "libdevice" not in capped.score and capped.score.count(" / ") == 1


def test_equal_texts_are_one_program():
    text, made_of = made(score(SCORES["alibi"]))
    again, other = made(score(SCORES["alibi"]))
    assert text == again and made_of is other and hash(made_of) == hash(other)
    turned = score(lambda s, q, k, x, **_: where(q >= k, (k - q) * x[1] + 0.1 * s))
    assert made(turned)[0] == text


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda s, **_: s * s.shape[-1], "reads a size"),
        (
            lambda s, rows, columns, **_: s * (2 if rows > columns else 1),
            "no function of tensors alone",
        ),
        (lambda s, **_: s.softmax(-1), "_softmax.default is not pointwise"),
        (lambda s, **_: s.sum(-1, keepdim=True), "is not pointwise"),
        (lambda s, **_: s + torch.rand_like(s), "rand_like.default is not pointwise"),
        (lambda s, **_: s + torch.arange(3.0), "no function of tensors alone"),
        (lambda s, x, **_: s + x[6].transpose(2, 3), "no function of tensors alone"),
        (lambda s, **_: s[..., None], "is not pointwise"),
    ],
)
def test_what_has_no_text(fn, reason):
    with pytest.raises(NotPointwise, match=reason):
        write(score(fn), tensors(), [3])


def test_numbers_beyond_32_bits_are_whole():
    """Places are int32 in kernels."""
    _, product = made(score(lambda s, q, k, **_: s + q * k * 2**-20))
    assert "q.to(tl.int64)" in product.score
    _, large = made(score(lambda s, q, **_: s + q * 2**33 * 2**-33))
    assert "q.to(tl.int64) * tl.full([], 8589934592, tl.int64)" in large.score.replace(
        "tmpr1", "q.to(tl.int64)"
    )
    _, far = made(score(lambda s, q, k, **_: where(k > q - 2**40, s)))
    assert far.keep == ""


def test_what_has_no_program():
    with pytest.raises(NoProgram, match="lgamma"):
        program("v0 = lgamma.default(s); v0", (), 0, "zero")
    with pytest.raises(NoProgram, match="expected pointwise aten operations of s, b, h"):
        program("v0 = mul.Tensor(s, x0); v0", (), 0, "zero")
    with pytest.raises(NoProgram, match="'zero' or 'nan'"):
        program("s", (), 0, "none")


def test_bad_texts():
    for text in (
        "v0 = mul.Tensor(s, y); v0",
        "v0 = cumsum.default(s, -1); v0",
        "s, s",
        "v0 = s; v0",
    ):
        with pytest.raises(ValueError, match=r"got|pointwise"):
            read(text)(torch.ones(SIZES), *positions(SIZES), 1, 1)


def test_no_kernel_is_given_a_number_that_places_can_not_be_added_to(monkeypatch):
    monkeypatch.setattr(_attention, "kernels_apply", lambda q: True)
    text, _ = made(score(lambda s, q, k, n, **_: where(k - q <= n[0], s)))
    q = torch.empty(1, 1, 1, 16)
    for number, there in ((5, True), (2**31 - 1, False), (2**40, False), (-(2**40), False)):
        assert (_attention.program_of(q, tensors(), [number], text, "zero") is not None) is there
