"""Cross-attention: each row reads the tokens of its own encoder output, in any order, projected once per state."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from heddle.laws.harness import (
    PADDING_TOKEN,
    DoesNotApply,
    LawViolation,
    assert_bitwise_equal,
    assert_close,
    assert_gradients_close,
    assert_refused,
    assert_unaffected,
    forward_with_state,
    gradients,
    model_under_test,
    normal_tensor,
    probe_loss,
    random_tokens,
)
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.parts.layout import EncoderOutput, Layout

ROWS, LENGTH, TOKENS = 3, 6, 7  # rows, tokens of the encoder output, tokens of the decoder
NAN = float("nan")
MASKS = {
    "on the right": [[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]],
    "on the left": [[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]],
    "between": [[1, 0, 1, 1, 0, 1], [0, 1, 0, 1, 1, 1], [0, 0, 1, 0, 0, 0]],
}


def cross_attention(config: ModelConfig) -> None:
    """Each row reads the tokens of its own encoder output, in any order; other designs refuse an encoder output."""
    model = model_under_test(config)
    tokens = random_tokens(config, ROWS, TOKENS)
    if model.encoder_width is None:
        _refused(model, tokens)
        raise DoesNotApply("no cross-attention")
    generator = torch.Generator().manual_seed(6)
    keys, values = (normal_tensor((ROWS, LENGTH, model.encoder_width), generator) for _ in range(2))
    for encoder_output in (EncoderOutput(keys), EncoderOutput(keys, values)):
        _own_rows(model, tokens, encoder_output)
        _any_order(model, tokens, encoder_output)
        for side, mask in MASKS.items():
            _padded(model, tokens, encoder_output, torch.tensor(mask) > 0, f"an encoder output padded {side}")
        _gradient_reaches_tokens(model, tokens, encoder_output)
    _both_sequences(model, tokens, keys, values)
    _nothing_to_read(model, tokens, keys)
    _wrong(model, tokens, keys)
    _encoded(model, tokens)


def _hidden_states(model: Decoder, tokens: Tensor, encoder_output: EncoderOutput) -> Tensor:
    with torch.no_grad():
        hidden, _ = model(tokens, Layout.causal(*tokens.shape).with_encoder_output(encoder_output))
    assert isinstance(hidden, Tensor)
    return hidden


def _map_tensors(encoder_output: EncoderOutput, change: Callable[[Tensor], Tensor]) -> EncoderOutput:
    """The encoder output with each of its tensors changed."""
    keys, values, is_token = (
        None if x is None else change(x) for x in (encoder_output.keys, encoder_output.values, encoder_output.is_token)
    )
    assert keys is not None
    return EncoderOutput(keys, values, is_token)


def _select_row(encoder_output: EncoderOutput, row: int, tokens: Tensor | slice = slice(None)) -> EncoderOutput:
    return _map_tensors(encoder_output, lambda x: x[row : row + 1, tokens])


def _with_padding(encoder_output: EncoderOutput, is_token: Tensor, filler: float) -> EncoderOutput:
    """The encoder output with padding of this value."""
    filled = _map_tensors(encoder_output, lambda x: x.masked_fill(~is_token[..., None], filler))
    return EncoderOutput(filled.keys, filled.values, is_token)


def _make_encoder_output(tensors: list[Tensor], is_token: Tensor) -> EncoderOutput:
    """An encoder output of one tensor, or of one for keys and one for values."""
    return EncoderOutput(tensors[0], tensors[1] if len(tensors) > 1 else None, is_token)


def _own_rows(model: Decoder, tokens: Tensor, encoder_output: EncoderOutput) -> None:
    batch = _hidden_states(model, tokens, encoder_output)
    for row in range(ROWS):
        alone = _hidden_states(model, tokens[row : row + 1], _select_row(encoder_output, row))
        assert_close(batch[row : row + 1], alone, f"row {row} and its encoder output, against both alone")
    poison = torch.tensor([1.0, 1.0, NAN], dtype=torch.float64)[:, None, None]
    changed = _hidden_states(model, tokens, _map_tensors(encoder_output, lambda x: x * poison))
    assert_unaffected(model, changed[:2], batch[:2], "the encoder output of row 2 is NaN")
    if bool(changed[2].isfinite().all()):
        raise LawViolation("row 2 does not read its encoder output: NaN in it changes nothing")


def _any_order(model: Decoder, tokens: Tensor, encoder_output: EncoderOutput) -> None:
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    moved = _hidden_states(model, tokens, _map_tensors(encoder_output, lambda x: x[:, order]))
    assert_close(moved, _hidden_states(model, tokens, encoder_output), "tokens of the encoder output in another order")


def _padded(model: Decoder, tokens: Tensor, encoder_output: EncoderOutput, is_token: Tensor, what: str) -> None:
    """Padding gives the result of the tokens alone, in one call and with a state, whatever values it holds.

    Gradients are compared too.
    """
    results = []
    for filler in (0.0, NAN):
        padded = _with_padding(encoder_output, is_token, filler)
        hidden, _ = model(tokens, Layout.causal(*tokens.shape).with_encoder_output(padded))
        steps = _in_steps(model, tokens, padded)
        assert_close(steps, hidden.detach(), f"{what}, the state made of it")
        results.append((torch.cat((hidden.detach(), steps), dim=1), gradients(model, probe_loss(hidden))))
    assert_bitwise_equal(results[1][0], results[0][0], f"NaN in {what}")
    assert_gradients_close(results[1][1], results[0][1], f"NaN in {what}", tolerance=0.0)
    for row in range(ROWS):
        want = _hidden_states(model, tokens[row : row + 1], _select_row(encoder_output, row, is_token[row]))
        assert_close(results[0][0][row : row + 1, :TOKENS], want, f"row {row} of {what}, against its tokens alone")


def _in_steps(model: Decoder, tokens: Tensor, encoder_output: EncoderOutput) -> Tensor:
    """Hidden states computed with a state; the encoder output is overwritten once the state exists.

    One call without a state for a bidirectional design.
    """
    if not model.causal:
        return _hidden_states(model, tokens, encoder_output)
    copy = _map_tensors(encoder_output, lambda x: x.clone())
    state = model.init_state(ROWS, TOKENS, copy)
    for tensor in (copy.keys, copy.values, copy.is_token):
        if tensor is not None:
            tensor.fill_(0 if tensor.dtype == torch.bool else NAN)
    out = []
    for chunk in tokens.split([3, 1, 1, TOKENS - 5], dim=1):
        hidden, state = forward_with_state(model, state, chunk)
        out.append(hidden)
    return torch.cat(out, dim=1)


def _gradient_reaches_tokens(model: Decoder, tokens: Tensor, encoder_output: EncoderOutput) -> None:
    """The gradient of each token of the encoder output is correct; padding has none."""
    is_token = torch.tensor([[1, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 1]]) > 0  # one alone has weight 1
    tensors = [x for x in (encoder_output.keys, encoder_output.values) if x is not None]
    leaves = [x.clone().requires_grad_() for x in tensors]
    layout = Layout.causal(*tokens.shape)
    hidden, _ = model(tokens, layout.with_encoder_output(_make_encoder_output(leaves, is_token)))
    grads = torch.autograd.grad(probe_loss(hidden), leaves, allow_unused=True, materialize_grads=True)
    for number, gradient in enumerate(grads):
        if not torch.equal(gradient.abs().amax(-1) > 0, is_token):
            raise LawViolation(
                f"the gradient of the encoder output's {('keys', 'values')[number]} does not reach exactly its tokens"
            )
    generator, step = torch.Generator().manual_seed(8), 1e-6
    directions = [normal_tensor(x.shape, generator) for x in tensors]
    predicted = sum(float((gradient * way).sum()) for gradient, way in zip(grads, directions, strict=True))
    losses = []
    for sign in (1, -1):
        moved = [x + sign * step * way for x, way in zip(tensors, directions, strict=True)]
        losses.append(float(probe_loss(_hidden_states(model, tokens, _make_encoder_output(moved, is_token)))))
    measured = (losses[0] - losses[1]) / (2 * step)
    if not abs(measured - predicted) <= 1e-5 * max(1.0, abs(measured)):
        raise LawViolation(
            f"a step of the encoder output changes the loss by {measured:.6g}, its gradient predicts {predicted:.6g}"
        )


def _both_sequences(model: Decoder, tokens: Tensor, keys: Tensor, values: Tensor) -> None:
    """Keys come from one sequence, values from another."""
    same = _hidden_states(model, tokens, EncoderOutput(keys))
    assert_bitwise_equal(
        _hidden_states(model, tokens, EncoderOutput(keys, keys)), same, "the keys passed as values, too"
    )
    for name, changed in {"keys": EncoderOutput(values, keys), "values": EncoderOutput(keys, values)}.items():
        if bool((_hidden_states(model, tokens, changed) - same).abs().amax(-1).min() < 1e-9):
            raise LawViolation(f"changing the encoder output's {name} changes nothing")


def _nothing_to_read(model: Decoder, tokens: Tensor, keys: Tensor) -> None:
    """An encoder output of padding alone acts like one without tokens, and leaves other rows unchanged."""
    is_token = torch.tensor([[1] * LENGTH, [0] * LENGTH, [1] * LENGTH]) > 0
    padded = _with_padding(EncoderOutput(keys), is_token, NAN)
    some, none = _hidden_states(model, tokens, padded), _hidden_states(model, tokens, EncoderOutput(keys[:, :0]))
    assert_close(some[1:2], none[1:2], "a row whose encoder output is all padding, against one without tokens")
    assert_close(
        some[::2],
        _hidden_states(model, tokens, EncoderOutput(keys))[::2],
        "rows next to one whose encoder output is all padding",
    )
    if model.causal:
        assert_close(_in_steps(model, tokens, padded), some, "a row whose encoder output is all padding, with a state")
        assert_close(
            _in_steps(model, tokens, EncoderOutput(keys[:, :0])), none, "encoder outputs without tokens, with a state"
        )


def _wrong(model: Decoder, tokens: Tensor, keys: Tensor) -> None:
    """A missing encoder output, another width, other rows, and a second one beside the state's are refused."""
    wrong = {
        "is missing": None,
        "keys are": EncoderOutput(keys[..., :-1].repeat(1, 1, 2)),
        "values are": EncoderOutput(keys, keys.repeat(1, 1, 2)),
        "has 2 rows": EncoderOutput(keys[:2]),
    }
    layout = Layout.causal(*tokens.shape)
    for words, encoder_output in wrong.items():
        call_layout = layout if encoder_output is None else layout.with_encoder_output(encoder_output)
        assert_refused(
            partial(model, tokens, call_layout),
            f"encoder_output: {words}",
            f"accepted a call whose encoder output {words}",
        )
        if model.causal:
            make = partial(model.init_state, ROWS, TOKENS, encoder_output)
            assert_refused(make, f"encoder_output: {words}", f"made a state whose encoder output {words}")
    if model.causal:
        state = model.init_state(ROWS, TOKENS, EncoderOutput(keys))
        again = partial(forward_with_state, model, state, tokens, layout.with_encoder_output(EncoderOutput(keys)))
        assert_refused(again, "encoder_output: the state already has one", "accepted a second encoder output")


