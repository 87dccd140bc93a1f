"""Dependencies: no token depends on a later one, and each depends on exactly its declared window."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from heddle.config import Config
from heddle.laws.harness import (
    DoesNotApply,
    LawViolation,
    assert_bitwise_equal,
    assert_unaffected,
    forward,
    forward_no_grad,
    layout_for,
    model_under_test,
    normal_tensor,
    random_tokens,
    windows,
)
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, Layer
from heddle.numerics.attention.observer import Observation, observing_attention
from heddle.parts.feedforwards import Feedforward
from heddle.parts.layout import HandedOver, Layout
from heddle.parts.mixers import Mixer
from heddle.parts.mixers.pair import Pair
from heddle.parts.modules.indexer import IndexerConfig
from heddle.parts.modules.short_convolution import ShortConvolutions
from heddle.parts.residuals.parallel import ParallelConfig

C = TypeVar("C", bound=Config)
MAX_DRAWS = 256  # of inputs, until every declared dependence is seen
InputAndOutput = tuple[Tensor, Tensor]


def causality(config: ModelConfig) -> None:
    """Changing later tokens changes no bit of earlier ones; in a bidirectional design it must change some."""
    model = model_under_test(config)
    length, vocabulary = 13, model.embed.weight.shape[0]
    tokens, others = random_tokens(config, 2, length), random_tokens(config, 2, length, seed=1)
    sees = _reach(model, length)
    layouts = {"one document": None, "packed documents": Layout.packed([[5, 8], [12, 1]])}
    for name, layout in layouts.items():
        before = forward_no_grad(model, tokens, layout)
        for start in (1, 6, length - 1):
            changed = torch.cat((tokens[:, :start], others[:, start:]), dim=1)
            changed[:, start] = tokens[:, start] % (vocabulary - 1) + 1  # always a different one
            after = forward_no_grad(model, changed, layout)
            if model.causal:
                assert_unaffected(
                    model, after[:, :start], before[:, :start], f"{name}, tokens from {start} on were changed"
                )
            elif layout is None and sees[start - 1, start] and not _sees_next(model, tokens, start - 1):
                raise LawViolation(f"a bidirectional design: token {start - 1} does not see token {start}")


def _sees_next(model: Decoder, tokens: Tensor, query: int) -> bool:
    """Whether changing the token after the query changes its output; a key that is not selected may hide this."""
    before, vocabulary = forward_no_grad(model, tokens), model.embed.weight.shape[0]
    for step in range(1, MAX_DRAWS):
        changed = tokens.clone()
        changed[:, query + 1] = (tokens[:, query + 1] + step) % vocabulary
        if not torch.equal(forward_no_grad(model, changed)[:, query], before[:, query]):
            return True
    return False


def document_isolation(config: ModelConfig) -> None:
    """Changing the tokens of one packed document changes no bit of another document."""
    model = model_under_test(config)
    tokens, others = random_tokens(config, 1, 12), random_tokens(config, 1, 12, seed=1)
    layout = Layout.packed([[4, 5, 3]])
    before = forward_no_grad(model, tokens, layout)
    for first, last in ((0, 4), (4, 9), (9, 12)):
        changed = tokens.clone()
        changed[:, first:last] = others[:, first:last]
        after = forward_no_grad(model, changed, layout)
        outside = torch.ones(12, dtype=torch.bool)
        outside[first:last] = False
        assert_unaffected(model, after[:, outside], before[:, outside], f"tokens {first} to {last - 1} were changed")


def receptive_field(config: ModelConfig) -> None:
    """The gradient of a token reaches exactly the tokens that its mixers declare, per layer and in the whole model."""
    model = model_under_test(config)
    length = max([2 * w + 3 for w in windows(model)] + [9])
    layout = layout_for(model, 1, length)
    for index, mixer in enumerate(model.mixers()):
        if mixer is not None:
            _check_support(partial(_part_call, model, mixer, layout), _mixer_reach(mixer, length), f"layer {index}")
    for index, layer in enumerate(model.layers):
        feedforward = layer.feedforward if isinstance(layer, Layer) else None
        if feedforward is not None and feedforward.window > 1:
            reach, what = _feedforward_reach(feedforward, length), f"the feed-forward of layer {index}"
            _check_support(partial(_part_call, model, feedforward, layout), reach, what)
    _check_support(partial(_model_call, model, layout), _reach(model, length), "the whole model")


def selected_keys(config: ModelConfig) -> None:
    """With an indexer, a token attends to `top_k` of the tokens, or blocks, that its mask shows, or to all of fewer.

    Of a block it attends to every visible token. The `local` and `first` blocks are among them; with `pool` so many
    finished ones are, beside all others. Heads that share a selection attend to the same tokens. A sequence of at most
    `top_k` tokens has the bits of the design without the indexer.
    """
    model = model_under_test(config)
    indexed: list[Any] = [module for module in model.layers.modules() if getattr(module, "indexer", None) is not None]
    if not indexed:
        raise DoesNotApply("no indexer")
    layout, running = Layout.packed([[5, 8], [13]]), list[Any]()

    def check(observation: Observation) -> None:
        if not running:
            return
        mixer = running[-1]
        chunked = getattr(mixer, "chunked", False)
        visible = layout.attention_mask(mixer.window, mixer.causal, chunked).materialize()[:, None]
        shares, choice = mixer.indexer.selections or mixer.heads, mixer.indexer.selector.choice
        shares = getattr(mixer, "kv_heads", shares) if choice.score == "attention" else shares
        attended = (observation.weights > 0).unflatten(1, (shares, -1)).any(2)
        if bool((attended & ~visible).any()):
            raise LawViolation("a token attends to a masked token")
        number = layout.positions // mixer.indexer.block
        same_block = (number[:, :, None] == number[:, None]).double()  # other documents are not visible
        counts = [shown.double() @ same_block[:, None] for shown in (attended, visible.expand_as(attended))]
        if bool((attended & (counts[0] != counts[1])).any()):
            raise LawViolation("a token attends to a part of a block")
        share_of_block = torch.where(counts[1] > 0, 1 / counts[1].clamp(min=1), 0.0)
        scored = counts[1] == mixer.indexer.block if mixer.indexer.pool else torch.ones_like(attended)
        if bool((visible & ~scored & ~attended).any()):
            raise LawViolation("a token does not attend to a block that is not finished")
        attended_blocks, visible_blocks = (
            ((shown * share_of_block).sum(-1)).round() for shown in (attended & scored, visible & scored)
        )
        if not torch.equal(attended_blocks, visible_blocks.clamp(max=choice.top_k)):
            raise LawViolation("the number of tokens, or of blocks, that a token attends to is not top_k")
        near = (number[:, :, None] - number[:, None]).abs() < choice.local
        always = near | (number < choice.first)[:, None]
        if bool((always[:, None] & visible & ~attended).any()):
            raise LawViolation("a token does not attend to a local block, or to a first one")

    handles = [mixer.register_forward_pre_hook(lambda mixer, _: running.append(mixer)) for mixer in indexed]
    handles += [mixer.register_forward_hook(lambda *_: running.clear()) for mixer in indexed]
    try:
        with observing_attention(check):
            forward_no_grad(model, random_tokens(config, 2, 13), layout)
    finally:
        for handle in handles:
            handle.remove()
    tokens = random_tokens(config, 2, min(mixer.indexer.selector.choice.top_k for mixer in indexed))
    dense = model_under_test(_without_indexers(config))
    dense.load_state_dict({name: value for name, value in model.state_dict().items() if ".indexer." not in name})
    assert_bitwise_equal(
        forward_no_grad(model, tokens), forward_no_grad(dense, tokens), "top_k tokens, with and without the indexer"
    )


def _without_indexers(config: C) -> C:
    """The design whose mixers have no indexer."""
    changed: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, IndexerConfig):
            changed[name] = None
        elif name == "shared_index":
            changed[name] = False
        elif isinstance(value, Config):
            changed[name] = _without_indexers(value)
        elif isinstance(value, tuple):
            changed[name] = tuple(_without_indexers(item) if isinstance(item, Config) else item for item in value)
    return config.replace(**changed)


def _part_call(model: Decoder, part: Mixer | Feedforward, layout: Layout, draw: int) -> InputAndOutput:
    """Random inputs of a mixer or a feed-forward, and its outputs. draw: the seed of the inputs."""
    generator = torch.Generator().manual_seed(2 + draw)
    inner = (part.streams,) if isinstance(part, Feedforward) and part.streams is not None else ()
    x = normal_tensor((1, layout.positions.shape[1], *inner, model.config.width), generator).requires_grad_()
    layout = replace(layout, handed_over=HandedOver())
    assert layout.handed_over is not None
    layout.handed_over.tokens = torch.full(layout.positions.shape, draw)
    if isinstance(part, Mixer):
        return x, _after_sources(model, part, x, layout)
    y, _ = part(x, layout)
    return x, y


def _after_sources(model: Decoder, mixer: Mixer, x: Tensor, layout: Layout) -> Tensor:
    """A mixer's outputs after running, on the same inputs, the layers whose keys, values or tables it reads."""
    for number in (mixer.value_source, mixer.kv_source, mixer.table_source, mixer.bias_source):
        source = None if number is None else model.mixers()[number]
        if source is not None:
            _after_sources(model, source, x, layout)
    y: Tensor = mixer(x, layout)[0]
    return y


