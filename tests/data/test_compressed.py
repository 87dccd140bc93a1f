"""Data where users have it: gzip, zstd and Parquet give the documents of the plain text; bombs are refused."""

import contextlib
import gzip
import json
import lzma
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import ipc, parquet

from heddle.data import documents
from heddle.data.documents import UnreadableError, read_documents, text_suffix
from heddle.data.sources import ContentCounts, ScannedSource, parse_source
from heddle.errors import DataError, pip_install
from tests import small


def zstd_file(path: Path, data: bytes) -> None:
    with pyarrow.CompressedOutputStream(str(path), "zstd") as output:
        output.write(data)


def gzip_file(path: Path, data: bytes) -> None:
    path.write_bytes(gzip.compress(data, mtime=0))


WRITERS: dict[str, Callable[[Path, bytes], None]] = {".gz": gzip_file, ".zst": zstd_file}


def scan(path: Path) -> ScannedSource:
    return parse_source(str(path))[0].scan(lambda _: None)


@pytest.mark.parametrize("suffix", WRITERS)
def test_compressed_text_is_the_text(suffix: str, tmp_path: Path) -> None:
    text = small.text(200_000)
    lines = "".join(json.dumps({"text": each, "n": 1}) + "\n" for each in ("a thread", "織機", text[:70_000]))
    for name, content in (("a.txt", text), ("a.jsonl", lines), ("none.txt", "")):
        (tmp_path / name).write_text(content, encoding="utf-8")
        WRITERS[suffix](tmp_path / (name + suffix), content.encode())
        assert list(read_documents(tmp_path / (name + suffix))) == list(read_documents(tmp_path / name))
    assert text_suffix(tmp_path / f"A.JSONL{suffix.upper()}") == ".jsonl"


def test_the_progress_of_reading_counts_bytes_on_disk(tmp_path: Path) -> None:
    gzip_file(tmp_path / "a.txt.gz", b"warp and weft " * 1000)
    (tmp_path / "b.txt").write_text("warp and weft " * 10, encoding="utf-8")
    gzip_file(tmp_path / "c.txt.gz", b"of no text\0")
    source, read = parse_source(str(tmp_path))[0], list[int]()
    source.scan(read.append)
    assert min(read) >= 0
    assert sum(read) <= source.size
    assert sum(read[:-1]) < source.size


def test_members_that_follow_each_other_are_one_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"warp ") + gzip.compress(b"weft"))
    assert list(read_documents(tmp_path / "a.txt.gz")) == ["warp weft"]


