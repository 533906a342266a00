"""What scans and recurrences are, position by position, and inputs to try them on."""

import math

import torch
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st

OPS = ("sum", "prod", "max", "min", "logsumexp")
PAIRS = ("cummax", "cummin")
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def first(y):
    """The values of a result that may come with positions."""
    return y[0] if isinstance(y, tuple) else y


def identity(op, dtype):
    if op in ("sum", "prod", "logsumexp"):
        return {"sum": 0, "prod": 1, "logsumexp": -math.inf}[op]
    largest = op in ("max", "cummax")
    if dtype == torch.bool:
        return not largest
    if dtype.is_floating_point:
        return -math.inf if largest else math.inf
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def combined(op, running, x, begins):
    """(value, whether it is x's own)."""
    if op == "sum":
        return torch.where(begins, x, running + x), None
    if op == "prod":
        return torch.where(begins, x, running * x), None
    if op == "logsumexp":
        safe = torch.where(begins | (running == -math.inf), 0.0, running)
        both = torch.where(running == -math.inf, x, torch.logaddexp(safe, x))
        return torch.where(begins, x, both), None
    own = x >= running if op in ("max", "cummax") else x <= running
    if x.is_floating_point():
        own = own & ~running.isnan() | x.isnan()
    own = own | begins
    return torch.where(own, x, running), own


def scan(x, op, dim=-1, reverse=False, exclusive=False, flags=None, dtype=None):
    """(values, positions) by a loop, in int64 or in the dtype of x; ``flags`` of x's shape."""
    if dtype is None:
        whole = not x.is_floating_point() and op in ("sum", "prod")
        dtype = torch.int64 if whole else x.dtype
    x = x.to(dtype) if dtype.is_floating_point else x
    wide = torch.int64 if not dtype.is_floating_point else x.dtype
    xs = x.movedim(dim, 0).to(wide)
    n = xs.shape[0]
    if n == 0:
        return x.to(dtype).clone(), torch.empty(x.shape, dtype=torch.int64)
    starts = torch.zeros(xs.shape, dtype=torch.bool)
    if flags is not None:
        starts = flags.movedim(dim, 0).clone()
    if reverse:  # what follows begins a segment
        starts = torch.cat([starts[1:], torch.ones_like(starts[:1])])
    starts[n - 1 if reverse else 0] = True
    nothing = torch.full_like(xs[0], identity(op, dtype))
    running, position = nothing, torch.full(xs.shape[1:], -1)
    values, positions = [None] * n, [None] * n
    for t in reversed(range(n)) if reverse else range(n):
        before = torch.where(starts[t], nothing, running)
        none = torch.where(starts[t], -1, position)
        running, own = combined(op, running, xs[t], starts[t])
        position = none if own is None else torch.where(own, t, none)
        values[t], positions[t] = (before, none) if exclusive else (running, position)
    return torch.stack(values).movedim(0, dim).to(dtype), torch.stack(positions).movedim(0, dim)


def recurrence(a, b, h0=None, dim=-1, reverse=False):
    a, b = torch.broadcast_tensors(a, b)
    left, right = a.movedim(dim, 0), b.movedim(dim, 0)
    n = left.shape[0]
    if n == 0:
        return b.clone()
    h = torch.zeros_like(right[0]) if h0 is None else h0
    values = [None] * n
    for t in reversed(range(n)) if reverse else range(n):
        h = left[t] * h + right[t]
        values[t] = h
    return torch.stack(values).movedim(0, dim)


# --- inputs ---------------------------------------------------------------------------------------

LAYOUTS = ("dense", "transposed", "strided", "broadcast")


# hypothesis, the same examples every time
SETTINGS = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "phases": [Phase.generate],
    "suppress_health_check": list(HealthCheck),
}


def sized(n, dim, lanes=3):
    return (lanes, n) if dim in (1, -1) else (n, lanes)


def segments_of(kind, n, dim, shape):
    """(what is given to the operation, flags in the shape of x)."""
    if kind == "none":
        return None, None
    if kind == "flags":
        flags = torch.rand(shape) < 0.3
        return flags, flags
    cu = offsets(n, 5)
    flags = along(flags_of(cu, n), dim, shape)
    if kind == "offsets":
        return cu.to(torch.int32), flags
    narrow = [s if d == dim % 2 else 1 for d, s in enumerate(shape)]
    return along(flags_of(cu, n), dim, narrow), flags


def numbers(shape, dtype, op="sum", scale=1.0):
    if dtype == torch.bool:
        return torch.rand(shape) < 0.4
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max, shape, dtype=torch.int64).to(dtype)
    if op == "prod":  # stays in range, has zeros and both signs
        x = torch.rand(shape, dtype=FP64) + 0.5
        return (x * torch.where(torch.rand(shape) < 0.2, -1, 1)).to(dtype)
    if op in ("max", "min", *PAIRS):  # with ties
        return torch.randint(-6, 7, shape).to(dtype)
    return (torch.randn(shape, dtype=FP64) * scale).to(dtype)


def laid_out(make, shape, layout):
    """A tensor of ``shape`` made by ``make(shape)``, in another layout."""
    if layout == "transposed":
        return make(shape[::-1]).permute(*reversed(range(len(shape))))
    if layout == "strided":
        return make((*shape[:-1], 2 * shape[-1] + 1))[..., 1::2][..., : shape[-1]]
    if layout == "broadcast":
        return make((1, *shape[1:])).expand(shape)
    return make(shape)


def offsets(n, segments=4):
    """Offsets of ``segments`` segments, some of them empty."""
    inner = torch.randint(0, n + 1, (segments - 1,)).sort().values
    return torch.cat([torch.tensor([0]), inner, torch.tensor([n])])


def flags_of(cu, n):
    flags = torch.zeros(n, dtype=torch.bool)
    for start in cu[:-1].tolist():
        if start < n:
            flags[start] = True
    return flags


def along(flags, dim, shape):
    """Flags [n] along ``dim``, in ``shape``."""
    view = [1] * len(shape)
    view[dim] = flags.shape[0]
    return flags.reshape(view).expand(shape)


def drawn(dtypes, dims):
    """A decorator: what can be asked of a scan of these dtypes along these dimensions."""
    return given(
        op=st.sampled_from((*OPS, *PAIRS)),
        dtype=st.sampled_from(dtypes),
        n=st.sampled_from((0, 1, 2, 7, 25)),
        dim=st.sampled_from(dims),
        reverse=st.booleans(),
        exclusive=st.booleans(),
        segments=st.sampled_from(("none", "flags", "offsets", "broadcast")),
        layout=st.sampled_from(LAYOUTS),
    )
