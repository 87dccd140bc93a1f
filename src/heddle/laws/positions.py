"""Positions: rotations keep lengths and know differences only; tables at the embedding know where they are."""

import torch
from torch import Tensor

from heddle.laws.subject import (
    Broken,
    advance,
    answer,
    call,
    equal,
    equal_gradients,
    fresh,
    gradients,
    identical,
    in_chunks,
    keeps_state,
    loss,
    normal,
    subject,
    text,
    undisturbed,
)
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.parts.context.layout import Layout
from heddle.parts.positions import Rotation

SHIFTS = (1, 17, 1000)
MOVES = ((1.0, 0.0), (0.0, 17.0), (-1000.0, 3.5))


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
        if module.axes == 2:
            _turns_by_places(module, x)


def _turns_by_places(module: Rotation, x: Tensor) -> None:
    """Scores know differences in x and in y; the dims that x turns come first, those of y are as many, and alike."""
    name, layout = type(module).__name__, Layout.causal(1, x.shape[2])
    places = _places(1, x.shape[2])

    def at(places: Tensor, x: Tensor = x) -> Tensor:
        return module(x, layout.with_places(places))

    turned = at(places)
    equal(_lengths(turned), _lengths(at(0.0 * places)), f"{name}: the length of a head at a place")
    for by in MOVES:
        moved = at(places + torch.tensor(by))
        equal((moved @ moved.mT)[0], (turned @ turned.mT)[0], f"{name}: scores after a move by {by} (row is the head)")
    by_x, by_y = (
        (at(places + torch.tensor(by)) != turned).flatten(0, 2).any(0).nonzero()[:, 0] for by in torch.eye(2).tolist()
    )
    if len(by_x) != len(by_y) or int(by_x.max()) >= int(by_y.min()):
        raise Broken(f"{name}: x turns the dims {by_x.tolist()} and y {by_y.tolist()}: not a first half and a second")
    order = torch.arange(x.shape[-1])
    order[by_x], order[by_y] = by_y, by_x
    equal(at(places.flip(-1), x[..., order])[0], turned[0][..., order], f"{name}: x and y exchanged (row is the head)")


def _places(rows: int, length: int) -> Tensor:
    return 4.0 * normal((rows, length, 2), torch.Generator().manual_seed(5))


def places(config: ModelConfig) -> None:
    """Moving all places by one (a, b) changes nothing; they matter where places turn heads, and nowhere else."""
    model = subject(config)
    tokens, layout, where = text(config, 2, 9), Layout.causal(2, 9), _places(2, 9)
    start = answer(model, tokens, layout.with_places(where))
    for by in MOVES:
        moved = layout.with_places(where + torch.tensor(by))
        equal(answer(model, tokens, moved), start, f"all places moved by {by}")
    reads = any(mixer is not None and mixer.reach != 1 and _by_places(mixer) for mixer in model.mixers())
    for axis, name in enumerate("xy"):
        changed = where.clone()
        changed[0, 4, axis] += 1.5
        after = answer(model, tokens, layout.with_places(changed))
        undisturbed(model, after[1:], start[1:], f"{name} of a token in another row (row counted without it)")
        if model.causal:
            undisturbed(model, after[:, :4], start[:, :4], f"{name} of a later token")
        if torch.equal(after, start) == reads:
            raise Broken(f"{name} of a token's place changes {'nothing' if reads else 'answers, though none is read'}")
    _usual_places(model, tokens)
    _places_of_padding(model, tokens, where)
    if keeps_state(model):
        for sizes, capacity in (([1] * 9, None), ([4, 1, 1, 3], 9)):
            hidden, _ = in_chunks(model, tokens, sizes, capacity, layout.with_places(where))
            equal(hidden, start, f"places of a text cut into {sizes}")


def _by_places(mixer: torch.nn.Module) -> bool:
    return any(isinstance(module, Rotation) and module.axes == 2 for module in mixer.modules())


def _usual_places(model: Decoder, tokens: Tensor) -> None:
    """Without places a token stands at (position, position)."""
    for name, layout in (("plain", Layout.causal(2, 9, start=3)), ("packed", Layout.packed([[4, 5], [9]]))):
        twice = torch.stack((layout.positions, layout.positions), dim=-1)
        want = answer(model, tokens, layout)
        identical(answer(model, tokens, layout.with_places(twice)), want, f"{name} rows at their positions")


def _places_of_padding(model: Decoder, tokens: Tensor, where: Tensor) -> None:
    """NaN as the place of padding changes no bit of an answer or a gradient."""
    layout = Layout.padded([9, 5], side="left")
    real = layout.positions >= 0
    found = []
    for filler in (0.0, float("nan")):
        here = layout.with_places(where.masked_fill(~real[..., None], filler))
        hidden = call(model, tokens, here)
        found.append((hidden.detach() * real[..., None], gradients(model, loss(hidden, real))))
    identical(found[1][0], found[0][0], "NaN as the place of padding")
    equal_gradients(found[1][1], found[0][1], "NaN as the place of padding", tolerance=0.0)


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
