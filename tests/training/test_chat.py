"""Training on conversations: each as if it stood alone, padding and other people's words without any influence."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import heddle
from heddle.data.chat import Chat, prepare_chat
from heddle.data.samples import Batch
from heddle.errors import ConfigError
from heddle.model.decoder import Decoder, build
from heddle.model.presets import KINDS
from heddle.storage.run_log import RUN, read_log, read_whole
from heddle.tokenization.tokenizer import Tokenizer
from heddle.training.evaluation.bits_per_byte import window_bits
from heddle.training.loop import Job, train
from heddle.training.settings import Settings
from heddle.training.step import BatchResult, gradients
from tests import small
from tests.data import chats

CONTEXT = 200


@pytest.fixture(scope="module")
def known() -> Tokenizer:
    return chats.tokenizer()


@pytest.fixture(scope="module")
def chat(known: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Chat:
    talks = [chats.talk(seed, 1) for seed in range(60)]
    argument = chats.write(tmp_path_factory.mktemp("chat") / "talks.jsonl", talks)
    return prepare_chat([argument], known, CONTEXT)


def model(**fields: Any) -> Decoder:
    return build(small.config(small.design(**fields)), dtype=torch.float64, seed=1).eval()


def moe() -> Decoder:
    mixer = {"kind": "attention", "heads": 2, "position": {"kind": "rope"}}
    return model(layers=[{"mixer": mixer, "feedforward": small.MOE}])


def of(net: Decoder, batch: Batch, pieces: int = 1) -> tuple[BatchResult, torch.Tensor]:
    net.zero_grad()
    found = gradients(net, batch, (0, 0), pieces)
    return found, torch.cat([one.grad.flatten() for one in net.parameters() if one.grad is not None])


def plainly(net: Decoder, chat: Chat, conversation: int) -> tuple[list[float], list[int]]:
    """Nats and bytes of each target of one conversation read alone."""
    tokens, scored = chat.train.said[conversation]
    ids = torch.tensor(tokens.astype(np.int64))
    with torch.no_grad():
        logits = net.head(net(ids[None, :-1])[0])[0].log_softmax(-1)
    places = np.flatnonzero(scored[1:])
    sizes = [int(chat.tokenizer.byte_lengths[tokens[place + 1]]) for place in places]
    return [-float(logits[place, ids[place + 1]]) for place in places], sizes


@pytest.mark.parametrize("kind", ["", *KINDS])
def test_the_loss_is_the_mean_over_what_the_assistant_says(chat: Chat, kind: str) -> None:
    small_size = ["width=64", f"vocab_size={small.VOCABULARY}", "layers.*.repeat=1"]
    net = build(heddle.load_config(f"preset:{kind}-tiny", small_size), dtype=torch.float64).eval() if kind else model()
    index = np.arange(len(chat.train.rows))[-6:]  # the last are made of the shortest
    batch = chat.train.batch(index, index)
    assert any(len(row) > 1 for row in batch.lengths)
    assert any(sum(row) < CONTEXT for row in batch.lengths)
    nats = [plainly(net, chat, one) for row in chat.train.rows[-6:] for one in row]
    every = [value for values, _ in nats for value in values]
    assert float(of(net, batch)[0].loss) == pytest.approx(sum(every) / len(every), rel=1e-10)
    measured = window_bits(net, [batch], chat.tokenizer.byte_lengths)
    for (bits, size), row in zip(measured, chat.train.rows[-6:], strict=True):
        pairs = [pair for one in row for pair in zip(*plainly(net, chat, one), strict=True)]
        assert size == sum(n for _, n in pairs)
        assert bits == pytest.approx(sum(value for value, n in pairs if n) / math.log(2), rel=1e-10)


@pytest.mark.parametrize("design", [model, moe])
def test_padding_has_no_influence(chat: Chat, design: Any) -> None:
    net = design()
    index = np.arange(4) + len(chat.train.rows) - 4
    batch = chat.train.batch(index, index)
    found, gradient = of(net, batch)
    filled = batch.tokens.copy()
    for row, lengths in enumerate(batch.lengths):
        filled[row, sum(lengths) :] = 7
    other, same = of(net, Batch(filled, batch.lengths, batch.samples, answers=batch.answers))
    assert torch.equal(gradient, same)
    assert torch.equal(found.loss, other.loss)
    wide = np.pad(batch.tokens, ((0, 0), (0, 9)))
    assert batch.answers is not None
    answers = np.pad(batch.answers, ((0, 0), (0, 9)), constant_values=-1)
    wider, like = of(net, Batch(wide, batch.lengths, batch.samples, answers=answers))
    torch.testing.assert_close(like, gradient, rtol=1e-9, atol=1e-12)
    assert float(wider.penalty) == pytest.approx(float(found.penalty), rel=1e-9)
    for name, tally in found.mixtures.items():
        assert torch.equal(tally.loads, wider.mixtures[name].loads)
        assert int(tally.tokens) == sum(map(sum, batch.lengths))
    torch.testing.assert_close(of(net, batch, pieces=4)[1], gradient, rtol=1e-9, atol=1e-12)


def job(chat: Chat, out: Path, **settings: Any) -> Job:
    given = {"steps": 6, "batch_size": 4, "context": CONTEXT, "save_every": 2, "evaluate_every": 3} | settings
    return Job(small.config(small.dropping()), chat, Settings(**given), out)


def test_a_training_is_logged_and_measured(chat: Chat, tmp_path: Path) -> None:
    outcome = train(job(chat, tmp_path, steps=30, learning_rate=1e-2))
    log = read_log(tmp_path)
    assert log[-1]["loss"] < log[0]["loss"] - 1
    assert all(0 < line["scored"] < 0.9 for line in log)
    assert sum("validation_bits_per_byte" in line for line in log) == 10
    assert len(outcome.windows) == len(chat.held.rows)
    assert sum(size for _, size in outcome.windows) == sum(
        int(chat.tokenizer.byte_lengths[one.tokens[one.scored]].sum()) for one in chat.held.said
    )
    assert read_whole(tmp_path / RUN)["data_report"]["validation"]["conversations"] == len(chat.held.said)


def test_an_interrupted_training_ends_with_the_same_bits(
    chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.same_after_a_signal(lambda name: job(chat, tmp_path / name), monkeypatch)


def test_rows_of_another_length_are_refused(chat: Chat, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--context 60: these conversations are packed for 200"):
        train(job(chat, tmp_path, context=60))
