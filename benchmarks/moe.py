"""What does a mixture of experts cost beside a dense feed-forward of as many operations, and transformers' blocks?

Width 512, one layer's feed-forward alone, 2,048 tokens: 8 experts of which 2 are chosen, 704 wide, and 32 of which 4
are, 352 wide; the dense one is as wide as those chosen together. The peers choose and weigh as their families do, and
so do ours; DeepSeek-V3's has a shared expert as wide as one more. `eager` and `grouped_mm` are the two ways in which
transformers runs its experts. One token goes through 12 such layers, as in decoding: ours with packed weights.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import THREADS, Case, Step, main, timed
from benchmarks.peers import DTYPES
from heddle.model.decoder import build
from heddle.model.load_config import load_config
from heddle.numerics.linear import PackedWeightCache, packed_weights
from heddle.parts.context.layout import Layout
from heddle.parts.feedforwards import Feedforward
from heddle.runtime import set_up_runtime

WIDTH, TOKENS = 512, 2048
SHAPES = {"2 of 8": (8, 2, 704), "4 of 32": (32, 4, 352)}
FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {},
    "mixtral": {},
    "qwen3": {},
    "deepseek": {"routing": "sigmoid", "groups": 4, "top_groups": 2, "shared": 1, "scale": 2.5, "bias_update": 0.001},
}
TURNS, TURNS_OF_ONE = 4, 16  # calls of one measurement, with many tokens and with one
LAYERS = 12  # that one token goes through, as in decoding: their weights do not stay in the caches


class Alone(nn.Module):
    """One of our feed-forwards, with weights as a model starts."""

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
    """Our mixture."""
    set_up_runtime("cpu", THREADS)
    experts, top_k, hidden = SHAPES[arguments["shape"]]
    fields = {"experts": experts, "top_k": top_k, "hidden": hidden, **FAMILIES[arguments["peer"]]}
    return measured(lambda: Alone({"kind": "moe", **fields}, DTYPES[arguments["precision"]]), arguments)


def peer_side(arguments: dict[str, Any]) -> Step:
    """Our dense feed-forward, or a block of transformers."""
    experts, top_k, hidden = SHAPES[arguments["shape"]]
    dtype, peer = DTYPES[arguments["precision"]], arguments["peer"]
    if peer == "dense":
        set_up_runtime("cpu", THREADS)
        return measured(lambda: Alone({"kind": "gated", "hidden": top_k * hidden}, dtype), arguments)
    torch.set_num_threads(THREADS)

    def block() -> nn.Module:
        moe_block = theirs(peer, (experts, top_k, hidden), arguments["way"])
        for parameter in moe_block.parameters():
            nn.init.normal_(parameter, std=0.02)
        return moe_block.to(dtype)

    return measured(block, arguments)


def theirs(peer: str, shape: tuple[int, int, int], implementation: str) -> nn.Module:
    """A block of transformers."""
    from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    experts, top_k, hidden = shape
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "num_experts_per_tok": top_k, "experts_implementation": implementation}
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


def measured(make: Callable[[], nn.Module], arguments: dict[str, Any]) -> Step:
    """Seconds of a call, without gradients or with them of everything; of one token in one layer of a stack."""
    tokens, dtype = arguments["tokens"], DTYPES[arguments["precision"]]
    stack = [make() for _ in range(LAYERS if tokens == 1 else 1)]
    shape = (TURNS_OF_ONE if tokens == 1 else TURNS, 1, tokens, WIDTH)
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

    def fresh() -> list[Tensor]:
        """Other tokens in every call, as in training: experts have other numbers of rows."""
        return [torch.randn_like(x).requires_grad_(arguments["gradients"]) for x in xs]

    def forward(inputs: list[Tensor]) -> None:
        for x in inputs:
            call(x)

    def both(inputs: list[Tensor]) -> None:
        for x in inputs:
            torch.autograd.grad(call(x), [x, *parameters], output_gradient)  # as in training, which adds to no older gradient

    def step() -> float:
        inputs = fresh()
        return timed(lambda: (both if arguments["gradients"] else forward)(inputs)) / TURNS

    return step if arguments["gradients"] else torch.no_grad()(step)


def cases() -> list[Case]:
    """Every shape, precision and peer; goals are ratios of the peer's time to ours."""
    max_ratios = {("2 of 8", "fp32"): 1.2, ("2 of 8", "bf16"): 1.35, ("4 of 32", "fp32"): 1.4, ("4 of 32", "bf16"): 1.7}
    peers = [("dense", "")] + [(peer, implementation) for peer in list(FAMILIES)[1:] for implementation in ("eager", "grouped_mm")]
    comparisons = []
    for (peer, implementation), shape, precision, gradients in product(peers, SHAPES, DTYPES, (False, True)):
        dense = 1 / max_ratios[shape, precision] if gradients else None
        goal = dense if peer == "dense" else 1 / 1.05
        comparisons.append(case({"peer": peer, "way": implementation, "shape": shape, "precision": precision}, TOKENS, gradients, goal))
    for (peer, implementation, goal), precision in product((("dense", "", 1 / 1.4), ("mixtral", "eager", 1 / 1.05)), DTYPES):
        comparisons.append(case({"peer": peer, "way": implementation, "shape": "2 of 8", "precision": precision}, 1, False, goal))
    return comparisons


def case(fields: dict[str, Any], tokens: int, gradients: bool, goal: float | None) -> Case:
    """One comparison; its goal is the least ratio of the peer's time to ours."""
    work = "one token" if tokens == 1 else "forward and backward" if gradients else "forward"
    name = f"{fields['peer']} {fields['way']}".strip() + f", {fields['shape']}, {fields['precision']}, {work}"
    arguments = fields | {"tokens": tokens, "gradients": gradients}
    return Case(name, arguments, None if goal is None else round(goal, 3), pairs=15 if tokens == 1 else 5)


if __name__ == "__main__":
    main(
        "benchmarks.moe",
        "What does a mixture of experts cost beside a dense feed-forward as large as what is active, and its peers?",
        {"heddle": heddle_side, "peer": peer_side},
        cases(),
    )
