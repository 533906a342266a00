"""Launches of chunked linear attention with one decay per head or per token: forward and backward.

One kernel makes o, dq, dk and dv. Where the heads and tiles alone don't fill the card, the tokens
are cut into segments: a first launch finds what each adds to the state, a small one the state in
front of each, and then they run side by side.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

from .linear_attention import between_segments_kernel, chunk_kernel, sums_kernel
from .linear_attention_gradients import token_gradients_kernel
from .tilings import tunable


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Tokens of a chunk, columns of v of a program, warps, pipeline stages, and segments (0: as
    many as fill the card)."""

    chunk: int
    block_v: int
    warps: int
    stages: int
    segments: int = 0


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _roomy(device: torch.device) -> bool:
    """Whether a program can have the shared memory that an H200 gives it, 227 KiB."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= 227 << 10


_FIELDS = {"scaled": "block_v", "stages": "stages"}


@tunable("linear_attention", "forward", "dv tokens heads", **_FIELDS)
def tiling(dtype: torch.dtype, dk: int, device: torch.device, chunk: int = 0) -> Tiling:
    """What is launched for dk channels, measured on an H200 at 128."""
    depth = triton.next_power_of_2(dk)
    if dtype == torch.float32:
        return Tiling(chunk or 16, 16 if depth > 128 else 32, 4, 1)
    if depth > 128 or not _roomy(device):
        return Tiling(chunk or 64, 32, 4, 1)
    return Tiling(chunk or 64, 64, 4, 3)


backward_tiling = tunable("linear_attention", "backward", "tokens heads", **_FIELDS)(tiling.rule)


def block_of(n: int) -> int:
    # On an H200 programs of triton 3.6 with blocks of 32 x 16 read wild addresses, of 32 x 32 not.
    return max(32, triton.next_power_of_2(n))


def gradient_tiling(dtype: torch.dtype, size: int) -> tuple[int, int]:
    """(channels at once, warps) of the gradients of a chunk."""
    return (32, 8) if dtype == torch.float32 and size > 128 else (32, 4)


def _fitted(chosen: Tiling, dv: int) -> Tiling:
    block = min(chosen.block_v, max(16, triton.next_power_of_2(dv)))
    return dataclasses.replace(chosen, block_v=block)


def _segments(
    programs: int, chunks: int, device: torch.device, wanted: int, twice: bool
) -> tuple[int, int]:
    """(segments, chunks of each): two programs for each multiprocessor, or, not ``twice``, one
    where that alone nearly fills the card, since segments read k and v once more."""
    if not wanted:
        card = _processors(device)
        full = not twice and programs >= card * 3 // 4
        wanted = 1 if full else max(2 * card // max(programs, 1), 1)
    each = triton.cdiv(chunks, max(min(wanted, chunks), 1))
    return max(triton.cdiv(chunks, max(each, 1)), 1), each


def rows(t: Tensor) -> Tensor:
    """Memory whose last dimension is dense, with rows near enough for 31 bits in a chunk."""
    near = t.stride(-1) == 1 and abs(t.stride(-2)) < 1 << 23
    return t if near else t.contiguous()


def strides(t: Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if t is None else tuple(t.stride()[:count])


def empty_state(q: Tensor, rows: int, columns: int) -> Tensor:
    return torch.empty((*q.shape[:2], rows, columns), dtype=torch.float32, device=q.device)


def chunk_states(q: Tensor, v: Tensor, chunk: int) -> Tensor:
    """[BH, chunks, dk, dv]; fp16 has no room for sums over all tokens."""
    kept = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
    many, chunks = q.shape[0] * q.shape[1], triton.cdiv(q.shape[2], chunk)
    return torch.empty((many, chunks, q.shape[3], v.shape[3]), dtype=kept, device=q.device)


def like(t: Tensor) -> Tensor:
    """Memory of its shape and order of dimensions, the last one dense and rows as ``rows`` has
    them."""
    out = torch.empty_like(t)
    near = out.stride(-1) == 1 and abs(out.stride(-2)) < 1 << 23
    return out if near else torch.empty(t.shape, dtype=t.dtype, device=t.device)


def transposed(state: Tensor | None) -> Tensor | None:
    return None if state is None else state.transpose(-1, -2)


def exact(q: Tensor, precision: str) -> str:
    """Of fp32 products: three of TF32 are as exact, and on the tensor cores."""
    return "tf32x3" if q.dtype == torch.float32 and precision == "ieee" else precision


def _matrices(state: Tensor | None) -> Tensor | None:
    """[BH, dk, dv] of [B, H, dk, dv], any strides."""
    return None if state is None else state.flatten(0, 1)


@dataclasses.dataclass(frozen=True)
class Decays:
    """Sums of decays inside chunks: of a token and those in front of it, and of those behind it
    [BH, padded]; strongest [BH]: the log of what the chunk that decays most keeps, None where all
    heads are computed alike. Per channel: firsts, seconds [BH, chunks, dk], of a chunk's halves."""

    until: Tensor | None = None
    behind: Tensor | None = None
    strongest: Tensor | None = None
    firsts: Tensor | None = None
    seconds: Tensor | None = None

    @property
    def kind(self) -> str:
        return "token" if self.until is not None else "channel" if self.firsts is not None else ""


