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

from . import active_plan as _active_plan
from . import choosing as _choosing
from . import dispatch as _dispatch
from . import ops as ops
from . import registry as _registry
from .active_plan import load_plan, unload_plan
from .autotuning import CustomOpConfig, register_custom_op_autotuning
from .plan import Plan
from .registry import disable, enable
from .report import Decision, Report, explain
from .tuning import tune

_registry.add_salt("forced", _choosing.forced_salt)
_registry.add_salt("plans", _active_plan.salt)
_compat.install_salt(_registry.revision)

from . import lowerings as lowerings  # noqa: E402  (registers every capability)

# Behind the passes of the lowerings: what they make of the graph is what is branched over.
_compat.append_graph_pass("post_grad", _dispatch.Pass())
_registry.warn_of_unknown_names()
_active_plan.load_environment()

__version__ = "0.1.0"
__all__ = [
    "CustomOpConfig",
    "Decision",
    "Plan",
    "Report",
    "disable",
    "enable",
    "explain",
    "load_plan",
    "register_custom_op_autotuning",
    "tune",
    "unload_plan",
]
