"""Tensors of a card that is not there: sizes, strides and a device, no data.

They are FakeTensors on "cuda:0". In C++ autograd asks a tensor for its device to find a stream and
a worker thread, which a torch without CUDA aborts on. So C++ (and only C++) is told "meta", which
autograd runs in the calling thread; Python is told "cuda:0". Operators that C++ calls with such a
tensor's device (factories, copies) arrive with "meta" and are put back on the card before any mode
sees or records them, as are those of a program that asks for meta tensors. The same is done where
a real card is present, so that the result is the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from inductor_ext.compat_patches import MovedName, Patches, private
from inductor_ext.compat_virtual import CARD_DEVICE, OnHost

_META = torch.device("meta")


def patch_fake_tensors(patches: Patches) -> None:
    fake_tensor = private("torch._subclasses.fake_tensor")
    fake_cls = private("torch._subclasses.fake_tensor:FakeTensor")
    fake_mode = private("torch._subclasses.fake_tensor:FakeTensorMode")
    functional = private("torch._subclasses.functional_tensor:FunctionalTensor")
    functional_mode = private("torch._subclasses.functional_tensor:FunctionalTensorMode")
    device_query = torch.ops.prim.device.default
    # Older versions touch the card when its first FakeTensor is made.
    for name in ("init_gpu_context", "init_cuda_context"):
        patches.set_if_there(fake_tensor, name, lambda *device: None)

    def told_to_cpp(tensor: Any) -> torch.device:
        if isinstance(tensor, functional):
            tensor = torch._from_functional_tensor(tensor.elem)
        if not isinstance(tensor, fake_cls):
            return tensor.device
        if tensor.fake_mode.in_kernel_invocation or tensor.fake_device.type == "cuda":
            return _META
        return tensor.fake_device

    handlers = private("torch._subclasses.fake_tensor:_DISPATCH_META_HANDLERS")
    if device_query not in handlers:
        raise MovedName(
            f"inductor_ext.testing expected {fake_tensor.__name__}._DISPATCH_META_HANDLERS to "
            f"answer prim.device in torch {torch.__version__}, got no such entry"
        )
    before = handlers[device_query]
    patches.callback(handlers.__setitem__, device_query, before)
    handlers[device_query] = lambda args: told_to_cpp(args[0])

    dispatch = vars(fake_cls)["__torch_dispatch__"].__func__

    def fake_dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is device_query:
            return told_to_cpp(args[0])
        return dispatch(cls, func, types, args, kwargs or {})

    patches.set(fake_cls, "__torch_dispatch__", classmethod(fake_dispatch))

    def functional_device(self: Any) -> torch.device:
        return torch._from_functional_tensor(self.elem).device

    patches.set(functional, "device", property(functional_device))
    _wrap_on_card(patches, functional)
    # The other attributes that Python reads through C++.
    for cls in (fake_cls, functional):
        for kind in ("cpu", "cuda", "meta", "xpu", "mps"):
            patches.set(cls, f"is_{kind}", property(_device_is(kind)))
        patches.set(cls, "get_device", _get_device)

    # torch.tensor(data, device="cuda") makes a real tensor there unless told that it cannot.
    patches.set(fake_mode, "avoid_device_init", property(lambda mode: True))
    # Tracing follows small constants with real tensors, which can only be on the host.
    tracer = private("torch.fx.experimental.proxy_tensor")
    patches.set(tracer, "unset_fake_temporarily", _on_host(tracer.unset_fake_temporarily))
    # Whichever of these modes an operator meets first: what the tracer writes down, it generates.
    for mode in (fake_mode, functional_mode, tracer.ProxyTorchDispatchMode):
        answered = _devices_on_card(mode.__torch_dispatch__, told_to_cpp)
        patches.set(mode, "__torch_dispatch__", answered)


def _wrap_on_card(patches: Patches, functional: type) -> None:
    """Functional tensors get the dispatch keys of the card, as the FakeTensors in them have.

    The device that C++ names for them is "meta". Made with its keys beside the card's, they would
    lead to no autocast, and composite operators (``nll_loss``) would lose their gradient.
    """
    make = torch.Tensor._make_wrapper_subclass
    device, dispatch_device = 6, 10  # where FunctionalTensor passes these two

    def make_on_card(cls: type, *args: Any, **kwargs: Any) -> torch.Tensor:
        if cls is functional:
            if len(args) <= dispatch_device or not isinstance(args[device], torch.device):
                raise MovedName(
                    f"inductor_ext.testing expected {functional.__name__} to pass its device as "
                    f"argument {device} in torch {torch.__version__}, got {args!r}"
                )
            if args[device] == _META:
                on_card = list(args)
                on_card[device], on_card[dispatch_device] = CARD_DEVICE, True
                args = tuple(on_card)
        return make(cls, *args, **kwargs)

    patches.set(torch.Tensor, "_make_wrapper_subclass", staticmethod(make_on_card))


def _on_host(unset: Callable[[], Any]) -> Callable[[], Any]:
    @contextlib.contextmanager
    def unset_on_host() -> Iterator[Any]:
        with unset() as before, OnHost():
            yield before

    return unset_on_host


def _device_is(kind: str) -> Callable[[torch.Tensor], bool]:
    return lambda tensor: tensor.device.type == kind


def _get_device(tensor: torch.Tensor) -> int:
    return -1 if tensor.device.type in ("cpu", "meta") else tensor.device.index or 0


def _devices_on_card(
    dispatch: Callable[..., Any], told_to_cpp: Callable[[Any], torch.device]
) -> Callable[..., Any]:
    """A mode's dispatch that puts the card where C++ has passed on the "meta" it was told."""
    device_query = torch.ops.prim.device.default

    @functools.wraps(dispatch)
    def on_card(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is device_query:
            return told_to_cpp(args[0])
        args = tuple(_card_for_meta(a) for a in args)
        kwargs = {name: _card_for_meta(value) for name, value in (kwargs or {}).items()}
        return dispatch(self, func, types, args, kwargs)

    return on_card


def _card_for_meta(value: Any) -> Any:
    return CARD_DEVICE if isinstance(value, torch.device) and value == _META else value


class CardTensors:
    """Makes the FakeTensors of one virtual card and remembers what each stands for."""

    def __init__(self) -> None:
        self.mode = private("torch._subclasses.fake_tensor:FakeTensorMode")(
            allow_non_fake_inputs=True
        )
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._storages: dict[int, Any] = {}

    def __call__(self, real: torch.Tensor) -> torch.Tensor:
        """``real``'s dtype, sizes, strides, offset, aliasing and requires_grad, on the card.

        A tensor whose shape a FakeTensor cannot take over (sparse, nested, a subclass) is refused.
        """
        if id(real) in self._made:
            return self._made[id(real)][1]
        no_dispatch = private("torch.utils._mode_utils:no_dispatch")
        fake_cls = private("torch._subclasses.fake_tensor:FakeTensor")
        storage = real.untyped_storage()
        with no_dispatch():
            if storage._cdata not in self._storages:
                self._storages[storage._cdata] = torch.UntypedStorage(
                    storage.nbytes(), device="meta"
                )
            meta = torch.empty(0, dtype=real.dtype, device="meta").set_(
                self._storages[storage._cdata], real.storage_offset(), real.shape, real.stride()
            )
            fake = fake_cls(self.mode, meta, CARD_DEVICE)
        fake.requires_grad_(real.requires_grad)
        if isinstance(real, torch.nn.Parameter):
            fake._is_param = True
        for name, value in vars(real).items():
            if name.startswith(("_dynamo_", "_specialize_on")):
                setattr(fake, name, value)
        self._made[id(real)] = (real, fake)
        return fake
