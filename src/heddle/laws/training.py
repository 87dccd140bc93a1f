"""Training: dropout off in eval and keyed by sample, gradients true, whatever way they are computed."""

from itertools import pairwise
from typing import Any

import torch

from heddle.config import decode
from heddle.laws.subject import (
    Broken,
    Gradients,
    add,
    answer,
    call,
    equal_gradients,
    gradients,
    identical,
    loss,
    normal,
    subject,
    text,
)
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.numerics.random import Key, keyed
from heddle.parts.modules.router_statistics import ledger

RATES = {"dropout", "drop_path"}
SOMETIMES = {"capacity"}  # whether anything is beyond it depends on the tokens


def dropout_off_in_eval(config: ModelConfig) -> None:
    """In eval nothing is dropped: the answer has the same bits as that of the design without dropout."""
    plain = decode(ModelConfig, _without(config.dump(), RATES | SOMETIMES))
    tokens = text(config, 2, 8)
    model, without = subject(config), subject(plain)
    identical(answer(model, tokens), answer(without, tokens), "in eval, against the design without dropout")
    model.train()
    with keyed(Key(1, 1, torch.arange(2))):
        changed = not torch.equal(answer(model, tokens), answer(without, tokens))
    declared = decode(ModelConfig, _without(config.dump(), RATES)) != config
    if changed != declared and (declared or config == plain):
        raise Broken(f"in training, something was {'' if changed else 'not '}dropped, against the declared rates")


def _without(data: Any, names: set[str]) -> Any:
    if isinstance(data, dict):
        return {name: _without(value, names) for name, value in data.items() if name not in names}
    return [_without(item, names) for item in data] if isinstance(data, list) else data


def _trained(model: Decoder, tokens: torch.Tensor, samples: torch.Tensor) -> tuple[Gradients, list[torch.Tensor]]:
    """Gradients of a training call, the losses that balance experts included, and the loads of each mixture."""
    with keyed(Key(7, 2, samples)):
        with ledger() as kept:
            value = loss(call(model, tokens))
        for entry in kept.entries:
            value = value if entry.penalty is None else value + entry.penalty
        return gradients(model, value), [entry.loads for entry in kept.entries]


def split_batch(config: ModelConfig) -> None:
    """Training gradients, dropout and losses of experts included, are the same however a batch is split into rows."""
    model = subject(config).train()
    tokens, samples = text(config, 4, 7), torch.tensor([3, 11, 4, 8])
    whole, _ = _trained(model, tokens, samples)
    for cuts in ((0, 1, 2, 3, 4), (0, 3, 4)):
        total = None
        for start, stop in pairwise(cuts):
            part, _ = _trained(model, tokens[start:stop], samples[start:stop])
            total = part if total is None else add(total, part)
        assert total is not None
        equal_gradients(total, whole, f"a batch split at rows {list(cuts)}", tolerance=1e-12)


def checkpointing(config: ModelConfig) -> None:
    """Recomputing layers in the backward pass gives the same bits of every gradient, dropout included."""
    model = subject(config).train()
    tokens, samples = text(config, 2, 7), torch.arange(2)
    want, loads = _trained(model, tokens, samples)
    model.checkpointing = True
    got, again = _trained(model, tokens, samples)
    equal_gradients(got, want, "with activation checkpointing", tolerance=0.0)
    if [one.tolist() for one in loads] != [one.tolist() for one in again]:
        raise Broken("with activation checkpointing, experts are told other loads")


def true_gradients(config: ModelConfig) -> None:
    """The gradient is that of the answer: it predicts a small step in a random direction."""
    model = subject(config)
    tokens, step = text(config, 2, 7), 1e-6
    found = gradients(model, loss(call(model, tokens)))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if name not in found:  # no gradient teaches it
            continue
        direction = normal(parameter.shape, generator)
        predicted = float((found[name] * direction).sum())
        values = []
        with torch.no_grad():
            before = parameter.clone()
            for sign in (1, -1):
                parameter.copy_(before + sign * step * direction)
                values.append(float(loss(call(model, tokens))))
            parameter.copy_(before)
        measured = (values[0] - values[1]) / (2 * step)
        if not abs(measured - predicted) <= 1e-5 * max(1.0, abs(measured)):
            raise Broken(f"{name}: a small step changes the loss by {measured:.6g}, its gradient says {predicted:.6g}")
