"""Launches of attention's backward: see ``attention_backward`` for the formulas."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton
from triton.tools.tensor_descriptor import TensorDescriptor

from . import attention_backward_gluon_launch as gluon
from . import attention_documents, attention_far, attention_forward, attention_gluon_launch
from .attention_backward import Form, gradient_axis
from .attention_backward_keys import keys_kernel
from .attention_backward_rows import rows_kernel
from .attention_backward_sums import statistics_kernel, sums_kernel
from .attention_backward_tilings import (
    Tiling,
    fitted,
    keys_tiling,
    rows_tiling,
    shared_bytes,
    width,
)
from .attention_dropout import Dropout
from .attention_launch import dense, products
from .attention_program import LOWEST, Program
from .attention_text import DESCRIBED, Operand, by_tma, describable, pieces, score_values

ROWS = 128  # the most query rows or keys of a tile
SUMMED = 16, 128  # the rows and keys whose sums a program makes
PAIR_BYTES = 1 << 29  # of gradients for single pairs that are in memory at a time


def _like(tensor: Tensor) -> Tensor:
    out = torch.empty_like(tensor)
    return out if out.stride(-1) == 1 else out.new_empty(tensor.shape)


def _row_descriptor(rows: Tensor, block: int) -> TensorDescriptor:
    """Of [B or 1, H or 1, 1, Sq]."""
    # The stride of a dimension of size 1 is any number, and has to be a fit one.
    strides = [16 if n == 1 else s for n, s in zip(rows.shape, rows.stride(), strict=True)]
    return TensorDescriptor(rows, list(rows.shape), [*strides[:3], 1], [1, 1, 1, block])


def _reduced(partials: Tensor, given: Tensor, axes: str) -> Tensor:
    """[B, H, Sq or 1, Sk or 1] summed over what the input is broadcast along."""
    over = [i for i, axis in enumerate("bhqk") if axis not in axes and partials.shape[i] != 1]
    total = partials.sum(over, keepdim=True) if over else partials
    return total.to(given.dtype).reshape(given.shape)


class _Backward:
    """One call: what all its launches are given."""

    def __init__(
        self, do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
        inputs: Sequence[Tensor], numbers: Sequence[int], program: Program, out: Tensor,
        lse: Tensor, precision: str, keep_dlse: bool = False, dropout: Dropout | None = None,
    ) -> None:  # fmt: skip
        self.dropout = dropout
        self.lost: Tensor | None = None  # rows that a likely program leaves out
        self.program, self.inputs, self.numbers = program, inputs, numbers
        self.q, self.k, self.v, self.do = map(dense, (q, k, v, do))
        self.batches, self.heads, self.rows = q.shape[:3]
        self.kv_heads, self.columns = k.shape[1:3]
        self.precision = products(q.dtype, precision)
        self.tma = tuple(map(by_tma, (self.q, self.k, self.v, self.do)))
        # Rows are padded to whole tiles of every tiling: their loads need no mask.
        self.padded = triton.cdiv(self.rows, ROWS) * ROWS
        # Through descriptors: what is along keys, and, where those stay, what is along rows.
        self.described = describable(program, inputs)
        axes = [given.axes for given in program.inputs]
        self.matrices = tuple(i for i in self.described if "q" in axes[i])
        self.streamed = tuple(
            i
            for i, tensor in enumerate(inputs)
            if "q" in axes[i] and "k" not in axes[i] and tensor.dtype in DESCRIBED
            if by_tma(tensor.mT)
        )
        self.delta = self.fp32(2, *q.shape[:2], self.padded)
        self.dlse = self.fp32(*q.shape[:2], self.padded) if keep_dlse else None
        if program.likely is not None:
            self.lost = torch.empty_like(self.delta[0], dtype=torch.int32)
        if attention_far.applies(program):
            shift, factor = self._far(lse.contiguous())
            scaled = torch.empty_like(self.do)  # in one pass, rounded once
            self.do = torch.mul(self.do, factor.unsqueeze(-1), out=scaled)
            dlse = None if dlse is None else dlse * factor
            self._statistics(dense(out), lse.contiguous(), dlse)
            self.delta[1][..., : self.rows].copy_(shift)
        else:
            self._statistics(dense(out), lse.contiguous(), dlse)

    def likely(self, lse: Tensor) -> _Backward:
        """The same of the likely program, for which the rows that it leaves out have no keys."""
        call = copy.copy(self)
        assert self.program.likely is not None
        call.program, call.lost = self.program.likely, None
        call.delta = self.delta.clone()
        call.delta[1][..., : self.rows].masked_fill_(lse < LOWEST, math.inf)
        return call

    def _far(self, lse: Tensor) -> tuple[Tensor, Tensor]:
        """lse2 and factors, also of rows far from 0."""
        layout = attention_forward.Layout(
            Operand("q", self.q.shape[3], self.tma[0]), Operand("k", self.k.shape[3], self.tma[1]),
            Operand("v", self.v.shape[3], self.tma[2]), self.precision, False, self.described,
        )  # fmt: skip
        return attention_far.launch(
            self.q, self.k, lse, self.inputs, self.numbers, self.program, layout
        )

    def form(self, **parts: Any) -> Form:
        tma: Any = self.tma
        head, value = self.q.shape[3], self.v.shape[3]
        given: dict[str, Any] = {"described": self.described} | parts
        lost = self.lost is not None
        return Form(
            head, value, tma, by_tma(self.delta), precision=self.precision, lost=lost, **given
        )

    def fp32(self, *size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float32, device=self.q.device)

    def _statistics(self, out: Tensor, lse: Tensor, dlse: Tensor | None) -> None:
        columns = triton.next_power_of_2(out.shape[3])
        dlse_strides = (0, 0, 0) if dlse is None else dlse.stride()
        block = max(1, 4096 // columns)
        programs = triton.cdiv(self.padded, block) * self.batches * self.heads
        wrap_triton(statistics_kernel)[(programs,)](
            out, self.do, lse, dlse, *self.delta, self.dlse, self.lost, self.rows, self.padded,
            self.heads, *out.stride()[:3], *self.do.stride()[:3], *dlse_strides,
            VALUE=out.shape[3], COLUMNS=columns, ROWS=block, LOWEST=LOWEST, num_warps=4,
        )  # fmt: skip

    def _given(self, form: Form, block_m: int, block_n: int) -> dict[str, Any]:
        """Arguments of every kernel."""
        blocks = (block_m, block_n, block_n, block_m)
        values: dict[str, Any] = {}
        tensors = (self.q, self.k, self.v, self.do)
        for operand, tensor, block in zip(form.operands, tensors, blocks, strict=True):
            values |= operand.values(tensor, block)
        values |= self._rows(form, block_m)
        values |= {} if self.dropout is None else self.dropout.values()
        values |= score_values(
            self.program, self.inputs, self.numbers, form.described, (block_m, block_n)
        )
        values |= {
            "rows": self.rows, "columns": self.columns, "kv_heads": self.kv_heads,
            "group": self.heads // self.kv_heads, "heads": self.heads, "padded": self.padded,
            "BLOCK_M": block_m, "BLOCK_N": block_n,
        }  # fmt: skip
        return values

    def _rows(self, form: Form, block: int) -> dict[str, Any]:
        """lse2 and delta, as the kernels are given them."""
        if not form.descriptors:
            return {"delta_ptr": self.delta[0], "shift_ptr": self.delta[1]}
        delta, shift = self.delta.flatten(1, 2)
        return {
            name: TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [1, block])
            for name, rows in (("delta_desc", delta), ("shift_desc", shift))
        }

    def _together(self, length: int, heads: int, near: int) -> int:
        """How many heads take turns, whose tensors of ``length`` are ``near`` MiB."""
        each = length * (self.q.shape[3] + self.v.shape[3]) * self.q.element_size()
        return max(1, min(heads, (near << 20) // max(each, 1)))

    def keys(
        self, dk: Tensor | None, dv: Tensor | None, sums: dict[int, Tensor], chosen: Tiling
    ) -> None:
        """dk, dv, and ``sums`` [B, Hq, Sk] of the inputs along keys."""
        if chosen.apart and dk is not None and dv is not None:
            self.keys(None, dv, {}, chosen)
            dv = None
        chosen = self._fitted(chosen, True)
        form = self.form(
            dk=() if dk is None else tuple(range(len(pieces(self.q.shape[3])))),
            dv=() if dv is None else tuple(range(len(pieces(self.v.shape[3])))),
            inputs=tuple(sums), merged=chosen.merged, early=chosen.early,
            described=self.matrices, streamed=self.streamed,
        )  # fmt: skip
        values = self._given(form, chosen.block_m, chosen.block_n)
        values |= {
            f"x{i}_row": _row_descriptor(self.inputs[i].mT, chosen.block_m) for i in self.streamed
        }
        heads = self.batches * self.kv_heads
        values["together"] = self._together(
            self.rows * self.heads // self.kv_heads, heads, chosen.near
        )
        for name, tensor in (("dk", dk), ("dv", dv)):
            if tensor is not None:
                values |= Operand(name, tensor.shape[3]).values(tensor, 0)
        values |= {f"sum{i}_ptr": tensor for i, tensor in sums.items()}
        if self.lost is not None:  # of any row of the heads that share keys
            values["lost_ptr"] = self.lost.view(heads, -1).amax(1)
        values |= self._documents("k", chosen.block_n)
        programs = triton.cdiv(self.columns, chosen.block_n) * heads
        self._launch(keys_kernel(self.program, form), programs, values, chosen)

    def by_gluon(self, part: str, pairs: Iterable[int] = ()) -> bool:
        """Whether dk and dv ("keys"), or dq and gradients of ``pairs`` ("rows"), are the Hopper
        kernel's. Heads of 64 are left to this one."""
        q, k, v = self.q, self.k, self.v
        pays = attention_gluon_launch.pays(q, k, v) and max(q.shape[3], v.shape[3]) > 64
        return pays and gluon.takes(part, q, k, v, self.do, self.inputs, self.program, tuple(pairs))

    def keys_by_gluon(self, dk: Tensor, dv: Tensor) -> None:
        gluon.keys(
            self.q, self.k, self.v, self.do, self.delta[0], self.delta[1], self.inputs,
            self.numbers, self.program, dk, dv,
        )  # fmt: skip

    def queries_by_gluon(self, dq: Tensor, *pairs_and_part: Any) -> None:
        gluon.rows(
            self.q, self.k, self.v, self.do, self.delta[0], self.delta[1], self.inputs,
            self.numbers, self.program, dq, None, *pairs_and_part,
        )  # fmt: skip

    def queries(
        self, dq: Tensor | None, sums: dict[int, Tensor], pairs: dict[int, Tensor], chosen: Tiling,
        hopper: bool = False, again: tuple[_Backward, Tiling] | None = None,
    ) -> None:  # fmt: skip
        """dq, ``sums`` [B, Hq, padded] of the inputs along rows or neither, and ``pairs``, the
        gradients of the inputs along rows and keys, these by the Hopper kernel if ``hopper``.
        ``again``: who makes the lost rows, and how."""
        if not pairs:
            self._queries(dq, sums, {}, chosen)
            if again is not None:
                again[0]._queries(dq, sums, {}, again[1])
            return
        # Whole tiles of pairs, so that no store has a mask and rows begin at multiples of 16 bytes.
        size = self.padded, triton.cdiv(self.columns, ROWS) * ROWS
        most = PAIR_BYTES // (size[0] * size[1] * sum(t.element_size() for t in pairs.values()))
        whole = (self.batches, self.heads, *size)
        in_place = all(t.shape == whole for t in pairs.values())  # nothing is summed
        if in_place:
            most = self.batches * self.heads
        parts = self._parts(pairs, max(1, most))
        totals = {i: self._total(i, t, parts[0]) for i, t in pairs.items()}
        most = math.prod(s.stop - s.start for s in parts[0])
        held = {i: t.new_empty((most, *size)) for i, t in pairs.items() if not in_place}
        for part in parts:
            heads = [s.stop - s.start for s in part]
            some = {
                i: t if in_place else held[i][: math.prod(heads)].unflatten(0, heads)
                for i, t in pairs.items()
            }
            if hopper:
                assert dq is not None
                self.queries_by_gluon(dq, *some.values(), part)
            else:
                self._queries(dq, sums, some, chosen, part)
            if again is not None:
                again[0]._queries(dq, sums, some, again[1], part)
            for i, found in some.items():
                if not in_place:
                    self._add(i, pairs[i], totals[i], found, part)
        for i, total in totals.items():
            if total is not pairs[i]:
                pairs[i].copy_(total)

    def _queries(
        self, dq: Tensor | None, sums: dict[int, Tensor], pairs: dict[int, Tensor], chosen: Tiling,
        part: Sequence[slice] | None = None,
    ) -> None:  # fmt: skip
        """One launch; ``pairs`` [.., .., whole tiles] of a ``part`` of the batches and heads."""
        chosen = self._fitted(chosen, False)
        form = self.form(
            dq=() if dq is None else tuple(range(len(pieces(self.q.shape[3])))),
            inputs=tuple(sums), pairs=tuple(pairs), merged=chosen.merged, early=chosen.early,
            stored=bool(pairs) and by_tma(self.delta),
        )  # fmt: skip
        values = self._given(form, chosen.block_m, chosen.block_n)
        if dq is not None:
            values |= Operand("dq", dq.shape[3]).values(dq, 0)
        values |= {f"sum{i}_ptr": tensor for i, tensor in sums.items()}
        values |= {"lse_grad_ptr": self.dlse} if sums else {}
        values |= {} if self.lost is None else {"lost_ptr": self.lost}
        values |= self._documents("q", chosen.block_m)
        kernel, tiles = rows_kernel(self.program, form), triton.cdiv(self.rows, chosen.block_m)
        heads = self.batches * self.heads
        for i, t in pairs.items():
            if form.stored:
                block = [chosen.block_m, chosen.block_n]
                values[f"pair{i}_desc"] = TensorDescriptor.from_tensor(t.flatten(0, 2), block)
            else:
                values[f"pair{i}_ptr"] = t
            assert part is not None
            heads = t.shape[0] * t.shape[1]
            values |= {
                "pair_step": t.shape[3], "pair_rows": t.shape[2], "first_batch": part[0].start,
                "first_head": part[1].start, "some_heads": t.shape[1],
            }  # fmt: skip
        values["together"] = self._together(self.columns, heads, chosen.near)
        self._launch(kernel, tiles * heads, values, chosen)

    def _total(self, i: int, grad: Tensor, part: Sequence[slice]) -> Tensor:
        """Where the gradient of input ``i`` is summed: itself, if every sum is made at once."""
        cut = part[0].stop < self.batches, part[1].stop < self.heads
        axes = self.program.inputs[i].axes
        if any(is_cut and a not in axes for is_cut, a in zip(cut, "bh", strict=True)):
            return grad.new_zeros(grad.shape, dtype=torch.float32)
        return grad

    def _add(
        self, i: int, grad: Tensor, total: Tensor, pairs: Tensor, part: Sequence[slice]
    ) -> None:
        """Add a part's pairs, summed over what the input is broadcast along, to ``_total``."""
        axes = self.program.inputs[i].axes
        place = [s if a in axes else slice(None) for s, a in zip(part, "bh", strict=True)]
        here = total[tuple(place)]
        sums = [1 if a in axes else n for a, n in zip("bh", pairs.shape[:2], strict=True)]
        tiles = triton.cdiv(self.rows, SUMMED[0]) * triton.cdiv(self.columns, SUMMED[1])
        wrap_triton(sums_kernel)[(tiles * here.shape[0] * here.shape[1],)](
            pairs, here, self.rows, self.columns, here.shape[1], *sums, *pairs.stride()[:3],
            *here.stride()[:3], ADD=total is not grad, ROWS=SUMMED[0], COLUMNS=SUMMED[1],
            num_warps=4,
        )  # fmt: skip

    def _parts(self, pairs: Iterable[int], many: int) -> list[tuple[slice, slice]]:
        """Batches and heads in rectangles of ``many`` matrices at most, which are as long as can be
        along what is summed over."""
        over_batches = all("h" in self.program.inputs[i].axes for i in pairs)
        batches = min(self.batches, many if over_batches else max(1, many // self.heads))
        heads = min(self.heads, max(1, many // batches))
        return [
            (slice(b, min(b + batches, self.batches)), slice(h, min(h + heads, self.heads)))
            for b in range(0, self.batches, batches)
            for h in range(0, self.heads, heads)
        ]

    def _fitted(self, chosen: Tiling, keys_held: bool) -> Tiling:
        """``chosen``, or what fits."""
        size = self.q.element_size()
        each = size * (width(self.q.shape[3]) + width(self.v.shape[3]))
        pair = sum(self.inputs[i].element_size() for i in self.matrices)
        return fitted(chosen, each, each + 8, pair, shared_bytes(self.q.device), keys_held)

    def _documents(self, axis: str, block: int) -> dict[str, Any]:
        if not self.program.documents:
            return {}
        found = attention_documents.hulls(self.program, self.inputs, axis, block)
        return attention_documents.hull_values(found)

    def _launch(self, kernel: Any, programs: int, values: dict[str, Any], chosen: Tiling) -> None:
        values["STAGES"] = chosen.stages
        values = {name: values[name] for name in kernel.arg_names}
        wrap_triton(kernel)[(programs,)](**values, num_warps=chosen.warps, num_stages=chosen.stages)


def backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, inputs: Sequence[Tensor],
    numbers: Sequence[int], program: Program, out: Tensor, lse: Tensor, needed: Sequence[bool],
    precision: str, keys: Tiling | None = None, rows: Tiling | None = None,
    dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """(dq, dk, dv, gradients of the inputs), each of its tensor's shape and dtype.

    do [B, Hq, Sq, Dv], dlse [B, Hq, Sq] or None, q [B, Hq, Sq, D], k [B, Hkv, Sk, D],
    v [B, Hkv, Sk, Dv], inputs [B, Hq, Sq, Sk] or 1 along any, out and lse of the forward.
    needed: for q, k, v and each input; what is not needed is an empty tensor. keys, rows: tilings
    other than the default ones. dropout: the forward's. Deterministic. Raises ValueError for an
    input that varies along fewer axes than it has sizes, which has no one gradient.
    """
    dtype, head, value = q.dtype, q.shape[3], v.shape[3]
    for i, (given, tensor) in enumerate(zip(program.inputs, inputs, strict=True)):
        spread = [a for a, n in zip("bhqk", tensor.shape, strict=True) if n > 1]
        if needed[3 + i] and not set(spread) <= set(given.axes):
            raise ValueError(
                f"attention's backward expected input {i} to have size 1 where it is broadcast, "
                f"got shape {tuple(tensor.shape)} varying along {given.axes!r}"
            )
    nothing = torch.empty(0, dtype=dtype, device=q.device)
    dq = _like(q) if needed[0] else nothing
    dk = _like(k) if needed[1] else nothing
    dv = _like(v) if needed[2] else nothing
    grads: list[Tensor] = [torch.empty(0, dtype=t.dtype, device=t.device) for t in inputs]
    wanted = [i for i in range(len(inputs)) if needed[3 + i]]
    if 0 in (*q.shape[:3], k.shape[2]):  # no pairs
        for tensor in (dq, dk, dv):
            tensor.zero_()
        for i in wanted:
            grads[i] = torch.zeros_like(inputs[i])
        return dq, dk, dv, grads
    by_rows = any(gradient_axis(program.inputs[i].axes) == "rows" for i in wanted)

    call = _Backward(
        do, dlse, q, k, v, inputs, numbers, program, out, lse, precision, by_rows, dropout
    )
    again = None
    if program.likely is not None:
        again, call, program = call, call.likely(lse), program.likely
        keys_again = keys or keys_tiling.rule(again.program, dtype, head, value)
        rows_again = rows or rows_tiling.rule(again.program, dtype, head, value)
    sums: dict[str, dict[int, Tensor]] = {"rows": {}, "columns": {}}
    pairs: dict[int, Tensor] = {}
    for i in wanted:
        axes = program.inputs[i].axes
        kind = gradient_axis(axes)
        if kind == "pairs":
            grads[i] = torch.empty(inputs[i].shape, dtype=inputs[i].dtype, device=q.device)
            pairs[i] = grads[i]
        else:
            length = call.padded if kind == "rows" else k.shape[2]
            sums[kind][i] = call.fp32(*q.shape[:2], length)
    sizes = {"rows": q.shape[2], "columns": k.shape[2], "heads": q.shape[0] * q.shape[1]}
    of_keys, of_rows = needed[1] or needed[2] or sums["columns"], needed[0] or sums["rows"] or pairs
    of_k, of_v = dk if needed[1] else None, dv if needed[2] else None
    alone = needed[1] and needed[2] and not sums["columns"] and keys is None
    if alone and call.by_gluon("keys"):
        call.keys_by_gluon(dk, dv)
    elif of_keys:
        keys = keys or keys_tiling(program, dtype, head, value, **sizes)
        call.keys(of_k, of_v, sums["columns"], keys)
    if again is not None and of_keys:
        again.keys(of_k, of_v, sums["columns"], keys_again)
    alone = needed[0] and not sums["rows"] and rows is None
    hopper = alone and call.by_gluon("rows", pairs)
    if hopper and not pairs:
        call.queries_by_gluon(dq)
        if again is not None:
            again.queries(dq, {}, {}, rows_again)
    elif of_rows:
        rows = rows or rows_tiling(program, dtype, head, value, **sizes)
        second = None if again is None else (again, rows_again)
        call.queries(dq if needed[0] else None, sums["rows"], pairs, rows, hopper, second)
    for kind, at in (("rows", 3), ("columns", 2)):
        for i, partials in sums[kind].items():
            partials = partials[:, :, : q.shape[2] if kind == "rows" else None].unsqueeze(at)
            grads[i] = _reduced(partials, inputs[i], program.inputs[i].axes)
    return dq, dk, dv, grads
