"""The Hopper forward: its numbers and barriers emulated on the CPU, and its machine code."""

import dataclasses
import re

import pytest
import torch
import triton
from inductor_ext.templates import attention_documents
from inductor_ext.templates import attention_gluon_launch as launch
from inductor_ext.templates.attention_gluon_launch import Tile
from inductor_ext.templates.attention_program import Input, Program, Span
from score_ways import INF, SCORES, made, score, tensors

from inductor_ext.ops._attention_score import positions, read
from inductor_ext.testing import launches_interpreted
from inductor_ext.testing.gluon import gluon_binary
from inductor_ext.testing.gluon_interpreter import interpret

BF16, FP16 = torch.bfloat16, torch.float16
CAUSAL = Program(scale=0.125, keep="keep = k <= q", row_spans=(Span("0", "q1 + 1", "0", "q0 + 1"),))
CAUSAL_TEXT = (
    "v0 = mul.Tensor(s, 0.125); v1 = le.Tensor(k, q); v2 = where.ScalarOther(v1, v0, -inf); v2"
)
FULL_TEXT = "v0 = mul.Tensor(s, 0.125); v0"


def draw(batch, heads, kv_heads, rows, columns, d, dv, dtype=BF16):
    """q, k, v as projections leave them: [B, S, H, D] transposed."""
    shapes = (batch, rows, heads, d), (batch, columns, kv_heads, d), (batch, columns, kv_heads, dv)
    return [torch.randn(shape).to(dtype).transpose(1, 2) for shape in shapes]


def emulated(q, k, v, program, tile, inputs=(), numbers=(), programs=2, delay=0.0):
    """(out, lse) of the kernel, whose memory is NaN before."""
    out = torch.full_like(launch._like(q, v.shape[3]), torch.nan)
    lse = torch.full(q.shape[:3], torch.nan)
    with launches_interpreted(attention_documents):
        _, grid, arguments = launch.launch(
            q, k, v, inputs, numbers, program, out, lse, tile, programs
        )
    copied = launch.staged(program, inputs)
    interpret(lambda: launch.define(program, copied).attention_gluon, grid[0], arguments, delay)
    return out, lse


def composed(text, q, k, v, inputs=(), numbers=(), dtype=torch.float64):
    """(out, lse) of the score's text, in a dtype."""
    sizes = (*q.shape[:3], k.shape[2])
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1).to(dtype) for x in (k, v))
    wide = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
    s = (q.to(dtype) @ k.mT).double()
    r = read(text)(s, *positions(sizes), *sizes[2:], numbers, wide).double().expand(sizes)
    lse = r.logsumexp(-1)
    p = torch.exp(r - lse.masked_fill(lse == -INF, 0)[..., None])
    return p.to(dtype) @ v, lse


def judge(found, text, *tensors_and_more):
    """By fp64: twice the error that eager makes in the inputs' dtype, and its rounding."""
    out, lse = composed(text, *tensors_and_more)
    eager, _ = composed(text, *tensors_and_more, dtype=tensors_and_more[0].dtype)
    allowed = 2 * (eager.double() - out).abs().max()
    allowed = allowed + out.abs().max() * torch.finfo(found[0].dtype).eps
    assert (found[0].double() - out).abs().max() <= allowed
    finite = lse > -1e30  # of a dtype's least numbers only the differences are right
    torch.testing.assert_close(found[1].double()[finite], lse[finite], rtol=1e-5, atol=1e-4)
    assert ((found[1] == -INF) == (lse == -INF)).all()


TILES = {
    "default": Tile(),
    "each": Tile(schedule="each"),
    "static": Tile(schedule="static", pingpong=False),
    "small blocks": Tile(keys=64, stages=4, in_place=True),
    "three": Tile(keys=64, consumers=3, stages=3),
    "one": Tile(consumers=1, warps=8),
}


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("delay", [0.0, 0.003])
def test_every_tile_computes_attention_and_ends(tile, delay):
    q, k, v = draw(1, 4, 2, 257, 391, 64, 128)
    found = emulated(q, k, v, Program(scale=0.125), TILES[tile], delay=delay)
    judge(found, FULL_TEXT, q, k, v)
    assert found[0].stride() == (257 * 4 * 128, 128, 4 * 128, 1)  # q's order
    q, k, v = draw(2, 2, 1, 600, 600, 64, 64, FP16)
    judge(emulated(q, k, v, CAUSAL, TILES[tile], delay=delay), CAUSAL_TEXT, q, k, v)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (17, 5), (113, 203), (130, 257), (1, 700)])
