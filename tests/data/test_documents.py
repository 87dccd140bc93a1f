"""Files become documents: the same text again, nothing over 64 KiB, and a clear reason for what cannot be used."""

import bz2
import gzip
import json
import lzma
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.data import documents
from heddle.data.documents import (
    MAX_DOCUMENT_BYTES,
    SkippedRecords,
    UnreadableError,
    read_documents,
    split_documents,
)
from heddle.data.sources import parse_source


def blocks(data: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def check_cut(cutter: Callable[[Iterator[bytes]], Iterator[bytes]], text: str, size: int) -> None:
    data = text.encode()
    pieces = list(cutter(blocks(data, size)))
    assert b"".join(pieces) == data
    assert all(0 < len(piece) <= MAX_DOCUMENT_BYTES for piece in pieces)
    for piece in pieces:
        piece.decode()  # no character is cut
    assert pieces == list(cutter(blocks(data, 10**9)))  # how it is read does not matter


LONG = [
    "日本語" * 30_000,
    "a" * 200_000,
    "word " * 50_000,
    "line\n" * 50_000,
    "paragraph\nof two lines\r\n\r\n" * 9_000,
    "\n" * 200_000,
    "\n\n" + "x" * 150_000 + "\n \t \n" + "é" * 70_000,
    "👩‍👩‍👧‍👦" * 20_000,
]


@pytest.mark.parametrize("text", LONG)
@pytest.mark.parametrize("size", [997, 65_536, 65_537, 1_000_003])
def test_cut_keeps_every_byte(text: str, size: int) -> None:
    check_cut(split_documents, text, size)


@given(st.lists(st.tuples(st.sampled_from(["a", "é", "日", "😀", " ", "\n", "\n\n", "\r\n"]), st.integers(1, 70_000))))
def test_cut_any_text(runs: list[tuple[str, int]]) -> None:
    check_cut(split_documents, "".join(part * min(count, 70_000 // len(part)) for part, count in runs[:6]), 65_536)


def test_cut_check_catches_a_cut_character() -> None:
    def careless(stream: Iterator[bytes]) -> Iterator[bytes]:
        return blocks(b"".join(stream), MAX_DOCUMENT_BYTES)

    with pytest.raises(UnicodeDecodeError):
        check_cut(careless, "日本語" * 30_000, 65_536)


def test_cut_prefers_blank_lines_then_lines_then_spaces() -> None:
    filler = "word " * 4_000 + "\n"
    text = filler + "\n" + filler * 4
    assert next(split_documents([text.encode()])).decode() == filler + "\n"
    assert next(split_documents([(filler * 9).encode()])).decode() == filler * 3
    assert next(split_documents([b"word " * 20_000])) == b"word " * 13_107


def test_a_file_up_to_the_limit_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a\n\n" * (MAX_DOCUMENT_BYTES // 3) + "b" * (MAX_DOCUMENT_BYTES % 3))
    assert path.stat().st_size == MAX_DOCUMENT_BYTES
    assert len(list(read_documents(path))) == 1
    with path.open("a") as file:
        file.write("b")
    assert len(list(read_documents(path))) == 2


@pytest.mark.parametrize("text", ["a\r\nb\r\n", "a\0b".rjust(9000), "\u2028\x0b\x85", "e\u0301", "\x7f\x1b[0m"])
def test_text_is_kept_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    assert "".join(read_documents(path)) == (text if not text.isspace() else "")


def test_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfabc")
    assert list(read_documents(path)) == ["abc"]
    path.write_bytes(b"\xef\xbb\xbf\xff")
    with pytest.raises(UnreadableError, match="offset 3"):
        list(read_documents(path))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"ab\xffcd", r"0xff.*offset 2"),
        (b"a" * 100_000 + b"\xe9t\xe9", r"0xe9.*offset 100000"),
        (b"\x7fELF\0\0", "offset 4"),
        ("utf-16".encode("utf-16-le"), "looks binary"),
        (b"abc\xe6\x97", r"UTF-8.*3"),
        (b"\xed\xa0\x80", "UTF-8"),
        (b"\xc0\x80", "UTF-8"),
    ],
)
def test_what_is_not_text_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(UnreadableError, match=reason):
        list(read_documents(path))


@pytest.mark.parametrize("content", [b"", b"\n\n\n", b" \t\r\n" * 50_000, b"\xef\xbb\xbf"])
def test_white_space_alone_is_no_document(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    assert list(read_documents(path)) == []


def test_special_files_do_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    things = {tmp_path / "pipe.txt": "a named pipe", tmp_path: "a folder", Path(os.devnull): "a device"}
    for path, words in things.items():
        with pytest.raises(UnreadableError, match=f"is {words}:"):
            list(read_documents(path))
    with pytest.raises(UnreadableError, match="does not exist"):
        list(read_documents(tmp_path / "gone.txt"))


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.JSONL"
    texts = [
        "one",
        "two\nlines",
        "\u2028\0\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
        "x" * 200_000,
    ]
    lines = [json.dumps({"id": 1, "text": text}) for text in texts]
    path.write_text("\ufeff" + lines[0] + "\r\n\n" + "\n".join(lines[1:]), encoding="utf-8")
    read = list(read_documents(path))
    assert read[:3] == texts[:3]
    assert "".join(read[3:]) == texts[3]
    assert all(len(text.encode()) <= MAX_DOCUMENT_BYTES for text in read)


BROKEN = [
    (b"{", "line 2"),
    (b"\xff", "line 2"),
    (b"[" * 200_000, "line 2"),
    (b"1" * 5_000, "line 2"),
    (b"[1]", "record 2"),
    (b"null", "record 2"),
    (b'{"text": null}', "record 2"),
    (b'{"text": 3}', "record 2"),
    (b'{"body": "a"}', "record 2"),
    (b'{"text": "\\ud800"}', "surrogate"),
]


@pytest.mark.parametrize(("line", "reason"), BROKEN)
def test_a_record_without_text_is_skipped_and_named(tmp_path: Path, line: bytes, reason: str) -> None:
    path, skipped = tmp_path / "a.jsonl", SkippedRecords()
    path.write_bytes(b'{"text": "fine"}\n' + line + b'\n{"text": "after"}')
    assert list(read_documents(path, skipped=skipped)) == ["fine", "after"]
    assert skipped.count == 1
    assert reason in skipped.reason
    path.write_bytes(line)
    with pytest.raises(UnreadableError):  # nothing else is there
        list(read_documents(path))


def test_an_endless_json_line_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_JSON_LINE_BYTES", 1024 * 1024)
    path, skipped = tmp_path / "a.jsonl", SkippedRecords()
    path.write_bytes(b'{"text": "' + b"a" * 5_000_000 + b'"}\n{"text": "after"}\n')
    assert list(read_documents(path, skipped=skipped)) == ["after"]
    assert (skipped.count, "1 MB on line 1" in skipped.reason) == (1, True)


RECORDS = ["one", "two\nlines", "a\u2028\u0085\x1db", "日本", "x" * 70_000]


RECORD_NAMES = ["a.jsonl", "a.ndjson", "A.JSONLINES", "a.ldjson", "lines.json", "lines.jl", "part-00000"]
RECORD_NAMES += ["array.json", "indented.json", "array.jsonl", "objects.json"]


@pytest.mark.parametrize("name", RECORD_NAMES)
@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".xz", ".gzip", ".lzma"])
def test_records_under_every_usual_name(name: str, suffix: str, tmp_path: Path) -> None:
    records = [{"id": 1, "text": text, "nested": {"a": [1, "]"]}} for text in RECORDS]
    if name == "objects.json":
        content = "\n".join(json.dumps(record, indent=1, ensure_ascii=False) for record in records)
    elif name in ("array.json", "indented.json", "array.jsonl"):
        content = json.dumps(records, indent=2 if name == "indented.json" else None, ensure_ascii=False)
    else:
        content = "\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    compressors: dict[str, Callable[[bytes], bytes]] = {
        "": bytes,
        ".gz": gzip.compress,
        ".bz2": bz2.compress,
        ".xz": lzma.compress,
        ".gzip": gzip.compress,
        ".lzma": lambda data: lzma.compress(data, lzma.FORMAT_ALONE),
    }
    path = tmp_path / (name + suffix)
    path.write_bytes(compressors[suffix](content.encode()))
    assert "".join(read_documents(path)) == "".join(RECORDS)


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_a_broken_array_keeps_what_was_read(cut: int, tmp_path: Path) -> None:
    path, skipped = tmp_path / "a.json", SkippedRecords()
    path.write_text(json.dumps([{"text": "first"}, {"text": "second"}, {"text": "x" * 50}])[:-cut])
    read = list(read_documents(path, skipped=skipped))
    assert read[:2] == ["first", "second"]
    assert (skipped.count, "item" in skipped.reason) == (1, True)


