"""How fast a design reads and writes: tokens a second of prefill and decode at several contexts, fresh weights."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from heddle.errors import ConfigError
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.state import State
from heddle.numerics.linear import packing

DECODED = 32
LONG = 2.0  # seconds after which a measurement is not repeated


def speeds(
    config: ModelConfig, contexts: Sequence[int], device: str, dtype: torch.dtype
) -> dict[str, list[tuple[int, float]]]:
    """{"prefill": [(context, tokens a second)], "decode": …}; contexts the design cannot reach are left out."""
    model = build(config, dtype=dtype, device=device).eval()
    result: dict[str, list[tuple[int, float]]] = {"prefill": [], "decode": []}
    with torch.no_grad(), packing():
        _prefill(model, min(64, *contexts))  # warm up
        for context in contexts:
            try:
                state, seconds = _timed_prefill(model, context)
                per_token = _decode(model, state)
            except ConfigError:  # learned positions end before this context
                break
            result["prefill"].append((context, context / seconds))
            result["decode"].append((context, 1 / per_token))
    return result


def _prefill(model: Decoder, context: int) -> State:
    device = model.embed.weight.device
    vocab = model.embed.weight.shape[0]
    tokens = (torch.arange(context, device=device) % vocab)[None]
    hidden, state = model(tokens, None, model.init_state(1, context + DECODED + 1))
    model.head(hidden[:, -1])
    assert state is not None
    return state


def _timed_prefill(model: Decoder, context: int) -> tuple[State, float]:
    times = []
    while True:
        seconds, state = timed(lambda: _prefill(model, context), model)
        times.append(seconds)
        if len(times) == 3 or sum(times) > LONG:
            return state, statistics.median(times)


def _decode(model: Decoder, state: State) -> float:
    """Median seconds of one token after the state's context."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.embed.weight.device)
    times = []
    for _ in range(DECODED):

        def step(before: State = state) -> State:
            hidden, after = model(token, None, before)
            model.head(hidden[:, -1]).argmax(-1)
            assert after is not None
            return after

        seconds, state = timed(step, model)
        times.append(seconds)
    return statistics.median(times)


def timed(call: Callable[[], State], model: Decoder) -> tuple[float, State]:
    """Seconds of a call, the device's queue drained before and after."""
    synchronise(model)
    began = time.perf_counter()
    result = call()
    synchronise(model)
    return time.perf_counter() - began, result


def synchronise(model: Decoder) -> None:
    """Wait for the accelerator, if there is one."""
    if model.embed.weight.device.type == "cuda":
        torch.cuda.synchronize()
