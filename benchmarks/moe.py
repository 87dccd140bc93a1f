"""What does a mixture of experts cost compared with a dense feed-forward of as many FLOPs, and with transformers' own?

Feed-forwards of width 512 on 2,048 tokens: top 2 of 8 experts with hidden width 704, and top 4 of 32 with 352. The
dense one is as wide as the chosen experts together. Both sides use the routing of the family; DeepSeek-V3 also has a
shared expert. `eager` and `grouped_mm` are transformers' two implementations of experts. One token, as in decoding,
runs through 12 such layers; heddle then has packed weights.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Case, Measured, Step, main, timed
from benchmarks.machine import THREADS
from benchmarks.peers import DTYPES, transformers_peer
from heddle.machine import measured_choices
from heddle.model.config import ModelConfig
from heddle.model.decoder import build
from heddle.model.load_config import load_config
from heddle.numerics.linear import PackedWeightCache, packed_weights
from heddle.parts.feedforwards import Feedforward
from heddle.parts.layout import Layout
from heddle.runtime import set_up_runtime

WIDTH, TOKENS = 512, 2048
SHAPES = {"2 of 8": (8, 2, 704), "4 of 32": (32, 4, 352)}
FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {},
    "mixtral": {},
    "qwen3": {},
    "deepseek": {"routing": "sigmoid", "groups": 4, "top_groups": 2, "shared": 1, "scale": 2.5, "bias_update": 0.001},
}
PRECISIONS = ("fp32", "bf16")
CALLS, CALLS_OF_ONE_TOKEN = 4, 16  # in one measurement
LAYERS = 12  # that one token runs through, so that weights do not stay in the CPU's caches


def design(feedforward: dict[str, Any], peer: str) -> ModelConfig:
    """One layer with a feed-forward, whose mixer makes it a model of the peer's family."""
    mixer: dict[str, Any] = {"kind": "attention", "heads": 8, "position": {"kind": "rope"}}
    if peer == "qwen3":
        mixer["qk_norm"] = "head"
    if peer == "deepseek":
        mixer |= {"kind": "latent_attention", "kv_rank": 64, "nope_dim": 32, "rope_dim": 32}
    layer = {"mixer": mixer, "feedforward": feedforward}
    return load_config({"vocab_size": 8, "width": WIDTH, "layers": [layer], "head": {"tied": False}})


class SingleFeedforward(nn.Module):
    """The feed-forward of such a model of heddle."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        model = build(config).to(dtype)
        (self.part,) = (module for module in model.modules() if isinstance(module, Feedforward))

    def forward(self, x: Tensor) -> Tensor:
        """x [1, T, width] -> the same shape."""
        y: Tensor = self.part(x, Layout.causal(1, x.shape[1]))[0]
        return y


def heddle_side(arguments: dict[str, Any]) -> Measured:
    """heddle's mixture of experts."""
    set_up_runtime("cpu", THREADS, choices=measured_choices(THREADS))
    config = design(experts(arguments), arguments["peer"])
    return timed_step(lambda: SingleFeedforward(config, DTYPES[arguments["precision"]]), arguments)


def experts(arguments: dict[str, Any]) -> dict[str, Any]:
    """The fields of heddle's mixture."""
    count, top_k, hidden = SHAPES[arguments["shape"]]
    return {"kind": "moe", "experts": count, "top_k": top_k, "hidden": hidden, **FAMILIES[arguments["peer"]]}


def peer_side(arguments: dict[str, Any]) -> Step | Measured:
    """heddle's dense feed-forward, which computes something else, or transformers' mixture with equal weights."""
    dtype, peer = DTYPES[arguments["precision"]], arguments["peer"]
    if peer == "dense":
        set_up_runtime("cpu", THREADS, choices=measured_choices(THREADS))
        _, top_k, hidden = SHAPES[arguments["shape"]]
        config = design({"kind": "gated", "hidden": top_k * hidden}, peer)
        return timed_step(lambda: SingleFeedforward(config, dtype), arguments).step
    config = design(experts(arguments), peer)

    def block() -> nn.Module:
        model = transformers_peer(config, dtype, tuned=False)
        model.set_experts_implementation(arguments["implementation"])
        mixture: nn.Module = model.model.layers[0].mlp
        return mixture

    return timed_step(block, arguments)


