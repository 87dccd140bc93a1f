"""Data sets on this disk give the texts that `datasets` itself gives, whatever the format; damage is one sentence."""

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import ipc, parquet

from heddle.data.corpus import prepare_corpus
from heddle.data.documents import MAX_DOCUMENT_BYTES
from heddle.data.hub import read_column
from heddle.data.sources import ScannedSource, parse_source
from heddle.errors import DataError
from tests import small

TEXTS = [small.text(300, seed) for seed in range(40)]
Writer = Callable[[Path, list[str | None]], None]


def scan(argument: str) -> ScannedSource:
    source, _ = parse_source(argument)
    return source.scan(lambda n: None)


def read(argument: object) -> list[str]:
    return list(scan(f"hf:{argument}").read())


def table(texts: list[str | None]) -> Any:
    return pyarrow.table(
        {"id": pyarrow.array(range(len(texts)), pyarrow.int64()), "text": pyarrow.array(texts, pyarrow.string())}
    )


def write_stream(path: Path, texts: list[str | None]) -> None:
    with ipc.new_stream(str(path), table([]).schema) as file:
        file.write_table(table(texts), max_chunksize=7)


def write_file(path: Path, texts: list[str | None]) -> None:
    with ipc.new_file(str(path), table([]).schema) as file:
        file.write_table(table(texts), max_chunksize=7)


def write_parquet(path: Path, texts: list[str | None]) -> None:
    parquet.write_table(table(texts), path, row_group_size=9)


def write_lines(path: Path, texts: list[str | None]) -> None:
    path.write_text("".join(json.dumps({"id": 3, "text": text or ""}) + "\n" for text in texts))


