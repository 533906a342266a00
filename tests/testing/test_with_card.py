"""Where there is a card: the virtual one gives the same code and leaves the real one usable."""

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from inductor_ext.testing import CARDS, compile_for
from inductor_ext.testing.generated import calls_of, kernels_of

pytestmark = pytest.mark.gpu


def real_card():
    name = torch.cuda.get_device_name()
    for card in CARDS.values():
        if card.name == name:
            return card
    pytest.skip(f"no virtual card is called {name}")


def fn(x, w):
    return torch.relu(x @ w).softmax(-1)


def test_data_sheet():
    card, real = real_card(), torch.cuda.get_device_properties(0)
    for name in (
        "major",
        "minor",
        "multi_processor_count",
        "L2_cache_size",
        "regs_per_multiprocessor",
        "max_threads_per_multi_processor",
        "shared_memory_per_block_optin",
        "shared_memory_per_multiprocessor",
        "warp_size",
    ):
        if hasattr(real, name):
            assert getattr(card, name) == getattr(real, name), name
    assert abs(card.total_memory / real.total_memory - 1) < 0.02


def test_same_code_as_on_the_card():
    x, w = torch.randn(64, 128), torch.randn(128, 256)
    virtual = compile_for(real_card().key, fn, x, w)
    torch._dynamo.reset()
    with torch.no_grad():
        out, (source,) = run_and_get_code(torch.compile(fn), x.cuda(), w.cuda())
    assert calls_of(source) == virtual.calls
    assert [k.source for k in kernels_of(source)] == [k.source for k in virtual.kernels]
    torch.testing.assert_close(out.cpu(), fn(x, w), rtol=1e-4, atol=1e-5)


def test_training_on_the_card_before_and_after():
    def train():
        model = torch.nn.Linear(16, 4).cuda()
        torch.compile(model)(torch.randn(8, 16, device="cuda")).sum().backward()
        assert model.weight.grad.isfinite().all()

    train()
    compile_for("h200", torch.nn.Linear(16, 4), torch.randn(8, 16), grad=True).cross_compile()
    train()
