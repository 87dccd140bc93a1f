"""Record the kernels of a step once, and launch all of them again by one call: a CUDA graph."""

from collections.abc import Callable

import torch

Step = Callable[[], None]


def capture(step: Step) -> Step:
    """Record `step`, which reads and writes the same tensors at each call, without running it. Returns its replay.

    The step must have run once, so that its libraries are loaded. It may not wait for the device, copy from pageable
    memory, or have shapes that depend on values. Raises RuntimeError (torch's) for a step that does.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
