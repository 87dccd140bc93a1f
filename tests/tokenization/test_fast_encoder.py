"""The fast library gives the ids of `tokenizers`, and where it might not, it is not asked."""

import json
import random
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gigatoken
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.errors import DataError
from heddle.tokenization import fast_encoder
from heddle.tokenization.backend import MAX_RUN_LENGTH
from heddle.tokenization.fast_encoder import CharacterClasses, FastEncoder
from heddle.tokenization.tokenizer import Tokenizer

TEXTS = [
    "def weave(threads):\n    return [lift(thread) for thread in threads]\n\n\n" * 20,
    "日本語の文章を書きます。織機の綜絖は経糸を持ち上げる。" * 20,
    "It's the heddle that lifts; don't let it drop. 1234567\r\n\t \u3000x" * 20,
    "Ткацкий станок, हिन्दी का करघा, نول النسيج, 한국어 베틀 e\u0301 👩‍👩‍👧 ٣٤٥ Ⅷ²" * 20,
    ("a" * 3 + " " * 5 + "-" * 6 + "7" * 5 + "\n" * 3) * 100,
]
PIECES = [
    " ",
    "  ",
    "\n",
    "\t",
    "\r\n",
    "\xa0",
    "\u2028",
    "\x85",
    "\x1c",
    "'s",
    "'LL",
    "a",
    "é",
    "日",
    "7",
    "²",
    "-",
    "\0",
]
PIECES += [
    "<|end|>",
    "\u180e",
    "\u200b",
    "\ufeff",
    "e\u0301",
    "👩‍👩‍👧",
    "word",
    " word",
    "I'd",
    "_",
    "\U0001ccf0",
    "\u088f",
    "\U00010940",
    "\U0010ffff",
]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return Tokenizer.train(TEXTS, 700)


def check_equal(tokenizer: Tokenizer, texts: list[str]) -> None:
    assert [ids.tolist() for ids in tokenizer.encode_documents(texts)] == tokenizer.encode_batch(texts)


def random_text(generator: random.Random) -> str:
    """Random code points, with more of the lower ones, and runs up to a little over the limit."""
    text = []
    for _ in range(generator.randrange(60)):
        point = generator.randrange(generator.choice([0x80, 0x800, 0x3000, 0xD800, 0x110000]))
        repeats = generator.choice([1, 1, 1, 1, 3, MAX_RUN_LENGTH - 1, MAX_RUN_LENGTH, MAX_RUN_LENGTH + 1])
        text.append("" if 0xD800 <= point < 0xE000 else chr(point) * repeats)
    return "".join(text)


@given(text=st.text())
def test_any_text_has_the_same_ids(trained: Tokenizer, text: str) -> None:
    check_equal(trained, [text])


@given(pieces=st.lists(st.sampled_from(PIECES)), count=st.sampled_from([1, 2, 100, 256, 300]))
def test_texts_of_awkward_pieces(trained: Tokenizer, pieces: list[str], count: int) -> None:
    check_equal(
        trained, ["".join(piece * (count if i == 1 else 1) for i, piece in enumerate(pieces)), "".join(pieces) * 2]
    )


def test_ordinary_texts_take_the_fast_way(trained: Tokenizer) -> None:
    encoder = trained._fast_encoder
    assert encoder is not None
    for text in [*TEXTS, "", " " + "a" * MAX_RUN_LENGTH + " \n"]:
        ids = encoder.encode(text)
        assert ids is not None, text[:20]
        assert ids.dtype == np.uint32
        assert ids.tolist() == trained.encode(text)
    mixed = [TEXTS[0], "x" * 300, "", TEXTS[1]]  # the second one is for `tokenizers`
    check_equal(trained, mixed)


@pytest.mark.parametrize("letter", ["a", "é", "日", "7", "²", "-", "👩", " ", "\n", "\u3000"])
def test_a_run_over_the_limit_takes_the_slow_way(trained: Tokenizer, letter: str) -> None:
    encoder = trained._fast_encoder
    assert encoder is not None
    for text in ("{}", "x {} 1", " {}", "{}\n", "{}x1 -"):
        for length in (MAX_RUN_LENGTH - 1, MAX_RUN_LENGTH, MAX_RUN_LENGTH + 1, 3 * MAX_RUN_LENGTH):
            check_equal(trained, [text.format(letter * length)])
    assert encoder.encode(letter * (MAX_RUN_LENGTH + 1)) is None


