"""Every launch of mHC compiles for the sizes that Triton makes constants of: a one is no number."""

import sys
from pathlib import Path

import pytest
import torch

from inductor_ext.testing import launch_binaries

sys.path.append(str(Path(__file__).parent))

from mhc_formulas import launching_modules

OPTIONS = (2, 1e-6, 1e-6, 1e-6, 2.0)


def launches(tokens, n, hidden, dtype):
    """Every launch function, with meta tensors."""
    from inductor_ext.templates import (
        mhc_post,
        mhc_post_backward,
        mhc_pre,
        mhc_pre_backward,
        mhc_sinkhorn_backward,
    )

    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    columns = n * (n + 2)
    x, y = empty(tokens, n, hidden, dtype=dtype), empty(tokens, hidden, dtype=dtype)
    post, comb = empty(tokens, n), empty(tokens, n, n)
    w, scale, base = empty(columns, n * hidden), empty(3), empty(columns)
    mixes, sqrsum = empty(tokens, columns), empty(tokens)
    given = y, post, comb
    return {
        "pre": lambda: mhc_pre.pre(x, w, scale, base, *OPTIONS, "ieee"),
        "collapse": lambda: mhc_pre.collapse(x, w, scale[:1], base[:n], 1e-6, 1e-6, "ieee"),
        "from mixes": lambda: mhc_pre.from_mixes(
            mixes[None], sqrsum[None], x, scale, base, *OPTIONS
        ),
        "sinkhorn": lambda: mhc_pre.sinkhorn(comb, 2, 1e-6),
        "post": lambda: mhc_post.post(x, y, post, comb.transpose(1, 2)),
        "sinkhorn_backward": lambda: mhc_sinkhorn_backward.sinkhorn_backward(comb, comb, 2, 1e-6),
        "pre_backward": lambda: mhc_pre_backward.backward(
            x, w, scale, base, mixes, sqrsum, x, *given, *OPTIONS
        ),
        "collapse_backward": lambda: mhc_pre_backward.backward(
            x, w, scale[:1], base[:n], mixes, sqrsum, None, y, mixes, sqrsum, 1, 1e-6, 1e-6, 0.0,
            1.0,
        ),
        "post_backward": lambda: mhc_post_backward.backward(x, y, post, comb, x),
    }  # fmt: skip


@pytest.mark.parametrize("name", launches(1, 2, 8, torch.float32))
def test_one_token(name):
    binaries = launch_binaries(launches(1, 4, 16, torch.bfloat16)[name], *launching_modules())
    assert binaries


def test_one_column():
    assert launch_binaries(launches(3, 2, 1, torch.float16)["pre_backward"], *launching_modules())
