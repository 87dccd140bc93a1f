"""How much faster are a window, linear attention and the gated delta rule at 8k tokens than the best full attention?

One layer without its projections, 8 heads of width 64, float32, forward and backward. Full attention is torch's fused
causal kernel, in a process with the settings of heddle: transformers' Llama calls the same one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.delta import delta_inputs
from benchmarks.harness import Case, Step, main, timed
from benchmarks.linear import forward_backward, full, linear
from benchmarks.machine import THREADS
from benchmarks.window import local
from heddle.machine import measured_choices
from heddle.numerics.recurrent.gated_delta import gated_delta_rule
from heddle.runtime import set_up_runtime

FULL = "full attention"


def delta(length: int) -> Callable[[], Any]:
    """Forward and backward of the gated delta rule, by the kernel that heddle chooses."""
    inputs, state = delta_inputs(length)
    output_gradient = torch.ones_like(inputs.v)
    return lambda: torch.autograd.grad(gated_delta_rule(inputs, state)[0], inputs[:5], output_gradient)


CALLS: dict[str, Callable[[int], Callable[[], Any]]] = {
    "window": partial(forward_backward, local),
    "linear": partial(forward_backward, linear),
    "delta": delta,
}


def heddle_side(arguments: dict[str, Any]) -> Step:
    """One of heddle's forms."""
    set_up_runtime("cpu", THREADS, choices=measured_choices(THREADS))
    call = CALLS[arguments["form"]](arguments["length"])
    return lambda: timed(call)


def full_side(arguments: dict[str, Any]) -> Step:
    """Full attention."""
    set_up_runtime("cpu", THREADS, choices=measured_choices(THREADS))
    call = forward_backward(full, arguments["length"])
    return lambda: timed(call)


def case(form: str, goal: float) -> Case:
    """One form at 8k tokens."""
    name = f"{form}, forward and backward, 8k"
    return Case(name, {"form": form, "length": 8192}, goal, pairs=7, figure=f"{form} 8k")


if __name__ == "__main__":
    main(
        "benchmarks.long_texts",
        "How much faster are a window, linear attention and gated delta at 8k tokens than the best full attention?",
        {"heddle": heddle_side, FULL: full_side},
        [case("window", 6.0), case("linear", 12.0), case("delta", 4.0)],
    )
