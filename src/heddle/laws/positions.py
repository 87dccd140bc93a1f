"""Positions: rotary embeddings keep norms and encode relative positions; absolute positions must have an effect."""

import torch
from torch import Tensor

from heddle.laws.harness import (
    DoesNotApply,
    LawViolation,
    assert_bitwise_equal,
    assert_close,
    assert_gradients_close,
    assert_unaffected,
    forward,
    forward_in_chunks,
    forward_no_grad,
    forward_with_state,
    gradients,
    model_under_test,
    new_state,
    normal_tensor,
    probe_loss,
    random_tokens,
    supports_state,
)
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.parts.layout import Layout
from heddle.parts.mixers import Mixer
from heddle.parts.positions import Rotation

SHIFTS = (1, 17, 1000)
OFFSETS = ((1.0, 0.0), (0.0, 17.0), (-1000.0, 3.5))


def position_shift_invariance(config: ModelConfig) -> None:
    """Shifting all positions changes nothing, unless the design has absolute positions."""
    model = model_under_test(config)
    tokens = random_tokens(config, 2, 9)
    start = forward_no_grad(model, tokens)
    if any(mixer is not None and mixer.absolute_positions for mixer in model.mixers()):
        # far from the start only, and then the scores; `options_have_effect` looks for the effect
        raise DoesNotApply("a mixer's scores depend on absolute positions")
    if config.embedding.position is not None:
        moved = forward_no_grad(model, tokens, Layout.causal(2, 9, start=3))
        if not bool(((moved - start).abs() > 1e-6).any()):
            raise LawViolation("shifting all positions by 3 changes nothing, though the design adds absolute positions")
        return
    for by in SHIFTS:
        assert_close(
            forward_no_grad(model, tokens, Layout.causal(2, 9, start=by)), start, f"all positions shifted by {by}"
        )
        if supports_state(model):
            first, state = forward_with_state(model, new_state(model, 2), tokens[:, :5], Layout.causal(2, 5, start=by))
            then, state = forward_with_state(model, state, tokens[:, 5:6])
            last, _ = forward_with_state(model, state, tokens[:, 6:])
            assert_close(torch.cat((first, then, last), dim=1), start, f"a state that starts at position {by}")


def rotary_invariants(config: ModelConfig) -> None:
    """A rotary embedding keeps norms, up to its attention factor, and scores depend on relative positions alone."""
    model = model_under_test(config)
    calls: list[tuple[Rotation, Tensor]] = []
    handles = [
        module.register_forward_pre_hook(lambda module, inputs: calls.append((module, inputs[0])))
        for module in model.modules()
        if isinstance(module, Rotation)
    ]
    forward_no_grad(model, random_tokens(config, 1, 9))
    for handle in handles:
        handle.remove()
    if not calls:
        raise DoesNotApply("no rotary embedding")
    generator = torch.Generator().manual_seed(0)
    for module, called_with in calls:
        length = called_with.shape[2]
        x = normal_tensor(called_with.shape, generator)  # features may be zero, and those a rotation leaves as they are
        rotated = module(x, Layout.causal(1, length))
        at_zero = module(x, Layout(torch.zeros(1, length, dtype=torch.int64), doc_lengths=((length,),)))
        scaled = x * module.attention_factor
        expected = torch.where(
            (at_zero - x).abs() <= (at_zero - scaled).abs(), x, scaled
        )  # dims without a rotation are not scaled
        assert_close(at_zero[0], expected[0], f"{type(module).__name__}: heads at position 0 (row is the head)")
        assert_close(_norms(rotated), _norms(at_zero), f"{type(module).__name__}: the norm of a head")
        for by in SHIFTS:
            moved = module(x, Layout.causal(1, length, start=by))
            scores, shifted = rotated @ rotated.mT, moved @ moved.mT
            assert_close(
                shifted[0], scores[0], f"{type(module).__name__}: scores after a shift by {by} (row is the head)"
            )
        if torch.equal(module(x, Layout.causal(1, length, start=1)), rotated):
            raise LawViolation(f"{type(module).__name__}: rotates nothing")
        if module.axes == 2:
            _check_two_axes(module, x)


def _check_two_axes(module: Rotation, x: Tensor) -> None:
    """Scores depend on differences in x and y. The dims that x rotates come first; y rotates as many, alike."""
    name, layout = type(module).__name__, Layout.causal(1, x.shape[2])
    coordinates = _random_coordinates(1, x.shape[2])

    def rotate(coordinates: Tensor, x: Tensor = x) -> Tensor:
        rotated: Tensor = module(x, layout.with_coordinates(coordinates))
        return rotated

    rotated = rotate(coordinates)
    assert_close(_norms(rotated), _norms(rotate(0.0 * coordinates)), f"{name}: the norm of a head")
    for by in OFFSETS:
        moved = rotate(coordinates + torch.tensor(by))
        assert_close(
            (moved @ moved.mT)[0], (rotated @ rotated.mT)[0], f"{name}: scores after a shift by {by} (row is the head)"
        )
    by_x, by_y = (
        (rotate(coordinates + torch.tensor(by)) != rotated).flatten(0, 2).any(0).nonzero()[:, 0]
        for by in torch.eye(2).tolist()
    )
    if len(by_x) != len(by_y) or int(by_x.max()) >= int(by_y.min()):
        raise LawViolation(
            f"{name}: x rotates the dims {by_x.tolist()} and y {by_y.tolist()}, which are not two halves"
        )
    order = torch.arange(x.shape[-1])
    order[by_x], order[by_y] = by_y, by_x
    assert_close(
        rotate(coordinates.flip(-1), x[..., order])[0],
        rotated[0][..., order],
        f"{name}: x and y swapped (row is the head)",
    )


