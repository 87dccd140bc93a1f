"""generate() of transformers with every kind of state, against plain loops, against no cache, and against heddle's."""

from typing import Any

import pytest
import torch
from transformers import WatermarkingConfig

import heddle
from heddle.errors import ConfigError
from tests.cases import in_turn
from tests.exchange.transformers.designs import DESIGNS, by_length, decoder, draft, model, padded, prompts
from tests.generation.loops import greedy_loop

STEPS = 14
EACH = [pytest.mark.parametrize("name", in_turn(DESIGNS, turn, 3)) for turn in range(3)]


def written(name: str, inputs: dict[str, Any], **kwargs: Any) -> list[list[int]]:
    """New tokens of each row."""
    arguments = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0} | kwargs
    rows: torch.Tensor = model(name).generate(**inputs, **arguments)
    new: list[list[int]] = rows[:, inputs["input_ids"].shape[1] :].tolist()
    return new


def check_greedy(name: str) -> None:
    """Left-padded rows go on as each alone, by a plain loop and by heddle.generate."""
    rows = prompts()
    actual = written(name, padded(rows))
    assert actual[1:] == [greedy_loop(decoder(name), row, STEPS) for row in rows[1:]]
    assert actual == heddle.generate(decoder(name), rows, max_new_tokens=STEPS)


def check_taken_back(name: str) -> None:
    """Guesses that are taken back leave no trace, whoever made them."""
    row = prompts([9])[0] * 2
    inputs, expected = padded([row]), greedy_loop(decoder(name), row, STEPS)
    assert written(name, inputs, prompt_lookup_num_tokens=4) == [expected]
    assert written(name, inputs, assistant_model=draft(name)) == [expected]


def check_beams(name: str) -> None:
    """Beams with a cache are those without."""
    inputs = padded(prompts([6, 3]))
    kwargs = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 8}
    assert written(name, inputs, **kwargs) == written(name, inputs, use_cache=False, **kwargs)


@EACH[0]
def test_greedy_in_a_padded_batch(name: str) -> None:
    check_greedy(name)


@EACH[1]
def test_caches_change_nothing(name: str) -> None:
    inputs = padded(prompts([7, 5]))
    expected = written(name, inputs)
    assert written(name, inputs, use_cache=False) == expected
    assert written(name, inputs, cache_implementation="static") == expected
    assert written(name, inputs, prefill_chunk_size=3) == expected


def test_chunked_prefill_needs_the_length_of_each_text() -> None:
    arguments = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0}
    inputs = padded(prompts([9, 7]))
    expected = by_length().generate(**inputs, **arguments)
    assert torch.equal(by_length().generate(**inputs, prefill_chunk_size=4, **arguments), expected)
    with pytest.raises(ConfigError, match="4 columns"):
        by_length().generate(**padded(prompts([9, 3])), prefill_chunk_size=4, **arguments)


@EACH[2]
def test_beams(name: str) -> None:
    check_beams(name)


@EACH[0]
def test_assisted_and_prompt_lookup(name: str) -> None:
    check_taken_back(name)


@EACH[1]
def test_sampling_draws_the_same_with_and_without_a_cache(name: str) -> None:
    inputs = padded(prompts([6, 2]))
    kwargs = {"do_sample": True, "temperature": 1.3, "top_k": 20, "num_return_sequences": 2}
    torch.manual_seed(4)
    first = written(name, inputs, **kwargs)
    torch.manual_seed(4)
    assert written(name, inputs, use_cache=False, **kwargs) == first
    assert first[0] != first[1]