def test_odd_sizes(rows, columns):
    q, k, v = draw(1, 2, 2, rows, columns, 128, 64)
    judge(emulated(q, k, v, CAUSAL, Tile()), CAUSAL_TEXT, q, k, v)


@pytest.mark.parametrize("name", SCORES)
def test_every_score(name):
    text, program = made(score(SCORES[name]))
    if not launch.speakable(program):
        pytest.skip("Gluon has not all of its functions")
    sizes = 2, 2, 150, 280
    inputs = tensors(sizes)
    q, k, v = draw(2, 2, 1, 150, 280, 64, 64)
    found = emulated(q, k, v, program, Tile(), inputs, [3])
    judge(found, text, q, k, v, inputs, [3])


def test_most_scores_are_speakable():
    known = [n for n in SCORES if launch.speakable(made(score(SCORES[n]))[1])]
    assert len(known) >= len(SCORES) - 3
    assert "softcap" in known
    assert "a logarithm" not in known  # libdevice


def test_rows_that_keep_nothing():
    program = dataclasses.replace(CAUSAL, keep="keep = k < q - 2", empty="nan")
    q, k, v = draw(1, 1, 1, 130, 130, 64, 64)
    out, lse = emulated(q, k, v, program, Tile())
    assert out[:, :, :3].isnan().all()
    assert not out[:, :, 3:].isnan().any()
    assert (lse[..., :3] == -INF).all()
    out, lse = emulated(q, k, v, dataclasses.replace(program, empty="zero"), Tile())
    assert (out[:, :, :3] == 0).all()


def test_huge_scores():
    q, k, v = draw(1, 1, 1, 140, 140, 64, 64)
    q = q * 1000
    judge(emulated(q, k, v, CAUSAL, Tile()), CAUSAL_TEXT, q, k, v)


def _binary(program, d, tile=None, dtype=BF16, inputs=(), numbers=()):
    q, k, v = (torch.empty(2, 4, 1000, d, dtype=dtype, device="meta") for _ in range(3))
    lse = torch.empty(2, 4, 1000, device="meta")
    tile = tile or launch.default_tile(program, d, launch.staged(program, inputs))
    kernel, _, arguments = launch.launch(
        q, k, v, inputs, numbers, program, torch.empty_like(q), lse, tile, 132
    )
    return gluon_binary(kernel, arguments)