_CHUNKS = 16  # of a program of sums


def sums(q: Tensor, decay: Tensor | None, chunk: int) -> Decays:
    """Of a decay [H] or [B, H, T]."""
    batch, heads, tokens = q.shape[:3]
    if decay is None or not q.numel():
        return Decays()
    strides = (0, decay.stride(0), 0) if decay.dim() == 1 else decay.stride()
    many, blocks = batch * heads, triton.cdiv(tokens, chunk * _CHUNKS)
    shape, wide = (many, blocks * chunk * _CHUNKS), q.dtype == torch.float32
    until = torch.empty(shape, dtype=torch.float64 if wide else torch.float32, device=q.device)
    behind = torch.empty(shape, dtype=torch.float32, device=q.device)
    strongest = torch.empty((many, blocks), dtype=torch.float32, device=q.device)
    wrap_triton(sums_kernel)[(many * blocks,)](
        decay, until, behind, strongest, tokens, heads, blocks, shape[1], *strides, WIDE=wide,
        CHUNK=chunk, CHUNKS=_CHUNKS, num_warps=4,
    )  # fmt: skip
    return Decays(until, behind, strongest.amin(1) if q.dtype == torch.bfloat16 else None)


def attend(
    q: Tensor, k: Tensor, v: Tensor, decays: Decays, out: Tensor | None, scale: float,
    start: Tensor | None, end: Tensor | None, chosen: Tiling, *, reverse: bool = False,
    precision: str = "ieee", fronts: Tensor | None = None, twice: bool = False,
    kinds: tuple[bool, ...] | None = None,
) -> None:  # fmt: skip
    """The kernel's ``out`` [B, H, T, dv], if any, of q, k [B, H, T, dk], v [B, H, T, dv].

    start, end: [B, H, dk, dv] in fp32, any strides; in reverse they are gradients of the states,
    which have the scale in them. fronts [BH, chunks, dk, dv]: the state in front of every chunk, or
    None. kinds: which heads, mild ones or others; None for all.
    """
    batch, heads, tokens, dk = q.shape
    dv = v.shape[-1]
    chosen = _fitted(chosen, dv)
    q, k, v = rows(q), rows(k), rows(v)
    start = _matrices(start)
    tiles = triton.cdiv(dv, chosen.block_v)
    chunks = triton.cdiv(tokens, chosen.chunk)
    many = batch * heads
    if not many:
        return
    segments, each = _segments(many * tiles, chunks, q.device, chosen.segments, twice)
    factors = (1.0 / scale, scale) if reverse else (1.0, 1.0)
    # With fewer rows the state's product is no wgmma, and reads its operands out of the pipeline's
    # buffers into registers: triton 3.6 overwrites too early what is read both ways.
    block_k = max(64, triton.next_power_of_2(dk))
    constants = {
        "DECAYS": decays.kind, "REVERSE": reverse, "PRECISION": exact(q, precision),
        "CHUNK": chosen.chunk, "BLOCK_K": block_k, "BLOCK_V": chosen.block_v,
        "EVEN_K": dk == block_k, "EVEN_V": dv % chosen.block_v == 0, "STAGES": chosen.stages,
        "num_warps": chosen.warps,
    }  # fmt: skip
    strongest = decays.strongest
    if kinds is None:
        kinds = (False,) if strongest is None else (True, False)
    padded = 0 if decays.until is None else decays.until.shape[1]

    def launch(
        first: Tensor | None, last: Tensor | None, log: Tensor | None, segments: int,
        first_factor: float, last_factor: float, local: bool,
    ) -> None:  # fmt: skip
        """``first``, ``last``: [BH, segments or 1, dk, dv]."""
        given = None if local else out
        for mild in kinds:
            wrap_triton(chunk_kernel)[(many * segments * tiles,)](
                q, k, v, given, decays.until, decays.behind, strongest, decays.firsts,
                decays.seconds, first, last, log, None if local else fronts, tokens, heads, tiles,
                segments, each, padded, scale, first_factor, last_factor, dk, dv, *q.stride()[:3],
                *k.stride()[:3], *v.stride()[:3], *strides(given, 3), *strides(first, 4),
                *strides(last, 4), MILD=mild, OUTPUT=given is not None, LOCAL=local, **constants,
            )  # fmt: skip

    first = None if start is None else start.unsqueeze(1)
    # Only the last segment writes it.
    last = None if end is None else end.view(many, 1, *end.shape[2:]).expand(-1, segments, -1, -1)
    if segments == 1:
        launch(first, last, None, 1, *factors, False)
        return
    wide: Any = {"dtype": torch.float32, "device": q.device}
    local = torch.empty((many, segments - 1, dk, dv), **wide)
    states = torch.empty((many, segments, dk, dv), **wide)
    log = None
    if decays.kind:
        log = torch.empty((many, segments - 1, dk if decays.kind == "channel" else 1), **wide)
    launch(None, local, log, segments - 1, 1.0, 1.0, True)
    block = 256
    blocks = triton.cdiv(dk * dv, block)
    log_strides = (0, 0) if log is None else (log.shape[2], int(log.shape[2] > 1))
    wrap_triton(between_segments_kernel)[(many * blocks,)](
        local, log, start, states, segments, blocks, dk * dv, dv, factors[0], *strides(start, 3),
        *log_strides, BLOCK=block, num_warps=2,
    )  # fmt: skip
    launch(states, last, None, segments, 1.0, factors[1], False)


