"""A corpus is made once, the same everywhere, encoded as far as needed, and found again."""

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from heddle import progress
from heddle.data import corpus as corpus_module
from heddle.data.cache import Cache, default_folder
from heddle.data.corpus import Corpus, prepare
from heddle.data.samples import Samples
from heddle.errors import DataError, MachineError
from heddle.tokenization.distinct_words import distinct_bytes
from heddle.tokenization.tokenizer import Tokenizer

WORDS = ["warp", "weft", "heddle", "shed", "reed", "treadle", "loom", "thread", "lift", "lower", "cross", "bind"]
WORDS += ["織機", "綜絖", "経糸", "緯糸"]


def write_text(folder: Path, files: int, seed: int = 0, words: int = 300) -> Path:
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        (folder / f"{number:03}.txt").write_text(f"{seed} {number} " + " ".join(draw.choices(WORDS, k=words)) + ".\r\n")
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_text(tmp_path / "texts", 60)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def made(source: Path, cache: Path, **changes: int | None) -> Corpus:
    return prepare([str(source)], vocab_size=changes.get("vocab_size", 300), budget=changes.get("budget"), cache=cache)


def all_text(corpus: Corpus) -> list[str]:
    return [
        corpus.tokenizer.decode(f.document(i)) for f in (*corpus.train, corpus.validation) for i in range(f.documents)
    ]


def test_the_tokens_are_the_text(texts: Path, cache: Path) -> None:
    corpus = made(texts, cache)
    assert sorted(all_text(corpus)) == sorted(path.read_bytes().decode() for path in texts.iterdir())
    [train] = corpus.train
    for file in (train, corpus.validation):
        tokens = file.read(0, len(file))
        assert np.array_equal(np.flatnonzero(tokens == corpus.tokenizer.end), file.offsets)
        assert int(corpus.tokenizer.byte_lengths[tokens].sum()) == file.bytes
        assert file.tokenizer == corpus.tokenizer.hash
        assert tokens.max() < corpus.tokenizer.vocab_size <= 300
    [source] = corpus.report["sources"]
    assert source["bytes"] == train.bytes + corpus.validation.bytes == sum(p.stat().st_size for p in texts.iterdir())
    assert source["documents"] == train.documents + corpus.validation.documents == 60
    assert source["train"]["tokens"] == len(train)
    assert source["validation"]["tokens"] == corpus.report["validation"]["tokens"] == len(corpus.validation)
    assert corpus.name == "texts"


def check_same(prepared: Callable[[Path, Path], Corpus], texts: Path, folder: Path) -> None:
    """Another place, another cache, another process state: the same corpus."""
    moved = folder / "moved" / "texts"
    shutil.copytree(texts, moved)
    one, other = prepared(texts, folder / "c1"), prepared(moved, folder / "c2")
    assert one.hash == other.hash
    assert one.tokenizer.hash == other.tokenizer.hash
    for a, b in zip((*one.train, one.validation), (*other.train, other.validation), strict=True):
        assert a.path.read_bytes() == b.path.read_bytes()


def test_place_and_cache_do_not_matter(texts: Path, tmp_path: Path) -> None:
    check_same(made, texts, tmp_path)


def test_the_check_catches_a_tokenizer_that_depends_on_the_place(texts: Path, tmp_path: Path) -> None:
    def by_place(source: Path, cache: Path) -> Corpus:
        return made(source, cache, vocab_size=270 + 9 * (len(source.parts) % 2))

    with pytest.raises(AssertionError):
        check_same(by_place, texts, tmp_path)


def test_hash_names_content_weights_and_tokenizer(texts: Path, cache: Path, tmp_path: Path) -> None:
    other = write_text(tmp_path / "other", 40, seed=1)
    base = prepare([str(texts), str(other)], vocab_size=300, budget=None, cache=cache)
    changed = [
        prepare([str(texts), f"{other}@2"], vocab_size=300, budget=None, cache=cache),
        prepare([str(other), str(texts)], vocab_size=300, budget=None, cache=cache),
        prepare([str(texts), str(other)], vocab_size=290, budget=None, cache=cache),
        prepare([str(texts)], vocab_size=300, budget=None, cache=cache),
    ]
    (other / "000.txt").write_text("changed")
    changed.append(prepare([str(texts), str(other)], vocab_size=300, budget=None, cache=cache))
    assert len({corpus.hash for corpus in (base, *changed)}) == 6


