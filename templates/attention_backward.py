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

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import attention_dropout as dropout
from .attention_forward import hull
from .attention_program import Program
from .attention_text import (
    Loops,
    Operand,
    indented,
    input_loads,
    joined,
    kept,
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


def place_of(axis: str, limit: str, block: str, last_first: bool) -> str:
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


def statistic(form: Form, name: str, expanded: str) -> str:
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


def pieces_of(operand: Operand) -> list[str]:
    return [f"{operand.name}{i}" for i in range(len(operand.pieces))]


def loaded(operand: Operand, start: str, block: str, limit: str) -> str:
    lines = [
        f"{operand.name}{i} = {operand.load(i, start, block, limit)}"
        for i in range(len(operand.pieces))
    ]
    return "\n".join(lines)


def transposed(names: Sequence[str]) -> list[str]:
    return [f"tl.trans({name})" for name in names]


def along(program: Program, axis: str) -> tuple[list[int], list[int]]:
    """The inputs that vary along ``axis``, which is that of the loop, and the others, which are
    loaded in front of it."""
    every = range(len(program.inputs))
    moving = [i for i in every if axis in program.inputs[i].axes]
    return moving, [i for i in every if i not in moving]


def held_inputs(program: Program, form: Form, axis: str) -> str:
    q_and_k = "q = q_start + ql" if axis == "k" else "k = k_start + kl"
    _, held = along(program, axis)
    loads = input_loads(program, False, False, held, described=())
    return joined(q_and_k, loads) if held else ""


def score_of(
    program: Program, form: Form, masked: str, q_inside: bool, k_inside: bool, axis: str
) -> str:
    """From ``s`` to ``r``, -inf where nothing is kept in tiles that are ``masked``: "" none of
    them, "always" all, else where the condition holds. ``axis``: that of the loop, "" for none."""
    moving, _ = along(program, axis) if axis else (list(range(len(program.inputs))), [])
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


def hull_of(program: Program, tile: str) -> str:
    return hull("doc", tile) if program.documents else ""


def common_parameters(program: Program, form: Form) -> list[str]:
    """Parameters of every kernel behind its own."""
    documents = ["doc_ptr", "doc_b", "doc_h"] if program.documents else []
    more = [*documents, *dropout.parameters(program)]
    more += ["lost_ptr"] if form.lost else []
    return [*more, *score_parameters(program, form.described), *SIZES]


def unspecialised(program: Program) -> list[str]:
    numbers = (f"n{i}" for i in range(program.numbers))
    return [*SIZES, *numbers, *dropout.UNSPECIALISED]


def weight_gradient(
    program: Program, left: Sequence[str], right: Sequence[str], options: str, shape: str
) -> str:
    """``dp``: dP - delta, of the product ``left right^T`` of do and v."""
    if not program.dropout:
        start = f"tl.broadcast_to(-delta, {shape})"
        return f"dp = {product(left, transposed(right), options, start)}"
    return joined(
        f"dp = {product(left, transposed(right), options)}",
        "dp = dp * drop_factor - delta",
    )


def gradient_of(program: Program, inputs: Sequence[int]) -> str:
    """From ``g`` to ``ds`` and the inputs' gradients. Where ds is a multiple of g, its factor waits
    for the end."""
    if program.factor is None:
        return program.gradient
    return joined(program.gradient if inputs else "", "ds = g")


def ds_factor(program: Program) -> str:
    return "" if program.factor is None else f" * {program.factor!r}"


def tiles_of(over: Loops, form: Form, body: Callable[[str], str]) -> str:
    """The loops around ``body``, which is given the condition under which a tile is masked."""
    if form.merged:
        return over.merged(body("step >= whole"))
    return joined(over.full(body("")), over.partial(body("always")))


def product_options(form: Form) -> str:
    return f', input_precision="{form.precision}"' if form.precision else ""


def summed(name: str, form: Form) -> str:
    return "\n".join(f"{name}{i} += tl.sum(tl.broadcast_to(d{i}, p.shape), 1)" for i in form.inputs)


def if_lost(form: Form, place: str, lost: str, rest: str) -> str:
    return joined(place, f"if {lost} > 0:", indented(rest)) if form.lost else joined(place, rest)
