"""Training: dropout is off in eval mode and keyed by sample, and gradients do not depend on how they are computed."""

from itertools import pairwise
from typing import Any

import torch

from heddle.config import parse_config
from heddle.laws.harness import (
    Gradients,
    LawViolation,
    add_gradients,
    assert_bitwise_equal,
    assert_gradients_close,
    forward,
    forward_no_grad,
    gradients,
    model_under_test,
    normal_tensor,
    probe_loss,
    random_tokens,
)
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.numerics.random import RandomKey, use_random_key
from heddle.parts.modules.router_statistics import record_router_statistics

DROPOUT_FIELDS = {"dropout", "drop_path"}
DATA_DEPENDENT = {"capacity_factor"}  # whether it drops any token depends on the tokens


def dropout_off_in_eval(config: ModelConfig) -> None:
    """In eval mode nothing is dropped: the output has the bits of the design without dropout."""
    plain = parse_config(ModelConfig, _without(config.dump(), DROPOUT_FIELDS | DATA_DEPENDENT))
    tokens = random_tokens(config, 2, 8)
    model, without = model_under_test(config), model_under_test(plain)
    assert_bitwise_equal(
        forward_no_grad(model, tokens), forward_no_grad(without, tokens), "in eval, against the design without dropout"
    )
    model.train()
    with use_random_key(RandomKey(1, 1, torch.arange(2))):
        changed = not torch.equal(forward_no_grad(model, tokens), forward_no_grad(without, tokens))
    declared = parse_config(ModelConfig, _without(config.dump(), DROPOUT_FIELDS)) != config
    if changed != declared and (declared or config == plain):
        raise LawViolation(f"in training, something was {'' if changed else 'not '}dropped, against the declared rates")


def _without(data: Any, names: set[str]) -> Any:
    if isinstance(data, dict):
        return {name: _without(value, names) for name, value in data.items() if name not in names}
    return [_without(item, names) for item in data] if isinstance(data, list) else data


def _training_gradients(
    model: Decoder, tokens: torch.Tensor, samples: torch.Tensor
) -> tuple[Gradients, list[torch.Tensor]]:
    """Gradients of a training call, including the experts' auxiliary losses, and each router's expert counts."""
    with use_random_key(RandomKey(7, 2, samples)):
        with record_router_statistics() as recorded:
            value = probe_loss(forward(model, tokens))
        for entry in recorded.entries:
            value = value if entry.aux_loss is None else value + entry.aux_loss
        return gradients(model, value), [entry.expert_counts for entry in recorded.entries]


def gradient_accumulation(config: ModelConfig) -> None:
    """Gradients, with dropout and auxiliary losses, are the same however a batch is split into rows."""
    model = model_under_test(config).train()
    tokens, samples = random_tokens(config, 4, 7), torch.tensor([3, 11, 4, 8])
    whole, _ = _training_gradients(model, tokens, samples)
    for cuts in ((0, 1, 2, 3, 4), (0, 3, 4)):
        total = None
        for start, stop in pairwise(cuts):
            part, _ = _training_gradients(model, tokens[start:stop], samples[start:stop])
            total = part if total is None else add_gradients(total, part)
        assert total is not None
        assert_gradients_close(total, whole, f"a batch split at rows {list(cuts)}", tolerance=1e-12)


def activation_checkpointing(config: ModelConfig) -> None:
    """Recomputing layers in the backward pass gives the same bits of every gradient, dropout included."""
    model = model_under_test(config).train()
    tokens, samples = random_tokens(config, 2, 7), torch.arange(2)
    want, loads = _training_gradients(model, tokens, samples)
    model.checkpointing = True
    got, again = _training_gradients(model, tokens, samples)
    assert_gradients_close(got, want, "with activation checkpointing", tolerance=0.0)
    if [counts.tolist() for counts in loads] != [counts.tolist() for counts in again]:
        raise LawViolation("with activation checkpointing, expert counts differ")


def finite_differences(config: ModelConfig) -> None:
    """Gradients predict the change of the loss by a small step in a random direction."""
    model = model_under_test(config)
    tokens, step = random_tokens(config, 2, 7), 1e-6
    grads = gradients(model, probe_loss(forward(model, tokens)))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if name not in grads:  # no gradient teaches it
            continue
        direction = normal_tensor(parameter.shape, generator)
        predicted = float((grads[name] * direction).sum())
        values = []
        with torch.no_grad():
            before = parameter.clone()
            for sign in (1, -1):
                parameter.copy_(before + sign * step * direction)
                values.append(float(probe_loss(forward(model, tokens))))
            parameter.copy_(before)
        measured = (values[0] - values[1]) / (2 * step)
        if not abs(measured - predicted) <= 1e-5 * max(1.0, abs(measured)):
            raise LawViolation(
                f"{name}: a small step changes the loss by {measured:.6g}, its gradient says {predicted:.6g}"
            )
