"""GPT-2, GPT-J and their followers: learned positions, RoPE or ALiBi, and feed-forwards of two projections."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.family import CONCATENATED, TRANSPOSED, Family, TensorTransform, WeightMap, interleaved_by_group
from heddle.model.config import ModelConfig
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.positions.learned import LearnedConfig

MASK_BUFFERS = ("*.attn.bias", "*.attn.masked_bias")  # buffers that older files hold
# Fields that do not change the logits: of classification heads, the length a second time, and of older programs.
UNUSED_FIELDS = (
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    "n_ctx", "output_past", "n_special", "predict_special_tokens",
)  # fmt: skip


def read_attention(config: ConfigReader, dropout: float) -> dict[str, Any]:
    """The fields of attention that both families have; `dropout` is the family's default."""
    heads = config.require_count("n_head", "num_attention_heads")
    return {"kind": "attention", "heads": heads, "dropout": config.get("attn_pdrop", dropout)}


def read_mlp(config: ConfigReader, activation: str = "gelu_new") -> dict[str, Any]:
    """The feed-forward; by default it is four times as wide as the model. activation: the family's default."""
    width = config.require_count("n_embd", "hidden_size")
    return {
        "kind": "mlp",
        "hidden": config.get("n_inner", 4 * width),
        "activation": _common.read_activation(config, "activation_function", activation),
        "bias": True,
    }


def read_depth(config: ConfigReader) -> int:
    """The number of layers."""
    return config.require_count("n_layer", "num_hidden_layers")


def gpt_design(config: ConfigReader, layers: list[dict[str, Any]], dropout: float, **extra: Any) -> dict[str, Any]:
    """A design with these layers. `dropout` is the family's default; it is added to `residual` and `embedding`."""
    config.ignore(*UNUSED_FIELDS)
    extra["residual"] = extra["residual"] | {"dropout": config.get("resid_pdrop", dropout)}
    extra["embedding"] = extra.get("embedding", {}) | {"dropout": config.get("embd_pdrop", dropout)}
    return _common.layer_norm_design(config, layers, "layer_norm_epsilon", **extra)


def gpt2_design(
    config: ConfigReader, layers: list[dict[str, Any]], length: int, dropout: float = 0.1
) -> dict[str, Any]:
    """As `gpt_design`, with learned positions for `length` tokens."""
    head = {"tied": config.get("tie_word_embeddings", True)}
    embedding = {"position": {"kind": "learned", "length": length}}
    return gpt_design(config, layers, dropout, residual={"kind": "pre_norm"}, embedding=embedding, head=head)


def write_gpt(design: ModelConfig) -> dict[str, Any]:
    """The fields of all these families."""
    mixer, mlp, position = (
        design_parts.first_attention(design),
        design_parts.first_mlp(design),
        design.embedding.position,
    )
    return {
        "vocab_size": design.vocab_size,
        "n_embd": design.width,
        "n_layer": design.depth,
        "n_head": mixer.heads,
        "n_inner": None if mlp.hidden == 4 * design.width else mlp.hidden,
        "n_positions": position.length if isinstance(position, LearnedConfig) else _common.DEFAULT_MAX_POSITIONS,
        "activation_function": hf_activation(mlp.activation),
        "attn_pdrop": mixer.dropout,
        "tie_word_embeddings": design.head.tied,
        "initializer_range": design.initialization.std,
        **_common.written(design, "layer_norm_epsilon", "embd_pdrop", "resid_pdrop"),
    }


def hf_activation(name: str) -> str:
    """The Hugging Face name of an activation. These families write the tanh approximation of GELU as `gelu_new`."""
    return "gelu_new" if name == "gelu_tanh" else design_parts.HF_ACTIVATIONS[name]


EMBEDDING, LAST_NORM = "transformer.wte", "transformer.ln_f"
GPT2_NORMS = {"ln_1": "residual.norms.mixer", "ln_2": "residual.norms.feedforward"}


def map_megatron_layer(weights: WeightMap, hf: str, heddle: str, attention: str, groups: int) -> None:
    """A layer of Megatron's, but for its norms; queries, keys and values are one matrix, interleaved by `groups`."""
    qkv = (f"{heddle}.mixer.{role}" for role in "qkv")
    weights.add_module(f"{hf}.{attention}.query_key_value", *qkv, transform=interleaved_by_group(groups))
    weights.add_module(f"{hf}.{attention}.dense", f"{heddle}.mixer.out")
    weights.add_modules(f"{hf}.mlp", f"{heddle}.feedforward", {"dense_h_to_4h": "up", "dense_4h_to_h": "down"})


