"""Training on conversations: each as if it stood alone, padding and other people's words without any influence."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import heddle
from heddle.data.chat import ChatDataset, prepare_chat
from heddle.data.samples import Batch
from heddle.errors import ConfigError
from heddle.model.decoder import Decoder, build
from heddle.model.presets import KINDS
from heddle.storage.file_io import read_json_file
from heddle.storage.run_log import RUN_FILE, read_log
from heddle.tokenization.tokenizer import Tokenizer
from heddle.training.evaluation.scores import bits_and_bytes
from heddle.training.job import TrainingJob
from heddle.training.loop import train
from heddle.training.settings import Settings
from heddle.training.step import BatchResult, accumulate_gradients
from tests import small
from tests.data import chats

CONTEXT = 200


@pytest.fixture(scope="module")
def known() -> Tokenizer:
    return chats.train_tokenizer()


@pytest.fixture(scope="module")
def chat(known: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> ChatDataset:
    talks = [chats.conversation(seed, 1) for seed in range(60)]
    argument = chats.write_chat_file(tmp_path_factory.mktemp("chat") / "talks.jsonl", talks)
    return prepare_chat([argument], known, CONTEXT)


def model(**fields: Any) -> Decoder:
    return build(small.config(small.design(**fields)), dtype=torch.float64, seed=1).eval()


def moe() -> Decoder:
    mixer = {"kind": "attention", "heads": 2, "position": {"kind": "rope"}}
    return model(layers=[{"mixer": mixer, "feedforward": small.MOE}])


def of(net: Decoder, batch: Batch, pieces: int = 1) -> tuple[BatchResult, torch.Tensor]:
    net.zero_grad()
    result = accumulate_gradients(net, batch, (0, 0), pieces)
    return result, torch.cat([parameter.grad.flatten() for parameter in net.parameters() if parameter.grad is not None])


def plainly(net: Decoder, chat: ChatDataset, conversation: int) -> tuple[list[float], list[int]]:
    """Nats and bytes of each target of one conversation read alone."""
    tokens, scored = chat.train.conversations[conversation]
    ids = torch.tensor(tokens.astype(np.int64))
    with torch.no_grad():
        logits = net.head(net(ids[None, :-1])[0])[0].log_softmax(-1)
    positions = np.flatnonzero(scored[1:])
    sizes = [int(chat.tokenizer.byte_lengths[tokens[position + 1]]) for position in positions]
    return [-float(logits[position, ids[position + 1]]) for position in positions], sizes


@pytest.mark.parametrize("kind", ["", *KINDS])
def test_the_loss_is_the_mean_over_what_the_assistant_says(chat: ChatDataset, kind: str) -> None:
    small_size = ["width=64", f"vocab_size={small.VOCABULARY}", "layers.*.repeat=1"]
    net = build(heddle.load_config(f"preset:{kind}-tiny", small_size), dtype=torch.float64).eval() if kind else model()
    index = np.arange(len(chat.train.rows))[-6:]  # the last are made of the shortest
    batch = chat.train.batch(index, index)
    assert any(len(row) > 1 for row in batch.doc_lengths)
    assert any(sum(row) < CONTEXT for row in batch.doc_lengths)
    nats = [plainly(net, chat, conversation) for row in chat.train.rows[-6:] for conversation in row]
    all_nats = [value for values, _ in nats for value in values]
    assert float(of(net, batch)[0].loss) == pytest.approx(sum(all_nats) / len(all_nats), rel=1e-10)
    measured = bits_and_bytes(net, [batch], chat.tokenizer.byte_lengths)
    for (bits, size), row in zip(measured, chat.train.rows[-6:], strict=True):
        pairs = [pair for conversation in row for pair in zip(*plainly(net, chat, conversation), strict=True)]
        assert size == sum(n for _, n in pairs)
        assert bits == pytest.approx(sum(value for value, n in pairs if n) / math.log(2), rel=1e-10)


@pytest.mark.parametrize("design", [model, moe])
def test_padding_has_no_influence(chat: ChatDataset, design: Any) -> None:
    net = design()
    index = np.arange(4) + len(chat.train.rows) - 4
    batch = chat.train.batch(index, index)
    result, gradient = of(net, batch)
    refilled = batch.tokens.copy()
    for row, lengths in enumerate(batch.doc_lengths):
        refilled[row, sum(lengths) :] = 7
    other, same = of(net, Batch(refilled, batch.doc_lengths, batch.sample_indices, labels=batch.labels))
    assert torch.equal(gradient, same)
    assert torch.equal(result.loss, other.loss)
    wide = np.pad(batch.tokens, ((0, 0), (0, 9)))
    assert batch.labels is not None
    answers = np.pad(batch.labels, ((0, 0), (0, 9)), constant_values=-1)
    wider, like = of(net, Batch(wide, batch.doc_lengths, batch.sample_indices, labels=answers))
    torch.testing.assert_close(like, gradient, rtol=1e-9, atol=1e-12)
    assert float(wider.aux_loss) == pytest.approx(float(result.aux_loss), rel=1e-9)
    for name, metrics in result.router_metrics.items():
        assert torch.equal(metrics.expert_counts, wider.router_metrics[name].expert_counts)
        assert int(metrics.tokens) == sum(map(sum, batch.doc_lengths))
    torch.testing.assert_close(of(net, batch, pieces=4)[1], gradient, rtol=1e-9, atol=1e-12)


def job(chat: ChatDataset, out: Path, **settings: Any) -> TrainingJob:
    arguments = {
        "steps": 6,
        "batch_size": 4,
        "sequence_length": CONTEXT,
        "save_every": 2,
        "evaluate_every": 3,
    } | settings
    return TrainingJob(small.config(small.dropping()), chat, Settings(**arguments), out)


def test_a_training_is_logged_and_measured(chat: ChatDataset, tmp_path: Path) -> None:
    result = train(job(chat, tmp_path, steps=30, learning_rate=1e-2))
    log = read_log(tmp_path)
    assert log[-1]["loss"] < log[0]["loss"] - 1
    assert all(0 < line["scored_fraction"] < 0.9 for line in log)
    assert sum("validation_bits_per_byte" in line for line in log) == 10
    assert len(result.scores) == len(chat.validation.rows)
    assert sum(size for _, size in result.scores) == sum(
        int(chat.tokenizer.byte_lengths[conversation.tokens[conversation.assistant_mask]].sum())
        for conversation in chat.validation.conversations
    )
    assert read_json_file(tmp_path / RUN_FILE)["data_report"]["validation"]["conversations"] == len(
        chat.validation.conversations
    )


def test_an_interrupted_training_ends_with_the_same_bits(
    chat: ChatDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.same_after_a_signal(lambda name: job(chat, tmp_path / name), monkeypatch)


def test_rows_of_another_length_are_refused(chat: ChatDataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sequence_length 60:.*200"):
        train(job(chat, tmp_path, sequence_length=60))
