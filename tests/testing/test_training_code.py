"""Typical training code on a virtual card: losses, normalisation, attention, autocast.

Each is generated for the card, run in the interpreter and compared with eager on the CPU.
"""

import pytest
import torch
import torch.nn.functional as F
import triton

from inductor_ext.testing import autocast, compile_for, run_interpreted

BF16 = torch.bfloat16
N, C = 13, 37


def cases(name):
    """Functions of one tensor, with the tensors they are called with."""
    torch.manual_seed(0)
    x, x3 = torch.randn(N, C), torch.randn(3, C, 5)
    y, y3 = torch.randint(0, C, (N,)), torch.randint(0, C, (3, 5))
    y[2] = y3[0, 1] = -100
    p, w = torch.randn(N, C).softmax(-1), torch.rand(C)
    ce, log = F.cross_entropy, F.log_softmax
    return {
        "none": (lambda x, y: ce(x, y, reduction="none"), x, y),
        "mean": (lambda x, y: ce(x, y), x, y),
        "sum": (lambda x, y: ce(x, y, reduction="sum"), x, y),
        "ignore_index": (lambda x, y: ce(x, y, ignore_index=3), x, y.clamp(min=0)),
        "label_smoothing": (lambda x, y: ce(x, y, label_smoothing=0.1), x, y),
        "weight": (lambda x, y, w: ce(x, y, weight=w, label_smoothing=0.1), x, y, w),
        "probabilities": (lambda x, p: ce(x, p), x, p),
        "3d": (lambda x, y: ce(x, y), x3, y3),
        "nll_loss": (lambda x, y: F.nll_loss(log(x, -1), y), x, y),
        "kl_div": (lambda x, p: F.kl_div(log(x, -1), p, reduction="batchmean"), x, p),
        "logsumexp": (lambda x: x.logsumexp(-1), x),
        "gather": (lambda x, y: x.gather(1, y[:, None]), x, y.clamp(min=0)),
    }[name]


LOSSES = (
    "none mean sum ignore_index label_smoothing weight probabilities 3d nll_loss kl_div logsumexp "
    "gather"
)


def check(fn, *args, grad, tolerance=1e-4, reference=None):
    """Outputs and, with ``grad``, the gradient of the first tensor are those of ``reference``."""
    reference = reference or fn
    args = [a.detach().requires_grad_(grad and i == 0) for i, a in enumerate(args)]
    code = compile_for("h200", fn, *args, grad=grad)
    assert not code.stopped and code.frames == 1
    assert "device='meta'" not in code.source
    expected = reference(*args)
    close = {"rtol": tolerance, "atol": tolerance}
    if not grad:
        torch.testing.assert_close(run_interpreted(code, *args), expected, **close)
        return code
    gradient = torch.randn_like(expected)
    kept = gradient.clone()
    out, gradients = run_interpreted(code, *args, grad_outputs=[gradient])
    torch.testing.assert_close(out, expected.detach(), **close)
    (wanted,) = torch.autograd.grad(expected, args[0], kept)
    torch.testing.assert_close(gradients["args[0]"], wanted, **close)
    assert torch.equal(gradient, kept)
    return code


@pytest.mark.codegen
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", LOSSES.split())
def test_losses(name, grad):
    fn, *args = cases(name)
    check(fn, *args, grad=grad)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_normalisation_with_weights(dtype, grad):
    x, w, b = (torch.randn(s, dtype=dtype) for s in ((4, 9, 64), 64, 64))
    tolerance = 1e-4 if dtype == torch.float32 else 6e-2
    check(lambda x, w: F.rms_norm(x, (64,), w), x, w, grad=grad, tolerance=tolerance)
    check(lambda x, w, b: F.layer_norm(x, (64,), w, b), x, w, b, grad=grad, tolerance=tolerance)
    check(torch.nn.RMSNorm(64, dtype=dtype), x, grad=grad, tolerance=tolerance)


ATTENTION = {
    "flash": ({"is_causal": True}, (2, 4, 16, 32), BF16),
    "efficient": ({"scale": 0.3}, (2, 4, 18, 32), torch.float32),
    "efficient causal": ({"is_causal": True}, (2, 4, 16, 32), torch.float32),
    "plain": ({}, (1, 2, 7, 10), torch.float32),
}


@pytest.mark.codegen
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name, grad):
    kwargs, shape, dtype = ATTENTION[name]
    q = torch.randn(shape, dtype=dtype)
    k, v = torch.randn_like(q), torch.randn_like(q)
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2

    def fn(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, **kwargs)

    code = check(fn, q, k, v, grad=grad, tolerance=tolerance)
    kernel = name.split()[0]
    assert (f"_scaled_dot_product_{kernel}_attention" in code.source) == (kernel != "plain")
    # The gradients of keys and values too.
    check(lambda k, q, v: fn(q, k, v), k, q, v, grad=True, tolerance=tolerance)
    check(lambda v, q, k: fn(q, k, v), v, q, k, grad=True, tolerance=tolerance)


