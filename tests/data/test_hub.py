"""`hf:NAME` against a stand-in of the hub on loopback: streamed once, continued where it was cut, to the same bits."""

import io
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from huggingface_hub import constants
from pyarrow import parquet

from heddle.data import hub
from heddle.data.cache import DataCache
from heddle.data.hub import HubDataset, parse_hub_argument
from heddle.data.sources import parse_source
from heddle.errors import DataError
from tests.data.hub_stand_in import Hub, serve_hub

TEXTS: list[str | None] = [f"thread {number}" for number in range(120)]
TEXTS[7] = None
READ = [text for text in TEXTS if text is not None]


def table(texts: list[str | None]) -> bytes:
    stream = io.BytesIO()
    columns = {"text": texts, "number": list(range(len(texts)))}
    parquet.write_table(pyarrow.table(columns), stream, row_group_size=20)
    return stream.getvalue()


@pytest.fixture(scope="module")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """The stand-in, and a process that knows no other hub and no other host."""
    files = {
        "data/train-00000-of-00002.parquet": table(TEXTS[:70]),
        "data/train-00001-of-00002.parquet": table(TEXTS[70:]),
        "data/test-00000-of-00001.parquet": table(["held out"]),
    }
    resolve = socket.getaddrinfo

    def resolve_loopback(host: Any, *arguments: Any, **named: Any) -> Any:
        assert host in ("127.0.0.1", None), f"the test asks for {host}"
        return resolve(host, *arguments, **named)

    with serve_hub("weavers/loom", files) as server, pytest.MonkeyPatch.context() as patch:
        cache = str(tmp_path_factory.mktemp("hub"))
        template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(socket, "getaddrinfo", resolve_loopback)
        patch.setattr(constants, "ENDPOINT", server.address)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", cache)
        patch.setattr(datasets.config, "HF_ENDPOINT", server.address)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
        patch.setattr(datasets.config, "HF_MODULES_CACHE", cache)
        yield server


@pytest.fixture
def server(running_server: Hub) -> Hub:
    running_server.broken = False
    running_server.requests.clear()
    return running_server


def read(argument: str, folder: Path) -> list[str]:
    return list(parse_source(argument, DataCache(folder))[0].scan(lambda _: None).read())


def test_a_stream_is_read_once_and_then_from_the_cache(server: Hub, tmp_path: Path) -> None:
    assert read("hf:weavers/loom,rows=1000", tmp_path) == READ
    assert any("train-00001" in request for request in server.requests)
    server.broken = True
    assert read("hf:weavers/loom,rows=1000", tmp_path) == READ
    assert read("hf:weavers/loom:train,rows=1000", tmp_path) == READ
    with pytest.raises(DataError, match="hf:weavers/loom"):
        read("hf:weavers/loom:test", tmp_path)


def test_a_cut_stream_goes_on_to_the_same_bits(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "FILE_ROWS", 25)
    write_file = hub._Stream.write_file
    for folder in (tmp_path / "whole", tmp_path / "cut"):
        folder.mkdir()
    whole = read("hf:weavers/loom,rows=110", tmp_path / "whole")
    assert whole == [text for text in TEXTS[:110] if text is not None]

    def die_at_the_third(stream: hub._Stream, path: Path, *arguments: object) -> object:
        if len(list(path.parent.glob("*.jsonl"))) == 2:
            raise KeyboardInterrupt
        return write_file(stream, path, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(hub._Stream, "write_file", die_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            read("hf:weavers/loom,rows=110", tmp_path / "cut")
    server.requests.clear()
    assert read("hf:weavers/loom,rows=110", tmp_path / "cut") == whole
    names = {path.name: path.read_bytes() for path in (tmp_path / "whole").glob("*.jsonl")}
    assert {path.name: path.read_bytes() for path in (tmp_path / "cut").glob("*.jsonl")} == names
    assert len(names) == 5
    # a damaged file is read again, and so are those after it
    damaged = sorted(names)[0]
    (tmp_path / "cut" / damaged).write_bytes(names[damaged][:-1])
    assert read("hf:weavers/loom,rows=110", tmp_path / "cut") == whole


def test_what_cannot_be_streamed_is_one_sentence(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"has no column 'body':.*text=COLUMN"):
        read("hf:weavers/loom,text=body", tmp_path)
    with pytest.raises(DataError, match="'number'"):
        read("hf:weavers/loom,text=number", tmp_path)
    with pytest.raises(DataError, match="cannot be read from the hub"):
        read("hf:weavers/none", tmp_path)
    with pytest.raises(DataError, match="cannot be read from the hub"):
        read("hf:weavers/loom:validation", tmp_path)
    assert not list(tmp_path.glob("*.jsonl"))
    monkeypatch.setattr(hub, "optional_module", lambda _: None)
    with pytest.raises(DataError, match=r"datasets.*\[hub\]'"):
        read("hf:weavers/loom", tmp_path)


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert parse_hub_argument("hf:here") is None
    assert parse_hub_argument("hf:a/b/c") is None
    assert parse_hub_argument("hf:/a") is None
    assert parse_hub_argument("hf:a/b") == HubDataset("a/b", None, "train", "text", 100_000)
    assert parse_hub_argument("hf:b:en,rows=5") == HubDataset("b", "en", "train", "text", 5)
    assert parse_hub_argument("hf:b:en:dev,text=x") == HubDataset("b", "en", "dev", "x", 100_000)
    assert parse_hub_argument("hf:b:validation") == HubDataset("b", None, "validation", "text", 100_000)
    for argument, message in (
        ("hf:b,rows=0", r"rows.*1,000,000,000"),
        ("hf:b,rows=x", "rows"),
        ("hf:b:test,split=train", "has split twice"),
    ):
        with pytest.raises(DataError, match=message):
            parse_hub_argument(argument)
    with pytest.raises(DataError, match=r"rows.*hub"):
        parse_source("hf:here,rows=3")
