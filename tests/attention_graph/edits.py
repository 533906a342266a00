"""Programs as the pass in front of AOTAutograd leaves them, run as they are."""

import torch
from inductor_ext.lowerings import attention as lowering

from inductor_ext import report

OP = "inductor_ext.attention.default("
# The same in what Inductor writes, where torch's dispatcher is left out.
WRITTEN = "inductor_ext.attention.default.launched("


def edited(fn, args, grad=False, dynamic=None):
    """(results, text, decisions) of the edited program; AOTAutograd and Inductor are left out.
    ``dynamic`` maps an argument to its dimensions of symbolic size."""
    kept = []

    def backend(graph, _):
        with report.collect() as decisions:
            lowering.rewrite(graph.graph)
        graph.recompile()
        kept.append((graph.code, list(decisions)))
        return graph.forward

    torch._dynamo.reset()
    for one, dims in (dynamic or {}).items():
        for dim in dims:
            torch._dynamo.mark_dynamic(args[one], dim)
    with torch.set_grad_enabled(grad):
        out = torch.compile(fn, backend=backend)(*args)
    (one,) = kept
    return out, *one


def wide(args):
    return [
        a.detach().double().requires_grad_(a.requires_grad) if a.is_floating_point() else a
        for a in args
    ]


def with_gradients(out, args):
    generator = torch.Generator().manual_seed(1)
    given = torch.randn(out.shape, generator=generator).to(out.dtype)
    leaves = [a for a in args if a.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, leaves, given)]
