"""DeepSeek-V3 (DeepSeek-AI 2024): as V2, with experts of a sigmoid that a bias balances, chosen within groups.

What predicts further tokens, in the layers after the last (`num_nextn_predict_layers`), is left out: it changes no
logit of the next token.
"""

from typing import Any

from heddle.exchange import views
from heddle.exchange.families import _blocks, _deepseek
from heddle.exchange.family import Family
from heddle.exchange.fields import Fields
from heddle.model.config import ModelConfig


def read(fields: Fields) -> dict[str, Any]:
    """The balancing bias stays as it is loaded; a training sets `bias_update`."""
    fields.find("num_nextn_predict_layers", "num_mtp_layers")
    fields.expect("scoring_func", "sigmoid", default="sigmoid")
    fields.expect("topk_method", "noaux_tc", default="noaux_tc")
    routing: dict[str, Any] = {
        "routing": "sigmoid",
        "renormalise": fields.take("norm_topk_prob", True),
        "groups": fields.need("n_group", int),
        "top_groups": fields.need("topk_group", int),
        "bias_update": 0.0,
    }
    layout = "interleaved" if fields.take("rope_interleave", True) else "half"
    mixer = _deepseek.read_attention(fields, layout)
    layers = _deepseek.read_layers(fields, mixer, routing, False)
    return _blocks.frame(fields, {"kind": "rms", "eps": fields.take("rms_norm_eps", 1e-6)}, layers)


def write(design: ModelConfig) -> dict[str, Any]:
    """As read."""
    moe, rope = views.moe(design), views.rope(views.latent(design))
    return _deepseek.write(design) | {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": moe.groups or 1,
        "topk_group": moe.top_groups or 1,
        "norm_topk_prob": moe.renormalise,
        "rope_interleave": rope.layout == "interleaved",
        "num_nextn_predict_layers": 0,
    }


FAMILY = Family(
    "deepseek_v3", "DeepseekV3ForCausalLM", read, write, _deepseek.rules, left_out=("model.layers.{depth}.",)
)
