"""Gradients of attention, as texts of two kernels around a score's ``Program``.

With p = exp2(r - lse2) (lse2: lse in units of log 2), and for a row with gradient do of the output

    delta = sum(do * out) - dlse         dP = do v^T
    g = p * (dP - delta)                 gradient for the score in natural units
    ds = gradient(g)                     of the program
    dv = p^T do      dk = ds^T q      dq = ds k

Where weights are dropped out, do v^T and the p of dv have a factor, 0 or 1 / (1 - dropout).

``attention_backward_sums`` has the kernels in front and behind: delta and lse2, sums of pairs.
``keys_kernel`` holds a tile of keys and goes over query rows and the heads of a group; its tiles
are transposed, [keys, rows], so that p and ds are the left operands of their products as they come
out of registers. ``rows_kernel`` holds a tile of query rows and goes over keys; the gradient of an
input with both it stores pair by pair, for some heads at a time, which are summed over what the
input is broadcast along. No two programs add to one place in memory, so all is deterministic. A row
without keys has lse2 = inf, hence p = 0: its gradients are 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import attention_dropout as dropout
from .attention_forward import hull
from .attention_program import Program
from .attention_text import (
    Loops,
    Operand,
    indented,
    input_loads,
    inputs_at,
    joined,
    kept,
    kernel_of,
    loops,
    product,
    score_parameters,
)

# Sizes that are not to be compiled in.
SIZES = ["rows", "columns", "kv_heads", "group", "heads", "together", "padded"]

# Which heads of which batches a launch is for.
PART = ["first_batch", "first_head", "some_heads"]

STATISTICS = ("shift", "delta")  # lse2 and delta


def gradient_axis(axes: str) -> str:
    """How the gradient of an input that varies along ``axes`` is made: by sums over "rows" (not
    along keys), over "columns" (along keys only), or as "pairs"."""
    return "rows" if "k" not in axes else "pairs" if "q" in axes else "columns"


@dataclass(frozen=True)
class Form:
    """What is compiled besides the program. ``head``, ``value``: D and Dv. ``tma``: q, k, v and
    do through tensor descriptors, ``descriptors``: lse2 and delta as well, ``described``: which of
    the score's inputs. ``dk``, ``dv``, ``dq``: the pieces of the head whose gradient a kernel
    makes. ``inputs``: the numbers of the inputs whose gradient it sums, ``pairs``: of those whose
    gradient it stores for each pair, ``stored``: through descriptors. ``merged``: one loop over
    all tiles, whose mask is a branch, in place of one over whole tiles and one over the others.
    ``early``: dP is made before p, so that the other products follow one another. ``streamed``: the
    inputs along rows only that the keys kernel reads through descriptors. ``lost``: only of tiles
    with a row, or of heads with one, that a likely program has left out."""

    head: int
    value: int
    tma: tuple[bool, bool, bool, bool]
    descriptors: bool
    described: tuple[int, ...]
    precision: str
    dq: tuple[int, ...] = ()
    dk: tuple[int, ...] = ()
    dv: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    pairs: tuple[int, ...] = ()
    stored: bool = False
    merged: bool = False
    early: bool = False
    streamed: tuple[int, ...] = ()
    lost: bool = False

    @property
    def again(self) -> bool:
        """Whether what a program holds is loaded anew for each tile: fp32 in parts of TF32 would
        else be held in registers, and spill."""
        return self.precision == "tf32x3"

    @property
    def operands(self) -> tuple[Operand, Operand, Operand, Operand]:
        q, k, v, do = self.tma
        return (
            Operand("query", self.head, q),
            Operand("key", self.head, k),
            Operand("value", self.value, v),
            Operand("out_grad", self.value, do),
        )


# ----------------------------------------------------------------------------------------
# what the kernels share


def _place(axis: str, limit: str, block: str, last_first: bool) -> str:
    """The tile and head of a program: ``together`` heads take turns, tile by tile, so that what
    they read stays in the L2 and the longest tiles still come first."""
    tile = "tiles - 1 - rest // width" if last_first else "rest // width"
    return f"""pid = tl.program_id(0)
