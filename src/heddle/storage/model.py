"""Save and load a model folder: `config.json`, `model.safetensors` and, with a tokenizer, `tokenizer.json`.

An imported model also has `imported.json`: config fields that an export to its family writes back.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from heddle.distributed.ranks import ONE_PROCESS, Ranks, as_sharded, call_on_all, held_rows, local_part, whole
from heddle.errors import CheckpointError, ConfigError, HeddleError, describe_path, no_folder_reason
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.embedding import Embedding, Head
from heddle.model.initialization import storage_dtype
from heddle.model.load_config import load_config
from heddle.model.lora import LoraLinear, adapters, add_lora, lora_tensors, merge_lora
from heddle.model.state import State
from heddle.parts.layout import EncoderOutput
from heddle.parts.position_table import PositionTable
from heddle.parts.states import MixerState
from heddle.progress import print_warning
from heddle.storage.checkpoints import PROGRESS_FILE, STEP_PATTERN, check_place, latest_checkpoint
from heddle.storage.file_io import is_gguf, read_json_file
from heddle.storage.folder import FolderContents, read_folder, write_folder
from heddle.storage.manifest import parse_json_object
from heddle.storage.rank_folder import write_rank_folder
from heddle.storage.run_log import CHECKPOINTS_FOLDER, RUN_FILE
from heddle.storage.tensor_file import DTYPES
from heddle.tokenization.tokenizer import Tokenizer

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
PEFT_FILE = "adapter_config.json"
IMPORTED_FILE = "imported.json"


def save(
    model: Decoder,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    documents: Mapping[str, str] | None = None,
    ranks: Ranks = ONE_PROCESS,
) -> None:
    """Write a model folder, whole or not at all. LoRA adapters are merged.

    documents: more text files to write, by name. ranks: collective; all write a sharded model together, and no rank
    needs memory for all of it. Raises CheckpointError or MachineError.
    """
    tensors, texts = {WEIGHTS_FILE: model_tensors(model)}, dict(documents or {}) | model_documents(model, tokenizer)
    if ranks.count == 1:
        write_folder(Path(folder), tensors=tensors, documents=texts, kind="model")
    else:
        write_rank_folder(Path(folder), tensors=tensors, documents=texts, kind="model", ranks=ranks)


def load(
    folder: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> tuple[Decoder, Tokenizer | None]:
    """Read a model folder, or the newest checkpoint of a run, and verify every byte.

    dtype: None keeps the file's dtypes; a warning says if matrices differ, which cannot be multiplied. Returns the
    model in eval mode, and its tokenizer if it has one. Raises CheckpointError, naming the defective file and tensor.
    """
    contents = read_folder(find_model_folder(Path(folder)))
    model = restore_model(contents, dtype, device)
    parameters = dict(model.named_parameters())
    if len(kinds := {parameters[name].dtype for name in multiplied_names(model)}) > 1:
        names = " and ".join(sorted(map(str, kinds)))
        print_warning(f"{folder}: holds matrices of {names}; to compute, give a dtype: load(…, dtype=torch.float32)")
    return model.eval(), Tokenizer.from_files(contents.documents)


def multiplied_names(model: Decoder) -> list[str]:
    """The names of the weights that must have one dtype to be multiplied in turn; a router may have another.

    A tied head has no name of its own.
    """
    kinds = (nn.Linear, Embedding, Head)
    names = {f"{name}.weight" for name, each in model.named_modules() if isinstance(each, kinds)}
    return [name for name, _ in model.named_parameters() if name in names]


def find_model_folder(folder: Path, ranks: Ranks = ONE_PROCESS) -> Path:
    """Return the folder itself if it holds a model, else the newest intact checkpoint of the run in it.

    A checkpoint must have its own step's name and lie in its own run. ranks: collective; each verifies a share.
    """
    if folder.is_file() and is_gguf(folder):
        raise CheckpointError(f"{folder}: is a GGUF, not a folder; first `heddle import {folder} NAME`, then give NAME")
    if describe_path(folder) not in ("is a folder", "does not exist"):
        raise CheckpointError(f"{folder}: {no_folder_reason(folder)}; name a folder that heddle saved")
    is_run = (folder / CHECKPOINTS_FOLDER).is_dir() or (folder / RUN_FILE).is_file()
    if is_run and not (folder / CONFIG_FILE).is_file():
        newest = latest_checkpoint(folder, ranks=ranks)
        nothing_intact = newest.path is None and newest.damaged
        for damage in newest.damaged[1:] if nothing_intact else newest.damaged:
            print_warning(damage)
        if nothing_intact:  # the user wants the newest one
            raise CheckpointError(newest.damaged[0])
        if newest.path is None:
            raise CheckpointError(f"{folder}: holds no checkpoint yet; train until one is saved")
        return newest.path
    if STEP_PATTERN.fullmatch(folder.absolute().name) and folder.is_dir():
        check_place(folder, read_folder(folder).documents.get(PROGRESS_FILE))
    return folder


def trained_length(folder: Path) -> int | None:
    """The tokens of a sequence in the training of a run, or of a checkpoint in it; None for other folders."""
    run = folder if (folder / RUN_FILE).is_file() else folder.absolute().parent.parent
    is_in_run = run == folder or folder.absolute().parent.name == CHECKPOINTS_FOLDER
    settings = read_json_file(run / RUN_FILE).get("settings") if is_in_run and (run / RUN_FILE).is_file() else None
    length = settings.get("sequence_length") if isinstance(settings, dict) else None
    return length if isinstance(length, int) else None


def stored_dtype(folder: Path) -> torch.dtype | None:
    """The dtype of the embedding in a model folder, or in a run's newest checkpoint; None where it cannot be read."""
    steps = sorted((folder / CHECKPOINTS_FOLDER).glob("step-*"))
    for place in (folder, *reversed(steps)):
        with suppress(CheckpointError, KeyError):
            return DTYPES[read_folder(place).tensor_records(WEIGHTS_FILE)["embed.weight"].dtype]
    return None


