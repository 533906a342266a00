"""A PyTorch Inductor plugin: ``import inductor_ext`` before ``torch.compile``, that is all.

Importing registers the lowerings and puts the plugin's revision into Inductor's cache keys. No
torch setting is touched and no custom-pass slot is taken.
"""

import torch as _torch

from . import compat as _compat

if not _compat.supported(_torch.__version__):
    raise ImportError(
        f"inductor_ext supports {_compat.SUPPORTED}, got torch {_torch.__version__}; "
        "install a supported torch or remove the import"
    )

from . import choosing as _choosing
from . import registry as _registry
from .autotuning import CustomOpConfig, register_custom_op_autotuning
from .registry import disable, enable
from .report import Decision, Report, explain

_registry.add_salt("forced", _choosing.forced_salt)
_compat.install_salt(_registry.revision)

from . import lowerings as lowerings  # noqa: E402  (registers every capability)

_registry.warn_of_unknown_names()

__version__ = "0.1.0"
__all__ = [
    "CustomOpConfig",
    "Decision",
    "Report",
    "disable",
    "enable",
    "explain",
    "register_custom_op_autotuning",
]
