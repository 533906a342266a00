"""mHC says in one sentence what is wrong with its input."""

import math
import sys
from pathlib import Path

import pytest
import torch

from inductor_ext import ops

sys.path.append(str(Path(__file__).parent))

from mhc_formulas import N, _seeded, drawn  # noqa: F401

# --- bad input ------------------------------------------------------------------------------------


def bad_calls():
    x, y, post, comb, w, scale, base = drawn((3,))
    mixes, squares = torch.randn(2, 3, 24), torch.rand(2, 3)
    pre, both, from_mixes = ops.mhc_pre, ops.mhc_post_pre, ops.mhc_pre_from_mixes
    three = torch.randn(3, 3, 48).bfloat16()
    return {
        "no streams": lambda: pre(x[0, 0], w, scale, base),
        "three streams": lambda: pre(three, torch.randn(15, 144), scale, torch.randn(15)),
        "integers": lambda: pre(x.int(), w, scale, base),
        "fp8": lambda: pre(x.to(torch.float8_e4m3fn), w, scale, base),
        "columns of W": lambda: pre(x, w[:, :-1], scale, base),
        "rows of W": lambda: pre(x, w[:-1], scale, base),
        "W of H": lambda: pre(x, w[:, :48], scale, base),
        "W of a wrong type": lambda: pre(x, w.half(), scale, base),
        "two scales": lambda: pre(x, w, scale[:2], base),
        "a short base": lambda: pre(x, w, scale, base[:-1]),
        "scale in bf16": lambda: pre(x, w, scale.bfloat16(), base),
        "no rounds": lambda: pre(x, w, scale, base, iters=0),
        "half a round": lambda: pre(x, w, scale, base, iters=1.5),
        "a negative eps": lambda: pre(x, w, scale, base, sinkhorn_eps=-1e-6),
        "NaN for eps": lambda: pre(x, w, scale, base, rms_eps=math.nan),
        "a norm weight of H": lambda: pre(x, w, scale, base, norm_weight=torch.ones(48)),
        "W elsewhere": lambda: pre(x, w.to("meta"), scale, base),
        "Y of another H": lambda: ops.mhc_post(x, y[:, :-1], post, comb),
        "Y of another type": lambda: ops.mhc_post(x, y.float(), post, comb),
        "Y of other tokens": lambda: ops.mhc_post(x, y[:2], post, comb),
        "post with a last 1": lambda: ops.mhc_post(x, y, post[..., None], comb),
        "comb of n": lambda: ops.mhc_post(x, y, post, comb[..., 0]),
        "comb of other tokens": lambda: ops.mhc_post(x, y, post, comb[:1]),
        "comb in fp16": lambda: ops.mhc_post(x, y, post, comb.half()),
        "post elsewhere": lambda: ops.mhc_post(x, y, post.to("meta"), comb),
        "both: W": lambda: both(x, y, post, comb, w[:, :-1], scale, base),
        "both: Y": lambda: both(x, y[..., :-1], post, comb, w, scale, base),
        "both: rounds": lambda: both(x, y, post, comb, w, scale, base, iters=0),
        "head: all columns": lambda: ops.mhc_head(x, w, scale[:1], base),
        "head: three scales": lambda: ops.mhc_head(x, w[:N], scale, base[:N]),
        "17 partials": lambda: from_mixes(torch.randn(17, 3, 24), None, x, scale, base),
        "mixes without partials": lambda: from_mixes(mixes[0], None, x, scale, base),
        "mixes of other tokens": lambda: from_mixes(mixes[:, :2], None, x, scale, base),
        "mixes in bf16": lambda: from_mixes(mixes.bfloat16(), squares, x, scale, base),
        "sums of other partials": lambda: from_mixes(mixes, squares[:1], x, scale, base),
        "a mix that is not square": lambda: ops.sinkhorn(torch.randn(3, 4, 2)),
        "a vector": lambda: ops.sinkhorn(torch.randn(4)),
        "sinkhorn: rounds": lambda: ops.sinkhorn(torch.randn(4, 4), iters=0),
        "sinkhorn: integers": lambda: ops.sinkhorn(torch.ones(4, 4).int()),
    }


BAD = [
    "no streams", "three streams", "integers", "fp8", "columns of W", "rows of W", "W of H",
    "W of a wrong type", "two scales", "a short base", "scale in bf16", "no rounds", "half a round",
    "a negative eps", "NaN for eps", "a norm weight of H", "W elsewhere", "Y of another H",
    "Y of another type", "Y of other tokens", "post with a last 1", "comb of n",
    "comb of other tokens", "comb in fp16", "post elsewhere", "both: W", "both: Y", "both: rounds",
    "head: all columns", "head: three scales", "17 partials", "mixes without partials",
    "mixes of other tokens", "mixes in bf16", "sums of other partials", "a mix that is not square",
    "a vector", "sinkhorn: rounds", "sinkhorn: integers",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence(name):
    calls = bad_calls()
    assert sorted(calls) == sorted(BAD)
    with pytest.raises((ValueError, TypeError), match="expect") as caught:
        calls[name]()
    assert "\n" not in str(caught.value)
