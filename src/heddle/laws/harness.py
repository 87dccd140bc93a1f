"""Shared by all laws: the model under test in float64, random inputs, a probe loss, and the comparisons."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.state import State
from heddle.parts.feedforwards import Feedforward
from heddle.parts.feedforwards.moe import ExpertTable
from heddle.parts.layout import EncoderOutput, Layout

TOLERANCE = 1e-10
MAX_TEXT_LENGTH = 128  # tokens, longer than any law's sequence
EXPERT_TOLERANCE = 1e-12  # other tokens change the row count, and so the rounding, of an expert's matrix product
ENCODER_LENGTH = 5  # tokens of the encoder output that cross-attention reads
PADDING_TOKEN = 0  # random_tokens never returns it: it stands for padding and for poisoned tokens
MAX_CACHED_PARAMETERS = 2**20  # of a model that stays in memory while others are checked

_cached_models: ContextVar[dict[ModelConfig, Decoder] | None] = ContextVar("cached_models", default=None)

Gradients = dict[str, Tensor]


class LawViolation(AssertionError):
    """A law does not hold. The message is one sentence: what differs, and by how much."""


class DoesNotApply(Exception):
    """A law says nothing about this design. The message is the reason, such as `no experts`."""


class ModelCache:
    """The models of several laws: each design is built once, and every law gets an unused copy of its own."""

    def __init__(self) -> None:
        self._models: dict[ModelConfig, Decoder] = {}

    @contextmanager
    def use(self) -> Iterator[None]:
        """Within the block, `model_under_test` copies these models and adds those that it builds."""
        token = _cached_models.set(self._models)
        try:
            yield
        finally:
            _cached_models.reset(token)


def model_under_test(config: ModelConfig, dtype: torch.dtype = torch.float64) -> Decoder:
    """Build the design in eval mode and add random numbers to every parameter but tables of whole numbers.

    Initial weights hide mistakes: gains are 1, biases 0 and branches small.
    """
    models = _cached_models.get()
    model = None if models is None else models.get(config)
    if model is None:
        model = _build(config)
        if models is None or sum(parameter.numel() for parameter in model.parameters()) > MAX_CACHED_PARAMETERS:
            return model.to(dtype)
        models[config] = model
    tables = [table for module in model.modules() for table in vars(module).values() if isinstance(table, dict | set)]
    # Most of a copy's time goes into a module's empty tables and sets of hooks: each gets a new one at once.
    return copy.deepcopy(model, {id(table): type(table)() for table in tables if not table}).to(dtype)


def _build(config: ModelConfig) -> Decoder:
    model = build(config, dtype=torch.float64, device=torch.get_default_device()).eval()
    generator = torch.Generator().manual_seed(1)
    tables = {id(module.experts) for module in model.modules() if isinstance(module, ExpertTable)}
    with torch.no_grad():
        for parameter in (each for each in model.parameters() if id(each) not in tables):
            spread = 0.3 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5
            parameter.add_(normal_tensor(parameter.shape, generator) * spread)
    return model


def random_tokens(config: ModelConfig, rows: int, length: int, seed: int = 0) -> Tensor:
    """Random tokens int64 [rows, length], none of them `PADDING_TOKEN`."""
    assert config.vocab_size is not None
    generator = torch.Generator().manual_seed(1000 + seed)
    tokens = torch.randint(1, config.vocab_size, (rows, length), generator=generator, device="cpu")
    return tokens.to(torch.get_default_device())


def normal_tensor(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Standard normal float64 numbers on the default device, the same on every device."""
    drawn = torch.empty(shape, dtype=torch.float64, device="cpu").normal_(generator=generator)
    return drawn.to(torch.get_default_device())


def encoder_output_for(model: Decoder, rows: int) -> EncoderOutput | None:
    """What the design's cross-attention reads in every law: the same for each row, so that rows stay comparable.

    Computed from random tokens if the design has an encoder, with gradients if they are enabled. Else random vectors.
    """
    if model.encoder_width is None:
        return None
    if model.encoder is not None:
        source = random_tokens(model.encoder.config, 1, ENCODER_LENGTH, seed=4)
        return model.encode(source.expand(max(1, rows), -1))  # batch 0 must be refused by the model, not here
    weight = model.embed.weight
    vectors = normal_tensor((1, ENCODER_LENGTH, model.encoder_width), torch.Generator().manual_seed(4)).to(weight)
    return EncoderOutput(vectors.expand(rows, -1, -1))


def layout_for(model: Decoder, rows: int, length: int, layout: Layout | None = None) -> Layout:
    """The layout of a call without a state, with an encoder output if the design reads one."""
    base = Layout.causal(rows, length) if layout is None else layout
    encoder_output = encoder_output_for(model, rows)
    return base if encoder_output is None else base.with_encoder_output(encoder_output)


def forward(model: Decoder, tokens: Tensor, layout: Layout | None = None) -> Tensor:
    """Hidden states [B, T, width] of one call without a state, with gradients if they are enabled."""
    hidden: Tensor
    hidden, _ = model(tokens, layout_for(model, tokens.shape[0], tokens.shape[1], layout))
    return hidden


def forward_no_grad(model: Decoder, tokens: Tensor, layout: Layout | None = None) -> Tensor:
    """Hidden states [B, T, width] of one call without a state and without gradients."""
    with torch.no_grad():
        return forward(model, tokens, layout)


def new_state(model: Decoder, rows: int, cache_length: int | None = None, rollback: int = 0) -> State:
    """An empty state.

    A design whose rotary embedding depends on the final length gets a `cache_length` long enough for any law.
    """
    if cache_length is None and model.length_dependent:
        cache_length = MAX_TEXT_LENGTH
    return model.init_state(rows, cache_length, encoder_output_for(model, rows), rollback)


