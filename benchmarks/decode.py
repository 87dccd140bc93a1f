"""How long does decoding a token take after 128 and 2,000 tokens, compared with transformers' Llama?

All sides run the same greedy loop from a cache of the earlier tokens: model, logits of the last position, argmax. The
prefill is not timed. (`benchmarks/huggingface.py` measures the same through transformers' `generate`.) heddle's side
is the step of `heddle generate --compile`, "heddle eager" the one without; the time of compiling is not counted.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.harness import Case, Measured, main, timed
from heddle.generation.decode import GenerationRequest, ModelRunner, PinnedDecoder, Sampler
from heddle.model.decoder import Decoder
from heddle.model.load_config import load_config
from heddle.model.size import size
from heddle.numerics.linear import PackedWeightCache, packed_weights

STEPS = 8


def decode_loop(step: Callable[[Tensor, Any], tuple[Tensor, Any]], start: Any, rows: int) -> Measured:
    """The loop of every side: seconds per token, each time from a copy of the same state."""
    state, token = copy.deepcopy(start), peers.tokens(rows, 1)

    def loop() -> None:
        nonlocal state, token
        for number in range(STEPS):
            logits, state = step(token, state)
            if number == 0:
                values[:] = logits[0, -1, :8].tolist()
            token = logits.argmax(-1)

    values: list[float] = []

    @torch.no_grad()
    def seconds() -> float:
        nonlocal state, token
        state, token = copy.deepcopy(start), peers.tokens(rows, 1)
        return timed(loop) / STEPS

    seconds()
    return Measured(seconds, lambda: values)


class _Greedy(Sampler):
    """The greedy choice, which also writes the first row's logits into a tensor that stays."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        object.__setattr__(self, "logits", logits)

    def choose(self, logits: Tensor, position: Tensor) -> Tensor:
        self.logits.copy_(logits[0, : len(self.logits)])  # type: ignore[attr-defined]
        return super().choose(logits, position)


class _Decoder(PinnedDecoder):
    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), self.request.sampler.logits]  # type: ignore[attr-defined]


@torch.no_grad()
def compiled_loop(model: Decoder, context: int, rows: int) -> Measured:
    """The steps of `heddle generate --compile`, each time from the same state after `context` tokens."""
    request = GenerationRequest(
        [[0]] * rows, STEPS + 1, _Greedy(torch.zeros(8, dtype=model.embed.weight.dtype)), compile_decoding=True
    )
    runner, tokens = ModelRunner(model.requires_grad_(False)), peers.tokens(rows, context)
    _, start = runner.forward(tokens[:, :-1], None, model.init_state(rows, context + STEPS))
    decoder = _Decoder(runner, request, tokens[:, -1], start)
    decoder.grow(context + STEPS)
    decoder.tokens.copy_(peers.tokens(rows, 1)[:, 0])
    step, contents = decoder.compiled_step(), [tensor.clone() for tensor in decoder.tensors()]
    values: list[float] = []

    def loop() -> None:
        for number in range(STEPS):
            step()
            if number == 0:
                values[:] = decoder.tensors()[-1].tolist()

    def seconds() -> float:
        for tensor, content in zip(decoder.tensors(), contents, strict=True):
            tensor.copy_(content)
        return timed(loop) / STEPS

    seconds()
    return Measured(seconds, lambda: values)


def heddle_side(arguments: dict[str, Any]) -> Measured:
    """heddle's model, compiled."""
    model = peers.ours(dtype=peers.DTYPES[arguments["precision"]]).eval()
    return compiled_loop(model, arguments["context"], arguments["rows"])


def eager_side(arguments: dict[str, Any]) -> Measured:
    """heddle's model and state."""
    model = peers.ours(dtype=peers.DTYPES[arguments["precision"]]).eval()
    context, rows = arguments["context"], arguments["rows"]
    with torch.no_grad():
        _, start = model(peers.tokens(rows, context), None, model.init_state(rows, context + STEPS))

    def step(token: Tensor, state: Any) -> tuple[Tensor, Any]:
        hidden, state = model(token, None, state)
        return model.head(hidden[:, -1:]), state

    loop, cache = decode_loop(step, start, rows), PackedWeightCache()

    def packed() -> float:
        with packed_weights(cache):  # a generation packs the weights once, here the step that warms up does
            return loop.step()

    return Measured(packed, loop.values)


def transformers_side(tuned: bool, arguments: dict[str, Any]) -> Measured:
    """transformers' model and dynamic cache."""
    model = peers.llama(peers.DTYPES[arguments["precision"]], tuned).eval()
    context, rows = arguments["context"], arguments["rows"]
    with torch.no_grad():
        start = model(input_ids=peers.tokens(rows, context), use_cache=True, logits_to_keep=1).past_key_values

    def step(token: Tensor, cache: Any) -> tuple[Tensor, Any]:
        output = model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits, output.past_key_values

    return decode_loop(step, start, rows)


def case(precision: str, context: int, goal: float | None, rows: int = 1) -> Case:
    """One precision at one context."""
    sizes = size(load_config("preset:gqa-medium"), context, dtype=peers.DTYPES[precision])
    read = sizes.parameters * peers.DTYPES[precision].itemsize + rows * sizes.state_bytes
    return Case(
        f"decode {precision} after {context}" + (f", {rows} rows" if rows > 1 else ""),
        {"precision": precision, "context": context, "rows": rows},
        goal,
        pairs=15,
        against=("transformers tuned",),
        figure=f"token after {context}" if precision == "bf16" and rows == 1 else "",
        work=("read", read),
    )


if __name__ == "__main__":
    main(
        "benchmarks.decode",
        "How much faster is decoding a token than with transformers, at its defaults and tuned?",
        {
            "heddle": heddle_side,
            "heddle eager": eager_side,
            "transformers": partial(transformers_side, False),
            "transformers tuned": partial(transformers_side, True),
        },
        [
            case("fp32", 128, 2.0),
            case("fp32", 2000, 2.0),
            case("bf16", 128, 2.0),
            case("bf16", 2000, 2.0),
            case("fp32", 128, None, rows=8),
            case("bf16", 128, None, rows=8),
        ],
    )
