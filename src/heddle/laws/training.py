"""Training: dropout is off in eval mode and keyed by sample, and gradients do not depend on how they are computed."""

from itertools import pairwise
from typing import Any, TypeVar, get_type_hints

import torch

from heddle.config import Config, Part, Probability
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

C = TypeVar("C", bound=Config)


def dropout_off_in_eval(config: ModelConfig) -> None:
    """In eval mode nothing is dropped: the output has the bits of the design without dropout."""
    plain = _without_dropout(config, data_dependent=False)
    tokens = random_tokens(config, 2, 8)
    model, without = model_under_test(config), model_under_test(plain)
    assert_bitwise_equal(
        forward_no_grad(model, tokens), forward_no_grad(without, tokens), "in eval, against the design without dropout"
    )
    model.train()
    with use_random_key(RandomKey(1, 1, torch.arange(2))):
        changed = not torch.equal(forward_no_grad(model, tokens), forward_no_grad(without, tokens))
    declared = _without_dropout(config, data_dependent=True) != config
    if changed != declared and (declared or config == plain):
        raise LawViolation(f"in training, something was {'' if changed else 'not '}dropped, despite the declared rates")


def _without_dropout(config: C, data_dependent: bool) -> C:
    """The design with every rate zero, and without the fields that drop something in training on some data only."""
    hints = get_type_hints(type(config), include_extras=True)
    changed: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if hints[name] == Probability:
            changed[name] = 0.0
        elif isinstance(value, Config):
            changed[name] = _without_dropout(value, data_dependent)
        elif isinstance(value, tuple):
            items = (_without_dropout(item, data_dependent) if isinstance(item, Config) else item for item in value)
            changed[name] = tuple(items)
    if isinstance(config, Part) and not data_dependent:
        changed |= dict.fromkeys(config.data_dependent)
    return config.replace(**changed)


def _training_gradients(
    model: Decoder, tokens: torch.Tensor, samples: torch.Tensor
) -> tuple[Gradients, list[torch.Tensor]]:
    """Gradients of a training call, including the auxiliary losses; expert counts and index losses after it."""
    with use_random_key(RandomKey(7, 2, samples)):
        with record_router_statistics() as recorded:
            value = probe_loss(forward(model, tokens))
        value = value + sum(recorded.losses)
        grads = gradients(model, value)
        return grads, [entry.expert_counts for entry in recorded.entries] + [
            entry.aux_loss.detach() for entry in recorded.index_losses
        ]


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
        assert_gradients_close(total, whole, f"a batch split at rows {list(cuts)}")


def activation_checkpointing(config: ModelConfig) -> None:
    """Recomputing layers in the backward pass gives the same bits of every gradient, dropout included."""
    model = model_under_test(config).train()
    tokens, samples = random_tokens(config, 2, 7), torch.arange(2)
    want, loads = _training_gradients(model, tokens, samples)
    model.checkpointing = True
    got, again = _training_gradients(model, tokens, samples)
    assert_gradients_close(got, want, "with activation checkpointing", tolerance=0.0)
    if [counts.tolist() for counts in loads] != [counts.tolist() for counts in again]:
        raise LawViolation("with activation checkpointing, expert counts or losses of indexers differ")


def finite_differences(config: ModelConfig) -> None:
    """Gradients predict the change of the loss by a small step in a random direction."""
    model, tokens = model_under_test(config), random_tokens(config, 2, 7)
    grads = gradients(model, probe_loss(forward(model, tokens)))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if name not in grads:  # not trained by gradients
            continue
        direction = normal_tensor(parameter.shape, generator)
        predicted = float((grads[name] * direction).sum())
        for step in (1e-6, 1e-7, 1e-8):  # where the loss is curved, a smaller step confirms a right gradient
            measured = _slope(model, tokens, parameter, step * direction) / step
            if abs(measured - predicted) <= 1e-5 * max(1.0, abs(measured)):
                break
        else:
            raise LawViolation(
                f"{name}: a small step changes the loss by {measured:.6g}; its gradient predicts {predicted:.6g}"
            )


@torch.no_grad()
def _slope(model: Decoder, tokens: torch.Tensor, parameter: torch.Tensor, step: torch.Tensor) -> float:
    """Half the difference of the losses after a step forward and one back."""
    before, losses = parameter.clone(), []
    for sign in (1, -1):
        parameter.copy_(before + sign * step)
        losses.append(float(probe_loss(forward(model, tokens))))
    parameter.copy_(before)
    return (losses[0] - losses[1]) / 2
