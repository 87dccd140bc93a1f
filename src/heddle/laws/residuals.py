"""Wirings: what is left of a layer whose branches add nothing, and how stochastic depth drops them."""

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import combinations

import torch
from torch import Tensor

from heddle.laws.subject import Broken, answer, equal, normal, placed, subject, text
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, Layer
from heddle.numerics.random import Key, keyed
from heddle.parts.modules.dropout import Drop
from heddle.parts.residuals import Residual, Stream

SAMPLES = 20_000
SPREADS = 4.0  # standard deviations that a share of the samples may be off
RATE = 0.4


@torch.no_grad()
def zero_branches(config: ModelConfig) -> None:
    """Where branches add nothing, the stream passes through the layers as it was, or as its wiring declares it."""
    model = subject(config)
    for stack in _stacks(model):
        tokens = text(stack.config, 2, 7)
        layout = placed(stack, 2, 7)
        with ExitStack() as hooks:
            for module in stack.modules():
                if isinstance(module, Drop):
                    hooks.enter_context(module.register_forward_hook(lambda _module, _inputs, y: torch.zeros_like(y)))
            got = answer(stack, tokens)
            stream = stack.config.residual.open(stack.embed(tokens, layout))
            for block in _blocks(stack):
                stream = block.at_rest(stream)
            equal(got, stack.close(stream), "with branches that add nothing, against the wiring at rest")


@torch.no_grad()
def drop_rates(config: ModelConfig) -> None:
    """Stochastic depth drops whole branches by sample, each by itself, at rates from 0 to drop_path over the depth."""
    for what, stack in _dropping(config):
        kept: dict[str, Tensor] = {}
        blocks = list(_blocks(stack))
        for index, (block, rate, stream) in enumerate(_streams(stack, SAMPLES)):
            found = _kept(block, stream)
            for name, rows in found.items():
                _share(rows, 1.0 - rate, f"{what}layer {index} of {len(blocks)}: samples that keep {name}")
            kept |= {f"layer {index}'s {name}": rows for name, rows in found.items() if rate}
        for (one, first), (other, second) in combinations(kept.items(), 2):
            both = float(first.double().mean() * second.double().mean())
            _share(first & second, both, f"{what}samples that keep both {one} and {other}")


@torch.no_grad()
def dropped_branches(config: ModelConfig) -> None:
    """A sample whose branches are all dropped passes as if they added nothing; what is kept is divided by 1 − rate."""
    for what, stack in _dropping(config):
        for index, (block, rate, stream) in enumerate(_streams(stack, 200)):
            kept, got = list(_kept(block, stream).values()), _run(block, stream)
            rest, whole = _flat(block.at_rest(stream)), _scaled(block, stream, 1.0 / (1.0 - rate))
            all_kept, none_kept = torch.stack(kept).all(0), ~torch.stack(kept).any(0)
            said = f"{what}layer {index}"
            equal(
                got[none_kept], rest[none_kept], f"{said}: samples that drop every branch, against the wiring at rest"
            )
            equal(
                got[all_kept], whole[all_kept], f"{said}: samples that keep every branch, against those in eval scaled"
            )


def _stacks(model: Decoder) -> list[Decoder]:
    return [model] if model.encoder is None else [model, model.encoder]


def _blocks(stack: Decoder) -> Iterator[Residual]:
    for layer in stack.layers:
        assert isinstance(layer, Layer)
        yield layer.residual


def _dropping(config: ModelConfig) -> Iterator[tuple[str, Decoder]]:
    """The design's stacks, with stochastic depth and no other dropout of branches, in training."""
    if config.encoder is not None:
        config = config.replace(encoder=_with_rate(config.encoder))
    model = subject(_with_rate(config)).train()
    yield from zip(("", "encoder: "), _stacks(model), strict=False)


def _with_rate(config: ModelConfig) -> ModelConfig:
    return config.replace(residual=config.residual.replace(drop_path=RATE, dropout=0.0))


def _streams(stack: Decoder, samples: int) -> Iterator[tuple[Residual, float, Stream]]:
    """Each layer's block, the rate it should drop at, and a stream of one token a sample that enters it."""
    start = normal((1, 1, stack.config.width), torch.Generator().manual_seed(5))
    stream = stack.config.residual.open(start.expand(samples, -1, -1))
    for index, block in enumerate(_blocks(stack)):
        yield block, RATE * index / max(1, stack.config.depth - 1), stream
        stream = block.at_rest(stream)


def _run(block: Residual, stream: Stream, changed: str = "") -> Tensor:
    """The block's streams after branches that give constants, another for the one that is named."""
    branches = {}
    for number, name in enumerate(block.drops):
        generator = torch.Generator().manual_seed(10 + number + 5 * (name == changed))
        branches[name] = lambda x, generator=generator: normal((x.shape[-1],), generator).expand_as(x)
    first = stream if isinstance(stream, Tensor) else stream[0]
    with keyed(Key(3, 1, torch.arange(first.shape[0]))):
        return _flat(block(stream, branches))


def _kept(block: Residual, stream: Stream) -> dict[str, Tensor]:
    """For each branch, bool [samples]: those that a change of what the branch gives does change."""
    before = _run(block, stream)
    return {name: (_run(block, stream, name) != before).flatten(1).any(1) for name in block.drops}


def _scaled(block: Residual, stream: Stream, factor: float) -> Tensor:
    """As `_run` in eval, but for what each branch adds, which is multiplied."""
    with ExitStack() as hooks:
        for drop in block.drops.values():
            hooks.enter_context(drop.register_forward_hook(lambda _module, _inputs, y: y * factor))
        block.eval()
        found = _run(block, stream)
        block.train()
    return found


def _flat(stream: Stream) -> Tensor:
    """[samples, 1, numbers] of a stream, whatever tensors it is of."""
    tensors = (stream,) if isinstance(stream, Tensor) else stream
    return torch.cat([tensor.flatten(1) for tensor in tensors], dim=-1)[:, None]


def _share(rows: Tensor, wanted: float, what: str) -> None:
    share, count = float(rows.double().mean()), rows.numel()
    spread = (wanted * (1.0 - wanted) / count) ** 0.5
    if abs(share - wanted) > SPREADS * spread:
        raise Broken(f"{what}: {share:.4f} of {count}, expected {wanted:.4f} ± {SPREADS * spread:.4f}")
