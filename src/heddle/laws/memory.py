"""The memory that cross-attention reads: each row its own, real tokens only, in any order, projected once."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from heddle.laws.subject import (
    POISON,
    Broken,
    advance,
    equal,
    equal_gradients,
    gradients,
    identical,
    loss,
    normal,
    refuses,
    subject,
    text,
    undisturbed,
)
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.parts.context.layout import Layout, Memory

ROWS, LENGTH, TOKENS = 3, 6, 7  # rows, tokens of the memory, tokens of the text
NAN = float("nan")
HOLES = {
    "on the right": [[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]],
    "on the left": [[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]],
    "between": [[1, 0, 1, 1, 0, 1], [0, 1, 0, 1, 1, 1], [0, 0, 1, 0, 0, 0]],
}


def memory(config: ModelConfig) -> None:
    """Each row reads the real tokens of its own memory, in any order, made once; others refuse a memory."""
    model = subject(config)
    tokens = text(config, ROWS, TOKENS)
    if model.memory_width is None:
        _refused(model, tokens)
        return
    generator = torch.Generator().manual_seed(6)
    keys, values = (normal((ROWS, LENGTH, model.memory_width), generator) for _ in range(2))
    for held in (Memory(keys), Memory(keys, values)):
        _own_rows(model, tokens, held)
        _any_order(model, tokens, held)
        for side, holes in HOLES.items():
            _padded(model, tokens, held, torch.tensor(holes) > 0, f"a memory padded {side}")
        _reached(model, tokens, held)
    _both_sequences(model, tokens, keys, values)
    _nothing_to_read(model, tokens, keys)
    _wrong(model, tokens, keys)
    _encoded(model, tokens)


def _read(model: Decoder, tokens: Tensor, held: Memory) -> Tensor:
    with torch.no_grad():
        hidden, _ = model(tokens, Layout.causal(*tokens.shape).with_memory(held))
    assert isinstance(hidden, Tensor)
    return hidden


def _some(held: Memory, change: Callable[[Tensor], Tensor]) -> Memory:
    """The memory with each of its tensors changed."""
    keys, values, real = (None if x is None else change(x) for x in (held.keys, held.values, held.real))
    assert keys is not None
    return Memory(keys, values, real)


def _row(held: Memory, row: int, real: Tensor | slice = slice(None)) -> Memory:
    return _some(held, lambda x: x[row : row + 1, real])


def _filled(held: Memory, real: Tensor, filler: float) -> Memory:
    """The memory with a number as its padding."""
    filled = _some(held, lambda x: x.masked_fill(~real[..., None], filler))
    return Memory(filled.keys, filled.values, real)


def _of(given: list[Tensor], real: Tensor) -> Memory:
    """A memory of one sequence, or of keys and values."""
    return Memory(given[0], given[1] if len(given) > 1 else None, real)


def _own_rows(model: Decoder, tokens: Tensor, held: Memory) -> None:
    whole = _read(model, tokens, held)
    for row in range(ROWS):
        alone = _read(model, tokens[row : row + 1], _row(held, row))
        equal(whole[row : row + 1], alone, f"row {row} and its memory, against both alone")
    other = torch.tensor([1.0, 1.0, NAN], dtype=torch.float64)[:, None, None]
    changed = _read(model, tokens, _some(held, lambda x: x * other))
    undisturbed(model, changed[:2], whole[:2], "the memory of row 2 is NaN")
    if bool(changed[2].isfinite().all()):
        raise Broken("row 2 does not read its memory: NaN in it changes nothing")


def _any_order(model: Decoder, tokens: Tensor, held: Memory) -> None:
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    moved = _read(model, tokens, _some(held, lambda x: x[:, order]))
    equal(moved, _read(model, tokens, held), "the memory's tokens in another order")


def _padded(model: Decoder, tokens: Tensor, held: Memory, real: Tensor, what: str) -> None:
    """As the real tokens alone, in one call and with a state, whatever the padding holds; gradients too."""
    found = []
    for filler in (0.0, NAN):
        beside = _filled(held, real, filler)
        hidden, _ = model(tokens, Layout.causal(*tokens.shape).with_memory(beside))
        steps = _in_steps(model, tokens, beside)
        equal(steps, hidden.detach(), f"{what}, the state made of it")
        found.append((torch.cat((hidden.detach(), steps), dim=1), gradients(model, loss(hidden))))
    identical(found[1][0], found[0][0], f"NaN in {what}")
    equal_gradients(found[1][1], found[0][1], f"NaN in {what}", tolerance=0.0)
    for row in range(ROWS):
        want = _read(model, tokens[row : row + 1], _row(held, row, real[row]))
        equal(found[0][0][row : row + 1, :TOKENS], want, f"row {row} of {what}, against its real tokens alone")


def _in_steps(model: Decoder, tokens: Tensor, held: Memory) -> Tensor:
    """With a state, whose memory is overwritten once it is made; in one call where no state can be kept."""
    if not model.causal:
        return _read(model, tokens, held)
    own = _some(held, lambda x: x.clone())
    state = model.init_state(ROWS, TOKENS, own)
    for tensor in (own.keys, own.values, own.real):
        if tensor is not None:
            tensor.fill_(0 if tensor.dtype == torch.bool else NAN)
    out = []
    for chunk in tokens.split([3, 1, 1, TOKENS - 5], dim=1):
        hidden, state = advance(model, state, chunk)
        out.append(hidden)
    return torch.cat(out, dim=1)


def _reached(model: Decoder, tokens: Tensor, held: Memory) -> None:
    """The gradient of each real token of a memory is that of the answer; padding has none."""
    real = torch.tensor([[1, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 1]]) > 0  # one alone has weight 1
    given = [x for x in (held.keys, held.values) if x is not None]
    leaves = [x.clone().requires_grad_() for x in given]
    layout = Layout.causal(*tokens.shape)
    hidden, _ = model(tokens, layout.with_memory(_of(leaves, real)))
    found = torch.autograd.grad(loss(hidden), leaves, allow_unused=True, materialize_grads=True)
    for number, gradient in enumerate(found):
        if not torch.equal(gradient.abs().amax(-1) > 0, real):
            raise Broken(f"the gradient of the memory's {('keys', 'values')[number]} is not that of its real tokens")
    generator, step = torch.Generator().manual_seed(8), 1e-6
    directions = [normal(x.shape, generator) for x in given]
    predicted = sum(float((gradient * way).sum()) for gradient, way in zip(found, directions, strict=True))
    ends = []
    for sign in (1, -1):
        moved = [x + sign * step * way for x, way in zip(given, directions, strict=True)]
        ends.append(float(loss(_read(model, tokens, _of(moved, real)))))
    measured = (ends[0] - ends[1]) / (2 * step)
    if not abs(measured - predicted) <= 1e-5 * max(1.0, abs(measured)):
        raise Broken(
            f"a small step of the memory changes the loss by {measured:.6g}, its gradient says {predicted:.6g}"
        )


def _both_sequences(model: Decoder, tokens: Tensor, keys: Tensor, values: Tensor) -> None:
    """Keys are made of one sequence, values of the other."""
    one = _read(model, tokens, Memory(keys))
    identical(_read(model, tokens, Memory(keys, keys)), one, "values given as the very keys")
    for name, other in {"keys": Memory(values, keys), "values": Memory(keys, values)}.items():
        if bool((_read(model, tokens, other) - one).abs().amax(-1).min() < 1e-9):
            raise Broken(f"other {name} of the memory change nothing")


def _nothing_to_read(model: Decoder, tokens: Tensor, keys: Tensor) -> None:
    """A memory of padding alone is one without tokens, and keeps the other rows as they were."""
    real = torch.tensor([[1] * LENGTH, [0] * LENGTH, [1] * LENGTH]) > 0
    filled = _filled(Memory(keys), real, NAN)
    some, none = _read(model, tokens, filled), _read(model, tokens, Memory(keys[:, :0]))
    equal(some[1:2], none[1:2], "a row whose memory is all padding, against one without tokens")
    equal(some[::2], _read(model, tokens, Memory(keys))[::2], "rows beside one whose memory is all padding")
    if model.causal:
        equal(_in_steps(model, tokens, filled), some, "a row whose memory is all padding, with a state")
        equal(_in_steps(model, tokens, Memory(keys[:, :0])), none, "memories without tokens, with a state")


def _wrong(model: Decoder, tokens: Tensor, keys: Tensor) -> None:
    """No memory, another width, other rows, and a second memory beside a state's are refused."""
    wrong = {
        "is missing": None,
        "keys are": Memory(keys[..., :-1].repeat(1, 1, 2)),
        "values are": Memory(keys, keys.repeat(1, 1, 2)),
        "has 2 rows": Memory(keys[:2]),
    }
    layout = Layout.causal(*tokens.shape)
    for words, held in wrong.items():
        beside = layout if held is None else layout.with_memory(held)
        refuses(partial(model, tokens, beside), f"memory: {words}", f"a call was taken whose memory {words}")
        if model.causal:
            make = partial(model.init_state, ROWS, TOKENS, held)
            refuses(make, f"memory: {words}", f"a state was made of what {words}")
    if model.causal:
        state = model.init_state(ROWS, TOKENS, Memory(keys))
        again = partial(advance, model, state, tokens, layout.with_memory(Memory(keys)))
        refuses(again, "memory: the state holds its own", "a call with a second memory")


