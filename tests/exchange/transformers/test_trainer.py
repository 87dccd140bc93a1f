"""transformers' Trainer on our classes: the losses of heddle's own loop, and what Trainer promises besides."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import IterableDataset
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import heddle
from heddle.exchange.transformers import HeddleForCausalLM, export
from heddle.model.decoder import Decoder
from heddle.training.job import TrainingJob
from heddle.training.optimizer import build_optimizer
from heddle.training.settings import Settings, scheduled_learning_rate
from heddle.training.step import accumulate_gradients, apply_gradients
from tests import small

STEPS, ROWS, CONTEXT = 20, 4, 32


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> TrainingJob:
    """A design of every native field and a text, packed as heddle packs it."""
    root = tmp_path_factory.mktemp("trainer")
    settings = Settings(steps=STEPS, batch_size=ROWS, sequence_length=CONTEXT, learning_rate=3e-3, seed=1)
    return TrainingJob(config=small.config(), source=small.corpus(root / "text"), settings=settings, out=root / "run")


def our_losses(job: TrainingJob, model: Decoder) -> list[float]:
    """Heddle's own steps."""
    batches, settings = job.training_data.train_batches(job.settings), job.settings
    optimizer = build_optimizer(model.train(), settings.weight_decay, settings.optimizer)
    losses = []
    for step in range(STEPS):
        result = accumulate_gradients(model, batches(step), (settings.seed, step))
        losses.append(
            apply_gradients(
                model, optimizer, result, scheduled_learning_rate(settings, step), settings.max_gradient_norm
            ).loss
        )
    return losses


def rows(job: TrainingJob) -> Iterator[dict[str, list[int]]]:
    """The same batches, row by row, as transformers wants them: positions start anew with each document.

    A row's first token is scored nowhere; the token after its inputs is only a target.
    """
    batches = job.training_data.train_batches(job.settings)
    for step in range(STEPS):
        batch = batches(step)
        for tokens, lengths in zip(batch.tokens.tolist(), batch.doc_lengths, strict=True):
            positions = [position for length in lengths for position in range(length)]
            yield {
                "input_ids": tokens,
                "position_ids": [*positions, positions[-1] + 1],
                "labels": [-100, *tokens[1:]],
            }


def trainer_of(model: Any, job: TrainingJob, out: Path, **overrides: Any) -> Trainer:
    """Trainer with heddle's optimizer and schedule."""
    settings = job.settings
    decays = {True: [], False: []}  # type: ignore[var-annotated]
    for name, parameter in model.named_parameters():
        decays[parameter.dim() >= 2 and not name.endswith(".bias")].append(parameter)
    groups = [
        {"params": parameters, "weight_decay": settings.weight_decay * kind} for kind, parameters in decays.items()
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: scheduled_learning_rate(settings, min(step, STEPS - 1)) / settings.learning_rate
    )
    arguments = {
        "max_steps": STEPS, "per_device_train_batch_size": ROWS, "logging_steps": 1, "use_cpu": True, "report_to": [],
        "save_strategy": "no", "max_grad_norm": settings.max_gradient_norm, "disable_tqdm": True,
        "output_dir": str(out),
    } | overrides  # fmt: skip
    data = IterableDataset.from_generator(rows, gen_kwargs={"job": job})
    return Trainer(model, TrainingArguments(**arguments), train_dataset=data, optimizers=(optimizer, schedule))


def their_losses(trainer: Trainer) -> list[float]:
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("kind", ["ours", "native"])
def test_the_losses_of_twenty_steps_are_those_of_heddles_own_loop(kind: str, job: TrainingJob, tmp_path: Path) -> None:
    start = heddle.build(job.config, seed=7)
    if kind == "ours":
        model: Any = HeddleForCausalLM.from_decoder(heddle.build(job.config, seed=7))
    else:
        export(start, tmp_path / "native")
        model = LlamaForCausalLM.from_pretrained(tmp_path / "native")
    theirs = their_losses(trainer_of(model, job, tmp_path / "out"))
    ours = our_losses(job, start)
    assert len(theirs) == STEPS
    assert theirs == pytest.approx(ours, abs=1e-4)
    assert ours[-1] < ours[0] - 0.3


