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
from heddle.training.loop import Job
from heddle.training.optimizer import make_optimizer
from heddle.training.settings import Settings, learning_rate
from heddle.training.step import apply, gradients
from tests import small

STEPS, ROWS, CONTEXT = 20, 4, 32


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A design of every native field and a text, packed as heddle packs it."""
    root = tmp_path_factory.mktemp("trainer")
    settings = Settings(steps=STEPS, batch_size=ROWS, context=CONTEXT, learning_rate=3e-3, seed=1)
    return Job(config=small.config(), corpus=small.corpus(root / "text"), settings=settings, out=root / "run")


def our_losses(job: Job, model: Decoder) -> list[float]:
    """Heddle's own steps."""
    batches, settings = job.material.batches(job.settings), job.settings
    optimizer = make_optimizer(model.train(), settings.weight_decay, settings.optimizer)
    found = []
    for step in range(STEPS):
        result = gradients(model, batches(step), (settings.seed, step))
        found.append(apply(model, optimizer, result, learning_rate(settings, step), settings.clip).loss)
    return found


def rows(job: Job) -> Iterator[dict[str, list[int]]]:
    """The same batches, row by row, as transformers wants them: positions start anew with each document.

    A row's first token is scored nowhere; the token after its inputs is only a target.
    """
    batches = job.material.batches(job.settings)
    for step in range(STEPS):
        batch = batches(step)
        for tokens, lengths in zip(batch.tokens.tolist(), batch.lengths, strict=True):
            positions = [place for length in lengths for place in range(length)]
            yield {
                "input_ids": tokens,
                "position_ids": [*positions, positions[-1] + 1],
                "labels": [-100, *tokens[1:]],
            }


def trainer_of(model: Any, job: Job, out: Path, **more: Any) -> Trainer:
    """Trainer with heddle's optimizer and schedule."""
    settings = job.settings
    decays = {True: [], False: []}  # type: ignore[var-annotated]
    for name, parameter in model.named_parameters():
        decays[parameter.dim() >= 2 and not name.endswith(".bias")].append(parameter)
    groups = [{"params": ones, "weight_decay": settings.weight_decay * kind} for kind, ones in decays.items()]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(settings, min(step, STEPS - 1)) / settings.learning_rate
    )
    given = {
        "max_steps": STEPS, "per_device_train_batch_size": ROWS, "logging_steps": 1, "use_cpu": True, "report_to": [],
        "save_strategy": "no", "max_grad_norm": settings.clip, "disable_tqdm": True, "output_dir": str(out),
    } | more  # fmt: skip
    data = IterableDataset.from_generator(rows, gen_kwargs={"job": job})
    return Trainer(model, TrainingArguments(**given), train_dataset=data, optimizers=(optimizer, schedule))


def their_losses(trainer: Trainer) -> list[float]:
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("kind", ["ours", "native"])
def test_the_losses_of_twenty_steps_are_those_of_heddles_own_loop(kind: str, job: Job, tmp_path: Path) -> None:
    start = heddle.build(job.config, seed=7)
    if kind == "ours":
        model: Any = HeddleForCausalLM.of(heddle.build(job.config, seed=7))
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

    def __call__(self, given: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(one["input_ids"]) for one in given)
        tokens = torch.zeros(len(given), longest, dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for row, one in enumerate(given):
            tokens[row, : len(one["input_ids"])] = torch.tensor(one["input_ids"])
            mask[row, : len(one["input_ids"])] = 1
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.where(mask.bool(), -100)}


def plain_trainer(out: Path, data: Any = None, model: Any = None, collate: Any = None, **more: Any) -> Trainer:
    """Trainer with its own optimizer, on rows of unlike lengths."""
    given = {
        "max_steps": 6, "per_device_train_batch_size": 8, "logging_steps": 1, "use_cpu": True, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "output_dir": str(out), "learning_rate": 3e-3, "seed": 3,
    } | more  # fmt: skip
    model = model or HeddleForCausalLM.of(heddle.build(small.config(), seed=7))
    return Trainer(
        model, TrainingArguments(**given), data_collator=collate or Padded(), train_dataset=data or texts_of(48)
    )


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


class Gradients(TrainerCallback):
    """Keeps the gradients of the first step."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        self.found = self.found or [parameter.grad.clone() for parameter in model.parameters()]


def test_a_batch_in_pieces_is_the_same_batch(tmp_path: Path) -> None:
    """Labels of the whole batch divide the loss: pieces with few labels do not count more."""
    kept = []
    whole, pieces = (
        plain_trainer(tmp_path / "whole", max_grad_norm=0.0),
        plain_trainer(
            tmp_path / "pieces", max_grad_norm=0.0, per_device_train_batch_size=2, gradient_accumulation_steps=4
        ),
    )
    for trainer in (whole, pieces):
        kept.append(Gradients())
        trainer.add_callback(kept[-1])
    assert their_losses(pieces) == pytest.approx(their_losses(whole), abs=1e-5)
    for mine, other in zip(kept[0].found, kept[1].found, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
    for mine, other in zip(weights(pieces), weights(whole), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=2e-5)


def test_a_resumed_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole, again = (
        plain_trainer(
            tmp_path,
            model=HeddleForCausalLM.of(heddle.build(small.config(DROPPING), seed=7)),
            save_strategy="steps",
            save_steps=3,
        )
        for _ in range(2)
    )
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert again.state.global_step == 6
    for mine, other in zip(weights(again), weights(whole), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("option", ["bf16", "gradient_checkpointing"])
def test_options(option: str, tmp_path: Path) -> None:
    plain = their_losses(plain_trainer(tmp_path / "plain"))
    other = their_losses(plain_trainer(tmp_path / "other", **{option: True}))
    assert other == pytest.approx(plain, abs=2e-4 if option == "gradient_checkpointing" else 0.05)
