"""Every way in which a scan's kernel is laid out, and what its programs leave for the next call."""

import itertools
import random

import pytest
import torch
import triton
import triton.language as tl
from inductor_ext.templates import scan as scan_module
from inductor_ext.templates import scan_forms, scan_launch, scan_text
from inductor_ext.templates.scan_launch import Tiling
from inductor_ext.templates.scan_program import Input, Program

from inductor_ext.testing import launches_interpreted

FP32, INT64 = torch.float32, torch.int64
WAYS = {
    "one tile": Tiling(2, 64, 1),
    "looped": Tiling(2, 8, 1),
    "looped, loaded ahead": Tiling(4, 8, 1, 0, True, 1),
    "looped, by addresses, ahead": Tiling(2, 4, 1, 0, False, 1),
    "shared": Tiling(2, 4, 1, 2, fetch=3),
    "shared, by addresses": Tiling(1, 2, 1, 2, False),
    "shared, groups of 3, the last one by tiles": Tiling(2, 2, 1, 3, depth=1),
}
STRIPES = Tiling(1, 4, 1, stripes=1, fetch=3, early=2)
# a thread has two or four neighbouring positions
COLUMNS = {
    "looped": Tiling(32, 8, 1),
    "looped, loaded ahead": Tiling(32, 16, 1, ahead=2),
    "chunks, read again": Tiling(32, 8, 1, 2, parts=2),
}


@pytest.fixture(autouse=True)
def two_multiprocessors(monkeypatch):
    monkeypatch.setattr(scan_launch, "units", lambda device: 2)


def program(name, dtype, reverse=False):
    form = scan_forms.form(name, dtype)
    kind = scan_text.TYPES[form.states[0]]
    if name == "affine":
        produce = f"s0 = x0.to(tl.{kind})\ns1 = x1.to(tl.{kind})"
        inputs, outputs, consume = (Input(dtype),) * 2, (dtype,), "y0 = s1"
    else:
        produce = f"v = x0.to(tl.{kind})\n{form.lift}"
        inputs, outputs, consume = (Input(dtype),), (dtype,), "y0 = s0"
    if name == "cummax":
        outputs, consume = (dtype, INT64), "y0 = s0\ny1 = s1"
    if name == "logsumexp":
        consume = f"y0 = {scan_forms.LOGARITHM}"
    return Program(inputs, outputs, form.states, produce, form.combine, consume, reverse)


def run(scan, inputs, dim, tile, order=range):
    outputs = [torch.empty(inputs[0].shape, dtype=dtype) for dtype in scan.outputs]
    with launches_interpreted(scan_launch, order=order):
        scan_launch.launch(scan, inputs, outputs, dim, tile)
    return outputs


def recurrence(a, b, dim):
    h, rows = torch.zeros_like(a.select(dim, 0)), []
    for x, y in zip(a.unbind(dim), b.unbind(dim), strict=True):
        h = x * h + y
        rows.append(h)
    return torch.stack(rows, dim)


@pytest.mark.parametrize(
    ("shape", "dim", "reverse"),
    [((2, 19), 1, False), ((2, 18), 1, True), ((19, 3), 0, True), ((2, 9, 2), 1, False)],
)
@pytest.mark.parametrize("way", WAYS)
def test_layouts_agree_with_torch(way, shape, dim, reverse):
    agrees_with_torch(WAYS[way], shape, dim, reverse)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("way", COLUMNS)
def test_columns_in_pieces_agree_with_torch(way, reverse):
    agrees_with_torch(COLUMNS[way], (51, 3), 0, reverse)


@pytest.mark.parametrize(
    ("shape", "reverse"), [((13,), False), ((16,), True), ((2, 16), True), ((3,), False)]
)
def test_stripes_agree_with_torch(shape, reverse, monkeypatch):
    monkeypatch.setattr(scan_module, "PATIENCE", 2)  # programs run one after the other
    agrees_with_torch(STRIPES, shape, len(shape) - 1, reverse)


def test_who_computed_one_total_goes_on_with_its_own_tiles(monkeypatch):
    words = torch.zeros(64, dtype=INT64)
    monkeypatch.setattr(scan_launch, "workspace", lambda *_: (words, 1))
    monkeypatch.setattr(scan_module, "PATIENCE", 2)
    x = torch.randint(-9, 9, (38,)).float()
    for missing in (slice(None), 1):
        words[missing] = 0
        (got,) = run(program("sum", FP32), [x], 0, STRIPES)
        assert torch.equal(got, x.cumsum(0)) and words[1] != 0


def test_where_programs_stay():
    def stays(shape, *strides, reverse=False, dim=-1, **given):
        strides = strides or (torch.empty(shape).stride(),) * 2
        laid = scan_launch.plan(
            program("sum", FP32, reverse), shape, strides[:1], strides[1:], dim % len(shape),
            choice=STRIPES, units=6, **given,
        )  # fmt: skip
        return laid.constants.get("PROGRAMS")

    assert stays((4096,)) == 6 and stays((4095,)) == 6 and stays((2, 4096)) == 3
    assert stays((9, 4096)) == 1  # more rows than there are programs
    assert stays((4096,), reverse=True) and not stays((4095,), reverse=True)
    assert not stays((4096,), aligned=False) and not stays((4096,), fetches=False)
    assert not stays((2, 4095)) and not stays((4096, 3), dim=0)
    assert not stays((4096,), (2,), (1,)) and stays((4096,), (0,), (1,))
    with pytest.raises(ValueError, match="at most 8 warps of programs that stay"):
        Tiling(1, 4096, 8, stripes=2)  # all have to be on the card at once


