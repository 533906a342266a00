"""Timing and judging kernels on a CUDA card: for the plugin at compile time and for the benchmarks.

A compiled function costs its caller 80 to 160 us of host time, many times what a small kernel runs,
so nothing here times a call from the host. Many calls are captured in one CUDA graph, each on its
own copy of the inputs so that the L2 cache is cold, and its replay is timed with events. There are
two readings. *Independent* calls don't use each other's results and may overlap under programmatic
dependent launch. In a *chain* a small producer writes each call's first input after reading the
previous output, which is the latency a model sees; the time of the producers alone, measured the
same way in the same rounds, is taken off.

Times are microseconds. Imports torch only.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

Call = Callable[..., Any]
Inputs = tuple[Any, ...]

_WARMUP = 2  # calls before a capture: lazy module loads and autotuning are illegal inside it
_LEAD_CYCLES = 400_000  # about 0.2 ms of spinning in front of a replay, and per call:
_LEAD_CYCLES_PER_CALL = 20_000  # the host enqueues about one node in 2 us, slower than they run
_REPLAY_US = 500.0  # what one replay should last, so that its start-up (a few us) does not count
_COLD = 2.5  # the input sets together exceed the L2 this many times
_MAX_SETS = 512
_MAX_CLONED_BYTES = 8 << 30


@dataclasses.dataclass(frozen=True)
class Timing:
    """Time of one call: median and interquartile range in us, over ``n`` replays."""

    us: float
    spread_us: float
    n: int


@dataclasses.dataclass(frozen=True)
class Check:
    """The verdict of :func:`check`; ``reason`` is one sentence where ``ok`` is False."""

    ok: bool
    error: float
    baseline_error: float
    allowed: float
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Captured:
    """A CUDA graph of ``calls`` calls; ``keep`` holds what the graph reads and runs."""

    graph: torch.cuda.CUDAGraph
    calls: int
    keep: tuple[Any, ...]


def require_cuda() -> None:
    """Raise RuntimeError with one sentence where torch sees no CUDA card."""
    if not torch.cuda.is_available():
        raise RuntimeError("Measuring needs a CUDA card, and torch sees none on this machine.")


def one_line(error: BaseException) -> str:
    """An exception as one short line, for reports and tables."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    # Dynamo's first line ends in "raised:", and the cause is on the second.
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {text}"[:200]


# --- inputs ---------------------------------------------------------------------------------------


def _storages(inputs: Inputs) -> dict[int, list[torch.Tensor]]:
    """The tensors of ``inputs`` by the memory they view."""
    by_storage: dict[int, list[torch.Tensor]] = {}
    for t in inputs:
        if isinstance(t, torch.Tensor):
            by_storage.setdefault(t.untyped_storage().data_ptr(), []).append(t)
    return by_storage


def _touched_bytes(inputs: Inputs) -> int:
    """Bytes one call can read at most: an expanded tensor counts its memory once."""
    return sum(
        min(sum(t.numel() * t.element_size() for t in ts), ts[0].untyped_storage().nbytes())
        for ts in _storages(inputs).values()
    )


def cloned(inputs: Inputs) -> Inputs:
    """Copy whole storages, so that strides, offsets and aliasing between the inputs survive."""
    copies: dict[int, torch.UntypedStorage] = {}
    out = []
    for t in inputs:
        if isinstance(t, torch.Tensor):
            storage = t.untyped_storage()
            if storage.data_ptr() not in copies:
                copies[storage.data_ptr()] = storage.clone()
            fresh = torch.empty(0, dtype=t.dtype, device=t.device)
            fresh.set_(copies[storage.data_ptr()], t.storage_offset(), t.size(), t.stride())
            t = fresh.requires_grad_(t.requires_grad)
        out.append(t)
    return tuple(out)


