"""Pictures of parts show what parts read."""

from collections.abc import Callable

import pytest
import torch

from heddle.config import kinds, parse_config
from heddle.laws.harness import model_under_test
from heddle.model.config import ModelConfig
from tools.part_pictures import FOLDER, LAYERS, MAPS, PANELS, TOKENS


def read(name: str, label: str) -> list[list[bool]]:
    """Whether output t changes with input s."""
    (panel,) = [panel for panel in PANELS[name] if panel.label == label]
    values = MAPS[panel.what](model_under_test(parse_config(ModelConfig, panel.data)))
    found: list[list[bool]] = (values > 1e-9).tolist()
    return found


def test_each_picture_is_drawn_and_its_kind_exists() -> None:
    assert {f"{name}.svg" for name in PANELS} == {file.name for file in FOLDER.iterdir()}
    for name in PANELS:
        slot, _, kind = name.partition("-")
        assert slot == "model" or kind in kinds(slot)


@pytest.mark.parametrize(
    ("label", "first"),
    [("causal", lambda t: 0), ("window 6", lambda t: max(0, t - 5)), ("chunks of 6", lambda t: t - t % 6)],
)
def test_tokens_that_attention_reads(label: str, first: Callable[[int], int]) -> None:
    assert read("mixers-attention", label) == [[first(t) <= s <= t for s in range(TOKENS)] for t in range(TOKENS)]


def test_layers_that_share_keys_read_the_input_of_their_source() -> None:
    last = LAYERS - 4
    expected = [[s == t or (t > last and s == last) for s in range(LAYERS)] for t in range(LAYERS)]
    assert read("mixers-attention", "shared_kv, 3 layers") == expected


def test_both_branches_of_a_parallel_layer_read_the_same() -> None:
    found = read("residuals-parallel", "two norms")
    assert found[:-1:2] == found[1:-1:2]
    pre_norm = torch.tensor(read("residuals-pre_norm", "pre-norm"))
    assert torch.equal(pre_norm, torch.ones(pre_norm.shape, dtype=torch.bool).tril())


def test_a_module_that_predicts_ahead_reads_as_far_ahead() -> None:
    for label, depth in (("next token", 0), ("2nd", 1), ("4th", 3)):
        found = read("model-MultiTokenConfig", label)
        assert all(found[t][t + depth] and not any(found[t][t + depth + 1 :]) for t in range(TOKENS - depth))
