"""Switches, each with an ``INDUCTOR_EXT_*`` environment variable.

Which lowerings are on is not a config value: it must be seen by every thread, and torch's config
overrides are context-local. See ``registry.enable``, ``registry.disable``, INDUCTOR_EXT_DISABLE.
"""

import os
import sys

from torch.utils._config_module import install_config_module

strict: bool = os.environ.get("INDUCTOR_EXT_STRICT", "0") == "1"
"""Raise when a lowering fails at compile time instead of falling back to stock with one warning."""

pdl: bool = os.environ.get("INDUCTOR_EXT_PDL", "1") == "1"
"""Launch our kernels with programmatic dependent launch where the card has it (sm_90 and up)."""

shipped_plan: bool = os.environ.get("INDUCTOR_EXT_SHIPPED_PLAN", "1") == "1"
"""Use the plan that came with the package for this card, where no plan of the user's answers."""

install_config_module(sys.modules[__name__])
