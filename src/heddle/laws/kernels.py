"""Every fast form equals its reference, in values and gradients, and lower precision stays within its bound."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from heddle.errors import ConfigError
from heddle.laws.subject import (
    Broken,
    Gradients,
    call,
    equal,
    equal_gradients,
    feedforwards,
    gradients,
    in_chunks,
    loss,
    subject,
    text,
    windows,
)
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.numerics.kernels import OPERATIONS, kernels
from heddle.parts.context.layout import Layout

REFERENCE = {name: operation.forms[-1].name for name, operation in OPERATIONS.items()}
FLOAT32_BOUND = 1e-10  # mean square of the error over that of the answer
BFLOAT16_BOUND = 1e-2

Run = Callable[[], tuple[Tensor, Gradients]]


def forms(config: ModelConfig) -> None:
    """Every form of every operation that can serve gives the values and gradients of the reference."""
    model = subject(config)
    for name, run in _runs(config, model):
        with kernels(**REFERENCE):
            want, want_gradients = run()
        for choice in [{}, *_named()]:
            what = f"{name}, " + (", ".join(f"{key}={form}" for key, form in choice.items()) or "chosen forms")
            try:
                with kernels(**(REFERENCE | choice if choice else {})):
                    got, got_gradients = run()
            except ConfigError as error:
                if choice and "cannot serve here, because" in str(error):
                    continue
                raise
            equal(got, want, what)
            equal_gradients(got_gradients, want_gradients, what)


def _named() -> Iterator[dict[str, str]]:
    """Each form alone, the other operations being left to their references."""
    for name, operation in OPERATIONS.items():
        for form in operation.forms[:-1]:
            yield {name: form.name}


def _runs(config: ModelConfig, model: Decoder) -> Iterator[tuple[str, Run]]:
    """Calls of every shape that the forms tell apart."""
    length = max([2 * w + 3 for w in windows(model)] + [12])
    tokens = text(config, 2, length)
    half = length // 2
    layouts = {
        "even rows": None,
        "padded rows": Layout.padded([length, half]),
        "packed documents": Layout.packed([[half, length - half], [1, length - 1]]),
    }
    for name, layout in layouts.items():
        yield name, _training_run(model, tokens, layout)
    if model.causal:

        def decode() -> tuple[Tensor, Gradients]:
            sizes = [half, 1, 1, length - half - 2]
            return in_chunks(model, tokens, sizes, capacity=length)[0], {}

        yield "chunks with a state", decode


def _training_run(model: Decoder, tokens: Tensor, layout: Layout | None) -> Run:
    def run() -> tuple[Tensor, Gradients]:
        hidden = call(model, tokens, layout)
        real = None if layout is None else layout.positions >= 0
        values = hidden.detach() if real is None else hidden.detach() * real[..., None]
        return values, gradients(model, loss(hidden, real))

    return run


def precision(config: ModelConfig) -> None:
    """Answers in float32 and bfloat16, also token by token and far from position 0, stay close to float64.

    Of experts the same are chosen: where two are nearly as good, rounding decides between functions that differ.
    """
    exact = subject(config, torch.bfloat16).to(torch.float64)  # every dtype can hold its parameters
    tokens = text(config, 1, 12)
    starts = (0,) if config.embedding.position is not None else (0, 3000)
    for start in starts:
        layout = Layout.causal(1, 12, start=start)
        with torch.no_grad(), _told(exact) as told:
            want = call(exact, tokens, layout)
        for dtype, bound in ((torch.float32, FLOAT32_BOUND), (torch.bfloat16, BFLOAT16_BOUND)):
            model = copy.deepcopy(exact).to(dtype)
            what = f"{dtype}".removeprefix("torch.") + f" from position {start}"
            with torch.no_grad(), _telling(model, told):
                _close(call(model, tokens, layout), want, f"{what}, one call", bound)
            if model.causal:
                with _telling(model, told):
                    got, _ = in_chunks(model, tokens, [4] + [1] * 8, 12, layout)
                _close(got, want, f"{what}, with a state", bound)


def _routers(model: Decoder) -> list[nn.Module]:
    return [part.mixture.router for part in feedforwards(model) if part.mixture is not None]


@contextmanager
def _told(model: Decoder) -> Iterator[list[Tensor]]:
    """What each router says within the block, in one call."""
    said: list[Tensor] = []
    handles = [router.register_forward_hook(lambda *given: said.append(given[2])) for router in _routers(model)]
    yield said
    for handle in handles:
        handle.remove()


@contextmanager
def _telling(model: Decoder, said: list[Tensor]) -> Iterator[None]:
    """Within the block, routers say the same of each token, whatever the chunks."""
    routers, place = _routers(model), [0] * len(said)

    def repeat(router: nn.Module, _: object, own: Tensor) -> Tensor:
        index = routers.index(router)
        start = place[index]
        place[index] += own.shape[1]
        return said[index][:, start : start + own.shape[1]].to(own)

    handles = [router.register_forward_hook(repeat) for router in routers]
    yield
    for handle in handles:
        handle.remove()


def _close(got: Tensor, want: Tensor, what: str, bound: float) -> None:
    error = float((got.double() - want).square().mean() / want.square().mean())
    if not error <= bound:
        raise Broken(f"{what}: the mean square error is {error:.1e} of the answer, more than {bound:.0e}")


def extremes(config: ModelConfig) -> None:
    """Zero, equal and huge embeddings give finite answers and gradients in float32 and bfloat16."""
    tokens = text(config, 2, 9)
    tokens[1] = tokens[1, 0]
    for dtype in (torch.float32, torch.bfloat16):
        for factor in (0.0, 1.0, 1e4):
            model = subject(config, dtype)
            with torch.no_grad():
                model.embed.weight.mul_(factor)
            hidden = call(model, tokens)
            found = gradients(model, loss(hidden.float()))
            for name, tensor in {"the answer": hidden, **found}.items():
                if not bool(tensor.isfinite().all()):
                    what = "the answer" if tensor is hidden else f"the gradient of {name}"
                    raise Broken(f"{dtype} with embeddings times {factor:g}: {what} is not finite")