def require_tokenizer(tokenizer: Tokenizer | None, folder: Path) -> Tokenizer:
    """Return the tokenizer of a model's folder. Raises CheckpointError if there is none."""
    if tokenizer is None:
        remedy = "import the model with --tokenizer FILE"
        raise CheckpointError(f"{folder}: has no tokenizer.json, so it cannot read text; {remedy}")
    return tokenizer


def model_tensors(model: Decoder) -> dict[str, Tensor]:
    """Return the parameters by name. A tied head appears once, as the embedding; adapters are merged.

    Sharded parameters stay sharded; sharded adapters are gathered, which is collective.
    """
    return {name: parameter.detach() for name, parameter in merge_lora(model, whole).named_parameters()}


def model_documents(model: Decoder, tokenizer: Tokenizer | None) -> dict[str, str]:
    """Return the text files of a model folder by name: config, fields of an import, and tokenizer files."""
    documents = {CONFIG_FILE: json.dumps(model.config.dump(), indent=2) + "\n"}
    if model.imported_config:
        documents[IMPORTED_FILE] = json.dumps(model.imported_config, indent=2) + "\n"
    return documents if tokenizer is None else documents | tokenizer.to_files()


def read_config(contents: FolderContents) -> dict[str, Any]:
    """Return the design in a folder, as plain data. Raises CheckpointError."""
    if CONFIG_FILE not in contents.documents:
        raise CheckpointError(f"{contents.folder}/{CONFIG_FILE}: is missing; this is not a model folder")
    config = _parse_document(contents, CONFIG_FILE)
    if "model_type" in config:
        folder = contents.folder
        raise CheckpointError(
            f"{folder}: is a transformers folder; first `heddle import {folder} NAME`, then give it; or in Python "
            "heddle.exchange.transformers.load"
        )
    return config


def read_imported_config(contents: FolderContents) -> dict[str, Any]:
    """Return the fields that an import left in a folder; empty for other models. Raises CheckpointError."""
    return _parse_document(contents, IMPORTED_FILE) if IMPORTED_FILE in contents.documents else {}


