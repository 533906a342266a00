"""Switches, each with an ``INDUCTOR_EXT_*`` environment variable.

What is set here, also by ``patch``, holds in every thread: a backward is compiled and launched in
autograd's. Which lowerings are on is said by ``registry.enable``, ``registry.disable`` and
INDUCTOR_EXT_DISABLE.
"""

import os
import sys

from torch.utils._config_module import install_config_module

from .compat_config import hold_everywhere

strict: bool = os.environ.get("INDUCTOR_EXT_STRICT", "0") == "1"
"""Raise when a lowering fails at compile time instead of falling back to stock with one warning."""

pdl: bool = os.environ.get("INDUCTOR_EXT_PDL", "1") == "1"
"""Launch our kernels with programmatic dependent launch where the card has it (sm_90 and up)."""

shipped_plan: bool = os.environ.get("INDUCTOR_EXT_SHIPPED_PLAN", "1") == "1"
"""Use the plan that came with the package for this card, where no plan of the user's answers."""

install_config_module(sys.modules[__name__])

# Call a function whenever a switch is set.
on_change = hold_everywhere(sys.modules[__name__])
