"""The trial of another program's expressions: those of well-known tokenizers pass, and ones that never end do not."""

from typing import Any

import pytest

from heddle.errors import DataError
from heddle.tokenization.backend import check_steps, read_backend

# The usual alternatives of byte-level tokenizers: contractions, words by case, digits, signs, line ends, spaces.
USUAL = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lo}\p{M}]*[\p{Ll}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lo}\p{M}]+[\p{Ll}\p{Lo}\p{M}]*"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def splits(pattern: str) -> dict[str, Any]:
    return {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}}


@pytest.mark.parametrize("pattern", USUAL)
def test_usual_expressions_pass(pattern: str) -> None:
    check_steps(splits(pattern), frozenset(), "usual")


@pytest.mark.parametrize("pattern", ["(a+)+b", "(?:m*n)|m", "(((k*)*)*)*l"])
def test_an_expression_that_takes_too_long_is_refused(pattern: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Also one whose every search ends, but whose time grows as the square of the text's length."""
    with pytest.raises(DataError, match=r"^tokenizer trap") as refused:
        check_steps(splits(pattern), frozenset(), "trap")
    assert len(str(refused.value)) <= 400
    assert capfd.readouterr() == ("", "")


def test_expressions_of_decoders_and_normalizers_are_tried() -> None:
    replace = {"type": "Replace", "pattern": {"Regex": "(a+)+b"}, "content": ""}
    for steps in ({"decoder": replace}, {"normalizer": {"type": "Sequence", "normalizers": [replace]}}):
        with pytest.raises(DataError, match="cannot encode every text"):
            check_steps(steps, frozenset(), "trap")


def test_a_key_that_stands_twice_hides_no_step() -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        read_backend('{"normalizer": null, "normalizer": null}', "twice")
