"""How long does decoding a token with latent attention take after 2k, 8k and 32k tokens, and how large is its state?

12 layers, width 768, 12 heads of 64 + 32 dims, latents of 256 + 32, dense feed-forwards. The peer is transformers'
DeepSeek-V2 with equal weights (its attention is V3's) in its own `generate`, with its default dynamic cache, which
stores latents and expands them at every step. There is no prefill: both states hold the same random latents.
"""

from functools import partial
from typing import Any

import torch

from benchmarks import peers
from benchmarks.harness import Case, Measured, limit_row, main, timed
from heddle.model.decoder import build
from heddle.model.load_config import load_config
from heddle.model.size import size
from heddle.numerics.linear import packed_weights

LAYERS, WIDTH, HEADS, HIDDEN, RANK, NOPE, ROPE = 12, 768, 12, 2048, 256, 64, 32
DESIGN: dict[str, Any] = {
    "vocab_size": peers.VOCABULARY,
    "width": WIDTH,
    "layers": [
        {
            "repeat": LAYERS,
            "mixer": {
                "kind": "latent_attention",
                "heads": HEADS,
                "kv_rank": RANK,
                "nope_dim": NOPE,
                "rope_dim": ROPE,
                "position": {"kind": "rope", "layout": "interleaved"},
            },
            "feedforward": {"kind": "gated", "hidden": HIDDEN},
        }
    ],
}


def heddle_side(arguments: dict[str, Any]) -> Measured:
    """Greedy steps: model, head of the last position, argmax."""
    model = peers.ours(DESIGN, peers.DTYPES[arguments["precision"]]).eval()
    context, steps = arguments["context"], arguments["steps"]
    start, first = peers.filled(model, context, steps), peers.tokens(1, context + 1)[:, -1:]
    values: list[float] = []

    @torch.no_grad()
    def step() -> float:
        state, token = start.fork(), first

        def work() -> None:
            nonlocal state, token
            for number in range(steps):
                hidden, state = model(token, None, state)
                logits = model.head(hidden[:, -1:])
                if number == 0:
                    values[:] = logits[0, -1, :8].tolist()
                token = logits.argmax(-1)

        with packed_weights():
            work()  # packs the weights, which a generation does once
            state, token = start.fork(), first
            return timed(work) / steps

    return Measured(step, lambda: values)


def transformers_side(arguments: dict[str, Any], tuned: bool = False) -> Measured:
    """The median time between two calls of a logits processor within `generate`."""
    dtype, context, steps = peers.DTYPES[arguments["precision"]], arguments["context"], arguments["steps"]
    start = peers.filled(build(load_config(DESIGN), dtype=dtype), context, steps)
    model = peers.transformers_peer(DESIGN, dtype, tuned).eval()
    prompt = peers.tokens(1, context + 1)
    return peers.generating(model, prompt, peers.transformers_cache(start, context, model.config), steps)


def case(precision: str, context: int, goal: float, steps: int = 4, pairs: int = 9) -> Case:
    """One precision at one context."""
    arguments = {"precision": precision, "context": context, "steps": steps}
    figure = f"MLA {context // 1024}k" if precision == "fp32" and context > 2048 else ""
    name = f"latent decode {precision} after {context}"
    return Case(name, arguments, goal, pairs, against=("transformers tuned",), figure=figure)


def state_rows() -> list[dict[str, Any]]:
    """Bytes that a token adds to the state of a layer."""
    rows = []
    for precision in ("fp32", "bf16"):
        dtype = peers.DTYPES[precision]
        bytes_per_token = size(load_config(DESIGN), 2048, dtype=dtype).state_bytes_per_token / LAYERS
        latent_bytes = (RANK + ROPE) * dtype.itemsize
        rows.append(limit_row(f"state of a token in a layer, {precision}", bytes_per_token, latent_bytes, "bytes"))
    return rows


if __name__ == "__main__":
    main(
        "benchmarks.latent",
        "How much faster is decoding a token with latent attention than with transformers' DeepSeek?",
        {
            "heddle": heddle_side,
            "transformers": transformers_side,
            "transformers tuned": partial(transformers_side, tuned=True),
        },
        [
            case("fp32", 2048, 4.0),
            case("fp32", 8192, 25.0, pairs=7),
            case("fp32", 32768, 45.0, steps=2, pairs=3),
            case("bf16", 2048, 3.0),
            case("bf16", 8192, 8.0, pairs=7),
            case("bf16", 32768, 30.0, steps=2, pairs=3),
        ],
        state_rows,
    )