tiles = tl.cdiv({limit}, {block})
many = tiles * together
chunk = pid // many
rest = pid % many
width = tl.minimum(together, tl.num_programs(0) // tiles - chunk * together)
{axis}_start = ({tile}) * {block}
bh = chunk * together + rest % width"""


def _statistic(form: Form, name: str, expanded: str) -> str:
    """A load of ``shift`` or ``delta`` of the tile's rows; there are more of both than rows.

    Through descriptors where those are: a pipelined load of a row by pointers takes a register per
    element and thread, since its layout is that of what it is subtracted from."""
    if form.descriptors:
        load = f"{name}_desc.load([row, q_start]).reshape(BLOCK_M)"
    else:
        load = f"tl.load({name}_ptr + row_at + q_start + tl.arange(0, BLOCK_M))"
    return f"{name} = {load}{expanded}"


def statistics_parameters(form: Form) -> list[str]:
    return [f"{name}_{'desc' if form.descriptors else 'ptr'}" for name in STATISTICS]


def _names(operand: Operand) -> list[str]:
    return [f"{operand.name}{i}" for i in range(len(operand.pieces))]


def _loaded(operand: Operand, start: str, block: str, limit: str) -> str:
    lines = [
        f"{operand.name}{i} = {operand.load(i, start, block, limit)}"
        for i in range(len(operand.pieces))
    ]
    return "\n".join(lines)


def _transposed(names: Sequence[str]) -> list[str]:
    return [f"tl.trans({name})" for name in names]


def _along(program: Program, axis: str) -> tuple[list[int], list[int]]:
    """The inputs that vary along ``axis``, which is that of the loop, and the others, which are
    loaded in front of it."""
    every = range(len(program.inputs))
    moving = [i for i in every if axis in program.inputs[i].axes]
    return moving, [i for i in every if i not in moving]


def _held_inputs(program: Program, form: Form, axis: str) -> str:
    q_and_k = "q = q_start + ql" if axis == "k" else "k = k_start + kl"
    _, held = _along(program, axis)
    loads = input_loads(program, False, False, held, described=())
    return joined(q_and_k, loads) if held else ""


def _score(
    program: Program, form: Form, masked: str, q_inside: bool, k_inside: bool, axis: str
) -> str:
    """From ``s`` to ``r``, -inf where nothing is kept in tiles that are ``masked``: "" none of
    them, "always" all, else where the condition holds. ``axis``: that of the loop, "" for none."""
    moving, _ = _along(program, axis) if axis else (list(range(len(program.inputs))), [])
    described = form.described
    streamed = [i for i in moving if i in form.streamed]
    loads = input_loads(
        program, q_inside, k_inside, [i for i in moving if i not in streamed],
        described=described, transposed=axis == "q",
    )  # fmt: skip
    lines = ["q = q_start + ql", "k = k_start + kl", loads]
    for i in streamed:
        b, h = (name if name in program.inputs[i].axes else "0" for name in "bh")
        lines.append(f"x{i} = x{i}_row.load([{b}, {h}, 0, q_start]).reshape(1, BLOCK_M)")
    lines.append(program.score)
    mask = joined(kept(program, q_inside, k_inside), 'r = tl.where(keep, r, float("-inf"))')
    if masked == "always":
        lines.append(mask)
    elif masked:
        lines.append(f"if {masked}:\n{indented(mask)}")
    return joined(*lines)


def _hull(program: Program, tile: str) -> str:
    return hull("doc", tile) if program.documents else ""


def _given(program: Program, form: Form) -> list[str]:
    """Parameters of every kernel behind its own."""
    documents = ["doc_ptr", "doc_b", "doc_h"] if program.documents else []
    more = [*documents, *dropout.parameters(program)]
    more += ["lost_ptr"] if form.lost else []
    return [*more, *score_parameters(program, form.described), *SIZES]


def _unspecialised(program: Program) -> list[str]:
    numbers = (f"n{i}" for i in range(program.numbers))
    return [*SIZES, *numbers, *dropout.UNSPECIALISED]


def _weight_gradient(
    program: Program, left: Sequence[str], right: Sequence[str], options: str, shape: str
) -> str:
    """``dp``: dP - delta, of the product ``left right^T`` of do and v."""
    if not program.dropout:
        start = f"tl.broadcast_to(-delta, {shape})"
        return f"dp = {product(left, _transposed(right), options, start)}"
    return joined(
        f"dp = {product(left, _transposed(right), options)}",
        "dp = dp * drop_factor - delta",
    )


def _gradient(program: Program, inputs: Sequence[int]) -> str:
    """From ``g`` to ``ds`` and the inputs' gradients. Where ds is a multiple of g, its factor waits
    for the end."""
    if program.factor is None:
        return program.gradient
    return joined(program.gradient if inputs else "", "ds = g")


def _ds_factor(program: Program) -> str:
    return "" if program.factor is None else f" * {program.factor!r}"


def _tiles(over: Loops, form: Form, body: Callable[[str], str]) -> str:
    """The loops around ``body``, which is given the condition under which a tile is masked."""
    if form.merged:
        return over.merged(body("step >= whole"))
    return joined(over.full(body("")), over.partial(body("always")))


def _options(form: Form) -> str:
    return f', input_precision="{form.precision}"' if form.precision else ""


# ----------------------------------------------------------------------------------------
# dk, dv, and gradients of inputs along keys


def _keys_body(program: Program, form: Form, masked: str) -> str:
    """A tile of query rows: p^T and ds^T, [BLOCK_N, BLOCK_M]."""
    query, key, value, out_grad = form.operands
    options = _options(form)
    limit = "rows" if masked else ""
    given = ""
    if form.dk or form.inputs:
        given = joined(
            _statistic(form, "delta", "[None, :]"),
            _weight_gradient(
                program, _names(value), _names(out_grad), options, "[BLOCK_N, BLOCK_M]"
            ),
        )
    lines = [
        _held_keys(form) if form.again else "",
        _loaded(query, "q_start", "BLOCK_M", limit),
        _loaded(out_grad, "q_start", "BLOCK_M", limit),
        f"s = {product(_names(key), _transposed(_names(query)), options)}",
        joined(dropout.draws(program, "row"), given) if form.early else "",
        _score(program, form, masked, not masked, False, "q"),
        _statistic(form, "shift", "[None, :]"),
        "p = tl.exp2(r - shift)",
        "" if form.early else dropout.draws(program, "row"),
    ]
    if form.dv:
        weights = "(p * drop_factor)" if program.dropout else "p"
        lines.append(f"narrow = {weights}.to(out_grad0.dtype)")
    for i in form.dv:
        lines.append(f"dv{i} = tl.dot(narrow, out_grad{i}, dv{i}{options})")
    if given:
        lines += ["" if form.early else given, "g = p * dp", _gradient(program, form.inputs)]
    lines.append(_summed("sum", form))
    if form.dk:
        lines.append("narrow_ds = ds.to(query0.dtype)")
    for i in form.dk:
        lines.append(f"dk{i} = tl.dot(narrow_ds, query{i}, dk{i}{options})")
    return joined(*lines)


def _held_keys(form: Form) -> str:
    _, key, value, _ = form.operands
    lines = [_loaded(key, "k_start", "BLOCK_N", "columns")]
    if form.dk or form.inputs:
        lines.append(_loaded(value, "k_start", "BLOCK_N", "columns"))
    return joined(*lines)


def keys_parameters(program: Program, form: Form) -> list[str]:
    names = [name for operand in form.operands for name in operand.parameters]
    for name in ("dk", "dv"):
        if getattr(form, name):
            names += Operand(name, 0).parameters
    names += [*statistics_parameters(form), *(f"sum{i}_ptr" for i in form.inputs)]
    names += [f"x{i}_row" for i in form.streamed]
    return [*names, *_given(program, form)]


def _keys(program: Program, form: Form) -> str:
    query, key, value, out_grad = form.operands
    documents = "doc" if program.documents else ""
    over = loops(program.column_spans, "q", "rows", "BLOCK_M", hull=documents)
    zeros = [
        f"{name}{i} = tl.zeros([BLOCK_N, {operand.pieces[i].size}], tl.float32)"
        for name, operand, which in (("dk", key, form.dk), ("dv", value, form.dv))
        for i in which
    ]
    sums = [f"sum{i} = tl.zeros([BLOCK_N], tl.float32)" for i in form.inputs]
    stored = [
        f"tl.store(sum{i}_ptr + (tl.cast(b, tl.int64) * heads + h) * columns + keys, "
        f"sum{i}, keys < columns)"
        for i in form.inputs
    ]
    head = joined(
        "h = kv_head * group + member",
        query.at(),
        out_grad.at(),
        inputs_at(program, described=form.described),
        "row = b * heads + h",
        "row_at = tl.cast(row, tl.int64) * padded",
        _held_inputs(program, form, "q"),
        _hull(program, "k_start // BLOCK_N"),
        over.head if documents else "",
        *sums,
        _tiles(over, form, functools.partial(_keys_body, program, form)),
        *stored,
    )
    ends = []
    for name, dim, which in (("dk", form.head, form.dk), ("dv", form.value, form.dv)):
        if not which:
            continue
        result = Operand(name, dim)
        factor = _ds_factor(program) if name == "dk" else ""
        ends.append(result.at("b", "kv_head"))
        for i in which:
            ends.append(result.store(i, "k_start", "BLOCK_N", "columns", f"{name}{i}{factor}"))
    place = joined(_place("k", "columns", "BLOCK_N", False), *_batch_and_head(program))
    return _if_lost(form, place, "tl.load(lost_ptr + b * kv_heads + kv_head)", joined(
        "ql = tl.arange(0, BLOCK_M)[None, :]",
        "kl = tl.arange(0, BLOCK_N)[:, None]",
        "keys = k_start + tl.arange(0, BLOCK_N)",
        "k0 = k_start",
        "k1 = tl.minimum(k_start + BLOCK_N, columns) - 1",
        key.at("b", "kv_head"),
        value.at("b", "kv_head"),
        dropout.seeded(program),
        "" if form.again else _held_keys(form),
        *zeros,
        "" if documents else over.head,
        "for member in range(0, group):",
        indented(head),
        *ends,
    ))  # fmt: skip


def _if_lost(form: Form, place: str, lost: str, rest: str) -> str:
    return joined(place, f"if {lost} > 0:", indented(rest)) if form.lost else joined(place, rest)


def _batch_and_head(program: Program) -> list[str]:
    """Batches that share a matrix lie side by side: it is most of what a tile reads."""
    axes = [set(given.axes) for given in program.inputs]
    if any({"q", "k"} <= a and "b" not in a for a in axes):
        batches = "batches = tl.num_programs(0) // (tiles * kv_heads)"
        return [batches, "b = bh % batches", "kv_head = bh // batches"]
    return ["b = bh // kv_heads", "kv_head = bh % kv_heads"]


@functools.cache
def keys_kernel(program: Program, form: Form) -> Any:
    return kernel_of(
        "attention_keys",
        keys_parameters(program, form),
        ["BLOCK_M", "BLOCK_N", "STAGES"],
        _keys(program, form),
        unspecialised=_unspecialised(program),
    )


# ----------------------------------------------------------------------------------------
# dq, and gradients of inputs along rows


def _rows_body(program: Program, form: Form, masked: str) -> str:
    """A tile of keys: p and ds, [BLOCK_M, BLOCK_N]."""
    query, key, value, out_grad = form.operands
    options = _options(form)
    limit = "columns" if masked else ""
    given = _weight_gradient(
        program, _names(out_grad), _names(value), options, "[BLOCK_M, BLOCK_N]"
    )
    lines = [
        _held_rows(form) if form.again else "",
        _loaded(key, "k_start", "BLOCK_N", limit),
        _loaded(value, "k_start", "BLOCK_N", limit),
        f"s = {product(_names(query), _transposed(_names(key)), options)}",
        joined(dropout.draws(program, "row"), given) if form.early else "",
        _score(program, form, masked, False, not masked, "k"),
        "p = tl.exp2(r - shift)",
        "" if form.early else joined(dropout.draws(program, "row"), given),
        "g = p * dp",
        _gradient(program, form.inputs + form.pairs),
    ]
    for i in form.pairs:
        lines.append(_stored_pairs(form, i, f"tl.broadcast_to(d{i}, [BLOCK_M, BLOCK_N])"))
    if form.dq:
        lines.append("narrow_ds = ds.to(key0.dtype)")
    for i in form.dq:
        lines.append(f"dq{i} = tl.dot(narrow_ds, key{i}, dq{i}{options})")
    if form.inputs:
        lines += [_summed("sum", form), "sum_g += tl.sum(g, 1)", "sum_p += tl.sum(p, 1)"]
        lines += ["g = p", program.gradient, _summed("weight", form)]
    return joined(*lines)


def _summed(name: str, form: Form) -> str:
    return "\n".join(f"{name}{i} += tl.sum(tl.broadcast_to(d{i}, p.shape), 1)" for i in form.inputs)


def _stored_pairs(form: Form, i: int, value: str) -> str:
    """``value`` for a tile's pairs. There is memory for whole tiles: no mask, wide stores."""
    if form.stored:
        return f"pair{i}_desc.store([pair_row, k_start], ({value}).to(pair{i}_desc.dtype))"
    at = f"pair{i}_at + (ql * pair_step + (k_start + kl))"
    return f"tl.store({at}, ({value}).to(pair{i}_ptr.dtype.element_ty))"


def _unkept_pairs(program: Program, form: Form) -> str:
    """Zeros for the pairs of tiles that the loops leave out."""
    lo, hi = [], []
    for span in program.row_spans:
        lo.append(f"tl.maximum({span.lo}, doc_lo)" if program.documents else span.lo)
        hi.append(f"tl.minimum({span.hi}, doc_hi)" if program.documents else span.hi)
    if not form.pairs or list(zip(lo, hi, strict=True)) == [("0", "columns")]:
        return ""
    touched = " | ".join(
        f"((k_start < {b}) & (k_start + BLOCK_N > {a}))" for a, b in zip(lo, hi, strict=True)
    )
    zeros = [_stored_pairs(form, i, "tl.zeros([BLOCK_M, BLOCK_N], tl.float32)") for i in form.pairs]
    return joined(
        "for k_start in range(0, columns, BLOCK_N):",
        f"    if not ({touched}):",
        indented(joined(*zeros), 8),
    )


def _corrected(form: Form) -> str:
    """Row sums of inputs' gradients with the delta of this very sum.

    delta is made of an output that was rounded, an error that all of a row shares, which averages
    out in sums along other axes. Here the sum of p dP - delta, which is dlse, tells it, and a
    gradient is linear in g: that of g = p says what the error has added. Rows far from 0 have p and
    1 / dlse times the sum of p."""
    lines = ["off = tl.load(lse_grad_ptr + row_at + at) * sum_p - sum_g"]
    lines.append("off = off / tl.where(sum_p > 0, sum_p, 1.0)")
    lines += [f"sum{i} += off * weight{i}" for i in form.inputs]
    lines += [f"tl.store(sum{i}_ptr + row_at + at, sum{i})" for i in form.inputs]
    return joined("at = q_start + tl.arange(0, BLOCK_M)", *lines) if form.inputs else ""


def _held_rows(form: Form) -> str:
    query, *_, out_grad = form.operands
    rows = "q_start", "BLOCK_M", "rows"
    return joined(_loaded(query, *rows), _loaded(out_grad, *rows))


def rows_parameters(program: Program, form: Form) -> list[str]:
    names = [name for operand in form.operands for name in operand.parameters]
    if form.dq:
        names += Operand("dq", 0).parameters
    names += [*statistics_parameters(form), *(f"sum{i}_ptr" for i in form.inputs)]
    names += ["lse_grad_ptr"] if form.inputs else []
    names += [f"pair{i}_{'desc' if form.stored else 'ptr'}" for i in form.pairs]
    names += ["pair_step", "pair_rows", *PART] if form.pairs else []
    return [*names, *_given(program, form)]


def _rows(program: Program, form: Form) -> str:
    query, key, value, out_grad = form.operands
    documents = "doc" if program.documents else ""
    over = loops(program.row_spans, "k", "columns", "BLOCK_N", hull=documents)
    ends = []
    sums = [f"{name}{i}" for i in form.inputs for name in ("sum", "weight")]
    sums += ["sum_g", "sum_p"] if sums else []
    if form.dq:
        result = Operand("dq", form.head)
        factor = _ds_factor(program)
        ends.append(result.at())
        for i in form.dq:
            ends.append(result.store(i, "q_start", "BLOCK_M", "rows", f"dq{i}{factor}"))
    some = ["b = bh // heads", "h = bh % heads"]
    if form.pairs:
        some = ["b = first_batch + bh // some_heads", "h = first_head + bh % some_heads"]
        some.append("pair_row = bh * pair_rows + q_start")
        if not form.stored:
            first = "tl.cast(pair_row, tl.int64) * pair_step"
            some += [f"pair{i}_at = pair{i}_ptr + {first}" for i in form.pairs]
    lost = "lost_ptr + tl.cast(b * heads + h, tl.int64) * padded + q_start + tl.arange(0, BLOCK_M)"
    place = joined(_place("q", "rows", "BLOCK_M", True), *some)
    return _if_lost(form, place, f"tl.max(tl.load({lost}), 0)", joined(
        "kv_head = h // group",
        "ql = tl.arange(0, BLOCK_M)[:, None]",
        "kl = tl.arange(0, BLOCK_N)[None, :]",
        "q0 = q_start",
        "q1 = tl.minimum(q_start + BLOCK_M, rows) - 1",
        query.at(),
        out_grad.at(),
        key.at("b", "kv_head"),
        value.at("b", "kv_head"),
        inputs_at(program, described=form.described),
        "row = b * heads + h",
        "row_at = tl.cast(row, tl.int64) * padded",
        _statistic(form, "shift", "[:, None]"),
        _statistic(form, "delta", "[:, None]"),
        dropout.seeded(program),
        "" if form.again else _held_rows(form),
        *(f"dq{i} = tl.zeros([BLOCK_M, {query.pieces[i].size}], tl.float32)" for i in form.dq),
        *(f"{name} = tl.zeros([BLOCK_M], tl.float32)" for name in sums),
        _held_inputs(program, form, "k"),
        _hull(program, "q_start // BLOCK_M"),
        over.head,
        _tiles(over, form, functools.partial(_rows_body, program, form)),
        _unkept_pairs(program, form),
        *ends,
        _corrected(form),
    ))  # fmt: skip


@functools.cache
def rows_kernel(program: Program, form: Form) -> Any:
    return kernel_of(
        "attention_rows",
        rows_parameters(program, form),
        ["BLOCK_M", "BLOCK_N", "STAGES"],
        _rows(program, form),
        unspecialised=[*_unspecialised(program), *(PART if form.pairs else [])],
    )
