"""Sinkhorn normalization (Sinkhorn & Knopp 1967): divide the columns and rows of a matrix by their sums in turn."""

from torch import Tensor

from heddle.numerics.norms import at_least_float32


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """Normalize exp(logits) [..., n, n] by columns, then rows, `iterations` times. At least float32, same shape.

    Rows sum to 1 up to rounding, columns approximately. It runs on logarithms, so that all finite logits have a finite
    result and gradient.
    """
    logs = at_least_float32(logits)
    for _ in range(iterations):
        logs = logs - logs.logsumexp(-2, keepdim=True)
        logs = logs - logs.logsumexp(-1, keepdim=True)
    return logs.exp()
