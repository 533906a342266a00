"""A Gluon kernel for Hopper on CPU tensors: its partitions as threads, its barriers as in PTX.

The module that defines the kernel is executed again with stand-ins for ``triton.experimental``:
tiles are CPU tensors without a layout, ``mbarrier`` counts arrivals and bytes by phases, copies are
done by a thread of their own some time after they were started, and a product that is not waited
for yet checks at its wait that nobody has written to its operands. A wait that takes seconds, an
operand that was overwritten, and a buffer that two programs share are errors. What the emulation
knows is what attention's kernels use.
"""

from __future__ import annotations

import operator
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from inductor_ext.testing.tritonmath import instruction

PATIENCE = 10.0  # seconds


class Tile:
    """A register tile; ``type.layout`` is whatever it was made with."""

    def __init__(self, value: torch.Tensor, layout: Any = None) -> None:
        self.value, self.type = value, SimpleNamespace(layout=layout)
        self.operands: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    def __bool__(self) -> bool:
        return bool(self.value)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Tile:
        return Tile(self.value.view(dtype) if bitcast else self.value.to(dtype), self.type.layout)


def _bare(x: Any) -> Any:
    return x.value if isinstance(x, Tile) else x


def _lifted(fn: Callable[..., Any]) -> Callable[..., Any]:
    def apply(*args: Any, **kwargs: Any) -> Any:
        layout = next((a.type.layout for a in args if isinstance(a, Tile)), None)
        result = fn(*map(_bare, args), **{k: _bare(v) for k, v in kwargs.items()})
        return Tile(result, layout) if isinstance(result, torch.Tensor) else result

    return apply


def _toward_zero(x: Any, y: Any) -> Any:
    return torch.div(x, y, rounding_mode="trunc")


_UNARY = {"neg": operator.neg, "invert": operator.invert}
_BINARY = {
    "floordiv": _toward_zero, "mod": torch.fmod,
    **{n: getattr(operator, n) for n in ("add", "sub", "mul", "truediv", "rshift", "lshift")},
    **{n: getattr(operator, n) for n in ("lt", "le", "gt", "ge", "eq", "ne")},
    "and": operator.and_, "or": operator.or_, "xor": operator.xor,
}  # fmt: skip
for _name, _function in (_UNARY | _BINARY).items():
    setattr(Tile, f"__{_name}__", _lifted(_function))
for _name in ("add", "sub", "mul", "truediv", "and", "or", "xor"):
    setattr(
        Tile,
        f"__r{_name}__",
        _lifted(lambda x, y, f=_BINARY[_name]: f(torch.as_tensor(y), x)),
    )


class Int(int):
    """A scalar: whole numbers stay of this class, and have ``to``."""

    def to(self, dtype: torch.dtype) -> Any:
        return float(self) if dtype.is_floating_point else self


for _name in ("add", "sub", "mul", "floordiv", "mod", "neg"):
    for _r in ("", "r") if _name != "neg" else ("",):
        _method = f"__{_r}{_name}__"

        def _apply(self: Int, *other: Any, m: str = _method) -> Any:
            result = getattr(int, m)(self, *other)
            return Int(result) if isinstance(result, int) else result

        setattr(Int, _method, _apply)


class Barrier:
    """An mbarrier: a phase completes when its arrivals and its bytes have come."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.missing = self.bytes = self.phase = 0

    def add(self, arrivals: int, size: int) -> None:
        with self.changed:
            self.missing -= arrivals
            self.bytes += size
            if self.missing < 0:
                raise AssertionError("a barrier got more arrivals than its phase counts")
            if self.missing == 0 and self.bytes == 0:
                self.phase, self.missing = self.phase + 1, self.count
            self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: (self.phase & 1) != parity, PATIENCE):
                raise TimeoutError("a barrier was waited for and never completed")


class Shared:
    """A piece of shared memory, poisoned with NaN; of int64 it holds barriers."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.memory.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    def index(self, i: int) -> Any:
        return self.memory[i] if isinstance(self.memory, list) else Shared(self.memory[i])

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.memory.view(*shape))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.memory.permute(*order))

    def store(self, value: Tile) -> None:
        self.memory.copy_(value.value)

    def load(self, layout: Any) -> Tile:
        return Tile(self.memory.clone(), layout)


