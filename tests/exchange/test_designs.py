"""Designs at random, from everything that can be built: exported, read by transformers, and computed there alike."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import heddle
import heddle.exchange.transformers  # registers our classes
from heddle.exchange.export import export
from heddle.exchange.load import load
from heddle.model.config import ModelConfig
from tests.covering import attempt, fits, sites
from tests.exchange.hf_models import AutoModelForCausalLM, our_logits, their_logits
from tests.pairs import Draft, catalogue

DESIGNS, MORE_DESIGNS, MANY_DESIGNS = 6, 50, 400  # in the suite, the night and the soak
PROFILE: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


@st.composite
def designs(draw: st.DrawFn) -> ModelConfig:
    """Any parts in any order, as the pairs of the laws are drawn, but what is refused and what reads a memory."""
    draft = Draft({})
    for site in sites():
        fitting = [label for label in catalogue()[site[1]] if fits(draft.labels | {site: label})]
        draft.labels[site] = draw(st.sampled_from(fitting))
        draft.picks[site] = draw(st.integers(0, 1000))
    attempted = attempt(draft)
    assume(isinstance(attempted, ModelConfig))
    assert isinstance(attempted, ModelConfig)
    assume(heddle.build(attempted, device="meta").encoder_width is None)
    return attempted


def check_in_transformers(design: ModelConfig) -> None:
    """The design is exported, read by transformers and by heddle, and computes the same logits in both."""
    model = heddle.build(design, seed=3).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.05)
    tokens = torch.randint(1, 61, (3, 23), generator=torch.Generator().manual_seed(9))
    layout = heddle.Layout.padded([23, 9, 1], side="left")
    real = layout.positions >= 0
    with TemporaryDirectory() as folder:
        export(model, Path(folder) / "out")
        theirs = AutoModelForCausalLM.from_pretrained(Path(folder) / "out").eval()
        again = load(Path(folder) / "out").model
    assert again.config == design
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name
    want = our_logits(model, tokens, layout)[real]
    torch.testing.assert_close(their_logits(theirs, tokens, real.long())[real], want, rtol=0, atol=1e-5)
    torch.testing.assert_close(their_logits(theirs, tokens[:1]), our_logits(model, tokens[:1]), rtol=0, atol=1e-5)


@settings(max_examples=DESIGNS, **PROFILE)
@given(designs())
def test_any_design_computes_alike_in_transformers(design: ModelConfig) -> None:
    check_in_transformers(design)


@pytest.mark.nightly
@settings(max_examples=MORE_DESIGNS, **PROFILE)
@given(designs())
def test_more_designs_compute_alike_in_transformers(design: ModelConfig) -> None:
    check_in_transformers(design)


@pytest.mark.soak
@settings(max_examples=MANY_DESIGNS, **PROFILE)
@given(designs())
def test_many_designs_compute_alike_in_transformers(design: ModelConfig) -> None:
    check_in_transformers(design)