WRITERS: dict[str, Writer] = {
    "a.arrow": write_stream, "b.arrow": write_file, "c.parquet": write_parquet, "d.jsonl": write_lines
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that `datasets` itself wrote."""
    root = tmp_path_factory.mktemp("saved")
    dataset = datasets.Dataset.from_dict({"text": TEXTS, "body": TEXTS[::-1], "n": list(range(len(TEXTS)))})
    datasets.disable_progress_bars()
    dataset.save_to_disk(str(root / "one"), num_shards=3)
    dataset.select(range(39, -1, -1)).filter(lambda row: row["n"] % 2).save_to_disk(str(root / "turned"))
    splits = datasets.DatasetDict({"train": dataset.select(range(30)), "held": dataset.select(range(30, 40))})
    splits.save_to_disk(str(root / "both"))
    dataset.to_parquet(str(root / "one.parquet"))
    return root


def test_what_the_library_saved_is_read_as_it_reads_it(saved: Path) -> None:
    assert read(saved / "one") == TEXTS == list(datasets.load_from_disk(str(saved / "one"))["text"])
    assert read(saved / "turned") == list(datasets.load_from_disk(str(saved / "turned"))["text"])
    assert read(saved / "both") == TEXTS[:30]
    assert read(f"{saved}/both,split=held") == TEXTS[30:]
    assert read(f"{saved}/both,text=body,split=held") == read(f"{saved}/both,split=held,text=body") == TEXTS[9::-1]
    assert read(saved / "one.parquet") == TEXTS


@given(st.lists(st.one_of(st.none(), st.text(st.characters(exclude_categories=["Cs"])))))
def test_every_format_gives_the_same_documents(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str | None]
) -> None:
    root = tmp_path_factory.mktemp("formats")
    documents = [text for text in texts if text and not text.isspace()]
    for name, write in WRITERS.items():
        write(root / name, texts)
        assert list(read_column(root / name, None, "text")) == documents


def test_the_format_does_not_change_the_hash_and_long_texts_are_cut(tmp_path: Path) -> None:
    texts: list[str | None] = [*TEXTS, small.text(3 * MAX_DOCUMENT_BYTES)]
    sources = []
    for name, write in WRITERS.items():
        write(tmp_path / name, texts)
        sources.append(scan(f"hf:{tmp_path}/{name}"))
    assert len({source.hash for source in sources}) == 1
    documents = list(sources[0].read())
    assert len(documents) > len(texts)
    assert "".join(documents) == "".join(text or "" for text in texts)


def test_kinds_of_text_columns(tmp_path: Path) -> None:
    for kind in (pyarrow.large_string(), pyarrow.string_view(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())):
        with ipc.new_file(str(tmp_path / "x.feather"), pyarrow.schema([("text", kind)])) as file:
            file.write(pyarrow.record_batch({"text": pyarrow.array(["a b", None, "c"]).cast(kind)}))
        assert read(tmp_path / "x.feather") == ["a b", "c"]


def test_splits_are_told_by_the_names_of_files(tmp_path: Path) -> None:
    for number, name in enumerate(("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001")):
        path = tmp_path / "hub" / "data" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_parquet(path, [f"{number}"])
    (tmp_path / "hub" / "loader.py").write_text("raise SystemExit('no code of a data set is run')")
    (tmp_path / "hub" / ".hidden.parquet").write_text("nothing")
    write_parquet(tmp_path / "hub" / "more.parquet", ["of no split"])
    assert [skipped.file for skipped in scan(f"hf:{tmp_path}/hub").skipped_files] == ["more.parquet"]
    assert read(tmp_path / "hub") == ["0", "1"]
    assert read(f"{tmp_path}/hub,split=test") == ["2"]
    with pytest.raises(DataError, match="'validation'"):
        read(f"{tmp_path}/hub,split=validation")
    for name in ("x", "y"):
        (tmp_path / "plain" / name).mkdir(parents=True)
        write_lines(tmp_path / "plain" / name / "part.jsonl", [name])
    assert read(tmp_path / "plain") == read(f"{tmp_path}/plain,split=train") == ["x", "y"]


def test_a_weight_and_a_corpus(saved: Path, tmp_path: Path) -> None:
    assert parse_source(f"hf:{saved}/both,split=held@2.5")[1] == 2.5
    (tmp_path / "real@2").mkdir()
    write_lines(tmp_path / "real@2" / "a.jsonl", ["a"])
    assert parse_source(f"hf:{tmp_path}/real@2")[1] == 1.0
    arguments = [f"hf:{saved}/one@2", f"hf:{saved}/one.parquet"]
    corpus = prepare_corpus(
        arguments, vocab_size=small.VOCABULARY, max_train_tokens=None, cache_folder=tmp_path / "cache"
    )
    assert corpus.weights == (2.0, 1.0)
    first, second = corpus.train
    assert first.read(0, len(first)).tolist() == second.read(0, len(second)).tolist()


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    texts: list[str | None] = [small.text(1000)] * 20
    with (
        ipc.new_stream(str(tmp_path / "a.arrow"), table([]).schema) as stream,
        parquet.ParquetWriter(tmp_path / "b.parquet", table([]).schema) as file,
    ):
        for _ in range(600):
            stream.write_table(table(texts))
            file.write_table(table(texts))
    before = pyarrow.total_allocated_bytes()
    for name in ("a.arrow", "b.parquet"):
        allocated = [pyarrow.total_allocated_bytes() - before for _ in read_column(tmp_path / name, None, "text")]
        assert len(allocated) == 12_000
        assert max(allocated) < 2 * 2**20


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("hf:@/none", "data hf:@/none does not exist: give a folder or file on this disk, or OWNER/NAME on the hub"),
        ("hf:", "data hf:. does not exist|data hf: does not exist"),
        ("hf:wikitext/raw/train", "data hf:wikitext/raw/train does not exist"),
        ("hf:@/one,txt=body", "has no option 'txt=body'; choices: text=COLUMN, split=NAME, rows=N"),
        ("hf:@/one,text=", "has no option 'text='"),
        ("hf:@/one,text=a,text=b", "text twice"),
        ("hf:@/one,text=titel", r"data file @/one/data-00000-of-00003.arrow has no column 'titel': name one with "
         "hf:@/one,text=text; columns: text, body, n"),
        ("hf:@/one.parquet,text=titel", "has no column 'titel': .*; columns: text, body, n"),
        ("hf:@/both,split=held,text=n", "int64 in column 'n', not text: name one with hf:@/both,split=held,text=text"),
        ("@/body.parquet", "has no column 'text': name one with hf:@/body.parquet,text=body; columns: n, body"),
        ("@/twice.parquet", "has 2 columns 'text': name one with hf:@/twice.parquet,text=body"),
        ("hf:@/number.parquet", "has no column 'text': write the text to a column of its own; columns: n"),
        ("hf:@/pointer.parquet", "is a Git LFS pointer"),
        ("hf:@/rowless", "has no rows"),
        ("@/one", "is a data set that `datasets` saved: name it with hf:@/one"),
        ("@/both", "is a data set that `datasets` saved: name it with hf:@/both"),
        ("hf:@/one,split=test", "has no split 'test'"),
        ("hf:@/both,split=test", "has no split 'test'; splits: train, held"),
        ("hf:@/one.parquet,split=test", "has no split 'test'"),
        ("hf:@/empty", "holds no .parquet"),
        ("hf:@/mixed", r"holds files of several formats \(.jsonl, .parquet\): name a file, or a folder"),
        ("hf:@/x.csv", "is not a .parquet"),
        ("hf:@/bad.jsonl", 'data file @/bad.jsonl has no text in "text", but fields with text'),
        ("hf:@/blank.parquet", "data blank.parquet is empty"),
        ("hf:@/lost", "state.json names no files of its folder"),
        ("hf:@/gone", "data file @/gone/data.arrow cannot be read"),
        ("hf:@/torn", "state.json cannot be read as JSON"),
        ("hf:@/ordered", "was saved with a separate order of rows"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_sentence(saved: Path, argument: str, message: str) -> None:
    (saved / "empty").mkdir(exist_ok=True)
    (saved / "mixed").mkdir(exist_ok=True)
    write_lines(saved / "mixed" / "a.jsonl", ["a"])
    write_parquet(saved / "mixed" / "b.parquet", ["b"])
    (saved / "x.csv").write_text("text\na\n")
    (saved / "bad.jsonl").write_text('{"other": 1}\n{"body": "b"}\n')
    write_parquet(saved / "blank.parquet", [None, " "])
    (saved / "pointer.parquet").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    texts = pyarrow.array(["a"])
    for name, columns in {"body": ["n", "body"], "twice": ["text", "text", "body"], "number": ["n"]}.items():
        values = [pyarrow.array([1]) if column == "n" else texts for column in columns]
        parquet.write_table(pyarrow.Table.from_arrays(values, names=columns), saved / f"{name}.parquet")
    states: dict[str, Any] = {
        "lost": {"_data_files": [{"filename": "../one/data-00000-of-00003.arrow"}]},
        "gone": {"_data_files": [{"filename": "data.arrow"}]},
        "ordered": {"_data_files": [{"filename": "data.arrow"}], "_indices_data_files": [{"filename": "i.arrow"}]},
        "torn": None,
        "rowless": {"_data_files": []},
    }
    for name, state in states.items():
        (saved / name).mkdir(exist_ok=True)
        (saved / name / "state.json").write_text("{" if state is None else json.dumps(state))
    with pytest.raises(DataError, match=message.replace("@", str(saved))) as error:
        scan(argument.replace("@", str(saved)))
    assert "\n" not in str(error.value)


def test_the_only_split_of_a_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_parquet(tmp_path / "data" / "test-00000-of-00001.parquet", ["a"])
    assert read(tmp_path) == read(f"{tmp_path},split=test") == ["a"]


@pytest.mark.parametrize("name", ["a.arrow", "b.arrow", "c.parquet"])
def test_a_file_cut_short_is_refused_wherever_it_is_cut(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name, [*TEXTS])
    data = (tmp_path / name).read_bytes()
    for size in {*range(0, len(data), 97), 1, 7, 8, len(data) - 1, len(data) - 8}:
        (tmp_path / name).write_bytes(data[:size])
        with pytest.raises(DataError):
            read(tmp_path / name)


@given(st.sampled_from(["a.arrow", "b.arrow", "c.parquet"]), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_a_damaged_file_gives_texts_or_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, name: str, position: float, bit: int
) -> None:
    path = tmp_path_factory.mktemp("damaged") / name
    WRITERS[name](path, [*TEXTS[:5]])
    data = bytearray(path.read_bytes())
    data[int(position * len(data))] ^= 1 << bit
    path.write_bytes(data)
    with contextlib.suppress(DataError):
        assert all(isinstance(text, str) for text in read(path))


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "a.parquet", ["a"])
    write_lines(tmp_path / "b.jsonl", ["b"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert read(tmp_path / "b.jsonl") == ["b"]
    with pytest.raises(DataError, match=r"a\.parquet.*pyarrow.*\[data\]'"):
        read(tmp_path / "a.parquet")
