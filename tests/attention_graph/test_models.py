"""Models of the transformers library with random weights: every layer's attention is one operation,
and the model computes what it did, its gradients too. Skipped where the library is not
installed."""

import pytest
import torch
from edits import OP, edited

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "vocab_size": 128, "max_position_embeddings": 256,
}  # fmt: skip
GPT = {
    "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 256,
    "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def model(kind, attention="eager", **options):
    config = getattr(transformers, f"{kind}Config")(**options)
    config._attn_implementation = attention
    return config


CONFIGS = {
    "Llama": lambda: ("LlamaForCausalLM", model("Llama", **SMALL, num_key_value_heads=2)),
    "Llama, torch's attention": lambda: (
        "LlamaForCausalLM", model("Llama", "sdpa", **SMALL, num_key_value_heads=2)),
    "Gemma 2": lambda: ("Gemma2ForCausalLM", model(
        "Gemma2", **SMALL, num_key_value_heads=2, head_dim=16, sliding_window=16)),
    "GPT-2": lambda: ("GPT2LMHeadModel", model("GPT2", **GPT)),
    "GPT-OSS": lambda: ("GptOssForCausalLM", model(
        "GptOss", **SMALL, num_key_value_heads=2, head_dim=16, sliding_window=16,
        num_local_experts=4, num_experts_per_tok=2)),
    "DeepSeek-V3": lambda: ("DeepseekV3ForCausalLM", model(
        "DeepseekV3", **SMALL, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=2,
        moe_intermediate_size=16)),
    "Bloom": lambda: ("BloomForCausalLM", model(
        "Bloom", hidden_size=64, n_layer=2, n_head=4, vocab_size=128)),
    "T5": lambda: ("T5ForConditionalGeneration", model(
        "T5", d_model=64, d_kv=16, num_layers=2, num_heads=4, d_ff=64, vocab_size=128,
        dropout_rate=0.0)),
}  # fmt: skip


PADDED = "Llama", "T5"


@pytest.mark.parametrize(
    ("name", "padded"), [*((n, False) for n in CONFIGS), *((n, True) for n in PADDED)]
)
def test_models(name, padded, card_here):
    kind, config = CONFIGS[name]()
    config.use_cache = False
    net = getattr(transformers, kind)(config).eval()
    tokens = torch.randint(1, 128, (2, 40))
    mask = torch.ones_like(tokens)
    if padded:
        mask[0, :7] = 0
    more = {"attention_mask": mask} if padded else {}
    if name == "T5":
        more["decoder_input_ids"] = tokens[:, :24]

    def fn(tokens, more):
        return net(input_ids=tokens, **more).logits

    training = not padded
    out, text, decisions = edited(fn, [tokens, more], grad=training)
    assert [d.fired for d in decisions] == [True] * (6 if name == "T5" else 2), decisions
    assert text.count(OP) == len(decisions)
    with torch.set_grad_enabled(training):
        right = fn(tokens, more)
    kept = mask.bool() if name != "T5" else slice(None)
    torch.testing.assert_close(out[kept], right[kept], rtol=1e-4, atol=1e-5)
    if training:
        given, weights = torch.randn_like(out), [w for w in net.parameters() if w.requires_grad]
        found, true = (
            torch.autograd.grad(x, weights, given, allow_unused=True) for x in (out, right)
        )
        for mine, theirs in zip(found, true, strict=True):
            if theirs is not None:
                assert (mine - theirs).norm() <= 1e-5 * theirs.norm() + 1e-8
    if not padded and name not in ("T5", "Bloom"):  # masks are positions: nothing is read
        assert not any("x0" in d.reason for d in decisions), decisions
