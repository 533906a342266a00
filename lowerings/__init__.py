"""One module per capability. Importing this package registers them all."""

from . import attention as attention
from . import classes_last as classes_last
from . import cross_entropy as cross_entropy
from . import decompose_k as decompose_k
from . import fused_loss as fused_loss
from . import linear_attention as linear_attention
from . import mhc_post_pre as mhc_post_pre
from . import scan as scan
from . import scan_gradient as scan_gradient
from . import softmax as softmax
