"""Save a decoding state as a folder and load it again.

`state.safetensors` holds the tensors. `state.json` holds the fields that are not tensors, and the design's fingerprint.
A prompt that was read in one process can be continued in another one.
"""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heddle.errors import CheckpointError
from heddle.model.decoder import Decoder, build
from heddle.model.state import State
from heddle.parts.context.encoder_output import EncoderOutput
from heddle.parts.context.mixer_state import MixerState
from heddle.parts.context.position_table import PositionTable
from heddle.storage.folder import read_folder, write_folder
from heddle.storage.manifest import parse_json_object

FOLDER_KIND = "state"
TENSORS_FILE = "state.safetensors"
METADATA_FILE = "state.json"
TEXT_LENGTHS = "text_lengths"  # a field that most states lack


def save_state(state: State, folder: str | Path) -> None:
    """Write a state to a folder, whole or not at all. The state stays usable.

    Raises ConfigError for a consumed state, CheckpointError or MachineError if the folder cannot be written.
    """
    state.check_not_consumed()
    metadata = {"design": state.fingerprint, "table": _plain_fields(state.table)}
    text = json.dumps(metadata, indent=1, sort_keys=True) + "\n"
    tensors, documents = {TENSORS_FILE: state.tensors()}, {METADATA_FILE: text}
    write_folder(Path(folder), tensors=tensors, documents=documents, kind=FOLDER_KIND)


def load_state(model: Decoder, folder: str | Path) -> State:
    """Read a state of this model and verify every byte. Decoding continues bit-equal to the original state.

    The design and the dtype must be the model's. The weights are not compared.
    Raises CheckpointError that says what differs.
    """
    contents = read_folder(Path(folder), FOLDER_KIND)
    design, table_fields = _read_metadata(contents.folder / METADATA_FILE, contents.documents.get(METADATA_FILE, ""))
    if design != model.fingerprint:
        raise CheckpointError(f"{folder}: is a state of another design; load the model that it was made with")
    tensors = contents.tensors(TENSORS_FILE, model.embed.weight.device)
    empty = _empty_state(model, contents.folder, table_fields, tensors)
    saved_fields: dict[str, Any] = {name: tensors[f"table.{name}"] for name in empty.table.tensors()} | table_fields
    table = replace(empty.table, **saved_fields)
    layers = [None if layer is None else _loaded(layer, index, tensors) for index, layer in enumerate(empty.layers)]
    return State(table, layers, design)


def _loaded(layer: MixerState, index: int, tensors: dict[str, Tensor]) -> MixerState:
    """The layer's state with its tensors replaced by the saved ones."""
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
            raise ValueError("its fields are not those of a state")
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
    # The saved encoder output had padding or not; only its tensors tell which.
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
        raise CheckpointError(f"{folder}: holds other tensors than a state of this design; save the state again")
    for name, tensor in tensors.items():
        if tensor.dtype != expected[name].dtype:
            raise CheckpointError(
                f"{folder}: '{name}' is {tensor.dtype}, the model's is {expected[name].dtype}; "
                "load the model with the dtype that the state was made with"
            )
        if tensor.dim() != expected[name].dim() or len(tensor) != batch:
            raise CheckpointError(
                f"{folder}: '{name}' has shape {list(tensor.shape)}, but the state has {batch} rows; save it again"
            )
    return empty
