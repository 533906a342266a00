"""What a second lowering decides inside the branches of the first is reported, once a site."""

import pytest
import torch

import inductor_ext
from inductor_ext import choosing, compat, compat_ir, registry
from inductor_ext.choosing import STOCK, Candidate
from inductor_ext.testing import compile_for

BF16 = torch.bfloat16
K, N = 4096, 32


@torch.library.custom_op("inductor_ext_test::inside", mutates_args=(), tags=(torch.Tag.pointwise,))
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(lambda x: torch.empty_like(x))


@pytest.fixture
def toy():
    """A lowering of its own choice for up to 32 rows; stock (the call of the operation) beyond."""

    def lower(x):
        size = x.get_size()
        few = compat.hint(size[0]) <= 32

        def emit():
            return compat_ir.call(torch.ops.aten.mul.Tensor, x, 2)

        site = f"twice [{size[0]},{size[1]}]"
        if not few:
            return choosing.leave("toy", site, "many rows")
        return choosing.choose("toy", site, [Candidate("ours", emit)], lambda: ("ours", "few rows"))

    registry.register(registry.Lowering("toy", {twice._opoverload: lower}))
    yield
    registry.unregister("toy")


def t(*size):
    return torch.empty(*size, dtype=BF16, device="meta")


def gate(x, w):
    return torch.relu(twice(x @ w))


def decisions(fn=gate, dynamic=(2, 8192), **kwargs):
    return compile_for("h200", fn, t(16, K), t(K, N), dynamic={0: {0: dynamic}}, **kwargs).decisions


@pytest.mark.codegen
@pytest.mark.usefixtures("toy")
def test_a_second_lowerings_site_is_reported_once_with_its_ranges():
    outer, inner = decisions()
    assert outer.lowering == "decompose_k" and len(outer.ranges) > 2
    assert (inner.lowering, inner.fired, inner.source) == ("toy", True, "heuristic")
    assert [(r.size, r.lo, r.hi) for r in inner.ranges] == [
        (r.size, r.lo, r.hi) for r in outer.ranges
    ]
    # By the sizes of each branch: those up to 32 rows, and the others.
    chosen = [r.chosen for r in inner.ranges]
    assert chosen[0] == "ours" and chosen[-1] == STOCK
    assert inner.chosen == f"{len(chosen)} ranges, 2 implementations"
    assert inner.reason == "few rows; many rows"
    shown = str(inductor_ext.Report((outer, inner)))
    assert "toy" in shown and shown.count("twice [") == 1


@pytest.mark.usefixtures("toy")
def test_two_sites_that_read_alike_are_two():
    outer, *inner = decisions(lambda x, w: twice(twice(x @ w)))
    assert outer.lowering == "decompose_k"
    assert [(d.lowering, len(d.ranges)) for d in inner] == [("toy", len(outer.ranges))] * 2


@pytest.mark.usefixtures("toy")
def test_one_choice_everywhere_is_one_choice():
    outer, inner = decisions(dynamic=(2, 32))
    assert len(outer.ranges) > 1 and inner.chosen == "ours" and inner.reason == "few rows"


@pytest.mark.usefixtures("toy")
def test_where_no_branch_can_be_written_the_site_is_reported_too():
    with torch._inductor.config.patch(memory_planning=True):
        outer, inner = decisions()
    assert (outer.lowering, outer.fired) == ("decompose_k", False)
    assert (inner.lowering, inner.chosen, inner.ranges) == ("toy", "ours", ())
