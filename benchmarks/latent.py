"""How long does decoding a token with latent attention take after 2k, 8k and 32k tokens, and how large is its state?

12 layers, width 768, 12 heads of 64 + 32 dims, latents of 256 + 32, dense feed-forwards. The peer is transformers'
DeepSeek-V3 of that shape in its own `generate`, with its default dynamic cache (which stores latents and expands them
at every step). There is no prefill: both states are filled with random latents.
"""

from functools import partial
from typing import Any

import torch

from benchmarks import peers
from benchmarks.harness import Case, Step, limit_row, main, timed
from benchmarks.machine import THREADS
from heddle.machine import measured_choices
from heddle.model.decoder import build
from heddle.model.load_config import load_config
from heddle.model.size import size
from heddle.numerics.linear import packed_weights
from heddle.runtime import set_up_runtime

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


def heddle_side(arguments: dict[str, Any]) -> Step:
    """Greedy steps: model, head of the last position, argmax."""
    set_up_runtime("cpu", THREADS, choices=measured_choices(THREADS))
    model = build(load_config(DESIGN), dtype=peers.DTYPES[arguments["precision"]]).eval()
    steps = arguments["steps"]
    start = peers.filled(model, arguments["context"], steps)

    @torch.no_grad()
    def step() -> float:
        state, token = start.fork(), peers.tokens(1, 1)

        def work() -> None:
            nonlocal state, token
            for _ in range(steps):
                hidden, state = model(token, None, state)
                token = model.head(hidden[:, -1:]).argmax(-1)

        with packed_weights():
            work()  # packs the weights, which a generation does once
            state, token = start.fork(), peers.tokens(1, 1)
            return timed(work) / steps

    return step


def deepseek(dtype: torch.dtype, tuned: bool = False) -> Any:
    """transformers' DeepseekV3ForCausalLM of the same shape. tuned: with the process settings of heddle."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    if tuned:
        set_up_runtime("cpu", THREADS, choices=measured_choices(THREADS))
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=peers.VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        intermediate_size=HIDDEN,
        kv_lora_rank=RANK,
        q_lora_rank=None,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=NOPE,
        first_k_dense_replace=LAYERS,
        num_mtp_layers=0,
        max_position_embeddings=65536,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model: Any = DeepseekV3ForCausalLM(config)
    return model.to(dtype).eval()


def transformers_side(arguments: dict[str, Any], tuned: bool = False) -> Step:
    """The median time between two calls of a logits processor within `generate`."""
    from transformers import DynamicCache

    dtype, context, steps = peers.DTYPES[arguments["precision"]], arguments["context"], arguments["steps"]
    model = deepseek(dtype, tuned)
    start = DynamicCache(config=model.config)
    for layer in range(LAYERS):
        latent, k_rope = (torch.randn(1, 1, context, dim, dtype=dtype) for dim in (RANK, ROPE))
        start.update(latent, k_rope, layer)
    prompt = peers.tokens(1, context + 1)
    return peers.generating(model, prompt, start, steps)


def case(precision: str, context: int, goal: float, steps: int = 4, pairs: int = 9) -> Case:
    """One precision at one context."""
    arguments = {"precision": precision, "context": context, "steps": steps}
    figure = f"MLA {context // 1024}k" if precision == "fp32" and context > 2048 else ""
    name = f"latent decode {precision} after {context}"
    return Case(name, arguments, goal, pairs, against=("transformers tuned",), figure=figure)


def state_rows() -> list[dict[str, Any]]:
    """Bytes that a token adds to the state of a layer."""
    rows = []
    for precision, dtype in peers.DTYPES.items():
        bytes_per_token = size(load_config(DESIGN), 2048, dtype=dtype).state_bytes_per_token / LAYERS
        latent_bytes = (RANK + ROPE) * dtype.itemsize
        rows.append(limit_row(f"state of a token in a layer, {precision}", bytes_per_token, latent_bytes, "bytes"))
    return rows


if __name__ == "__main__":
    main(
        "benchmarks.latent",
        "How much faster is decoding a token with latent attention than with transformers' DeepSeek-V3?",
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
