"""What `--data` may name, what is refused, what is skipped, and that content alone decides the hash."""

import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from heddle.data import sources
from heddle.data.sources import FileSource, Survey, open_source
from heddle.errors import DataError


def survey(argument: object) -> Survey:
    source, _ = open_source(str(argument))
    return source.survey(lambda n: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    for name, text in {"b.txt": "second", "a.md": "first", "sub/c.py": "third = 3", "sub/d.rst": "fourth"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_folder_is_read_in_order_of_names(folder: Path) -> None:
    found = survey(folder)
    assert list(found.read()) == ["first", "second", "third = 3", "fourth"]
    assert (found.name, found.files, found.tally.documents) == ("texts", 4, 4)
    assert found.tally.bytes == sum(len(text) for text in found.read())


def test_hash_depends_on_content_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = survey(folder).hash
    moved = folder.parent / "elsewhere" / "other name"
    shutil.copytree(folder, moved)
    walk = os.walk

    def backwards(top: Path, onerror: Callable[[OSError], None]) -> Iterator[tuple[str, list[str], list[str]]]:
        for place, inner, names in walk(str(top), onerror=onerror):
            inner.sort(reverse=True)
            yield place, inner, sorted(names, reverse=True)

    monkeypatch.setattr(os, "walk", backwards)
    assert survey(moved).hash == before
    (moved / "sub/c.py").write_text("third = 4")
    assert survey(moved).hash != before  # a hash that ignored content would pass all of the above


def test_the_standard_library_without_installed_packages() -> None:
    source, weight = open_source("stdlib")
    assert isinstance(source, FileSource)
    labels = {file.label for file in source.files}
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
    found = survey(folder)
    assert list(found.read()) == ["first", "second", "third = 3", "fourth"]
    names = [skipped.file for skipped in found.skipped]
    assert names == ["bad.txt", "binary.txt", "broken.txt", "late.txt", "lines.jsonl", "loop.txt", "pipe.txt"]
    assert (found.empty, found.ignored) == (2, 2)
    assert found.hash == survey_without(folder, names).hash


def survey_without(folder: Path, names: list[str]) -> Survey:
    for name in names:
        (folder / name).unlink()
    return survey(folder)


def test_an_unreadable_folder_inside_is_listed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = os.scandir

    def refuse(place: str) -> object:
        if str(place).endswith("sub"):
            raise PermissionError(13, "Permission denied", str(place))
        return scan(place)

    monkeypatch.setattr(os, "scandir", refuse)
    found = survey(folder)
    assert [(s.file, s.reason) for s in found.skipped] == [("sub", "cannot be read (Permission denied)")]
    with pytest.raises(DataError, match=r"sub cannot be read .Permission denied"):
        survey(folder / "sub")


def test_a_named_bad_file_is_an_error(tmp_path: Path) -> None:
    for name, content, reason in [
        ("a.txt", b"\xff", r"data file .*a.txt is not UTF-8 .byte 0xff at offset 0.: convert it to UTF-8\."),
        ("b.bin", b"\0", r"data file .*b.bin looks binary"),
        ("c.txt", b"", r"data c.txt is empty: "),
        ("d.txt", b"\n\n", r"data d.txt is empty: "),
        ("e.jsonl", b"{}", r"data file .*e.jsonl has no string"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=reason):
            survey(tmp_path / name)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="not a regular file"):
        survey(tmp_path / "pipe")


def test_a_named_file_needs_no_suffix(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("text")
    assert list(survey(tmp_path / "notes").read()) == ["text"]


def test_folders_without_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no text file"):
        survey(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"holds no usable text .*a.txt, because it is not UTF-8"):
        survey(tmp_path)


@pytest.mark.parametrize("argument", ["missing", "missing@2", "a@b", "", "a\0b", "x@3/y", "/dev/null/x"])
def test_missing_data_is_one_sentence(argument: str) -> None:
    with pytest.raises(DataError) as caught:
        open_source(argument)
    message = str(caught.value)
    assert message.isprintable()
    assert message.endswith(".")


def test_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert open_source("texts")[1] == 1
    assert open_source("texts@3")[1] == 3
    assert open_source("texts@0.25")[1] == 0.25
    assert open_source("stdlib@2")[1] == 2
    for wrong in ("texts@0", "texts@0.0", "texts@0.0001", "texts@" + "9" * 400):
        with pytest.raises(DataError, match="weight"):
            open_source(wrong)
    Path("texts@3").write_text("a file of this very name")
    source, weight = open_source("texts@3")
    assert (source.name, weight) == ("texts@3", 1)


def test_a_file_that_changes_or_vanishes_is_an_error(folder: Path) -> None:
    found = survey(folder)
    (folder / "b.txt").write_text("longer than before")
    with pytest.raises(DataError, match=r"b.txt changed while it was read"):
        list(found.read())
    (folder / "b.txt").unlink()
    with pytest.raises(DataError, match=r"b.txt changed while it was read"):
        list(found.read())


def test_a_file_that_vanishes_between_listing_and_reading(folder: Path) -> None:
    source, _ = open_source(str(folder))
    (folder / "b.txt").unlink()
    assert [s.file for s in source.survey(lambda n: None).skipped] == ["b.txt"]


def test_names_that_a_terminal_cannot_show(tmp_path: Path) -> None:
    name = os.fsdecode(b"a\xff\x1b[31m\n.txt")
    (tmp_path / name).write_bytes(b"\xff")
    (tmp_path / "good.txt").write_text("good")
    assert survey(tmp_path).skipped[0].file.isprintable()
    with pytest.raises(DataError) as caught:
        survey(tmp_path / name)
    assert str(caught.value).isprintable()


def test_progress_counts_the_bytes(folder: Path) -> None:
    source, _ = open_source(str(folder))
    seen: list[int] = []
    source.survey(seen.append)
    assert sum(seen) == source.size


def test_one_document_in_twenty_is_held_out() -> None:
    held = sum(sources.is_held_out(number.to_bytes(4, "big").rjust(8, b"\1")[::-1]) for number in range(20_000))
    assert 900 < held < 1100
