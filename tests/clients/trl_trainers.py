"""TRL: SFT, DPO, GRPO and a reward model, of our class and of a family's, by path and by object, with LoRA too."""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from tests.clients.folders import COMMON, TEXTS, folder_of, run_client

PAIRS = [{"prompt": "The weaver", "chosen": " lifts a thread", "rejected": " throws"} for _ in range(8)]


def adapters() -> LoraConfig:
    """A new config, since PEFT writes the names that it finds into it."""
    return LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")


def reward(completions: list[Any], **_: Any) -> list[float]:
    """Longer texts are better."""
    return [float(len(text)) for text in completions]


def check_trained(trainer: Any, name: str) -> None:
    """Train two steps. All losses are finite, and weights move: with LoRA only its own."""
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 2, name
    assert all(torch.isfinite(torch.tensor(losses))), name
    moved = [n for n, parameter in trainer.model.named_parameters() if not torch.equal(parameter, before[n])]
    assert moved, f"{name}: no weight moved"
    if "lora" in name:
        assert all("lora_" in n for n in moved), name


def trainers(model: Any, reward_model: Any, tokenizer: Any, out: Path) -> dict[str, Any]:
    """One of each kind. model: a folder or an object."""
    both = {"processing_class": tokenizer}
    common = COMMON | {"output_dir": str(out)}
    texts, pairs = Dataset.from_list([{"text": text} for text in TEXTS]), Dataset.from_list(PAIRS)
    prompts = Dataset.from_list([{"prompt": pair["prompt"]} for pair in PAIRS])
    grpo = common | {"num_generations": 2, "max_completion_length": 6}
    return {
        "sft": lambda: SFTTrainer(model(), SFTConfig(max_length=32, **common), train_dataset=texts, **both),
        "sft packed": lambda: SFTTrainer(
            model(), SFTConfig(max_length=96, packing=True, **common), train_dataset=texts, **both
        ),
        "sft lora": lambda: SFTTrainer(
            model(), SFTConfig(max_length=32, **common), train_dataset=texts, peft_config=adapters(), **both
        ),
        "dpo": lambda: DPOTrainer(model(), args=DPOConfig(**common), train_dataset=pairs, **both),
        "grpo": lambda: GRPOTrainer(model(), reward, args=GRPOConfig(**grpo), train_dataset=prompts, **both),
        "reward": lambda: RewardTrainer(reward_model(), RewardConfig(**common), train_dataset=pairs, **both),
    }


def models_of(folder: Path) -> dict[str, tuple[Any, Any]]:
    """How a trainer gets its model, and one for rewards: by a folder, or as an object."""
    return {
        "path": (lambda: str(folder), lambda: str(folder)),
        "object": (
            lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            lambda: AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1),
        ),
    }


def main(work: Path) -> str:
    """Every trainer on each kind of model."""
    count = 0
    for kind in ("gated_delta", "llama"):
        folder = folder_of(kind, work, pad=True)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        for model, reward_model in models_of(folder).values():
            for name, make in trainers(model, reward_model, tokenizer, work / "out").items():
                check_trained(make(), name)
                count += 1
    return (
        f"{count} trainings: SFT, SFT packed, SFT with LoRA, DPO, GRPO, reward; by path and by object; ours and native"
    )


if __name__ == "__main__":
    run_client(main, "trl")