def _encoded(model: Decoder, tokens: Tensor) -> None:
    """An encoder makes the same memory of a padded source as of its tokens alone, and marks the padding."""
    if model.encoder is None:
        refuses(lambda: model.encode(tokens), "encoder: this design has none", "a design without an encoder encoded")
        return
    source, lengths = text(model.encoder.config, ROWS, LENGTH), [LENGTH, 2, 1]
    alone = [_read(model, tokens[i : i + 1], model.encode(source[i : i + 1, :n])) for i, n in enumerate(lengths)]
    for side in ("left", "right"):
        layout = Layout.padded(lengths, side=side)
        padded = torch.where(layout.positions >= 0, source.gather(1, layout.positions.clamp(min=0)), POISON)
        found = _read(model, tokens, model.encode(padded, layout))
        equal(found, torch.cat(alone), f"sources padded on the {side}, against each alone")
        with torch.no_grad():
            before = model.encoder.embed.weight[POISON].clone()
            model.encoder.embed.weight[POISON] = NAN
            identical(_read(model, tokens, model.encode(padded, layout)), found, f"NaN in sources padded on the {side}")
            model.encoder.embed.weight[POISON] = before
    packed = Layout.packed([[2, LENGTH - 2]] * ROWS)
    refuses(lambda: model.encode(source, packed), "source: packed documents", "a packed source was encoded")


def _refused(model: Decoder, tokens: Tensor) -> None:
    """A design that reads no memory refuses one."""
    held = Memory(torch.zeros(ROWS, LENGTH, model.config.width, dtype=torch.float64))
    layout = Layout.causal(*tokens.shape).with_memory(held)
    words = "memory: no layer of this design reads one"
    refuses(lambda: model(tokens, layout), words, "a memory that nothing reads was taken")
    if model.causal:
        refuses(lambda: model.init_state(ROWS, TOKENS, held), words, "a state took a memory that nothing reads")