def _model_call(model: Decoder, layout: Layout, draw: int) -> InputAndOutput:
    """The embeddings of random tokens, and the model's outputs."""
    embedded: list[Tensor] = []

    def catch(_module: object, _inputs: object, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0]

    handle = model.embed.register_forward_hook(catch)
    hidden = forward(model, random_tokens(model.config, 1, layout.positions.shape[1], seed=draw), layout)
    handle.remove()
    return embedded[0], hidden


def _band(length: int, back: int | None, ahead: int | None = 0) -> Tensor:
    """bool [T, T]: the tokens within so many back and ahead of each token, itself included; None: all."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return (distance <= (length if back is None else back)) & (-distance <= (length if ahead is None else ahead))


def _after(second: Tensor, first: Tensor) -> Tensor:
    """What a token depends on through `first`, then `second`: both bool [T, T]."""
    return (second.double() @ first.double()) > 0


def _mixer_reach(mixer: Mixer | None, length: int) -> Tensor:
    """bool [T, T]: which tokens each token depends on through a mixer, of a text from position 0."""
    if mixer is None:
        return _band(length, 0)
    window, earlier = mixer.window, mixer.beyond_window
    back = None if window is None else window + earlier - (1 if mixer.causal else 0)
    within = _band(length, back, 0 if mixer.causal else window)
    if isinstance(mixer, Pair):  # one of the two may have chunks
        return within & (_mixer_reach(mixer.first, length) | _mixer_reach(mixer.second, length))
    if not mixer.chunked or window is None:
        return within
    chunk = torch.arange(length) // window
    reach = _band(length, None, 0 if mixer.causal else None) & (chunk[:, None] == chunk)
    convolutions: ShortConvolutions | None = getattr(mixer, "convolutions", None)
    if convolutions is None:
        return reach
    reads = [_band(length, convolutions.kernel - 1 if name in convolutions else 0) for name in ("q", "k", "v")]
    return reads[0] | _after(reach, reads[1] | reads[2])


def _feedforward_reach(feedforward: Feedforward, length: int) -> Tensor:
    """bool [T, T]: which tokens each token depends on through the input of a feed-forward."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return _band(length, feedforward.window - 1) & (distance % feedforward.dilation == 0)


