"""Residual blocks: layers whose branches return zero, and branches dropped by stochastic depth."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import combinations

import torch
from torch import Tensor

from heddle.laws.harness import (
    DoesNotApply,
    LawViolation,
    assert_close,
    assert_refused,
    forward_no_grad,
    layout_for,
    model_under_test,
    normal_tensor,
    random_tokens,
)
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, Layer
from heddle.model.size import with_encoder
from heddle.numerics.random import RandomKey, use_random_key
from heddle.parts.layout import HandedOver
from heddle.parts.modules.dropout import BranchDropout
from heddle.parts.residuals import Residual, Stream

SAMPLES, SMALL_SAMPLES = 20_000, 200
MAX_DEVIATIONS = 4.0  # standard deviations that a share of samples may be off
RATE = 0.4
FIRST_RATE = 0.25  # of the first layer, where a design has one


@torch.no_grad()
def residual_identity(config: ModelConfig) -> None:
    """With branches that return zero, the stream passes unchanged, or as the residual kind declares."""
    model = model_under_test(config)
    for stack in with_encoder(model):
        tokens = random_tokens(stack.config, 2, 7)
        layout = layout_for(stack, 2, 7)
        with ExitStack() as hooks:
            for module in stack.modules():
                if isinstance(module, BranchDropout):
                    hooks.enter_context(module.register_forward_hook(lambda _module, _inputs, y: torch.zeros_like(y)))
            got = forward_no_grad(stack, tokens)
            layout = replace(layout, handed_over=HandedOver())
            stream = stack.expand_stream(stack.embedded(tokens, layout))
            for layer, block in zip(stack.layers, _blocks(stack), strict=True):
                assert isinstance(layer, Layer)
                stream = layer.after_branches(block.identity_output(stream), layout)
            assert_close(
                got,
                stack.final_norm(stream),
                "with branches that return zero, against the residual kind's identity output",
            )


@torch.no_grad()
def drop_path_rates(config: ModelConfig) -> None:
    """Stochastic depth drops whole branches per sample, independently, at rates from 0 to drop_path over the depth."""
    for what, stack in _stacks_with_drop_path(config):
        survivors: dict[str, Tensor] = {}
        blocks = list(_blocks(stack))
        for index, (block, rate, stream) in enumerate(_streams(stack, SAMPLES)):
            if not rate:
                stream = _first_samples(stream, SMALL_SAMPLES)  # anything dropped here shows at once
            by_branch = _surviving_samples(block, stream)
            for name, rows in by_branch.items():
                _check_share(rows, 1.0 - rate, f"{what}layer {index} of {len(blocks)}: samples that keep {name}")
            survivors |= {f"layer {index}'s {name}": rows for name, rows in by_branch.items() if rate}
        for (name, first), (other_name, second) in combinations(survivors.items(), 2):
            both = float(first.double().mean() * second.double().mean())
            _check_share(first & second, both, f"{what}samples that keep both {name} and {other_name}")


@torch.no_grad()
def drop_path_scaling(config: ModelConfig) -> None:
    """Dropped branches add nothing to a sample, and the others are divided by 1 − rate."""
    for what, stack in _stacks_with_drop_path(config):
        for index, (block, rate, stream) in enumerate(_streams(stack, SMALL_SAMPLES)):
            survivors, got = list(_surviving_samples(block, stream).values()), _forward_constants(block, stream)
            dropped, scaled = _flat(block.dropped_output(stream)), _scaled(block, stream, 1.0 / (1.0 - rate))
            all_kept, none_kept = torch.stack(survivors).all(0), ~torch.stack(survivors).any(0)
            where = f"{what}layer {index}"
            assert_close(
                got[none_kept],
                dropped[none_kept],
                f"{where}: samples that drop every branch, against the output without them",
            )
            assert_close(
                got[all_kept],
                scaled[all_kept],
                f"{where}: samples that keep every branch, against scaled branches in eval",
            )


def _blocks(stack: Decoder) -> Iterator[Residual]:
    for layer in stack.layers:
        assert isinstance(layer, Layer)
        yield layer.residual


def _stacks_with_drop_path(config: ModelConfig) -> Iterator[tuple[str, Decoder]]:
    """The stacks in training with stochastic depth and no other dropout of branches.

    A stack of one layer must refuse a rate of the last layer.
    """
    design = config if config.encoder is None else config.replace(encoder=_with_rate(config.encoder))
    stacks = with_encoder(model_under_test(_with_rate(design)).train())
    if all(stack.config.depth == 1 for stack in stacks):
        raise DoesNotApply("one layer, which refuses stochastic depth")
    for what, stack in zip(("", "encoder: "), stacks, strict=False):
        if stack.config.depth > 1:
            yield what, stack


def _with_rate(config: ModelConfig) -> ModelConfig:
    """The design with stochastic depth, if it has several layers, and no other dropout of branches."""
    first = FIRST_RATE if config.residual.drop_path_first else 0.0
    plain = config.residual.replace(drop_path=0.0, drop_path_first=0.0, dropout=0.0)
    if config.depth == 1:
        refused = partial(config.replace, residual=plain.replace(drop_path=RATE))
        assert_refused(refused, "drop_path", "one layer accepted drop_path, which does nothing in it")
        return config.replace(residual=plain)
    return config.replace(residual=plain.replace(drop_path=RATE, drop_path_first=first))


def _streams(stack: Decoder, samples: int) -> Iterator[tuple[Residual, float, Stream]]:
    """Each layer's residual block, its drop rate, and the stream that enters it: one token per sample."""
    start = normal_tensor((1, 1, stack.config.width), torch.Generator().manual_seed(5))
    stream = stack.expand_stream(start.expand(samples, -1, -1))
    first = stack.config.residual.drop_path_first
    for index, block in enumerate(_blocks(stack)):
        yield block, first + (RATE - first) * index / max(1, stack.config.depth - 1), stream
        stream = block.identity_output(stream)