def _allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
    if dtype == torch.int64:
        return Shared([Barrier() for _ in range(shape[0])])
    poison = torch.nan if dtype.is_floating_point else -1
    return Shared(torch.full(tuple(shape), poison, dtype=dtype))


class Descriptor:
    """A tensor map: blocks are clipped where they leave the tensor, and read as zero there."""

    def __init__(self, base: torch.Tensor, block: Sequence[int]) -> None:
        self.base, self.dtype, self.layout = base, base.dtype, None
        size = base.element_size()
        for n in block:
            size *= n
        self.block_type = SimpleNamespace(shape=list(block), nbytes=size)

    def cut(self, at: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The block's (place in the tensor, place in the block)."""
        spans = [
            (max(i, 0), max(min(i + n, size), max(i, 0)), i)
            for i, n, size in zip(at, self.block_type.shape, self.base.shape, strict=True)
        ]
        return (
            tuple(slice(lo, hi) for lo, hi, _ in spans),
            tuple(slice(lo - i, hi - i) for lo, hi, i in spans),
        )


class Pointer:
    def __init__(self, flat: torch.Tensor, offset: Any = 0) -> None:
        self.flat, self.offset = flat, offset
        self.dtype = SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.flat, offset + self.offset)


def _store(pointer: Pointer, value: Tile, mask: Tile | None = None, **_: Any) -> None:
    if mask is None:
        pointer.flat[_bare(pointer.offset)] = _bare(value)
    else:
        pointer.flat[pointer.offset.value[mask.value]] = value.value[mask.value]


def _load(
    pointer: Pointer, mask: Tile | None = None, other: float = 0, volatile: bool = False
) -> Any:
    if volatile:
        time.sleep(0)  # whoever is waited for goes on
    if isinstance(pointer.offset, Tile):
        if mask is not None:
            inside, at = torch.broadcast_tensors(mask.value, pointer.offset.value)
            value = pointer.flat[torch.where(inside, at, 0)]
            other = torch.full_like(value, other)
            return Tile(torch.where(inside, value, other), pointer.offset.type.layout)
        return Tile(pointer.flat[pointer.offset.value], pointer.offset.type.layout)
    inside = mask is None or bool(_bare(mask))
    value = pointer.flat[_bare(pointer.offset)] if inside else torch.tensor(other)
    return Tile(value) if value.is_floating_point() else Int(value)


def _atomic_add(pointer: Pointer, value: int) -> int:
    before = int(pointer.flat[0])
    pointer.flat[0] += value
    return Int(before)


def _mma(a: Any, b: Shared, acc: Tile, use_acc: bool = True, is_async: bool = False) -> Tile:
    left = a.memory if isinstance(a, Shared) else a.value
    result = Tile(left.float() @ b.memory.float() + (acc.value if use_acc else 0), acc.type.layout)
    read = [b.memory, *([a.memory] if isinstance(a, Shared) else [])]
    result.operands = [*acc.operands, *((m, m.clone()) for m in read)]
    return result


def _mma_wait(outstanding: int, deps: Sequence[Tile]) -> Any:
    for tile in deps:
        for memory, then in tile.operands:
            if not torch.equal(memory.view(torch.int16), then.view(torch.int16)):
                raise AssertionError("an operand was overwritten before its product was waited for")
        tile.operands = []
    return deps[0] if len(deps) == 1 else tuple(deps)


def _asm(text: str, constraints: str, args: Sequence[Any], dtype: torch.dtype, **_: Any) -> Any:
    packs = {"cvt.rn.bf16x2.f32 $0, $2, $1;": torch.bfloat16}
    packs["cvt.rn.f16x2.f32 $0, $2, $1;"] = torch.float16
    if text in packs:
        pair = torch.stack([a.value.to(packs[text]) for a in args], -1)
        return Tile(pair.view(torch.int32)[..., 0], args[0].type.layout)
    known = instruction(text)
    if known is None:
        raise NotImplementedError(f"the emulation does not know {text!r}")
    value = known(torch.as_tensor(_bare(args[0]), dtype=torch.float32))
    return Tile(value, args[0].type.layout) if isinstance(args[0], Tile) else value.item()


def _full(shape: Sequence[int], x: Any, dtype: torch.dtype, layout: Any = None) -> Any:
    return Tile(torch.full(tuple(shape), x, dtype=dtype), layout) if len(shape) else x