def _parse_document(contents: FolderContents, name: str) -> dict[str, Any]:
    try:
        return parse_json_object(contents.documents[name].encode())
    except ValueError as error:
        raise CheckpointError(
            f"{contents.folder}/{name}: is not a table in JSON ({error}); save the model again"
        ) from error


def load_shards(
    model: Decoder, source: str | Path | FolderContents, device: torch.device | str = "cpu", ranks: Ranks = ONE_PROCESS
) -> None:
    """Allocate a model that was sharded on the meta device, and read this rank's rows.

    source: a model folder, or a run, written by any number of ranks. Values are converted to the dtypes that the model
    was built with. Raises CheckpointError, on all ranks, for a tensor that is damaged or does not fit.
    """
    folder = source.folder if isinstance(source, FolderContents) else find_model_folder(Path(source), ranks)
    own_rows = HeldRows(dict(model.named_parameters()))
    rows: dict[str, Tensor] = {}

    def read() -> str:
        contents = source if isinstance(source, FolderContents) else read_folder(folder)
        rows.update(own_rows.read(contents, WEIGHTS_FILE))
        model.imported_config = read_imported_config(contents)
        return ""

    call_on_all(ranks, read)
    model.to_empty(device=torch.device(device))
    model.tie()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local_part(parameter).copy_(rows.pop(name))


class HeldRows:
    """This rank's rows of tensors. They are computed once, because only the main thread knows its rank.

    tensors: by name. rows: by name; None for a tensor that is not sharded.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.rows: dict[str, range | None] = dict.fromkeys(tensors)
        for name, tensor in tensors.items():
            if as_sharded(tensor) is not None:
                self.rows[name] = range(tensor.shape[0])[held_rows(tensor)]

    def read(self, contents: FolderContents, set_name: str) -> dict[str, Tensor]:
        """Read these rows from a tensor set. Raises CheckpointError, naming a tensor that does not fit."""
        shapes = {name: record.whole_shape for name, record in contents.tensor_records(set_name).items()}
        _check_fits(f"{contents.folder}/{set_name}", shapes, self.tensors)
        return contents.read_slices(set_name, self.rows)


def _check_fits(path: str, shapes: Mapping[str, tuple[int, ...]], parameters: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError, naming a tensor that does not fit the design."""
    for name in sorted(shapes.keys() | parameters.keys()):
        if name not in shapes or name not in parameters:
            fault = "is missing" if name in parameters else "belongs to no part of the design"
            raise CheckpointError(f"{path}: tensor '{name}' {fault}; the folder's config and weights do not fit")
        if shapes[name] != parameters[name].shape:
            difference = f"has shape {list(shapes[name])}, the design needs {list(parameters[name].shape)}"
            raise CheckpointError(f"{path}: tensor '{name}' {difference}; the folder's config and weights do not fit")


def restore_model(
    contents: FolderContents, dtype: torch.dtype | None, device: torch.device | str, config: ModelConfig | None = None
) -> Decoder:
    """Build a model with the weights of a folder.

    config: a design with the same parameters, instead of the folder's own. Raises CheckpointError, naming a tensor that
    does not fit.
    """
    model = build(load_config(read_config(contents)) if config is None else config, device="meta")
    tensors = contents.tensors(WEIGHTS_FILE, device)
    expected = dict(model.named_parameters())
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    _check_fits(f"{contents.folder}/{WEIGHTS_FILE}", shapes, expected)
    for name, parameter in expected.items():
        module_path, _, parameter_name = name.rpartition(".")
        tensor = tensors.pop(name)
        tensor = tensor.to(tensor.dtype if dtype is None else storage_dtype(parameter, dtype))
        setattr(model.get_submodule(module_path), parameter_name, nn.Parameter(tensor, parameter.requires_grad))
    model.tie()
    model.imported_config = read_imported_config(contents)
    return model


# A decoding state is saved as a folder and loaded again.
#
# `state.safetensors` holds the tensors. `state.json` holds the fields that are not tensors, and the design's
# fingerprint. A prompt that was read in one process can be continued in another.


