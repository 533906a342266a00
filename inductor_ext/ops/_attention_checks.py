"""What the arguments of ``ops.attention`` must be, in one sentence each."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import Tensor

from inductor_ext.templates.attention_dropout import LARGEST, LEAST

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
WHOLE = (torch.int32, torch.int64)
_NUMBERS = (numbers.Real, torch.SymInt, torch.SymFloat)


def _on(name: str, t: Tensor, q: Tensor) -> None:
    if t.device != q.device:
        raise ValueError(f"{name} is expected on {q.device}, where q is, got {t.device}")


def check_tensor(name: str, t: Any) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} is expected as a tensor, got {type(t).__name__}")
    if t.layout != torch.strided:
        raise TypeError(f"{name} is expected as a dense tensor, got one of {t.layout}")


def check_flags(**flags: Any) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is expected as True or False, got {type(value).__name__}")


def _said(shape: Any) -> str:
    return f"[{', '.join(str(n) for n in shape)}]"


def _fits(t: Tensor, shape: Any, ones: bool = False) -> bool:
    """Whether a tensor is of a shape; with ``ones`` also where a size is 1."""
    if t.dim() != len(shape):
        return False
    return all(a == b or (ones and a == 1) for a, b in zip(t.shape, shape, strict=True))


def check_heads(q: Tensor, k: Tensor, v: Tensor, paged: bool) -> None:
    """Shapes, dtypes and devices of the three tensors."""
    forms = {"q": "[B, Hq, Sq, D]", "k": "[B, Hkv, Sk, D]", "v": "[B, Hkv, Sk, Dv]"}
    if paged:
        forms |= {"k": "[pages, page size, Hkv, D]", "v": "[pages, page size, Hkv, Dv]"}
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, t)
        if t.dim() != 4:
            raise ValueError(f"{name} is expected as {forms[name]}, got {_said(t.shape)}")
        if t.dtype not in DTYPES or t.dtype != q.dtype:
            wanted = "fp16, bf16, fp32 or fp64" if name == "q" else f"{q.dtype}, as q is"
            raise TypeError(f"{name} is expected as {wanted}, got {t.dtype}")
        _on(name, t, q)
    heads, own = q.shape[1], k.shape[2 if paged else 1]
    if k.shape[-1] != q.shape[-1] or q.shape[-1] == 0 or v.shape[-1] == 0:
        raise ValueError(
            "q and k are expected with one head size of 1 or more, and v with one, got "
            f"{q.shape[-1]}, {k.shape[-1]} and {v.shape[-1]}"
        )
    if not paged and k.shape[0] != q.shape[0]:
        raise ValueError(f"k is expected with q's batch of {q.shape[0]}, got {k.shape[0]}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v is expected as {_said([*k.shape[:3], 'Dv'])} beside k of {_said(k.shape)}, got "
            f"{_said(v.shape)}"
        )
    if own == 0 or heads % own:
        raise ValueError(
            f"q is expected with a multiple of the {own} heads of k and v, got {heads} heads"
        )


def check_numbers(scale: Any, softcap: Any, dropout: Any) -> None:
    for name, value in (("scale", scale), ("softcap", softcap), ("dropout", dropout)):
        if value is None and name != "dropout":
            continue
        if not isinstance(value, _NUMBERS) or isinstance(value, bool):
            raise TypeError(f"{name} is expected as a number, got {type(value).__name__}")
    if scale is not None and not 0 < abs(scale) < math.inf:
        raise ValueError(f"scale is expected as a finite number other than 0, got {scale}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap is expected as a positive number or None, got {softcap}")
    if dropout != 0 and not LEAST <= dropout <= LARGEST:
        raise ValueError(
            f"dropout is expected as 0 or a probability in [{LEAST}, {LARGEST}], got {dropout}"
        )


def causal_of(causal: Any) -> str:
    """ "", "lower_right" or "upper_left"."""
    if causal is not True and causal is not False and causal not in ("lower_right", "upper_left"):
        raise ValueError(
            f'causal is expected as True, False, "lower_right" or "upper_left", got {causal!r}'
        )
    if causal is True:
        return "lower_right"
    return "" if causal is False else causal


def _whole(value: Any) -> bool:
    """Whether a value is a whole number of 64 bits."""
    if isinstance(value, torch.SymInt):
        return True
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63


def window_of(window: Any) -> tuple[Any, Any]:
    """(in front, behind), None where there is no end."""
    ends = window if isinstance(window, (tuple, list)) else (window, window)
    if len(ends) != 2 or not all(e is None or (_whole(e) and e >= 0) for e in ends):
        raise ValueError(
            "window is expected as a whole number of 0 or more, or a pair of such or None, got "
            f"{window!r}"
        )
    return ends[0], ends[1]


def check_sinks(sinks: Any) -> None:
    if not _whole(sinks) or not sinks >= 0:
        raise ValueError(f"sinks is expected as a whole number of 0 or more, got {sinks!r}")


def check_bias(bias: Tensor, q: Tensor, columns: Any) -> Tensor:
    """The bias with four dimensions."""
    check_tensor("bias", bias)
    known = (torch.bool, q.dtype, torch.float64 if q.dtype == torch.float64 else torch.float32)
    if bias.dtype not in known:
        said = " or ".join(str(d) for d in dict.fromkeys(known))
        raise TypeError(f"bias is expected as {said} beside q of {q.dtype}, got {bias.dtype}")
    _on("bias", bias, q)
    shape = (*q.shape[:3], columns)
    if bias.dim() > 4 or not _fits(bias, shape[4 - bias.dim() :], ones=True):
        raise ValueError(
            f"bias is expected in a shape that broadcasts to {_said(shape)}, [B, Hq, Sq, Sk], got "
            f"{_said(bias.shape)}"
        )
    return bias if bias.dim() == 4 else bias[(None,) * (4 - bias.dim())]


def check_slot_bias(beta: Tensor, q: Tensor, own: Any, columns: Any) -> None:
    check_tensor("slot_bias", beta)
    known = (q.dtype, torch.float64 if q.dtype == torch.float64 else torch.float32)
    if beta.dtype not in known:
        said = " or ".join(str(d) for d in dict.fromkeys(known))
        raise TypeError(f"slot_bias is expected as {said}, got {beta.dtype}")
    _on("slot_bias", beta, q)
    shape = (q.shape[0], own, columns)
    if (
        beta.dim() != 3
        or not _fits(beta[:1], (1, *shape[1:]))
        or beta.shape[0] not in (1, shape[0])
    ):
        raise ValueError(
            f"slot_bias is expected as {_said(shape)}, [B, Hkv, Sk], got {_said(beta.shape)}"
        )


def check_sink(sink: Tensor, q: Tensor) -> None:
    check_tensor("sink", sink)
    if not sink.dtype.is_floating_point:
        raise TypeError(f"sink is expected as floating point, got {sink.dtype}")
    _on("sink", sink, q)
    if sink.dim() != 1 or sink.shape[0] != q.shape[1]:
        raise ValueError(f"sink is expected as [{q.shape[1]}], one per query head, got "
                         f"{_said(sink.shape)}")  # fmt: skip


def segments_of(segments: Any, q: Tensor, columns: Any) -> tuple[Tensor, Tensor]:
    """Those of query rows and of keys: both ids or both offsets."""
    pair = segments if isinstance(segments, (tuple, list)) else (segments, segments)
    if len(pair) != 2:
        raise ValueError(f"segments are expected as a tensor or a pair, got {len(pair)} of them")
    for side, t, size in zip(("query rows", "keys"), pair, (q.shape[2], columns), strict=True):
        check_tensor("segments", t)
        if t.dtype not in WHOLE:
            raise TypeError(f"segments are expected as int32 or int64, got {t.dtype}")
        _on("segments", t, q)
        if t.dim() != pair[0].dim() or t.dim() not in (1, 2):
            raise ValueError(
                "segments are expected as ids [B, S] or as offsets [segments + 1], got "
                f"{_said(t.shape)}"
            )
        if t.dim() == 2 and not (t.shape[1] == size and (t.shape[0] in (1, q.shape[0]))):
            raise ValueError(
                f"segments of the {side} are expected as {_said([q.shape[0], size])}, got "
                f"{_said(t.shape)}"
            )
        if t.dim() == 1 and (t.shape[0] < 2 or t.shape != pair[0].shape):
            raise ValueError(
                "segments as offsets are expected as [segments + 1], as many for keys as for query "
                f"rows, got {_said(pair[0].shape)} and {_said(pair[1].shape)}"
            )
    return pair[0], pair[1]


def check_pages(table: Tensor, lengths: Tensor | None, q: Tensor) -> None:
    check_tensor("block_table", table)
    if table.dtype not in WHOLE:
        raise TypeError(f"block_table is expected as int32 or int64, got {table.dtype}")
    _on("block_table", table, q)
    if table.dim() != 2 or table.shape[0] != q.shape[0]:
        raise ValueError(
            f"block_table is expected as [{q.shape[0]}, most pages of a sequence], got "
            f"{_said(table.shape)}"
        )
    if lengths is None:
        raise ValueError("lengths are expected beside a block_table, got None")


def check_lengths(lengths: Tensor, q: Tensor) -> None:
    check_tensor("lengths", lengths)
    if lengths.dtype not in WHOLE:
        raise TypeError(f"lengths are expected as int32 or int64, got {lengths.dtype}")
    _on("lengths", lengths, q)
    if lengths.dim() != 1 or lengths.shape[0] != q.shape[0]:
        raise ValueError(f"lengths are expected as [{q.shape[0]}], got {_said(lengths.shape)}")


def check_score_inputs(score_mod: Any, inputs: Any, q: Tensor, columns: Any) -> None:
    if not isinstance(inputs, (tuple, list, torch.nn.ParameterList)):
        raise TypeError(
            f"score_inputs are expected as a tuple or list of tensors, got {type(inputs).__name__}"
        )
    if score_mod is None:
        if inputs:
            raise ValueError("score_inputs are expected only beside a score_mod, got some")
        return
    if not callable(score_mod):
        raise TypeError(f"score_mod is expected as a function, got {type(score_mod).__name__}")
    shape = (*q.shape[:3], columns)
    for t in inputs:
        check_tensor("each of score_inputs", t)
        _on("each of score_inputs", t, q)
        if not _fits(t, shape, ones=True):
            raise ValueError(
                f"each of score_inputs is expected to broadcast to {_said(shape)} with four "
                f"dimensions, got {_said(t.shape)}"
            )


def check_columns_asked(asked: bool, count: Any, rows: Any, dropout: float) -> None:
    if count is not None:
        if not asked:
            raise ValueError("colsum_rows is expected only with return_colsum, got it without")
        if not _whole(count) or not count >= 0:
            raise ValueError(
                f"colsum_rows is expected as a whole number of 0 or more, got {count!r}"
            )
        if count > rows:
            raise ValueError(f"colsum_rows is expected as {rows}, Sq, at most, got {count}")
    if asked and dropout:
        raise ValueError(
            f"return_colsum is expected without dropout, which scales probabilities, got {dropout}"
        )
