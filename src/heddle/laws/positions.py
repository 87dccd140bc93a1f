"""Positions: rotations keep lengths and know differences only; tables at the embedding know where they are."""

import torch
from torch import Tensor

from heddle.laws.subject import Broken, advance, answer, equal, fresh, keeps_state, subject, text
from heddle.model.config import ModelConfig
from heddle.parts.layout import Layout
from heddle.parts.positions import Rotation

SHIFTS = (1, 17, 1000)


def shift(config: ModelConfig) -> None:
    """Shifting all positions changes nothing, unless the design adds absolute positions at the embedding."""
    model = subject(config)
    tokens = text(config, 2, 9)
    start = answer(model, tokens)
    if config.embedding.position is not None:
        moved = answer(model, tokens, Layout.causal(2, 9, start=3))
        if not bool(((moved - start).abs() > 1e-6).any()):
            raise Broken("shifting all positions by 3 changes nothing, though the design adds absolute positions")
        return
    for by in SHIFTS:
        equal(answer(model, tokens, Layout.causal(2, 9, start=by)), start, f"all positions shifted by {by}")
        if keeps_state(model):
            first, state = advance(model, fresh(model, 2), tokens[:, :5], Layout.causal(2, 5, start=by))
            then, state = advance(model, state, tokens[:, 5:6])
            last, _ = advance(model, state, tokens[:, 6:])
            equal(torch.cat((first, then, last), dim=1), start, f"a state that starts at position {by}")


def rotation(config: ModelConfig) -> None:
    """A rotation keeps the length of every head, but for its amplitude; scores know differences of positions alone."""
    model = subject(config)
    calls: list[tuple[Rotation, Tensor]] = []
    handles = [
        module.register_forward_pre_hook(lambda module, inputs: calls.append((module, inputs[0])))
        for module in model.modules()
        if isinstance(module, Rotation)
    ]
    answer(model, text(config, 1, 9))
    for handle in handles:
        handle.remove()
    for module, x in calls:
        length = x.shape[2]
        turned = module(x, Layout.causal(1, length))
        still = module(x, Layout(torch.zeros(1, length, dtype=torch.int64), has_padding=False))
        grown = x * module.amplitude
        nearer = torch.where((still - x).abs() <= (still - grown).abs(), x, grown)  # dims that are not turned stay
        equal(still[0], nearer[0], f"{type(module).__name__}: heads at position 0 (row is the head)")
        equal(_lengths(turned), _lengths(still), f"{type(module).__name__}: the length of a head")
        for by in SHIFTS:
            moved = module(x, Layout.causal(1, length, start=by))
            scores, shifted = turned @ turned.mT, moved @ moved.mT
            equal(shifted[0], scores[0], f"{type(module).__name__}: scores after a shift by {by} (row is the head)")
        if torch.equal(module(x, Layout.causal(1, length, start=1)), turned):
            raise Broken(f"{type(module).__name__}: turns nothing")


def _lengths(x: Tensor) -> Tensor:
    return x.norm(dim=-1)[0, ..., None]


def dtype_round_trip(config: ModelConfig) -> None:
    """Converting a model to bfloat16 and back loses bits of its parameters and nothing else (no table is harmed)."""
    model = subject(config, torch.bfloat16).to(torch.float64)  # its parameters are exact in bfloat16
    tokens = text(config, 2, 9)
    layout = None if config.embedding.position is not None else Layout.causal(2, 9, start=1000)
    before = answer(model, tokens, layout)
    after = answer(model.to(torch.bfloat16).to(torch.float64), tokens, layout)
    equal(after, before, "after conversion to bfloat16 and back", tolerance=0.0)
