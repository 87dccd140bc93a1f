"""Format 2 as it was when it was made: a folder in tests/goldens that must stay readable and be written byte for byte.

`python tests/storage/test_format2.py` wrote it, once. If a test here fails, the code is wrong, not the folder.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from heddle.errors import CheckpointError
from heddle.storage import manifest as manifest_module
from heddle.storage import tensor_file
from heddle.storage.file_io import read_json_file, write_json_file
from heddle.storage.folder import tensors_sha256, verify_folder, write_folder
from heddle.storage.run_log import LOG_FILE, RUN_FILE, RunLog, read_log
from heddle.storage.tensor_file import DTYPES

GOLDEN = Path(__file__).parents[1] / "goldens" / "format2"
CHECKPOINT = "checkpoint"
SHA256 = "02e0cc3d6a208c815afb9636e157a1a6d7374e2aa7d46c9db3460e496ecc0908"
RUN: dict[str, Any] = {"command": "heddle train βῆτα", "settings": {"steps": 2, "learning_rate": 0.003}, "lora": None}
LINES: list[dict[str, Any]] = [{"step": 1, "loss": 5.5, "seconds": 0.25}, {"step": 2, "loss": None, "seconds": 1e-06}]


def tensors() -> dict[str, dict[str, Tensor]]:
    """Every type, a scalar, an empty tensor, one set in three shards and one in a single file; no random numbers."""
    bits = torch.arange(32, dtype=torch.uint8)
    typed = {name: (bits % 2 if dtype is torch.bool else bits).view(dtype) for name, dtype in DTYPES.items()}
    model = {f"layers.{layer}.weight": torch.arange(12.0).reshape(4, 3) * (layer + 1) for layer in (0, 2, 10)}
    return {
        "model.safetensors": model | {"embed": torch.arange(10, dtype=torch.bfloat16).reshape(5, 2)},
        "training.safetensors": typed | {"scalar": torch.tensor(7), "empty": torch.zeros(0, 5)},
    }


def write(folder: Path) -> None:
    """Write run.json, log.jsonl and a checkpoint, as a training does."""
    write_json_file(folder / RUN_FILE, RUN)
    log = RunLog(folder)
    log.resume(manifest_module.LogPosition())
    for line in LINES:
        log.write(line)
    log.close()
    documents = {"config.json": '{"width": 3}\n', "notes.txt": "βῆτα\r\n"}
    write_folder(
        folder / CHECKPOINT,
        tensors=tensors(),
        documents=documents,
        kind="training",
        log=log.position,
        max_shard_bytes=200,
    )


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_was_written_is_written_today_byte_for_byte(tmp_path: Path) -> None:
    write(tmp_path)
    golden, today = files(GOLDEN), files(tmp_path)
    assert len(golden) == 10
    assert today.keys() == golden.keys()
    assert [name for name in golden if today[name] != golden[name]] == []


def test_what_was_written_is_read_today() -> None:
    contents = verify_folder(GOLDEN / CHECKPOINT, "training")
    assert tensors_sha256(contents) == SHA256
    assert contents.documents == {"config.json": '{"width": 3}\n', "notes.txt": "βῆτα\r\n"}
    assert [len(files) for _, files in sorted(contents.tensor_sets.items())] == [1, 3]
    for name, expected in tensors().items():
        saved = contents.tensors(name)
        theirs: dict[str, Tensor] = {}
        for file in contents.tensor_sets[name]:
            theirs |= safetensors.torch.load_file(GOLDEN / CHECKPOINT / file)
        assert saved.keys() == theirs.keys() == expected.keys()
        for tensor in expected:
            for version in (saved[tensor], theirs[tensor]):
                assert (version.dtype, version.shape) == (expected[tensor].dtype, expected[tensor].shape)
                bits = [part.flatten().view(torch.uint8) for part in (version, expected[tensor])]
                assert torch.equal(*bits)
    assert read_json_file(GOLDEN / RUN_FILE) == RUN
    assert read_log(GOLDEN) == LINES


def test_a_run_of_then_goes_on_today(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path, dirs_exist_ok=True)
    log = RunLog(tmp_path)
    position = verify_folder(tmp_path / CHECKPOINT).log
    assert position is not None
    log.resume(position)
    log.write({"step": 3})
    log.close()
    assert read_log(tmp_path) == [*LINES, {"step": 3}]
    assert (tmp_path / LOG_FILE).read_bytes().startswith((GOLDEN / LOG_FILE).read_bytes())


@pytest.mark.parametrize(
    ("name", "value"), [("FORMAT_VERSION", 3), ("BLOCK_BYTES", 16), ("rows_per_block", lambda shape, itemsize: 1)]
)
def test_another_rule_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    """Planted: a rule of the format is changed."""
    monkeypatch.setattr(manifest_module, name, value)
    if name == "rows_per_block":
        monkeypatch.setattr(tensor_file, "rows_per_block", value)
        monkeypatch.setattr(tensor_file, "rows_per_block", value)
    with pytest.raises((AssertionError, CheckpointError)):
        test_what_was_written_is_written_today_byte_for_byte(tmp_path)
    with pytest.raises(CheckpointError):
        test_what_was_written_is_read_today()


if __name__ == "__main__":
    write(GOLDEN)