DROPPING = small.dropping() | {"embedding": {"dropout": 0.0}}


def texts_of(count: int) -> list[dict[str, list[int]]]:
    """Rows of unlike lengths, so that a batch's pieces have unlike numbers of labels."""
    draw = torch.Generator().manual_seed(4)
    sizes = [9, 30, 4, 17, 25, 6, 12, 21]
    drawn = [torch.randint(1, small.VOCABULARY, (sizes[i % 8],), generator=draw).tolist() for i in range(count)]
    return [{"input_ids": tokens} for tokens in drawn]


class Padded:
    """Rows of a batch padded on the right; nothing is asked at padding."""

    def __call__(self, examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(example["input_ids"]) for example in examples)
        tokens = torch.zeros(len(examples), longest, dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for row, example in enumerate(examples):
            tokens[row, : len(example["input_ids"])] = torch.tensor(example["input_ids"])
            mask[row, : len(example["input_ids"])] = 1
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.where(mask.bool(), -100)}


def plain_trainer(out: Path, data: Any = None, model: Any = None, collate: Any = None, **overrides: Any) -> Trainer:
    """Trainer with its own optimizer, on rows of unlike lengths."""
    arguments = {
        "max_steps": 6, "per_device_train_batch_size": 8, "logging_steps": 1, "use_cpu": True, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "output_dir": str(out), "learning_rate": 3e-3, "seed": 3,
    } | overrides  # fmt: skip
    model = model or HeddleForCausalLM.from_decoder(heddle.build(small.config(), seed=7))
    return Trainer(
        model, TrainingArguments(**arguments), data_collator=collate or Padded(), train_dataset=data or texts_of(48)
    )


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


class Gradients(TrainerCallback):
    """Keeps the gradients of the first step."""

    def __init__(self) -> None:
        self.gradients: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **overrides: Any) -> None:
        self.gradients = self.gradients or [parameter.grad.clone() for parameter in model.parameters()]


def test_a_batch_in_pieces_is_the_same_batch(tmp_path: Path) -> None:
    """Labels of the whole batch divide the loss: pieces with few labels do not count more."""
    recorders = []
    full, pieces = (
        plain_trainer(tmp_path / "whole", max_grad_norm=0.0),
        plain_trainer(
            tmp_path / "pieces", max_grad_norm=0.0, per_device_train_batch_size=2, gradient_accumulation_steps=4
        ),
    )
    for trainer in (full, pieces):
        recorders.append(Gradients())
        trainer.add_callback(recorders[-1])
    assert their_losses(pieces) == pytest.approx(their_losses(full), abs=1e-5)
    for actual, other in zip(recorders[0].gradients, recorders[1].gradients, strict=True):
        torch.testing.assert_close(actual, other, rtol=0, atol=1e-6)
    for actual, other in zip(weights(pieces), weights(full), strict=True):
        torch.testing.assert_close(actual, other, rtol=0, atol=2e-5)


def test_a_resumed_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    full, again = (
        plain_trainer(
            tmp_path,
            model=HeddleForCausalLM.from_decoder(heddle.build(small.config(DROPPING), seed=7)),
            save_strategy="steps",
            save_steps=3,
        )
        for _ in range(2)
    )
    full.train()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert again.state.global_step == 6
    for actual, other in zip(weights(again), weights(full), strict=True):
        assert torch.equal(actual, other)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("option", ["bf16", "gradient_checkpointing"])
def test_options(option: str, tmp_path: Path) -> None:
    plain = their_losses(plain_trainer(tmp_path / "plain"))
    other = their_losses(plain_trainer(tmp_path / "other", **{option: True}))
    assert other == pytest.approx(plain, abs=2e-4 if option == "gradient_checkpointing" else 0.05)
