"""Limits on sizes: which errors of torch are refusals, and how many layers a refusal names."""

import pytest

from heddle.errors import ConfigError
from heddle.model.config import MAX_LAYERS, refuse_overflow, too_many_layers


def test_only_an_overflow_is_a_refusal() -> None:
    with pytest.raises(ConfigError, match="choose smaller sizes"), refuse_overflow():
        raise RuntimeError("Storage size calculation overflowed with sizes=[9223372036854775807, 2]")
    with pytest.raises(RuntimeError, match="another error"), refuse_overflow():
        raise RuntimeError("another error")


def test_a_refusal_names_the_number_of_layers_up_to_2_to_the_64() -> None:
    sentences = [too_many_layers(depth) for depth in (MAX_LAYERS, MAX_LAYERS + 1, 2**64 - 1, 2**64)]
    numbers = [sentence and sentence.split(" layers")[0] for sentence in sentences]
    assert numbers == [None, "expands to 1025", "expands to 18446744073709551615", "expands to more than 2^64"]
