"""BioGPT (Luo et al. 2022): OPT with GELU, embeddings times the square root of the width, and an embedding dropout."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import opt
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import ModelConfig

NAMES = {
    "ffn_dim": "intermediate_size", "activation_function": "hidden_act", "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob", "init_std": "initializer_range",
}  # fmt: skip
OF_OPT = ("enable_bias", "word_embed_proj_dim", "do_layer_norm_before", "layer_norm_elementwise_affine")


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same. Its class has norms with an epsilon of 1e-5, whatever `layer_norm_eps` says."""
    config.names = NAMES
    config.optional("layer_norm_eps")
    for name in OF_OPT:
        config.expect(name, None)
    design = opt.read_config(config, "gelu", dropout=0.1, length=1024)
    design["layers"][0]["feedforward"] |= {"dropout": config.get("activation_dropout", 0.0)}
    design["embedding"] |= {"dropout": design["residual"]["dropout"]}
    if config.get("scale_embedding", True):
        design["embedding"] |= {"multiplier": design["width"] ** 0.5}
    return design


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    fields = {NAMES.get(name, name): value for name, value in opt.write_config(design).items() if name not in OF_OPT}
    return fields | {
        "activation_dropout": design_parts.first_mlp(design).dropout,
        "scale_embedding": design.embedding.multiplier is not None,
    }


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """OPT's tensor names but for the model's, the last norm's and the head's."""
    opt.map_weights(design, weights, "biogpt", ("layer_norm", "output_projection"))


FAMILY = Family("biogpt", "BioGptForCausalLM", read_config, write_config, map_weights)
