"""What every law works with: a model in float64, texts, loss and gradients, and how a difference is told."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.state import State
from heddle.parts.context.layout import Layout, Memory
from heddle.parts.feedforwards import Feedforward

TOLERANCE = 1e-10
ROOM = 128  # tokens, more than any law's text
GROUPED = 1e-12  # where others change how many rows an expert's product has: its sums may be rounded otherwise
MEMORY = 5  # tokens of the memory that cross-attention reads
POISON = 0  # texts never hold this token, so that padding and other rows may

Gradients = dict[str, Tensor]


class Broken(AssertionError):
    """A law does not hold: one sentence with what differs and by how much."""


def subject(config: ModelConfig, dtype: torch.dtype = torch.float64) -> Decoder:
    """The design as a model in eval mode, every parameter made rough.

    At their start gains are 1, biases 0 and branches small: mistakes would hide behind them.
    """
    model = build(config, dtype=torch.float64, device=torch.get_default_device()).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5
            parameter.add_(normal(parameter.shape, generator) * spread)
    return model.to(dtype)


def text(config: ModelConfig, rows: int, length: int, seed: int = 0) -> Tensor:
    """Random tokens int64 [rows, length], none of them `POISON`."""
    assert config.vocab_size is not None
    generator = torch.Generator().manual_seed(1000 + seed)
    tokens = torch.randint(1, config.vocab_size, (rows, length), generator=generator, device="cpu")
    return tokens.to(torch.get_default_device())


def normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Normal float64 numbers on the device in force, the same on every device."""
    drawn = torch.empty(shape, dtype=torch.float64, device="cpu").normal_(generator=generator)
    return drawn.to(torch.get_default_device())


def memory(model: Decoder, rows: int) -> Memory | None:
    """What a design's cross-attention reads in every law: the same for each row, so that rows stay comparable.

    A design with an encoder reads what that makes of a text, with gradients where they are on.
    """
    if model.memory_width is None:
        return None
    if model.encoder is not None:
        source = text(model.encoder.config, 1, MEMORY, seed=4)
        return model.encode(source.expand(max(1, rows), -1))  # that no row is refused is the model's to say
    weight = model.embed.weight
    one = normal((1, MEMORY, model.memory_width), torch.Generator().manual_seed(4)).to(weight)
    return Memory(one.expand(rows, -1, -1))


def placed(model: Decoder, rows: int, length: int, layout: Layout | None = None) -> Layout:
    """The layout of a call without a state, a memory beside it where the design reads one."""
    here = Layout.causal(rows, length) if layout is None else layout
    beside = memory(model, rows)
    return here if beside is None else here.with_memory(beside)


def call(model: Decoder, tokens: Tensor, layout: Layout | None = None) -> Tensor:
    """Hidden states [B, T, width] of one call without a state, with gradients where they are on."""
    hidden, _ = model(tokens, placed(model, tokens.shape[0], tokens.shape[1], layout))
    return hidden


def answer(model: Decoder, tokens: Tensor, layout: Layout | None = None) -> Tensor:
    """Hidden states [B, T, width] of one call without a state, no gradients."""
    with torch.no_grad():
        return call(model, tokens, layout)


def fresh(model: Decoder, rows: int, capacity: int | None = None, rewind: int = 0) -> State:
    """An empty state; a design whose rotation depends on the length is given a capacity for any law's text."""
    if capacity is None and model.by_length:
        capacity = ROOM
    return model.init_state(rows, capacity, memory(model, rows), rewind)


def advance(model: Decoder, state: State, tokens: Tensor, layout: Layout | None = None) -> tuple[Tensor, State]:
    """Hidden states of one call with a state, and the new state."""
    with torch.no_grad():
        hidden, after = model(tokens, layout, state)
    assert after is not None
    return hidden, after


def fork(state: State) -> State:
    """An independent copy."""
    return state.fork()


def part_of(layout: Layout, start: int, stop: int) -> Layout:
    """The layout of tokens start … stop − 1 alone."""
    documents = None if layout.documents is None else layout.documents[:, start:stop]
    places = None if layout.places is None else layout.places[:, start:stop]
    return Layout(layout.positions[:, start:stop], documents, has_padding=layout.has_padding, places=places)