def read_gpt2(config: ConfigReader) -> dict[str, Any]:
    """GPT-2 (Radford et al. 2019): pre-norm, learned positions, biases; matrices stored [inputs, outputs]."""
    config.optional("reorder_and_upcast_attn")  # scores in float32, as heddle always computes them
    mixer, depth = read_attention(config, 0.1) | {"bias": True}, read_depth(config)
    scaled, by_depth = config.get("scale_attn_weights", True), config.get("scale_attn_by_inverse_layer_idx", False)
    scale = (config.require_count("n_embd", "hidden_size") // mixer["heads"] or 1) ** -0.5 if scaled else 1.0
    scales = [scale / index for index in range(1, depth + 1)] if by_depth else [scale]
    forward = {"feedforward": read_mlp(config), "repeat": depth // len(scales)}
    length = config.require("n_positions", int, "max_position_embeddings")
    return gpt2_design(config, [forward | {"mixer": mixer | {"scale": scale}} for scale in scales], length)


def write_gpt2(design: ModelConfig) -> dict[str, Any]:
    """Only the two known kinds of score scale can be written."""
    mixers = [layer.mixer for layer in design_parts.layers(design)]
    scales = [mixer.scale or 1.0 for mixer in mixers if isinstance(mixer, AttentionConfig)] or [1.0]
    return write_gpt(design) | {
        "scale_attn_weights": not math.isclose(scales[0], 1.0),
        "scale_attn_by_inverse_layer_idx": len(scales) > 1 and math.isclose(scales[1], scales[0] / 2),
    }


def map_gpt2(
    design: ModelConfig,
    weights: WeightMap,
    qkv: TensorTransform = TRANSPOSED,
    matrix: TensorTransform = TRANSPOSED,
    embeddings: tuple[str, str] = (EMBEDDING, "transformer.wpe"),
) -> None:
    """The tensor names. qkv: how queries, keys and values are one matrix. matrix: how others are stored.

    embeddings: of tokens and of positions.
    """
    _common.map_embedding_and_head(design, weights, embeddings[0], LAST_NORM)
    weights.add_module(embeddings[1], "embed.position")
    for hf, heddle, _ in _common.named_layers(design, prefix="transformer.h"):
        weights.add_modules(hf, heddle, GPT2_NORMS)
        weights.add_module(f"{hf}.attn.c_attn", *(f"{heddle}.mixer.{role}" for role in "qkv"), transform=qkv)
        weights.add_module(f"{hf}.attn.c_proj", f"{heddle}.mixer.out", transform=matrix)
        weights.add_module(f"{hf}.mlp.c_fc", f"{heddle}.feedforward.up", transform=matrix)
        weights.add_module(f"{hf}.mlp.c_proj", f"{heddle}.feedforward.down", transform=matrix)


GPT2 = Family("gpt2", "GPT2LMHeadModel", read_gpt2, write_gpt2, map_gpt2, ignored_tensors=MASK_BUFFERS)


GPT_ACTIVATIONS = {"gelu": "gelu_tanh", "gelu_new": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}
GPT_AFN = {"gelu_tanh": "gelu", "gelu": "gelu", "relu": "relu", "silu": "silu"}  # the second is another, and refused


def read_gpt(config: ConfigReader) -> dict[str, Any]:
    """GPT (Radford et al. 2018): norms after each sum, learned positions, biases; its `gelu` is the tanh form."""
    name = config.get("afn", "gelu")
    if name not in GPT_ACTIVATIONS:
        raise config.invalid("afn", f"heddle has {', '.join(GPT_ACTIVATIONS)}")
    mixer, width = read_attention(config, 0.1) | {"bias": True}, config.require_count("n_embd", "hidden_size")
    if width % mixer["heads"]:
        raise config.invalid("n_embd", f"openai-gpt needs a multiple of its {mixer['heads']} heads")
    feedforward = {"kind": "mlp", "hidden": 4 * width, "activation": GPT_ACTIVATIONS[name], "bias": True}
    layer = {"repeat": read_depth(config), "mixer": mixer, "feedforward": feedforward}
    design = gpt2_design(config, [layer], config.get("n_positions", 512, "max_position_embeddings"))
    design["residual"] |= {"kind": "post_norm"}
    return design


def write_openai_gpt(design: ModelConfig) -> dict[str, Any]:
    fields = _common.without(write_gpt(design), "n_inner", "activation_function")
    return fields | {"afn": GPT_AFN.get(design_parts.first_mlp(design).activation, "gelu")}


def map_openai_gpt(design: ModelConfig, weights: WeightMap) -> None:
    """GPT-2's tensor names of layers, and two of embeddings."""
    map_gpt2(design, weights, embeddings=("transformer.tokens_embed", "transformer.positions_embed"))


OPENAI_GPT = Family(
    "openai-gpt", "OpenAIGPTLMHeadModel", read_gpt, write_openai_gpt, map_openai_gpt, ignored_tensors=MASK_BUFFERS
)


NEO_NAMES = {
    "n_embd": "hidden_size", "n_layer": "num_layers", "n_head": "num_heads", "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings", "resid_pdrop": "resid_dropout", "embd_pdrop": "embed_dropout",
    "attn_pdrop": "attention_dropout",
}  # fmt: skip
NEO_LAYER = {
    **GPT2_NORMS, **{f"attn.attention.{role}_proj": f"mixer.{role}" for role in "qkv"},
    "attn.attention.out_proj": "mixer.out", "mlp.c_fc": "feedforward.up", "mlp.c_proj": "feedforward.down",
}  # fmt: skip


def read_gpt_neo(config: ConfigReader) -> dict[str, Any]:
    """GPT-Neo (EleutherAI 2021): GPT-2 with unscaled scores, a bias of attention's output only, windowed layers."""
    config.names = NEO_NAMES
    config.ignore("classifier_dropout")
    depth, width = read_depth(config), config.require_count("n_embd")
    mixer = read_attention(config, 0.0) | {"bias": "out", "scale": 1.0}
    if width % mixer["heads"]:
        raise config.invalid("n_embd", f"gpt_neo needs a multiple of its {mixer['heads']} heads")
    usual: list[Any] = [[["global", "local"], 12]]
    pairs = config.get("attention_types", usual)
    kinds = [kind for pair in pairs for _ in range(pair[1]) for kind in pair[0]]
    if len(kinds) != depth or set(kinds) - {"global", "local"}:
        raise config.invalid("attention_types", f"should say global or local of each of {depth} layers")
    config.expect("attention_layers", kinds, None)
    window, feedforward = config.get("window_size", 256), read_mlp(config)
    mixers = [mixer | {"window": window if kind == "local" else None} for kind in kinds]
    layers = [{"mixer": mixer, "feedforward": feedforward} for mixer in mixers]
    return gpt2_design(config, layers, config.get("n_positions", 2048), dropout=0.0)


def write_gpt_neo(design: ModelConfig) -> dict[str, Any]:
    windows = [getattr(layer.mixer, "window", None) for layer in design_parts.layers(design)]
    kinds = ["global" if window is None else "local" for window in windows]
    return {NEO_NAMES.get(name, name): value for name, value in write_gpt(design).items()} | {
        "attention_types": [[[kind], 1] for kind in kinds],
        "attention_layers": kinds,
        "window_size": design_parts.first_window(design) or 256,
    }


def map_gpt_neo(design: ModelConfig, weights: WeightMap) -> None:
    """GPT-2's tensor names of embeddings, and own ones of layers."""
    _common.map_embedding_and_head(design, weights, EMBEDDING, LAST_NORM)
    weights.add_module("transformer.wpe", "embed.position")
    for hf, heddle, _ in _common.named_layers(design, prefix="transformer.h"):
        weights.add_modules(hf, heddle, NEO_LAYER)


GPT_NEO = Family(
    "gpt_neo", "GPTNeoForCausalLM", read_gpt_neo, write_gpt_neo, map_gpt_neo,
    ignored_tensors=("*.attn.attention.bias", "*.attn.attention.masked_bias"),
)  # fmt: skip


def read_bigcode(config: ConfigReader) -> dict[str, Any]:
    """GPT-BigCode (Ben Allal et al. 2023; SantaCoder, StarCoder): GPT-2 with one head of keys and values."""
    # `multi_query: false` is multi-head attention.
    config.optional("attention_softmax_in_fp32")  # heddle always computes scores in float32
    config.optional("scale_attention_softmax_in_fp32")
    config.note("inference_runner", "max_batch_size", "max_sequence_length", "pad_key_length", "pre_allocate_kv_cache")
    config.note("validate_runner_input", "runner_max_sequence_length")  # of the first files
    mixer = read_attention(config, 0.1) | {"bias": True}
    width, heads = config.require_count("n_embd", "hidden_size"), mixer["heads"]
    if width % heads:
        raise config.invalid("n_embd", f"gpt_bigcode needs a multiple of its {heads} heads")
    kv_heads = 1 if config.get("multi_query", True) else heads
    config.expect("num_key_value_heads", None, kv_heads)
    mixer |= {"kv_heads": kv_heads} | ({} if config.get("scale_attn_weights", True) else {"scale": 1.0})
    layer = {"repeat": read_depth(config), "mixer": mixer, "feedforward": read_mlp(config, "gelu_pytorch_tanh")}
    return gpt2_design(config, [layer], config.get("n_positions", 1024, "max_position_embeddings"))


def write_bigcode(design: ModelConfig) -> dict[str, Any]:
    mixer = design_parts.first_attention(design)
    return write_gpt(design) | {
        "activation_function": design_parts.HF_ACTIVATIONS[design_parts.first_mlp(design).activation],
        "scale_attn_weights": mixer.scale is None or not math.isclose(mixer.scale, 1.0),
        "multi_query": mixer.kv_heads == 1,
    }


def map_bigcode(design: ModelConfig, weights: WeightMap) -> None:
    """Queries, keys and values are one matrix, interleaved by head of keys."""
    mixer = design_parts.first_attention(design)
    map_gpt2(design, weights, interleaved_by_group(mixer.kv_heads or mixer.heads), CONCATENATED)


GPT_BIGCODE = Family(
    "gpt_bigcode", "GPTBigCodeForCausalLM", read_bigcode, write_bigcode, map_bigcode, ignored_tensors=MASK_BUFFERS
)


THETA = 10000.0  # a constant in transformers, not a field


def read_gptj(config: ConfigReader) -> dict[str, Any]:
    """GPT-J (Wang & Komatsuzaki 2021): both branches read one norm, interleaved partial RoPE, a head with a bias."""
    config.expect("rotary", True, default=True)
    config.expect("scale_attn_weights", True, default=True)
    mixer = read_attention(config, 0.0)
    rotary_dim = _read_rotary_dim(config, mixer["heads"])
    mixer["position"] = {"kind": "rope", "base": THETA, "layout": "interleaved", "rotary_dim": rotary_dim}
    layer = {"repeat": read_depth(config), "mixer": mixer, "feedforward": read_mlp(config)}
    head = {"tied": config.get("tie_word_embeddings", False), "bias": True}
    return gpt_design(config, [layer], 0.0, residual={"kind": "parallel", "norms": 1}, head=head)


def _read_rotary_dim(config: ConfigReader, heads: int) -> int:
    """The number of rotated dims of a head. Null means the model's width, which is possible with a single head only."""
    if "rotary_dim" in config.data and config.optional("rotary_dim") is None:
        if heads > 1:
            raise config.invalid("rotary_dim", "this rotates the dims of all heads together; give one head's number")
        return config.require_count("n_embd", "hidden_size")
    return config.get("rotary_dim", 64)


def write_gptj(design: ModelConfig) -> dict[str, Any]:
    mixer = design_parts.first_attention(design)
    own = {"rotary_dim": design_parts.rope_of(mixer).rotary_dim or mixer.head_dim}
    return write_gpt(design) | {"n_positions": _common.DEFAULT_MAX_POSITIONS} | own


GPTJ_LAYER = {
    "ln_1": "residual.norms.shared", "attn.out_proj": "mixer.out", "mlp.fc_in": "feedforward.up",
    "mlp.fc_out": "feedforward.down",
}  # fmt: skip
GPTJ_QKV = {"attn.q_proj": "mixer.q", "attn.k_proj": "mixer.k", "attn.v_proj": "mixer.v"}


def map_gptj(design: ModelConfig, weights: WeightMap, qkv: Mapping[str, str] = GPTJ_QKV) -> None:
    """The tensor names; each is one parameter. qkv: names of queries, keys and values."""
    _common.map_embedding_and_head(design, weights, EMBEDDING, LAST_NORM)
    weights.add_module("lm_head", "head")
    for hf, heddle, _ in _common.named_layers(design, prefix="transformer.h"):
        weights.add_modules(hf, heddle, {**GPTJ_LAYER, **qkv})


GPTJ = Family("gptj", "GPTJForCausalLM", read_gptj, write_gptj, map_gptj, ignored_tensors=MASK_BUFFERS)


BLOCKS = 4  # a constant in transformers: the devices that trained it


def read_codegen(config: ConfigReader) -> dict[str, Any]:
    """CodeGen (Nijkamp et al. 2022): GPT-J with queries, values and keys as one matrix in four blocks of heads."""
    heads = config.require_count("n_head", "num_attention_heads")
    if heads % BLOCKS:
        raise config.invalid("n_head", f"its class needs a multiple of {BLOCKS}")
    return read_gptj(config)


def map_codegen(design: ModelConfig, weights: WeightMap) -> None:
    """GPT-J's tensor names but for the projections that are one."""
    map_gptj(design, weights, qkv={})
    for hf, heddle, _ in _common.named_layers(design, prefix="transformer.h"):
        roles = (f"{heddle}.mixer.{role}" for role in "qvk")
        weights.add_module(f"{hf}.attn.qkv_proj", *roles, transform=interleaved_by_group(BLOCKS))


CODEGEN = Family(
    "codegen", "CodeGenForCausalLM", read_codegen, write_gptj, map_codegen, (*MASK_BUFFERS, "*.attn.causal_mask")
)


LAST = "final_layer_norm", "lm_head"
OPT_LAYER = {
    "self_attn_layer_norm": "residual.norms.mixer", "final_layer_norm": "residual.norms.feedforward",
    "fc1": "feedforward.up", "fc2": "feedforward.down",
}  # fmt: skip
OPT_OFFSET = 2  # rows of the table of positions before the first token's


def read_opt(
    config: ConfigReader, activation: str = "relu", dropout: float = 0.0, length: int = 2048
) -> dict[str, Any]:
    """OPT (Zhang et al. 2022): GPT-2 with ReLU, one dropout rate and two unused rows in the table of positions.

    The 350M model, with embeddings narrower than the model and norms after each branch, is refused by these fields.
    """
    # activation, dropout (of attention), length: the defaults of the family.
    _common.check_width(config)
    width, bias = config.require_count("hidden_size"), config.get("enable_bias", True)
    config.expect("word_embed_proj_dim", None, width)
    config.expect("do_layer_norm_before", True, default=True)
    config.expect("_remove_final_layer_norm", False, default=False)
    config.expect("layer_norm_elementwise_affine", True, default=True)
    config.optional("layerdrop")  # skips whole layers, in training alone
    config.note("activation_dropout", "prefix")  # of the first files
    heads = config.require_count("num_attention_heads")
    mixer = {"kind": "attention", "heads": heads, "bias": bias, "dropout": config.get("attention_dropout", dropout)}
    hidden = config.require("ffn_dim", int)
    activation = _common.read_activation(config, "activation_function", activation)
    feedforward = {"kind": "mlp", "hidden": hidden, "activation": activation, "bias": bias}
    length = config.get("max_position_embeddings", length)
    std = config.get("init_std", 0.02)
    return _common.design_fields(
        config,
        {"kind": "layer", "eps": 1e-5},
        _common.same_layers(config, mixer, feedforward),
        tied=True,
        embedding={"position": {"kind": "learned", "length": length, "offset": OPT_OFFSET}},
        residual={"kind": "pre_norm", "dropout": config.get("dropout", 0.1)},
        initialization={"std": std} if std else {},
    )


def write_opt(design: ModelConfig) -> dict[str, Any]:
    mixer, feedforward = design_parts.first_attention(design), design_parts.first_mlp(design)
    position = design.embedding.position
    config = _common.write_common(design)
    return config | {
        "max_position_embeddings": position.length if isinstance(position, LearnedConfig) else 2048,
        "init_std": config.pop("initializer_range"),
        "num_attention_heads": mixer.heads,
        "attention_dropout": mixer.dropout,
        "dropout": design.residual.dropout,
        "enable_bias": mixer.bias is True,
        "ffn_dim": feedforward.hidden,
        "activation_function": design_parts.HF_ACTIVATIONS[feedforward.activation],
        "word_embed_proj_dim": design.width,
    }


def map_opt(
    design: ModelConfig, weights: WeightMap, model: str = "model.decoder", last: tuple[str, str] = LAST
) -> None:
    """The tensor names; each is one parameter. model: the name of all but the head. last: of the last norm and head."""
    _common.map_embedding_and_head(design, weights, f"{model}.embed_tokens", f"{model}.{last[0]}", last[1])
    weights.add_module(f"{model}.embed_positions", "embed.position")
    for hf, heddle, _ in _common.named_layers(design, prefix=f"{model}.layers"):
        _common.map_attention(weights, hf, heddle, "out_proj")
        weights.add_modules(hf, heddle, OPT_LAYER)


OPT = Family("opt", "OPTForCausalLM", read_opt, write_opt, map_opt)


BIOGPT_NAMES = {
    "ffn_dim": "intermediate_size", "activation_function": "hidden_act", "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob", "init_std": "initializer_range",
}  # fmt: skip
OF_OPT = ("enable_bias", "word_embed_proj_dim", "do_layer_norm_before", "layer_norm_elementwise_affine")


def read_biogpt(config: ConfigReader) -> dict[str, Any]:
    """BioGPT (Luo et al. 2022): OPT with GELU, embeddings times the root of the width, and an embedding dropout."""
    # Its class has norms with an epsilon of 1e-5, whatever `layer_norm_eps` says.
    config.names = BIOGPT_NAMES
    config.optional("layer_norm_eps")
    for name in OF_OPT:
        config.expect(name, None)
    design = read_opt(config, "gelu", dropout=0.1, length=1024)
    design["layers"][0]["feedforward"] |= {"dropout": config.get("activation_dropout", 0.0)}
    design["embedding"] |= {"dropout": design["residual"]["dropout"]}
    if config.get("scale_embedding", True):
        design["embedding"] |= {"multiplier": design["width"] ** 0.5}
    return design


def write_biogpt(design: ModelConfig) -> dict[str, Any]:
    return _write_renamed_opt(design, BIOGPT_NAMES)


def _write_renamed_opt(design: ModelConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """The fields of OPT by other names, without the fields of its variants."""
    fields = {names.get(name, name): value for name, value in _common.without(write_opt(design), *OF_OPT).items()}
    return fields | {
        "activation_dropout": design_parts.first_mlp(design).dropout,
        "scale_embedding": design.embedding.multiplier is not None,
    }


# OPT's tensor names but for the model's, the last norm's and the head's.
map_biogpt = partial(map_opt, model="biogpt", last=("layer_norm", "output_projection"))


BIOGPT = Family("biogpt", "BioGptForCausalLM", read_biogpt, write_biogpt, map_biogpt)


XGLM_NAMES = {"hidden_size": "d_model", "num_attention_heads": "attention_heads", "num_hidden_layers": "num_layers"}
FAIRSEQ = {"kind": "sinusoidal", "layout": "halves", "offset": OPT_OFFSET, "endpoint": True}


def read_xglm(config: ConfigReader) -> dict[str, Any]:
    """XGLM (Lin et al. 2021): OPT with GELU, fairseq's sinusoidal positions, embeddings times the root of the width."""
    config.names = XGLM_NAMES
    for name in OF_OPT:
        config.expect(name, None)
    if (padding := config.data.get("pad_token_id")) is not None and padding >= OPT_OFFSET:
        raise config.invalid("pad_token_id", f"should be below {OPT_OFFSET}; the position of this id would be zero")
    activation_dropout = config.get("activation_dropout", 0.1)
    design = read_opt(config, "gelu", dropout=0.1)
    design["layers"][0]["feedforward"] |= {"dropout": activation_dropout}
    multiplier = design["width"] ** 0.5 if config.get("scale_embedding", True) else None
    dropout = design["residual"]["dropout"]
    return design | {"embedding": {"position": FAIRSEQ, "multiplier": multiplier, "dropout": dropout}}


def write_xglm(design: ModelConfig) -> dict[str, Any]:
    return _write_renamed_opt(design, XGLM_NAMES)


XGLM = Family(
    "xglm", "XGLMForCausalLM", read_xglm, write_xglm, partial(map_opt, model="model", last=("layer_norm", "lm_head")),
    ignored_tensors=("model.embed_positions.weights",),
)  # fmt: skip


CTRL_LAYER = {
    **{f"multi_head_attention.W{role}": f"mixer.{role}" for role in "qkv"}, "multi_head_attention.dense": "mixer.out",
    "ffn.0": "feedforward.up", "ffn.2": "feedforward.down", "layernorm1": "residual.norms.mixer",
    "layernorm2": "residual.norms.feedforward",
}  # fmt: skip


def read_ctrl(config: ConfigReader) -> dict[str, Any]:
    """CTRL (Keskar et al. 2019): pre-norm, sinusoidal positions, scaled embeddings, a head with a bias."""
    config.expect("layer_norm_epsilon", 1e-6, None)  # of layers, whatever it says
    config.note("attn_pdrop", "n_positions")  # of attention's dropout, which its class leaves out
    width, heads = config.require_count("n_embd", "hidden_size"), config.require_count("n_head", "num_attention_heads")
    if width % heads:
        raise config.invalid("n_embd", f"ctrl needs a multiple of its {heads} heads")
    mixer = {"kind": "attention", "heads": heads, "bias": True}
    feedforward = {"kind": "mlp", "hidden": config.require_count("dff"), "activation": "relu", "bias": True}
    layer = {"repeat": read_depth(config), "mixer": mixer, "feedforward": feedforward}
    head = {"tied": config.get("tie_word_embeddings", True), "bias": True}
    position = {"kind": "sinusoidal", "layout": "halves"}
    embedding = {"scale": True, "position": position}
    design = gpt_design(config, [layer], 0.1, residual={"kind": "pre_norm"}, embedding=embedding, head=head)
    return design | {"norm": {"kind": "layer", "eps": 1e-6}}


def write_ctrl(design: ModelConfig) -> dict[str, Any]:
    fields = _common.without(write_gpt(design), "n_inner", "activation_function", "attn_pdrop")
    return fields | {"dff": design_parts.first_mlp(design).hidden}


def map_ctrl(design: ModelConfig, weights: WeightMap) -> None:
    """The tensor names."""
    _common.map_embedding_and_head(design, weights, "transformer.w", "transformer.layernorm")
    weights.add_module("lm_head", "head")
    for hf, heddle, _ in _common.named_layers(design, prefix="transformer.h"):
        weights.add_modules(hf, heddle, CTRL_LAYER)


CTRL = Family("ctrl", "CTRLLMHeadModel", read_ctrl, write_ctrl, map_ctrl)


MPT_NAMES = {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
# Options that its class has one value for, and options of training, of devices and of features that its class lacks.
ALWAYS = {"expansion_ratio": 4, "no_bias": True, "logit_scale": None, "ffn_config": None}
OF_ATTENTION = {
    "attn_type": "multihead_attention", "clip_qkv": None, "prefix_lm": False, "qk_ln": False, "alibi": True,
    "alibi_bias_max": 8, "attn_uses_sequence_id": False, "qk_gn": False, "sliding_window_size": -1, "rope": False,
}  # fmt: skip
OF_LAYER = {
    "attn.out_proj": "mixer.out", "norm_1": "residual.norms.mixer", "norm_2": "residual.norms.feedforward",
    "ffn.up_proj": "feedforward.up", "ffn.down_proj": "feedforward.down",
}  # fmt: skip
UNUSED = (
    "emb_pdrop", "resid_pdrop", "learned_pos_emb", "init_device", "embedding_fraction", "norm_type", "verbose",
    "init_config", "tokenizer_name", "fc_type",
)  # fmt: skip


def read_mpt(config: ConfigReader) -> dict[str, Any]:
    """MPT (MosaicML 2023): ALiBi, norms and projections without biases, a feed-forward four times as wide as the model.

    Options of the original training code that transformers' class ignores are refused by name. A number of heads that
    is not a power of two is refused, since its slopes differ from heddle's.
    """
    config.names = MPT_NAMES
    _common.check_width(config)
    width, heads = config.require_count("hidden_size"), config.require_count("num_attention_heads")
    if heads & (heads - 1):
        raise config.invalid("n_heads", "should be a power of two; other numbers have slopes heddle does not build")
    config.ignore(*UNUSED)
    attention = ConfigReader(config.get("attn_config", dict[str, Any]()), f"{config.source}, attn_config")
    config.expect_all(**ALWAYS)
    attention.expect_all(**OF_ATTENTION)
    attention.optional("attn_impl")
    scale, dropout = attention.optional("softmax_scale"), attention.get("attn_pdrop", 0.0)
    attention.check_all_read()
    mixer = {"kind": "attention", "heads": heads, "scale": scale, "dropout": dropout, "position": {"kind": "alibi"}}
    return _common.design_fields(
        config,
        {"kind": "layer", "eps": config.get("layer_norm_epsilon", 1e-5), "bias": False},
        _common.same_layers(config, mixer, {"kind": "mlp", "hidden": 4 * width, "activation": "gelu"}),
        tied=True,
        residual={"kind": "pre_norm", "dropout": dropout},
    )


def write_mpt(design: ModelConfig) -> dict[str, Any]:
    mixer, fields = design_parts.first_attention(design), _common.write_common(design)
    fields["max_seq_len"] = fields.pop("max_position_embeddings")
    usual = mixer.scale == (mixer.head_dim or 1) ** -0.5
    return {MPT_NAMES.get(name, name): value for name, value in fields.items()} | {
        "n_heads": mixer.heads,
        "attn_config": {"softmax_scale": None if usual else mixer.scale, "attn_pdrop": mixer.dropout or 0},
        "layer_norm_epsilon": design_parts.norm_eps(design),
    }


def map_mpt(design: ModelConfig, weights: WeightMap) -> None:
    """The tensor names."""
    _common.map_embedding_and_head(design, weights, "transformer.wte", "transformer.norm_f")
    for hf, heddle, _ in _common.named_layers(design, prefix="transformer.blocks"):
        weights.add_module(f"{hf}.attn.Wqkv", *(f"{heddle}.mixer.{role}" for role in "qkv"))
        weights.add_modules(hf, heddle, OF_LAYER)


MPT = Family("mpt", "MptForCausalLM", read_mpt, write_mpt, map_mpt)


def read_nanochat(config: ConfigReader) -> dict[str, Any]:
    """nanochat (Karpathy 2025): RMSNorm without weights, also of embeddings and rotated heads, squared ReLU, a cap.

    Its heads are rotated in the opposite direction; exchanging the halves of every head of q and k is equivalent.
    """
    bias = config.get("attention_bias", False)
    mixer = _common.read_attention(config, qk_norm="head", norm_after_rotation=True, bias=bias)
    activation = _common.read_activation(config, default="relu2")
    feedforward = {"kind": "mlp", "hidden": config.require("intermediate_size", int), "activation": activation}
    softcap = config.get_nullable("final_logit_softcapping", 15.0)
    return _common.design_fields(
        config,
        {"kind": "rms", "eps": config.get("rms_norm_eps", 1e-6), "weight": False},
        _common.same_layers(config, mixer, feedforward),
        embedding={"norm": True},
        head={"tied": config.get("tie_word_embeddings", False), "softcap": softcap},
    )


def write_nanochat(design: ModelConfig) -> dict[str, Any]:
    return (
        _common.write_common(design)
        | _common.write_attention(design)
        | _common.written(design, "attention_bias")
        | _common.write_mlp(design)
        | _common.written(design, "rms_norm_eps")
        | {"final_logit_softcapping": design.head.softcap}
    )


def exchanged_halves(heads: int) -> TensorTransform:
    """Each head's second half of rows before its first; its own inverse."""

    def exchanged(tensor: Tensor) -> Tensor:
        rows: Tensor = tensor.unflatten(0, (heads, 2, -1)).flip(1).flatten(0, 2)
        return rows

    return TensorTransform(lambda parameters: exchanged(parameters[0]), lambda tensor, shapes: [exchanged(tensor)])


def map_nanochat(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's names of embeddings and attention; there is no norm to map."""
    mixer = design_parts.first_attention(design)
    _common.map_weights(design, weights, map_feedforward=_map_mlp)
    for hf, heddle, _ in _common.named_layers(design):
        for role, heads in (("q", mixer.heads), ("k", mixer.kv_heads or mixer.heads)):
            projections = f"{hf}.self_attn.{role}_proj", f"{heddle}.mixer.{role}"
            weights.add_module(*projections, transform=exchanged_halves(heads))


def _map_mlp(weights: WeightMap, hf: str, heddle: str) -> None:
    weights.add_modules(hf, heddle, {"fc1": "up", "fc2": "down"})


NANOCHAT = Family("nanochat", "NanoChatForCausalLM", read_nanochat, write_nanochat, map_nanochat)
