"""Which dtype each operator computes in under ``torch.autocast("cuda")`` on a card.

Torch decides that in C++, for tensors that call themselves CUDA tensors; those of a virtual card do
not (``cardtensors``), so every cast would be skipped without a word. The rules are therefore
applied here, as published in torch's "Automatic Mixed Precision" reference: to the dtype of
the context, to float32, a float32 result, or the widest dtype among the inputs. Which operators
have a rule at all is read from torch; one whose rule is not known here is refused.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree

from inductor_ext.compat_patches import Patches, private

_KEY = "AutocastCUDA"

# Operators by the rule they follow, all overloads alike.
_LOW_PRECISION = (
    "_convolution _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell "
    "addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc "
    "conv_transpose1d conv_transpose2d conv_transpose3d convolution cudnn_convolution "
    "cudnn_convolution_transpose einsum gru_cell linalg_multi_dot linalg_vecdot linear lstm_cell "
    "matmul mm mv prelu rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention"
)
_FLOAT32 = (
    "_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d "
    "_upsample_nearest_exact2d _upsample_nearest_exact3d acos asin "
    "binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity dist "
    "erfinv exp expm1 frobenius_norm group_norm hinge_embedding_loss huber_loss kl_div l1_loss "
    "layer_norm log log10 log1p log2 logsumexp margin_ranking_loss mse_loss multi_margin_loss "
    "multilabel_margin_loss native_layer_norm nll_loss nll_loss2d nuclear_norm pdist "
    "poisson_nll_loss pow reciprocal renorm rms_norm rsqrt sinh smooth_l1_loss soft_margin_loss "
    "softplus tan triplet_margin_loss upsample_bicubic2d upsample_bilinear2d upsample_linear1d "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d"
)
_FLOAT32_RESULT = (  # through their dtype argument, unless it is given
    "cumprod cumsum linalg_matrix_norm linalg_vector_norm log_softmax prod softmax sum"
)
_WIDEST = (
    "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot"
)
# ``norm`` takes a dtype in other overloads than the ones without.
_WITH_DTYPE = {"Scalar": "ScalarOpt_dtype", "ScalarOpt_dim": "ScalarOpt_dim_dtype"}


def patch_autocast(patches: Patches) -> None:
    """Cast the inputs of operators on the virtual card as described above."""
    library = patches.enter_context(private("torch.library:_scoped_library")("aten", "IMPL"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for op in operators_with_a_rule():
            name = op._schema.name.removeprefix("aten::")
            overload = "" if op._overloadname == "default" else f".{op._overloadname}"
            kernel = functools.partial(_autocast, op, rule_of(op))
            library.impl(name + overload, kernel, _KEY, allow_override=True)


def operators_with_a_rule() -> list[Any]:
    """The aten operators that torch treats specially under autocast on a card."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    found = []
    for full_name in torch._C._dispatch_get_all_op_names():
        if full_name.startswith("aten::") and has_kernel(full_name, _KEY):
            name, _, overload = full_name.removeprefix("aten::").partition(".")
            found.append(getattr(getattr(torch.ops.aten, name), overload or "default"))
    return found


def rule_of(op: Any) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
    """The function that makes ``op``'s call under autocast, cast by its rule."""
    name = op.overloadpacket.__name__
    if name == "norm" and op._overloadname in _WITH_DTYPE:
        return _norm
    if name == "binary_cross_entropy":
        return _banned
    return _RULES.get(name, _unknown)


def _autocast(op: Any, rule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))
    with torch._C._ExcludeDispatchKeyGuard(key):
        return rule(op, args, kwargs)


def _castable(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "cuda"
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def _cast(op: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = pytree.tree_map(
        lambda value: value.to(dtype) if _castable(value) else value, (args, kwargs)
    )
    return op(*args, **kwargs)


def _to_low_precision(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _cast(op, torch.get_autocast_dtype("cuda"), args, kwargs)


def _to_float32(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _cast(op, torch.float32, args, kwargs)


def _to_widest(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    low = torch.get_autocast_dtype("cuda")
    dtypes = {value.dtype for value in pytree.tree_leaves((args, kwargs)) if _castable(value)}
    if dtypes - {low, torch.float32}:
        raise RuntimeError(
            f"torch.autocast expected inputs of {low} or torch.float32 for {op}, got "
            f"{sorted(map(str, dtypes))}"
        )
    return _cast(op, torch.float32 if torch.float32 in dtypes else low, args, kwargs)


def _float32_result(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if _castable(args[0]) and given.get("dtype") is None:
        given["dtype"] = torch.float32
        positional = [a.name for a in op._schema.arguments if not a.kwarg_only and a.name in given]
        args = tuple(given.pop(name) for name in positional[: len(args)])
        return op(*args, **given)
    return op(*args, **kwargs)


def _norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _castable(args[0]):
        return op(*args, **kwargs)
    with_dtype = getattr(op.overloadpacket, _WITH_DTYPE[op._overloadname])
    names = [argument.name for argument in op._schema.arguments]
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    return with_dtype(*(given[name] for name in names), dtype=torch.float32)


def _banned(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise RuntimeError(
        "torch.autocast expected binary_cross_entropy_with_logits, got binary_cross_entropy, which "
        "is unsafe to autocast"
    )


def _unknown(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise NotImplementedError(
        f"compile_for expected operators whose autocast rule it knows inside torch.autocast, got "
        f"{op}"
    )


_RULES = {
    name: rule
    for rule, names in (
        (_to_low_precision, _LOW_PRECISION),
        (_to_float32, _FLOAT32),
        (_float32_result, _FLOAT32_RESULT),
        (_to_widest, _WIDEST),
    )
    for name in names.split()
}
