"""Rows of a tensor: the rule of blocks, and that only the blocks in question are read and verified."""

import hashlib
import itertools
import math
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from heddle.errors import CheckpointError
from heddle.storage import file_io, tensor_file
from heddle.storage.folder import FolderContents, read_folder, write_folder
from heddle.storage.manifest import BLOCK_BYTES, rows_per_block
from heddle.storage.tensor_file import HeaderEntry, block_ranges

FILE = "model.safetensors"
ROWS, COLUMNS = 1500, 700  # 2800 bytes a row: 256 rows a block, 6 blocks, 4.2 MB
TALL = torch.arange(ROWS * COLUMNS, dtype=torch.int32).reshape(ROWS, COLUMNS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows") / "model"
    tensors = {
        "tall": TALL,
        "before": torch.randn(5, 3, dtype=torch.float64),
        "wide": torch.randn(3, BLOCK_BYTES).bfloat16(),  # a row is two MiB
        "scalar": torch.tensor(7.0),
        "empty": torch.zeros(4, 0),
        "none": torch.zeros(0, 4),
    }
    write_folder(folder, tensors={FILE: tensors}, documents={}, kind="model")
    return folder


@pytest.fixture
def contents(saved: Path) -> FolderContents:
    return read_folder(saved)


@pytest.mark.parametrize(
    ("shape", "itemsize", "expected"),
    [
        ((1500, 700), 4, 256),
        ((1500, 1024), 4, 256),  # exactly 1 MiB
        ((1500, 1025), 4, 128),
        ((100, 1024), 4, 100),  # not more than there are
        ((8, 2**20), 1, 1),
        ((8, 2**20 + 1), 1, 1),
        ((8, 2**19 + 1), 1, 1),
        ((8, 2**19), 1, 2),
        ((2**21,), 1, 2**20),
        ((2**21,), 8, 2**17),
        ((), 8, 1),
        ((0, 5), 4, 1),
        ((5, 0), 4, 5),
        ((0,), 4, 1),
        ((3, 2, 2**17), 4, 1),
        ((3, 2, 2**16), 4, 2),
    ],
)
def test_the_rule_of_rows_per_block(shape: tuple[int, ...], itemsize: int, expected: int) -> None:
    assert rows_per_block(shape, itemsize) == expected


def test_hashes_are_those_that_ranks_can_compute_from_their_rows(contents: FolderContents) -> None:
    record = contents.tensor_records(FILE)["tall"]
    halves = [TALL[:512], TALL[512:]]  # two ranks
    digests = []
    for half in halves:
        for start in range(0, len(half), 256):
            digests.append(hashlib.sha256(half[start : start + 256].contiguous().numpy().tobytes()))
    assert record.blocks == tuple(digest.hexdigest() for digest in digests)
    assert record.sha256 == hashlib.sha256(b"".join(digest.digest() for digest in digests)).hexdigest()
    for name in ("scalar", "empty", "none"):
        assert len(contents.tensor_records(FILE)[name].blocks) == 1


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, 1), (0, 256), (255, 257), (256, 512), (300, 301), (1499, 1500), (0, 1500), (7, 7), (1500, 1500)],
)
def test_rows_are_those_of_the_whole_tensor(contents: FolderContents, start: int, stop: int) -> None:
    assert same(contents.read_rows(FILE, "tall", start, stop), TALL[start:stop])


def test_rows_of_every_tensor(contents: FolderContents) -> None:
    whole = contents.tensors(FILE)
    for name in ("before", "wide", "empty", "none"):
        for start in range(len(whole[name]) + 1):
            for stop in range(start, len(whole[name]) + 1):
                assert same(contents.read_rows(FILE, name, start, stop), whole[name][start:stop])


def test_a_rank_in_a_sharded_set_reads_its_rows(tmp_path: Path) -> None:
    tensors = {f"layers.{n}": torch.randn(8, 3) for n in range(4)}
    write_folder(tmp_path / "m", tensors={FILE: tensors}, documents={}, kind="model", max_shard_bytes=200)
    contents = read_folder(tmp_path / "m")
    assert len(contents.tensor_sets[FILE]) == 2
    for name, tensor in tensors.items():
        assert torch.equal(torch.cat([contents.read_rows(FILE, name, n, n + 4) for n in (0, 4)]), tensor)


