"""Tensor sets: `model.safetensors` is one file, or shards `model-00001-of-00003.safetensors` and an index beside them.

The index, `model.safetensors.index.json`, is in the form of Hugging Face. The manifest says the same; both must agree.
Shards of ranks may hold slices of a tensor: the index lists them apart, so that no reader takes a slice for a tensor.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from heddle.errors import CheckpointError
from heddle.storage.manifest import FileRecord, TensorRecord, parse_json_object
from heddle.storage.tensor_header import DTYPES

MAX_SHARD_BYTES = 5 * 10**9  # of huggingface_hub ("5GB")
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
SHARD_PATTERN = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """Return a sorting key by which `layers.2` comes before `layers.10`, so that a shard holds neighboring layers."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def split_into_shards(set_name: str, sizes: Mapping[str, int], max_bytes: int) -> dict[str, list[str]]:
    """Return the files of a tensor set, each with its tensors' names. Equal sizes give equal shards.

    sizes: bytes of each tensor. A file has at most `max_bytes` of tensors, or a single larger tensor. A set that fits
    one file is that file.
    """
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for name in sorted(sizes, key=natural_order):
        if shards[-1] and shard_bytes + sizes[name] > max_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += sizes[name]
    if len(shards) == 1:
        return {set_name: shards[0]}
    stem = set_name.removesuffix(SUFFIX)
    return {shard_name(stem, number, len(shards)): names for number, names in enumerate(shards, start=1)}


def shard_name(stem: str, number: int, count: int) -> str:
    """Return the name of a shard, counted from 1."""
    return f"{stem}-{number:05d}-of-{count:05d}{SUFFIX}"


def index_name(set_name: str) -> str:
    """Return the name of a tensor set's index."""
    return set_name.removesuffix(SUFFIX) + INDEX_SUFFIX


def index_text(
    shards: Mapping[str, Iterable[str]], total_bytes: int, slices: Mapping[str, Mapping[str, range]] | None = None
) -> str:
    """Return the index of a tensor set. shards: file to the names of its tensors. slices: tensor to file to rows."""
    weight_map = {name: file for file, names in shards.items() for name in names}
    content: dict[str, Any] = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    if slices:
        content["slices"] = {
            name: {file: [rows.start, rows.stop] for file, rows in files.items()} for name, files in slices.items()
        }
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def index_of(records: Mapping[str, FileRecord]) -> str:
    """Return the index of a tensor set whose files have these entries in the manifest."""
    shards, slices = _contents(records)
    return index_text(shards, sum(map(_tensor_bytes, records.values())), slices)


def _contents(records: Mapping[str, FileRecord]) -> tuple[dict[str, list[str]], dict[str, dict[str, range]]]:
    """Return the tensors of each file, and of each tensor that is in slices the rows in each file."""
    shards: dict[str, list[str]] = {file: [] for file in records}
    slices: dict[str, dict[str, range]] = {}
    for file, record in records.items():
        for name, tensor in (record.tensors or {}).items():
            if tensor.total_rows is None:
                shards[file].append(name)
            else:
                slices.setdefault(name, {})[file] = tensor.rows
    return shards, slices


def find_tensor_sets(folder: Path, records: Mapping[str, FileRecord]) -> dict[str, tuple[str, ...]]:
    """Return the files of each tensor set in a manifest. Raises CheckpointError if shards do not make a whole."""
    numbers: dict[str, dict[int, str]] = {}
    sets: dict[str, tuple[str, ...]] = {}
    for name, record in sorted(records.items()):
        if record.tensors is None:
            continue
        match = SHARD_PATTERN.fullmatch(name)
        if match is None:
            sets[name] = (name,)
            find_slices(folder, sets[name], records)
            continue
        stem, number, count = match["stem"], int(match["number"]), int(match["count"])
        shards = numbers.setdefault(stem, {})
        first_number, first_file = next(iter(shards.items()), (number, name))
        if not 1 <= number <= count or shard_name(stem, first_number, count) != first_file:
            raise CheckpointError(f"{folder / name}: does not belong to the shards beside it; save the folder again")
        shards[number] = name
    for stem, shards in numbers.items():
        count = int(next(iter(shards.values()))[: -len(SUFFIX)][-5:])
        files = tuple(shard_name(stem, number, count) for number in range(1, count + 1))
        present = set(shards.values())
        missing = next((file for file in files if file not in present), None)
        if missing is not None:
            raise CheckpointError(f"{folder / missing}: is a shard that the manifest lacks; save the folder again")
        if stem + SUFFIX in sets:
            raise CheckpointError(f"{folder / stem}{SUFFIX}: is there as one file and as shards; save the folder again")
        find_slices(folder, files, records)
        sets[stem + SUFFIX] = files
    return sets