@pytest.mark.skipif(not launch.available(), reason="another Triton")
@pytest.mark.parametrize(
    ("program", "d", "dtype"),
    [(CAUSAL, 128, BF16), (CAUSAL, 64, BF16), (Program(scale=0.1), 128, FP16)],
)
def test_machine_code(program, d, dtype):
    binary, sass = _binary(program, d, dtype=dtype)
    assert binary.spills == 0
    assert binary.target == "sm_90a"
    assert binary.shared_bytes <= 232448
    assert "wgmma.mma_async" in binary.ptx
    assert "cp.async.bulk.tensor.4d.shared" in binary.ptx
    assert "cp.async.bulk.tensor.4d.global" in binary.ptx
    counts = set(re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", binary.ptx))
    assert {"232", "40"} <= counts
    # One wait per group of products: the assembler has not put them one behind the other.
    assert sass.count("gsb0, 0x") == binary.ptx.count("wgmma.commit_group")
    # The softmax is ahead of the wait for the product that runs beside it.
    assert _exponentials_beside_products(sass) >= 2


def _exponentials_beside_products(sass):
    """Places where a whole softmax lies between the wait for scores and that for the output."""
    found, count, inside = 0, 0, False
    for line in sass.splitlines():
        if "DEPBAR.LE gsb0, 0x1" in line:
            inside, count = True, 0
        elif "DEPBAR.LE gsb0, 0x0" in line:
            found += inside and count >= 64
            inside = False
        elif inside and "MUFU.EX2" in line:
            count += 1
    return found


def _softmaxes(sass):
    """The instructions between the waits for scores and those for the output beside them."""
    parts = re.findall(r"DEPBAR\.LE gsb0, 0x1(.*?)DEPBAR\.LE gsb0, 0x0", sass, re.DOTALL)
    assert len(parts) >= 4
    return "".join(parts)


SLOTS = Program(inputs=(Input(torch.float32, "bhk"),), score="r = s * 0.1 + x0 * 1.4")
PAIRS = Program(inputs=(Input(BF16, "hqk"),), score="r = s * 0.1 + x0.to(tl.float32) * 1.4")


@pytest.mark.skipif(not launch.available(), reason="another Triton")
@pytest.mark.parametrize(
    ("program", "shape", "dtype"),
    [(SLOTS, (2, 4, 1, 1000), torch.float32), (PAIRS, (1, 4, 1000, 1000), BF16)],
    ids=["per key", "per pair"],
)
def test_machine_code_of_inputs(program, shape, dtype):
    binary, sass = _binary(program, 128, inputs=[torch.empty(shape, dtype=dtype, device="meta")])
    assert binary.spills <= 32  # a few scalars of a tile, hardly any in a block's softmax
    assert len(re.findall(r"\b(LDL|STL)\b", _softmaxes(sass))) <= 2
    assert binary.shared_bytes <= 232448
    assert "ld.global" not in binary.ptx  # the copies are the producer's
    assert sass.count("gsb0, 0x") == binary.ptx.count("wgmma.commit_group")


def test_what_is_copied_beside_keys():
    """Whatever a tensor map describes, matrices first, two at most; else it is loaded."""
    axes = {"k": (1, 1, 1, 48), "bq": (2, 1, 40, 1), "hqk": (1, 2, 40, 48), "bhk": (2, 2, 1, 48)}
    inputs = [torch.randn(size) for size in axes.values()]
    program = Program(
        inputs=tuple(Input(torch.float32, a) for a in axes),
        score="r = s * 0.2 + x0 + x1 + x2 + x3",
    )
    text = (
        "v0 = mul.Tensor(s, 0.2); v1 = add.Tensor(v0, x0); v2 = add.Tensor(v1, x1); "
        "v3 = add.Tensor(v2, x2); v4 = add.Tensor(v3, x3); v5 = mul.Tensor(v4, 0.6931471805599453);"
        " v5"
    )
    assert launch.staged(program, inputs) == (2, 0)
    narrow = [*inputs[:2], inputs[2][..., :45], inputs[3]]  # 48 numbers from row to row
    assert launch.staged(program, narrow) == (2, 0)
    odd = [inputs[0], inputs[1], torch.randn(1, 2, 40, 45), inputs[3]]
    assert launch.staged(program, odd) == (0, 3)
    for given in (inputs, odd):
        columns = given[2].shape[3]
        some = [given[0][..., :columns], given[1], given[2], given[3][..., :columns]]
        q, k, v = draw(2, 2, 1, 40, columns, 64, 64)
        for tile in (launch.default_tile(program, 64, launch.staged(program, some)), Tile()):
            judge(emulated(q, k, v, program, tile, some), text, q, k, v, some)


def test_compiles_with_this_triton():
    """On every version: what ``VERSIONS`` leaves out may compile, and is just not known to run."""
    binary, _ = _binary(CAUSAL, 64)
    assert "wgmma.mma_async" in binary.ptx
    assert launch.available() == triton.__version__.startswith("3.6.")


def test_applies_reads_layouts_and_versions(monkeypatch):
    q, k, v = draw(1, 2, 2, 8, 8, 64, 64)
    assert not launch.applies(q, k, v, CAUSAL)  # on no Hopper
    monkeypatch.setattr(launch, "_hopper", lambda device: True)
    monkeypatch.setattr(launch, "VERSIONS", (triton.__version__,))
    assert launch.applies(q, k, v, CAUSAL)
    assert not launch.applies(q.float(), k.float(), v.float(), CAUSAL)
    assert not launch.applies(q[..., :32], k[..., :32], v, CAUSAL)
    assert not launch.applies(q, k[:, :, :0], v[:, :, :0], CAUSAL)
    assert not launch.applies(q, k[:, :1].expand(k.shape), v, CAUSAL)  # a step of 0
    assert not launch.applies(torch.randn(1, 2, 8, 65, dtype=BF16)[..., 1:], k, v, CAUSAL)
    assert not launch.applies(q, k, v, Program(score="r = libdevice.log(s)"))
    assert not launch.pays(q, k, v)
    assert launch.pays(*(torch.empty(4, 16, 2048, 128, device="meta") for _ in range(3)))
    monkeypatch.setattr(launch, "VERSIONS", ("2.",))
    assert not launch.applies(q, k, v, CAUSAL)
    with pytest.raises(ValueError, match="expected what"):
        launch.forward(q, k, v, [], [], CAUSAL)
