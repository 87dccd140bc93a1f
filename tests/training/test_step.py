"""One step: the same gradients however a batch is cut, documents kept apart, bad numbers refused."""

import copy
import dataclasses
import math
import threading

import numpy as np
import pytest
import torch
from torch import Tensor

from heddle.data.samples import Batch
from heddle.model.decoder import Decoder, build
from heddle.model.embedding import Embedding
from heddle.model.load_config import load_config
from heddle.numerics.cross_entropy import loss_sum
from heddle.numerics.kernels import kernels
from heddle.numerics.random import RandomKey, use_random_key
from heddle.training import step
from heddle.training.optimizer import Optimizer, build_optimizer
from heddle.training.settings import OPTIMIZERS
from heddle.training.step import BatchResult, accumulate_gradients, apply_gradients
from tests import small
from tests.conversion.memory import LiveStorages
from tests.training.gradients import CONTEXT, KEY, ROWS, batch, furthest, gradients_of


def double(data: dict[str, object] | None = None) -> Decoder:
    return build(small.config(data or small.dropping()), dtype=torch.float64, seed=3).train()


def of(model: Decoder, rows: Batch, pieces: int = 1) -> dict[str, Tensor]:
    """The gradients of a batch, and its loss."""
    gradients, result = gradients_of(model, rows, pieces)
    assert len(gradients) == len(list(model.parameters()))
    return gradients | {"loss": result.loss}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("pieces", [2, 4])
def test_any_split_of_a_batch_has_the_same_gradients(pieces: int, checkpointing: bool) -> None:
    model = double()
    whole = of(model, batch())
    model.checkpointing = checkpointing
    assert furthest(whole, of(model, batch(), pieces)) <= 1e-12


def test_another_step_draws_other_noise() -> None:
    model = double()
    assert not torch.equal(
        accumulate_gradients(model, batch(), (5, 7)).loss, accumulate_gradients(model, batch(), (5, 8)).loss
    )
    assert not torch.equal(
        accumulate_gradients(model, batch(), (5, 7)).loss, accumulate_gradients(model, batch(), (6, 7)).loss
    )


def test_noise_drawn_by_the_row_of_a_piece_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model = double()
    whole = of(model, batch())
    right = RandomKey
    monkeypatch.setattr(step, "RandomKey", lambda seed, at, samples: right(seed, at, torch.arange(len(samples))))
    assert furthest(whole, of(model, batch(), 4)) > 1e-6


def test_a_mean_over_the_piece_instead_of_the_batch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model = double()
    whole = of(model, batch())
    right = loss_sum
    monkeypatch.setattr(step, "loss_sum", lambda *arguments: right(*arguments) * 2)
    assert furthest(whole, of(model, batch(), 2)) > 1e-6


