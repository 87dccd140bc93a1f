"""The designs of examples/extrapolation: equal except for positions, and able to read the lengths they state."""

import pytest
import torch

import heddle
from heddle.errors import ConfigError
from heddle.model.config import ModelConfig
from tests.source import ROOT

NAMES = ("alibi", "learned", "nope", "rope", "rope_window", "sinusoidal")
TRAINING_LENGTH = 64


def design(name: str) -> ModelConfig:
    return heddle.load_config(str(ROOT / "examples" / "extrapolation" / f"{name}.yaml"), ["vocab_size=512"])


@pytest.mark.parametrize("name", NAMES)
def test_a_design_reads_what_it_says(name: str) -> None:
    model = heddle.build(design(name), dtype=torch.float32, device="cpu", seed=0)
    max_length = 2 * TRAINING_LENGTH if name == "learned" else 8 * TRAINING_LENGTH
    with torch.no_grad():
        assert model(torch.zeros(1, max_length, dtype=torch.int64))[0].isfinite().all()
        if name == "learned":
            with pytest.raises(ConfigError, match="128 learned"):
                model(torch.zeros(1, max_length + 1, dtype=torch.int64))


def test_designs_differ_in_positions_alone() -> None:
    without_positions = {name: design(name).dump() for name in NAMES}
    for data in without_positions.values():
        data.pop("embedding")
        for layer in data["layers"]:
            layer["mixer"] = {key: value for key, value in layer["mixer"].items() if key not in ("position", "window")}
    assert all(data == without_positions["rope"] for data in without_positions.values())
    assert without_positions["rope"]["layers"][0]["repeat"] == 3