def _random_coordinates(rows: int, length: int) -> Tensor:
    return 4.0 * normal_tensor((rows, length, 2), torch.Generator().manual_seed(5))


def coordinate_shift_invariance(config: ModelConfig) -> None:
    """Shifting all coordinates changes nothing; they matter exactly where axial rotary embeddings read them.

    Norms after the rotation make scores depend on coordinates themselves: there a shift may change something.
    """
    model = model_under_test(config)
    tokens, layout, coordinates = random_tokens(config, 2, 9), Layout.causal(2, 9), _random_coordinates(2, 9)
    start = forward_no_grad(model, tokens, layout.with_coordinates(coordinates))
    shifts = not any(mixer is not None and mixer.absolute_positions for mixer in model.mixers())
    for by in OFFSETS if shifts else ():
        moved = layout.with_coordinates(coordinates + torch.tensor(by))
        assert_close(forward_no_grad(model, tokens, moved), start, f"all coordinates shifted by {by}")
    uses_coordinates = any(mixer is not None and _uses_coordinates(mixer) for mixer in model.mixers())
    for axis, name in enumerate("xy"):
        changed = coordinates.clone()
        changed[0, 4, axis] += 1.5
        after = forward_no_grad(model, tokens, layout.with_coordinates(changed))
        assert_unaffected(model, after[1:], start[1:], f"{name} of a token in another row (row counted without it)")
        if model.causal:
            assert_unaffected(model, after[:, :4], start[:, :4], f"{name} of a later token")
        if torch.equal(after, start) == uses_coordinates:
            effect = "nothing" if uses_coordinates else "the output, though nothing reads it"
            raise LawViolation(f"{name} of a token's coordinates changes {effect}")
    _default_coordinates(model, tokens)
    _coordinates_of_padding(model, tokens, coordinates)
    if supports_state(model):
        for sizes, cache_length in (([1] * 9, None), ([4, 1, 1, 3], 9)):
            hidden, _ = forward_in_chunks(model, tokens, sizes, cache_length, layout.with_coordinates(coordinates))
            assert_close(hidden, start, f"coordinates of a text in chunks of {sizes}")


def _uses_coordinates(mixer: Mixer) -> bool:
    """Whether coordinates rotate tokens relative to each other: never in a causal window of one."""
    parts = [module for module in mixer.modules() if isinstance(module, Mixer) and module is not mixer]
    if parts:
        return any(map(_uses_coordinates, parts))
    sees_others = mixer.window != 1 or not mixer.causal
    return sees_others and any(isinstance(module, Rotation) and module.axes == 2 for module in mixer.modules())


def _default_coordinates(model: Decoder, tokens: Tensor) -> None:
    """Without coordinates a token is at (position, position)."""
    for name, layout in (("plain", Layout.causal(2, 9, start=3)), ("packed", Layout.packed([[4, 5], [9]]))):
        twice = torch.stack((layout.positions, layout.positions), dim=-1)
        want = forward_no_grad(model, tokens, layout)
        assert_bitwise_equal(
            forward_no_grad(model, tokens, layout.with_coordinates(twice)), want, f"{name} rows at their positions"
        )


def _coordinates_of_padding(model: Decoder, tokens: Tensor, coordinates: Tensor) -> None:
    """NaN as the coordinates of padding changes no bit of an output or a gradient."""
    layout = Layout.padded([9, 5], side="left")
    is_token = layout.positions >= 0
    results = []
    for filler in (0.0, float("nan")):
        poisoned = layout.with_coordinates(coordinates.masked_fill(~is_token[..., None], filler))
        hidden = forward(model, tokens, poisoned)
        results.append((hidden.detach() * is_token[..., None], gradients(model, probe_loss(hidden, is_token))))
    assert_bitwise_equal(results[1][0], results[0][0], "NaN as the coordinates of padding")
    assert_gradients_close(results[1][1], results[0][1], "NaN as the coordinates of padding", tolerance=0.0)


def _norms(x: Tensor) -> Tensor:
    norms: Tensor = x.norm(dim=-1)
    return norms[0, ..., None]


def dtype_round_trip(config: ModelConfig) -> None:
    """Converting a model to bfloat16 and back changes its parameters by rounding and nothing else."""
    model = model_under_test(config, torch.bfloat16).to(torch.float64)  # its parameters are exact in bfloat16
    tokens = random_tokens(config, 2, 9)
    layout = None if config.embedding.position is not None else Layout.causal(2, 9, start=1000)
    before = forward_no_grad(model, tokens, layout)
    after = forward_no_grad(model.to(torch.bfloat16).to(torch.float64), tokens, layout)
    assert_close(after, before, "after conversion to bfloat16 and back", tolerance=0.0)
