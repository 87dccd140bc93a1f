"""Malicious files are refused with a CheckpointError, without running code, waiting or allocating much memory."""

import dataclasses
import hashlib
import io
import json
import os
import pickle
import socket
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from heddle.errors import CheckpointError, MachineError
from heddle.storage.folder import read_folder, verify_folder, write_folder
from heddle.storage.manifest import FileRecord, Manifest, TensorRecord
from heddle.storage.tensor_file import MAX_HEADER_BYTES, read_tensor_file
from tests.storage.shared import content

LIMIT = 2**40


def file(header: bytes | str | dict[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with any header and any header length."""
    text = json.dumps(header) if isinstance(header, dict) else header
    raw = text.encode() if isinstance(text, str) else text
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def tensor_header(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4), **extra_fields: Any) -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets, **extra_fields}}


class Bomb:
    """Creates a folder if it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, int]]:
        return os.mkdir, ("unpickled", 0o700)


def archive(mode: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:  # type: ignore[call-overload]
        entry = tarfile.TarInfo("../data.pkl")
        entry.size = 4
        tar.addfile(entry, io.BytesIO(b"data"))
    return buffer.getvalue()


def zipped() -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(2)}, buffer)
    return buffer.getvalue()


PICKLES = {f"pickle protocol {protocol}": pickle.dumps(Bomb(), protocol) for protocol in range(6)} | {
    "dictionary": pickle.dumps({"a": Bomb()}),
    "protocol 0 dictionary": pickle.dumps({"a": [Bomb()]}, 0),
    "torch zip": zipped(),
    "gzip": archive("w:gz"),
}

