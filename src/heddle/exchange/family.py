"""A family of Hugging Face models: functions between its config.json and a heddle design, and a map of the weights."""

import importlib
import itertools
import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.exchange.config_reader import ConfigReader, short_repr
from heddle.exchange.dequantized_folder import packing_of
from heddle.model.config import MAX_LAYERS, ModelConfig, MultiTokenConfig

# How the parameters of a heddle model correspond to the tensors of a Hugging Face checkpoint, in both directions.
#
# A rule says that one Hugging Face tensor is made of one or more heddle parameters: concatenated, transposed or
# interleaved. Rules only move numbers, so every tensor keeps its bits in both directions. A Hugging Face tensor is
# always made of whole parameters, or of slices along their first dimension (one expert of a stacked weight, or the
# channels of q in a convolution of q, k and v).


# A parameter's name, or (name, index) or (name, slice with both ends) along its first dimension.
ParameterRef = str | tuple[str, int | slice]


class TensorTransform(NamedTuple):
    """join: heddle parameters -> Hugging Face tensor. split: the inverse, given the shapes of the parameters.

    whole_numbers: the Hugging Face tensor is of int64, and the parameter of float32.
    """

    join: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[Tensor, Sequence[torch.Size]], Sequence[Tensor]]
    whole_numbers: bool = False


def _concatenate(parameters: Sequence[Tensor]) -> Tensor:
    return parameters[0] if len(parameters) == 1 else torch.cat(list(parameters))


def _split(tensor: Tensor, shapes: Sequence[torch.Size]) -> Sequence[Tensor]:
    return [tensor] if len(shapes) == 1 else tensor.split([shape[0] for shape in shapes])


def _transpose_matrix(x: Tensor) -> Tensor:
    return x.T if x.dim() == 2 else x


# Concatenated along the outputs; a single parameter is taken as it is.
CONCATENATED = TensorTransform(_concatenate, _split)
# The same, for a matrix stored as [inputs, outputs], as in GPT-2's Conv1D.
TRANSPOSED = TensorTransform(
    lambda parameters: _transpose_matrix(_concatenate(parameters)),
    lambda tensor, shapes: _split(_transpose_matrix(tensor), shapes),
)
# Stacks of matrices [experts, outputs, inputs], concatenated along the outputs.
STACKED = TensorTransform(
    lambda parameters: torch.cat(list(parameters), dim=1),
    lambda tensor, shapes: tensor.split([shape[1] for shape in shapes], dim=1),
)
# The same, of matrices [experts, inputs, outputs].
STACKED_TRANSPOSED = TensorTransform(
    lambda parameters: torch.cat(list(parameters), dim=1).mT,
    lambda tensor, shapes: tensor.mT.split([shape[1] for shape in shapes], dim=1),
)
# The weight of a depthwise convolution, stored as [channels, 1, kernel].
DEPTHWISE_CONV = TensorTransform(
    lambda parameters: parameters[0].unsqueeze(1), lambda tensor, shapes: [tensor.squeeze(1)]
)


def reshaped(*shape: int) -> TensorTransform:
    """One parameter in another shape, of which one size may be −1."""
    return TensorTransform(
        lambda parameters: parameters[0].reshape(shape), lambda tensor, shapes: [tensor.reshape(shapes[0])]
    )


