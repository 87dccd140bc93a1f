"""Data arguments: what they may name, what is refused or skipped, and a hash of the content alone."""

import gzip
import os
import shlex
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pytest

from heddle.data import sources
from heddle.data.sources import FileSource, ScannedSource, parse_source
from heddle.errors import DataError
from heddle.storage.file_io import write_json_file


def scan(argument: object) -> ScannedSource:
    source, _ = parse_source(str(argument))
    return source.scan(lambda n: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    for name, text in {"b.txt": "second", "a.md": "first", "sub/c.py": "third = 3", "sub/d.rst": "fourth"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_folder_is_read_in_order_of_names(folder: Path) -> None:
    source = scan(folder)
    assert list(source.read()) == ["first", "second", "third = 3", "fourth"]
    assert (source.name, source.files, source.counts.documents) == ("texts", 4, 4)
    assert source.counts.bytes == sum(len(text) for text in source.read())


def test_hash_depends_on_content_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = scan(folder).hash
    moved = folder.parent / "elsewhere" / "other name"
    shutil.copytree(folder, moved)
    walk = os.walk

    def backwards(top: Path, onerror: Callable[[OSError], None]) -> Iterator[tuple[str, list[str], list[str]]]:
        for path, folders, names in walk(str(top), onerror=onerror):
            folders.sort(reverse=True)
            yield path, folders, sorted(names, reverse=True)

    monkeypatch.setattr(os, "walk", backwards)
    assert scan(moved).hash == before
    (moved / "sub/c.py").write_text("third = 4")
    assert scan(moved).hash != before  # catches a hash that ignores the content


def test_the_standard_library_without_installed_packages() -> None:
    source, weight = parse_source("stdlib")
    assert isinstance(source, FileSource)
    labels = {file.display_name for file in source.files}
    assert weight == 1
    assert "argparse.py" in labels
    assert not [label for label in labels if "site-packages" in label or "__pycache__" in label]
    assert all(label.endswith(".py") for label in labels)
    assert (Path(sysconfig.get_path("stdlib")) / "argparse.py").exists()


def test_bad_files_in_a_folder_are_skipped_counted_and_listed(folder: Path) -> None:
    (folder / "bad.txt").write_bytes(b"caf\xe9")
    (folder / "late.txt").write_bytes(b"a" * 300_000 + b"\xff")
    (folder / "binary.txt").write_bytes(b"\0\1\2")
    (folder / "lines.jsonl").write_bytes(b'{"text": "good"}\n{}')
    (folder / "empty.txt").write_bytes(b"")
    (folder / "newlines.txt").write_bytes(b"\n\n\n")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / ".hidden.txt").write_text("hidden")
    (folder / ".git").mkdir()
    (folder / ".git" / "x.txt").write_text("hidden")
    (folder / "broken.txt").symlink_to("nowhere")
    (folder / "loop.txt").symlink_to("loop.txt")
    (folder / "round").symlink_to(folder)
    (folder / "folder.txt").mkdir()
    os.mkfifo(folder / "pipe.txt")
    source = scan(folder)
    assert list(source.read()) == ["first", "second", "good", "third = 3", "fourth"]
    names = [skipped.file for skipped in source.skipped_files]
    assert names == ["bad.txt", "binary.txt", "broken.txt", "late.txt", "loop.txt", "pipe.txt"]
    assert (source.empty_files, source.ignored_files) == (2, 2)
    [(name, records)] = source.skipped_records
    assert (name, records.count) == ("lines.jsonl", 1)
    assert "record 2" in records.reason
    assert source.hash == scan_without(folder, names).hash


def scan_without(folder: Path, names: list[str]) -> ScannedSource:
    for name in names:
        (folder / name).unlink()
    return scan(folder)


def test_what_heddle_wrote_inside_is_no_text(folder: Path) -> None:
    """A comparison in the folder of its text would change the text; a file of that name that is another's is read."""
    before = scan(folder)
    out = folder / "out" / "runs"
    out.mkdir(parents=True)
    write_json_file(folder / "out" / "plan.json", {"designs": []})
    for path in (folder / "out" / "notes.txt", out / "notes.txt"):
        path.write_text("text\n" * 100)
    after = scan(folder)
    assert after.hash == before.hash
    assert [skipped.file for skipped in after.skipped_files] == [*(s.file for s in before.skipped_files), "out"]
    (folder / "out" / "plan.json").write_text('{"text": "a plan of another kind"}\n')
    other = scan(folder)
    assert other.hash != before.hash


def test_an_unreadable_folder_inside_is_listed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    source = scan(folder)
    assert [(s.file, s.reason) for s in source.skipped_files] == [("sub", "cannot be read (Permission denied)")]
    with pytest.raises(DataError, match=r"sub.*Permission denied"):
        scan(folder / "sub")


def test_a_named_bad_file_is_an_error(tmp_path: Path) -> None:
    for name, content, reason in [
        ("a.txt", b"\xff", r"a.txt.*UTF-8.*0xff.*offset 0.*UTF-8"),
        ("b.bin", b"\0", r"b.bin"),
        ("c.txt", b"", r"data c.txt is empty:"),
        ("d.txt", b"\n\n", r"data d.txt is empty:"),
        ("e.jsonl", b"{}", r"e.jsonl"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=reason):
            scan(tmp_path / name)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="named pipe"):
        scan(tmp_path / "pipe")


def test_a_named_file_needs_no_suffix(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("text")
    assert list(scan(tmp_path / "notes").read()) == ["text"]


def test_folders_without_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no text file"):
        scan(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"a.txt.*UTF-8"):
        scan(tmp_path)


@pytest.mark.parametrize("argument", ["missing", "missing@2", "a@b", "", "a\0b", "x@3/y", "/dev/null/x"])
def test_missing_data_is_one_sentence(argument: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_source(argument)
    message = str(caught.value)
    assert message.isprintable()
    assert message.endswith(".")


def test_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert parse_source("texts")[1] == 1
    assert parse_source("texts@3")[1] == 3
    assert parse_source("texts@0.25")[1] == 0.25
    assert parse_source("stdlib@2")[1] == 2
    for wrong in ("texts@0", "texts@0.0", "texts@0.0001", "texts@" + "9" * 400):
        with pytest.raises(DataError, match="weight"):
            parse_source(wrong)
    Path("texts@3").write_text("a file of this very name")
    source, weight = parse_source("texts@3")
    assert (source.name, weight) == ("texts@3", 1)


def test_a_file_that_changes_or_vanishes_is_an_error(folder: Path) -> None:
    source = scan(folder)
    (folder / "b.txt").write_text("longer than before")
    with pytest.raises(DataError, match=r"b.txt"):
        list(source.read())
    (folder / "b.txt").unlink()
    with pytest.raises(DataError, match=r"b.txt"):
        list(source.read())


def test_a_file_that_vanishes_between_listing_and_reading(folder: Path) -> None:
    source, _ = parse_source(str(folder))
    (folder / "b.txt").unlink()
    assert [s.file for s in source.scan(lambda n: None).skipped_files] == ["b.txt"]


def test_names_that_a_terminal_cannot_show(tmp_path: Path) -> None:
    name = os.fsdecode(b"a\xff\x1b[31m\n.txt")
    (tmp_path / name).write_bytes(b"\xff")
    (tmp_path / "good.txt").write_text("good")
    assert scan(tmp_path).skipped_files[0].file.isprintable()
    with pytest.raises(DataError) as caught:
        scan(tmp_path / name)
    assert str(caught.value).isprintable()


def test_progress_counts_the_bytes(folder: Path) -> None:
    source, _ = parse_source(str(folder))
    sizes: list[int] = []
    source.scan(sizes.append)
    assert sum(sizes) == source.size


def test_one_document_in_twenty_is_for_validation() -> None:
    count = sum(sources.is_in_validation(number.to_bytes(4, "big").rjust(8, b"\1")[::-1]) for number in range(20_000))
    assert 900 < count < 1100


def test_files_without_a_suffix_and_manual_pages_are_read_if_they_are_text(tmp_path: Path) -> None:
    (tmp_path / "fortune").write_text("a thread\n%\n織機\n")
    (tmp_path / "ls.1").write_text(".TH LS 1\n")
    (tmp_path / "printf.3posix.gz").write_bytes(gzip.compress(b".TH PRINTF 3\n"))
    (tmp_path / "libx.so.1").write_bytes(b"\x7fELF\2\1\1\0")
    (tmp_path / "legacy").write_bytes(b"caf\xe9 " * 100)
    (tmp_path / "cut").write_bytes(("é" * 8000).encode()[:-1])
    (tmp_path / "weights.bin").write_text("no suffix of text")
    source = scan(tmp_path)
    assert list(source.read()) == ["a thread\n%\n織機\n", ".TH LS 1\n", ".TH PRINTF 3\n"]
    assert [skipped.file for skipped in source.skipped_files] == ["cut"]
    assert source.ignored_files == 3


def test_a_saved_data_set_below_a_folder_is_named_and_arrow_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    for name in ("state.json", "dataset_info.json", "saved/state.json", "saved/dataset_info.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "state.json").unlink()  # alone, it may be of any program
    with pyarrow.ipc.new_file(str(tmp_path / "a.arrow"), (table := pyarrow.table({"text": ["warp"]})).schema) as file:
        file.write_table(table)
    source = scan(tmp_path)
    assert list(source.read()) == ["warp", "{}"]
    [skipped] = source.skipped_files
    assert (skipped.file, shlex.split(skipped.reason)[-1]) == ("saved", f"hf:{tmp_path}/saved")


def test_tables_and_pages_are_left_out_and_said_to_be(tmp_path: Path) -> None:
    for name in (
        "a.csv",
        "b.CSV",
        "c.html",
        "d.tsv.gz",
        "f.psv",
        "g.xhtml",
        "h.jsonl.zip",
        "i.tar.gz",
        "j.pdf",
        "e.txt",
    ):
        (tmp_path / name).write_text("text")
    source = scan(tmp_path)
    assert list(source.read()) == ["text"]
    one_each = dict.fromkeys((".html", ".pdf", ".psv", ".tar", ".tsv", ".xhtml", ".zip"), 1)
    assert source.left_out == {".csv": 2} | one_each
    assert list(scan(tmp_path / "a.csv").read()) == ["text"]  # named, it is read as it is
