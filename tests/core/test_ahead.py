"""Kernels are compiled before their launches, from fake tensors."""

import functools
import sys
import threading
import types

import pytest
import torch
import triton
import triton.language as tl
from inductor_ext.templates import scan_launch
from torch._subclasses import FakeTensor, FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from inductor_ext import compat_ahead

pytestmark = pytest.mark.codegen


@triton.jit
def doubled_kernel(X, OUT, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(OUT + at, tl.load(X + at, mask=at < n) * 2, mask=at < n)


@pytest.fixture
def compiles(monkeypatch):
    """The kernels that are compiled from now on, for a card that is not there."""
    card = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", card)
    done, before = [], JITFunction._do_compile

    def compile_(kernel, *args, **kwargs):
        done.append(kernel)
        return before(kernel, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "_do_compile", compile_)
    return done


def doubled(x, *, block):
    assert block != 48, "what fails is left to the launch"
    # An address that is no multiple of 16 is known as such; what is read back is nobody's.
    doubled_kernel[(1,)](x[1:], torch.empty_like(x)[4:], x.numel() - 5, BLOCK=block)
    return x[torch.empty_like(x).long()]


def test_what_was_compiled_ahead_is_not_compiled_for_the_launch(compiles):
    x = torch.randn(64)
    compat_ahead.compile_ahead(functools.partial(doubled, x, block=n) for n in (16, 48, 32))
    assert len(compiles) == 2
    for block in (16, 32):
        kernel = doubled_kernel.run(
            x[1:], torch.empty_like(x)[4:], 59, BLOCK=block, grid=(1,), warmup=True
        )
        assert "st.global" in kernel.asm["ptx"]
    assert len(compiles) == 2
    assert not hasattr(x, "fake_mode") and FakeTensor.data_ptr is torch.Tensor.data_ptr


def test_a_workspace_of_fake_tensors_is_not_kept(monkeypatch):
    stream = types.SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(scan_launch, "_kept", {})
    with FakeTensorMode():
        words, call = scan_launch.workspace(torch.device("cuda"), 8)
    assert isinstance(words, FakeTensor) and call == 1 and not scan_launch._kept


def test_two_at_a_time_leave_nothing_behind(compiles):
    """What is patched meanwhile is the process's."""
    before, over = JITFunction.run, threading.Event()

    def other():
        compat_ahead.compile_ahead([lambda: over.wait(5)])

    thread = threading.Thread(target=other)
    compat_ahead.compile_ahead([thread.start])
    over.set()
    thread.join()
    assert JITFunction.run is before


def test_an_interrupt_leaves_kernels_that_compile(compiles):
    x = torch.randn(64)

    def interrupted(future):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        waits = sys.modules[triton.AsyncCompileMode.__module__]
        patch.setattr(waits, "as_completed", interrupted)
        compat_ahead.compile_ahead([functools.partial(doubled, x, block=64)])
    doubled_kernel.run(x, torch.empty_like(x), 59, BLOCK=128, grid=(1,), warmup=True)
