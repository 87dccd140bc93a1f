"""Beam search: with enough beams it equals an exhaustive search, with few beams the same search written plainly."""

from dataclasses import replace

import pytest
import torch

import heddle
from heddle.errors import ConfigError, MachineError
from heddle.generation.decode import GenerationRequest, Sampler
from heddle.generation.generate import beam_search
from heddle.laws.harness import encoder_output_for
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.tokenization.tokenizer import Tokenizer
from tests import small
from tests.cases import in_turn
from tests.generation.loops import amplify_layers, beam_search_loop, designs, greedy_loop, most_likely_text

DESIGNS = designs()
PROMPTS = [[4, 1, 2, 3], [2], [3, 3]]


def tiny_model(config: ModelConfig, seed: int = 1, vocab_size: int = 5) -> Decoder:
    return amplify_layers(build(config.replace(vocab_size=vocab_size), dtype=torch.float64, seed=seed))


def test_logits_that_are_not_finite_are_an_error() -> None:
    model = tiny_model(next(iter(DESIGNS.values())))
    with torch.no_grad():
        next(model.final_norm.parameters()).fill_(torch.nan)
    with pytest.raises(MachineError, match="not finite"):
        search(model, PROMPTS, 3, 2, None)


def search(model: Decoder, rows: list[list[int]], steps: int, num_beams: int, eos_id: int | None) -> list[list[int]]:
    """Each row's best sequence."""
    texts: list[list[int]] = [[] for _ in rows]
    for step_tokens in beam_search(
        model,
        GenerationRequest(
            rows,
            steps,
            Sampler(),
            eos_ids=() if eos_id is None else (eos_id,),
            encoder_output=encoder_output_for(model, len(rows)),
        ),
        num_beams,
    ):
        for row, token in step_tokens:
            texts[row].append(token)
    return texts


@pytest.mark.parametrize("kind", in_turn(DESIGNS, 2))
def test_enough_beams_find_the_likeliest_of_all_texts(kind: str) -> None:
    model = tiny_model(DESIGNS[kind]).eval()
    for end in (None, 0):
        best = [most_likely_text(model, prompt, 3, end)[0] for prompt in PROMPTS[:2]]
        assert search(model, PROMPTS[:2], 3, 25, end) == best


def test_enough_beams_find_the_likeliest_of_all_longer_texts() -> None:
    ended = 0
    for seed in range(4):
        model = tiny_model(DESIGNS["gqa"], seed).eval()
        best = [most_likely_text(model, prompt, 4, 1)[0] for prompt in PROMPTS]
        ended += sum(1 in text for text in best)
        assert search(model, PROMPTS, 4, 125, 1) == best
    assert 0 < ended < 12


@pytest.mark.parametrize(
    ("kind", "num_beams"),
    [each for turn, beams in ((1, 2), (3, 3)) for each in in_turn([(kind, beams) for kind in DESIGNS], turn)],
)
def test_few_beams_are_the_plain_search(kind: str, num_beams: int) -> None:
    model = tiny_model(DESIGNS[kind], vocab_size=11).eval()
    for end in (None, 3):
        plain = [beam_search_loop(model, prompt, 6, num_beams, end) for prompt in PROMPTS]
        assert search(model, PROMPTS, 6, num_beams, end) == plain
        assert [search(model, [prompt], 6, num_beams, end)[0] for prompt in PROMPTS] == plain


def test_one_beam_is_greedy_and_more_find_likelier_texts() -> None:
    model = tiny_model(DESIGNS["gqa"], vocab_size=11)
    assert search(model, PROMPTS, 7, 1, None) == [greedy_loop(model, prompt, 7) for prompt in PROMPTS]
    assert heddle.generate(model, PROMPTS, max_new_tokens=7, num_beams=4) == search(model, PROMPTS, 7, 4, None)
    assert heddle.generate(model, PROMPTS, max_new_tokens=7, num_beams=4) != heddle.generate(
        model, PROMPTS, max_new_tokens=7
    )


def test_equal_scores_go_to_the_lower_token() -> None:
    model = tiny_model(DESIGNS["mha"])
    with torch.no_grad():
        model.head.weight.zero_()
    assert search(model, PROMPTS, 3, 4, None) == [[0, 0, 0]] * 3
    assert search(model, PROMPTS, 3, 4, 2) == [[2]] * 3  # every text is as likely a token; the first to end wins


def test_rows_that_are_settled_leave_the_batch() -> None:
    model = tiny_model(DESIGNS["gqa"])
    with torch.no_grad():
        model.embed.weight[0].mul_(9.0)  # the end is certain after some prompts
    together = search(model, PROMPTS, 5, 3, 0)
    assert together == [search(model, [prompt], 5, 3, 0)[0] for prompt in PROMPTS]


def test_texts_end_where_they_end() -> None:
    tokenizer = Tokenizer.train([small.text(4000)], small.VOCABULARY)
    config = small.config(small.design(vocab_size=tokenizer.vocab_size))
    model = amplify_layers(build(config, dtype=torch.float64, seed=2))
    pieces = ["", ""]

    def hear(row: int, piece: str) -> None:
        pieces[row] += piece

    texts = heddle.generate(model, ["The", ""], tokenizer, max_new_tokens=9, num_beams=3, on_text=hear)
    assert texts == pieces
    request = GenerationRequest(
        [[tokenizer.eod_id, *tokenizer.encode("The")]], 9, Sampler(), tokenizer.vocab_size, (tokenizer.eod_id,)
    )
    tokens = [token for _, token in next(beam_search(model, request, 3))]
    assert texts[0] == tokenizer.decode([token for token in tokens if token != tokenizer.eod_id])
    narrow = next(beam_search(model, replace(request, vocab_limit=7, eos_ids=()), 3))
    assert max(token for _, token in narrow) < 7
    stop = texts[0][1]
    assert heddle.generate(model, ["The"], tokenizer, max_new_tokens=9, num_beams=3, stop=[stop]) == [
        texts[0].partition(stop)[0]
    ]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_beams": 0}, "num_beams 0:"),
        ({"num_beams": 10**9}, "num_beams 1000000000:"),
        ({"max_new_tokens": 10**20}, "max_new_tokens 100000000000000000000:"),
        ({"num_beams": 2, "temperature": 0.5}, "num_beams 2:"),
    ],
)
def test_settings_that_conflict_with_beam_search_are_refused(settings: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        heddle.generate(tiny_model(DESIGNS["mha"]), [[1]], **settings)  # type: ignore[call-overload]
    assert str(caught.value).startswith(says)
