"""Read a llama.cpp GGUF as a heddle model: the families that heddle writes, with weights of any ggml type.

Quantized weights are unpacked by the package `gguf`. Tensor names and row orders are as in `export`; the orders are
undone.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from heddle.errors import CheckpointError, ConfigError
from heddle.exchange.config_reader import short_repr
from heddle.exchange.export import HFTensors
from heddle.exchange.family import Family, families
from heddle.exchange.family_match import design_from_config
from heddle.exchange.gguf.architectures import ARCHITECTURES, Architecture, gguf_tensors
from heddle.exchange.gguf.export import ROPE_FACTORS, check_package
from heddle.exchange.gguf.file import StoredTensor, read_contents
from heddle.exchange.gguf.tokenizer import read_tokenizer
from heddle.exchange.imported_checkpoint import ImportedModel
from heddle.exchange.load import load_weights
from heddle.exchange.tokenizer_files import chosen_tokenizer
from heddle.model.decoder import Decoder, build
from heddle.parts.positions.rope import RopeConfig
from heddle.parts.scalings.llama3 import Llama3Config
from heddle.progress import format_amount, print_status, progress_bar

# The keys of a GGUF as the config.json of a family. Only the graphs that heddle writes are read.


T = TypeVar("T")
Shapes = Mapping[str, tuple[int, ...]]  # of tensors, by name
PARTIAL_ROPE = ("phi2", "phi3", "gptneox")  # graphs whose RoPE may rotate some dims of a head only
# Fields that the families of these graphs do not have.
MISSING_FIELDS = {
    "phi2": ("rms_norm_eps",),
    "gpt2": ("head_dim", "intermediate_size", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "rope_theta"),
    "gptneox": ("head_dim", "num_key_value_heads", "rms_norm_eps"),
    "command-r": ("rms_norm_eps",),
    "cohere2": ("rms_norm_eps",),
    "bert": ("head_dim", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "rope_theta"),
}
GEMMA_ACTIVATION = {"hidden_activation": "gelu_pytorch_tanh"}
# Llama 3's published scalings; a GGUF holds only their factors.
LLAMA3_FACTORS = (8.0, 32.0)
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_LENGTH = 8192


class Keys:
    """Typed access to the keys. rope_factors: the factors of RoPE's frequencies, if the file has them."""

    def __init__(self, fields: Mapping[str, Any], source: str) -> None:
        self.fields, self.source = fields, source
        self.rope_factors: list[float] = []

    def get(self, name: str, default: T) -> T:
        """A key's value, or the default. Raises CheckpointError for a value of another type."""
        value: Any = self.fields.get(name, default)
        if isinstance(default, float):
            value = _decimal(value) if isinstance(value, int | float) else value
        return value if isinstance(value, type(default)) else self._refuse(name, value, type(default))

    def require(self, name: str, kind: type[T]) -> T:
        """The value of a key that must be there."""
        if name not in self.fields:
            raise CheckpointError(f"{self.source}: key '{name}' is missing; without it the model cannot be built")
        value = self.fields[name]
        return value if isinstance(value, kind) else self._refuse(name, value, kind)

    @cached_property
    def graph(self) -> str:
        """The name of its graph, with which the names of the model's keys begin."""
        return self.require("general.architecture", str)

    def of_graph(self, name: str, default: T) -> T:
        """A key of the graph, as `get`."""
        return self.get(f"{self.graph}.{name}", default)

    def number(self, name: str) -> int:
        """An integer of the graph that must be there."""
        return self.require(f"{self.graph}.{name}", int)

    @property
    def head_dim(self) -> int:
        """The head dimension: the file's, or width / heads."""
        width, heads = self.number("embedding_length"), self.number("attention.head_count")
        return self.of_graph("attention.key_length", width // max(heads, 1))

    def _refuse(self, name: str, value: Any, kind: type) -> Any:
        raise CheckpointError(f"{self.source}: key '{name}' is {short_repr(value)}; should be of type {kind.__name__}")


def _decimal(value: float) -> Any:
    """A float32 as the shortest decimal number that rounds to it."""
    return float(str(np.float32(value)))


def config_from_keys(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    """The config.json, with its model_type. Raises ConfigError for a graph that heddle does not read."""
    if keys.graph not in ARCHITECTURE_FIELDS:
        known = ", ".join(ARCHITECTURE_FIELDS)
        raise ConfigError(
            f"{keys.source}: its architecture {short_repr(keys.graph)} is not supported; heddle reads {known}"
        )
    config = _common_fields(keys, shapes) | ARCHITECTURE_FIELDS[keys.graph](keys, shapes)
    missing = MISSING_FIELDS.get(keys.graph, ())
    return {name: value for name, value in config.items() if name not in missing}


def _common_fields(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    graph, head_dim, heads = keys.graph, keys.head_dim, keys.number("attention.head_count")
    for name in ("attention.value_length", *(() if graph in PARTIAL_ROPE else ("rope.dimension_count",))):
        if keys.of_graph(name, head_dim) != head_dim:
            raise ConfigError(f"{keys.source}: key '{graph}.{name}' should be key_length = {head_dim}")
    theta = keys.of_graph("rope.freq_base", 10000.0)
    return {
        "vocab_size": shapes.get("token_embd.weight", (0,))[0],
        "hidden_size": keys.number("embedding_length"),
        "num_hidden_layers": keys.number("block_count"),
        "intermediate_size": keys.number("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.of_graph("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.of_graph("attention.layer_norm_rms_epsilon", 1e-5),
        "max_position_embeddings": keys.of_graph("context_length", 2048),
        "tie_word_embeddings": "output.weight" not in shapes,
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta} | _scaling(keys, theta, head_dim),
    }


def _scaling(keys: Keys, theta: float, head_dim: int) -> dict[str, Any]:
    kind = keys.of_graph("rope.scaling.type", "none")
    if keys.rope_factors:
        return _llama3(keys, theta, head_dim)
    if kind == "none":
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        name = f"{keys.graph}.rope.scaling.type"
        raise ConfigError(f"{keys.source}: key '{name}' is {kind!r}; heddle reads linear and yarn")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": keys.of_graph("rope.scaling.factor", 1.0)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = keys.number("rope.scaling.original_context_length")
    return scaling


def _llama3(keys: Keys, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling, found by its factors. Raises ConfigError if no published one has them."""
    plain = RopeConfig(base=theta, rotary_dim=head_dim)
    unscaled = plain.build(head_dim).scaled_frequencies(1).inv_freq
    for factor in LLAMA3_FACTORS:
        scaling = Llama3Config(factor=factor, original_length=LLAMA3_LENGTH, **LLAMA3)
        scaled = plain.replace(scaling=scaling).build(head_dim).scaled_frequencies(1).inv_freq
        factors = [float(a / b) for a, b in zip(unscaled, scaled, strict=True)]
        same = len(factors) == len(keys.rope_factors)
        if same and all(math.isclose(*pair, rel_tol=1e-5) for pair in zip(factors, keys.rope_factors, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "original_max_position_embeddings": LLAMA3_LENGTH,
                **LLAMA3,
            }
    raise ConfigError(f"{keys.source}: its RoPE factors match no published Llama 3; import the original folder")


def _biases(shapes: Shapes) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in shapes, "mlp_bias": "blk.0.ffn_down.bias" in shapes}


def _llama(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    experts = keys.of_graph("expert_count", 0)
    if not experts:
        return {"model_type": "llama", **_biases(shapes)}
    used = keys.number("expert_used_count")
    return {"model_type": "mixtral", "num_local_experts": experts, "num_experts_per_tok": used}


def _experts(keys: Keys, renormalized: bool) -> dict[str, Any]:
    numbers = {"num_experts": keys.number("expert_count"), "num_experts_per_tok": keys.number("expert_used_count")}
    return numbers | {"norm_topk_prob": renormalized}


def _qwen3_moe(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    experts = _experts(keys, True)
    return {"model_type": "qwen3_moe", **experts, "moe_intermediate_size": keys.number("expert_feed_forward_length")}


def _qwen2_moe(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    return {
        "model_type": "qwen2_moe",
        **_experts(keys, False),
        "moe_intermediate_size": keys.number("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.number("expert_shared_feed_forward_length"),
    }


def _olmoe(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    return {"model_type": "olmoe", **_experts(keys, False), "attention_bias": False}


def _gemma(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    return {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh", **GEMMA_ACTIVATION}


def _query_scale(keys: Keys, depth: int) -> dict[str, Any]:
    """Gemma's score scale: by head_dim, in the largest models by width / heads."""
    is_largest = keys.number("block_count") == depth
    dim = keys.number("embedding_length") // keys.number("attention.head_count") if is_largest else keys.head_dim
    return {"query_pre_attn_scalar": dim, "sliding_window": keys.of_graph("attention.sliding_window", 4096)}


def _gemma2(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    caps = {name: keys.of_graph(name, default) for name, default in caps.items()}
    return {"model_type": "gemma2", **GEMMA_ACTIVATION, **_query_scale(keys, 46), **caps}


def _ropes(keys: Keys, theta: float, sliding_theta: float) -> dict[str, Any]:
    """The RoPEs of layers without and with a window; the thetas are the defaults."""
    head_dim = keys.number("attention.key_length")
    theta, sliding = keys.of_graph("rope.freq_base", theta), keys.of_graph("rope.freq_base_swa", sliding_theta)
    full = {"rope_theta": theta} | _scaling(keys, theta, head_dim)
    tables = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": sliding}}
    return {"rope_parameters": tables, "rope_theta": None}


def _gemma3(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    cap = {"final_logit_softcapping": keys.fields.get(f"{keys.graph}.final_logit_softcapping")}
    return {"model_type": "gemma3_text", **GEMMA_ACTIVATION, **_query_scale(keys, 62), **cap, **_ropes(keys, 1e6, 1e4)}


def _olmo2(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    window = keys.of_graph("attention.sliding_window", 0)
    if not window:
        return {"model_type": "olmo2"}
    theta = keys.of_graph("rope.freq_base", 500000.0)
    return {"model_type": "olmo3", "sliding_window": window, **_ropes(keys, theta, theta)}


def _rotary_factor(keys: Keys) -> float:
    """The share of the dims of a head that RoPE rotates."""
    return keys.of_graph("rope.dimension_count", keys.head_dim) / max(keys.head_dim, 1)


def _layer_norm_eps(keys: Keys, default: float = 1e-5) -> float:
    return keys.of_graph("attention.layer_norm_epsilon", default)


def _phi3(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    return {"model_type": "phi3", "partial_rotary_factor": _rotary_factor(keys), "sliding_window": None}


def _phi(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    numbers = {"partial_rotary_factor": _rotary_factor(keys), "layer_norm_eps": _layer_norm_eps(keys)}
    return {"model_type": "phi", **numbers, "hidden_act": "gelu_new"}


def _gpt2(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    numbers = {"n_inner": keys.number("feed_forward_length"), "layer_norm_epsilon": _layer_norm_eps(keys)}
    return {"model_type": "gpt2", **numbers, "activation_function": "gelu_new"}


def _gpt_neox(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    return {
        "model_type": "gpt_neox",
        "rotary_pct": _rotary_factor(keys),
        "rotary_emb_base": keys.of_graph("rope.freq_base", 10000.0),
        "layer_norm_eps": _layer_norm_eps(keys),
        "hidden_act": "gelu_pytorch_tanh",
        "use_parallel_residual": keys.of_graph("use_parallel_residual", True),
    }


def _cohere(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    numbers = {"logit_scale": keys.of_graph("logit_scale", 0.0625), "layer_norm_eps": _layer_norm_eps(keys)}
    if keys.graph == "command-r":
        return {"model_type": "cohere", **numbers}
    return {"model_type": "cohere2", **numbers, "sliding_window": keys.number("attention.sliding_window")}


def _bert(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    return {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "hidden_act": "gelu",
        "layer_norm_eps": _layer_norm_eps(keys, 1e-12),
        "max_position_embeddings": shapes.get("position_embd.weight", (512,))[0],
        "type_vocab_size": shapes.get("token_types.weight", (2,))[0],
    }


ARCHITECTURE_FIELDS: dict[str, Callable[[Keys, Shapes], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": lambda keys, shapes: {"model_type": "qwen2"},
    "qwen3": lambda keys, shapes: {"model_type": "qwen3", "attention_bias": False},
    "qwen3moe": _qwen3_moe,
    "qwen2moe": _qwen2_moe,
    "olmoe": _olmoe,
    "ernie4_5": lambda keys, shapes: {"model_type": "ernie4_5", "use_bias": False},
    "hunyuan-dense": lambda keys, shapes: {"model_type": "hunyuan_v1_dense", "attention_bias": False},
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "olmo2": _olmo2,
    "smollm3": lambda keys, shapes: {"model_type": "smollm3"},
    "phi3": _phi3,
    "phi2": _phi,
    "gpt2": _gpt2,
    "gptneox": _gpt_neox,
    "command-r": _cohere,
    "cohere2": _cohere,
    "bert": _bert,
}


FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_gguf(
    file: str | Path,
    dequantize: torch.dtype | None = None,
    allow_non_finite: bool = False,
    tokenizer_file: Path | None = None,
) -> ImportedModel:
    """Read a GGUF. All weights get one dtype: the embedding's, or `dequantize`, which quantized ones need.

    tokenizer_file: a tokenizer.json in place of the file's own tokenizer, read with the files beside it.

    Raises CheckpointError and ConfigError with one sentence that names the key or tensor that is missing, altered or
    not supported.
    """
    check_package()
    source = GGUFFile(Path(file), dequantize)
    family = families()[source.config.pop("model_type")]
    model = build(design_from_config(source.config, family, str(file)), device="meta")
    source.plan(family, model)
    load_weights(model, family, source, None, allow_non_finite)
    rows = model.embed.weight.shape[0]
    if tokenizer_file is None:
        tokenizer = read_tokenizer(source.keys, rows, str(file))
        text_files = {} if tokenizer is None else dict(tokenizer.companion_files)
    else:
        tokenizer, text_files = chosen_tokenizer(tokenizer_file, rows)
    lengths = {"max_position_embeddings": source.config["max_position_embeddings"]}
    model.imported_config = lengths | {"model_type": family.model_type}
    return ImportedModel(model.eval(), tokenizer, text_files)


class GGUFFile:
    """The tensors of a GGUF by their names in a family."""

    def __init__(self, file: Path, dequantize: torch.dtype | None) -> None:
        self.folder, self.file, self.dequantize = file.parent, file, dequantize
        self.ignored_tensors: tuple[str, ...] = (ROPE_FACTORS,)
        self._read()
        shapes = {name: tensor.shape for name, tensor in self.tensors_by_name.items()}
        self.config = config_from_keys(self.keys, shapes)

    def _read(self) -> None:
        contents = read_contents(self.file)
        self.keys, self.tensors_by_name = Keys(contents.keys, str(self.file)), contents.tensors
        self._check_kind()
        if ROPE_FACTORS in self.tensors_by_name:
            self.keys.rope_factors = self._values(self.tensors_by_name[ROPE_FACTORS]).flatten().tolist()

    def _check_kind(self) -> None:
        """Raises ConfigError for a file that is not a whole model."""
        kind, parts = self.keys.get("general.type", "model"), self.keys.get("split.count", 1)
        if kind != "model":
            raise ConfigError(f"{self.file}: is {kind} ('general.type'), not a model; import the model's own GGUF")
        if parts > 1:
            part = self.keys.get("split.no", 0) + 1
            remedy = "merge the parts with `llama-gguf-split --merge`"
            raise ConfigError(f"{self.file}: is part {part} of {parts}; {remedy}")

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of all weights. Raises ConfigError if some are quantized and `dequantize` is None."""
        packed = sorted({tensor.kind for tensor in self.tensors_by_name.values()} - FLOAT_DTYPES.keys())
        if self.dequantize is None and packed:
            remedy = "unpack them with `--dequantize bf16`"
            raise ConfigError(f"{self.file}: holds quantized weights ({', '.join(packed)}); {remedy}")
        embedding = self.tensors_by_name.get("token_embd.weight")
        return self.dequantize or FLOAT_DTYPES["F32" if embedding is None else embedding.kind]

    def plan(self, family: Family, model: Decoder) -> None:
        """Map the tensors of the file to the family's."""
        graph: Architecture = ARCHITECTURES[family.model_type]
        tensors = HFTensors(family, model)
        self._plan = {spec.name: spec for spec in gguf_tensors(tensors, self.config, graph, self.dtype)}

    def tensor_specs(self) -> Iterable[str]:
        """The names of the family's tensors that the file holds."""
        return {name for spec in self._plan.values() for name in spec.hf_names}

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (file, the family's name, tensor) for every tensor; an unknown one keeps its own name."""
        stored = sum(tensor.data.nbytes for tensor in self.tensors_by_name.values())
        numbers, packed = 0, set[str]()
        with progress_bar("reading", stored, "bytes") as progress:
            for name, tensor in self.tensors_by_name.items():
                values = self._values(tensor)
                numbers += values.numel()
                packed |= {tensor.kind} - FLOAT_DTYPES.keys()
                spec = self._plan.get(name)
                if spec is None:
                    yield self.file.name, name, values
                    continue
                parts = list(values) if len(spec.hf_names) > 1 or values.dim() == 3 else [values]
                for hf_name, part in zip(spec.hf_names, parts, strict=False):
                    has_shape = part.shape == spec.shape[len(spec.shape) - part.dim() :]
                    whole = spec.restore(part) if has_shape else part
                    yield self.file.name, hf_name, whole.to(self.dtype).contiguous()
                progress.advance(tensor.data.nbytes)
        if packed:
            sizes = [format_amount(size, "bytes") for size in (stored, numbers * self.dtype.itemsize)]
            dtype = str(self.dtype).removeprefix("torch.")
            print_status(f"dequantized: {', '.join(sorted(packed))}, {sizes[0]}, to {dtype}, {sizes[1]}")

    def _values(self, tensor: StoredTensor) -> Tensor:
        """The numbers of a tensor, float32."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            return torch.from_numpy(dequantize(tensor.data, GGMLQuantizationType[tensor.kind]).copy())
        except (RuntimeError, ValueError) as error:
            reason = f"tensor '{tensor.name}' of type {tensor.kind} cannot be unpacked"
            raise CheckpointError(f"{self.file}: {reason}") from error