FILES = PICKLES | {
    "tar": archive("w"),
    "pickle behind a header": file(tensor_header(), pickle.dumps(Bomb())),
    "header is a pickle": file(pickle.dumps(Bomb())),
    "nothing": b"",
    "seven bytes": bytes(7),
    "zero length": file(b""),
    "zero length and data": file(b"", bytes(16)),
    "length 2^63": file("{}", length=2**63),
    "length 2^64-1": file("{}", length=2**64 - 1),
    "length beyond the file": file("{}", length=3),
    "header over the cap": file(b"{}" + b" " * MAX_HEADER_BYTES),
    "not JSON": file("{a: 1}"),
    "not UTF-8": file(b'{"\xff": 1}'),
    "a list": file("[]"),
    "deep": file('{"a":' * 50_000 + "1" + "}" * 50_000),
    "deep list": file('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"),
    "many digits": file('{"a": ' + "9" * 5000 + "}"),
    "duplicate tensors": file('{"a":%s,"a":%s}' % ((json.dumps(tensor_header()["a"]),) * 2), bytes(4)),
    "duplicate fields": file('{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', bytes(4)),
    "too many tensors": file(
        "{" + ",".join(f'"{i}":0' for i in range(100_001)) + "}",
    ),
    "overlap": file(tensor_header() | {"b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]}}, bytes(6)),
    "the same bytes twice": file(tensor_header() | {"b": tensor_header()["a"]}, bytes(4)),
    "hole": file(tensor_header() | {"b": {"dtype": "U8", "shape": [4], "data_offsets": [5, 9]}}, bytes(9)),
    "hole at the start": file(tensor_header(offsets=[1, 5]), bytes(5)),
    "bytes left over": file(tensor_header(), bytes(5)),
    "bytes missing": file(tensor_header(), bytes(3)),
    "data without tensors": file("{}", bytes(5)),
    "negative shape": file(tensor_header(shape=[-2, -2]), bytes(4)),
    "negative offsets": file(tensor_header(offsets=[-4, 0]), bytes(4)),
    "offsets reversed": file(tensor_header(offsets=[4, 0]), bytes(4)),
    "three offsets": file(tensor_header(offsets=[0, 4, 4]), bytes(4)),
    "no offsets": file({"a": {"dtype": "U8", "shape": [4]}}, bytes(4)),
    "more fields": file(tensor_header(code="import os"), bytes(4)),
    "shape is a number": file(tensor_header(shape=4), bytes(4)),
    "shape of floats": file(tensor_header(shape=[4.0]), bytes(4)),
    "shape of truths": file(tensor_header(shape=[True, 4]), bytes(4)),
    "shape of NaN": file('{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,4]}}', bytes(4)),
    "shape that does not fit": file(tensor_header(shape=[5]), bytes(4)),
    "shape whose product wraps": file(tensor_header(shape=[2**32, 2**32, 4]), bytes(4)),
    "empty with huge sides": file(tensor_header(shape=[0, 2**62, 2**62], offsets=[0, 0])),
    "65 dimensions": file(tensor_header(shape=[1] * 64 + [4]), bytes(4)),
    "huge tensor": file(tensor_header(shape=[LIMIT], offsets=[0, LIMIT]), bytes(4)),
    "unknown type": file(tensor_header(dtype="Q4_0"), bytes(4)),
    "type is a list": file(tensor_header(dtype=["U8"]), bytes(4)),
    "entry is a text": file({"a": "os.system"}),
    "metadata of numbers": file({"__metadata__": {"a": 1}} | tensor_header(), bytes(4)),
    "metadata is a text": file({"__metadata__": "x"} | tensor_header(), bytes(4)),
    "name ../x": file({"../x": tensor_header()["a"]}, bytes(4)),
    "name /etc": file({"/etc/passwd": tensor_header()["a"]}, bytes(4)),
    "name with NUL": file({"a\0": tensor_header()["a"]}, bytes(4)),
    "name turned around": file({"\u202ea": tensor_header()["a"]}, bytes(4)),
    "name with half a character": file({"\ud800": tensor_header()["a"]}, bytes(4)),
    "empty name": file({"": tensor_header()["a"]}, bytes(4)),
    "long name": file({"a" * 201: tensor_header()["a"]}, bytes(4)),
}


def signed(folder: Path, files: dict[str, bytes], tensors: tuple[str, ...] = ("a",)) -> Path:
    """A folder with any files and a manifest that lists them."""
    folder.mkdir()
    records = {}
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
        sha256 = hashlib.sha256(raw).hexdigest()
        if name.endswith(".safetensors"):
            header = raw[: 8 + min(int.from_bytes(raw[:8], "little"), len(raw))]
            data = hashlib.sha256(raw[len(header) :]).hexdigest()
            hashes = dict.fromkeys(tensors, TensorRecord("U8", (4,), 4, (data,)))
            records[name] = FileRecord(len(raw), sha256, hashlib.sha256(header).hexdigest(), hashes)
        else:
            records[name] = FileRecord(len(raw), sha256)
    (folder / "manifest.json").write_bytes(Manifest("model", records).encode())
    return folder


def test_a_valid_file_is_read_and_verified(tmp_path: Path) -> None:
    folder = signed(tmp_path / "model", {"model.safetensors": file(tensor_header(), b"abcd")})
    verify_folder(folder)
    assert bytes(dict(read_tensor_file(folder / "model.safetensors"))["a"].tolist()) == b"abcd"


@pytest.mark.parametrize("raw", FILES.values(), ids=FILES.keys())
def test_hostile_tensor_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    folder = signed(tmp_path / "model", {"model.safetensors": raw})
    for read in (lambda: list(read_tensor_file(folder / "model.safetensors")), lambda: verify_folder(folder)):
        with pytest.raises(CheckpointError) as caught:
            read()
        assert str(folder / "model.safetensors") in str(caught.value)
        assert len(str(caught.value)) < 1000
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("raw", PICKLES.values(), ids=PICKLES.keys())
def test_the_error_of_a_pickle_names_the_format(tmp_path: Path, raw: bytes) -> None:
    write_folder(tmp_path / "model", **content(1))
    (tmp_path / "model" / "model.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"model\.safetensors:.*pickle"):
        read_folder(tmp_path / "model").tensors("model.safetensors")


def manifest(**changes: Any) -> bytes:
    """A manifest with changes and a correct hash."""
    body = {"format": "heddle", "version": 2, "kind": "model", "files": {}} | changes
    text = json.dumps(body, indent=1, sort_keys=True) + "\n"
    body["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    return (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()


DIGEST = "0" * 64
TENSOR_FILE = {"size": 8, "sha256": DIGEST, "header_sha256": DIGEST, "tensors": {}}
TENSOR = {
    "dtype": "U8",
    "shape": [4],
    "row_block": 4,
    "sha256": hashlib.sha256(bytes(32)).hexdigest(),
    "blocks": [DIGEST],
}


def tensor_manifest(**changes: Any) -> bytes:
    """A manifest of one tensor file, right but for the changes of its tensor's fields."""
    return manifest(files={"a.safetensors": TENSOR_FILE | {"tensors": {"a": TENSOR | changes}}})


MANIFESTS = {
    "nothing": b"",
    "pickle": pickle.dumps(Bomb()),
    "random": bytes(range(256)),
    "list": b"[]",
    "null": b"null",
    "deep": b'{"a":' * 50_000,
    "another program's": b'{"weight_map": {}}',
    "duplicate keys": manifest().replace(b'"kind": "model"', b'"kind": "model",\n "kind": "model"'),
    "other spaces": manifest().replace(b"\n", b"\r\n"),
    "wrong own hash": manifest().replace(b'"model"', b'"mode1"'),
    "version true": manifest(version=True),
    "version 1.0": manifest(version=1.0),
    "kind is a number": manifest(kind=1),
    "kind is a path": manifest(kind="../model"),
    "files is a list": manifest(files=[]),
    "log is a list": manifest(log=[1, "0" * 16]),
    "log without lines": manifest(log={"head": "0" * 16}),
    "log of negative lines": manifest(log={"lines": -1, "head": "0" * 16}),
    "log's head a SHA-256": manifest(log={"lines": 1, "head": DIGEST}),
    "file outside": manifest(files={"../a.json": {"size": 0, "sha256": DIGEST}}),
    "absolute file": manifest(files={"/etc/passwd": {"size": 0, "sha256": DIGEST}}),
    "file is ..": manifest(files={"..": {"size": 0, "sha256": DIGEST}}),
    "hidden file": manifest(files={".lock": {"size": 0, "sha256": DIGEST}}),
    "itself": manifest(files={"manifest.json": {"size": 0, "sha256": DIGEST}}),
    "record is a text": manifest(files={"a.json": "x"}),
    "negative size": manifest(files={"a.json": {"size": -1, "sha256": DIGEST}}),
    "size is a float": manifest(files={"a.json": {"size": 1.0, "sha256": DIGEST}}),
    "size true": manifest(files={"a.json": {"size": True, "sha256": DIGEST}}),
    "hash is a number": manifest(files={"a.json": {"size": 1, "sha256": 0}}),
    "hash in capitals": manifest(files={"a.json": {"size": 1, "sha256": "A" * 64}}),
    "no hash": manifest(files={"a.json": {"size": 1}}),
    "tensors in a document": manifest(files={"a.json": TENSOR_FILE}),
    "no tensors": manifest(files={"a.safetensors": {"size": 1, "sha256": DIGEST}}),
    "tensors null": manifest(files={"a.safetensors": TENSOR_FILE | {"tensors": None}}),
    "tensors a list": manifest(files={"a.safetensors": TENSOR_FILE | {"tensors": ["a"]}}),
    "tensor's name a path": manifest(files={"a.safetensors": TENSOR_FILE | {"tensors": {"../a": DIGEST}}}),
    "tensor's fields a list": manifest(files={"a.safetensors": TENSOR_FILE | {"tensors": {"a": [DIGEST]}}}),
    "tensor's fields a hash": manifest(files={"a.safetensors": TENSOR_FILE | {"tensors": {"a": DIGEST}}}),
    "tensor's hash not of its blocks": tensor_manifest(sha256=DIGEST),
    "tensor's type a number": tensor_manifest(dtype=8),
    "tensor's shape negative": tensor_manifest(shape=[-4]),
    "tensor's shape huge": tensor_manifest(shape=[2**62]),
    "tensor's shape long": tensor_manifest(shape=[1] * 65),
    "no rows a block": tensor_manifest(row_block=0),
    "rows of a block true": tensor_manifest(row_block=True),
    "blocks a text": tensor_manifest(blocks=DIGEST),
    "block's hash short": tensor_manifest(blocks=["0"]),
}


def test_the_unchanged_manifest_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(manifest())
    assert read_folder(tmp_path).kind == "model"


def test_fields_of_later_versions_pass(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"")
    record = {"size": 0, "sha256": hashlib.sha256(b"").hexdigest(), "rank": 3}
    raw = manifest(files={"a.json": record}, mesh={"ranks": [1, 2.5]}, log={"lines": 2, "head": "ab" * 8, "bytes": 9})
    (tmp_path / "manifest.json").write_bytes(raw)
    contents = read_folder(tmp_path)
    assert contents.documents == {"a.json": ""}
    assert (contents.log.lines, contents.log.head) == (2, "ab" * 8) if contents.log else False
    (tmp_path / "manifest.json").write_bytes(raw.replace(b"2.5", b"2.6"))
    with pytest.raises(CheckpointError, match="it was altered"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (1, "was saved in format 1, and this heddle reads only format 2; train or save it again, or read it with the"),
        (3, "was saved in format 3 by a newer heddle, and this one reads only format 2; install the newer release"),
    ],
)
def test_another_format_is_refused_in_a_sentence(tmp_path: Path, version: int, words: str) -> None:
    (tmp_path / "manifest.json").write_bytes(manifest(version=version, files="as it likes"))
    with pytest.raises(CheckpointError) as caught:
        read_folder(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: {words}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "I8"},
        {"shape": (2, 2)},
        {"shape": (2**61,)},
        {"row_block": 2},
        {"blocks": (DIGEST, DIGEST)},
        {"blocks": ()},
    ],
)
def test_a_manifest_that_describes_a_tensor_otherwise_than_its_file_is_refused(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    folder = signed(tmp_path / "model", {"model.safetensors": file(tensor_header(), b"abcd")})
    record = read_folder(folder).records["model.safetensors"]
    assert record.tensors is not None
    tensors = {"a": dataclasses.replace(record.tensors["a"], **fields)}
    records = {"model.safetensors": dataclasses.replace(record, tensors=tensors)}
    (folder / "manifest.json").write_bytes(Manifest("model", records).encode())
    for read in (lambda: verify_folder(folder), lambda: read_folder(folder).read_rows("model.safetensors", "a", 0, 1)):
        with pytest.raises(CheckpointError, match="tensor 'a'"):
            read()


@pytest.mark.parametrize("raw", MANIFESTS.values(), ids=MANIFESTS.keys())
def test_hostile_manifests_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "manifest.json").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"manifest\.json:"):
        read_folder(tmp_path)
    assert os.listdir(tmp_path) == ["manifest.json"]


def test_a_huge_manifest_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "manifest.json", "wb") as sparse:
        sparse.truncate(LIMIT)
    with pytest.raises(CheckpointError, match="is larger than"):
        read_folder(tmp_path)