def agrees_with_torch(tile, shape, dim, reverse):
    turned = (lambda x: x.flip(dim)) if reverse else (lambda x: x)
    x, a = torch.randint(-9, 9, shape), torch.randint(0, 3, shape).double()
    (got,) = run(program("sum", INT64, reverse), [x], dim, tile)
    assert torch.equal(got, turned(turned(x).cumsum(dim)))
    (got,) = run(program("affine", torch.float64, reverse), [a, x.double()], dim, tile)
    torch.testing.assert_close(got, turned(recurrence(turned(a), turned(x.double()), dim)))
    values, positions = run(program("cummax", FP32, reverse), [x.float()], dim, tile)
    expected = torch.cummax(turned(x.float()), dim)
    assert torch.equal(values, turned(expected.values))
    assert torch.equal(positions, turned(expected.indices))  # counted along the scan


def test_a_workspace_serves_call_after_call(monkeypatch):
    words, calls = torch.zeros(4096, dtype=INT64), itertools.count(1)
    monkeypatch.setattr(scan_launch, "workspace", lambda *_: (words, next(calls)))
    for length, lanes, tile in ((40, 2, 2), (9, 3, 4), (40, 2, 2), (33, 1, 2), (33, 1, 2)):
        x = torch.randint(-9, 9, (lanes, length))
        (got,) = run(program("sum", INT64), [x], 1, Tiling(1, tile, 1, 2))
        assert torch.equal(got, x.cumsum(1))


def shuffled(n):
    return random.Random(0).sample(range(n), n)


@pytest.mark.parametrize("order", [lambda n: reversed(range(n)), shuffled])
@pytest.mark.parametrize(
    ("name", "shape", "dim", "reverse", "tile"),
    [
        ("sum", (37,), 0, False, Tiling(1, 2, 1, 2)),
        ("affine", (34,), 0, True, Tiling(1, 2, 1, 2, depth=2)),
        ("sum", (17, 3), 0, True, Tiling(2, 2, 1, 2, depth=1)),
        ("sum", (19,), 0, False, STRIPES),
        ("affine", (16,), 0, True, STRIPES),
        ("logsumexp", (2, 16), 1, False, STRIPES),
    ],
)
def test_programs_that_start_in_any_order_end(name, shape, dim, reverse, tile, order, monkeypatch):
    """One after the other, in an order in which what is waited for has not begun. Whoever computes
    a tile's total, its bits are the same."""
    scan = program(name, FP32, reverse)
    inputs = [torch.rand(shape) for _ in scan.inputs]
    monkeypatch.setattr(scan_module, "PATIENCE", 2)
    expected = run(scan, inputs, dim, tile)
    for mine, theirs in zip(run(scan, inputs, dim, tile, order), expected, strict=True):
        assert torch.equal(mine, theirs)


@triton.jit
def reading(some, address, size):
    at = tl.arange(0, 64)
    bytes = tl.load(address.to(tl.pointer_type(tl.int8)) + at, mask=at < size, other=0)
    return some + 0 * tl.sum(bytes.to(tl.int32))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("shape", "dim", "tile"),
    [
        ((2, 29), 1, Tiling(1, 8, 1, 2, fetch=2)),
        ((2, 17, 2), 1, Tiling(1, 8, 1, 2, fetch=2)),
        ((2, 48), 1, Tiling(1, 8, 1, stripes=1, fetch=1)),
    ],
)
def test_what_is_asked_for_is_in_the_tensors(shape, dim, tile, reverse, monkeypatch):
    """Reads outside of what a kernel was given raise in the interpreter."""
    scan_text.kernel.cache_clear()
    monkeypatch.setattr(scan_module, "fetch", reading)
    monkeypatch.setattr(scan_module, "PATIENCE", 8)
    agrees_with_torch(tile, shape, dim, reverse)
    scan_text.kernel.cache_clear()


def test_more_groups_of_groups_than_a_window():
    x = torch.randint(-9, 9, (270,))
    (got,) = run(program("sum", INT64), [x], 0, Tiling(1, 1, 1, 2))
    assert torch.equal(got, x.cumsum(0))


def test_bits_of_a_total_are_kept():
    x = torch.tensor([float("nan"), -0.0, 1e-45, float("inf"), -1.0, 2.0, 3.0]).view(1, -1)
    first = Program((Input(FP32),), (FP32,), ("fp32",), "s0 = x0", "r0 = a0", "y0 = s0")
    for value in x[0].tolist():
        x[0, 0] = value  # carried through all tiles as the state of those in front
        (got,) = run(first, [x], 1, Tiling(1, 2, 1, 2))
        assert torch.equal(got.view(torch.int32), x[:, :1].view(torch.int32).expand(1, 7))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_nothing_to_scan(shape):
    (got,) = run(program("sum", FP32), [torch.empty(shape)], 0, None)
    assert got.shape == shape


def test_what_tensors_walk_alike_is_one_dimension():
    x = torch.empty(4, 6, 50, 8)
    laid = scan_launch.plan(program("sum", FP32), x.shape, [x.stride()], [x.stride()], 2)
    assert laid.arguments["lanes"] == 4 * 6 * 8 and "n2" not in laid.arguments
    rows = scan_launch.plan(program("sum", FP32), x.shape, [x.stride()], [x.stride()], 3)
    assert rows.arguments["lanes"] == 4 * 6 * 50 and "n1" not in rows.arguments