def forward_with_state(
    model: Decoder, state: State, tokens: Tensor, layout: Layout | None = None
) -> tuple[Tensor, State]:
    """Hidden states of one call with a state, and the new state."""
    with torch.no_grad():
        hidden, new_state = model(tokens, layout, state)
    assert new_state is not None
    return hidden, new_state


def fork(state: State) -> State:
    """An independent copy."""
    return state.fork()


def slice_layout(layout: Layout, start: int, stop: int) -> Layout:
    """The layout of tokens start … stop − 1."""
    return layout.map_tensors(lambda x: x[:, start:stop])


def forward_in_chunks(
    model: Decoder,
    tokens: Tensor,
    sizes: Sequence[int],
    cache_length: int | None = None,
    layout: Layout | None = None,
) -> tuple[Tensor, State]:
    """Hidden states of a text read with an empty state in chunks of these sizes, and the final state."""
    state = new_state(model, tokens.shape[0], cache_length)
    out, start = [], 0
    for size in sizes:
        chunk_layout = None if layout is None else slice_layout(layout, start, start + size)
        hidden, state = forward_with_state(model, state, tokens[:, start : start + size], chunk_layout)
        out.append(hidden)
        start += size
    return torch.cat(out, dim=1), state


def supports_state(model: Decoder) -> bool:
    """Whether the design can have a state. Raises LawViolation if a bidirectional design does not refuse one."""
    if not model.causal:
        assert_refused(lambda: model.init_state(1), "bidirectional", "a bidirectional design returned a state")
    return model.causal


def require_state(model: Decoder, rollback: bool = False) -> None:
    """Raise DoesNotApply for a design without a state, or, with `rollback`, one whose state cannot be rolled back."""
    if not supports_state(model):
        raise DoesNotApply("no state, because the design is bidirectional")
    if rollback and not new_state(model, 1).can_roll_back(1):
        raise DoesNotApply("its state cannot be rolled back")


def feedforwards(model: Decoder) -> list[Feedforward]:
    """Every feed-forward of the model and its encoder."""
    return [module for _, module in model.own_modules() if isinstance(module, Feedforward)]


def windows(model: Decoder) -> list[int]:
    """The distinct windows of the model's mixers."""
    return sorted({mixer.window for mixer in model.mixers() if mixer is not None and mixer.window is not None})


def probe_loss(hidden: Tensor, is_token: Tensor | None = None) -> Tensor:
    """A scalar to which every token contributes separately. is_token is bool [B, T]; None counts all."""
    probe = torch.linspace(-1.0, 1.5, hidden.shape[-1], dtype=hidden.dtype)
    value = (hidden @ probe).sin()
    return value.sum() if is_token is None else value.masked_fill(~is_token, 0.0).sum()


def gradients(model: Decoder, value: Tensor) -> Gradients:
    """The gradient of every trainable parameter, zero where it is not used."""
    named = {name: value for name, value in model.named_parameters() if value.requires_grad}
    grads = torch.autograd.grad(value, list(named.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(named, grads, strict=True))


def add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """The sum of two sets of gradients."""
    return {name: left[name] + right[name] for name in left}


def assert_close(got: Tensor, want: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    """Compare hidden states [B, T, width]. Raises LawViolation naming the token that differs most."""
    if got.shape != want.shape:
        raise LawViolation(f"{what}: the shape is {list(got.shape)} instead of {list(want.shape)}")
    if got.numel() == 0:
        return
    difference = (got - want).abs().amax(-1).nan_to_num(nan=float("inf"))
    row, token = divmod(int(difference.argmax()), difference.shape[1])
    worst = float(difference.max())
    if worst > tolerance:
        deviation = f"differs by {worst:.1e}" if worst < float("inf") else "is not finite"
        raise LawViolation(f"{what}: token {token} of row {row} {deviation}")


def assert_bitwise_equal(got: Tensor, want: Tensor, what: str) -> None:
    """Compare hidden states, which must be finite and have the same bits."""
    assert_close(got, want, what, tolerance=0.0)


def assert_unaffected(model: Decoder, got: Tensor, want: Tensor, what: str) -> None:
    """Compare hidden states before and after a change elsewhere: they must have the same bits.

    With experts they may differ by 1e-12 of the largest, because other rows change the shape of a matrix product.
    """
    has_experts = any(part.expert_info is not None for part in feedforwards(model))
    assert_close(
        got,
        want,
        what,
        tolerance=EXPERT_TOLERANCE * max(1.0, float(want.abs().max())) if has_experts and want.numel() else 0.0,
    )


def assert_gradients_close(got: Gradients, want: Gradients, what: str, tolerance: float = TOLERANCE) -> None:
    """Compare gradients, relative to the largest entry if that is above 1.

    Raises LawViolation naming the parameter that differs most.
    """
    worst, at = -1.0, ""
    for name, expected in want.items():
        scale = max(1.0, float(expected.abs().max()))
        difference = float((got[name] - expected).abs().nan_to_num(nan=float("inf")).max()) / scale
        if difference > worst:
            worst, at = difference, name
    if worst > tolerance:
        deviation = f"differs by {worst:.1e}" if worst < float("inf") else "is not finite"
        raise LawViolation(f"{what}: the gradient of {at} {deviation}")


def assert_refused(call: Callable[[], object], words: str, otherwise: str) -> None:
    """The call must raise a ConfigError that contains `words`. Raises LawViolation with `otherwise` if it does not."""
    try:
        call()
    except ConfigError as error:
        if words not in str(error):
            raise LawViolation(f"{otherwise}: refused, but without the words '{words}': {error}") from None
        return
    raise LawViolation(f"{otherwise}, which must be refused")
