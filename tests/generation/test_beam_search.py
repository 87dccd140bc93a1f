"""Beams find the likeliest text: all of them against trying everything, few against the same search written plainly."""

from dataclasses import replace

import pytest
import torch

import heddle
from heddle.errors import ConfigError
from heddle.generation.beam_search import searched
from heddle.generation.prefill import Request
from heddle.generation.sampling import Sampling
from heddle.laws.subject import memory
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.tokenization.tokenizer import Tokenizer
from tests import small
from tests.generation.loops import beam_search, designs, greedy, likeliest, lively

DESIGNS = designs()
PROMPTS = [[4, 1, 2, 3], [2], [3, 3]]


def tiny(config: ModelConfig, seed: int = 1, vocab_size: int = 5) -> Decoder:
    return lively(build(config.replace(vocab_size=vocab_size), dtype=torch.float64, seed=seed))


def found(model: Decoder, rows: list[list[int]], steps: int, beams: int, end: int | None) -> list[list[int]]:
    """The text of each row."""
    texts: list[list[int]] = [[] for _ in rows]
    for new in searched(
        model,
        Request(rows, steps, Sampling(), ends=() if end is None else (end,), memory=memory(model, len(rows))),
        beams,
    ):
        for row, token in new:
            texts[row].append(token)
    return texts


@pytest.mark.parametrize("kind", DESIGNS)
def test_enough_beams_find_the_likeliest_of_all_texts(kind: str) -> None:
    model = tiny(DESIGNS[kind]).eval()
    for end in (None, 0):
        best = [likeliest(model, prompt, 3, end)[0] for prompt in PROMPTS[:2]]
        assert found(model, PROMPTS[:2], 3, 25, end) == best


def test_enough_beams_find_the_likeliest_of_all_longer_texts() -> None:
    ended = 0
    for seed in range(4):
        model = tiny(DESIGNS["gqa"], seed).eval()
        best = [likeliest(model, prompt, 4, 1)[0] for prompt in PROMPTS]
        ended += sum(1 in text for text in best)
        assert found(model, PROMPTS, 4, 125, 1) == best
    assert 0 < ended < 12


@pytest.mark.parametrize("kind", DESIGNS)
@pytest.mark.parametrize("beams", [2, 3])
def test_few_beams_are_the_plain_search(kind: str, beams: int) -> None:
    model = tiny(DESIGNS[kind], vocab_size=11).eval()
    for end in (None, 3):
        plain = [beam_search(model, prompt, 6, beams, end) for prompt in PROMPTS]
        assert found(model, PROMPTS, 6, beams, end) == plain
        assert [found(model, [prompt], 6, beams, end)[0] for prompt in PROMPTS] == plain


def test_one_beam_is_greedy_and_more_find_likelier_texts() -> None:
    model = tiny(DESIGNS["gqa"], vocab_size=11)
    assert found(model, PROMPTS, 7, 1, None) == [greedy(model, prompt, 7) for prompt in PROMPTS]
    assert heddle.generate(model, PROMPTS, max_new_tokens=7, beams=4) == found(model, PROMPTS, 7, 4, None)
    assert heddle.generate(model, PROMPTS, max_new_tokens=7, beams=4) != heddle.generate(
        model, PROMPTS, max_new_tokens=7
    )


def test_equal_scores_go_to_the_lower_token() -> None:
    model = tiny(DESIGNS["mha"])
    with torch.no_grad():
        model.head.weight.zero_()
    assert found(model, PROMPTS, 3, 4, None) == [[0, 0, 0]] * 3
    assert found(model, PROMPTS, 3, 4, 2) == [[2]] * 3  # every text is as likely a token; the first to end wins


def test_rows_that_are_settled_leave_the_batch() -> None:
    model = tiny(DESIGNS["gqa"])
    with torch.no_grad():
        model.embed.weight[0].mul_(9.0)  # the end is certain after some prompts
    together = found(model, PROMPTS, 5, 3, 0)
    assert together == [found(model, [prompt], 5, 3, 0)[0] for prompt in PROMPTS]


def test_texts_end_where_they_end() -> None:
    tokenizer = Tokenizer.train([small.text(4000)], small.VOCABULARY)
    config = small.config(small.design(vocab_size=tokenizer.vocab_size))
    model = lively(build(config, dtype=torch.float64, seed=2))
    pieces = ["", ""]

    def hear(row: int, piece: str) -> None:
        pieces[row] += piece

    texts = heddle.generate(model, ["The", ""], tokenizer, max_new_tokens=9, beams=3, on_text=hear)
    assert texts == pieces
    request = Request(
        [[tokenizer.end, *tokenizer.encode("The")]], 9, Sampling(), tokenizer.vocab_size, (tokenizer.end,)
    )
    tokens = [token for _, token in next(searched(model, request, 3))]
    assert texts[0] == tokenizer.decode([token for token in tokens if token != tokenizer.end])
    narrow = next(searched(model, replace(request, known=7, ends=()), 3))
    assert max(token for _, token in narrow) < 7
    stop = texts[0][1]
    assert heddle.generate(model, ["The"], tokenizer, max_new_tokens=9, beams=3, stop=[stop]) == [
        texts[0].partition(stop)[0]
    ]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"beams": 0}, "beams 0: must be at least 1"),
        ({"beams": 2, "temperature": 0.5}, "beams 2: look for the likeliest text and do not sample"),
    ],
)
def test_what_does_not_go_with_beams(settings: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        heddle.generate(tiny(DESIGNS["mha"]), [[1]], **settings)  # type: ignore[call-overload]
    assert str(caught.value).startswith(says)
