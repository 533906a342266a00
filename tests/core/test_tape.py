"""Calls that are done again from a tape: the same bits as deciding everything anew."""

import contextlib
import functools

import pytest
import torch
import triton
from inductor_ext.templates import (
    attention_backward_launch,
    attention_decode_launch,
    attention_documents,
    attention_far,
    attention_launch,
    tilings,
)
from torch.utils._python_dispatch import TorchDispatchMode

from inductor_ext import compat_replay
from inductor_ext.ops import _attention as operation
from inductor_ext.ops import _attention_options as options_of
from inductor_ext.ops import _tape
from inductor_ext.testing import launches_interpreted

MODULES = (
    attention_launch,
    attention_backward_launch,
    attention_decode_launch,
    attention_documents,
    attention_far,
)


class Launch:
    """A launch that is done again in the interpreter, of tensors by their places."""

    def __init__(self, kernel, grid, args, kwargs, compiled, tape):
        self.kernel, self.grid, self.roots = kernel, grid, set()

        def placed(value):
            if isinstance(value, torch.Tensor):
                at = tape.place(value)
                self.roots.add(at.root)
                return at, value.shape, value.stride()
            if hasattr(value, "block_shape"):
                return type(value), placed(value.base), value
            return value

        self.args = [placed(a) for a in args]
        self.kwargs = {n: placed(a) for n, a in kwargs.items()}

    def __call__(self, tensors, addresses):
        def real(value):
            if isinstance(value, tuple) and isinstance(value[0], _tape.Place):
                at, shape, stride = value
                root = tensors[at.root]
                assert root is not None and root.data_ptr() == addresses[at.root]
                offset = root.storage_offset() + at.offset // root.element_size()
                return root.as_strided(shape, stride, offset)
            if isinstance(value, tuple) and isinstance(value[0], type):
                kind, base, like = value
                return kind(real(base), like.shape, like.strides, like.block_shape)
            return value

        args = [real(a) for a in self.args]
        self.kernel[self.grid](*args, **{n: real(a) for n, a in self.kwargs.items()})


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(operation, "kernels_apply", lambda q: True)
    with launches_interpreted(*MODULES):
        yield


@contextlib.contextmanager
def interpreted(tape):
    """What the interpreter launches is seen by a tape."""

    class Seen:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                run = functools.partial(self.kernel[grid], *args, **kwargs)
                return tape.launch(run, self.kernel, grid, args, kwargs)

            return launch

    with pytest.MonkeyPatch.context() as patches:
        for module in MODULES:
            own = module.wrap_triton
            patches.setattr(module, "wrap_triton", lambda kernel, own=own: Seen(own(kernel)))
        yield lambda: tape.launches


def recorded(fn, args):
    tensors = [t for a in args for t in (a if isinstance(a, list) else [a])]
    tensors = [t for t in tensors if isinstance(t, torch.Tensor)]
    result, tape = _tape.record(fn, args, tensors, Launch, interpreted)
    assert isinstance(tape, _tape.Playable), tape
    return result, tape


def same(mine, right):
    if isinstance(right, torch.Tensor):
        assert mine.stride() == right.stride() and mine.dtype == right.dtype
        assert torch.equal(mine, right)
        return
    assert len(mine) == len(right)
    for one, other in zip(mine, right, strict=True):
        same(one, other)


def draw(rows, columns, heads=2, own=1, d=16, dtype=torch.float32):
    q = torch.randn(1, rows, heads, d, dtype=dtype).transpose(1, 2)
    packed = torch.randn(1, columns, own, 2 * d, dtype=dtype).transpose(1, 2)
    return q, packed[..., :d], packed[..., d:]


def bias(rows, columns):
    return {"bias": torch.randn(1, 2, rows, columns)}


