"""A part beside the plain loop of its paper: random weights, loops that parts share, and errors of all results."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from heddle.laws.harness import normal_tensor
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.parts.layout import Layout
from heddle.parts.mixers import Mixer
from heddle.parts.position_table import PositionTable
from heddle.parts.states import StateSpec

M = TypeVar("M", bound=nn.Module)
Errors = tuple[float, float]  # of outputs, and of gradients


def with_large_weights(module: M, draw: random.Random, scale: float = 0.7) -> M:
    """The module in float64, with random values in every parameter."""
    module.double()
    generator = torch.Generator().manual_seed(draw.randrange(10**6))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(normal_tensor(tuple(parameter.shape), generator) * scale)
    return module


def errors(actual: Tensor, expected: Tensor, inputs: Sequence[Tensor]) -> Errors:
    """The largest differences of two results, and of the gradients of `inputs`."""
    probe = normal_tensor(tuple(actual.shape), torch.Generator().manual_seed(99))
    gradients = [torch.autograd.grad((y * probe).sum(), inputs, materialize_grads=True) for y in (actual, expected)]
    gradient = max(float((a - b).abs().max()) for a, b in zip(*gradients, strict=True))
    return float((actual - expected).detach().abs().max()), gradient


def assert_none(found: Errors, what: object = "") -> None:
    assert found[0] < 1e-10, what
    assert found[1] < 1e-9, what


def mixer_errors(
    mixer: Mixer, loop: Callable[[Tensor, Mixer], Tensor], width: int, lengths: list[int], draw: random.Random
) -> Errors:
    """Of the outputs, and of the gradients of x and of all weights, for packed documents of these lengths.

    The outputs are those of one call and of calls with a state, a few tokens each, over the documents after the first.
    """
    generator = torch.Generator().manual_seed(draw.randrange(10**6))
    x = normal_tensor((sum(lengths), width), generator).requires_grad_()
    expected = torch.cat([loop(document, mixer) for document in x.split(lengths)])
    found = errors(mixer(x[None], Layout.packed([lengths]))[0][0], expected, [x, *mixer.parameters()])
    with torch.no_grad():
        rest = x[lengths[0] :]
        pieces = in_pieces(mixer, rest[None], draw.choice((1, 2, 3)), mixer.lookback)[0]
        return max(found[0], float((pieces - expected[lengths[0] :]).abs().max())), found[1]


def in_pieces(mixer: Mixer, x: Tensor, sizes: int | list[int], lookback: int | None = 0) -> Tensor:
    """The outputs of calls with these numbers of tokens, one after the other with a state."""
    table, out = PositionTable.empty(len(x), lookback, None, "cpu"), []
    state = mixer.init_state(StateSpec(len(x), None, torch.float64, "cpu"))
    for piece in x.split(sizes, dim=1):
        table, layout = table.extend(table.next_layout(piece.shape[1]))
        y, state = mixer(piece, layout, state)
        out.append(y)
    return torch.cat(out, dim=1)


def decoder_errors(
    model: Decoder, loop: Callable[[Decoder, list[Tensor]], Tensor], seed: int, length: int = 7
) -> Errors:
    """Of the hidden states of one document of embeddings, and of the gradients of it and of all weights of layers."""
    embedded = normal_tensor((1, length, model.config.width), torch.Generator().manual_seed(seed)).requires_grad_()
    return errors(model(embedded)[0][0], loop(model, list(embedded[0])), [embedded, *model.layers.parameters()])


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(−x))."""
    return 1 / (1 + torch.exp(-x))


def normalized(x: Tensor, gain: Tensor | float = 1.0) -> Tensor:
    """RMSNorm of one vector."""
    return x / (x.square().mean() + 1e-5).sqrt() * gain


