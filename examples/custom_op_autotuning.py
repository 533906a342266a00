"""Tune your own operation: two outputs, two implementations, the faster right one is emitted."""

import torch

import inductor_ext
from inductor_ext import CustomOpConfig


@torch.library.custom_op("example::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, eps: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """x over its root mean square along the last dimension, and the reciprocal of that root."""
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (x * scale).to(x.dtype), scale


@rms_norm.register_fake
def _(x: torch.Tensor, eps: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def one_reduction(x: torch.Tensor, eps: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole row in one reduction."""
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (x * scale).to(x.dtype), scale


def in_chunks(
    x: torch.Tensor, eps: float = 1e-6, chunks: int = 4
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial sums per chunk first: more programs for few long rows."""
    parts = x.float().square().reshape(*x.shape[:-1], chunks, -1).sum(-1)
    scale = torch.rsqrt(parts.sum(-1, keepdim=True) / x.shape[-1] + eps)
    return (x * scale).to(x.dtype), scale


inductor_ext.register_custom_op_autotuning(
    rms_norm,
    configs=[
        CustomOpConfig(one_reduction),
        CustomOpConfig(in_chunks, chunks=4),
        CustomOpConfig(in_chunks, chunks=16),
    ],
)


def block(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a model does with it; the SiLU fuses into whichever candidate wins."""
    normed, scale = torch.ops.example.rms_norm(x)
    return torch.nn.functional.silu(normed), scale


def main() -> None:
    """Measure on this card, or show one candidate's generated code for an H200."""
    x = torch.randn(16, 65536, dtype=torch.bfloat16)
    if torch.cuda.is_available():
        print(inductor_ext.explain(block, x.cuda()))
    else:
        from inductor_ext.testing import compile_for, outline

        force = {"example::rms_norm_autotuned": "in_chunks_chunks16"}
        code = compile_for("h200", block, x, force=force)
        print(inductor_ext.Report(tuple(code.decisions)))
        print(outline(code))


if __name__ == "__main__":
    main()