def test_without_the_check_of_runs_the_ids_would_be_others(trained: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a" * (MAX_RUN_LENGTH + 1)
    check_equal(trained, [text])
    monkeypatch.setattr(fast_encoder, "_LONG_RUNS", ())
    with pytest.raises(AssertionError):
        check_equal(trained, [text])


class OtherUnicode:
    """gigatoken with a version of Unicode in which é is no letter."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    @classmethod
    def from_json(cls, text: str) -> "OtherUnicode":
        return cls(gigatoken.Tokenizer.from_json(text))

    def encode(self, data: bytes) -> np.ndarray:
        return self._backend.encode(data.replace("é".encode(), "×".encode()))


def test_a_character_of_another_class_takes_the_slow_way(trained: Tokenizer) -> None:
    library = SimpleNamespace(Tokenizer=OtherUnicode)
    classes = CharacterClasses(library)  # type: ignore[arg-type]
    assert classes.of_text("naïve") == bytes([1, 1, 1, 1, 1])
    assert classes.of_text("é") is None
    assert classes.of_text("né") is None
    assert classes.of_text("aé1²-日 \u3000"[2:]) == bytes([2, 2, 3, 1, 4, 4])


def test_half_a_surrogate_pair_is_refused(trained: Tokenizer) -> None:
    with pytest.raises(DataError, match="half a surrogate pair"):
        trained.encode_documents(["a", "\ud800"])


def test_the_library_is_renewed_before_it_takes_much_memory(
    trained: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_encoder, "_RENEW_AFTER_BYTES", 3000)
    encoder = FastEncoder(gigatoken, json.loads(trained.to_json()))
    first = encoder._tokenizer
    expected = trained.encode(TEXTS[0])
    for _ in range(6):
        ids = encoder.encode(TEXTS[0])
        assert ids is not None
        assert ids.tolist() == expected
    assert encoder._tokenizer is not first


def fast_or_none(tokenizer: Tokenizer, change: Any) -> FastEncoder | None:
    data = json.loads(tokenizer.to_json())
    change(data)
    return Tokenizer.from_json(json.dumps(data))._fast_encoder


def test_other_tokenizers_are_left_to_tokenizers(trained: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = {"id": 700, "content": "weave", "single_word": False, "lstrip": False, "rstrip": False}
    assert fast_or_none(trained, lambda data: None) is not None
    assert fast_or_none(trained, lambda data: data.update(pre_tokenizer=gpt2)) is None
    assert fast_or_none(trained, lambda data: data["model"]["merges"].reverse()) is None
    word = added | {"normalized": False, "special": False}
    assert fast_or_none(trained, lambda data: data["added_tokens"].append(word)) is None
    assert fast_or_none(trained, lambda data: data["model"].update(ignore_merges=True)) is None

    class Broken(OtherUnicode):
        def encode(self, data: bytes) -> np.ndarray:
            return self._backend.encode(data)[::-1]

    monkeypatch.setattr(fast_encoder, "_gigatoken", lambda: SimpleNamespace(Tokenizer=Broken))
    assert fast_or_none(trained, lambda data: None) is None


def test_without_the_library_nothing_changes(trained: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> ModuleType | None:
        return None

    monkeypatch.setattr(fast_encoder, "_gigatoken", missing)
    alone = Tokenizer.from_json(trained.to_json())
    assert alone._fast_encoder is None
    for own, fast in zip(alone.encode_documents(TEXTS), trained.encode_documents(TEXTS), strict=True):
        np.testing.assert_array_equal(own, fast, strict=True)


@pytest.mark.soak
def test_every_character_and_many_random_texts(trained: Tokenizer) -> None:
    generator = random.Random(0)
    check_equal(trained, [random_text(generator) for _ in range(20_000)])
    points = [*range(0xD800), *range(0xE000, 0x110000)]
    for before in ("a", "1", "!", " ", ""):
        lines = [
            "".join(f"{before}{chr(i)}{before}b" for i in points[start : start + 256])
            for start in range(0, len(points), 256)
        ]
        check_equal(trained, lines)


@pytest.mark.soak
def test_the_files_of_this_repository(trained: Tokenizer) -> None:
    paths = [path for path in Path(__file__).parents[2].rglob("*") if path.suffix in (".py", ".md", ".json", ".html")]
    texts = [path.read_bytes().decode("utf-8", "replace") for path in paths if ".venv" not in path.parts]
    check_equal(trained, [text[:100_000] for text in texts])