@pytest.mark.parametrize("grad", [False, True])
def test_attention_with_masks_and_shared_heads(grad):
    q = torch.randn(2, 4, 16, 32)
    mask = torch.rand(16, 16) > 0.5
    mask[:, 0] = True
    attention = F.scaled_dot_product_attention
    code = check(attention, q, q.clone(), q.clone(), mask, grad=grad)
    assert "_scaled_dot_product_efficient_attention" in code.source
    bias = torch.randn(2, 4, 16, 16)
    check(lambda m, q, k: attention(q, k, k, m), bias, q, q.clone(), grad=grad)
    q = q.to(BF16)
    shared = torch.randn(2, 2, 16, 32, dtype=BF16)
    code = check(
        lambda k, q: attention(q, k, k, is_causal=True, enable_gqa=True),
        *(shared, q),
        grad=grad,
        tolerance=6e-2,
    )
    assert "_scaled_dot_product_flash_attention" in code.source


def test_causal_attention_of_other_lengths_is_aligned_to_the_first_key():
    q, k = torch.randn(1, 2, 8, 16, dtype=BF16), torch.randn(1, 2, 16, 16, dtype=BF16)

    def fn(q, k):
        return F.scaled_dot_product_attention(q, k, k, is_causal=True)

    code = check(fn, q, k, grad=False, tolerance=2e-2)
    assert "_scaled_dot_product_flash_attention" not in code.source


def test_attention_with_dropout_is_refused_in_the_interpreter():
    q = torch.randn(1, 2, 16, 16)
    code = compile_for("h200", lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), q)
    with pytest.raises(NotImplementedError, match=r"without dropout, got dropout_p=0\.5"):
        run_interpreted(code, q)


# ----------------------------------------------------------------------------------------
# autocast


def under_autocast(fn, device):
    def wrapped(*args):
        with torch.autocast(device, dtype=BF16):
            return fn(*args)

    return wrapped


@pytest.mark.codegen
def test_autocast_computes_each_operator_in_its_dtype():
    def fn(x, w):
        h = x @ w
        low = F.linear(h, w), torch.bmm(h[None], w[None]), torch.addcmul(h, h, h), h.relu()
        high = h.softmax(-1), h.exp(), h.sum(0), h.norm(), h.norm(dim=0), F.layer_norm(h, (64,))
        return (h, *low), (*high, torch.addcmul(h, x, h), h.cumsum(0), h.logsumexp(-1), h**2)

    x, w = torch.randn(17, 64), torch.randn(64, 64)
    code = compile_for("h200", under_autocast(fn, "cuda"), x, w)
    low, high = run_interpreted(code, x, w)
    assert [t.dtype for t in low] == [BF16] * len(low)
    assert [t.dtype for t in high] == [torch.float32] * len(high)
    h = x.to(BF16) @ w.to(BF16)
    torch.testing.assert_close(low[0], h)
    torch.testing.assert_close(low[1], F.linear(h, w.to(BF16)))
    wide = low[0].float()
    expected = wide.softmax(-1), wide.exp(), wide.sum(0), wide.norm(), wide.norm(dim=0)
    torch.testing.assert_close(high[:5], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("grad", [False, True])
def test_autocast_of_a_loss(grad):
    torch.manual_seed(0)
    x, w, y = torch.randn(17, 64), torch.randn(64, 32) / 8, torch.randint(0, 32, (17,))

    def fn(w, x, y):
        return F.cross_entropy(x @ w, y)

    cuda, cpu = under_autocast(fn, "cuda"), under_autocast(fn, "cpu")
    code = check(cuda, w, x, y, grad=grad, tolerance=2e-3, reference=cpu)
    assert code.source.count("torch.bfloat16") > 2 and "extern_kernels.mm" in code.source


def test_autocast_may_be_off_and_leaves_float64_and_integers_alone():
    def fn(x, wide, i):
        with torch.autocast("cuda", dtype=torch.float16):
            with torch.autocast("cuda", enabled=False):
                off = x @ x
            return off, x @ x, wide @ wide, i.sum(), i.cumsum(0)

    x = torch.randn(8, 8)
    i = torch.arange(8)
    code = compile_for("h200", fn, x, x.double(), i)
    dtypes = [t.dtype for t in run_interpreted(code, x, x.double(), i)]
    assert dtypes == [torch.float32, torch.float16, torch.float64, torch.int64, torch.int64]


def test_autocast_refuses_what_a_card_refuses():
    x = torch.rand(4)
    with pytest.raises(Exception, match="unsafe to autocast"):
        compile_for("h200", under_autocast(F.binary_cross_entropy, "cuda"), x, x)
    half = torch.rand(4, dtype=torch.float16)
    with pytest.raises(Exception, match=r"torch\.bfloat16 or torch\.float32 for aten\.dot"):
        compile_for("h200", under_autocast(torch.dot, "cuda"), half, half)


@pytest.mark.codegen
def test_every_operator_with_an_autocast_rule_is_known():
    unknown = {
        op.overloadpacket.__name__
        for op in autocast.operators_with_a_rule()
        if autocast.rule_of(op) is autocast._unknown and "names" not in op._overloadname
    }
    # A library call no program makes under its own name, and one that only torch 2.15 has.
    assert unknown <= {"_cudnn_rnn", "linalg_matrix_sqrth"}


def test_autocast_is_torch_s_own_again_afterwards():
    before = torch._C._dispatch_dump("aten::mm")
    compile_for("h200", torch.sin, torch.randn(4))
    assert torch._C._dispatch_dump("aten::mm") == before


# ----------------------------------------------------------------------------------------
# whole layers


class Attention(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in self.qkv(x).chunk(3, -1))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Layer(torch.nn.Module):
    def __init__(self, width=32, heads=2):
        super().__init__()
        self.norms = torch.nn.ModuleList([torch.nn.RMSNorm(width), torch.nn.LayerNorm(width)])
        self.attention = Attention(width, heads)
        self.up = torch.nn.Linear(width, 2 * width, bias=False)
        self.down = torch.nn.Linear(width, width, bias=False)

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * F.dropout(up, 0.5, training=False))


