"""Are linear attention and retention linear in the length, and how much faster than full attention?

One layer without its projections, 8 heads of width 64, float32: feature maps, sums and quotient compared with torch's
fused causal kernel in the same process. A decoding step is that of a whole mixer with a state, projections included.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.harness import alternate, limit_row, ratio_row, show, write
from benchmarks.machine import THREADS
from heddle.machine import measured_choices
from heddle.model.decoder import build
from heddle.model.load_config import load_config
from heddle.model.size import state_bytes
from heddle.numerics.recurrent.causal_sums import causal_means, causal_sums
from heddle.numerics.recurrent.chunked_sums import CallLayout
from heddle.numerics.recurrent.linear_attention import elu_features
from heddle.runtime import set_up_runtime

HEADS, WIDTH = 8, 64
SHORT, LONG = 8192, 32768
CONTEXTS = (1024, 32768)
STEPS = 16
QUESTION = "Are linear attention and retention linear in the length, and how much faster than full attention?"

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention with elu + 1 features."""
    return causal_means(elu_features(q), elu_features(k), v, CallLayout())[0]


def retention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Retention with the decays of its paper."""
    log_decay = torch.log1p(-(2.0 ** (-5.0 - torch.arange(HEADS))))
    return causal_sums(q, k, v, log_decay, CallLayout())[0]


def full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def forward_backward(mix: Mix, length: int) -> Callable[[], Any]:
    """Forward and backward of [1, 8, length, 64]."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, length, WIDTH, generator=generator).requires_grad_() for _ in range(3))
    output_gradient = torch.ones(q.shape)
    return lambda: torch.autograd.grad(mix(q, k, v), (q, k, v), output_gradient)


def step(kind: str, context: int) -> Callable[[], Any]:
    """Decode `STEPS` tokens after a text of `context` tokens."""
    layer = {"mixer": {"kind": kind, "heads": HEADS}}
    model = build(load_config({"vocab_size": 64, "width": HEADS * WIDTH, "layers": [layer]}))
    tokens = torch.randint(64, (1, context + STEPS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        _, start = model(tokens[:, :context], None, model.init_state(1, context + STEPS))
    assert start is not None

    @torch.no_grad()
    def work() -> None:
        state = start.fork()
        for token in tokens[:, context:].split(1, dim=1):
            _, state = model(token, None, state)

    return work


def against_full(length: int, rounds: int, goal: float) -> list[dict[str, Any]]:
    """Rows that compare forward_backward mixers with full attention."""
    mixes: dict[str, Mix] = {"linear": linear, "retention": retention, "full": full}
    seconds_of = alternate({name: forward_backward(mix, length) for name, mix in mixes.items()}, rounds)
    rows = []
    for name in ("linear", "retention"):
        ratios = [slow / fast for fast, slow in zip(seconds_of[name], seconds_of["full"], strict=True)]
        seconds = {f"{side} seconds": statistics.median(seconds_of[side]) for side in (name, "full")}
        case = f"{name}, forward and backward, {length}, against full attention"
        rows.append({"case": case, **seconds, **ratio_row(ratios, goal)})
    return rows


def run(short: int = SHORT, long: int = LONG) -> list[dict[str, Any]]:
    """All rows."""
    set_up_runtime("cpu", THREADS, choices=measured_choices(THREADS))
    rows = [*against_full(short, 7, 8.0), *against_full(long, 3, 15.0)]
    for name, mix in (("linear", linear), ("retention", retention)):
        seconds = alternate({"short": forward_backward(mix, short), "long": forward_backward(mix, long)}, rounds=7)
        growth = [slow / fast for fast, slow in zip(seconds["short"], seconds["long"], strict=True)]
        rows.append(limit_row(f"{name}, time of {long} over {short}", statistics.median(growth), 5.0, "times"))
    for kind in ("linear_attention", "retention"):
        seconds = alternate({str(context): step(kind, context) for context in CONTEXTS}, rounds=15)
        near, far = (seconds[str(context)] for context in CONTEXTS)
        growth = [slow / fast for fast, slow in zip(near, far, strict=True)]
        name = f"{kind}, a step after {CONTEXTS[1]} over one after {CONTEXTS[0]}"
        rows.append(limit_row(name, statistics.median(growth), 1.1, "times"))
        design = load_config("preset:mha-tiny", ["vocab_size=512", f"layers.*.mixer={{kind: {kind}, heads: 4}}"])
        sizes = [state_bytes(design, context) for context in CONTEXTS]
        rows.append(limit_row(f"{kind}, state of {CONTEXTS[1]} over {CONTEXTS[0]}", sizes[1] / sizes[0], 1.0, "times"))
    return rows


if __name__ == "__main__":
    argparse.ArgumentParser(description=QUESTION).parse_args()
    rows = run()
    show(rows)
    write("benchmarks.linear", QUESTION, rows)
