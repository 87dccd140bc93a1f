"""Load a Hugging Face folder as a heddle model: read config.json field by field, then place the tensors one by one."""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from heddle.config import parse_config
from heddle.errors import CheckpointError, ConfigError
from heddle.exchange.config_reader import ConfigReader, list_fields
from heddle.exchange.dequantized_folder import DESCRIPTION, DequantizedFolder
from heddle.exchange.family import Family, ModuleNames, TensorRule, WeightMap, family_of, parameter_name
from heddle.exchange.family_match import design_from_config, differences
from heddle.exchange.imported_checkpoint import ImportedModel
from heddle.exchange.safetensors_folder import CONFIG_FILE, IGNORED_TENSORS, SafetensorsFolder, head_remedy
from heddle.exchange.tokenizer_files import chosen_tokenizer, read_tokenizer_files
from heddle.model.config import ModelConfig, MultiTokenConfig
from heddle.model.decoder import Decoder, build
from heddle.model.initialization import set_parameter, storage_dtype
from heddle.progress import print_status
from heddle.tokenization.tokenizer import Tokenizer

TensorSpec = tuple[str, torch.dtype, tuple[int, ...]]  # file, dtype and shape
ABSENT: TensorSpec = ("", torch.float32, ())
EMBEDDING, HEAD_WEIGHT = "embed.weight", "head.weight"
HF_HEAD_WEIGHTS = (
    "lm_head.weight", "embed_out.weight", "cls.predictions.decoder.weight", "lm_head.decoder.weight", "decoder.weight",
)  # fmt: skip
# Words that wrappers insert into tensor names: torch.compile, data parallelism, FSDP, checkpointing.
WRAPPERS = ("_orig_mod", "module", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
MODULES_FILE = "modules.json"  # of sentence-transformers
# Suffixes of tensors that are left over where quantized weights were loaded and saved again.
QUANTIZATION_LEFTOVERS = (
    ".qweight", ".qzeros", ".g_idx", ".scales", ".weight_scale", ".weight_scale_inv", ".input_scale", ".SCB",
    ".weight_format", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".zero_point", ".weight_packed",
    ".weight_scale_2", ".weight_global_scale", ".weight_shape", ".weight_g_idx", ".weight_zero_point",
    ".input_global_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".act_scales", ".wscale",
    ".weight_scales", ".scale",
)  # fmt: skip
# Words in the names of tensors that an adapter adds, or puts in the place of a weight.
ADAPTER_WORDS = {
    "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "base_layer", "ia3_l",
    "modules_to_save", "original_module", "hada_w1_a", "lokr_w1", "vera_lambda_b", "oft_r",
}  # fmt: skip


def load(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    dequantize: torch.dtype | None = None,
    allow_non_finite: bool = False,
    tokenizer_file: Path | None = None,
) -> ImportedModel:
    """Read a folder that transformers or `heddle export` wrote. dtype None keeps the dtype of each tensor.

    dequantize: the dtype to unpack quantized weights to (see `dequantized_folder`); None: they are refused.
    allow_non_finite: whether weights may hold Inf and NaN. tokenizer_file: a
    tokenizer.json in place of the folder's, read with the files beside it.
    Peak memory is the model plus one tensor. Raises CheckpointError and ConfigError with one sentence that names the
    file, tensor or field that is missing, altered, unknown or not supported.
    """
    path = Path(folder)
    checkpoint = SafetensorsFolder(path) if dequantize is None else DequantizedFolder(path, dequantize)
    source = str(checkpoint.folder / CONFIG_FILE)
    family = family_of(checkpoint.config, source)
    noted: list[str] = []
    try:
        design = folder_design(checkpoint, family, source, noted)
        _print_notes(noted, family, source)
        if (modules := path / MODULES_FILE).is_file():
            print_status(f"noted: {modules}: what follows the transformer, such as pooling, is not read")
        design = with_stored_modules(design, family, checkpoint)
        model = build(design, device="meta")
    except (RuntimeError, OverflowError) as error:  # torch counts bytes in 63 bits
        raise ConfigError(f"{source}: asks for tensors larger than any machine holds; restore the file") from error
    load_weights(model, family, checkpoint, dtype, allow_non_finite)
    tokenizer, text_files = _tokenizer_of(checkpoint, model, tokenizer_file)
    model.imported_config = ConfigReader(checkpoint.config).preserved() | {"model_type": family.model_type}
    return ImportedModel(model.eval(), tokenizer, text_files)


def _tokenizer_of(
    checkpoint: SafetensorsFolder, model: Decoder, tokenizer_file: Path | None
) -> tuple[Tokenizer | None, dict[str, str]]:
    rows = model.embed.weight.shape[0]
    if tokenizer_file is not None:
        return chosen_tokenizer(tokenizer_file, rows)
    folder = checkpoint.folder
    return read_tokenizer_files(folder, rows, lambda path: checkpoint.read_text(path.name), checkpoint.config)


def _print_notes(noted: list[str], family: Family, source: str) -> None:
    """Print which fields of a config.json are set but change nothing."""
    others = [name for name in noted if name != "auto_map"]
    if len(others) < len(noted):
        print_status(f"noted: {source}: the code that 'auto_map' names is never run; read as {family.model_type}")
    if others:
        changes = "changes" if len(others) == 1 else "change"
        print_status(f"noted: {source}: {list_fields(others)} {changes} nothing that the model computes")


def original_design(
    config: Mapping[str, Any], family: Family, source: str, noted: list[str] | None = None
) -> ModelConfig:
    """The design that an export stored in config.json if it still agrees with the fields, else the fields' design.

    noted: as in `design_from_config`.
    """
    design = design_from_config(dict(config), family, source, noted)
    heddle_fields = config.get("heddle")
    if isinstance(heddle_fields, dict) and isinstance(heddle_fields.get("design"), dict):
        stored = parse_config(ModelConfig, heddle_fields["design"])
        bare = stored if family.multi_token is None else stored.replace(multi_token=None)
        if not differences(bare, design):
            return stored
        print_status(f"warning: {source}: was changed after the export, so the design stored in it is not used")
    return design


def folder_design(
    checkpoint: SafetensorsFolder, family: Family, source: str, noted: list[str] | None = None
) -> ModelConfig:
    """`original_design` of a folder. A masked language model whose head is not there is read as its base class.

    Sentence encoders are trained without the head, and keep the config of the model that they began as.
    """
    design = original_design(checkpoint.config, family, source, noted)
    base = family.architecture.replace("ForMaskedLM", "Model")
    if base == family.architecture or checkpoint.config.get("architectures") not in (None, [family.architecture]):
        return design
    config = checkpoint.config | {"architectures": [base]}
    headless, weight_map = (
        original_design(config, family, source),
        build_weight_map(family, build(design, device="meta")),
    )
    own = stored_names(weight_map, checkpoint.tensor_specs(), checkpoint.label)
    for rule in weight_map.rules.values():
        if parameter_name(rule.parameters[0]).startswith("head.") and rule.hf_name in own:
            return design
    print_status(f"noted: {checkpoint.folder}: has no language head, so it is read as {base}")
    checkpoint.config = config
    return headless


def with_stored_modules(design: ModelConfig, family: Family, checkpoint: SafetensorsFolder) -> ModelConfig:
    """The design with the multi-token modules that a folder holds, whatever its config says.

    Modules that compute something else than heddle's are left out; a notice says why.
    """
    names = family.multi_token
    if names is None:
        return design
    bare, stored = design.replace(multi_token=None), checkpoint.tensor_specs()
    depth = _stored_modules(design, names, stored)
    if not depth:
        if design.multi_token is not None:
            print_status(f"noted: {checkpoint.folder}: holds no multi-token modules, which the exported design has")
        return bare
    design = design.replace(multi_token=(design.multi_token or MultiTokenConfig()).replace(depth=depth))
    reason = "their layer is of another kind than the last one of the model"
    if names.fitting(design) is not None:
        differs = _module_difference(design, names, family, checkpoint, stored)
        if differs is None:
            return design
        reason = differs
    print_status(f"ignored: the multi-token modules of {checkpoint.folder}: {reason}")
    return bare


def _stored_modules(design: ModelConfig, names: ModuleNames, stored: Iterable[str]) -> int:
    """How many modules, from the first on, have a projection among tensors, which may lack the first word."""
    [projection] = [hf for hf, heddle in names.parts.items() if heddle == "projection"]
    known, count = [f".{_without_wrappers(name)}" for name in stored], 0
    while count < names.most:
        prefix = names.prefix.format(layer=design.depth + count).removeprefix("model.")
        if not any(name.endswith(f".{prefix}.{projection}.weight") for name in known):
            break
        count += 1
    return count


def _module_difference(
    design: ModelConfig,
    modules: ModuleNames,
    family: Family,
    checkpoint: SafetensorsFolder,
    stored: Mapping[str, TensorSpec],
) -> str | None:
    """Why a folder's multi-token modules do not fit a design, or None if they do."""
    weight_map = build_weight_map(family, build(design, device="meta"))
    own = stored_names(weight_map, stored, str(checkpoint.folder))
    rules = {parameter_name(rule.parameters[0]): rule.hf_name for rule in weight_map.rules.values()}
    wanted = {
        rule.hf_name
        for rule in weight_map.rules.values()
        if parameter_name(rule.parameters[0]).startswith("multi_token.")
    }
    prefixes = tuple(f"{prefix}." for prefix in modules.prefixes(design))
    found = {name for name in own if name.startswith(prefixes) and _matching_prefix(name, IGNORED_TENSORS) is None}
    if missing := sorted(wanted - found):
        return f"tensor '{missing[0]}' is missing"
    if unknown := sorted(found - wanted - weight_map.copies.keys()):
        return f"tensor '{unknown[0]}' has no counterpart in heddle's"
    for name, parameter in weight_map.copies.items():
        main = rules[parameter]
        if name in own and main in own:
            copy, original = (checkpoint.tensor(stored[own[each]][0], own[each]) for each in (name, main))
            if not torch.equal(copy.to(original.dtype), original):
                return f"tensor '{name}' differs from the model's '{main}', which heddle's share"
    return None


def _check_tensor(
    weight_map: WeightMap, rule: TensorRule, dtype: torch.dtype, shape: Sequence[int], source: str, restore: str
) -> None:
    """Raises CheckpointError for a tensor that does not fit its rule."""
    if rule.transform.whole_numbers:
        if dtype not in (torch.int64, torch.int32):
            raise CheckpointError(f"{source} is of type {dtype}; it holds ids, which are int64 or int32")
    elif not dtype.is_floating_point or dtype.itemsize == 1:
        remedy = "save the weights dequantized, or restore the config that says how they are quantized"
        raise CheckpointError(f"{source} is of type {dtype}, as quantized weights are; {remedy}")
    if tuple(shape) != tuple(expected := weight_map.hf_shape(rule)):
        raise CheckpointError(f"{source} has shape {list(shape)}, the config needs {list(expected)}; {restore}")


def _missing(name: str) -> str:
    if name in HF_HEAD_WEIGHTS:
        remedy = "import a model with one, or set 'tie_word_embeddings' to true if it is the embedding"
        return f"tensor '{name}' is missing, as in base classes without a language head; {remedy}"
    return f"tensor '{name}' is missing; download the weights again"


def build_weight_map(family: Family, model: Decoder) -> WeightMap:
    """The rules between a model's parameters and a family's tensors."""
    weight_map = WeightMap({name: parameter.shape for name, parameter in model.named_parameters()})
    family.map_weights(model.config, weight_map)
    if family.multi_token is not None:
        family.multi_token.map_parts(model.config, weight_map)
    return weight_map


def _matching_prefix(name: str, prefixes: Iterable[str]) -> str | None:
    return next((prefix for prefix in prefixes if fnmatchcase(name, prefix + "*")), None)


class WeightSource(Protocol):
    """The tensors of a family's model, by their names in the family. folder, ignored_tensors: as of a folder.

    label: what messages call it. restore: the remedy where config and weights disagree.
    """

    folder: Path
    label: str
    restore: str
    ignored_tensors: tuple[str, ...]

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (file, name, tensor in its own memory) for every tensor."""

    def tensor_specs(self) -> Iterable[str]:
        """The names of the tensors."""


class TensorNames:
    """The names that a file's tensors have in a family's class, where wrappers, trainers or base classes changed them.

    A base class lacks the first word of its names (`LlamaModel` has `layers.0…`, its causal language model
    `model.layers.0…`); a trainer may put words before all of them. The embedding's name shows which. Of a tied model, a
    file may hold the head in place of the embedding. Raises CheckpointError where several tensors may be the embedding.
    """

    def __init__(self, weight_map: WeightMap, stored_names: Iterable[str], source: str) -> None:
        rules = weight_map.rules
        others = {name: rule for name, (rule, _) in weight_map.alternatives.items()}
        self.known = {*rules, *others, *weight_map.copies, *weight_map.constants}
        self.base = self.dropped = self.added = self.head_alone = self.embedding = ""
        names = {_without_wrappers(name) for name in stored_names}
        for known in (rules, others):
            embedding = next((name for name, rule in known.items() if rule.parameters[0] == EMBEDDING), None)
            if embedding is not None and self._finds(embedding, known, names, source):
                return
        heads = names.intersection(HF_HEAD_WEIGHTS)
        if len(heads) == 1 and all(rule.parameters[0] != HEAD_WEIGHT for rule in rules.values()):
            [self.head_alone] = heads
        self.embedding = next((name for name, rule in rules.items() if rule.parameters[0] == EMBEDDING), "")

    def _finds(self, embedding: str, known: Collection[str], names: Collection[str], source: str) -> bool:
        """Whether a file's names have this embedding; if so, sets how its names differ from the class's."""
        base, _, rest = embedding.partition(".")
        is_base = bool(rest) and sum(name.startswith(f"{base}.") for name in known) > len(known) // 2
        self.base = f"{base}." if is_base else ""
        if embedding in names or embedding.removeprefix(self.base) in names:
            self.added = "" if embedding in names else self.base
            return True
        ends = (embedding, embedding.removeprefix(self.base))
        found = {
            name: end
            for end in reversed(ends)
            for name in names  # a multi-token module may repeat the embedding, below the number of its layer
            if name.endswith(f".{end}") and not name.removesuffix(f".{end}").rpartition(".")[2].isdigit()
        }
        if len(found) > 1:
            two = " and ".join(f"'{name}'" for name in sorted(found)[:2])
            raise CheckpointError(f"{source}: holds several models ({two}); save the weights of only one")
        for name, end in found.items():
            self.dropped, self.added = name.removesuffix(end), "" if end == embedding else self.base
        return bool(found)

    def __call__(self, stored_name: str) -> str:
        """The name in the family's class."""
        name = _without_wrappers(stored_name)
        if self.dropped and not name.startswith(self.dropped):
            return name
        name = self.embedding if name == self.head_alone else name.removeprefix(self.dropped)
        return self.added + name if self.added + name in self.known else name


def stored_names(weight_map: WeightMap, stored: Iterable[str], source: str) -> dict[str, str]:
    """A file's names of its tensors by the family's. The rules' alternatives that the file holds are used."""
    names = TensorNames(weight_map, stored, source)
    own = {names(name): name for name in stored}
    weight_map.use_alternatives(own)
    return own


def _without_wrappers(name: str) -> str:
    return ".".join(word for word in name.split(".") if word not in WRAPPERS)


def load_weights(
    model: Decoder, family: Family, source: WeightSource, dtype: torch.dtype | None, allow_non_finite: bool
) -> None:
    """Fill a model on the meta device. dtype None keeps each tensor's. Raises CheckpointError and ConfigError."""
    _WeightLoader(model, family, source, allow_non_finite).load(dtype)


class _WeightLoader:
    """Fills a model on the meta device with the tensors of a checkpoint, in the order in which they are read."""

    def __init__(self, model: Decoder, family: Family, checkpoint: WeightSource, allow_non_finite: bool) -> None:
        self.model, self.family, self.checkpoint = model, family, checkpoint
        self.allow_non_finite = allow_non_finite
        self.weight_map = build_weight_map(family, model)
        stored = list(checkpoint.tensor_specs())
        self.names = TensorNames(self.weight_map, stored, checkpoint.label)
        self.weight_map.use_alternatives({self.names(name) for name in stored})
        self.missing = dict(self.weight_map.rules)
        self.parameters = dict(model.named_parameters())
        self.loaded: dict[str, Tensor] = {}

    def load(self, dtype: torch.dtype | None) -> None:
        """Read every tensor. Raises CheckpointError naming one that is missing or unknown, or of a wrong shape."""
        ignored: set[str] = set()
        for file, name, tensor in self.checkpoint.tensors():
            source = f"{self.checkpoint.folder / file}: tensor '{name}'"
            own_name, name = name, self.names(name)
            rule = self.missing.pop(name, None)
            if rule is not None:
                _check_tensor(self.weight_map, rule, tensor.dtype, tensor.shape, source, self.checkpoint.restore)
                self._check_finite(tensor, source)
                first = self.parameters[parameter_name(rule.parameters[0])]
                self._copy_into(rule, tensor if dtype is None else tensor.to(storage_dtype(first, dtype)))
            elif name in self.weight_map.copies:
                continue  # compared before
            elif (constant := self.weight_map.constants.get(name)) is not None:
                if tensor.tolist() != constant:
                    raise CheckpointError(f"{source} is not what follows from its config; restore config.json")
            elif (prefix := self._ignored_prefix(name)) is not None:
                ignored.add(prefix)
            elif self.model.config.head.tied and name in HF_HEAD_WEIGHTS:
                self.loaded[HEAD_WEIGHT] = tensor
            elif name in self.weight_map.rules:
                raise CheckpointError(f"{source} appears twice; save the weights again")
            elif own_name.endswith(QUANTIZATION_LEFTOVERS) or DESCRIPTION in own_name:
                remedy = "save the weights dequantized, or restore the config that says how they are quantized"
                raise CheckpointError(f"{source} is left over from quantized weights; {remedy}")
            elif ADAPTER_WORDS & {*own_name.split(".")}:
                remedy = "merge it with peft's `merge_and_unload`, save that, and import it"
                raise CheckpointError(f"{source} is of an adapter inside the model; {remedy}")
            else:
                remedy = head_remedy(own_name) or f"{self.checkpoint.restore}, or save the model without that tensor"
                raise CheckpointError(
                    f"{source} belongs to no part of a {self.family.architecture} with this config; {remedy}"
                )
        self._fill_absent()
        for name in self.missing:
            raise CheckpointError(f"{self.checkpoint.label}: {_missing(name)}")
        self._check_tied_head()
        for prefix in sorted(ignored):
            print_status(f"ignored: tensors {prefix}…, which heddle does not build")
        for name, tensor in self.loaded.items():
            set_parameter(self.model, name, tensor, self.parameters[name].requires_grad)
        self.model.tie()

    def _fill_absent(self) -> None:
        """Fill missing tensors with zeros, where the family's class does."""
        for name in [name for name in self.missing if _matching_prefix(name, self.family.zeros_if_absent)]:
            rule = self.missing.pop(name)
            self._copy_into(rule, torch.zeros(self.weight_map.hf_shape(rule)))

    def _ignored_prefix(self, name: str) -> str | None:
        """The prefix of tensors to ignore that matches a name, or None."""
        patterns = IGNORED_TENSORS + self.family.ignored_tensors + self.checkpoint.ignored_tensors
        return _matching_prefix(name, [pattern.format(depth=self.model.config.depth) for pattern in patterns])

    def _check_finite(self, tensor: Tensor, source: str) -> None:
        if tensor.numel() and not all(bound.isfinite() for bound in tensor.aminmax()):
            if not self.allow_non_finite:
                remedy = "download the weights again, or allow such values"
                raise CheckpointError(f"{source} has non-finite values; {remedy}")
            print_status(f"warning: {source} has non-finite values; the model may generate nonsense")

    def _check_tied_head(self) -> None:
        """Raises ConfigError if the head is tied, but the file holds a head that differs from the embedding."""
        head = self.loaded.pop(HEAD_WEIGHT, None) if self.model.config.head.tied else None
        if head is None:
            return
        embedding = self.loaded[EMBEDDING]
        if not torch.equal(head.to(embedding.dtype), embedding):
            raise ConfigError(
                f"{self.checkpoint.folder / CONFIG_FILE}: field 'tie_word_embeddings' says that the head is the "
                "embedding, but the weights hold a different head; set it to false"
            )

    def _copy_into(self, rule: TensorRule, tensor: Tensor) -> None:
        """Split a Hugging Face tensor into the parameters, or slices of parameters, that it holds."""
        shapes = self.weight_map.parameter_shapes(rule)
        for ref, part in zip(rule.parameters, rule.transform.split(tensor, shapes), strict=True):
            if isinstance(ref, str):
                self.loaded[ref] = part.contiguous() if len(shapes) == 1 else part.clone().contiguous()
            else:
                name, index = ref
                if name not in self.loaded:
                    self.loaded[name] = torch.empty(self.weight_map.shapes[name], dtype=part.dtype)
                self.loaded[name][index] = part


# A Hugging Face folder; its parameters are read one at a time, by their names in heddle.


class LazyCheckpoint:
    """A transformers folder. Headers are checked when it is opened, values are read when they are looked up.

    Raises CheckpointError and ConfigError, naming the file, tensor or field that is missing or not supported.
    """

    def __init__(self, folder: Path) -> None:
        self.checkpoint = SafetensorsFolder(folder)
        source = str(folder / CONFIG_FILE)
        self.family = family_of(self.checkpoint.config, source)
        design = folder_design(self.checkpoint, self.family, source)
        self.design: ModelConfig = with_stored_modules(design, self.family, self.checkpoint)
        self._model = build(self.design, device="meta")
        self._weight_map = build_weight_map(self.family, self._model)
        stored = self.checkpoint.tensor_specs()
        self._names = stored_names(self._weight_map, stored, str(folder))
        self._stored = {name: stored[own_name] for name, own_name in self._names.items()}
        self._rules: dict[str, list[TensorRule]] = {}  # of each parameter
        for rule in self._weight_map.rules.values():
            self._check(rule)
            for name in {parameter_name(ref) for ref in rule.parameters}:
                self._rules.setdefault(name, []).append(rule)

    def _check(self, rule: TensorRule) -> None:
        name = rule.hf_name
        if name not in self._stored:
            if _matching_prefix(name, self.family.zeros_if_absent) is not None:
                return
            raise CheckpointError(f"{self.checkpoint.folder}: {_missing(name)}")
        file, dtype, shape = self._stored[name]
        source = f"{self.checkpoint.folder / file}: tensor '{name}'"
        _check_tensor(self._weight_map, rule, dtype, shape, source, self.checkpoint.restore)

    @cached_property
    def specs(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """The dtype and shape of every parameter, by its name in heddle."""
        return {
            name: (self._dtype(self._rules[name][0]), tuple(parameter.shape))
            for name, parameter in self._model.named_parameters()
        }

    def _dtype(self, rule: TensorRule) -> torch.dtype:
        stored: torch.dtype = self._stored.get(rule.hf_name, ABSENT)[1]
        return torch.float32 if rule.transform.whole_numbers else stored

    def tensor(self, name: str) -> Tensor:
        """Read one parameter."""
        dtype, shape = self.specs[name]
        whole: Tensor | None = None
        for rule in self._rules[name]:
            if rule.hf_name not in self._stored:
                return torch.zeros(shape)
            value = self.checkpoint.tensor(self._stored[rule.hf_name][0], self._names[rule.hf_name])
            parts = rule.transform.split(value, self._weight_map.parameter_shapes(rule))
            for ref, part in zip(rule.parameters, parts, strict=True):
                if ref == name:
                    return part.clone().contiguous()
                if not isinstance(ref, str) and ref[0] == name:
                    whole = torch.empty(shape, dtype=dtype) if whole is None else whole
                    whole[ref[1]] = part
        assert whole is not None
        return whole

    def weights_sha256(self) -> str:
        """The SHA-256 of all tensor files, read block by block."""
        digest = hashlib.sha256()
        for file in self.checkpoint.tensor_files:
            with open(self.checkpoint.folder / file, "rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()

    @cached_property
    def imported_config(self) -> dict[str, Any]:
        """The fields of config.json that an export writes back."""
        return ConfigReader(self.checkpoint.config).preserved() | {"model_type": self.family.model_type}

    def read_tokenizer(self) -> tuple[Tokenizer | None, dict[str, str]]:
        """The tokenizer, or None, and the text of its other files."""
        return _tokenizer_of(self.checkpoint, self._model, None)
