"""GPT-J (Wang & Komatsuzaki 2021): both branches read one norm, interleaved partial RoPE, a head with a bias."""

from typing import Any

from heddle.exchange import views
from heddle.exchange.families import _gpt
from heddle.exchange.family import Family
from heddle.exchange.fields import Fields
from heddle.exchange.rules import BLOCKS, Rules
from heddle.model.config import ModelConfig

BASE = 10000.0  # of the rotation; no field tells it


def read(fields: Fields) -> dict[str, Any]:
    """Every layer alike."""
    fields.expect("rotary", True, default=True)
    fields.expect("scale_attn_weights", True, default=True)
    mixer = _gpt.read_attention(fields, 0.0)
    mixer["position"] = {"kind": "rope", "base": BASE, "layout": "interleaved", "dim": _turned(fields, mixer["heads"])}
    layer = {"repeat": _gpt.read_depth(fields), "mixer": mixer, "feedforward": _gpt.read_mlp(fields)}
    head = {"tied": fields.take("tie_word_embeddings", False), "bias": True}
    return _gpt.frame(fields, [layer], 0.0, residual={"kind": "parallel", "norms": 1}, head=head)


def _turned(fields: Fields, heads: int) -> int:
    """The dims of a head that are turned. Null means as many as the model's width, which fits a single head only."""
    if "rotary_dim" in fields.data and fields.find("rotary_dim") is None:
        if heads > 1:
            raise fields.wrong("rotary_dim", "turns as many dims as all heads have together; give those of one head")
        return fields.count("n_embd", "hidden_size")
    return fields.take("rotary_dim", 64)


def write(design: ModelConfig) -> dict[str, Any]:
    """As read."""
    mixer = views.attention(design)
    return _gpt.write(design) | {"rotary_dim": views.rope(mixer).dim or mixer.head_dim}


def rules(design: ModelConfig, to: Rules) -> None:
    """Matrices as ours."""
    _gpt.ends(to)
    for index in range(design.depth):
        theirs, ours = f"transformer.h.{index}", f"layers.{index}"
        to.module(f"{theirs}.ln_1", f"{ours}.residual.norms.shared")
        for name in ("q", "k", "v", "out"):
            to.module(f"{theirs}.attn.{name}_proj", f"{ours}.mixer.{name}")
        _gpt.mlp(to, f"{theirs}.mlp.fc_in", f"{theirs}.mlp.fc_out", f"{ours}.feedforward", BLOCKS)


FAMILY = Family(
    "gptj",
    "GPTJForCausalLM",
    read,
    write,
    rules,
    left_out=_gpt.MASKS,
)
