"""A corpus is the same everywhere, encoded as far as needed, and read back from the cache."""

import contextlib
import itertools
import math
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heddle import progress
from heddle.data import corpus as corpus_encoder
from heddle.data import corpus as corpus_module
from heddle.data.corpus import Corpus, distinct_word_bytes, prepare_corpus
from heddle.data.samples import CorpusLoader
from heddle.errors import DataError, MachineError, pip_install
from heddle.tokenization import DEFAULT_VOCAB_SIZE, fast_encoder
from heddle.tokenization.tokenizer import Tokenizer

VOCABULARY = ["warp", "weft", "heddle", "shed", "reed", "treadle", "loom", "thread", "lift", "lower", "cross", "bind"]
VOCABULARY += ["織機", "綜絖", "経糸", "緯糸"]


def write_text(folder: Path, files: int, seed: int = 0, words: int = 300) -> Path:
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        (folder / f"{number:03}.txt").write_text(
            f"{seed} {number} " + " ".join(draw.choices(VOCABULARY, k=words)) + ".\r\n"
        )
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_text(tmp_path / "texts", 60)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def make_corpus(source: Path, cache: Path, until: float = math.inf, **changes: int | None) -> Corpus:
    return prepare_corpus(
        [str(source)],
        vocab_size=changes.get("vocab_size", 300),
        max_train_tokens=changes.get("max_train_tokens"),
        cache_folder=cache,
        until=until,
    )


def all_text(corpus: Corpus) -> list[str]:
    return [
        corpus.tokenizer.decode(f.document(i))
        for f in (*corpus.train, corpus.validation)
        for i in range(f.document_count)
    ]


def test_the_tokens_are_the_text(texts: Path, cache: Path) -> None:
    corpus = make_corpus(texts, cache)
    assert sorted(all_text(corpus)) == sorted(path.read_bytes().decode() for path in texts.iterdir())
    [train] = corpus.train
    for file in (train, corpus.validation):
        tokens = file.read(0, len(file))
        assert np.array_equal(np.flatnonzero(tokens == corpus.tokenizer.eod_id), file.offsets)
        assert int(corpus.tokenizer.byte_lengths[tokens].sum()) == file.text_bytes
        assert file.tokenizer_hash == corpus.tokenizer.hash
        assert tokens.max() < corpus.tokenizer.vocab_size <= 300
    [source] = corpus.report["sources"]
    assert (
        source["bytes"]
        == train.text_bytes + corpus.validation.text_bytes
        == sum(p.stat().st_size for p in texts.iterdir())
    )
    assert source["documents"] == train.document_count + corpus.validation.document_count == 60
    assert source["train"]["tokens"] == len(train)
    assert source["validation"]["tokens"] == corpus.report["validation"]["tokens"] == len(corpus.validation)
    assert corpus.name == "texts"


def check_same(prepared: Callable[[Path, Path], Corpus], texts: Path, folder: Path) -> None:
    """Another folder, another cache, another process state: the same corpus."""
    moved = folder / "moved" / "texts"
    shutil.copytree(texts, moved)
    first, second = prepared(texts, folder / "c1"), prepared(moved, folder / "c2")
    assert first.hash == second.hash
    assert first.tokenizer.hash == second.tokenizer.hash
    for a, b in zip((*first.train, first.validation), (*second.train, second.validation), strict=True):
        assert a.path.read_bytes() == b.path.read_bytes()


def test_folder_and_cache_do_not_matter(texts: Path, tmp_path: Path) -> None:
    check_same(make_corpus, texts, tmp_path)


def test_the_check_catches_a_tokenizer_that_depends_on_the_folder(texts: Path, tmp_path: Path) -> None:
    def by_folder(source: Path, cache: Path) -> Corpus:
        return make_corpus(source, cache, vocab_size=270 + 9 * (len(source.parts) % 2))

    with pytest.raises(AssertionError):
        check_same(by_folder, texts, tmp_path)