def _either(of_tiles: Callable[..., Any], of_scalars: Callable[..., Any]) -> Callable[..., Any]:
    def apply(x: Any, y: Any) -> Any:
        if torch.is_tensor(x) or torch.is_tensor(y):
            return of_tiles(torch.as_tensor(x), torch.as_tensor(y))
        return of_scalars(x, y)

    return apply


def _where(condition: Any, x: Any, y: Any) -> Any:
    if torch.is_tensor(condition):
        return torch.where(condition, x, y)
    chosen = x if condition else y
    return Int(chosen) if type(chosen) is int else chosen


def _fma(x: Any, y: Any, z: Any) -> Any:
    """Rounded once; of fp32, whose products are exact in fp64."""
    x, y, z = (torch.as_tensor(v, dtype=torch.float64) for v in (x, y, z))
    return torch.addcmul(z, x, y).float()


def _sum(x: Tile, axis: int) -> Any:
    total = x.value.sum(axis)
    if total.ndim or total.is_floating_point():
        return Tile(total, x.type.layout)
    return Int(total)


def _split(x: Tile) -> tuple[Tile, Tile]:
    return Tile(x.value[..., 0], x.type.layout), Tile(x.value[..., 1], x.type.layout)


class _Language(ModuleType):
    """``gl`` of one program."""

    def __init__(self, program: int, programs: int) -> None:
        super().__init__("gl")
        layouts = {n: (lambda *a: a) for n in (
            "SliceLayout", "NVMMADistributedLayout", "DotOperandLayout", "BlockedLayout",
            "SwizzledSharedLayout",
        )}  # fmt: skip
        dtypes = {n: getattr(torch, n) for n in (
            "float32", "bfloat16", "float16", "int16", "int32", "int64", 
        )} | {"int1": torch.bool}  # fmt: skip
        self.__dict__.update(
            **layouts, **dtypes,
            constexpr=lambda x: x,
            static_range=range,
            program_id=lambda axis: Int(program),
            num_programs=lambda axis: Int(programs),
            cast=lambda x, dtype: x,
            load=_load,
            minimum=_lifted(_either(torch.minimum, min)),
            maximum=_lifted(_either(torch.maximum, max)),
            where=_lifted(_where),
            exp2=_lifted(lambda x: torch.exp2(x) if torch.is_tensor(x) else 2.0**x),
            log2=_lifted(torch.log2),
            **{n: _lifted(getattr(torch, n)) for n in ("abs", "exp", "log", "sqrt", "zeros_like")},
            max=_lifted(lambda x, axis: x.amax(axis)),
            sum=_sum,
            fma=_lifted(_fma),
            full_like=_lifted(torch.full_like),
            thread_barrier=lambda: None,
            to_tensor=lambda x: x,
            atomic_add=_atomic_add,
            expand_dims=_lifted(torch.unsqueeze),
            reshape=_lifted(lambda x, shape: x.reshape(shape)),
            split=_split,
            join=_lifted(lambda x, y: torch.stack([x, y], -1)),
            convert_layout=lambda x, layout: Tile(x.value, layout),
            zeros=lambda shape, dtype, layout: Tile(torch.zeros(shape, dtype=dtype), layout),
            full=_full,
            arange=lambda lo, hi, layout: Tile(torch.arange(lo, hi), layout),
            allocate_shared_memory=_allocate,
            inline_asm_elementwise=_asm,
            store=_store,
            warp_specialize=_specialize,
        )  # fmt: skip


def _specialize(
    partitions: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], warps: Any, registers: Any
) -> None:
    assert len(warps) == len(registers) == len(partitions) - 1
    _at_once([(lambda fn=fn, args=args: fn(*args), {}) for fn, args in partitions])


def _at_once(calls: Sequence[tuple[Callable[..., None], dict[str, Any]]]) -> None:
    """Functions with their arguments, each in a thread."""
    errors: list[BaseException] = []

    def run(fn: Callable[..., None], names: dict[str, Any]) -> None:
        try:
            fn(**names)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        # A partition that failed leaves the others waiting: theirs are not the cause.
        raise min(errors, key=lambda e: isinstance(e, TimeoutError))


