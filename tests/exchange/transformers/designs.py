"""Small designs of every kind of mixer and state, as models of transformers in float64."""

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

import heddle
from heddle.laws.harness import forward_no_grad
from heddle.model.config import ModelConfig
from heddle.model.load_config import load_config
from tests.cases import ALIBI, LONG, MLP, ROPE, SHARED, Data, attention, delta, design, latent, layer
from tests.generation.loops import amplify_layers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what a third party says while it is imported is not ours
    from transformers.utils import logging

    from heddle.exchange.transformers import HeddleForCausalLM

    logging.set_verbosity_error()
    logging.disable_progress_bar()

MOE: Data = {
    "kind": "moe",
    "experts": 4,
    "top_k": 2,
    "hidden": 9,
    "shared": 1,
    "aux_loss": 0.3,
    "routing": "sigmoid",
    "bias_update": 0.01,
}
DESIGNS: dict[str, Data] = {
    "gqa": design(layer(attention(6, kv_heads=2), repeat=2)),
    "window": design(layer(attention(window=5)), layer(attention(kv_heads=1)), head={"tied": False, "bias": True}),
    "rings": design(layer(attention(window=3)), layer(attention(window=6, kv_heads=2))),
    "mla": design(layer(latent(), repeat=2)),
    "linear": design(layer({"kind": "linear_attention", "heads": 3, "feature_map": "elu"}, repeat=2)),
    "hybrid": design(delta(repeat=1, conv_kernel=3), layer(attention(kv_heads=2))),
    "pair": design(layer({"kind": "pair", "first": attention(3, window=2), "second": attention(kv_heads=2, window=5)})),
    "moe": design(layer(attention(3), MOE, repeat=2)),
    "looped": design(layer(attention(3), MOE, repeat=2) | SHARED, layer(attention(kv_heads=2)), head={"tied": False}),
    "attention-residuals": design(
        layer(attention(position=ROPE), repeat=2), residual={"kind": "attention_residuals", "value_norm": True}
    ),
    "dual-alibi": design(layer(attention(position=ALIBI), repeat=2), residual={"kind": "residual_dual"}),
    "learned": design(layer(attention(position=None)), embedding={"position": {"kind": "learned", "length": 64}}),
}
LENGTHS = [11, 4, 1]


def config(name: str) -> ModelConfig:
    """A design by its name."""
    return load_config(DESIGNS[name])


@cache
def decoder(name: str) -> heddle.Decoder:
    """The model itself, lively in float64."""
    return amplify_layers(heddle.build(config(name), dtype=torch.float64, seed=1)).eval()


def model(name: str) -> HeddleForCausalLM:
    """The same behind the class of transformers."""
    return HeddleForCausalLM.from_decoder(decoder(name))


def draft(name: str) -> HeddleForCausalLM:
    """A model that often guesses the same: the weights disturbed."""
    draft_decoder = heddle.build(config(name), dtype=torch.float64, seed=1)
    with torch.no_grad():
        for disturbed, original in zip(draft_decoder.parameters(), decoder(name).parameters(), strict=True):
            disturbed.copy_(original + 0.02 * original.std().nan_to_num() * torch.randn_like(original))
    return HeddleForCausalLM.from_decoder(draft_decoder.eval())


def by_length() -> HeddleForCausalLM:
    """A design that turns by the length of the whole text."""
    scaling = LONG | {"original_length": 20}
    data = design(layer(attention(position=ROPE | {"scaling": scaling}), MLP, repeat=2))
    return HeddleForCausalLM.from_decoder(amplify_layers(heddle.build(load_config(data), dtype=torch.float64)).eval())


def prompts(lengths: list[int] = LENGTHS, seed: int = 3) -> list[list[int]]:
    """Rows of tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 61, (length,), generator=generator).tolist() for length in lengths]


def padded(rows: list[list[int]], side: str = "left") -> dict[str, Tensor]:
    """input_ids and attention_mask; under the padding stand tokens like others."""
    width = max(map(len, rows))
    gaps = [[5] * (width - len(row)) for row in rows]
    left = side == "left"
    tokens = [gap + row if left else row + gap for gap, row in zip(gaps, rows, strict=True)]
    masks = [[0] * len(gap) + [1] * len(row) for gap, row in zip(gaps, rows, strict=True)]
    return {
        "input_ids": torch.tensor(tokens),
        "attention_mask": torch.tensor(masks if left else [mask[::-1] for mask in masks]),
    }


@torch.no_grad()
def alone(name: str, row: list[int]) -> Tensor:
    """Logits [T, vocab] of a row by itself, by the model of heddle, no state and no mask."""
    result: Tensor = decoder(name).head(forward_no_grad(decoder(name), torch.tensor([row])))[0]
    return result


@torch.no_grad()
def logits(name: str, **inputs: Any) -> Tensor:
    """What the class of transformers says, without a cache."""
    result: Tensor = model(name)(**inputs, use_cache=False).logits
    return result