def rotated(
    x: Tensor, position: int, dims: int | None = None, interleaved: bool = False, base: float = 10000.0
) -> Tensor:
    """RoPE of the first dims of one head; pairs are halves apart, or neighbors."""
    result, dims = list(x), len(x) if dims is None else dims
    for i in range(dims // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + dims // 2)
        angle = position * base ** (-2 * i / dims)
        result[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
        result[b] = x[b] * math.cos(angle) + x[a] * math.sin(angle)
    return torch.stack(result)


def convolved(inputs: list[Tensor], weight: Tensor, config: Any) -> list[Tensor]:
    """A sequence of vectors, one token after the other; the last column of the weight is that of the token itself."""
    outputs = []
    for t, x in enumerate(inputs):
        y = torch.zeros_like(x)
        if config.token_shift:
            before = inputs[t - 1] if t else y
            outputs.append(x + weight * (before - x))
            continue
        for back in range(min(t, config.conv_kernel - 1) + 1):
            y = y + weight[:, config.conv_kernel - 1 - back] * inputs[t - back]
        y = y * sigmoid(y) if config.activation == "silu" else y
        outputs.append(x + y if config.residual else y)
    return outputs


class DecoderLoop:
    """Hidden states of one document by attention and feed-forwards, one layer, token and head at a time.

    What a layer reads of earlier ones is found by walking back over them.
    """

    def __init__(self, module: nn.Module, config: ModelConfig) -> None:
        self.parameters = dict(module.named_parameters())
        self.layers = config.resolved().layers
        self.prefix = ""
        self.kept: list[tuple[Any, list[list[Tensor]], list[list[Tensor]]]] = []  # window, keys and values

    def get(self, name: str) -> Tensor:
        """A parameter of the layer."""
        return self.parameters[f"{self.prefix}.{name}"]

    def convolve(self, part: Any, name: str, path: str, inputs: list[Tensor]) -> list[Tensor]:
        """The sequence, convolved if the part's option names it."""
        config = part.short_convolution
        named = config is not None and name in config.of
        return convolved(inputs, self.get(f"{path}.weight"), config) if named else inputs

    def hidden(self, stream: list[Tensor]) -> Tensor:
        """Embeddings [T][width] -> hidden states [T, width]."""
        self.kept = []
        for index, layer_config in enumerate(self.layers):
            stream = self.layer(layer_config, f"layers.{index}", stream)
        return torch.stack([normalized(x, self.parameters["final_norm.norm.weight"]) for x in stream])

    def layer(self, layer_config: Any, prefix: str, stream: list[Tensor]) -> list[Tensor]:
        """One layer, whose parameters have this prefix."""
        self.prefix = prefix
        for name, run in (("mixer", self.attend), ("feedforward", self.feed_forward)):
            part = getattr(layer_config, name)
            if part is not None:
                inputs = [normalized(x, self.get(f"residual.norms.{name}.weight")) for x in stream]
                inputs = self.convolve(part, "input", f"{name}_convolution.input", inputs)
                stream = [x + y for x, y in zip(stream, run(part, inputs), strict=True)]
        return stream

    def heads(self, name: str, mixer: Any, inputs: list[Tensor], width: int) -> list[list[Tensor]]:
        """q, k or v, [token][head]."""
        projected = [self.get(f"mixer.{name}.weight") @ x for x in inputs]
        return [list(x.split(width)) for x in self.convolve(mixer, name, f"mixer.convolutions.{name}", projected)]

    def turned(self, name: str, mixer: Any, inputs: list[Tensor]) -> list[list[Tensor]]:
        """q or k after its norm and its rotation."""
        heads = self.heads(name, mixer, inputs, mixer.head_dim)
        if mixer.qk_norm is not None:
            heads = [[normalized(x, self.get(f"mixer.{name}_norm.weight")) for x in token] for token in heads]
        if mixer.position is None:
            return heads
        return [[rotated(x, t, base=mixer.position.base) for x in token] for t, token in enumerate(heads)]

    def own_values(self, mixer: Any, inputs: list[Tensor]) -> list[list[Tensor]]:
        """v of the layer."""
        values = self.heads("k" if mixer.k_eq_v else "v", mixer, inputs, mixer.value_dim)
        return [[normalized(v) for v in token] for token in values] if mixer.value_norm else values

    def values(self, mixer: Any, inputs: list[Tensor]) -> list[list[Tensor]]:
        """v of the layer, mixed with those of the first one."""
        values = self.own_values(mixer, inputs)
        if mixer.value_residual is None:
            return values
        own, first = self.get("mixer.value_mix") if mixer.value_residual == "learned" else mixer.value_residual
        pairs = zip(values, self.kept[0][2], strict=True)
        return [[own * v + first * v1 for v, v1 in zip(*pair, strict=True)] for pair in pairs]

    def attend(self, mixer: Any, inputs: list[Tensor]) -> list[Tensor]:
        """Softmax attention."""
        q, outputs = self.turned("q", mixer, inputs), []
        if mixer.shared_kv:
            keys, values = next((k, v) for window, k, v in reversed(self.kept) if window == mixer.window)
        else:
            keys, values = self.turned("k", mixer, inputs), self.values(mixer, inputs)
            self.kept.append((mixer.window, keys, values))
        for t in range(len(inputs)):
            first, heads = 0 if mixer.window is None else max(0, t + 1 - mixer.window), []
            for head in range(mixer.heads):
                g = head // (mixer.heads // mixer.kv_heads)
                scores = torch.stack([q[t][head] @ keys[s][g] for s in range(first, t + 1)]) / math.sqrt(mixer.head_dim)
                weights = scores.exp() / scores.exp().sum()
                heads.append(torch.stack([w * values[first + s][g] for s, w in enumerate(weights)]).sum(0))
            outputs.append(self.get("mixer.out.weight") @ torch.cat(heads))
        return outputs

    def feed_forward(self, part: Any, inputs: list[Tensor]) -> list[Tensor]:
        """`down(relu(up(x)))`, or `down(silu(gate(x)) ⊙ up(x))`."""
        hidden = {}
        for name in ("up",) if part.kind == "mlp" else ("gate", "up"):
            projected = [self.get(f"feedforward.{name}.weight") @ x for x in inputs]
            hidden[name] = self.convolve(part, "hidden", f"feedforward.convolutions.{name}", projected)
        outputs = []
        for t, up in enumerate(hidden["up"]):
            power = 2 if part.activation == "relu2" else 1
            y = up.clamp(min=0) ** power if part.kind == "mlp" else hidden["gate"][t] * sigmoid(hidden["gate"][t]) * up
            outputs.append(self.get("feedforward.down.weight") @ y)
        return outputs


def decoder_loop(model: Decoder, stream: list[Tensor]) -> Tensor:
    """The hidden states [T, width] of one document of embeddings."""
    return DecoderLoop(model, model.config).hidden(stream)
