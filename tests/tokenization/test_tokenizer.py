"""Tokenizers: every text round-trips, each token has known bytes, and lossy tokenizers are refused."""

import copy
import json
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer

from heddle.data import corpus
from heddle.data.corpus import distinct_word_bytes
from heddle.errors import DataError
from heddle.tokenization.backend import EOD_TOKEN, MAX_RUN_LENGTH
from heddle.tokenization.tokenizer import Tokenizer

TEXTS = [
    "def weave(threads):\n    return [lift(thread) for thread in threads]\n" * 20,
    "日本語の文章を書きます。織機の綜絖は経糸を持ち上げる。" * 20,
    "It's the heddle that lifts; don't let it drop. 1234567\r\n" * 20,
]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return Tokenizer.train(TEXTS, 400)


def byte_level_backend(**changes: Any) -> BackendTokenizer:
    """A byte-level tokenizer made with another library."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = BackendTokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = changes.get("pre", pre_tokenizers.ByteLevel(add_prefix_space=False))
    backend.decoder = decoders.ByteLevel()
    if "normalizer" in changes:
        backend.normalizer = changes["normalizer"]
    return backend


def check_bytes(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert int(tokenizer.byte_lengths[ids].sum()) == len(text.encode())
    assert tokenizer.eod_id not in ids
    stream = tokenizer.decode_stream()
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.finish() == text


@given(text=st.text())
def test_any_text_round_trips(trained: Tokenizer, text: str) -> None:
    check_bytes(trained, text)


@given(
    text=st.lists(st.sampled_from(["<|end|>", "<|", "|>", "end", " ", "\n", "\r\n", "\ufeff", "\0", "Ġ", "e\u0301"]))
)
def test_text_with_the_end_token_written_in_it(trained: Tokenizer, text: list[str]) -> None:
    check_bytes(trained, "".join(text))


@given(ids=st.lists(st.integers(0, 399)))
def test_streaming_any_ids_equals_decoding_them(trained: Tokenizer, ids: list[int]) -> None:
    ids = [i % trained.vocab_size for i in ids]
    stream = trained.decode_stream()
    assert "".join([stream.push(i) for i in ids]) + stream.finish() == trained.decode(ids)


def test_a_stream_never_gives_half_a_character(trained: Tokenizer) -> None:
    ids = [i for byte in "😀é".encode() for i in range(trained.vocab_size) if trained.token_bytes(i) == bytes([byte])]
    stream = trained.decode_stream()
    assert [stream.push(i) for i in ids] == ["", "", "", "😀", "", "é"]
    assert stream.push(ids[0]) + stream.finish() == "\ufffd"
    # Decoding token by token is the bug this guards against.
    assert "".join(trained.decode([i]) for i in ids) != "😀é"


def test_properties_of_a_trained_tokenizer(trained: Tokenizer) -> None:
    assert trained.vocab_size <= 400
    assert trained.token_bytes(trained.eod_id) == b""
    assert trained.byte_lengths.dtype == np.int64
    assert trained.byte_lengths[trained.eod_id] == 0
    assert {trained.token_bytes(i) for i in range(trained.vocab_size)} >= {bytes([b]) for b in range(256)}
    assert len(trained.encode(TEXTS[0])) < len(TEXTS[0]) / 3
    assert trained.encode("") == []
    assert trained.encode_batch(["a", "", "b"]) == [trained.encode("a"), [], trained.encode("b")]


def test_other_programs_read_it(trained: Tokenizer) -> None:
    backend = BackendTokenizer.from_str(trained.to_json())
    for text in TEXTS:
        assert backend.encode(text).ids == trained.encode(text)
        assert backend.decode(trained.encode(text)) == text
    assert backend.encode(EOD_TOKEN).ids == [trained.eod_id]


def test_ordinary_text_is_divided_as_gpt2_divides_it(trained: Tokenizer) -> None:
    heddle_split = BackendTokenizer.from_str(trained.to_json()).pre_tokenizer
    gpt2_split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in [*TEXTS, "  a\n\n\n   b  ", "x" * MAX_RUN_LENGTH, "--- ---\t\t1,000 naïve"]:
        assert [t for t, _ in heddle_split.pre_tokenize_str(text)] == [t for t, _ in gpt2_split.pre_tokenize_str(text)]


@pytest.mark.parametrize("letter", ["a", "é", "日", "7", "-", " ", "\n"])
def test_no_run_is_longer_than_the_limit(trained: Tokenizer, letter: str) -> None:
    def longest(backend: BackendTokenizer) -> int:
        return max(end - start for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(letter * 5000))

    assert longest(BackendTokenizer.from_str(trained.to_json())) == MAX_RUN_LENGTH
    assert longest(byte_level_backend()) == 5000  # without the limit
    check_bytes(trained, letter * 5000)


def test_saving_and_loading_changes_nothing(trained: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(trained.to_json(), encoding="utf-8")
    loaded = Tokenizer.load(path)
    assert (loaded.hash, loaded.vocab_size, loaded.eod_id) == (trained.hash, trained.vocab_size, trained.eod_id)
    assert loaded.to_json() == trained.to_json()
    path.write_text(json.dumps(json.loads(trained.to_json()), sort_keys=True))
    assert Tokenizer.load(path).hash == trained.hash
    assert Tokenizer.train(TEXTS, 300).hash != trained.hash


def test_training_is_the_same_in_every_process(trained: Tokenizer) -> None:
    code = f"from {Tokenizer.__module__} import Tokenizer; print(Tokenizer.train({TEXTS!r}, 400).hash)"
    for seed in ("1", "2"):
        environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": seed}
        result = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert result.stdout.strip() == trained.hash


def test_a_vocabulary_below_the_bytes_is_refused() -> None:
    with pytest.raises(DataError, match=r"vocab_size 256.*least 257"):
        Tokenizer.train(TEXTS, 256)
    smallest = Tokenizer.train(TEXTS, 257)
    assert smallest.vocab_size == 257
    check_bytes(smallest, TEXTS[1])


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": normalizers.NFC()},
        {"normalizer": normalizers.NFKC()},
        {"normalizer": normalizers.Lowercase()},
        {"normalizer": normalizers.Replace(" ", "▁")},
        {"normalizer": normalizers.Strip()},
        {"pre": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre": pre_tokenizers.Metaspace()},
        {"pre": pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(False)])},
    ],
)
def test_a_tokenizer_that_loses_text_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"round-trip.*byte-level"):
        Tokenizer.from_json(byte_level_backend(**changes).to_str())


def test_more_tokenizers_that_lose_text() -> None:
    words = BackendTokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    no_unknown = BackendTokenizer(models.WordLevel({"a": 0}, unk_token="none"))
    few = BackendTokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    few.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    stripping = byte_level_backend()
    stripping.add_tokens([AddedToken("weft", lstrip=True, rstrip=True)])
    for backend in (words, no_unknown, few, stripping, BackendTokenizer(models.BPE())):
        with pytest.raises(DataError, match=r"tokenizer .*(round-trip|cannot encode every text)"):
            Tokenizer.from_json(backend.to_str())


def test_an_external_tokenizer_is_used_unchanged() -> None:
    backend = byte_level_backend()
    backend.add_special_tokens(["<pad>", "<|endoftext|>"])
    backend.add_tokens(["weft", "日本"])
    backend.enable_truncation(max_length=2)
    backend.enable_padding()
    tokenizer = Tokenizer.from_json(backend.to_str())
    assert (tokenizer.eod_id, tokenizer.vocab_size) == (257, 260)
    assert tokenizer.byte_lengths[256:].tolist() == [0, 0, 4, 6]
    check_bytes(tokenizer, "<pad><|endoftext|> the weft 日本語")
    assert 258 in tokenizer.encode("the weft")


def test_an_external_tokenizer_without_an_end_token_gets_one() -> None:
    tokenizer = Tokenizer.from_json(byte_level_backend().to_str())
    assert (tokenizer.eod_id, tokenizer.vocab_size) == (256, 257)
    assert Tokenizer.from_json(tokenizer.to_json()).hash == tokenizer.hash


def test_dropout_does_not_make_encoding_random() -> None:
    content = json.loads(Tokenizer.train(TEXTS, 400).to_json())
    content["model"]["dropout"] = 0.5
    tokenizer = Tokenizer.from_json(json.dumps(content))
    assert len({tuple(tokenizer.encode(TEXTS[0])) for _ in range(5)}) == 1


@pytest.mark.parametrize("content", ["", "{}", "[]", "null", "nonsense", '{"model": {"type": "BPE"}}', "[" * 100_000])
def test_a_file_that_is_no_tokenizer(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"tokenizer.json"):
        Tokenizer.load(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"\xff")
    for path in (tmp_path, tmp_path / "missing", tmp_path / "a.json"):
        with pytest.raises(DataError, match=r"tokenizer.json"):
            Tokenizer.load(path)


def test_ids_far_apart_are_refused() -> None:
    content = json.loads(Tokenizer.train(TEXTS, 300).to_json())
    content["model"]["vocab"]["far"] = 4_000_000_000
    with pytest.raises(DataError, match="4000000000"):
        Tokenizer.from_json(json.dumps(content))


def test_what_cannot_be_encoded_or_decoded(trained: Tokenizer) -> None:
    with pytest.raises(DataError, match="half a surrogate pair"):
        trained.encode("a\ud800")
    for i in (-1, trained.vocab_size):
        with pytest.raises(DataError, match="outside the tokenizer's vocabulary"):
            trained.decode([i])


def test_distinct_words_are_counted_in_bytes_up_to_a_limit() -> None:
    assert distinct_word_bytes(["a b", "b é a", ", ,a"], 100) == 5
    assert distinct_word_bytes((f"w{number}" for number in range(10**9)), 1000) < 1010


@given(
    texts=st.lists(st.text(st.sampled_from("ab1_,.é日 \n\x1c\x85\u2028x")), max_size=6), remembered=st.integers(0, 9)
)
def test_words_are_counted_once_whatever_is_remembered(texts: list[str], remembered: int) -> None:
    words = {word for text in texts for word in re.findall(r"\w{1,256}|[^\w\s]{1,256}", text)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "_MAX_RUNS_SIZE", remembered)
        assert distinct_word_bytes(texts, 10**9) == sum(len(word.encode()) for word in words)


def test_a_tokenizer_is_pickled_after_it_encoded(trained: Tokenizer) -> None:
    """Workers that load data get a copy; the fast encoder of another library stays behind."""
    text = "The weaver lifts the warp."
    expected = trained.encode_documents([text])[0].tolist()
    again = pickle.loads(pickle.dumps(trained))
    assert again.encode_documents([text])[0].tolist() == expected
    assert copy.deepcopy(trained).hash == trained.hash


class Interrupted:
    """A backend during whose `encode` another thread encodes a text, and is waited for while it may."""

    def __init__(self, backend: BackendTokenizer, meanwhile: threading.Thread) -> None:
        self.__dict__ |= {"backend": backend, "meanwhile": meanwhile}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.backend, name, value)

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        if not self.meanwhile.is_alive():
            self.meanwhile.start()
            self.meanwhile.join(0.5)
        return self.backend.encode(text, add_special_tokens=add_special_tokens)


def test_threads_do_not_see_each_others_settings(trained: Tokenizer) -> None:
    """A server cuts several requests at a time; in one of them, names of special tokens become the tokens."""
    tokenizer, text, found = copy.copy(trained), f"warp{EOD_TOKEN}", list[list[int]]()
    alone = tokenizer.encode(text)
    meanwhile = threading.Thread(target=lambda: found.append(tokenizer.encode(text)))
    vars(tokenizer)["_backend"] = Interrupted(tokenizer._backend, meanwhile)
    tokens = [token for token, _ in tokenizer.encode_with_offsets(text)]
    meanwhile.join()
    assert tokens[-1] == tokenizer.eod_id
    assert found == [alone]
    assert tokenizer.eod_id not in alone
