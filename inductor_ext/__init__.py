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

_compat.import_inductor()

from . import active_plan as _active_plan  # noqa: E402
from . import choosing as _choosing  # noqa: E402
from . import compat_launch as _compat_launch  # noqa: E402
from . import dispatch as _dispatch  # noqa: E402
from . import ops as ops  # noqa: E402
from . import planned_launches as _planned_launches  # noqa: E402
from . import registry as _registry  # noqa: E402
from .active_plan import load_plan, unload_plan  # noqa: E402
from .autotuning import CustomOpConfig, register_custom_op_autotuning  # noqa: E402
from .plan import Plan  # noqa: E402
from .registry import disable, enable  # noqa: E402
from .report import Decision, Report, explain  # noqa: E402
from .tuning import tune  # noqa: E402

_registry.add_salt("forced", _choosing.forced_salt)
_registry.add_salt("plans", _active_plan.salt)
_compat.install_salt(_registry.revision)
_planned_launches.install()
_compat_launch.install()

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
