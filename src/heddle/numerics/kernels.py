"""All operations whose kernel a user can choose: `kernels(attention="reference")`."""

from contextlib import AbstractContextManager
from typing import Any

from heddle.numerics.activations import SWIGLU
from heddle.numerics.attention.latent import LATENT
from heddle.numerics.attention.softmax import ATTENTION
from heddle.numerics.cross_entropy import LINEAR_CROSS_ENTROPY
from heddle.numerics.dispatch import Operation, force_kernels
from heddle.numerics.experts.mixture import EXPERTS
from heddle.numerics.linear import LINEAR
from heddle.numerics.norms import LAYER_NORM, RMS_NORM
from heddle.numerics.quantized import QUANTIZED_LINEAR
from heddle.numerics.recurrent.causal_sums import CAUSAL_MEANS, CAUSAL_SUMS
from heddle.numerics.recurrent.convolution import CONVOLUTION
from heddle.numerics.recurrent.double_softmax import DOUBLE_SOFTMAX
from heddle.numerics.recurrent.gated_delta import DELTA_RULE
from heddle.numerics.recurrent.general_delta import GENERAL_DELTA
from heddle.numerics.recurrent.linear_attention import DOCUMENT_SUMS
from heddle.numerics.recurrent.selective_scan import DIAGONAL, SELECTIVE_SCAN
from heddle.numerics.recurrent.ssd import SSD
from heddle.numerics.rotary import ROTARY

_ALL: tuple[Operation[Any], ...] = (
    ATTENTION,
    CAUSAL_MEANS,
    CAUSAL_SUMS,
    CONVOLUTION,
    DELTA_RULE,
    DIAGONAL,
    DOCUMENT_SUMS,
    DOUBLE_SOFTMAX,
    EXPERTS,
    GENERAL_DELTA,
    LATENT,
    LAYER_NORM,
    LINEAR,
    LINEAR_CROSS_ENTROPY,
    QUANTIZED_LINEAR,
    RMS_NORM,
    ROTARY,
    SELECTIVE_SCAN,
    SSD,
    SWIGLU,
)
OPERATIONS: dict[str, Operation[Any]] = {operation.name: operation for operation in _ALL}


def kernels(**choices: str) -> AbstractContextManager[None]:
    """Within the block, use the given kernel for each named operation.

    Example: `with heddle.kernels(attention="reference"): ...`. Raises ConfigError for an unknown name. A call that the
    kernel does not support raises ConfigError with the reason.
    """
    return force_kernels(choices, OPERATIONS)
