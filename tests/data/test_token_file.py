"""Token files: what is read is what was written, and every kind of damage is noticed."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.data import token_file as token_bin
from heddle.data.token_file import HEADER_BYTES, MAGIC, TokenFile, write_token_file
from heddle.errors import DataError, MachineError

DOCUMENTS = [[1, 2, 3], [], [4], [5, 6]]


def write_documents(path: Path, documents: list[list[int]], vocab_size: int = 100, eod_id: int = 0) -> TokenFile:
    with write_token_file(path, vocab_size=vocab_size, eod_id=eod_id, tokenizer_hash="t") as writer:
        for document in documents:
            writer.add([document], len(document))
        writer.end_source()
    return TokenFile(path)


@given(
    documents=st.lists(st.lists(st.integers(1, 99), max_size=20), max_size=20),
    vocabulary=st.sampled_from([100, 65_536, 65_537, 2**31]),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], vocabulary: int
) -> None:
    file = write_documents(tmp_path_factory.mktemp("bin") / "a.bin", documents, vocabulary)
    assert file.dtype == (np.uint16 if vocabulary <= 65_536 else np.uint32)
    assert [file.document(i).tolist() for i in range(file.document_count)] == [[0, *ids] for ids in documents]
    assert file.read(0, len(file)).tolist() == [i for ids in documents for i in [0, *ids]]
    assert (file.document_count, file.text_bytes) == (len(documents), sum(map(len, documents)))
    assert file.source_token_counts == (len(file),)


def test_largest_ids_survive(tmp_path: Path) -> None:
    assert write_documents(tmp_path / "a", [[65_535]], 65_536).read(1, 2).tolist() == [65_535]
    assert write_documents(tmp_path / "b", [[65_536]], 65_537).read(1, 2).tolist() == [65_536]
    with pytest.raises(AssertionError):
        write_documents(tmp_path / "c", [[100]], 100)


def test_parts_and_header(tmp_path: Path) -> None:
    with write_token_file(tmp_path / "a", vocab_size=9, eod_id=8, tokenizer_hash="the hash") as writer:
        writer.add([[1, 2], [3]], 3)
        writer.end_source()
        writer.end_source()
        writer.add([[4]], 1)
        writer.end_source()
    file = TokenFile(tmp_path / "a")
    assert (file.source_token_counts, file.eod_id, file.tokenizer_hash, file.vocab_size) == (
        (5, 0, 2),
        8,
        "the hash",
        9,
    )


def test_reading_does_not_load_the_file(tmp_path: Path) -> None:
    file = write_documents(tmp_path / "a", DOCUMENTS)
    assert isinstance(file.offsets, np.memmap)
    assert not file.offsets.flags.writeable
    with pytest.raises(IndexError):
        file.read(0, len(file) + 1)
    with pytest.raises(IndexError):
        file.read(-1, 2)
    with pytest.raises(IndexError):
        file.document(4)


def test_any_damage_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_documents(path, DOCUMENTS)
    good = path.read_bytes()
    for offset in [*range(600), HEADER_BYTES - 2, *range(HEADER_BYTES, len(good))]:
        path.write_bytes(good[:offset] + bytes([good[offset] ^ 1]) + good[offset + 1 :])
        with pytest.raises(DataError, match=r"a\.bin is"):
            TokenFile(path)
    for length in range(0, len(good), 7):
        path.write_bytes(good[:length])
        with pytest.raises(DataError, match=r"not a heddle token file|truncated or damaged"):
            TokenFile(path)
    path.write_bytes(good + b"\0")
    with pytest.raises(DataError, match="truncated or damaged"):
        TokenFile(path)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"dtype": "float64"},
        {"dtype": "object"},
        {"tokens": -1},
        {"tokens": 2**63},
        {"tokens": True},
        {"tokens": 3.0},
        {"documents": None},
        {"parts": None},
        {"parts": ["x"]},
        {"end": 100},
        {"tokenizer": 1},
        {"sha256": None},
    ],
)
def test_foreign_headers_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "a.bin"
    write_documents(path, DOCUMENTS)
    good = path.read_bytes()
    header = json.loads(good[len(MAGIC) : HEADER_BYTES]) | change
    path.write_bytes((MAGIC + json.dumps(header).encode()).ljust(HEADER_BYTES) + good[HEADER_BYTES:])
    with pytest.raises(DataError, match="token file"):
        TokenFile(path)


def test_files_that_are_not_ours(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    for content in (b"", b"\x80\x04", MAGIC, MAGIC.ljust(HEADER_BYTES), MAGIC + b"[" * HEADER_BYTES * 2):
        path.write_bytes(content)
        with pytest.raises(DataError, match="token file"):
            TokenFile(path)
    with pytest.raises(DataError, match="cannot be read"):
        TokenFile(tmp_path / "missing")


def test_a_crash_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    with pytest.raises(AssertionError):  # 9 is outside the vocabulary
        write_documents(path, [[1], [9]], 9)
    assert list(tmp_path.iterdir()) == []
    write_documents(path, [[1]])
    with pytest.raises(AssertionError):
        write_documents(path, [[9]], 9)
    assert TokenFile(path).read(0, 2).tolist() == [0, 1]


def test_the_name_appears_only_after_the_bytes_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.bin"
    synced: list[int] = []
    sync, rename = os.fsync, os.rename

    def note(handle: int) -> None:
        synced.append(os.fstat(handle).st_size)
        sync(handle)

    def replace(source: Path, target: Path) -> None:
        assert synced == [source.stat().st_size]
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "rename", replace)
    write_documents(path, DOCUMENTS)
    assert path.exists()


def test_a_full_disk_is_the_machines_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MachineError, match=r"a.bin:.*No space left"):
        write_documents(tmp_path / "a.bin", DOCUMENTS)
    assert list(tmp_path.iterdir()) == []


def test_a_file_under_the_name_of_another_is_refused(tmp_path: Path) -> None:
    """Swapped in the cache, both would be whole, and each the text of the other."""
    write_documents(tmp_path / "a.bin", DOCUMENTS)
    (tmp_path / "a.bin").rename(tmp_path / "b.bin")
    with pytest.raises(DataError, match=r"b\.bin was written as a\.bin"):
        TokenFile(tmp_path / "b.bin")
    header = json.loads((tmp_path / "b.bin").read_bytes()[len(MAGIC) : HEADER_BYTES])
    assert header["name"] == "a.bin"


def test_equal_input_gives_equal_files(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", DOCUMENTS)
    with write_token_file(tmp_path / "b", vocab_size=100, eod_id=0, tokenizer_hash="t") as writer:
        writer.add(DOCUMENTS, 6)
        writer.end_source()
    first, second = ((tmp_path / name).read_bytes() for name in "ab")
    assert first[HEADER_BYTES:] == second[HEADER_BYTES:]
    write_documents(tmp_path / "again" / "a", DOCUMENTS)
    assert first == (tmp_path / "again" / "a").read_bytes()
    assert token_bin.FORMAT_VERSION == 1
