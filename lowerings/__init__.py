"""One module per capability. Importing this package registers them all."""

from . import decompose_k as decompose_k