def forward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, start: Tensor | None, scale: float,
    precision: str, chunk: int = 0, chosen: Tiling | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o, final state [B, H, dk, dv] in fp32); decay: None, [H] or [B, H, T]; chunk: tokens of one,
    0 to have it chosen."""
    dk, dv = q.shape[-1], v.shape[-1]
    chosen = chosen or tiling(
        q.dtype, dk, q.device, chunk, dv=dv, tokens=q.shape[2], heads=q.shape[0] * q.shape[1]
    )
    out, end = like(v), empty_state(q, dk, dv)
    decays = sums(q, decay, chosen.chunk)
    # With decays, what a second program of a multiprocessor hides is less than it costs.
    twice = not decays.kind
    attend(q, k, v, decays, out, scale, start, end, chosen, precision=precision, twice=twice)
    return out, end


def backward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, start: Tensor | None, scale: float,
    precision: str, chunk: int, do: Tensor, dend: Tensor | None, need_decay: bool,
    need_start: bool, chosen: Tiling | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(dq, dk, dv, ddecay in fp32, dstart in fp32); dend: the gradient of the final state."""
    batch, heads, tokens, dk = q.shape
    chosen = chosen or backward_tiling(
        q.dtype, max(dk, v.shape[-1]), q.device, chunk, tokens=tokens, heads=batch * heads
    )
    dq, dkeys, dvalues = like(q), like(k), like(v)
    dstart = empty_state(q, dk, v.shape[-1]) if need_start else None
    decays = sums(q, decay, chosen.chunk)
    options: Any = {"precision": precision}
    if need_decay and decay is not None:
        grad = _token_gradients(
            q, k, v, decays, do, start, dend, dstart, scale, precision, chosen, dq, dkeys, dvalues
        )
        ddecay = grad.sum((0, 2)) if decay.dim() == 1 else grad
        return dq, dkeys, dvalues, ddecay, dstart
    given: Any = decays, dq, scale, transposed(start), None, chosen
    attend(do, v, k, *given, **options)
    given = decays, dkeys, scale, transposed(dend), transposed(dstart), chosen
    attend(v, do, q, *given, reverse=True, **options)
    attend(k, q, do, decays, dvalues, scale, dend, None, chosen, reverse=True, **options)
    return dq, dkeys, dvalues, None, dstart


def _token_gradients(
    q: Tensor, k: Tensor, v: Tensor, decays: Decays, do: Tensor, start: Tensor | None,
    dend: Tensor | None, dstart: Tensor | None, scale: float, precision: str, chosen: Tiling,
    dq: Tensor, dkeys: Tensor, dvalues: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient of the decays [B, H, T] in fp32, and all others into what is given for them."""
    batch, heads, tokens, dk = q.shape
    grad = torch.empty((batch, heads, tokens), dtype=torch.float32, device=q.device)
    fronts, follows = (chunk_states(q, v, chosen.chunk) for _ in range(2))
    alike = dataclasses.replace(decays, strongest=None)
    q, k, v, do = rows(q), rows(k), rows(v), rows(do)
    attend(k, k, v, alike, None, scale, start, None, chosen, fronts=fronts, precision=precision)
    # Measured: 377 us of 32 columns beside 422 of 64, where states are stored as well.
    narrow = dataclasses.replace(chosen, block_v=min(chosen.block_v, 32))
    attend(
        k, q, do, decays, dvalues, scale, dend, dstart, narrow, fronts=follows, reverse=True,
        precision=precision,
    )  # fmt: skip
    if not fronts.numel():
        return grad
    part, warps = gradient_tiling(q.dtype, max(dk, v.shape[-1]))
    part = min(part, block_of(dk))
    assert decays.until is not None
    wrap_triton(token_gradients_kernel)[(fronts.shape[0] * fronts.shape[1],)](
        q, k, v, do, decays.until, decays.behind, fronts, follows, dq, dkeys,
        grad, tokens, heads, decays.until.shape[1], triton.cdiv(dk, part), scale, dk, v.shape[-1],
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3], *dq.stride()[:3],
        *dkeys.stride()[:3], PRECISION=exact(q, precision),
        CHUNK=chosen.chunk, BLOCK_K=block_of(dk), PART=part,
        BLOCK_V=block_of(v.shape[-1]),
        num_warps=warps,
    )  # fmt: skip
    return grad