def test_a_folder_of_every_form(tmp_path: Path) -> None:
    gzip_file(tmp_path / "a.txt.gz", b"one text")
    zstd_file(tmp_path / "b.jsonl.zst", b'{"text": "two texts"}\n')
    parquet.write_table(pyarrow.table({"text": ["three", "four"]}), tmp_path / "c.parquet")
    (tmp_path / "d.warc").write_bytes(b"WARC/1.0\r\n\r\nfive")
    gzip_file(tmp_path / "e.warc.wet.gz", b"WARC/1.0\r\n\r\nsix")
    parquet.write_table(pyarrow.table({"body": ["unnamed"]}), tmp_path / "f.parquet")
    gzip_file(tmp_path / "weights.gz", b"of no text\0")
    source = scan(tmp_path)
    texts = ["one text", "two texts", "three", "four"]
    assert list(source.read()) == texts
    assert [skipped.file for skipped in source.skipped_files] == ["d.warc", "e.warc.wet.gz", "f.parquet"]
    assert source.ignored_files == 1
    counts = ContentCounts()
    for text in texts:
        counts.add(text)
    assert source.hash == counts.hasher.hexdigest()


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_bomb_is_refused(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would give 16 MiB; what is read of it is a few blocks."""
    path = tmp_path / f"a.txt{suffix}"
    WRITERS[suffix](path, b"loom " * (16 * 2**20 // 5))
    assert sum(map(len, read_documents(path))) > 2**24 - 5  # not yet: below 64 MiB any ratio is right
    monkeypatch.setattr(documents, "MAX_BYTES_OF_ANY_RATIO", 2**20)
    texts: list[str] = []
    with pytest.raises(UnreadableError, match="100 times"):
        texts.extend(read_documents(path))
    assert sum(map(len, texts)) < 2**23
    source = parse_source(str(path))[0]
    with pytest.raises(DataError, match=rf"a\.txt{suffix}.*100 times"):
        source.scan(lambda _: None)


@pytest.mark.parametrize("suffix", WRITERS)
def test_damage_is_one_sentence(suffix: str, tmp_path: Path) -> None:
    """Cut anywhere it is refused; with any bit changed it is refused or gives text."""
    path, text = tmp_path / f"a.txt{suffix}", small.text(3000)
    WRITERS[suffix](path, text.encode())
    data, draw = path.read_bytes(), random.Random(0)
    for size in (0, 1, 5, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        if size:
            with pytest.raises(UnreadableError, match=r"cannot be decompressed|looks binary"):
                list(read_documents(path))
    for _ in range(40):
        damaged = bytearray(data)
        damaged[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        with contextlib.suppress(UnreadableError):
            assert all(isinstance(each, str) for each in read_documents(path))


@pytest.mark.parametrize("name", ["a.warc", "a.WET", "a.warc.wet.gz"])
def test_a_warc_file_is_not_read_as_text(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"WARC/1.0\r\nWARC-Type: conversion\r\n\r\ntext")
    with pytest.raises(DataError, match=rf"{name}.*WARC.*\.jsonl"):
        scan(tmp_path / name)


def test_what_needs_pyarrow_is_said_and_in_a_folder_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zstd_file(tmp_path / "a.txt.zst", b"a text")
    (tmp_path / "b.txt").write_text("another")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    source: Any = scan(tmp_path)
    assert list(source.read()) == ["another"]
    assert source.skipped_files[0].reason == f"needs pyarrow to be read: {pip_install('data')}"
    with pytest.raises(DataError, match=r"a\.txt\.zst.*pyarrow"):
        scan(tmp_path / "a.txt.zst")


def test_a_parquet_that_stands_for_much_more_text_is_refused(tmp_path: Path) -> None:
    """As rows that share one long text, as pages that decompress to it, and as rows without any."""
    nulls = pyarrow.table({"text": pyarrow.nulls(10**7, pyarrow.string())})
    with parquet.ParquetWriter(tmp_path / "nulls.parquet", nulls.schema) as writer:
        for _ in range(7):
            writer.write_table(nulls)
    shared = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 2000, pyarrow.int32()), ["a" * 10**6])
    parquet.write_table(pyarrow.table({"text": shared}), tmp_path / "shared.parquet", compression="zstd")
    rows = pyarrow.array(["a" * 10**6] * 100)
    parquet.write_table(
        pyarrow.table({"text": rows}), tmp_path / "pages.parquet", compression="zstd", use_dictionary=False
    )
    for name in ("shared", "pages", "nulls"):
        assert (tmp_path / f"{name}.parquet").stat().st_size < 2 * 10**5
        with pytest.raises(DataError, match=rf"{name}.parquet.*more than 100 times"):
            scan(tmp_path / f"{name}.parquet")


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@pytest.mark.parametrize("form", ["stream", "file", "dictionary", "dictionary file"])
def test_an_arrow_batch_is_refused_before_it_is_decompressed(codec: str, form: str, tmp_path: Path) -> None:
    """100 MB in one batch, or in the dictionary of its one row."""
    texts = pyarrow.array(["a" * 10**6] * 100)
    if form.startswith("dictionary"):
        texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0], pyarrow.int32()), texts)
    batch, path = pyarrow.record_batch({"text": texts}), tmp_path / "a.arrow"
    opened = ipc.new_file if form.endswith("file") else ipc.new_stream
    for options, is_bomb in ((ipc.IpcWriteOptions(compression=codec), True), (ipc.IpcWriteOptions(), False)):
        with opened(str(path), batch.schema, options=options) as file:
            file.write(batch)
        if not is_bomb:
            scan(path)
            continue
        assert path.stat().st_size < 10**6
        usual = pyarrow.default_memory_pool()
        counting = pyarrow.proxy_memory_pool(usual)
        pyarrow.set_memory_pool(counting)
        try:
            with pytest.raises(DataError, match=r"a.arrow.*more than 100 times"):
                scan(path)
        finally:
            pyarrow.set_memory_pool(usual)
        assert counting.max_memory() < 10**6


def test_a_json_that_datasets_writes_is_of_a_bounded_size(tmp_path: Path) -> None:
    with (tmp_path / "state.json").open("wb") as file:
        file.truncate(5 * 2**30)
    with pytest.raises(DataError, match=r"state\.json"):
        scan(Path(f"hf:{tmp_path}"))


def test_an_xz_file_takes_no_more_memory_than_it_may(tmp_path: Path) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 2**30}]
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"warp", filters=filters))
    with pytest.raises(UnreadableError, match="decompressed"):
        list(read_documents(tmp_path / "a.txt.xz"))
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress(b"warp ") + lzma.compress(b"weft") + bytes(8))
    assert list(read_documents(tmp_path / "b.txt.xz")) == ["warp weft"]
    (tmp_path / "c.txt.xz").write_bytes(lzma.compress(b"warp" * 100)[:-9])
    with pytest.raises(UnreadableError, match="cut short"):
        list(read_documents(tmp_path / "c.txt.xz"))
