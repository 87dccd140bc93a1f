"""Sets of tensors in shards: whole, deterministic, read by safetensors, and every way to break them is named."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from heddle.errors import CheckpointError
from heddle.storage import folder as folder_module
from heddle.storage.folder import read_folder, tensors_sha256, verify_folder, write_folder
from heddle.storage.manifest import FileRecord, Manifest, read_manifest
from heddle.storage.tensor_file import split_into_shards
from tests.storage.shared import content
from tests.storage.test_damage import random_versions, silent

LIMIT = 100  # bytes
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "model", **content(1), max_shard_bytes=LIMIT)
    return tmp_path / "model"


def test_a_sharded_set_is_what_one_file_holds(folder: Path, tmp_path: Path) -> None:
    write_folder(tmp_path / "one", **content(1))
    assert sorted(os.listdir(folder)) == sorted(
        ["config.json", "manifest.json", INDEX, *SHARDS, "training.safetensors"]
    )
    sharded, single = verify_folder(folder), verify_folder(tmp_path / "one")
    assert sharded.tensor_sets == {
        "model.safetensors": tuple(SHARDS),
        "training.safetensors": ("training.safetensors",),
    }
    assert sharded.documents == single.documents
    assert tensors_sha256(sharded) == tensors_sha256(single)
    expected = content(1)["tensors"]["model.safetensors"]
    for contents in (sharded, single):
        tensors = contents.tensors("model.safetensors")
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_the_index_is_that_of_hugging_face(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    tensors: dict[str, Tensor] = {}
    for file in SHARDS:
        own = safetensors.torch.load_file(folder / file)
        assert {name for name, at in index["weight_map"].items() if at == file} == own.keys()
        tensors |= own
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    expected = content(1)["tensors"]["model.safetensors"]
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_shards_have_neighboring_layers_and_do_not_depend_on_the_order() -> None:
    sizes = {f"layers.{layer}.{name}": 10 for layer in range(12) for name in ("a", "b")} | {"embed": 70}
    shards = split_into_shards("model.safetensors", sizes, 60)
    assert list(shards) == [f"model-0000{number}-of-00005.safetensors" for number in range(1, 6)]
    assert next(iter(shards.values())) == ["embed"]  # larger than a shard may be
    assert list(shards.values())[1] == [f"layers.{layer}.{name}" for layer in range(3) for name in ("a", "b")]
    assert list(shards.values())[4] == [f"layers.{layer}.{name}" for layer in (9, 10, 11) for name in ("a", "b")]
    assert split_into_shards("model.safetensors", dict(reversed(sizes.items())), 60) == shards
    assert split_into_shards("x.safetensors", sizes, 310) == {"x.safetensors": sorted(sizes, key=list(sizes).index)[-1:]
        + [name for name in sizes if name != "embed"]}  # fmt: skip


def test_equal_content_is_equal_shards(folder: Path, tmp_path: Path) -> None:
    arguments = content(1)
    arguments["tensors"] = {
        name: dict(reversed(named.items())) for name, named in reversed(arguments["tensors"].items())
    }
    write_folder(tmp_path / "again", **arguments, max_shard_bytes=LIMIT)
    for name in os.listdir(folder):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_only_one_tensor_is_made_at_a_time(tmp_path: Path) -> None:
    class Made(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            assert isinstance(name, str)
            looked_up.append(name)
            return super().__getitem__(name)

    looked_up: list[str] = []
    tensors = Made(content(1)["tensors"]["model.safetensors"])
    write_folder(tmp_path / "m", tensors={"m.safetensors": tensors}, documents={}, kind="model", max_shard_bytes=LIMIT)
    assert len(looked_up) == 2 * len(tensors)  # once for the header of its shard, once for its bytes


def test_no_random_damage_of_shards_and_index_is_silent(folder: Path) -> None:
    tried, missed = silent(folder, random_versions(folder, 2000))
    assert missed == []
    assert tried > 1900


def test_a_lost_shard_or_index_is_named(folder: Path) -> None:
    for name in (*SHARDS, INDEX):
        raw = (folder / name).read_bytes()
        (folder / name).unlink()
        with pytest.raises(CheckpointError, match=rf"{name}:.*missing"):
            read_folder(folder)
        (folder / name).write_bytes(raw)
    (folder / SHARDS[0]).write_bytes((folder / SHARDS[1]).read_bytes())
    with pytest.raises(CheckpointError, match=f"{SHARDS[0]}:"):
        verify_folder(folder)


def resigned(folder: Path, change: Callable[[dict[str, FileRecord]], object], index: Any = None) -> None:
    """Write the manifest again after a change of its entries, and with another index: a wrong writer, no damage."""
    manifest = read_manifest(folder)
    records = dict(manifest.files)
    change(records)
    if index is not None:
        raw = index if isinstance(index, bytes) else json.dumps(index).encode()
        (folder / INDEX).write_bytes(raw)
        records[INDEX] = FileRecord(len(raw), hashlib.sha256(raw).hexdigest())
    (folder / "manifest.json").write_bytes(Manifest(manifest.kind, records).encode())


def twice(records: dict[str, FileRecord]) -> None:
    records[SHARDS[0]] = FileRecord(
        records[SHARDS[0]].size,
        records[SHARDS[0]].sha256,
        records[SHARDS[0]].header_sha256,
        {**(records[SHARDS[0]].tensors or {}), **(records[SHARDS[2]].tensors or {})},
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.pop(SHARDS[1]), f"{SHARDS[1]}:"),
        (lambda r: r.pop(SHARDS[2]), f"{SHARDS[2]}:"),
        (twice, f"{SHARDS[2]}: holds tensor 'layers.0.mixer.q'"),
        (lambda r: r.update({"model.safetensors": r["training.safetensors"]}), "exists as one file and as shards"),
        (lambda r: r.update({"model-00001-of-00004.safetensors": r[SHARDS[0]]}), "does not belong to the shards"),
        (lambda r: r.update({"model-00004-of-00003.safetensors": r[SHARDS[0]]}), "does not belong to the shards"),
        (lambda r: r.update({"model-00000-of-00003.safetensors": r[SHARDS[0]]}), "does not belong to the shards"),
        (
            lambda r: r.update({"x-99999-of-99999.safetensors": r[SHARDS[0]]}),
            "x-00001-of-99999.safetensors:",
        ),
        (lambda r: r.pop(INDEX), f"{INDEX}:"),
    ],
)
def test_shards_that_make_no_whole_are_named(
    folder: Path, change: Callable[[dict[str, FileRecord]], object], words: str
) -> None:
    resigned(folder, change)
    with pytest.raises(CheckpointError) as caught:
        read_folder(folder)
    assert words in str(caught.value)
    assert str(caught.value).endswith("; save the folder again") or "save it again" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_index_is_named(folder: Path) -> None:
    right = json.loads((folder / INDEX).read_text())
    name, file = next(iter(right["weight_map"].items()))
    others = {tensor: at for tensor, at in right["weight_map"].items() if tensor != name}
    wrong: list[tuple[Any, str]] = [
        (b"[]", "is not an index of shards"),
        ({"weight_map": []}, "has no table 'weight_map'"),
        (right | {"weight_map": others}, f"says that tensor '{name}' is in no file, but the manifest says {file}"),
        (right | {"weight_map": {**right["weight_map"], "x": file}}, f"tensor 'x' is in {file}, but the manifest says"),
        (right | {"weight_map": {**others, name: "../x"}}, f"tensor '{name}' is in ../x, but the manifest says {file}"),
        (right | {"weight_map": {**others, name: 5}}, f"tensor '{name}' is in 5, but"),
        (right | {"metadata": {"total_size": 1}}, "its total_size is not the "),
        (right | {"metadata": 1}, "its total_size is not the "),
    ]
    for index, words in wrong:
        resigned(folder, lambda records: None, index)
        with pytest.raises(CheckpointError) as caught:
            read_folder(folder)
        assert str(caught.value).startswith(f"{folder / INDEX}: ")
        assert words in str(caught.value)
    resigned(folder, lambda records: None, right)
    verify_folder(folder)


@pytest.mark.parametrize("name", [SHARDS[0], INDEX, "a-00001-of-00001.safetensors"])
def test_names_of_shards_are_given_by_the_writer_alone(tmp_path: Path, name: str) -> None:
    tensors = {name: {"a": torch.zeros(1)}} if name.endswith(".safetensors") else {}
    with pytest.raises(CheckpointError, match="shards"):
        write_folder(tmp_path / "m", tensors=tensors, documents={} if tensors else {name: "{}"}, kind="model")
    assert os.listdir(tmp_path) == []


def test_a_reader_that_does_not_compare_the_index_is_caught(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the check above must fail without it."""
    monkeypatch.setattr(folder_module, "check_index", lambda *arguments: None)
    with pytest.raises(pytest.fail.Exception):
        test_a_wrong_index_is_named(folder)
