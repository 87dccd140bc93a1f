"""Training, multi-token modules, and building: dropout, gradients, and what defines a model."""

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, TypeVar, get_type_hints

import torch
import yaml
from torch import Tensor

from heddle.config import Config, DesignError, Part, Probability, parse_config
from heddle.laws.harness import (
    ENCODER_LENGTH,
    EXPERT_TOLERANCE,
    DoesNotApply,
    Gradients,
    LawViolation,
    add_gradients,
    assert_bitwise_equal,
    assert_close,
    assert_gradients_close,
    encoder_output_for,
    feedforwards,
    forward,
    forward_no_grad,
    gradients,
    layout_for,
    model_under_test,
    new_state,
    normal_tensor,
    probe_loss,
    random_tokens,
)
from heddle.model.config import ModelConfig, MultiTokenConfig
from heddle.model.decoder import Decoder, build
from heddle.model.initialization import initialize, materialize
from heddle.model.load_config import parse_yaml
from heddle.model.multi_token import Prediction
from heddle.model.size import size
from heddle.numerics.random import RandomKey, use_random_key
from heddle.parts.layout import Layout
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
    if config == plain and not declared:
        raise DoesNotApply("no dropout")


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
    trained = {name: parameter for name, parameter in model.named_parameters() if name in grads}
    directions = {name: normal_tensor(parameter.shape, generator) for name, parameter in trained.items()}
    slopes = {name: float((grads[name] * direction).sum()) for name, direction in directions.items()}

    def otherwise(names: Iterable[str], tolerance: float) -> float | None:
        """The measured slope if it differs from the predicted one."""
        measured, predicted = 0.0, sum(slopes[name] for name in names)
        for step in (1e-7, 1e-6, 1e-8):  # where the loss is curved, a smaller step confirms a right gradient
            measured = _slope(model, tokens, [(trained[name], step * directions[name]) for name in names]) / step
            if abs(measured - predicted) <= tolerance * max(1.0, abs(measured)):
                return None
        return measured

    # All at once, a thousand times closer, as one parameter is a share of the sum; where they differ, each alone.
    if otherwise(trained, 1e-8) is None:
        return
    for name in trained:
        measured = otherwise([name], 1e-5)
        if measured is not None:
            raise LawViolation(
                f"{name}: a small step changes the loss by {measured:.6g}; its gradient predicts {slopes[name]:.6g}"
            )


