"""The collators and data sets of transformers on our classes: what each makes of rows, and padding asks nothing."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    DataCollatorWithFlattening,
    DefaultDataCollator,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

import heddle
from heddle.exchange.transformers import HeddleForCausalLM, export
from tests import small
from tests.exchange.transformers.designs import DESIGNS, alone, model, prompts

LENGTHS = [9, 1, 14, 5]
TEXTS = [sentence * (1 + index % 2) for index, sentence in enumerate(small.SENTENCES)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer of ours as AutoTokenizer reads it, with a token for padding beside the one that ends texts."""
    root = tmp_path_factory.mktemp("collators")
    texts = small.corpus(root / "text")
    export(heddle.build(small.config(small.design(vocab_size=400))), root / "model", texts.tokenizer)
    hf_tokenizer = AutoTokenizer.from_pretrained(root / "model")
    assert isinstance(hf_tokenizer, PreTrainedTokenizerBase)
    hf_tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    for text in TEXTS:
        input_ids = hf_tokenizer(text).input_ids
        assert input_ids == [texts.tokenizer.eod_id, *texts.tokenizer.encode(text)]
        assert hf_tokenizer.decode(input_ids, skip_special_tokens=True) == text
    return hf_tokenizer


def mean_loss(name: str, rows: list[list[int]]) -> Tensor:
    """The mean over what rows are asked when each stands alone, by the model of heddle."""
    lost = [
        nn.functional.cross_entropy(alone(name, row)[:-1], torch.tensor(row[1:]), reduction="none")
        for row in rows if len(row) > 1
    ]  # fmt: skip
    return torch.cat(lost).mean()


@torch.no_grad()
@pytest.mark.parametrize("source", ["positions", "kernels"])
@pytest.mark.parametrize("name", DESIGNS)
def test_flattened_rows_are_the_rows_alone(name: str, source: str) -> None:
    rows = prompts(LENGTHS)
    extra_kwargs = {"return_flash_attn_kwargs": True, "return_seq_idx": True} if source == "kernels" else {}
    batch = DataCollatorWithFlattening(return_tensors="pt", **extra_kwargs)([{"input_ids": row} for row in rows])
    assert batch["input_ids"].shape == (1, sum(LENGTHS))
    outputs = model(name)(**batch)
    torch.testing.assert_close(outputs.logits[0], torch.cat([alone(name, row) for row in rows]), rtol=0, atol=1e-10)
    torch.testing.assert_close(outputs.loss.double(), mean_loss(name, rows), rtol=0, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["gqa", "hybrid", "mla"])
def test_padded_labels_ask_nothing(name: str, side: str, tokenizer: Any) -> None:
    """Labels padded with −100. Left padding would be asked for a row's first token, so that has none either."""
    tokenizer.padding_side = side
    rows = prompts(LENGTHS)
    collate = DataCollatorForTokenClassification(tokenizer)
    batch = collate([{"input_ids": row, "labels": [-100, *row[1:]]} for row in rows])
    batch["input_ids"] %= 61
    assert int((batch["labels"] != -100).sum()) == sum(LENGTHS) - len(rows)
    outputs = model(name)(**batch)
    torch.testing.assert_close(outputs.loss.double(), mean_loss(name, rows), rtol=0, atol=1e-6)


@cache
def rows_of(length: int, count: int) -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(4)
    rows = [torch.randint(1, small.VOCABULARY, (length,), generator=draw).tolist() for _ in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def losses(data: Any, collate: Any, out: Path, vocab_size: int = small.VOCABULARY) -> list[float]:
    """Of three steps of Trainer."""
    arguments = TrainingArguments(
        max_steps=3, per_device_train_batch_size=4, logging_steps=1, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True, output_dir=str(out), learning_rate=3e-3, train_sampling_strategy="sequential",
    )  # fmt: skip
    hf_model = HeddleForCausalLM.from_decoder(heddle.build(small.config(small.design(vocab_size=vocab_size)), seed=7))
    trainer = Trainer(hf_model, arguments, data_collator=collate, train_dataset=data)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_data_sets_by_number_and_in_order_are_the_same(tmp_path: Path) -> None:
    rows = rows_of(12, 12)
    expected = losses(rows, DefaultDataCollator(), tmp_path)
    assert len(expected) == 3
    assert losses(Dataset.from_list(rows), DefaultDataCollator(), tmp_path) == expected
    assert losses(IterableDataset.from_generator(lambda: iter(rows)), DefaultDataCollator(), tmp_path) == expected


def test_texts_become_labels(tokenizer: Any, tmp_path: Path) -> None:
    """Padding is masked by its token; where that is the end token too, ends are never learned."""
    tokenizer.padding_side = "right"
    read = [{"input_ids": [*tokenizer(text).input_ids, tokenizer.eos_token_id]} for text in TEXTS[:4]]
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    batch = collate(read)
    is_token = batch["attention_mask"].bool()
    assert torch.equal(batch["labels"], batch["input_ids"].where(is_token, -100))
    assert not is_token.all()
    padded = losses(Dataset.from_list(read), collate, tmp_path, 400)
    flat = losses(Dataset.from_list(read), DataCollatorWithFlattening(return_tensors="pt"), tmp_path, 400)
    assert padded == pytest.approx(flat, abs=1e-5)
    assert padded[-1] < padded[0]
