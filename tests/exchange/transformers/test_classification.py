"""Labels for texts and tokens: the decoder's last hidden states under a head, padding, folders, and new heads."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import heddle
from heddle.exchange.transformers import (
    HeddleForCausalLM,
    HeddleForSequenceClassification,
    HeddleForTokenClassification,
)
from heddle.exchange.transformers.modeling import _Classifier
from tests.exchange.transformers.designs import config, prompts
from tests.laws.planting import calls

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

PAD = 0
NAMES = ["gqa", "hybrid", "moe"]
CLASSES: list[Any] = [HeddleForSequenceClassification, HeddleForTokenClassification]


def classifier(kind: Any, name: str) -> Any:
    model = kind.from_decoder(heddle.build(config(name), dtype=torch.float64, seed=3).eval(), 3, pad_token_id=PAD)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(2))
    return model


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_labels_are_the_head_over_hidden_states(name: str) -> None:
    texts = [[5, 9, 7, 11, 3], [4, 8]]
    model, tokens = classifier(HeddleForSequenceClassification, name), torch.full((2, 5), PAD)
    mask = torch.zeros_like(tokens)
    for row, text in enumerate(texts):
        tokens[row, : len(text)], mask[row, : len(text)] = torch.tensor(text), 1
    logits = model(tokens, attention_mask=mask).logits
    for row, text in enumerate(texts):
        hidden = model.heddle_decoder(torch.tensor([text]))[0][0]
        torch.testing.assert_close(logits[row], model.score(hidden[-1]), rtol=0, atol=1e-10)
    by_token = classifier(HeddleForTokenClassification, name)
    hidden = by_token.heddle_decoder(torch.tensor(texts[:1]))[0]
    torch.testing.assert_close(by_token(torch.tensor(texts[:1])).logits, by_token.score(hidden), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", CLASSES)
def test_folders_there_and_back(kind: Any, tmp_path: Path) -> None:
    model, tokens = classifier(kind, "gqa"), torch.tensor(prompts([5]))
    model.save_pretrained(tmp_path)
    auto = AutoModelForSequenceClassification if kind is CLASSES[0] else AutoModelForTokenClassification
    for loaded in (kind.from_pretrained(tmp_path), auto.from_pretrained(tmp_path)):
        assert type(loaded) is kind
        assert all(map(torch.equal, loaded.state_dict().values(), model.state_dict().values()))
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", CLASSES)
def test_a_folder_that_writes_text_gets_a_new_head(kind: Any, tmp_path: Path) -> None:
    """Its decoder's weights are loaded; the head is drawn with torch's seed."""
    writer = HeddleForCausalLM.from_decoder(heddle.build(config("gqa"), seed=3).eval())
    writer.save_pretrained(tmp_path)
    torch.manual_seed(4)
    first = kind.from_pretrained(tmp_path, num_labels=40)
    torch.manual_seed(4)
    second = kind.from_pretrained(tmp_path, num_labels=40)
    assert torch.equal(first.score.weight, second.score.weight)
    assert 0.015 < float(first.score.weight.detach().std()) < 0.025
    for name, parameter in writer.heddle_decoder.named_parameters():
        assert torch.equal(first.heddle_decoder.get_parameter(name), parameter), name


@pytest.mark.parametrize("kind", CLASSES)
def test_it_learns_labels(kind: Any) -> None:
    tokens = torch.tensor([[5, 9, 7], [4, 8, 6]])
    labels = torch.tensor([0, 2]) if kind is CLASSES[0] else torch.tensor([[0, 1, 2], [2, 0, -100]])
    model = kind.from_decoder(heddle.build(config("gqa"), seed=3).train(), 3, pad_token_id=PAD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for _ in range(30):
        loss = model(tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[0] > 0.8
    assert losses[-1] < 0.05


def test_a_head_that_is_not_drawn_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    HeddleForCausalLM.from_decoder(heddle.build(config("gqa"), seed=3)).save_pretrained(tmp_path)
    calls(_Classifier._init_weights, "normal_", lambda init, weight, std: init.normal_(weight, std=3.0))(monkeypatch)
    drawn = HeddleForSequenceClassification.from_pretrained(tmp_path, num_labels=40)
    assert not 0.015 < float(drawn.score.weight.detach().std()) < 0.025