def timed_step(make: Callable[[], nn.Module], arguments: dict[str, Any]) -> Measured:
    """A step: seconds of a call, with all gradients or without. One token: seconds per layer of a stack.

    The values are some of what comes out of the first layer, and of the gradient of what went in.
    """
    tokens, dtype = arguments["tokens"], DTYPES[arguments["precision"]]
    stack = [make() for _ in range(LAYERS if tokens == 1 else 1)]
    shape = (CALLS_OF_ONE_TOKEN if tokens == 1 else CALLS, 1, tokens, WIDTH)
    xs = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).unbind()
    values = first_values(stack[0], xs[0], arguments["gradients"])
    if tokens == 1:
        packed_weight_cache: PackedWeightCache = {}

        def decode() -> None:
            with packed_weights(packed_weight_cache):
                for token in xs:
                    for call in stack:
                        call(token)

        return Measured(torch.no_grad()(lambda: timed(decode) / len(xs) / LAYERS), lambda: values)
    (call,) = stack
    parameters = [parameter for parameter in call.parameters() if parameter.requires_grad]
    output_gradient = torch.ones_like(xs[0])

    def new_inputs() -> list[Tensor]:
        """New tokens in every call, as in training, so that the expert counts vary."""
        return [torch.randn_like(x).requires_grad_(arguments["gradients"]) for x in xs]

    def forward(inputs: list[Tensor]) -> None:
        for x in inputs:
            call(x)

    def forward_backward(inputs: list[Tensor]) -> None:
        for x in inputs:
            torch.autograd.grad(call(x), [x, *parameters], output_gradient)

    def step() -> float:
        inputs = new_inputs()
        return timed(lambda: (forward_backward if arguments["gradients"] else forward)(inputs)) / CALLS

    return Measured(step if arguments["gradients"] else torch.no_grad()(step), lambda: values)


def first_values(call: nn.Module, x: Tensor, gradients: bool) -> list[float]:
    """Numbers of an output and, with gradients, of the input's gradient and the norm of all weights' gradients."""
    x = x.detach().clone().requires_grad_(gradients)
    with torch.set_grad_enabled(gradients):
        y = call(x)
    values = y[0, -1, :8].tolist()
    if gradients:
        weights = [parameter for parameter in call.parameters() if parameter.requires_grad]
        found = torch.autograd.grad(y, [x, *weights], torch.ones_like(y))
        values += [
            *found[0][0, -1, :8].tolist(),
            float(torch.stack([gradient.double().norm() for gradient in found]).norm()),
        ]
    return [float(value) for value in values]


def cases() -> list[Case]:
    """Every shape, precision and peer. Goals are ratios of the peer's seconds to heddle's."""
    max_ratios = {("2 of 8", "fp32"): 1.1, ("2 of 8", "bf16"): 1.2, ("4 of 32", "fp32"): 1.4, ("4 of 32", "bf16"): 1.7}
    peers = [("dense", ""), *product(list(FAMILIES)[1:], ("eager", "grouped_mm"))]
    comparisons = []
    for (peer, implementation), shape, precision, gradients in product(peers, SHAPES, PRECISIONS, (False, True)):
        dense_goal = 1 / max_ratios[shape, precision] if gradients else None
        goal = dense_goal if peer == "dense" else 1 / 1.05
        fields = {"peer": peer, "implementation": implementation, "shape": shape, "precision": precision}
        comparisons.append(case(fields, TOKENS, gradients, goal))
    one_token_peers = (("dense", "", 1 / 1.25), ("mixtral", "eager", 1 / 1.05))
    for (peer, implementation, goal), precision in product(one_token_peers, PRECISIONS):
        fields = {"peer": peer, "implementation": implementation, "shape": "2 of 8", "precision": precision}
        comparisons.append(case(fields, 1, False, goal))
    return comparisons


def case(fields: dict[str, Any], tokens: int, gradients: bool, goal: float | None) -> Case:
    """One comparison. `goal` is the smallest acceptable ratio of the peer's seconds to heddle's."""
    work = "one token" if tokens == 1 else "forward and backward" if gradients else "forward"
    name = (
        f"{fields['peer']} {fields['implementation']}".strip() + f", {fields['shape']}, {fields['precision']}, {work}"
    )
    arguments = fields | {"tokens": tokens, "gradients": gradients}
    figure = ""
    if fields["peer"] == "dense" and fields["shape"] == "2 of 8":
        figure = f"experts {fields['precision']}" if gradients else ""
        figure = "experts token" if tokens == 1 and fields["precision"] == "fp32" else figure
    pairs = 15 if tokens == 1 else 5
    has_float64 = fields["implementation"] != "grouped_mm"
    rounded = None if goal is None else round(goal, 3)
    return Case(name, arguments, rounded, pairs, figure=figure, has_float64=has_float64)


if __name__ == "__main__":
    main(
        "benchmarks.moe",
        "What does a mixture of experts cost, compared with dense feed-forwards of as many FLOPs and transformers?",
        {"heddle": heddle_side, "peer": peer_side},
        cases(),
    )
