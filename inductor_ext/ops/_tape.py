"""What an operation did for a kind of call, done again without deciding anything anew.

An operation's launches follow from its arguments' sizes, strides, dtypes and alignment, from its
numbers and words, and from a few settings of torch; never from what is in a tensor. Choosing a
kernel, a tiling, layouts and descriptors takes the host ten times as long as launching what was
chosen. So a call whose like was seen before is recorded: the memory that it takes, the operations
of torch that it calls, and its launches as compiled kernels with their arguments, in which
everything is a number but the addresses. Calls like it run that list.

What can't be so described leaves no tape, and the operation runs as it is: a tensor from elsewhere,
a value read by the host.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from inductor_ext import compat_replay, config
from inductor_ext.templates import tilings

log = logging.getLogger("inductor_ext")
aten = torch.ops.aten
MOST = 1024  # kinds of calls of one operation
OFTEN = 16  # calls of a kind that are recorded, whatever recordings of others came to
_MEMORY = (
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
_READ_BY_HOST = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class NoTape(Exception):
    """Why a call can't be described."""


# --- what calls are told apart by -----------------------------------------------------------------


def key_of(args: Sequence[Any]) -> tuple[Any, list[Tensor]] | None:
    """(what a call's launches follow from, its tensors); None where that is not known. The first
    argument is a tensor."""
    tensors: list[Tensor] = []
    parts: list[Any] = []
    for arg in args:
        if isinstance(arg, Tensor):
            tensors.append(arg)
            parts.append(Tensor)
        elif isinstance(arg, (list, tuple)):
            parts.append(len(arg))
            for one in arg:
                if isinstance(one, Tensor):
                    tensors.append(one)
                    parts.append(Tensor)
                elif isinstance(one, (list, tuple, dict, slice)):
                    return None
                else:
                    parts.append(_exactly(one))
        else:
            parts.append(_exactly(arg))
    exact = False
    device = tensors[0].device
    for t in tensors:
        if type(t) not in _PLAIN or t.device != device:
            return None
        exact = exact or t.dtype is torch.float32
        parts.append(t.shape)
        parts.append(t.stride())
        parts.append((t.dtype, t.data_ptr() % 16, t.storage_offset() % 16, t.requires_grad))
    if len({*map(id, tensors)}) < len(tensors):
        return None
    parts.append(compat_replay.settings(device, exact))
    return tuple(parts), tensors


_PLAIN = (Tensor, torch.nn.Parameter)


def _exactly(value: Any) -> Any:
    """A number or word, told apart from others that are equal to it (1, 1.0, True; 0.0, -0.0)."""
    if isinstance(value, float):
        return float, value, math.copysign(1.0, value)
    return type(value), value


