"""PEFT's adapters on named projections of our classes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

import heddle
from heddle.exchange.transformers import HeddleForCausalLM
from tests.cases import case

# PEFT reads a name that transformers is giving up.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

TOKENS = torch.arange(1, 41).view(2, 20)
DESIGNS = ["attention-gqa", "latent-full-query", "delta-hybrid", "gated-silu"]
# A name's end, as PEFT matches it: of projections everywhere, or of one layer.
TARGETS: list[Any] = [["q", "v"], ["up", "down"], ["k_up", "v_up", "v"], r".*layers\.1\..*\.(q|k|out)"]


def model_of(name: str) -> HeddleForCausalLM:
    return HeddleForCausalLM.from_decoder(heddle.build(case(name), seed=5).eval())


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    result: torch.Tensor = model(TOKENS).logits
    return result


def step(model: Any) -> None:
    """Adapters away from their start, where B is zero and nothing changes."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.3)


@pytest.mark.parametrize("name", DESIGNS)
@pytest.mark.parametrize("targets", TARGETS, ids=str)
def test_adapters_learn_alone_and_merge(name: str, targets: Any, tmp_path: Path) -> None:
    before = logits(model_of(name))
    adapted = get_peft_model(model_of(name), LoraConfig(target_modules=targets, r=2, lora_alpha=3)).eval()
    assert torch.equal(logits(adapted), before)
    assert all(("lora_" in name) == parameter.requires_grad for name, parameter in adapted.named_parameters())
    adapted(TOKENS, labels=TOKENS).loss.backward()
    felt = [p.grad is not None and bool(p.grad.any()) for n, p in adapted.named_parameters() if "lora_B" in n]
    assert felt
    assert all(felt)
    step(adapted)
    moved = logits(adapted)
    assert float((moved - before).abs().max()) > 1e-4
    adapted.save_pretrained(str(tmp_path / "adapters"))
    again = PeftModel.from_pretrained(model_of(name), tmp_path / "adapters").eval()
    assert torch.equal(logits(again), moved)
    written = again.generate(TOKENS, max_new_tokens=8, do_sample=False)
    merged = again.merge_and_unload()
    assert type(merged) is HeddleForCausalLM
    torch.testing.assert_close(logits(merged), moved, rtol=0, atol=1e-5)
    assert torch.equal(merged.generate(TOKENS, max_new_tokens=8, do_sample=False), written)


def test_a_projection_that_is_not_there_is_told() -> None:
    with pytest.raises(ValueError, match="q_proj"):
        get_peft_model(model_of("attention-gqa"), LoraConfig(target_modules=["q_proj"]))
