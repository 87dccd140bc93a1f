"""How much faster is the chunked gated delta rule, and does the time of a decoding step depend on the context length?

8 heads of width 64, float32. Compared with the recurrent definition (token by token), with what transformers runs for
Qwen3-Next without extra kernels, and with torch's grouped convolution.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.harness import alternate, limit_row, ratio_row, run_rows
from benchmarks.machine import THREADS
from heddle.config import parse_config
from heddle.machine import measured_choices
from heddle.model.config import ModelConfig
from heddle.model.decoder import build
from heddle.model.load_config import DEFAULTS
from heddle.model.size import state_bytes
from heddle.numerics.kernels import kernels
from heddle.numerics.recurrent.convolution import causal_conv1d
from heddle.numerics.recurrent.gated_delta import DeltaInputs, gated_delta_rule, l2_normalize
from heddle.runtime import set_up_runtime

HEADS, WIDTH, KERNEL = 8, 64, 4
QUESTION = "How much faster is the chunked gated delta rule, and does a decoding step depend on the context length?"
MIXER = {"kind": "gated_delta", "heads": HEADS, "head_dim": WIDTH}
LAYERS = [{"repeat": 6, "mixer": MIXER, "feedforward": {"kind": "gated", "hidden": 1408}}]
DESIGN: dict[str, Any] = DEFAULTS | {"vocab_size": 512, "width": 512, "layers": LAYERS}

Call = Callable[[], Any]


def delta_inputs(length: int) -> tuple[DeltaInputs, Tensor]:
    """Inputs of `length` tokens that need gradients, and a recurrent state."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, length, WIDTH, generator=generator) for _ in range(3))
    log_decay, beta = (torch.rand(1, HEADS, length, generator=generator) for _ in range(2))
    tensors = (l2_normalize(q), l2_normalize(k), v, -log_decay[..., None], beta)
    q, k, v, log_decay, beta = (x.requires_grad_() for x in tensors)
    return DeltaInputs(q, k, v, log_decay, beta), torch.zeros(1, HEADS, WIDTH, WIDTH)


def heddle_rule(kernel: str, length: int) -> Call:
    """Forward and backward of one of heddle's kernels."""
    inputs, state = delta_inputs(length)
    output_gradient = torch.ones_like(inputs.v)

    def call() -> Any:
        with kernels(delta=kernel):
            return torch.autograd.grad(gated_delta_rule(inputs, state)[0], inputs[:5], output_gradient)

    return call


def transformers_rule(length: int) -> Call:
    """Forward and backward of transformers' chunked rule."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    inputs, _ = delta_inputs(length)
    output_gradient = torch.ones_like(inputs.v).transpose(1, 2)

    def call() -> Any:
        per_head = inputs._replace(log_decay=inputs.log_decay[..., 0])
        y, _ = torch_chunk_gated_delta_rule(*(x.transpose(1, 2) for x in per_head[:5]))
        return torch.autograd.grad(y, inputs[:5], output_gradient)

    return call


def convolution(grouped: bool, length: int) -> Call:
    """Forward and backward of the convolution of q, k and v: heddle's, or torch's grouped convolution."""
    channels = 3 * HEADS * WIDTH
    x, weight = torch.randn(1, length, channels).requires_grad_(), torch.randn(channels, KERNEL).requires_grad_()
    output_gradient = torch.ones(1, length, channels)

    def call() -> Any:
        if grouped:
            wide = functional.conv1d(x.mT, weight[:, None], padding=KERNEL - 1, groups=channels)
            y = wide[..., :length].mT
        else:
            y = causal_conv1d(x, weight, None, None)
        return torch.autograd.grad(y, (x, weight), output_gradient)

    return call


def steps(context: int, count: int = 16) -> Call:
    """`count` tokens, one at a time, after a text of `context`."""
    model = build(parse_config(ModelConfig, DESIGN))
    token = torch.zeros(1, 1, dtype=torch.int64)
    with torch.no_grad():
        _, state = model(torch.randint(512, (1, context)), None, model.init_state(1))

    @torch.no_grad()
    def call() -> None:
        nonlocal state
        for _ in range(count):
            _, state = model(token, None, state)

    return call


def forward(length: int) -> Call:
    """Without gradients."""
    inputs, state = delta_inputs(length)
    return torch.no_grad()(lambda: gated_delta_rule(inputs, state))


def comparison_row(name: str, calls: dict[str, Call], goal: float | None, rounds: int) -> dict[str, Any]:
    """A row with the ratio of the second call's seconds to the first's."""
    seconds_of = alternate(calls, rounds)
    fast, slow = seconds_of.values()
    seconds = {f"{side} seconds": statistics.median(values) for side, values in seconds_of.items()}
    return {"case": name, **seconds, **ratio_row([b / a for a, b in zip(fast, slow, strict=True)], goal)}


def run(length: int, short: int, long: int, rounds: int) -> list[dict[str, Any]]:
    """All rows, training at `length` tokens, decoding after `short` and `long`."""
    set_up_runtime("cpu", THREADS, choices=measured_choices(THREADS))
    chunked = heddle_rule("chunked", length)
    rows = [
        comparison_row(
            "training, recurrent form",
            {"chunked": chunked, "recurrent": heddle_rule("reference", length)},
            20.0,
            rounds,
        ),
        comparison_row(
            "training, transformers", {"chunked": chunked, "transformers": transformers_rule(length)}, 3.0, rounds
        )
        | {"figure": "delta training"},
        comparison_row(
            "convolution, torch", {"ours": convolution(False, length), "torch": convolution(True, length)}, 2.0, rounds
        ),
    ]
    seconds = alternate({"short": forward(8 * short), "long": forward(long)}, rounds)
    growth = [b / a * 8 * short / long for a, b in zip(seconds["short"], seconds["long"], strict=True)]
    rows.append(limit_row(f"forward, time a token of {long} over {8 * short}", statistics.median(growth), 1.1, "times"))
    seconds = alternate({"short": steps(short), "long": steps(long)}, rounds)
    growth = [b / a for a, b in zip(seconds["short"], seconds["long"], strict=True)]
    rows.append(limit_row(f"a step after {long} over after {short}", statistics.median(growth), 1.1, "times"))
    sizes = [state_bytes(parse_config(ModelConfig, DESIGN), context) for context in (short, long)]
    rows.append(limit_row(f"state of {long} tokens over {short}", sizes[1] / sizes[0], 1.0, "times"))
    return rows


def all_rows(quick: bool) -> list[dict[str, Any]]:
    """Small sizes, to see that it runs, or those of the question."""
    return run(96, 16, 256, 2) if quick else run(2048, 1024, 32768, 9)


if __name__ == "__main__":
    run_rows("benchmarks.delta", QUESTION, all_rows)