def _first_samples(stream: Stream, samples: int) -> Stream:
    return stream[:samples] if isinstance(stream, Tensor) else tuple(tensor[:samples] for tensor in stream)


def _forward_constants(block: Residual, stream: Stream, changed: str = "") -> Tensor:
    """The block's output for branches that return constants. The branch named `changed` returns another."""
    branches = {}
    for number, name in enumerate(block.drops):
        generator = torch.Generator().manual_seed(10 + number + 5 * (name == changed))
        branches[name] = lambda x, generator=generator: normal_tensor((x.shape[-1],), generator).expand_as(x)
    first = stream if isinstance(stream, Tensor) else stream[0]
    with use_random_key(RandomKey(3, 1, torch.arange(first.shape[0]))):
        return _flat(block(stream, branches))


def _surviving_samples(block: Residual, stream: Stream) -> dict[str, Tensor]:
    """For each branch, bool [samples]: those whose output depends on the branch."""
    before = _forward_constants(block, stream)
    return {name: (_forward_constants(block, stream, name) != before).flatten(1).any(1) for name in block.drops}


def _scaled(block: Residual, stream: Stream, factor: float) -> Tensor:
    """The output in eval mode, with what each branch adds multiplied by `factor`."""
    with ExitStack() as hooks:
        for drop in block.drops.values():
            hooks.enter_context(drop.register_forward_hook(lambda _module, _inputs, y: y * factor))
        block.eval()
        output = _forward_constants(block, stream)
        block.train()
    return output


def _flat(stream: Stream) -> Tensor:
    """All tensors of a stream as one of shape [samples, 1, values]."""
    tensors = (stream,) if isinstance(stream, Tensor) else stream
    return torch.cat([tensor.flatten(1) for tensor in tensors], dim=-1)[:, None]


def _check_share(rows: Tensor, expected: float, what: str) -> None:
    share, count = float(rows.double().mean()), rows.numel()
    spread = (expected * (1.0 - expected) / count) ** 0.5
    if abs(share - expected) > MAX_DEVIATIONS * spread:
        raise LawViolation(f"{what}: {share:.4f} of {count}, expected {expected:.4f} ± {MAX_DEVIATIONS * spread:.4f}")