FINE = [b'{"text": "one"}', b'{"text": "two"}', b'{"text": "three"}']


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([b"null", *FINE], "of record 1"),
        ([b'"a \\" b"', b"-1.5e3", *FINE], "of record 1"),
        ([FINE[0], b'{"text": "\xff"}', *FINE[1:]], "UTF-8 in item 2"),
        ([FINE[0], b'{"text": "a" "b"}', *FINE[1:]], "JSON in item 2"),
        ([*FINE[:2], b"[" * 99_999, FINE[2]], "JSON in item 3"),
    ],
)
@pytest.mark.parametrize("form", [b"[%b]", b"[\n  %b\n]"])
def test_a_broken_item_of_an_array_costs_no_other(
    records: list[bytes], reason: str, form: bytes, tmp_path: Path
) -> None:
    path, skipped = tmp_path / "a.json", SkippedRecords()
    path.write_bytes(form % (b",\n  " if b" " in form else b",\n").join(records))
    assert list(read_documents(path, skipped=skipped)) == ["one", "two", "three"]
    assert (skipped.count, reason in skipped.reason) == (len(records) - 3, True)


@pytest.mark.parametrize("first", [b"null", b'{"text": "never ends'])
def test_a_broken_first_line_of_json_lines_costs_no_other(first: bytes, tmp_path: Path) -> None:
    path, skipped = tmp_path / "a.json", SkippedRecords()
    path.write_bytes(b"\n".join([first, *FINE]))
    assert list(read_documents(path, skipped=skipped)) == ["one", "two", "three"]
    assert skipped.count == 1


