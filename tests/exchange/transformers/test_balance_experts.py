"""Mixtures of experts under Trainer: balanced after each step as heddle's own loop balances them."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import heddle
from heddle.data.samples import Batch
from heddle.exchange.transformers import HeddleForCausalLM
from heddle.exchange.transformers.modeling import BalanceExperts
from heddle.training.step import accumulate_gradients
from tests.exchange.transformers.designs import config

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import Trainer, TrainingArguments


@pytest.mark.parametrize("name", ["moe", "looped"])
def test_experts_are_balanced_after_each_step(name: str, tmp_path: Path) -> None:
    """Without a rate only the balance moves, so three steps of pieces are three of heddle's."""
    rows = torch.randint(1, 61, (12, 9), generator=torch.Generator().manual_seed(2))
    model = heddle.build(config(name), seed=3).train()
    for step in range(3):
        tokens = rows[4 * step : 4 * step + 4].numpy()
        # Trainer's model reads the last token too, whose target nobody has.
        tokens = np.concatenate((tokens, tokens[:, :1]), axis=1)
        result = accumulate_gradients(
            model, Batch(tokens=tokens, doc_lengths=((9,),) * 4, sample_indices=np.arange(4)), (0, step)
        )
        for path, metrics in result.router_metrics.items():
            model.get_submodule(path).update_expert_bias(metrics.expert_counts)  # type: ignore[operator]
        model.zero_grad()
    hf_model = HeddleForCausalLM.from_decoder(heddle.build(config(name), seed=3))
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=0.0, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True,
        train_sampling_strategy="sequential", dataloader_pin_memory=False,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]
    Trainer(model=hf_model, args=arguments, train_dataset=data, callbacks=[BalanceExperts()]).train()
    for layer, hf_layer in list(zip(model.layers, hf_model.heddle_decoder.layers, strict=True))[:2]:
        expert_bias = hf_layer.feedforward.router.expert_bias  # type: ignore[union-attr]
        assert torch.equal(layer.feedforward.router.expert_bias, expert_bias)  # type: ignore[union-attr, arg-type]
        assert not torch.equal(expert_bias, torch.zeros(4))  # type: ignore[arg-type]
    assert not hf_model.expert_counts
