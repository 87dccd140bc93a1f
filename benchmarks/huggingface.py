"""How long does a token take through transformers' `generate`, with heddle's classes and with transformers' own?

Greedy, one row, both with their default dynamic cache: `preset:gqa-medium` and LlamaForCausalLM of the same shape after
2,000 tokens; the latent attention of `benchmarks.latent` and DeepseekV2ForCausalLM after 8,192. There is no prefill:
caches are filled with the same random numbers. A logits processor measures the time between tokens.
"""

from typing import Any

from benchmarks import latent, peers
from benchmarks.harness import Case, Measured, main
from heddle.model.decoder import build
from heddle.model.load_config import load_config

DESIGNS: dict[str, Any] = {"llama": peers.DESIGN, "deepseek": latent.DESIGN}


def heddle_side(arguments: dict[str, Any]) -> Measured:
    """HeddleForCausalLM."""
    from heddle.exchange.transformers import HeddleCache, HeddleForCausalLM

    context, steps = arguments["context"], arguments["steps"]
    model = peers.ours(DESIGNS[arguments["peer"]], peers.DTYPES[arguments["precision"]]).eval()
    start = HeddleCache()
    start.layers[0].state = peers.filled(model, context, steps + 2)
    start.layers[0].seq_length = context
    prompt = peers.tokens(1, context + 1)
    if arguments["precision"] == "fp64":
        peers.float32_is_float64()  # of `generate`, which rounds the logits
    return peers.generating(HeddleForCausalLM.from_decoder(model), prompt, start, steps)


def transformers_side(arguments: dict[str, Any]) -> Measured:
    """transformers' own class, with equal weights and an equal cache."""
    dtype, context, steps = peers.DTYPES[arguments["precision"]], arguments["context"], arguments["steps"]
    design = DESIGNS[arguments["peer"]]
    start = peers.filled(build(load_config(design), dtype=dtype), context, steps + 2)
    model = peers.transformers_peer(design, dtype, False).eval()
    cache = peers.transformers_cache(start, context, model.config)
    return peers.generating(model, peers.tokens(1, context + 1), cache, steps)


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
