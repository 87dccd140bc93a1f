"""Random models of transformers and the same weights in heddle, by an explicit mapping of names."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import heddle
from heddle.config import parse_config
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.model.load_config import DEFAULTS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what a third party says while it is imported is not ours
    from transformers import (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        Phi3Config,
        Phi3ForCausalLM,
    )
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

VOCABULARY, WIDTH, HIDDEN, DEPTH = 97, 42, 52, 3
CONFIGS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "deepseek": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
}


def theirs(family: str, heads: int, kv_heads: int, **options: Any) -> Any:
    """Their model in eval mode, its weights drawn so widely that logits and choices are far from even."""
    config_class, model_class = CONFIGS[family]
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=DEPTH,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        initializer_range=0.15,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
        **options,
    )
    torch.manual_seed(3)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # gains of one and biases of zero would hide where they belong
                parameter.add_(torch.randn_like(parameter) * 0.2)
            assert parameter.abs().max() > 0, name
    return model


def ours(design: dict[str, Any], model: Any, split: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict) -> Decoder:
    """The design with their weights; `split` takes apart what they keep joined."""
    config = parse_config(ModelConfig, DEFAULTS | {"vocab_size": VOCABULARY, "width": WIDTH} | design)
    mine = heddle.build(config).eval()
    mine.load_state_dict(renamed(split(model.state_dict()), config.head.tied))
    return mine


def scaling_options(kind: str, base: float, fields: dict[str, Any]) -> dict[str, Any]:
    """Our fields of a scaling as their `rope_parameters`."""
    renamed = {"original_length": "original_max_position_embeddings"}
    return {"rope_type": kind, "rope_theta": base} | {renamed.get(key, key): fields[key] for key in fields}


def scaled(
    kind: str, sizes: tuple[int, float], fields: dict[str, Any], length: int | None = None, part: float = 1.0
) -> tuple[Tensor, float]:
    """Their frequencies and the factor of their cosines for heads of (width, base), a `part` of whose dims turn."""
    dim, base = sizes
    options = scaling_options(kind, base, fields) | {"partial_rotary_factor": part}
    longest = fields.get("original_length", 2**20) if kind == "dynamic" else 2**20
    config = LlamaConfig(head_dim=dim, max_position_embeddings=longest, rope_parameters=options)
    result: tuple[Tensor, float] = ROPE_INIT_FUNCTIONS[kind](config, seq_len=length)
    return result


NAMES = {
    "self_attn.q_proj": "mixer.q",
    "self_attn.k_proj": "mixer.k",
    "self_attn.v_proj": "mixer.v",
    "self_attn.o_proj": "mixer.out",
    "self_attn.q_a_proj": "mixer.q_down",
    "self_attn.q_a_layernorm": "mixer.q_norm",
    "self_attn.q_b_proj": "mixer.q_up",
    "self_attn.kv_a_layernorm": "mixer.kv_norm",
    **{f"self_attn.{role}": f"mixer.{role}" for role in ("kv_down", "k_rope", "k_up", "v_up")},  # split by the test
    "mlp.gate_proj": "feedforward.gate",
    "mlp.up_proj": "feedforward.up",
    "mlp.down_proj": "feedforward.down",
    "input_layernorm": "residual.norms.mixer",
    "post_attention_layernorm": "residual.norms.feedforward",
}


def renamed(weights: dict[str, Tensor], tied: bool) -> dict[str, Tensor]:
    """Their names -> ours."""
    embedding = weights["model.embed_tokens.weight"]
    result = {
        "embed.weight": embedding,
        "head.weight": embedding if tied else weights["lm_head.weight"],
        "final_norm.norm.weight": weights["model.norm.weight"],
    }
    for name, value in weights.items():
        if name.startswith("model.layers."):
            _, _, index, rest = name.split(".", 3)
            role, _, what = rest.rpartition(".")
            result[f"layers.{index}.{NAMES[role]}.{what}"] = value
    return result


def logits(model: Decoder, tokens: Tensor, layout: heddle.Layout | None = None) -> Tensor:
    with torch.no_grad():
        hidden, _ = model(tokens, layout)
        result: Tensor = model.head(hidden)
    return result


def their_logits(model: Any, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
        result: Tensor = model(tokens, attention_mask=mask, position_ids=positions).logits
    return result


def greedy(model: Decoder, tokens: Tensor, layout: heddle.Layout | None, count: int) -> Tensor:
    """`count` more tokens of each row, by the state, one at a time."""
    out = []
    with torch.no_grad():
        state = model.init_state(tokens.shape[0], tokens.shape[1] + count)
        for _ in range(count):
            hidden, state = model(tokens, layout, state)
            tokens, layout = model.head(hidden[:, -1:]).argmax(-1), None
            out.append(tokens)
    return torch.cat(out, dim=1)


def their_greedy(model: Any, tokens: Tensor, mask: Tensor, count: int) -> Tensor:
    result: Tensor = model.generate(
        tokens, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    return result[:, tokens.shape[1] :]


def left_padded(lengths: list[int]) -> tuple[Tensor, Tensor, heddle.Layout]:
    """Tokens with 0 as padding, the mask transformers wants, and our layout."""
    layout = heddle.Layout.padded(lengths, side="left")
    generator = torch.Generator().manual_seed(9)
    tokens = torch.randint(1, VOCABULARY, tuple(layout.positions.shape), generator=generator)
    real = layout.positions >= 0
    return torch.where(real, tokens, 0), real.long(), layout


def compare(mine: Decoder, model: Any, lengths: list[int], count: int = 64) -> None:
    """Logits to 1e-5 for rows alone and left-padded together, and the same greedy text."""
    tokens, mask, layout = left_padded(lengths)
    real = mask.bool()
    got, want = logits(mine, tokens, layout)[real], their_logits(model, tokens, mask)[real]
    assert float(want.std()) > 0.5, "logits this even would agree whatever the model does"
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    for row, length in enumerate(lengths):
        alone = tokens[row : row + 1, -length:]
        torch.testing.assert_close(logits(mine, alone), their_logits(model, alone), rtol=0, atol=1e-5)
    assert torch.equal(greedy(mine, tokens, layout, count), their_greedy(model, tokens, mask, count))
