"""Multi-token modules: a design computes the same with and without them, and no module sees what it predicts."""

import torch
from torch import Tensor

from heddle.config import DesignError
from heddle.laws.harness import (
    EXPERT_TOLERANCE,
    LawViolation,
    assert_bitwise_equal,
    assert_close,
    encoder_output_for,
    feedforwards,
    layout_for,
    model_under_test,
    random_tokens,
)
from heddle.model.config import ModelConfig, MultiTokenConfig
from heddle.model.decoder import Decoder, build
from heddle.model.multi_token import Prediction
from heddle.parts.layout import Layout

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
        reads_others = mixer is not None and (mixer.reads_kv or mixer.adds_first_values)
        if not error.path.startswith("multi_token") or not (reads_others or not bare.causal):
            raise LawViolation(f"with multi_token: refused: {error}") from None
        return
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
    for size in CHUNKS:
        part = slice(start, start + size)
        ahead = embedding[:, start + 1 : start + 1 + size]
        states, state = module(hidden[:, part], ahead, state.table.next_layout(size), state)
        got.append(states)
        start += size
    assert_close(torch.cat(got, dim=1), wanted, f"a module's state in calls of {CHUNKS} tokens")