STATE_KIND = "state"
STATE_TENSORS_FILE = "state.safetensors"
STATE_FILE = "state.json"
TEXT_LENGTHS = "text_lengths"  # a field that most states lack


def save_state(state: State, folder: str | Path) -> None:
    """Write a state to a folder, whole or not at all. The state stays usable.

    Raises ConfigError for a consumed state, CheckpointError or MachineError if the folder cannot be written.
    """
    state.check_not_consumed()
    metadata = {"design": state.fingerprint, "table": _plain_fields(state.table)}
    text = json.dumps(metadata, indent=1, sort_keys=True) + "\n"
    tensors, documents = {STATE_TENSORS_FILE: state.tensors()}, {STATE_FILE: text}
    write_folder(Path(folder), tensors=tensors, documents=documents, kind=STATE_KIND)


def load_state(model: Decoder, folder: str | Path) -> State:
    """Read a state of this model and verify every byte. Decoding continues bit-equal to the original state.

    The design and the dtype must be the model's. The weights are not compared.
    Raises CheckpointError, naming the difference.
    """
    contents = read_folder(Path(folder), STATE_KIND)
    design, table_fields = _read_metadata(contents.folder / STATE_FILE, contents.documents.get(STATE_FILE, ""))
    if design != model.fingerprint:
        raise CheckpointError(f"{folder}: is a state of another design; load the model that made it")
    tensors = contents.tensors(STATE_TENSORS_FILE, model.embed.weight.device)
    empty = _empty_state(model, contents.folder, table_fields, tensors)
    saved_fields: dict[str, Any] = {name: tensors[f"table.{name}"] for name in empty.table.tensors()} | table_fields
    table = replace(empty.table, **saved_fields)
    layers = [None if layer is None else _loaded(layer, index, tensors) for index, layer in enumerate(empty.layers)]
    return State(table, layers, design)


def _loaded(layer: MixerState, index: int, tensors: dict[str, Tensor]) -> MixerState:
    """Return the layer's state with its tensors replaced by the saved ones."""
    return layer.map(lambda name, _: tensors[f"layers.{index}.{name}"])


def _plain_fields(table: PositionTable) -> dict[str, Any]:
    """Return the fields of the table that are not tensors; TEXT_LENGTHS only if it is set."""
    values = {field.name: getattr(table, field.name) for field in fields(table)}
    plain = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
    if plain[TEXT_LENGTHS] is None:
        del plain[TEXT_LENGTHS]
    return plain


def _read_metadata(path: Path, text: str) -> tuple[str, dict[str, Any]]:
    """Return the design's fingerprint and the table's plain fields."""
    try:
        content = parse_json_object(text.encode())
        design, table_fields = content["design"], content["table"]
        expected = _plain_fields(PositionTable.empty(1, None, None, "cpu"))
        flags = {name for name, value in expected.items() if isinstance(value, bool)}
        optional = {"lookback", "cache_length"}  # None: no limit
        if not isinstance(design, str) or set(table_fields) - {TEXT_LENGTHS} != set(expected):
            raise ValueError("its fields do not describe a state")
        text_lengths = table_fields.pop(TEXT_LENGTHS, None)
        if text_lengths is not None and not all(type(length) is int and length > 0 for length in text_lengths):
            raise ValueError(f"its {TEXT_LENGTHS} are {text_lengths!r}")
        for name, value in table_fields.items():
            is_count = type(value) is int and value >= 0
            if not (type(value) is bool if name in flags else is_count or (name in optional and value is None)):
                raise ValueError(f"its {name} is {value!r}")
        table_fields |= {} if text_lengths is None else {TEXT_LENGTHS: tuple(text_lengths)}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: does not describe a state ({error}); save the state again") from error
    return design, table_fields


