"""Training with multi-token modules: the losses of plain autograd, in any split of a batch, and what the log says."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn import functional

from heddle.data.samples import Batch
from heddle.errors import ConfigError
from heddle.exchange.export import export
from heddle.exchange.load import load
from heddle.exchange.transformers import HeddleForCausalLM
from heddle.model.copies import compiled
from heddle.model.decoder import Decoder, build
from heddle.parts.layout import Layout
from heddle.storage.run_log import read_log
from heddle.training.loop import train
from tests import small
from tests.cases import in_turn
from tests.training.gradients import CONTEXT, ROWS, furthest, gradients_of

pytestmark = [  # of the compiler itself, as in tests/model/test_compile.py
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

WEIGHT, DEPTH = 0.4, 2
MODULES: dict[str, Any] = {"depth": DEPTH, "loss_weight": WEIGHT}
LENGTHS = ((CONTEXT,), (5, 7), (1, 1, 8), (2, 9))  # with padding in two rows


def model_of(**fields: Any) -> Decoder:
    return build(small.config(small.design(multi_token=MODULES, **fields)), dtype=torch.float64, seed=2)


def batch(labels: bool = False) -> Batch:
    draw = np.random.default_rng(1)
    tokens = draw.integers(1, small.VOCABULARY, (ROWS, CONTEXT + 1))
    kept = draw.random((ROWS, CONTEXT)) < (0.6 if labels else 1.0)
    for row, lengths in zip(kept, LENGTHS, strict=True):
        row[sum(lengths) :] = False  # padding has no target
    return Batch(tokens, LENGTHS, np.arange(ROWS), labels=np.where(kept, tokens[:, 1:], -1))


def plain(model: Decoder, rows: Batch) -> tuple[dict[str, Tensor], Tensor, list[Tensor]]:
    """Gradients and losses of whole logits, target by target."""
    tokens, targets = torch.from_numpy(rows.tokens[:, :-1]), rows.targets
    layout = Layout.packed(rows.doc_lengths, CONTEXT)
    hidden, _ = model(tokens, layout)
    states = [hidden, *(each.hidden for each in model.predict_ahead(hidden, tokens, layout))]
    losses = []
    for ahead, state in enumerate(states):
        logits, terms = model.head(state), []
        for row, lengths in enumerate(rows.doc_lengths):
            start = 0
            for length in lengths:
                for t in range(start, start + length - ahead):  # token t + ahead is in the same document
                    if targets[row, t + ahead] >= 0:
                        terms.append(functional.cross_entropy(logits[row, t], torch.tensor(targets[row, t + ahead])))
                start += length
        losses.append(torch.stack(terms).mean())
    main, *others = losses
    total = main + WEIGHT * torch.stack(others).mean()
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(total, list(named.values()))
    return dict(zip(named, gradients, strict=True)), main, others


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_losses_and_gradients_are_those_of_plain_autograd(pieces: int, labels: bool) -> None:
    model, rows = model_of(), batch(labels)
    wanted, main, others = plain(model, rows)
    for checkpointing in (False, True):
        model.checkpointing = checkpointing
        gradients, result = gradients_of(model, rows, pieces)
        assert furthest(gradients, wanted) <= 1e-12
        assert float(result.loss) == pytest.approx(float(main.detach()), abs=1e-12)
        assert [float(each) for each in result.multi_token] == pytest.approx(
            [float(each.detach()) for each in others], abs=1e-12
        )


@pytest.mark.parametrize("design", in_turn([small.dropping(), small.design(layers=small.design()["layers"] * 2)], 0))
def test_compiled_layers_give_the_same_gradients(design: dict[str, Any]) -> None:
    model, rows = build(small.config(design | {"multi_token": MODULES}), dtype=torch.float64).train(), batch()
    wanted, result = gradients_of(model, rows, 2)
    torch._dynamo.reset()
    other = compiled(model, backend=(counter := CompileCounter()))
    gradients, compiled_result = gradients_of(other, rows, 2)
    frames = counter.frame_count
    assert frames > 0
    assert furthest(gradients, wanted) <= 1e-12
    assert float(result.loss) == pytest.approx(float(compiled_result.loss), abs=1e-12)
    gradients_of(other, dataclasses.replace(rows, doc_lengths=((4, 8), (CONTEXT,), (3, 9), (6, 6))), 2)
    assert counter.frame_count == frames  # another layout compiles nothing


def test_weights_and_main_losses_do_not_depend_on_the_modules() -> None:
    data = small.design()
    plain_model = build(small.config(data), dtype=torch.float64, seed=2)
    model = model_of()
    weights = dict(model.named_parameters())
    assert all(torch.equal(value, weights[name]) for name, value in plain_model.named_parameters())
    assert {name.split(".")[0] for name in weights.keys() - dict(plain_model.named_parameters()).keys()} == {
        "multi_token"
    }
    _, with_modules = gradients_of(model, batch())
    _, without = gradients_of(plain_model, batch())
    assert torch.equal(with_modules.loss, without.loss)


def test_documents_shorter_than_a_depth_have_no_loss() -> None:
    rows = Batch(batch().tokens, ((1,) * CONTEXT,) * ROWS, np.arange(ROWS))
    gradients, result = gradients_of(model_of(), rows)
    assert [float(each) for each in result.multi_token] == [0.0, 0.0]
    assert float(sum(value.abs().sum() for name, value in gradients.items() if name.startswith("multi_token"))) == 0.0


def test_a_run_logs_each_depth_and_validates_the_next_token_alone(tmp_path: Path) -> None:
    corpus = small.corpus(tmp_path / "texts")
    data = small.design(layers=[{"mixer": small.design()["layers"][0]["mixer"], "feedforward": small.MOE}])
    result = train(small.job(corpus, tmp_path / "run", data | {"multi_token": MODULES}, steps=6))
    lines = read_log(tmp_path / "run")
    assert len(lines) == 6
    for line in lines:
        assert line["multi_token_loss_1"] > 1.0
        assert line["multi_token_loss_2"] > 1.0
        assert "multi_token.1.layer.feedforward" in line["experts"]
    assert "multi_token_loss_3" not in lines[0]
    assert lines[-1]["multi_token_loss_1"] < lines[0]["multi_token_loss_1"]
    assert result.bits_per_byte > 0


def test_transformers_does_not_train_them_by_halves() -> None:
    model = HeddleForCausalLM.from_decoder(model_of())
    tokens = torch.randint(small.VOCABULARY, (1, 6))
    assert model.eval()(tokens, labels=tokens).loss > 0
    with pytest.raises(ConfigError, match="multi_token: their losses are not part of this loss"):
        model.train()(tokens, labels=tokens)


def test_an_export_keeps_them_and_a_family_without_them_is_refused(tmp_path: Path) -> None:
    model = model_of()
    export(model, tmp_path / "folder")
    again = load(tmp_path / "folder").model
    assert again.config == model.config
    for name, value in model.named_parameters():
        assert torch.equal(again.get_parameter(name), value), name
    with pytest.raises(ConfigError, match=r"cannot express this design .multi_token is"):
        export(model, tmp_path / "other", family="llama")


def test_a_resumed_run_has_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = small.corpus(tmp_path / "texts")
    data = small.design(multi_token=MODULES)
    small.same_after_a_signal(lambda name: small.job(corpus, tmp_path / name, data, steps=6), monkeypatch)