def test_only_the_blocks_in_question_are_read(contents: FolderContents, monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0
    original = os.readv

    def counting(descriptor: int, buffers: list[memoryview]) -> int:
        nonlocal read
        count = original(descriptor, buffers)
        read += count
        return count

    monkeypatch.setattr(os, "readv", counting)
    with open(contents.folder / FILE, "rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    for start, stop, blocks in [(0, 1, 1), (255, 257, 2), (256, 512, 1), (300, 900, 3), (5, 5, 0)]:
        read = 0
        contents.read_rows(FILE, "tall", start, stop)
        assert read == header + blocks * 256 * 4 * COLUMNS
    read = 0
    contents.read_rows(FILE, "tall", 1400, 1500)
    assert read == header + (ROWS - 5 * 256) * 4 * COLUMNS  # the last block is shorter


@pytest.mark.parametrize(("start", "stop"), [(-1, 1), (0, 1501), (2, 1), (1501, 1501)])
def test_rows_that_are_not_there_are_refused(contents: FolderContents, start: int, stop: int) -> None:
    with pytest.raises(CheckpointError, match=rf"'tall'.*\[1500, 700\].*{start}.*{stop}"):
        contents.read_rows(FILE, "tall", start, stop)


def test_tensors_without_rows_and_other_names_are_refused(contents: FolderContents) -> None:
    with pytest.raises(CheckpointError, match=r"'scalar'.*\[\].*0.*1"):
        contents.read_rows(FILE, "scalar", 0, 1)
    with pytest.raises(CheckpointError, match="tensor 'x'"):
        contents.read_rows(FILE, "x", 0, 1)
    with pytest.raises(CheckpointError, match=r"'x\.safetensors'"):
        contents.read_rows("x.safetensors", "tall", 0, 1)


def damaged_blocks(saved: Path) -> list[str]:
    """Flip one bit in each block of `tall` in turn; what of the six blocks is then read, and what is refused."""
    path = saved / FILE
    raw = bytearray(path.read_bytes())
    first = raw.index(TALL[:2].numpy().tobytes())
    wrong = []
    for block in range(6):
        at = first + block * 256 * 4 * COLUMNS + 12345
        raw[at] ^= 8
        path.write_bytes(raw)
        for number in range(6):
            rows = (256 * number, min(256 * number + 256, ROWS))
            try:
                intact = torch.equal(read_folder(saved).read_rows(FILE, "tall", *rows), TALL[slice(*rows)])
                if number == block or not intact:
                    wrong.append(f"block {number} was read although {block} is damaged")
            except CheckpointError as error:
                if number != block or f"'tall' was altered in block {block} of 6" not in str(error):
                    wrong.append(str(error))
        raw[at] ^= 8
    path.write_bytes(raw)
    return wrong


def test_damage_is_found_in_its_block_alone(saved: Path) -> None:
    assert damaged_blocks(saved) == []


def test_a_reader_that_does_not_hash_is_caught(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: every block has the hash that the manifest says."""

    def careless(self: tensor_file._BlockReader, entry: HeaderEntry, hashes: object, blocks: range) -> Tensor:
        ranges = block_ranges(entry.shape, entry.dtype.itemsize)[blocks.start : blocks.stop]
        buffer = torch.empty(ranges[-1][1] - ranges[0][0], dtype=torch.uint8)
        file_io.read_exactly(self.descriptor, buffer.numpy().data, self.path)
        return buffer

    monkeypatch.setattr(tensor_file._BlockReader, "read", careless)
    assert len(damaged_blocks(saved)) == 6


def test_blocks_cover_a_tensor_once() -> None:
    for shape in [(), (0,), (3, 0), (1,), (1500, 700), (3, 2**18), (2**19 + 3,), (5, 7, 11)]:
        for itemsize in (1, 2, 4, 8):
            ranges = block_ranges(shape, itemsize)
            assert ranges[0][0] == 0
            assert ranges[-1][1] == math.prod(shape) * itemsize
            assert all(end == start for (_, end), (start, _) in itertools.pairwise(ranges))
