"""generate() of transformers with every kind of state, against plain loops, against no cache, and against heddle's."""

from typing import Any

import pytest
import torch

import heddle
from tests.exchange.transformers.designs import DESIGNS, by_length, decoder, draft, model, padded, prompts
from tests.generation.loops import greedy

STEPS = 14
EACH = pytest.mark.parametrize("name", DESIGNS)


def written(name: str, given: dict[str, Any], **how: Any) -> list[list[int]]:
    """New tokens of each row."""
    usual = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0} | how
    rows: torch.Tensor = model(name).generate(**given, **usual)
    new: list[list[int]] = rows[:, given["input_ids"].shape[1] :].tolist()
    return new


def check_greedy(name: str) -> None:
    """Left-padded rows go on as each alone, by a plain loop and by heddle.generate."""
    rows = prompts()
    found = written(name, padded(rows))
    assert found[1:] == [greedy(decoder(name), row, STEPS) for row in rows[1:]]
    assert found == heddle.generate(decoder(name), rows, max_new_tokens=STEPS)


def check_taken_back(name: str) -> None:
    """Guesses that are taken back leave no trace, whoever made them."""
    row = prompts([9])[0] * 2
    given, want = padded([row]), greedy(decoder(name), row, STEPS)
    assert written(name, given, prompt_lookup_num_tokens=4) == [want]
    assert written(name, given, assistant_model=draft(name)) == [want]


def check_beams(name: str) -> None:
    """Beams with a cache are those without."""
    given = padded(prompts([6, 3]))
    how = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 8}
    assert written(name, given, **how) == written(name, given, use_cache=False, **how)


@EACH
def test_greedy_in_a_padded_batch(name: str) -> None:
    check_greedy(name)


@EACH
def test_caches_change_nothing(name: str) -> None:
    given = padded(prompts([7, 5]))
    want = written(name, given)
    assert written(name, given, use_cache=False) == want
    assert written(name, given, cache_implementation="static") == want
    assert written(name, given, prefill_chunk_size=3) == want


@EACH
def test_beams(name: str) -> None:
    check_beams(name)


@EACH
def test_assisted_and_prompt_lookup(name: str) -> None:
    check_taken_back(name)


@EACH
def test_sampling_draws_the_same_with_and_without_a_cache(name: str) -> None:
    given = padded(prompts([6, 2]))
    how = {"do_sample": True, "temperature": 1.3, "top_k": 20, "num_return_sequences": 2}
    torch.manual_seed(4)
    first = written(name, given, **how)
    torch.manual_seed(4)
    assert written(name, given, use_cache=False, **how) == first
    assert first[0] != first[1]


@EACH
def test_a_cache_given_back_goes_on(name: str) -> None:
    given = padded(prompts([6, 2]))
    want = model(name).generate(**given, max_new_tokens=STEPS, do_sample=False, pad_token_id=0)
    how = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    first = model(name).generate(**given, max_new_tokens=5, **how)
    grown = torch.ones_like(first.sequences)
    grown[:, : given["attention_mask"].shape[1]] = given["attention_mask"]
    again = model(name).generate(
        first.sequences, attention_mask=grown, past_key_values=first.past_key_values, max_new_tokens=STEPS - 5, **how
    )
    assert torch.equal(again.sequences, want)


def test_embeddings_in_place_of_tokens() -> None:
    given = padded(prompts([6, 2]))
    rows = model("learned").get_input_embeddings()(given["input_ids"])
    how = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0}
    found = model("learned").generate(inputs_embeds=rows, attention_mask=given["attention_mask"], **how)
    assert found.tolist() == written("learned", given)


def test_a_design_that_turns_by_the_length_is_told_it() -> None:
    one, row = by_length(), prompts([9])[0]
    found = one.generate(torch.tensor([row]), max_new_tokens=STEPS, do_sample=False)
    assert found[:, 9:].tolist() == heddle.generate(one.of_heddle, [row], max_new_tokens=STEPS)


def test_scores_and_attentions_are_given_on_request() -> None:
    given = padded([prompts([6])[0]])
    how = {"return_dict_in_generate": True, "output_attentions": True, "output_hidden_states": True}
    found = model("gqa").generate(**given, max_new_tokens=3, do_sample=False, pad_token_id=0, **how)
    assert [tuple(step[1].shape) for step in found.attentions] == [(1, 6, 6, 6), (1, 6, 1, 7), (1, 6, 1, 8)]
    assert [len(step) for step in found.hidden_states] == [3, 3, 3]


def test_caches_of_other_kinds_are_refused_by_name() -> None:
    with pytest.raises(heddle.errors.ConfigError, match="cache_implementation: is 'offloaded'"):
        written("gqa", padded(prompts([4])), cache_implementation="offloaded")