def _reach(model: Decoder, length: int) -> Tensor:
    """The same through the whole model."""
    reach = _band(length, 0)
    for layer in model.layers:
        if isinstance(layer, Layer):
            reach = _after(_layer_reach(layer, model, length), reach)
    return reach


def _layer_reach(layer: Layer, model: Decoder, length: int) -> Tensor:
    """The same through a layer, with its branches in sequence or in parallel."""
    first = _after(_mixer_reach(layer.mixer, length), _band(length, _earlier(layer.mixer_convolution)))
    second = _band(length, _earlier(layer.feedforward_convolution))
    if layer.feedforward is not None:
        second = _after(_feedforward_reach(layer.feedforward, length), second)
    return first | second if isinstance(model.config.residual, ParallelConfig) else _after(second, first)


def _earlier(convolutions: ShortConvolutions | None) -> int:
    """How many earlier tokens short convolutions read."""
    return 0 if convolutions is None else convolutions.kernel - 1


def _check_support(call: Callable[[int], InputAndOutput], declared: Tensor, what: str) -> None:
    """Compare the tokens that a gradient reaches with the declared ones, bool [T, T].

    A feature that is zero (relu's) or a key that is not selected hides a dependence, so dependences that one draw does
    not show are looked for in others.
    """
    missing: Tensor | None = None
    for draw in range(MAX_DRAWS):
        x, y = call(draw)
        queries = sorted({0, y.shape[1] // 2, y.shape[1] - 1})
        probe = torch.linspace(-1.0, 1.5, y.shape[-1], dtype=y.dtype)
        depends = torch.stack([_reached_tokens(x, (y[0, row] * probe).sum()) for row in queries])
        _report(depends & ~declared[queries], queries, f"{what}: token {{}} depends on token {{}}")
        missing = declared[queries] & ~depends & (True if missing is None else missing)
        if not bool(missing.any()):
            return
    assert missing is not None
    _report(missing, queries, f"{what}: token {{}} does not depend on token {{}}")


def _reached_tokens(x: Tensor, scalar: Tensor) -> Tensor:
    """Which tokens of x, bool [T], the gradient of a scalar reaches."""
    (gradient,) = torch.autograd.grad(scalar, x, retain_graph=True)
    reached: Tensor = gradient[0].flatten(1).abs().amax(-1) > 0
    return reached


def _report(wrong: Tensor, queries: list[int], message: str) -> None:
    """Raise LawViolation where any (query, key) is wrong."""
    if bool(wrong.any()):
        row, key = wrong.nonzero()[0].tolist()
        raise LawViolation(f"{message.format(queries[row], key)}, contrary to the `window` that its mixers declare")