def test_records_of_one_line_after_a_broken_one_are_said_to_be_left_out(tmp_path: Path) -> None:
    path, skipped = tmp_path / "a.json", SkippedRecords()
    path.write_bytes(b"[" + b", ".join([FINE[0], b'{"text": "a" "b"}', *FINE[1:]]) + b"]")
    assert list(read_documents(path, skipped=skipped)) == ["one"]
    assert "from item 2 on" in skipped.reason


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json"])
def test_what_a_name_hides_is_named(name: str, tmp_path: Path) -> None:
    contents = {
        "gzip": gzip.compress(FINE[0]),
        "bzip2": bz2.compress(FINE[0]),
        "xz": lzma.compress(FINE[0]),
        "zip": b"PK\x03\x04aaa",
        "tar": b"a.txt".ljust(257, b"\0") + b"ustar\0" + bytes(249),
        "UTF-16": FINE[0].decode().encode("utf-16"),
        "UTF-32": FINE[0].decode().encode("utf-32"),
    }
    for what, content in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UnreadableError, match=what):
            list(read_documents(tmp_path / name))


@pytest.mark.parametrize(
    ("rest", "is_whole"), [(b" \n\0", True), (b"\n" * 2**21, True), (b"\n[1]", False), (b"x", False)]
)
def test_what_follows_an_array_is_not_left_out_without_a_word(rest: bytes, is_whole: bool, tmp_path: Path) -> None:
    path, skipped = tmp_path / "a.json", SkippedRecords()
    path.write_bytes(b"[" + FINE[0] + b"]" + rest)
    assert list(read_documents(path, skipped=skipped)) == ["one"]
    assert ("more after its array" in skipped.reason) is not is_whole


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_json_text_sequences_are_records(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x1e" + b"\n\x1e".join(FINE) + b"\n")
    assert list(read_documents(tmp_path / name)) == ["one", "two", "three"]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b",\n", b"\n\n", b"\n\x1e"])
def test_what_stands_between_records_is_no_part_of_them(line_end: bytes, tmp_path: Path) -> None:
    path, skipped = tmp_path / "a.jsonl", SkippedRecords()
    path.write_bytes(line_end.join([*FINE, b""]))
    assert list(read_documents(path, skipped=skipped)) == ["one", "two", "three"]
    assert not skipped.count