def test_hash_names_content_weights_and_tokenizer(texts: Path, cache: Path, tmp_path: Path) -> None:
    other = write_text(tmp_path / "other", 40, seed=1)
    corpus = prepare_corpus([str(texts), str(other)], vocab_size=300, max_train_tokens=None, cache_folder=cache)
    changed = [
        prepare_corpus([str(texts), f"{other}@2"], vocab_size=300, max_train_tokens=None, cache_folder=cache),
        prepare_corpus([str(other), str(texts)], vocab_size=300, max_train_tokens=None, cache_folder=cache),
        prepare_corpus([str(texts), str(other)], vocab_size=290, max_train_tokens=None, cache_folder=cache),
        prepare_corpus([str(texts)], vocab_size=300, max_train_tokens=None, cache_folder=cache),
    ]
    (other / "000.txt").write_text("changed")
    changed.append(prepare_corpus([str(texts), str(other)], vocab_size=300, max_train_tokens=None, cache_folder=cache))
    assert len({corpus.hash for corpus in (corpus, *changed)}) == 6


def test_the_cache_is_used_and_damage_is_repaired(texts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_corpus(texts, cache)
    files = {path: path.read_bytes() for path in cache.iterdir()}
    encode = Tokenizer.encode_batch
    batch_sizes: list[int] = []

    def counted(self: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
        batch_sizes.append(len(texts))
        return encode(self, texts)

    monkeypatch.setattr(Tokenizer, "encode_batch", counted)
    monkeypatch.setattr(Tokenizer, "train", lambda *arguments: pytest.fail("trained again"))
    again = make_corpus(texts, cache)
    assert (again.hash, again.report) == (first.hash, first.report)
    assert batch_sizes == []  # not even to try the loaded tokenizer, which this process has seen to round-trip
    monkeypatch.undo()
    for path, content in files.items():
        for damaged in (content[: len(content) // 2], b"", b"nonsense", content[:-1] + bytes([content[-1] ^ 1])):
            path.write_bytes(damaged)
            assert make_corpus(texts, cache).hash == first.hash
            assert path.read_bytes() == content


def test_files_of_another_text_in_the_cache_are_not_read_for_this_one(tmp_path: Path, cache: Path) -> None:
    """Whole files, each with its right hash, but swapped; a file that is damaged is not what tells them apart."""
    sources = [write_text(tmp_path / name, count) for name, count in (("one", 60), ("two", 70))]
    hashes = [make_corpus(source, cache).hash for source in sources]
    names: dict[str, list[Path]] = {}
    for path in sorted(cache.iterdir()):
        names.setdefault(path.suffix, []).append(path)
    pairs = [(one, two) for paths in names.values() for one, two in itertools.combinations(paths, 2)]
    assert len(pairs) >= 2
    for one, two in pairs:
        kept = one.read_bytes(), two.read_bytes()
        one.write_bytes(kept[1])
        two.write_bytes(kept[0])
        assert [make_corpus(source, cache).hash for source in sources] == hashes, (one, two)
        for source in sources:
            assert all_text(make_corpus(source, cache)) == all_text(make_corpus(source, tmp_path / "other")), (one, two)
        one.write_bytes(kept[0])
        two.write_bytes(kept[1])


def test_several_sources(texts: Path, cache: Path, tmp_path: Path) -> None:
    other = write_text(tmp_path / "other", 40, seed=1)
    corpus = prepare_corpus([str(texts), f"{other}@3"], vocab_size=300, max_train_tokens=None, cache_folder=cache)
    assert corpus.weights == (1.0, 3.0)
    assert corpus.name == "texts+other"
    assert len(corpus.train) == 2
    assert sum(corpus.validation.source_token_counts) == len(corpus.validation)
    assert min(corpus.validation.source_token_counts) > 0
    texts_of = {n: {path.read_bytes().decode() for path in folder.iterdir()} for n, folder in ((0, texts), (1, other))}
    for number, file in enumerate(corpus.train):
        assert {corpus.tokenizer.decode(file.document(i)) for i in range(file.document_count)} <= texts_of[number]
    CorpusLoader(corpus.train, corpus.weights, 16, 4, 0, corpus.tokenizer.eod_id).batch(3)


def test_a_small_budget_encodes_an_even_part_only(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = write_text(tmp_path / "texts", 400)
    monkeypatch.setattr(corpus_encoder, "FULLY_ENCODED_BYTES", 50_000)
    monkeypatch.setattr(corpus_module, "_BUDGET_SLACK", 0)
    monkeypatch.setattr(corpus_encoder, "_BATCH_BYTES", 20_000)
    whole = make_corpus(texts, cache)
    sizes = []
    for max_tokens in (1_000, 60_000, 120_000, 10**9):
        part = make_corpus(texts, cache, max_train_tokens=max_tokens)
        assert len(part.train[0]) > min(max_tokens, len(whole.train[0]) - 1)
        assert part.hash == whole.hash
        assert part.validation.path == whole.validation.path
        numbers = [
            int(part.tokenizer.decode(part.train[0].document(i)).split()[1])
            for i in range(part.train[0].document_count)
        ]
        assert numbers == sorted(numbers)
        assert 120 < float(np.mean(numbers)) < 280  # not the first files alone
        sizes.append(len(part.train[0]))
        fresh = make_corpus(texts, tmp_path / f"fresh {max_tokens}", max_train_tokens=max_tokens)
        assert fresh.train[0].path.read_bytes() == part.train[0].path.read_bytes()  # whatever the cache holds
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[1] < sizes[2] < sizes[3] == len(whole.train[0])
    assert sizes[1] < 60_000 * 1.5


def test_an_encoding_that_ends_too_late_is_given_up(texts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_encoder, "_BATCH_BYTES", 1_000)
    now = [0.0]
    encode = Tokenizer.encode_documents

    def slow(self: Tokenizer, documents: Any) -> Any:
        now[0] += 1.0
        return encode(self, documents)

    monkeypatch.setattr(Tokenizer, "encode_documents", slow)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with pytest.raises(MachineError, match=r"encoding .* of text takes about .* leaves too little of --budget"):
        make_corpus(texts, cache, until=8.0)
    assert now[0] < 8.0  # it is foreseen
    make_corpus(texts, cache, until=1e6)
    make_corpus(texts, cache, until=0.0)  # in the cache


def test_validation_is_bounded(texts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = write_text(texts, 800)
    whole = make_corpus(texts, cache)
    monkeypatch.setattr(corpus_encoder, "MAX_VALIDATION_TOKENS", len(whole.validation) // 3)
    part = make_corpus(texts, cache)
    assert 0 < len(part.validation) < len(whole.validation) / 2


def test_a_given_tokenizer(texts: Path, cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(Tokenizer.train(["other text"], 280).to_json(), encoding="utf-8")
    tokenizer = Tokenizer.load(path)
    for vocab_size in (None, tokenizer.vocab_size, 1000):
        corpus = prepare_corpus(
            [str(texts)], vocab_size=vocab_size, max_train_tokens=None, cache_folder=cache, tokenizer=path
        )
        assert corpus.tokenizer.hash == tokenizer.hash
    below = tokenizer.vocab_size - 1
    with pytest.raises(DataError, match=f"{tokenizer.vocab_size} tokens.*vocab_size.*{below}"):
        prepare_corpus([str(texts)], vocab_size=below, max_train_tokens=None, cache_folder=cache, tokenizer=path)


def test_without_a_vocabulary_size_there_is_a_default(texts: Path, cache: Path) -> None:
    assert 300 < make_corpus(texts, cache, vocab_size=None).tokenizer.vocab_size <= DEFAULT_VOCAB_SIZE


def test_learning_reads_training_text_only(texts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = Tokenizer.train
    learned: list[str] = []

    def watched(documents: Iterable[str], vocab_size: int) -> Tokenizer:
        def noted() -> Iterator[str]:
            for text in documents:
                learned.append(text)
                yield text

        return train(noted(), vocab_size)

    monkeypatch.setattr(Tokenizer, "train", watched)
    corpus = make_corpus(texts, cache)
    validation = {
        corpus.tokenizer.decode(corpus.validation.document(i)) for i in range(corpus.validation.document_count)
    }
    assert len(learned) == corpus.train[0].document_count
    assert not validation & set(learned)


def test_learning_stops_at_a_bound_of_distinct_words(texts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    train = Tokenizer.train

    def watched(documents: Iterable[str], vocab_size: int) -> Tokenizer:
        seen[:] = documents
        return train(seen, vocab_size)

    monkeypatch.setattr(Tokenizer, "train", watched)
    (texts / "words.txt").write_text("\n\n".join(f"wörter{number}" for number in range(40_000)))
    make_corpus(texts, cache)
    assert distinct_word_bytes(seen, 10**9) > 400_000
    monkeypatch.setattr(corpus_module, "TOKENIZER_DISTINCT_WORD_BYTES", 50_000)
    make_corpus(texts, cache)
    assert 0 < distinct_word_bytes(seen, 10**9) <= 50_000


def test_the_progress_of_learning_ends_at_its_total(texts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of documents of unequal sizes has not the expected size; its bar has the real one."""
    bars: list[list[int]] = []

    class Counted:
        def advance(self, n: int, *_: object) -> None:
            bars[-1][1] += n

    @contextlib.contextmanager
    def counted(description: str, total: int, *_: object) -> Iterator[Counted]:
        bars.append([total if description == "training a tokenizer" else 0, 0])
        yield Counted()

    for number in range(40):
        (texts / f"{number}.txt").write_text(f"some {number} words " * 40 * (1 + number % 7))
    monkeypatch.setattr(corpus_module, "TOKENIZER_TRAINING_BYTES", 20_000)
    monkeypatch.setattr(progress, "progress_bar", counted)
    make_corpus(texts, cache)
    [[total, done]] = [bar for bar in bars if bar[0]]
    assert total == done


@pytest.mark.parametrize("vocab_size", [0, -1, 256])
def test_a_vocabulary_that_is_too_small(texts: Path, cache: Path, vocab_size: int) -> None:
    with pytest.raises(DataError, match=f"vocab_size {vocab_size}"):
        make_corpus(texts, cache, vocab_size=vocab_size)


def test_no_data(cache: Path) -> None:
    with pytest.raises(DataError, match="no data was named"):
        prepare_corpus([], vocab_size=300, max_train_tokens=None, cache_folder=cache)


def test_messages(texts: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(7):
        (texts / f"bad{number}.txt").write_bytes(b"\xff")
    corpus = make_corpus(texts, cache)
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{corpus.hash[:16]}" in err
    assert "skipped 7 files" in err
    assert "; and bad1.txt, bad2.txt" in err
    assert corpus.report["sources"][0]["skipped_files"] == len(corpus.report["sources"][0]["skipped"]) == 7
    with progress.quiet():
        make_corpus(texts, cache)
    assert capsys.readouterr() == ("", "")


def test_one_long_line_needs_little_memory(tmp_path: Path) -> None:
    # Ten times more text may not need noticeably more memory; both processes load the same libraries.
    code = (
        f"import resource, sys; from pathlib import Path; from {corpus_module.__name__} import prepare_corpus;"
        "prepare_corpus([sys.argv[1]], vocab_size=300, max_train_tokens=None, cache_folder=Path(sys.argv[2]));"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = []
    for size in (10**6, 10**7):
        path = tmp_path / f"{size}.txt"
        path.write_text("a" * size)
        command = [sys.executable, "-c", code, str(path), str(tmp_path / "cache")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        peaks.append(int(result.stdout) * 1024)
    assert peaks[1] - peaks[0] < 20 * 10**6


def test_a_script_of_many_characters_is_suggested_a_larger_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "DEFAULT_VOCAB_SIZE", 300)
    draw = random.Random(0)
    chinese = "".join(chr(0x4E00 + draw.randrange(3000)) for _ in range(6000))
    for name, text in (("chinese", chinese), ("english", "The weaver lifts a thread. " * 300)):
        (tmp_path / name).write_text(text, encoding="utf-8")
        result = prepare_corpus([str(tmp_path / name)], vocab_size=300, max_train_tokens=None)
        assert result.bytes_per_character == len(text.encode()) / len(text)
        printed = capsys.readouterr().err
        assert ("tokens per character with a vocabulary of 300," in printed) == (name == "chinese")


def test_a_long_encoding_names_the_library_that_is_faster(
    texts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpus_encoder, "_HINT_BYTES", 1000)
    fast = make_corpus(texts, cache / "fast")
    assert "gigatoken" not in capsys.readouterr().err
    monkeypatch.setattr(fast_encoder, "_gigatoken", lambda: None)
    slow = make_corpus(texts, cache / "slow")
    assert pip_install("data") in capsys.readouterr().err
    assert slow.hash == fast.hash
    np.testing.assert_array_equal(slow.train[0].read(0, len(slow.train[0])), fast.train[0].read(0, len(fast.train[0])))
