"""The tensors of a foreign folder, one at a time: `model.safetensors`, or the shards that its index names."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from heddle.errors import CheckpointError, ConfigError
from heddle.progress import bar
from heddle.storage.atomic import READ_LINKED, opened, read_exactly, unreadable
from heddle.storage.folder import MAX_DOCUMENT, read_folder
from heddle.storage.manifest import FILE, FileRecord, is_file_name, parse_object
from heddle.storage.tensor_file import read_tensor_file

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LARGEST = 64 * 2**20  # of a text file
DEEPEST = 64  # of tables in tables
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5")


class Foreign:
    """A folder that somebody else's library wrote: its config, checked for what heddle never does, and its tensors.

    Where the folder has a manifest of ours (our own exports have), every byte is held against it. Raises
    CheckpointError, naming file and remedy, for a folder that is no such thing, and ConfigError for a field.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._open(folder)
        except OSError as error:
            raise unreadable(folder, error) from error

    def _open(self, folder: Path) -> None:
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: there is no such folder; name one that holds a {CONFIG}")
        if not (folder / CONFIG).is_file():
            raise CheckpointError(f"{folder}: holds no {CONFIG}, so it is no model of transformers; name its folder")
        self.records: Mapping[str, FileRecord] = {}
        self.held: Mapping[str, str] = {}
        if os.path.lexists(folder / FILE):
            contents = read_folder(folder, flags=READ_LINKED)
            self.records, self.held = contents.records, contents.documents
        self.config = self.table(CONFIG)
        self._refuse_fields()
        self.files = self._files()

    def text(self, name: str) -> str:
        """One of its texts. Raises CheckpointError for one that is too large or not UTF-8."""
        return self.held[name] if name in self.held else read_text(self.folder / name)

    def table(self, name: str) -> dict[str, Any]:
        """The table in one of its JSON files. Raises CheckpointError naming the file."""
        return parsed(self.text(name), self.folder / name)

    def _refuse_fields(self) -> None:
        place = self.folder / CONFIG
        if "auto_map" in self.config:
            raise ConfigError(
                f"{place}: field 'auto_map' asks to run code of the folder, which is never done;"
                " without the field heddle reads the model itself, if it knows its model_type"
            )
        if self.config.get("quantization_config") is not None:
            kind = self.config["quantization_config"]
            name = kind.get("quant_method") if isinstance(kind, dict) else kind
            raise ConfigError(
                f"{place}: field 'quantization_config' says the weights are quantised ({name});"
                " import the unquantised model, or save it dequantised with transformers"
            )

    def _files(self) -> list[str]:
        """The tensor files, in the order of their names."""
        if (self.folder / SINGLE).is_file():
            return [SINGLE]
        if (self.folder / INDEX).is_file():
            shards = self.table(INDEX).get("weight_map")
            if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
                raise CheckpointError(f"{self.folder / INDEX}: has no table 'weight_map' of files; restore it")
            for tensor, name in shards.items():
                if not is_file_name(name):
                    raise CheckpointError(f"{self.folder / INDEX}: tensor '{tensor}' is said to be in {name!r}")
                if not (self.folder / name).is_file():
                    raise CheckpointError(f"{self.folder / name}: shard is missing; download it again")
            self._index = shards
            return sorted(set(shards.values()))
        self._refuse_others()
        raise CheckpointError(f"{self.folder}: holds neither {SINGLE} nor {INDEX}; download the weights")

    def _refuse_others(self) -> None:
        for name in sorted(os.listdir(self.folder)):
            if name.endswith(PICKLES):
                raise CheckpointError(
                    f"{self.folder / name}: is a pickle or another format that can run code, and is never read; "
                    "convert it to safetensors, with transformers: from_pretrained(...).save_pretrained(...)"
                )

    @property
    def bytes(self) -> int:
        """Of all tensor files."""
        return sum((self.folder / name).stat().st_size for name in self.files)

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """(file, name, tensor in memory of its own), file by file, with a progress bar."""
        index: dict[str, str] = getattr(self, "_index", {})
        missing = dict(index)
        with bar("reading", self.bytes, "bytes") as shown:
            for file in self.files:
                if self.records and file not in self.records:
                    raise CheckpointError(
                        f"{self.folder / file}: is not in the {FILE} beside it; remove one of the two"
                    )
                for name, tensor in read_tensor_file(self.folder / file, self.records.get(file), READ_LINKED):
                    if index and missing.pop(name, None) != file:
                        raise CheckpointError(f"{self.folder / file}: holds '{name}', which {INDEX} does not say")
                    yield file, name, tensor
                    shown.advance(tensor.numel() * tensor.element_size())
        for name, file in missing.items():
            raise CheckpointError(f"{self.folder / file}: lacks tensor '{name}', which {INDEX} says it holds")


def read_text(path: Path) -> str:
    """A text file of a folder of others. Raises CheckpointError for one that is too large or not UTF-8."""
    with opened(path, READ_LINKED) as (descriptor, size):
        if size > MAX_DOCUMENT:
            raise CheckpointError(f"{path}: has {size} bytes, over {MAX_DOCUMENT}; it should be a text")
        raw = bytearray(size)
        read_exactly(descriptor, memoryview(raw), path)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise CheckpointError(f"{path}: is not text in UTF-8; restore the file") from None


def parsed(text: str, path: Path) -> dict[str, Any]:
    """The table in the text of a JSON file. Raises CheckpointError naming the file."""
    if len(text) > LARGEST:
        raise CheckpointError(f"{path}: has more than {LARGEST} characters; it should be a small text")
    try:
        found = parse_object(text.encode("utf-8"))
        if _depth(found) > DEEPEST:
            raise ValueError("it is nested too deeply")
    except ValueError as error:
        raise CheckpointError(f"{path}: is no table in JSON ({error}); restore the file") from None
    return found


def _depth(table: Any) -> int:
    """How deep tables and lists are nested, counted without recursion."""
    level, depth = [table], 0
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return depth


def to_json(data: Mapping[str, Any]) -> str:
    """The text of a JSON file."""
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"
