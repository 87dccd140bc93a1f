"""Resolved designs, with all defaults written out: the same model, and resolving twice changes nothing."""

import pytest
import torch

import heddle
from tests.cases import case
from tests.covering import each_option


@pytest.mark.parametrize("name", each_option())
def test_a_resolved_design_builds_the_same_model(name: str) -> None:
    config = case(name)
    resolved_config = config.resolved()
    assert resolved_config.resolved() == resolved_config
    original, rebuilt = heddle.build(config, device="meta"), heddle.build(resolved_config, device="meta")
    assert {n: p.shape for n, p in original.named_parameters()} == {n: p.shape for n, p in rebuilt.named_parameters()}


def test_a_resolved_design_gives_the_same_logits() -> None:
    config = heddle.load_config("preset:gqa-tiny", ["vocab_size=50"])
    tokens = torch.arange(12)[None]
    original, rebuilt = heddle.build(config).eval(), heddle.build(config.resolved()).eval()
    with torch.no_grad():
        assert torch.equal(original.head(original(tokens)[0]), rebuilt.head(rebuilt(tokens)[0]))