@torch.no_grad()  # with gradients another kernel may run, which rounds differently
def _encoded(model: Decoder, tokens: Tensor) -> None:
    """The encoder computes the same output from a padded source as from its tokens alone, and marks the padding."""
    if model.encoder is None:
        assert_refused(
            lambda: model.encode(tokens), "encoder: this design has none", "a design without an encoder encoded"
        )
        return
    source, lengths = random_tokens(model.encoder.config, ROWS, LENGTH), [LENGTH, 2, 1]
    alone = [
        _hidden_states(model, tokens[i : i + 1], model.encode(source[i : i + 1, :n])) for i, n in enumerate(lengths)
    ]
    for side in ("left", "right"):
        layout = Layout.padded(lengths, side=side)
        padded = torch.where(layout.positions >= 0, source.gather(1, layout.positions.clamp(min=0)), PADDING_TOKEN)
        batch = _hidden_states(model, tokens, model.encode(padded, layout))
        assert_close(batch, torch.cat(alone), f"sources padded on the {side}, against each alone")
        before = model.encoder.embed.weight[PADDING_TOKEN].clone()
        model.encoder.embed.weight[PADDING_TOKEN] = NAN
        assert_bitwise_equal(
            _hidden_states(model, tokens, model.encode(padded, layout)), batch, f"NaN in sources padded on the {side}"
        )
        model.encoder.embed.weight[PADDING_TOKEN] = before
    packed = Layout.packed([[2, LENGTH - 2]] * ROWS)
    assert_refused(lambda: model.encode(source, packed), "source: packed documents", "a packed source was encoded")


def _refused(model: Decoder, tokens: Tensor) -> None:
    """A design without cross-attention refuses an encoder output."""
    encoder_output = EncoderOutput(torch.zeros(ROWS, LENGTH, model.config.width, dtype=torch.float64))
    layout = Layout.causal(*tokens.shape).with_encoder_output(encoder_output)
    words = "encoder_output: no layer of this design reads one"
    assert_refused(lambda: model(tokens, layout), words, "an encoder output that nothing reads was accepted")
    if model.causal:
        assert_refused(
            lambda: model.init_state(ROWS, TOKENS, encoder_output),
            words,
            "a state accepted an encoder output that nothing reads",
        )
