"""How much faster is the chunked gated delta rule, and does the time of a decoding step depend on the context length?

8 heads of width 64, float32; in Kimi Delta Attention (KDA) each channel of a key has its own decay. Compared with the
recurrent definition (token by token), with what transformers runs for Qwen3-Next and Kimi Linear without extra kernels,
and with torch's grouped convolution.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.harness import Case, Measured, alternate, limit_row, main, timed
from benchmarks.machine import THREADS
from benchmarks.peers import DTYPES, float32_is_float64
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
LENGTH, SHORT, LONG, ROUNDS = 2048, 1024, 32768, 9
QUESTION = "How much faster is the chunked gated delta rule, and does a decoding step depend on the context length?"
MIXER = {"kind": "gated_delta", "heads": HEADS, "head_dim": WIDTH}
LAYERS = [{"repeat": 6, "mixer": MIXER, "feedforward": {"kind": "gated", "hidden": 1408}}]
DESIGN: dict[str, Any] = DEFAULTS | {"vocab_size": 512, "width": 512, "layers": LAYERS}

Call = Callable[[], Any]


def delta_inputs(length: int, dtype: torch.dtype = torch.float32, decays: int = 1) -> tuple[DeltaInputs, Tensor]:
    """Inputs of `length` tokens that need gradients, with `decays` numbers a token and head, and a recurrent state."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, length, WIDTH, generator=generator).to(dtype) for _ in range(3))
    log_decay = torch.rand(1, HEADS, length, decays, generator=generator).to(dtype)
    beta = torch.rand(1, HEADS, length, generator=generator).to(dtype)
    tensors = (l2_normalize(q), l2_normalize(k), v, -log_decay, beta)
    q, k, v, log_decay, beta = (x.requires_grad_() for x in tensors)
    return DeltaInputs(q, k, v, log_decay, beta), torch.zeros(1, HEADS, WIDTH, WIDTH, dtype=dtype)


def rule_loop(rule: Callable[[DeltaInputs], Tensor], arguments: dict[str, Any]) -> Measured:
    """Forward and backward of a rule from inputs to outputs [1, heads, length, width]."""
    inputs, _ = delta_inputs(arguments["length"], DTYPES[arguments["precision"]], arguments["decays"])
    return gradients_loop(lambda: rule(inputs), inputs[:5])


def gradients_loop(forward: Call, inputs: Sequence[Tensor]) -> Measured:
    """Forward and backward. The values are some of the output and of every input's gradient."""
    output_gradient = torch.ones_like(forward())
    y, *found = forward(), *torch.autograd.grad(forward(), inputs, output_gradient)
    values = [float(number) for x in (y.detach(), *found) for number in x.flatten()[-8:]]
    return Measured(lambda: timed(lambda: torch.autograd.grad(forward(), inputs, output_gradient)), lambda: values)


def heddle_rule(choices: Mapping[str, str], arguments: dict[str, Any]) -> Measured:
    """The kernel that heddle chooses on this machine, or one of `choices`."""
    set_up_runtime("cpu", THREADS, choices=measured_choices(THREADS))

    def rule(inputs: DeltaInputs) -> Tensor:
        scaled = inputs._replace(q=inputs.q * WIDTH**-0.5)  # as transformers' rule does by itself
        with kernels(**choices):
            return gated_delta_rule(scaled, torch.zeros(1, HEADS, WIDTH, WIDTH, dtype=inputs.v.dtype))[0]

    return rule_loop(rule, arguments)


def transformers_rule(arguments: dict[str, Any]) -> Measured:
    """transformers' chunked rule, of Qwen3-Next or Kimi Linear, in a process with the settings of heddle."""
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    set_up_runtime("cpu", THREADS, choices=measured_choices(THREADS))
    if arguments["precision"] == "fp64":
        float32_is_float64()

    def rule(inputs: DeltaInputs) -> Tensor:
        peer = chunk_kimi_delta_attention
        if inputs.log_decay.shape[3] == 1:
            peer, inputs = torch_chunk_gated_delta_rule, inputs._replace(log_decay=inputs.log_decay[..., 0])
        y: Tensor = peer(*(x.transpose(1, 2) for x in inputs[:5]))[0].transpose(1, 2)
        return y

    return rule_loop(rule, arguments)


def convolution(is_grouped: bool, arguments: dict[str, Any]) -> Measured:
    """The convolution of q, k and v: heddle's, or torch's grouped convolution."""
    set_up_runtime("cpu", THREADS, choices=measured_choices(THREADS))
    channels, length, dtype = 3 * HEADS * WIDTH, arguments["length"], DTYPES[arguments["precision"]]
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((1, length, channels), (channels, KERNEL))
    )
    inputs = (x.requires_grad_(), weight.requires_grad_())

    def forward() -> Tensor:
        if not is_grouped:
            return causal_conv1d(x, weight, None, None)
        wide = functional.conv1d(x.mT, weight[:, None], padding=KERNEL - 1, groups=channels)
        return wide[..., :length].mT

    return gradients_loop(forward, inputs)


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


def growth_rows() -> list[dict[str, Any]]:
    """Whether a forward pass is linear in the length, and a step's time and a state's size independent of it."""
    set_up_runtime("cpu", THREADS, choices=measured_choices(THREADS))
    seconds = alternate({"short": forward(8 * SHORT), "long": forward(LONG)}, ROUNDS)
    growth = [b / a * 8 * SHORT / LONG for a, b in zip(seconds["short"], seconds["long"], strict=True)]
    rows = [limit_row(f"forward, time a token of {LONG} over {8 * SHORT}", statistics.median(growth), 1.1, "times")]
    seconds = alternate({"short": steps(SHORT), "long": steps(LONG)}, ROUNDS)
    growth = [b / a for a, b in zip(seconds["short"], seconds["long"], strict=True)]
    rows.append(limit_row(f"a step after {LONG} over after {SHORT}", statistics.median(growth), 1.1, "times"))
    sizes = [state_bytes(parse_config(ModelConfig, DESIGN), context) for context in (SHORT, LONG)]
    rows.append(limit_row(f"state of {LONG} tokens over {SHORT}", sizes[1] / sizes[0], 1.0, "times"))
    return rows


def case(name: str, sides: tuple[str, str], goal: float, figure: str = "", decays: int = 1) -> Case:
    """One comparison at LENGTH tokens."""
    arguments = {"length": LENGTH, "precision": "fp32", "decays": decays}
    return Case(name, arguments, goal, ROUNDS, sides, figure=figure)


if __name__ == "__main__":
    main(
        "benchmarks.delta",
        QUESTION,
        {
            "heddle": partial(heddle_rule, {}),
            "recurrent": partial(heddle_rule, {"delta": "reference"}),
            "transformers": transformers_rule,
            "convolution": partial(convolution, False),
            "grouped convolution": partial(convolution, True),
        },
        [
            case("training, recurrent form", ("heddle", "recurrent"), 20.0),
            case("training, transformers", ("heddle", "transformers"), 3.0, "delta training"),
            case("training KDA, transformers", ("heddle", "transformers"), 10.0, decays=WIDTH),
            case("convolution, torch", ("convolution", "grouped convolution"), 2.0),
        ],
        growth_rows,
    )
