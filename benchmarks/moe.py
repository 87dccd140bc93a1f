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

from benchmarks.harness import Case, Step, main, timed
from benchmarks.machine import THREADS
from benchmarks.peers import DTYPES
from heddle.machine import measured_choices
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
CALLS, CALLS_OF_ONE_TOKEN = 4, 16  # in one measurement
LAYERS = 12  # that one token runs through, so that weights do not stay in the CPU's caches


class SingleFeedforward(nn.Module):
    """A feed-forward of heddle with its initial weights."""

    def __init__(self, data: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        layer = {"mixer": None, "feedforward": data}
        model = build(load_config({"vocab_size": 8, "width": WIDTH, "layers": [layer]}), dtype=dtype)
        (self.part,) = (module for module in model.modules() if isinstance(module, Feedforward))

    def forward(self, x: Tensor) -> Tensor:
        """x [1, T, width] -> the same shape."""
        y: Tensor = self.part(x, Layout.causal(1, x.shape[1]))
        return y


def heddle_side(arguments: dict[str, Any]) -> Step:
    """heddle's mixture of experts."""
    set_up_runtime("cpu", THREADS, choices=measured_choices(THREADS))
    experts, top_k, hidden = SHAPES[arguments["shape"]]
    fields = {"experts": experts, "top_k": top_k, "hidden": hidden, **FAMILIES[arguments["peer"]]}
    return timed_step(lambda: SingleFeedforward({"kind": "moe", **fields}, DTYPES[arguments["precision"]]), arguments)


def peer_side(arguments: dict[str, Any]) -> Step:
    """heddle's dense feed-forward, or a mixture of experts of transformers."""
    experts, top_k, hidden = SHAPES[arguments["shape"]]
    dtype, peer = DTYPES[arguments["precision"]], arguments["peer"]
    if peer == "dense":
        set_up_runtime("cpu", THREADS, choices=measured_choices(THREADS))
        return timed_step(lambda: SingleFeedforward({"kind": "gated", "hidden": top_k * hidden}, dtype), arguments)
    torch.set_num_threads(THREADS)

    def block() -> nn.Module:
        moe_block = transformers_block(peer, (experts, top_k, hidden), arguments["implementation"])
        for parameter in moe_block.parameters():
            nn.init.normal_(parameter, std=0.02)
        return moe_block.to(dtype)

    return timed_step(block, arguments)


def transformers_block(peer: str, shape: tuple[int, int, int], implementation: str) -> nn.Module:
    """A mixture of experts of transformers."""
    from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    experts, top_k, hidden = shape
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "num_experts_per_tok": top_k,
        "experts_implementation": implementation,
    }
    block: nn.Module
    if peer == "mixtral":
        block = MixtralSparseMoeBlock(MixtralConfig(num_local_experts=experts, intermediate_size=hidden, **sizes))
    elif peer == "qwen3":
        sizes |= {"num_experts": experts, "moe_intermediate_size": hidden, "norm_topk_prob": True}
        block = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**sizes))
    else:
        sizes |= {"num_local_experts": experts, "moe_intermediate_size": hidden, "n_shared_experts": 1}
        block = DeepseekV3MoE(DeepseekV3Config(n_group=4, topk_group=2, **sizes))
    return block


def timed_step(make: Callable[[], nn.Module], arguments: dict[str, Any]) -> Step:
    """A step: seconds of a call, with all gradients or without. One token: seconds per layer of a stack."""
    tokens, dtype = arguments["tokens"], DTYPES[arguments["precision"]]
    stack = [make() for _ in range(LAYERS if tokens == 1 else 1)]
    shape = (CALLS_OF_ONE_TOKEN if tokens == 1 else CALLS, 1, tokens, WIDTH)
    xs = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).unbind()
    if tokens == 1:
        packed_weight_cache: PackedWeightCache = {}

        def decode() -> None:
            with packed_weights(packed_weight_cache):
                for token in xs:
                    for call in stack:
                        call(token)

        return torch.no_grad()(lambda: timed(decode) / len(xs) / LAYERS)
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

    return step if arguments["gradients"] else torch.no_grad()(step)


def cases() -> list[Case]:
    """Every shape, precision and peer. Goals are ratios of the peer's seconds to heddle's."""
    max_ratios = {("2 of 8", "fp32"): 1.1, ("2 of 8", "bf16"): 1.2, ("4 of 32", "fp32"): 1.4, ("4 of 32", "bf16"): 1.7}
    peers = [("dense", ""), *product(list(FAMILIES)[1:], ("eager", "grouped_mm"))]
    comparisons = []
    for (peer, implementation), shape, precision, gradients in product(peers, SHAPES, DTYPES, (False, True)):
        dense_goal = 1 / max_ratios[shape, precision] if gradients else None
        goal = dense_goal if peer == "dense" else 1 / 1.05
        fields = {"peer": peer, "implementation": implementation, "shape": shape, "precision": precision}
        comparisons.append(case(fields, TOKENS, gradients, goal))
    one_token_peers = (("dense", "", 1 / 1.25), ("mixtral", "eager", 1 / 1.05))
    for (peer, implementation, goal), precision in product(one_token_peers, DTYPES):
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
    return Case(name, arguments, None if goal is None else round(goal, 3), pairs, figure=figure)


if __name__ == "__main__":
    main(
        "benchmarks.moe",
        "What does a mixture of experts cost, compared with dense feed-forwards of as many FLOPs and transformers?",
        {"heddle": heddle_side, "peer": peer_side},
        cases(),
    )
