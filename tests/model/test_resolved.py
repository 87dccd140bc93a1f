"""Defaults written out: the model stays the same, and so does a design that was written out already."""

import pytest
import torch

import heddle
from tests.cases import CASES, case


@pytest.mark.parametrize("name", CASES)
def test_a_design_written_out_builds_the_same_model(name: str) -> None:
    config = case(name)
    written = config.resolved()
    assert written.resolved() == written
    original, rebuilt = heddle.build(config, device="meta"), heddle.build(written, device="meta")
    assert {n: p.shape for n, p in original.named_parameters()} == {n: p.shape for n, p in rebuilt.named_parameters()}


def test_logits_too() -> None:
    config = heddle.load_config("preset:gqa-tiny", ["vocab_size=50"])
    tokens = torch.arange(12)[None]
    original, rebuilt = heddle.build(config).eval(), heddle.build(config.resolved()).eval()
    with torch.no_grad():
        assert torch.equal(original.head(original(tokens)[0]), rebuilt.head(rebuilt(tokens)[0]))