def _empty_state(model: Decoder, folder: Path, table_fields: dict[str, Any], tensors: dict[str, Tensor]) -> State:
    """Build an empty state, on the meta device, with the same tensors as the saved one.

    Raises CheckpointError if no state of this design has these tensors.
    """
    counts = tensors.get("table.token_counts")
    batch = 0 if counts is None or counts.dim() != 1 else len(counts)
    if not batch:
        raise CheckpointError(f"{folder}: holds no rows; save the state again")
    text_lengths = table_fields.get(TEXT_LENGTHS)
    if text_lengths is not None and (len(text_lengths) != batch or not model.length_dependent):
        raise CheckpointError(f"{folder}: its {TEXT_LENGTHS} do not fit its {batch} rows and design; save it again")
    meta_model = build(model.config, dtype=model.embed.weight.dtype, device="meta")
    # Only the tensors show whether the saved encoder output had padding.
    for is_token in (None, torch.ones(batch, 1, dtype=torch.bool, device="meta")):
        width = meta_model.encoder_width
        encoder_output = None
        if width is not None:
            hidden = meta_model.embed.weight.new_zeros(batch, 1, width)
            encoder_output = EncoderOutput(hidden, is_token=is_token)
        length, rollback = table_fields["cache_length"], table_fields["rollback"]
        empty = meta_model.init_state(batch, length, encoder_output, rollback, text_lengths)
        expected = empty.tensors()
        if expected.keys() == tensors.keys():
            break
    else:
        raise CheckpointError(f"{folder}: its tensors do not fit a state of this design; save the state again")
    for name, tensor in tensors.items():
        if tensor.dtype != expected[name].dtype:
            raise CheckpointError(
                f"{folder}: '{name}' is {tensor.dtype}, the model's is {expected[name].dtype}; "
                "load the model in the dtype of the state"
            )
        if tensor.dim() != expected[name].dim() or len(tensor) != batch:
            raise CheckpointError(
                f"{folder}: '{name}' has shape {list(tensor.shape)}, but the state has {batch} rows; save it again"
            )
    return empty


# LoRA adapters (Hu et al. 2021) are saved as a folder and loaded again.
#
# `adapter.safetensors` holds A and B of each projection. `adapter.json` holds rank, alpha, the paths of the
# projections, the design's fingerprint and the SHA-256 of the base weights.


ADAPTER_KIND = "adapter"
ADAPTER_FILE = "adapter.json"
ADAPTER_TENSORS_FILE = "adapter.safetensors"


def save_lora(model: Decoder, folder: str | Path) -> None:
    """Write only the adapters of a model to a folder, whole or not at all.

    Raises ConfigError if the model has no adapters, CheckpointError or MachineError if the folder cannot be written.
    """
    adapters_by_path = adapters(model)
    if not adapters_by_path:
        raise ConfigError("lora: the model has no adapters to save; add some, or save the model")
    first_adapter = next(iter(adapters_by_path.values()))
    metadata = {
        "alpha": first_adapter.alpha,
        "base_weights_sha256": base_weights_sha256(model),
        "design": model.fingerprint,
        "rank": first_adapter.rank,
        "target_modules": list(adapters_by_path),
    }
    tensors, documents = (
        {ADAPTER_TENSORS_FILE: lora_tensors(model)},
        {ADAPTER_FILE: json.dumps(metadata, indent=1) + "\n"},
    )
    write_folder(Path(folder), tensors=tensors, documents=documents, kind=ADAPTER_KIND)


