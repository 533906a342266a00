"""Models of the transformers library with random weights on a card, in bf16: compiled, a training
step is as near to that in fp64 as eager's, in every weight's gradient."""

import copy
import pathlib
import sys

import pytest
import torch
from inductor_ext.lowerings import attention_replacement

from inductor_ext import report

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "attention_graph"))

pytestmark = pytest.mark.gpu
transformers = pytest.importorskip("transformers")
WIDE = {
    "hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 256, "n_embd": 256,
    "n_head": 8, "max_position_embeddings": 1024, "n_positions": 1024, "head_dim": 32,
    "d_model": 256, "d_kv": 32, "num_heads": 8, "d_ff": 256, "sliding_window": 100,
    "num_experts_per_tok": 4,  # of four: no choice that a rounding could change
}  # fmt: skip


def wider(kind, attention="eager", **options):
    """The small models of the tests without a card, with heads of a usual size."""
    options |= {n: v for n, v in WIDE.items() if n in options}
    if kind not in ("Gemma2", "GptOss"):  # whose layers are of two kinds
        options |= {n: 1 for n in ("num_hidden_layers", "n_layer", "num_layers") if n in options}
    if kind == "DeepseekV3":
        options["num_key_value_heads"] = WIDE["num_attention_heads"]
    config = getattr(transformers, f"{kind}Config")(**options)
    config._attn_implementation = attention
    config._experts_implementation = "eager"  # grouped products have no fp64
    return config


def names():
    import test_models as small

    small.model = wider
    return small.CONFIGS


@pytest.mark.parametrize(
    "name",
    [
        "Llama",
        "Llama, torch's attention",
        "Gemma 2",
        "GPT-2",
        "GPT-OSS",
        "DeepSeek-V3",
        "Bloom",
        "T5",
    ],
)
def test_training_step(name, monkeypatch, own_caches):
    for threshold, value in (("LEAST_SCORES", 0), ("LEAST_KEYS", 0), ("LEAST_STATIC", (0, 0))):
        monkeypatch.setattr(attention_replacement, threshold, value)
    kind, config = names()[name]()
    config.use_cache = False
    net = getattr(transformers, kind)(config).eval().to("cuda", torch.bfloat16)
    tokens = torch.randint(1, 128, (2, 500), device="cuda")
    more = {"decoder_input_ids": tokens[:, :300]} if name == "T5" else {}

    def logits(net):
        return net(input_ids=tokens, **more).logits

    def step(call, net):
        out = call(net)
        weights = [w for w in net.parameters() if w.requires_grad]
        torch.manual_seed(1)
        seed = torch.randn(out.shape, device="cuda").to(torch.bfloat16).to(out.dtype)
        found = torch.autograd.grad(out, weights, seed, allow_unused=True)
        return [out.detach(), *(g for g in found if g is not None)]

    right = step(logits, copy.deepcopy(net).double())
    eager = step(logits, net)
    with report.collect() as decisions:
        mine = step(torch.compile(logits), net)
    own = [d for d in decisions if d.lowering == "attention"]
    assert own and all(d.fired for d in own), own
    assert len(mine) == len(right)
    worst = 0.0
    for x, truth, baseline in zip(mine, right, eager, strict=True):
        norm = truth.norm()
        error, theirs = ((t.double() - truth).norm() / norm for t in (x, baseline))
        worst = max(worst, (error / (theirs + 1e-5)).item())
        assert error <= 2 * theirs + 1e-5, (x.shape, error, theirs)
    print(f"{name}: at most {worst:.2f} of eager's error")