def test_a_huge_document_is_not_read(tmp_path: Path) -> None:
    folder = signed(tmp_path / "model", {"a.json": b"{}"})
    with open(folder / "a.json", "wb") as sparse:
        sparse.truncate(LIMIT)
    record = FileRecord(LIMIT, DIGEST)
    (folder / "manifest.json").write_bytes(Manifest("model", {"a.json": record}).encode())
    with pytest.raises(CheckpointError, match=r"a\.json:.*1099511627776 bytes"):
        read_folder(folder)


def test_a_document_that_is_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a\.json:.*not text"):
        read_folder(signed(tmp_path / "model", {"a.json": pickle.dumps(Bomb())}))


def test_tensor_names_that_differ_from_the_manifest_are_refused(tmp_path: Path) -> None:
    folder = signed(tmp_path / "model", {"model.safetensors": file(tensor_header(), bytes(4))}, ("b",))
    with pytest.raises(CheckpointError, match=r"tensors.*manifest"):
        verify_folder(folder)


def link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def listening(path: Path) -> None:
    path.unlink()
    previous = os.getcwd()
    os.chdir(path.parent)  # the name of a socket has at most 107 bytes
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(previous)


@pytest.mark.parametrize("trick", [link, device, pipe, directory, listening])
@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "config.json"])
def test_irregular_files_are_refused_at_once(tmp_path: Path, name: str, trick: Callable[[Path], None]) -> None:
    path = tmp_path / "model" / name
    write_folder(path.parent, **content(1))
    trick(path)
    with pytest.raises(CheckpointError, match=name):
        verify_folder(path.parent)