def apart(model: Decoder, packed: Batch) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients, each document run alone."""
    total, sums = 0.0, {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for tokens, sizes in zip(packed.tokens, packed.doc_lengths, strict=True):
        start = 0
        for size in sizes:
            piece = Batch(tokens[None, start : start + size + 1], ((size,),), np.array([0]))
            gradients = of(model, piece)
            share = size / (len(packed.tokens) * (packed.tokens.shape[1] - 1))
            total += float(gradients.pop("loss")) * share
            for name, gradient in gradients.items():
                sums[name] += gradient * share
            start += size
    return total, sums


@pytest.mark.parametrize("window", [None, 3])
def test_documents_in_one_row_are_trained_as_if_apart(window: int | None) -> None:
    data = small.design()
    data["layers"][0]["mixer"]["window"] = window
    model = double(data)
    loss, sums = apart(model, batch())
    packed = of(model, batch())
    assert float(packed.pop("loss")) == pytest.approx(loss, abs=1e-12)
    assert furthest(packed, sums) <= 1e-12


def test_documents_that_see_each_other_are_caught() -> None:
    model = double(small.design())
    loss, sums = apart(model, batch())
    leaking = batch()
    leaking = Batch(leaking.tokens, ((CONTEXT,),) * ROWS, leaking.sample_indices)
    packed = of(model, leaking)
    assert abs(float(packed.pop("loss")) - loss) > 1e-6
    assert furthest(packed, sums) > 1e-6


def taught(model: Decoder, kind: str = "adamw") -> Optimizer:
    """An optimizer that has taken one good step."""
    optimizer = build_optimizer(model, 0.1, kind)
    apply_gradients(model, optimizer, accumulate_gradients(model, batch(), KEY), 1e-3, 1.0)
    return optimizer


def contents(model: Decoder, optimizer: Optimizer) -> list[Tensor]:
    state = [torch.as_tensor(value) for tensor_state in optimizer.state.values() for value in tensor_state.values()]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *state)]


def asked(packed: Batch) -> Batch:
    """The same rows with targets of their own, few of which are asked, and unevenly many in each row."""
    rng = np.random.default_rng(2)
    answers = rng.integers(0, small.VOCABULARY, packed.targets.shape)
    answers[rng.random(answers.shape) < 0.7] = -1
    answers[1] = -1
    return dataclasses.replace(packed, labels=answers)


def test_only_asked_targets_enter_and_the_loss_is_their_mean() -> None:
    model = double(small.design())
    rows = asked(batch(((CONTEXT,),) * ROWS))
    gradients = of(model, rows)
    hidden, _ = model(torch.from_numpy(rows.tokens[:, :-1]))
    logits, targets = hidden @ model.head.weight.T, rows.targets
    terms = [
        torch.logsumexp(logits[row, position], 0) - logits[row, position, targets[row, position]]
        for row in range(ROWS) for position in range(CONTEXT) if targets[row, position] >= 0
    ]  # fmt: skip
    loss = torch.stack(terms).mean()
    plain = torch.autograd.grad(loss, list(model.parameters()))
    assert float(gradients.pop("loss")) == pytest.approx(float(loss.detach()), abs=1e-12)
    names = [name for name, _ in model.named_parameters()]
    assert furthest(gradients, dict(zip(names, plain, strict=True))) <= 1e-12


@pytest.mark.parametrize("pieces", [2, 4])
def test_any_split_of_asked_targets_has_the_same_gradients(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = double()
    whole = of(model, asked(batch()))
    assert furthest(whole, of(model, asked(batch()), pieces)) <= 1e-12
    right = loss_sum
    monkeypatch.setattr(step, "loss_sum", lambda h, w, t: right(h, w, t) * len(t))  # a weight of its own a piece
    assert furthest(whole, of(model, asked(batch()), pieces)) > 1e-6


def test_what_is_not_asked_changes_no_bit() -> None:
    model = double()
    rows = asked(batch())
    first = of(model, rows)
    other = dataclasses.replace(rows, tokens=rows.tokens.copy())
    other.tokens[:, -1] = 7  # follows the last input
    assert all(torch.equal(first[name], gradient) for name, gradient in of(model, other).items())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bad_value", ["loss", "gradient"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_bad_number_changes_neither_weights_nor_moments(kind: str, bad_value: str, bad: float) -> None:
    model = double()
    optimizer = taught(model, kind)
    before = contents(model, optimizer)
    batch_result = accumulate_gradients(model, batch(), KEY)
    if bad_value == "loss":
        batch_result = dataclasses.replace(batch_result, loss=batch_result.loss * bad)
    else:
        last = list(model.parameters())[-1]
        assert last.grad is not None
        last.grad.view(-1)[-1] = bad
    result = apply_gradients(model, optimizer, batch_result, 1e-3, 1.0)
    assert result.skipped
    assert all(torch.equal(old, new) for old, new in zip(before, contents(model, optimizer), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not apply_gradients(model, optimizer, accumulate_gradients(model, batch(), KEY), 1e-3, 1.0).skipped


def test_a_skip_that_multiplies_by_zero_is_caught() -> None:
    """0 · NaN is NaN, and a step of zeros still ages the moments."""
    model = double()
    optimizer = taught(model)
    before = contents(model, optimizer)
    accumulate_gradients(model, batch(), KEY)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= 0.0
    optimizer.step(1e-3)
    assert not all(torch.equal(old, new) for old, new in zip(before, contents(model, optimizer), strict=True))


def test_the_gradient_is_clipped_to_the_norm_and_the_rate_is_set() -> None:
    model = double(small.design())
    optimizer = build_optimizer(model, 0.0)
    accumulate_gradients(model, batch(), KEY)
    gradients = {name: copy.deepcopy(p.grad) for name, p in model.named_parameters()}
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values() if g is not None))
    clipped_gradients: list[Tensor] = []
    optimizer.optimizers[0].register_step_pre_hook(
        lambda *_: clipped_gradients.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
    )
    result = apply_gradients(model, optimizer, BatchResult(torch.tensor(1.0)), 0.25, max_gradient_norm=norm / 4)
    assert result.gradient_norm == pytest.approx(norm, rel=1e-12)
    clipped = math.sqrt(sum(float(g.square().sum()) for g in clipped_gradients))
    assert clipped == pytest.approx(norm / 4, rel=1e-5)
    assert {group["lr"] for group in optimizer.optimizers[0].param_groups} == {0.25}


@pytest.mark.parametrize("forced", [{}, {"attention": "reference"}])
def test_recomputation_in_another_thread_knows_what_was_in_force(forced: dict[str, str]) -> None:
    """On a GPU the backward pass, and so what it recomputes, runs in a thread of the engine's own."""
    model = double()
    gradients = []
    for checkpointing in (False, True):
        model.checkpointing = checkpointing
        model.zero_grad()
        tokens = torch.from_numpy(batch().tokens)
        with use_random_key(RandomKey(*KEY, torch.from_numpy(batch().sample_indices))), kernels(**forced):
            hidden, _ = model(tokens[:, :-1])
        backward = threading.Thread(target=torch.autograd.backward, args=(hidden.square().sum(),))
        backward.start()
        backward.join()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) == len(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_tied_weight_has_one_gradient_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lookup's gradient is added to the head's in place, with the same bits as autograd's sum."""
    layer = {"mixer": {"kind": "attention", "heads": 2}, "feedforward": {"kind": "gated", "hidden": 32}}
    model = build(load_config({"vocab_size": 4096, "width": 512, "layers": [layer]}), seed=0).train()
    assert model.head.tied
    weight = 4 * 4096 * 512

    def peak(parts: int) -> tuple[int, dict[str, Tensor]]:
        with LiveStorages() as live:
            gradients, _ = gradients_of(model, parts=parts)
        return live.peak, gradients

    saving, joined = peak(1)
    parts = peak(4)[1]
    monkeypatch.setattr(Embedding, "share", lambda self, layout: None)
    usual, apart = peak(1)
    assert usual >= 2 * weight
    assert saving <= usual - 0.7 * weight
    assert furthest(joined, apart) == furthest(parts, peak(4)[1]) == 0