@torch.no_grad()
def _slope(model: Decoder, tokens: torch.Tensor, steps: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Half the difference of the losses after a step of these parameters forward and one back."""
    before, losses = [parameter.clone() for parameter, _ in steps], []
    for sign in (1, -1):
        for (parameter, step), value in zip(steps, before, strict=True):
            parameter.copy_(value + sign * step)
        losses.append(float(probe_loss(forward(model, tokens))))
    for (parameter, _), value in zip(steps, before, strict=True):
        parameter.copy_(value)
    return (losses[0] - losses[1]) / 2


# Multi-token modules: a design computes the same with and without them, and no module sees what it predicts.


DEPTH = 2
DOCUMENTS = ((5, 1, 4), (3, 7), (2, 6))  # the last row has padding
LENGTH = 10
CHUNKS = (1, 3, 2, 3)  # of the pairs that a state reads


def multi_token_prediction(config: ModelConfig) -> None:
    """A design with multi-token modules has the same hidden states, and a module reads nothing that it predicts.

    At depth d, token t is predicted from states up to t and tokens up to t + d of its document, however rows are
    packed, padded or split into calls. Where a mixer sees later tokens, or the last layer reads keys or values of
    another, the design is refused.
    """
    depth = DEPTH if config.multi_token is None else config.multi_token.depth
    changed = {"multi_token": MultiTokenConfig(depth=depth)}
    try:
        with_modules = config.replace(**changed)
        build(with_modules, device="meta")
    except DesignError as error:
        bare = build(config, device="meta")
        mixer = config.last_layer.mixer
        reads_others = mixer is not None and bool(mixer.reads_kv or mixer.adds_first_values or mixer.shares_bias)
        reads_others |= config.last_layer.reads_tokens
        if not error.path.startswith("multi_token") or not (reads_others or not bare.causal):
            raise LawViolation(f"with multi_token: refused: {error}") from None
        raise DoesNotApply("the design refuses multi-token modules") from None
    model = model_under_test(with_modules)
    if config.multi_token is None:
        _check_main_states(config, model)
    _check_documents(model, depth)
    _check_later_tokens(model, depth)
    _check_state(model)


def _check_main_states(config: ModelConfig, model: Decoder) -> None:
    device = torch.get_default_device()
    plain = build(config, device=device)
    drawn = dict(build(model.config, device=device).named_parameters())
    for name, value in plain.named_parameters():
        if not torch.equal(value, drawn[name]):
            raise LawViolation(f"{name}: has different initial values in a design with multi_token")
    plain = plain.double().eval()
    weights = model.state_dict()
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()})
    tokens = random_tokens(config, 2, LENGTH)
    layout = layout_for(plain, 2, LENGTH)
    with torch.no_grad():
        assert_bitwise_equal(model(tokens, layout)[0], plain(tokens, layout)[0], "hidden states with modules")


@torch.no_grad()
def _predict(model: Decoder, tokens: Tensor, layout: Layout | None = None) -> list[Prediction]:
    layout = layout_for(model, tokens.shape[0], tokens.shape[1], layout)
    return model.predict_ahead(model(tokens, layout)[0], tokens, layout)


def _tolerance(model: Decoder, values: Tensor) -> float:
    has_experts = any(part.expert_info is not None for part in feedforwards(model))
    return EXPERT_TOLERANCE * max(1.0, float(values.abs().max())) if has_experts else 0.0


def _check_documents(model: Decoder, depth: int) -> None:
    """Packed and padded documents are predicted as each one alone."""
    tokens = random_tokens(model.config, len(DOCUMENTS), LENGTH)
    packed = _predict(model, tokens, Layout.packed(DOCUMENTS, LENGTH))
    if len(packed) != min(depth, LENGTH - 1):
        raise LawViolation(f"{len(packed)} depths are predicted instead of {depth}")
    for row, lengths in enumerate(DOCUMENTS):
        start = 0
        for length in lengths:
            alone = _predict(model, tokens[row : row + 1, start : start + length])
            for ahead, (hidden, layout) in enumerate(packed, start=1):
                place = slice(start, min(start + length, LENGTH - ahead))
                count = int((layout.positions[row, place] >= 0).sum())
                if count != max(0, length - ahead):
                    raise LawViolation(f"depth {ahead}: {count} tokens of a document of {length} are predicted")
                if count:
                    own, what = slice(start, start + count), f"depth {ahead}, a packed document of {length} tokens"
                    assert_close(hidden[row : row + 1, own], alone[ahead - 1].hidden, what)
            start += length


def _check_later_tokens(model: Decoder, depth: int) -> None:
    """Changing a token changes the predictions that read it, from `depth` before it on, and no earlier one."""
    tokens, at = random_tokens(model.config, 1, LENGTH), LENGTH - 3
    other = tokens.clone()
    other[0, at] = tokens[0, at] % (model.embed.weight.shape[0] - 1) + 1  # a different token, and not padding
    for ahead, (before, after) in enumerate(zip(_predict(model, tokens), _predict(model, other), strict=True), start=1):
        first = at - ahead  # which reads token first + ahead = at
        if first < 0:
            break
        unaffected, tolerance = slice(0, first), _tolerance(model, before.hidden)
        what = f"depth {ahead}, token {at} was changed"
        assert_close(after.hidden[:, unaffected], before.hidden[:, unaffected], what, tolerance)
        if not bool((after.hidden[:, first] - before.hidden[:, first]).abs().max() > 0.0):
            raise LawViolation(f"depth {ahead}: token {at} does not affect the prediction at token {first}")


@torch.no_grad()
def _check_state(model: Decoder) -> None:
    """The first module with a state, in calls of any length, predicts what it does in one call."""
    tokens = random_tokens(model.config, 2, sum(CHUNKS) + 1)
    layout = layout_for(model, *tokens.shape)
    hidden, _ = model(tokens, layout)
    wanted = model.predict_ahead(hidden, tokens, layout)[0].hidden
    embedding, module = model.embed(tokens, layout), model.multi_token[0]
    state = model.init_draft_state(2, sum(CHUNKS) + 1, encoder_output_for(model, 2))
    got, start = [], 0
    for count in CHUNKS:
        part = slice(start, start + count)
        ahead = embedding[:, start + 1 : start + 1 + count]
        states, state = module(hidden[:, part], ahead, state.table.next_layout(count), state)
        got.append(states)
        start += count
    assert_close(torch.cat(got, dim=1), wanted, f"a module's state in calls of {CHUNKS} tokens")


# Building, writing and sizing: a config and a state dict define a model completely.


def complete_initialization(config: ModelConfig) -> None:
    """A model whose parameters are allocated and then initialized holds no uninitialized value."""
    with torch.device("meta"):
        model = Decoder(config)
    materialize(model, torch.float32, "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    initialize(model, seed=0)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise LawViolation(f"{name}: is on the meta device after the model was allocated")
        if not bool(tensor.isfinite().all()):
            raise LawViolation(f"{name}: is uninitialized")


def seeded_initialization(config: ModelConfig) -> None:
    """Initial weights depend on the seed alone, apart from rounding to the dtype; another seed gives different ones."""
    torch.rand(3)  # whatever was drawn before must not matter
    first = dict(build(config, seed=3).named_parameters())
    again = dict(build(config, seed=3).named_parameters())
    other_seed = dict(build(config, seed=4).named_parameters())
    wide = dict(build(config, dtype=torch.float64, seed=3).named_parameters())
    narrow = dict(build(config, dtype=torch.bfloat16, seed=3).named_parameters())
    for name, value in first.items():
        if not torch.equal(value, again[name]):
            raise LawViolation(f"{name}: differs between two builds with the same seed")
        if not torch.equal(wide[name].float(), value) or not torch.equal(value.to(narrow[name].dtype), narrow[name]):
            raise LawViolation(f"{name}: has different initial values in another dtype")
        spread = value.numel() > 1 and float(value.detach().std()) > 0  # constants are the same for every seed
        if spread and torch.equal(value, other_seed[name]):
            raise LawViolation(f"{name}: is the same for two seeds")
    by_shape: dict[tuple[int, ...], list[tuple[str, Tensor]]] = {}
    for name, value in first.items():
        for earlier, same in by_shape.setdefault(tuple(value.shape), []):
            if value.numel() > 1 and float(value.detach().std()) > 0 and torch.equal(value, same):
                raise LawViolation(f"{name}: has the same initial values as {earlier}")
        by_shape[tuple(value.shape)].append((name, value))


def tied_head(config: ModelConfig) -> None:
    """A tied head shares the embedding's weight, also after a change of dtype; an untied one does not."""
    for model in (build(config), build(config).to(torch.bfloat16)):
        tied = model.head.weight is model.embed.weight
        if tied != config.head.tied:
            raise LawViolation(
                f"the head {'shares' if tied else 'does not share'} the embedding's weight, "
                f"though tied is {config.head.tied}"
            )


def config_round_trip(config: ModelConfig) -> None:
    """A design written as JSON or YAML and read back is equal."""
    plain = config.dump()
    for name, data in (
        ("plain data", plain),
        ("JSON", json.loads(json.dumps(plain))),
        ("YAML", parse_yaml(yaml.safe_dump(plain), "the design")),
    ):
        again = parse_config(ModelConfig, data)
        if again != config:
            raise LawViolation(f"{name}: reads back as {again.dump()} instead of {plain}")


def state_dict_completeness(config: ModelConfig) -> None:
    """A state dict loaded into a model with another seed gives the same bits."""
    model = model_under_test(config)
    other = build(config, dtype=torch.float64, device=torch.get_default_device(), seed=5).eval()
    other.load_state_dict(model.state_dict())
    tokens = random_tokens(config, 2, 7)
    assert_close(
        forward_no_grad(other, tokens),
        forward_no_grad(model, tokens),
        "the same weights in another model",
        tolerance=0.0,
    )


def size_matches_model(config: ModelConfig) -> None:
    """The parameters and state bytes that `size` reports equal the built model's."""
    reported = size(config, context_length=21, batch=2, encoder_length=ENCODER_LENGTH)
    model = build(config, device=torch.get_default_device())
    parameters = sum({id(value): value.numel() for value in model.parameters()}.values())
    if reported.parameters != parameters:
        raise LawViolation(f"{reported.parameters} parameters are reported, {parameters} are built")
    if sum(layer.count for layer in reported.layers) != config.depth:
        raise LawViolation(f"the number of reported layers is not {config.depth}")
    if sum(layer.count for layer in reported.encoder) != (0 if config.encoder is None else config.encoder.depth):
        raise LawViolation("the reported layers of the encoder differ from its design")
    allocated = new_state(model, 2, 21).bytes if model.causal else 0
    if reported.state_bytes != allocated:
        raise LawViolation(f"{reported.state_bytes} bytes of state are reported, {allocated} are allocated")
