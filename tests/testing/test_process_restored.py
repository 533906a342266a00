"""The process is as it was before ``compile_for``, whether it returns or raises."""

import os
import threading

import pytest
import torch
import triton

from inductor_ext import compat_virtual
from inductor_ext.testing import CARDS, compile_for


def snapshot():
    from torch._dynamo.device_interface import CudaInterface, device_interfaces
    from torch._subclasses.fake_tensor import FakeTensor

    return {
        "cuda": {n: getattr(torch.cuda, n) for n in dir(torch.cuda)},
        "interface": dict(vars(CudaInterface)),
        "interfaces": dict(device_interfaces),
        "version": torch.version.cuda,
        "fake": {n: v for n, v in vars(FakeTensor).items()},
        "config": torch._inductor.config.save_config_portable(),
        "env": dict(os.environ),
        "driver": triton.runtime.driver._active,
        "interpret": triton.knobs.runtime.interpret,
        "names": sorted(n for n in dir(torch._C) if n.startswith("_cuda")),
        "grad": torch.is_grad_enabled(),
    }


def run_on_cpu():
    x = torch.randn(8, 16)
    w = torch.randn(16, 4, requires_grad=True)
    out = torch.compile(lambda x: torch.tanh(x @ w).sum())(x)
    out.backward()
    torch.testing.assert_close(out, torch.tanh(x @ w).sum())
    assert w.grad is not None


def test_cpu_compile_runs_before_and_after():
    available = torch.cuda.is_available()
    run_on_cpu()
    before = snapshot()
    model = torch.nn.Linear(16, 4)
    compile_for("h200", model, torch.randn(8, 16), grad=True).cross_compile()
    after = snapshot()
    for name in before:
        assert after[name] == before[name], name
    assert torch.cuda.is_available() == available
    assert compat_virtual.active_card() is None
    run_on_cpu()


def test_restored_after_an_exception():
    before = snapshot()

    def fails(x):
        raise KeyError("from the function")

    with pytest.raises(Exception, match="from the function"):
        compile_for("h200", fails, torch.randn(4))
    assert snapshot() == before
    run_on_cpu()


def test_module_is_untouched_after_an_exception():
    model = torch.nn.Linear(4, 4)
    weight = model.weight
    model.register_forward_hook(lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compile_for("h200", model, torch.randn(2, 4))
    assert model.weight is weight and weight.device.type == "cpu"


def test_one_card_at_a_time():
    with (
        pytest.raises(RuntimeError, match="one inside another"),
        compat_virtual.virtual_device(CARDS["h200"]),
    ):
        compile_for("h200", torch.sin, torch.randn(4))
    results = []
    threads = [
        threading.Thread(
            target=lambda n=n: results.append(compile_for("h200", torch.sin, torch.randn(n)))
        )
        for n in (4, 8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2 and all(len(code.kernels) == 1 for code in results)


def test_benchmarks_are_refused():
    from torch._inductor.runtime.benchmarking import benchmarker

    def fn(x):
        benchmarker.benchmark_gpu(lambda: None)
        return x

    with pytest.raises(RuntimeError, match="expected no benchmark under a virtual card"):
        compile_for("h200", torch._dynamo.disable(fn), torch.randn(4))