BEAMS = {"num_beams": 3, "eos_token_id": 9}
SAMPLED = {"do_sample": True, "temperature": 0.3}
STRATEGIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # the arguments, and those without the strategy
    "beams that sample": (SAMPLED | {"num_beams": 3}, SAMPLED),
    "top_p": (SAMPLED | {"top_p": 0.5}, SAMPLED),
    "min_p": (SAMPLED | {"min_p": 0.5}, SAMPLED),
    "typical_p": (SAMPLED | {"typical_p": 0.4}, SAMPLED),
    "epsilon_cutoff": (SAMPLED | {"epsilon_cutoff": 0.03}, SAMPLED),
    "eta_cutoff": (SAMPLED | {"eta_cutoff": 0.9}, SAMPLED),
    "repetition_penalty": ({"repetition_penalty": 30.0}, {}),
    "no_repeat_ngram_size": ({"no_repeat_ngram_size": 1}, {}),
    "guidance_scale": ({"guidance_scale": 9.0}, {}),
    "sequence_bias": ({"sequence_bias": [[[7], 50.0]]}, {}),
    "bad_words_ids": ({"bad_words_ids": [[token] for token in range(20)]}, {}),
    "suppress_tokens": ({"suppress_tokens": list(range(20, 40))}, {}),
    "forced_eos_token_id": ({"forced_eos_token_id": 3}, {}),
    "top_k": (SAMPLED | {"top_k": 2}, SAMPLED),
    "top_h": (SAMPLED | {"top_h": 0.3}, SAMPLED),
    "length_penalty": (BEAMS | {"length_penalty": -9.0}, BEAMS),
    "min_new_tokens": ({"min_new_tokens": 12, "eos_token_id": 9}, {"eos_token_id": 9}),
    "exponential_decay_length_penalty": (
        {"exponential_decay_length_penalty": (2, 30.0), "eos_token_id": 3},
        {"eos_token_id": 3},
    ),
    "encoder_repetition_penalty": ({"encoder_repetition_penalty": 30.0}, {}),
    "begin_suppress_tokens": ({"begin_suppress_tokens": list(range(40))}, {}),
    "watermarking_config": ({"watermarking_config": WatermarkingConfig(bias=20.0)}, {}),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_are_the_same_with_and_without_a_cache(strategy: str) -> None:
    """A hybrid of recurrent states and keys: the strategy changes the text, and the cache does not."""
    inputs = padded(prompts([6, 4]))

    def text(use_cache: bool, arguments: dict[str, Any]) -> list[list[int]]:
        torch.manual_seed(4)
        return written("hybrid", inputs, use_cache=use_cache, **arguments)

    arguments, without = STRATEGIES[strategy]
    assert text(True, arguments) == text(False, arguments)
    assert text(True, arguments) != text(True, without)


@EACH[2]
def test_a_cache_given_back_goes_on(name: str) -> None:
    inputs = padded(prompts([6, 2]))
    expected = model(name).generate(**inputs, max_new_tokens=STEPS, do_sample=False, pad_token_id=0)
    kwargs = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    first = model(name).generate(**inputs, max_new_tokens=5, **kwargs)
    mask = torch.ones_like(first.sequences)
    mask[:, : inputs["attention_mask"].shape[1]] = inputs["attention_mask"]
    again = model(name).generate(
        first.sequences, attention_mask=mask, past_key_values=first.past_key_values, max_new_tokens=STEPS - 5, **kwargs
    )
    assert torch.equal(again.sequences, expected)


def test_embeddings_in_place_of_tokens() -> None:
    inputs = padded(prompts([6, 2]))
    rows = model("learned").get_input_embeddings()(inputs["input_ids"])
    kwargs = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0}
    actual = model("learned").generate(inputs_embeds=rows, attention_mask=inputs["attention_mask"], **kwargs)
    assert actual.tolist() == written("learned", inputs)


def test_a_design_that_turns_by_the_length_is_told_it() -> None:
    hf_model, row = by_length(), prompts([9])[0]
    actual = hf_model.generate(torch.tensor([row]), max_new_tokens=STEPS, do_sample=False)
    assert actual[:, 9:].tolist() == heddle.generate(hf_model.heddle_decoder, [row], max_new_tokens=STEPS)


def test_a_longer_row_changes_no_rotation_of_the_others() -> None:
    """The texts end at 17, 22 and 28 tokens; the switch is at 20."""
    hf_model, rows = by_length(), prompts([4, 9, 15])
    inputs = padded(rows)
    actual = hf_model.generate(**inputs, max_new_tokens=STEPS, do_sample=False, pad_token_id=0)
    expected = [heddle.generate(hf_model.heddle_decoder, [row], max_new_tokens=STEPS)[0] for row in rows]
    assert actual[:, 15:].tolist() == expected
    assert heddle.generate(hf_model.heddle_decoder, rows, max_new_tokens=STEPS) == expected
    whole = hf_model(**inputs, use_cache=False).logits[0, -4:]
    torch.testing.assert_close(whole, hf_model(torch.tensor([rows[0]]), use_cache=False).logits[0], rtol=0, atol=1e-10)


def test_scores_and_attentions_are_given_on_request() -> None:
    inputs = padded([prompts([6])[0]])
    kwargs = {"return_dict_in_generate": True, "output_attentions": True, "output_hidden_states": True}
    actual = model("gqa").generate(**inputs, max_new_tokens=3, do_sample=False, pad_token_id=0, **kwargs)
    assert [tuple(step[1].shape) for step in actual.attentions] == [(1, 6, 6, 6), (1, 6, 1, 7), (1, 6, 1, 8)]
    assert [len(step) for step in actual.hidden_states] == [3, 3, 3]


def test_caches_of_other_kinds_are_refused_by_name() -> None:
    with pytest.raises(heddle.errors.ConfigError, match=r"cache_implementation:.*'offloaded'"):
        written("gqa", padded(prompts([4])), cache_implementation="offloaded")