def _on_card(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_cuda


def _may_replay() -> bool:
    """Whether nobody looks at how an operation comes to its launches."""
    return tilings.watcher is None and not compat_replay.is_watched()


# --- recording ------------------------------------------------------------------------------------


class Place:
    """Where a tensor is: ``offset`` bytes behind the start of tensor number ``root``."""

    __slots__ = ("offset", "root")

    def __init__(self, root: int, offset: int = 0) -> None:
        self.root, self.offset = root, offset


class _Slot:
    """A tensor by its number, in arguments and results."""

    __slots__ = ("at",)

    def __init__(self, at: int) -> None:
        self.at = at


class Tape(TorchDispatchMode):
    """Records while it is entered; ``play`` does the same with other tensors."""

    def __init__(self, tensors: Sequence[Tensor], bind: Callable[..., Any]) -> None:
        super().__init__()
        self.bind, self.inputs, self.device = bind, len(tensors), tensors[0].device
        self.places: dict[int, Place] = {}  # by id, of those that are alive
        self.slots: dict[int, int] = {}
        self.alive: dict[int, Any] = {}
        self.dtypes: dict[int, torch.dtype] = {}
        self.count = 0
        self.steps: list[tuple[Any, ...]] = []
        self.fault: str | None = None
        self.launching = self.below = False
        self.launches = 0
        for t in tensors:
            self._new(t)

    # While it records

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.launching:
            return func(*args, **kwargs)
        # What an operation of ours launches in turn is part of that operation.
        before, self.below = self.below, True
        try:
            found = func(*args, **kwargs)
        finally:
            self.below = before
        with self._faults():
            self._saw(func, args, kwargs, found)
        return found

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """What can't be noted ends the tape, never the call."""
        if self.fault is not None:
            yield
            return
        try:
            yield
        except NoTape as reason:
            self.fault = str(reason)
        except Exception as error:
            if config.strict:
                raise
            self.fault = f"{type(error).__name__}: {error}"

    def launch(
        self, run: Callable[[], Any], kernel: Any, grid: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Launch a kernel by ``run``, and note it."""
        self.launching = True
        self.launches += 1
        try:
            compiled = run()
        finally:
            self.launching = False
        with self._faults():
            self.steps.append(("launch", self.bind(kernel, grid, args, kwargs, compiled, self)))
        return compiled

    def place(self, t: Tensor) -> Place:
        """Where a tensor is that a kernel is given."""
        try:
            return self.places[id(t)]
        except KeyError:
            raise NoTape(f"a tensor {tuple(t.shape)} comes from elsewhere") from None

    def _saw(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        if any(tag in func.tags for tag in _READ_BY_HOST):
            raise NoTape(f"{func} is read by the host")
        made = [t for t in _tensors(found) if id(t) not in self.places]
        given = [*_tensors(args), *_tensors(list(kwargs.values()))]
        if any(t.device != self.device for t in made):  # a tensor from elsewhere
            if func not in _MEMORY and any(t.device == self.device for t in given):
                raise NoTape(f"{func} gives a tensor on another device, which the host may read")
            return
        if func in _MEMORY:
            (t,) = made
            what = tuple(t.shape), t.stride(), t.dtype, t.device
            self.steps.append(("memory", self._new(t), *what))
            return
        storages = {t.untyped_storage()._cdata: t for t in given}
        if not func._schema.is_mutable and made:
            sources = [storages.get(t.untyped_storage()._cdata) for t in made]
            if all(source is not None for source in sources):
                for t, source in zip(made, sources, strict=True):
                    assert source is not None
                    at = self.place(source)
                    self._known(t, Place(at.root, at.offset + _start(t) - _start(source)))
                return
            if any(source is not None for source in sources):
                raise NoTape(f"{func} gives views beside new tensors")
        elif any(t.untyped_storage()._cdata in storages for t in made):
            raise NoTape(f"{func} gives a view of what it changed")
        given_slots = self._as_slots(args), self._as_slots(kwargs)
        outs = self._outs(found)
        self.steps.append(("call", func, *given_slots, outs))

    def _new(self, t: Tensor) -> int:
        self._known(t, Place(self.count))
        self.slots[id(t)], self.dtypes[self.count] = self.count, t.dtype
        self.count += 1
        return self.count - 1

    def _known(self, t: Tensor, place: Place) -> None:
        """Until it dies: then another may get its id."""
        at = id(t)

        def gone(_: Any) -> None:
            self.places.pop(at, None)
            self.slots.pop(at, None)
            self.alive.pop(at, None)

        self.places[at], self.alive[at] = place, weakref.ref(t, gone)

    def _outs(self, found: Any) -> Any:
        if isinstance(found, Tensor):
            return None if id(found) in self.places else self._new(found)
        if isinstance(found, (list, tuple)):
            return [self._outs(one) for one in found]
        return None

    def _slot(self, t: Tensor) -> _Slot:
        """A tensor that an operation of torch is given, or a result."""
        if id(t) not in self.slots:
            at, size = self.place(t), t.element_size()
            if self.dtypes[at.root] != t.dtype or at.offset % size:
                raise NoTape("a view in another dtype is given to an operation")
            slot = self.count
            self.slots[id(t)] = slot
            self.count += 1
            view = tuple(t.shape), t.stride(), at.offset // size
            self.steps.append(("view", slot, at.root, *view))
        return _Slot(self.slots[id(t)])

    def _as_slots(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._slot(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._as_slots(one) for one in value)
        if isinstance(value, dict):
            return {name: self._as_slots(one) for name, one in value.items()}
        return value

    def finished(self, result: Any) -> Playable | str:
        """The tape of a call that gave ``result``, or why there is none."""
        tape: Playable | str | None = self.fault
        with self._faults():
            if tape is None:
                given = self._as_slots(result)  # may add a step
                tape = Playable(self.inputs, self.count, self.steps, given)
        for known in (self.alive, self.places, self.slots):
            known.clear()  # their finalisers hold this
        return self.fault if tape is None or self.fault else tape


def _start(t: Tensor) -> int:
    """Bytes in front of a tensor in its storage; an empty one has no address."""
    return t.storage_offset() * t.element_size()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for one in value for t in _tensors(one)]
    return []


# --- playing --------------------------------------------------------------------------------------


def _slots_in(value: Any) -> set[int]:
    if isinstance(value, _Slot):
        return {value.at}
    if isinstance(value, (list, tuple)):
        return set().union(*map(_slots_in, value)) if value else set()
    if isinstance(value, dict):
        return _slots_in(list(value.values()))
    return set()


def _filled(value: Any, tensors: list[Any]) -> Any:
    if isinstance(value, _Slot):
        return tensors[value.at]
    if isinstance(value, (list, tuple)):
        return type(value)([_filled(one, tensors) for one in value])
    return value


class Playable:
    """A finished tape: immutable, so that threads may play it at once."""

    def __init__(self, inputs: int, count: int, steps: list[tuple[Any, ...]], result: Any) -> None:
        self.inputs, self.count, self.result = inputs, count, result
        kept = _slots_in(result)
        used = set(kept)
        for step in steps:
            used |= _uses(step)
        steps = [s for s in steps if s[0] != "memory" or s[1] in used]
        last: dict[int, int] = {}
        for i, step in enumerate(steps):
            last.update(dict.fromkeys(_uses(step), i))
        ends: list[tuple[int, ...]] = [()] * len(steps)
        for slot, i in last.items():
            if slot not in kept and slot >= inputs:
                ends[i] = (*ends[i], slot)
        self.steps = list(zip(steps, ends, strict=True))

    def play(self, given: Sequence[Tensor]) -> Any:
        tensors: list[Any] = [*given, *[None] * (self.count - self.inputs)]
        addresses: list[int] = [t.data_ptr() for t in given]
        addresses += [0] * (self.count - self.inputs)
        for step, ends in self.steps:
            kind = step[0]
            if kind == "launch":
                step[1](tensors, addresses)
            elif kind == "memory":
                _, slot, size, stride, dtype, device = step
                made = torch.empty_strided(size, stride, dtype=dtype, device=device)
                tensors[slot], addresses[slot] = made, made.data_ptr()
            elif kind == "view":
                _, slot, root, size, stride, offset = step
                base = tensors[root]
                tensors[slot] = base.as_strided(size, stride, base.storage_offset() + offset)
            else:
                _, func, args, kwargs, outs = step
                made = func(
                    *_filled(args, tensors), **{n: _filled(v, tensors) for n, v in kwargs.items()}
                )
                _put(outs, made, tensors, addresses)
            for slot in ends:
                tensors[slot] = None
        return _filled(self.result, tensors)


def _uses(step: tuple[Any, ...]) -> set[int]:
    """The tensors that a step needs to be there."""
    kind = step[0]
    if kind == "launch":
        return set(step[1].roots)
    if kind == "view":
        return {step[2]}
    return _slots_in((step[2], step[3])) if kind == "call" else set()


def _put(outs: Any, made: Any, tensors: list[Any], addresses: list[int]) -> None:
    if isinstance(outs, int):
        tensors[outs], addresses[outs] = made, made.data_ptr()
    elif isinstance(outs, list):
        for out, one in zip(outs, made, strict=True):
            _put(out, one, tensors, addresses)


# --- operations -----------------------------------------------------------------------------------


class Taped:
    """A function that launches kernels, with the tapes of what it was called for."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.epoch = -1
        self.forget()

    def forget(self) -> None:
        self.tapes: dict[Any, Playable | str] = {}
        self.seen: dict[Any, int] = {}
        self.epoch = tilings.epoch
        self.recorded = self.played = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or not _on_card(args[0]) or not _may_replay():
            return self.fn(*args, **kwargs)
        if self.epoch != tilings.epoch:
            self.forget()
        found = key_of(args)
        if found is None:
            return self.fn(*args)
        key, tensors = found
        tape = self.tapes.get(key)
        if tape is None:
            return self._without(key, tensors, args)
        if isinstance(tape, str):
            return self.fn(*args)
        self.played += 1
        return tape.play(tensors)

    def _without(self, key: Any, tensors: list[Tensor], args: tuple[Any, ...]) -> Any:
        """A call that has no tape. The second of its kind is recorded, if recordings have paid so
        far: each takes about what eight plays save, and sizes may never come again. A kind that
        came ``OFTEN`` is recorded in any case."""
        seen = self.seen.get(key, 0)
        if not seen and len(self.seen) >= MOST:
            self.seen.clear()
        self.seen[key] = seen + 1
        if not seen or (seen < OFTEN and 8 * self.recorded > self.played + 512):
            return self.fn(*args)
        if len(self.tapes) >= MOST:
            self.tapes.clear()
        tapes = self.tapes
        result, tape = record(self.fn, args, tensors)
        if tape is not None and tapes is self.tapes:  # no plan was loaded meanwhile
            self.recorded += 1
            tapes[key] = tape
            if isinstance(tape, str):
                log.info("%s: no tape: %s", getattr(self.fn, "__name__", self.fn), tape)
        return result


def record(
    fn: Callable[..., Any], args: Sequence[Any], tensors: Sequence[Tensor],
    bind: Callable[..., Any] = compat_replay.bind, watched: Any = compat_replay.watched,
) -> tuple[Any, Playable | str | None]:  # fmt: skip
    """(result of a call, its tape or why it never has one; None where it has none now)."""
    tape = Tape(tensors, bind)
    with watched(tape) as launches:
        if launches is None:
            return fn(*args), None
        collecting = gc.isenabled()
        gc.disable()  # what finalisers do is no part of the call
        try:
            with tape:
                result = fn(*args)
        finally:
            if collecting:
                gc.enable()
        if tape.launches != launches():
            tape.fault = "a kernel was launched that the recorder did not see"
    return result, tape.finished(result)
