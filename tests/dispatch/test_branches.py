"""The generated branch: its conditions, what is fused in each side, and its numbers."""

import functools
import itertools
import re

import pytest
import torch
import torch.nn.functional as F

import inductor_ext
from inductor_ext import dispatch
from inductor_ext.testing import assert_golden, compile_for, outline

BF16 = torch.bfloat16
ANY = {0: {0: None}}  # the first argument's first dimension


def r(*size, dtype=BF16):
    return torch.randn(size).to(dtype)


def weight(*size, k=4096):
    return (torch.randn(size) * k**-0.5).to(BF16)


def t(*size, dtype=BF16):
    return torch.empty(*size, dtype=dtype, device="meta")


def sigmoid_router(x, w, bias):
    return torch.sigmoid(F.linear(x, w).float()) + bias


def softmax_router(x, w, bias):
    return (F.linear(x, w).float() + bias).softmax(-1)


ROUTERS = {"sigmoid": sigmoid_router, "softmax": softmax_router}


@functools.cache
def router(scoring):
    torch.manual_seed(0)
    constants = weight(256, 7168, k=7168), torch.randn(256)
    code = compile_for("h200", ROUTERS[scoring], r(16, 7168), *constants, dynamic=ANY)
    return code, constants


@pytest.mark.codegen
@pytest.mark.parametrize("scoring", ROUTERS)
def test_router_outline(scoring, conditions_of):
    code, _ = router(scoring)
    text = "\n".join([*conditions_of(code), "", outline(code)])
    assert_golden(f"router_{scoring}", re.sub(r" loads=\d+", "", text))


@pytest.mark.parametrize("scoring", ROUTERS)
def test_router_decision(scoring):
    code, _ = router(scoring)
    (decision,) = code.decisions
    assert decision.fired and decision.source == "heuristic" and "ranges" in decision.chosen
    spans = [(x.lo, x.hi) for x in decision.ranges]
    assert spans[0][0] == 2 and spans[-1][1] is None
    assert all(a[1] + 1 == b[0] for a, b in itertools.pairwise(spans))
    assert decision.ranges[-1].chosen == "stock" and decision.ranges[0].chosen != "stock"
    assert all(x.size == decision.ranges[0].size for x in decision.ranges)
    one_row_kernel, *split = [x.chosen for x in decision.ranges[:-1]]
    assert one_row_kernel.startswith("dot_")
    assert all(chosen.endswith("_rowwise") == (scoring == "softmax") for chosen in split)
    shown = str(inductor_ext.Report((decision,)))
    assert f"{spans[1][0]}..{spans[1][1]}" in shown and f">= {spans[-1][0]}" in shown


@pytest.mark.codegen
@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 16, 17, 64, 65, 300])
def test_router_numbers_of_one_program(tokens, right_at):
    code, constants = router("sigmoid")
    right_at(code, sigmoid_router, (r(tokens, 7168), *constants))


@pytest.mark.parametrize("tokens", [1, 17, 65])
def test_softmax_router_numbers_of_one_program(tokens, right_at):
    code, constants = router("softmax")
    right_at(code, softmax_router, (r(tokens, 7168), *constants))


def test_router_beyond_the_last_edge(right_at):
    """In the branch of stock."""

    def fn(x, w):
        return torch.relu(x @ w)

    w = weight(2048, 128, k=2048)
    code = compile_for("h200", fn, r(4, 2048), w, dynamic=ANY)
    last = code.decisions[0].ranges[-1]
    assert last.chosen == "stock"
    right_at(code, fn, (r(last.lo, 2048), w))


def test_weights_are_fetched_ahead_where_one_tile_holds_all_rows():
    """As in a static graph: not where several rows of tiles would ask for the same weights."""
    code, _ = router("sigmoid")
    partial = [k.source for k in code.kernels if "SPLITS" in k.source and "BLOCK_K" in k.source]
    ahead = ["cp.async.bulk.prefetch" in source for source in partial]
    assert ahead[:3] == [True, True, True] and not ahead[-1]


def test_an_operand_the_graph_computes_is_not_fetched_ahead():
    code = compile_for("h200", lambda x, w: torch.relu(x @ w.sin().t()), t(8, 4096), t(32, 4096))
    assert "cp.async.bulk.prefetch" not in code.source
    code = compile_for(
        "h200", lambda x, w: torch.relu(x @ w.sin().t()), t(8, 4096), t(32, 4096), dynamic=ANY
    )
    assert len(code.decisions[0].ranges) > 1 and "cp.async.bulk.prefetch" not in code.source


# --- bounds ---------------------------------------------------------------------------------------


