"""A state as a folder: `state.safetensors` and, in `state.json`, the facts that no tensor tells and the design's name.

A conversation's prompt, read once, goes on in another process as if it had never left.
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
from heddle.parts.context.layout import Memory
from heddle.parts.context.position_table import PositionTable
from heddle.storage.folder import read_folder, write_folder
from heddle.storage.manifest import parse_object

KIND = "state"
TENSORS = "state.safetensors"
FACTS = "state.json"


def save_state(state: State, folder: str | Path) -> None:
    """Write a state, which stays good, so that the folder is at every instance whole.

    Raises ConfigError for a consumed handle, CheckpointError or MachineError where the folder cannot be written.
    """
    state.check()
    facts = {"design": state.design, "table": _facts(state.table)}
    text = json.dumps(facts, indent=1, sort_keys=True) + "\n"
    write_folder(Path(folder), tensors={TENSORS: state.tensors()}, documents={FACTS: text}, kind=KIND)


def load_state(model: Decoder, folder: str | Path) -> State:
    """Read a state of this model, verified to the byte: going on from it is going on from the original, bit for bit.

    The design and its dtype must be those of the model; that its weights are the same, nobody checks.
    Raises CheckpointError with what differs.
    """
    contents = read_folder(Path(folder), KIND)
    design, facts = _read_facts(contents.folder / FACTS, contents.documents.get(FACTS, ""))
    if design != model.fingerprint:
        raise CheckpointError(f"{folder}: is a state of another design; load the model that it was made with")
    held = contents.tensors(TENSORS, model.embed.weight.device)
    empty = _empty(model, contents.folder, facts, held)
    known: dict[str, Any] = {name: held[f"table.{name}"] for name in empty.table.tensors()} | facts
    table = replace(empty.table, **known)
    layers = [
        None if layer is None else layer.map(lambda name, _, index=index: held[f"layers.{index}.{name}"])  # type: ignore[misc]
        for index, layer in enumerate(empty.layers)
    ]
    return State(table, layers, design)


def _facts(table: PositionTable) -> dict[str, Any]:
    """Every field of the table that is no tensor."""
    named = {field.name: getattr(table, field.name) for field in fields(table)}
    return {name: value for name, value in named.items() if not isinstance(value, Tensor)}


def _read_facts(path: Path, text: str) -> tuple[str, dict[str, Any]]:
    """The design's fingerprint, and the facts of the table."""
    try:
        content = parse_object(text.encode())
        design, facts = content["design"], content["table"]
        expected = _facts(PositionTable.empty(1, None, None, "cpu"))
        truths = {name for name, value in expected.items() if isinstance(value, bool)}
        limits = {"reach", "capacity"}  # None: there is none
        if not isinstance(design, str) or set(facts) != set(expected):
            raise ValueError("its fields are not those of a state")
        for name, value in facts.items():
            whole = type(value) is int and value >= 0
            if not (type(value) is bool if name in truths else whole or (name in limits and value is None)):
                raise ValueError(f"its {name} is {value!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: does not tell what the state is ({error}); save the state again") from error
    return design, facts


def _empty(model: Decoder, folder: Path, facts: dict[str, Any], held: dict[str, Tensor]) -> State:
    """An empty state of the design, without memory, that has the tensors that were saved.

    Raises CheckpointError where there is none.
    """
    counts = held.get("table.counts")
    batch = 0 if counts is None or counts.dim() != 1 else len(counts)
    if not batch:
        raise CheckpointError(f"{folder}: holds no rows; save the state again")
    like = build(model.config, dtype=model.embed.weight.dtype, device="meta")
    for real in (None, torch.ones(batch, 1, dtype=torch.bool, device="meta")):
        width = like.memory_width
        memory = None if width is None else Memory(like.embed.weight.new_zeros(batch, 1, width), real=real)
        empty = like.init_state(batch, facts["capacity"], memory, facts["rewind"])
        wanted = empty.tensors()
        if wanted.keys() == held.keys():
            break
    else:
        raise CheckpointError(f"{folder}: holds other tensors than a state of this design; save the state again")
    for name, tensor in held.items():
        if tensor.dtype != wanted[name].dtype:
            raise CheckpointError(
                f"{folder}: '{name}' is {tensor.dtype}, the model's is {wanted[name].dtype}; "
                "load the model with the dtype that the state was made with"
            )
        if tensor.dim() != wanted[name].dim() or len(tensor) != batch:
            raise CheckpointError(
                f"{folder}: '{name}' has shape {list(tensor.shape)}, but the state has {batch} rows; save it again"
            )
    return empty
