"""Facts of the machine code, without the machine."""

import pytest
import torch

from inductor_ext.testing import compile_for, run_interpreted


def test_pointwise_moves_16_bytes_at_a_time():
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    (kernel,) = compile_for("h200", lambda x: torch.relu(x) * 2, x).cross_compile()
    assert kernel.name == "triton_poi_fused_mul_relu_0" and kernel.target == "sm_90a"
    assert kernel.widest_load == kernel.widest_store == 16
    assert 8 <= kernel.registers <= 64 and kernel.spills == 0 and kernel.shared_bytes == 0
    assert not kernel.uses_tensor_cores and not kernel.has_pdl
    assert "XBLOCK" in kernel.config and ".visible .entry" in kernel.ptx


def test_unaligned_rows_move_less():
    x = torch.empty(4096, 4097, dtype=torch.bfloat16, device="meta")[:, 1:]
    (kernel,) = compile_for("h200", torch.relu, x).cross_compile()
    assert kernel.widest_load < 16


def test_reduction_uses_shared_memory():
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    (kernel,) = compile_for("h200", lambda x: x.float().sum(-1), x).cross_compile()
    assert kernel.shared_bytes > 0 and kernel.widest_load >= 8 and kernel.num_warps >= 4


@pytest.mark.parametrize(
    ("card", "target", "load"), [("a100", "sm_80", 16), ("b200", "sm_100a", 16)]
)
def test_other_cards(card, target, load):
    x = torch.empty(4096, 4096, dtype=torch.float32, device="meta")
    (kernel,) = compile_for(card, torch.relu, x).cross_compile()
    assert kernel.target == target and kernel.widest_load >= load


def test_matmul_template_uses_tensor_cores():
    x = torch.empty(1024, 1024, dtype=torch.bfloat16, device="meta")
    code = compile_for(
        "h200",
        lambda x: torch.relu(x @ x),
        x,
        mode="max-autotune-no-cudagraphs",
        force={"mm": r"BLOCK_M=64\b.*BLOCK_N=64\b"},
    )
    (kernel,) = code.cross_compile()
    assert kernel.uses_tensor_cores and kernel.widest_load == 16 and kernel.spills == 0


def test_every_configuration():
    x = torch.empty(4096, 4096, device="meta")
    code = compile_for("h200", lambda x: x.softmax(-1), x, mode="max-autotune-no-cudagraphs")
    every = code.cross_compile(configs="all")
    assert len(every) > 1 and len({k.config for k in every}) == len(every)
    with pytest.raises(ValueError, match='"first" or "all", got \'best\''):
        code.cross_compile(configs="best")


def test_a_program_is_interpreted_and_compiled_in_one_process():
    a, b = torch.randn(16, 2048).bfloat16(), torch.randn(2048, 16).bfloat16()
    code = compile_for("h200", lambda a, b: torch.relu(a @ b), a, b)
    for _ in range(2):
        run_interpreted(code, a, b)
        assert all(kernel.spills == 0 for kernel in code.cross_compile())
