"""Mixtures of experts under Trainer: balanced after each step as heddle's own loop balances them."""

import warnings
from pathlib import Path

import numpy as np
import torch

import heddle
from heddle.data.samples import Batch
from heddle.exchange.transformers import HeddleForCausalLM
from heddle.exchange.transformers.experts import BalanceExperts
from heddle.training.step import gradients
from tests.exchange.transformers.designs import config

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import Trainer, TrainingArguments


def test_experts_are_balanced_after_each_step(tmp_path: Path) -> None:
    """Without a rate only the balance moves, so three steps of pieces are three of heddle's."""
    rows = torch.randint(1, 61, (12, 9), generator=torch.Generator().manual_seed(2))
    own = heddle.build(config("moe"), seed=3).train()
    for step in range(3):
        tokens = rows[4 * step : 4 * step + 4].numpy()
        # Trainer's model reads the last token too, whose target nobody has.
        tokens = np.concatenate((tokens, tokens[:, :1]), axis=1)
        told = gradients(own, Batch(tokens=tokens, lengths=((9,),) * 4, samples=np.arange(4)), (0, step))
        for path, tally in told.mixtures.items():
            own.get_submodule(path).balance(tally.loads)  # type: ignore[operator]
        own.zero_grad()
    one = HeddleForCausalLM.of(heddle.build(config("moe"), seed=3))
    how = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=0.0, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True,
        train_sampling_strategy="sequential", dataloader_pin_memory=False,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]
    Trainer(model=one, args=how, train_dataset=data, callbacks=[BalanceExperts()]).train()
    for mine, theirs in zip(own.layers, one.of_heddle.layers, strict=True):
        found = theirs.feedforward.router.balance  # type: ignore[union-attr]
        assert torch.equal(mine.feedforward.router.balance, found)  # type: ignore[union-attr, arg-type]
        assert not torch.equal(found, torch.zeros(4))  # type: ignore[arg-type]
    assert not one.loads