def interleaved_by_group(groups: int) -> TensorTransform:
    """Concatenated group by group: the outputs of every parameter for group 0, then those for group 1, …"""

    def join(parameters: Sequence[Tensor]) -> Tensor:
        return torch.cat([parameter.unflatten(0, (groups, -1)) for parameter in parameters], dim=1).flatten(0, 1)

    def split(tensor: Tensor, shapes: Sequence[torch.Size]) -> Sequence[Tensor]:
        sizes = [shape[0] // groups for shape in shapes]
        return [part.flatten(0, 1) for part in tensor.unflatten(0, (groups, -1)).split(sizes, dim=1)]

    return TensorTransform(join, split)


@dataclass(frozen=True)
class TensorRule:
    """The Hugging Face tensor `hf_name` is made of `parameters` by `transform`."""

    hf_name: str
    parameters: tuple[ParameterRef, ...]
    transform: TensorTransform


class WeightMap:
    """The rules of one model, by Hugging Face name. A family's `map_weights` adds them.

    shapes: the shape of every parameter of the heddle model. copies: tensors that repeat a parameter, which another
    rule reads; an export writes them. constants: tensors that follow from the config; a file may hold these values.
    """

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self.shapes = shapes
        self.rules: dict[str, TensorRule] = {}
        self.copies: dict[str, str] = {}
        self.alternatives: dict[str, tuple[TensorRule, tuple[str, ...]]] = {}
        self.parts: dict[str, str] = {}
        self.constants: dict[str, list[int]] = {}

    def add_tensor(self, hf_name: str, *parameters: ParameterRef, transform: TensorTransform = CONCATENATED) -> None:
        """Add the rule for one tensor. Does nothing if the model has no such parameter."""
        if parameter_name(parameters[0]) in self.shapes:
            self.rules[hf_name] = TensorRule(hf_name, parameters, transform)

    def add_module(self, hf_module: str, *modules: ParameterRef, transform: TensorTransform = CONCATENATED) -> None:
        """Add the rules for the weight and the bias of a module, those that the model has, or for a tensor."""
        for suffix in (".weight", ".bias", ""):
            names = [
                module + suffix if isinstance(module, str) else (module[0] + suffix, module[1]) for module in modules
            ]
            self.add_tensor(hf_module + suffix, *names, transform=transform)

    def add_modules(self, hf: str, heddle: str, names: Mapping[str, str]) -> None:
        """Add the rules for modules below `hf` and `heddle`. names: Hugging Face's -> heddle's."""
        for hf_name, name in names.items():
            self.add_module(f"{hf}.{hf_name}", f"{heddle}.{name}")

    def add_alternative(
        self, hf_name: str, *parameters: ParameterRef, transform: TensorTransform, replace: Sequence[str]
    ) -> None:
        """Add the rule for one tensor that some files have in place of the tensors `replace`."""
        self.alternatives[hf_name] = TensorRule(hf_name, parameters, transform), tuple(replace)

    def add_renamed(self, hf_name: str, published_name: str) -> None:
        """Add the rule for a tensor that has another name than `published_name` in some files."""
        rule = self.rules[published_name]
        self.add_alternative(hf_name, *rule.parameters, transform=rule.transform, replace=[published_name])

    def add_parts(self, hf_name: str, parameter: str) -> None:
        """Add the rules for one parameter whose rows a file has in any number of tensors; {part} stands for theirs.

        All but the last have equally many rows. An export writes one tensor.
        """
        self.add_tensor(hf_name.format(part=0), parameter)
        if parameter in self.shapes:
            self.parts[hf_name] = parameter

    def use_alternatives(self, names: Container[str]) -> None:
        """Use the alternatives that a file holds in place of the tensors that they replace, and its parts."""
        for hf_name, parameter in self.parts.items():
            count = next(part for part in itertools.count() if hf_name.format(part=part) not in names)
            rows = self.shapes[parameter][0]
            for part in range(count if count > 1 else 0):
                size = -(-rows // count)
                own = slice(min(part * size, rows), min((part + 1) * size, rows))
                self.add_tensor(hf_name.format(part=part), (parameter, own))
        present = [hf_name for hf_name in self.alternatives if hf_name in names]
        replaced = {name for hf_name in present for name in self.alternatives[hf_name][1]}
        self.rules = {name: rule for name, rule in self.rules.items() if name not in replaced}
        self.rules |= {hf_name: self.alternatives[hf_name][0] for hf_name in present}

    def parameter_shapes(self, rule: TensorRule) -> list[torch.Size]:
        """The shapes of the parameters, or slices of parameters, of a rule."""
        return [self._shape(ref) for ref in rule.parameters]

    def _shape(self, ref: ParameterRef) -> torch.Size:
        if isinstance(ref, str):
            return self.shapes[ref]
        name, rows = ref
        shape = self.shapes[name][1:]
        return shape if isinstance(rows, int) else torch.Size([rows.stop - rows.start, *shape])

    def hf_shape(self, rule: TensorRule) -> torch.Size:
        """The shape of a rule's Hugging Face tensor."""
        return rule.transform.join([torch.empty(shape, device="meta") for shape in self.parameter_shapes(rule)]).shape

    def unmapped_parameters(self) -> list[str]:
        """The parameters that the rules do not cover completely."""
        covered: dict[str, int] = dict.fromkeys(self.shapes, 0)
        for rule in self.rules.values():
            for ref, shape in zip(rule.parameters, self.parameter_shapes(rule), strict=True):
                covered[parameter_name(ref)] += shape.numel()
        return [name for name, shape in self.shapes.items() if covered[name] != shape.numel()]


def parameter_name(ref: ParameterRef) -> str:
    """The name of the parameter that a reference points to."""
    return ref if isinstance(ref, str) else ref[0]


@dataclass(frozen=True)
class ModuleNames:
    """A family's names of its multi-token modules, which compute the same as heddle's (`model/multi_token.py`).

    count_field: the field of config.json with their number. prefix, layer: what the names of a module's tensors, and of
    its layer's, begin with; {layer} stands for the number of the model's layers and the modules before it. parts: names
    of its other parts below `prefix`, with heddle's. copies: tensors below it that repeat the model's embedding or
    head. fits: whether the last layer of a design is of the kind that the family's modules have. most: how many a file
    holds.
    """

    count_field: str
    prefix: str
    layer: str
    parts: Mapping[str, str]
    fits: Callable[[ModelConfig], bool]
    copies: Mapping[str, str] = field(default_factory=dict)
    most: int = MAX_LAYERS

    def prefixes(self, design: ModelConfig) -> list[str]:
        """The prefix of each module of a design."""
        depth = 0 if design.multi_token is None else design.multi_token.depth
        return [self.prefix.format(layer=design.depth + index) for index in range(depth)]

    def layers(self, design: ModelConfig) -> list[tuple[str, str]]:
        """The names of each module's layer, the family's and heddle's."""
        return [
            (self.layer.format(layer=design.depth + index), f"multi_token.{index}.layer")
            for index, _ in enumerate(self.prefixes(design))
        ]

    def map_parts(self, design: ModelConfig, weights: WeightMap) -> None:
        """Add the rules of each module for all but its layer."""
        for index, prefix in enumerate(self.prefixes(design)):
            for hf, heddle in self.parts.items():
                weights.add_module(f"{prefix}.{hf}", f"multi_token.{index}.{heddle}")
            for hf, heddle in self.copies.items():
                weights.copies[f"{prefix}.{hf}.weight"] = f"{'embed' if design.head.tied else heddle}.weight"

    def fitting(self, design: ModelConfig) -> MultiTokenConfig | None:
        """The modules of a design if it has some and the family can have them."""
        modules = design.multi_token
        return modules if modules is not None and modules.depth <= self.most and self.fits(design) else None


FAMILIES_FOLDER = Path(__file__).parent / "families"
NOT_READ_FILE = Path(__file__).parent / "not_read.json"
# By model_type: what its class computes with where a config lacks a field, if readers would take another value.
ABSENT: dict[str, dict[str, Any]] = {
    **{
        name: {"num_key_value_heads": heads}
        for heads, names in {
            2: "ernie4_5 glm glm4 internlm3",
            4: "flint gemma2 gemma3_text granite_swa kolibri1 lfm3 mellum minimax_m3_vl_text smollm3 vaultgemma",
            8: "cwm emu3_text_model gpt_oss hy_v3 iquestcoder lfm2 lfm2_moe llama4_text ministral ministral3 mistral"
            " phimoe seed_oss",
            16: "gemma qwen2_moe",
            20: "helium",
            32: "dots1 qwen2 qwen3",
        }.items()
        for name in names.split()
    },
    **{name: {"n_group": 8, "topk_group": 4} for name in ("axk1", "deepseek_v3", "deepseek_v32")},
    "xlm-roberta-xl": {"layer_norm_eps": 1e-5, "type_vocab_size": 1},
}
ABSENT["gpt_oss"]["head_dim"] = 64
ABSENT["glm"]["head_dim"] = ABSENT["glm4"]["head_dim"] = 128
ABSENT["internlm3"]["rms_norm_eps"] = ABSENT["iquestcoder"]["rms_norm_eps"] = 1e-5
OTHER_NAMES = {"kimi_k2": "deepseek_v3"}  # of published files; their class is that of the second


@dataclass(frozen=True)
class Family:
    """One model_type of transformers.

    read_config: config.json -> the plain data of a design. It must read every field that changes what is computed.
    write_config: a resolved design -> the nearest config.json of this family. It must not fail: features that the
    family cannot express are found by reading the result back and comparing the two designs. map_weights: adds the
    rules between the family's tensors and the model's parameters. ignored_tensors: prefixes of tensor names that heddle
    skips with a notice; {depth} stands for the number of layers, * for anything. zeros_if_absent: patterns of tensors
    that are zeros where a file lacks them. priority: if several families match a design exactly, the one with the
    lowest number is used. documents: text files that an export writes beside the weights, by name. multi_token: the
    names of its multi-token modules, if heddle reads them. Modules in a file are read whatever its config says.
    """

    model_type: str
    architecture: str
    read_config: Callable[[ConfigReader], dict[str, Any]]
    write_config: Callable[[ModelConfig], dict[str, Any]]
    map_weights: Callable[[ModelConfig, WeightMap], None]
    ignored_tensors: tuple[str, ...] = ()
    zeros_if_absent: tuple[str, ...] = ()
    priority: int = 100
    documents: Mapping[str, str] = field(default_factory=dict)
    multi_token: ModuleNames | None = None


@cache
def families() -> Mapping[str, Family]:
    """Every family by its model_type, in order of priority: each module-level `Family` in `families/`."""
    names = sorted(file.stem for file in FAMILIES_FOLDER.glob("*.py") if not file.stem.startswith("_"))
    files = [importlib.import_module(f"heddle.exchange.families.{name}") for name in names]
    result = [value for file in files for value in vars(file).values() if isinstance(value, Family)]
    result.sort(key=lambda family: (family.priority, family.model_type))
    return {family.model_type: family for family in result}


@cache
def missing_parts() -> Mapping[str, str]:
    """For each other causal model_type of transformers, the part that heddle lacks; "" if no part is missing."""
    needs: dict[str, str] = json.loads(NOT_READ_FILE.read_text(encoding="utf-8"))["needs"]
    return needs


def family_of(config: Mapping[str, Any], source: str) -> Family:
    """The family that a config.json names by its model_type, or in the oldest files by its class.

    Raises ConfigError for a model_type that heddle does not read, and for quantized weights.
    """
    model_type = config.get("model_type")
    if "model_type" not in config:
        classes = {family.architecture: name for name, family in reversed([*families().items()])}
        match config.get("architectures"):
            case [str(architecture)]:
                model_type = classes.get(architecture)
    if isinstance(model_type, str):
        model_type = OTHER_NAMES.get(model_type, model_type)
    if not isinstance(model_type, str) or model_type not in families():
        if model_type is None and "layers" in config:
            raise ConfigError(
                f"{source}: is a design of heddle's, which needs no import; use its folder as it is: heddle.load"
            )
        if isinstance(model_type, str) and model_type in missing_parts():
            missing = missing_parts()[model_type]
            why = f"it needs {missing}, which heddle lacks" if missing else "no family supports it yet"
            raise ConfigError(f"{source}: model_type {model_type!r} is not supported; {why}")
        near = get_close_matches(model_type[:40], families(), n=1) if isinstance(model_type, str) else []
        question = f"did you mean {near[0]!r}? " if near else ""
        code = "; the code that 'auto_map' names is never run" if config.get("auto_map") else ""
        raise ConfigError(
            f"{source}: model_type {short_repr(model_type)} is not supported; {question}"
            f"heddle reads the {len(families())} families of docs/huggingface/families.md{code}"
        )
    for field_name in ("quantization_config", "quantization"):  # transformers, MLX
        quantization = config.get(field_name)
        if quantization is not None:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            is_known = isinstance(quantization, dict) and packing_of(quantization) is not None
            unpack = "unpack them with `--dequantize bf16`, or " if is_known else "heddle does not unpack these; "
            raise ConfigError(
                f"{source}: field '{field_name}' says the weights are quantized ({short_repr(method)});"
                f" {unpack}import the unquantized model, or remove the field if the weights are plain"
            )
    return families()[model_type]
