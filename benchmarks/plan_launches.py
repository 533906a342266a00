"""What ``benchmarks.plan`` tunes besides sites: programs whose operations launch what plans name.

Each is a program as models have it, over the tokens or keys in flight, with its backward where
models are trained with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

DEVICE = "cuda"
TRACED_AT = 64
LARGE = 2048  # as sites of a graph are, where a rule leaves small logits to stock

Program = tuple[Callable[..., Any], tuple[Any, ...], dict[str, tuple[int, int]]]


@dataclasses.dataclass(frozen=True)
class Launches:
    """A target: ``program()`` is a function, its arguments, and the dimension to tune along. What
    takes minutes to compile does so in ``parts`` processes."""

    name: str
    program: Callable[[], Program]
    parts: int = 1


def _half(*size: int, grad: bool = True) -> Any:
    import torch

    return torch.randn(*size, device=DEVICE, dtype=torch.bfloat16).requires_grad_(grad)


def _cross_entropy() -> Program:
    import torch
    from torch.nn.functional import cross_entropy

    def fn(logits: Any, target: Any) -> Any:
        return cross_entropy(logits, target)

    target = torch.randint(128256, (LARGE,), device=DEVICE)
    return fn, (_half(LARGE, 128256), target), {"logits.0": (512, 8192)}


def _losses_of_rows() -> Program:
    import torch

    import inductor_ext

    def fn(logits: Any, target: Any) -> Any:
        return inductor_ext.ops.cross_entropy(logits, target, reduction="none")

    target = torch.randint(128256, (LARGE,), device=DEVICE)
    return fn, (_half(LARGE, 128256), target), {"logits.0": (512, 8192)}


def _classes_strided() -> Program:
    import torch
    from torch.nn.functional import cross_entropy

    def fn(logits: Any, target: Any) -> Any:
        return cross_entropy(logits, target)

    target = torch.randint(19, (8, 512, 512), device=DEVICE)
    return fn, (_half(8, 19, 512, 512), target), {"logits.0": (4, 64)}


def _entropy() -> Program:
    def fn(logits: Any) -> Any:
        p = logits.float().log_softmax(-1)
        return -(p.exp() * p).sum(-1).mean()

    return fn, (_half(LARGE, 128256),), {"logits.0": (512, 8192)}


def _softmax() -> Program:
    def fn(x: Any) -> Any:
        return x.softmax(-1)

    return fn, (_half(LARGE, 32768),), {"x.0": (512, 8192)}


def _scan(*size: int, dim: int, along: int, hi: int) -> Program:
    import torch

    def fn(x: Any) -> Any:
        return torch.cumsum(x, dim)

    return fn, (torch.randn(*size, device=DEVICE),), {f"x.{along}": (size[along], hi)}


def _rows() -> Program:
    return _scan(64, 16384, dim=1, along=0, hi=8192)


def _long_rows() -> Program:
    return _scan(16, 16384, dim=1, along=1, hi=1 << 20)


def _columns() -> Program:
    return _scan(8, 1024, 1024, dim=1, along=1, hi=32768)


def _recurrence() -> Program:
    import torch

    import inductor_ext

    def fn(a: Any, b: Any) -> Any:
        return inductor_ext.ops.linear_recurrence(a, b, dim=1)

    a, b = (torch.rand(8, 1024, 2048, device=DEVICE).requires_grad_() for _ in range(2))
    return fn, (a, b), {"a.1": (1024, 16384)}


def _mhc_pre() -> Program:
    import torch

    import inductor_ext

    def fn(x: Any, w: Any, scale: Any, base: Any) -> Any:
        return inductor_ext.ops.mhc_pre(x, w, scale, base)

    w = torch.randn(24, 4 * 7168, device=DEVICE) * (4 * 7168) ** -0.5
    small = torch.ones(3, device=DEVICE), torch.zeros(24, device=DEVICE)
    return fn, (_half(TRACED_AT, 4, 7168), w, *small), {"x.0": (16, 8192)}


def _mhc_post() -> Program:
    import torch

    import inductor_ext

    def fn(x: Any, y: Any, post: Any, comb: Any) -> Any:
        return inductor_ext.ops.mhc_post(x, y, post, comb)

    post, comb = (torch.rand(TRACED_AT, *size, device=DEVICE) for size in ((4,), (4, 4)))
    x, y = _half(TRACED_AT, 4, 7168, grad=False), _half(TRACED_AT, 7168, grad=False)
    return fn, (x, y, post, comb), {"x.0": (16, 8192)}


def _attention(heads: int, dim: int, grad: bool = True, **options: Any) -> Program:
    import inductor_ext

    def fn(qkv: Any) -> Any:
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
        return inductor_ext.ops.attention(q, k, v, causal=True, **options)

    return fn, (_half(1, 256, 3, heads, dim, grad=grad),), {"qkv.1": (256, 8192)}


def _softcap() -> Program:
    return _attention(16, 128, softcap=30.0)


def _window() -> Program:
    return _attention(32, 64, window=1024)


def _column_sums() -> Program:
    return _attention(16, 128, grad=False, return_colsum=True, colsum_rows=64)


def _all_column_sums() -> Program:
    return _attention(16, 128, grad=False, return_colsum=True)


def _decode() -> Program:
    import inductor_ext

    def fn(q: Any, kv: Any) -> Any:
        k, v = (t.transpose(1, 2) for t in kv.unbind(2))
        return inductor_ext.ops.attention(q, k, v)

    q, kv = _half(16, 32, 1, 128, grad=False), _half(16, 256, 2, 8, 128, grad=False)
    return fn, (q, kv), {"kv.1": (256, 32768)}


def _linear_attention() -> Program:
    import inductor_ext

    def fn(qkv: Any) -> Any:
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
        return inductor_ext.ops.linear_attention(q, k, v)

    return fn, (_half(1, 256, 3, 16, 128),), {"qkv.1": (256, 16384)}


def _sparse_attention() -> Program:
    import torch

    import inductor_ext

    def fn(q: Any, kv: Any, indices: Any) -> Any:
        return inductor_ext.ops.sparse_attention(q, kv, indices, scale=576**-0.5)

    kv = _half(8192, 576, grad=False)
    indices = torch.randint(8192, (TRACED_AT, 2048), device=DEVICE, dtype=torch.int32)
    return fn, (_half(TRACED_AT, 64, 576, grad=False), kv, indices), {"q.0": (16, 1024)}


LAUNCHES = (  # what takes longest to compile last: ``--prewarm`` begins at the end
    Launches("cross entropy of 128256 classes", _cross_entropy),
    Launches("cross entropy of each row, 128256 classes", _losses_of_rows),
    Launches("entropy of 128256 classes", _entropy),
    Launches("cross entropy of the 19 classes of each pixel", _classes_strided),
    Launches("softmax of 32768 columns", _softmax),
    Launches("cumulative sums of rows of 16384", _rows),
    Launches("cumulative sums of 8 x 1024 columns", _columns),
    Launches("recurrences of 8 x 2048 channels", _recurrence),
    Launches("attention of one token over a cache, 16 sequences, 32 heads on 8 of 128", _decode),
    Launches("mHC post, 4 streams of 7168", _mhc_post),
    Launches("cumulative sums of 16 long rows", _long_rows),
    Launches("sparse attention, 64 heads of 576 over 2048 entries", _sparse_attention),
    Launches("mHC pre, 4 streams of 7168", _mhc_pre),
    Launches("sums of columns of causal attention, 64 rows, 16 heads of 128", _column_sums),
    Launches("sums of columns of causal attention, all rows, 16 heads of 128", _all_column_sums),
    Launches("linear attention, 16 heads of 128", _linear_attention, 7),
    Launches("causal attention with a softcap, 16 heads of 128", _softcap, 6),
    Launches("causal attention in a window of 1024, 32 heads of 64", _window, 6),
)