def test_bounds_prune_ranges(conditions_of):
    args = t(8, 7168), t(256, 7168), t(256, dtype=torch.float32)

    def ranges(*bounds):
        code = compile_for("h200", sigmoid_router, *args, dynamic={0: {0: bounds}})
        return code, [(x.lo, x.hi) for x in code.decisions[0].ranges]

    everything = [(x.lo, x.hi) for x in router("sigmoid")[0].decisions[0].ranges]
    code, found = ranges(2, 64)
    assert found == everything[:4] and len(conditions_of(code)) == 3
    assert "extern_kernels.mm" not in code.source
    code, found = ranges(3, 16)
    assert found == [(3, 16)] and conditions_of(code) == []
    assert [k.kind for k in code.kernels] == ["template", "template"]
    assert code.decisions[0].fired and code.decisions[0].chosen.startswith("split")


def test_bounds_within_stock_are_stock(conditions_of):
    args = t(2048, 7168), t(256, 7168), t(256, dtype=torch.float32)
    code = compile_for("h200", sigmoid_router, *args, dynamic={0: {0: (1024, 8192)}})
    (decision,) = code.decisions
    assert not decision.fired and "below 4 x" in decision.reason and conditions_of(code) == []
    assert [(x.lo, x.hi, x.chosen) for x in decision.ranges] == [(1024, 8192, "stock")]


# --- derived sizes --------------------------------------------------------------------------------


def test_twice_a_size(conditions_of, right_at):
    def fn(x, w):
        return torch.relu(torch.cat([x, x]) @ w)

    w = weight(4096, 32)
    code = compile_for("h200", fn, r(16, 4096), w, dynamic=ANY)
    (decision,) = code.decisions
    assert "2*s" in decision.sites and not any("*" in x.size for x in decision.ranges)
    assert all(re.fullmatch(r"s0 <= \d+", c) for c in conditions_of(code))
    for rows in (2, 9, 17):
        right_at(code, fn, (r(rows, 4096), w))