@pytest.mark.parametrize("length", [10, 2_000_000])
def test_a_json_file_may_be_one_record(length: int, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"id": 1, "text": "é\n" * length}, indent=1))
    assert "".join(read_documents(path)) == "é\n" * length
    assert "".join(read_documents(path, "body")) == path.read_text()


def test_a_broken_object_among_objects_costs_no_other(tmp_path: Path) -> None:
    path, skipped = tmp_path / "a.json", SkippedRecords()
    records = [json.dumps({"text": text}, indent=1) for text in ("one", "two", "three")]
    path.write_text("\n".join([records[0], records[1].replace(":", ""), records[2]]))
    assert list(read_documents(path, skipped=skipped)) == ["one", "three"]
    assert (skipped.count, "JSON in item 2" in skipped.reason) == (1, True)


@pytest.mark.parametrize("content", ['{"a": 1}', '{\n "text": 1\n}', "[1, 2]", '{"a": 1}\nx', "[]", '{"a": 1} []'])
def test_other_json_is_text_like_any_source(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    assert list(read_documents(tmp_path / "a.json")) == [content]


@pytest.mark.parametrize("start", ['{"data": ', '{"version": "1.1", "n": 2, "rows": '])
def test_records_in_a_field_of_an_object_are_not_read_as_text(start: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(start + '[{"id": 1, "text": "one"}]}')
    with pytest.raises(UnreadableError, match=r'field "(data|rows)"'):
        list(read_documents(tmp_path / "a.json"))
    (tmp_path / "a.json").write_text(content := start + '[{"id": 1}], "text": 1}')  # such as settings of a program
    assert list(read_documents(tmp_path / "a.json", "body")) == [content]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.txt.zst"])
def test_a_pointer_in_place_of_a_file_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(UnreadableError, match="Git LFS pointer"):
        list(read_documents(tmp_path / name))


def test_a_compressed_tar_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(b"a.txt".ljust(257, b"\0") + b"ustar\0" + bytes(249)))
    with pytest.raises(UnreadableError, match="tar archive"):
        list(read_documents(tmp_path / "a.tar.gz"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jl", "part-00000", "my threads.jsonl"])
@pytest.mark.parametrize("field", ["content", "post body", "it's"])
def test_other_fields_are_said_with_how_to_name_them(name: str, field: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(json.dumps({"n": 1, field: "a thread"}) + "\n" + json.dumps({field: "another"}) + "\n")
    with pytest.raises(UnreadableError, match=rf"\({field}\).*hf:.*text=") as caught:
        list(read_documents(path))
    [argument] = shlex.split(str(caught.value).split("name one with ")[1])
    assert list(parse_source(argument)[0].scan(lambda _: None).read()) == ["a thread", "another"]


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("a.jsonl", "my,field"),
        ("a.jsonl", ""),
        ("a.jsonl", "two\nlines"),
        ("a,text=b.jsonl", "content"),
        ("two\nlines.jsonl", "content"),
    ],
)
def test_fields_and_files_that_no_argument_names_are_to_be_renamed(name: str, field: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(json.dumps({field: "a thread"}) + "\n" + json.dumps({field: "another"}) + "\n")
    with pytest.raises(UnreadableError, match='call one "text"'):
        list(read_documents(path))
    path.write_text(path.read_text().replace(json.dumps(field), '"text"'))
    assert list(read_documents(path)) == ["a thread", "another"]


def test_a_field_that_can_be_named_is_named_before_one_that_cannot(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"a,b": "x", "content": "a thread"}) + "\n")
    with pytest.raises(UnreadableError, match="text=content"):
        list(read_documents(path))


@pytest.mark.parametrize(
    "content",
    [
        {"text": ["a thread", "another"], "n": [1, 2]},
        {"text": {"0": "a thread", "1": "another"}},
        {"version": 1, "meta": {"of": "cloth"}, "rows": [{"text": "a thread"}]},
        {"empty": [], "rows": [{"n": 1, "text": "a thread"}]},
    ],
)
def test_json_of_data_frames_is_not_read_as_text(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UnreadableError, match="a record on each line"):
        list(read_documents(path))


@pytest.mark.parametrize("end", [",", ",\n", "\x1e"])
def test_a_record_alone_may_end_as_in_an_array(end: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"text": "a thread"}) + end)
    assert list(read_documents(path)) == ["a thread"]
