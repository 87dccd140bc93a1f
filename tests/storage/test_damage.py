"""A checkpoint changed in any bit, cut, blanked or lengthened is refused, and the message names the file."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from heddle.errors import CheckpointError
from heddle.storage import folder
from heddle.storage.folder import read_folder, verify_folder, write_folder
from heddle.storage.manifest import FileRecord
from heddle.storage.tensor_file import read_tensor_file
from tests.storage.damage import damaged, overwrite
from tests.storage.shared import content

TRIALS = 10_000


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    arguments = content(1)
    arguments["tensors"]["model.safetensors"]["large"] = torch.randn(60, 40)  # several pages
    write_folder(tmp_path / "step", **arguments)
    return tmp_path / "step"


def silent(checkpoint: Path, versions: Iterator[tuple[Path, bytes]]) -> tuple[int, list[str]]:
    """(number of damaged versions tried, those that were read as if whole or whose message names no file)."""
    tried, missed = 0, []
    for path, version in versions:
        raw = path.read_bytes()
        if version == raw:
            continue
        tried += 1
        overwrite(path, version, len(raw))
        try:
            verify_folder(checkpoint, "training")
            missed.append(f"{path.name} was read")
        except CheckpointError as error:
            if not str(error).startswith(f"{path}: "):
                missed.append(str(error))
        overwrite(path, raw, len(version))
    verify_folder(checkpoint, "training")
    return tried, missed


def random_versions(checkpoint: Path, trials: int) -> Iterator[tuple[Path, bytes]]:
    draw = random.Random(0)
    paths = sorted(checkpoint.iterdir())
    for _ in range(trials):
        path = draw.choice(paths)
        yield path, damaged(path.read_bytes(), draw)


def test_no_random_damage_is_silent(checkpoint: Path) -> None:
    tried, missed = silent(checkpoint, random_versions(checkpoint, TRIALS))
    assert missed == []
    assert tried > 0.95 * TRIALS


def test_no_byte_of_manifest_documents_and_headers_can_change(checkpoint: Path) -> None:
    def versions() -> Iterator[tuple[Path, bytes]]:
        draw = random.Random(1)
        for path in sorted(checkpoint.iterdir()):
            raw = path.read_bytes()
            end = 8 + int.from_bytes(raw[:8], "little") if path.suffix == ".safetensors" else len(raw)
            for offset in range(end):
                yield path, raw[:offset] + bytes([raw[offset] ^ 1 << draw.randrange(8)]) + raw[offset + 1 :]

    tried, missed = silent(checkpoint, versions())
    assert missed == []
    assert tried > 1500


def test_a_reader_without_hashes_is_caught(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(path: Path, record: FileRecord | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        return read_tensor_file(path)

    monkeypatch.setattr(folder, "read_tensor_file", careless)
    assert len(silent(checkpoint, random_versions(checkpoint, 300))[1]) > 30


def test_the_altered_tensor_is_named(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    last = [name for name, _ in read_tensor_file(path)][-1]
    contents = read_folder(checkpoint)  # documents and the other file are still good
    assert contents.tensors("training.safetensors").keys() == {"step", "moments"}
    with pytest.raises(CheckpointError) as caught:
        contents.tensors("model.safetensors")
    assert str(caught.value) == (
        f"{path}: tensor '{last}' was altered (its SHA-256 differs from the manifest);"
        " restore the file or go back to an earlier checkpoint"
    )


def test_files_of_another_save_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    write_folder(tmp_path / "other", **content(2))
    for name in ("training.safetensors", "config.json", "manifest.json"):
        raw = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes((tmp_path / "other" / name).read_bytes())
        with pytest.raises(CheckpointError):
            verify_folder(checkpoint)
        (checkpoint / name).write_bytes(raw)
    verify_folder(checkpoint)


def test_a_lost_file_is_named(checkpoint: Path) -> None:
    for path in sorted(checkpoint.iterdir()):
        raw = path.read_bytes()
        path.unlink()
        with pytest.raises(CheckpointError, match=path.name):
            read_folder(checkpoint)
        path.write_bytes(raw)