OPTIONS = {
    "causal": lambda rows, columns: {"causal": "lower_right"},
    "bias": bias,
    "documents": lambda rows, columns: {
        "segments": options_of.packed(
            (torch.arange(rows) // 17)[None], (torch.arange(columns) // 17)[None], rows, columns, ""
        )
    },
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("rows", [20, 3])
def test_attention(name, rows, on_cpu):
    def call():
        q, k, v = draw(rows, 40)
        options = options_of.Options(scale=0.25, **OPTIONS[name](rows, 40))
        score = options_of.score_of(options, 2, 2)
        return [q, k, v, list(score.inputs), list(score.numbers), score.text, "zero"]

    forward, backward = operation._attention._init_fn, operation._backward._init_fn
    first, second = call(), call()
    _, tape = recorded(forward.fn, first)
    right = forward.fn(*second)
    tensors = [*second[:3], *second[3]]
    same(tape.play(tensors), right)

    def gradients(given, found):
        out, lse = found
        needed = [True] * 3 + [t.is_floating_point() for t in given[3]]
        do = torch.randn(out.shape[0], out.shape[2], out.shape[1], out.shape[3]).transpose(1, 2)
        return [do, None, *given, out, lse, needed]

    first, second = gradients(first, forward.fn(*first)), gradients(second, right)
    _, tape = recorded(backward.fn, first)
    tensors = [second[0], *tensors, *right]
    same(tape.play(tensors), backward.fn(*second))


# --- which calls are done again -------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch):
    """(a taped function of tensors on a "card", the list of its calls that were decided)."""
    monkeypatch.setattr(_tape, "_on_card", lambda t: isinstance(t, torch.Tensor))
    monkeypatch.setattr(compat_replay, "settings", lambda device, exact: (settings["now"],))
    calls, settings = [], {"now": 0}

    def fn(x, others, factor, word, maybe=None):
        calls.append(word)
        kept = torch.empty_like(x)
        kept.copy_(x * factor if word != "read" or x.sum().item() else x)
        for other in others:
            kept[1:] += other[1:].transpose(0, 1).transpose(0, 1)
        return kept[1:], [kept.sum(0)]

    return _tape.Taped(fn), calls, settings


def three(taped, x, *more):
    """Three calls, and that their results are right."""
    for _ in range(3):
        got, (total,) = taped(x.clone(), *more)
        whole = x * more[1]
        for other in more[0]:
            whole[1:] += other[1:]
        assert torch.equal(got, whole[1:]) and torch.equal(total, whole.sum(0))


def test_the_third_call_decides_nothing(counted):
    taped, calls, settings = counted
    x, other = torch.randn(4, 6), torch.randn(4, 6)
    three(taped, x, [other], 2.0, "a")
    three(taped, torch.randn(4, 6), [torch.randn(4, 6)], 2.0, "a")
    assert len(calls) == 2 and taped.played == 4
    # Each is another kind of call.
    for changed in (
        (x, [other, other.clone()], 2.0, "a"),
        (x, [other], 3.0, "a"),
        (x, [other], 2.0, "b"),
        (torch.randn(6, 4).mT, [other], 2.0, "a"),
        (x, [torch.randn(25)[1:].view(4, 6)], 2.0, "a"),
        (x.double(), [other.double()], 2.0, "a"),
        (x, [other.clone().requires_grad_().detach()], 2.0, "a", None),
    ):
        calls.clear()
        with torch.no_grad():
            three(taped, *changed)
        assert len(calls) == 2
    settings["now"] = 1
    calls.clear()
    three(taped, x, [other], 2.0, "a")
    assert len(calls) == 2


def test_what_the_host_reads_is_always_decided(counted):
    taped, calls, _ = counted
    three(taped, torch.ones(4, 6), [], 2.0, "read")
    assert len(calls) == 3 and taped.played == 0


def test_one_tensor_given_twice_is_always_decided(counted):
    taped, calls, _ = counted
    x = torch.randn(4, 6)
    for _ in range(3):
        taped(x, [x], 2.0, "a")
    assert len(calls) == 3


def test_who_watches_sees_decisions(counted, monkeypatch):
    taped, calls, _ = counted
    x = torch.randn(4, 6)
    three(taped, x, [], 2.0, "a")

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    calls.clear()
    with Watching():
        taped(x, [], 2.0, "a")
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", print)
    taped(x, [], 2.0, "a")
    monkeypatch.undo()
    assert len(calls) == 2


def test_other_plans_are_asked(counted):
    taped, calls, _ = counted
    x = torch.randn(4, 6)
    three(taped, x, [], 2.0, "a")
    calls.clear()
    tilings.forget()
    three(taped, x, [], 2.0, "a")
    assert len(calls) == 2


def test_sizes_that_never_come_again_are_not_recorded_for_long(counted):
    """Two calls of each length, as two layers of a growing cache have."""
    taped, _, _ = counted
    for length in range(2, 300):
        x = torch.randn(length, 2)
        taped(x, [], 1.0, "a"), taped(x, [], 1.0, "a")
    assert taped.recorded <= 65
    for _ in range(_tape.OFTEN + 2):  # lengths that stay pay, whatever came before
        taped(torch.randn(7, 3), [], 1.0, "a")
    assert taped.played == 1 and taped.recorded <= 66


def test_a_plan_that_comes_during_a_recording(counted):
    taped, calls, _ = counted
    x = torch.randn(4, 6)
    taped(x, [], 2.0, "a")
    own = taped.fn

    def interrupted(*args):
        found = own(*args)
        taped.fn = own
        tilings.forget()
        taped(x[:, :2].clone(), [], 2.0, "a")  # another thread's call
        return found

    taped.fn = interrupted
    taped(x, [], 2.0, "a")
    calls.clear()
    three(taped, x, [], 2.0, "a")
    assert len(calls) == 2


def test_equal_numbers_that_differ_are_other_kinds(counted):
    x = torch.randn(2)
    keys = {_tape.key_of([x, value])[0][1] for value in (1, 1.0, True, 0.0, -0.0, 0, False)}
    assert len(keys) == 7 and _tape.key_of([x, [[1]]]) is None


def test_memory_that_the_host_may_read_leaves_no_tape(counted):
    def fn(x, others, factor, word):
        return x + x.to("meta").dim()

    taped = _tape.Taped(fn)
    for _ in range(3):
        taped(torch.randn(4), [], 1.0, "a")
    assert taped.played == 0 and "another device" in next(iter(taped.tapes.values()))


@pytest.mark.parametrize("hook", [None, print])
def test_hooks_of_a_users_own_leave_launches_alone(hook, monkeypatch):
    run = triton.runtime.jit.JITFunction.run
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", hook)
    with compat_replay.watched(None) as launches:
        assert launches is None
    assert triton.runtime.jit.JITFunction.run is run
    monkeypatch.undo()
    with compat_replay.watched(None) as launches:
        assert launches() == 0
    assert triton.runtime.jit.JITFunction.run is run


def test_memory_is_given_back_as_it_is_used_up(counted):
    """A step's tensors that nobody needs any more are gone before the next one."""
    taped, _, _ = counted
    x = torch.randn(4, 6)
    three(taped, x, [], 2.0, "a")
    (tape,) = taped.tapes.values()
    ends = [end for _, end in tape.steps]
    results = _tape._slots_in(tape.result)
    made = set(range(tape.inputs, tape.count))
    assert {slot for end in ends for slot in end} == made - results


def test_who_follows_operations_sees_those_of_a_program():
    """What a program calls in the dispatcher's place goes through it for a mode or a profiler."""
    op = torch.ops.inductor_ext.attention.default
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    args = q, k, v, [], [], "v0 = mul.Tensor(s, 0.5); v0", "zero"
    seen = []

    class Following(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    right = op(*args)
    same(op.launched(*args), right)
    with Following():
        same(op.launched(*args), right)
    assert seen[0] is op  # before what compares
    with torch.profiler.profile() as profile:
        op.launched(*args)
    assert "inductor_ext::attention" in {event.name for event in profile.events()}