class _Copies:
    """``tma``: copies into shared memory done later by a thread, in the order of their start."""

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self.started: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while (job := self.started.get()) is not None:
            desc, at, barrier, shared = job
            time.sleep(self.delay)
            source, target = desc.cut(at)
            shared.memory.zero_()
            shared.memory[target] = desc.base[source]
            barrier.add(0, -desc.block_type.nbytes)

    def async_copy_global_to_shared(self, *job: Any) -> None:
        self.started.put(job)

    def async_copy_shared_to_global(self, desc: Descriptor, at: Sequence[int], src: Shared) -> None:
        target, source = desc.cut(at)
        desc.base[target] = src.memory[source]

    def store_wait(self, pending: int) -> None:
        pass


class _ThreadCopies:
    """``async_copy``: what a group copies comes when it is waited for, or, ``early``, at once."""

    def __init__(self, early: bool) -> None:
        self.early = early
        self.groups: list[list[Any]] = []
        self.open: list[Any] = []

    def async_copy_global_to_shared(self, shared: Shared, pointer: Pointer, mask: Tile) -> None:
        def copy() -> None:
            kept = torch.full_like(shared.memory, torch.nan)
            shared.memory.copy_(torch.where(mask.value, _load(pointer, mask).value, kept))

        self.open.append(copy)
        if self.early:
            copy()

    def commit_group(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, outstanding: int) -> None:
        while len(self.groups) > outstanding:
            for copy in self.groups.pop(0):
                if not self.early:
                    copy()


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.missing = count


@contextmanager
def _standing_in(
    language: ModuleType, copies: _Copies, thread_copies: _ThreadCopies
) -> Iterator[None]:
    jit = lambda fn=None, **_: fn if fn is not None else (lambda f: f)  # noqa: E731
    hopper = {
        "fence_async_shared": lambda: None,
        "mbarrier": SimpleNamespace(
            init=_init,
            expect=lambda barrier, size: barrier.add(1, size),
            arrive=lambda barrier, count=1, pred=True: barrier.add(count, 0) if pred else None,
            wait=lambda barrier, parity: barrier.wait(parity),
            MBarrierLayout=lambda: None,
        ),
        "tma": copies,
        "warpgroup_mma": _mma,
        "warpgroup_mma_init": lambda accumulator: accumulator,
        "warpgroup_mma_wait": _mma_wait,
    }
    root = "triton.experimental.gluon"
    modules = {
        root: {"jit": jit, "language": language},
        f"{root}.language": vars(language),
        f"{root}.language.nvidia": {},
        f"{root}.language.nvidia.hopper": hopper,
        f"{root}.language.nvidia.ampere": {"async_copy": thread_copies},
    }
    import triton.experimental

    before = {name: sys.modules.get(name) for name in modules}
    imported = getattr(triton.experimental, "gluon", None)
    for name, entries in modules.items():
        module = language if name == f"{root}.language" else ModuleType(name)
        module.__dict__.update(entries)
        sys.modules[name] = module
    triton.experimental.gluon = sys.modules[root]
    try:
        yield
    finally:
        if imported is None:
            del triton.experimental.gluon
        else:
            triton.experimental.gluon = imported
        for name, old in before.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old


def _argument(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_argument, value))
    if isinstance(value, torch.Tensor):
        size = value.untyped_storage().size() // value.element_size() - value.storage_offset()
        return Pointer(value.as_strided((size,), (1,)))
    return Descriptor(value.base, value.block_shape) if hasattr(value, "block_shape") else value


def interpret(
    define: Callable[[], Callable[..., None]],
    programs: int,
    arguments: dict[str, Any],
    delay: float = 0.0,
    together: bool = False,
) -> None:
    """Run all programs of a launch one after the other, or ``together``, where they wait for each
    other. ``define`` executes the kernel's module afresh and returns the kernel; tensors of
    ``arguments`` become pointers, and objects with ``base`` and ``block_shape`` descriptors.
    ``delay``: seconds before each copy; copies by threads come as late as they may, or, of 0, at
    once."""
    names = {n: _argument(v) for n, v in arguments.items() if n != "num_warps"}
    copies = [_Copies(delay) for _ in range(programs)]
    kernels = []
    for program in range(programs):
        language = _Language(program, programs)
        with _standing_in(language, copies[program], _ThreadCopies(delay == 0.0)):
            kernels.append(define())
    try:
        if together:
            _at_once([(kernel, names) for kernel in kernels])
        else:
            for kernel in kernels:
                kernel(**names)
    finally:
        for one in copies:
            one.started.put(None)
