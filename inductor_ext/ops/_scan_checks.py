"""What the arguments of ``scan`` and ``linear_recurrence`` must be, in one sentence each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inductor_ext.compat_runtime import under_functorch

OPS = ("sum", "prod", "max", "min", "logsumexp", "cummax", "cummin")
WITH_INDEX = ("cummax", "cummin")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _names(dtypes: Any) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def check_op(op: str) -> None:
    if op not in OPS:
        raise ValueError(f"op is expected to be one of {', '.join(OPS)}, got {op!r}")


def checked_dim(name: str, x: Tensor, dim: int) -> int:
    """``dim`` counted from the front."""
    if x.dim() == 0:
        raise ValueError(f"{name} is expected to have at least one dimension, got none")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim is expected in [{-x.dim()}, {x.dim()}), got {dim}")
    return dim % x.dim()


def result_dtype(x: Tensor, op: str, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the result, after a check of both dtypes."""
    known: tuple[torch.dtype, ...] = FLOATS
    known = known if op == "logsumexp" else (*FLOATS, *INTS, torch.bool)
    if x.dtype not in known:
        raise TypeError(f"x is expected to be one of {_names(known)} for {op}, got {x.dtype}")
    if dtype is None:
        whole = not x.dtype.is_floating_point
        return torch.int64 if whole and op in ("sum", "prod") else x.dtype
    known = tuple(d for d in known if d != torch.bool)
    if dtype not in known:
        raise TypeError(f"dtype is expected to be one of {_names(known)} for {op}, got {dtype}")
    return dtype


def check_segments(x: Tensor, segments: Tensor, dim: int) -> None:
    if segments.device != x.device:
        raise ValueError(f"segments are expected on {x.device} as x, got {segments.device}")
    if segments.dtype == torch.bool:
        return
    if segments.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"segments are expected as bool flags or int32 or int64 offsets, got {segments.dtype}"
        )
    if segments.dim() != 1 or segments.shape[0] < 1:
        raise ValueError(
            "segments of offsets are expected as [number of segments + 1], got "
            f"{list(segments.shape)}"
        )
    known = type(segments) in (Tensor, torch.nn.Parameter) and not under_functorch()
    if segments.device.type != "cpu" or torch.compiler.is_compiling() or not known:
        return  # their values are not there, or not on the host
    if segments[0] != 0 or segments[-1] != x.shape[dim] or (segments.diff() < 0).any():
        raise ValueError(
            f"segments of offsets are expected to rise from 0 to {x.shape[dim]}, the size of "
            f"dimension {dim}, got {_few(segments)}"
        )


def _few(values: Tensor) -> str:
    shown = ", ".join(str(v) for v in values[:8].tolist())
    return f"[{shown}{', ...' if len(values) > 8 else ''}]"


def resets_of(x: Tensor, segments: Tensor, dim: int) -> Tensor:
    """Flags in the shape of x, True where a segment begins, of segments in either form."""
    check_segments(x, segments, dim)
    if segments.dtype != torch.bool:
        n = x.shape[dim]
        # An empty segment begins where the next one does, or behind the end.
        flags = torch.zeros(n + 1, dtype=torch.bool, device=x.device)
        flags = flags.scatter(0, segments.long(), True)[:n]
        segments = flags.reshape(n, *[1] * (x.dim() - 1 - dim))
    lead = x.dim() - segments.dim()
    fits = lead >= 0 and all(
        s == 1 or s == size for s, size in zip(segments.shape, x.shape[lead:], strict=True)
    )
    if not fits:
        raise ValueError(
            f"segments of flags are expected to broadcast to the shape {list(x.shape)} of x, got "
            f"{list(segments.shape)}"
        )
    return segments.expand(x.shape)


def check_recurrence(a: Tensor, b: Tensor, h0: Tensor | None) -> None:
    """Dtypes and devices."""
    if b.dtype not in FLOATS:
        raise TypeError(f"b is expected to be one of {_names(FLOATS)}, got {b.dtype}")
    for name, t in (("a", a), ("h0", h0)):
        if t is None:
            continue
        if t.dtype != b.dtype:
            raise TypeError(f"{name} is expected in {b.dtype} as b, got {t.dtype}")
        if t.device != b.device:
            raise ValueError(f"{name} is expected on {b.device} as b, got {t.device}")


def broadcast(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a and b as views of one shape."""
    if a.shape == b.shape:
        return a, b
    pairs = zip(reversed(a.shape), reversed(b.shape), strict=False)
    if not all(m == n or m == 1 or n == 1 for m, n in pairs):
        raise ValueError(
            "a and b are expected in shapes that broadcast to one, got "
            f"{list(a.shape)} and {list(b.shape)}"
        )
    a, b = torch.broadcast_tensors(a, b)
    return a, b


def check_initial(b: Tensor, h0: Tensor, dim: int) -> None:
    expected = [*b.shape[:dim], *b.shape[dim + 1 :]]
    if list(h0.shape) != expected:
        raise ValueError(
            f"h0 is expected as {expected}, the shape of h without dimension {dim}, got "
            f"{list(h0.shape)}"
        )
