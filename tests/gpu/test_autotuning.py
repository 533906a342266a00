"""Custom-op autotuning on the card: what is measured, what may win, what is emitted."""

import pytest
import torch

from inductor_ext import CustomOpConfig, measure, register_custom_op_autotuning, report

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@torch.library.custom_op("inductor_ext_gpu_test::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, eps: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (x * scale).to(x.dtype), scale


@rms_norm.register_fake
def _(x, eps=1e-6):
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def one_reduction(x, eps=1e-6):
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (x * scale).to(x.dtype), scale


def in_chunks(x, eps=1e-6, chunks=4):
    parts = x.float().square().reshape(*x.shape[:-1], chunks, -1).sum(-1)
    scale = torch.rsqrt(parts.sum(-1, keepdim=True) / x.shape[-1] + eps)
    return (x * scale).to(x.dtype), scale


def wrong_but_fast(x, eps=1e-6):
    scale = x[..., :1].float()
    return x * 1, scale


def subtly_wrong(x, eps=1e-6):
    """Leaves out the last sixteenth of each row."""
    part = x[..., : x.shape[-1] * 15 // 16].float()
    scale = torch.rsqrt(part.square().mean(-1, keepdim=True) + eps)
    return (x * scale).to(x.dtype), scale


def failing(x, eps=1e-6):
    raise RuntimeError("this candidate cannot do it")


def block(x):
    normed, scale = torch.ops.inductor_ext_gpu_test.rms_norm(x)
    return torch.nn.functional.silu(normed), scale


def test_two_outputs_are_measured_and_the_right_one_wins():
    register_custom_op_autotuning(
        rms_norm,
        configs=[
            CustomOpConfig(wrong_but_fast),
            CustomOpConfig(subtly_wrong),
            CustomOpConfig(failing),
            CustomOpConfig(one_reduction),
            CustomOpConfig(in_chunks, chunks=4),
            CustomOpConfig(in_chunks, chunks=16),
        ],
    )
    x = torch.randn(16, 65536, device="cuda").to(BF16)
    compiled = torch.compile(block)
    with report.collect() as decisions:
        out = compiled(x)
    (decision,) = (d for d in decisions if "rms_norm" in d.lowering)
    by_name = {c.name: c for c in decision.candidates}
    assert decision.source == "measured" and decision.fired, decision
    assert decision.chosen in ("one_reduction", "in_chunks_chunks4", "in_chunks_chunks16")
    for name in ("wrong_but_fast", "subtly_wrong"):
        assert by_name[name].us is None and by_name[name].note.startswith("wrong"), by_name[name]
    assert by_name["failing"].us is None and by_name["failing"].note.startswith("failed")
    timed = {c.name: c.us for c in decision.candidates if c.us is not None}
    assert timed.keys() == by_name.keys() - {"wrong_but_fast", "subtly_wrong", "failing"}
    assert min(timed, key=timed.get) == decision.chosen and timed["stock"] > timed[decision.chosen]

    wide = x.double()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    references = torch.nn.functional.silu(wide * scale), scale
    for got, reference, eager in zip(out, references, block(x), strict=True):
        verdict = measure.check(got, reference, eager)
        assert verdict.ok, verdict.reason
    assert all(torch.equal(a, b) for a, b in zip(compiled(x), out, strict=True))


@torch.library.custom_op("inductor_ext_gpu_test::product", mutates_args=())
def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


product.register_fake(lambda x, w: x.new_empty(x.shape[0], w.shape[1]))


def by_hand(x, w):
    return (x[:, :, None].float() * w[None].float()).sum(1).to(x.dtype)


def test_stock_is_kept_where_it_wins():
    register_custom_op_autotuning(product, configs=[CustomOpConfig(by_hand)])
    x, w = (torch.randn(512, 512, device="cuda").to(BF16) for _ in range(2))
    with report.collect() as decisions:
        out = torch.compile(lambda x, w: torch.ops.inductor_ext_gpu_test.product(x, w))(x, w)
    (decision,) = (d for d in decisions if "product" in d.lowering)
    assert decision.source == "measured" and decision.chosen == "stock" and not decision.fired
    assert all(c.us is not None for c in decision.candidates), decision.candidates
    assert measure.check(out, x.double() @ w.double(), x @ w).ok


@torch.library.custom_op("inductor_ext_gpu_test::sums", mutates_args=())
def sums(x: torch.Tensor) -> torch.Tensor:
    return x.float().sum(1)


sums.register_fake(lambda x: x.new_empty(x.shape[0], dtype=torch.float32))


def whole_rows(x):
    return x.float().sum(1)


def in_pieces(x):
    """Many programs per row: ahead for few rows, one more kernel for many."""
    return x.float().reshape(x.shape[0], 64, -1).sum(2).sum(1)


def test_ranges_of_a_size_are_measured_where_none_are_given():
    register_custom_op_autotuning(
        sums,
        configs=[CustomOpConfig(whole_rows), CustomOpConfig(in_pieces)],
        dispatch_on={"tensor_name": "x", "dim": 0, "range_upper_bound": 2048},
    )

    def scaled(x):
        return torch.ops.inductor_ext_gpu_test.sums(x) * 0.5

    torch._dynamo.reset()
    program = torch.compile(scaled)

    def rows_of(rows):
        x = torch.randn(rows, 4096, device="cuda").to(BF16)
        torch._dynamo.mark_dynamic(x, 0)
        return x

    again = torch._inductor.config.patch(fx_graph_cache=False)
    with again, report.collect() as decisions:
        program(rows_of(16))
    (decision,) = (d for d in decisions if "sums" in d.lowering)
    assert decision.source == "measured", decision
    times = {c.name: c.us for c in decision.candidates}
    assert all(times[name] for name in ("whole_rows", "in_pieces", "stock")), decision
    edges = {e for r in decision.ranges for e in (r.lo, r.hi) if e is not None and 2 <= e < 4096}
    for rows in sorted({2, 3, 2048, 2049, *edges}):
        x = rows_of(rows)
        assert measure.check(program(x), x.double().sum(1) * 0.5, scaled(x)).ok, rows