def in_chunks(
    model: Decoder,
    tokens: Tensor,
    sizes: Sequence[int],
    capacity: int | None = None,
    layout: Layout | None = None,
) -> tuple[Tensor, State]:
    """Hidden states of a text fed to a fresh state in chunks of these sizes, and the state at the end."""
    state = fresh(model, tokens.shape[0], capacity)
    out, start = [], 0
    for size in sizes:
        place = None if layout is None else part_of(layout, start, start + size)
        hidden, state = advance(model, state, tokens[:, start : start + size], place)
        out.append(hidden)
        start += size
    return torch.cat(out, dim=1), state


def keeps_state(model: Decoder) -> bool:
    """Whether the design can keep a state; a bidirectional one must refuse to."""
    if not model.causal:
        refuses(lambda: model.init_state(1), "bidirectional", "a bidirectional design made a state")
    return model.causal


def feedforwards(model: Decoder) -> list[Feedforward]:
    """Every feed-forward, an encoder's too."""
    return [module for module in model.modules() if isinstance(module, Feedforward)]


def windows(model: Decoder) -> list[int]:
    """The distinct windows of a model's mixers."""
    return sorted({mixer.reach for mixer in model.mixers() if mixer is not None and mixer.reach is not None})


def loss(hidden: Tensor, real: Tensor | None = None) -> Tensor:
    """A number that every real token adds to by itself; real is bool [B, T], all where None."""
    probe = torch.linspace(-1.0, 1.5, hidden.shape[-1], dtype=hidden.dtype)
    value = (hidden @ probe).sin()
    return value.sum() if real is None else value.masked_fill(~real, 0.0).sum()


def gradients(model: Decoder, value: Tensor) -> Gradients:
    """The gradient of every parameter that learns by one, zero where it is not used."""
    named = {name: value for name, value in model.named_parameters() if value.requires_grad}
    found = torch.autograd.grad(value, list(named.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(named, found, strict=True))


def add(left: Gradients, right: Gradients) -> Gradients:
    """The sum, name by name."""
    return {name: left[name] + right[name] for name in left}


def equal(got: Tensor, want: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    """Hidden states [B, T, width] agree. Raises Broken with the token that differs most."""
    if got.shape != want.shape:
        raise Broken(f"{what}: the shape is {list(got.shape)} instead of {list(want.shape)}")
    if got.numel() == 0:
        return
    difference = (got - want).abs().amax(-1).nan_to_num(nan=float("inf"))
    row, token = divmod(int(difference.argmax()), difference.shape[1])
    worst = float(difference.max())
    if worst > tolerance:
        said = f"differs by {worst:.1e}" if worst < float("inf") else "is not finite"
        raise Broken(f"{what}: token {token} of row {row} {said}")


def identical(got: Tensor, want: Tensor, what: str) -> None:
    """Hidden states are the same bits, and finite."""
    equal(got, want, what, tolerance=0.0)


def undisturbed(model: Decoder, got: Tensor, want: Tensor, what: str) -> None:
    """Hidden states are the same bits though other tokens are others; with experts, within 1e-12 of their largest."""
    mixes = any(part.mixture is not None for part in feedforwards(model))
    equal(got, want, what, tolerance=GROUPED * max(1.0, float(want.abs().max())) if mixes and want.numel() else 0.0)


def equal_gradients(got: Gradients, want: Gradients, what: str, tolerance: float = TOLERANCE) -> None:
    """Gradients agree, relative to the largest entry where it is above 1. Raises Broken with the worst name."""
    worst, at = -1.0, ""
    for name, wanted in want.items():
        scale = max(1.0, float(wanted.abs().max()))
        difference = float((got[name] - wanted).abs().nan_to_num(nan=float("inf")).max()) / scale
        if difference > worst:
            worst, at = difference, name
    if worst > tolerance:
        said = f"differs by {worst:.1e}" if worst < float("inf") else "is not finite"
        raise Broken(f"{what}: the gradient of {at} {said}")


def refuses(call: Callable[[], object], words: str, otherwise: str) -> None:
    """The call raises ConfigError and its sentence holds `words`. Raises Broken with `otherwise`."""
    try:
        call()
    except ConfigError as error:
        if words not in str(error):
            raise Broken(f"{otherwise}: refused, but without the words '{words}': {error}") from None
        return
    raise Broken(f"{otherwise}, which must be refused")
