"""The operations whose form can be named: `kernels(attention="reference")`."""

from contextlib import AbstractContextManager

from heddle.numerics.attention import ATTENTION
from heddle.numerics.causal_sums import CAUSAL_MEANS, CAUSAL_SUMS
from heddle.numerics.choose import Operation, forcing
from heddle.numerics.linear import LINEAR
from heddle.numerics.linear_attention import DOCUMENT_SUMS
from heddle.numerics.norms import RMS_NORM

OPERATIONS: dict[str, Operation] = {
    operation.name: operation for operation in (ATTENTION, LINEAR, RMS_NORM, CAUSAL_SUMS, CAUSAL_MEANS, DOCUMENT_SUMS)
}


def kernels(**choices: str) -> AbstractContextManager[None]:
    """Within the block each named operation uses the named form, or raises that form's reason.

    Example: `with heddle.kernels(attention="reference"): ...`. Raises ConfigError for an unknown name.
    """
    return forcing(choices, OPERATIONS)
