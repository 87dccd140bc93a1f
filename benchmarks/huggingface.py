"""How long does a token take through transformers' `generate`, with heddle's classes and with transformers' own?

Greedy, one row, both with their default dynamic cache: `preset:gqa-medium` and LlamaForCausalLM of the same shape after
2,000 tokens; the latent attention of `benchmarks.latent` and DeepseekV3ForCausalLM after 8,192. There is no prefill:
caches are filled with random numbers. A logits processor measures the time between tokens.
"""

from typing import Any

import torch

from benchmarks import latent, peers
from benchmarks.harness import Case, Step, main


def heddle_side(arguments: dict[str, Any]) -> Step:
    """HeddleForCausalLM."""
    from heddle.exchange.transformers import HeddleCache, HeddleForCausalLM

    context, steps = arguments["context"], arguments["steps"]
    design = "preset:gqa-medium" if arguments["peer"] == "llama" else latent.DESIGN
    model = peers.ours(design, peers.DTYPES[arguments["precision"]]).eval()
    start = HeddleCache()
    start.layers[0].state = peers.filled(model, context, steps + 2)
    start.layers[0].seq_length = context
    prompt = peers.tokens(1, context + 1)
    return peers.generating(HeddleForCausalLM.from_decoder(model), prompt, start, steps)


def transformers_side(arguments: dict[str, Any]) -> Step:
    """transformers' own class."""
    from transformers import DynamicCache

    dtype, context = peers.DTYPES[arguments["precision"]], arguments["context"]
    if arguments["peer"] == "deepseek":
        return latent.transformers_side(arguments)
    model = peers.llama(dtype).eval()
    config = model.config
    start = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        keys, values = torch.randn(2, 1, config.num_key_value_heads, context, config.head_dim, dtype=dtype)
        start.update(keys, values, layer)
    return peers.generating(model, peers.tokens(1, context + 1), start, arguments["steps"])


def case(peer: str, precision: str, context: int, goal: float, pairs: int) -> Case:
    """One peer at one precision."""
    arguments = {"peer": peer, "precision": precision, "context": context, "steps": 8 if peer == "llama" else 4}
    return Case(f"{peer} {precision} after {context}", arguments, goal, pairs)


if __name__ == "__main__":
    main(
        "benchmarks.huggingface",
        "How much faster is a token through generate() with heddle's classes than with transformers' own?",
        {"heddle": heddle_side, "transformers": transformers_side},
        [
            case("llama", "fp32", 2000, 1.5, pairs=15),
            case("llama", "bf16", 2000, 1.5, pairs=15),
            case("deepseek", "fp32", 8192, 10.0, pairs=7),
            case("deepseek", "bf16", 8192, 10.0, pairs=7),
        ],
    )
