"""Low precision: outputs stay close to float64, over a few tokens and at the end of a long text read with a state."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from heddle.laws.harness import (
    DoesNotApply,
    LawViolation,
    feedforwards,
    forward,
    forward_in_chunks,
    forward_with_state,
    model_under_test,
    new_state,
    random_tokens,
    require_state,
)
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.model.state import State
from heddle.numerics.attention.mask import AttentionMask
from heddle.parts.layout import Layout
from heddle.parts.modules.indexer import KeySelector
from heddle.parts.positions import Rotation
from heddle.parts.states import LayerState

FLOAT32_BOUND = 1e-10  # mean square error relative to the mean square of the output
FLOAT32_ANGLES_BOUND = 1e-9  # where angles are float32, as in transformers: one of 3,000 is rounded by 1e-4
BFLOAT16_BOUND = 1e-2
AMPLIFIED_TEXTS = 4  # over which errors are averaged where one rounding changes much
BRANCHES = ("mixer", "feedforward")
TEXTS, TEXT_LENGTH = 5, 12  # on which a part is computed alone
PART_BOUND, PART_FACTOR = 1e-4, 4.0  # at a typical token, and of the error of rounded modules
TOKEN_BOUND = 5e-3
FAR = 3000  # a position above 2048, to which float16 is exact
CHUNKS, STEPS = (300, 212), 32  # how a long text is read
FACTOR = 2.5  # of the error in one call; kernels of one token and of many differ by up to 1.6
LONG_BOUND = 1e-3  # of that error in one call; at most 2e-4 in the cases
LEAST_ERROR = 1e-7  # counts as this much: rounding once to bfloat16 is about 3e-6
SUMMED_STEPS = 3  # tokens that change a sum
PLACES = 6  # numbers of a tensor that are looked at


def low_precision(config: ModelConfig) -> None:
    """Outputs in float32 and bfloat16, also token by token and far from position 0, stay close to float64.

    Experts are routed, and indexers select keys, as in float64: where two experts or keys are nearly equal, rounding
    would choose between different functions. A design that amplifies rounding may have twice the error of a float64
    model whose modules read and return rounded numbers, on average over several texts. In bfloat16 each mixer and
    feed-forward is also compared alone, since the stream and the mean hide what one head or one token does.
    """
    exact = model_under_test(config, torch.bfloat16).to(torch.float64)  # every dtype can hold its parameters
    starts = (0,) if config.embedding.position is not None else (0, FAR)
    for start in starts:
        layout = Layout.causal(1, 12, start=start)
        float32_bound = FLOAT32_ANGLES_BOUND if start and _has_float32_angles(exact) else FLOAT32_BOUND
        for dtype, bound in ((torch.float32, float32_bound), (torch.bfloat16, BFLOAT16_BOUND)):
            model = copy.deepcopy(exact).to(dtype)
            errors = _rounding_errors(exact, model, random_tokens(config, 1, 12), layout)
            if max(errors) > bound:
                texts = [random_tokens(config, 1, 12, seed) for seed in range(AMPLIFIED_TEXTS)]
                several = [_rounding_errors(exact, model, text, layout, dtype) for text in texts]
                *errors, rounded = (sum(column) / len(texts) for column in zip(*several, strict=True))
                bound = max(bound, 2 * rounded)
            for how, error in zip(("one call", "with a state"), errors, strict=False):
                if not error <= bound:
                    what = f"{dtype}".removeprefix("torch.") + f" from position {start}, {how}"
                    raise LawViolation(f"{what}: the relative mean square error is {error:.1e}, more than {bound:.0e}")
        _check_parts(exact, copy.deepcopy(exact).to(torch.bfloat16), start)


def _check_parts(exact: Decoder, narrow: Decoder, start: int) -> None:
    """Refuse a part whose rounding is too large at a typical token of several texts, or at one token of most texts."""
    parts = {(index, name): getattr(layer, name) for index, layer in enumerate(exact.layers) for name in BRANCHES}
    names = [f"layers.{index}.{name}" for (index, name), part in parts.items() if part is not None]
    tokens = random_tokens(exact.config, TEXTS, TEXT_LENGTH)
    layout = Layout.causal(TEXTS, TEXT_LENGTH, start=start)
    with torch.no_grad(), _record_choices(exact) as choices, _recorded(exact, names) as pinned:
        forward(exact, tokens, layout)
    with torch.no_grad(), _replay_choices(narrow, choices), _pinned(narrow, pinned) as outputs:
        forward(narrow, tokens, layout)
    rounding = _rounded_outputs(exact, torch.bfloat16)
    with torch.no_grad(), rounding, _replay_choices(exact, choices), _pinned(exact, pinned) as rounded:
        forward(exact, tokens, layout)
    for name, (_, want) in pinned.items():
        errors, least = (_token_errors(torch.cat(own[name], 1), want) for own in (outputs, rounded))
        typical, bound = _typical(errors), max(PART_BOUND, PART_FACTOR * _typical(least))
        worst = float(errors.amax(1).median())
        if not (typical <= bound and worst <= TOKEN_BOUND):
            raise LawViolation(
                f"bfloat16 from position {start}, {name} alone: the relative square error is {typical:.1e} at a "
                f"typical token, which may be {bound:.0e}, and {worst:.1e} at the worst of a text, which may be "
                f"{TOKEN_BOUND:.0e}"
            )


def _rounding_errors(
    exact: Decoder, model: Decoder, tokens: Tensor, layout: Layout, dtype: torch.dtype | None = None
) -> list[float]:
    """The errors in one call and, for a causal model, with a state; with a dtype, also of `_rounded_outputs`, last."""
    with torch.no_grad(), _record_choices(exact) as choices:
        want = forward(exact, tokens, layout)
    with torch.no_grad(), _replay_choices(model, choices):
        found = [_error(forward(model, tokens, layout), want)]
    if model.causal:
        with torch.no_grad(), _replay_choices(model, choices):
            found.append(_error(forward_in_chunks(model, tokens, [4] + [1] * 8, 12, layout)[0], want))
    if dtype is not None:
        with torch.no_grad(), _replay_choices(exact, choices), _rounded_outputs(exact, dtype):
            found.append(_error(forward(exact, tokens, layout), want))
    return found


def _has_float32_angles(model: Decoder) -> bool:
    return any(isinstance(module, Rotation) and not module.float64_angles for module in model.modules())


def _choosers(model: Decoder) -> list[nn.Module]:
    """Routers, and what selects keys."""
    routers = [part.expert_info.router for part in feedforwards(model) if part.expert_info is not None]
    return [*routers, *(module for module in model.modules() if isinstance(module, KeySelector))]


@contextmanager
def _record_choices(model: Decoder) -> Iterator[dict[int, Any]]:
    """Collect the output of each router, and each selection of keys, within the block, in one call."""
    outputs: dict[int, Any] = {}
    choosers = _choosers(model)

    def keep(chooser: nn.Module, _: object, own: Any) -> None:
        outputs[choosers.index(chooser)] = own

    handles = [chooser.register_forward_hook(keep) for chooser in choosers]
    yield outputs
    for handle in handles:
        handle.remove()


@contextmanager
def _replay_choices(model: Decoder, outputs: dict[int, Any]) -> Iterator[None]:
    """Within the block, the recorded choices are made again, for any chunks of the same tokens in one document."""
    choosers, consumed = _choosers(model), [0] * len(outputs)

    def repeat(chooser: nn.Module, _: object, own: Any) -> Any:
        index = choosers.index(chooser)
        if isinstance(own, AttentionMask):
            return _reselected(own, outputs[index])
        start = consumed[index]
        consumed[index] += own.shape[1]
        return outputs[index][:, start : consumed[index]].to(own).expand_as(own)

    handles = [chooser.register_forward_hook(repeat) for chooser in choosers]
    yield
    for handle in handles:
        handle.remove()


def _reselected(own: AttentionMask, recorded: AttentionMask) -> AttentionMask:
    """A mask of some of the queries and keys of a recorded one, with its selection."""
    if own.selected is None or recorded.selected is None:
        return own
    pairs = ((own.q_positions, recorded.q_positions), (own.k_positions, recorded.k_positions))
    rows, keys = ((mine[0][:, None] == theirs[0]).int().argmax(1) for mine, theirs in pairs)
    selected = recorded.selected[:, :, rows][..., keys]
    return replace(own, selected=selected.expand(len(own.q_positions), -1, -1, -1))


@contextmanager
def _rounded_outputs(model: Decoder, dtype: torch.dtype) -> Iterator[None]:
    """Within the block, what each module without submodules reads and returns is rounded to `dtype`."""

    def rounded(x: object) -> object:
        return x.to(dtype).to(x.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    parts = [part for part in model.modules() if not list(part.children())]
    handles = [part.register_forward_hook(lambda _module, _inputs, output: rounded(output)) for part in parts]
    handles += [part.register_forward_pre_hook(lambda _module, inputs: tuple(map(rounded, inputs))) for part in parts]
    yield
    for handle in handles:
        handle.remove()


def _error(got: Tensor, want: Tensor) -> float:
    """Mean square error relative to the mean square of the output."""
    return float((got.double() - want).square().mean() / want.square().mean())


# A long text: what each part with a state reads is pinned, so that only its own rounding differs.


def low_precision_state(config: ModelConfig) -> None:
    """In bfloat16 a long text decoded token by token errs no more than in one call, and sums in a state are wider.

    Each part with a state reads the same rounded numbers in every model: those of a float64 model. Sums over tokens are
    the numbers of a state that every token changes and that depend on themselves.
    """
    exact = model_under_test(_with_long_table(config), torch.bfloat16).to(torch.float64)
    require_state(exact)
    length = sum(CHUNKS) + STEPS
    narrow = copy.deepcopy(exact).to(torch.bfloat16)
    names = _parts_with_state(new_state(narrow, 1, length))
    if not names:
        raise DoesNotApply("no part has a state")
    tokens = random_tokens(config, 1, length)
    start = 0 if config.embedding.position is not None else FAR
    layout = Layout.causal(1, length, start=start)
    with torch.no_grad(), _record_choices(exact) as choices, _recorded(exact, names) as pinned:
        forward(exact, tokens, layout)
    with torch.no_grad(), _replay_choices(narrow, choices), _pinned(narrow, pinned) as whole:
        forward(narrow, tokens, layout)
    with _replay_choices(narrow, choices), _pinned(narrow, pinned) as decoded:
        state, read = new_state(narrow, 1, length), 0
        for size in CHUNKS:
            first = Layout.causal(1, size, start=start) if not read else None
            _, state = forward_with_state(narrow, state, tokens[:, read : read + size], first)
            read += size
        prefilled = state.fork()
        for token in range(read, length):
            _, state = forward_with_state(narrow, state, tokens[:, token : token + 1])
    for name, (_, want) in pinned.items():
        last = (torch.cat(own[name], 1)[:, -STEPS:] for own in (whole, decoded))
        in_one_call, by_steps = (_typical(_token_errors(own, want[:, -STEPS:])) for own in last)
        bound = min(LONG_BOUND, FACTOR * max(in_one_call, LEAST_ERROR))
        if not by_steps <= bound:
            raise LawViolation(
                f"{name}, the last {STEPS} of {length} tokens: the relative square error is {by_steps:.1e} token by "
                f"token, {in_one_call:.1e} in one call and may be {bound:.0e}; sum up in at least float32"
            )
    with _replay_choices(narrow, choices):
        _check_sums(narrow, prefilled, tokens[:, read : read + SUMMED_STEPS], pinned, read)


def _with_long_table(config: ModelConfig) -> ModelConfig:
    """The design with learned positions for a long text."""
    position, length = config.embedding.position, sum(CHUNKS) + STEPS
    if position is None or length <= getattr(position, "length", length):
        return config
    return config.replace(embedding=config.embedding.replace(position=position.replace(length=length)))


def _parts_with_state(state: State) -> list[str]:
    """The names of mixers and feed-forwards with a state."""
    names: list[str] = []
    for index, layer in enumerate(state.layers):
        mixer = layer.mixer if isinstance(layer, LayerState) else layer
        names += [f"layers.{index}.mixer"] if mixer is not None else []
        names += [f"layers.{index}.feedforward"] if isinstance(layer, LayerState) else []
    return names


Pinned = dict[str, tuple[Tensor, Tensor]]  # of each part: what it reads, and what the float64 model makes of it


@contextmanager
def _recorded(model: Decoder, names: Sequence[str]) -> Iterator[Pinned]:
    """Within the block, of one call, parts read numbers that bfloat16 has, and these and their outputs are kept."""
    pinned: Pinned = {}

    def round_input(_: object, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return inputs[0].to(torch.bfloat16).to(inputs[0].dtype), *inputs[1:]

    def keep(name: str, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> None:
        pinned[name] = inputs[0], output[0]

    parts = [(name, model.get_submodule(name)) for name in names]
    handles = [part.register_forward_pre_hook(round_input) for _, part in parts]
    handles += [part.register_forward_hook(lambda _, *rest, name=name: keep(name, *rest)) for name, part in parts]
    yield pinned
    for handle in handles:
        handle.remove()


@contextmanager
def _pinned(model: Decoder, pinned: Pinned, start: int = 0) -> Iterator[dict[str, list[Tensor]]]:
    """Within the block, parts read the recorded numbers, call after call from a token on; yields their outputs."""
    outputs: dict[str, list[Tensor]] = {name: [] for name in pinned}

    def read(name: str, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        first, length = start + sum(output.shape[1] for output in outputs[name]), inputs[0].shape[1]
        return pinned[name][0][:, first : first + length].to(inputs[0].dtype).expand_as(inputs[0]), *inputs[1:]

    def keep(name: str, output: tuple[Tensor, Any]) -> None:
        outputs[name].append(output[0])

    parts = [(name, model.get_submodule(name)) for name in pinned]
    handles = [part.register_forward_pre_hook(lambda _, args, name=name: read(name, args)) for name, part in parts]
    handles += [part.register_forward_hook(lambda _, _args, y, name=name: keep(name, y)) for name, part in parts]
    yield outputs
    for handle in handles:
        handle.remove()


def _token_errors(got: Tensor, want: Tensor) -> Tensor:
    """The square error at each token, relative to the mean square of the output."""
    got, want = (x.flatten(2).double() for x in (got, want))
    scale = want.square().mean().clamp(min=torch.finfo(torch.float64).tiny)
    return (got - want).square().mean(-1) / scale


def _typical(errors: Tensor) -> float:
    """Their geometric mean. A mean would be that of the few tokens at which a norm magnifies rounding."""
    return float(errors.clamp(min=LEAST_ERROR).log().mean().exp())


def _check_sums(model: Decoder, state: State, tokens: Tensor, pinned: Pinned, start: int) -> None:
    """Refuse sums over tokens that all have at most the bits of bfloat16.

    Rows of one batch read the same tokens, each but the first with another number in one place. A sum is a number that
    every token changes, and that stays another one where it was. A row is about one layer: later ones read its output.
    """
    rows = [name for name in _numbers(state) for _ in range(PLACES)]
    batch = state.select([0] * (1 + len(rows)))
    places = _change_places(batch, rows)
    found = {full: [tensor] for full, tensor in _copies(batch).items()}
    with _pinned(model, pinned, start):
        for token in tokens.T[..., None]:
            _, batch = forward_with_state(model, batch, token.expand(1 + len(rows), 1))
            for full, tensor in _copies(batch).items():
                found[full].append(tensor)
    for full, tensors in found.items():
        sums = [_sums_at(row, place, tensors) for row, place in places[full]]
        values = torch.tensor([value for values in sums for value in values], device="cpu")
        if len(values) and torch.equal(values, values.to(torch.bfloat16).float()):
            raise LawViolation(
                f"{full}: sums over tokens have at most the bits of bfloat16; keep them in at least float32, and round "
                "none of them between two tokens"
            )


def _change_places(batch: State, rows: Sequence[str]) -> dict[str, list[tuple[int, int]]]:
    """Double one number other than zero in each row but the first, in the tensor of its name: (row, place) of each."""
    generator = torch.Generator().manual_seed(5)
    places: dict[str, list[tuple[int, int]]] = {}
    for full, tensor in _numbers(batch).items():
        used = tensor[0].flatten().nonzero()[:, 0].tolist()
        own = [row for row, name in enumerate(rows, start=1) if name == full and used]
        drawn = torch.randint(max(1, len(used)), (len(own),), generator=generator, device="cpu").tolist()
        places[full] = [(row, used[number]) for row, number in zip(own, drawn, strict=True)]
        for row, place in places[full]:
            tensor[row].view(-1)[place] *= 2
    return places


def _sums_at(row: int, place: int, tensors: Sequence[Tensor]) -> list[float]:
    """What a place holds after each token, if it is a sum; tensors: before and after each token."""
    if any(tensor.shape != tensors[0].shape for tensor in tensors):
        return []
    plain, other = ([float(tensor[index].flatten()[place]) for tensor in tensors] for index in (0, row))
    for token, before in enumerate(tensors[:-1], start=1):
        is_moved = bool((before[row] == other[token]).any())  # as in a queue
        if is_moved or plain[token] in (plain[token - 1], other[token]):
            return []
    return plain[1:]


def _copies(state: State) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in _numbers(state).items()}


def _numbers(state: State) -> dict[str, Tensor]:
    """The floating tensors of the layers."""
    return {name: tensor for name, tensor in state.tensors().items() if tensor.is_floating_point()}
