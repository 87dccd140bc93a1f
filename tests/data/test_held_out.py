"""The held-out text in two parts: for tuning, and for the final scores."""

from pathlib import Path

import numpy as np
import pytest

from heddle.data.samples import evaluation_windows
from heddle.data.token_file import MAX_FINAL_TOKENS, MAX_TUNING_TOKENS, TokenFile, split_held_out, write_token_file
from heddle.errors import DataError

VOCABULARY = 60_000
ONE_BYTE = np.ones(VOCABULARY, dtype=np.int64)
ONE_BYTE[0] = -1  # the end token


def numbered(path: Path, documents: int, length: int) -> TokenFile:
    """Documents whose tokens are all different, as far as the vocabulary goes."""
    with write_token_file(path, vocab_size=VOCABULARY, eod_id=0, tokenizer_hash="t") as writer:
        for index in range(documents):
            first = 1 + index * length
            writer.add([[1 + number % (VOCABULARY - 1) for number in range(first, first + length)]], length)
    return TokenFile(path)


def tokens_of(part: TokenFile) -> set[int]:
    return set(part.read(0, len(part)).tolist()) - {0}


@pytest.mark.parametrize(("documents", "length"), [(300, 90), (40, 700), (1, 30_000), (3, 9000)])
def test_no_token_is_in_both_parts(tmp_path: Path, documents: int, length: int) -> None:
    text = numbered(tmp_path / "a", documents, length)
    tuning, final = split_held_out(text, 32, ONE_BYTE)
    assert not tokens_of(tuning) & tokens_of(final)
    assert 0.15 < len(tuning) / len(text) < 0.35
    assert len(tuning) + len(final) == pytest.approx(len(text), rel=0.01)
    assert tuning.text_bytes == len(tuning) - tuning.document_count
    for part in (tuning, final):
        assert part.read(0, 1).tolist() == [0]
        assert part.document(part.document_count - 1).tolist()[0] == 0
    if length < 100:  # shorter than a piece: no document is cut
        assert all(len(tuning.document(index)) == length + 1 for index in range(tuning.document_count))


def test_a_long_text_is_sampled_evenly_and_read_whole(tmp_path: Path) -> None:
    """Parts are so short that an evaluation reads every window, whatever the batch size is."""
    text = numbered(tmp_path / "a", 2000, 300)
    tuning, final = split_held_out(text, 128, ONE_BYTE)
    assert len(tuning) <= MAX_TUNING_TOKENS
    assert len(final) <= MAX_FINAL_TOKENS
    assert len(final) > 0.9 * MAX_FINAL_TOKENS
    rows = [[row.tolist() for batch in evaluation_windows(final, 128, size) for row in batch.tokens] for size in (1, 8)]
    assert rows[0] == rows[1]


def test_too_little_text(tmp_path: Path) -> None:
    text = numbered(tmp_path / "a", 3, 100)
    with pytest.raises(DataError, match=r"303 tokens.*512.*sequence_length 32"):
        split_held_out(text, 32, ONE_BYTE)
    tuning, final = split_held_out(text, 16, ONE_BYTE)
    assert len(tuning) >= 50
    assert len(final) > 200