class LoraFolder(NamedTuple):
    """The contents of a folder of adapters, not yet compared with a model.

    design: the fingerprint of the base model's design. tensors: A and B by name, `layers.0.mixer.q.a`.
    """

    folder: Path
    design: str
    base_weights_sha256: str
    paths: Sequence[str]
    rank: int
    alpha: float
    tensors: dict[str, Tensor]

    def check_base(self, weights_sha256: str) -> None:
        """Raise CheckpointError unless the adapters were trained on weights with this SHA-256."""
        if self.base_weights_sha256 != weights_sha256:
            raise CheckpointError(
                f"{self.folder}: were trained on other weights of this design, or in another dtype; load those"
            )

    def check_tensors(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise CheckpointError unless A and B have these names and shapes."""
        for name in shapes.keys() | self.tensors.keys():
            if name not in shapes or name not in self.tensors or list(shapes[name]) != list(self.tensors[name].shape):
                path = self.folder / ADAPTER_TENSORS_FILE
                raise CheckpointError(f"{path}: tensor '{name}' does not fit {ADAPTER_FILE}; save them again")


def read_lora(folder: str | Path, device: torch.device | str = "cpu") -> LoraFolder:
    """Read a folder of adapters. Raises CheckpointError if it is damaged."""
    if (Path(folder) / CHECKPOINTS_FOLDER).is_dir() or (Path(folder) / PROGRESS_FILE).is_file():
        raise CheckpointError(f"{folder}: is a run, whose model has its adapters merged already; use the run itself")
    if (Path(folder) / PEFT_FILE).is_file():
        remedy = "merge it there with `merge_and_unload`, save that, and import it"
        raise CheckpointError(f"{folder}: is an adapter of peft; {remedy}")
    contents = read_folder(Path(folder), ADAPTER_KIND)
    metadata_path = contents.folder / ADAPTER_FILE
    keys = ("design", "base_weights_sha256", "target_modules", "rank", "alpha")
    try:
        metadata = parse_json_object(contents.documents.get(ADAPTER_FILE, "").encode())
        design, base_sha256, paths, rank, alpha = (metadata[key] for key in keys)
        if type(rank) is not int or type(alpha) is not float or not all(isinstance(path, str) for path in paths):
            raise ValueError("rank, alpha or target_modules have the wrong type")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{metadata_path}: does not describe adapters ({error}); save them again") from error
    tensors = contents.tensors(ADAPTER_TENSORS_FILE, torch.device(device))
    return LoraFolder(contents.folder, design, base_sha256, paths, rank, alpha, tensors)


def load_lora(model: Decoder, folder: str | Path) -> Decoder:
    """Return a model with the saved adapters, bit-equal. It shares the base weights of `model`.

    Raises CheckpointError if the adapters are damaged, or belong to another design, other base weights, or the same
    base weights in another dtype.
    """
    saved = read_lora(folder, model.embed.weight.device)
    if saved.design != model.fingerprint:
        raise CheckpointError(f"{folder}: holds adapters of another design; load the model that they were trained on")
    saved.check_base(base_weights_sha256(model))
    adapted_model = with_lora_folder(model, saved)
    for name, parameter in lora_tensors(adapted_model).items():
        parameter.copy_(saved.tensors[name])
    return adapted_model


def with_lora_folder(model: Decoder, lora_folder: LoraFolder) -> Decoder:
    """Return a model with new adapters in the shapes of the saved ones. Raises CheckpointError if they do not fit."""
    try:
        adapted_model = add_lora(model, lora_folder.paths, lora_folder.rank, lora_folder.alpha)
    except HeddleError as error:
        metadata_path = lora_folder.folder / ADAPTER_FILE
        raise CheckpointError(f"{metadata_path}: does not fit the model ({error}); save the adapters again") from error
    lora_folder.check_tensors({name: parameter.shape for name, parameter in lora_tensors(adapted_model).items()})
    return adapted_model


def base_weights_sha256(model: Decoder) -> str:
    """Return the SHA-256 over names, dtypes, shapes and bytes of a model's weights, without adapters."""
    return digest_tensors(sorted(_base_parameters(model).items()))


def digest_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 over names, dtypes, shapes and bytes of tensors, which must come in alphabetical order."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _base_parameters(model: Decoder) -> dict[str, Tensor]:
    """Return a model's parameters, without adapters, under the names of the plain model."""
    parameters: dict[str, Tensor] = {}
    for path, module in model.own_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not isinstance(module, LoraLinear):
                parameters[f"{path}.{name}"] = parameter
            elif name not in module.matrix_parameters:
                parameters[f"{path}.{'weight' if name == 'frozen' else name}"] = parameter
    if model.config.head.tied:
        del parameters["head.weight"]
    return parameters