def find_slices(
    folder: Path, files: Iterable[str], records: Mapping[str, FileRecord]
) -> dict[str, list[tuple[str, TensorRecord]]]:
    """Return the files of each tensor of a set, each with its manifest entry, in the order of rows.

    Raises CheckpointError for a tensor that is there twice, and for slices that leave a hole, overlap or do not fit.
    """
    pieces: dict[str, list[tuple[str, TensorRecord]]] = {}
    for file in files:
        for name, tensor in (records[file].tensors or {}).items():
            pieces.setdefault(name, []).append((file, tensor))
    for name, slices in pieces.items():
        if slices[0][1].total_rows is None and len(slices) == 1:
            continue
        if any(tensor.total_rows is None for _, tensor in slices):
            (first_file, _), (file, _) = slices[:2]
            where = f"which is in {first_file} too"
            raise CheckpointError(f"{folder / file}: holds tensor {name!r}, {where}; save it again")
        slices.sort(key=lambda piece: piece[1].row_offset)
        first_file, first = slices[0]
        next_row, kind_of_first = 0, (first.dtype, first.row_block, first.whole_shape)
        for file, tensor in slices:
            if (tensor.dtype, tensor.row_block, tensor.whole_shape) != kind_of_first:
                raise CheckpointError(
                    f"{folder / file}: its slice of tensor {name!r} has another type or shape than that in"
                    f" {first_file}; save the folder again"
                )
            if tensor.row_offset != next_row:
                defect = "an overlap" if tensor.row_offset < next_row else "a hole"
                raise CheckpointError(
                    f"{folder / file}: its slice of tensor {name!r} starts at row {tensor.row_offset} where {next_row}"
                    f" is next ({defect}); save the folder again"
                )
            next_row = tensor.rows.stop
        if next_row != first.total_rows:
            raise CheckpointError(
                f"{folder / slices[-1][0]}: tensor {name!r} ends at row {next_row} of {first.total_rows} (a hole);"
                " save the folder again"
            )
    return pieces


def check_index(folder: Path, set_name: str, records: Mapping[str, FileRecord], documents: Mapping[str, str]) -> None:
    """Raise CheckpointError if the index of a tensor set does not say what the manifest says.

    records: the manifest's entries of the set's shards. documents: the folder's text files, with the index.
    """
    path = folder / index_name(set_name)
    if path.name not in documents:
        raise CheckpointError(f"{path}: is not in the manifest, which lists shards; save the folder again")
    try:
        content = parse_json_object(documents[path.name].encode())
    except ValueError as error:
        raise CheckpointError(f"{path}: is not an index of shards ({error}); save the folder again") from error
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path}: has no table 'weight_map'; save the folder again")
    shards, slices = _contents(records)
    expected = {tensor: file for file, names in shards.items() for tensor in names}
    for tensor in sorted(expected.keys() | weight_map.keys()):
        listed, actual = weight_map.get(tensor), expected.get(tensor)
        if listed != actual:
            raise CheckpointError(
                f"{path}: says that tensor {tensor!r} is in {listed or 'no file'}, but the manifest says"
                f" {actual or 'in none'}; save the folder again"
            )
    if content.get("slices", {}) != json.loads(index_text({}, 0, slices)).get("slices", {}):
        raise CheckpointError(f"{path}: does not list the slices that the manifest lists; save the folder again")
    metadata: Any = content.get("metadata")
    total = sum(map(_tensor_bytes, records.values()))
    if not isinstance(metadata, dict) or metadata.get("total_size") != total:
        raise CheckpointError(f"{path}: its total_size is not the {total} bytes of the tensors; save the folder again")


def _tensor_bytes(record: FileRecord) -> int:
    """Return the bytes of a file's tensors, without its header."""
    itemsizes = {name: dtype.itemsize for name, dtype in DTYPES.items()}
    tensors = (record.tensors or {}).values()
    return sum(math.prod(tensor.shape) * itemsizes.get(tensor.dtype, 0) for tensor in tensors)