def test_an_eighth_of_a_size(conditions_of, right_at):
    def fn(x, w):
        return torch.relu(x[: x.shape[0] // 8] @ w)

    w = weight(4096, 32)
    code = compile_for("h200", fn, r(64, 4096), w, dynamic=ANY)
    first, second, *_ = code.decisions[0].ranges
    assert (first.lo, first.hi, first.chosen) == (2, 7, "stock")  # no row is left
    assert second.lo == 8 and second.chosen != "stock"
    for rows in (2, 8, 140):
        right_at(code, fn, (r(rows, 4096), w))


@pytest.mark.codegen
def test_product_of_two_sizes(conditions_of, right_at):
    def fn(x, w):
        return torch.relu(x @ w)

    w = weight(4096, 32)
    code = compile_for("h200", fn, r(3, 5, 4096), w, dynamic={0: {0: None, 1: None}})
    (decision,) = code.decisions
    assert "*" in decision.ranges[0].size
    assert all(re.fullmatch(r"s0\*s1 <= \d+", c) for c in conditions_of(code))
    for batch, rows in ((2, 2), (3, 9), (2, 40)):
        right_at(code, fn, (r(batch, rows, 4096), w))


def test_products_of_sizes_inside_and_outside(right_at):
    """Such a product has one name in the whole program, and is computed wherever it is needed."""

    def fn(x, w, c, y):
        b, n, _ = x.shape
        first = y.sin() + y[:, :1]  # divides by 48 n, before the branch and after it
        h = torch.relu(x.reshape(b * n, 4096) @ w).reshape(b, n, 64) + c  # by 64 n, inside
        return first, h, (first.cumsum(1) + y[:, :1]) * h.cumsum(1)[:, :1, :1]

    args = r(4, 6, 4096), weight(4096, 64), r(4, 1, 64), r(4, 6, 48)
    b, n = (2, 64), (2, 64)
    code = compile_for("h200", fn, *args, dynamic={0: {0: b, 1: n}, 2: {0: b}, 3: {0: b, 1: n}})
    (decision,) = (d for d in code.decisions if d.lowering == "decompose_k")
    assert len(decision.ranges) > 2
    named = re.findall(r"^( +)(ps\d+) = (.*)$", code.source, re.MULTILINE)
    assert len({indent for indent, *_ in named}) == 2, named
    values = {name: {v for _, n, v in named if n == name} for _, name, _ in named}
    assert len(values) > 1 and all(len(found) == 1 for found in values.values()), named
    for size in ((2, 3), (4, 6), (7, 9), (9, 16)):
        x, y = r(*size, 4096), r(*size, 48)
        right_at(code, fn, (x, args[1], r(size[0], 1, 64), y))


def test_rows_and_batch(conditions_of, right_at):
    def fn(a, b):
        return torch.tanh(torch.bmm(a, b))

    dynamic = {0: {0: None, 1: None}, 1: {0: None}}
    code = compile_for("h200", fn, r(2, 16, 2048), r(2, 2048, 32), dynamic=dynamic)
    (decision,) = code.decisions
    assert 2 < len(decision.ranges) <= 8 and any(x.and_also for x in decision.ranges)
    assert any(" and " in c for c in conditions_of(code))
    for batch, rows in ((2, 2), (3, 40), (9, 3), (2, 130)):
        right_at(code, fn, (r(batch, rows, 2048), weight(batch, 2048, 32, k=2048)))


def test_columns(right_at):
    def fn(a, b):
        return torch.relu(a @ b)

    code = compile_for("h200", fn, r(5, 4096), r(4096, 16), dynamic={1: {1: None}})
    assert len(code.decisions[0].ranges) > 2
    for columns in (2, 20, 60):
        right_at(code, fn, (r(5, 4096), weight(4096, columns)))


# --- regions --------------------------------------------------------------------------------------


def kinds_in_branches(code):
    """Kinds of the kernels launched in each branch."""
    kinds = {k.name: k.kind for k in code.kernels}
    body = code.source[code.source.index("def call") :]
    parts = re.split(r"^\s+(?:if|elif) .*\bs\d+.*:$|^\s+else:$", body, flags=re.MULTILINE)[1:]
    launched = [re.findall(r"(\w+)\.run\(|(extern_kernels\.\w+)\(", part) for part in parts]
    return [[kinds.get(a, b) for a, b in part] for part in launched]


def two_outputs(x, w):
    y = x @ w
    return torch.sigmoid(y), torch.tanh(y).float()


def computed_residual(x, w, skip):
    return torch.relu(x @ w) + torch.tanh(skip)


def transposed_gate(x, w, gate):
    return F.silu(x @ w) * gate.t()


def views_of_the_product(x, w):
    y = torch.relu(x @ w)
    return y, y.view(-1, 2, 16), y.unsqueeze(1), y[:, 3:]


def used_before_the_region_ends(x, w, gate):
    y = x @ w
    early = y.cumsum(1)  # not fused, and in the graph before the gate is computed
    scores = gate.cos().cumsum(1)
    return torch.relu(y) * scores, early


def leaves_and_comes_back(x, w):
    y = torch.relu(x @ w)
    return torch.sin(y) + y.cumsum(1)


def sum_of_everything(x, w):
    return torch.relu(x @ w).float().sum()


def scaled_by_size(x, w):
    return (x @ w) * x.shape[0]


def constant_mask(x, w, y):
    return torch.where(y > 0, (x @ w).float(), float("-inf")).amax(-1)


REGIONS = {
    "two outputs": (two_outputs, (), ["template", "template"]),
    "computed residual": (computed_residual, ((-1, 32),), ["template", "template"]),
    "transposed gate": (transposed_gate, ((32, -1),), ["template", "template"]),
    "views of the product": (views_of_the_product, (), ["template", "template"]),
    "used before it ends": (used_before_the_region_ends, ((-1, 32),), ["template", "template"]),
    "leaves and comes back": (leaves_and_comes_back, (), ["template", "template"]),
    "sum": (sum_of_everything, (), None),
    "scaled by size": (scaled_by_size, (), ["template", "template"]),
    "mask and row maximum": (constant_mask, ((-1, 32),), ["template", "persistent_reduction"]),
}


@pytest.mark.codegen
@pytest.mark.parametrize("case", REGIONS)
def test_regions(case, right_at):
    fn, shapes, kinds = REGIONS[case]

    def args(rows):
        rest = [r(*(rows if n < 0 else n for n in shape)) for shape in shapes]
        return r(rows, 2048), w, *rest

    w = weight(2048, 32, k=2048)
    dynamic = {0: {0: (2, 512)}}
    dynamic |= {2 + i: {shape.index(-1): (2, 512)} for i, shape in enumerate(shapes)}
    code = compile_for("h200", fn, *args(16), dynamic=dynamic)
    (decision,) = (d for d in code.decisions if d.lowering == "decompose_k")
    assert decision.fired and len(decision.ranges) > 2
    branches = kinds_in_branches(code)
    assert len(branches) == len(decision.ranges)
    if kinds is not None:
        for branch, span in zip(branches[:-1], decision.ranges, strict=False):
            assert span.chosen == "stock" or branch == kinds, (branch, span)
    if "cumsum" not in code.source:  # nothing is computed outside
        assert len(code.calls) == sum(map(len, branches))
    for rows in (2, 40):
        right_at(code, fn, args(rows))


def test_outputs_do_not_share_memory():
    from inductor_ext.testing import run_interpreted

    w = weight(2048, 32, k=2048)
    code = compile_for("h200", two_outputs, r(16, 2048), w, dynamic=ANY)
    x = r(5, 2048)
    a, b = run_interpreted(code, x, w)
    storages = {v.untyped_storage().data_ptr() for v in (a, b, x, w)}
    assert len(storages) == 4


def test_two_sites_whose_regions_meet(right_at):
    def fn(x, w, v):
        return F.silu(x @ w) * (x @ v)

    w, v = weight(2048, 32, k=2048), weight(2048, 32, k=2048)
    code = compile_for("h200", fn, r(16, 2048), w, v, dynamic={0: {0: (2, 64)}})
    assert [d.fired for d in code.decisions] == [True, True]
    branches = kinds_in_branches(code)
    assert len(branches) == 2 * len(code.decisions[0].ranges)
    assert all(branch == ["template", "template"] for branch in branches)
    for rows in (2, 40):
        right_at(code, fn, (r(rows, 2048), w, v))


@pytest.mark.codegen
def test_one_site_behind_another(right_at):
    def fn(x, w, v):
        return torch.tanh(torch.relu(x @ w) @ v)

    w, v = weight(2048, 1024, k=2048), weight(1024, 32, k=1024)
    code = compile_for("h200", fn, r(16, 2048), w, v, dynamic={0: {0: (2, 64)}})
    assert any(len(d.ranges) > 1 for d in code.decisions)
    for rows in (2, 40):
        right_at(code, fn, (r(rows, 2048), w, v))


def test_each_branch_is_what_was_chosen_for_it(monkeypatch):
    """Not what the heuristic would pick at its sizes."""
    chosen = ["bmm_split16", "split8_16x16x128_w2_s4_pdl", "stock"]

    def boxes(axes, pick):
        ends = [(2, 9), (10, 99), (100, None)]
        return [dispatch.Box((e,), c, (e[0],)) for e, c in zip(ends, chosen, strict=True)]

    monkeypatch.setattr(dispatch, "boxes_of", boxes)
    code = compile_for(
        "h200", lambda x, w: torch.relu(x @ w), t(16, 4096), t(4096, 32), dynamic=ANY
    )
    (decision,) = code.decisions
    assert [x.chosen for x in decision.ranges] == chosen
    library, ours, stock = kinds_in_branches(code)
    assert "bmm" in library[0] and ours == ["template", "template"]
    assert stock == ["extern_kernels.mm", "pointwise"]


# --- training -------------------------------------------------------------------------------------


def gradients_right(layer, code, rows, features):
    """The interpreted program against autograd, as an error relative to its largest value."""
    from inductor_ext.testing import run_interpreted

    x = r(rows, features)
    x.requires_grad_()
    with torch.no_grad():
        shape = F.gelu(layer(x)).shape
    upstream = r(*shape)
    out, found = run_interpreted(code, x, grad_outputs=[upstream])
    want_x = x.detach().double().requires_grad_()
    parameters = [p.detach().double().requires_grad_() for p in layer.parameters()]
    expected = F.gelu(F.linear(want_x, *parameters))
    expected.backward(upstream.double())
    wanted = {"args[0]": want_x.grad, "weight": parameters[0].grad, "bias": parameters[1].grad}
    torch.testing.assert_close(out.double(), expected.detach(), rtol=2e-2, atol=2e-2)
    for name, gradient in found.items():
        want = wanted[name.split(".")[-1]]
        error = (gradient.double() - want).abs().max() / want.abs().max()
        assert error < 2e-2, (name, error)


@pytest.mark.codegen
@pytest.mark.parametrize(("features", "outputs"), [(1024, 32), (32, 1024)])
def test_training(features, outputs):
    """Ranges in the forward (long rows) and in the backward (long gradients)."""
    layer = torch.nn.Linear(features, outputs).to(BF16)

    def fn(x):
        return F.gelu(layer(x))

    x = torch.empty(16, features, dtype=BF16, requires_grad=True)
    code = compile_for("h200", fn, x, dynamic={0: {0: (2, 64)}}, grad=True)
    in_forward = features > outputs
    part = code.forward if in_forward else code.backward
    assert re.search(r"if s\d+ <= \d+:", part)
    assert any(len(d.ranges) > 1 and d.fired for d in code.decisions)
    for rows in (3, 20):
        gradients_right(layer, code, rows, features)


def test_a_size_that_divides_by_zero_somewhere(right_at):
    """(s//4) * (s // (s//4)) rows: fewer than 4 can't be, but they are within the bounds."""

    def fn(x, w):
        return torch.relu(x.view(-1, 4, 2048) @ w)

    w = weight(2048, 32, k=2048)
    code = compile_for("h200", fn, r(64, 2048), w, dynamic=ANY)
    assert len(code.decisions[0].ranges) > 2 and code.decisions[0].ranges[0].chosen == "stock"
    for rows in (4, 12, 40):
        right_at(code, fn, (r(rows, 2048), w))