def rotate(inputs: Sequence[Any], l2_bytes: int | None = None) -> list[Inputs]:
    """Copies of ``inputs`` that together exceed ``l2_bytes`` (default: this card's L2) 2.5 times.

    The first set is ``inputs`` itself; the others hold the same values in memory of their own, with
    the same sizes, strides and storage offsets, and views of one storage stay views of one storage.
    At least 2 sets, at most 512: inputs under about 300 KB on a 60 MB L2 are partly warm. Raises
    ValueError when there is no tensor among the inputs.
    """
    inputs = tuple(inputs)
    storages = _storages(inputs)
    if not storages:
        raise ValueError("rotate() needs at least one tensor among the inputs, and there is none.")
    if l2_bytes is None:
        require_cuda()
        l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    stored = sum(ts[0].untyped_storage().nbytes() for ts in storages.values())
    count = min(math.ceil(_COLD * l2_bytes / max(_touched_bytes(inputs), 1)), _MAX_SETS)
    count = min(count, _MAX_CLONED_BYTES // max(stored, 1))
    return [inputs, *(cloned(inputs) for _ in range(max(count, 2) - 1))]


def poison(tensor: torch.Tensor) -> None:
    """Fill with NaN (integers: the largest value; bool: True), so that unwritten elements show."""
    if tensor.dtype == torch.bool:
        tensor.fill_(True)
    elif tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(math.nan)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


# --- graphs ---------------------------------------------------------------------------------------


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    # One per device: cuBLAS keeps a workspace for every stream it has seen.
    return torch.cuda.Stream(device)


def capture_stream() -> torch.cuda.Stream:
    """The stream that calls are captured on. A backward runs where its forward ran: whoever
    captures a backward alone runs the forward there."""
    require_cuda()
    return _side_stream(torch.cuda.current_device())


def _synchronizes(run: Callable[[], Any]) -> bool:
    """Whether ``run`` waits for the card. Asked before a capture, which waiting would break."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Not "error": other threads are in that mode too. Torch says once that it is a prototype.
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return any("synchronizing CUDA operation" in str(w.message) for w in caught)


_abandoned: list[torch.cuda.CUDAGraph] = []


def _abandon(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Take back what a broken capture leaves behind.

    Where ending a capture raises, torch 2.11 leaves its allocator recording, and the next release
    of cached memory in the process fails. The allocators may still ask the graph, so it is kept.
    """
    _abandoned.append(graph)
    device = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # later versions have ended it themselves
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


def _capture(body: Callable[[], Any], warm: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Run ``warm`` on the capture stream, capture ``body``, replay it once; body's result too."""
    current = torch.cuda.current_stream()
    stream = _side_stream(torch.cuda.current_device())
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        warm()
        if _synchronizes(warm):
            raise RuntimeError("The call waits for the card, which no CUDA graph can hold.")
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    failure: Exception | None = None
    result = None
    try:
        # The outer context restores the stream where ending a broken capture raises inside torch.
        with (
            torch.cuda.stream(current),
            torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"),
        ):
            try:
                result = body()
            except Exception as error:  # the cause, not what ending the capture says of it
                failure = error
    except Exception as error:
        failure = failure or error
        _abandon(graph, pool)
    if failure is not None:
        raise failure
    graph.replay()
    torch.cuda.synchronize()  # a kernel that faults is blamed on this candidate, not on the next
    return graph, result


def _first_element(output: Any) -> torch.Tensor:
    tensor = next(t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor))
    element = tensor.as_strided((), ())
    # There is no arithmetic on fp8; the dependence needs the bytes only.
    one_byte_float = tensor.is_floating_point() and tensor.element_size() == 1
    return element.view(torch.uint8) if one_byte_float else element


def _run(
    call: Call, sets: Sequence[Inputs], calls: int, live: Sequence[torch.Tensor] | None
) -> Iterator[Any]:
    """Yield the outputs of ``calls`` calls; with ``live`` buffers, of a dependent chain of them."""
    previous: Any = sets[0]
    for i in range(calls):
        inputs = sets[i % len(sets)]
        if live is not None:
            # Adding 0 times the last output changes no value and orders the producer after it.
            first = live[i % len(live)]
            with torch.no_grad():
                torch.add(inputs[0], _first_element(previous), alpha=0, out=first)
            inputs = (first, *inputs[1:])
        previous = call(*inputs)
        yield previous


def _live(sets: Sequence[Inputs], count: int) -> list[torch.Tensor]:
    first = sets[0][0]
    if not isinstance(first, torch.Tensor) or first.numel() == 0 or 0 in first.stride():
        raise ValueError("A chain's first input must be a writable tensor: its producer writes it.")
    return [cloned(sets[i % len(sets)][:1])[0] for i in range(count)]


def _calls_per_graph(sets: Sequence[Inputs]) -> int:
    # A small kernel takes 2 us, and the fastest cards move about 4e6 bytes per us.
    calls = max(_REPLAY_US / (2.0 + _touched_bytes(sets[0]) / 4e6), 10)
    # Whole passes over the sets: the next replay must not begin with sets that are still warm.
    return math.ceil(calls / len(sets)) * len(sets)


def capture(
    call: Call, input_sets: Sequence[Inputs], *, calls: int | None = None, chained: bool = False
) -> Captured:
    """Capture ``calls`` calls (default: half a millisecond's worth), each on the next input set.

    ``chained`` puts the producer before each call; two buffers in turn are the first input then.
    Raises what the call raises, or RuntimeError without a card.
    """
    require_cuda()
    calls = calls or _calls_per_graph(input_sets)
    live = _live(input_sets, 2) if chained else None
    graph, _ = _capture(
        # Outputs are dropped as they come: the next call reuses their memory, as in a program.
        lambda: collections.deque(_run(call, input_sets, calls, live), maxlen=0),
        lambda: collections.deque(_run(call, input_sets, _WARMUP, live), maxlen=0),
    )
    return Captured(graph, calls, (call, input_sets, live))


def _event_us(run: Callable[[], Any], lead_cycles: int) -> float:
    """Time of what ``run`` enqueues; the card spins meanwhile, so that the host stays ahead."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(lead_cycles)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def replay_us(captured: Captured) -> float:
    """Time of one replay over the number of its calls, in us."""
    lead = _LEAD_CYCLES + _LEAD_CYCLES_PER_CALL * captured.calls
    return _event_us(captured.graph.replay, lead) / captured.calls


def graph_outputs(call: Call, input_sets: Sequence[Inputs], *, chained: bool = False) -> list[Any]:
    """The outputs of one captured call per input set, for checking what the timed graph computes.

    Before the replay every output is poisoned and, in a chain, so are the buffers the producers
    write: a kernel that leaves an element out, or that reads its input before the producer has
    written it, ends in NaN. Give the sets different, finite values: a race between two calls on the
    same values is invisible.
    """
    require_cuda()
    live = _live(input_sets, len(input_sets)) if chained else None
    graph, outputs = _capture(
        lambda: list(_run(call, input_sets, len(input_sets), live)),
        lambda: list(_run(call, input_sets, _WARMUP, live)),
    )
    read = _storages(tuple(pytree.tree_leaves(list(input_sets))))
    for t in pytree.tree_leaves(outputs):
        # An output that is a view of an input is left alone: poisoning it would change the input.
        if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in read:
            poison(t)
    for t in live or ():
        poison(t)
    graph.replay()
    torch.cuda.synchronize()
    # Cloned, because the graph's memory goes with the graph.
    return pytree.tree_map_only(torch.Tensor, torch.clone, outputs)


def _timing(times: Sequence[float]) -> Timing:
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Timing(median, high - low, len(times))


def compare(
    candidates: Mapping[str, Call],
    inputs: Sequence[Any],
    *,
    repeats: int = 20,
    chained: bool = False,
) -> dict[str, Timing | str]:
    """Time every candidate on ``inputs``, cold, in rounds that visit all: drift hits all alike.

    A candidate that raises or can't be captured gives its error as a string. With ``chained``, the
    time of a link less the producer's. Raises RuntimeError without a card, ValueError on bad input.
    """
    require_cuda()
    if repeats < 2:
        raise ValueError(f"repeats must be at least 2, and {repeats} came.")
    sets = rotate(inputs)
    producer = capture(lambda first, *_: first, sets, chained=True) if chained else None
    results: dict[str, Timing | str] = {}
    graphs: dict[str, Captured] = {}
    for name, call in candidates.items():
        try:
            graphs[name] = capture(call, sets, chained=chained)
        except Exception as error:
            results[name] = one_line(error)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for i in range(repeats + 1):
        base = replay_us(producer) if producer else 0.0
        for name, captured in graphs.items():
            us = replay_us(captured) - base
            if i:  # the first round brings the clocks up
                times[name].append(us)
    results.update((name, _timing(t)) for name, t in times.items())
    return {name: results[name] for name in candidates}


def time_graph(
    call: Call, input_sets: Sequence[Inputs], *, rounds: int = 20, calls: int | None = None
) -> float:
    """Median us per call over ``rounds`` replays of one graph; ``rotate`` makes cold input sets."""
    captured = capture(call, input_sets, calls=calls)
    replay_us(captured)
    return statistics.median(replay_us(captured) for _ in range(rounds))


def chain_time(call: Call, inputs: Sequence[Any], *, repeats: int = 20) -> Timing:
    """Time of one link of a dependent chain, net of its producer; RuntimeError if it fails."""
    result = compare({"call": call}, inputs, repeats=repeats, chained=True)["call"]
    if isinstance(result, str):
        raise RuntimeError(f"The chain could not be timed: {result}")
    return result


def host_overhead(call: Call, *inputs: Any, batches: int = 20, batch: int = 20) -> float:
    """Host us per call: the median over ``batches`` of ``batch`` calls issued without waiting.

    Small batches, because a full launch queue would make the host wait for the card.
    """
    require_cuda()
    times = []
    for _ in range(batches + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(batch):
            call(*inputs)
        times.append((time.perf_counter() - start) * 1e6 / batch)
    torch.cuda.synchronize()
    return statistics.median(times[1:])


# --- correctness ----------------------------------------------------------------------------------


def _kinds(x: torch.Tensor) -> torch.Tensor:
    """0 finite, 1 NaN, 2 +inf, 3 -inf."""
    return x.isnan() + 2 * x.isposinf() + 3 * x.isneginf()


def check(
    candidate: torch.Tensor,
    reference: torch.Tensor,
    baseline: torch.Tensor,
    *,
    rounding: torch.dtype | None = None,
    tf32: bool = False,
) -> Check:
    """Judge ``candidate`` by a ``reference`` in fp64 and by eager's own error in the same dtype.

    Up to 16 bits: the largest absolute error may be twice that of ``baseline`` plus half a unit in
    the last place of the largest magnitude. fp32: the relative norm error may be 1e-5, or, where
    ``tf32`` is allowed, twice the baseline's if that is more; fp64: 1e-12. Integers: no more off
    than the baseline. ``rounding`` (default: the candidate's dtype) is the dtype eager rounds to on
    the way, where the result is wider. Every element that is not finite must be what the reference
    rounded to the candidate's dtype is, or what eager gives where that dtype overflows.
    """
    if reference.dtype not in (torch.float64, torch.float32):
        raise ValueError(f"The reference must be float64 or float32, and {reference.dtype} came.")
    if baseline.shape != reference.shape:
        shapes = f"{tuple(baseline.shape)} and {tuple(reference.shape)}"
        raise ValueError(f"Baseline and reference must have one shape, and {shapes} came.")
    if candidate.shape != baseline.shape or candidate.dtype != baseline.dtype:
        mine, eagers = (f"{t.dtype} of shape {tuple(t.shape)}" for t in (candidate, baseline))
        reason = f"{mine} where eager gives {eagers}."
        return Check(False, math.inf, math.nan, math.nan, reason)
    dtype = rounding or candidate.dtype
    got, eager, truth = candidate.double(), baseline.double(), reference.double()
    if dtype.is_floating_point:
        kinds = _kinds(got)
        wrong = (kinds != _kinds(truth.to(candidate.dtype).double())) & (kinds != _kinds(eager))
        if wrong.any():
            reason = f"{int(wrong.sum())} elements are NaN or inf, or not, unlike the reference."
            return Check(False, math.inf, math.nan, math.nan, reason)
    offs, base_offs = got - truth, eager - truth
    offs, base_offs = offs[offs.isfinite()], base_offs[base_offs.isfinite()]
    truth = truth[truth.isfinite()]
    if truth.numel() == 0:
        return Check(True, 0.0, 0.0, 0.0)
    if dtype in (torch.float32, torch.float64):
        scale = truth.norm().item() or 1.0
        error, base = offs.norm().item() / scale, base_offs.norm().item() / scale
        allowed = 1e-12 if dtype == torch.float64 else max(1e-5, 2 * base if tf32 else 0.0)
    else:
        error, base = (d.abs().max().item() if d.numel() else 0.0 for d in (offs, base_offs))
        half_ulp = torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0
        factor = 2 if dtype.is_floating_point else 1
        allowed = factor * base + half_ulp * truth.abs().max().item()
    ok = error <= allowed
    reason = "" if ok else f"error {error:.3g} where {allowed:.3g} is allowed (eager: {base:.3g})."
    return Check(ok, error, base, allowed, reason)


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What this card reaches: bytes read plus written, and matmul flops, per us."""

    copy: float
    half: float
    single: float

    def flops(self, dtype: torch.dtype) -> float:
        """The rate of a large matmul, in flops per us: fp32, or bf16 for 16-bit dtypes."""
        return self.single if dtype == torch.float32 else self.half


def _large_us(call: Callable[[], Any]) -> float:
    return statistics.median([_event_us(call, _LEAD_CYCLES) for _ in range(13)][2:])


@functools.cache
def _ceilings(device: int, precision: str) -> Ceilings:
    free, _ = torch.cuda.mem_get_info(device)
    nbytes = min(2 << 30, free // 4)
    source = torch.randn(nbytes // 4, device=device)  # random: zeros can run faster
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / _large_us(functools.partial(target.copy_, source))
    del source, target
    rates = []
    for n, dtype in ((8192, torch.bfloat16), (4096, torch.float32)):
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        rates.append(2 * n**3 / _large_us(functools.partial(torch.mm, a, b)))
    return Ceilings(copy, *rates)


def ceilings() -> Ceilings:
    """This card's ceilings, measured once per process and float32 matmul precision."""
    require_cuda()
    return _ceilings(torch.cuda.current_device(), torch.get_float32_matmul_precision())


def copy_floor_us(nbytes: float) -> float:
    """Least time in us to move ``nbytes`` (read plus written) on this card."""
    return nbytes / ceilings().copy