def test_a_read_error_raises_machine_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "model", **content(1))

    def failing(descriptor: int, buffers: list[memoryview]) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "readv", failing)
    with pytest.raises(MachineError, match=r"manifest\.json:.*Input/output"):
        read_folder(tmp_path / "model")


class Watch:
    """Records audit events of the interpreter. A hook cannot be removed, so there is a single one, off by default."""

    def __init__(self) -> None:
        self.on = False
        self.events: list[tuple[str, str]] = []
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on:
            self.events.append((event, str(arguments[0]) if arguments else ""))

    def during(self, action: Callable[[], object]) -> list[tuple[str, str]]:
        self.events, self.on = [], True
        try:
            action()
        except CheckpointError:
            pass  # only the recorded events matter
        finally:
            self.on = False
        return self.events


WATCH = Watch()


def forbidden_events(events: list[tuple[str, str]], folder: Path) -> list[tuple[str, str]]:
    """The forbidden events: running or importing code, connecting, or opening files outside the folder."""
    kinds = ("exec", "compile", "import", "pickle", "marshal", "subprocess", "os.", "socket", "ctypes", "shutil")
    harmless = ("os.listdir", "os.scandir")
    return [
        (event, argument)
        for event, argument in events
        if (event.startswith(kinds) and event not in harmless)
        or (event == "open" and not argument.startswith(str(folder)))
    ]


def test_reading_has_no_forbidden_events(tmp_path: Path) -> None:
    valid_folder = tmp_path / "valid_folder"
    write_folder(valid_folder, **content(1))
    verify_folder(valid_folder)  # torch imports modules at its first calls
    events = WATCH.during(lambda: verify_folder(valid_folder))
    assert [argument for event, argument in events if event == "open"]
    assert forbidden_events(events, valid_folder) == []
    for number, raw in enumerate(FILES.values()):
        folder = signed(tmp_path / str(number), {"model.safetensors": raw})
        assert forbidden_events(WATCH.during(lambda folder=folder: verify_folder(folder)), folder) == []  # type: ignore[misc]


def test_unpickling_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen = forbidden_events(WATCH.during(lambda: pickle.loads(pickle.dumps(Bomb()))), tmp_path)
    assert ("pickle.find_class", "posix") in seen
    assert ("os.mkdir", "unpickled") in seen