def test_the_cache_is_used_and_damage_is_mended(texts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = made(texts, cache)
    files = {path: path.read_bytes() for path in cache.iterdir()}
    encode = Tokenizer.encode_batch
    encoded: list[int] = []

    def counted(self: Tokenizer, given: Sequence[str]) -> list[list[int]]:
        encoded.append(len(given))
        return encode(self, given)

    monkeypatch.setattr(Tokenizer, "encode_batch", counted)
    monkeypatch.setattr(Tokenizer, "train", lambda *given: pytest.fail("trained again"))
    again = made(texts, cache)
    assert (again.hash, again.report) == (first.hash, first.report)
    assert len(encoded) == 1  # the round-trip check of the loaded tokenizer alone
    monkeypatch.undo()
    for path, content in files.items():
        for damaged in (content[: len(content) // 2], b"", b"nonsense", content[:-1] + bytes([content[-1] ^ 1])):
            path.write_bytes(damaged)
            assert made(texts, cache).hash == first.hash
            assert path.read_bytes() == content


def test_several_sources(texts: Path, cache: Path, tmp_path: Path) -> None:
    other = write_text(tmp_path / "other", 40, seed=1)
    corpus = prepare([str(texts), f"{other}@3"], vocab_size=300, budget=None, cache=cache)
    assert corpus.weights == (1.0, 3.0)
    assert corpus.name == "texts+other"
    assert len(corpus.train) == 2
    assert sum(corpus.validation.parts) == len(corpus.validation)
    assert min(corpus.validation.parts) > 0
    texts_of = {n: {path.read_bytes().decode() for path in folder.iterdir()} for n, folder in ((0, texts), (1, other))}
    for number, file in enumerate(corpus.train):
        assert {corpus.tokenizer.decode(file.document(i)) for i in range(file.documents)} <= texts_of[number]
    Samples(corpus.train, corpus.weights, 16, 4, 0, corpus.tokenizer.end).batch(3)


def test_a_small_budget_encodes_an_even_part_only(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = write_text(tmp_path / "texts", 400)
    monkeypatch.setattr(corpus_module, "WHOLE_BYTES", 50_000)
    monkeypatch.setattr(corpus_module, "_SLACK", 0)
    monkeypatch.setattr(corpus_module, "_BATCH_BYTES", 20_000)
    whole = made(texts, cache)
    sizes = []
    for budget in (1_000, 60_000, 120_000, 10**9):
        part = made(texts, cache, budget=budget)
        assert len(part.train[0]) > min(budget, len(whole.train[0]) - 1)
        assert part.hash == whole.hash
        assert part.validation.path == whole.validation.path
        places = [
            int(part.tokenizer.decode(part.train[0].document(i)).split()[1]) for i in range(part.train[0].documents)
        ]
        assert places == sorted(places)
        assert 120 < float(np.mean(places)) < 280  # not the first files alone
        sizes.append(len(part.train[0]))
        fresh = made(texts, tmp_path / f"fresh {budget}", budget=budget)
        assert fresh.train[0].path.read_bytes() == part.train[0].path.read_bytes()  # whatever the cache held
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[1] < sizes[2] < sizes[3] == len(whole.train[0])
    assert sizes[1] < 60_000 * 1.5


def test_validation_is_bounded(texts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = write_text(texts, 800)
    whole = made(texts, cache)
    monkeypatch.setattr(corpus_module, "VALIDATION_TOKENS", len(whole.validation) // 3)
    part = made(texts, cache)
    assert 0 < len(part.validation) < len(whole.validation) / 2


def test_a_given_tokenizer(texts: Path, cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(Tokenizer.train(["other text"], 280).to_json(), encoding="utf-8")
    given = Tokenizer.load(path)
    for vocab_size in (None, given.vocab_size, 1000):
        corpus = prepare([str(texts)], vocab_size=vocab_size, budget=None, cache=cache, tokenizer=path)
        assert corpus.tokenizer.hash == given.hash
    below = given.vocab_size - 1
    with pytest.raises(DataError, match=f"the tokenizer has {given.vocab_size} tokens, but vocab_size is {below}: "):
        prepare([str(texts)], vocab_size=below, budget=None, cache=cache, tokenizer=path)


def test_without_a_vocabulary_size_there_is_a_default(texts: Path, cache: Path) -> None:
    assert 300 < made(texts, cache, vocab_size=None).tokenizer.vocab_size <= corpus_module.DEFAULT_VOCABULARY


def test_learning_reads_training_text_only(texts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = Tokenizer.train
    seen: list[str] = []

    def watched(documents: Iterable[str], vocab_size: int) -> Tokenizer:
        def noted() -> Iterator[str]:
            for text in documents:
                seen.append(text)
                yield text

        return train(noted(), vocab_size)

    monkeypatch.setattr(Tokenizer, "train", watched)
    corpus = made(texts, cache)
    held = {corpus.tokenizer.decode(corpus.validation.document(i)) for i in range(corpus.validation.documents)}
    assert len(seen) == corpus.train[0].documents
    assert not held & set(seen)


def test_learning_stops_at_a_bound_of_distinct_words(texts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    train = Tokenizer.train

    def watched(documents: Iterable[str], vocab_size: int) -> Tokenizer:
        seen[:] = documents
        return train(seen, vocab_size)

    monkeypatch.setattr(Tokenizer, "train", watched)
    (texts / "words.txt").write_text("\n\n".join(f"wörter{number}" for number in range(40_000)))
    made(texts, cache)
    assert distinct_bytes(seen, 10**9) > 400_000
    monkeypatch.setattr(corpus_module, "LEARNING_DISTINCT_BYTES", 50_000)
    made(texts, cache)
    assert 0 < distinct_bytes(seen, 10**9) <= 50_000


@pytest.mark.parametrize("vocab_size", [0, -1, 256])
def test_a_vocabulary_that_is_too_small(texts: Path, cache: Path, vocab_size: int) -> None:
    with pytest.raises(DataError, match=f"vocab_size {vocab_size} is too small"):
        made(texts, cache, vocab_size=vocab_size)


def test_no_data(cache: Path) -> None:
    with pytest.raises(DataError, match="no data was named"):
        prepare([], vocab_size=300, budget=None, cache=cache)


def test_what_is_said(texts: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(7):
        (texts / f"bad{number}.txt").write_bytes(b"\xff")
    corpus = made(texts, cache)
    out, err = capsys.readouterr()
    assert out == ""
    assert f"corpus texts, hash {corpus.hash[:16]}: " in err
    assert "skipped 7 unreadable or non-UTF-8 files of texts: bad0.txt, " in err
    assert "and 2 more" in err
    assert corpus.report["sources"][0]["skipped_files"] == len(corpus.report["sources"][0]["skipped"]) == 7
    with progress.quiet():
        made(texts, cache)
    assert capsys.readouterr() == ("", "")


def test_an_unwritable_cache_is_named(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match=r"file/cache cannot be written .*HEDDLE_CACHE"):
        made(texts, tmp_path / "file" / "cache")
    with pytest.raises(MachineError, match=r"file cannot be written"):
        made(texts, tmp_path / "file")
    monkeypatch.setattr(os, "access", lambda *given: False)
    with pytest.raises(MachineError, match=r"closed cannot be written"):
        made(texts, tmp_path / "closed")


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HEDDLE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_folder() == tmp_path / "home/.cache/heddle"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_folder() == tmp_path / "xdg/heddle"
    monkeypatch.setenv("HEDDLE_CACHE", str(tmp_path / "own"))
    assert default_folder() == tmp_path / "own"


def test_what_a_killed_process_left_is_removed_after_a_day(tmp_path: Path) -> None:
    old, new = tmp_path / "a.bin.1-x.temporary", tmp_path / "b.bin.2-x.temporary"
    for path in (old, new):
        path.write_bytes(b"left")
    os.utime(old, (0, 0))
    Cache(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [new.name]


def test_one_long_line_needs_little_memory(tmp_path: Path) -> None:
    # Ten times more text may not need noticeably more memory; both processes load the same libraries.
    code = (
        "import resource, sys; from pathlib import Path; from heddle.data.corpus import prepare;"
        "prepare([sys.argv[1]], vocab_size=300, budget=None, cache=Path(sys.argv[2]));"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = []
    for size in (10**6, 10**7):
        path = tmp_path / f"{size}.txt"
        path.write_text("a" * size)
        command = [sys.executable, "-c", code, str(path), str(tmp_path / "cache")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout) * 1024)
    assert peaks[1] - peaks[0] < 20 * 10**6
