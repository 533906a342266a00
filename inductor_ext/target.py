"""A TARGET of the command line: where a program to compile and its arguments come from."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

HELP = """TARGET is file.py:function or module:function. The function takes no argument
and returns (callable, args): a function, module or compiled function, and a
tuple of what to call it with. Mark dynamic sizes on args, as your program does:

  def router():
      gpu = dict(device="cuda", dtype=torch.bfloat16)
      x = torch.randn(64, 7168, **gpu)
      torch._dynamo.mark_dynamic(x, 0, min=2, max=8192)
      return torch.nn.Linear(7168, 256, **gpu), (x,)
"""


class TargetError(ValueError):
    """A target that can't be used; the message is one sentence."""


def load(target: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The callable and the arguments that a target names.

    Imports the module or runs the file (its folder is put on ``sys.path``), then calls the
    function. Raises TargetError, one sentence that names file and line where the user's own code
    raised.
    """
    place, colon, name = target.rpartition(":")
    if not (colon and place and name.isidentifier()):
        raise TargetError(
            f"expected a target like file.py:function or module:function, got {target!r}."
        )
    module = _file(Path(place)) if place.endswith(".py") or "/" in place else _module(place)
    make = getattr(module, name, None)
    if make is None:
        raise TargetError(f"{place} has no {name!r}{_did_you_mean(module)}.")
    if not callable(make):
        raise TargetError(f"expected a function as {target}, got {type(make).__name__}.")
    if _wants_arguments(make):
        raise TargetError(
            f"expected {target} to be called without arguments, and it takes "
            f"{inspect.signature(make)}; return (callable, args) from a function of no argument."
        )
    try:
        made = make()
    except (Exception, SystemExit) as error:
        raise TargetError(_raised(error, module, f"{target} raised")) from None
    pair = isinstance(made, tuple) and len(made) == 2
    if not pair or not callable(made[0]) or not isinstance(made[1], (tuple, list)):
        raise TargetError(f"expected {target} to return (callable, args), got {_shown(made)}.")
    return made[0], tuple(made[1])


def _file(path: Path) -> types.ModuleType:
    if not path.is_file():
        raise TargetError(f"{path}: there is no such file.")
    name = f"inductor_ext_target_{path.stem}"  # a user's torch.py must not stand for torch
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path}: expected a Python file, named *.py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise TargetError(f"{error.filename}, line {error.lineno}: {error.msg}.") from None
    except (Exception, SystemExit) as error:
        raise TargetError(_raised(error, module, f"{path} raised")) from None
    return module


def _module(name: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise TargetError(
                f"there is no module {name!r} on the path (a file is named with its .py)."
            ) from None
        raise TargetError(f"importing {name} raised {_line(error)}.") from None
    except SyntaxError as error:
        raise TargetError(f"{error.filename}, line {error.lineno}: {error.msg}.") from None
    except (Exception, SystemExit) as error:
        raise TargetError(f"importing {name} raised {_line(error)}.") from None


def _line(error: BaseException) -> str:
    """Type and first line of an error, without the full stop."""
    text = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {text}".rstrip(".: ")


def _raised(error: BaseException, module: types.ModuleType, what: str) -> str:
    """One sentence, beginning with the deepest line of the user's file."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename == module.__file__]
    where = f"{own[-1].filename}, line {own[-1].lineno}: " if own else ""
    return f"{where}{what} {_line(error)}."


def _did_you_mean(module: types.ModuleType) -> str:
    own = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not _wants_arguments(value)
    ]
    return f"; its functions without arguments are {', '.join(own)}" if own else ""


def _wants_arguments(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return False
    return any(
        p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters
    )


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(v).__name__ for v in value) or 'nothing'}"
    return type(value).__name__


def describe_failure(error: Exception, what: str) -> str:
    """One sentence for what torch or the user's program raised while being compiled."""
    return f"{what} raised {_line(error)}."