@pytest.mark.codegen
@pytest.mark.parametrize("grad", [False, True])
def test_transformer_layer(grad):
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(2, 16, 32)
    check(layer, x, grad=grad, tolerance=1e-3)
    cuda, cpu = under_autocast(layer, "cuda"), under_autocast(layer, "cpu")
    code = check(cuda, x, grad=grad, tolerance=6e-2, reference=cpu)
    assert "_scaled_dot_product_flash_attention" in code.source


def test_mixture_of_experts_routing_and_embedding_loss():
    torch.manual_seed(0)
    x, router, experts = torch.randn(32, 16), torch.randn(16, 4), torch.randn(4, 16, 8)

    def route(x, router, experts):
        weight, index = (x @ router).softmax(-1).topk(2, -1)
        y = torch.einsum("td,edf->tef", x, experts)
        return (y.gather(1, index[..., None].expand(-1, -1, 8)) * weight[..., None]).sum(1)

    check(route, x, router, experts, grad=True, tolerance=1e-3)
    table, tokens = torch.randn(50, 32), torch.randint(0, 50, (2, 16))

    def loss(table, tokens, target):
        logits = F.embedding(tokens, table) @ table.t()
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    check(loss, table, tokens, torch.randint(0, 50, (2, 16)), grad=True, tolerance=1e-3)


@pytest.mark.codegen
def test_outputs_that_are_views_have_gradients():
    # The gradient is copied into the output's layout before the backward is called.
    check(lambda x: F.pad(x, (1, 2))[:, 1:], torch.randn(2, 16, 32), grad=True)
    check(lambda x: (x * 2).transpose(1, 2), torch.randn(2, 16, 32), grad=True)


def test_tensors_in_default_arguments_are_on_the_card():
    w, norm = torch.randn(32), torch.nn.RMSNorm(32)

    def fn(x, w=w, *, norm=norm):
        return norm(x) * w

    check(fn, torch.randn(4, 32), grad=False)
    assert fn.__defaults__[0] is w and norm.weight.device.type == "cpu"


def test_constants_of_any_shape():
    def fn(x):
        table = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=x.device)
        return x @ table + table.sum() * torch.tensor([0.5, 2.0], device=x.device)

    check(fn, torch.randn(5, 2), grad=True)


def test_a_scan_leaves_the_interpreter_as_it_was():
    # Its combine function is a kernel module's own device function; a looped reduction comes after.
    check(lambda x: x.cumsum(0) + x.norm(), torch.randn(17, 64), grad=False)
    language = dict(vars(triton.language.core.tensor))
    check(lambda x: x.cumsum(0), torch.randn(17, 64), grad=True)
    assert dict(vars(triton.language.core.tensor)) == language


def test_gradients_passed_in_are_not_written_to():
    def fn(x):
        return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,))

    check(fn, torch.rand(4, 8), grad=True)
